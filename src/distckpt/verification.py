"""Whether all of a checkpoint is what was committed: every byte of it, or what a glance shows.

Invariants:
    * Nothing is written, and nothing is unpickled.
    * Every byte of a committed file is compared: with a checksum, or with zero where no item lies.
    * What one file or record is found to be does not keep the others from being looked at.
    * Memory is a few MiB for each thread, whatever the size of the files.

Threads: `verify` starts its own and ends them; each opens a storage of its own.

Torch-free.
"""

from __future__ import annotations

import os
import re
import threading
import time
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distckpt.coordination import JOB_PREFIX
from distckpt.errors import CheckpointError, IntegrityError, WriteError
from distckpt.integrity import HEADER, UNUSED, Record, extents, find_record, read_manifest, read_record
from distckpt.manifest import (
    FOLDER,
    IMAGE_NAME,
    METADATA,
    METADATA_NAME,
    NAMES_NAME,
    OWNER,
    UNFINISHED_METADATA_NAME,
    record_name,
    unseal,
)
from distckpt.storage import reopen_storage
from distckpt.worker import CHECKSUM_BLOCK_BYTES, checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distckpt.integrity import Extent
    from distckpt.storage import Storage

__all__ = ["Finding", "Report", "Summary", "default_jobs", "step_of", "survey", "verify"]

_READ_BYTES = 2 * CHECKSUM_BLOCK_BYTES
"""Read at once; a multiple of the blocks, so that none is cut in two."""
_MOST_JOBS = 8
_SETTLE_ATTEMPTS = 3
_ZEROS = bytes(1 << 16)
_END_OF_TIME_S = 1e11
"""Some millennia away; what is later is no time."""
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it was committed.

    Attributes:
        kind: "missing", "size", "damaged", "extra" (no committed checkpoint names it) or "unreadable".
        file: Name of the file, relative to the checkpoint.
        item: Name of the entry in the state; None if it concerns the file as such or what lies between items.
        start: First byte of the file that is concerned.
        end: Byte after the last; the same as `start` if none can be named.
        message: What it is, in a line.
    """

    kind: str
    file: str
    item: str | None
    start: int
    end: int
    message: str


@dataclass
class Report:
    """What `verify` found.

    Attributes:
        url: The checkpoint.
        status: "complete"; "damaged": something is missing or not what was committed; "partial": files of
            saves, and no metadata; "unverifiable": committed by another tool, or by another version;
            "absent": nothing that a save wrote.
        findings: What is wrong, by file and byte; files that are merely extra do not make it damaged.
        num_files: Files, records and manifests included, that were compared.
        num_items: Items that were compared.
        nbytes: Bytes that were compared.
        seconds: How long it took.
        has_checksums: Whether all of it has checksums; if not, of some files only the size can be compared.
        step: The step that the directory's name says.
    """

    url: str
    status: str = "absent"
    findings: list[Finding] = field(default_factory=list)
    num_files: int = 0
    num_items: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    has_checksums: bool = True
    step: int | None = None


@dataclass
class Summary:
    """What can be said of a checkpoint without reading its files.

    Attributes:
        url: The checkpoint.
        status: As in `Report`; "complete" if records are whole and files are there in their sizes.
        step: The step that the directory's name says.
        nbytes: Bytes in files of items.
        num_files: How many of these there are.
        num_items: Items that they hold; None if that is not known.
        time: When it was committed, in seconds since the epoch; None if the record does not say.
        format: Name of the file format.
        world: Number of ranks that saved it.
        save_id: The save.
        message: What is wrong, if something is, or why nothing can be said.
    """

    url: str
    status: str = "absent"
    step: int | None = None
    nbytes: int = 0
    num_files: int = 0
    num_items: int | None = None
    time: float | None = None
    format: str | None = None
    world: int | None = None
    save_id: str | None = None
    message: str | None = None


@dataclass
class _File:
    """A file that a manifest lists."""

    name: str
    nbytes: int
    items: list[Extent]
    fqns: Sequence[Any]
    # Bytes of it that can be compared with checksums.
    readable_bytes: int = 0

    @property
    def has_checksums(self) -> bool:
        return all(item.checksums for item in self.items if item.nbytes)

    def fqn(self, item: Extent) -> str:
        if item.number == UNUSED:
            return "what an earlier checkpoint has there"
        return "the header" if item.number == HEADER else str(self.fqns[item.number])

    def overlapping(self, start: int, end: int) -> Iterator[Extent]:
        """Yield the items, in ascending offset, that have bytes between `start` and `end`."""
        first = max(0, bisect_right(self.items, start, key=lambda item: item.offset) - 1)
        for index in range(first, len(self.items)):
            item = self.items[index]
            if item.offset >= end:
                break
            if item.nbytes > 0 and item.offset + item.nbytes > start:
                yield item

    def findings(self, kind: str, start: int, end: int, message: str) -> Iterator[Finding]:
        """Yield what is to be said of a stretch of the file, and of each item in it."""
        yield Finding(kind, self.name, None, start, end, message)
        for item in self.overlapping(start, end):
            first, last = max(start, item.offset), min(end, item.offset + item.nbytes)
            yield Finding(kind, self.name, self.fqn(item), first, last, message)


@dataclass
class _Commit:
    """What the metadata, records and manifests of a checkpoint say, as far as they are whole."""

    # By name, to see whether another save replaces it meanwhile.
    metadata: dict[str, bytes | None] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    manifests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    # Bytes of records and manifests that were compared.
    nbytes: int = 0
    is_foreign: bool = False
    is_of_another_version: bool = False
    # Whether all that is committed is known, so that the rest can be called extra.
    is_known: bool = True

    def note(self, kind: str, file: str, nbytes: int, error: CheckpointError) -> None:
        self.findings.append(Finding(kind, file, None, 0, nbytes, str(error)))
        self.is_known = False


class _Listing:
    """The files of a checkpoint with their sizes; each folder is listed once."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.top = storage.list()
        self._folders: dict[str, dict[str, int]] = {"": self.top}

    def folder(self, name: str) -> dict[str, int]:
        """Return what lies in a folder; nothing if it cannot be listed, which shows when it is read."""
        if name not in self._folders:
            try:
                self._folders[name] = self._storage.list(name)
            except CheckpointError:
                self._folders[name] = {}
        return self._folders[name]

    def has(self, name: str) -> bool:
        """Say whether a file is there."""
        folder, slash, base = name.rpartition("/")
        return base in self.folder(folder + slash)

    def size(self, name: str) -> int:
        """Return the bytes of a file, 0 if there is none."""
        folder, slash, base = name.rpartition("/")
        return self.folder(folder + slash).get(base, 0)


def default_jobs() -> int:
    """Return how many threads compare checksums if nobody says how many."""
    return max(1, min(_MOST_JOBS, len(os.sched_getaffinity(0))))


def verify(
    storage: Storage, *, jobs: int | None = None, on_progress: Callable[[int, int], None] | None = None
) -> Report:
    """Compare all of a checkpoint with what was committed.

    Args:
        storage: Its directory.
        jobs: Threads, from 1; default: one for each core, at most 8. With more than one, each opens the
            storage again; a storage that has no spec is read by one.
        on_progress: Called with the bytes that are done and the bytes in all, by one thread at a time.

    Raises:
        WriteError: The storage refuses to list the directory.
    """
    started = time.monotonic()
    attempt = 0
    while True:
        report, commit = _verify_once(storage, jobs or default_jobs(), on_progress)
        attempt += 1
        # A save may have replaced the checkpoint while it was read, and swept its files.
        if not report.findings or attempt == _SETTLE_ATTEMPTS or _is_settled(storage, commit):
            break
    report.seconds = time.monotonic() - started
    return report


def survey(storage: Storage) -> Summary:
    """Say what a checkpoint is, without reading its files.

    Args:
        storage: Its directory.

    Raises:
        WriteError: The storage refuses to list the directory.
    """
    attempt = 0
    while True:
        summary, commit = _survey_once(storage)
        attempt += 1
        if summary.message is None or attempt == _SETTLE_ATTEMPTS or _is_settled(storage, commit):
            break
    if summary.status == "unverifiable" and summary.message is None:
        summary.message = "written by another tool"
    return summary


def _is_settled(storage: Storage, commit: _Commit) -> bool:
    try:
        return all(
            data is None or data == bytes(storage.read(name) or b"") for name, data in commit.metadata.items()
        )
    except CheckpointError:
        return True


def _verify_once(
    storage: Storage, jobs: int, on_progress: Callable[[int, int], None] | None
) -> tuple[Report, _Commit]:
    listing = _Listing(storage)
    commit = _read_commit(storage, listing)
    report = Report(storage.url, step=step_of(storage.url))
    findings: list[Finding] = []
    files: list[_File] = []
    for name, manifest in commit.manifests:
        try:
            files += _files_of(storage, name, manifest)
        except IntegrityError as error:
            commit.note("damaged", name, listing.size(name), error)
    for file in files:
        findings += _check_size(storage, listing, file)
    comparison = _Comparison(storage, files, on_progress)
    comparison.run(jobs)
    findings += commit.findings + comparison.findings
    if not commit.is_foreign and not commit.is_of_another_version:
        findings += _check_owner(storage)
    report.status = _status(listing, commit, is_damaged=bool(findings))
    if commit.metadata and commit.is_known and not commit.is_foreign:
        findings += _extras(listing, commit, files)
    report.findings = _merged(findings)
    report.num_files = len(files) + len(commit.manifests) + 2 * len(commit.records)
    report.num_items = sum(item.number >= 0 for file in files for item in file.items)
    report.nbytes = commit.nbytes + comparison.done
    report.has_checksums = all(file.has_checksums for file in files)
    return report, commit


def _survey_once(storage: Storage) -> tuple[Summary, _Commit]:
    listing = _Listing(storage)
    commit = _read_commit(storage, listing)
    summary = Summary(storage.url, step=step_of(storage.url))
    problems = [finding.message for finding in commit.findings]
    sizes: dict[str, int] = {}
    num_items = 0
    for name, manifest in commit.manifests:
        try:
            sizes |= {str(file): int(nbytes) for file, nbytes in manifest["files"].items()}
            num_items += len(manifest["items"]["sizes"])
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            problems.append(f"{storage.url}/{name} contradicts itself: {error}")
    for file, nbytes in sizes.items():
        problems += [found.message for found in _check_size(storage, listing, _File(file, nbytes, [], ()))]
    if not commit.manifests:
        sizes = {name: size for name, size in listing.top.items() if IMAGE_NAME.fullmatch(name)}
    summary.num_files, summary.nbytes = len(sizes), sum(sizes.values())
    summary.num_items = num_items if commit.manifests else None
    for record in commit.records[:1]:
        when, world = record.fields.get("time"), record.fields.get("world")
        summary.time = _seconds(when)
        summary.world = world if isinstance(world, int) else None
        summary.format = _text(record.fields.get("format"))
        summary.save_id = _text(record.fields.get("save_id"))
    if len(commit.records) > 1:
        # Each rank has published its own part.
        summary.world = len(commit.records)
    summary.status = _status(listing, commit, is_damaged=bool(problems))
    summary.message = problems[0] if problems else None
    return summary, commit


def _seconds(value: object) -> float | None:
    """Return a time that a record says, if it is one."""
    if not isinstance(value, (int, float)) or not abs(value) < _END_OF_TIME_S:
        return None
    return float(value)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def step_of(url: str) -> int | None:
    """Return the step that the name of a directory says, if it is that of a step."""
    match = _STEP.fullmatch(url.rstrip("/").rpartition("/")[2])
    return int(match[1]) if match else None


def _status(listing: _Listing, commit: _Commit, *, is_damaged: bool) -> str:
    if not commit.metadata:
        ours = any(
            IMAGE_NAME.fullmatch(name) or UNFINISHED_METADATA_NAME.fullmatch(name) for name in listing.top
        )
        # Where participants have only left word for each other, checkpoints lie below.
        ours = ours or any(not entry.startswith(JOB_PREFIX) for entry in listing.folder(FOLDER))
        return "partial" if ours else "absent"
    if commit.is_foreign or (commit.is_of_another_version and not commit.manifests):
        return "unverifiable"
    return "damaged" if is_damaged else "complete"


# What the checkpoint says of itself.


def _read_commit(storage: Storage, listing: _Listing) -> _Commit:
    commit = _Commit()
    # What lies there in place of a file, a link or a pipe, is not listed.
    for name in sorted({METADATA, *filter(METADATA_NAME.fullmatch, listing.top)}):
        try:
            data = storage.read(name)
        except WriteError as error:
            commit.metadata[name] = None
            commit.note("unreadable", name, listing.size(name), error)
            _add_probable(storage, listing, commit, name)
            continue
        if data is not None:
            commit.metadata[name] = bytes(data)
            _read_record(storage, listing, commit, name, bytes(data))
    return commit


def _read_record(storage: Storage, listing: _Listing, commit: _Commit, name: str, metadata: bytes) -> None:
    expected = record_name(metadata)
    try:
        record = find_record(storage, metadata, name)
    except IntegrityError as error:
        probable = _add_probable(storage, listing, commit, name)
        if error.expected == expected and not probable:
            # It bears our mark, and there is no record of other bytes: it is whole, and its record is gone.
            commit.note("missing", expected, 0, error)
        else:
            file = name if error.file is None else error.file
            commit.note("damaged", file, listing.size(file), error)
    except WriteError as error:
        commit.note("unreadable", expected, 0, error)
        _add_probable(storage, listing, commit, name)
    except CheckpointError as error:
        commit.is_of_another_version = True
        commit.note("unreadable", expected, listing.size(expected), error)
    else:
        if record is None:
            commit.is_foreign = True
        else:
            commit.nbytes += len(metadata)
            _add_record(storage, listing, commit, record)


def _add_record(storage: Storage, listing: _Listing, commit: _Commit, record: Record) -> None:
    commit.records.append(record)
    commit.nbytes += listing.size(record.name)
    for name, sha256 in record.manifests:
        try:
            manifest = read_manifest(storage, name, sha256)
        except IntegrityError as error:
            commit.note("damaged" if listing.has(name) else "missing", name, listing.size(name), error)
        except WriteError as error:
            commit.note("unreadable", name, listing.size(name), error)
        except CheckpointError as error:
            commit.is_of_another_version = True
            commit.note("unreadable", name, listing.size(name), error)
        else:
            commit.nbytes += listing.size(name)
            commit.manifests.append((name, manifest))


def _add_probable(storage: Storage, listing: _Listing, commit: _Commit, name: str) -> bool:
    """Add what the metadata `name`, which is damaged, belonged to, so that its files are looked at, too.

    Nothing but the report depends on it.

    Returns:
        Whether there is a record that can be meant.
    """
    best: tuple[int, float, _Commit] | None = None
    for entry in listing.folder(FOLDER):
        record = _record_at(storage, FOLDER + entry) if entry.startswith("commit-") else None
        if record is None or record.fields.get("metadata") != name:
            continue
        tried = _Commit()
        _add_record(storage, listing, tried, record)
        lacking = sum(
            listing.top.get(str(file)) != nbytes
            for _, manifest in tried.manifests
            if isinstance(manifest.get("files"), dict)
            for file, nbytes in manifest["files"].items()
        )
        when = record.fields.get("time")
        # An unfinished save may have left another one: it is newer, and files of it may be missing.
        rank = (lacking + len(tried.findings), -(_seconds(when) or 0.0))
        if best is None or rank < best[:2]:
            best = (*rank, tried)
    if best is None:
        return False
    tried = best[2]
    commit.records += tried.records
    commit.manifests += tried.manifests
    commit.findings += tried.findings
    commit.nbytes += tried.nbytes
    return True


def _record_at(storage: Storage, name: str) -> Record | None:
    try:
        return read_record(storage, name)
    except CheckpointError:
        return None


def _files_of(storage: Storage, name: str, manifest: dict[str, Any]) -> list[_File]:
    """Return the files that a manifest lists.

    Raises:
        IntegrityError: It contradicts itself.
    """
    found = list(extents(storage, name, manifest))
    if not all(isinstance(nbytes, int) and nbytes >= 0 for nbytes in manifest["files"].values()):
        raise IntegrityError(f"{storage.url}/{name} contradicts itself: sizes of files", file=name)
    fqns = manifest["items"].get("fqns")
    if not isinstance(fqns, list) or len(fqns) != len(manifest["items"]["sizes"]):
        raise IntegrityError(f"{storage.url}/{name} contradicts itself: items without names", file=name)
    return [_File(file, nbytes, items, fqns) for file, nbytes, items in found]


def _check_owner(storage: Storage) -> list[Finding]:
    """Compare the record of who saved last; a checkpoint is whole without it."""
    nbytes, kind = 0, "damaged"
    try:
        data = storage.read(OWNER)
        if data is None:
            return []
        nbytes = len(data)
        unseal(storage, OWNER, data)
    except CheckpointError as error:
        kind = "damaged" if isinstance(error, IntegrityError) else "unreadable"
        return [Finding(kind, OWNER, None, 0, nbytes, str(error))]
    return []


def _check_size(storage: Storage, listing: _Listing, file: _File) -> Iterator[Finding]:
    """Compare the size of a file with what was committed, and note how much of it can be read."""
    size = listing.size(file.name) if listing.has(file.name) else None
    if size is None:
        # Missing, or something that is not listed: a link is read, a pipe or a directory is not.
        try:
            probe = storage.read(file.name, max(0, file.nbytes - 1), 2)
        except CheckpointError as error:
            yield from file.findings("unreadable", 0, file.nbytes, str(error))
            return
        where = f"{storage.url}/{file.name}"
        if probe is None:
            yield from file.findings("missing", 0, file.nbytes, f"{where} is missing")
            return
        if len(probe) < min(1, file.nbytes):
            yield from file.findings("size", 0, file.nbytes, f"{where} is shorter than {file.nbytes} bytes")
            return
        size = file.nbytes + (len(probe) > min(1, file.nbytes))
    where = f"{storage.url}/{file.name} holds {size} bytes, not {file.nbytes}"
    if size < file.nbytes:
        yield from file.findings("size", size, file.nbytes, where)
    elif size > file.nbytes:
        yield Finding("size", file.name, None, file.nbytes, size, where)
    file.readable_bytes = min(size, file.nbytes)


def _extras(listing: _Listing, commit: _Commit, files: list[_File]) -> Iterator[Finding]:
    """Yield what saves have left and no committed checkpoint names; files of other names are not ours."""
    keep = {OWNER, *commit.metadata, *(record.name for record in commit.records)}
    keep |= {name for name, _ in commit.manifests} | {file.name for file in files}
    found = {
        name: size
        for name, size in listing.top.items()
        if IMAGE_NAME.fullmatch(name) or UNFINISHED_METADATA_NAME.fullmatch(name)
    }
    for entry, size in listing.folder(FOLDER).items():
        inners = listing.folder(FOLDER + entry) if entry.endswith("/") else {}
        is_kept = any(name.startswith(FOLDER + entry) for name, _ in commit.manifests)
        found |= {
            FOLDER + entry + inner: nbytes
            for inner, nbytes in inners.items()
            if not (is_kept and NAMES_NAME.fullmatch(inner))
        }
        if not inners:
            found[FOLDER + entry] = size
    for name, size in found.items():
        if name not in keep:
            yield Finding("extra", name, None, 0, size, f"{name}: no committed checkpoint names it")


def _merged(findings: list[Finding]) -> list[Finding]:
    """Return `findings` by file and byte, those of blocks of one item that follow each other as one."""
    # For each file, item and kind, where the last one stands, and what was said of its first block.
    last: dict[tuple[str, str | None, str], tuple[int, str, int]] = {}
    merged: list[Finding] = []
    for finding in sorted(findings, key=lambda each: (each.file, each.start, each.item or "", each.end)):
        key = (finding.file, finding.item, finding.kind)
        index, first, num_blocks = last.get(key, (-1, "", 0))
        if index >= 0 and finding.start == merged[index].end < finding.end:
            num_blocks += 1
            message = f"{num_blocks} blocks in a row; the first: {first}"
            merged[index] = replace(merged[index], end=finding.end, message=message)
            last[key] = (index, first, num_blocks)
        else:
            last[key] = (len(merged), finding.message, 1)
            merged.append(finding)
    return merged


class _Comparison:
    """Compares the bytes of files with their checksums, in ranges that several threads share among them.

    Args:
        storage: The checkpoint's directory.
        files: The files; of each as much as can be read.
        on_progress: See `verify`.
    """

    def __init__(
        self, storage: Storage, files: list[_File], on_progress: Callable[[int, int], None] | None
    ) -> None:
        self._storage = storage
        self._files = [file for file in files if file.has_checksums]
        self._total = sum(file.readable_bytes for file in self._files)
        self._ranges = self._each_range()
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._stopped = False
        self.findings: list[Finding] = []
        self.done = 0

    def run(self, jobs: int) -> None:
        """Compare everything, with up to `jobs` threads."""
        jobs = min(jobs, -(-self._total // _READ_BYTES))
        if jobs <= 1 or not self._storage.spec:
            self._compare_all(self._storage)
            return
        with ThreadPoolExecutor(jobs, "distckpt-verify") as pool:
            try:
                running = [
                    pool.submit(lambda: self._compare_all(reopen_storage(self._storage.spec)))
                    for _ in range(jobs)
                ]
                for each in running:
                    each.result()
            finally:
                # After an interrupt, too: the threads end with the range that they have.
                self._stopped = True

    def _each_range(self) -> Iterator[tuple[_File, int, int]]:
        for file in self._files:
            for start in range(0, file.readable_bytes, _READ_BYTES):
                yield file, start, min(start + _READ_BYTES, file.readable_bytes)

    def _compare_all(self, storage: Storage) -> None:
        while not self._stopped:
            with self._lock:
                taken = next(self._ranges, None)
            if taken is None:
                break
            file, start, end = taken
            findings = self._compare(storage, file, start, end)
            with self._lock:
                self.findings += findings
                self.done += end - start
                if self._on_progress is not None:
                    self._on_progress(self.done, self._total)

    def _compare(self, storage: Storage, file: _File, start: int, end: int) -> list[Finding]:
        try:
            data = storage.read(file.name, start, end - start)
        except CheckpointError as error:
            first = start // CHECKSUM_BLOCK_BYTES * CHECKSUM_BLOCK_BYTES + CHECKSUM_BLOCK_BYTES
            if first >= end:
                return list(file.findings("unreadable", start, end, str(error)))
            # The blocks that can be read are compared all the same.
            return self._compare(storage, file, start, first) + self._compare(storage, file, first, end)
        url = f"{storage.url}/{file.name}"
        if data is None:
            return list(file.findings("missing", start, end, f"{url} has gone while it was read"))
        findings: list[Finding] = []
        stop = start + len(data)
        if stop < end:
            findings += file.findings("size", stop, end, f"{url} ends before byte {file.nbytes}")
        position = start
        with memoryview(data) as view:
            for item in file.overlapping(start, stop):
                if item.offset > position:
                    findings += _check_gap(file, data, start, position, item.offset)
                    position = item.offset
                item_end = item.offset + item.nbytes
                first_block = item.offset // CHECKSUM_BLOCK_BYTES
                while position < min(item_end, stop):
                    block = position // CHECKSUM_BLOCK_BYTES
                    block_end = min(item_end, (block + 1) * CHECKSUM_BLOCK_BYTES)
                    if block_end > stop:
                        # Cut: that the file ends too early is said elsewhere.
                        position = stop
                        break
                    found = checksum(view[position - start : block_end - start])
                    expected = item.checksums[block - first_block]
                    if found != expected:
                        fqn = file.fqn(item)
                        message = (
                            f"{url}: {fqn!r} is damaged between bytes {position} and {block_end}: "
                            f"CRC32C {found:08x}, written as {expected:08x}"
                        )
                        findings.append(Finding("damaged", file.name, fqn, position, block_end, message))
                    position = block_end
        if position < stop:
            findings += _check_gap(file, data, start, position, stop)
        return findings


def _check_gap(file: _File, data: bytearray, start: int, first: int, end: int) -> list[Finding]:
    """Compare what lies between items with zero.

    Args:
        file: The file.
        data: What was read of it.
        start: Where `data` begins in the file, in bytes.
        first: Where the gap begins.
        end: Where it ends.
    """
    findings = []
    while first < end:
        nbytes = min(len(_ZEROS), end - first)
        if not data.startswith(_ZEROS[:nbytes], first - start):
            gap = bytes(data[first - start : first - start + nbytes])
            low, high = first + nbytes - len(gap.lstrip(b"\0")), first + len(gap.rstrip(b"\0"))
            message = f"{file.name} is damaged between bytes {low} and {high}, where no item lies: not zero"
            findings.append(Finding("damaged", file.name, None, low, high, message))
        first += nbytes
    return findings

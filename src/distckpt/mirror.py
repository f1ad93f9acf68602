"""A copy of a committed checkpoint on another storage, which is not seen before it is complete.

    claim -> files, range by range, each compared -> documents -> manifests -> commit record, `.metadata`

What is complete on the target stands in a progress document beside it, `.distckpt/mirror.json`, until the
copy is published: a copy that broke off goes on from there, whichever process makes it.

The bytes of the copy are those of the checkpoint, `.metadata` among them: so the id of the checkpoint that
torch keeps in there (`StorageMeta.checkpoint_id`) says where it was committed first, also on the target. No
reader goes by it.

Invariants:
    * What is published was compared with its checksums as it was read, and what was compared was sent.
    * A checkpoint on the target stays valid until the copy is published. Only where readers go by names, or
      where a name that the copy needs is taken by other bytes, it is made invisible before anything is
      written.
    * A file counts as complete only by word of the progress document, of the same `.metadata`, with no other
      save's claim since; or because the checkpoint on the target lists it with the same checksums.
    * A claim revokes the earlier ones, those of copies of the same checkpoint among them.
    * Memory is a range for each stream, beside what manifests hold.

Threads: `mirror` starts its own and ends them; each opens both storages again. Files are begun and completed
through the storage that `mirror` was given, by one thread at a time. Torch-free, but for what a format that
readers find by names imports.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import threading
import time
import uuid
from bisect import bisect_right
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from distckpt.commit import Claim, claim, exclusive_of, publish
from distckpt.errors import CheckpointError, CommitError, IntegrityError, WriteError
from distckpt.formats import open_format
from distckpt.integrity import HEADER, UNUSED, extents, find_record, read_manifest
from distckpt.manifest import (
    FOLDER,
    IMAGE_NAME,
    METADATA,
    OWNER,
    TRAILER,
    ManifestRef,
    record_name,
    seal,
    unseal,
    write_names,
)
from distckpt.storage import SHARED_NAME, reopen_storage
from distckpt.threads import Threads
from distckpt.worker import CHECKSUM_BLOCK_BYTES, block_spans, checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from distckpt.commit import Exclusive
    from distckpt.integrity import Extent
    from distckpt.storage import ImageFile, Receipt, Storage

__all__ = ["PROGRESS", "is_complete_copy", "mirror"]

_LOG = logging.getLogger(__name__)
PROGRESS = FOLDER + "mirror.json"
"""Which files of a copy are complete, until it is published."""
_RANGE_BYTES = 4 * CHECKSUM_BLOCK_BYTES
"""Read at once where the storage does not say: as its parts are, a multiple of the blocks of checksums."""
_NOTE_S = 5.0
"""Between two notes of what is complete."""
_POLL_S = 0.05
_END_S = 4.0
"""Streams that have not ended by then are given up; they end with what they are waiting for."""
_ZEROS = bytes(1 << 16)


def _tell_nobody(nbytes: int) -> None:
    """Do nothing with what is told."""


def is_complete_copy(source: Storage, target: Storage) -> bool:
    """Say whether `target` has published the checkpoint that `source` holds; no file is looked at.

    Args:
        source: A directory with a checkpoint, or without.
        target: Another one.

    Raises:
        WriteError: A storage refuses.
    """
    metadata = source.read(METADATA)
    return metadata is not None and _has_published(target, bytes(metadata))


def mirror(
    source: Storage,
    target: Storage,
    *,
    stop: threading.Event,
    tell: Callable[[int], None] = _tell_nobody,
    num_streams: int = 4,
    timeout_s: float | None = None,
) -> int:
    """Copy the checkpoint that `source` holds to `target`, where it becomes visible as a whole.

    Returns at once where that has been done, and goes on where it was begun. A checkpoint of another save on
    the target is replaced.

    Args:
        source: Directory of a checkpoint that a save of distckpt has committed; nobody replaces it meanwhile.
        target: Where to. A save, or another copy, that is under way there will be refused.
        stop: Once it is set, `mirror` returns soon, and the next call goes on; `is_complete_copy` tells.
        tell: Called with the bytes of files that this call has sent so far, by one thread at a time.
        num_streams: Ranges that are under way at once, from 1; a storage that has no spec is used by one.
        timeout_s: Seconds without a range getting done after which it fails, and after which a call of the
            storages is given up; None: never.

    Returns:
        Bytes of files that this call has sent.

    Raises:
        CommitError: There is no such checkpoint, another save or copy has claimed the target, its record
            of that is damaged, or files lie there that readers would take for a part of the checkpoint.
        IntegrityError: What `source` holds is not what was committed; `file` is filled. Nothing is published.
        WriteError: A storage refuses, or nothing gets done for too long.
    """
    original = _read_original(source)
    if stop.is_set():
        return 0
    if _has_published(target, original.metadata) and target.read(PROGRESS, nbytes=0) is None:
        return 0
    _check_sizes(source, original)
    target.prepare()
    copy = _Copy(source, target, original, stop, tell, max(1, num_streams), timeout_s)
    try:
        copy.run()
    except WriteError as error:
        explained = copy.explain(error)
        if explained is error:
            raise
        raise explained from error
    return copy.num_sent_bytes


@dataclass(frozen=True)
class _File:
    """A file that a manifest of the source lists."""

    name: str
    nbytes: int
    items: list[Extent]
    fqns: Sequence[Any]

    @property
    def checksums(self) -> list[int]:
        """Of all blocks, in ascending offset; equal for files that hold the same, whatever is in them."""
        return [each for item in self.items for each in item.checksums]

    @property
    def has_checksums(self) -> bool:
        return all(item.checksums for item in self.items if item.nbytes)

    def fqn(self, item: Extent) -> str:
        if item.number in {HEADER, UNUSED}:
            return "the header" if item.number == HEADER else "what an earlier checkpoint has there"
        return str(self.fqns[item.number])

    def overlapping(self, start: int, end: int) -> Iterator[Extent]:
        """Yield the items, in ascending offset, that have bytes between `start` and `end`."""
        first = max(0, bisect_right(self.items, start, key=lambda item: item.offset) - 1)
        for index in range(first, len(self.items)):
            item = self.items[index]
            if item.offset >= end:
                break
            if item.nbytes > 0 and item.offset + item.nbytes > start:
                yield item


@dataclass(frozen=True)
class _Original:
    """What the source holds, as far as its metadata, record and manifests say."""

    metadata: bytes
    save_id: str
    format: str
    details: dict[str, Any]
    manifests: list[ManifestRef]
    files: dict[str, _File]

    @property
    def names(self) -> dict[str, list[str]]:
        """Lists of names, by the name of the list, of files whose own names do not say whose they are."""
        lists = {}
        for ref in self.manifests:
            folder, slash, base = ref.name.rpartition("/")
            listed = [name for name in ref.files if not IMAGE_NAME.fullmatch(name)]
            if listed:
                lists[folder + slash + base.replace("rank-", "names-", 1)] = listed
        return lists

    @property
    def exclusive(self) -> Exclusive | None:
        """What the format asks of a directory, if it does."""
        # Nobody finds files of torch_dist by names, and so torch need not be imported for it.
        return None if self.format == "torch_dist" else exclusive_of(open_format(self.format))

    def groups(self, done: Collection[str]) -> Iterator[list[_File]]:
        """Yield what is to be sent, in groups each of which is complete before the next one begins.

        Documents come after all that they lead readers to, and the one at the root is the last.
        """

        def place(file: _File) -> tuple[bool, int]:
            is_document = file.name.endswith(".json")
            return is_document, -file.name.count("/") if is_document else 0

        left = (file for file in self.files.values() if file.name not in done)
        for _, group in groupby(sorted(left, key=place), key=place):
            yield list(group)


def _read_original(source: Storage) -> _Original:
    """Read all of a checkpoint but its files.

    Raises:
        CheckpointError: It is of another version.
        CommitError: There is none that a save of distckpt has committed for all ranks.
        IntegrityError: Its metadata, record or a manifest is damaged.
        WriteError: The storage refuses.
    """
    found = source.read(METADATA)
    if found is None:
        raise CommitError(f"not copied: {source.url} holds no committed checkpoint of all ranks")
    metadata = bytes(found)
    record = find_record(source, metadata)
    if record is None or not metadata.endswith(TRAILER):
        raise CommitError(
            f"not copied: {source.url} was not written by distckpt: nothing tells whether its files are whole"
        )
    files: dict[str, _File] = {}
    refs = []
    file_format = record.fields.get("format")
    for name, sha256 in record.manifests:
        manifest = read_manifest(source, name, sha256)
        file_format = file_format or manifest.get("format")
        own = [
            _File(file, nbytes, items, manifest["items"].get("fqns") or ())
            for file, nbytes, items in extents(source, name, manifest)
        ]
        refs.append(ManifestRef(name, sha256, {file.name: file.nbytes for file in own}))
        files.update({file.name: file for file in own})
    own_fields = {"version", "name", "save_id", "metadata", "manifests", "sha256"}
    details = {key: value for key, value in record.fields.items() if key not in own_fields}
    save_id = str(record.fields.get("save_id"))
    return _Original(metadata, save_id, str(file_format), details, refs, files)


def _check_sizes(source: Storage, original: _Original) -> None:
    """Refuse a source that lacks a file, before anything is sent.

    Raises:
        IntegrityError: It does; `file`, `expected` and `found` are filled.
        WriteError: The storage refuses.
    """
    listed = _listed(source, original.files)
    for name, file in original.files.items():
        found = listed.get(name)
        if found != file.nbytes:
            what = "is missing" if found is None else f"holds {found} bytes, not {file.nbytes}"
            raise IntegrityError(
                f"not copied: {source.url}/{name} {what}", file=name, expected=file.nbytes, found=found
            )


def _listed(storage: Storage, names: Collection[str]) -> dict[str, int]:
    """Return the sizes of those of `names` that are there."""
    folders: dict[str, dict[str, int]] = {}
    found = {}
    for name in names:
        folder, slash, base = name.rpartition("/")
        if folder not in folders:
            folders[folder] = storage.list(folder + slash)
        if base in folders[folder]:
            found[name] = folders[folder][base]
    return found


def _folders_of(name: str) -> Iterator[str]:
    folder = name.rpartition("/")[0]
    while folder:
        yield f"{folder}/"
        folder = folder.rpartition("/")[0]


def _has_published(target: Storage, metadata: bytes) -> bool:
    found = target.read(METADATA)
    if found is None or bytes(found) != metadata:
        return False
    return target.read(record_name(metadata), nbytes=0) is not None


def _committed_files(target: Storage, metadata: bytes) -> dict[str, _File] | None:
    """Return the files of the checkpoint that the target holds; None if it does not say for certain.

    Raises:
        WriteError: The storage refuses.
    """
    try:
        record = find_record(target, metadata)
        # The files of another tool are not known, but none has a name that bears the id of a save.
        return {
            file: _File(file, nbytes, items, ())
            for name, sha256 in (record.manifests if record else ())
            for file, nbytes, items in extents(target, name, read_manifest(target, name, sha256))
        }
    except WriteError:
        raise
    except CheckpointError:
        return None


def _owner(target: Storage) -> dict[str, Any]:
    data = target.read(OWNER)
    try:
        return {} if data is None else unseal(target, OWNER, data)
    except IntegrityError as error:
        # What is to be copied is not what is damaged.
        raise CommitError(f"not copied: {error}") from error


@dataclass(frozen=True)
class _CopyClaim(Claim):
    """The claim of one copy: no other copy of the same checkpoint has its token."""

    token: str = ""

    def is_owner(self, storage: Storage) -> bool:
        """See `Claim.is_owner`."""
        owner = _owner(storage)
        return owner.get("save_id") == self.save_id and owner.get("token") == self.token


def _claim(target: Storage, save_id: str) -> _CopyClaim:
    """Take the target for a copy of the checkpoint of the save `save_id`.

    Raises:
        CommitError: A save has claimed it at the same time.
        WriteError: The storage refuses.
    """
    plain = claim(target, save_id)
    plain.check(target)
    fields = {key: value for key, value in _owner(target).items() if key not in {"version", "sha256"}}
    token = uuid.uuid4().hex
    owner = seal({**fields, "save_id": save_id, "token": token})
    # What a save that has claimed it since has left is not among what was found.
    target.put(OWNER, owner, last_check=lambda: plain.check(target))
    # Whoever saw its own claim a moment ago puts these now, or never.
    target.revoke(METADATA)
    target.revoke(PROGRESS)
    return _CopyClaim(save_id, None, plain.found, plain.unfinished, token=token)


@dataclass
class _Begun:
    """A file that is under way."""

    file: _File
    part_bytes: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    token: str | None = None
    receipts: list[Receipt] = field(default_factory=list)
    # Ranges that nobody has taken yet, and streams that have taken some and not finished them.
    num_left: int = 0
    num_writers: int = 0
    is_complete: bool = False


class _Copy:
    """One call of `mirror`.

    Args:
        source: See `mirror`.
        target: See `mirror`.
        original: What the source holds.
        stop: See `mirror`.
        tell: See `mirror`.
        num_streams: See `mirror`.
        timeout_s: See `mirror`.

    Attributes:
        num_sent_bytes: Bytes of files that were sent.
    """

    def __init__(
        self,
        source: Storage,
        target: Storage,
        original: _Original,
        stop: threading.Event,
        tell: Callable[[int], None],
        num_streams: int,
        timeout_s: float | None,
    ) -> None:
        self._source = source
        self._target = target
        self._original = original
        self._stop = stop
        self._tell = tell
        self._timeout_s = timeout_s
        # Where nothing can be opened again, one thread has the storages to itself.
        self._is_shared = not (source.spec and target.spec)
        self._num_streams = 1 if self._is_shared else num_streams
        self._claimed: _CopyClaim | None = None
        self._lock = threading.Lock()
        """Of all that follows."""
        self._target_lock = threading.Lock()
        self._ranges: Iterator[tuple[_Begun, int, int]] = iter(())
        self._begun: list[_Begun] = []
        self._images: set[ImageFile] = set()
        self._done: set[str] = set()
        self._num_noted = -1
        self._is_over = False
        self._last_s = time.monotonic()
        self._there: dict[str, int] = {}
        self.num_sent_bytes = 0

    @property
    def claimed(self) -> _CopyClaim:
        assert self._claimed is not None, "the target is claimed first"
        return self._claimed

    def explain(self, error: WriteError) -> BaseException:
        """Return what `error` comes from; see `Claim.explain`."""
        return error if self._claimed is None else self._claimed.explain(self._target, error)

    def run(self) -> None:
        """Copy all of it, or as much as can be done until it is stopped.

        Raises:
            CheckpointError: See `mirror`.
        """
        exclusive = self._original.exclusive
        self._take_over(exclusive)
        self._clear(exclusive)
        try:
            for group in self._original.groups(frozenset(self._done)):
                self._send_all(group)
                if self._stop.is_set():
                    self._leave()
                    return
            self._publish()
        except BaseException:
            # What failed is said by its own error.
            with contextlib.suppress(CheckpointError):
                self._leave()
            raise
        self._sweep()

    # What is there already.

    def _take_over(self, exclusive: Exclusive | None) -> None:
        """Claim the target, and find out what of it is complete.

        Raises:
            CommitError: Another save or copy claims it, or its owner record is damaged.
            WriteError: It refuses.
        """
        target, original = self._target, self._original
        was_ours = False
        with contextlib.suppress(CommitError):
            was_ours = _owner(target).get("save_id") == original.save_id
        try:
            self._claimed = _claim(target, original.save_id)
        except IntegrityError as error:
            raise CommitError(f"not copied: {error}") from error
        noted = self._read_progress() if was_ours else None
        self._there = _listed(target, original.files)
        whole = {name for name, file in original.files.items() if self._there.get(name) == file.nbytes}
        self._done = whole & (noted or set())
        is_in_the_way = False
        metadata = target.read(METADATA)
        if _has_published(target, original.metadata):
            # By a call that did not get to its end, if it is whole.
            self._done = whole
            is_in_the_way = len(whole) < len(original.files)
        elif metadata is not None and exclusive is None:
            committed = _committed_files(target, bytes(metadata))
            self._done |= {name for name in whole if self._is_same(name, committed)}
            taken = self._there.keys() - self._done
            is_in_the_way = bool(taken if committed is None else taken & committed.keys())
        # Before anything else: whatever another copy has noted is not to be believed from now on.
        self._note()
        if is_in_the_way:
            self.claimed.check(target)
            target.delete(METADATA)

    def _is_same(self, name: str, committed: dict[str, _File] | None) -> bool:
        """Say whether the checkpoint on the target has a file of that name with the same bytes."""
        ours, theirs = self._original.files[name], (committed or {}).get(name)
        if theirs is None or theirs.nbytes != ours.nbytes:
            return False
        return ours.has_checksums and theirs.has_checksums and ours.checksums == theirs.checksums

    def _read_progress(self) -> set[str] | None:
        """Return which files are complete; None if nobody has noted that, or of another checkpoint."""
        data = self._target.read(PROGRESS)
        if data is None:
            return None
        try:
            noted = unseal(self._target, PROGRESS, data)
        except CheckpointError:
            return None
        expected = [self._original.save_id, record_name(self._original.metadata)]
        files = noted.get("files")
        if [noted.get("save_id"), noted.get("metadata")] != expected or not isinstance(files, list):
            return None
        return {name for name in files if isinstance(name, str)}

    def _note(self) -> None:
        """Put down which files are complete.

        Raises:
            CheckpointError: Another save or copy has claimed the target, or it refuses.
        """
        with self._lock:
            files = sorted(self._done)
        if len(files) == self._num_noted:
            return
        data = seal({
            "save_id": self._original.save_id,
            "metadata": record_name(self._original.metadata),
            "files": files,
        })  # fmt: skip
        with self._target_lock:
            if self._num_noted >= 0 and any("/" in name for name in files):
                # Makes names durable that nothing else would, should this process end before it returns from
                # the next line, and so before what follows is believed.
                self.claimed.check(self._target)
                write_names(self._target, *self._first_names())
            self._target.put(PROGRESS, data, last_check=lambda: self.claimed.check(self._target))
        self._num_noted = len(files)

    def _first_names(self) -> tuple[str, list[str]]:
        return next(iter(self._original.names.items()))

    def _clear(self, exclusive: Exclusive | None) -> None:
        """Make room for what is to be sent, and note the names that will be there.

        Raises:
            CheckpointError: See `mirror`.
        """
        target, claimed = self._target, self.claimed
        for name, handle in claimed.unfinished:
            try:
                target.abort(name, handle)
            except WriteError as error:
                _LOG.warning("an unfinished upload to %s stays: %s", target.url, error)
        found = tuple(name for name in claimed.found if name != PROGRESS)
        marker = None
        if exclusive is not None and len(self._done) < len(self._original.files):
            marker = exclusive.marker.format(save_id=claimed.save_id) or None
            found = self._clear_names(exclusive, marker, found)
        self._claimed = replace(claimed, found=found, unfinished=(), marker=marker)
        for name, names in self._original.names.items():
            claimed.check(target)
            write_names(target, name, names)

    def _clear_names(
        self, exclusive: Exclusive, marker: str | None, found: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Remove what readers that go by names would mix with the copy; returns what is left to remove.

        Raises:
            CommitError: Some of it stays, or another save or copy has claimed the target.
            WriteError: The storage refuses.
        """
        target, claimed = self._target, self.claimed
        keep = {marker, PROGRESS, *self._done}
        for name in self._done:
            keep.update(_folders_of(name))
        what = "which stays, and is not known to be of an earlier save"
        # Before a checkpoint is removed for what cannot take its place.
        exclusive.refuse(target, self._foreign(exclusive, {*keep, *found}), what)
        has_metadata = target.read(METADATA, nbytes=0) is not None
        claimed.check(target)
        if marker is not None:
            target.put(marker, b"unfinished", last_check=lambda: claimed.check(target))
        if has_metadata:
            target.delete(METADATA)
        left = [name for name in found if name not in keep and not name.startswith(FOLDER)]
        # What leads readers to the others, first: where a chunk is missing, they find zeros.
        left.sort(key=lambda name: 2 if name.endswith("/") else not name.endswith(".json"))
        for name in left:
            claimed.check(target)
            try:
                target.delete(name)
            except WriteError as error:
                # A folder in which somebody else has left something: what is there is looked at below.
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise
            self._there.pop(name, None)
        foreign = self._foreign(exclusive, keep)
        if foreign and marker is not None:
            # Whatever these files are, they can be read.
            target.delete(marker)
        exclusive.refuse(target, foreign, what)
        return tuple(name for name in found if name.startswith(FOLDER))

    def _foreign(self, exclusive: Exclusive, known: Collection[str | None]) -> list[str]:
        """Return what readers of the format would find, and is not among `known`."""
        listed = self._target.list()
        return [name for name in listed if exclusive.pattern.fullmatch(name) and name not in known]

    # Files.

    def _send_all(self, files: Sequence[_File]) -> None:
        """Send files, with several streams; returns early when it is stopped.

        Raises:
            CheckpointError: See `mirror`.
        """
        self._begun = []
        for file in files:
            part_bytes = self._target.part_bytes(file.nbytes) or _RANGE_BYTES
            if self._target.is_stream:
                part_bytes = max(1, file.nbytes)
            begun = _Begun(file, part_bytes, num_left=max(1, -(-file.nbytes // part_bytes)))
            self._begun.append(begun)
        self._ranges = (
            (begun, start, min(start + begun.part_bytes, begun.file.nbytes))
            for begun in self._begun
            for start in range(0, max(1, begun.file.nbytes), begun.part_bytes)
        )
        self._last_s = noted_s = time.monotonic()
        count = min(self._num_streams, sum(begun.num_left for begun in self._begun))
        threads = Threads(count, "distckpt-mirror")
        try:
            running = [threads.submit(self._serve) for _ in range(count)]
            while True:
                ended, left = wait(running, timeout=_POLL_S, return_when=FIRST_EXCEPTION)
                for each in ended:
                    each.result()
                if not left or self._stop.is_set():
                    break
                if time.monotonic() - noted_s > _NOTE_S:
                    self._note()
                    noted_s = time.monotonic()
                self._check_progress()
        finally:
            with self._lock:
                self._is_over = (
                    self._is_over
                    or self._stop.is_set()
                    or any(not begun.is_complete for begun in self._begun)
                )
                images = list(self._images) if self._is_over else []
            for image in images:
                image.cancel()
            if not threads.close(_END_S):
                # What they hold is not to be touched.
                self._begun = []

    def _check_progress(self) -> None:
        if self._timeout_s is not None and time.monotonic() - self._last_s > self._timeout_s:
            raise WriteError(
                f"cannot write {self._target.url}: {self.num_sent_bytes} bytes were sent, and nothing more "
                f"within {self._timeout_s:g} s [ETIMEDOUT]",
                errno=errno.ETIMEDOUT,
                path=self._target.url,
            )

    def _serve(self) -> None:
        """Send one range after the other; the top frame of a thread."""
        source, target = self._source, self._target
        image: ImageFile | None = None
        begun: _Begun | None = None
        try:
            if not self._is_shared:
                source = reopen_storage(source.spec, timeout_s=self._timeout_s)
                target = reopen_storage(target.spec, timeout_s=self._timeout_s)
            while True:
                taken = self._take(begun)
                if begun is not None and image is not None and (taken is None or taken[0] is not begun):
                    if taken is not None or begun.num_left == 0:
                        self._finish(begun, image)
                    self._drop(image)
                    image = None
                if taken is None:
                    break
                begun, start, end = taken
                if image is None:
                    image = self._open(target, begun)
                self._send(source, begun, image, start, end)
        except BaseException:
            with self._lock:
                self._is_over = True
            raise
        finally:
            if image is not None:
                self._drop(image)

    def _take(self, current: _Begun | None) -> tuple[_Begun, int, int] | None:
        """Return a range that nobody else has; None if there is none, or all is over."""
        with self._lock:
            if self._is_over or self._stop.is_set():
                return None
            taken = next(self._ranges, None)
            if taken is not None:
                begun = taken[0]
                begun.num_left -= 1
                if begun is not current:
                    begun.num_writers += 1
            return taken

    def _open(self, target: Storage, begun: _Begun) -> ImageFile:
        name, nbytes = begun.file.name, begun.file.nbytes
        with begun.lock:
            if begun.token is None:
                with self._target_lock:
                    begun.token = self._create(name, nbytes)
        with self._alone():
            image = target.open_image(name, begun.token)
        with self._lock:
            self._images.add(image)
        return image

    def _alone(self) -> contextlib.AbstractContextManager[Any]:
        """Return what keeps others from the target, where it is that of `mirror`."""
        return self._target_lock if self._is_shared else contextlib.nullcontext()

    def _create(self, name: str, nbytes: int) -> str:
        if SHARED_NAME.fullmatch(name) or name in self._there:
            self.claimed.check(self._target)
        if name in self._there:
            # Of an earlier call, which did not complete it, or has not said so.
            self._target.delete(name)
        return self._target.create_image(name, nbytes)

    def _send(self, source: Storage, begun: _Begun, image: ImageFile, start: int, end: int) -> None:
        """Send a range that was compared; a stream in pieces.

        Raises:
            IntegrityError: It is not what was committed.
            WriteError: A storage refuses.
        """
        file = begun.file
        for first in range(start, end, _RANGE_BYTES if self._target.is_stream else begun.part_bytes):
            with self._lock:
                if self._is_over or self._stop.is_set():
                    # Not finished, so it is not completed either.
                    begun.num_left += 1
                    return
            last = min(end, first + (_RANGE_BYTES if self._target.is_stream else begun.part_bytes))
            data = source.read(file.name, first, last - first)
            if data is None or len(data) != last - first:
                raise IntegrityError(
                    f"not copied: {source.url}/{file.name} is cut short at byte {first}",
                    file=file.name, expected=last - first, found=None if data is None else len(data),
                )  # fmt: skip
            with memoryview(data) as view:
                _compare(source.url, file, view, first)
                with self._alone():
                    image.write(first, [view])
            with self._lock:
                self._last_s = time.monotonic()
                self.num_sent_bytes += last - first
                self._tell(self.num_sent_bytes)

    def _finish(self, begun: _Begun, image: ImageFile) -> None:
        """Have a stream's part of a file be durable; the last stream completes it."""
        with self._alone():
            receipts = image.finish()
        with self._lock:
            begun.receipts += receipts
            begun.num_writers -= 1
            if begun.num_left or begun.num_writers:
                return
        name, nbytes = begun.file.name, begun.file.nbytes
        assert begun.token is not None, "who finishes it has opened it"
        with self._target_lock:
            if SHARED_NAME.fullmatch(name):
                self.claimed.check(self._target)
            self._target.complete_image(name, begun.token, nbytes, begun.receipts)
        with self._lock:
            begun.is_complete = True
            self._done.add(name)
            self._last_s = time.monotonic()

    def _drop(self, image: ImageFile) -> None:
        with self._lock:
            self._images.discard(image)
        image.close()

    # The end.

    def _leave(self) -> None:
        """Leave the target as the next call can go on from it.

        Raises:
            CheckpointError: That cannot be done, and is not needed.
        """
        for begun in self._begun:
            if begun.token is not None and not begun.is_complete:
                # Names may be those of whoever has claimed it since.
                self.claimed.check(self._target)
                with contextlib.suppress(WriteError):
                    self._target.discard_image(begun.file.name, begun.token)
        self._note()

    def _publish(self) -> None:
        """Make the copy visible.

        Raises:
            CommitError: Another save or copy has claimed the target.
            IntegrityError: A manifest is not what was committed any more.
            WriteError: A storage refuses.
        """
        source, target, original = self._source, self._target, self._original
        for ref in original.manifests:
            data = source.read(ref.name)
            if data is None or hashlib.sha256(data).hexdigest() != ref.sha256:
                raise IntegrityError(f"{source.url}/{ref.name} is not what was committed", file=ref.name)
            self.claimed.check(target)
            target.put(ref.name, bytes(data))
        # What was found is not removed by `publish`: names may be those of a checkpoint that was copied once,
        # and is again by whoever has claimed the target since.
        claimed = replace(self.claimed, found=(), unfinished=())
        publish(
            target, original.metadata.removesuffix(TRAILER), claimed, original.manifests, original.details
        )

    def _sweep(self) -> None:
        """Remove what the copy has replaced, and what it needed; what fails costs space and is said."""
        target, original = self._target, self._original
        names = [*original.files, *original.names, *(ref.name for ref in original.manifests)]
        keep = {METADATA, OWNER, record_name(original.metadata), *names}
        for name in names:
            keep.update(_folders_of(name))
        try:
            refused = self._remove([name for name in self.claimed.found if name not in keep])
            if refused is None:
                # Not before all else is: who finds it there goes on removing.
                refused = self._remove([PROGRESS])
        except CheckpointError as error:
            refused = error
        if refused is not None:
            _LOG.warning("%s is committed; not all that was there before is removed: %s", target.url, refused)

    def _remove(self, names: Sequence[str]) -> CheckpointError | None:
        """Remove files, as long as nobody has claimed the target; returns the first refusal.

        Raises:
            CommitError: Somebody has.
            WriteError: The storage does not say.
        """
        refused: CheckpointError | None = None
        for name in names:
            self.claimed.check(self._target)
            try:
                self._target.delete(name)
            except WriteError as error:
                # A folder in which somebody has left something since.
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                    refused = refused or error
        return refused


def _compare(url: str, file: _File, data: memoryview, start: int) -> None:
    """Compare bytes of a file with what was committed: checksums, and zeros where no item lies.

    Args:
        url: Of the checkpoint, for the message.
        file: The file; one without checksums is taken as it is.
        data: The bytes.
        start: Where they begin in the file: on a multiple of the blocks of checksums. They end on one, too,
            or with the file.

    Raises:
        IntegrityError: They differ; `file`, `item`, `expected` and `found` are filled.
    """
    if not file.has_checksums:
        return
    position, stop = start, start + len(data)
    for item in file.overlapping(start, stop):
        _check_gap(url, file, data, start, position, max(position, item.offset))
        low, high = max(item.offset, start), min(item.offset + item.nbytes, stop)
        skipped = low // CHECKSUM_BLOCK_BYTES - item.offset // CHECKSUM_BLOCK_BYTES
        for (first, nbytes), expected in zip(
            block_spans(low, high - low), item.checksums[skipped:], strict=False
        ):
            with data[first - start : first - start + nbytes] as block:
                found = checksum(block)
            if found != expected:
                fqn = file.fqn(item)
                raise IntegrityError(
                    f"not copied: {url}/{file.name}: {fqn!r} is damaged between bytes {first} and "
                    f"{first + nbytes}: CRC32C {found:08x}, written as {expected:08x}",
                    file=file.name, item=fqn, expected=expected, found=found,
                )  # fmt: skip
        position = high
    _check_gap(url, file, data, start, position, stop)


def _check_gap(url: str, file: _File, data: memoryview, start: int, first: int, end: int) -> None:
    """Compare what lies between items with zero.

    Raises:
        IntegrityError: It differs; `file` is filled.
    """
    while first < end:
        nbytes = min(len(_ZEROS), end - first)
        if data[first - start : first - start + nbytes] != _ZEROS[:nbytes]:
            raise IntegrityError(
                f"not copied: {url}/{file.name} is damaged between bytes {first} and {first + nbytes}, where "
                f"no item lies: not zero",
                file=file.name,
            )
        first += nbytes

"""From written files to a checkpoint: manifests, publication, sweep.

Invariants:
    * `.metadata` is published last, in one atomic step; before it, the commit record that bears its digest.
    * Names are new for each save, so that nothing of a committed checkpoint is ever written to.
    * Sweep removes only what no committed checkpoint names.

Torch-free: the pickled metadata arrives as bytes.
"""

from __future__ import annotations

import base64
import errno
import functools
import hashlib
import json
import logging
import os
import re
import socket
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distckpt.errors import CheckpointError, CommitError, IntegrityError, WriteError
from distckpt.worker import CHECKSUM_BLOCK_BYTES, block_spans, checksum

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from distckpt.storage import Storage

_LOG = logging.getLogger(__name__)
METADATA = ".metadata"
FOLDER = ".distckpt/"
_OWNER = FOLDER + "owner"
_VERSION = 2
_SETTLE_ATTEMPTS = 3
_CHECKSUM_BYTES = 4
_ITEMS = b',"items":'
_IMAGE = re.compile(r"__(\d+)_\d+\.distcp(\.[0-9a-f]+)?")
_METADATA = re.compile(r"(?:__(\d+))?\.metadata(\.[0-9a-f]+\.tmp)?")
_FAILURE = re.compile(r"failed-rank-(\d+)\.json")


@dataclass(frozen=True)
class ItemTable:
    """Where one rank's items lie: columns of equal length, one entry for each item; never changed.

    Attributes:
        fqns: Names of the entries.
        chunks: Offsets of the chunks in their tensors, in elements; None for byte blobs.
        item_files: Index of the file, from 0.
        offsets: Bytes from the start of the file.
        sizes: Bytes, framing included.
        entries: What a coordinator that has no plan of this rank needs to know: shape of the tensor, shape of
            the chunk, dtype, whether it requires grad, path in the state; None if there is such a plan.
    """

    fqns: list[str]
    chunks: list[Sequence[int] | None]
    item_files: list[int]
    offsets: list[int]
    sizes: list[int]
    entries: list[Any] | None = None

    @functools.cached_property
    def json(self) -> bytes:
        """The table as it stands in a manifest; encoded once, for all saves that share it."""
        return _to_json({
            "fqns": self.fqns,
            "chunks": self.chunks,
            "item_files": self.item_files,
            "offsets": self.offsets,
            "sizes": self.sizes,
            **({} if self.entries is None else {"entries": self.entries}),
        })  # fmt: skip


@dataclass
class Manifest:
    """What one rank wrote in one save.

    Attributes:
        save_id: The save, as this rank calls it.
        rank: The rank.
        format: Name of the file format.
        plan: Digest of the plan: items, sizes, dtypes.
        files: Size in bytes of each file, in the order of the table's indices.
        checksums: For each file: CRC32C of each block of each item, items in ascending offset, blocks as
            `worker.block_spans` cuts them, packed as little-endian uint32. Without checksums: b"" for each.
        items: Where the items lie.
        relies: Digest of the coordinator's plan, if items were left to it that this rank has as well.
    """

    save_id: str
    rank: int
    format: str
    plan: str
    files: dict[str, int]
    checksums: list[bytes]
    items: ItemTable
    relies: str = ""

    def to_json(self) -> bytes:
        """Return the manifest as it stands on storage; `items` is not encoded a second time."""
        assert len(self.checksums) == len(self.files)
        head = _to_json({
            "version": _VERSION,
            "save_id": self.save_id,
            "rank": self.rank,
            "format": self.format,
            "plan": self.plan,
            "relies": self.relies,
            "files": self.files,
            "checksums": [base64.b64encode(packed).decode("ascii") for packed in self.checksums],
        })  # fmt: skip
        return b"".join((head[:-1], _ITEMS, self.items.json, b"}"))


def _to_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@dataclass(frozen=True)
class ManifestRef:
    """What the coordinator learns of a rank's manifest.

    Attributes:
        name: Where it lies.
        sha256: Digest of its bytes.
        files: Size in bytes of each file that it lists.
    """

    name: str
    sha256: str
    files: dict[str, int]


def plan_digest(fqns: Sequence[str], kinds: Iterable[Hashable]) -> str:
    """Return a digest of what a plan says of its items, in their order.

    Args:
        fqns: Name of each item's entry.
        kinds: Offsets, sizes and dtype of each item; equal ones are spelt out once.
    """
    numbers: dict[Hashable, int] = {}
    sequence = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
    return hashlib.sha256(repr((fqns, sequence, list(numbers))).encode("utf-8", "surrogatepass")).hexdigest()


def manifest_name(save_id: str, rank: int) -> str:
    """Return the name of the manifest of `rank` in the save `save_id`."""
    return f"{FOLDER}{save_id}/rank-{rank:05}.json"


def write_manifest(storage: Storage, manifest: Manifest) -> ManifestRef:
    """Make `manifest`, and with it the names of all files that it lists, durable."""
    name = manifest_name(manifest.save_id, manifest.rank)
    data = manifest.to_json()
    storage.put(name, data)
    return ManifestRef(name, hashlib.sha256(data).hexdigest(), manifest.files)


@dataclass(frozen=True)
class PartialManifest:
    """A rank's manifest as another rank reads it; the items, which may be many, are not parsed.

    Attributes:
        ref: What `publish` needs.
        head: Everything but the items.
        items: The table of the items, as JSON.
    """

    ref: ManifestRef
    head: dict[str, Any]
    items: bytes


def read_partial(storage: Storage, save_id: str, rank: int) -> PartialManifest | None:
    """Return what `rank` wrote in the save `save_id`, as its manifest on storage says.

    Args:
        storage: The checkpoint's directory.
        save_id: The save, as `rank` calls it.
        rank: The rank.

    Returns:
        The manifest; None if it is not there, or not visible yet.

    Raises:
        CheckpointError: It is of another version.
        IntegrityError: It is unreadable; `file` is filled.
        WriteError: The storage refuses.
    """
    name = manifest_name(save_id, rank)
    data = storage.read(name)
    if data is None:
        return None
    head, mark, items = bytes(data).partition(_ITEMS)
    manifest = _parse(storage, name, bytearray(head + b"}" if mark else head))
    if not mark or not data.endswith(b"]}}") or not isinstance(manifest.get("files"), dict):
        raise IntegrityError(f"{storage.url}/{name} names no files or no items", file=name)
    ref = ManifestRef(name, hashlib.sha256(data).hexdigest(), manifest["files"])
    return PartialManifest(ref, manifest, items[:-1])


def report_failure(storage: Storage, save_id: str, rank: int, message: str) -> None:
    """Leave word that `rank` gave up the save `save_id`; it goes with what else the save left.

    Args:
        storage: The checkpoint's directory.
        save_id: The save.
        rank: The rank that failed.
        message: What happened, for the other ranks' errors.

    Raises:
        WriteError: The storage refuses.
    """
    report = {"version": _VERSION, "rank": rank, "message": message}
    storage.put(f"{FOLDER}{save_id}/failed-rank-{rank:05}.json", _to_json(report))


def failures(storage: Storage, save_id: str) -> dict[int, str]:
    """Return the messages of the ranks that gave up the save `save_id`, as far as they are visible, by rank.

    Raises:
        WriteError: The storage refuses.
    """
    folder = f"{FOLDER}{save_id}/"
    messages: dict[int, str] = {}
    for entry in sorted(storage.list(folder)):
        match = _FAILURE.fullmatch(entry)
        data = storage.read(folder + entry) if match else None
        if match is None or data is None:
            continue
        try:
            message = str(json.loads(data)["message"])
        except (ValueError, KeyError, TypeError):
            # That a rank failed is known from the name.
            message = f"{storage.url}/{folder}{entry} is not readable"
        messages[int(match[1])] = message
    return messages


def committed_by(storage: Storage) -> str | None:
    """Return the id of the save that published the checkpoint of all ranks.

    Reads all of `.metadata`, and its record, whatever version wrote it.

    Args:
        storage: The checkpoint's directory.

    Returns:
        The id, as `publish` was told; None without a checkpoint, for one of another tool, and for one that is
        replaced again and again meanwhile.

    Raises:
        IntegrityError: The record is unreadable; `file` is filled.
        WriteError: The storage refuses.
    """
    for _ in range(_SETTLE_ATTEMPTS):
        try:
            metadata = storage.read(METADATA)
            if metadata is None:
                return None
            name = _record_name(metadata)
            record = storage.read(name)
            if record is not None:
                save_id = _parse_object(storage, name, record).get("save_id")
                return None if save_id is None else str(save_id)
            # The next save may have published, and swept the record, between the two reads.
            if storage.read(METADATA) == metadata:
                return None
        except WriteError as error:
            # NFS: another host replaced the file after it was opened here.
            if error.errno != errno.ESTALE:
                raise
    return None


def claim(storage: Storage, save_id: str) -> None:
    """Record that the save `save_id` is the one that may publish here; an earlier one will be refused."""
    record = {"save_id": save_id, "host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
    storage.put(_OWNER, json.dumps(record).encode())


def publish(
    storage: Storage,
    metadata: bytes,
    *,
    save_id: str,
    manifests: Sequence[ManifestRef],
    rank: int | None = None,
    details: dict[str, Any] | None = None,
) -> None:
    """Make the files that `manifests` list the checkpoint.

    Args:
        storage: The checkpoint's directory.
        metadata: Pickled metadata.
        save_id: The save that `claim` was called with.
        manifests: One for each rank that wrote something.
        rank: None for the whole checkpoint; else the rank that publishes only its own part.
        details: What else the commit record shall say.

    Raises:
        CommitError: Another save has claimed the directory, or a file is missing or has another size.
        WriteError: The storage refuses.
    """
    _check_owner(storage, save_id, rank)
    present = storage.list()
    for ref in manifests:
        for name, nbytes in ref.files.items():
            if present.get(name) != nbytes:
                raise CommitError(
                    f"not published: {storage.url}/{name} should hold {nbytes} bytes and "
                    f"{'is missing' if name not in present else f'holds {present[name]}'}"
                )
    record = {
        "version": _VERSION,
        "save_id": save_id,
        "metadata": metadata_name(rank),
        "manifests": [{"name": ref.name, "sha256": ref.sha256} for ref in manifests],
        **(details or {}),
    }
    storage.put(_record_name(metadata), _to_json(record))
    # Looked for before the last check: what a save that claims the directory later writes is not among it.
    stale = _stale(storage, metadata, manifests, rank)
    _check_owner(storage, save_id, rank)
    storage.put(str(record["metadata"]), metadata)
    _sweep(storage, stale)


def _check_owner(storage: Storage, save_id: str, rank: int | None) -> None:
    if rank is not None:
        return
    owner = storage.read(_OWNER)
    if owner is None or f'"save_id": "{save_id}"'.encode() not in owner:
        who = "nobody" if owner is None else owner.decode(errors="replace")
        raise CommitError(
            f"not published: {storage.url} was claimed by another save while this one ({save_id}) ran: {who}"
        )


def refuse_part(storage: Storage) -> None:
    """Refuse to write a part of a checkpoint without collectives where there is one of all ranks.

    Readers look for the metadata of all ranks first: they would not find the part, and what the sweep removes
    would be missing to the whole.

    Raises:
        CommitError: There is one.
    """
    if storage.read(METADATA, nbytes=0) is not None:
        raise CommitError(
            f"not written: {storage.url} holds a checkpoint that was saved with collectives, which readers "
            f"would go on finding: remove it, or save without collectives to another directory"
        )


def metadata_name(rank: int | None) -> str:
    """Return the name of the metadata of all ranks, or of the one that published only its own part."""
    return METADATA if rank is None else f"__{rank}{METADATA}"


def _record_name(metadata: bytes | bytearray) -> str:
    return f"{FOLDER}commit-{hashlib.sha256(metadata).hexdigest()}.json"


def _stale(
    storage: Storage, metadata: bytes, manifests: Sequence[ManifestRef], rank: int | None
) -> list[str]:
    """Return what earlier saves left, in an order in which it can be removed."""
    keep = {name for ref in manifests for name in ref.files} | {metadata_name(rank)}
    stale = []
    for name in storage.list():
        ours = _IMAGE.fullmatch(name) or _METADATA.fullmatch(name)
        if ours is not None and name not in keep and (rank is None or ours[1] == str(rank)):
            stale.append(name)
    folders = {ref.name.rpartition("/")[0] + "/" for ref in manifests}
    return stale + _stale_records(storage, {_record_name(metadata), _OWNER}, folders, rank)


def _stale_records(storage: Storage, keep: set[str], keep_folders: set[str], rank: int | None) -> list[str]:
    stale = []
    prefixes = ("",) if rank is None else (f"rank-{rank:05}.", f"failed-rank-{rank:05}.")
    for entry in storage.list(FOLDER):
        name = FOLDER + entry
        if name in keep or name in keep_folders:
            continue
        if entry.endswith("/"):
            inners = storage.list(name)
            ours = [inner for inner in inners if inner.startswith(prefixes)]
            stale += [name + inner for inner in ours]
            # An empty folder may be one that another rank has just made.
            if len(ours) == len(inners) and (ours or rank is None):
                stale.append(name)
        elif rank is None or _belongs_to(storage, name, rank):
            stale.append(name)
    return stale


def _sweep(storage: Storage, names: Sequence[str]) -> None:
    """Remove `names`; a failure costs disk space and is said, the checkpoint is committed."""
    try:
        for name in names:
            storage.delete(name)
    except WriteError as error:
        _LOG.warning("%s is committed; what earlier saves left there stays: %s", storage.url, error)


def _belongs_to(storage: Storage, name: str, rank: int) -> bool:
    record = storage.read(name)
    return record is not None and f'"metadata":"{metadata_name(rank)}"'.encode() in record


class Integrity:
    """The checksums of a committed checkpoint.

    Args:
        url: The checkpoint, for messages.
        items: For each (file, offset): size in bytes and checksums of the blocks.
    """

    def __init__(self, url: str, items: dict[tuple[str, int], tuple[int, Sequence[int]]]) -> None:
        self._url = url
        self._items = items

    def check(self, file: str, offset: int, data: bytearray, fqn: str) -> None:
        """Compare the bytes of an item, as read, with what was written.

        Args:
            file: Name of its file.
            offset: Where it begins there, in bytes.
            data: All of its bytes.
            fqn: Name of the entry, for messages.

        Raises:
            IntegrityError: They differ; `file`, `item`, `expected` and `found` are filled.
        """
        recorded = self._items.get((file, offset))
        if recorded is None:
            raise IntegrityError(
                f"{self._url}/{file}: no manifest lists {fqn!r} at byte {offset}", file=file, item=fqn
            )
        nbytes, checksums = recorded
        if nbytes != len(data):
            raise IntegrityError(
                f"{self._url}/{file}: {fqn!r} at byte {offset} has {len(data)} of {nbytes} bytes",
                file=file, item=fqn, expected=nbytes, found=len(data),
            )  # fmt: skip
        if not checksums:
            return
        with memoryview(data) as view:
            for (start, size), expected in zip(block_spans(offset, nbytes), checksums, strict=True):
                with view[start - offset : start - offset + size] as block:
                    found = checksum(block)
                if found != expected:
                    raise IntegrityError(
                        f"{self._url}/{file}: {fqn!r} is damaged between bytes {start} and {start + size}: "
                        f"CRC32C {found:08x}, written as {expected:08x}",
                        file=file, item=fqn, expected=expected, found=found,
                    )  # fmt: skip


def load_integrity(storage: Storage, metadata: bytes) -> Integrity | None:
    """Return the checksums that belong to `metadata`, or None if another tool wrote it.

    Args:
        storage: The checkpoint's directory.
        metadata: Bytes of its `.metadata`.

    Raises:
        IntegrityError: A manifest is missing, unreadable or not the one that was committed.
    """
    record_name = _record_name(metadata)
    record = storage.read(record_name)
    if record is None:
        return None
    items: dict[tuple[str, int], tuple[int, Sequence[int]]] = {}
    parsed = _parse(storage, record_name, record)
    if "manifests" not in parsed:
        raise IntegrityError(f"{storage.url}/{record_name} names no manifests", file=record_name)
    for ref in parsed["manifests"]:
        data = storage.read(ref["name"])
        if data is None:
            raise IntegrityError(f"{storage.url}/{ref['name']} is missing", file=ref["name"])
        found = hashlib.sha256(data).hexdigest()
        if found != ref["sha256"]:
            raise IntegrityError(
                f"{storage.url}/{ref['name']} is not the manifest that was committed",
                file=ref["name"], expected=ref["sha256"], found=found,
            )  # fmt: skip
        manifest = _parse(storage, ref["name"], data)
        try:
            _add_checksums(items, manifest)
        except (ValueError, LookupError, TypeError) as error:
            raise IntegrityError(
                f"{storage.url}/{ref['name']} contradicts itself: {error}", file=ref["name"]
            ) from error
    return Integrity(storage.url, items)


def _add_checksums(items: dict[tuple[str, int], tuple[int, Sequence[int]]], manifest: dict[str, Any]) -> None:
    """Add to `items`, as `Integrity` takes them, those of a parsed manifest.

    Raises:
        ValueError: The checksums do not fit the items.
    """
    names = list(manifest["files"])
    table = manifest["items"]
    spans: list[list[tuple[int, int]]] = [[] for _ in names]
    for file, offset, size in zip(table["item_files"], table["offsets"], table["sizes"], strict=True):
        spans[file].append((offset, size))
    columns = [base64.b64decode(text, validate=True) for text in manifest["checksums"]]
    has_checksums = any(columns)
    for name, file_spans, packed in zip(names, spans, columns, strict=True):
        found, rest = divmod(len(packed), _CHECKSUM_BYTES)
        checksums = struct.unpack_from(f"<{found}I", packed)
        start = 0
        for offset, size in sorted(file_spans):
            end = start + _num_blocks(offset, size) if has_checksums else start
            items[name, offset] = (size, checksums[start:end])
            start = end
        if start != found or rest:
            raise ValueError(f"{len(packed)} bytes of checksums for the {start} blocks in {name}")


def _num_blocks(offset: int, nbytes: int) -> int:
    """Return how many spans `block_spans` yields."""
    if nbytes == 0:
        return 0
    return (offset + nbytes - 1) // CHECKSUM_BLOCK_BYTES - offset // CHECKSUM_BLOCK_BYTES + 1


def _parse(storage: Storage, name: str, data: bytearray) -> dict[str, Any]:
    parsed = _parse_object(storage, name, data)
    version = parsed.get("version")
    if version is None:
        raise IntegrityError(f"{storage.url}/{name} is not readable: it has no version", file=name)
    if version != _VERSION:
        raise CheckpointError(
            f"{storage.url}/{name} has version {version}; this distckpt reads version {_VERSION}"
        )
    return parsed


def _parse_object(storage: Storage, name: str, data: bytearray) -> dict[str, Any]:
    try:
        parsed = json.loads(data)
    except ValueError as error:
        raise IntegrityError(f"{storage.url}/{name} is not readable: {error}", file=name) from error
    if not isinstance(parsed, dict):
        raise IntegrityError(f"{storage.url}/{name} is not readable: it holds no object", file=name)
    return parsed

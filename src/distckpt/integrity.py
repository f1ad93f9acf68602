"""Whether what is read is what was committed.

    .metadata -> commit record (named by its digest) -> manifests (digests) -> blocks of files (CRC32C)

Invariants:
    * Nothing is unpickled here, and nothing of a manifest is believed before its digest was compared.
    * Damage to a `.metadata` of ours is never taken for the `.metadata` of another tool.

Torch-free.
"""

from __future__ import annotations

import base64
import hashlib
import pickletools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from distckpt.errors import CheckpointError, IntegrityError
from distckpt.manifest import FOLDER, METADATA, TRAILER, parse, record_name, unseal
from distckpt.storage import check_name
from distckpt.worker import CHECKSUM_BLOCK_BYTES, block_spans, checksum

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distckpt.storage import Storage

_CHECKSUM_BYTES = 4
_STOP = b"."


@dataclass(frozen=True)
class Record:
    """A commit record, as far as its digest and its form were checked.

    Attributes:
        name: Where it lies.
        fields: What it says.
        manifests: (name, SHA-256) of the manifests of the commit.
    """

    name: str
    fields: dict[str, Any]
    manifests: list[tuple[str, str]]


def find_record(storage: Storage, metadata: bytes, name: str = METADATA) -> Record | None:
    """Return the commit record that belongs to `metadata`.

    Args:
        storage: The checkpoint's directory.
        metadata: Bytes of `name`.
        name: Name of the metadata.

    Returns:
        The record; None if another tool wrote the metadata.

    Raises:
        CheckpointError: The record is of another version.
        IntegrityError: The metadata, or its record, is damaged; `file` is filled.
        WriteError: The storage refuses.
    """
    expected = record_name(metadata)
    record = read_record(storage, expected)
    if record is None:
        if metadata.endswith(TRAILER):
            raise IntegrityError(
                f"{storage.url}/{name} is not what was committed, or its record {expected} is missing",
                file=name, expected=expected,
            )  # fmt: skip
        _check_foreign(storage, metadata, name)
    elif record.fields.get("metadata") != name:
        raise IntegrityError(f"{storage.url}/{name} holds what was committed as another file", file=name)
    return record


def read_record(storage: Storage, name: str) -> Record | None:
    """Return a commit record, whatever metadata there is; None if it is not there.

    Raises:
        CheckpointError: It is of another version.
        IntegrityError: It is damaged; `file` is filled.
        WriteError: The storage refuses.
    """
    data = storage.read(name)
    if data is None:
        return None
    fields = unseal(storage, name, data)
    if fields.get("name") != name:
        raise IntegrityError(f"{storage.url}/{name} is the record of other metadata", file=name)
    try:
        manifests = [(str(ref["name"]), str(ref["sha256"])) for ref in fields["manifests"]]
    except (LookupError, TypeError) as error:
        raise IntegrityError(f"{storage.url}/{name} names no manifests", file=name) from error
    for manifest, _ in manifests:
        check_name(storage.url, manifest)
    return Record(name, fields, manifests)


def _check_foreign(storage: Storage, metadata: bytes, name: str) -> None:
    """Refuse metadata that no other tool can have written.

    Raises:
        IntegrityError: It is such; `file` is filled.
    """
    if not _is_whole_pickle(metadata):
        raise IntegrityError(
            f"{storage.url}/{name} is cut short or damaged: it is no whole pickle", file=name
        )
    for entry in storage.list(FOLDER):
        try:
            record = read_record(storage, FOLDER + entry) if entry.startswith("commit-") else None
        except CheckpointError:
            # Of a checkpoint that another tool has replaced: its state says nothing of this one.
            continue
        if record is None or record.fields.get("metadata") != name:
            continue
        save_id = str(record.fields.get("save_id"))
        if save_id.encode() in metadata:
            raise IntegrityError(
                f"{storage.url}/{name} is not what was committed: {record.name} is the record of its save, "
                f"{save_id}, and names other bytes",
                file=name,
            )


def _is_whole_pickle(data: bytes) -> bool:
    if not data.endswith(_STOP):
        return False
    position: int | None = None
    try:
        for _, _, position in pickletools.genops(data):  # noqa: B007 - the last one is wanted
            pass
    except Exception:  # noqa: BLE001 - whatever it is that it cannot read
        return False
    return position == len(data) - 1


class Integrity:
    """The checksums of a committed checkpoint.

    Args:
        url: The checkpoint, for messages.
        items: For each (file, offset): size in bytes and checksums of the blocks.
    """

    def __init__(self, url: str, items: dict[tuple[str, int], tuple[int, Sequence[int]]]) -> None:
        self._url = url
        self._items = items

    def check(self, file: str, offset: int, data: bytearray | memoryview, fqn: str) -> None:
        """Compare the bytes of an item, as read, with what was written.

        Args:
            file: Name of its file.
            offset: Where it begins there, in bytes.
            data: All of its bytes.
            fqn: Name of the entry, for messages.

        Raises:
            IntegrityError: They differ; `file`, `item`, `expected` and `found` are filled.
        """
        nbytes, checksums = self._recorded(file, offset, fqn)
        if nbytes != len(data):
            raise IntegrityError(
                f"{self._url}/{file}: {fqn!r} at byte {offset} has {len(data)} of {nbytes} bytes",
                file=file, item=fqn, expected=nbytes, found=len(data),
            )  # fmt: skip
        if checksums:
            self._compare(file, offset, data, checksums, fqn)

    def widen(self, file: str, offset: int, low: int, high: int) -> tuple[int, int]:
        """Return what must be read of an item, in bytes from its start, for [low, high) to be checked."""
        nbytes, checksums = self._items.get((file, offset), (high, ()))
        if not checksums:
            return low, high
        first = (offset + low) // CHECKSUM_BLOCK_BYTES * CHECKSUM_BLOCK_BYTES - offset
        stop = -(-(offset + high) // CHECKSUM_BLOCK_BYTES) * CHECKSUM_BLOCK_BYTES - offset
        return max(0, first), min(nbytes, stop)

    def check_part(self, file: str, offset: int, first: int, data: bytearray | memoryview, fqn: str) -> None:
        """Compare some bytes of an item, as `widen` has named them, with what was written; see `check`.

        Args:
            file: As for `check`.
            offset: As for `check`.
            first: Where the bytes begin, from the start of the item.
            data: The bytes.
            fqn: As for `check`.

        Raises:
            IntegrityError: As `check`.
        """
        _, checksums = self._recorded(file, offset, fqn)
        if not checksums:
            return
        skipped = (offset + first) // CHECKSUM_BLOCK_BYTES - offset // CHECKSUM_BLOCK_BYTES
        self._compare(file, offset + first, data, checksums[skipped:], fqn)

    def _recorded(self, file: str, offset: int, fqn: str) -> tuple[int, Sequence[int]]:
        recorded = self._items.get((file, offset))
        if recorded is None:
            raise IntegrityError(
                f"{self._url}/{file}: no manifest lists {fqn!r} at byte {offset}", file=file, item=fqn
            )
        return recorded

    def _compare(
        self, file: str, offset: int, data: bytearray | memoryview, checksums: Sequence[int], fqn: str
    ) -> None:
        with memoryview(data) as view:
            for (start, size), expected in zip(block_spans(offset, len(data)), checksums, strict=False):
                with view[start - offset : start - offset + size] as block:
                    found = checksum(block)
                if found != expected:
                    raise IntegrityError(
                        f"{self._url}/{file}: {fqn!r} is damaged between bytes {start} and {start + size}: "
                        f"CRC32C {found:08x}, written as {expected:08x}",
                        file=file, item=fqn, expected=expected, found=found,
                    )  # fmt: skip


def read_manifest(storage: Storage, name: str, sha256: str) -> dict[str, Any]:
    """Return a manifest of a commit.

    Args:
        storage: The checkpoint's directory.
        name: Where it lies.
        sha256: What the commit record says of it.

    Raises:
        CheckpointError: It is of another version.
        IntegrityError: It is missing, or not the one that was committed; `file` is filled.
        WriteError: The storage refuses.
    """
    data = storage.read(name)
    if data is None:
        raise IntegrityError(f"{storage.url}/{name} is missing", file=name)
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise IntegrityError(
            f"{storage.url}/{name} is not the manifest that was committed",
            file=name, expected=sha256, found=found,
        )  # fmt: skip
    return parse(storage, name, data)


HEADER = -1
UNUSED = -2


class Extent(NamedTuple):
    """One item in a file, as a manifest says.

    Attributes:
        offset: Bytes from the start of the file.
        nbytes: Its bytes.
        number: Its place in the columns of the manifest; `HEADER` for the bytes before the items,
            `UNUSED` for what was an item of another checkpoint that has the file.
        checksums: CRC32C of its blocks; empty without checksums.
    """

    offset: int
    nbytes: int
    number: int
    checksums: Sequence[int]


def extents(storage: Storage, name: str, manifest: dict[str, Any]) -> Iterator[tuple[str, int, list[Extent]]]:
    """Yield (file, its bytes, its items in ascending offset) for each file of a manifest.

    Args:
        storage: The checkpoint's directory.
        name: Name of the manifest, for messages.
        manifest: The manifest, as `read_manifest` returns it.

    Raises:
        IntegrityError: It contradicts itself, or names files outside the checkpoint.
    """
    try:
        yield from _extents(storage, manifest)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{storage.url}/{name} contradicts itself: {error}", file=name) from error


def _extents(storage: Storage, manifest: dict[str, Any]) -> Iterator[tuple[str, int, list[Extent]]]:
    files = manifest["files"]
    table = manifest["items"]
    spans: list[list[tuple[int, int, int]]] = [[] for _ in files]
    for number, (file, offset, size) in enumerate(
        zip(table["item_files"], table["offsets"], table["sizes"], strict=True)
    ):
        if file < 0 or size < 0:
            raise ValueError(f"item {number} lies in file {file} with {size} bytes")
        spans[file].append((offset, size, number))
    for file, offset, size in manifest.get("unused", ()):
        if file < 0 or size < 0:
            raise ValueError(f"what is not used lies in file {file} with {size} bytes")
        spans[file].append((offset, size, UNUSED))
    headers = manifest.get("headers") or [0] * len(files)
    for own, size in zip(spans, headers, strict=True):
        if size:
            own.append((0, size, HEADER))
    columns = [base64.b64decode(text, validate=True) for text in manifest["checksums"]]
    has_checksums = any(columns)
    for (name, nbytes), file_spans, packed in zip(files.items(), spans, columns, strict=True):
        check_name(storage.url, name)
        found, rest = divmod(len(packed), _CHECKSUM_BYTES)
        checksums = struct.unpack_from(f"<{found}I", packed)
        items, start, position = [], 0, 0
        for offset, size, number in sorted(file_spans):
            if offset < position or offset + size > nbytes:
                raise ValueError(f"item {number} does not fit at byte {offset} of the {nbytes} of {name}")
            position = offset + size
            end = start + _num_blocks(offset, size) if has_checksums else start
            items.append(Extent(offset, size, number, checksums[start:end]))
            start = end
        if start != found or rest:
            raise ValueError(f"{len(packed)} bytes of checksums for the {start} blocks in {name}")
        yield name, nbytes, items


def _num_blocks(offset: int, nbytes: int) -> int:
    """Return how many spans `block_spans` yields."""
    if nbytes == 0:
        return 0
    return (offset + nbytes - 1) // CHECKSUM_BLOCK_BYTES - offset // CHECKSUM_BLOCK_BYTES + 1


def load_integrity(storage: Storage, metadata: bytes, name: str = METADATA) -> Integrity | None:
    """Return the checksums that belong to `metadata`, or None if another tool wrote it.

    Args:
        storage: The checkpoint's directory.
        metadata: Bytes of `name`.
        name: Name of the metadata.

    Raises:
        CheckpointError: A record or a manifest is of another version.
        IntegrityError: The metadata, its record or a manifest is damaged or missing; `file` is filled.
        WriteError: The storage refuses.
    """
    record = find_record(storage, metadata, name)
    if record is None:
        return None
    items: dict[tuple[str, int], tuple[int, Sequence[int]]] = {}
    for manifest_name, sha256 in record.manifests:
        manifest = read_manifest(storage, manifest_name, sha256)
        for file, _, found in extents(storage, manifest_name, manifest):
            for item in found:
                items[file, item.offset] = (item.nbytes, item.checksums)
    return Integrity(storage.url, items)

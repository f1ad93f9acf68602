"""What a checkpoint says of itself: manifests, commit records and the other small objects beside the images.

Invariants:
    * A small object is sealed: one whose bytes are not those that were written is never taken for whole.
    * Names that are read from storage lie within the checkpoint, or are refused.

Torch-free.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distckpt.errors import CheckpointError, CommitError, IntegrityError, WriteError
from distckpt.storage import check_name

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from distckpt.storage import Storage

METADATA = ".metadata"
FOLDER = ".distckpt/"
OWNER = FOLDER + "owner"
IMAGE_NAME = re.compile(
    r"__(\d+)_\d+\.distcp(\.[0-9a-f]+)?"
    r"|shard-\d+-\d+-[0-9a-f]+\.safetensors"
    r"|unfinished-[0-9a-f]+\.safetensors(\.[0-9a-f]+\.tmp)?"
)
"""With the id of a save: ours. Without: of stock PyTorch, whose checkpoint a save in its place replaces."""
NAMES_NAME = re.compile(r"names-\d+(-documents)?\.json")
PARTIAL_NAME = re.compile(r"\.[0-9a-f]+\.tmp$")
"""Ends the name of a file that is to get its own when it is complete."""
METADATA_NAME = re.compile(r"(?:__(\d+))?\.metadata")
UNFINISHED_METADATA_NAME = re.compile(METADATA_NAME.pattern + r"\.[0-9a-f]+\.tmp")
VERSION = 3
TRAILER = b"\n.distckpt/commit-*.json belongs to this\n"
"""Ends every `.metadata` of ours, behind the pickle, where readers do not look: one that has it and no record
is damaged, one that has neither may be that of another tool."""
_VISIBLE_S = 70.0
"""Longer than an NFS client remembers what a directory holds (acdirmax, 60 s)."""
_VISIBLE_POLL_S = 0.05
_FEW = 8
_READERS = 16
_ITEMS = b',"items":'
_SEAL = b',"sha256":"'
_SEAL_BYTES = len(_SEAL) + 64 + len(b'"}')


def seal(fields: dict[str, Any]) -> bytes:
    """Return `fields` as JSON, with the digest of what stands before it as the last field.

    Args:
        fields: Plain values.
    """
    body = to_json({"version": VERSION, **fields})[:-1]
    return body + _SEAL + hashlib.sha256(body).hexdigest().encode() + b'"}'


def unseal(storage: Storage, name: str, data: bytes | bytearray) -> dict[str, Any]:
    """Return the fields of a sealed object.

    Args:
        storage: Where it lies, for messages.
        name: Its name there.
        data: Its bytes.

    Raises:
        CheckpointError: It is of another version.
        IntegrityError: It is not what was written; `file`, `expected` and `found` are filled.
    """
    body, mark = bytes(data[:-_SEAL_BYTES]), bytes(data[-_SEAL_BYTES:])
    found = hashlib.sha256(body).hexdigest()
    if mark != _SEAL + found.encode() + b'"}':
        if not mark.startswith(_SEAL):
            # Not readable at all, or of a version before there were seals.
            parse(storage, name, data)
        raise IntegrityError(
            f"{storage.url}/{name} is not what was written: its SHA-256 is {found}",
            file=name, expected=mark[len(_SEAL) : -2].decode(errors="replace"), found=found,
        )  # fmt: skip
    return parse(storage, name, data)


def parse(storage: Storage, name: str, data: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object that `data` holds.

    Args:
        storage: Where it lies, for messages.
        name: Its name there.
        data: Its bytes.

    Raises:
        CheckpointError: It is of another version.
        IntegrityError: It is not readable; `file` is filled.
    """
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{storage.url}/{name} is not readable: {error}", file=name) from error
    version = parsed.get("version") if isinstance(parsed, dict) else None
    if version is None:
        raise IntegrityError(f"{storage.url}/{name} is not readable: it has no version", file=name)
    if version != VERSION:
        raise CheckpointError(
            f"{storage.url}/{name} has version {version}; this distckpt reads version {VERSION}"
        )
    assert isinstance(parsed, dict)
    return parsed


def to_json(value: dict[str, Any]) -> bytes:
    """Return `value` as it stands on storage."""
    return json.dumps(value, separators=(",", ":")).encode()


def metadata_name(rank: int | None) -> str:
    """Return the name of the metadata of all ranks, or of the one that published only its own part."""
    return METADATA if rank is None else f"__{rank}{METADATA}"


def record_name(metadata: bytes | bytearray) -> str:
    """Return the name of the commit record of the metadata with these bytes."""
    return f"{FOLDER}commit-{hashlib.sha256(metadata).hexdigest()}.json"


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
            the chunk, dtype, whether it requires grad, path in the state, and by how many rows it
            could be shared, None if a mesh says who has it; None if there is such a plan.
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
        return to_json({
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
        shares: What this rank relies upon, where others write what it has as well (see `ownership.Shares`).
        headers: For each file the bytes before its first item, which have checksums of their own; empty if
            no file has any.
        arrays: What the tensors are, for formats that have a grid (see `formats.Arrays`).
        unused: File, offset and bytes of what was an item of an earlier checkpoint with the same file, and
            is none of this one; its checksums are among the others.
    """

    save_id: str
    rank: int
    format: str
    plan: str
    files: dict[str, int]
    checksums: list[bytes]
    items: ItemTable
    shares: Mapping[str, Any] = field(default_factory=dict)
    headers: Sequence[int] = ()
    arrays: Mapping[str, Any] = field(default_factory=dict)
    unused: Sequence[tuple[int, int, int]] = ()

    def to_json(self) -> bytes:
        """Return the manifest as it stands on storage; `items` is not encoded a second time."""
        assert len(self.checksums) == len(self.files)
        head = to_json({
            "version": VERSION,
            "save_id": self.save_id,
            "rank": self.rank,
            "format": self.format,
            "plan": self.plan,
            "shares": self.shares,
            "files": self.files,
            "checksums": [base64.b64encode(packed).decode("ascii") for packed in self.checksums],
            **({"headers": self.headers} if self.headers else {}),
            **({"arrays": self.arrays} if self.arrays else {}),
            **({"unused": self.unused} if self.unused else {}),
        })  # fmt: skip
        return b"".join((head[:-1], _ITEMS, self.items.json, b"}"))


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


def manifest_name(save_id: str, rank: int, *, of_documents: bool = False) -> str:
    """Return the name of the manifest of `rank` in the save `save_id`, or of that of its documents."""
    return f"{FOLDER}{save_id}/rank-{rank:05}{'-documents' if of_documents else ''}.json"


def write_manifest(storage: Storage, manifest: Manifest, *, of_documents: bool = False) -> ManifestRef:
    """Make `manifest`, and with it the names of all files that it lists, durable."""
    name = manifest_name(manifest.save_id, manifest.rank, of_documents=of_documents)
    data = manifest.to_json()
    storage.put(name, data)
    return ManifestRef(name, hashlib.sha256(data).hexdigest(), manifest.files)


def names_name(save_id: str, rank: int, *, are_documents: bool = False) -> str:
    """Return the name of the list of names that `rank` writes to in the save `save_id`."""
    return f"{FOLDER}{save_id}/names-{rank:05}{'-documents' if are_documents else ''}.json"


def is_names(name: str, folder: str) -> bool:
    """Say whether `name` is that of a list of names of the save with this folder."""
    return name.startswith(folder) and NAMES_NAME.fullmatch(name.removeprefix(folder)) is not None


def write_names(storage: Storage, name: str, names: Sequence[str]) -> None:
    """Make durable what a save is about to write under names by which it could not be told to be of a save.

    Args:
        storage: The checkpoint's directory.
        name: Of the list.
        names: What it lists.
    """
    storage.put(name, seal({"names": list(names)}))


def read_names(storage: Storage, name: str) -> list[str]:
    """Return what a list of names lists; nothing if it is none, or is not what was written.

    Raises:
        WriteError: The storage refuses.
    """
    if NAMES_NAME.fullmatch(name.rpartition("/")[2]) is None:
        return []
    try:
        data = storage.read(name)
        listed = [] if data is None else unseal(storage, name, data).get("names")
        names = [each for each in listed if isinstance(each, str)] if isinstance(listed, list) else []
        for each in names:
            check_name(storage.url, each)
    except WriteError:
        raise
    except CheckpointError:
        return []
    return [each for each in names if not each.startswith(FOLDER) and not METADATA_NAME.fullmatch(each)]


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
    manifest = parse(storage, name, bytearray(head + b"}" if mark else head))
    if not mark or not data.endswith(b"]}}") or not isinstance(manifest.get("files"), dict):
        raise IntegrityError(f"{storage.url}/{name} names no files or no items", file=name)
    ref = ManifestRef(name, hashlib.sha256(data).hexdigest(), manifest["files"])
    return PartialManifest(ref, manifest, items[:-1])


def read_partials(
    storage: Storage, save_id: str, ranks: Sequence[int], check: Callable[[], None]
) -> list[PartialManifest]:
    """Return the manifests of `ranks`, which have said that they are durable; several at a time.

    Args:
        storage: The checkpoint's directory.
        save_id: The save.
        ranks: The ranks.
        check: Called while one is not visible; raises if it never will be, for another save has removed it.

    Raises:
        CommitError: One does not become visible.
        IntegrityError: As `read_partial`.
        WriteError: As `read_partial`.
    """

    def read(rank: int) -> PartialManifest:
        pause = threading.Event()
        deadline = time.monotonic() + _VISIBLE_S
        while True:
            found = read_partial(storage, save_id, rank)
            if found is not None:
                return found
            check()
            # NFS: that there was no such file may be remembered for a while.
            if time.monotonic() > deadline:
                raise CommitError(
                    f"not published: rank {rank} has written {storage.url}/{manifest_name(save_id, rank)}, "
                    f"which is not there",
                    rank=rank,
                )
            pause.wait(_VISIBLE_POLL_S)

    if len(ranks) <= _FEW:
        return [read(rank) for rank in ranks]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="distckpt-manifests") as pool:
        try:
            found = pool.map(read, ranks)
        except RuntimeError:
            # The interpreter ends: there are no more threads.
            found = map(read, ranks)
        return list(found)

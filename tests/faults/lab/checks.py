"""What must hold of whatever a crash leaves.

* The newest committed checkpoint is there: `.metadata` is exactly the old or the new one, the new one once
  the publication has returned, and what its commit record and its manifests name has exactly the bytes that
  were committed, as they are and as distckpt's own verification sees them.
* The next save works on it, and nothing but its files is left then.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from distckpt import StorageWriter
from distckpt.commit import claim, leftovers, publish
from distckpt.integrity import extents, find_record, read_manifest
from distckpt.manifest import FOLDER, METADATA, ItemTable, Manifest, write_manifest
from distckpt.storage import Storage
from distckpt.worker import block_spans, checksum
from faults.checkpoints import assert_is_clean
from faults.lab.disk import Disk, State, Tree
from faults.lab.memory import MemoryStorage
from faults.lab.saves import (
    NEW,
    NEXT,
    OLD,
    Recording,
    Setting,
    load,
    same,
    save_next,
    state_of,
    step_path,
    write_tree,
)

_NEXT_ID = "ffffffffffffffffffffffffffffffff"
_NEXT_DATA = b"what the next save writes" * 400
_OWNER = FOLDER + "owner"


class Finding(AssertionError):
    """Something that must hold does not."""


def require(condition: object, what: str) -> None:
    """Raise a finding that says `what`, unless the condition holds."""
    if not condition:
        raise Finding(what)


def verify(storage: Storage) -> set[str]:
    """Return the names of the files of the committed checkpoint, as distckpt's own verification finds them.

    Raises:
        CheckpointError: It is damaged.
        Finding: It is of another tool, or a block has another checksum.
    """
    metadata = storage.read(METADATA)
    assert metadata is not None
    record = find_record(storage, bytes(metadata))
    require(record is not None, "the record of the metadata is missing")
    assert record is not None
    names = {METADATA, record.name}
    for manifest_name, sha256 in record.manifests:
        names.add(manifest_name)
        manifest = read_manifest(storage, manifest_name, sha256)
        for file, nbytes, items in extents(storage, manifest_name, manifest):
            names.add(file)
            data = storage.read(file)
            require(data is not None and len(data) == nbytes, f"{file} is missing, or has another size")
            assert data is not None
            for item in items:
                blocks = list(block_spans(item.offset, item.nbytes))
                for (start, size), expected in zip(blocks, item.checksums, strict=True):
                    require(checksum(data[start : start + size]) == expected, f"{file} is damaged at {start}")
    return names


def save_again(storage: Storage) -> None:
    """Claim, write, publish: what the next save of one rank does, with the real functions."""
    storage.prepare()
    claimed = claim(storage, _NEXT_ID)
    name = f"__0_0.distcp.{_NEXT_ID}"
    token = storage.create_image(name, len(_NEXT_DATA))
    image = storage.open_image(name, token)
    image.write(0, [memoryview(_NEXT_DATA)])
    storage.complete_image(name, token, len(_NEXT_DATA), image.finish())
    nbytes = len(_NEXT_DATA)
    checksums = [checksum(_NEXT_DATA[start : start + size]) for start, size in block_spans(0, nbytes)]
    table = ItemTable(["entry"], [None], [0], [0], [nbytes])
    packed = struct.pack(f"<{len(checksums)}I", *checksums)
    ref = write_manifest(storage, Manifest(_NEXT_ID, 0, "torch_dist", "", {name: nbytes}, [packed], table))
    publish(storage, b"the next metadata", claimed, [ref])


def check_is_only(storage: Storage, names: set[str]) -> None:
    """Check that a directory holds the files of one checkpoint and the owner record, nothing else."""
    found = set(storage.list())
    for folder in (FOLDER, *(FOLDER + name for name in storage.list(FOLDER) if name.endswith("/"))):
        found |= {folder + name for name in storage.list(folder)}
    folders = {FOLDER, *(name.rpartition("/")[0] + "/" for name in names if "/" in name)}
    require(found == names | folders | {_OWNER}, f"left: {found - names - folders}, missing: {names - found}")
    require(not leftovers(storage), "there are leftovers")


@dataclass
class Laboratory:
    """Checks the states that one recorded save may leave, each distinct one once."""

    recording: Recording
    checked: set[tuple[State, bool]] = field(default_factory=set)
    on_disk: set[State] = field(default_factory=set)
    num_points: int = 0
    """States, those that are the same at several points of the log counted at each."""

    def __post_init__(self) -> None:
        self._commits: dict[bytes, dict[str, bytes]] = {}
        self._verified: set[frozenset[tuple[str, bytes]]] = set()
        self.root = self.recording.setting.checkpoint
        self._metadata = f"{self.root}/{METADATA}"
        self.new = self._read_commit(self.recording.after)
        beside = step_path(0) + "/"
        self._beside = {
            path: data
            for path, data in self.recording.before.items()
            if path.startswith(beside) and not self.root.startswith(step_path(0))
        }
        # What may be found before: what was there, and what a save that crashed may have published.
        self._allowed: set[bytes | None] = {self.new}
        for tree in (self.recording.before, self.recording.disk().tree()):
            is_there = tree.get(self._metadata) is not None
            self._allowed.add(self._read_commit(tree) if is_there else None)

    def _read_commit(self, tree: Tree) -> bytes:
        """Learn what belongs to the checkpoint of a tree; returns its metadata."""
        names = verify(MemoryStorage(tree, self.root))
        files = {f"{self.root}/{name}": tree[f"{self.root}/{name}"] for name in names}
        metadata = files[self._metadata]
        assert metadata is not None
        self._commits[metadata] = {path: data for path, data in files.items() if data is not None}
        return metadata

    def check(self, state: State, *, has_returned: bool) -> bool:
        """Check one state; returns whether it is new.

        Args:
            state: What a crash leaves.
            has_returned: Whether the publication had returned before the crash.

        Raises:
            Finding: Something does not hold.
            CheckpointError: The next save failed, or the verification.
        """
        self.num_points += 1
        if (state, has_returned) in self.checked:
            return False
        self.checked.add((state, has_returned))
        tree = dict(state)
        self.check_committed(tree, has_returned=has_returned)
        storage = MemoryStorage(tree, self.root)
        save_again(storage)
        check_is_only(storage, verify(storage))
        return True

    def check_committed(self, tree: Tree, *, has_returned: bool) -> int | None:
        """Check that a tree holds what it must; returns the seed of its checkpoint, or None without one."""
        self.check_beside(tree)
        metadata = tree.get(self._metadata)
        require(metadata == self.new or not has_returned, "the checkpoint was published, and it is not there")
        require(metadata in self._allowed, "the old checkpoint is gone, and the new one is not there")
        if metadata is None:
            return None
        files = self._commits[metadata]
        for path, data in files.items():
            found = tree.get(path)
            require(found is not None, f"{path} is missing")
            require(found == data, f"{path} has other bytes")
        key = frozenset(files.items())
        if key not in self._verified:
            names = verify(MemoryStorage(tree, self.root))
            assert {f"{self.root}/{name}" for name in names} == files.keys()
            self._verified.add(key)
        return NEW if metadata == self.new else OLD

    def check_beside(self, tree: Tree) -> None:
        """Check that an earlier step is what it was."""
        harmed = [path for path, data in self._beside.items() if tree.get(path, b"gone") != data]
        require(not harmed, f"of an earlier step, {harmed} are not what they were")

    def run(self, on_disk: Callable[[Tree], object] | None = None, first: int = 0) -> None:
        """Check what may be found after every prefix of the recorded operations, by every loss.

        Args:
            on_disk: Called with each distinct state that is left when only the processes die, and with each
                that a power failure around the publication leaves.
            first: Length of the shortest prefix.

        Raises:
            Finding: Something does not hold.
        """
        disk = self.recording.disk()
        for count in range(len(self.recording.entries) + 1):
            if count:
                entry = self.recording.entries[count - 1]
                disk.apply(entry)
                if entry["op"] == "open" or count < first:
                    continue
            try:
                self._check_point(disk, count, on_disk)
            except Exception as error:
                entry = self.recording.entries[count - 1] if count else {"op": "the beginning"}
                where = {name: value for name, value in entry.items() if name != "data"}
                text = f"{type(error).__name__}: {error}"
                raise Finding(
                    f"{self.recording.setting}, after operation {count}, {where}: {text}"
                ) from error

    def _check_point(self, disk: Disk, count: int, on_disk: Callable[[Tree], object] | None) -> None:
        published, durable = self.recording.published, self.recording.durable
        left = frozenset(disk.tree().items())
        is_near = published - 3 <= count <= durable + 1
        for state in (left, *disk.losses()):
            self.check(state, has_returned=count >= durable)
            if on_disk is not None and (state is left or is_near) and state not in self.on_disk:
                self.on_disk.add(state)
                on_disk(dict(state))


class RealDirectory:
    """Checks a state in a real directory: a load, and the next save, with the real writer and reader.

    Args:
        folder: Empty; for one state after the other.
        laboratory: Says what must be there.
        writer: Saves.
    """

    def __init__(self, folder: Path, laboratory: Laboratory, writer: StorageWriter) -> None:
        self._folder = folder
        self._laboratory = laboratory
        self._writer = writer
        self._count = 0

    def __call__(self, tree: Tree) -> None:
        """Check one state."""
        self._count += 1
        # Not the same path again, where the writer has saved before.
        root = self._folder / str(self._count)
        write_tree(tree, root)
        seed = self._laboratory.check_committed(tree, has_returned=False)
        check_directory(root, self._laboratory.recording.setting, seed, self._writer)
        shutil.rmtree(root)


def check_directory(root: Path, setting: Setting, seed: int | None, writer: StorageWriter) -> None:
    """Check a real directory that a save was killed in.

    Args:
        root: The lab's root.
        setting: Which save.
        seed: What its checkpoint holds; None: there is none.
        writer: For the next save.
    """
    path, ranks = root / setting.checkpoint, range(setting.world)
    if seed is None:
        require(not (path / METADATA).exists(), "there is a checkpoint")
    else:
        require(
            same(load(path, setting.world), state_of(seed, ranks)), "it loads otherwise than it was saved"
        )
    save_next(writer, path, setting.world)
    require(same(load(path, setting.world), state_of(NEXT, ranks)), "the next save loads otherwise")
    assert_is_clean(path)

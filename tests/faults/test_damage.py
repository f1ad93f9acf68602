"""What was committed and is not as it was: found by `verify`, and refused on load before it is believed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo

from distckpt import Checkpointer, CheckpointError, IntegrityError, StorageReader, WriteError
from distckpt.commit import claim, leftovers, publish, reclaim, sweep
from distckpt.integrity import Extent, extents, find_record, load_integrity, read_manifest
from distckpt.manifest import METADATA, TRAILER, record_name, seal, unseal
from distckpt.storage import open_storage
from distckpt.verification import Finding, Report, survey, verify
from faults.checkpoints import KIB, empty_like, error_of, load, outcome_of, same, save, state_of
from faults.conftest import OpenWriter
from faults.in_process_ranks import parts_of, save_as_ranks
from faults.memory_storage import MemoryStorage

OWNER = ".distckpt/owner"
FLIPS = 10_000
FLIPS_ON_DISK = 300
Files = dict[str, bytes]


class Committed:
    """A checkpoint of two ranks, and what its bytes are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = state_of(7, 256 * KIB, tensors=6)
        save_as_ranks(path, parts_of(self.state))
        self.files: Files = MemoryStorage.of(path).files
        self.images = sorted(name for name in self.files if ".distcp" in name and "/" not in name)
        self.manifests = sorted(name for name in self.files if "/rank-" in name)
        self.record = record_name(self.files[METADATA])
        self.save_id = self.manifests[0].split("/")[1]
        self.items: dict[str, list[tuple[str, Extent]]] = {}
        storage = MemoryStorage(self.files)
        for name in self.manifests:
            manifest = read_manifest(storage, name, hashlib.sha256(self.files[name]).hexdigest())
            for file, _, found in extents(storage, name, manifest):
                self.items[file] = [(manifest["items"]["fqns"][item.number], item) for item in found]

    def item_at(self, file: str, position: int) -> str | None:
        """Return the name of the item at a byte of an image; None between items."""
        for fqn, item in self.items.get(file, []):
            if item.offset <= position < item.offset + item.nbytes:
                return fqn
        return None

    def is_read(self, file: str, position: int) -> bool:
        """Say whether a load reads a byte: all but what lies between items, and the owner."""
        return file != OWNER and (file not in self.items or self.item_at(file, position) is not None)

    @contextlib.contextmanager
    def replaced(self, name: str, data: bytes) -> Iterator[None]:
        """Put other bytes into a file on disk, for a while."""
        path = self.path / name
        path.write_bytes(data)
        try:
            yield
        finally:
            path.write_bytes(self.files[name])


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    return Committed(tmp_path_factory.mktemp("damage") / "checkpoint")


@pytest.fixture
def copied(committed: Committed, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may do to as it pleases."""
    target = tmp_path / "copy"
    shutil.copytree(committed.path, target)
    return target


def verified(files: Files) -> Report:
    return verify(MemoryStorage(files), jobs=1)


def real(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.kind != "extra"]


def flipped(data: bytes, position: int, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[position] ^= 1 << bit
    return bytes(damaged)


def assert_found(committed: Committed, name: str, position: int, report: Report, where: str) -> None:
    """Assert that one flipped bit is found where it is, and nothing else."""
    assert report.status in {"damaged", "unverifiable"}, where
    findings = real(report)
    assert [finding.file for finding in findings] == [name], (where, findings)
    finding = findings[0]
    assert finding.start <= position < finding.end, (where, finding)
    assert finding.item == committed.item_at(name, position), (where, finding)


def restored(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Return what `Checkpointer.restore` loads from a checkpoint."""
    found = empty_like(state)
    link = path.parent / "root" / "step-00000001"
    link.parent.mkdir(exist_ok=True)
    shutil.copytree(path, link)
    try:
        with Checkpointer(link.parent) as checkpointer:
            assert checkpointer.restore(found) == 1
    finally:
        shutil.rmtree(link.parent)
    return found


def test_a_whole_checkpoint_is_whole(committed: Committed) -> None:
    report = verify(open_storage(committed.path), jobs=2)
    assert report == Report(
        report.url, "complete", [],
        num_files=len(committed.files) - 1,
        num_items=8,
        nbytes=sum(len(data) for name, data in committed.files.items() if name != OWNER),
        seconds=report.seconds,
        has_checksums=True,
    )  # fmt: skip
    assert len(committed.images) == len(committed.manifests) == 2
    assert verified(committed.files).status == "complete"
    assert same(load(committed.path, committed.state), committed.state)
    assert same(restored(committed.path, committed.state), committed.state)


# Every class of bytes, one after the other.


@pytest.mark.slow
def test_every_byte_of_metadata_and_records_counts(committed: Committed) -> None:
    names = [METADATA, committed.record, OWNER, *committed.manifests]
    for name in names:
        data = committed.files[name]
        for position in range(len(data)):
            # Every bit of the record, which says its own version; one of the others, which a digest covers.
            for bit in range(8) if name == committed.record else [position % 8]:
                files = {**committed.files, name: flipped(data, position, bit)}
                where = f"{name}, byte {position}, bit {bit}"
                assert_found(committed, name, position, verified(files), where)
                if name == OWNER:
                    continue
                with pytest.raises(CheckpointError):
                    load_integrity(MemoryStorage(files), files[METADATA])
    assert verified(committed.files).status == "complete"


def test_a_flip_of_the_version_is_damage_and_no_other_version(committed: Committed) -> None:
    data = committed.files[committed.record]
    position = data.index(b'"version":3') + len(b'"version":')
    report = verified({**committed.files, committed.record: flipped(data, position, 0)})
    assert report.status == "damaged"


@pytest.mark.slow
def test_every_class_of_bytes_of_an_image_counts(committed: Committed) -> None:
    """For each item: the first and last bytes of its header, payload and trailer, and of the gap after it."""
    classes = set()
    for name, items in committed.items.items():
        data = committed.files[name]
        for number, (_, item) in enumerate(items):
            end = item.offset + item.nbytes
            gap_end = items[number + 1][1].offset if number + 1 < len(items) else len(data)
            payload = -(-(item.offset + 300) // 64) * 64
            edges = {
                "header": (item.offset, item.offset + 30),
                "payload": (payload, item.offset + item.nbytes // 2),
                "trailer": (end - 22, end),
                "gap": (end, gap_end),
            }
            for kind, (first, last) in edges.items():
                for position in {first, (first + last) // 2, last - 1} if last > first else ():
                    classes.add(kind)
                    for bit in range(8):
                        damaged = flipped(data, position, bit)
                        where = f"{name}, byte {position} ({kind}), bit {bit}"
                        report = verified({**committed.files, name: damaged})
                        assert_found(committed, name, position, report, where)
                        if bit:
                            continue
                        with committed.replaced(name, damaged):
                            error = outcome_of(lambda: load(committed.path, committed.state))
                        if kind == "gap":
                            assert error is None, where
                        else:
                            assert isinstance(error, IntegrityError), where
                            assert error.file == name
                            assert error.item == committed.item_at(name, position)
    assert classes == {"header", "payload", "trailer", "gap"}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_no_flip_is_missed(committed: Committed, rng: Random) -> None:
    names = list(committed.files)
    sizes = [len(committed.files[name]) for name in names]
    for number in range(FLIPS):
        # Half of them in the small files, of which few bytes would be drawn otherwise.
        weights = sizes if number % 2 else [min(size, 4 * KIB) for size in sizes]
        name = rng.choices(names, weights)[0]
        data = committed.files[name]
        position, bit = rng.randrange(len(data)), rng.randrange(8)
        report = verified({**committed.files, name: flipped(data, position, bit)})
        assert_found(committed, name, position, report, f"{name}, byte {position}, bit {bit}")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_no_flip_of_what_is_read_is_missed_on_load(committed: Committed, rng: Random) -> None:
    names = list(committed.files)
    refused = 0
    for number in range(FLIPS_ON_DISK):
        name = names[number % len(names)]
        data = committed.files[name]
        position, bit = rng.randrange(len(data)), rng.randrange(8)
        where = f"{name}, byte {position}, bit {bit}"
        with committed.replaced(name, flipped(data, position, bit)):
            assert_found(committed, name, position, verify(open_storage(committed.path), jobs=2), where)
            error = outcome_of(lambda: load(committed.path, committed.state))
        assert (error is not None) == committed.is_read(name, position), where
        refused += error is not None
    assert refused > FLIPS_ON_DISK // 2
    assert same(load(committed.path, committed.state), committed.state)


@pytest.mark.parametrize("which", ["metadata", "trailer", "record", "manifest", "image"])
def test_restore_refuses_what_is_damaged(committed: Committed, which: str) -> None:
    name, position = {
        "metadata": (METADATA, 100),
        "trailer": (METADATA, len(committed.files[METADATA]) - 2),
        "record": (committed.record, 60),
        "manifest": (committed.manifests[1], 60),
        "image": (committed.images[1], 1000),
    }[which]
    with committed.replaced(name, flipped(committed.files[name], position, 5)):
        error = error_of(lambda: restored(committed.path, committed.state))
    assert isinstance(error, IntegrityError)
    # The root of a copy has the same names below it.
    assert error.file == name


# Whole files.


@pytest.mark.slow
def test_a_truncated_file_is_found(committed: Committed, rng: Random) -> None:
    for name, data in committed.files.items():
        lengths = {0, 1, len(data) // 2, len(data) - 1, *(rng.randrange(len(data)) for _ in range(20))}
        lengths |= {item.offset for _, item in committed.items.get(name, [])}
        for length in lengths:
            report = verified({**committed.files, name: data[:length]})
            where = f"{name}, cut to {length} bytes"
            assert report.status == "damaged", where
            assert {finding.file for finding in real(report)} == {name}, where
            if name in committed.items:
                assert {finding.kind for finding in report.findings} == {"size"}, where
                assert (report.findings[0].start, report.findings[0].end) == (length, len(data)), where
                lost = [fqn for fqn, item in committed.items[name] if item.offset + item.nbytes > length]
                assert [found.item for found in report.findings if found.item is not None] == lost, where
            with committed.replaced(name, data[:length]):
                error = outcome_of(lambda: load(committed.path, committed.state))
                assert (error is not None) == (name != OWNER), where


def test_a_longer_file_is_found(committed: Committed) -> None:
    for name, data in committed.files.items():
        for more in (b"\0", b"more" * 2000):
            report = verified({**committed.files, name: data + more})
            assert [finding.file for finding in report.findings] == [name]
            if name in committed.items:
                finding = report.findings[0]
                assert (finding.kind, finding.start, finding.end) == ("size", len(data), len(data + more))


def test_a_missing_file_is_found(committed: Committed) -> None:
    for name in committed.files:
        report = verified({other: data for other, data in committed.files.items() if other != name})
        if name == OWNER:
            assert report.status == "complete", "it says who may write, and nothing of the checkpoint"
            continue
        if name == METADATA:
            assert report.status == "partial"
            continue
        assert report.status == "damaged"
        assert {(finding.kind, finding.file) for finding in report.findings} == {("missing", name)}
        lost = [fqn for fqn, _ in committed.items.get(name, [])]
        assert [finding.item for finding in report.findings if finding.item is not None] == lost


def test_an_extra_file_is_found(committed: Committed) -> None:
    extra = {
        "__7_0.distcp.0a": b"left by a save that never ended",
        ".distckpt/0a/rank-00007.json": b"{}",
        f".distckpt/{committed.save_id}/failed-rank-00001.json": b"{}",
        f".distckpt/commit-{'0' * 64}.json": b"{}",
        ".metadata.0a.tmp": b"",
    }
    not_ours = {"README": b"notes", "sub/__0_0.distcp": b"", "model.safetensors": b""}
    report = verified({**committed.files, **extra, **not_ours})
    assert report.status == "complete"
    assert {(found.kind, found.file, found.end) for found in report.findings} == {
        ("extra", name, len(data)) for name, data in extra.items()
    }


def test_extra_is_what_a_sweep_removes(copied: Path) -> None:
    for name in ("__7_0.distcp.0a", ".metadata.0a.tmp", ".distckpt/0a/rank-00007.json", "README"):
        (copied / name).parent.mkdir(exist_ok=True)
        (copied / name).write_bytes(b"{}")
    (copied / ".distckpt" / "0b").mkdir()
    storage = open_storage(copied)
    swept = {name for name in leftovers(storage) if not name.endswith("0a/")}
    assert {finding.file for finding in verify(storage).findings} == swept
    assert len(swept) == 4
    sweep(storage, "0c")
    assert verify(storage).findings == []
    assert (copied / "README").exists()


def test_exchanged_files_are_found(committed: Committed) -> None:
    for names in (committed.images, committed.manifests):
        first, second = names
        files = {**committed.files, first: committed.files[second], second: committed.files[first]}
        assert {finding.file for finding in real(verified(files))} == {first, second}


def test_a_zeroed_file_is_found(committed: Committed) -> None:
    for name, data in committed.files.items():
        report = verified({**committed.files, name: bytes(len(data))})
        assert {finding.file for finding in real(report)} == {name}
        if name in committed.items:
            assert [finding.item for finding in report.findings] == [fqn for fqn, _ in committed.items[name]]


# Records of others.


def test_exchanged_records_are_found(committed: Committed, tmp_path: Path, open_writer: OpenWriter) -> None:
    save(open_writer(), tmp_path, state_of(8, 16 * KIB))
    other = MemoryStorage.of(tmp_path).files
    files = {**committed.files, committed.record: other[record_name(other[METADATA])]}
    report = verified(files)
    assert report.status == "damaged"
    with committed.replaced(committed.record, files[committed.record]):
        assert isinstance(error_of(lambda: load(committed.path, committed.state)), IntegrityError)


def test_exchanged_records_of_one_directory_are_found(committed: Committed, tmp_path: Path) -> None:
    save_as_ranks(tmp_path, parts_of(committed.state), use_collectives=False)
    files = MemoryStorage.of(tmp_path).files
    assert verified(files).status == "complete"
    first, second = (record_name(files[f"__{rank}{METADATA}"]) for rank in range(2))
    report = verified({**files, first: files[second], second: files[first]})
    assert report.status == "damaged"
    assert {finding.file for finding in real(report)} == {first, second}


def test_a_manifest_of_another_save_is_found(
    committed: Committed, tmp_path: Path, open_writer: OpenWriter
) -> None:
    save(open_writer(), tmp_path, state_of(8, 16 * KIB))
    other = MemoryStorage.of(tmp_path).files
    theirs = next(name for name in other if "/rank-" in name)
    # All digests are right.
    fields = unseal(MemoryStorage({}), "record", committed.files[committed.record])
    fields["manifests"] = [{"name": theirs, "sha256": hashlib.sha256(other[theirs]).hexdigest()}]
    files = {**committed.files, theirs: other[theirs], committed.record: resealed(fields)}
    report = verified(files)
    assert report.status == "damaged"
    assert {finding.kind for finding in real(report)} == {"missing"}
    (committed.path / theirs).parent.mkdir()
    try:
        (committed.path / theirs).write_bytes(other[theirs])
        with committed.replaced(committed.record, files[committed.record]):
            error = error_of(lambda: load(committed.path, committed.state))
    finally:
        shutil.rmtree((committed.path / theirs).parent)
    assert isinstance(error, IntegrityError)


def resealed(fields: dict[str, Any]) -> bytes:
    return seal({name: value for name, value in fields.items() if name not in {"version", "sha256"}})


def save_with_torch(path: Path, state: dict[str, Any]) -> None:
    """Save with torch's own writer, over whatever lies there."""
    with warnings.catch_warnings():
        # That it overwrites is the point.
        warnings.simplefilter("ignore")
        state_dict_saver.save(state, storage_writer=FileSystemWriter(path), checkpoint_id=str(path))


def test_metadata_of_another_tool_is_unverifiable(copied: Path, committed: Committed) -> None:
    state = state_of(9, 16 * KIB)
    save_with_torch(copied, state)
    report = verify(open_storage(copied))
    assert (report.status, report.findings) == ("unverifiable", [])
    assert survey(open_storage(copied)).status == "unverifiable"
    assert same(load(copied, state), state)


def test_a_copy_verifies(committed: Committed, copied: Path) -> None:
    assert verify(open_storage(copied)).status == "complete"
    assert verify(open_storage(copied)).findings == []
    moved = copied.with_name("moved")
    copied.rename(moved)
    assert verify(open_storage(moved)).findings == []
    assert same(load(moved, committed.state), committed.state)


def test_records_before_seals_are_refused_by_name(committed: Committed) -> None:
    fields = unseal(MemoryStorage({}), "record", committed.files[committed.record])
    old = {name: value for name, value in fields.items() if name != "sha256"} | {"version": 2}
    data = json.dumps(old, separators=(",", ":")).encode()
    report = verified({**committed.files, committed.record: data})
    assert report.status == "unverifiable"
    assert [finding.file for finding in report.findings] == [committed.record]
    assert "has version 2; this distckpt reads version 3" in report.findings[0].message
    with committed.replaced(committed.record, data):
        error = error_of(lambda: load(committed.path, committed.state))
    assert "has version 2; this distckpt reads version 3" in str(error)


# What somebody made to do harm.


class Harm:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("reader", ["load", "restore"])
@pytest.mark.parametrize("end", [TRAILER, b""], ids=["trailer", "none"])
def test_metadata_that_does_not_match_is_never_unpickled(
    copied: Path, committed: Committed, tmp_path: Path, end: bytes, reader: str
) -> None:
    target = tmp_path / "harm"
    harmful = pickle.dumps(Harm(target))
    pickle.loads(harmful)
    target.rmdir()
    (copied / METADATA).write_bytes(harmful + end)
    read = load if reader == "load" else restored
    error = error_of(lambda: read(copied, committed.state))
    assert not target.exists()
    if end:
        assert isinstance(error, IntegrityError)
        assert verify(open_storage(copied)).status == "damaged"
    else:
        # What has no record may be another tool's: read, by an unpickler that builds nothing but Metadata.
        assert "mkdir" in str(error)
        assert verify(open_storage(copied)).status == "unverifiable"
    assert not target.exists()


@pytest.mark.parametrize("has_record", [True, False])
def test_metadata_with_a_record_that_matches_runs_nothing(tmp_path: Path, has_record: bool) -> None:
    target = tmp_path / "harm"
    folder = tmp_path / "checkpoint"
    storage = open_storage(folder)
    storage.prepare()
    publish(storage, pickle.dumps(Harm(target)), claim(storage, "0a"), [])
    if not has_record:
        (folder / METADATA).write_bytes(pickle.dumps(Harm(target)))
    error = error_of(lambda: load(folder, state_of(1)))
    assert "mkdir" in str(error)
    assert not target.exists()
    for _ in (verify(storage), survey(storage)):
        assert not target.exists()


class Command:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_an_object_that_runs_a_command_is_refused_by_name(tmp_path: Path, open_writer: OpenWriter) -> None:
    target = tmp_path / "harm"
    command = Command(f"mkdir {target}")
    folder = tmp_path / "checkpoint"
    save(open_writer(), folder, {"weight": torch.ones(4), "extra": {"hook": command}})
    assert verify(open_storage(folder)).status == "complete"
    state = {"weight": torch.zeros(4), "extra": {"hook": None}}
    error = error_of(lambda: state_dict_loader.load(state, storage_reader=StorageReader(folder)))
    assert "'extra.hook'" in str(error)
    assert "posix.system" in str(error)
    assert not target.exists()
    shutil.copytree(folder, tmp_path / "root" / "step-00000001")
    with Checkpointer(tmp_path / "root") as checkpointer:
        error = error_of(lambda: checkpointer.restore(state))
    assert "posix.system" in str(error)
    assert not target.exists()
    # Such an object does run when it is trusted.
    reader = StorageReader(folder, ckpt_weights_only=False)
    with contextlib.suppress(Exception):
        state_dict_loader.load(state, storage_reader=reader)
    assert target.is_dir()


EVIL_NAMES = ["../outside", "/{outside}", "sub/../../outside", "a\0b", "..", ".", "", "sub//x"]


def names_below(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the files below a folder, with their times and bytes."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("name", EVIL_NAMES)
@pytest.mark.parametrize("place", ["manifest", "file", "metadata"])
def test_a_name_that_leads_outside_is_refused(
    copied: Path, committed: Committed, tmp_path: Path, name: str, place: str, open_writer: OpenWriter
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "data").write_bytes(b"of somebody else")
    (tmp_path / "outside.bin").write_bytes(b"of somebody else")
    before = names_below(outside)
    evil = name.format(outside=str(outside)[1:])
    fields = unseal(MemoryStorage({}), "record", committed.files[committed.record])
    if place == "manifest":
        fields["manifests"][0]["name"] = evil
        (copied / committed.record).write_bytes(resealed(fields))
    elif place == "file":
        manifest = json.loads(committed.files[committed.manifests[0]])
        manifest["files"] = {evil: next(iter(manifest["files"].values()))}
        data = json.dumps(manifest).encode()
        (copied / committed.manifests[0]).write_bytes(data)
        fields["manifests"][0]["sha256"] = hashlib.sha256(data).hexdigest()
        (copied / committed.record).write_bytes(resealed(fields))
    else:
        (copied / METADATA).write_bytes(pointing_to(evil, committed.files[METADATA]))
    storage = open_storage(copied)
    report = verify(storage)
    survey(storage)
    if place != "metadata":
        assert report.status == "damaged"
    error = error_of(lambda: load(copied, committed.state))
    assert isinstance(error, IntegrityError)
    with contextlib.suppress(CheckpointError):
        leftovers(storage)
        sweep(storage, "0c")
    with contextlib.suppress(CheckpointError):
        save(open_writer(), copied, committed.state)
    assert names_below(outside) == before
    assert (tmp_path / "outside.bin").read_bytes() == b"of somebody else"


def pointing_to(name: str, metadata: bytes) -> bytes:
    """Return metadata, without our mark, whose items lie in the file `name`."""
    parsed = pickle.load(io.BytesIO(metadata))
    for index, info in parsed.storage_data.items():
        parsed.storage_data[index] = _StorageInfo(name, info.offset, info.length)
    return pickle.dumps(parsed)


def test_items_in_a_file_outside_are_not_read(tmp_path: Path) -> None:
    folder, state = tmp_path / "checkpoint", state_of(1, 16 * KIB)
    save_with_torch(folder, state)
    metadata = (folder / METADATA).read_bytes()
    shutil.copy(folder / "__0_0.distcp", tmp_path / "outside")
    for name in ("../outside", str(tmp_path / "outside"), "sub/../../outside"):
        (folder / METADATA).write_bytes(pointing_to(name, metadata))
        error = error_of(lambda: load(folder, state))
        assert isinstance(error, IntegrityError)
        assert "does not lie within" in str(error)


@pytest.mark.parametrize("nbytes", [-1, 1 << 30, 1 << 60, 1 << 64])
def test_an_item_that_is_longer_than_its_file_or_than_memory_is_damage(tmp_path: Path, nbytes: int) -> None:
    folder, state = tmp_path / "checkpoint", state_of(1, 16 * KIB)
    save_with_torch(folder, state)
    parsed = pickle.loads((folder / METADATA).read_bytes())
    index, info = next(iter(parsed.storage_data.items()))
    parsed.storage_data[index] = _StorageInfo(info.relative_path, info.offset, nbytes)
    (folder / METADATA).write_bytes(pickle.dumps(parsed))
    error = error_of(lambda: load(folder, state))
    assert isinstance(error, IntegrityError)
    assert f"of {nbytes} bytes" in str(error)


def link_records(folder: Path, outside: Path, committed: Committed) -> None:
    shutil.copytree(folder / ".distckpt", outside, dirs_exist_ok=True)
    shutil.rmtree(folder / ".distckpt")
    (folder / ".distckpt").symlink_to(outside)


def link_save(folder: Path, outside: Path, committed: Committed) -> None:
    place = folder / ".distckpt" / committed.save_id
    shutil.copytree(place, outside, dirs_exist_ok=True)
    shutil.rmtree(place)
    place.symlink_to(outside)


def link_foreign_save(folder: Path, outside: Path, committed: Committed) -> None:
    (folder / ".distckpt" / "0a").symlink_to(outside)


def link_file(name_of: Callable[[Committed], str]) -> Callable[[Path, Path, Committed], None]:
    def link(folder: Path, outside: Path, committed: Committed) -> None:
        path = folder / name_of(committed)
        shutil.copy(path, outside / "linked")
        path.unlink()
        path.symlink_to(outside / "linked")

    return link


def link_new_image(folder: Path, outside: Path, committed: Committed) -> None:
    (folder / "__0_0.distcp").unlink(missing_ok=True)
    (folder / "__0_0.distcp").symlink_to(outside / "new")
    (folder / "__0_1.distcp").symlink_to(outside / "data")


LINKS = {
    ".distckpt": link_records,
    ".distckpt/id": link_save,
    ".distckpt/other": link_foreign_save,
    "image": link_file(lambda committed: committed.images[0]),
    "metadata": link_file(lambda committed: METADATA),
    "record": link_file(lambda committed: committed.record),
    "manifest": link_file(lambda committed: committed.manifests[1]),
    "owner": link_file(lambda committed: OWNER),
    "new image": link_new_image,
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", LINKS)
def test_links_lead_to_nothing_that_is_written_or_removed(
    copied: Path, committed: Committed, tmp_path: Path, kind: str, open_writer: OpenWriter
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "data").write_bytes(b"of somebody else")
    (outside / "__0_0.distcp").write_bytes(b"of somebody else")
    LINKS[kind](copied, outside, committed)
    before = names_below(outside)
    storage = open_storage(copied)
    verify(storage, jobs=2)
    survey(storage)
    outcome_of(lambda: load(copied, committed.state))
    assert names_below(outside) == before
    with contextlib.suppress(CheckpointError):
        sweep(storage, "0c")
    assert names_below(outside) == before
    state = state_of(10, 64 * KIB)
    error = outcome_of(lambda: save(open_writer(), copied, state))
    assert names_below(outside) == before
    if kind == ".distckpt":
        # A link in place of the folder is not followed: the save is refused, and says why.
        assert isinstance(error, WriteError)
    else:
        assert error is None
        assert same(load(copied, state), state)
        with contextlib.suppress(CheckpointError):
            sweep(storage, "0d")
    (copied / METADATA).unlink()
    with contextlib.suppress(CheckpointError):
        reclaim(storage, "0e", idle_s=0.0)
    assert names_below(outside) == before


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


PLACES: dict[str, Callable[[Committed], str]] = {
    "metadata": lambda committed: METADATA,
    "record": lambda committed: committed.record,
    "manifest": lambda committed: committed.manifests[0],
    "image": lambda committed: committed.images[0],
    "owner": lambda committed: OWNER,
    "partial": lambda committed: ".metadata.0a.tmp",
    "new image": lambda committed: "__0_0.distcp",
    "part": lambda committed: "__0.metadata",
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("make", [make_fifo, Path.mkdir], ids=["fifo", "directory"])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_file_stops_nobody(
    copied: Path, committed: Committed, place: str, make: Callable[[Path], None], open_writer: OpenWriter
) -> None:
    name = PLACES[place](committed)
    path = copied / name
    path.unlink(missing_ok=True)
    make(path)
    storage = open_storage(copied)
    report = verify(storage, jobs=2)
    if place in {"metadata", "record", "manifest", "image", "owner"}:
        assert report.status == "damaged"
        assert name in {finding.file for finding in report.findings}
    if place in {"metadata", "record", "manifest", "image"}:
        assert outcome_of(lambda: load(copied, committed.state)) is not None
    else:
        assert same(load(copied, committed.state), committed.state)
    survey(storage)
    with contextlib.suppress(CheckpointError):
        sweep(storage, "0c")
    state = state_of(10, 64 * KIB)
    error = outcome_of(lambda: save(open_writer(), copied, state))
    if error is None:
        assert same(load(copied, state), state)
    else:
        assert isinstance(error, WriteError)
        assert name in str(error)
    with contextlib.suppress(CheckpointError):
        reclaim(storage, "0d", idle_s=0.0)


def malformed() -> dict[str, Callable[[dict[str, Any]], object]]:
    """Return manifests whose digests are right, and which no save has written."""

    def change(**fields: Any) -> Callable[[dict[str, Any]], object]:
        return lambda manifest: manifest.update(fields)

    def change_items(**fields: Any) -> Callable[[dict[str, Any]], object]:
        return lambda manifest: manifest["items"].update(fields)

    return {
        "files: list": change(files=[]),
        "files: null": change(files=None),
        "size: text": lambda manifest: manifest["files"].update(dict.fromkeys(manifest["files"], "12")),
        "size: negative": lambda manifest: manifest["files"].update(dict.fromkeys(manifest["files"], -1)),
        "size: huge": lambda manifest: manifest["files"].update(dict.fromkeys(manifest["files"], 10**400)),
        "items: list": change(items=[]),
        "items: missing": lambda manifest: manifest.pop("items"),
        "fqns: short": change_items(fqns=[]),
        "fqns: missing": lambda manifest: manifest["items"].pop("fqns"),
        "offsets: text": change_items(offsets=["a"] * 5),
        "offsets: null": change_items(offsets=None),
        "sizes: negative": lambda manifest: manifest["items"]["sizes"].__setitem__(0, -5),
        "sizes: fraction": lambda manifest: manifest["items"]["sizes"].__setitem__(0, 0.5),
        "item_files: beyond": lambda manifest: manifest["items"]["item_files"].__setitem__(0, 99),
        "item_files: negative": lambda manifest: manifest["items"]["item_files"].__setitem__(0, -1),
        "item_files: fraction": lambda manifest: manifest["items"]["item_files"].__setitem__(0, 0.0),
        "checksums: number": change(checksums=[5]),
        "checksums: no base64": change(checksums=["%%%%"]),
        "checksums: short": change(checksums=["AAAA"]),
    }


@pytest.mark.parametrize("kind", malformed())
def test_a_manifest_that_makes_no_sense_is_refused(committed: Committed, kind: str) -> None:
    name = committed.manifests[0]
    manifest = json.loads(committed.files[name])
    malformed()[kind](manifest)
    files = with_manifest(committed, name, json.dumps(manifest).encode())
    report = verified(files)
    assert report.status == "damaged"
    if kind == "size: huge":
        # Of the file, too, that can be.
        assert {finding.file for finding in real(report)} == set(manifest["files"])
        return
    assert name in {finding.file for finding in real(report)}
    survey(MemoryStorage(files))
    if not kind.startswith("fqns"):
        with pytest.raises(IntegrityError, match="contradicts itself"):
            load_integrity(MemoryStorage(files), files[METADATA])


JUNK: tuple[Any, ...] = (None, -1, 10**30, 1.5, float("nan"), "x", "../x", "", [], {}, True, [[1]])


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) in a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places_in(value[key])


@pytest.mark.slow
def test_junk_with_right_digests_breaks_nothing(committed: Committed, rng: Random) -> None:
    name = committed.manifests[0]
    fields = unseal(MemoryStorage({}), "record", committed.files[committed.record])
    for number in range(1000):
        value = fields if number % 4 == 0 else json.loads(committed.files[name])
        value = json.loads(json.dumps(value))
        container, key = rng.choice(list(places_in(value)))
        was, container[key] = container[key], rng.choice(JUNK)
        where = f"{key!r}: {was!r} became {container[key]!r}"
        if number % 4 == 0:
            files = {**committed.files, committed.record: resealed(value)}
        else:
            files = with_manifest(committed, name, json.dumps(value).encode())
        try:
            verified(files)
            survey(MemoryStorage(files))
            with contextlib.suppress(CheckpointError):
                load_integrity(MemoryStorage(files), files[METADATA])
            with contextlib.suppress(CheckpointError):
                leftovers(MemoryStorage(files))
        except Exception as error:
            raise AssertionError(where) from error


def test_records_nested_without_end_are_refused(committed: Committed) -> None:
    deep = b'{"version":3,"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    files = with_manifest(committed, committed.manifests[0], deep)
    assert verified(files).status == "damaged"
    with pytest.raises(IntegrityError):
        load_integrity(MemoryStorage(files), files[METADATA])
    body = deep[:-1]
    sealed = body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}'
    for record in (deep, sealed):
        files = {**committed.files, committed.record: record}
        assert verified(files).status == "damaged"
        with pytest.raises(IntegrityError):
            find_record(MemoryStorage(files), files[METADATA])


def with_manifest(committed: Committed, name: str, data: bytes) -> Files:
    """Return the files with another manifest, and a record that bears its digest."""
    fields = unseal(MemoryStorage({}), "record", committed.files[committed.record])
    for ref in fields["manifests"]:
        if ref["name"] == name:
            ref["sha256"] = hashlib.sha256(data).hexdigest()
    return {**committed.files, name: data, committed.record: resealed(fields)}


def test_a_checkpoint_without_checksums_is_compared_by_size(tmp_path: Path, open_writer: OpenWriter) -> None:
    save(open_writer(ckpt_checksum="none"), tmp_path, state_of(1, 64 * KIB))
    storage = open_storage(tmp_path)
    report = verify(storage)
    assert (report.status, report.has_checksums) == ("complete", False)
    image = next(tmp_path.glob("__*"))
    os.truncate(image, 1000)
    report = verify(storage)
    assert {finding.kind for finding in report.findings} == {"size"}
    assert survey(storage).status == "damaged"

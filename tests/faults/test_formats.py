"""Formats whose readers find files by their names: never a part, whatever fails, dies or is overtaken."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException

from distckpt import Checkpointer, CommitError, StorageReader, StorageWriter, WriteError
from distckpt.commit import reclaim, sweep
from distckpt.integrity import extents, find_record, read_manifest
from distckpt.manifest import METADATA, is_names, seal
from distckpt.storage import open_storage
from distckpt.verification import verify
from faults.checkpoints import KIB, MIB, outcome_of, save, wait_until
from faults.conftest import OpenWriter
from faults.lab.shim.sitecustomize import install, read_log
from faults.test_fences import Overtaken, Watcher, watch_calls

FORMATS = ("safetensors", "zarr")
Flat = dict[str, torch.Tensor]


def state_of(seed: int, nbytes: int = 64 * KIB) -> dict[str, Any]:
    """Return a state whose every value depends on `seed`, with a chunk of padding, a scalar and an object."""
    generator = torch.Generator().manual_seed(seed)
    rows = nbytes // 4 // 64

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(1, 2**31 - 1, shape, generator=generator, dtype=torch.int32)

    return {
        "model": {"weight": draw(rows, 64), "bias": draw(7), "deep": {"norm": draw(3, 5).float()}},
        "step": torch.tensor(seed),
        "note": f"state {seed}",
    }


def flat(state: dict[str, Any], prefix: str = "") -> Flat:
    """Return the tensors of a state by their names."""
    found: Flat = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            found[prefix + key] = value
    return found


def zeros_like(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: zeros_like(value)
        if isinstance(value, dict)
        else torch.zeros_like(value)
        if isinstance(value, torch.Tensor)
        else ""
        for key, value in state.items()
    }


def same(left: Flat, right: Flat) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def load(path: Path, like: dict[str, Any]) -> dict[str, Any]:
    """Return what our reader loads, with every checksum compared."""
    found = zeros_like(like)
    state_dict_loader.load(found, storage_reader=StorageReader(path))
    return found


def read_safetensors(path: Path, like: dict[str, Any]) -> list[Flat]:
    """Return what stock readers of safetensors make of a directory: nothing of those that fail."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    found: list[Flat] = []
    template = {name: torch.zeros_like(value) for name, value in flat(like).items()}
    with contextlib.suppress(CheckpointException), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_loader.load(template, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
        found.append(template)
    with contextlib.suppress(SafetensorError):
        files = [load_file(file) for file in path.glob("*.safetensors")]
        if files:
            found.append({name: value for file in files for name, value in file.items()})
    return found


def read_zarr(path: Path, like: dict[str, Any]) -> list[Flat]:
    """Return what zarr-python makes of a directory; if it fails, nothing."""
    import zarr

    try:
        group = zarr.open_group(path, mode="r")
    except FileNotFoundError:
        return []
    except Exception:  # noqa: BLE001 - loud, whatever it is
        return []
    found: Flat = {}
    for name, value in flat(like).items():
        try:
            array: Any = group[name.replace(".", "/")]
            data = array[...]
        except Exception:  # noqa: BLE001 - loud, whatever it is
            return []
        found[name] = torch.as_tensor(data).to(value.dtype)
    return [found]


def stock(file_format: str, path: Path, like: dict[str, Any]) -> list[Flat]:
    if not path.is_dir():
        return []
    return (read_safetensors if file_format == "safetensors" else read_zarr)(path, like)


def assert_stock_is_whole(file_format: str, path: Path, states: list[dict[str, Any]], where: str) -> int:
    """Assert that stock readers see one of `states`, or fail; returns how many see one."""
    found = stock(file_format, path, states[0])
    for each in found:
        assert any(same(each, flat(state)) for state in states), f"{where}: stock readers read a part"
    return len(found)


def tree_of(path: Path) -> set[str]:
    return {
        str(each.relative_to(path)) + ("/" if each.is_dir() and not each.is_symlink() else "")
        for each in path.rglob("*")
    }


def assert_only_committed(path: Path, where: str = "") -> None:
    """Assert that a directory holds what the commit names, what belongs to it, and nothing else."""
    storage = open_storage(path)
    metadata = storage.read(METADATA)
    assert metadata is not None, where
    record = find_record(storage, bytes(metadata))
    assert record is not None, where
    names = {METADATA, record.name, ".distckpt/owner"}
    found = tree_of(path)
    for manifest, sha256 in record.manifests:
        names.add(manifest)
        names |= {file for file, _, _ in extents(storage, manifest, read_manifest(storage, manifest, sha256))}
        folder = manifest.rpartition("/")[0] + "/"
        names |= {name for name in found if is_names(name, folder)}
    folders = {f"{parent}/" for name in names for parent in Path(name).parents if str(parent) != "."}
    assert found == names | folders, f"{where}: left {found - names - folders}, lacks {names - found}"
    report = verify(storage, jobs=1)
    assert (report.status, report.findings) == ("complete", []), (where, report)


def assert_committed(file_format: str, path: Path, state: dict[str, Any], where: str = "") -> None:
    found = load(path, state)
    assert found["note"] == state["note"], where
    assert same(flat(found), flat(state)), where
    read = stock(file_format, path, state)
    assert len(read) == (2 if file_format == "safetensors" else 1), where
    for each in read:
        assert same(each, flat(state)), where
    assert_only_committed(path, where)


@contextlib.contextmanager
def shim(root: Path, folder: Path, *rules: dict[str, Any]) -> Iterator[None]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    remove = install(
        {"root": str(root), "folder": str(folder), "role": "rank0", "rules": list(rules), "keep_data": False}
    )
    try:
        yield
    finally:
        # What makes directories durable is not waited for where it fails.
        wait_until(
            lambda: not [one for one in threading.enumerate() if "distckpt-sync" in one.name], 5, "no thread"
        )
        remove()


EVERY = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.thorough)])
"""Of the points, one in so many."""
OLD, NEW, NEXT = (state_of(seed) for seed in (1, 2, 3))


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("is_dead", [True, False])
@pytest.mark.parametrize("file_format", FORMATS)
@EVERY
def test_a_save_that_stops_at_any_operation(
    open_writer: OpenWriter, tmp_path: Path, file_format: str, is_dead: bool, every: int
) -> None:
    """Everything fails from one operation on, as if the process had died, or that one operation fails."""
    writer = open_writer(ckpt_format=file_format, ckpt_objects="sidecar")
    save(writer, tmp_path / "first", OLD)
    successor = open_writer(ckpt_format=file_format, ckpt_objects="sidecar")
    num_whole = 0
    for point in range(1, 1000, every):
        root = tmp_path / str(point)
        path = root / "checkpoint"
        root.mkdir()
        number = errno.EIO if is_dead else (errno.ENOSPC, errno.EACCES, errno.ESTALE)[point % 3]
        rule = {"do": "fail", "errno": number, "n": point, "since": is_dead}
        with shim(root, tmp_path / "shim", rule):
            error = outcome_of(lambda p=path: save(writer, p, NEW))  # type: ignore[misc]
        failed = [entry for entry in read_log(tmp_path / "shim") if entry.get("errno") == number]
        where = f"stopped at operation {point}, {failed[:1]}"
        if error is None:
            assert (path / METADATA).exists(), where
            assert_stock_is_whole(file_format, path, [NEW], where)
            if not failed:
                break
            # What could not be removed costs room, and is there for the next one.
            sweep(open_storage(path), "5c")
            assert_committed(file_format, path, NEW, where)
            continue
        num_whole += assert_stock_is_whole(file_format, path, [NEW], where)
        if (path / METADATA).exists():
            assert_stock_is_whole(file_format, path, [NEW], where)
            assert same(flat(load(path, NEW)), flat(NEW)), where
            continue
        save(successor, path, NEXT)
        assert_committed(file_format, path, NEXT, where)
        shutil.rmtree(root)
    else:
        pytest.fail("it has never come to an end")
    assert point > 40
    assert num_whole


def leave_complete(writer: StorageWriter, root: Path, folder: Path, state: dict[str, Any]) -> None:
    """Have a save die where all of it is complete, and nothing is published."""
    root.mkdir()
    rule = {"do": "fail", "errno": errno.EIO, "op": "rename", "path": r".*/\.metadata", "since": True}
    gone = {"do": "fail", "errno": errno.EIO, "op": "unlink", "path": r".*shard.*", "since": True}
    with shim(root, folder, rule, gone):
        assert outcome_of(lambda: save(writer, root / "checkpoint", state)) is not None


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("what", [pytest.param("save", marks=pytest.mark.thorough), "reclaim"])
@pytest.mark.parametrize("file_format", FORMATS)
def test_what_removes_a_complete_save_stops_at_any_operation(
    open_writer: OpenWriter, tmp_path: Path, file_format: str, what: str
) -> None:
    """A save that was about to be published is cleared away, and that stops."""
    writer = open_writer(ckpt_format=file_format, ckpt_objects="sidecar")
    leave_complete(writer, tmp_path / "left", tmp_path / "shim", OLD)
    assert len(stock(file_format, tmp_path / "left" / "checkpoint", OLD)) >= 1
    faults = []
    for point in range(1, 1000):
        root = tmp_path / str(point)
        path = root / "checkpoint"
        shutil.copytree(tmp_path / "left", root)
        rule = {"do": "fail", "errno": errno.EIO, "n": point, "since": True}
        removed = False
        with shim(root, tmp_path / "shim", rule), contextlib.suppress(WriteError):
            if what == "save":
                outcome_of(lambda p=path: save(writer, p, NEW))  # type: ignore[misc]
            else:
                removed = reclaim(open_storage(path), "5c", idle_s=-1)
        last = read_log(tmp_path / "shim")[-1]
        where = f"stopped at operation {point} ({last['op']} {last['path']})"
        if (removed and not path.exists()) or (path / METADATA).exists():
            break
        try:
            assert_stock_is_whole(file_format, path, [OLD, NEW], where)
        except AssertionError as fault:
            faults.append(str(fault).splitlines()[0])
        save(writer, path, NEXT)
        assert_committed(file_format, path, NEXT, where)
        shutil.rmtree(root)
    else:
        pytest.fail("it has never come to an end")
    assert point > 8
    assert not faults, "\n".join(faults)


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch) -> Watcher:
    opened = Watcher()
    watch_calls(lambda name, call: monkeypatch.setattr(os, name, call), opened.happens)
    return opened


SMALL = [
    {"a": {"w": torch.arange(1, 65) * seed, "b": torch.arange(1, 9) * seed}, "note": f"state {seed}"}
    for seed in (1, 2, 3)
]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("before", ["fresh", "left"])
@pytest.mark.parametrize("file_format", FORMATS)
@EVERY
def test_a_save_that_goes_on_after_another_has_committed(
    open_writer: OpenWriter, watcher: Watcher, tmp_path: Path, file_format: str, before: str, every: int
) -> None:
    settings = {"ckpt_format": file_format, "ckpt_objects": "sidecar"}
    stale, successor = open_writer(**settings), open_writer(**settings)
    old, new, third = SMALL
    if before == "left":
        leave_complete(stale, tmp_path / "left", tmp_path / "shim", third)
    faults: list[str] = []
    num_refused = 0
    for point in range(1, 1000, every):
        path = tmp_path / str(point)
        if before == "left":
            shutil.copytree(tmp_path / "left" / "checkpoint", path)
        overtaken = Overtaken(watcher, path, point, lambda p=path: save(stale, p, old))  # type: ignore[misc]
        where = f"stopped before step {point}, after {overtaken.steps.seen[-1:]}"
        if overtaken.has_ended:
            assert overtaken.end() is None
            break
        error = outcome_of(lambda p=path: save(successor, p, new))  # type: ignore[misc]
        refused = overtaken.end()
        expected = new if error is None else old
        if (error is None) == (refused is None):
            faults.append(f"{where}: {error!r}, {refused!r}")
            if error is None:
                continue
        num_refused += isinstance(refused, CommitError)
        if refused is not None and not isinstance(refused, (CommitError, WriteError)):
            faults.append(f"{where}: refused with {refused!r}")
        if before == "left" and where.endswith(".distckpt/owner']"):
            # Between the last look at the claim and a removal there is an instant that nothing guards.
            shutil.rmtree(path)
            continue
        try:
            status = verify(open_storage(path), jobs=1).status
            assert status == "complete", where
            assert_stock_is_whole(file_format, path, [expected], where)
            # Nothing else cleans up: there is no save in its place.
            sweep(open_storage(path), "5c")
            assert_committed(file_format, path, expected, where)
        except (Exception, CheckpointException) as fault:  # noqa: BLE001 - all of them are told
            faults.append(f"{where}: {type(fault).__name__} {str(fault)[:300]}")
        shutil.rmtree(path)
    else:
        pytest.fail("it has never come to an end")
    assert not faults, "\n".join(faults)
    assert num_refused > 15 // every


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each format."""
    paths = {}
    for file_format in FORMATS:
        paths[file_format] = tmp_path_factory.mktemp("damage") / file_format
        with StorageWriter(ckpt_format=file_format, ckpt_objects="sidecar") as writer:
            save(writer, paths[file_format], OLD)
    return paths


def damages(name: str, data: bytes) -> Iterator[tuple[str, bytes | None]]:
    """Yield what a file may become: what was done, and its bytes; None: it is gone."""
    size = len(data)
    # Length of a header, header, blanks behind it, payload, padding, checksum.
    places = {0, 7, 8, 30, 4095, 4096, size // 3, size // 2, size - 70, size - 5, size - 4, size - 1}
    for place in sorted(place for place in places if 0 <= place < size):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        yield f"{name}: byte {place}", bytes(damaged)
    yield f"{name}: gone", None
    yield f"{name}: empty", b""
    yield f"{name}: short", data[:-1]
    yield f"{name}: longer", data + b"\0"


@pytest.mark.parametrize("file_format", FORMATS)
def test_every_kind_of_damage_is_found(committed: dict[str, Path], file_format: str) -> None:
    path = committed[file_format]
    files = {str(file.relative_to(path)): file for file in path.rglob("*") if file.is_file()}
    documents = {name for name in files if name.endswith(("zarr.json", "index.json"))}
    # Documents are for readers of the format; lists of names, for who cleans up.
    unread = documents | {name for name in files if "names-" in name or name == ".distckpt/owner"}
    assert documents
    accepted: list[str] = []
    for name, file in files.items():
        data = file.read_bytes()
        for where, damaged in damages(name, data):
            if damaged is None:
                file.unlink()
            else:
                file.write_bytes(damaged)
            report = verify(open_storage(path), jobs=1)
            error = None
            # Without it, torch's own loading looks for metadata of single ranks.
            if not (name == METADATA and damaged is None):
                error = outcome_of(lambda: load(path, OLD))
            file.write_bytes(data)
            if "names-" in name or name == ".distckpt/owner" or (name == METADATA and damaged is None):
                continue
            assert report.status == "damaged", where
            assert {found.file for found in report.findings if found.kind != "extra"} == {name}, where
            # What lies behind the payload of a chunk is not read, and its framing not believed.
            if name not in unread and (error is None):
                accepted.append(where)
    assert all(where.endswith("longer") or ("shard-" in where and ": byte" in where) for where in accepted)
    assert_committed(file_format, path, OLD)


def read_arrays(path: Path, names: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield what zarr-python and tensorstore read, both of which compare checksums."""
    import tensorstore
    import zarr

    group = zarr.open_group(path, mode="r")
    for name in names:
        array: Any = group[name]
        yield name, array[...]
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/{name}"}}
        yield name, tensorstore.open(spec).result().read().result()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_saves", [5, pytest.param(20, marks=pytest.mark.thorough)])
def test_a_seal_over_parts_of_several_lanes_is_new_each_time(tmp_path: Path, num_saves: int) -> None:
    generator = torch.Generator().manual_seed(1)
    # Rows that cannot be cut, of several parts each; the last part is short.
    state = {
        "one": torch.randint(-(2**62), 2**62, (1, 21 * MIB // 8 + 13), generator=generator),
        "rows": torch.randint(-(2**30), 2**30, (3, 2 * MIB + 1), generator=generator, dtype=torch.int32),
        "small": torch.randint(0, 9, (3,), generator=generator),
    }
    settings: dict[str, Any] = {"ckpt_format": "zarr", "dist_ckpt_workers": 3, "ckpt_bucket_bytes": "4MiB"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpointer = Checkpointer(tmp_path, async_save=True, **settings)
    with checkpointer:
        for step in range(num_saves):
            for tensor in state.values():
                tensor.add_(1)
            handle = checkpointer.save(step, state)
            handle.result(30)
            for name, found in read_arrays(Path(handle.path), list(state)):
                assert torch.equal(torch.as_tensor(found), state[name]), (step, name)
            shutil.rmtree(handle.path)


@pytest.mark.parametrize(
    "names",
    [
        ["../victim"],
        ["{root}/victim"],
        [METADATA, ".metadata.00.tmp", ".distckpt/owner"],
        ["./.metadata", "a/../.metadata", ".distckpt//owner", "x/.//y"],
        ["link/victim"],
        ["model/weight/c.0.0"],
    ],
    ids=lambda names: names[0].replace("/", "|"),
)
def test_names_that_are_not_of_a_save_are_not_removed(
    open_writer: OpenWriter, tmp_path: Path, names: list[str]
) -> None:
    path, outside = tmp_path / "checkpoint", tmp_path / "outside"
    save(open_writer(ckpt_format="zarr", ckpt_objects="sidecar"), path, OLD)
    outside.mkdir()
    for folder in (tmp_path, outside):
        (folder / "victim").touch()
    (path / "link").symlink_to(outside)
    listed = path / ".distckpt" / "aa" / "names-00000.json"
    listed.parent.mkdir()
    listed.write_bytes(seal({"names": [name.format(root=tmp_path) for name in names]}))
    with contextlib.suppress(WriteError):
        sweep(open_storage(path), "5c")
    assert (tmp_path / "victim").exists()
    assert (outside / "victim").exists()
    assert verify(open_storage(path), jobs=1).status == "complete"
    assert same(flat(load(path, OLD)), flat(OLD))

"""Where a checkpoint goes, what may be set, and what a damaged checkpoint answers."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.serialization import _get_layout

from distckpt import (
    CheckpointConfig,
    Checkpointer,
    ConfigError,
    IntegrityError,
    SavePlanner,
    StorageReader,
    StorageWriter,
    engine,
    observe,
)
from distckpt.manifest import TRAILER
from faults.checkpoints import on_event, pids_of
from integration.checkpoints import (
    assert_every_reader_finds,
    assert_same,
    failure_of,
    read,
    read_with_distckpt,
    read_with_torch,
    save,
)
from servers import S3Server

pytestmark = pytest.mark.slow

METADATA_MODULE = b"torch.distributed.checkpoint.metadata"
STATE: dict[str, Any] = {
    "a": torch.arange(3000.0).reshape(30, 100),
    "b": {"c": torch.arange(7, dtype=torch.int16), "large": torch.zeros(3 << 20, dtype=torch.uint8)},
    "o": ["object", 1],
}


@pytest.fixture
def writer() -> Iterator[StorageWriter]:
    with StorageWriter() as opened:
        yield opened


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def names_under(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_one_writer_for_many_paths(tmp_path: Path, home: Path) -> None:
    """With and without `checkpoint_id`, and in every notation; each save is where the same path says."""
    paths: list[str | os.PathLike[str]] = [
        tmp_path / "pathlib",
        str(tmp_path / "str"),
        f"file://{tmp_path}/url",
        f"{tmp_path}/slash/",
        f"file://{tmp_path}/url and slash/",
        "relative",
        Path("relative pathlib") / "below",
        "./dot/../relative.2",
        f"{tmp_path}/with space",
        f"{tmp_path}/\u00fcn\u00efc\u00f6d\u00e9 \u5f20",
        f"{tmp_path}/step=1,lr=%20#?*[x]:5%",
        f"{tmp_path}/many/missing/directories",
    ]
    with StorageWriter(tmp_path / "first", dist_ckpt_workers=2) as writer:
        state_dict_saver.save({"number": -1}, storage_writer=writer)
        for number, path in enumerate(paths):
            state_dict_saver.save({"number": number - 1000}, checkpoint_id=path, storage_writer=writer)
            # The last path stays until another is given.
            state_dict_saver.save({"number": number}, storage_writer=writer)
            assert writer.checkpoint_id == path
    assert_same(read_with_torch(tmp_path / "first"), {"number": -1})
    reader = StorageReader(tmp_path / "first")
    for number, path in enumerate(paths):
        target = {"number": None}
        state_dict_loader.load(target, checkpoint_id=path, storage_reader=reader)
        assert target == {"number": number}
        local = Path(str(path).removeprefix("file://"))
        assert_every_reader_finds({"number": number}, local.absolute())
    assert not [name for name in names_under(home) if name.startswith("file:")]


def test_relative_path_and_another_working_directory(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, writer: StorageWriter
) -> None:
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        state_dict_saver.save({"number": number}, checkpoint_id="here", storage_writer=writer)
    for number in range(2):
        assert_same(read_with_torch(tmp_path / str(number) / "here"), {"number": number})
    assert names_under(home) == set()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("path", ["here", Path("here")])
def test_working_directory_that_changes_during_a_save(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, workers: int, path: str | Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    end = observe.subscribe(lambda event: monkeypatch.chdir(elsewhere))
    try:
        with StorageWriter(dist_ckpt_workers=workers) as writer:
            state_dict_saver.save(STATE, checkpoint_id=path, storage_writer=writer)
    finally:
        end()
    assert Path.cwd() == elsewhere
    assert_same(read_with_distckpt(home / "here"), STATE)
    assert names_under(elsewhere) == set()


@pytest.mark.parametrize("url", ["s3:///checkpoint", "nosuch://x", ""])
def test_storage_that_is_not_available(home: Path, writer: StorageWriter, url: str) -> None:
    for opener in (StorageWriter, StorageReader):
        with pytest.raises(ConfigError):
            opener(url)
        assert not opener.validate_checkpoint_id(url)
    for is_async in (False, True):
        with pytest.raises(CheckpointException) as caught:
            save(STATE, url, writer, is_async=is_async)
        assert isinstance(failure_of(caught.value), ConfigError)
    assert names_under(home) == set()
    # The writer is none the worse for it.
    state_dict_saver.save(STATE, checkpoint_id="a", storage_writer=writer)
    assert_same(read_with_distckpt(home / "a"), STATE)


def test_no_path_at_all(writer: StorageWriter) -> None:
    with pytest.raises(CheckpointException) as caught:
        state_dict_saver.save(STATE, storage_writer=writer)
    assert isinstance(failure_of(caught.value), ConfigError)
    with pytest.raises(CheckpointException, match="no checkpoint directory"):
        state_dict_loader.load({"a": torch.ones(1)}, storage_reader=StorageReader())


@pytest.mark.parametrize("opener", [StorageWriter, StorageReader])
def test_storage_options(tmp_path: Path, opener: Callable[..., Any]) -> None:
    path = tmp_path / "a"
    with pytest.raises(ConfigError, match="nosuchoption"):
        opener(path, storage_options={"nosuchoption": 1})
    with pytest.raises(ConfigError, match="anon"):
        opener(f"file://{path}", storage_options={"anon": True, "auto_mkdir": True})
    assert not path.exists()


def test_storage_options_with_an_effect(tmp_path: Path) -> None:
    options = {"auto_mkdir": True}
    with StorageWriter(tmp_path / "b" / "a", storage_options=options) as writer:
        state_dict_saver.save(STATE, storage_writer=writer)
    assert_same(read(StorageReader(tmp_path / "b" / "a", storage_options=options)), STATE)


def test_storage_options_without_a_path_are_checked_by_the_save(home: Path) -> None:
    with (
        StorageWriter(storage_options={"anon": True}) as writer,
        pytest.raises(CheckpointException) as caught,
    ):
        state_dict_saver.save(STATE, checkpoint_id=home / "a", storage_writer=writer)
    assert isinstance(failure_of(caught.value), ConfigError)
    assert names_under(home) == set()


def test_storage_options_survive_a_reset(home: Path) -> None:
    """One that has no effect is refused wherever options reach."""
    with StorageWriter(storage_options={"anon": True}) as writer:
        for turn in range(3):
            writer.reset(home / f"{turn}")
            with pytest.raises(CheckpointException) as caught:
                state_dict_saver.save(STATE, checkpoint_id=home / f"{turn}", storage_writer=writer)
            assert "anon" in str(failure_of(caught.value))
    reader = StorageReader(storage_options={"anon": True})
    for turn in range(3):
        reader.reset(home / f"{turn}")
        with pytest.raises(ConfigError, match="anon"):
            reader.read_metadata()


@pytest.mark.parametrize("opener", [StorageWriter, StorageReader])
def test_settings_that_cannot_be_honoured(tmp_path: Path, opener: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="did you mean 'dist_ckpt_workers'"):
        opener(tmp_path, dist_ckpt_worker=2)
    with pytest.raises(ConfigError, match="ckpt_format"):
        opener(tmp_path, ckpt_format="hdf5")
    with pytest.raises(ConfigError, match="dist_ckpt_workers"):
        opener(tmp_path, CheckpointConfig(), dist_ckpt_workers=0)
    with pytest.raises(ConfigError, match="config"):
        opener(tmp_path, {"dist_ckpt_workers": 2})
    assert names_under(tmp_path) == set()


def test_config_and_settings_together(tmp_path: Path) -> None:
    config = CheckpointConfig(dist_ckpt_workers=2, ckpt_checksum="none")
    with StorageWriter(tmp_path / "a", config, dist_ckpt_workers=3) as writer:
        state_dict_saver.save({str(i): torch.zeros(5 << 20) for i in range(3)}, storage_writer=writer)
    assert len(manifest_of(tmp_path / "a")["files"]) == 3
    assert manifest_of(tmp_path / "a")["checksums"] == ["", "", ""]


@pytest.mark.parametrize(
    ("settings", "levels"),
    [
        ({"ckpt_fully_parallel_save": True}, ["WARNING"]),
        ({"ckpt_fully_parallel_save": False}, []),
        # Nobody has asked for it.
        ({}, ["INFO"]),
        ({"config": CheckpointConfig()}, ["INFO"]),
    ],
)
def test_a_planner_that_shares_nothing_is_named_once(
    tmp_path: Path,
    settings: dict[str, Any],
    levels: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distckpt.writer._planner_warned", False)
    with StorageWriter(**settings) as writer, caplog.at_level(logging.INFO, "distckpt"):
        for number in range(3):
            # Alone, with ours, and as a planner of torch's would.
            for ranks, planner in [(1, DefaultSavePlanner()), (2, SavePlanner()), (2, DefaultSavePlanner())]:
                writer.reset(tmp_path / f"{number}")
                planner.set_up_planner({"rank": 0})
                writer.set_up_storage_writer(True, rank=0)
                plan = writer.prepare_local_plan(planner.create_local_plan())
                [plan, *_] = writer.prepare_global_plan([plan] + [SavePlan([])] * (ranks - 1))
                writer.write_data(plan, planner)
    said = "ckpt_fully_parallel_save has no effect with DefaultSavePlanner"
    assert [entry.levelname for entry in caplog.records if said in entry.getMessage()] == levels


def test_over_a_checkpoint_of_stock_torch_and_back(tmp_path: Path, writer: StorageWriter) -> None:
    path = tmp_path / "a"
    for number in range(4):
        state = {**STATE, "number": number, f"only {number}": torch.full((5,), number)}
        stock = FileSystemWriter(path, overwrite=True) if number % 2 == 0 else None
        with pytest.MonkeyPatch.context() as patch:
            if stock is not None:
                # It says on every overwrite that it overwrites.
                patch.setattr("warnings.warn", lambda *args, **kwargs: None)
            state_dict_saver.save(state, checkpoint_id=path, storage_writer=stock or writer)
        assert_every_reader_finds(state, path)
        if stock is None:
            # Nothing of the other tool's checkpoint is left.
            assert {name for name in os.listdir(path) if ".distcp" in name} == set(manifest_of(path)["files"])


def manifest_of(path: Path) -> dict[str, Any]:
    [file] = path.glob(".distckpt/*/rank-00000.json")
    manifest = json.loads(file.read_bytes())
    assert isinstance(manifest, dict)
    return manifest


def place_of(path: Path, fqn: str) -> _StorageInfo:
    [info] = [
        info
        for index, info in FileSystemReader(path).read_metadata().storage_data.items()
        if index.fqn == fqn
    ]
    assert isinstance(info, _StorageInfo)
    return info


def flip(path: Path, info: _StorageInfo) -> None:
    """Change one bit in the middle of an item, which is payload."""
    with (path / info.relative_path).open("r+b") as file:
        file.seek(info.offset + info.length // 2)
        [byte] = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))


def damage_found(reader: StorageReader) -> IntegrityError:
    with pytest.raises(CheckpointException) as caught:
        read(reader)
    failure = failure_of(caught.value)
    assert isinstance(failure, IntegrityError)
    return failure


@pytest.fixture(params=[1, 2], ids=["1-worker", "2-workers"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with StorageWriter(dist_ckpt_workers=request.param) as writer:
        save(STATE, tmp_path / "a", writer, is_async=request.param == 2)
    return tmp_path / "a"


@pytest.mark.parametrize("fqn", ["a", "b.c", "b.large", "o"])
def test_a_flipped_bit(checkpoint: Path, fqn: str) -> None:
    info = place_of(checkpoint, fqn)
    flip(checkpoint, info)
    failure = damage_found(StorageReader(checkpoint))
    assert (failure.file, failure.item) == (info.relative_path, fqn)
    assert failure.expected != failure.found
    assert info.relative_path in str(failure)
    assert repr(fqn) in str(failure)
    # The items beside it are none the worse.
    target = {"b": {"c": torch.zeros(7, dtype=torch.int16)}} if fqn == "a" else {"a": torch.zeros(30, 100)}
    state_dict_loader.load(target, storage_reader=StorageReader(checkpoint))
    flip(checkpoint, info)
    assert_same(read_with_distckpt(checkpoint), STATE)


def test_a_flipped_bit_without_verification(checkpoint: Path) -> None:
    flip(checkpoint, place_of(checkpoint, "a"))
    found = read(StorageReader(checkpoint, verify=False))
    assert int((found["a"] != STATE["a"]).sum()) == 1


@pytest.mark.parametrize("how", ["to half", "to nothing", "removed"])
def test_a_file_that_is_not_whole(checkpoint: Path, how: str) -> None:
    info = place_of(checkpoint, "b.large")
    file = checkpoint / info.relative_path
    if how == "removed":
        file.unlink()
    else:
        os.truncate(file, info.offset + info.length // 2 if how == "to half" else 0)
    failure = damage_found(StorageReader(checkpoint))
    assert failure.file == info.relative_path
    if how == "to half":
        assert (failure.item, failure.expected) == ("b.large", info.length)
        assert failure.found == info.length // 2


def test_without_checksums(tmp_path: Path) -> None:
    with StorageWriter(ckpt_checksum="none") as writer:
        save(STATE, tmp_path / "a", writer, is_async=False)
    assert manifest_of(tmp_path / "a")["checksums"] == [""]
    assert_every_reader_finds(STATE, tmp_path / "a")
    info = place_of(tmp_path / "a", "b.large")
    os.truncate(tmp_path / "a" / info.relative_path, info.offset + info.length - 1)
    # The sizes are recorded all the same.
    assert damage_found(StorageReader(tmp_path / "a")).item == "b.large"


def test_without_the_commit_record(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    [record] = checkpoint.glob(".distckpt/commit-*.json")
    record.unlink()
    failure = damage_found(StorageReader(checkpoint))
    assert failure.file == ".metadata"
    assert record.name in str(failure)
    # Without what marks it as ours, it is another tool's.
    metadata = checkpoint / ".metadata"
    metadata.write_bytes(metadata.read_bytes().removesuffix(TRAILER))
    with caplog.at_level(logging.WARNING, "distckpt"):
        assert_same(read_with_distckpt(checkpoint), STATE)
    [message] = [entry.getMessage() for entry in caplog.records if entry.name.startswith("distckpt")]
    assert str(checkpoint) in message
    assert "without verification" in message


@pytest.mark.parametrize("how", ["changed", "cut", "removed"])
def test_a_damaged_manifest(checkpoint: Path, how: str) -> None:
    reader = StorageReader(checkpoint)
    [file] = checkpoint.glob(".distckpt/*/rank-00000.json")
    content = file.read_bytes()
    if how == "removed":
        file.unlink()
    else:
        file.write_bytes(content.replace(b'"rank":0', b'"rank":1') if how == "changed" else content[:-9])
    failure = damage_found(reader)
    assert failure.file == str(file.relative_to(checkpoint))
    # Whoever wants it all the same can have it.
    assert_same(read(StorageReader(checkpoint, verify=False)), STATE)
    # The same reader sees that it was mended.
    file.write_bytes(content)
    assert_same(read(reader), STATE)


def test_a_damaged_commit_record(checkpoint: Path) -> None:
    [file] = checkpoint.glob(".distckpt/commit-*.json")
    for content in (b"", b"{}", b"[]", b"\0", b'{"version": 3}', file.read_bytes().replace(b"1", b"2")):
        file.write_bytes(content)
        assert damage_found(StorageReader(checkpoint)).file == str(file.relative_to(checkpoint))
    file.write_bytes(b'{"version": 2}')
    with pytest.raises(CheckpointException, match=rf"{file.name} has version 2; .* reads version 3"):
        read(StorageReader(checkpoint))


@pytest.mark.parametrize("how", ["cut", "flipped", "flipped at its end", "of no Metadata"])
def test_damaged_metadata(checkpoint: Path, how: str) -> None:
    path = checkpoint / ".metadata"
    content = bytearray(path.read_bytes())
    if how == "cut":
        del content[len(content) // 2 :]
    elif how == "of no Metadata":
        content = bytearray(pickle.dumps("text"))
    else:
        content[len(content) // 2 if how == "flipped" else -1] ^= 4
    path.write_bytes(content)
    failure = damage_found(StorageReader(checkpoint))
    assert failure.file is not None
    assert failure.file.endswith(".metadata")
    # Whoever looks at it without torch between learns of it, too.
    with pytest.raises(IntegrityError):
        assert StorageReader(checkpoint).read_metadata().state_dict_metadata


class Trap:
    """What runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_metadata_that_runs_code_is_refused(checkpoint: Path, tmp_path: Path, is_damaged: bool) -> None:
    ran = tmp_path / "ran"
    content = pickle.dumps(Trap(ran)) + (TRAILER if is_damaged else b"")
    (checkpoint / ".metadata").write_bytes(content)
    if is_damaged:
        assert damage_found(StorageReader(checkpoint, ckpt_weights_only=False)).file == ".metadata"
    else:
        with pytest.raises(CheckpointException, match=r"names posix\.mkdir, which is no part"):
            read(StorageReader(checkpoint))
        with pytest.raises(CheckpointException, match=r"names posix\.mkdir, which is no part"):
            read(StorageReader(checkpoint, verify=False))
    assert not ran.exists()
    if not is_damaged:
        with pytest.raises(CheckpointException, match="not Metadata"):
            read(StorageReader(checkpoint, ckpt_weights_only=False))
        assert ran.exists()


TRAPS = {
    "class": b"c" + METADATA_MODULE + b"\nMetadataIndex\nN}\x8c\x08__hash__Ns\x8c\x05extraNs\x86b0",
    "member": b"c" + METADATA_MODULE + b"\n_MEM_FORMAT_ENCODING\nK\x00\x85R}\x8c\x07_value_Kcsb0",
    "name of a class": b"c" + METADATA_MODULE + b"\nMetadataIndex\nN}\x8c\x0c__qualname__\x8c\x01xs\x86b0",
}
"""BUILD sets attributes of whatever is on the stack."""
HARMLESS = {
    "function": b"ctorch.serialization\n_get_layout\nN}\x8c\x0c__qualname__\x8c\x01xs\x86b0",
    "path": b"cpathlib\nPosixPath\nN}\x8c\x0c__qualname__\x8c\x01xs\x86b0",
}


@pytest.mark.parametrize("trap", [*TRAPS, *HARMLESS])
def test_a_metadata_that_changes_classes_changes_nothing(checkpoint: Path, trap: str) -> None:
    data = b"\x80\x04" + (TRAPS | HARMLESS)[trap] + pickle.dumps(Metadata({}), 4)[2:]
    (checkpoint / ".metadata").write_bytes(data)
    of_class, of_members = dict(vars(MetadataIndex)), [dict(vars(member)) for member in _MEM_FORMAT_ENCODING]
    if trap in TRAPS:
        with pytest.raises(CheckpointException, match="tries to change classes"):
            read(StorageReader(checkpoint))
    else:
        assert StorageReader(checkpoint).read_metadata().state_dict_metadata == {}
    assert dict(vars(MetadataIndex)) == of_class
    assert [dict(vars(member)) for member in _MEM_FORMAT_ENCODING] == of_members
    assert MetadataIndex.__qualname__ == "MetadataIndex"
    assert _get_layout.__qualname__ == "_get_layout"
    assert PosixPath.__qualname__ == "PosixPath"
    assert hash(MetadataIndex("a")) == hash(MetadataIndex("a"))


def test_an_object_that_runs_code_is_refused(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    with StorageWriter() as writer:
        save({"good": torch.ones(3), "trap": {"inner": Trap(ran)}}, tmp_path / "a", writer, is_async=False)
    target = {"good": torch.zeros(3), "trap": {"inner": None}}
    for use in (
        lambda: state_dict_loader.load(target, storage_reader=StorageReader(tmp_path / "a")),
        lambda: read(StorageReader(tmp_path / "a")),
    ):
        with pytest.raises(
            CheckpointException, match=r"'trap.inner' .* names posix\.mkdir.*ckpt_weights_only"
        ):
            use()
    assert not ran.exists()
    state_dict_loader.load(target, storage_reader=StorageReader(tmp_path / "a", ckpt_weights_only=False))
    assert ran.exists()
    # What else there is can be loaded.
    state_dict_loader.load({"good": torch.zeros(3)}, storage_reader=StorageReader(tmp_path / "a"))


def test_no_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointException, match="holds no complete checkpoint"):
            read(StorageReader(path))


# Buckets and O_DIRECT.


WIDE: dict[str, Any] = {"w": torch.arange(10 << 20, dtype=torch.float32), "b": torch.ones(1 << 20)}
MIB = 1 << 20


def parts_written(save_one: Callable[[], object]) -> list[int]:
    """Return the bytes of each part that lanes write while `save_one` runs."""
    sizes: list[int] = []
    with on_event("part.written", lambda event: sizes.append(int(str(event.fields["nbytes"])))):
        save_one()
    return sizes


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("way", ["sync", "async", "checkpointer"])
def test_a_bucket_is_what_a_lane_writes_at_once(tmp_path: Path, workers: int, way: str) -> None:
    largest = []
    for number, bucket in enumerate(["4MiB", "16MiB"]):
        settings: Any = {
            "ckpt_bucket_bytes": bucket,
            "dist_ckpt_workers": workers,
            "ckpt_host_memory": "256MiB",
        }
        path = tmp_path / str(number)
        if way == "checkpointer":
            with Checkpointer(path, **settings) as checkpointer:
                sizes = parts_written(functools.partial(checkpointer.save, 1, WIDE))
            path = path / "step-00000001"
        else:
            with StorageWriter(**settings) as writer:
                sizes = parts_written(functools.partial(save, WIDE, path, writer, is_async=way == "async"))
        largest.append(max(sizes))
        assert_same(read_with_distckpt(path), WIDE)
    # What was staged before there was a plan is cut at blocks of the file: one of them may stick out.
    slack = 4 * MIB + 4096 if way == "async" else 0
    assert 4 * MIB <= largest[0] <= 4 * MIB + slack < 16 * MIB <= largest[1] <= 16 * MIB + slack


@pytest.mark.parametrize(("bucket", "part_bytes"), [("auto", 16 * MIB), ("8MiB", 8 * MIB)])
def test_a_bucket_is_a_part_on_s3(s3_server: S3Server, s3_url: str, bucket: str, part_bytes: int) -> None:
    options: Any = {"storage_options": s3_server.options}
    with StorageWriter(s3_url, ckpt_bucket_bytes=bucket, dist_ckpt_workers=2, **options) as writer:
        sizes = parts_written(functools.partial(save, WIDE, s3_url, writer, is_async=False))
    assert max(sizes) == part_bytes
    target = {name: torch.zeros_like(tensor) for name, tensor in WIDE.items()}
    state_dict_loader.load(target, storage_reader=StorageReader(s3_url, **options))
    assert_same(target, WIDE)


@pytest.mark.parametrize("opener", [StorageWriter, Checkpointer])
def test_a_bucket_that_host_memory_does_not_hold_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opener: Callable[..., object]
) -> None:
    monkeypatch.setattr(engine, "available_memory", lambda: 100 * MIB)
    with pytest.raises(ConfigError, match="holds buckets of at most 8MiB, got '64MiB'"):
        opener(tmp_path / "a", ckpt_bucket_bytes="64MiB")
    assert not (tmp_path / "a").exists()


def open_flags(pid: int, folder: Path) -> set[int]:
    """Return whether each file below `folder` that a process has open for writing goes past the cache."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        # They come and go.
        with contextlib.suppress(OSError):
            if str(folder) in str(link.readlink()) and "distcp" in link.name + str(link.readlink()):
                flags = int((link.parent.parent / "fdinfo" / link.name).read_text().split()[3], 8)
                found.add(flags & os.O_DIRECT)
    return found


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("direct_io", [True, False])
def test_files_are_opened_for_direct_writes_only_where_that_is_wanted(
    tmp_path: Path, workers: int, direct_io: bool
) -> None:
    probe = tmp_path / "probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of the test refuses O_DIRECT")
    seen: set[int] = set()
    with StorageWriter(dist_ckpt_workers=workers, ckpt_direct_io=direct_io) as writer:
        save(WIDE, tmp_path / "0", writer, is_async=False)
        pids = pids_of(writer) if workers > 1 else [os.getpid()]
        over = threading.Event()

        def look() -> None:
            while not over.is_set():
                for pid in pids:
                    seen.update(open_flags(pid, tmp_path))

        looking = threading.Thread(target=look)
        looking.start()
        try:
            for number in range(1, 30):
                save(WIDE, tmp_path / str(number % 2), writer, is_async=False)
                if seen:
                    break
        finally:
            over.set()
            looking.join()
    assert seen == ({0, os.O_DIRECT} if direct_io else {0})
    assert_same(read_with_distckpt(tmp_path / "0"), WIDE)


def test_a_setting_that_storage_cannot_honour_is_refused(tmp_path: Path) -> None:
    config = CheckpointConfig(ckpt_direct_io=False)
    for opener in (StorageWriter, Checkpointer):
        with pytest.raises(ConfigError, match="ckpt_direct_io"):
            opener("memory://settings/a", config)
    # The path of a save may be given late; and what only reads takes the same settings.
    with StorageWriter(config=config) as writer:
        with pytest.raises(CheckpointException) as caught:
            save(STATE, "memory://settings/a", writer, is_async=False)
        assert isinstance(failure_of(caught.value), ConfigError)
        save(STATE, tmp_path, writer, is_async=False)
    with StorageWriter() as writer:
        save(STATE, "memory://settings/a", writer, is_async=False)
    StorageReader("memory://settings/a", config).read_metadata()


def test_the_largest_buckets_of_a_small_budget_are_not_waited_for(tmp_path: Path) -> None:
    state = {f"t{number}": torch.zeros(64 * MIB, dtype=torch.uint8) for number in range(8)}
    settings: dict[str, Any] = {"ckpt_host_memory": "512MiB", "ckpt_bucket_bytes": "128MiB"}
    with StorageWriter(tmp_path / "checkpoint", distributed_timeout_minutes=0.2, **settings) as writer:
        state_dict_saver.save(state, storage_writer=writer, no_dist=True)

"""Copies of checkpoints on other storages: complete, bounded in memory, stopped and resumed."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from distckpt import CheckpointConfig, Checkpointer, CommitError, WriteError
from distckpt import mirror as room
from distckpt.commit import remove_checkpoint
from distckpt.manifest import FOLDER, METADATA, OWNER
from distckpt.mirror import PROGRESS, is_complete_copy, mirror
from distckpt.storage import Storage, open_storage
from distckpt.storage.bounded import Bounded
from distckpt.verification import verify
from integration.checkpoints import assert_same, read, read_with_distckpt, read_with_torch
from servers import FaultProxy, S3Server

pytestmark = pytest.mark.slow

MIB = 1 << 20
FORMATS = ("torch_dist", "safetensors", "zarr")
Tree = dict[str, bytes]


def state_of(seed: int) -> dict[str, Any]:
    """20 MiB, in two files; with parts of 8 MiB, each has two."""
    generator = torch.Generator().manual_seed(seed)
    model = {f"weight{i}": torch.randn(5 * MIB // 4, 2, generator=generator) for i in range(2)}
    return {"model": {**model, "empty": torch.empty(0, 3)}, "step": torch.tensor(seed)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for file_format in FORMATS:
        config = CheckpointConfig(
            ckpt_format=file_format,
            ckpt_objects="sidecar" if file_format == "safetensors" else "auto",
            dist_ckpt_workers=2,
        )
        with Checkpointer(tmp_path_factory.mktemp(file_format), config) as checkpointer:
            found[file_format] = Path(checkpointer.save(1, state_of(1)).result())
    return found


def on_s3(url: str, options: dict[str, Any]) -> Storage:
    return open_storage(url, options, bucket_bytes=8 * MIB)


def copy(source: Path, target: Storage, **settings: Any) -> int:
    return mirror(open_storage(source), target, **{"stop": threading.Event(), **settings})


def bytes_of_files(folder: Path) -> int:
    manifested = (path for path in folder.rglob("*") if path.is_file())
    names = ((str(path.relative_to(folder)), path.stat().st_size) for path in manifested)
    return sum(nbytes for name, nbytes in names if not name.startswith((FOLDER, METADATA)))


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def assert_is_complete(storage: Storage, source: Path) -> None:
    report = verify(storage, jobs=2)
    assert (report.status, report.findings) == ("complete", [])
    assert is_complete_copy(open_storage(source), storage)
    assert copy(source, storage) == 0


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_copy_is_the_checkpoint(saved: dict[str, Path], file_format: str, tmp_path: Path) -> None:
    source, target = saved[file_format], tmp_path / "target"
    told: list[int] = []
    sent = copy(source, open_storage(target), tell=told.append)
    assert sent == told[-1] == bytes_of_files(source)
    assert told == sorted(told)
    assert_is_complete(open_storage(target), source)
    for name in names_in(source) - {OWNER}:
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert names_in(target) == names_in(source)
    assert_same(read_with_distckpt(target), state_of(1))
    if file_format == "torch_dist":
        assert_same(read_with_torch(target), state_of(1))
    # As retention does.
    assert remove_checkpoint(open_storage(target), "0" * 32)
    assert not target.exists()


def test_streams_and_a_storage_with_deadlines(saved: dict[str, Path], tmp_path: Path) -> None:
    for url in (f"local://{tmp_path}/stream", tmp_path / "bounded"):
        target = open_storage(url, timeout_s=30.0)
        assert isinstance(target, Bounded)
        assert copy(saved["torch_dist"], target, timeout_s=30.0) == bytes_of_files(saved["torch_dist"])
        assert_is_complete(target, saved["torch_dist"])


@pytest.mark.s3
@pytest.mark.parametrize("file_format", FORMATS)
def test_a_copy_on_s3(saved: dict[str, Path], file_format: str, s3_server: S3Server, s3_url: str) -> None:
    source = saved[file_format]
    storage = on_s3(s3_url, s3_server.options)
    assert copy(source, storage) == bytes_of_files(source)
    assert_is_complete(storage, source)
    assert s3_server.keys(s3_url).keys() == names_in(source)
    assert s3_server.unfinished_uploads(s3_url) == []
    if file_format == "torch_dist":
        assert_same(read(FsspecReader(s3_url, **s3_server.options)), state_of(1))


@pytest.mark.s3
@pytest.mark.parametrize("file_format", ["torch_dist", "zarr"])
def test_a_copy_on_s3_that_was_killed(
    saved: dict[str, Path],
    file_format: str,
    s3_server: S3Server,
    s3_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = saved[file_format]
    storage = on_s3(s3_url, s3_server.options)
    # It had noted what was done, and died then.
    monkeypatch.setattr(room._Copy, "_leave", room._Copy._note)

    def kill(sent: int) -> None:
        if sent > bytes_of_files(source) * 3 // 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy(source, storage, tell=kill, num_streams=1)
    assert storage.read(METADATA) is None
    assert len(s3_server.unfinished_uploads(s3_url)) == 1
    sent = copy(source, storage)
    assert 0 < sent < bytes_of_files(source)
    assert_is_complete(storage, source)
    assert s3_server.keys(s3_url).keys() == names_in(source)
    assert s3_server.unfinished_uploads(s3_url) == []


@pytest.mark.s3
def test_a_part_that_s3_refuses_for_good(
    saved: dict[str, Path], fault_proxy: FaultProxy, s3_server: S3Server, s3_url: str
) -> None:
    source = saved["torch_dist"]
    quick = {"config_kwargs": {"retries": {"mode": "standard", "total_max_attempts": 1}}}
    fault_proxy.set_rules(
        {"op": "UploadPart", "query": {"partNumber": "2"}, "status": 403, "code": "AccessDenied"}
    )
    with pytest.raises(WriteError) as caught:
        copy(source, on_s3(s3_url, {**fault_proxy.options, **quick}))
    assert caught.value.path is not None
    assert caught.value.path.startswith(f"{s3_url}/__0_")
    assert METADATA not in s3_server.keys(s3_url)
    assert s3_server.unfinished_uploads(s3_url) == []
    fault_proxy.reset()
    copy(source, on_s3(s3_url, s3_server.options))
    assert_is_complete(on_s3(s3_url, s3_server.options), source)


def test_a_stop_is_prompt_and_resumed(
    saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_RANGE_BYTES", 4 * MIB)
    for file_format in FORMATS:
        source, target = saved[file_format], tmp_path / file_format
        stop = threading.Event()
        total = bytes_of_files(source)

        def tell(sent: int) -> None:
            if sent > total * 3 // 4:  # noqa: B023 - called here
                stop.set()  # noqa: B023 - called here

        first = copy(source, open_storage(target), stop=stop, tell=tell, num_streams=1)
        assert 0 < first < total
        assert not is_complete_copy(open_storage(source), open_storage(target))
        assert (target / PROGRESS).exists()
        assert not (target / METADATA).exists()
        # Nothing is done while it is set.
        assert copy(source, open_storage(target), stop=stop) == 0
        second = copy(source, open_storage(target))
        assert 0 < second < total
        assert_is_complete(open_storage(target), source)
        assert names_in(target) == names_in(source)


def test_memory_is_bounded(saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, most, lock = 0, 0, threading.Lock()
    real_compare = room._compare

    def compare(url: str, file: Any, data: memoryview, start: int) -> None:
        nonlocal held, most
        with lock:
            held += len(data)
            most = max(most, held)
        real_compare(url, file, data, start)
        with lock:
            held -= len(data)

    monkeypatch.setattr(room, "_RANGE_BYTES", 4 * MIB)
    monkeypatch.setattr(room, "_compare", compare)
    copy(saved["torch_dist"], open_storage(tmp_path / "target"), num_streams=2)
    assert 0 < most <= 2 * 4 * MIB


def test_what_was_not_committed_by_distckpt_is_refused(tmp_path: Path, saved: dict[str, Path]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(CommitError, match="holds no committed checkpoint"):
        copy(source, open_storage(tmp_path / "target"))

    save({"a": torch.ones(3)}, storage_writer=FileSystemWriter(source))
    with pytest.raises(CommitError, match="was not written by distckpt"):
        copy(source, open_storage(tmp_path / "target"))
    assert not (tmp_path / "target").exists()
    # On the other side such a checkpoint is replaced, as a save would.
    assert copy(saved["torch_dist"], open_storage(source)) > 0
    assert_is_complete(open_storage(source), saved["torch_dist"])


def test_files_of_nobody_are_not_mixed_in(saved: dict[str, Path], tmp_path: Path) -> None:
    for file_format, name in (("safetensors", "other.safetensors"), ("zarr", "notes.txt")):
        target = tmp_path / file_format
        target.mkdir()
        (target / name).write_bytes(b"x")
        with pytest.raises(CommitError, match=name):
            copy(saved[file_format], open_storage(target))
        assert not (target / METADATA).exists()
        shutil.rmtree(target)

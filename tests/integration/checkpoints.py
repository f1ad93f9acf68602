"""What the tests of this folder share: ways to write, every way to read, and comparison bit for bit."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from distckpt import StorageReader, StorageWriter, observe
from distckpt.lanes import WorkerLanes

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.planner import SavePlanner
    from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader

WAIT_S = 30.0
"""No wait of a test is longer."""


def save(
    state: dict[str, Any],
    path: Path | str,
    writer: StorageWriter,
    *,
    is_async: bool,
    planner: SavePlanner | None = None,
) -> Metadata:
    """Write `state` with `dcp.save` or `dcp.async_save`, and wait for the end."""
    if is_async:
        response = start(state, path, writer, planner)
        response.staging_completion.result(WAIT_S)
        return finish(response)
    metadata = state_dict_saver.save(state, checkpoint_id=path, storage_writer=writer, planner=planner)
    assert isinstance(metadata, Metadata)
    return metadata


def start(
    state: dict[str, Any], path: Path | str, writer: StorageWriter, planner: SavePlanner | None = None
) -> AsyncSaveResponse:
    response = state_dict_saver.async_save(state, checkpoint_id=path, storage_writer=writer, planner=planner)
    assert isinstance(response, AsyncSaveResponse)
    return response


def finish(response: AsyncSaveResponse) -> Metadata:
    metadata: Any = response.upload_completion.result(WAIT_S)
    assert isinstance(metadata, Metadata)
    return metadata


def read(reader: TorchStorageReader) -> dict[str, Any]:
    """Load everything that a checkpoint holds, with nothing but its own metadata to go by."""
    state: dict[str, Any] = {}
    _load_state_dict(state, reader, no_dist=True, planner=_EmptyStateDictLoadPlanner())  # type: ignore[no-untyped-call]
    return state


def read_with_torch(path: Path) -> dict[str, Any]:
    return read(FileSystemReader(path))


def read_with_distckpt(path: Path) -> dict[str, Any]:
    # Tests save objects of every kind.
    return read(StorageReader(path, ckpt_weights_only=False))


def read_with_fsspec(path: Path) -> dict[str, Any]:
    return read(FsspecReader(f"file://{path}"))


def read_converted(path: Path) -> dict[str, Any]:
    target = path.with_name(path.name + ".pt")
    dcp_to_torch_save(path, target)
    state = torch.load(target, weights_only=False)
    assert isinstance(state, dict)
    return state


READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "FileSystemReader": read_with_torch,
    "StorageReader": read_with_distckpt,
    "FsspecReader": read_with_fsspec,
    "dcp_to_torch_save": read_converted,
}


def assert_every_reader_finds(state: dict[str, Any], path: Path) -> None:
    for name, read_checkpoint in READERS.items():
        assert_same(read_checkpoint(path), state, name)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The values of `tensor` in contiguous order, as uint8: NaN payloads and dtypes without == included."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    start = dense.storage_offset() * dense.element_size()
    return torch.empty(0, dtype=torch.uint8).set_(dense.untyped_storage(), start, (dense.nbytes,), (1,))


def assert_same(found: Any, expected: Any, where: str = "state") -> None:
    """Compare nested containers, tensors bit for bit and everything else by type and value."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), where
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert torch.equal(bits(found), bits(expected)), where
        return
    if isinstance(expected, dict):
        assert isinstance(found, dict), where
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}[{key!r}]")
        return
    assert type(found) is type(expected), where
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
        return
    assert found == expected, where


def failure_of(error: CheckpointException, rank: int = 0) -> BaseException:
    """What went wrong on `rank`."""
    failure: BaseException = error.failures[rank][0]
    return failure


class GatedPlanner(DefaultSavePlanner):
    """Makes no plan before `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert self.gate.wait(WAIT_S)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


@contextmanager
def stopped_workers(writer: StorageWriter) -> Iterator[None]:
    """Keep the worker processes from running; they must have been started by an earlier save."""
    assert writer._engine is not None
    lanes = writer._engine.lanes
    assert isinstance(lanes, WorkerLanes)
    pids = lanes.pids
    assert len(pids) == lanes.count
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def waiting_for(event_name: str) -> Iterator[Callable[[], None]]:
    """Give a function that waits until `event_name` has been emitted."""
    seen = threading.Event()
    end = observe.subscribe(lambda event: seen.set() if event.name == event_name else None)

    def wait() -> None:
        assert seen.wait(WAIT_S), f"no {event_name}"

    try:
        yield wait
    finally:
        end()

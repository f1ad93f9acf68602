"""The writers that are compared: torch's own, distckpt's, and one that writes nothing."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from measurement import Stopwatch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from distckpt import StorageWriter

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

State = dict[str, torch.Tensor]


class TimedStock(FileSystemWriter):
    """torch's writer, with the time it spends writing and publishing."""

    def __init__(self, path: str, **settings: Any) -> None:
        super().__init__(path, **settings)
        self.watch = Stopwatch()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        with self.watch.running():
            future = super().write_data(plan, planner)
            future.wait()
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self.watch.running():
            super().finish(metadata, results)


class TimedWriter(StorageWriter):
    """distckpt's writer, with the time it spends writing and publishing."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.watch = Stopwatch()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        with self.watch.running():
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self.watch.running():
            super().finish(metadata, results)


class NullWriter(TorchStorageWriter):
    """Writes nothing: what is left of a save is torch's planning."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        future: TorchFuture[list[WriteResult]] = TorchFuture()
        future.set_result([])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def save(state: State, path: Path, writer: TorchStorageWriter) -> float:
    """Return the seconds of a whole `dcp.save` to `path`, which must not exist."""
    started = time.perf_counter()
    state_dict_saver.save(state, checkpoint_id=path, storage_writer=writer, no_dist=True)
    return time.perf_counter() - started


def async_save(state: State, path: Path, writer: TorchStorageWriter | None) -> dict[str, float]:
    """Return the seconds until `dcp.async_save` to `path` returned, had staged, and was durable.

    Args:
        state: The state.
        path: Must not exist.
        writer: None for what torch takes by default.
    """
    started = time.perf_counter()
    response = state_dict_saver.async_save(state, checkpoint_id=path, storage_writer=writer, no_dist=True)
    stall_s = time.perf_counter() - started
    staged_s = stall_s
    upload: Future[Any]
    if isinstance(response, state_dict_saver.AsyncSaveResponse):
        response.staging_completion.result()
        staged_s = time.perf_counter() - started
        upload = response.upload_completion
    else:
        upload = response
    upload.result()
    return {"stall_s": stall_s, "staged_s": staged_s, "total_s": time.perf_counter() - started}


def sizes(path: Path) -> tuple[int, int]:
    """Return the bytes of a checkpoint's data files, and of all that it consists of."""
    files = {file: file.stat().st_size for file in path.rglob("*") if file.is_file()}
    return sum(n for file, n in files.items() if ".distcp" in file.name), sum(files.values())


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)

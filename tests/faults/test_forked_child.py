"""A child that was forked after a save: it has the writer, but not its memory, its workers or its locks."""

from __future__ import annotations

import os
import select
import signal
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save

from distckpt import StorageReader, StorageWriter


def exit_status(pid: int) -> int:
    """Return the exit status of a child, which is killed if it does not end."""
    pidfd = os.pidfd_open(pid)
    try:
        if not select.select([pidfd], [], [], 20)[0]:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("workers", [1, 2])
def test_parent_and_child_save_through_one_writer(tmp_path: Path, workers: int) -> None:
    with StorageWriter(dist_ckpt_workers=workers, ckpt_host_memory="64MiB") as writer:
        save({"value": torch.zeros(1000)}, checkpoint_id=tmp_path / "0", storage_writer=writer, no_dist=True)
        ours = {"value": torch.full((1000,), 1.0)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            staged = writer.stage(ours).result(10)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                theirs = {"value": torch.full((1000,), 7.0)}
                save(theirs, checkpoint_id=tmp_path / "child", storage_writer=writer, no_dist=True)
                writer.close()
                status = 0
            except Exception:  # noqa: BLE001 - the child's top frame: where a person reads it
                traceback.print_exc()
            finally:
                os._exit(status)
        assert exit_status(child) == 0
        assert torch.equal(staged["value"], ours["value"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            response = async_save(
                ours, checkpoint_id=tmp_path / "parent", storage_writer=writer, no_dist=True
            )
        assert isinstance(response, AsyncSaveResponse)
        response.upload_completion.result(30)
    for name, expected in (("parent", 1.0), ("child", 7.0)):
        loaded = {"value": torch.zeros(1000)}
        load(loaded, storage_reader=StorageReader(tmp_path / name), no_dist=True)
        assert torch.equal(loaded["value"], torch.full((1000,), expected)), name

"""Runs in a virtual machine: what every storage promises, and the life of a checkpoint, on real NFS mounts.

A line of the output for each test and version of NFS: version, test, outcome, and seconds. What fails is told
in the end.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import shutil
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from distckpt import Checkpointer, CommitError, StorageReader, StorageWriter, observe
from distckpt.cli import main as cli
from distckpt.commit import claim
from distckpt.storage import Storage, open_storage
from distckpt.storage.contract import StorageContract
from faults.checkpoints import (
    MIB,
    assert_is_clean,
    empty_like,
    error_of,
    files_in,
    load,
    on_event,
    same,
    save,
    save_in,
    say,
    state_of,
)
from faults.uml.nfs import EXPORT, MOUNT, Server
from integration.checkpoints import read_with_torch

VERSIONS = ("4.2", "3")
OTHER_MOUNT = "/run/nfs-of-another-host"
FOLDER = "work"
SERVER_BYTES = 512 * MIB
PATH = Path(MOUNT, FOLDER, "checkpoint")
ON_SERVER = Path(EXPORT, FOLDER, "checkpoint")
ELSEWHERE = Path(OTHER_MOUNT, FOLDER, "checkpoint")
NBYTES = 12 * MIB
WAYS = [(1, "sync"), (1, "async"), (2, "sync"), (2, "async")]


@pytest.fixture(autouse=True)
def _new_folder() -> Iterator[None]:
    """An empty folder, in which a test leaves no file that was removed while it was open."""
    Path(MOUNT, FOLDER).mkdir()
    yield
    gc.collect()
    left = [name for name in files_in(Path(EXPORT, FOLDER)) if ".nfs" in name]
    shutil.rmtree(Path(MOUNT, FOLDER))
    assert not left


class TestContract(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return open_storage(PATH.parent / "above" / "a b ü")


@pytest.mark.parametrize(("workers", "mode"), WAYS)
def test_a_checkpoint_is_written_and_overwritten(workers: int, mode: str) -> None:
    with StorageWriter(dist_ckpt_workers=workers) as writer:
        for seed in (1, 2):
            state = state_of(seed, NBYTES)
            save_in(mode, writer, PATH, state)
            # Through this mount, by another host, and what is on the server.
            for path in (PATH, ELSEWHERE, ON_SERVER):
                assert same(load(path, state), state)
                assert_is_clean(path)
    found = read_with_torch(PATH)
    assert torch.equal(found["model.weight0"] if "model.weight0" in found else found["model"]["weight0"],
                       state["model"]["weight0"])


@pytest.mark.parametrize("workers", [1, 2])
def test_what_another_save_left_is_swept(workers: int) -> None:
    with StorageWriter(dist_ckpt_workers=workers) as writer:
        save(writer, PATH, state_of(1))
        with on_event("files.written", _fail):
            error_of(lambda: save(writer, PATH, state_of(2)))
        # By a writer that died, on another host.
        other = open_storage(ELSEWHERE)
        other.create_image("__0_0.distcp.0123456789abcdef", 4)
        save(writer, PATH, state_of(3))
        assert same(load(PATH, state_of(3)), state_of(3))
        assert_is_clean(PATH)
        assert_is_clean(ON_SERVER)


def _fail(_: object) -> None:
    raise OSError("an event's observer fails, which harms nothing")


def test_files_that_others_read_are_removed_all_the_same() -> None:
    old, new, third = state_of(1), state_of(2), state_of(3)
    with StorageWriter() as writer:
        save(writer, PATH, old)
        images = [path for path in PATH.iterdir() if ".distcp" in path.name]
        with contextlib.ExitStack() as reading:
            files = [reading.enter_context(path.open("rb")) for path in images]
            before = [file.read(1) for file in files]
            save(writer, PATH, new)
            # The client keeps them under another name until they are closed.
            assert any(name.startswith(".nfs") for name in os.listdir(ON_SERVER))
            assert same(load(PATH, new), new)
            assert cli(["verify", str(PATH)]) == 0
            for file, byte in zip(files, before, strict=True):
                file.seek(0)
                assert file.read(1) == byte
            save(writer, PATH, third)
        assert same(load(PATH, third), third)
        assert_is_clean(ON_SERVER)


def test_the_command_line_finds_damage_done_on_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    with StorageWriter() as writer:
        save(writer, PATH, state_of(1))
    assert cli(["verify", str(PATH)]) == 0
    image = max((path for path in ON_SERVER.iterdir() if ".distcp" in path.name), key=lambda p: p.stat().st_size)
    with image.open("r+b") as file:
        file.seek(image.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, io.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    capsys.readouterr()
    assert cli(["verify", str(PATH)]) != 0
    captured = capsys.readouterr()
    assert image.name in captured.out + captured.err
    assert cli(["ls", str(PATH.parent)]) == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_is_saved_step_by_step_and_restored(workers: int) -> None:
    root = PATH.parent / "run"
    states = {step: state_of(step, NBYTES) for step in (1, 2, 3)}
    with Checkpointer(root, async_save=True, dist_ckpt_workers=workers) as checkpointer:
        for step, state in states.items():
            checkpointer.save(step, state).result(50)
        assert checkpointer.steps() == [1, 2, 3]
    with Checkpointer(Path(OTHER_MOUNT, FOLDER, "run")) as checkpointer:
        restored = empty_like(states[3])
        assert checkpointer.restore(restored) == 3
        assert same(restored, states[3])
        assert checkpointer.restore(restored, 1) == 1
        assert same(restored, states[1])


def test_a_save_that_another_host_has_overtaken_is_refused() -> None:
    old, new = state_of(1), state_of(2)
    with StorageWriter() as writer:
        save(writer, PATH, old)
        # Seen by this client, with whatever it caches of it.
        with on_event("rank.written", lambda _: claim(open_storage(ELSEWHERE), "of another host")):
            error = error_of(lambda: save(writer, PATH, new))
        assert isinstance(error, CommitError)
        assert "of another host" in str(error)
        assert same(load(PATH, old), old)
        save(writer, PATH, new)
        assert same(load(PATH, new), new)


def test_two_ranks_save_and_load() -> None:
    state = state_of(1, NBYTES)
    store = PATH.parent / "store"
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            _end_with(lambda rank=rank: _be_rank(rank, store, state))  # type: ignore[misc]
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]
    assert_is_clean(PATH)
    assert {name[:4] for name in files_in(PATH) if ".distcp" in name} == {"__0_", "__1_"}
    assert same(load(PATH, state), state)


def _end_with(call: Any) -> None:
    status = 1
    try:
        call()
        status = 0
    except BaseException:  # noqa: BLE001 - the top frame of a process
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def _be_rank(rank: int, store: Path, state: dict[str, Any]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file:///run/tmp{store}".replace(str(store), f"/{os.getppid()}"), rank=rank, world_size=2)
    mine = {"model": {f"weight{i}": state["model"][f"weight{i}"] for i in range(rank, 4, 2)}}
    if rank == 0:
        mine |= {"step": state["step"], "note": state["note"]}
    with StorageWriter(dist_ckpt_workers=1) as writer:
        state_dict_saver.save(mine, storage_writer=writer, checkpoint_id=str(PATH))
    loaded = empty_like(state)
    state_dict_loader.load(loaded, storage_reader=StorageReader(PATH))
    assert same(loaded, state)
    dist.destroy_process_group()


class Telling:
    """Has pytest say what became of each test."""

    def __init__(self, version: str) -> None:
        self._version = version

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Say it once for each test, and for what fails around it."""
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.partition("::")[2].replace(" ", "_")
            say("test", self._version, report.outcome, f"{report.duration:.2f}", name)
        if report.failed:
            sys.stderr.write(f"NFS {self._version}: {report.nodeid} ({report.when})\n{report.longreprtext}\n")


def main(arguments: list[str]) -> None:
    """Run the tests of this file on each version."""
    torch.set_num_threads(1)
    server = Server(SERVER_BYTES)
    options = [
        __file__, "-q", "--no-header", "--noconftest", "-p", "no:cacheprovider", "-c", os.devnull,
        "--rootdir", "/run", "-o", "python_files=*.py", "-W", "ignore", "--tb=short", "--capture=sys",
    ]  # fmt: skip
    for version in VERSIONS:
        server.mount(f"vers={version},hard")
        # As another host would: nothing of what it knows is shared.
        server.mount(f"vers={version},hard,nosharecache", OTHER_MOUNT)
        with contextlib.redirect_stdout(sys.stdout):
            pytest.main([*options, *arguments], plugins=[Telling(version)])
        server.unmount(OTHER_MOUNT)
        server.unmount()
    observe.emit("done")


if __name__ == "__main__":
    main(sys.argv[1:])

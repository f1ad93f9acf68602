"""Runs in a virtual machine: what every storage promises, and the life of a checkpoint, on real NFS mounts.

usage: nfs_checks.py VERSION[,VERSION...] [ARGUMENT-OF-PYTEST...]

A line of the output for each test: `test`, version, outcome, seconds, name. What fails is told beside.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import io
import itertools
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader

from distckpt import Checkpointer, CommitError, StorageReader, StorageWriter
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
from faults.uml.nfs import EXPORT, MOUNT, OTHER_MOUNT, Server, see_as_other_host

NBYTES = 12 * MIB
_TWO_RANKS_S = 25.0
"""Less than a client goes on believing what it was told of a folder."""
WAYS = [(1, "sync"), (2, "async")]


_NUMBERS = itertools.count()
_TICK_S = 0.03
"""More than the tick of the server's clock: changes of a folder within one are one to a client of NFS 3."""


class Place(NamedTuple):
    """A folder of one test, by the hosts that see it."""

    here: Path
    elsewhere: Path
    on_server: Path


@pytest.fixture
def place() -> Iterator[Place]:
    """A new folder; no file is left in it that was removed while somebody had it open."""
    name = f"test{next(_NUMBERS)}"
    Path(MOUNT, name).mkdir()
    yield Place(*(Path(root, name) for root in (MOUNT, OTHER_MOUNT, EXPORT)))
    gc.collect()
    left = [file for file in files_in(Path(EXPORT, name)) if ".nfs" in file]
    shutil.rmtree(Path(MOUNT, name))
    assert not left


class TestContract(StorageContract):
    @pytest.fixture
    def storage(self, place: Place) -> Storage:
        return open_storage(place.here / "above" / "a b ü")


@pytest.mark.parametrize(("workers", "mode"), WAYS)
def test_a_checkpoint_is_written_and_overwritten(place: Place, workers: int, mode: str) -> None:
    states = [state_of(seed, NBYTES) for seed in (1, 2)]
    with StorageWriter(dist_ckpt_workers=workers) as writer:
        for state in states:
            save_in(mode, writer, place.here, state)
            for path in place:
                assert same(load(path, state), state), path
                assert_is_clean(path)
    found = empty_like(states[1])
    state_dict_loader.load(found, storage_reader=FileSystemReader(place.here))
    assert same(found, states[1])


@pytest.mark.parametrize("workers", [1, 2])
def test_what_another_save_left_is_swept(place: Place, workers: int) -> None:
    with StorageWriter(dist_ckpt_workers=workers) as writer:
        save(writer, place.here, state_of(1))
        # By a writer on another host, which was overtaken in the middle, and by one that died.
        other = open_storage(place.elsewhere)
        with on_event("files.written", lambda _: claim(other, "another")):
            error_of(lambda: save(writer, place.here, state_of(2)))
        other.create_image("__0_0.distcp.0123456789abcdef0123456789abcdef", 4)
        save(writer, place.here, state_of(3))
    assert same(load(place.here, state_of(3)), state_of(3))
    assert_is_clean(place.on_server)


def test_files_that_others_read_are_removed_all_the_same(place: Place) -> None:
    old, new, third = state_of(1), state_of(2), state_of(3)
    with StorageWriter() as writer:
        save(writer, place.here, old)
        images = [path for path in place.here.iterdir() if ".distcp" in path.name]
        with contextlib.ExitStack() as reading:
            files = [reading.enter_context(path.open("rb")) for path in images]
            before = [file.read(1) for file in files]
            save(writer, place.here, new)
            # The client keeps them under another name until they are closed.
            assert any(name.startswith(".nfs") for name in os.listdir(place.on_server))
            assert same(load(place.here, new), new)
            assert cli(["verify", str(place.here)]) == 0
            for file, byte in zip(files, before, strict=True):
                file.seek(0)
                assert file.read(1) == byte
            save(writer, place.here, third)
    assert same(load(place.here, third), third)
    assert_is_clean(place.on_server)


def test_the_command_line_finds_damage_done_on_the_server(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    with StorageWriter() as writer:
        save(writer, place.here, state_of(1))
    assert cli(["verify", str(place.here)]) == 0
    images = [path for path in place.on_server.iterdir() if ".distcp" in path.name]
    image = max(images, key=lambda path: path.stat().st_size)
    with image.open("r+b") as file:
        file.seek(image.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, io.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    capsys.readouterr()
    assert cli(["verify", str(place.elsewhere)]) != 0
    captured = capsys.readouterr()
    assert image.name in captured.out + captured.err


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_is_saved_step_by_step_and_restored(place: Place, workers: int) -> None:
    states = {step: state_of(step, NBYTES) for step in (1, 2, 3)}
    with (
        Checkpointer(place.here / "run", async_save=True, dist_ckpt_workers=workers) as checkpointer,
        Checkpointer(place.elsewhere / "run") as other,
    ):
        assert other.restore(empty_like(states[1])) is None
        for step, state in states.items():
            checkpointer.save(step, state).result(50)
            time.sleep(_TICK_S)
            restored = empty_like(state)
            # By a host that has looked there a moment ago.
            assert other.restore(restored) == step
            assert same(restored, state)
        assert checkpointer.steps() == other.steps() == [1, 2, 3]
        restored = empty_like(states[1])
        assert other.restore(restored, 1) == 1
        assert same(restored, states[1])


def test_what_another_host_makes_is_found_at_once(place: Place) -> None:
    here, elsewhere = open_storage(place.here / "new"), open_storage(place.elsewhere / "new")
    assert elsewhere.list() == {}
    assert elsewhere.read("folder/file") is None
    time.sleep(_TICK_S)
    here.prepare()
    here.put("folder/file", b"bytes")
    time.sleep(_TICK_S)
    # A client believes for half a minute that there is no such file, unless it is told to look again.
    assert bytes(elsewhere.read("folder/file") or b"") == b"bytes"
    assert elsewhere.list() == {"folder/": 0}
    assert elsewhere.list("other/") == {}
    time.sleep(_TICK_S)
    here.put("other/file", b"more bytes")
    here.put("folder/file", b"other bytes")
    time.sleep(_TICK_S)
    assert elsewhere.list("other/") == {"file": 10}
    assert bytes(elsewhere.read("folder/file") or b"") == b"other bytes"


def test_a_save_that_another_host_has_overtaken_is_refused(place: Place) -> None:
    old, new = state_of(1), state_of(2)
    with StorageWriter() as writer:
        save(writer, place.here, old)
        with on_event("rank.written", lambda _: claim(open_storage(place.elsewhere), "of another host")):
            error = error_of(lambda: save(writer, place.here, new))
        assert isinstance(error, CommitError)
        assert "of another host" in str(error)
        assert same(load(place.here, old), old)
        save(writer, place.here, new)
    assert same(load(place.elsewhere, new), new)


def test_ranks_on_two_hosts_save_and_load(place: Place) -> None:
    state = state_of(1, NBYTES)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as meeting:
        pids = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                _end_with(functools.partial(_be_rank, rank, place.here, f"{meeting}/store", state))
            pids.append(pid)
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]
    assert time.monotonic() - started < _TWO_RANKS_S
    for path in (place.here / "checkpoint", place.here / "run" / "step-00000003"):
        images = {name for name in files_in(path) if ".distcp" in name}
        assert {name[:4] for name in images} == {"__0_", "__1_"}
        assert cli(["verify", str(path)]) == 0
        assert same(load(path, state), state)


def _end_with(call: Callable[[], None]) -> None:
    """End this process, which was forked, once `call` has returned."""
    status = 1
    try:
        call()
        status = 0
    except BaseException:  # noqa: BLE001 - the top frame of a process
        traceback.print_exc(file=sys.__stderr__)
    os._exit(status)


def _be_rank(rank: int, folder: Path, meeting: str, state: dict[str, Any]) -> None:
    faulthandler.dump_traceback_later(_TWO_RANKS_S, exit=True, file=2)
    if rank == 1:
        see_as_other_host()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    mine = {"model": {f"weight{i}": state["model"][f"weight{i}"] for i in range(rank, 4, 2)}}
    if rank == 0:
        mine |= {"step": state["step"], "note": state["note"]}
    with StorageWriter(dist_ckpt_workers=1) as writer:
        state_dict_saver.save(mine, storage_writer=writer, checkpoint_id=str(folder / "checkpoint"))
    # Which find each other through files.
    with Checkpointer(folder / "run") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, mine).result(_TWO_RANKS_S)
    loaded = empty_like(state)
    state_dict_loader.load(loaded, storage_reader=StorageReader(folder / "checkpoint"))
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


def main(versions: str, *arguments: str) -> None:
    """Run the tests of this file on each version."""
    torch.set_num_threads(1)
    # Whose file system counts changes, as those of most servers do.
    server = Server()
    server.add_host()
    options = [
        __file__,
        "-c",
        os.devnull,
        "--rootdir",
        "/run",
        "--noconftest",
        "-o",
        "python_files=*.py",
        "-s",
    ]
    for plugin in ("cacheprovider", "logging", "terminal"):
        options += ["-p", f"no:{plugin}"]
    for version in versions.split(","):
        server.mount(f"vers={version},hard")
        server.mount_on_other_host(f"vers={version},hard")
        pytest.main([*options, *arguments], plugins=[Telling(version)])
        server.unmount(OTHER_MOUNT)
        server.unmount()


if __name__ == "__main__":
    main(*sys.argv[1:])

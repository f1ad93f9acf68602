"""A real NFS server that is away, full or loses a file, under real mounts, in a virtual machine."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distckpt.errors import WriteError
from distckpt.storage.posix import PosixStorage
from faults.uml import machine
from faults.uml.nfs_faults import AWAY_S, CASES, DEADLINE_S, PATH

PROGRAM = Path(__file__).with_name("uml") / "nfs_faults.py"
CLEARING_UP_S = 25.0
"""What a save may take beyond its deadline: lanes are given time to end, and workers to die."""

Seen = dict[str, Any]


@pytest.fixture(scope="module")
def all_seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """What every case has seen, by its name; one machine for all, which takes a while to import torch."""
    missing = machine.why_not(*machine.NFS_TOOLS)
    if missing is not None:
        pytest.skip(missing)
    done = machine.run(PROGRAM, folder=tmp_path_factory.mktemp("machine"), timeout_s=280)
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert done.status == 0, done.err
    return {line["name"]: line for line in lines}


@pytest.fixture
def seen(all_seen: dict[str, Seen], request: pytest.FixtureRequest) -> Seen:
    """What one case has seen; it has checked that the next save works, and leaves nothing of those before."""
    found = all_seen[request.param]
    assert "failure" not in found, found["failure"]
    return found


def cases(*words: str) -> pytest.MarkDecorator:
    """Run a test with every case whose name begins with `words`."""
    names = [name for name in CASES if name.split()[: len(words)] == list(words)]
    assert names, words
    # They share one virtual machine, which takes minutes for all of them.
    params = [pytest.param(name, marks=pytest.mark.thorough) for name in names]
    return pytest.mark.parametrize("seen", params, indirect=True)


def assert_names_the_file(seen: Seen) -> None:
    assert seen["path"].startswith(f"{PATH}/__0_"), seen
    assert seen["path"] in seen["message"], seen
    assert (seen["rank"], seen["lane"]) in {(0, 0), (0, 1)}, seen


@pytest.mark.slow
@pytest.mark.timeout(300)
@cases("outage")
def test_a_hard_mount_outlives_its_server(seen: Seen) -> None:
    assert (seen["error"], seen["found"]) == (None, "new"), seen
    assert seen["seconds"] >= AWAY_S


@pytest.mark.slow
@pytest.mark.timeout(300)
@cases("packets")
def test_a_hard_mount_outlives_its_network(seen: Seen) -> None:
    assert (seen["error"], seen["found"]) == (None, "new"), seen
    assert seen["seconds"] >= AWAY_S


@pytest.mark.slow
@pytest.mark.timeout(300)
@cases("refusal")
def test_a_soft_mount_without_its_server_fails_the_save(seen: Seen) -> None:
    assert (seen["error"], seen["found"]) == ("WriteError", "old"), seen
    assert seen["errno"] == (errno.ETIMEDOUT if "softerr" in seen["name"] else errno.EIO), seen
    assert_names_the_file(seen)


@pytest.mark.slow
@pytest.mark.timeout(300)
@cases("full")
def test_a_full_server_fails_the_save(seen: Seen) -> None:
    assert (seen["error"], seen["errno"], seen["found"]) == ("WriteError", errno.ENOSPC, "old"), seen
    assert_names_the_file(seen)
    assert not [name for name in seen["left"] if ".distcp" in name.split("/")[0]], "images are removed"


@pytest.mark.slow
@pytest.mark.timeout(300)
@cases("removed")
def test_a_file_that_was_removed_on_the_server_is_not_published(seen: Seen) -> None:
    # Writing to it fails with ESTALE by version 3, once the server has closed it, and not at all by 4.2.
    assert seen["error"] in {"WriteError", "CommitError"}, seen
    assert seen["errno"] in {errno.ESTALE, errno.ENOENT, None}, seen
    assert seen["found"] == "old", seen
    assert f"{PATH}/__0_" in seen["message"], seen


@pytest.mark.slow
@pytest.mark.timeout(300)
@cases("gone")
def test_a_hard_mount_whose_server_is_gone_ends_the_save_at_its_deadline(seen: Seen) -> None:
    assert (seen["error"], seen["errno"], seen["found"]) == ("WriteError", errno.ETIMEDOUT, "old"), seen
    assert seen["path"].startswith(PATH), seen
    assert PATH in seen["message"], seen
    assert DEADLINE_S <= seen["seconds"] < DEADLINE_S + CLEARING_UP_S, seen


PASSING = (errno.ESTALE, errno.EAGAIN, errno.EIO)
LOOKS: dict[str, tuple[str, Callable[[PosixStorage], object], object]] = {
    "read": ("preadv", lambda storage: storage.read("file"), bytearray(b"data")),
    "list": ("scandir", lambda storage: storage.list(), {"file": 4}),
    "complete": ("lstat", lambda storage: storage.complete_image("file", "", 4, ()), None),
}


class Failing:
    """Fails the first calls of a function of `os`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, number: int, times: float) -> None:
        self.calls = 0
        self._call = getattr(os, name)
        self._number = number
        self._times = times
        monkeypatch.setattr(os, name, self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls <= self._times:
            raise OSError(self._number, os.strerror(self._number))
        return self._call(*arguments, **named)


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    opened = PosixStorage(str(tmp_path / "checkpoint"))
    opened.prepare()
    opened.put("file", b"data")
    return opened


@pytest.mark.parametrize("number", PASSING)
@pytest.mark.parametrize("look", LOOKS)
def test_what_only_looks_is_tried_again_after_an_error_that_passes(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch, look: str, number: int
) -> None:
    name, call, expected = LOOKS[look]
    failing = Failing(monkeypatch, name, number, times=2)
    assert call(storage) == expected
    assert failing.calls >= 3


@pytest.mark.parametrize(("number", "calls"), [(errno.EAGAIN, 3), (errno.EIO, 3), (errno.EACCES, 1)])
@pytest.mark.parametrize("look", LOOKS)
def test_an_error_that_does_not_pass_is_raised(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch, look: str, number: int, calls: int
) -> None:
    name, call, _ = LOOKS[look]
    failing = Failing(monkeypatch, name, number, times=float("inf"))
    with pytest.raises(WriteError) as caught:
        call(storage)
    assert (caught.value.errno, failing.calls) == (number, calls)


@pytest.mark.parametrize("look", ["read", "list"])
def test_what_stays_stale_is_looked_at_anew(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    name, call, expected = LOOKS[look]
    Failing(monkeypatch, name, errno.ESTALE, times=4)
    assert call(storage) == expected
    monkeypatch.undo()
    failing = Failing(monkeypatch, name, errno.ESTALE, times=float("inf"))
    with pytest.raises(WriteError):
        call(storage)
    assert failing.calls == 6


def test_what_failed_to_become_durable_is_never_synced_again(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.create_image("image", 4)
    image = storage.open_image("image")
    image.write(0, [memoryview(b"data")])
    failing = Failing(monkeypatch, "fsync", errno.EIO, times=1)
    with pytest.raises(WriteError) as caught:
        image.finish()
    assert (caught.value.errno, failing.calls) == (errno.EIO, 1)
    failing = Failing(monkeypatch, "fsync", errno.EIO, times=1)
    with pytest.raises(WriteError):
        storage.put("file", b"new")
    assert failing.calls == 1
    assert storage.read("file") == bytearray(b"data")


def test_an_image_that_was_given_up_is_written_no_further_and_closed(storage: PosixStorage) -> None:
    storage.create_image("image", 0)
    image = storage.open_image("image")
    descriptors = set(os.listdir("/proc/self/fd"))
    image.write(0, [memoryview(b"data")])
    image.cancel()
    for nbytes in (4, 4 << 20):
        with pytest.raises(WriteError, match="ECANCELED"):
            image.write(0, [memoryview(bytes(nbytes))])
    assert storage.read("image") == bytearray(b"data")
    # Nobody closes what a thread that was given up has in its hands.
    del image
    assert len(set(os.listdir("/proc/self/fd"))) < len(descriptors)

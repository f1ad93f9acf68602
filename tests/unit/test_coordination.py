"""A process's place in a save, the deadline of its waits, and where ranks leave word for each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from distckpt import coordination
from distckpt.coordination import (
    Coordinator,
    Participant,
    ProgressDeadline,
    SingleCoordinator,
    StorageCoordinator,
    StoreCoordinator,
)
from distckpt.errors import CommitError, ConfigError

Join = Callable[..., Coordinator]


@pytest.mark.parametrize(
    ("is_coordinator", "use_collectives", "publishes"),
    [(True, True, True), (False, True, False), (True, False, True), (False, False, True)],
)
def test_who_publishes(is_coordinator: bool, use_collectives: bool, publishes: bool) -> None:
    assert Participant(1, is_coordinator, use_collectives).publishes is publishes


def test_a_process_alone_publishes() -> None:
    assert Participant() == Participant(0, True, True)
    assert Participant().publishes


def test_a_deadline_moves_on_with_progress_only() -> None:
    now = [100.0]
    deadline = ProgressDeadline(10, clock=lambda: now[0])
    passed = []
    for now[0] in (110, 110.1):
        passed.append(deadline.passed)
    deadline.progress()
    for now[0] in (110.1, 120, 120.2):
        passed.append(deadline.passed)
    assert passed == [False, True, False, False, True]
    assert deadline.idle_s == pytest.approx(10.1)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "_num_coordinators", Counter())


@pytest.fixture(params=["TCPStore", "FileStore", "prefix", "storage"])
def join(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Join]:
    """Let participants join, each through a client of its own where there are such."""
    if request.param == "storage":

        def on_storage(rank: int, ranks: list[int], name: str = "job") -> Coordinator:
            return StorageCoordinator(tmp_path, rank, ranks, job=name)

        yield on_storage
        return
    server = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)

    def on_store(rank: int, ranks: list[int], name: str = "job") -> Coordinator:
        store: Store = server
        if request.param == "FileStore":
            store = FileStore(str(tmp_path / "store"), -1)
        elif request.param == "prefix":
            store = PrefixStore("of the job", server)
        return StoreCoordinator(store, rank, ranks, name)

    yield on_store


def test_what_one_tells_others_hear(join: Join) -> None:
    ranks = [3, 5, 4]
    three, five, four = (join(rank, ranks) for rank in ranks)
    assert [one.rank for one in (three, five, four)] == [0, 1, 2]
    assert three.ranks == (3, 5, 4)
    assert four.hear([]) == four.hear(["a.0"]) == four.hear(["a.0", "a.1"]) == {}
    three.tell("a.0", b"first")
    five.tell("a.1", b"\x00\xff" * 1000)
    assert four.hear(["a.0", "a.1"]) == {"a.0": b"first", "a.1": b"\x00\xff" * 1000}
    three.tell("a.0", b"")
    assert four.hear(["a.2", "a.0", "b.0"]) == {"a.0": b""}
    four.forget(["a.0", "a.7"])
    assert three.hear(["a.0", "a.1"]).keys() == {"a.1"}


def test_names_keep_apart(join: Join) -> None:
    one, other = join(0, [0, 1], "one"), join(0, [0, 1], "other")
    one.tell("a.0", b"one")
    assert other.hear(["a.0"]) == {}


def test_nobody_waits_for_what_is_not_there(join: Join) -> None:
    one = join(1, [0, 1])
    started = time.monotonic()
    one.hear(["x.0"])
    one.hear([f"x.{number}" for number in range(50)])
    one.forget(["x.0"])
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(("rank", "ranks", "said"), [(2, [0, 1], "none of"), (1, [1, 0, 1], "named twice")])
def test_who_is_not_among_them_is_refused(join: Join, rank: int, ranks: list[int], said: str) -> None:
    with pytest.raises(ConfigError, match=f"participants: .*{said}"):
        join(rank, ranks)


def test_a_store_that_is_gone_is_an_error() -> None:
    server = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=2))
    client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=2))
    one = StoreCoordinator(client, 0, [0, 1])
    del server

    def tell_often() -> None:
        # The first may end in a buffer.
        for number in range(100):
            one.tell(f"a.{number}", b"word")

    with pytest.raises(CommitError, match="store of the participants cannot be reached"):
        tell_often()


@pytest.mark.parametrize("job", ["", "a/b", "..", ".x", "a b"])
def test_a_job_that_is_no_name_is_refused(tmp_path: Path, job: str) -> None:
    with pytest.raises(ConfigError, match="job: expected"):
        StorageCoordinator(tmp_path, 0, [0, 1], job=job)


def test_a_job_that_was_used_before_is_refused(tmp_path: Path) -> None:
    StorageCoordinator(tmp_path, 0, [0, 1], job="7")
    StorageCoordinator(tmp_path, 1, [0, 1], job="7")
    with pytest.raises(ConfigError, match="'7' was used before, by rank 0"):
        StorageCoordinator(tmp_path, 0, [0, 1], job="7")


def test_what_runs_before_have_left_goes(tmp_path: Path) -> None:
    for job in ("old", "young"):
        StorageCoordinator(tmp_path, 0, [0, 1], job=job).tell("1.1.0", b"word")
    old = tmp_path / ".distckpt" / "job-old"
    for path in (*old.iterdir(), old):
        os.utime(path, (time.time() - 1000,) * 2)
    (tmp_path / ".distckpt" / "other").mkdir()
    StorageCoordinator(tmp_path, 1, [0, 1], job="new", timeout_s=30)
    assert old.exists(), "only the first of the ranks clears away"
    StorageCoordinator(tmp_path, 0, [0, 1], job="new", timeout_s=30)
    assert sorted(path.name for path in (tmp_path / ".distckpt").iterdir()) == [
        "job-new",
        "job-young",
        "other",
    ]


def test_one_process_tells_nobody() -> None:
    alone = SingleCoordinator(3)
    alone.tell("a.0", b"word")
    alone.forget(["a.0"])
    assert alone.hear(["a.0"]) == {}
    assert (alone.rank, alone.ranks) == (0, (3,))


def test_a_store_that_stops_answering_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped: the client of such a store waits for ever."""
    monkeypatch.setattr(coordination, "_STORE_TIMEOUT_S", 0.5)
    serve = (
        "from torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", serve], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        client = TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False, wait_for_workers=False)
        one = StoreCoordinator(client, 0, [0, 1])
        one.tell("a.0", b"word")
        server.send_signal(signal.SIGSTOP)
        while psutil.Process(server.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        started = time.monotonic()
        with pytest.raises(CommitError, match="has not answered for"):
            one.hear(["a.0", "a.1"])
        with pytest.raises(CommitError, match="has stopped answering"):
            one.tell("a.0", b"word")
        assert time.monotonic() - started < 20
        server.kill()


def test_two_of_one_name_are_kept_apart(join: Join) -> None:
    first = [join(rank, [0, 1]) for rank in (0, 1)] if join.__name__ == "on_store" else []
    second = [join(rank, [0, 1]) for rank in (0, 1)] if first else []
    for one in first[:1]:
        one.tell("1.1.0", b"yesterday")
    for one in second[1:]:
        assert one.hear(["1.1.0"]) == {}

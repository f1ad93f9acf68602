"""Calls of a storage that take too long are given up, and do no harm afterwards."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from distckpt.errors import WriteError
from distckpt.storage import Receipt, Storage, bounded, fill
from distckpt.storage.bounded import Bounded
from distckpt.storage.posix import PosixStorage
from unit.interrupts import is_interrupted

WAIT_S = 10.0
SHORT_S = 0.1


class Stuck(PosixStorage):
    """A directory that can be gone: then no call returns before it is back."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.is_back = threading.Event()
        self.is_back.set()
        self.threads: list[threading.Thread] = []
        self.ended = 0

    def pass_gate(self) -> None:
        self.threads.append(threading.current_thread())
        assert self.is_back.wait(WAIT_S)
        self.ended += 1

    def prepare(self) -> None:
        self.pass_gate()
        super().prepare()

    def create_image(self, name: str, nbytes: int) -> str:
        self.pass_gate()
        return super().create_image(name, nbytes)

    def complete_image(self, name: str, token: str, nbytes: int, receipts: Sequence[Receipt]) -> None:
        self.pass_gate()
        super().complete_image(name, token, nbytes, receipts)

    def discard_image(self, name: str, token: str) -> None:
        self.pass_gate()
        super().discard_image(name, token)

    def unfinished(self) -> list[tuple[str, str]]:
        self.pass_gate()
        return super().unfinished()

    def abort(self, name: str, handle: str) -> None:
        self.pass_gate()
        super().abort(name, handle)

    def put(self, name: str, data: bytes, last_check: Callable[[], None] | None = None) -> None:
        self.pass_gate()
        super().put(name, data, last_check)

    def revoke(self, name: str) -> None:
        self.pass_gate()
        super().revoke(name)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray | None:
        self.pass_gate()
        return super().read(name, offset, nbytes)

    def fill(self, name: str, offset: int, target: memoryview) -> int | None:
        self.pass_gate()
        return super().fill(name, offset, target)

    def list(self, prefix: str = "") -> dict[str, int]:
        self.pass_gate()
        return super().list(prefix)

    def delete(self, name: str) -> None:
        self.pass_gate()
        super().delete(name)

    def last_change(self) -> float | None:
        self.pass_gate()
        return super().last_change()

    def remove_directory(self) -> bool:
        self.pass_gate()
        return super().remove_directory()


CALLS: dict[str, tuple[Callable[[Storage], object], str]] = {
    "prepare": (lambda storage: storage.prepare(), ""),
    "create_image": (lambda storage: storage.create_image("a.distcp", 4), "/a.distcp"),
    "complete_image": (lambda storage: storage.complete_image("old.distcp", "", 3, []), "/old.distcp"),
    "discard_image": (lambda storage: storage.discard_image("old.distcp", ""), "/old.distcp"),
    "unfinished": (lambda storage: storage.unfinished(), ""),
    "abort": (lambda storage: storage.abort("a.distcp", "1"), "/a.distcp"),
    "put": (lambda storage: storage.put("a/b", b"new"), "/a/b"),
    "revoke": (lambda storage: storage.revoke("old"), "/old"),
    "read": (lambda storage: storage.read("old"), "/old"),
    "fill": (lambda storage: fill(storage, "old", 0, memoryview(bytearray(3))), "/old"),
    "list": (lambda storage: storage.list(), ""),
    "delete": (lambda storage: storage.delete("old"), "/old"),
    "last_change": (lambda storage: storage.last_change(), ""),
    "remove_directory": (lambda storage: storage.remove_directory(), ""),
}


@pytest.fixture(autouse=True)
def _short_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "_IDLE_S", 0.1)


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[Stuck]:
    storage = Stuck(str(tmp_path / "checkpoint"))
    PosixStorage(storage.root).prepare()
    for name in ("old", "old.distcp"):
        Path(storage.root, name).write_bytes(b"old")
    yield storage
    storage.is_back.set()
    for thread in storage.threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert not bounded._stuck


def error_of(call: Callable[[], object]) -> WriteError:
    with pytest.raises(WriteError) as caught:
        call()
    return caught.value


def read(storage: Storage) -> bytes:
    return bytes(storage.read("old") or b"absent")


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_every_call_of_the_protocol_is_known_here() -> None:
    names = {name for name in vars(Storage) if not name.startswith("_") and callable(getattr(Storage, name))}
    assert names | {"fill"} == {*CALLS, "open_image", "part_bytes"}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_does_not_return_is_given_up_by_name(stuck: Stuck, name: str) -> None:
    call, path = CALLS[name]
    stuck.is_back.clear()
    started = time.monotonic()
    error = error_of(lambda: call(Bounded(stuck, SHORT_S)))
    assert SHORT_S <= time.monotonic() - started < SHORT_S + 2
    assert (error.errno, error.path) == (errno.ETIMEDOUT, stuck.root + path)
    assert f"cannot {bounded_words(str(error))} {stuck.root}{path}: no answer within 0.1 s" in str(error)


def bounded_words(message: str) -> str:
    """The words between `cannot` and the path: some, and not the same for all."""
    words = message.removeprefix("cannot ").partition(" /")[0]
    assert words
    return words


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_returns_does_what_it_does_without(stuck: Stuck, tmp_path: Path, name: str) -> None:
    call, _ = CALLS[name]
    twin = PosixStorage(str(tmp_path / "twin"))
    twin.prepare()
    for file in ("old", "old.distcp"):
        Path(twin.root, file).write_bytes(b"old")
    found, expected = call(Bounded(stuck, WAIT_S)), call(twin)
    if name == "last_change":
        assert isinstance(found, float)
    else:
        assert found == expected
    assert content(stuck.root) == content(twin.root)
    assert stuck.threads[0] is not threading.current_thread()


def content(root: str) -> dict[str, bytes]:
    paths = Path(root).rglob("*")
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else b"" for path in paths}


def test_what_it_says_of_itself_is_what_the_other_storage_says(stuck: Stuck) -> None:
    stuck.in_flight, stuck.is_stream = 3, True
    storage: Storage = Bounded(stuck, WAIT_S)
    assert isinstance(storage, Storage)
    assert (storage.url, storage.spec) == (stuck.url, stuck.spec)
    assert (storage.in_flight, storage.is_stream, storage.part_bytes(1 << 30)) == (3, True, 0)
    storage.open_image("old.distcp", "").close()


def test_an_error_is_that_of_the_call(stuck: Stuck) -> None:
    error = error_of(lambda: Bounded(stuck, WAIT_S).create_image("old", 0))
    assert (error.errno, error.path) == (errno.EEXIST, f"{stuck.root}/old")
    assert isinstance(error.__cause__, FileExistsError)


def test_one_thread_serves_calls_that_follow_each_other(stuck: Stuck) -> None:
    storage = Bounded(stuck, WAIT_S)
    for _ in range(20):
        storage.list()
        with pytest.raises(WriteError):
            storage.create_image("old", 0)
    assert len(set(stuck.threads)) == 1


def test_a_thread_ends_when_it_has_nothing_to_do(stuck: Stuck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "_IDLE_S", 0.02)
    storage = Bounded(stuck, WAIT_S)
    storage.list()
    stuck.threads[0].join(WAIT_S)
    assert not stuck.threads[0].is_alive()
    storage.list()
    assert stuck.threads[1] is not stuck.threads[0]


def test_calls_and_idle_ends_never_miss_each_other(stuck: Stuck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "_IDLE_S", 0.001)
    storage = Bounded(stuck, WAIT_S)
    for count in range(200):
        storage.read("old")
        time.sleep(0.0008 + count % 5 * 0.0001)
    assert len(set(stuck.threads)) > 1


def test_threads_may_call_at_once(stuck: Stuck) -> None:
    storage = Bounded(stuck, WAIT_S)
    stuck.is_back.clear()
    found: list[object] = []
    callers = [threading.Thread(target=lambda: found.append(storage.read("old"))) for _ in range(3)]
    for caller in callers:
        caller.start()
    wait_until(lambda: len(set(stuck.threads)) == 3)
    stuck.is_back.set()
    for caller in callers:
        caller.join(WAIT_S)
    assert found == [bytearray(b"old")] * 3


def test_a_stuck_call_holds_up_no_other(stuck: Stuck) -> None:
    storage = Bounded(stuck, SHORT_S)
    stuck.is_back.clear()
    error_of(storage.list)
    threading.Timer(SHORT_S / 10, stuck.is_back.set).start()
    assert read(storage) == b"old"
    assert stuck.threads[0] is not stuck.threads[1]


def test_after_a_few_stuck_calls_the_next_fails_at_once(stuck: Stuck, tmp_path: Path) -> None:
    stuck.is_back.clear()
    for _ in range(bounded._MOST_STUCK):
        error_of(Bounded(stuck, 0.01).list)
    started = time.monotonic()
    # Whoever asks: each step of a run has a storage of its own.
    beside = Stuck(str(tmp_path / "beside"))
    error = error_of(lambda: Bounded(beside, WAIT_S).read("old"))
    assert time.monotonic() - started < WAIT_S / 2
    assert (error.errno, error.path) == (errno.ETIMEDOUT, f"{beside.root}/old")
    assert "not tried" in str(error)
    assert not beside.threads
    elsewhere = Stuck(str(tmp_path / "else" / "where"))
    assert Bounded(elsewhere, WAIT_S).list() == {}
    stuck.is_back.set()
    wait_until(lambda: not bounded._stuck)
    assert Bounded(beside, WAIT_S).read("old") is None


def test_calls_that_were_interrupted_and_have_returned_are_not_stuck(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_run, run = threading.Event(), bounded._Call.run

    def run_and_tell(call: Any) -> None:
        run(call)
        has_run.set()

    class Interrupted(SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            if threading.current_thread() is threading.main_thread():
                # As late as can be: the thread has replied, and is through with the call.
                assert has_run.wait(WAIT_S)
                has_run.clear()
                raise KeyboardInterrupt
            return super().get(block, timeout)

    storage = Bounded(stuck, WAIT_S)
    with monkeypatch.context() as interrupting:
        interrupting.setattr(bounded._Call, "run", run_and_tell)
        interrupting.setattr(bounded, "SimpleQueue", Interrupted)
        for _ in range(bounded._MOST_STUCK + 1):
            with pytest.raises(KeyboardInterrupt):
                storage.list()
    assert not bounded._stuck
    assert read(storage) == b"old"


@pytest.mark.slow
@pytest.mark.parametrize("has_thread", [False, True])
def test_an_interrupt_anywhere_leaves_no_thread_and_no_stuck_call(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch, has_thread: bool
) -> None:
    monkeypatch.setattr(bounded, "_IDLE_S", 0.05)
    storage = Bounded(stuck, WAIT_S)
    for at in itertools.count():
        wait_until(lambda: not threads_of_storage())
        if has_thread:
            storage.list()
        if not is_interrupted(storage.list, at, Bounded._call, bounded._hand_over):
            break
        assert read(storage) == b"old"
        wait_until(lambda: not bounded._stuck)
    assert at > 10
    wait_until(lambda: not threads_of_storage())
    assert not any(runner.pid == os.getpid() for runner in bounded._idle)


def threads_of_storage() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "distckpt-storage"]


def test_a_call_that_was_interrupted_and_does_not_return_is_stuck(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            if threading.current_thread() is threading.main_thread():
                wait_until(lambda: len(stuck.threads) > len(bounded._stuck))
                raise KeyboardInterrupt
            return super().get(block, timeout)

    storage = Bounded(stuck, WAIT_S)
    stuck.is_back.clear()
    with monkeypatch.context() as interrupting:
        interrupting.setattr(bounded, "SimpleQueue", Interrupted)
        for _ in range(bounded._MOST_STUCK):
            with pytest.raises(KeyboardInterrupt):
                storage.list()
    assert "not tried" in str(error_of(storage.list))
    stuck.is_back.set()
    wait_until(lambda: not bounded._stuck)


def test_a_call_that_was_given_up_before_it_began_is_not_made() -> None:
    made: list[int] = []
    call = bounded._Call(made.append, (1,))
    call.is_given_up = True
    call.run()
    assert not made
    assert not call.is_running


def test_a_thread_that_ended_when_it_was_taken_is_given_nothing(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "_IDLE_S", 0.001)
    ended = bounded._Runner(bounded._Call(int, ()))
    thread = threading.Thread(target=ended.run)
    thread.start()
    thread.join(WAIT_S)
    assert not ended.accept(bounded._Call(int, ()))
    bounded._idle.append(ended)
    assert read(Bounded(stuck, WAIT_S)) == b"old"


def test_a_last_check_decides_within_its_time(stuck: Stuck) -> None:
    storage = Bounded(stuck, WAIT_S)
    seen: list[bytes] = []
    # It asks the same storage, as the check of a claim does.
    storage.put("old", b"new", last_check=lambda: seen.append(read(storage)))
    assert (seen, read(storage)) == ([b"old"], b"new")

    def refuse() -> None:
        raise KeyError("overtaken")

    with pytest.raises(KeyError, match="overtaken"):
        storage.put("old", b"newer", last_check=refuse)
    assert read(storage) == b"new"


def test_no_last_check_is_asked_after_the_call_was_given_up(stuck: Stuck) -> None:
    asked: list[str] = []
    stuck.is_back.clear()
    error_of(lambda: Bounded(stuck, SHORT_S).put("old", b"late", last_check=lambda: asked.append("too late")))
    stuck.is_back.set()
    wait_until(lambda: not bounded._stuck)
    assert not asked
    assert content(stuck.root) == {"old": b"old", "old.distcp": b"old"}


def test_a_last_check_under_way_when_the_call_is_given_up_does_not_pass(stuck: Stuck) -> None:
    go_on = threading.Event()

    def pass_late() -> None:
        assert go_on.wait(WAIT_S)

    error_of(lambda: Bounded(stuck, SHORT_S).put("old", b"late", last_check=pass_late))
    go_on.set()
    wait_until(lambda: not bounded._stuck)
    assert content(stuck.root) == {"old": b"old", "old.distcp": b"old"}


def test_a_call_that_was_given_up_ends_its_thread_when_it_returns(stuck: Stuck) -> None:
    storage = Bounded(stuck, SHORT_S)
    stuck.is_back.clear()
    error_of(lambda: storage.put("late", b"late"))
    assert not Path(stuck.root, "late").exists()
    stuck.is_back.set()
    stuck.threads[0].join(WAIT_S)
    assert not stuck.threads[0].is_alive()
    # Without a last check it is as good late as in time.
    assert Path(stuck.root, "late").read_bytes() == b"late"


def test_what_a_call_was_given_does_not_outlive_it(stuck: Stuck) -> None:
    class Check:
        def __call__(self) -> None:
            """Pass."""

    storage = Bounded(stuck, WAIT_S)
    check = Check()
    gone = weakref.ref(check)
    gc.disable()
    try:
        storage.put("old", b"new", last_check=check)
        del check
        wait_until(lambda: gone() is None)
    finally:
        gc.enable()


def test_a_forked_child_starts_a_thread_of_its_own(stuck: Stuck) -> None:
    storage = Bounded(stuck, WAIT_S)
    storage.list()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if read(storage) == b"old" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_process_ends_with_a_call_that_never_returns(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    program = f"""
from distckpt.storage.bounded import Bounded
from distckpt.storage.posix import PosixStorage
class Never(PosixStorage):
    def list(self, prefix=""):
        open({str(tmp_path / "pipe")!r}).read()
try:
    Bounded(Never("/nowhere/at/all"), 0.1).list()
except Exception as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=WAIT_S, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("cannot list /nowhere/at/all: no answer within 0.1 s")


def test_a_call_costs_less_than_100_microseconds(stuck: Stuck) -> None:
    class Free(PosixStorage):
        def unfinished(self) -> list[tuple[str, str]]:
            return []

    storage = Bounded(Free(stuck.root), WAIT_S)
    best = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(50):
            storage.unfinished()
        best = min(best, (time.perf_counter() - started) / 50)
    assert best < 100e-6, f"{best * 1e6:.0f} microseconds"

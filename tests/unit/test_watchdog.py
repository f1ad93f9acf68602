"""A save that gets on is told of; one that does not is said in the log, with where it stands."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from distckpt.watchdog import Standing, Watchdog

if TYPE_CHECKING:
    import pytest

GIB = 1 << 30
TIMEOUT_S = 0.4
WAIT_S = 10.0


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_progress_is_told_and_no_more_than_that() -> None:
    standings = iter([None, *[Standing(number // 3, 10, "", {}) for number in range(12)]])
    told: list[tuple[int, int]] = []
    over = threading.Event()

    def look() -> Standing | None:
        try:
            return next(standings)
        except StopIteration:
            over.set()
            return None

    with Watchdog(TIMEOUT_S, look).watching("a save", lambda *progress: told.append(progress)):
        assert over.wait(WAIT_S)
    assert told == [(0, 10), (1, 10), (2, 10), (3, 10)]


def test_a_save_that_stands_still_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        standing = Standing(
            GIB, 4 * GIB, "__0_1.distcp at byte 7 is with its lane", {3: worker.pid, 4: os.getpid()}
        )
        with Watchdog(TIMEOUT_S, lambda: standing).watching("rank 2: the save of the/step"):
            this_line_is_in_the_stack(caplog)
        worker.communicate(b"\n")
    text = caplog.records[0].getMessage()
    assert text.startswith("rank 2: the save of the/step is slow: nothing new for 0.")
    assert "1.000 of 4.000 GiB are written, __0_1.distcp at byte 7 is with its lane" in text
    assert f"lane 3: worker {worker.pid} is " in text
    assert "lane 4" not in text, "this process is no worker"
    assert "this_line_is_in_the_stack" in text
    assert caplog.records[0].levelno == logging.WARNING
    pauses = len(caplog.records)
    assert pauses <= 3, "less and less often"


def this_line_is_in_the_stack(caplog: pytest.LogCaptureFixture) -> None:
    wait_until(lambda: caplog.records)


def test_a_worker_that_is_gone_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as worker:
        worker.wait()
    with Watchdog(TIMEOUT_S, lambda: Standing(0, 1, "", {0: worker.pid})).watching("a save"):
        wait_until(lambda: caplog.records)
    assert f"worker {worker.pid}: " in caplog.records[0].getMessage()


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    for _ in range(20):
        with Watchdog(60, lambda: None).watching("a save"):
            pass
    wait_until(lambda: threading.active_count() <= before)


def test_it_goes_on_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with Watchdog(60, lambda: None).watching("a save"):
        reached = True
    assert reached

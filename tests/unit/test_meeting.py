"""What the ranks of a save tell each other, and how their waits end."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from distckpt import coordination
from distckpt import meeting as room
from distckpt.coordination import StoreCoordinator
from distckpt.errors import CommitError, MissingRanks
from distckpt.meeting import Meeting, Word, exchange, hear, tell

DEADLINE_S = 0.4
RANKS = [10, 11, 12, 13]
Meet = Callable[..., list[Meeting]]


@pytest.fixture
def coordinators() -> list[StoreCoordinator]:
    store = HashStore()
    return [StoreCoordinator(store, rank, RANKS) for rank in RANKS]


@pytest.fixture(autouse=True)
def fresh_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_MARGIN_S", 0.3)
    monkeypatch.setattr(room, "_GRACE_S", 0.2)
    monkeypatch.setattr(coordination, "_num_coordinators", Counter())


@pytest.fixture
def meetings(coordinators: list[StoreCoordinator]) -> list[Meeting]:
    return [Meeting(one, "5.1", timeout_s=DEADLINE_S, where="the/step") for one in coordinators]


def in_background(call: Callable[[], Any]) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


def test_a_save(meetings: list[Meeting]) -> None:
    first, *others = meetings
    claims = [in_background(other.await_claim) for other in others]
    first.say("writing", save_id="0a")
    assert [claim.result(5) for claim in claims] == ["0a"] * 3
    written = in_background(first.await_written)
    outcomes = [in_background(other.await_outcome) for other in others]
    for other in others:
        other.say("written")
    written.result(5)
    assert not any(outcome.done() for outcome in outcomes)
    first.say("committed", facts={"plain": [["a", 4]]})
    for outcome in outcomes:
        assert outcome.result(5).facts == {"plain": [["a", 4]]}


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_reaches_all_at_once(meetings: list[Meeting], failing: int) -> None:
    first, *others = meetings
    first.say("writing", save_id="0a")
    waiting = [in_background(first.await_written if failing else lambda: None)]
    waiting += [in_background(other.await_outcome) for other in others]
    meetings[failing].say("failed", text="its disk is full", facts={"differ": True})
    if failing:
        with pytest.raises(CommitError, match="rank 12 gave the save up: its disk is full") as caught:
            waiting[0].result(5)
        assert caught.value.rank == 12
        first.say("failed", text=str(caught.value), facts={"differ": True})
    for outcome, other in zip(waiting[1:], others, strict=True):
        with pytest.raises(CommitError, match=r"rank 10 gave the save up.*its disk is full"):
            outcome.result(5)
        assert other.outcome.facts == {"differ": True}


def test_who_is_missing_is_named_with_how_far_each_got(meetings: list[Meeting]) -> None:
    first, quick, slow, _ = meetings
    first.say("writing", save_id="0a")
    quick.say("written")
    slow.progress(1 << 30, 3 << 30)
    with pytest.raises(MissingRanks) as caught:
        first.await_written()
    text = str(caught.value)
    assert caught.value.ranks == (12, 13)
    assert "rank 12 has written 1.000 of 3.000 GiB, rank 13 never entered the save" in text
    assert "the/step" in text
    assert "rank 11" not in text
    assert DEADLINE_S <= (caught.value.waited_s or 0) < DEADLINE_S + 1


@pytest.mark.parametrize("wait", [Meeting.await_claim, Meeting.await_outcome])
def test_a_coordinator_that_says_nothing_is_missing(
    meetings: list[Meeting], wait: Callable[[Meeting], object]
) -> None:
    if wait is Meeting.await_outcome:
        meetings[0].say("writing", save_id="0a")
    with pytest.raises(MissingRanks) as caught:
        wait(meetings[1])
    assert caught.value.ranks == (10,)


def test_a_wait_goes_on_while_others_get_on(meetings: list[Meeting]) -> None:
    first, *others = meetings
    first.say("writing", save_id="0a")
    waits = [in_background(first.await_written), in_background(others[0].await_outcome)]
    for other in others[:2]:
        other.say("written")
    pause = threading.Event()
    for nbytes in range(12):
        others[2].progress(nbytes, 100)
        pause.wait(DEADLINE_S / 4)
    assert not any(wait.done() for wait in waits), "three deadlines have passed"
    others[2].say("written")
    waits[0].result(5)
    first.say("committed")
    assert waits[1].result(5).phase == "committed"


def test_words_that_say_nothing_new_are_not_told(coordinators: list[StoreCoordinator]) -> None:
    told: list[bytes] = []

    class Listening(StoreCoordinator):
        def tell(self, key: str, value: bytes) -> None:
            told.append(value)
            super().tell(key, value)

    meeting = Meeting(Listening(HashStore(), 11, RANKS), "1.1", timeout_s=1, where="")
    for _ in range(3):
        meeting.progress(5, 10)
        meeting.say("writing")
    assert len(told) == 1
    meeting.say("written")
    meeting.progress(6, 10)
    assert len(told) == 2, "no progress after the end"


def test_a_store_that_fails_ends_the_wait_soon() -> None:
    class Broken(StoreCoordinator):
        def hear(self, keys: Any) -> Any:
            raise CommitError("the store cannot be reached")

    meeting = Meeting(Broken(HashStore(), 11, RANKS), "1.1", timeout_s=60, where="")
    started = time.monotonic()
    with pytest.raises(MissingRanks, match=r"nobody can be heard of.*the store cannot be reached") as caught:
        meeting.await_outcome()
    assert caught.value.ranks == (10,)
    first = Meeting(Broken(HashStore(), 10, RANKS), "1.1", timeout_s=60, where="")
    with pytest.raises(CommitError, match="nobody can be heard of") as caught_first:
        first.await_written()
    assert not isinstance(caught_first.value, MissingRanks), "those may be well"
    assert time.monotonic() - started < 20


def test_a_rank_alone_waits_for_nobody() -> None:
    alone = Meeting(StoreCoordinator(HashStore(), 7, [7]), "1.1", timeout_s=60, where="")
    alone.await_written()


def test_what_was_said_can_be_forgotten(
    coordinators: list[StoreCoordinator], meetings: list[Meeting]
) -> None:
    for meeting in meetings:
        meeting.say("written")
    keys = [f"5.1.1.{place}" for place in range(4)]
    assert len(coordinators[0].hear(keys)) == 4
    meetings[0].forget()
    assert coordinators[0].hear(keys) == {}


def test_an_exchange(coordinators: list[StoreCoordinator]) -> None:
    found = [
        in_background(partial(exchange, one, "x", f"from {one.rank} \udc80", timeout_s=5))
        for one in coordinators
    ]
    assert [one.result(5) for one in found] == [{place: f"from {place} \udc80" for place in range(4)}] * 4
    tell(coordinators[0], "y", "word")
    assert hear(coordinators[3], "y", [0], timeout_s=5) == {0: "word"}
    with pytest.raises(MissingRanks, match="ranks 11, 13 to restore") as caught:
        hear(coordinators[2], "y", [0, 1, 3], timeout_s=0.1)
    assert caught.value.ranks == (11, 13)


def test_words_say_how_far_a_rank_has_got() -> None:
    assert str(Word("writing", nbytes=1 << 29, total=1 << 30)) == "has written 0.500 of 1.000 GiB"
    assert str(Word("failed", text="why")) == "has failed: why"


def test_a_save_before_that_others_are_busy_with_is_no_silence(
    coordinators: list[StoreCoordinator], meetings: list[Meeting]
) -> None:
    """Rank 1 has given the save before up at once, and waits for the next; rank 0 still writes it."""
    later = Meeting(coordinators[1], "6.1", timeout_s=DEADLINE_S, where="the/next step", before=meetings[1])
    waiting = in_background(later.await_claim)
    pause = threading.Event()
    for nbytes in range(12):
        meetings[0].progress(nbytes, 100)
        pause.wait(DEADLINE_S / 4)
    assert not waiting.done(), "three deadlines have passed"
    Meeting(coordinators[0], "6.1", timeout_s=DEADLINE_S, where="").say("writing", save_id="0b")
    assert waiting.result(5) == "0b"


def test_a_failure_of_the_store_that_passes_is_survived(coordinators: list[StoreCoordinator]) -> None:
    class Shaky(StoreCoordinator):
        calls = 0

        def hear(self, keys: Any) -> Any:
            self.calls += 1
            if self.calls % 2:
                raise CommitError("it is busy")
            return super().hear(keys)

    store = HashStore()
    first = Meeting(StoreCoordinator(store, 0, [0, 1]), "1.1", timeout_s=DEADLINE_S, where="")
    other = Meeting(Shaky(store, 1, [0, 1]), "1.1", timeout_s=DEADLINE_S, where="")
    waiting = in_background(other.await_claim)
    first.say("writing", save_id="0a")
    assert waiting.result(5) == "0a"

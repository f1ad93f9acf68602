"""Watching for the end of a job: all ranks name one step, none has passed it, and others' handlers go on."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distckpt.errors import CheckpointError, CommitError, ConfigError
from distckpt.preemption import _MARGIN_STEPS, Preemption


class Board:
    """Where the ranks of a test leave word."""

    def __init__(self) -> None:
        self.left: dict[str, bytes] = {}
        self.is_reachable = True
        self.calls = 0


class Place:
    """The coordinator of one rank."""

    def __init__(self, board: Board, rank: int, world: int) -> None:
        self.board = board
        self.rank = rank
        self.ranks = tuple(range(world))

    def tell(self, key: str, value: bytes) -> None:
        self._reach()
        self.board.left[key] = value

    def hear(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        self._reach()
        return {key: self.board.left[key] for key in keys if key in self.board.left}

    def forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.board.left.pop(key, None)

    def _reach(self) -> None:
        self.board.calls += 1
        if not self.board.is_reachable:
            raise CommitError("the store is away")


def watches(world: int, board: Board | None = None, name: str = "watch") -> list[Preemption]:
    """Return the watches of all ranks, which handle no signal of this process."""
    board = board or Board()
    return [Preemption(Place(board, rank, world), name, ()) for rank in range(world)]


def signalled(watch: Preemption) -> None:
    watch._handle(signal.SIGTERM, None)


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_alone_the_step_of_the_signal_is_the_last() -> None:
    [watch] = watches(1)
    assert [watch.is_due(step) for step in range(3)] == [False] * 3
    signalled(watch)
    assert watch.is_due(3)
    assert watch.is_due(4)


@given(
    world=st.integers(2, 5),
    hits=st.dictionaries(st.integers(0, 4), st.integers(0, 30), min_size=1, max_size=5),
    orders=st.lists(st.randoms(use_true_random=False), min_size=60, max_size=60),
    stride=st.integers(1, 3),
)
def test_all_ranks_end_after_one_step(
    world: int, hits: dict[int, int], orders: list[Any], stride: int
) -> None:
    """In every order in which ranks that are at most a step apart may ask."""
    ranks = watches(world)
    hits = {rank % world: step for rank, step in hits.items()}
    due: dict[int, list[int]] = {rank: [] for rank in range(world)}
    asked = [0] * world
    for number, order in enumerate(orders):
        turn = list(range(world))
        order.shuffle(turn)
        for rank in turn:
            if hits.get(rank) == number:
                signalled(ranks[rank])
            step = number * stride
            asked[rank] += 1
            if ranks[rank].is_due(step):
                due[rank].append(step)
    firsts = {steps[0] for steps in due.values()}
    assert len(firsts) == 1, "the same step on all"
    [first] = firsts
    earliest = min(hits.values()) * stride
    assert earliest <= first <= earliest + (2 * _MARGIN_STEPS + 2) * max(stride, 1)
    for steps in due.values():
        assert steps == list(range(first, len(orders) * stride, stride)), "and from then on"


@given(
    world=st.integers(2, 4),
    hit=st.integers(0, 3),
    chance=st.randoms(use_true_random=False),
)
def test_no_rank_has_passed_the_step(world: int, hit: int, chance: Any) -> None:
    """Any interleaving in which no rank is more than a step ahead of another, as collectives keep them."""
    ranks = watches(world)
    steps = [0] * world
    ended: dict[int, int] = {}
    for turn in range(400):
        if turn == 40:
            signalled(ranks[hit % world])
        slowest = min(steps[rank] for rank in range(world))
        may_go = [rank for rank in range(world) if rank not in ended and steps[rank] <= slowest]
        if not may_go:
            break
        rank = chance.choice(may_go)
        if ranks[rank].is_due(steps[rank]):
            ended[rank] = steps[rank]
        steps[rank] += 1
    assert len(ended) == world
    assert len(set(ended.values())) == 1, ended


def test_what_was_told_of_one_watch_is_nothing_to_the_next() -> None:
    board = Board()
    first = watches(2, board, "one")
    signalled(first[1])
    due = [[watch.is_due(step) for watch in first] for step in range(6)]
    assert due[-1] == [True, True]
    assert not any(watch.is_due(9) for watch in watches(2, board, "two"))


def test_each_step_asks_little() -> None:
    board = Board()
    ranks = watches(4, board)
    for step in range(10):
        assert not any(watch.is_due(step) for watch in ranks)
    assert board.calls == 40, "one question each"


def test_a_store_that_cannot_be_reached_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "distckpt")
    board = Board()
    ranks = watches(2, board)
    board.is_reachable = False
    signalled(ranks[1])
    assert [watch.is_due(3) for watch in ranks] == [False, False]
    assert "the store is away" in caplog.text
    board.is_reachable = True
    due: list[list[bool]] = [[watch.is_due(step) for watch in ranks] for step in range(4, 12)]
    assert due[-1] == [True, True], "told as soon as it can be"
    assert all(one == other for one, other in due[2:])


@pytest.mark.usefixtures("handlers")
def test_handlers_that_were_there_are_called_and_put_back() -> None:
    got: list[int] = []

    def theirs(number: int, frame: object) -> None:
        got.append(number)

    signal.signal(signal.SIGUSR1, theirs)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    watch = Preemption(Place(Board(), 0, 1), "watch", (signal.SIGUSR1, signal.SIGUSR2))
    assert not watch.is_due(0)
    signal.raise_signal(signal.SIGUSR1)
    assert watch.is_due(1)
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR2)
    assert got == [signal.SIGUSR1, signal.SIGUSR1]
    watch.close()
    watch.close()
    assert signal.getsignal(signal.SIGUSR1) is theirs
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN


@pytest.mark.usefixtures("handlers")
def test_a_signal_that_was_ignored_before_is_seen() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    watch = Preemption(Place(Board(), 0, 1), "watch", (signal.SIGUSR1,))
    signal.raise_signal(signal.SIGUSR1)
    assert watch.is_due(0)
    signal.raise_signal(signal.SIGUSR1)
    watch.close()


@pytest.mark.usefixtures("handlers")
def test_a_handler_that_was_set_later_stays() -> None:
    def later(number: int, frame: object) -> None: ...

    watch = Preemption(Place(Board(), 0, 1), "watch", (signal.SIGUSR1,))
    signal.signal(signal.SIGUSR1, later)
    watch.close()
    assert signal.getsignal(signal.SIGUSR1) is later


@pytest.mark.usefixtures("handlers")
def test_a_handler_that_raises_is_heard() -> None:
    def theirs(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGUSR1, theirs)
    watch = Preemption(Place(Board(), 0, 1), "watch", (signal.SIGUSR1,))
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGUSR1)
    assert watch.is_due(0)
    watch.close()


@pytest.mark.usefixtures("handlers")
def test_what_cannot_be_handled_is_refused_and_leaves_nothing() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ConfigError, match="SIGKILL"):
        Preemption(Place(Board(), 0, 1), "watch", (signal.SIGUSR1, signal.SIGKILL))
    assert signal.getsignal(signal.SIGUSR1) == before


def test_on_another_thread_it_is_refused() -> None:
    found: list[BaseException] = []

    def watch() -> None:
        try:
            Preemption(Place(Board(), 0, 1), "watch", (signal.SIGUSR1,))
        except CheckpointError as error:
            found.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert isinstance(found[0], ConfigError)


def test_a_word_that_was_lost_ends_no_rank_alone() -> None:
    board = Board()
    first, second = watches(2, board)
    first._got = signal.SIGTERM
    first._coordinator.hear([])
    hear = first._coordinator.hear

    def and_then_away(keys: Sequence[str]) -> Mapping[str, bytes]:
        found = hear(keys)
        board.is_reachable = False
        return found

    first._coordinator.hear = and_then_away  # type: ignore[method-assign]
    assert not first.is_due(10)
    first._coordinator.hear = hear  # type: ignore[method-assign]
    board.is_reachable = True
    due = [(first.is_due(step), second.is_due(step)) for step in range(11, 16)]
    assert [one for one, _ in due] == [other for _, other in due]
    assert due[-1] == (True, True)

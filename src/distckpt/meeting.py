"""One save of several ranks: what they tell each other of it, and how long each waits for the others.

    rank 0                              the others
    claims the directory, says so  ->   begin to write
    writes                              write
    waits for all of them          <-   say that they have written
    publishes, says so             ->   the save is over

Every rank tells how far it has got. A wait goes on while those it waits for get on; after that it ends with
`MissingRanks`, which says who they are and how far each had got. Nobody takes over from rank 0.

Torch-free.
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from distckpt.coordination import ProgressDeadline
from distckpt.errors import CheckpointError, CommitError, MissingRanks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distckpt.coordination import Coordinator

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.005
_LAST_PAUSE_S = 0.5
_GRACE_S = 5.0
"""A store that cannot be reached may be again."""
_MARGIN_S = 1.0
"""Rank 0 sees who is missing: the others wait a little longer, for its word."""
_MOST_NAMED = 8
_GIB = 1 << 30


@dataclass(frozen=True)
class Word:
    """What one rank has last said of one save.

    Attributes:
        phase: "writing", then "written", or on rank 0 "waiting"; at the end "committed" or "failed".
        save_id: The save, once it is claimed.
        nbytes: Bytes that are written.
        total: Bytes that are to be written.
        text: Why it failed.
        others: On rank 0: bytes that the others have written, as far as it has heard.
        facts: Whatever else the ranks need to know.
    """

    phase: str
    save_id: str = ""
    nbytes: int = 0
    total: int = 0
    text: str = ""
    others: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return how far the rank has got, for people."""
        if self.phase in ("writing", "waiting"):
            return f"has written {self.nbytes / _GIB:.3f} of {self.total / _GIB:.3f} GiB"
        return f"has {self.phase}" + (f": {self.text}" if self.text else "")


class Meeting:
    """One attempt at a save, as its participants see it.

    Args:
        coordinator: Where they leave word.
        name: Of the save; all participants give the same, and no two saves have it.
        attempt: Number of the attempt.
        timeout_s: Seconds without progress after which a wait has failed.
        where: The checkpoint, for messages.
        before: The one before it, which others may still be busy with.
        number: Of the save, on this rank.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        name: str,
        attempt: int = 1,
        *,
        timeout_s: float,
        where: str,
        before: Meeting | None = None,
        number: int = 0,
    ) -> None:
        self.name, self.attempt, self.number = name, attempt, number
        self._coordinator = coordinator
        self._rank = coordinator.rank
        self.keys = [f"{name}.{attempt}.{rank}" for rank in range(len(coordinator.ranks))]
        self._before = [] if before is None else before.keys
        self._timeout_s = timeout_s
        self._where = where
        self._heard: dict[int, Word] = {}
        self._own = Word("writing")
        self._has_spoken = False
        self.outcome = Word("writing")
        """What rank 0 has last said, for the others."""
        # The thread that writes and the one that watches it.
        self._lock = threading.Lock()

    def say(self, phase: str, **fields: Any) -> None:
        """Tell the others how far this rank has got.

        Args:
            phase: See `Word`.
            **fields: Fields of `Word` that change.

        Raises:
            CommitError: They cannot be reached.
        """
        with self._lock:
            word = Word(**{**_fields(self._own), **fields, "phase": phase})
            if word != self._own or not self._has_spoken:
                self._own = word
                self._tell()

    def progress(self, nbytes: int, total: int) -> None:
        """Tell the others how much this rank has written; nothing that this is worth raising for."""
        with self._lock:
            if self._own.phase != "writing" or (nbytes, total) == (self._own.nbytes, self._own.total):
                return
            self._own = Word(**{**_fields(self._own), "nbytes": nbytes, "total": total})
            try:
                self._tell()
            except CheckpointError as error:
                _LOG.debug("progress could not be told: %s", error)

    def await_claim(self) -> str:
        """Wait until rank 0 has claimed the directory, and return the id of the save.

        Raises:
            CommitError: Rank 0 has given the save up, or cannot be reached.
            MissingRanks: It has said nothing within the deadline.
        """
        return self._await_coordinator("claimed").save_id

    def await_outcome(self) -> Word:
        """Wait until rank 0 has published the save, and return what it says; raises as `await_claim`."""
        return self._await_coordinator("committed")

    def await_written(self) -> None:
        """Wait until all other ranks have written, and made their manifests durable; for rank 0.

        Raises:
            CommitError: One has given the save up.
            MissingRanks: Some have not got on within the deadline.
        """
        missing = set(range(len(self.keys))) - {self._rank}
        if not missing:
            return
        # Those that wait for this rank wait no shorter than it does.
        self.say("waiting")
        for has_news in self._listen(sorted(missing), self._timeout_s):
            if not has_news:
                continue
            for rank in sorted(missing):
                word = self._heard.get(rank)
                if word is None:
                    continue
                if word.phase == "failed":
                    ranks = self._coordinator.ranks
                    raise CommitError(f"rank {ranks[rank]} gave the save up: {word.text}", rank=ranks[rank])
                if word.phase == "written":
                    missing.discard(rank)
            if not missing:
                return
            # Those that wait for this rank see that it goes on.
            self.say("waiting", others=sum(word.nbytes for word in self._heard.values()) + len(self._heard))

    @property
    def is_final(self) -> bool:
        """Whether a rank has said that it does not try this save again."""
        words = [self.outcome, *self._heard.values()]
        return any(word.phase == "failed" and word.facts.get("final") for word in words)

    def forget(self) -> None:
        """Remove what was said; every rank has heard it."""
        try:
            self._coordinator.forget(self.keys)
        except CheckpointError as error:
            _LOG.debug("%s: what was said of the save stays: %s", self._where, error)

    def _await_coordinator(self, what: str) -> Word:
        for _ in self._listen([0], self._timeout_s + _MARGIN_S):
            word = self._heard.get(0)
            if word is None:
                continue
            self.outcome = word
            if word.phase == "failed":
                told = f"rank {self._name(0)} gave the save up: {word.text}"
                missing = word.facts.get("missing")
                if missing:
                    raise MissingRanks(told, rank=self._coordinator.ranks[0], ranks=tuple(missing))
                raise CommitError(told, rank=self._coordinator.ranks[0])
            if word.phase == "committed" or (what == "claimed" and word.save_id):
                return word
        raise AssertionError("listens until it raises")

    def _listen(self, ranks: Sequence[int], timeout_s: float) -> Iterator[bool]:
        """Yield, less and less often, whether there is news of `ranks`; to be asked again, or left.

        Args:
            ranks: Positions of those that are waited for.
            timeout_s: Seconds without any.

        Raises:
            MissingRanks: There was none within the deadline.
        """
        deadline = ProgressDeadline(timeout_s)
        reachable = ProgressDeadline(min(_GRACE_S, timeout_s))
        pause, pause_s = threading.Event(), _FIRST_PAUSE_S
        busy: Mapping[str, bytes] = {}
        while True:
            failure: CheckpointError | None = None
            told: Mapping[str, bytes] = {}
            news = False
            awaited = [rank for rank in ranks if not self._has_ended(rank)]
            try:
                told = self._coordinator.hear([self.keys[rank] for rank in awaited])
                if self._before and not told:
                    earlier = self._coordinator.hear([self._before[rank] for rank in awaited])
                    if earlier != busy:
                        busy = earlier
                        deadline.progress()
                reachable.progress()
            except CheckpointError as error:
                failure = error
            for rank in awaited:
                data = told.get(self.keys[rank])
                if data is not None:
                    word = Word(**json.loads(data))
                    news |= word != self._heard.get(rank)
                    self._heard[rank] = word
            if news:
                deadline.progress()
                pause_s = _FIRST_PAUSE_S
            yield news
            if failure is not None and (reachable.passed or deadline.passed):
                self._give_up_unheard(failure)
            if deadline.passed:
                self._give_up(awaited, deadline.idle_s)
            pause.wait(min(pause_s, max(_FIRST_PAUSE_S, timeout_s - deadline.idle_s)))
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _has_ended(self, rank: int) -> bool:
        return rank in self._heard and self._heard[rank].phase == "written"

    def _give_up_unheard(self, failure: CheckpointError) -> NoReturn:
        what = f"nobody can be heard of in the save of {self._where}: {failure}"
        if self._rank == 0:
            raise CommitError(what) from failure
        # Where the store is kept nobody here knows: it may be gone with rank 0.
        first = self._coordinator.ranks[0]
        raise MissingRanks(f"{what}; rank {first} publishes", ranks=(first,)) from failure

    def _give_up(self, ranks: Sequence[int], waited_s: float) -> NoReturn:
        states = [
            f"rank {self._name(rank)} {self._heard.get(rank, 'never entered the save')}"
            for rank in ranks[:_MOST_NAMED]
        ]
        if len(ranks) > _MOST_NAMED:
            states.append(f"and {len(ranks) - _MOST_NAMED} more")
        raise MissingRanks(
            f"nothing new for {waited_s:.0f} s (--distributed-timeout-minutes) in the save of {self._where}: "
            f"{', '.join(states)}",
            ranks=tuple(self._coordinator.ranks[rank] for rank in ranks),
            waited_s=waited_s,
        )

    def _name(self, rank: int) -> str:
        return str(self._coordinator.ranks[rank])

    def _tell(self) -> None:
        data = json.dumps(_fields(self._own), separators=(",", ":"))
        self._coordinator.tell(self.keys[self._rank], data.encode())
        self._has_spoken = True


def _fields(word: Word) -> dict[str, Any]:
    return {**asdict(word), "facts": dict(word.facts)}


def tell(coordinator: Coordinator, name: str, text: str) -> None:
    """Tell the other participants `text` about `name`, of which this rank never says anything else.

    Raises:
        CommitError: They cannot be reached.
    """
    coordinator.tell(f"{name}.{coordinator.rank}", text.encode("utf-8", "surrogatepass"))


def hear(
    coordinator: Coordinator, name: str, places: Sequence[int], *, timeout_s: float, doing: str = "restore"
) -> dict[int, str]:
    """Return what participants tell about `name`.

    Args:
        coordinator: Where they leave word.
        name: What is asked for.
        places: Positions of those whose word is waited for.
        timeout_s: Seconds to wait for them.
        doing: What they are expected to do, for the message.

    Raises:
        CommitError: They cannot be reached.
        MissingRanks: Some have said nothing in time.
    """
    deadline = ProgressDeadline(timeout_s)
    pause, pause_s = threading.Event(), _FIRST_PAUSE_S
    heard: dict[int, str] = {}
    while True:
        keys = {f"{name}.{place}": place for place in places if place not in heard}
        for key, data in coordinator.hear(list(keys)).items():
            heard[keys[key]] = data.decode("utf-8", "surrogatepass")
        if len(heard) == len(places):
            return heard
        if deadline.passed:
            ranks = tuple(coordinator.ranks[place] for place in places if place not in heard)
            raise MissingRanks(
                f"waited {timeout_s:.0f} s (--distributed-timeout-minutes) for rank"
                f"{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_MOST_NAMED]))}"
                f"{', ...' if len(ranks) > _MOST_NAMED else ''} to {doing}, too",
                ranks=ranks,
                waited_s=timeout_s,
            )
        pause.wait(pause_s)
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)


def exchange(coordinator: Coordinator, name: str, text: str, *, timeout_s: float) -> dict[int, str]:
    """Tell the others `text` about `name`, and return what all have told; raises as `hear`."""
    tell(coordinator, name, text)
    return hear(coordinator, name, range(len(coordinator.ranks)), timeout_s=timeout_s)

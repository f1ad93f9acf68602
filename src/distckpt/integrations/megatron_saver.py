"""Saver: what a `Checkpointer` does, into directories that the caller names, with replicas agreed on first.

    every rank   digests what it has                      -> first participant: as last time?
                 sends the list of it, if anything changed -> finds what ranks have in common
                 hears that, and leaves its part of the rest to the others

A `Checkpointer` learns from its first save what ranks have in common. Megatron's states are so often replicas
that this save would write them as often as there are data-parallel ranks; so the ranks leave word beforehand.

Invariants:
    * Nothing here is a collective, and no rank is asked but the participants; every wait has a deadline.
    * What was agreed on is used again only if every participant has the same as then, compared at every save.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import zlib
from collections import Counter
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import distributed
from torch.distributed.checkpoint.metadata import StorageMeta

from distckpt.archive import Archive
from distckpt.assembly import entry_of
from distckpt.checkpointer import Checkpointer
from distckpt.config import CheckpointConfig
from distckpt.errors import CheckpointError, CommitError, ConfigError
from distckpt.manifest import ManifestRef, PartialManifest
from distckpt.meeting import hear, tell
from distckpt.ownership import (
    Common,
    Rules,
    common_from_json,
    common_to_json,
    divide,
    find_common,
    members_in,
)
from distckpt.planner import SavePlanner
from distckpt.storage import open_storage

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from distckpt import SaveHandle
    from distckpt.participants import Participants
    from distckpt.signature import View

_MOST_NAMED = 3
_MARGIN_S = 1.0


class Claim(NamedTuple):
    """A part of the state that a rank has, and whether it is the one that answers for it.

    Attributes:
        fqn: Name of the entry.
        offsets: Where the chunk begins in the global tensor; None for an object.
        is_main: Whether this rank's is the main replica.
        family: Name that the objects of one kind share; "" for a tensor.
        size: How many of these objects there must be.
    """

    fqn: str
    offsets: tuple[int, ...] | None
    is_main: bool
    family: str = ""
    size: int = 0


class _Directories(Archive):
    """Directories that the caller names, of which nothing else is known: they belong to the caller."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._names: dict[int, str] = {}

    def name(self, step: int, url: str) -> None:
        """Say where a step is saved."""
        under_way = self._under_way()
        self._names = {one: where for one, where in self._names.items() if one in under_way}
        self._names[step] = url

    def path(self, step: int, tier: int = 0) -> str:
        """Return the directory of a step."""
        del tier
        return self._names.get(step, self.url)

    def take(self, *_: Any) -> None:
        """Leave other directories alone."""

    def upload(self) -> None:
        """Nothing is uploaded."""


class Saver(Checkpointer):
    """Saves states to directories, one after the other or in flight together.

    Args:
        directory: Of the first save, or one on the same kind of storage.
        config: Settings; default: `CheckpointConfig()`. Those of a training loop, such as what to keep and
            what to do after a failure, have no effect: they are up to the caller.
        participants: As for `Checkpointer`. They all make one, and call `save_to` for the same directories.
        storage_options: Passed to fsspec as they are.
        **settings: Fields of `CheckpointConfig`, which override `config`.

    Raises:
        ConfigError: As for `Checkpointer`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: CheckpointConfig | None = None,
        *,
        participants: Participants = None,
        storage_options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        given = CheckpointConfig.build(config, settings)
        given.warn_of_loop_settings(type(self).__name__, stacklevel=3)
        plain: dict[str, Any] = {one.name: one.default for one in fields(given) if one.metadata.get("loop")}
        super().__init__(
            directory,
            replace(given, **plain),
            participants=participants,
            storage_options=storage_options,
        )
        self._directories = _Directories(
            directory, self._storage_options, self._config, self._steps_under_way
        )
        self._archive = self._directories
        self._num_begun = 0
        self._claims: Sequence[Claim] | None = None
        self._failure: Exception | None = None
        self._agrees = self._may_share = False
        """Whether the ranks ask each other what they have, in the save that is planned, and share it."""
        self._shared: Common | None = None
        """By what this rank works out its part; other than in a `Checkpointer`, a save that ends says nothing
        of it: the next one may have begun."""
        self._found_by_step: dict[int, Common | None] = {}
        """What is published as agreed on, for each save that is under way."""
        self._agreed: Common | None = None
        self._agreed_words: tuple[str, ...] = ()
        """What all said then; on the first participant."""
        self._spoken: list[str] = []
        """Keys under which this rank has left word, which the others have read by the next time."""

    @property
    def is_first(self) -> bool:
        """Whether this rank publishes."""
        return self._is_first

    def save_to(
        self,
        directory: str | os.PathLike[str],
        state: Mapping[str, Any],
        *,
        wait: bool = True,
        shares: bool = True,
        claims: Sequence[Claim] | None = None,
        failure: Exception | None = None,
    ) -> SaveHandle:
        """Save `state` in `directory`.

        Args:
            directory: Of this checkpoint, the same on all participants.
            state: Nested containers of tensors and Python objects.
            wait: Whether to return when it is committed; else when the state may change again.
            shares: Whether several ranks may have the same, which is then shared with
                `ckpt_fully_parallel_save`; the same on all participants. Without it the ranks do not ask
                each other what they have.
            claims: If given, there must be exactly one main replica of everything, among all participants;
                given by all or by none.
            failure: Why this rank has no state, which is then `{}`: it is raised, and the others learn of it.

        Returns:
            A handle of the save.

        Raises:
            CheckpointError: As `Checkpointer.save`; a replica is missing, or there is more than one.
            ConfigError: The storage is of another kind than that of the first save.
        """
        storage = open_storage(directory, self._storage_options)
        if _scheme(storage.url) != _scheme(self._directories.url):
            raise ConfigError(
                f"{storage.url} is on another kind of storage than {self._directories.url}: use two savers"
            )
        self._config = replace(self._config, async_save=not wait)
        step, self._num_begun = self._num_begun, self._num_begun + 1
        self._directories.name(step, storage.url)
        self._claims, self._failure = claims, failure
        self._agrees = not self._is_alone and (
            claims is not None or (shares and self._config.ckpt_fully_parallel_save)
        )
        self._may_share = shares and self._config.ckpt_fully_parallel_save
        if not self._may_share:
            self._shared = None
        try:
            return self.save(step, state)
        finally:
            self._agrees, self._claims, self._failure = False, None, None

    def announce(self, handle: SaveHandle, error: BaseException | None = None) -> None:
        """Tell the others that this rank, the first, has done what they wait for in `await_announcement`.

        Args:
            handle: Of the save that it belongs to.
            error: Why it has not.

        Raises:
            CommitError: They cannot be reached.
        """
        if not self._is_alone:
            text = "" if error is None else f"{type(error).__name__}: {error}"
            tell(self._coordinator, self._announcement(handle), text)

    def await_announcement(self, handle: SaveHandle) -> None:
        """Wait until the first participant has called `announce`.

        Args:
            handle: Of the save that it belongs to.

        Raises:
            CommitError: It could not do what it was to do, or cannot be reached.
            MissingRanks: It has said nothing within the deadline.
        """
        text = self._hear(self._announcement(handle), [0], handle.path)[0]
        if text:
            raise CommitError(f"{handle.path}: rank {self._coordinator.ranks[0]} failed: {text}")

    def _announcement(self, handle: SaveHandle) -> str:
        return f"{self._name}.done.{handle.step}"

    def _plan(self, state: Mapping[str, Any], view: View, versions: list[int] | None = None) -> Any:
        if self._agrees:
            self._agree(state, view)
        elif self._failure is not None:
            raise self._failure
        elif self._claims is not None:
            wrong = self._misclaimed([[list(claim) for claim in self._claims]])
            if wrong:
                raise CommitError(f"not saved: {wrong}")
        return super()._plan(state, view, versions)

    def _rules(self) -> Rules:
        return super()._rules()._replace(common=self._shared)

    def _publish(self, handle: SaveHandle, *args: Any) -> None:
        # Used by the thread that publishes alone.
        self._found = self._found_by_step.get(handle.step, self._found)
        super()._publish(handle, *args)

    def _learn(self, *_: Any) -> None:
        """Nothing is to be learnt: the ranks have agreed before."""

    def _agree(self, state: Mapping[str, Any], view: View) -> None:
        """Find out what the participants have in common, unless it is what they had the last time.

        Raises:
            CommitError: There is not one main replica of everything.
            MissingRanks: Somebody has not entered the save within the deadline.
        """
        where = self._path(self._num_begun - 1)
        name = f"{self._name}.own.{self._num_begun - 1}"
        claims = None if self._claims is None else sorted(set(self._claims), key=repr)
        claims_digest = "" if claims is None else hashlib.sha256(repr(claims).encode()).hexdigest()[:32]
        plain, table, failure = "", None, self._failure
        if failure is None:
            try:
                plain, table = self._digest_of(state, view)
            except Exception as error:  # noqa: BLE001 - raised again, once the others know of it
                failure = error
        told = "" if failure is None else f"{type(failure).__name__}: {failure}"
        knows = "" if self._agreed is None else self._agreed.digest
        spoken, self._spoken = self._spoken, []
        verdict, words = self._verdict(name, json.dumps([plain, claims_digest, knows, told]), where)
        if failure is not None:
            raise failure
        if "wrong" in verdict:
            raise CommitError(f"not saved: {verdict['wrong']}")
        if "send" in verdict:
            self._agreed, self._agreed_words = None, ()
            if table is None:
                table = self._table_of(state)[1]
            outcome = self._compare(name, words, verdict["send"], [table, claims], where)
            if outcome["wrong"]:
                raise CommitError(f"not saved: {outcome['wrong']}")
            self._agreed = common_from_json(outcome["common"])
            self._agreed_words = tuple(
                json.dumps([*json.loads(one)[:2], self._agreed.digest, ""]) for one in words
            )
        # All have read them: what they have answered to was said after that.
        with contextlib.suppress(CheckpointError):
            self._coordinator.forget(spoken)
        assert self._agreed is not None, "those that were not asked have agreed before"
        place = self._coordinator.rank
        is_shared = self._may_share and any(place in members_in(text) for text, _ in self._agreed.classes)
        self._shared = self._agreed if is_shared else None
        under_way = self._steps_under_way()
        kept = {step: common for step, common in self._found_by_step.items() if step in under_way}
        self._found_by_step = {**kept, self._num_begun - 1: self._agreed}

    def _verdict(self, name: str, word: str, where: str) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return what the first makes of the words of all, and, on the first, these words.

        Raises:
            CheckpointError: Somebody has not said anything within the deadline, or cannot be heard of.
        """
        if not self._is_first:
            self._say(name, word)
            found: dict[str, Any] = json.loads(self._hear(f"{name}.verdict", [0], where)[0])
            return found, ()
        ranks = self._coordinator.ranks
        words: tuple[str, ...] = (word,)
        wrong = ""
        try:
            if not json.loads(word)[3]:
                others = range(1, len(ranks))
                heard = self._hear(name, others, where)
                words += tuple(heard[place] for place in others)
        except CheckpointError as error:
            wrong = f"{type(error).__name__}: {error}"
            raise
        finally:
            failed = [
                f"rank {ranks[at]}: {text}" for at, one in enumerate(words) if (text := json.loads(one)[3])
            ]
            verdict: dict[str, Any] = {"same": True}
            if wrong or failed:
                verdict = {"wrong": wrong or ", ".join(failed[:_MOST_NAMED])}
            elif words != self._agreed_words or len({json.loads(one)[2] for one in words}) > 1:
                senders = {one: words.index(one) for one in dict.fromkeys(words)}
                verdict = {"send": sorted(senders.values())}
            self._say(f"{name}.verdict", json.dumps(verdict))
        return verdict, words

    def _compare(
        self, name: str, words: Sequence[str], senders: Sequence[int], own: list[Any], where: str
    ) -> dict[str, Any]:
        """Return what the participants have in common, and what is wrong with that, as the first sees it."""
        place = self._coordinator.rank
        if not self._is_first:
            if place in senders:
                packed = base64.b85encode(zlib.compress(json.dumps(own).encode(), 1))
                self._say(f"{name}.list", packed.decode())
            outcome: dict[str, Any] = json.loads(self._hear(f"{name}.outcome", [0], where)[0])
            return outcome
        others = [one for one in senders if one != place]
        texts = self._hear(f"{name}.list", others, where)
        lists = {one: json.loads(zlib.decompress(base64.b85decode(texts[one]))) for one in others}
        lists[place] = json.loads(json.dumps(own))
        by_word = {words[one]: lists[one] for one in senders}
        manifests = []
        for at, one in enumerate(words):
            head = {"rank": self._coordinator.ranks[at], "shares": {"plain": json.loads(one)[0]}}
            items = json.dumps(by_word[one][0]).encode()
            manifests.append(PartialManifest(ManifestRef("", "", {}), head, items))
        wrong = self._misclaimed([by_word[one][1] for one in words])
        outcome = {"common": common_to_json(find_common(manifests)), "wrong": wrong}
        self._say(f"{name}.outcome", json.dumps(outcome))
        return outcome

    def _misclaimed(self, all_claims: Sequence[list[Any] | None]) -> str:
        """Return what has not exactly one main replica; "" if there is no such thing."""
        mains: Counter[tuple[str, str]] = Counter()
        families: dict[str, tuple[int, set[str]]] = {}
        for claims in all_claims:
            for fqn, offsets, is_main, family, size in claims or ():
                mains[fqn, str(offsets)] += bool(is_main)
                if family and is_main:
                    families.setdefault(family, (size, set()))[1].add(fqn)
        wrong = [
            f"{fqn!r} at {offsets} has {count} main replicas"
            for (fqn, offsets), count in sorted(mains.items())
            if count > 1 or (count == 0 and not self._is_part)
        ]
        if not self._is_part:
            wrong += [
                f"{size - len(there)} of {size} objects of {family!r} are missing"
                for family, (size, there) in sorted(families.items())
                if len(there) != size
            ]
        more = f" and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        return ", ".join(wrong[:_MOST_NAMED]) + more

    @property
    def _is_part(self) -> bool:
        """Whether some ranks of the job do not take part, which may have the main replica of something."""
        return distributed.is_initialized() and len(self._coordinator.ranks) < distributed.get_world_size()

    def _digest_of(self, state: Mapping[str, Any], view: View) -> tuple[str, dict[str, Any] | None]:
        """Return the digest of what this rank has, and the table of it if that had to be made."""
        planned = self._planned
        if (
            planned is not None
            and planned.signature is not None
            and planned.shares.plain
            and view.is_simple
            and planned.signature.matches(view)
        ):
            return planned.shares.plain, None
        return self._table_of(state)

    def _table_of(self, state: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        planner = SavePlanner()
        planner.set_up_planner(dict(state), StorageMeta(), is_coordinator=self._is_first)
        items = planner.create_local_plan().items
        pieces, shares = divide(items, planner.state_dict.__getitem__, self._rules()._replace(common=None))
        table = {
            "fqns": [piece.item.index.fqn for piece in pieces],
            "chunks": [piece.item.index.offset for piece in pieces],
            "entries": [entry_of(piece.item, None, plain_rows=piece.plain_rows) for piece in pieces],
        }
        return shares.plain, table

    def _say(self, name: str, text: str) -> None:
        tell(self._coordinator, name, text)
        self._spoken.append(f"{name}.{self._coordinator.rank}")

    def _hear(self, name: str, places: Sequence[int], where: str) -> dict[int, str]:
        if not places:
            return {}
        # The first sees who is missing: the others wait a little longer, for its word.
        timeout_s = self._timeout_s + (0.0 if self._is_first else _MARGIN_S)
        return hear(self._coordinator, name, places, timeout_s=timeout_s, doing=f"save {where}")


def _scheme(url: str) -> str:
    return url.partition("://")[0] if "://" in url else ""

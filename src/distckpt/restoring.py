"""What a restore is to all ranks: one checkpoint for all of them, and an older one if any finds it damaged.

    first rank looks -> all load the same -> each says how that went -> done, or the next older one

Threads: one at a time, that of the trainer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import operator
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException

from distckpt.archive import Copy
from distckpt.commit import committed_by
from distckpt.errors import CheckpointError, ConfigError, IntegrityError
from distckpt.meeting import exchange, hear, tell
from distckpt.parallel_load import load
from distckpt.reader import StorageReader

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch.distributed import ProcessGroup

    from distckpt.archive import Archive
    from distckpt.config import CheckpointConfig
    from distckpt.coordination import Coordinator
    from distckpt.stateful import Gathered

_LOG = logging.getLogger(__name__)
_DONE = "done: "
_MOST_NAMES = 5


class Restorer:
    """Restores checkpoints of an archive, the same on all ranks.

    Args:
        archive: Where they are.
        config: Settings.
        coordinator: How the ranks hear of each other.
        group: Their process group, if they have one.
        name: What words of these ranks begin with.
        gather: Takes a state apart into what is loaded, given who reads it.
    """

    def __init__(
        self,
        archive: Archive,
        config: CheckpointConfig,
        coordinator: Coordinator,
        group: ProcessGroup | None,
        name: str,
        gather: Callable[[Mapping[str, Any], StorageReader], Gathered],
    ) -> None:
        self._archive, self._config, self._coordinator = archive, config, coordinator
        self._group, self._name, self._gather = group, name, gather
        self._rank = coordinator.ranks[coordinator.rank]
        self._is_first = coordinator.rank == 0
        self._is_alone = len(coordinator.ranks) == 1
        self._timeout_s = config.distributed_timeout_minutes * 60
        self._num_restores = 0
        """That have begun."""
        self._save_id: str | None = None
        """Of what was loaded last, if it was a save of ours."""
        self._left_out: dict[str, list[str]] = {}
        """Of each object, what the last load had no place for."""

    def restore(self, state: dict[str, Any], step: int | str | None) -> int | None:
        """Load a checkpoint into `state`; see `Checkpointer.restore`."""
        with contextlib.suppress(TypeError):
            # As `save` takes it.
            step = step if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
        damaged: dict[Copy, str | None] = {}
        first_error: CheckpointError | None = None
        is_latest = step in (None, "latest")
        while True:
            found = self._find_for_all(step, damaged)
            if found is None:
                if first_error is not None:
                    raise first_error
                return None
            try:
                error = self._load(state, found)
            except Exception as foreign:
                # Of an object of the state: the others need not wait for this rank.
                if not self._is_alone:
                    with contextlib.suppress(CheckpointError):
                        tell(
                            self._coordinator,
                            self._loaded_name,
                            f"failed: {type(foreign).__name__}: {foreign}",
                        )
                raise
            outcome = self._outcome_for_all(error)
            if outcome is None:
                self._warn_of_left_out(found)
                if not is_latest:
                    self._warn_of_later(found.step)
                _LOG.info("restored step %d from %s", found.step, self._where(found))
                return found.step
            if not isinstance(outcome, IntegrityError):
                raise outcome
            first_error = first_error or outcome
            damaged[found] = self._save_id
            if is_latest or self._archive.has_tiers:
                _LOG.warning(
                    "%s is damaged, and the next older one is tried, unless a save has replaced it: %s",
                    self._where(found),
                    outcome,
                )

    def _say_why_nothing(self) -> None:
        """Say that the caller starts anew, and what may be the matter.

        Raises:
            ConfigError: The root is a checkpoint itself.
        """
        root = self._archive.url
        if why := self._archive.why_nothing():
            _LOG.warning("%s has no checkpoint: %s", root, why)
        else:
            _LOG.info("nothing is restored: %s has no checkpoint", root)

    def _warn_of_later(self, step: int) -> None:
        """Say that there are later checkpoints, which the next restore of the latest finds."""
        if not self._is_first:
            return
        with contextlib.suppress(CheckpointError):
            latest = next((copy.step for copy in self._archive.copies()), step)
            if latest > step:
                _LOG.warning(
                    "step %d is restored, and there is a step %d: unless later ones are removed, the next "
                    "restore of the latest goes on from there",
                    step,
                    latest,
                )

    def _warn_of_left_out(self, copy: Copy) -> None:
        """Say what was not restored, for the state has no place for it."""
        for fqn, names in self._left_out.items() if self._is_first else ():
            _LOG.warning(
                "%s has %d entries of %r for which the state has no place, and that are not restored: %s%s "
                "(objects are given theirs: pass modules and optimizers, not their state_dict())",
                self._where(copy),
                len(names),
                fqn,
                ", ".join(names[:_MOST_NAMES]),
                ", ..." if len(names) > _MOST_NAMES else "",
            )

    def _where(self, copy: Copy) -> str:
        return self._archive.path(copy.step, copy.tier)

    def _load(self, state: dict[str, Any], copy: Copy) -> CheckpointError | None:
        """Load one checkpoint; returns why that failed, if it lies with the checkpoint or the state."""
        group = self._group if self._config.ckpt_fully_parallel_load and not self._is_alone else None
        number = self._num_restores
        num_asked = 0
        path = self._where(copy)
        reader = StorageReader(path, self._config, storage_options=self._archive.options_of(copy.tier))

        def gather(loaded: Mapping[str, Any]) -> Gathered:
            gathered = self._gather(loaded, reader)
            self._left_out = gathered.left_out
            return gathered

        def agree(text: str) -> bool:
            nonlocal num_asked
            num_asked += 1
            name = f"{self._name}.load.{number}.{num_asked}"
            heard = exchange(self._coordinator, name, text, timeout_s=self._timeout_s)
            return len(set(heard.values())) == 1

        try:
            load(
                state,
                reader,
                group=group,
                agree=agree,
                gather=gather,
                weights_only=self._config.ckpt_weights_only,
            )
        except CheckpointException as error:
            cause = _cause_of(error, path, self._rank)
            cause.__cause__ = error
            return cause
        except CheckpointError as error:
            return error
        finally:
            self._save_id = reader.save_id
        return None

    @property
    def _loaded_name(self) -> str:
        return f"{self._name}.loaded.{self._num_restores}"

    def _outcome_for_all(self, error: CheckpointError | None) -> CheckpointError | None:
        """Return how loading went: None if it went well on all ranks, damage if one has found any."""
        if self._is_alone:
            return error
        # One rank may have a place for what another has none for, as where stages of a model are.
        text = _DONE + json.dumps(
            {
                fqn: hashlib.sha256("\n".join(names).encode()).hexdigest()
                for fqn, names in self._left_out.items()
            }
        )
        if error is not None:
            text = f"{'damaged' if isinstance(error, IntegrityError) else 'failed'}: {error}"
        heard = exchange(self._coordinator, self._loaded_name, text, timeout_s=self._timeout_s)
        for place, told in heard.items():
            if told.startswith("damaged: "):
                rank = self._coordinator.ranks[place]
                return IntegrityError(f"{told.removeprefix('damaged: ')} (rank {rank})", rank=rank)
        if error is not None:
            return error
        for place, told in heard.items():
            if not told.startswith(_DONE):
                rank = self._coordinator.ranks[place]
                return CheckpointError(
                    f"rank {rank} could not load: {told.removeprefix('failed: ')}", rank=rank
                )
        words = [json.loads(told.removeprefix(_DONE)) for told in heard.values()]
        self._left_out = {
            fqn: names for fqn, names in self._left_out.items() if len({word.get(fqn) for word in words}) == 1
        }
        return None

    def _find_for_all(self, step: int | str | None, damaged: Mapping[Copy, str | None]) -> Copy | None:
        """Return what the first rank finds: one rank may see a checkpoint that another does not see yet.

        Args:
            step: What is asked for.
            damaged: What has been tried, and the save of which it was: not what was saved there since.

        Raises:
            CheckpointError: There is no such step, or the ranks ask for different ones.
        """
        self._num_restores += 1
        name = f"{self._name}.restore.{self._num_restores}"
        found, failure = None, None
        if self._is_first:
            try:
                found = self._find(step, [copy for copy in damaged if self._is_still(copy, damaged[copy])])
            except CheckpointError as error:
                failure = error
            told = [str(step), found, failure and f"{type(failure).__name__}: {failure}"]
            if not self._is_alone:
                tell(self._coordinator, name, json.dumps(told))
        else:
            [word] = hear(self._coordinator, name, [0], timeout_s=self._timeout_s).values()
            asked, place, text = json.loads(word)
            first = self._coordinator.ranks[0]
            if asked != str(step):
                text = f"all ranks restore the same: rank {first} restores step {asked}, and this one {step}"
            failure = CheckpointError(f"{text} (rank {first})") if text else None
            found = None if place is None else Copy(*place)
        if failure is not None:
            raise failure
        return found

    def _is_still(self, copy: Copy, save_id: str | None) -> bool:
        """Say whether a checkpoint that was found damaged is the same: a save may have replaced it."""
        with contextlib.suppress(CheckpointError):
            return save_id is None or committed_by(self._archive.open(*copy)) in (save_id, None)
        return True

    def _find(self, step: int | str | None, leave_out: Collection[Copy]) -> Copy | None:
        if step is None or step == "latest":
            found = next((copy for copy in self._archive.copies() if copy not in leave_out), None)
            if found is None and not leave_out:
                self._say_why_nothing()
            return found
        text = str(step)
        if isinstance(step, bool) or not (text.isascii() and text.isdecimal()):
            raise ConfigError(f"step: expected a number from 0, or 'latest', got {step!r}")
        number = int(text)
        found = self._archive.find(number, leave_out)
        if found is None and leave_out:
            return None
        if found is None:
            steps = self._archive.steps()
            others = (
                f"there are {', '.join(map(str, steps[-_MOST_NAMES:]))}" if steps else "nor does another step"
            )
            raise CheckpointError(f"{self._archive.path(number)} holds no complete checkpoint; {others}")
        return found


def _cause_of(error: CheckpointException, path: str, rank: int) -> CheckpointError:
    """Return our own error among those that torch has gathered, or one that says what it gathered."""
    [failure, *_] = (failure for failure, _ in error.failures.values())
    if isinstance(failure, CheckpointError):
        return failure
    if not isinstance(failure, Exception):
        # torch gathers what ends a program, too.
        raise failure from error
    return CheckpointError(f"{path} cannot be loaded into the state: {failure} (rank {rank})", rank=rank)

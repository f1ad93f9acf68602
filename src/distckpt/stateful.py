"""What a training loop hands over, as plain containers of tensors and objects, and back.

    {"model": Module, "optimizer": Optimizer, "loader": PerRank(loader)}
        -> {"model": {...}, "optimizer": {...}, "loader": {"rank-00000": tensor}}

What comes from torchdata is wrapped in a `PerRank` unasked.

Invariants:
    * A state without objects that have a state of their own is passed on as it is, not copied.
    * The state of a `PerRank` is one tensor that keeps its place and size from save to save, as far as it
      goes: a plan of the whole holds.

Threads: the trainer's.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from distckpt.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Gathered", "PerRank", "name_of"]

_LOG = logging.getLogger(__name__)
_PLAIN = {torch.Tensor, torch.nn.Parameter, DTensor, int, float, str, bool, bytes, type(None)}
_STATE, _GENERATOR = "distckpt.state", "distckpt.generator"
_HEAD_BYTES = 8
_ROOM_BYTES = 4096
"""The tensor of a `PerRank` is a multiple of it."""


class PerRank:
    """An object of a state that is another one on each rank, such as a data loader.

    Each rank saves its own and gets it back. A rank for which the checkpoint has none, for there were fewer
    of them, keeps what it has, and says so in the log.

    Args:
        wrapped: Has `state_dict` and `load_state_dict`; what the first returns can be pickled.
    """

    def __init__(self, wrapped: Any) -> None:
        if not isinstance(wrapped, Stateful):
            raise ConfigError(
                f"PerRank: expected an object with state_dict() and load_state_dict(), got "
                f"{type(wrapped).__name__}"
            )
        self._wrapped = wrapped
        self._memory = torch.zeros(_ROOM_BYTES, dtype=torch.uint8)

    def state_of(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the state of this rank, as one tensor that the next call overwrites.

        Args:
            rank: This rank.
        """
        buffer = io.BytesIO()
        state = self._wrapped.state_dict()
        generator = _generator_of(self._wrapped)
        if generator is not None:
            # torchdata saves where the pass under way began, not where the generator is: the next pass would
            # have another order.
            state = {_STATE: state, _GENERATOR: generator.get_state()}
        torch.save(state, buffer)
        data = buffer.getbuffer()
        needed = _HEAD_BYTES + data.nbytes
        if self._memory.numel() < needed:
            # Some more, so that it need not grow again soon.
            room = -(-(needed + needed // 4) // _ROOM_BYTES) * _ROOM_BYTES
            self._memory = torch.zeros(room, dtype=torch.uint8)
        head = data.nbytes.to_bytes(_HEAD_BYTES, "little")
        self._memory[:needed] = torch.frombuffer(bytearray(head + data), dtype=torch.uint8)
        return {name_of(rank): self._memory}

    def room_for(self, rank: int, nbytes: int) -> dict[str, torch.Tensor]:
        """Return where the state of this rank is loaded to.

        Args:
            rank: This rank.
            nbytes: Of what was saved.
        """
        self._memory = torch.zeros(nbytes, dtype=torch.uint8)
        return {name_of(rank): self._memory}

    def take(self, *, weights_only: bool) -> None:
        """Hand what was loaded to the object.

        Args:
            weights_only: As for `torch.load`.

        Raises:
            CheckpointError: It cannot be read, or only with code of its author.
        """
        data = self._memory.numpy().tobytes()
        nbytes = int.from_bytes(data[:_HEAD_BYTES], "little")
        try:
            state = torch.load(
                io.BytesIO(data[_HEAD_BYTES : _HEAD_BYTES + nbytes]), weights_only=weights_only
            )
        except Exception as error:
            raise CheckpointError(
                f"the state of a {type(self._wrapped).__name__} cannot be read: {error}"
            ) from error
        drawn = None
        if _is_loader(self._wrapped) and isinstance(state, dict) and _GENERATOR in state:
            state, drawn = state[_STATE], state[_GENERATOR]
        self._wrapped.load_state_dict(state)
        if _is_loader(self._wrapped):
            # Has it begin its pass over the data, for which it draws a random number: the run that was saved
            # had drawn it, and the generators are set after this.
            self._wrapped.state_dict()
            generator = _generator_of(self._wrapped)
            if generator is not None and drawn is not None:
                generator.set_state(drawn)


def _is_loader(entry: Any) -> bool:
    return any(one.__module__.startswith("torchdata.") for one in type(entry).__mro__)


def _generator_of(entry: Any) -> torch.Generator | None:
    """Return the generator that a data loader was given for itself."""
    found = getattr(entry, "generator", None) if _is_loader(entry) else None
    return found if isinstance(found, torch.Generator) else None


def name_of(rank: int) -> str:
    """Return the key under which a rank has what is its alone."""
    return f"rank-{rank:05}"


class Gathered:
    """A state as plain containers.

    Keys of mappings are spelt as text, as torch's planners spell them: what these load would otherwise go to
    keys of its own.

    Args:
        state: Nested containers of tensors, objects that have a state of their own, and others.
        rank: This rank.
        wrappers: Keeps, from save to save, what is wrapped around data loaders, which are each rank's own.
        sizes: To load: returns names and, of tensors, bytes of what the checkpoint has.

    Attributes:
        values: The containers; `state` itself where there is nothing to replace.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        rank: int,
        wrappers: dict[int, PerRank],
        sizes: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        self._rank = rank
        self._wrappers = wrappers
        self._sizes = sizes
        self._taken: list[tuple[Any, Any]] = []
        """Objects, and what they have returned as their state."""
        self._copies: list[tuple[Any, Sequence[Any], Any]] = []
        """Containers, their keys, and what stands for them in `values`."""
        self._wrapped: set[int] = set()
        self.values: dict[str, Any] = self._gather(state, "")
        for gone in set(wrappers) - self._wrapped:
            del wrappers[gone]

    def _gather(self, container: Any, prefix: str) -> Any:
        is_mapping = isinstance(container, Mapping)
        entries = list(container.values()) if is_mapping else list(container)
        keys: Sequence[Any] = list(container) if is_mapping else range(len(entries))
        is_spelt = not is_mapping or set(map(type, keys)) <= {str}
        if is_spelt and set(map(type, entries)) <= _PLAIN:
            return container
        found = [self._value(entry, f"{prefix}{key}") for key, entry in zip(keys, entries, strict=True)]
        if is_spelt and all(new is old for new, old in zip(found, entries, strict=True)):
            return container
        values = dict(zip(map(str, keys), found, strict=True)) if is_mapping else found
        if len(values) != len(keys):
            raise ConfigError(
                f"{prefix.removesuffix('.') or 'state'}: two keys are spelt alike: {list(keys)}"
            )
        self._copies.append((container, keys, values))
        return values

    def _value(self, entry: Any, fqn: str) -> Any:
        if type(entry) in _PLAIN or isinstance(entry, torch.Tensor):
            return entry
        if isinstance(entry, PerRank):
            return self._of_rank(entry, fqn)
        if isinstance(entry, Stateful):
            if _is_loader(entry):
                self._wrapped.add(id(entry))
                return self._of_rank(self._wrappers.setdefault(id(entry), PerRank(entry)), fqn)
            if self._sizes is not None and isinstance(entry, Optimizer):
                self._make_room(entry, fqn)
            state = entry.state_dict()
            self._taken.append((entry, state))
            return self._gather(state, f"{fqn}.")
        if isinstance(entry, (Mapping, list)):
            return self._gather(entry, f"{fqn}.")
        return entry

    def _of_rank(self, entry: PerRank, fqn: str) -> dict[str, torch.Tensor]:
        if self._sizes is None:
            return entry.state_of(self._rank)
        nbytes = self._sizes().get(f"{fqn}.{name_of(self._rank)}")
        if nbytes is None:
            _LOG.warning("the checkpoint has no %r of rank %d: it stays as it is", fqn, self._rank)
            return {}
        self._taken.append((entry, None))
        return entry.room_for(self._rank, nbytes)

    def _make_room(self, optimizer: Optimizer, fqn: str) -> None:
        """Give an optimizer the tensors that its state is loaded to, or none if there is none of it."""
        assert self._sizes is not None
        names = self._sizes()
        if not any(name.startswith(f"{fqn}.state.") for name in names):
            if any(name.startswith(f"{fqn}.") for name in names):
                # It was saved before its first step.
                optimizer.state.clear()
            return
        if optimizer.state:
            return
        # torch takes gradients for a sign that the optimizer is in use.
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        _init_optim_state(optimizer)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    def hand_back(self, *, weights_only: bool) -> None:
        """Hand what was loaded into `values` to the containers and objects of the state.

        Args:
            weights_only: As for `torch.load`.

        Raises:
            CheckpointError: What a `PerRank` has saved cannot be read.
        """
        stand_ins = {id(values) for _, _, values in self._copies}
        stand_ins |= {id(state) for _, state in self._taken}
        for container, keys, values in self._copies:
            loaded = values if isinstance(values, list) else [values[str(key)] for key in keys]
            for key, value in zip(keys, loaded, strict=True):
                if value is not container[key] and not (
                    id(value) in stand_ins or isinstance(container[key], (PerRank, Stateful))
                ):
                    container[key] = value
        for entry, state in self._taken:
            if isinstance(entry, PerRank):
                entry.take(weights_only=weights_only)
            else:
                entry.load_state_dict(state)

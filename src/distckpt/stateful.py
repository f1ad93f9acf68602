"""What a training loop hands over, as plain containers of tensors and objects, and back.

    {"model": Module, "optimizer": Optimizer, "loader": PerRank(loader)}
        -> {"model": {...}, "optimizer": {...}, "loader": {"rank-00000": tensor}}

What comes from torchdata is wrapped in a `PerRank` unasked.

Invariants:
    * A state without objects that have a state of their own is passed on as it is, not copied.
    * An optimizer that is restored has, for each parameter, what the checkpoint has of it, and nothing else;
      until that was loaded it keeps its entries, and no step of it is made.
    * The state of a `PerRank` is one tensor that keeps its place and size from save to save, as far as it
      goes: a plan of the whole holds.

Threads: the trainer's.
"""

from __future__ import annotations

import bisect
import dataclasses
import io
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import zeros as distributed_zeros
from torch.optim import Optimizer

from distckpt.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from torch.distributed.checkpoint.metadata import Metadata

    Path = tuple[str | int, ...]

__all__ = ["Gathered", "PerRank", "name_of"]

_LOG = logging.getLogger(__name__)
_PLAIN = {torch.Tensor, torch.nn.Parameter, DTensor, int, float, str, bool, bytes, type(None)}
_STATE, _GENERATOR = "distckpt.state", "distckpt.generator"
_HEAD_BYTES = 8
_ROOM_BYTES = 4096
"""The tensor of a `PerRank` is a multiple of it."""
_MOST_LEVELS = 100
_TRIAL_BYTES = 256 << 20
"""Of parameters whose first states are made at once, beside those that train."""
_STATE_OF, _GROUPS_OF = "state", "param_groups"
"""What the state of an optimizer consists of."""


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
        metadata: To load: returns that of the checkpoint.

    Attributes:
        values: The containers; `state` itself where there is nothing to replace.
        left_out: To load: of each object that has a state of its own, and of each other entry, the names of
            what the checkpoint has of it and the state has no place for, if there are any.

    Raises:
        ConfigError: Of an entry, which it names, nothing could be restored.
        CheckpointError: An optimizer does not take what the checkpoint has of it.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        rank: int,
        wrappers: dict[int, PerRank],
        metadata: Callable[[], Metadata] | None = None,
    ) -> None:
        self._rank = rank
        self._wrappers = wrappers
        self._metadata = metadata
        self._known: _Saved | None = None
        self._taken: list[tuple[Any, Path]] = []
        """Objects, and where their states stand in `values`."""
        self._copies: list[tuple[Any, Sequence[Any], Path]] = []
        """Containers, their keys, and where what stands for them is in `values`."""
        self._wrapped: set[int] = set()
        self.values: dict[str, Any] = self._gather(state, ())
        self.left_out: dict[str, list[str]] = {}
        if metadata is not None:
            self._check_room()
        for gone in set(wrappers) - self._wrapped:
            del wrappers[gone]

    @property
    def _saved(self) -> _Saved:
        """What the checkpoint has, once something depends on it."""
        if self._known is None:
            assert self._metadata is not None
            self._known = _Saved(self._metadata())
        return self._known

    def _gather(self, container: Any, path: Path) -> Any:
        is_mapping = isinstance(container, Mapping)
        entries = list(container.values()) if is_mapping else list(container)
        keys: Sequence[Any] = list(container) if is_mapping else range(len(entries))
        is_spelt = not is_mapping or set(map(type, keys)) <= {str}
        if is_spelt and set(map(type, entries)) <= _PLAIN:
            return container
        if len(path) > _MOST_LEVELS:
            raise ConfigError(
                f"{_fqn(path[:4])}...: this contains itself, or has more than {_MOST_LEVELS} levels"
            )
        names: Sequence[Any] = list(map(str, keys)) if is_mapping else keys
        found = [self._value(entry, (*path, name)) for name, entry in zip(names, entries, strict=True)]
        if is_spelt and all(new is old for new, old in zip(found, entries, strict=True)):
            return container
        values = dict(zip(names, found, strict=True)) if is_mapping else found
        if len(values) != len(keys):
            raise ConfigError(f"{_fqn(path) or 'state'}: two keys are spelt alike: {list(keys)}")
        self._copies.append((container, keys, path))
        return values

    def _value(self, entry: Any, path: Path) -> Any:
        if type(entry) in _PLAIN or isinstance(entry, torch.Tensor):
            return entry
        # Whether something has a state of its own takes long to ask, and there may be thousands of these.
        if type(entry) in (dict, list):
            return self._gather(entry, path)
        if type(entry) is tuple and set(map(type, entry)) <= _PLAIN:
            return entry
        if isinstance(entry, PerRank):
            return self._of_rank(entry, path)
        if isinstance(entry, Stateful):
            if _is_loader(entry):
                self._wrapped.add(id(entry))
                return self._of_rank(self._wrappers.setdefault(id(entry), PerRank(entry)), path)
            state: Any = entry.state_dict()
            if self._metadata is not None and isinstance(entry, Optimizer):
                with torch.inference_mode(mode=False), torch.no_grad():
                    state = _room_of(entry, state, self._saved, _fqn(path))
            self._taken.append((entry, path))
            return self._gather(state, path) if isinstance(state, (Mapping, list)) else state
        if isinstance(entry, (Mapping, list)):
            return self._gather(entry, path)
        if self._metadata is None:
            held = next(_held_by(entry, set()), None)
            if held is not None:
                raise ConfigError(
                    f"{_fqn(path)}: a {type(held).__name__} in a {type(entry).__name__} would be pickled as "
                    f"a whole, and could not be restored: use a list or a mapping"
                )
        return entry

    def _of_rank(self, entry: PerRank, path: Path) -> dict[str, torch.Tensor]:
        if self._metadata is None:
            return entry.state_of(self._rank)
        nbytes = self._saved.nbytes(f"{_fqn(path)}.{name_of(self._rank)}")
        if nbytes is None:
            _LOG.warning("the checkpoint has no %r of rank %d: it stays as it is", _fqn(path), self._rank)
            return {}
        self._taken.append((entry, path))
        return entry.room_for(self._rank, nbytes)

    def _check_room(self) -> None:
        """Refuse tensors without memory, and find out what there is no place for.

        Raises:
            ConfigError: An object gets nothing of what is loaded into a tensor without memory; or two entries
                have one name.
        """
        try:
            leaves, _ = flatten_state_dict(self.values)
        except ValueError as error:
            raise ConfigError(f"state: two entries have one name: {error}") from error
        owners = {_fqn(path): entry for entry, path in self._taken}
        for name, leaf in leaves.items():
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta":
                # torch makes a tensor in place of it, of which the object would not hear.
                if any(name == owner or name.startswith(f"{owner}.") for owner in owners):
                    raise ConfigError(
                        f"{name}: it is on the meta device, and has no memory to load into: call to_empty() "
                        f"of the module first"
                    )
                if not distributed.is_initialized():
                    raise ConfigError(
                        f"{name}: it is on the meta device, and without a process group it is not known "
                        f"where to load it to: give a tensor that has memory"
                    )
        # What each rank has for itself is of no use to another.
        of_ranks = tuple(f"{fqn}." for fqn, entry in owners.items() if isinstance(entry, PerRank))
        for fqn, entry in owners.items():
            if not isinstance(entry, PerRank):
                self._note_left_out(fqn, leaves, of_ranks)
        # Who leaves out a whole entry of the state does not want it; within one, nobody chooses.
        for key in self.values:
            if key not in owners:
                self._note_left_out(key, leaves, tuple(f"{fqn}." for fqn in owners))

    def _note_left_out(self, fqn: str, leaves: Collection[str], but: tuple[str, ...]) -> None:
        """Note what the checkpoint has below `fqn` that is none of `leaves`, nor begins with one of `but`."""
        names = [name for name in self._saved.below(fqn) if name not in leaves and not name.startswith(but)]
        if names:
            self.left_out[fqn] = names

    def hand_back(self, *, weights_only: bool) -> None:
        """Hand what was loaded into `values` to the containers and objects of the state.

        Args:
            weights_only: As for `torch.load`.

        Raises:
            CheckpointError: What a `PerRank` has saved cannot be read.
        """
        # By their places: torch's planner puts lists of its own there.
        copies = [(container, keys, self._at(path)) for container, keys, path in self._copies]
        originals = {id(values): container for container, _, values in copies}
        for container, keys, values in copies:
            loaded = values if isinstance(values, list) else [values[str(key)] for key in keys]
            for key, value in zip(keys, loaded, strict=True):
                if value is not container[key] and not (
                    id(value) in originals or isinstance(container[key], (PerRank, Stateful))
                ):
                    container[key] = value
        for entry, path in self._taken:
            if isinstance(entry, PerRank):
                entry.take(weights_only=weights_only)
            else:
                state = self._at(path)
                entry.load_state_dict(originals.get(id(state), state))

    def _at(self, path: Path) -> Any:
        value: Any = self.values
        for key in path:
            value = value[key]
        return value


def _fqn(path: Path) -> str:
    return ".".join(map(str, path))


def _held_by(entry: Any, seen: set[int]) -> Iterator[Any]:
    """Yield what has a state of its own in containers that are pickled as a whole."""
    if type(entry) in _PLAIN or id(entry) in seen:
        return
    seen.add(id(entry))
    inner: list[Any] = []
    if isinstance(entry, Mapping):
        inner = list(entry.values())
    elif isinstance(entry, (list, tuple, set, frozenset)):
        inner = list(entry)
    elif dataclasses.is_dataclass(entry):
        inner = list(getattr(entry, "__dict__", {}).values())
    if set(map(type, inner)) <= _PLAIN:
        return
    for one in inner:
        if isinstance(one, (PerRank, Stateful)) and not isinstance(one, type):
            yield one
        else:
            yield from _held_by(one, seen)


class _Saved:
    """What a checkpoint has, by name.

    Args:
        metadata: Of the checkpoint.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._entries = metadata.state_dict_metadata
        self._paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
        self._names = sorted(self._entries)

    def below(self, fqn: str) -> list[str]:
        """Return the names of all that is in an entry, sorted."""
        # A slash is what comes next after a dot.
        first, stop = (bisect.bisect_left(self._names, f"{fqn}{end}") for end in "./")
        return self._names[first:stop]

    def tensor(self, name: str) -> TensorStorageMetadata | None:
        """Return what is known of a tensor; None of an object."""
        entry = self._entries[name]
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def nbytes(self, name: str) -> int | None:
        """Return the bytes of a tensor, 0 of an object; None of what is not there."""
        if name not in self._entries:
            return None
        entry = self.tensor(name)
        return 0 if entry is None else entry.size.numel() * entry.properties.dtype.itemsize

    def tree(self, fqn: str) -> dict[str | int, Any]:
        """Return what is in an entry: nested keys, those of lists as numbers, and names at the ends."""
        found: dict[str | int, Any] = {}
        for name in self.below(fqn):
            *keys, last = self._keys(name, name[len(fqn) + 1 :])
            inner = found
            for key in keys:
                inner = inner.setdefault(key, {})
            inner[last] = name
        return found

    def _keys(self, name: str, rest: str) -> Path:
        path = tuple(self._paths.get(name, ()))
        keys = next((path[n:] for n in range(len(path)) if _fqn(path[n:]) == rest), None)
        return tuple(rest.split(".")) if keys is None else keys


def _room_of(optimizer: Optimizer, state: Any, saved: _Saved, fqn: str) -> Any:
    """Return the state of an optimizer with places for what a checkpoint has of it, and for nothing else.

    The checkpoint decides which parameters have a state: those that had no gradient yet have none, and those
    that are frozen by now may have one.

    Args:
        optimizer: The optimizer.
        state: What it returns as its state; its tensors are places.
        saved: What the checkpoint has.
        fqn: Name of the optimizer.

    Raises:
        CheckpointError: There can be no place for something.
    """
    if not (isinstance(state, Mapping) and {_STATE_OF, _GROUPS_OF} <= state.keys() and saved.below(fqn)):
        return state
    groups = {str(key): tree for key, tree in saved.tree(f"{fqn}.{_GROUPS_OF}").items()}
    if groups.keys() != set(map(str, range(len(state[_GROUPS_OF])))):
        raise CheckpointError(
            f"{fqn}.{_GROUPS_OF}: the optimizer has {len(state[_GROUPS_OF])}, the checkpoint {len(groups)}"
        )
    owners: dict[str, tuple[Any, torch.Tensor | None]] = {
        str(key): (key, parameter)
        for packed, group in zip(state[_GROUPS_OF], optimizer.param_groups, strict=False)
        for key, parameter in zip(packed.get("params", ()), group["params"], strict=False)
    }
    num_parameters = len(owners)
    for key in state[_STATE_OF]:
        owners.setdefault(str(key), (key, None))
    trees = {str(key): tree for key, tree in saved.tree(f"{fqn}.{_STATE_OF}").items()}
    for text in trees:
        if text not in owners and text.isdecimal():
            raise CheckpointError(
                f"{fqn}.{_STATE_OF}.{text}: the optimizer has no such parameter, but {num_parameters}"
            )
        owners.setdefault(text, (text, None))
    wanted = [
        (*owner, state[_STATE_OF].get(owner[0]), trees[text])
        for text, owner in owners.items()
        if text in trees
    ]
    made = _first_states(
        optimizer,
        [
            parameter
            for _, parameter, had, tree in wanted
            if parameter is not None and not _has_all(had, tree, saved)
        ],
    )
    return {
        **state,
        _STATE_OF: {
            key: _Room(saved, parameter).of(tree, [had, made.get(id(parameter))])
            for key, parameter, had, tree in wanted
        },
        _GROUPS_OF: [
            _Room(saved, None).of(groups[str(number)], [packed])
            for number, packed in enumerate(state[_GROUPS_OF])
        ],
    }


def _has_all(state: Any, tree: Any, saved: _Saved) -> bool:
    """Say whether a state has a place for all tensors of `tree`."""
    if isinstance(tree, str):
        return saved.tensor(tree) is None or isinstance(state, torch.Tensor)
    return all(_has_all(_entry(state, key), inner, saved) for key, inner in tree.items())


def _entry(container: Any, key: str | int) -> Any:
    """Return what a container has under a key that may be spelt as text; None if there is none."""
    if isinstance(container, Mapping):
        if key in container:
            return container[key]
        return next((value for own, value in container.items() if str(own) == key), None)
    if isinstance(container, list) and isinstance(key, int) and key < len(container):
        return container[key]
    return None


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


class _Room:
    """Makes places for what a checkpoint has.

    Args:
        saved: What that is.
        parameter: Whose state it is; None if of none.
    """

    def __init__(self, saved: _Saved, parameter: torch.Tensor | None) -> None:
        self._saved, self._parameter = saved, parameter

    def of(self, tree: Any, patterns: Sequence[Any], key: str | int = "") -> Any:
        """Return containers that are nested as `tree`.

        Args:
            tree: As of `_Saved.tree`.
            patterns: States, the tensors of the first of which are used that has them.
            key: Under which it stands.

        Raises:
            CheckpointError: There can be no place for a tensor.
        """
        if isinstance(tree, str):
            saved = self._saved.tensor(tree)
            if saved is None:
                # Whatever stands there is replaced.
                return None
            tensor = next((each for each in patterns if isinstance(each, torch.Tensor)), None)
            return self._new(tree, saved, key) if tensor is None else tensor
        inner = {
            key: self.of(each, [_entry(pattern, key) for pattern in patterns], key)
            for key, each in tree.items()
        }
        if all(isinstance(key, int) for key in inner):
            return [inner.get(number) for number in range(max(inner) + 1)]
        # Under their own keys, which a checkpoint spells as text; and an empty mapping leaves no trace in it.
        own = {
            str(key): (key, value)
            for pattern in patterns
            if isinstance(pattern, Mapping)
            for key, value in pattern.items()
        }
        found = {
            key: inner.pop(text, value)
            for text, (key, value) in own.items()
            if text in inner or _is_empty(value)
        }
        return {**found, **inner}

    def _new(self, name: str, saved: TensorStorageMetadata, key: str | int) -> torch.Tensor:
        parameter, size, dtype = self._parameter, saved.size, saved.properties.dtype
        try:
            if isinstance(parameter, DTensor) and key != "step" and len(size) > 0:
                if size == parameter.size():
                    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                mesh = parameter.device_mesh
                return distributed_zeros(
                    size, dtype=dtype, device_mesh=mesh, placements=[Replicate()] * mesh.ndim
                )
            # Steps are counted on the host; what is elsewhere is brought there by the optimizer.
            device = "cpu" if parameter is None or not len(size) else parameter.device
            return torch.zeros(size, dtype=dtype, device=device)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            raise CheckpointError(
                f"{name}: the optimizer has no place for it, and none could be made: {error}"
            ) from error


def _first_states(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> dict[int, Any]:
    """Return the states that parameters have after a first step; as far as that can be found out.

    A likeness of the optimizer steps, with parameters of its own: no value, gradient or state of those that
    train changes, and no hook is called.

    Args:
        optimizer: Of the parameters.
        parameters: Of which to make them.

    Returns:
        By the id of the parameter; none of them if it does not step by itself.
    """
    found: dict[int, Any] = {}
    parameters = [each for each in parameters if each.is_floating_point() or each.is_complex()]
    # One that wraps another has these elsewhere: what is put there would be put into the other.
    if not parameters or not {_STATE_OF, _GROUPS_OF} <= vars(optimizer).keys():
        return found
    gradients = [
        (parameter, parameter.grad) for group in optimizer.param_groups for parameter in group["params"]
    ]
    try:
        # Should the likeness have another optimizer step, that finds nothing to do.
        for parameter, _ in gradients:
            parameter.grad = None
        some, nbytes = [], 0
        for parameter in parameters:
            some.append(parameter)
            nbytes += getattr(parameter, "_local_tensor", parameter).nbytes
            if nbytes >= _TRIAL_BYTES or parameter is parameters[-1]:
                found.update(_states_after_step(optimizer, some))
                some, nbytes = [], 0
    except Exception as error:  # noqa: BLE001 - what an optimizer wants is its own matter
        _LOG.debug("no first step of a %s: %s", type(optimizer).__name__, error)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return found


def _states_after_step(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> dict[int, Any]:
    stand_ins = {}
    for parameter in parameters:
        stand_in = torch.zeros_like(parameter, requires_grad=False)
        # Some optimizers go by what is noted there.
        vars(stand_in).update(vars(parameter))
        stand_in.requires_grad_()
        stand_in.grad = torch.zeros_like(stand_in, requires_grad=False)
        stand_ins[id(parameter)] = stand_in
    idle = torch.zeros(0)
    likeness = object.__new__(type(optimizer))
    vars(likeness).update(vars(optimizer))
    vars(likeness).update(
        state=defaultdict(dict),
        param_groups=[
            {
                **{
                    key: value.clone() if isinstance(value, torch.Tensor) else value
                    for key, value in group.items()
                },
                "params": [stand_ins.get(id(parameter), idle) for parameter in group["params"]],
            }
            for group in optimizer.param_groups
        ],
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
    )
    # That of the class: schedulers put one of the optimizer itself in its place; and below what calls hooks.
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(likeness)
    return {
        number: likeness.state[stand_in]
        for number, stand_in in stand_ins.items()
        if stand_in in likeness.state
    }

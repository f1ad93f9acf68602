"""What identifies a state, cheap enough to be compared at every save.

Source of the choice of calls: for 30,000 tensors that are not in the processor's cache each attribute asked
from Python costs 3 to 7 ms. The guards of compiled functions compare types, dtypes, devices, shapes, strides
and dispatch keys (conj, neg) of all in 5 ms; without them the attributes are asked one by one.

Invariants:
    * Two states with equal signatures have the same entries, and tensors of one kind at the same addresses.
    * A signature holds no tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from distckpt.sharded import Sharded

try:
    from torch._C._dynamo import guards

    # The stub of it is wrong about what it takes.
    TensorGuards: Any = guards.TensorGuards
except (ImportError, AttributeError):
    TensorGuards = None

_STRETCH = 256
_NUMBERS = list(range(_STRETCH))
# Compares all addresses in one call; only torch with CUDA has it.
_addresses_equal: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)  # noqa: SLF001
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_KNOWN = {*_PLAIN, DTensor}
_local = operator.attrgetter("_local_tensor")
_spec = operator.attrgetter("_spec")
_requires_grad = operator.attrgetter("requires_grad")
version_of = operator.attrgetter("_version")


class View:
    """A state, walked: its tensors, and what `Signature` compares.

    Args:
        state: Nested containers of tensors and Python objects.
        with_paths: Whether `paths` is wanted.

    Attributes:
        leaves: The tensors, in the order of the containers; those of a `Sharded` instead of it.
        paths: For each, the keys that lead to it, those of mappings spelt as text, as torch's planner does;
            for a tensor of a `Sharded` the offsets of its box after them, as one key.
        structure: Keys and types of what every container holds, and the boxes of each `Sharded`.
    """

    def __init__(self, state: Mapping[Any, Any], *, with_paths: bool = False) -> None:
        self.leaves: list[torch.Tensor] = []
        self.structure: list[Sequence[Any]] = []
        self.paths: list[tuple[Any, ...]] = []
        kinds: set[type] = set()
        self._walk(state, () if with_paths else None, kinds)
        self.is_simple = kinds <= _KNOWN
        """Whether all tensors are of kinds that a signature knows in full."""
        self.specs: list[list[Any]] = []
        """Of the DTensors: their specs, and what else the parts on this rank do not tell."""
        self.locals: list[torch.Tensor] = self.leaves
        """The part of each tensor that lies on this rank."""
        self.wrapped: list[int] = []
        """Numbers of those leaves that are DTensors."""
        if DTensor in kinds:
            self.wrapped = [number for number, leaf in enumerate(self.leaves) if type(leaf) is DTensor]
            wrapped = [self.leaves[number] for number in self.wrapped]
            self.specs = [
                list(map(question, wrapped))
                for question in (_spec, _requires_grad, torch.Tensor.is_inference)
            ]
            self.locals = [_local(leaf) if type(leaf) is DTensor else leaf for leaf in self.leaves]
            self.is_simple = self.is_simple and set(map(type, self.locals)) <= _PLAIN

    def _walk(self, container: Any, prefix: tuple[Any, ...] | None, found: set[type]) -> None:
        if isinstance(container, Mapping):
            keys: Sequence[Any] = list(container)
            entries = list(container.values())
            self.structure.append(keys)
            if prefix is not None:
                keys = list(map(str, keys))
        else:
            keys, entries = range(len(container)), list(container)
        kinds = list(map(type, entries))
        self.structure.append(kinds)
        present = set(kinds)
        if present <= _KNOWN:
            found |= present
            self.leaves += entries
            if prefix is not None:
                self.paths += [(*prefix, key) for key in keys]
            return
        for key, entry in zip(keys, entries, strict=True):
            if isinstance(entry, Sharded):
                self._add_boxes(entry, None if prefix is None else (*prefix, key), found)
            elif isinstance(entry, torch.Tensor):
                found.add(type(entry))
                self.leaves.append(entry)
                if prefix is not None:
                    self.paths.append((*prefix, key))
            elif isinstance(entry, (Mapping, list, tuple)):
                self._walk(entry, None if prefix is None else (*prefix, key), found)

    def _add_boxes(self, entry: Sharded, path: tuple[Any, ...] | None, found: set[type]) -> None:
        found.update(map(type, entry.tensors))
        self.leaves += entry.tensors
        self.structure.append((entry.shape, entry.boxes))
        if path is not None:
            self.paths += [(*path, offsets) for offsets, _ in entry.boxes]


class Signature:
    """What identifies the state that `view` has walked; see the module."""

    def __init__(self, view: View) -> None:
        self._structure = view.structure
        self._specs = view.specs
        self._num_tensors = len(view.locals)
        with torch.enable_grad():
            self._stretches = [
                _Stretch(view.locals[first : first + _STRETCH])
                for first in range(0, self._num_tensors, _STRETCH)
            ]

    @property
    def addresses(self) -> list[int]:
        """Where each tensor lies."""
        return [address for stretch in self._stretches for address in stretch.addresses]

    def is_like(self, view: View) -> bool:
        """Say whether `view` has walked a state with the same entries, wherever they lie."""
        return self._all(view, lambda stretch, tensors: stretch.is_like(tensors))

    def matches(self, view: View, versions: list[int] | None = None) -> bool:
        """Say whether `view` has walked a state with this signature.

        Args:
            view: The state.
            versions: If given, the version of each tensor is appended, at less cost than apart from this.
        """
        return self._all(view, lambda stretch, tensors: stretch.matches(tensors, versions))

    def _all(self, view: View, question: Callable[[_Stretch, list[torch.Tensor]], bool]) -> bool:
        tensors = view.locals
        if self._structure != view.structure or self._specs != view.specs:
            return False
        firsts = range(0, self._num_tensors, _STRETCH)
        # Where gradients are off, the guards take nothing to require one.
        with torch.enable_grad():
            return len(tensors) == self._num_tensors and all(
                question(stretch, tensors[first : first + _STRETCH])
                for first, stretch in zip(firsts, self._stretches, strict=True)
            )


class _Stretch:
    """Some tensors, few enough to stay in the processor's cache from the first question to the last."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.addresses = list(map(torch.Tensor.data_ptr, tensors))
        self._guards: Any = None
        self._kinds: list[object] = []
        # What it is made for, the guards of compiled functions, has no tensor twice.
        if TensorGuards is not None and len(set(map(id, tensors))) == len(tensors):
            self._guards = TensorGuards(
                *tensors,
                dynamic_dims_sizes=[list(tensor.size()) for tensor in tensors],
                dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
            )
        else:
            self._kinds = list(map(_kind, tensors))

    def is_like(self, tensors: list[torch.Tensor]) -> bool:
        if self._guards is not None:
            return bool(self._guards.check(*tensors))
        try:
            return self._kinds == list(map(_kind, tensors))
        except RuntimeError:
            # A tensor that is no plain memory any more has no strides.
            return False

    def matches(self, tensors: list[torch.Tensor], versions: list[int] | None) -> bool:
        if not (self.is_like(tensors) and self._has_addresses_of(tensors)):
            return False
        if versions is not None:
            versions += map(version_of, tensors)
        return True

    def _has_addresses_of(self, tensors: list[torch.Tensor]) -> bool:
        if _addresses_equal is not None:
            return bool(_addresses_equal(tensors, self.addresses, _NUMBERS[: len(tensors)]))
        return self.addresses == list(map(torch.Tensor.data_ptr, tensors))


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        tensor.dtype, tensor.size(), tensor.stride(), tensor.requires_grad, tensor.is_conj(), tensor.is_neg(),
        tensor.is_inference(),
    )  # fmt: skip


def local_tensors(state: Mapping[Any, Any]) -> list[torch.Tensor]:
    """Return the tensors of this rank in `state`, as far as they are strided memory."""
    found: list[torch.Tensor] = []
    for leaf in View(state).locals:
        if isinstance(leaf, ShardedTensor):
            found += [shard.tensor for shard in leaf.local_shards()]
        elif leaf.layout is torch.strided:
            found.append(leaf)
    return found

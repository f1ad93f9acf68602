"""Tensors that are no DTensors, with their place in a global tensor, for saving and loading.

The place comes from the parameter, or from what its rank knows of itself: never from the values, and without
communication. docs/geometry.md has an example of each way in.

Invariants:
    * What a `Sharded` holds are views: a load fills the memory that it was made of.
    * Making one, or a DTensor, involves no other rank and moves nothing to another device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta

from distckpt.errors import ConfigError
from distckpt.geometry import TensorParallel, fused_chunks, stray

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from typing_extensions import Self

    Shape = tuple[int, ...]
    Boxes = tuple[tuple[Shape, Shape], ...]

_ATEN = torch.ops.aten
_PART = "box_"
_ON_EACH_BOX = {
    _ATEN.detach.default, _ATEN.clone.default, _ATEN.empty_like.default, _ATEN._to_copy.default,  # noqa: SLF001
}  # fmt: skip
"""What whoever copies a state, not knowing what is in it, asks of a tensor."""


class _Cut(NamedTuple):
    """How the tensors of a `Sharded` are cut from one local tensor.

    Attributes:
        shape: Of the local tensor.
        starts: Of the first element of each box, in the flattened local tensor.
    """

    shape: tuple[int, ...]
    starts: tuple[int, ...]


class Sharded(torch.Tensor):
    """A global tensor of which this rank holds some boxes, or none; an entry of a state like a DTensor.

    It is saved and loaded, also into other layouts, by `dcp.save`, `dcp.load` and a `Checkpointer`, with any
    storage writer and reader. It is nothing to compute with: use `tensors`. Ranks may hold the same boxes, if
    these are equal; all boxes of all ranks together must fill the global tensor.

    Args:
        shape: Global shape, in elements.
        boxes: For each box its offsets in the global tensor, in elements of each dimension, and a tensor of
            the size of the box, on any device, of any strides. They share one dtype and do not overlap. Empty
            ones are left out.
        dtype: Needed where there is no box.

    Attributes:
        boxes: Offsets and sizes of each box, in elements.
        tensors: What this rank has for each of them; views of what was given.

    Raises:
        ConfigError: The boxes do not fit the shape, or each other.
    """

    boxes: Boxes
    tensors: list[torch.Tensor]
    _cut: _Cut | None

    # As DTensor has it: operators come to __torch_dispatch__ at once.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    def __new__(
        cls,
        shape: Sequence[int],
        boxes: Iterable[tuple[Sequence[int], torch.Tensor]],
        *,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """See the class.

        Raises:
            ConfigError: As there.
        """
        size = tuple(shape)
        if min(size, default=0) < 0:
            raise ConfigError(f"no tensor has the shape {size}")
        given = [(tuple(offsets), tensor) for offsets, tensor in boxes]
        for offsets, tensor in given:
            if not _is_local(tensor):
                raise ConfigError(f"a box of a Sharded is a local tensor, not a {type(tensor).__name__}")
            if not len(offsets) == tensor.dim() == len(size):
                raise ConfigError(
                    f"a box at {offsets} of {tuple(tensor.shape)} in a tensor of {size}, which has "
                    f"{len(size)} dimensions"
                )
        wrong = stray(size, [(offsets, tuple(tensor.shape)) for offsets, tensor in given])
        if wrong is not None:
            raise ConfigError(f"the boxes of a Sharded do not fit: {wrong}")
        dtypes = list(dict.fromkeys([tensor.dtype for _, tensor in given] + ([dtype] if dtype else [])))
        if len(dtypes) != 1:
            names = " and of ".join(map(str, dtypes))
            raise ConfigError(
                f"a Sharded of {size} with boxes of {names}: it has one dtype"
                if dtypes
                else f"a Sharded of {size} has no box here: say its dtype"
            )
        held = [(offsets, tensor) for offsets, tensor in given if tensor.numel()]
        cut = None
        if len(held) < 2:
            cut = _Cut(tuple(held[0][1].shape), (0,)) if held else _Cut((0,), ())
        return cls._of(
            size,
            tuple((offsets, tuple(tensor.shape)) for offsets, tensor in held),
            [tensor for _, tensor in held],
            dtypes[0],
            cut,
        )

    @classmethod
    def _of(
        cls, shape: Shape, boxes: Boxes, tensors: Sequence[torch.Tensor], dtype: torch.dtype, cut: _Cut | None
    ) -> Self:
        """Return one of boxes that fit."""
        if 0 in shape:
            # Somebody must say that there is such a tensor.
            boxes, tensors = (((0,) * len(shape), shape),), [torch.empty(shape, dtype=dtype)]
        device = tensors[0].device if tensors else torch.device("cpu")
        made: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # noqa: SLF001
        made.boxes = boxes
        made.tensors = [tensor.detach() for tensor in tensors]
        made._cut = cut
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say where the boxes lie."""
        boxes = ", ".join(f"{offsets} of {sizes}" for offsets, sizes in self.boxes)
        return f"Sharded({tuple(self.shape)}, boxes at [{boxes}], {self.dtype})"

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Return what this rank can write, for torch's planner."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return what this rank wants to read, for torch's planner."""
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the tensor of the box at an offset, for torch's planner.

        Raises:
            ValueError: There is none.
        """
        # Not by the index's number, which counts the chunks of all ranks.
        for (offsets, _), tensor in zip(self.boxes, self.tensors, strict=True):
            if offsets == index.offset:
                return tensor
        raise ValueError(f"{index.fqn!r} has no box at {index.offset} on this rank")

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of its parts, and the rest."""
        names = [f"{_PART}{number}" for number in range(len(self.boxes))]
        return names, (tuple(self.shape), self.boxes, self.dtype, self._cut)

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, torch.Tensor], context: Any, *_: object) -> Sharded:
        """Return what `__tensor_flatten__` took apart."""
        shape, boxes, dtype, cut = context
        return Sharded._of(shape, boxes, [inner[f"{_PART}{n}"] for n in range(len(boxes))], dtype, cut)

    def __getattr__(self, name: str) -> torch.Tensor:
        """Return the part of that name.

        Raises:
            AttributeError: There is none.
        """
        if name.startswith(_PART):
            for number, tensor in enumerate(self.tensors):
                if name == f"{_PART}{number}":
                    return tensor
        raise AttributeError(f"a Sharded has no attribute {name!r}")

    def __reduce_ex__(self, _: object) -> tuple[Any, ...]:
        """Pickle the parts."""
        names, context = self.__tensor_flatten__()
        return Sharded.__tensor_unflatten__, ({name: getattr(self, name) for name in names}, context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Sharded:
        """Copy it box by box.

        Raises:
            NotImplementedError: Another operator is called.
        """
        made_of = args[0] if args else None
        if isinstance(made_of, Sharded):
            if func in _ON_EACH_BOX and len(args) == 1:
                return _on_each_box(made_of, lambda tensor: func(tensor, **(kwargs or {})))
            if func is _ATEN.new_empty.default and tuple(args[1]) == made_of.shape:
                return _on_each_box(made_of, lambda tensor: func(tensor, tensor.shape, **(kwargs or {})))
        raise NotImplementedError(f"{func} of a Sharded: it is to be saved and loaded; compute with .tensors")


def _on_each_box(made_of: Sharded, do: Callable[[torch.Tensor], torch.Tensor]) -> Sharded:
    tensors = [do(tensor) for tensor in made_of.tensors]
    dtype = tensors[0].dtype if tensors else made_of.dtype
    return Sharded._of(tuple(made_of.shape), made_of.boxes, tensors, dtype, made_of._cut)  # noqa: SLF001


@overload
def flat(
    value: torch.Tensor,
    shape: Sequence[int],
    start: int,
    stop: int,
    *,
    sections: None = None,
    tensor_parallel: TensorParallel | None,
) -> Sharded: ...


@overload
def flat(
    value: torch.Tensor,
    shape: Sequence[int],
    start: int,
    stop: int,
    *,
    sections: Sequence[int],
    tensor_parallel: TensorParallel | None,
) -> list[Sharded]: ...


def flat(
    value: torch.Tensor,
    shape: Sequence[int],
    start: int,
    stop: int,
    *,
    sections: Sequence[int] | None = None,
    tensor_parallel: TensorParallel | None,
) -> Sharded | list[Sharded]:
    """Return elements [start, stop) of a flattened parameter, or of one of its optimizer's states.

    Args:
        value: These elements, contiguous, of any shape, on any device.
        shape: Of the parameter on this tensor-parallel rank.
        start: First element of the slice, in the flattened parameter.
        stop: Element after the last.
        sections: Rows of each of the tensors that are fused in the parameter, on this rank.
        tensor_parallel: How `shape` is part of the global one; None if it is all of it. There is no default:
            a checkpoint would be wrong without an error.

    Returns:
        Views of `value`; with `sections` one `Sharded` for each of them, in their order.

    Raises:
        ConfigError: The arguments do not fit each other.
    """
    if not _is_local(value):
        raise ConfigError(f"a slice is a local tensor, not a {type(value).__name__}")
    if value.numel() != stop - start or not value.is_contiguous():
        raise ConfigError(
            f"elements [{start}, {stop}) of a parameter of {tuple(shape)} in a tensor of "
            f"{tuple(value.shape)}, strides {value.stride()}: these must be so many, one after the other"
        )
    found = [
        _view(
            value,
            held.shape,
            tuple((chunk.offsets, chunk.sizes) for chunk in held.chunks),
            _Cut(tuple(value.shape), tuple(chunk.start for chunk in held.chunks)),
        )
        for held in fused_chunks(shape, sections, start, stop, tensor_parallel=tensor_parallel)
    ]
    return found[0] if sections is None else found


def fused(
    value: torch.Tensor, sections: Sequence[int], *, tensor_parallel: TensorParallel | None
) -> list[Sharded]:
    """Return the tensors that are fused in a parameter, or in one of its optimizer's states.

    For example the gate and the up projection of SwiGLU, or the six sections of a gated delta net's input
    projection. The fused parameter of one rank is no part of anything at another number of tensor-parallel
    ranks; its sections are.

    Args:
        value: Of the shape that the parameter has on this tensor-parallel rank, contiguous.
        sections: Rows of each tensor along dimension 0, on this rank.
        tensor_parallel: As `flat`.

    Returns:
        Views of `value`, one `Sharded` for each section.

    Raises:
        ConfigError: The arguments do not fit each other.
    """
    return flat(value, value.shape, 0, value.numel(), sections=sections, tensor_parallel=tensor_parallel)


def sharded_like(parameter: torch.Tensor | Sequence[Sharded], value: Any) -> Any:
    """Give a plain local tensor the place that a parameter has in the global one.

    Args:
        parameter: A DTensor, a `Sharded`, several of one fused parameter, or a plain tensor, which has no
            place.
        value: What the rank has for its part of the parameter, of the same local shape, any dtype, on any
            device: a gradient, a master weight, a state of the optimizer.

    Returns:
        A view of `value`, of the parameter's class, one for each of several. What has no dimensions, such as
        a `step`, what is no tensor and what has a place already is returned as it is.

    Raises:
        ConfigError: `value` has another shape than the parameter has on this rank.
    """
    if isinstance(parameter, Sequence):
        return [sharded_like(section, value) for section in parameter]
    if not _is_local(value):
        return value
    if isinstance(parameter, DTensor):
        local = parameter._local_tensor  # noqa: SLF001
        if not _fits(value, tuple(local.shape)):
            return value
        meta = TensorMeta(parameter.shape, parameter.stride(), value.dtype)
        # Not from_local, which moves a CPU tensor to the device of the mesh: a load would fill the copy.
        return DTensor(  # type: ignore[no-untyped-call]
            value.detach().view(local.shape),
            replace(parameter._spec, tensor_meta=meta),  # noqa: SLF001
            requires_grad=False,
        )
    if isinstance(parameter, Sharded):
        cut = parameter._cut  # noqa: SLF001
        if cut is None:
            raise ConfigError(f"{parameter} is not cut from one tensor: give Sharded the boxes of each state")
        if not _fits(value, cut.shape):
            return value
        return _view(value, tuple(parameter.shape), parameter.boxes, cut)
    return value


def optimizer_state(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    *,
    like: Mapping[str, torch.Tensor | Sequence[Sharded]] | None = None,
) -> dict[str, Any]:
    """Return the state of an optimizer by names, each tensor in the place of its parameter.

    Tensors are views: a load fills the optimizer's own, which must have its states by then. What is no tensor
    is loaded into what this returns, and taken from there:

        for group, loaded in zip(optimizer.param_groups, state["param_groups"], strict=True):
            group.update((key, value) for key, value in loaded.items() if key != "params")

    Args:
        optimizer: Its states may be plain tensors, on any device.
        named_parameters: Name and parameter, as in the optimizer's groups; for example those of a module.
        like: By name what has the place of a parameter, as `sharded_like` takes it, where that is not the
            parameter in the optimizer: of master weights that are plain tensors.

    Returns:
        "state", by name of the parameter and of the state, and "param_groups" with names of parameters.

    Raises:
        ConfigError: A parameter has no name, a state has another shape than its parameter on this rank, or
            there is no state yet.
    """
    names: dict[int, str] = {}
    for fqn, parameter in named_parameters:
        names.setdefault(id(parameter), fqn)
    state: dict[str, dict[str, Any]] = {}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        fqns = []
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigError(
                    f"a parameter of {tuple(parameter.shape)} in group {number} of the optimizer has no name"
                )
            fqn = names[id(parameter)]
            fqns.append(fqn)
            place = (like or {}).get(fqn, parameter)
            try:
                entries = {
                    key: sharded_like(place, value)
                    for key, value in optimizer.state.get(parameter, {}).items()
                }
            except ConfigError as error:
                raise ConfigError(f"a state of {fqn!r}: {error}") from None
            if entries:
                state[fqn] = entries
        groups.append({**group, "params": fqns})
    if not state:
        raise ConfigError(
            "the optimizer has no states yet, so that nothing could be loaded into them: step it once, for "
            "example with gradients of zeros and lr=0 (one that never has any has only param_groups to save)"
        )
    return {"state": state, "param_groups": groups}


def _is_local(value: Any) -> bool:
    """Say whether `value` is a tensor without a place in a global one."""
    return isinstance(value, torch.Tensor) and not isinstance(value, (Sharded, DTensor, ShardedTensor))


def _fits(value: torch.Tensor, shape: Shape) -> bool:
    """Say whether `value` is what a rank has for its part of a parameter; False if it is a scalar beside it.

    Raises:
        ConfigError: It is neither.
    """
    if value.shape == shape or value.numel() == math.prod(shape) == 0:
        return True
    if value.dim() == 0:
        return False
    raise ConfigError(
        f"a tensor of {tuple(value.shape)} cannot take the place of a parameter of which this rank has "
        f"{shape}"
    )


def _view(value: torch.Tensor, shape: Shape, boxes: Boxes, cut: _Cut) -> Sharded:
    """Return the boxes that `cut` says of `value`, which has the shape that it says.

    Raises:
        ConfigError: They are no views.
    """
    value = value.detach()
    if 0 in shape:
        return Sharded._of(shape, (), [], value.dtype, cut)  # noqa: SLF001
    if any(sizes != value.shape for _, sizes in boxes) and not value.is_contiguous():
        raise ConfigError(
            f"a tensor of {tuple(value.shape)}, strides {value.stride()} cannot be cut: it is not contiguous"
        )
    tensors = [
        value if sizes == value.shape else value.view(-1).narrow(0, start, math.prod(sizes)).view(sizes)
        for (_, sizes), start in zip(boxes, cut.starts, strict=True)
    ]
    return Sharded._of(shape, boxes, tensors, value.dtype, cut)  # noqa: SLF001

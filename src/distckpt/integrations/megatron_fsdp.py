"""States of Megatron-FSDP (`fsdp_dtensor`): their places in the global tensors, worked out without asking.

    parameter -> shape on its tensor-parallel rank, slice of it that is here -> boxes -> `Sharded`

Megatron-FSDP cuts flat buffers, so that its DTensors are uneven; it gathers shapes, for each tensor, to say
where they lie, and twice more for a SwiGLU or gated-delta-net weight, whose sections it saves apart. A
parameter knows its slice, and that is enough.

Invariants:
    * The place of a value comes from its parameter, be the value a DTensor or a plain tensor on the CPU.
    * Values are views: a load fills the model's and the optimizer's own memory.
    * Nothing here is a collective, and nothing is moved to another device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from distckpt.errors import ConfigError
from distckpt.geometry import TensorParallel
from distckpt.sharded import Sharded, flat

_WRAPPERS = re.compile(r"^(module\.)+")
_EXTRA = "._extra_state"
_SWIGLU = ("_w", "_v")
_GDN = (".query", ".key", ".value", ".z", ".beta", ".alpha")
_FC1 = re.compile(r"linear_fc1\.(weight|bias)\d*$")


class Fused(NamedTuple):
    """The tensors that are fused in one parameter.

    Attributes:
        suffixes: What is added to its name for each of them.
        sections: Rows of each along dimension 0, on this tensor-parallel rank; None: all alike.
    """

    suffixes: tuple[str, ...]
    sections: tuple[int, ...] | None = None


class _Place(NamedTuple):
    """Where the part of a parameter lies that a rank has.

    Attributes:
        shape: Of the parameter on its tensor-parallel rank.
        start: First element of the part, in that parameter, flattened.
        stop: Element after the last.
        tensor_parallel: How that is part of the global tensor.
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    tensor_parallel: TensorParallel | None


def fsdp_dtensor_state(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    state: Mapping[str, Any],
    *,
    fused: Mapping[str, Fused] | None = None,
) -> dict[str, Any]:
    """Prepare a state of Megatron-FSDP for a save or a load; takes the place of Megatron's own preprocessing.

    Names are those that Megatron gives: `_w` and `_v` for SwiGLU's first projection, `.query`, `.key`,
    `.value`, `.z`, `.beta`, `.alpha` for a gated delta net's. Extra states of FP8 are left out.

    Args:
        model: The model, wrapped or not, or its chunks.
        state: "model": its state by name; "optimizer": an optimizer that has its states, such as
            `HybridDeviceOptimizer`, or {"state": {name: {key: value}}, ...}, as Megatron's
            `optimizer.sharded_state_dict` returns; anything else is returned as it is.
        fused: Fused parameters by their names in the model, without `module.`, besides those that the modules
            of the model tell of.

    Returns:
        A state for `dcp.save`, `dcp.load`, a `Checkpointer` or a `Saver`. Parameters go by their names.

    Raises:
        ConfigError: A parameter does not say where its part lies, or a value has another size than that.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    parameters: dict[str, torch.Tensor] = {}
    known: dict[str, Fused] = {}
    for chunk in chunks:
        parameters |= {_bare(name): parameter for name, parameter in chunk.named_parameters()}
        known |= find_fused(chunk)
    preparation = _Preparation(parameters, {**known, **(fused or {})})
    prepared = dict(state)
    if "model" in state:
        prepared["model"] = preparation.model(state["model"])
    optimizer = state.get("optimizer")
    if isinstance(optimizer, Optimizer):
        optimizer = _state_of(optimizer, parameters)
    if isinstance(optimizer, Mapping) and "state" in optimizer:
        prepared["optimizer"] = {**optimizer, "state": preparation.optimizer(optimizer["state"])}
    return prepared


def find_fused(model: torch.nn.Module) -> dict[str, Fused]:
    """Return the fused parameters of a model, by name without wrappers, as its modules tell of them."""
    found: dict[str, Fused] = {}
    for name, module in model.named_modules():
        prefix = f"{_bare(name)}." if _bare(name) else ""
        config = getattr(module, "config", None)
        if getattr(config, "gated_linear_unit", False) and hasattr(module, "linear_fc1"):
            for own, _ in module.named_parameters():
                if own.startswith("linear_fc1.") and _FC1.fullmatch(own):
                    found[prefix + own] = Fused(_SWIGLU)
        if hasattr(module, "in_proj") and hasattr(module, "qk_dim") and hasattr(module, "v_dim"):
            parallel = int(getattr(module, "tp_size", 1))
            qk, v = module.qk_dim // parallel, module.v_dim // parallel
            names: Iterable[str] | None = getattr(module, "in_proj_split_names", None)
            if names is not None:
                sections = tuple(int(rows) for rows in module.in_proj_split_sections)
                found[f"{prefix}in_proj.weight"] = Fused(tuple(f".{one}" for one in names), sections)
            else:
                heads = module.num_value_heads // parallel
                found[f"{prefix}in_proj.weight"] = Fused(_GDN, (qk, qk, v, v, heads, heads))
            for own in ("conv1d.weight", "conv1d.bias"):
                found[prefix + own] = Fused(_GDN[:3], (qk, qk, v))
    return found


class _Preparation:
    """Gives values the places of their parameters.

    Args:
        parameters: By name, without wrappers.
        fused: As `fsdp_dtensor_state`.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], fused: Mapping[str, Fused]) -> None:
        self._parameters = parameters
        self._fused = fused
        self._places: dict[str, _Place | None] = {}

    def model(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model's state."""
        found: dict[str, Any] = {}
        for key, value in state.items():
            if not key.endswith(_EXTRA):
                found |= {key + suffix: part for suffix, part in self._parts(key, key, value)}
        return found

    def optimizer(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states of the parameters."""
        found: dict[str, Any] = {}
        for key, entries in state.items():
            if not isinstance(entries, Mapping):
                found[key] = entries
                continue
            for name, value in entries.items():
                for suffix, part in self._parts(key, f"{key}: {name}", value):
                    found.setdefault(key + suffix, {})[name] = part
        return found

    def _parts(self, key: str, what: str, value: Any) -> list[tuple[str, Any]]:
        """Return what is saved of a value, by what is added to its key.

        Raises:
            ConfigError: It does not fit its parameter.
        """
        name = _bare(key)
        parameter, fused = self._parameters.get(name), self._fused.get(name)
        suffixes = ("",) if fused is None else fused.suffixes
        if not isinstance(value, torch.Tensor) or isinstance(value, Sharded) or value.dim() == 0:
            return [(suffix, value) for suffix in suffixes]
        if name not in self._places:
            self._places[name] = None if parameter is None else _place_of(name, parameter)
        place = self._places[name]
        if place is None:
            if fused is None or parameter is None:
                return [("", value)]
            # Whole on this rank, and on all others.
            place = _Place(tuple(parameter.shape), 0, parameter.numel(), None)
        try:
            return list(zip(suffixes, self._cut(value, place, fused), strict=True))
        except ConfigError as error:
            raise ConfigError(f"{what!r}: {error}") from None

    def _cut(self, value: torch.Tensor, place: _Place, fused: Fused | None) -> list[Sharded]:
        local = value._local_tensor if isinstance(value, DTensor) else value  # noqa: SLF001
        local = local.detach()
        if fused is None:
            return [flat(local, place.shape, place.start, place.stop, tensor_parallel=place.tensor_parallel)]
        sections = fused.sections
        if sections is None:
            rows = place.shape[0] // len(fused.suffixes)
            sections = (rows,) * len(fused.suffixes)
        return flat(
            local,
            place.shape,
            place.start,
            place.stop,
            sections=sections,
            tensor_parallel=place.tensor_parallel,
        )


def _place_of(name: str, parameter: torch.Tensor) -> _Place | None:
    """Return where the part of a parameter lies; None if it is no DTensor, so that each rank has all of it.

    Raises:
        ConfigError: It does not say.
    """
    if not isinstance(parameter, DTensor):
        return None
    mesh, placements = parameter.device_mesh, parameter.placements
    index = getattr(parameter, "megatron_fsdp_dist_index", None)
    tensor_dim = getattr(index, "tp_dim", None) or "tp"
    shape = list(parameter.shape)
    tensor_parallel = None
    is_cut = False
    for dim, placement in enumerate(placements):
        names = mesh.mesh_dim_names or ()
        if names and names[dim] == tensor_dim:
            if placement.is_shard() and mesh.size(dim) > 1:
                cut = int(placement.dim)  # type: ignore[attr-defined]
                shape[cut] //= mesh.size(dim)
                tensor_parallel = TensorParallel(mesh.get_local_rank(dim), mesh.size(dim), cut)
        elif placement.is_shard():
            is_cut = is_cut or mesh.size(dim) > 1
    held = parameter._local_tensor.numel()  # noqa: SLF001
    if not is_cut:
        return _Place(tuple(shape), 0, math.prod(shape), tensor_parallel)
    if held == 0:
        return _Place(tuple(shape), 0, 0, tensor_parallel)
    part = getattr(parameter, "megatron_fsdp_slice", None)
    if part is not None:
        return _Place(tuple(shape), int(part.start), int(part.stop), tensor_parallel)
    start = _start_of(name, parameter, shape, tensor_parallel)
    return _Place(tuple(shape), start, start + held, tensor_parallel)


def _start_of(
    name: str, parameter: DTensor, shape: Sequence[int], tensor_parallel: TensorParallel | None
) -> int:
    """Return the first element of a part of which only the box is known, as Megatron-FSDP has noted it.

    Raises:
        ConfigError: It has not.
    """
    told = getattr(parameter._local_tensor, "__create_chunk_list__", None)  # noqa: SLF001
    if told is None:
        raise ConfigError(
            f"{name!r} does not say which part of it is here: it has neither megatron_fsdp_slice nor a list "
            f"of chunks, which Megatron-FSDP gives the parameters of its optimizers"
        )
    [chunk] = told()
    offsets = list(chunk.offsets)
    if tensor_parallel is not None:
        offsets[tensor_parallel.dim] -= tensor_parallel.rank * shape[tensor_parallel.dim]
    return sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))


def _state_of(optimizer: Optimizer, parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the states of an optimizer, and its groups, by the names of the parameters.

    Raises:
        ConfigError: One has no name.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigError(
                    f"a parameter of {tuple(parameter.shape)} of the optimizer is none of the model's"
                )
            entries = optimizer.state.get(parameter)
            if entries:
                state[names[id(parameter)]] = dict(entries)
        groups.append({**group, "params": [names[id(parameter)] for parameter in group["params"]]})
    return {"state": state, "param_groups": groups}


def _bare(name: str) -> str:
    """Return a name without what wrappers put before it."""
    return _WRAPPERS.sub("", name) if name != "module" else ""

"""States of Megatron-FSDP on the CPU: its own DTensors, and the states of its CPU-offloaded optimizer.

Two tensor-parallel ranks times two that share a flat buffer, wherever that cuts the rows.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import make_fsdp_dtensor
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
    preprocess_state_dict_for_uneven_dtensor,
)
from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import FSDPDistributedIndex
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.transformer.fsdp_dtensor_checkpoint import handle_swiglu_in_state_dict
from torch import distributed
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from distckpt import CheckpointConfig, StorageReader
from distckpt.integrations.megatron_fsdp import fsdp_dtensor_state
from distckpt.integrations.megatron_saver import Saver
from integration.ranks import collectives

WIDTH, TENSOR_PARALLEL = 5, 2
GLOBAL = {
    "decoder.mlp.linear_fc1.weight_w": (6, WIDTH),
    "decoder.mlp.linear_fc1.weight_v": (6, WIDTH),
    "decoder.mlp.linear_fc2.weight": (WIDTH, 6),
    "decoder.norm.weight": (WIDTH,),
    "decoder.gdn.in_proj.weight.query": (4, WIDTH),
    "decoder.gdn.in_proj.weight.key": (4, WIDTH),
    "decoder.gdn.in_proj.weight.value": (8, WIDTH),
    "decoder.gdn.in_proj.weight.z": (8, WIDTH),
    "decoder.gdn.in_proj.weight.beta": (2, WIDTH),
    "decoder.gdn.in_proj.weight.alpha": (2, WIDTH),
    "decoder.gdn.conv1d.weight.query": (4, 1, 3),
    "decoder.gdn.conv1d.weight.key": (4, 1, 3),
    "decoder.gdn.conv1d.weight.value": (8, 1, 3),
}
"""Of the tensors in the checkpoint."""
LOCAL = {
    "decoder.mlp.linear_fc1.weight": (0, ("_w", "_v")),
    "decoder.mlp.linear_fc2.weight": (1, ("",)),
    "decoder.norm.weight": (None, ("",)),
    "decoder.gdn.in_proj.weight": (0, (".query", ".key", ".value", ".z", ".beta", ".alpha")),
    "decoder.gdn.conv1d.weight": (0, (".query", ".key", ".value")),
}
"""Of the parameters: the dimension that tensor parallelism splits, and what is fused in each."""
ROWS = dict(zip(LOCAL, (5, 2, 0, 11, 1), strict=True))
"""How many rows the first of two ranks has."""


def full(name: str, seed: int) -> torch.Tensor:
    """Return the values of a tensor in the checkpoint."""
    generator = torch.Generator().manual_seed(seed * 1000 + list(GLOBAL).index(name))
    return torch.randn(GLOBAL[name], generator=generator)


def on_tensor_rank(name: str, rank: int, seed: int) -> torch.Tensor:
    """Return the values of a parameter on its tensor-parallel rank."""
    dim, suffixes = LOCAL[name]
    parts = [full(name + suffix, seed) for suffix in suffixes]
    if dim is not None:
        parts = [part.chunk(TENSOR_PARALLEL, dim)[rank] for part in parts]
    return torch.cat(parts)


class Part(torch.nn.Module):
    """A module with the names and the attributes of Megatron's."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def with_weight(parameter: torch.nn.Parameter) -> Part:
    """Return a module that has it."""
    return Part(weight=parameter)


class Model(torch.nn.Module):
    """A SwiGLU layer and a gated delta net, sharded as Megatron-FSDP does."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2, TENSOR_PARALLEL), mesh_dim_names=("dp", "tp"))
        index = FSDPDistributedIndex(device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp")
        data_rank, tensor_rank = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
        made = {}
        for name, (dim, _) in LOCAL.items():
            whole = torch.nn.Parameter(on_tensor_rank(name, tensor_rank, seed))
            if dim is not None:
                vars(whole).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=1)
            row = whole[0].numel()
            cut = ROWS[name] * row
            start, stop = (0, cut) if data_rank == 0 else (cut, whole.numel())
            sharded = make_fsdp_dtensor(
                whole.detach().flatten()[start:stop].clone(), whole, index,
                update_uneven_dtensor_chunk_meta=True,
            )  # fmt: skip
            parameter = torch.nn.Parameter(sharded)
            vars(parameter).update(
                vars(whole), megatron_fsdp_slice=slice(start, stop), megatron_fsdp_dist_index=index
            )
            made[name] = parameter
        config = SimpleNamespace(gated_linear_unit=True)
        module = torch.nn.Module()
        module.mlp = Part(
            config=config,
            linear_fc1=with_weight(made["decoder.mlp.linear_fc1.weight"]),
            linear_fc2=with_weight(made["decoder.mlp.linear_fc2.weight"]),
        )
        module.norm = with_weight(made["decoder.norm.weight"])
        module.gdn = Part(
            qk_dim=4, v_dim=8, num_value_heads=2, tp_size=TENSOR_PARALLEL,
            in_proj=with_weight(made["decoder.gdn.in_proj.weight"]),
            conv1d=with_weight(made["decoder.gdn.conv1d.weight"]),
        )  # fmt: skip
        self.module = torch.nn.Module()
        self.module.decoder = module

    def locals(self) -> dict[str, torch.Tensor]:
        """Return what this rank has of each parameter, by name without wrappers."""
        found = {}
        for name, parameter in self.named_parameters():
            assert isinstance(parameter, DTensor)
            found[name.removeprefix("module.")] = parameter._local_tensor.detach()
        return found


class OnDevice(torch.nn.Parameter):
    """A parameter that passes for one on a GPU."""

    is_cuda = True


class Offloaded:
    """Megatron's optimizer whose states are on the CPU, in plain tensors."""

    def __init__(self, model: Model, seed: int) -> None:
        stream = SimpleNamespace(
            wait_stream=lambda _: None, record_event=lambda: SimpleNamespace(
                wait=lambda _: None, synchronize=lambda: None
            )
        )  # fmt: skip
        torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment]
        torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment, return-value]
        torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
        self.parameters = {
            name: OnDevice(local.clone()) for name, local in model.locals().items() if local.numel()
        }
        self.optimizer = HybridDeviceOptimizer(
            list(self.parameters.values()),
            offload_fraction=1.0,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            param_update_in_fp32=True,
            pin_cpu_grads=False,
            overlap_cpu_optimizer_d2h_h2d=False,
            lr=0.1,
        )
        for name, parameter in self.parameters.items():
            # What tensor parallelism does not split is alike on its ranks.
            torch.manual_seed(seed if LOCAL[name][0] is None else seed + distributed.get_rank())
            parameter.grad = torch.randn(parameter.shape)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return what Megatron's distributed optimizer makes of it."""
        entries = {f"module.{name}": self.optimizer.state[one] for name, one in self.parameters.items()}
        return {"state": entries, "param_to_group_meta": {f"module.{name}": {"lr": 0.1} for name in LOCAL}}


def boxes(value: Any) -> list[Any]:
    """Return where the part of a DTensor or a `Sharded` lies, by Megatron and by us."""
    if isinstance(value, DTensor):
        local: Any = value._local_tensor
        chunks = local.__create_chunk_list__()
        return [[list(one.offsets), list(one.sizes)] for one in chunks if torch.Size(one.sizes).numel()]
    return [[list(offsets), list(sizes)] for offsets, sizes in value.boxes]


def prepare_and_save(root: str) -> dict[str, Any]:
    """Compare with Megatron's own preparation; then prepare, save and load with every collective raising."""
    found: dict[str, Any] = {}
    model = Model(1)
    offloaded = Offloaded(model, 1)
    torch.Tensor.cuda = lambda self, *_: self  # type: ignore[method-assign]
    weights = {name.removeprefix("module."): one for name, one in model.named_parameters()}
    theirs, _ = handle_swiglu_in_state_dict(model, dict(weights), None)
    preprocess_state_dict_for_uneven_dtensor(theirs)
    their_boxes = {name: boxes(value) for name, value in theirs.items()}

    collectives.forbid()
    ours = fsdp_dtensor_state(model, {"model": dict(weights), "optimizer": offloaded.state(), "step": 4})
    for name in (
        "decoder.mlp.linear_fc1.weight_w",
        "decoder.mlp.linear_fc1.weight_v",
        "decoder.mlp.linear_fc2.weight",
        "decoder.norm.weight",
    ):
        found[name] = boxes(ours["model"][name]) == their_boxes[name] or [
            boxes(ours["model"][name]), their_boxes[name]
        ]  # fmt: skip
    found["names"] = set(ours["model"]) == set(GLOBAL)
    before = {
        f"{name} {key}": value.clone()
        for name, entries in offloaded.state()["state"].items()
        for key, value in entries.items()
    } | {name: local.clone() for name, local in model.locals().items()}
    for name in GLOBAL:
        if distributed.get_rank() == 0:
            torch.save(full(name, 1), f"{root}/{name}.pt")
    config = CheckpointConfig(distributed_timeout_minutes=0.3)
    with Saver(f"{root}/sync", config) as saver:
        saver.save_to(f"{root}/sync", ours)
        handle = saver.save_to(f"{root}/async", ours, wait=False)
        for entries in offloaded.state()["state"].values():
            for value in entries.values():
                value.detach().fill_(-1)
        for local in model.locals().values():
            local.fill_(-1)
        handle.result(20)
    for name in ("sync", "async"):
        target = fsdp_dtensor_state(
            model, {"model": dict(weights), "optimizer": offloaded.state(), "step": 0}
        )
        _load_state_dict(target, StorageReader(Path(root, name)), no_dist=True)
        after = {
            f"{one} {key}": value
            for one, entries in offloaded.state()["state"].items()
            for key, value in entries.items()
        } | model.locals()
        # A step is no tensor with a place: it is loaded beside the optimizer.
        wrong = [one for one in before if before[one].dim() and not torch.equal(before[one], after[one])]
        found[f"loaded {name}"] = wrong == [] or wrong
        found[f"step {name}"] = target["step"] == 4
        for local in model.locals().values():
            local.fill_(-1)
    return found

"""Sharded states of Megatron-Core, made on the CPU: of a GPT with its AdamW, and by hand."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed


def use_cpu() -> None:
    """Let what Megatron-Core asks of CUDA between saves be done on the CPU."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None


class Gpt:
    """A small GPT and an AdamW that has stepped.

    Args:
        seed: Of its values.
        tensor_parallel: Number of ranks that share a layer; others are replicas.
        device: Where it lies.
    """

    def __init__(self, seed: int, tensor_parallel: int = 1, device: str = "cpu") -> None:
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(tensor_parallel)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            ffn_hidden_size=64,
            use_cpu_initialization=True,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
        )
        torch.manual_seed(seed)
        self.model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16)
        self.model.to(device)
        # Alike on all replicas, and not on the ranks that share a layer.
        torch.manual_seed(100 * seed + parallel_state.get_tensor_model_parallel_rank())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 * seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if not getattr(parameter, "tensor_model_parallel", False):
                    torch.manual_seed(seed)
                parameter.copy_(torch.randn(parameter.shape))
                parameter.grad = torch.randn(parameter.shape).to(device)
        self.optimizer.step()

    def state(self, step: int = 0, *, is_loading: bool = False) -> dict[str, Any]:
        """Return its sharded state."""
        model = self.model.sharded_state_dict()
        optimizer = self.optimizer.state_dict()
        # Those of the optimizer itself, from which nothing is to be taken.
        optimizer["state"] = {number: dict(entry) for number, entry in optimizer["state"].items()}
        parameters = get_param_id_to_sharded_param_map(model, self.model.parameters())
        steps = {number: entry.pop("step") for number, entry in optimizer["state"].items()}
        optim_state_to_sharding_state(optimizer, parameters)
        for number, entry in optimizer["state"].items():
            entry["step"] = LocalNonpersistentObject(steps[number])
        rank, world = distributed.get_rank(), distributed.get_world_size()
        return {
            "model": model,
            "optimizer": optimizer,
            "rng": ShardedObject("rng", None if is_loading else torch.get_rng_state(), (world,), (rank,)),
            "iteration": step,
            "args": {"name": "gpt"},
        }

    def scramble(self) -> None:
        """Change all of it."""
        with torch.no_grad():
            for tensor in self.tensors().values():
                tensor.fill_(-1.0)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return its tensors."""
        found = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                if value.dim():
                    found[f"{name}.{key}"] = value
        return found

    def bits(self) -> dict[str, list[int]]:
        """Return the bits of all tensors."""
        return {name: value.view(torch.int32).flatten().tolist() for name, value in self.tensors().items()}


def values(state: Any) -> dict[str, Any]:
    """Return what a loaded state has, as JSON."""
    found: dict[str, Any] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, one in value.items():
                walk(one, f"{name}/{key}")
        elif isinstance(value, (list, tuple)):
            for number, one in enumerate(value):
                walk(one, f"{name}/{number}")
        elif isinstance(value, torch.Tensor):
            found[name] = value.detach().double().flatten().tolist()
        else:
            found[name] = repr(value)

    walk(state, "")
    return found


def hand_made(seed: int, index: int, of: int, *, late: bool = False) -> dict[str, Any]:
    """Return a state of `of` ranks by hand, for the one at `index`.

    Args:
        seed: Of its values.
        index: Place of this rank among those that save.
        of: How many these are.
        late: Whether it has a tensor more.
    """
    full = torch.arange(8.0 * 6).reshape(8, 6) + seed
    rows = 8 // of
    state: dict[str, Any] = {
        "part": ShardedTensor.from_rank_offsets(
            "part", full[index * rows : (index + 1) * rows].clone(), (0, index, of)
        ),
        "copy": ShardedTensor.from_rank_offsets("copy", full.clone(), replica_id=index),
        "layer": ShardedTensor.from_rank_offsets("layers", full.clone(), (0, index, of), prepend_axis_num=1),
        "scalar": ShardedTensor.from_rank_offsets("scalar", torch.tensor(float(seed)), replica_id=index),
        "own": ShardedObject("own", {"seed": seed, "index": index}, (of,), (index,)),
        "common": {"seed": seed},
    }
    if late:
        state["late"] = ShardedTensor.from_rank_offsets("late", full.clone() + 1, replica_id=index)
    return state


def keys(state: Any) -> set[str]:
    """Return the keys of a sharded state."""
    return {entry.key for entry in nested_values(state) if isinstance(entry, ShardedTensor)}


__all__ = ["Gpt", "hand_made", "keys", "model_parallel_cuda_manual_seed", "use_cpu", "values"]

"""Train a small GPT of Megatron-Core on two ranks, save it while it trains, and load it into another layout.

    python docs/examples/megatron_gpt.py [DIRECTORY]

It needs megatron-core and no GPU, and starts its own ranks. The lines of distckpt are marked.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed

with warnings.catch_warnings():
    # What is not installed here: Apex, Transformer Engine.
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

from distckpt.integrations.megatron import LoadShardedStrategy, SaveShardedStrategy  # distckpt: 1

WORDS, LENGTH, STEPS = 64, 16, 6


def make_model() -> GPTModel:
    """Return a GPT, sharded among the tensor-parallel ranks."""
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True,
        attention_dropout=0.0, hidden_dropout=0.0, bias_dropout_fusion=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=WORDS, max_sequence_length=LENGTH)
    torch.manual_seed(parallel_state.get_tensor_model_parallel_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            if getattr(parameter, "tensor_model_parallel", False):
                parameter.copy_(0.02 * torch.randn(parameter.shape))
            elif parameter.dim() > 1:
                parameter.fill_(0.01)
    return model


def gradients(model: GPTModel, step: int) -> None:
    """Stand in for a backward pass, which in Megatron-Core needs a GPU."""
    for number, parameter in enumerate(model.parameters()):
        torch.manual_seed(1000 * step + number)
        parameter.grad = torch.randn(parameter.shape) * 0.01


def total(model: GPTModel) -> float:
    """Return the sum of the squares of what this rank answers for."""
    entries = [entry for entry in model.sharded_state_dict().values() if isinstance(entry, ShardedTensor)]
    return sum(
        float(e.data.detach().double().square().sum()) for e in entries if is_main_replica(e.replica_id)
    )


def save(root: Path) -> float:
    """Train, and save in the background every second step; return the squares of all parameters, summed."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    strategy = SaveShardedStrategy(dist_ckpt_workers=2)  # distckpt: 2
    pending: Any = None
    for step in range(1, STEPS + 1):
        gradients(model, step)
        optimizer.step()
        if step % 2 == 0:
            if pending is not None:
                # Where Megatron-LM asks its queue of asynchronous saves.
                pending.execute_sync()
            path = root / f"iter_{step:07}"
            path.mkdir(parents=True, exist_ok=True)
            state = {"model": model.sharded_state_dict(), "iteration": step}
            # The state may change as soon as this returns.
            pending = dist_checkpointing.save(state, str(path), strategy, async_sharded_save=True)
    pending.execute_sync()
    say(f"saved {STEPS // 2} checkpoints of a GPT that two tensor-parallel ranks share in {root}")
    return sum_of_ranks(total(model))


def load(root: Path) -> float:
    """Load the last checkpoint; return the sum of the squares of all parameters."""
    model = make_model()
    state = {"model": model.sharded_state_dict(), "iteration": 0}
    path = str(root / f"iter_{STEPS:07}")
    loaded = dist_checkpointing.load(state, path, LoadShardedStrategy())  # distckpt: 3
    model.load_state_dict(loaded["model"], strict=False)
    say(f"loaded iteration {loaded['iteration']}, all of it on each rank")
    return sum_of_ranks(total(model))


def sum_of_ranks(value: float) -> float:
    """Return the sum of what the ranks pass."""
    tensor = torch.tensor(value, dtype=torch.float64)
    distributed.all_reduce(tensor)
    return float(tensor)


def say(line: str) -> None:
    """Print one line on one rank."""
    if distributed.get_rank() == 0:
        sys.stdout.write(line + "\n")


def train_and_load(root: Path) -> None:
    """Be one of the ranks."""
    distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    saved = save(root)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    loaded = load(root)
    assert abs(loaded - saved) < 1e-9 * saved, "the parameters are not those that were saved"
    say("the parameters are the same")
    distributed.destroy_process_group()


def main() -> None:
    """Start the ranks, or be one of them."""
    if "RANK" in os.environ:
        train_and_load(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as temporary:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        root = sys.argv[1] if len(sys.argv) > 1 else temporary
        subprocess.run([sys.executable, *launch, root], env=environment, check=True)


if __name__ == "__main__":
    main()

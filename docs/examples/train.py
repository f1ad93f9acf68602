"""Train a small language model under FSDP2 and checkpoint it while it trains.

A decoder-only transformer reads bytes of `text.txt`. Every few steps the whole training state (model,
optimizer, scheduler, step) goes to storage through `dcp.async_save` and one `distckpt.StorageWriter`, while
training goes on. Started again with `--resume`, the script continues from the newest complete checkpoint:

    torchrun --standalone --nproc-per-node 2 docs/examples/train.py --out run --resume

The first weights are fixed by a seed; the order of the data and the learning rate are functions of the step.
So the losses of a resumed run equal those of a run that was never interrupted, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from distckpt import CheckpointConfig, StorageReader, StorageWriter, add_arguments

if TYPE_CHECKING:
    from concurrent.futures import Future

TEXT = Path(__file__).with_name("text.txt")
VOCABULARY = 256
CONTEXT = 64
BATCH = 4
TIMEOUT_S = 120.0
GIB = 1 << 30


class Layer(nn.Module):
    """One transformer layer: causal self-attention, then a feed-forward network."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map activations of shape (batch, context, width) to the same shape."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3)
        query, key, value = heads.unbind(2)
        # The plain kernel is the one that is deterministic on every device.
        with sdpa_kernel(SDPBackend.MATH):
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_out(functional.gelu(self.feed_in(self.feed_norm(x))))


class ByteTransformer(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, width: int = 384, num_layers: int = 6, num_heads: int = 6) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Layer(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map bytes of shape (batch, context) to logits of shape (batch, context, 256)."""
        x = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class TrainingState(Stateful):
    """Everything that a resumed run needs, in the form that DCP saves and loads."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state; its tensors are the live ones, each rank's shards as DTensors."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        scheduler = self.scheduler.state_dict()
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state that DCP has read."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.scheduler.load_state_dict(state_dict["scheduler"])
        self.step = state_dict["step"]


class Saver:
    """Saves the training state without stopping the training; at most one save is in flight."""

    def __init__(self, root: Path, writer: StorageWriter, every: int) -> None:
        self.root = root
        self.writer = writer
        self.every = every
        # The save is planned in a background thread, which must not share a group with the training.
        self.group = dist.new_group(backend="gloo")
        self.staging: Future[None] | None = None
        self.upload: Future[Any] | None = None

    def save_if_due(self, state: TrainingState, loss: float) -> None:
        """Every few steps, start to save `state`, once the save before has ended."""
        if self.every == 0 or state.step % self.every != 0:
            return
        self.wait_for_upload()
        directory, start_s = checkpoint_directory(self.root, state.step), time.monotonic()
        response = dcp.async_save(
            {"train": state},
            checkpoint_id=directory,
            storage_writer=self.writer,
            process_group=self.group,
        )
        held_s = time.monotonic() - start_s
        assert isinstance(response, AsyncSaveResponse)
        self.staging, self.upload = response.staging_completion, response.upload_completion
        if dist.get_rank() == 0:
            line = f"step {state.step:3}  loss {loss:.4f}"
            self.upload.add_done_callback(lambda upload: report_save(upload, line, start_s, held_s))

    def wait_for_staging(self) -> None:
        """Return once the parameters may change again.

        Raises:
            Exception: If the staging of the last save failed.
        """
        if self.staging is not None:
            self.staging.result(TIMEOUT_S)
            self.staging = None

    def wait_for_upload(self) -> None:
        """Return once the last save is complete on storage.

        Raises:
            Exception: If it failed.
        """
        if self.upload is not None:
            self.upload.result(TIMEOUT_S)
            self.upload = None


def report_save(upload: Future[Any], line: str, start_s: float, held_s: float) -> None:
    """Print `line` with size and speed of a save, unless it failed: `Saver.wait_for_upload` raises that."""
    if upload.exception() is None:
        seconds = time.monotonic() - start_s
        gib = sum(info.length for info in upload.result().storage_data.values()) / GIB
        speed = f"{gib:.3f} GiB in {seconds:.2f} s ({gib / seconds:.2f} GiB/s)"
        say(f"{line}  saved {speed}, training held for {held_s:.3f} s")


def say(line: str) -> None:
    """Print one line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def checkpoint_directory(root: Path, step: int) -> Path:
    """Return where the checkpoint of `step` lies."""
    return root / f"step-{step:06}"


def newest_complete_checkpoint(root: Path) -> Path | None:
    """Return the newest checkpoint below `root` that has its `.metadata`, the file that is published last."""
    return max((path.parent for path in root.glob("step-*/.metadata")), default=None)


def make_batch(text: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's inputs and targets for `step`, each of shape (BATCH, CONTEXT), int64."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
    tokens = text[starts + torch.arange(CONTEXT + 1)]
    return tokens[:, :-1], tokens[:, 1:]


def learning_rate_factor(step: int) -> float:
    """Return the share of the peak learning rate at `step`: a warm-up, then a cosine down to 10 %."""
    return min(1.0, (step + 1) / 8) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / 1000)))


def make_state(device: torch.device) -> TrainingState:
    """Build the model, sharded over all ranks, with its optimizer and scheduler."""
    torch.manual_seed(0)
    model = ByteTransformer().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, learning_rate_factor)
    return TrainingState(model, optimizer, scheduler)


def resume(state: TrainingState, root: Path) -> None:
    """Load the newest complete checkpoint below `root` into `state`, if there is one."""
    # One rank looks, so that all ranks load the same checkpoint whatever their view of the storage is.
    found = [newest_complete_checkpoint(root)]
    dist.broadcast_object_list(found, src=0)
    directory = found[0]
    if directory is not None:
        dcp.load({"train": state}, checkpoint_id=directory, storage_reader=StorageReader(directory))
    if dist.get_rank() == 0:
        say(f"step {state.step:3}  {'starts anew' if directory is None else f'resumed from {directory}'}")


def train(state: TrainingState, saver: Saver, args: argparse.Namespace, device: torch.device) -> None:
    """Run the steps that are left, record each loss in `losses.jsonl`, save every `args.save_every` steps."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    with (args.out / "losses.jsonl").open("a", buffering=1) as losses:
        while state.step < args.steps:
            inputs, targets = (tokens.to(device) for tokens in make_batch(text, state.step))
            loss = functional.cross_entropy(state.model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            saver.wait_for_staging()
            state.optimizer.step()
            state.scheduler.step()
            state.optimizer.zero_grad()
            state.step += 1

            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                losses.write(json.dumps({"step": state.step, "loss": mean.item()}) + "\n")
            saver.save_if_due(state, mean.item())


def parse_arguments() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the losses and the checkpoints")
    parser.add_argument("--steps", type=int, default=24, help="step at which the training ends")
    parser.add_argument("--save-every", type=int, default=6, help="steps between saves; 0: never save")
    parser.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint")
    add_arguments(parser)
    return parser.parse_args()


def main() -> None:
    """Train on as many ranks as torchrun has started."""
    args = parse_arguments()
    # One thread, and a workspace of cuBLAS that is fixed before its first use: sums are made in one order.
    torch.set_num_threads(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    if torch.cuda.device_count() >= max(2, int(os.environ["LOCAL_WORLD_SIZE"])):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")

    root = args.out / "checkpoints"
    root.mkdir(parents=True, exist_ok=True)
    state = make_state(device)
    if dist.get_rank() == 0:
        num_parameters = sum(parameter.numel() for parameter in state.model.parameters())
        say(f"{num_parameters / 1e6:.1f} M parameters on {dist.get_world_size()} ranks, {device.type}")
    if args.resume:
        resume(state, root)
    with StorageWriter(config=CheckpointConfig.from_args(args)) as writer:
        saver = Saver(root, writer, args.save_every)
        train(state, saver, args, device)
        saver.wait_for_upload()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

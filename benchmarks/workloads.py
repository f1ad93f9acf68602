"""States shaped like those of real trainings, cut as their parallelism cuts them, scaled to a rank's bytes.

Shapes of models are those of their published configurations. A training keeps, for each parameter, the bf16
parameter, an fp32 master copy and Adam's two moments in fp32; and a step counter of 0 dimensions on the host.

The training that a state stands for has as many ranks as make a rank's part about as large as was asked for;
this machine's ranks hold the parts of as many of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

State = dict[str, torch.Tensor]
_MAX_SHARDS = 1 << 20


@dataclass(frozen=True)
class Piece:
    """A rank's part of one parameter.

    Attributes:
        fqn: Its name.
        shape: Of the part.
        dim: The dimension that the ranks of this machine cut; None if each has all of it.
    """

    fqn: str
    shape: tuple[int, ...]
    dim: int | None = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Workload:
    """A state.

    Attributes:
        title: What it is shaped like.
        pieces: Gives the parts of a rank if all that can be cut is cut into so many shards beyond what its
            own parallelism does.
        kinds: Name and dtype of what is kept for each parameter.
        scales: Whether it is cut until it fits; if not, it is as large as it is.
    """

    title: str
    pieces: Callable[[int], list[Piece]]
    kinds: tuple[tuple[str, torch.dtype], ...] = (
        ("model", torch.bfloat16),
        ("optimizer.master", torch.float32),
        ("optimizer.exp_avg", torch.float32),
        ("optimizer.exp_avg_sq", torch.float32),
    )
    scales: bool = True

    def shards_for(self, nbytes: int) -> int:
        """Return the least number of shards with which a rank holds at most `nbytes`."""
        if not self.scales:
            return 1
        low, high = 1, _MAX_SHARDS
        while low < high:
            middle = (low + high) // 2
            if self.bytes_with(middle) <= nbytes:
                high = middle
            else:
                low = middle + 1
        return low

    def bytes_with(self, shards: int) -> int:
        each = sum(dtype.itemsize for _, dtype in self.kinds)
        return each * sum(piece.numel for piece in self.pieces(shards))


def _ceil(number: int, parts: int) -> int:
    return -(-number // parts)


def _cut(parameters: Iterator[tuple[str, tuple[int, ...]]]) -> Callable[[int], list[Piece]]:
    """Cut the first dimension of every parameter, as FSDP2 does."""
    known = list(parameters)
    return lambda shards: [
        Piece(fqn, (_ceil(shape[0], shards), *shape[1:])) for fqn, shape in known
    ]  # fmt: skip


def _llama_layer(dim: int, ffn: int, kv: int) -> list[tuple[str, tuple[int, ...], str]]:
    """Names, shapes, and how tensor parallelism cuts them: by columns (dimension 0), rows, or not."""
    return [
        ("attention.wq.weight", (dim, dim), "column"),
        ("attention.wk.weight", (kv, dim), "column"),
        ("attention.wv.weight", (kv, dim), "column"),
        ("attention.wo.weight", (dim, dim), "row"),
        ("feed_forward.w1.weight", (ffn, dim), "column"),
        ("feed_forward.w2.weight", (dim, ffn), "row"),
        ("feed_forward.w3.weight", (ffn, dim), "column"),
        ("attention_norm.weight", (dim,), ""),
        ("ffn_norm.weight", (dim,), ""),
    ]


def _llama(layers: int, dim: int, ffn: int, kv: int, vocab: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "tok_embeddings.weight", (vocab, dim)
    for layer in range(layers):
        for name, shape, _ in _llama_layer(dim, ffn, kv):
            yield f"layers.{layer}.{name}", shape
    yield "norm.weight", (dim,)
    yield "output.weight", (vocab, dim)


def _llama_3d(
    layers: int, dim: int, ffn: int, kv: int, vocab: int, *, tensor: int, pipeline: int
) -> Callable[[int], list[Piece]]:
    """Cut by tensor and pipeline parallelism; what is left over is cut by data parallel shards."""

    def piece(fqn: str, shape: tuple[int, ...], how: str, shards: int) -> Piece:
        if how == "column":
            return Piece(fqn, (_ceil(shape[0], tensor * shards), *shape[1:]))
        if how == "row":
            return Piece(fqn, (_ceil(shape[0], shards), _ceil(shape[1], tensor)), dim=1)
        return Piece(fqn, (_ceil(shape[0], shards),), dim=None)

    def pieces(shards: int) -> list[Piece]:
        # The last stage: with the head.
        found = [
            piece(f"layers.{layer}.{name}", shape, how, shards)
            for layer in range(layers - layers // pipeline, layers)
            for name, shape, how in _llama_layer(dim, ffn, kv)
        ]
        found.append(piece("norm.weight", (dim,), "", shards))
        return [*found, piece("output.weight", (vocab, dim), "column", shards)]

    return pieces


def _experts(
    layers: int, dim: int, ffn: int, experts: int, heads: int, kv: int
) -> Callable[[int], list[Piece]]:
    """Experts are whole tensors, of which a rank has some; the rest is cut as FSDP2 does."""

    def pieces(shards: int) -> list[Piece]:
        mine, split = max(1, experts // shards), max(1, _ceil(shards, experts))
        found = []
        for layer in range(layers):
            for name, shape in (
                ("self_attn.q_proj.weight", (heads, dim)),
                ("self_attn.k_proj.weight", (kv, dim)),
                ("self_attn.v_proj.weight", (kv, dim)),
                ("self_attn.o_proj.weight", (dim, heads)),
                ("mlp.gate.weight", (experts, dim)),
            ):
                found.append(Piece(f"layers.{layer}.{name}", (_ceil(shape[0], shards), *shape[1:])))
            for expert in range(mine):
                prefix = f"layers.{layer}.mlp.experts.{expert}"
                for name, shape in (
                    ("gate_proj", (ffn, dim)),
                    ("up_proj", (ffn, dim)),
                    ("down_proj", (dim, ffn)),
                ):
                    found.append(Piece(f"{prefix}.{name}.weight", (_ceil(shape[0], split), *shape[1:])))
        return found

    return pieces


def _diffusion(dim: int, double: int, single: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A transformer of two kinds of blocks, such as FLUX.1."""
    for block in range(double):
        for stream in ("img", "txt"):
            prefix = f"double_blocks.{block}.{stream}"
            for name, shape in (
                ("mod.lin", (6 * dim, dim)), ("attn.qkv", (3 * dim, dim)), ("attn.proj", (dim, dim)),
                ("mlp.0", (4 * dim, dim)), ("mlp.2", (dim, 4 * dim)),
            ):  # fmt: skip
                yield f"{prefix}_{name}.weight", shape
                yield f"{prefix}_{name}.bias", shape[:1]
    for block in range(single):
        for name, shape in (
            ("linear1", (7 * dim, dim)),
            ("linear2", (dim, 5 * dim)),
            ("modulation.lin", (3 * dim, dim)),
        ):
            yield f"single_blocks.{block}.{name}.weight", shape
            yield f"single_blocks.{block}.{name}.bias", shape[:1]


def _adapters(layers: int, dim: int, ffn: int, kv: int, rank: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The trained part of a LoRA: two narrow matrices beside each of a layer's seven."""
    for layer in range(layers):
        for name, (out, into) in {
            "q_proj": (dim, dim), "k_proj": (kv, dim), "v_proj": (kv, dim), "o_proj": (dim, dim),
            "gate_proj": (ffn, dim), "up_proj": (ffn, dim), "down_proj": (dim, ffn),
        }.items():  # fmt: skip
            yield f"layers.{layer}.{name}.lora_A.weight", (rank, into)
            yield f"layers.{layer}.{name}.lora_B.weight", (out, rank)


_ADAM = (
    ("model", torch.bfloat16),
    ("optimizer.master", torch.float32),
    ("optimizer.exp_avg", torch.float32),
    ("optimizer.exp_avg_sq", torch.float32),
)
_ONE = (("state", torch.float32),)

WORKLOADS = {
    "llama-8b": Workload("Llama 3 8B, FSDP2", _cut(_llama(32, 4096, 14336, 1024, 128256))),
    "llama-70b": Workload(
        "Llama 3 70B, tensor parallel 8, pipeline parallel 4",
        _llama_3d(80, 8192, 28672, 1024, 128256, tensor=8, pipeline=4),
    ),
    "llama-405b": Workload(
        "Llama 3 405B, tensor parallel 8, pipeline parallel 16",
        _llama_3d(126, 16384, 53248, 1024, 128256, tensor=8, pipeline=16),
    ),
    "moe": Workload(
        "Qwen3 30B-A3B: 128 experts in 48 layers, expert parallel", _experts(48, 2048, 768, 128, 4096, 512)
    ),
    "diffusion": Workload(
        "FLUX.1, FSDP2, with a moving average",
        _cut(_diffusion(3072, 19, 38)),
        (*_ADAM, ("ema", torch.float32)),
    ),
    "lora": Workload(
        "LoRA of rank 16 on Llama 3 8B, the adapters",
        _cut(_adapters(32, 4096, 14336, 1024, 16)),
        scales=False,
    ),
    "small": Workload(
        "30,000 tensors of 16 KiB",
        lambda shards: [Piece(f"t.{number}", (4096,)) for number in range(30_000 // shards)],
        _ONE,
    ),
    "giant": Workload("one tensor", lambda shards: [Piece("weight", ((1 << 28) // shards, 1024))], _ONE),
}


def make(
    workload: Workload, nbytes: int, device: str, mesh: DeviceMesh | None, *, fill: bool = True
) -> State:
    """Return the state of this rank.

    Args:
        workload: Whose state.
        nbytes: At most so many for a rank.
        device: "cuda" or "cpu".
        mesh: All ranks; tensors are DTensors over it. None for one rank, whose tensors are plain.
        fill: With random values; else zeros.
    """
    state: State = {}
    generator = torch.Generator(device).manual_seed(0 if mesh is None else mesh.get_rank())
    for piece in workload.pieces(workload.shards_for(nbytes)):
        for kind, dtype in workload.kinds:
            local = torch.zeros(piece.shape, dtype=dtype, device=device)
            if fill:
                local.uniform_(-1, 1, generator=generator)
            state[f"{kind}.{piece.fqn}"] = local if mesh is None else _over(local, piece, mesh)
        if workload.kinds[1:]:
            state[f"optimizer.step.{piece.fqn}"] = torch.tensor(7.0 if fill else 0.0)
    return state


def _over(local: torch.Tensor, piece: Piece, mesh: DeviceMesh) -> torch.Tensor:
    if piece.dim is None:
        # What every rank has is the same.
        return DTensor.from_local(torch.ones_like(local), mesh, [Replicate()], run_check=False)
    shape = list(local.shape)
    shape[piece.dim] *= mesh.size()
    size = torch.Size(shape)
    return DTensor.from_local(
        local,
        mesh,
        [Shard(piece.dim)],
        run_check=False,
        shape=size,
        stride=torch.empty(size, device="meta").stride(),
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def size_of(state: State) -> int:
    """Return the bytes that this rank holds."""
    return sum(local(tensor).nbytes for tensor in state.values())


def zeros_like(state: State) -> State:
    """Return a state of the same shapes that holds nothing."""
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def equal(one: State, other: State) -> bool:
    """Say whether two states hold the same."""
    return all(torch.equal(local(one[name]), local(other[name])) for name in one)

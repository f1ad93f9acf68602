"""A transformer under FSDP2, trained while its state is saved back to back, and while it is not, in turn."""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import mean, median, quantiles
from typing import TYPE_CHECKING, Any

import torch
from bare import BareSave
from candidates import remove_tree
from results import BARE
from torch.distributed import new_group
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, async_save
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from workloads import State, size_of

from distckpt import Checkpointer

if TYPE_CHECKING:
    from cell import Part
    from ranks import Ranks

_LIMIT_S = 120.0
_VOCABULARY = 4096
_WARM_STEPS = 10
_WARM_SAVES = 3
"""Saves until one replays a captured graph."""
_TURNS = 9


class _Model(torch.nn.Module):
    """A decoder: embedding, layers with causal attention, head."""

    def __init__(self, layers: int, dim: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(_VOCABULARY, dim)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                dim, max(1, dim // 64), 4 * dim, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = torch.nn.LayerNorm(dim)
        self.head = torch.nn.Linear(dim, _VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(
            tokens.shape[1], device=tokens.device, dtype=hidden.dtype
        )
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


class Trainer:
    """The model of a size that fits, its optimizer, and one step after the other.

    Args:
        ranks: All of them train.
        nbytes: Of parameters and moments of a rank, about.
    """

    def __init__(self, ranks: Ranks, nbytes: int) -> None:
        self._ranks, is_cuda = ranks, ranks.device == "cuda"
        dim, tokens = (2048, (4, 1024)) if is_cuda else (256, (1, 64))
        # A layer has 12 dim^2 parameters, each of them 12 bytes: itself and two moments, in fp32.
        embedding_bytes = 12 * 2 * _VOCABULARY * dim
        layers = max(2, (nbytes * ranks.world - embedding_bytes) // (12 * 12 * dim**2))
        torch.manual_seed(0)
        model = _Model(layers, dim).to(ranks.device)
        mesh = ranks.mesh or init_device_mesh(ranks.device, (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if is_cuda else MixedPrecisionPolicy()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=is_cuda)
        self._model = model
        generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
        self._tokens = torch.randint(_VOCABULARY, tokens, device=ranks.device, generator=generator)
        number = sum(parameter.numel() for parameter in model.parameters())
        self.name = (
            f"transformer of {number / 1e6:.0f} M parameters, {layers} layers, FSDP2 over {ranks.world}"
        )
        self.step(nullcontext())

    def step(self, guard: AbstractContextManager[object]) -> None:
        logits = self._model(self._tokens)[:, :-1].float()
        loss = functional.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
        loss.backward()
        with guard:
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self._ranks.device == "cuda":
            torch.cuda.current_stream().synchronize()

    def state(self) -> State:
        """Return parameters and moments by name: always the same tensors."""
        found: State = {}
        for name, parameter in self._model.named_parameters():
            found[f"model.{name}"] = parameter.detach()
            for kind, tensor in self.optimizer.state[parameter].items():
                found[f"optimizer.{name}.{kind}"] = tensor
        return found


class _Saving(ABC):
    """Saves that go on beside the training, one at a time."""

    def __init__(self, trainer: Trainer, folder: Path, ranks: Ranks) -> None:
        self._trainer, self._folder, self._ranks = trainer, folder, ranks
        self._number = 0
        self._over: list[Path] = []
        self.is_running = False

    def begin(self) -> None:
        self._number += 1
        self.is_running = True
        self._begin(self._number)

    def look(self) -> None:
        """See whether the save is over; every rank finds the same.

        What the ranks say to each other for it they say with no save under way, too: it is no cost of one.
        """
        if all(self._ranks.gather(self.is_running and self._is_done())):
            self.finish()

    def finish(self) -> None:
        if self.is_running:
            self._over.append(self._result())
            self.is_running = False

    def clear(self) -> None:
        """Remove the checkpoints that are done, which no step is to wait for."""
        self._ranks.barrier()
        if self._ranks.rank == 0:
            for path in self._over:
                remove_tree(path)
        self._over.clear()

    @abstractmethod
    def guard(self) -> AbstractContextManager[object]:
        """Return what goes around the optimizer's step."""

    @abstractmethod
    def _begin(self, number: int) -> None: ...

    @abstractmethod
    def _is_done(self) -> bool: ...

    @abstractmethod
    def _result(self) -> Path: ...

    @abstractmethod
    def close(self) -> None: ...


class _Ours(_Saving):
    """`Checkpointer.save`, with the optimizer guarded."""

    def __init__(self, trainer: Trainer, folder: Path, ranks: Ranks, **settings: Any) -> None:
        super().__init__(trainer, folder, ranks)
        self._checkpointer = Checkpointer(folder / "ours", async_save=True, log_level="error", **settings)
        # The optimizer becomes known.
        trainer.step(self.guard())
        self._state = trainer.state()
        self._checkpointer.prewarm(self._state).result(timeout=_LIMIT_S)

    def guard(self) -> AbstractContextManager[object]:
        return self._checkpointer.guard(self._trainer.optimizer)

    def _begin(self, number: int) -> None:
        self._handle = self._checkpointer.save(number, self._trainer.state())

    def _is_done(self) -> bool:
        return bool(self._handle.committed)

    def _result(self) -> Path:
        return Path(self._handle.result(timeout=_LIMIT_S))

    def close(self) -> None:
        self._checkpointer.close()


class _Stock(_Saving):
    """`dcp.async_save` with a stager that keeps pinned memory and copies in a thread."""

    def __init__(self, trainer: Trainer, folder: Path, ranks: Ranks, threads: int) -> None:
        super().__init__(trainer, folder, ranks)
        self._threads = threads
        self._stager: DefaultStager | None = None
        # Of its own: its thread says things in it while the training does in others.
        self._group = new_group(backend="gloo")

    def guard(self) -> AbstractContextManager[object]:
        if self.is_running and not self._is_staged:
            # What is being copied must not change.
            self._response.staging_completion.result()
            self._is_staged = True
        return nullcontext()

    def _begin(self, number: int) -> None:
        is_cuda = self._ranks.device == "cuda"
        # torch 2.11 empties the stager that it was given when its save has ended: it is made anew.
        inner = getattr(self._stager, "_state_dict_stager", None)
        if not getattr(inner, "_deepcopy_dispatch", None):
            self.close()
            self._stager = DefaultStager(StagingOptions(is_cuda, False, True, is_cuda))
        self._path = self._folder / f"stock-{number}"
        self._response: Any = async_save(
            self._trainer.state(),
            storage_writer=FileSystemWriter(str(self._path), thread_count=self._threads),
            planner=DefaultSavePlanner(enable_plan_caching=True),
            async_stager=self._stager,
            process_group=self._group,
        )
        self._is_staged = False

    def _is_done(self) -> bool:
        return bool(self._response.upload_completion.done())

    def _result(self) -> Path:
        self._response.upload_completion.result()
        return self._path

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class _Bare(_Saving):
    """With copies to pinned memory, which the optimizer waits for, and plain writes of as many bytes."""

    def __init__(self, trainer: Trainer, folder: Path, ranks: Ranks) -> None:
        super().__init__(trainer, folder, ranks)
        self._bare = BareSave(trainer.state().values())

    def guard(self) -> AbstractContextManager[object]:
        self._bare.order_after()
        return nullcontext()

    def _begin(self, number: int) -> None:
        self._path = self._folder / f"bare-{number}"
        self._path.mkdir(exist_ok=True)
        self._bare.start(self._path / str(self._ranks.rank))

    def _is_done(self) -> bool:
        return self._bare.is_done()

    def _result(self) -> Path:
        self._bare.finish()
        return self._path

    def close(self) -> None:
        self._bare.close()


def measure(part: Part) -> None:
    """Train in phases without and with saves, in turn, and record every step."""
    spec, ranks = part.spec, part.ranks
    trainer = Trainer(ranks, spec.nbytes)
    for _ in range(_WARM_STEPS):
        trainer.step(nullcontext())
    saving: _Saving
    if spec.candidate == "distckpt":
        nbytes = size_of(trainer.state())
        saving = _Ours(
            trainer, spec.place, ranks,
            dist_ckpt_workers=spec.workers, ckpt_host_memory=max(spec.host_memory, 2 * nbytes),
        )  # fmt: skip
    elif spec.candidate == BARE:
        saving = _Bare(trainer, spec.place, ranks)
    else:
        saving = _Stock(trainer, spec.place, ranks, spec.workers)
    phases: list[dict[str, Any]] = []
    try:
        for _ in range(_WARM_SAVES):
            saving.begin()
            while saving.is_running:
                trainer.step(saving.guard())
                saving.look()
            saving.clear()
        for turn in range(_TURNS):
            is_saving = turn % 2 == 1
            gc.collect()
            ranks.settle()
            steps: list[float] = []
            saves = 0
            until = time.perf_counter() + spec.seconds / _TURNS
            while True:
                started = time.perf_counter()
                if is_saving and not saving.is_running:
                    saving.begin()
                    saves += 1
                trainer.step(saving.guard())
                saving.look()
                steps.append(time.perf_counter() - started)
                # All its steps are beside a save: a phase ends with one.
                over = time.perf_counter() > until and not saving.is_running
                if any(ranks.gather(over)):
                    break
            saving.finish()
            saving.clear()
            phases.append(
                {"saving": is_saving, "saves": saves, "step_s": [round(one, 6) for one in steps]}
            )  # fmt: skip
    finally:
        saving.close()
    part.record({
        "kind": "training", "candidate": spec.candidate, "model": trainer.name, "ranks": ranks.world,
        "nbytes": int(ranks.total(size_of(trainer.state()))), "phases": phases,
        "figures": figures_of(phases),
    })  # fmt: skip


def figures_of(phases: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return what phases without and with saves, in turn, tell: of each one with saves, and of all steps.

    Each phase with saves stands beside the two around it: what drifts slowly cancels out.
    """
    means = [mean(phase["step_s"]) for phase in phases]
    plain, saving = (
        sorted(step for phase in phases if phase["saving"] is kind for step in phase["step_s"])
        for kind in (False, True)
    )
    lost = [
        (mine - (before + after) / 2, (before + after) / 2, phase)
        for before, mine, after, phase in zip(
            means[::2], means[1::2], means[2::2], phases[1::2], strict=False
        )
    ]
    return {
        "slowdown": [more / step for more, step, _ in lost],
        "lost_s": [more * len(phase["step_s"]) / phase["saves"] for more, _, phase in lost],
        "p50_s": [median(plain), median(saving)],
        "p99_s": [quantiles(steps, n=100, method="inclusive")[98] for steps in (plain, saving)],
        "saves": [sum(phase["saves"] for phase in phases)],
    }

"""Hugging Face Accelerate: what an `Accelerator` has prepared, saved and restored through a `Checkpointer`.

    model.*       weights by their names, shards of FSDP as DTensors
    optimizer.*   states by the names of the weights, so that another number of ranks can load them
    objects.*     schedulers, gradient scaler, registered objects: those of the main process
    own.*         of each rank its own: random number generators, data loaders

Written against Accelerate 1.15.

Threads: the trainer's.
"""

# ruff: noqa: SLF001 - what an Accelerator has prepared is in its private lists alone

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import ModuleList

from distckpt.checkpointer import Checkpointer
from distckpt.config import CheckpointConfig
from distckpt.errors import CheckpointError, ConfigError
from distckpt.integrations.packing import pack, unpack
from distckpt.rng import RngState
from distckpt.stateful import PerRank

try:
    from accelerate.data_loader import SeedableRandomSampler
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ConfigError(
        f"distckpt.integrations.accelerate needs accelerate (1.15 was tested): {error}"
    ) from error

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from accelerate import Accelerator
    from torch.nn import Module
    from torch.optim import Optimizer
    from typing_extensions import Self

    from distckpt import SaveHandle

__all__ = ["AcceleratorCheckpointer", "Own", "Parts"]

_LEAST_BYTES = 1 << 20
"""A tensor of `objects` that has fewer is pickled with the rest, and may come and go between saves."""

_LIVE = {
    DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP,
}  # fmt: skip
"""Where models and optimizers hold their states themselves, as torch does."""


class Own:
    """What a rank has for itself: random number generators, and what `value` is set to.

    It stays the same object from save to save, so that their plan holds.
    """

    def __init__(self) -> None:
        self.value: Any = None
        self._rng = RngState()
        self._restored_rng: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state now."""
        return {"rng": self._rng.state_dict(), "value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `value`; the generators only when `set_rng` is called."""
        self._restored_rng, self.value = state["rng"], state["value"]

    def set_rng(self) -> None:
        """Set the random number generators as they were restored, if they were."""
        if self._restored_rng is not None:
            self._rng.load_state_dict(self._restored_rng)


class Parts:
    """The parts of a training, as one state.

    Args:
        models: As they train: wrapped for data parallelism, or sharded.
        optimizers: Of the parameters of these models.
        own: What this rank has for itself.
    """

    def __init__(self, models: Sequence[Module], optimizers: Sequence[Any], own: PerRank) -> None:
        self._has_models = bool(models)
        self._model = models[0] if len(models) == 1 else ModuleList(models)
        # Accelerate's own optimizer skips steps, and a first one makes the states that are loaded.
        self._optimizers: list[Optimizer] = [getattr(one, "optimizer", one) for one in optimizers]
        self._own = own

    def state(self, objects: Any, *, is_main: bool) -> dict[str, Any]:
        """Return what is to be saved.

        Args:
            objects: What the main process saves for all.
            is_main: Whether this is it.
        """
        state = self._tensors()
        if is_main:
            state["objects"] = pack(objects, _LEAST_BYTES)
        return state

    def room(self, objects: Any) -> dict[str, Any]:
        """Return what a checkpoint is restored into.

        Args:
            objects: What would be saved now, for the places of its tensors.
        """
        for optimizer in self._optimizers:
            # With gradients there, torch would not make the states of one that has not stepped.
            optimizer.zero_grad()
        return {**self._tensors(), "objects": pack(objects, _LEAST_BYTES)}

    def take(self, state: dict[str, Any], *, weights_only: bool) -> Any:
        """Hand what was restored to models and optimizers.

        Args:
            state: What `room` returned, filled.
            weights_only: As for `torch.load`.

        Returns:
            The objects that were saved.
        """
        if self._has_models:
            set_model_state_dict(self._model, state["model"])
        for number, optimizer in enumerate(self._optimizers):
            set_optimizer_state_dict(self._model, optimizer, state["optimizer"][str(number)])
        return unpack(state["objects"], weights_only=weights_only)

    def _tensors(self) -> dict[str, Any]:
        return {
            # Without any, torch finds a mistake in that.
            "model": get_model_state_dict(self._model) if self._has_models else {},
            "optimizer": {
                str(number): self._optimizer_state(optimizer)
                for number, optimizer in enumerate(self._optimizers)
            },
            "own": self._own,
        }

    def _optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        is_new = not optimizer.state
        state = dict(get_optimizer_state_dict(self._model, optimizer))
        if is_new:
            # torch has let it make a step, with a rate and gradients of zero: that it has made none.
            for entry in optimizer.state.values():
                if isinstance(entry.get("step"), torch.Tensor):
                    entry["step"].zero_()
        return state


class AcceleratorCheckpointer:
    """Saves and restores what an `Accelerator` has prepared, and the objects registered with it.

    What `accelerator.save_state` covers: models, optimizers, schedulers, gradient scaler, samplers and
    stateful data loaders, random number generators, registered objects. Make it after `prepare`, on all
    ranks.

    Args:
        accelerator: The accelerator.
        root: Directory of all steps, or a URL.
        config: Settings; default: `CheckpointConfig()`.
        restore: Number of a step to restore at once, or "latest", if there is one.
        storage_options: Passed to fsspec as they are.
        **settings: Fields of `CheckpointConfig`, which override `config`.

    Attributes:
        restored: The step that was restored last; None if none was.

    Raises:
        CheckpointError: What is to be restored cannot be; see `restore`.
        ConfigError: A setting cannot be honoured, or the state is kept by an engine of its own, as
            DeepSpeed's.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        root: str | os.PathLike[str],
        config: CheckpointConfig | None = None,
        *,
        restore: int | str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        if accelerator.distributed_type not in _LIVE:
            raise ConfigError(
                f"accelerator: {accelerator.distributed_type.value} keeps its state itself; only plain, "
                f"data parallel and FSDP training is covered"
            )
        self._accelerator = accelerator
        # Saved here in any case.
        self._config = CheckpointConfig.build(config, {**settings, "load_rng": False})
        self._checkpointer = Checkpointer(root, self._config, storage_options=storage_options)
        self._own = Own()
        self._per_rank = PerRank(self._own)
        self.restored: int | None = None
        if restore is not None:
            try:
                self.restore(restore)
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Self:
        """Return itself; it is closed on leaving."""
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it; see `Checkpointer`."""
        self._checkpointer.__exit__(exc_type, error, trace)

    def save(self, step: int, *, metric: float | None = None) -> SaveHandle:
        """Save as step `step`; with `async_save` this returns when the state may change again.

        Args:
            step: Number of the step, from 0.
            metric: By which `keep_best` chooses.

        Returns:
            A handle of the save.
        """
        self._own.value = {
            "step": self._accelerator.step,
            "loaders": [_loader_state(loader) for loader in self._accelerator._dataloaders],
        }
        state = self._parts().state(self._objects(), is_main=self._accelerator.is_main_process)
        return self._checkpointer.save(step, state, metric=metric)

    def guard(self) -> AbstractContextManager[None]:
        """See `Checkpointer.guard`: of all optimizers that were prepared."""
        return self._checkpointer.guard(*(prepared.optimizer for prepared in self._accelerator._optimizers))

    def restore(self, step: int | str | None = "latest") -> int | None:
        """Restore a step, on all ranks.

        Args:
            step: Number of the step, or "latest".

        Returns:
            The step that was loaded; None if "latest" was asked for and there is none.

        Raises:
            CheckpointError: There is no such step, it cannot be read, or it is of other objects.
        """
        accelerator, parts = self._accelerator, self._parts()
        # Optimizers are left alone if there is nothing to restore.
        if self._checkpointer.restore({"objects": {"structure": b""}}, step) is None:
            return None
        state = parts.room(self._objects())
        self._own.value = None
        found = self._checkpointer.restore(state, step)
        if found is None:
            return None
        objects = parts.take(state, weights_only=self._config.ckpt_weights_only)
        targets = [*accelerator._schedulers, *accelerator._custom_objects]
        saved = [*objects["schedulers"], *objects["custom"]]
        if len(targets) != len(saved):
            raise CheckpointError(
                f"step {found} has {len(saved)} schedulers and registered objects, and there are "
                f"{len(targets)} now"
            )
        for target, one in zip(targets, saved, strict=True):
            target.load_state_dict(one)
        if accelerator.scaler is not None and objects["scaler"] is not None:
            accelerator.scaler.load_state_dict(objects["scaler"])
        if self._own.value is not None:
            accelerator.step = self._own.value["step"]
            for loader, one in zip(accelerator._dataloaders, self._own.value["loaders"], strict=True):
                _set_loader(loader, one)
        self._own.set_rng()
        self.restored = found
        return found

    def steps(self) -> list[int]:
        """Return the steps that are complete, ascending."""
        return self._checkpointer.steps()

    def wait(self) -> None:
        """Wait for all saves that are under way.

        Raises:
            CheckpointError: One failed.
        """
        self._checkpointer.wait()

    def close(self) -> None:
        """Wait for saves that are under way, end workers and give memory back; idempotent.

        Raises:
            CheckpointError: A save failed whose result nobody has asked for.
        """
        self._checkpointer.close()

    def _objects(self) -> dict[str, Any]:
        accelerator = self._accelerator
        return {
            "schedulers": [one.state_dict() for one in accelerator._schedulers],
            "scaler": accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
            "custom": [one.state_dict() for one in accelerator._custom_objects],
        }

    def _parts(self) -> Parts:
        return Parts(self._accelerator._models, self._accelerator._optimizers, self._per_rank)


def _loader_state(loader: Any) -> dict[str, Any]:
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    state: dict[str, Any] = {"iteration": getattr(loader, "iteration", 0)}
    if isinstance(sampler, SeedableRandomSampler):
        state["sampler"] = {"epoch": sampler.epoch, "initial_seed": sampler.initial_seed}
    if getattr(loader, "use_stateful_dataloader", False):
        state["loader"] = loader.state_dict()
    return state


def _set_loader(loader: Any, state: dict[str, Any]) -> None:
    if hasattr(loader, "iteration"):
        loader.iteration = state["iteration"]
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    if isinstance(sampler, SeedableRandomSampler) and "sampler" in state:
        sampler.initial_seed = state["sampler"]["initial_seed"]
        sampler.set_epoch(state["sampler"]["epoch"])
    if getattr(loader, "use_stateful_dataloader", False) and "loader" in state:
        loader.load_state_dict(state["loader"])

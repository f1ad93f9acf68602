"""Lightning: a `CheckpointIO` plugin, and a strategy for sharded models, that save through distckpt.

    trainer -> save_checkpoint -> staged -> one background thread: saves and removals, in order

A checkpoint is a directory, wherever Lightning's own would be a file. Written against Lightning 2.6.

Invariants:
    * A checkpoint is removed only after the saves that were begun before it have succeeded.
    * What fails in the background is raised by the next call that saves, loads or ends.

Threads: the trainer's, and one of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from distckpt.config import CheckpointConfig
from distckpt.errors import CheckpointError, ConfigError
from distckpt.integrations.packing import load_packed, pack, plain_errors, remove_checkpoint, room_for, unpack
from distckpt.planner import SavePlanner
from distckpt.reader import StorageReader
from distckpt.storage import open_storage
from distckpt.writer import StorageWriter

try:
    from lightning.fabric.plugins import CheckpointIO as LightningCheckpointIO
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import ModelParallelStrategy as LightningModelParallelStrategy
except ImportError as error:
    raise ConfigError(f"distckpt.integrations.lightning needs lightning (2.6 was tested): {error}") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from torch.distributed import ProcessGroup

    from distckpt.storage import Storage

__all__ = ["CheckpointIO", "ModelParallelStrategy"]

_LOG = logging.getLogger(__name__)
_Path = str | os.PathLike[str]


class CheckpointIO(LightningCheckpointIO):
    """Saves and loads the checkpoints of a `Trainer` or `Fabric`, given as one of its `plugins`.

    With `async_save` a save returns when the state is copied. A single file that Lightning wrote itself is
    loaded and removed, too.

    Args:
        config: Settings; default: `CheckpointConfig()`.
        storage_options: Passed to fsspec as they are.
        **settings: Fields of `CheckpointConfig`, which override `config`.

    Raises:
        ConfigError: A setting cannot be honoured.
    """

    def __init__(
        self,
        config: CheckpointConfig | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._config = CheckpointConfig.build(config, settings)
        self._storage_options = dict(storage_options or {})
        self._writer: StorageWriter | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: list[Future[None]] = []
        self._has_failed = False
        """Whether a save has, since the last one that has not."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _Path, storage_options: Any | None = None
    ) -> None:
        """Save `checkpoint`; Lightning calls this on one rank.

        Args:
            checkpoint: Nested containers of tensors and Python objects.
            path: Directory, or a URL.
            storage_options: None: those of the plugin hold for all checkpoints.

        Raises:
            CheckpointError: The save failed, or, with `async_save`, one before it.
            ConfigError: There are `storage_options`.
        """
        if storage_options is not None:
            raise ConfigError("storage_options: give them to CheckpointIO, which loads and removes, too")
        self.save_state(pack(checkpoint), path)

    def save_state(self, state: dict[str, Any], path: _Path, group: ProcessGroup | None = None) -> None:
        """Save what `dcp.save` takes; all ranks of `group` call this, for the same checkpoints.

        Args:
            state: The state.
            path: Directory, or a URL.
            group: Of a backend for CPUs, which nothing else uses; default: this rank alone.

        Raises:
            CheckpointError: The save failed, or, with `async_save`, one before it.
        """
        if group is None:
            self._raise_failure()
        else:
            # The same saves on all ranks, or what failed would be raised by one and awaited by the others.
            self._drain()
        if self._writer is None:
            self._writer = StorageWriter(config=self._config, storage_options=self._storage_options)
        # A link would have the checkpoint that it leads to be replaced.
        _unlink(path)
        writer, place = self._writer, _absolute(path)
        if not self._config.async_save:
            self._save(writer, state, place, group)
            return
        staged = writer.stage(state)

        def save() -> None:
            self._has_failed = True
            self._save(writer, staged.result(), place, group)
            self._has_failed = False

        self._submit(save)

    def load_checkpoint(
        self, path: _Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint; every rank that calls this reads all of it.

        Args:
            path: Directory, or a URL; or a file that Lightning wrote.
            map_location: A device, for the tensors; default: the CPU.
            weights_only: As for `torch.load`; default: the plugin's `ckpt_weights_only`.

        Returns:
            What was saved.

        Raises:
            CheckpointError: There is no such checkpoint, it is damaged, or a save failed.
            ConfigError: `map_location` is something else.
        """
        reader, only = self.reader_of(path, weights_only)
        if os.path.isfile(path):
            loaded: dict[str, Any] = TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
            return loaded
        if not isinstance(map_location, (str, torch.device, type(None))):
            raise ConfigError(f"map_location: expected a device, got {map_location!r}")
        packed: dict[str, Any] = load_packed(reader, weights_only=only, device=map_location)
        return packed

    def reader_of(self, path: _Path, weights_only: bool | None = None) -> tuple[StorageReader, bool]:
        """Return what reads a checkpoint, once the saves before are complete, and what `weights_only` means.

        Args:
            path: Directory, or a URL.
            weights_only: As for `load_checkpoint`.

        Raises:
            CheckpointError: A save failed.
        """
        self._drain()
        only = self._config.ckpt_weights_only if weights_only is None else weights_only
        reader = StorageReader(
            _absolute(path), self._config, storage_options=self._storage_options, ckpt_weights_only=only
        )
        return reader, only

    def remove_checkpoint(self, path: _Path) -> None:
        """Remove a checkpoint, once the saves that were begun before are complete; not if one has failed.

        Args:
            path: Directory, or a URL; or a file that Lightning wrote.
        """
        if os.path.islink(path):
            # As of ModelCheckpoint(save_last="link"): what it leads to stays.
            self._after_saves(path, lambda: _unlink(path))
        elif os.path.isfile(path):
            self._after_saves(path, lambda: TorchCheckpointIO().remove_checkpoint(path))
        else:
            storage = self._open(_absolute(path))
            self._after_saves(path, lambda: remove_checkpoint(storage))

    def teardown(self) -> None:
        """Wait for the saves, end workers and give memory back; a save after this starts anew.

        Raises:
            CheckpointError: A save failed; all is ended nevertheless.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=True)
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        self._raise_failure()

    def _after_saves(self, path: _Path, remove: Callable[[], None]) -> None:
        def run() -> None:
            if self._has_failed:
                _LOG.warning("%s stays: the save that was to replace it has failed", path)
                return
            try:
                remove()
            except CheckpointError as error:
                _LOG.warning("%s could not be removed: %s", path, error)

        if self._thread is None:
            run()
        else:
            self._submit(run)

    def _submit(self, task: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="distckpt-lightning")
        self._under_way.append(self._thread.submit(task))

    def _drain(self) -> None:
        for future in self._under_way:
            future.exception()
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Forget what has ended, and raise what failed first."""
        over = [future for future in self._under_way if future.done()]
        self._under_way = [future for future in self._under_way if not future.done()]
        for future in over:
            future.result()

    def _save(
        self, writer: StorageWriter, state: dict[str, Any], place: str, group: ProcessGroup | None
    ) -> None:
        planner = SavePlanner(fully_parallel_save=self._config.ckpt_fully_parallel_save)
        with plain_errors(f"saving {place}"):
            state_dict_saver.save(
                state,
                checkpoint_id=place,
                storage_writer=writer,
                planner=planner,
                process_group=group,
                no_dist=group is None,
            )

    def _open(self, place: str) -> Storage:
        timeout_s = self._config.distributed_timeout_minutes * 60
        return open_storage(place, self._storage_options, timeout_s=timeout_s)


class ModelParallelStrategy(LightningModelParallelStrategy):
    """Lightning's strategy of this name, FSDP2 and tensor parallelism, with checkpoints of distckpt.

    Each rank saves its shards; any number of ranks loads them. What Lightning wrote itself is loaded, too.

    Args:
        *args: As Lightning's.
        checkpoint_config: Settings; default: `CheckpointConfig()`.
        storage_options: Passed to fsspec as they are.
        **kwargs: As Lightning's.

    Raises:
        ConfigError: `save_distributed_checkpoint` is off.
    """

    def __init__(
        self,
        *args: Any,
        checkpoint_config: CheckpointConfig | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if not self._save_distributed_checkpoint:
            raise ConfigError("save_distributed_checkpoint: distckpt saves shards: leave it on")
        self._io = CheckpointIO(checkpoint_config, storage_options=storage_options)
        self.checkpoint_io = self._io
        self._saving_group: ProcessGroup | None = None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights, where they are: distckpt copies them."""
        assert self.model is not None
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer, where it is."""
        assert self.model is not None
        return dict(get_optimizer_state_dict(self.model, _plain(optimizer)))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _Path, storage_options: Any | None = None
    ) -> None:
        """Save the shards of this rank, and on the first rank what is no tensor of model or optimizer.

        Args:
            checkpoint: What the trainer has collected.
            filepath: Directory, or a URL; that of the first rank holds.
            storage_options: None: those of the strategy hold for all checkpoints.

        Raises:
            ConfigError: There are `storage_options`.
        """
        if storage_options is not None:
            raise ConfigError("storage_options: give them to ModelParallelStrategy, which loads, too")
        if self._saving_group is None:
            # Saves are planned in the background, where they must not meet the training.
            self._saving_group = distributed.new_group(backend="gloo")
        rest = dict(checkpoint)
        state = {"state_dict": rest.pop("state_dict")}
        for number, optimizer in enumerate(rest.pop("optimizer_states", [])):
            state[f"optimizer_{number}"] = optimizer
        if self.is_global_zero:
            state["rest"] = pack(rest)
        self._io.save_state(state, self.broadcast(filepath), self._saving_group)

    def load_checkpoint(self, checkpoint_path: _Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load into model and optimizers.

        Args:
            checkpoint_path: Directory, or a URL; that of the first rank holds.
            weights_only: As for `torch.load`; default: `ckpt_weights_only`.

        Returns:
            The rest of the checkpoint.
        """
        path = self.broadcast(checkpoint_path)
        reader, only = self._io.reader_of(path, weights_only)
        if os.path.isfile(path) or os.path.isfile(os.path.join(path, "meta.pt")):
            loaded: dict[str, Any] = super().load_checkpoint(path, weights_only)
            return loaded
        assert self.model is not None
        optimizers = [_plain(optimizer) for optimizer in self.optimizers]
        state: dict[str, Any] = {"state_dict": get_model_state_dict(self.model)}
        for number, optimizer in enumerate(optimizers):
            state[f"optimizer_{number}"] = get_optimizer_state_dict(self.model, optimizer)
        state["rest"] = room_for(reader, "rest.")
        with plain_errors(f"loading {path}"):
            state_dict_loader.load(state, storage_reader=reader)
        set_model_state_dict(self.model, state["state_dict"])
        for number, optimizer in enumerate(optimizers):
            set_optimizer_state_dict(self.model, optimizer, state[f"optimizer_{number}"])
        rest: dict[str, Any] = unpack(state["rest"], weights_only=only)
        return rest

    def teardown(self) -> None:
        """Wait for the saves, and end; see `CheckpointIO.teardown`."""
        try:
            self._io.teardown()
        finally:
            super().teardown()


def _plain(optimizer: Any) -> Any:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer  # noqa: SLF001


def _unlink(path: _Path) -> None:
    if os.path.islink(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _absolute(path: _Path) -> str:
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(text)

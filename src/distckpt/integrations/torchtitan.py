"""torchtitan: its checkpoint manager, whose checkpoints are written and read by distckpt.

The folders, the schedule, what the last save holds and what is loaded stay torchtitan's. Written against
torchtitan 0.3.0.

Threads: the trainer's; torchtitan's own thread removes old checkpoints.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from distckpt.config import CheckpointConfig
from distckpt.errors import ConfigError
from distckpt.integrations.packing import plain_errors
from distckpt.planner import SavePlanner
from distckpt.reader import StorageReader
from distckpt.writer import StorageWriter

try:
    from torchtitan.components.checkpointer import MODEL, AsyncMode
    from torchtitan.components.checkpointer import CheckpointManager as TitanCheckpointManager
    from torchtitan.tools import filesystem
except ImportError as error:
    raise ConfigError(
        f"distckpt.integrations.torchtitan needs torchtitan (0.3.0 was tested): {error}"
    ) from error

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["CheckpointManager"]

_LOG = logging.getLogger(__name__)
_STEP = re.compile(r"step-(\d+)")
_MARKS = (".metadata", "model.safetensors.index.json")
"""What torchtitan, too, takes for the sign that a checkpoint is complete."""


class CheckpointManager(TitanCheckpointManager):
    """torchtitan's `CheckpointManager`, which writes and reads through distckpt.

    Both asynchronous modes are the same here: the state is staged by distckpt, and the trainer does not wait
    for the copies, which run before whatever its streams are given next.

    Only complete checkpoints count for `keep_latest_k`, so that the last good one stays whatever becomes of
    the save under way. `close` waits for the last save.

    Args:
        config: As torchtitan's, and `distckpt`.
        **parts: As torchtitan's.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanCheckpointManager.Config):
        """torchtitan's settings, and those of distckpt."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """Whether training goes on while a checkpoint is written."""

        distckpt: CheckpointConfig = field(default_factory=CheckpointConfig)
        """Settings of distckpt; `async_save` among them has no part here, for there is `async_mode`."""

    def __init__(self, config: Config, **parts: Any) -> None:
        self._writer: StorageWriter | None = None
        self._settings = config.distckpt
        super().__init__(config, **parts)
        if not self.enable:
            return
        self._writer = StorageWriter(config=self._settings)
        if self.async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM:
            # torchtitan makes a stager of its own if there is none.
            self.stager: StorageWriter | None = self._writer

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | AsyncSaveResponse | None:
        """Save `state_dict`; what is exported for Hugging Face is written by torchtitan.

        Args:
            state_dict: The state.
            checkpoint_id: Where to.
            async_mode: Whether this returns before it is written.
            enable_garbage_collection: Only for what torchtitan writes itself: distckpt leaves no garbage.
            to_hf: Whether it is an export.

        Returns:
            What torchtitan expects in this mode.
        """
        if to_hf:
            exported: Future[Any] | AsyncSaveResponse | None = super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
            return exported
        planner = SavePlanner(fully_parallel_save=self._settings.ckpt_fully_parallel_save)
        if async_mode is AsyncMode.DISABLED:
            state_dict_saver.save(
                state_dict, checkpoint_id=checkpoint_id, storage_writer=self._writer, planner=planner
            )
            return None
        response = state_dict_saver.async_save(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=self._writer,
            planner=planner,
            process_group=self.pg,
        )
        assert isinstance(response, AsyncSaveResponse), "distckpt stages into a future"
        return response if async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM else response.upload_completion

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load a checkpoint into `state_dict`; those of Hugging Face are read by torchtitan.

        Args:
            state_dict: What to fill.
            checkpoint_id: Where from; also what stock PyTorch has written.
            from_hf: Whether it is one of Hugging Face.
            from_quantized: Whether that is quantized.
        """
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        reader = StorageReader(checkpoint_id, self._settings)
        with plain_errors(f"loading {checkpoint_id}"):
            state_dict_loader.load(state_dict, checkpoint_id=checkpoint_id, storage_reader=reader)
        # The weights lie in it under their own names, beside the other states.
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def _maybe_wait_for_staging(self) -> None:
        """Go on: the copies run before what the streams are given next; what fails, the save raises."""
        self.staging_future = None

    def _wait_for_saving(self) -> None:
        try:
            with plain_errors("the last save"):
                super()._wait_for_saving()
        finally:
            # What has failed is told once.
            self.save_future = None
        self._purge_stale_checkpoints()

    def _purge_stale_checkpoints(self) -> None:
        if not self._should_purge():
            return
        found = sorted(
            (int(match[1]), filesystem.join(self.folder, name))
            for name in filesystem.listdir(self.folder)
            if (match := _STEP.fullmatch(name.rstrip("/")))
        )
        complete = [step for step, path in found if _is_complete(path)]
        if len(complete) > self.keep_latest_k:
            oldest = complete[-self.keep_latest_k]
            for step, path in found:
                if step < oldest:
                    self.purge_queue.put(path)

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            self.maybe_wait_for_saving()
        finally:
            self.stager = None
            super()._close()
            writer.close()


def _is_complete(path: str) -> bool:
    return any(filesystem.isfile(filesystem.join(path, mark)) for mark in _MARKS)

"""Hugging Face Transformers: a `Trainer` whose checkpoints are written and read by distckpt.

    Trainer(model, args, ...)  ->  output_dir/step-00000500, step-00001000, ...

When it saves and how many checkpoints stay is said by `TrainingArguments`, as ever. It is a subclass and no
callback: callbacks are told of saves, but nothing lets them load. Written against Transformers 5.24.

Threads: the trainer's.
"""

# ruff: noqa: SLF001 - what a Trainer loads goes through private methods alone

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from distckpt.checkpointer import Checkpointer
from distckpt.config import CheckpointConfig
from distckpt.errors import CheckpointError, ConfigError
from distckpt.integrations.accelerate import Own, Parts
from distckpt.integrations.packing import unpack
from distckpt.stateful import PerRank

try:
    import transformers
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise ConfigError(
        f"distckpt.integrations.transformers needs transformers and accelerate (5.24 and 1.15 were tested): "
        f"{error}"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distckpt import SaveHandle

__all__ = ["CheckpointMixin", "Trainer"]

_LOG = logging.getLogger(__name__)
_STEP = re.compile(r"step-(\d{8,})")
_STATE_NAME = "trainer_state.json"


class CheckpointMixin:
    """Comes before a class that is a `transformers.Trainer`, in the list of bases.

    `train(resume_from_checkpoint=True)` resumes from the last complete checkpoint, a number or the path of a
    step from that step, anything else as Transformers does it.

    Args:
        *args: As the trainer's.
        checkpoint_root: Directory of all steps, or a URL; default: `output_dir` of the trainer's arguments.
        checkpoint_config: Settings; default: `CheckpointConfig(async_save=True)`.
        storage_options: Passed to fsspec as they are.
        **kwargs: As the trainer's.

    Raises:
        ConfigError: The trainer's arguments ask for what is not covered.
    """

    def __init__(
        self,
        *args: Any,
        checkpoint_root: str | os.PathLike[str] | None = None,
        checkpoint_config: CheckpointConfig | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        arguments = self.args  # type: ignore[attr-defined]
        if self.is_deepspeed_enabled:  # type: ignore[attr-defined]
            raise ConfigError("deepspeed keeps its state itself: use Transformers' own Trainer")
        if arguments.save_only_model:
            raise ConfigError("save_only_model: such checkpoints cannot be resumed from: use save_model()")
        if arguments.push_to_hub and arguments.hub_strategy != "end":
            raise ConfigError("hub_strategy: checkpoints are not pushed: only 'end' is covered")
        self._root = arguments.output_dir if checkpoint_root is None else checkpoint_root
        # Saved here in any case, and set when the trainer says so.
        self._config = CheckpointConfig.build(
            checkpoint_config or CheckpointConfig(async_save=True), {"load_rng": False}
        )
        self._storage_options = dict(storage_options or {})
        self._checkpointer: Checkpointer | None = None
        self._handle: SaveHandle | None = None
        self._resumed: int | None = None
        self._other_metric: int | None = None
        """Of what is not the best so far."""
        self._own = Own()
        self._per_rank = PerRank(self._own)

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Train; see `transformers.Trainer.train`. On return all checkpoints are complete.

        Args:
            resume_from_checkpoint: True, the number of a step, or a path.
            **kwargs: As the trainer's.

        Raises:
            CheckpointError: A save failed, or there is no such checkpoint.
        """
        parent: Any = super()
        config = self._with_retention()
        with Checkpointer(self._root, config, storage_options=self._storage_options) as checkpointer:
            self._checkpointer = checkpointer
            try:
                asked = self._step_of(resume_from_checkpoint)
                if asked is None:
                    result = parent.train(resume_from_checkpoint=resume_from_checkpoint or None, **kwargs)
                else:
                    with tempfile.TemporaryDirectory(prefix="distckpt-") as folder:
                        # What the trainer reads itself: how far it was.
                        Path(folder, _STATE_NAME).write_text(self._read_progress(asked))
                        result = parent.train(resume_from_checkpoint=folder, **kwargs)
                checkpointer.wait()
            finally:
                self._checkpointer = self._handle = self._resumed = None
        return result

    def _with_retention(self) -> CheckpointConfig:
        """Return the settings, with what the trainer's arguments say of retention, if they do.

        Raises:
            ConfigError: The settings say it, too.
        """
        arguments = self.args  # type: ignore[attr-defined]
        if not arguments.save_total_limit:
            return self._config
        if self._config.has_retention:
            raise ConfigError("save_total_limit: the settings of distckpt say what is kept: leave one out")
        kept = {"keep_last": arguments.save_total_limit}
        if arguments.metric_for_best_model is not None:
            # Set with load_best_model_at_end, too. The metric is the step for what is the best so far, so of
            # all of them the last one is the best.
            kept |= {"keep_best": 1, "keep_best_mode": "max"}
            self._other_metric = -1
        return CheckpointConfig.build(self._config, kept)

    def _step_of(self, asked: Any) -> int | str | None:
        """Return the step to resume from, or "latest"; None: the trainer goes its own way."""
        if asked is True:
            return "latest"
        if asked is None or asked is False or isinstance(asked, int):
            return asked or None
        match = _STEP.fullmatch(os.path.basename(os.fspath(asked).rstrip("/")))
        step = int(match[1]) if match else -1
        is_ours = step >= 0 and os.path.abspath(asked) == os.path.abspath(self._path(step))
        return step if is_ours else None

    def _read_progress(self, step: int | str) -> str:
        """Find the checkpoint to resume from, and return the state of the trainer in it.

        Raises:
            CheckpointError: There is none.
        """
        assert self._checkpointer is not None
        packed = {"structure": b""}
        self._resumed = self._checkpointer.restore({"objects": packed}, step)
        if self._resumed is None:
            text = f"{self._root} holds no complete checkpoint"
            folder = self.args.output_dir  # type: ignore[attr-defined]
            stock = get_last_checkpoint(folder) if os.path.isdir(folder) else None
            if stock is not None:
                text += f" of distckpt; {stock} is one of Transformers: pass its path to resume from it"
            raise CheckpointError(text)
        progress: str = unpack(packed, weights_only=self._config.ckpt_weights_only)["trainer"]
        return progress

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        trainer: Any = self
        if trial is not None:
            raise ConfigError("hyperparameter_search: checkpoints of trials are not covered")
        assert self._checkpointer is not None, "train() saves"
        trainer.store_flos()
        state, step = trainer.state, trainer.state.global_step
        best = state.best_global_step
        if best and best in {step, *self._checkpointer.steps()}:
            state.best_model_checkpoint = self._path(best)
        for callback in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(callback, ExportableState):
                name = type(callback).__name__
                if isinstance(state.stateful_callbacks[name], list):
                    state.stateful_callbacks[name].append(callback.state())
                else:
                    state.stateful_callbacks[name] = callback.state()
        if (
            self._handle is not None
            and not self._handle.is_skipped
            and self._config.ckpt_on_failure != "warn"
        ):
            # What failed is raised here, on all ranks, and not at the end of the training.
            self._handle.result()
        saved = self._parts().state(self._objects(), is_main=trainer.is_world_process_zero())
        self._handle = self._checkpointer.save(
            step, saved, metric=step if best == step else self._other_metric
        )

    def _objects(self) -> dict[str, Any]:
        trainer: Any = self
        scaler = getattr(trainer.accelerator, "scaler", None)
        return {
            "trainer": json.dumps(asdict(trainer.state), indent=2, sort_keys=True),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
        }

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._resumed is None:
            parent: Any = super()
            parent._load_from_checkpoint(resume_from_checkpoint, model)
        # Else with the optimizer, once all is in its place.

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            parent: Any = super()
            parent._load_optimizer_and_scheduler(checkpoint)
            return
        assert self._checkpointer is not None
        trainer: Any = self
        parts = self._parts()
        state = parts.room(self._objects())
        self._checkpointer.restore(state, self._resumed)
        objects = parts.take(state, weights_only=self._config.ckpt_weights_only)
        trainer.lr_scheduler.load_state_dict(objects["scheduler"])
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None and objects["scaler"] is not None:
            scaler.load_state_dict(objects["scaler"])

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            parent: Any = super()
            parent._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._resumed is not None:
            # Now, and not with the rest: the trainer draws the order of the data before.
            self._own.set_rng()
        else:
            parent: Any = super()
            parent._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        trainer: Any = self
        step = trainer.state.best_global_step
        if self._checkpointer is None or trainer.state.best_model_checkpoint != self._path(step or 0):
            parent: Any = super()
            parent._load_best_model()
            return
        self._checkpointer.wait()
        model = trainer.model_wrapped
        state = {"model": get_model_state_dict(model)}
        self._checkpointer.restore(state, step)
        set_model_state_dict(model, state["model"])

    def _parts(self) -> Parts:
        trainer: Any = self
        return Parts([trainer.model_wrapped], [trainer.optimizer], self._per_rank)

    def _path(self, step: int) -> str:
        return f"{os.fspath(self._root).rstrip('/')}/step-{step:08}"


class Trainer(CheckpointMixin, transformers.Trainer):
    """`transformers.Trainer`, which saves and resumes through distckpt; see `CheckpointMixin`."""

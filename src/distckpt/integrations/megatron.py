"""Megatron-Core: strategies that save and load its sharded states, its async requests, and `save`.

    dist_checkpointing.save(state, directory, sharded_strategy=SaveShardedStrategy(dist_ckpt_workers=4))
    dist_checkpointing.load(state, directory, sharded_strategy=LoadShardedStrategy())

Checkpoints are those of Megatron-Core's `torch_dist`, which reads them, as this reads its.

Invariants:
    * Nothing here is a collective. Those that are left are Megatron-Core's own, around the strategy; `save`
      of this module has none.
    * Nothing is forked: a request has nothing for a queue's process to do.
    * What a save plans anew, and what it takes from the last one, follows from comparing the states.

docs/megatron.md says what is replaced, and what was tested with which version.
"""

from __future__ import annotations

import inspect
import io
import json
import logging
import re
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from distckpt.collector import collector_paused
from distckpt.config import CheckpointConfig
from distckpt.errors import CheckpointError, ConfigError, DistckptWarning
from distckpt.integrations.megatron_fsdp import fsdp_dtensor_state
from distckpt.integrations.megatron_saver import Claim, Saver
from distckpt.integrations.megatron_writer import FileSystemWriterAsync, close_writers
from distckpt.sharded import Sharded
from distckpt.storage import open_storage

try:
    import megatron.core
    from megatron.core.dist_checkpointing.core import CheckpointingConfig
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    from distckpt.integrations.megatron_load import LoadShardedStrategy, with_axes
    from distckpt.integrations.megatron_requests import AsyncCallsQueue, AsyncRequest, Commit
except ImportError as error:
    raise ConfigError(
        f"distckpt.integrations.megatron needs megatron-core, 0.16 to 0.19, and what that imports "
        f"(pip install 'megatron-core>=0.16,<0.20'): {error}"
    ) from error

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from distckpt import SaveHandle
    from distckpt.participants import Participants

    _Path = str | os.PathLike[str]

__all__ = [
    "AsyncCallsQueue",
    "AsyncRequest",
    "FileSystemWriterAsync",
    "LoadShardedStrategy",
    "SaveShardedStrategy",
    "Saver",
    "close_writers",
    "fsdp_dtensor_state",
    "save",
]

_LOG = logging.getLogger(__name__)
_BACKEND, _BACKEND_VERSION = "torch_dist", 1
_FIRST_VERSION, _END_VERSION = (0, 16), (0, 20)
_COMMON, _CONFIG = "common.pt", "metadata.json"
_MOST_FRAMES = 8
"""Between the wrapper's call and ours there are but its own decorators."""
_warned: set[str] = set()


def _warn_once(text: str, stacklevel: int = 3) -> None:
    if text not in _warned:
        _warned.add(text)
        _LOG.warning("%s", text)
        warnings.warn(text, DistckptWarning, stacklevel=stacklevel)


def _check_version(version: str) -> None:
    """Warn of a version of Megatron-Core whose interface is not known."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not _FIRST_VERSION <= (int(found[1]), int(found[2])) < _END_VERSION:
        _warn_once(
            f"distckpt.integrations.megatron knows megatron-core 0.16 to 0.19, and this is {version}: try a "
            f"save and a load before relying on them",
            stacklevel=4,
        )


_check_version(megatron.core.__version__)


class _Objects:
    """What the objects of one key are saved as: opaque for planners, and a list for whoever loads it."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = list(values)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (tuple(self.values),)


class SaveShardedStrategy(torch_strategies.TorchDistSaveShardedStrategy):
    """Saves sharded states of Megatron-Core; for `dist_checkpointing.save`, this module's `save`, and FSDP.

    With `ckpt_fully_parallel_save`, the default, ranks that have the same share the writing, as
    `FullyParallelSaveStrategyWrapper` does, but without its collectives, and split large tensors; without it,
    main replicas are written. Inside of that wrapper it writes what the wrapper says.

    Args:
        config: Settings; default: `CheckpointConfig()`. `async_save` is what the caller of the strategy says.
        participants: Who saves together, as for `Checkpointer`; default: all ranks. Megatron-Core's own
            `dist_checkpointing.save` involves all ranks of the job nevertheless: use `save` of this module.
        storage_options: Passed to fsspec as they are.
        **settings: Fields of `CheckpointConfig`, which override `config`.

    Raises:
        ConfigError: A setting cannot be honoured.
    """

    def __init__(
        self,
        config: CheckpointConfig | None = None,
        *,
        participants: Participants = None,
        storage_options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._config = CheckpointConfig.build(config, settings)
        if self._config.ckpt_format != _BACKEND:
            raise ConfigError(
                f"ckpt_format: Megatron-Core reads {_BACKEND}, and not {self._config.ckpt_format}"
            )
        super().__init__(_BACKEND, _BACKEND_VERSION, thread_count=self._config.dist_ckpt_workers)
        self._participants = participants
        self.storage_options = dict(storage_options or {})
        self._saver: Saver | None = None

    def save(self, sharded_state_dict: Any, checkpoint_dir: _Path, *_: Any, **__: Any) -> None:
        """Save, and return when the checkpoint is committed.

        Args:
            sharded_state_dict: Of `ShardedTensor` and `ShardedObject`.
            checkpoint_dir: Directory of the checkpoint.
            *_: What later versions pass.
            **__: What later versions pass.

        Raises:
            CheckpointError: The save failed, on all participants.
        """
        self.begin(sharded_state_dict, checkpoint_dir, wait=True)

    def async_save(
        self, sharded_state_dict: Any, checkpoint_dir: _Path, async_strategy: str = "mcore", **_: Any
    ) -> AsyncRequest:
        """Begin to save, and return when the state may change again; see `Checkpointer.save`.

        Args:
            sharded_state_dict: As `save`.
            checkpoint_dir: As `save`.
            async_strategy: Whose queue will have the request; it suits all of them.
            **_: What later versions pass.

        Returns:
            A request for a queue. The save is under way, and commits whether or not it is scheduled.

        Raises:
            CheckpointError: The state cannot be staged.
        """
        del async_strategy
        return AsyncRequest(None, (), [Commit(self.begin(sharded_state_dict, checkpoint_dir, wait=False))])

    def begin(
        self, sharded_state_dict: Any, checkpoint_dir: _Path, *, wait: bool, validate: bool = False
    ) -> SaveHandle:
        """Begin to save.

        Args:
            sharded_state_dict: As `save`.
            checkpoint_dir: As `save`.
            wait: Whether to return when it is committed.
            validate: Whether to check that there is one main replica of everything.

        Raises:
            CheckpointError: The save failed, or the state cannot be staged.
        """
        is_wrapped = _is_called_by_wrapper()
        if is_wrapped:
            _warn_once(
                "FullyParallelSaveStrategyWrapper exchanges metadata through collectives and divides the "
                "writing by whole tensors: SaveShardedStrategy shares it by itself, give it unwrapped"
            )
        shares = self._config.ckpt_fully_parallel_save and not is_wrapped
        state: dict[str, Any] = {}
        claims: list[Claim] = []
        failure: Exception | None = None
        try:
            with collector_paused():
                state, claims = state_of(sharded_state_dict, has_all_replicas=shares)
        except Exception as error:  # noqa: BLE001 - raised where the other ranks learn of it
            failure = error
        return self.saver(checkpoint_dir).save_to(
            checkpoint_dir,
            state,
            wait=wait,
            shares=shares,
            claims=claims if validate else None,
            failure=failure,
        )

    def saver(self, checkpoint_dir: _Path) -> Saver:
        """Return what saves; it is made by the first save, to whose kind of storage it keeps.

        Args:
            checkpoint_dir: Directory of that save.
        """
        if self._saver is None:
            self._saver = Saver(
                checkpoint_dir,
                self._config,
                participants=self._participants,
                storage_options=self.storage_options,
            )
        return self._saver

    def close(self) -> None:
        """Wait for saves that are under way, end workers and give memory back; idempotent.

        Raises:
            CheckpointError: A save failed whose result nobody has asked for.
        """
        if self._saver is not None:
            self._saver.close()


def _is_called_by_wrapper() -> bool:
    """Say whether Megatron-Core's wrapper has called the strategy, and so set the replica ids."""
    frame = inspect.currentframe()
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return False
        if isinstance(frame.f_locals.get("self"), FullyParallelSaveStrategyWrapper):
            return True
        frame = frame.f_back
    return False


def state_of(sharded_state_dict: Any, *, has_all_replicas: bool) -> tuple[dict[str, Any], list[Claim]]:
    """Return a sharded state of Megatron-Core as one of ours.

    Args:
        sharded_state_dict: Of `ShardedTensor` and `ShardedObject`.
        has_all_replicas: Whether to take tensors that are no main replicas, too.

    Returns:
        By key what this rank has, tensors as `Sharded`; and for each part whether it is a main replica.

    Raises:
        CheckpointError: A tensor has no data, or is flattened.
    """
    tensors: dict[str, dict[tuple[int, ...], Any]] = {}
    objects: dict[str, list[Any]] = {}
    claims: dict[tuple[str, tuple[int, ...] | None], Claim] = {}
    for entry in nested_values(sharded_state_dict):
        is_main = bool(is_main_replica(entry.replica_id))
        if isinstance(entry, ShardedObject):
            if is_main:
                key = entry.unique_key
                objects.setdefault(key, []).append(entry.data)
                size = int(torch.Size(entry.global_shape).numel())
                claims[key, None] = Claim(key, None, is_main, entry.key, size)
            continue
        if not isinstance(entry, ShardedTensor):
            raise CheckpointError(f"a sharded state holds a {type(entry).__name__}")
        _check(entry)
        place = tuple(entry.global_offset)
        known = claims.get((entry.key, place))
        claims[entry.key, place] = Claim(entry.key, place, is_main or (known is not None and known.is_main))
        if (is_main or has_all_replicas) and (known is None or not known.is_main):
            tensors.setdefault(entry.key, {})[place] = entry
    state: dict[str, Any] = {}
    for key, entries in tensors.items():
        shape = next(iter(entries.values())).global_shape
        boxes = [(place, with_axes(entry, entry.data)) for place, entry in entries.items()]
        state[key] = Sharded(shape, boxes)
    for key, values in objects.items():
        state[key] = _Objects(values)
    return state, list(claims.values())


def _check(entry: Any) -> None:
    if entry.data is None:
        raise CheckpointError(f"{entry.key!r} has no data: nothing can be saved of it")
    if getattr(entry, "flattened_range", None) is not None:
        raise CheckpointError(f"{entry.key!r} is flattened, which Megatron-Core from 0.14 on is not")


def save(
    sharded_state_dict: Any,
    checkpoint_dir: _Path,
    sharded_strategy: SaveShardedStrategy | None = None,
    common_strategy: None = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    content_metadata: dict[str, Any] | None = None,
    **_: Any,
) -> AsyncRequest | None:
    """Save as `megatron.core.dist_checkpointing.save` does, without a collective, among the participants.

    The integrity of access is validated by what the participants tell each other, when it was not the same
    the last time; gaps and overlaps are found when the checkpoint is published. The common state is that of
    the first participant; it is not compared with those of others.

    Args:
        sharded_state_dict: As there; factories are applied to it in place.
        checkpoint_dir: Directory of the checkpoint.
        sharded_strategy: The same object for all saves of a job: it keeps memory and workers.
        common_strategy: As there, None.
        validate_access_integrity: Whether there must be exactly one main replica of everything.
        async_sharded_save: Whether to return a request, when the state may change again.
        preprocess_common_before_consistancy_check: Not needed.
        content_metadata: As there.
        **_: What later versions pass.

    Returns:
        With `async_sharded_save` a request, which every participant must finalize.

    Raises:
        CheckpointError: The save failed, on all participants.
        ConfigError: An argument cannot be honoured.
    """
    del preprocess_common_before_consistancy_check
    if common_strategy is not None:
        raise ConfigError("common_strategy: there is only that of Megatron-Core, None")
    if not isinstance(sharded_strategy, SaveShardedStrategy):
        raise ConfigError(
            f"sharded_strategy: expected a SaveShardedStrategy of distckpt, got "
            f"{type(sharded_strategy).__name__}; keep one for all saves"
        )
    if content_metadata is not None:
        sharded_state_dict["content_metadata"] = content_metadata
    sharded, common = save_preprocess(sharded_state_dict, False)
    saver = sharded_strategy.saver(checkpoint_dir)
    text: bytes | Exception = b""
    if saver.is_first:
        # As it is now; what fails here is told to the others when they wait for it.
        try:
            data = io.BytesIO()
            torch.save(common, data)
            text = data.getvalue()
        except Exception as error:  # noqa: BLE001 - an object of the user's raises anything
            text = error
    handle = sharded_strategy.begin(
        sharded, checkpoint_dir, wait=not async_sharded_save, validate=validate_access_integrity
    )

    def finalize() -> None:
        if not saver.is_first:
            saver.await_announcement(handle)
            return
        try:
            if isinstance(text, Exception):
                raise CheckpointError(f"the common state cannot be saved: {text}") from text
            storage = open_storage(handle.path, sharded_strategy.storage_options)
            storage.put(_COMMON, text)
            # Last of all: without it, Megatron-Core sees no checkpoint.
            storage.put(_CONFIG, json.dumps(asdict(CheckpointingConfig(_BACKEND, _BACKEND_VERSION))).encode())
        except CheckpointError as error:
            saver.announce(handle, error)
            raise
        saver.announce(handle)

    if async_sharded_save:
        return AsyncRequest(None, (), [Commit(handle), finalize])
    finalize()
    return None

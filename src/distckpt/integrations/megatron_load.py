"""LoadShardedStrategy: loads what Megatron-Core's `torch_dist` format holds, whoever wrote it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from distckpt.config import CheckpointConfig
from distckpt.errors import CheckpointError
from distckpt.reader import StorageReader
from distckpt.sharded import Sharded

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    _Path = str | os.PathLike[str]


class LoadShardedStrategy(torch_strategies.TorchDistLoadShardedStrategy):
    """Loads checkpoints of Megatron-Core's `torch_dist`, whoever wrote them; for `dist_checkpointing.load`.

    Each rank reads what it needs by itself, with several threads, and compares it with the checksums of the
    commit, if distckpt wrote it. There is no collective here.

    Args:
        config: Settings; default: `CheckpointConfig()`.
        storage_options: Passed to fsspec as they are.
        verify: Whether to compare checksums.
        **settings: Fields of `CheckpointConfig`, which override `config`.

    Raises:
        ConfigError: A setting cannot be honoured.
    """

    def __init__(
        self,
        config: CheckpointConfig | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        verify: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__()
        self._config = CheckpointConfig.build(config, settings)
        self._storage_options = dict(storage_options or {})
        self._verify = verify

    def load(self, sharded_state_dict: Any, checkpoint_dir: _Path, *_: Any, **__: Any) -> Any:
        """Load what `sharded_state_dict` names.

        Args:
            sharded_state_dict: Of `ShardedTensor`, whose data is filled, or made if there is none, and
                `ShardedObject`.
            checkpoint_dir: Directory of the checkpoint.
            *_: What later versions pass.
            **__: What later versions pass.

        Returns:
            A state with the same containers, with tensors and objects.

        Raises:
            CheckpointError: It cannot be read, or does not fit.
            CheckpointingException: Megatron-Core says so.
        """
        reader = StorageReader(
            checkpoint_dir, self._config, storage_options=self._storage_options, verify=self._verify
        )
        targets = _Targets(sharded_state_dict)
        state, planner = targets.state, _LoadPlanner(targets.flexible)
        try:
            # Besides what torch admits: Megatron-Core's objects are lists of what it says is safe.
            with torch.serialization.safe_globals([list, *_safe_globals()]):
                _load_state_dict(state, reader, no_dist=True, planner=planner)
        except (CheckpointError, CheckpointingException):
            raise
        except BaseException as error:
            causes = [cause for cause, _ in getattr(error, "failures", {}).values()]
            for cause in causes:
                if isinstance(cause, (CheckpointError, CheckpointingException)):
                    raise cause from error
            raise
        targets.complete()
        self.cached_global_metadata = planner.metadata_read
        objects = {key: iter(value) for key, value in state.items() if isinstance(value, list)}

        def loaded(entry: Any) -> Any:
            return next(objects[entry.unique_key]) if isinstance(entry, ShardedObject) else entry.data

        return dict_list_map_outplace(loaded, sharded_state_dict)


def _safe_globals() -> list[Any]:
    """Return what Megatron-Core lets torch unpickle."""
    try:
        from megatron.core.safe_globals import SAFE_GLOBALS
    except ImportError:
        return []
    return list(SAFE_GLOBALS)


class _Targets:
    """What is to be filled.

    Attributes:
        state: By key.
        flexible: Keys that may have another shape in the checkpoint.
    """

    def __init__(self, sharded_state_dict: Any) -> None:
        self.state: dict[str, Any] = {}
        self.flexible: set[str] = set()
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        tensors: dict[str, dict[tuple[int, ...], Any]] = {}
        for entry in nested_values(sharded_state_dict):
            if isinstance(entry, ShardedObject):
                self.state[entry.unique_key] = None
                continue
            if entry.data is None:
                entry.init_data("cpu", torch.zeros if entry.allow_shape_mismatch else torch.empty)
            elif entry.allow_shape_mismatch:
                entry.data.detach().zero_()
            if entry.allow_shape_mismatch:
                self.flexible.add(entry.key)
            first = tensors.setdefault(entry.key, {}).setdefault(tuple(entry.global_offset), entry)
            if first is not entry:
                self._copies.append((entry.data, first.data))
        for key, places in tensors.items():
            shape = next(iter(places.values())).global_shape
            self.state[key] = Sharded(shape, [(at, with_axes(one, one.data)) for at, one in places.items()])

    def complete(self) -> None:
        """Fill what the state names more than once."""
        for target, source in self._copies:
            target.detach().copy_(source.detach())


class _LoadPlanner(DefaultLoadPlanner):
    """Checks global shapes; keys that may have another one in the checkpoint are loaded as far as they go."""

    def __init__(self, flexible: set[str]) -> None:
        super().__init__()
        self._flexible = flexible
        self.metadata_read: Metadata | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state, and the metadata with the shapes that are expected of flexible keys.

        Raises:
            CheckpointError: A key is not in the checkpoint, or has another shape there.
        """
        assert metadata is not None
        self.metadata_read = metadata
        entries = dict(metadata.state_dict_metadata)
        for key, value in state_dict.items():
            found = entries.get(key)
            if found is None:
                raise CheckpointError(f"{key!r} is not in the checkpoint")
            if isinstance(value, Sharded) and isinstance(found, TensorStorageMetadata):
                if key in self._flexible:
                    entries[key] = replace(found, size=value.size())
                elif found.size != value.size():
                    raise CheckpointError(
                        f"{key!r} has {tuple(found.size)} in the checkpoint, and is to have "
                        f"{tuple(value.size())}"
                    )
        super().set_up_planner(state_dict, replace(metadata, state_dict_metadata=entries), is_coordinator)


def with_axes(entry: Any, data: torch.Tensor) -> torch.Tensor:
    """Return `data` with as many dimensions as the global tensor has."""
    data = data.detach()
    for _ in range(entry.prepend_axis_num):
        data = data.unsqueeze(0)
    return data

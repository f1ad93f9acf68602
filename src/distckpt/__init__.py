"""Asynchronous checkpoint writer engine for PyTorch.

Importing this package imports nothing else: each public name is resolved when it is first used. Workers,
which must not import torch, run this file too.

Torch-free.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "Checkpointer",
    "CommitError",
    "ConfigError",
    "DistckptWarning",
    "IntegrityError",
    "MissingRanks",
    "PerRank",
    "SaveHandle",
    "SavePlanner",
    "Sharded",
    "StagingError",
    "StorageContract",
    "StorageReader",
    "StorageWriter",
    "WorkerDied",
    "WriteError",
    "add_arguments",
    "register_storage",
]

if TYPE_CHECKING:
    from distckpt.checkpointer import Checkpointer
    from distckpt.config import CheckpointConfig, add_arguments
    from distckpt.errors import (
        CheckpointError,
        CommitError,
        ConfigError,
        DistckptWarning,
        IntegrityError,
        MissingRanks,
        StagingError,
        WorkerDied,
        WriteError,
    )
    from distckpt.handle import SaveHandle
    from distckpt.planner import SavePlanner
    from distckpt.reader import StorageReader
    from distckpt.sharded import Sharded
    from distckpt.stateful import PerRank
    from distckpt.storage import register_storage
    from distckpt.storage.contract import StorageContract
    from distckpt.writer import StorageWriter

# Hidden from type checkers, which would otherwise accept every misspelt name.
if not TYPE_CHECKING:
    _MODULES = {
        "CheckpointConfig": "config",
        "add_arguments": "config",
        "Checkpointer": "checkpointer",
        "PerRank": "stateful",
        "SaveHandle": "handle",
        "SavePlanner": "planner",
        "Sharded": "sharded",
        "StorageContract": "storage.contract",
        "StorageReader": "reader",
        "StorageWriter": "writer",
        "register_storage": "storage",
    }

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f"distckpt.{_MODULES.get(name, 'errors')}"), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})

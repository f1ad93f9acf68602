"""The public names, and that importing the package costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import distckpt

PUBLIC = [
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


def test_public_surface_is_frozen() -> None:
    assert distckpt.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(distckpt))


@pytest.mark.parametrize("name", PUBLIC)
def test_name_is_resolved_on_first_use(name: str) -> None:
    value = getattr(distckpt, name)
    assert value.__name__ == name
    assert getattr(distckpt, name) is value


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'StorageWritr'"):
        distckpt.StorageWritr  # type: ignore[attr-defined]  # noqa: B018


def test_import_imports_nothing() -> None:
    code = (
        "import sys, typing; before = set(sys.modules); import distckpt; "
        "sys.exit(', '.join(set(sys.modules) - before - {'distckpt'}) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

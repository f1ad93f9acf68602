"""What every storage promises, of those that need no server."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from distckpt import storage as door
from distckpt.storage import Storage, open_storage, register_storage
from distckpt.storage.contract import StorageContract

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


class TestPosix(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return open_storage(tmp_path / "some" / "checkpoint")


class TestMemory(StorageContract):
    can_revoke = False

    @pytest.fixture
    def storage(self) -> Storage:
        return open_storage(f"memory://{uuid.uuid4().hex}/some/checkpoint")


class TestExample(StorageContract):
    """The storage that docs/storages.md takes for an example."""

    can_revoke = False

    @pytest.fixture
    def storage(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
        monkeypatch.setattr(door, "_FACTORIES", {})
        monkeypatch.syspath_prepend(str(EXAMPLES))
        register_storage("sqlite", "own_storage:SqliteStorage")
        return open_storage(f"sqlite://{tmp_path / 'run.db'}!step-1")


@pytest.mark.slow
def test_the_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "own_storage.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=55,
    )
    assert done.returncode == 0, done.stderr
    assert "loaded again" in done.stdout

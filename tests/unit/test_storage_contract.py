"""What every storage promises, of those that need no server."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from distckpt.storage import Storage, open_storage
from distckpt.storage.contract import StorageContract


class TestPosix(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return open_storage(tmp_path / "some" / "checkpoint")


class TestMemory(StorageContract):
    can_revoke = False

    @pytest.fixture
    def storage(self) -> Storage:
        return open_storage(f"memory://{uuid.uuid4().hex}/some/checkpoint")

"""A local storage of which one write takes until others have gone on."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distckpt.storage.posix import PosixImage, PosixStorage

if TYPE_CHECKING:
    import pytest

_LIMIT_S = 20.0


def hold_first_write(monkeypatch: pytest.MonkeyPatch, until_bytes: int) -> None:
    """Have lanes of this process write two parts at once, and the first write wait for others.

    Args:
        monkeypatch: Takes it back.
        until_bytes: How many bytes others must have written; if they do not, the write fails.
    """
    monkeypatch.setattr(PosixStorage, "in_flight", 2)
    written_bytes, is_held = 0, threading.Event()
    write = PosixImage.write

    def slow(
        image: PosixImage, offset: int, buffers: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        nonlocal written_bytes
        if not is_held.is_set():
            is_held.set()
            deadline = time.monotonic() + _LIMIT_S
            while written_bytes < until_bytes and time.monotonic() < deadline:
                time.sleep(0.001)
            assert written_bytes >= until_bytes, "the other lanes wait for this write"
        write(image, offset, buffers, crc32c)
        written_bytes += sum(buffer.nbytes for buffer in buffers)

    monkeypatch.setattr(PosixImage, "write", slow)

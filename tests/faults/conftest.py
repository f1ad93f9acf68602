"""Fixtures of the fault tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from distckpt import StorageWriter
from faults.programs import Programs, Zygote

OpenWriter = Callable[..., StorageWriter]


@pytest.fixture
def open_writer() -> Iterator[OpenWriter]:
    """Opens writers that are closed after the test, when its variables hold no error any more."""
    opened: list[StorageWriter] = []

    def open_one(**settings: Any) -> StorageWriter:
        # A wait that should not be there ends with the test.
        opened.append(StorageWriter(**{"distributed_timeout_minutes": 0.5} | settings))
        return opened[-1]

    yield open_one
    for writer in opened:
        writer.close()


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    opened = Zygote()
    yield opened
    opened.close()


@pytest.fixture
def programs(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Programs that have torch imported already and end with the test."""
    started = Programs(zygote, tmp_path_factory.mktemp("programs"))
    yield started
    for child in started.children:
        child.end()

"""Fixtures of the tests with several ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from integration.ranks.world import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Runs functions on worlds of gloo ranks."""
    world = Ranks()
    yield world
    world.close()

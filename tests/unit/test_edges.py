"""What steps lose where saves begin and end, told from steps that change their speed by themselves."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

STEP_S, SAVE_S, GAP_S, CALL_S = 0.003, 1.0, 0.6, 0.002


@pytest.fixture(autouse=True, scope="module")
def edges() -> Iterator[Any]:
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    yield importlib.import_module("edges")
    sys.path.remove(folder)


def timeline(edges: Any, saves: int, slower: float, edges_slower: float, seed: int) -> Any:
    """Return steps that take turns between two speeds, and are slower by known parts while saves go on.

    By one as long as they do, by another at their begin and their end.
    """
    chance, found, speed = random.Random(seed), edges.Edges(), 1.0
    now_s, until_s, since_s = 0.0, GAP_S, None
    change_s = 0.5
    while len(found.ends) < saves or now_s < until_s:
        if now_s > change_s:
            speed, change_s = 2.5 - speed, now_s + chance.uniform(0.3, 2.0)
        if now_s >= until_s and since_s is None:
            found.begins.append(len(found.steps))
            found.calls.append(CALL_S)
            found.steps.append(STEP_S * speed + CALL_S)
            since_s = now_s + found.steps[-1]
        else:
            if since_s is not None and now_s >= since_s + SAVE_S:
                found.ends.append(len(found.steps))
                since_s, until_s = None, now_s + GAP_S
            change = 0.0
            if since_s is not None:
                at_an_edge = now_s < since_s + 0.03 or now_s >= since_s + SAVE_S - edges.BESIDE_S
                change = slower + (edges_slower if at_an_edge else 0.0)
            found.steps.append(STEP_S * speed * chance.gauss(1.0, 0.01) * (1 + change))
        now_s += found.steps[-1]
    return found


@pytest.mark.parametrize("slower", [0.0, 0.005, 0.05])
def test_a_slowdown_is_told_from_speeds_that_change(edges: Any, slower: float) -> None:
    found = timeline(edges, 40, slower, 0.1, seed=1)
    changes = found.changes()
    assert {len(samples) for samples in changes.values()} == {40}
    first, *others = (edges.window_name(*window) for window in edges.WINDOWS)
    for window in (first, "end"):
        assert sorted(changes[window])[20] == pytest.approx(slower + 0.1, abs=0.01)
    for window in (*others, "writing"):
        low, high = edges.interval(changes[window])
        assert low - 0.001 <= slower <= high + 0.001, window
    at_edges_s = (0.03 + edges.BESIDE_S) * 0.1 / (1 + 0.1 + slower)
    expected = (SAVE_S * slower / (1 + slower) + at_edges_s + CALL_S) / (SAVE_S + CALL_S)
    assert edges.lost(changes, sorted(found.seconds())[20], CALL_S) == pytest.approx(expected, abs=0.003)


def test_a_save_of_two_steps_reaches_no_window(edges: Any) -> None:
    found = edges.Edges([0.01] * 50, begins=[20], ends=[23], calls=[0.001])
    assert found.changes() == {"end": [pytest.approx(0.0)]}
    assert found.seconds() == [pytest.approx(0.02)]
    assert edges.lost({}, 1.0, 0.01) == pytest.approx(0.01 / 1.01)


def test_what_publishing_costs_counts_once(edges: Any) -> None:
    """It is not taken for what every moment of a save costs."""
    assert edges.lost({"writing": [0.0], "end": [1.0]}, 2.0, 0.0) == pytest.approx(edges.BESIDE_S / 2 / 2)

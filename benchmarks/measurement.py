"""Samples taken alternately, and the table made of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

Figures = dict[str, float]
Samples = dict[str, dict[str, list[float]]]
"""For each candidate and each of its figures, one value for each repetition."""


class Stopwatch:
    """Adds up seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of a `with` block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started


@dataclass
class Row:
    """One comparison: `ratio` says how many times better `ours` is than `reference`."""

    ratio: float
    what: str
    ours: str
    reference: str
    bar: str = ""


@dataclass
class Outcome:
    """What a theme found."""

    title: str
    config: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    first: Samples = field(default_factory=dict)
    samples: Samples = field(default_factory=dict)

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def alternate(candidates: Mapping[str, Callable[[], Figures]], repeats: int) -> tuple[Samples, Samples]:
    """Run every candidate once, then all of them in turn `repeats` times; returns first and later samples.

    A machine that is busy for a while is so for all candidates, and ratios of medians keep their meaning.
    Every second turn goes backwards: what one leaves to disk and caches does not always meet the same one.
    """
    first: Samples = {}
    samples: Samples = {}
    for turn in range(repeats + 1):
        order = list(candidates.items())
        for name, candidate in reversed(order) if turn % 2 else order:
            gc.collect()
            kept = samples if turn else first
            for figure, value in candidate().items():
                kept.setdefault(name, {}).setdefault(figure, []).append(round(value, 6))
    return first, samples


def middle(samples: Samples, name: str, figure: str) -> float:
    return median(samples[name][figure])


def table(outcome: Outcome) -> str:
    """Return the rows as plain text, the ratio first."""
    cells = [("ratio", "bar", "what", "distckpt", "compared with")]
    cells += [(f"{row.ratio:.2f}x", row.bar, row.what, row.ours, row.reference) for row in outcome.rows]
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([outcome.title, *(f"  {line.rstrip()}" for line in lines)])

"""What steps of a training loop lose where saves begin and end: each beside the steps next to it.

Steps that are bound by their launches take turns between two speeds for seconds at a time where the cores are
shared with other machines: means over whole phases do not tell a slowdown of less than some per cent. Those a
tenth of a second apart mostly have one speed, and the median over many saves leaves out where it changed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import mean, median

WINDOWS = ((0.0, 0.03), (0.03, 0.08), (0.08, 0.2), (0.2, 0.5))
"""Seconds after the step in which a save is asked for, of which the call alone counts.

What comes after the last is measured where saves end."""
ENDS = {"writing": (0.3, 0.1), "end": (0.1, 0.0)}
"""Seconds before a save has ended: while its last parts are written, and while it is published, once."""
BESIDE_S = 0.1
"""Of the steps before a save, and after it."""
_DRAWS = 2000


@dataclass
class Edges:
    """Steps without a gap, and where among them saves began and ended.

    Attributes:
        steps: Seconds of each step.
        begins: Index of the step in which each save was asked for.
        ends: Index of the first step after it was committed.
        calls: Seconds of each call, which are a part of its step.
    """

    steps: list[float] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)

    def changes(self) -> dict[str, list[float]]:
        """Return by how much the mean step changes: of each save, in each window and where it ends.

        A window that a save does not reach, or that has no step, is left out.
        """
        starts = [0.0, *accumulate(self.steps)]

        def mean_in(low_s: float, high_s: float) -> float | None:
            found = [
                step for step, start_s in zip(self.steps, starts, strict=False) if low_s <= start_s < high_s
            ]
            return mean(found) if found else None

        found: dict[str, list[float]] = {}

        def compare(name: str, mine: float | None, other: float | None) -> None:
            if mine is not None and other is not None:
                found.setdefault(name, []).append(mine / other - 1)

        for begin, end in zip(self.begins, self.ends, strict=False):
            since_s, until_s = starts[begin + 1], starts[end]
            before = mean_in(starts[begin] - BESIDE_S, starts[begin])
            for low_s, high_s in WINDOWS:
                if since_s + high_s <= until_s:
                    compare(window_name(low_s, high_s), mean_in(since_s + low_s, since_s + high_s), before)
            after = mean_in(until_s, until_s + BESIDE_S)
            for name, (first_s, last_s) in ENDS.items():
                # One that has no other window has but its end.
                if name == "end" or since_s <= until_s - first_s:
                    compare(name, mean_in(until_s - first_s, until_s - last_s), after)
        return found

    def seconds(self) -> list[float]:
        """Return how long each save took, from the step after its call."""
        starts = [0.0, *accumulate(self.steps)]
        return [starts[end] - starts[begin + 1] for begin, end in zip(self.begins, self.ends, strict=False)]


def window_name(low_s: float, high_s: float) -> str:
    """Return what a window is called."""
    return f"{1000 * low_s:.0f} to {1000 * high_s:.0f} ms"


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """Return between what the median lies with 90 % confidence, by drawing samples again (bootstrap)."""
    chance = random.Random(0)
    found = sorted(median(chance.choices(samples, k=len(samples))) for _ in range(_DRAWS))
    return found[_DRAWS // 20], found[-1 - _DRAWS // 20]


def lost(changes: dict[str, list[float]], save_s: float, call_s: float) -> float:
    """Return the share of a save's time that its steps lose: the call, the windows, and the rest.

    The rest is taken to lose what steps lose while the last parts are written.

    Args:
        changes: From `Edges.changes`.
        save_s: Seconds of a save after the call.
        call_s: Seconds of the call.
    """
    widths = {window_name(low_s, high_s): high_s - low_s for low_s, high_s in WINDOWS}
    widths["end"] = BESIDE_S
    # What a slowed step takes more, of the time that it took.
    shares = {name: median(samples) / (1 + median(samples)) for name, samples in changes.items() if samples}
    known = {name: width for name, width in widths.items() if name in shares}
    lost_s = call_s + sum(width * shares[name] for name, width in known.items())
    rest = shares.get("writing", shares.get("end", 0.0))
    lost_s += max(0.0, save_s - sum(known.values())) * rest
    return lost_s / (save_s + call_s)

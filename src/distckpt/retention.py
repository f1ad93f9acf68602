"""Which checkpoints are kept, and the file that names the latest.

Invariants:
    * The checkpoint that was committed last is never removed, nor that with the highest step: after a run
      went back these are two.
    * What is removed stops being a checkpoint before any of its files goes.
    * The file `latest` names a checkpoint that is committed; it is replaced after the commit, in one step.

Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from distckpt.config import CheckpointConfig

__all__ = ["LATEST", "Saved", "committed_at", "kept_steps"]

LATEST = "latest"
"""A file with the name of the latest step's directory, for people and scripts; nothing here trusts it."""
_HOUR_S = 3600.0


@dataclass(frozen=True)
class Saved:
    """What retention goes by.

    Attributes:
        step: Step of a committed checkpoint.
        time_s: When it was committed, in seconds since the epoch; None if nothing tells.
        metric: What `save` was given; None if nothing.
    """

    step: int
    time_s: float | None = None
    metric: float | None = None


def kept_steps(saved: Collection[Saved], config: CheckpointConfig) -> set[int]:
    """Return the steps that stay: what any of the policies asks for, and always the newest.

    Args:
        saved: All committed checkpoints.
        config: Its `keep_` settings; without any of them all stay.
    """
    steps = sorted(one.step for one in saved)
    if not config.has_retention:
        return set(steps)
    kept = set(steps[-(config.keep_last or 1) :])
    kept |= {one.step for one in [max(saved, key=committed_at, default=None)] if one is not None}
    if config.keep_every is not None:
        kept |= {step for step in steps if step % config.keep_every == 0}
    if config.keep_best is not None:
        kept |= set(_best(saved, config.keep_best, config.keep_best_mode))
    if config.keep_hourly is not None:
        kept |= set(_newest_of_hours(saved, config.keep_hourly))
    return kept


def committed_at(one: Saved) -> tuple[float, int]:
    """Return what orders checkpoints by when they were committed."""
    return (-1.0 if one.time_s is None else one.time_s), one.step


def _best(saved: Iterable[Saved], count: int, mode: str) -> list[int]:
    """Return the steps with the best metrics; of equal ones the newer, and none whose metric is no number."""
    sign = 1.0 if mode == "min" else -1.0
    measured = [
        (sign * one.metric, -one.step, one.step)
        for one in saved
        if one.metric is not None and one.metric == one.metric
    ]
    return [step for _, _, step in sorted(measured)[:count]]


def _newest_of_hours(saved: Iterable[Saved], count: int) -> list[int]:
    """Return the newest step of each of the last hours of the clock in which something was saved."""
    newest: dict[int, int] = {}
    for one in saved:
        if one.time_s is not None:
            hour = int(one.time_s // _HOUR_S)
            newest[hour] = max(one.step, newest.get(hour, one.step))
    return [newest[hour] for hour in sorted(newest)[-count:]]

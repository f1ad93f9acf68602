"""Which checkpoints stay: what any policy asks for, never less than the last that was committed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distckpt.config import CheckpointConfig
from distckpt.retention import Saved, kept_steps

HOUR_S = 3600.0
METRICS = st.none() | st.floats(-5, 5) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0])
COUNTS = st.none() | st.integers(1, 4)


@st.composite
def histories(draw: st.DrawFn) -> list[Saved]:
    """Checkpoints of a run that never went back: later steps are saved later."""
    steps = sorted(draw(st.sets(st.integers(0, 60), max_size=12)))
    pauses = draw(st.lists(st.floats(0, 3 * HOUR_S), min_size=len(steps), max_size=len(steps)))
    found, time_s = [], 1.7e9
    for step, pause in zip(steps, pauses, strict=True):
        time_s += pause
        found.append(Saved(step, time_s, draw(METRICS)))
    return found


@st.composite
def policies(draw: st.DrawFn) -> CheckpointConfig:
    settings: dict[str, Any] = {
        name: draw(COUNTS) for name in ("keep_last", "keep_every", "keep_best", "keep_hourly")
    }
    if settings["keep_best"] is not None:
        settings["keep_best_mode"] = draw(st.sampled_from(["min", "max"]))
    return CheckpointConfig.from_mapping(settings)


def kept(saved: list[Saved], **settings: Any) -> set[int]:
    return kept_steps(saved, CheckpointConfig.from_mapping(settings))


def steps_of(saved: list[Saved]) -> list[int]:
    return sorted(one.step for one in saved)


@given(histories())
def test_without_a_policy_all_stay(saved: list[Saved]) -> None:
    assert kept(saved) == set(steps_of(saved))


@given(histories(), policies(), st.randoms())
def test_the_newest_stays_whatever_is_asked_for(
    saved: list[Saved], config: CheckpointConfig, chance: Any
) -> None:
    found = kept_steps(saved, config)
    assert found <= set(steps_of(saved))
    assert set(steps_of(saved)[-1:]) <= found
    shuffled = list(saved)
    chance.shuffle(shuffled)
    assert kept_steps(shuffled, config) == found, "in whatever order they are listed"


@given(histories(), policies())
def test_policies_add_up(saved: list[Saved], config: CheckpointConfig) -> None:
    each = [
        kept(saved, **{name: getattr(config, name)}, **mode)
        for name in ("keep_last", "keep_every", "keep_best", "keep_hourly")
        if getattr(config, name) is not None
        for mode in [{"keep_best_mode": config.keep_best_mode} if name == "keep_best" else {}]
    ]
    assert kept_steps(saved, config) == (set().union(*each) if each else set(steps_of(saved)))


@given(histories(), policies(), st.floats(0, 3 * HOUR_S), METRICS)
def test_what_is_gone_is_never_asked_for_again(
    saved: list[Saved], config: CheckpointConfig, pause_s: float, metric: float | None
) -> None:
    """Removing as the run goes on keeps what would be kept of the whole history."""
    remaining = [one for one in saved if one.step in kept_steps(saved, config)]
    assert kept_steps(remaining, config) == set(steps_of(remaining))
    last = max(saved, key=lambda one: one.step, default=Saved(0, 1.7e9))
    assert last.time_s is not None
    new = Saved(last.step + 1, last.time_s + pause_s, metric)
    assert kept_steps([*remaining, new], config) == kept_steps([*saved, new], config)


@given(histories(), st.integers(1, 5))
def test_the_last(saved: list[Saved], count: int) -> None:
    assert kept(saved, keep_last=count) == set(steps_of(saved)[-count:])


@given(histories(), st.integers(1, 9))
def test_every_so_many_steps(saved: list[Saved], every: int) -> None:
    multiples = {step for step in steps_of(saved) if step % every == 0}
    assert kept(saved, keep_every=every) == multiples | set(steps_of(saved)[-1:])


@given(histories(), st.integers(1, 5), st.sampled_from(["min", "max"]))
def test_the_best(saved: list[Saved], count: int, mode: str) -> None:
    sign = 1 if mode == "min" else -1
    measured = {one.step: sign * one.metric for one in saved if one.metric is not None}
    measured = {step: metric for step, metric in measured.items() if not math.isnan(metric)}
    expected = set(steps_of(saved)[-1:])
    for step, metric in measured.items():
        before = [
            other for other, its in measured.items() if its < metric or (its == metric and other > step)
        ]
        if len(before) < count:
            expected.add(step)
    assert kept(saved, keep_best=count, keep_best_mode=mode) == expected


def test_of_equally_good_ones_the_newer_stays() -> None:
    saved = [Saved(step, step, 1.0) for step in range(4)] + [Saved(4, 4.0, 2.0)]
    assert kept(saved, keep_best=2) == {2, 3, 4}
    assert kept(saved, keep_best=2, keep_best_mode="max") == {3, 4}


@given(histories(), st.integers(1, 4))
def test_the_newest_of_each_hour(saved: list[Saved], count: int) -> None:
    hours: dict[int, list[int]] = {}
    for one in saved:
        assert one.time_s is not None
        hours.setdefault(int(one.time_s // HOUR_S), []).append(one.step)
    expected = {max(hours[hour]) for hour in sorted(hours)[-count:]}
    assert kept(saved, keep_hourly=count) == expected | set(steps_of(saved)[-1:])


def test_hours_without_a_checkpoint_are_not_counted() -> None:
    saved = [Saved(step, hour * HOUR_S + 7) for step, hour in enumerate([0, 0, 5, 5, 9, 30])]
    assert kept(saved, keep_hourly=3) == {3, 4, 5}


def test_what_nothing_is_known_of_is_none_of_the_best_and_of_no_hour() -> None:
    saved = [Saved(0), Saved(1, 10.0, 3.0), Saved(2)]
    assert kept(saved, keep_best=3) == {1, 2}
    assert kept(saved, keep_hourly=3) == {1, 2}


@pytest.mark.parametrize(
    "settings", [{"keep_last": 1}, {"keep_best": 1}, {"keep_every": 7}, {"keep_hourly": 1}], ids=str
)
def test_what_was_committed_last_stays_after_the_run_went_back(settings: dict[str, Any]) -> None:
    """Step 8 was damaged, so the run went on from step 4: step 5 is the one that it lives on."""
    saved = [Saved(4, 1000.0, 2.0), Saved(8, 2000.0, 1.0), Saved(5, 3000.0, 3.0)]
    assert 5 in kept(saved, **settings)

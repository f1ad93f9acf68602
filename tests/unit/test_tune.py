"""The choice of settings from what was measured, and what is refused before anything is written."""

from __future__ import annotations

import json
import math
import os
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distckpt import tune
from distckpt.config import CheckpointConfig
from distckpt.errors import ConfigError
from distckpt.tune import (
    BUCKETS,
    Trial,
    Tuning,
    choose,
    default_workers,
    noise_of,
    plain_write,
    reason_for,
    sweep,
)

MIB = 1 << 20
GIB = 1 << 30


def trial(workers: int, *seconds: float) -> Trial:
    return Trial("workers", workers, None, True, GIB, list(seconds))


def test_the_fastest_is_chosen_if_it_is_faster_beyond_noise() -> None:
    trials = [trial(1, *2 * [2.0, 2.1, 1.9]), trial(2, *2 * [1.0, 1.1, 0.9]), trial(4, *2 * [1.5, 1.6, 1.4])]
    assert choose(trials).workers == 2
    reason = reason_for(trials, {})
    assert reason.startswith("2 workers: 1.00 GiB/s, the fastest (1 worker 0.50, 4 workers 0.67; noise ±10%)")


def test_the_fewest_workers_are_chosen_that_are_as_fast_but_for_noise() -> None:
    trials = [
        trial(1, *2 * [2.0, 2.1, 1.9]),
        trial(2, *2 * [1.05, 1.15, 0.95]),
        trial(4, *2 * [1.0, 1.1, 0.9]),
    ]
    assert choose(trials).workers == 2
    reason = reason_for(trials, {"page cache, 4 files": [1.0, 9.0, 2.0], "O_DIRECT, 4 files": [0.5]})
    assert reason == (
        "2 workers: 0.95 GiB/s, nearly as fast as 4 workers (1 worker 0.50, 4 workers 1.00; "
        "noise ±14%): "
        "fewer workers leave memory and cores to the trainer; "
        "48% of plain writes (page cache, 4 files: 2.00 GiB/s)"
    )


def test_one_save_that_something_held_up_is_no_noise() -> None:
    saves = [1.0, 1.0, 9.0, 1.0, 1.0], [1.0, 1.02, 0.98, 1.0, 1.0]
    assert noise_of([trial(1, *saves[0]), trial(2, *saves[1])]) == tune._LEAST_NOISE
    assert choose([trial(1, 1.2, 1.2, 9.0, 1.2, 1.2), trial(2, *saves[1])]).workers == 2


def test_noise_of_few_samples_is_assumed() -> None:
    # Saves that were alike by chance: in the next stage the same setting took a fifth longer.
    assert noise_of([trial(1, 1.0, 1.0), trial(2, 3.0, 3.0)]) == tune._UNKNOWN_NOISE
    assert choose([trial(1, 1.2, 1.2, 1.2), trial(2, 1.0, 1.0, 1.0)]).workers == 1
    assert "assumed: there was time for 3" in reason_for([trial(1, *[1.2] * 3), trial(2, *[1.0] * 3)], {})
    assert noise_of([trial(1, 1.0), trial(2, 3.0)]) == tune._UNKNOWN_NOISE
    assert choose([trial(1, 1.09), trial(2, 1.0)]).workers == 1
    assert choose([trial(1, 1.3), trial(2, 1.0)]).workers == 2
    assert "assumed" in reason_for([trial(1, 1.09), trial(2, 1.0)], {})
    assert "nothing else was tried" in reason_for([trial(3, 1.0)], {})


samples = st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=7)


@given(st.lists(samples, min_size=1, max_size=5), st.floats(0.01, 100.0))
def test_the_choice_is_within_noise_of_the_best_and_nobody_before_it_is(
    all_samples: list[list[float]], factor: float
) -> None:
    trials = [trial(number + 1, *each) for number, each in enumerate(all_samples)]
    chosen = choose(trials)
    margin = max(noise_of(trials), tune._LEAST_GAIN)
    limit_s = min(statistics.median(each) for each in all_samples) * (1 + margin)
    assert statistics.median(chosen.seconds) <= limit_s
    assert all(statistics.median(each.seconds) > limit_s for each in trials[: chosen.workers - 1])
    assert chosen.label in reason_for(trials, {"any": [1.0]})
    # Another unit, or a machine that is slower in all, changes nothing but for rounding at the limit.
    if not any(math.isclose(statistics.median(each), limit_s) for each in all_samples):
        scaled = [trial(each.workers, *(factor * second for second in each.seconds)) for each in trials]
        assert choose(scaled).workers == chosen.workers


def test_labels_say_what_is_compared() -> None:
    def label(stage: str, **changes: Any) -> str:
        settings: dict[str, Any] = {"workers": 2, "bucket_bytes": 8 * MIB, "direct_io": False} | changes
        return Trial(stage, **settings, nbytes=1, seconds=[1.0]).label

    assert [label("workers"), label("workers", workers=1)] == ["2 workers", "1 worker"]
    assert [label("buckets"), label("buckets", bucket_bytes=None)] == ["8MiB", "auto"]
    assert [label("direct"), label("direct", direct_io=True)] == ["page cache", "O_DIRECT"]
    assert label("parts", parts_at_once=8) == "8 at once"


def test_a_tuning_is_plain_json() -> None:
    trials = [trial(2, 0.5, 0.25)]
    found = Tuning("/x", GIB, 1.5, trials, {"O_DIRECT": [1.0]}, ["--a 1"], ["for b"], {"c": 2}, ["for d"])
    told = json.loads(json.dumps(found.as_dict()))
    assert told["trials"][0] == {
        "stage": "workers", "workers": 2, "bucket_bytes": None, "direct_io": True, "nbytes": GIB,
        "seconds": [0.5, 0.25], "write_seconds": [], "gib_per_s": 1 / 0.375, "parts_at_once": None,
    }  # fmt: skip
    del told["trials"]
    assert told == {
        "path": "/x", "nbytes": GIB, "seconds": 1.5, "ceilings": {"O_DIRECT": [1.0]}, "flags": ["--a 1"],
        "reasons": ["for b"], "options": {"c": 2}, "option_reasons": ["for d"],
    }  # fmt: skip


@pytest.mark.parametrize(("cores", "expected"), [(1, (1,)), (2, (1, 2)), (7, (1, 2, 4)), (64, (1, 2, 4, 8))])
def test_default_workers_are_no_more_than_the_cores(
    cores: int, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert default_workers() == expected


def test_every_bucket_that_is_tried_is_a_setting() -> None:
    for nbytes in BUCKETS:
        assert CheckpointConfig(ckpt_bucket_bytes=nbytes).bucket_bytes() == nbytes


@pytest.mark.parametrize(
    ("nbytes", "files", "share"), [(1, 1, 4096), (5 * MIB, 2, 5 * MIB // 2), (MIB, 3, 352256)]
)
def test_plain_writes_write_all_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, files: int, share: int
) -> None:
    sizes = []
    unlink = os.unlink

    def note(path: str) -> None:
        sizes.append(os.stat(path).st_size)
        unlink(path)

    monkeypatch.setattr(os, "unlink", note)
    assert plain_write(tmp_path, nbytes, direct=False, files=files) > 0
    assert sizes == [share] * files
    assert not list(tmp_path.iterdir())


def test_plain_writes_that_are_refused_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "plain-1").mkdir()
    with pytest.raises(OSError, match="plain-1"):
        plain_write(tmp_path, MIB, direct=False, files=2)
    assert [path.name for path in tmp_path.iterdir()] == ["plain-1"]


# What is refused.


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"workers": [2, 0]}, r"workers: expected integers of at least 1, got \[2, 0\]"),
        ({"workers": []}, "workers: expected"),
        ({"workers": [True]}, "workers: expected"),
        ({"workers": ["2", 1]}, "workers: expected"),
        ({"nbytes": 0}, "nbytes: expected at least 1048576, got 0"),
        ({"seconds": 0}, "seconds: expected"),
        ({"seconds": math.nan}, "seconds: expected"),
        ({"seconds": math.inf}, "seconds: expected"),
        ({"nbytes": 1 << 50}, "saves of 1048576.00 GiB are too large: host memory must hold 5 of them, and"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_written(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{reason}"):
        sweep(tmp_path, **{"workers": [1], "buckets": [8 * MIB], **settings})
    assert not list(tmp_path.iterdir())


def test_too_little_space_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statvfs = os.statvfs

    def nearly_full(path: str) -> os.statvfs_result:
        found = list(statvfs(path))
        found[1], found[4] = 4096, 7 * MIB // 4096
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", nearly_full)
    reason = f"of 4 MiB are too large: {tmp_path} must have room for 2 of them, and 7 MiB are free: at most 4"
    with pytest.raises(ConfigError, match=reason):
        sweep(tmp_path, nbytes=4 * MIB)
    assert not list(tmp_path.iterdir())


def test_a_target_that_is_no_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        with pytest.raises(ConfigError, match=f"there is no directory {tmp_path / name}$"):
            sweep(tmp_path / name)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be written to"):
        sweep(tmp_path)
    with pytest.raises(ConfigError, match="fsspec cannot open"):
        sweep("nosuch://x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

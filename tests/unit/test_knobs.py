"""Each setting does what it says, where it is set: by name, by flag, or in the section of another program."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from distckpt import Checkpointer, CheckpointError, ConfigError, StagingError, WriteError, observe
from distckpt.config import CheckpointConfig, add_arguments
from distckpt.lanes import WorkerLanes

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
WAIT_S = 20.0
Open = Callable[..., Checkpointer]


@pytest.fixture
def open_one(tmp_path: Path) -> Iterator[Open]:
    """Opens checkpointers of directories of their own; their failures are not raised at the end."""
    opened: list[Checkpointer] = []

    def open_one(**settings: Any) -> Checkpointer:
        opened.append(Checkpointer(tmp_path / f"{len(opened)}", **settings))
        return opened[-1]

    yield open_one
    for one in opened:
        one.__exit__(KeyError)


def root_of(checkpointer: Checkpointer) -> Path:
    return Path(checkpointer._archive.url)


def small(step: int = 0) -> dict[str, Any]:
    return {"t": torch.full((5,), float(step))}


def fail(checkpointer: Checkpointer, *steps: int) -> None:
    for step in steps:
        (root_of(checkpointer) / f"step-{step:08}").mkdir(parents=True, exist_ok=True)
        (root_of(checkpointer) / f"step-{step:08}" / ".metadata" / "x").mkdir(parents=True)


@contextmanager
def slowly(seconds: float) -> Iterator[None]:
    """Have every save take so long."""
    pause = threading.Event()
    end = observe.subscribe(lambda event: pause.wait(seconds) if event.name == "files.written" else None)
    try:
        yield
    finally:
        pause.set()
        end()


def save_all(checkpointer: Checkpointer, steps: int, **metrics: Callable[[int], float]) -> list[int]:
    """Save `steps` steps, and return those that stay."""
    for step in range(steps):
        checkpointer.save(step, small(step), **{name: of(step) for name, of in metrics.items()})
    cleaner = checkpointer._archive._cleaner
    if cleaner is not None:
        cleaner.submit(lambda: None).result(WAIT_S)
    return checkpointer.steps()


def workers(open_one: Open) -> list[object]:
    found: list[object] = []
    for settings in ({}, {"dist_ckpt_workers": 2}):
        checkpointer = open_one(**settings)
        checkpointer.save(0, small())
        lanes = checkpointer._engine.lanes
        found.append(len(lanes.pids) if isinstance(lanes, WorkerLanes) else None)
    return found


def cores(open_one: Open) -> list[object]:
    allowed = os.sched_getaffinity(0)
    one = min(allowed)
    found: list[object] = []
    for settings in ({}, {"ckpt_worker_cores": str(one)}):
        checkpointer = open_one(dist_ckpt_workers=2, **settings)
        checkpointer.save(0, small())
        lanes = checkpointer._engine.lanes
        assert isinstance(lanes, WorkerLanes)
        pinned = {frozenset(os.sched_getaffinity(pid)) for pid in lanes.pids}
        found.append(pinned == {frozenset({one} if settings else allowed)})
    return found


def in_background(open_one: Open) -> list[object]:
    found: list[object] = []
    with slowly(0.2):
        for settings in ({}, {"async_save": True}):
            found.append(bool(open_one(**settings).save(0, small()).committed))
    return found


def deadline(open_one: Open) -> list[object]:
    checkpointer = open_one(async_save=True, ckpt_host_memory=24 * MIB, distributed_timeout_minutes=0.005)
    gate = threading.Event()
    checkpointer._thread.submit(gate.wait, WAIT_S)
    state = {"t": torch.zeros(6 * MIB, dtype=torch.uint8)}
    checkpointer.save(0, state)
    started = time.monotonic()
    with pytest.raises(StagingError, match="waited"):
        checkpointer.save(1, state)
    gate.set()
    return [0.2 < time.monotonic() - started < 20]


def layout(open_one: Open) -> list[object]:
    found: list[object] = []
    for settings in ({}, {"ckpt_format": "safetensors"}, {"ckpt_format": "zarr"}):
        checkpointer = open_one(**settings)
        checkpointer.save(0, small())
        names = [path.name for path in (root_of(checkpointer) / "step-00000000").rglob("*")]
        found.append([any(name.endswith(end) for name in names) for end in (".safetensors", "zarr.json")])
    return found


def objects(open_one: Open) -> list[object]:
    found: list[object] = []
    for settings in ({}, {"ckpt_objects": "sidecar"}):
        checkpointer = open_one(ckpt_format="safetensors", **settings)
        state = {**small(), "object": {1, 2}}
        try:
            checkpointer.save(0, state)
        except CheckpointError:
            found.append("refused")
        else:
            target: dict[str, Any] = {**small(), "object": None}
            checkpointer.restore(target)
            found.append(target["object"])
    return found


def memory(open_one: Open) -> list[object]:
    return [open_one(ckpt_host_memory=size)._engine.arena.budget_bytes for size in ("24MiB", 32 * MIB)]


def failures(open_one: Open) -> list[object]:
    found: list[object] = []
    for policy in ("raise", "warn", "retry"):
        checkpointer = open_one(ckpt_on_failure=policy, log_level="error")
        fail(checkpointer, 0)
        timer = threading.Timer(0.3, repair, (root_of(checkpointer), 0))
        timer.start()
        try:
            found.append(bool(checkpointer.save(0, small()).committed))
        except WriteError:
            found.append("raised")
        timer.join()
    return found


def repair(root: Path, step: int) -> None:
    folder = root / f"step-{step:08}" / ".metadata"
    (folder / "x").rmdir()
    folder.rmdir()


def too_many(open_one: Open) -> list[object]:
    found: list[object] = []
    for settings in ({}, {"ckpt_max_failures": 1}, {"ckpt_max_failures": 2}):
        checkpointer = open_one(ckpt_on_failure="warn", log_level="error", **settings)
        fail(checkpointer, *range(4))
        number = 0
        for step in range(4):
            try:
                checkpointer.save(step, small())
            except WriteError:
                break
            number += 1
        found.append(number)
    return found


def in_flight(open_one: Open) -> list[object]:
    found: list[object] = []
    for settings in ({}, {"ckpt_max_in_flight": 1}, {"ckpt_max_in_flight": 4}):
        checkpointer = open_one(async_save=True, ckpt_when_busy="skip", log_level="error", **settings)
        gate = threading.Event()
        checkpointer._thread.submit(gate.wait, WAIT_S)
        found.append(sum(not checkpointer.save(step, small()).is_skipped for step in range(6)))
        gate.set()
    return found


def busy(open_one: Open) -> list[object]:
    found: list[object] = []
    for policy in ("wait", "skip", "fail"):
        checkpointer = open_one(
            async_save=True, ckpt_when_busy=policy, ckpt_max_in_flight=1, log_level="error"
        )
        gate = threading.Event()
        checkpointer._thread.submit(gate.wait, WAIT_S)
        checkpointer.save(0, small())
        timer = threading.Timer(0.1, gate.set)
        timer.start()
        try:
            handle = checkpointer.save(1, small())
            found.append("skipped" if handle.is_skipped else "waited" if gate.is_set() else "")
        except CheckpointError:
            found.append("failed")
        timer.join()
    return found


def generators(open_one: Open) -> list[object]:
    found: list[object] = []
    for settings in ({}, {"load_rng": True}):
        checkpointer = open_one(log_level="error", **settings)
        checkpointer.save(0, small())
        drawn = torch.rand(3).tolist(), random.random()
        checkpointer.restore(small())
        found.append((torch.rand(3).tolist(), random.random()) == drawn)
    return found


def kept(**settings: Any) -> Callable[[Open], list[object]]:
    def effect(open_one: Open) -> list[object]:
        quiet = {"log_level": "error"}
        return [save_all(open_one(**quiet, **settings), 6, metric=lambda step: abs(step - 1.8))]

    return effect


def best(open_one: Open) -> list[object]:
    return [
        save_all(open_one(keep_best=2, log_level="error", **settings), 6, metric=lambda step: abs(step - 1.8))
        for settings in ({}, {"keep_best_mode": "max"})
    ]


def severity(open_one: Open) -> list[object]:
    found: list[object] = []
    for level in ("debug", "info", "warning", "error"):
        open_one(log_level=level)
        found.append(logging.getLogger("distckpt").level)
    return found


EFFECTS: dict[str, tuple[Callable[[Open], list[object]], list[object]]] = {
    "dist_ckpt_workers": (workers, [None, 2]),
    "ckpt_worker_cores": (cores, [True, True]),
    "async_save": (in_background, [True, False]),
    "distributed_timeout_minutes": (deadline, [True]),
    "ckpt_format": (layout, [[False, False], [True, False], [False, True]]),
    "ckpt_objects": (objects, ["refused", {1, 2}]),
    "ckpt_host_memory": (memory, [24 * MIB, 32 * MIB]),
    "ckpt_on_failure": (failures, ["raised", False, True]),
    "ckpt_max_failures": (too_many, [2, 0, 1]),
    "ckpt_max_in_flight": (in_flight, [2, 1, 4]),
    "ckpt_when_busy": (busy, ["waited", "skipped", "failed"]),
    "load_rng": (generators, [False, True]),
    "keep_last": (kept(keep_last=2), [[4, 5]]),
    "keep_every": (kept(keep_every=3), [[0, 3, 5]]),
    "keep_best": (kept(keep_best=2), [[1, 2, 5]]),
    "keep_best_mode": (best, [[1, 2, 5], [4, 5]]),
    "keep_hourly": (kept(keep_hourly=2), [[5]]),
    "log_level": (severity, [10, 20, 30, 40]),
}
"""What is found with the default and with other values, or with those alone."""
ELSEWHERE = {
    "ckpt_bucket_bytes": "integration/test_settings.py::test_a_bucket_is_what_a_lane_writes_at_once",
    "ckpt_direct_io": (
        "integration/test_settings.py::test_files_are_opened_for_direct_writes_only_where_that_is_wanted"
    ),
    "ckpt_checksum": "integration/test_settings.py::test_without_checksums",
    "ckpt_weights_only": "integration/test_settings.py::test_an_object_that_runs_code_is_refused",
    "ckpt_fully_parallel_save": "integration/test_participants.py::test_replicas_share_the_writing",
    "ckpt_fully_parallel_load": "integration/test_participants.py",
    "ckpt_incremental": "integration/test_incremental.py",
    "ckpt_local_dir": "integration/test_tiers.py",
    "ckpt_local_keep": "integration/test_tiers.py",
}
"""Which tests see the effect of the others."""


def test_every_setting_has_an_effect_that_is_seen() -> None:
    names = [one.name for one in dataclasses.fields(CheckpointConfig)]
    assert sorted([*EFFECTS, *ELSEWHERE]) == sorted(names)
    for name, where in ELSEWHERE.items():
        file, _, function = where.partition("::")
        text = (ROOT / "tests" / file).read_text()
        defined = {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
        assert function in defined if function else name in text, name


@pytest.mark.slow
@pytest.mark.parametrize("name", EFFECTS)
def test_a_setting_does_what_it_says(open_one: Open, name: str) -> None:
    effect, expected = EFFECTS[name]
    level = logging.getLogger("distckpt").level
    try:
        assert effect(open_one) == expected
    finally:
        logging.getLogger("distckpt").setLevel(level)


def megatron_parser() -> argparse.ArgumentParser:
    """Return a parser with the flags that Megatron-LM has for checkpoints."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    group = parser.add_argument_group(title="checkpointing")
    group.add_argument("--save", type=str, default=None)
    group.add_argument("--save-interval", type=int, default=None)
    group.add_argument("--no-save-optim", action="store_true", default=None)
    group.add_argument("--no-save-rng", action="store_true", default=None)
    group.add_argument("--load", type=str, default=None)
    group.add_argument("--no-load-optim", action="store_true", default=None)
    group.add_argument("--no-load-rng", action="store_true", default=None)
    group.add_argument("--async-save", action="store_true", default=None)
    group.add_argument("--use-persistent-ckpt-worker", action="store_true")
    group.add_argument(
        "--ckpt-format", default="torch_dist", choices=["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"]
    )
    group.add_argument(
        "--ckpt-fully-parallel-save", action="store_true", dest="ckpt_fully_parallel_save_deprecated"
    )
    group.add_argument("--no-ckpt-fully-parallel-save", action="store_false", dest="ckpt_fully_parallel_save")
    group.add_argument("--ckpt-fully-parallel-load", action="store_true")
    group.add_argument("--ckpt-assume-constant-structure", action="store_true")
    group.add_argument("--dist-ckpt-strictness", type=str, default="assume_ok_unexpected")
    group.add_argument("--distributed-timeout-minutes", type=int, default=10)
    group.add_argument("--logging-level", type=int, default=None)
    return parser


def of_megatron(*arguments: str) -> CheckpointConfig:
    parser = megatron_parser()
    before = dict(parser._option_string_actions)
    add_arguments(parser)
    for flag, action in before.items():
        assert parser._option_string_actions[flag] is action, "theirs is left as it is"
    return CheckpointConfig.from_args(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        # Its defaults: it saves the generators, and loads in parallel only if it is told to.
        ([], {"load_rng": True, "ckpt_fully_parallel_load": False}),
        (["--no-load-rng"], {"ckpt_fully_parallel_load": False}),
        (["--ckpt-fully-parallel-load"], {"load_rng": True}),
        (["--ckpt-fully-parallel-load", "--no-load-rng", "--async-save"], {"async_save": True}),
        (
            ["--ckpt-fully-parallel-load", "--no-load-rng", "--no-ckpt-fully-parallel-save"],
            {"ckpt_fully_parallel_save": False},
        ),
        (
            ["--ckpt-fully-parallel-load", "--no-load-rng", "--distributed-timeout-minutes", "3"],
            {"distributed_timeout_minutes": 3},
        ),
        (
            ["--ckpt-fully-parallel-load", "--no-load-rng", "--keep-last", "3", "--ckpt-when-busy", "skip"],
            {"keep_last": 3, "ckpt_when_busy": "skip"},
        ),
    ],
)
def test_a_parser_of_megatrons_shape(arguments: list[str], settings: dict[str, Any]) -> None:
    assert of_megatron(*arguments) == CheckpointConfig.from_mapping(settings)


SECTION: dict[str, Any] = {
    "save": "/somewhere",
    "load": None,
    "save_interval": 500,
    "load_rng": True,
    "load_optim": True,
    "fully_parallel_save": False,
    "fully_parallel_load": False,
    "async_save": True,
    "ckpt_format": "fsdp_dtensor",
    "ckpt_step": None,
    "most_recent_k": 4,
    "dist_ckpt_strictness": "log_all",
    "distributed_timeout_minutes": 7,
    "logging_level": logging.WARNING,
}


def test_a_section_of_megatrons_shape(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "distckpt")
    before = dict(SECTION)
    found = CheckpointConfig.from_mapping(SECTION, strict=False)
    assert before == SECTION
    assert found == CheckpointConfig(
        load_rng=True,
        ckpt_fully_parallel_save=False,
        ckpt_fully_parallel_load=False,
        async_save=True,
        distributed_timeout_minutes=7,
        log_level="warning",
    )
    [line] = [record.getMessage() for record in caplog.records]
    left = ["save", "load", "save_interval", "load_optim", "ckpt_format=fsdp_dtensor", "ckpt_step"]
    for name in [*left, "most_recent_k", "dist_ckpt_strictness"]:
        assert f" {name}," in f"{line},", name
    for name in (
        "load_rng",
        "fully_parallel_save",
        "async_save",
        "logging_level",
        "distributed_timeout_minutes",
    ):
        assert f" {name}," not in f"{line},", name
    with pytest.raises(ConfigError, match="save"):
        CheckpointConfig.from_mapping(SECTION)


def test_a_section_with_settings_of_ours_beside_its_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "distckpt")
    ours = {
        "dist_ckpt_workers": 4,
        "keep_last": 2,
        "ckpt_fully_parallel_save": True,
        "log_level": "debug",
        "ckpt_format": "zarr",
        "keep_hourly": None,
    }
    found = CheckpointConfig.from_mapping({**SECTION, **ours}, strict=False)
    assert (found.dist_ckpt_workers, found.keep_last, found.ckpt_format) == (4, 2, "zarr")
    assert found.ckpt_fully_parallel_save, "ours, where both are given"
    assert not found.ckpt_fully_parallel_load
    assert found.log_level == "debug"
    assert found.keep_hourly is None


@pytest.mark.parametrize("given", [{}, {"async_save": True}, {"keep_last": 2}], ids=str)
def test_nothing_is_said_of_a_section_of_settings_alone(
    given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "distckpt")
    assert CheckpointConfig.from_mapping(given, strict=False) == CheckpointConfig(**given)
    assert not caplog.records


LEVELS = {
    0: "debug",
    10: "debug",
    15: "debug",
    20: "info",
    25: "info",
    30: "warning",
    40: "error",
    50: "error",
}


@pytest.mark.parametrize(("level", "expected"), LEVELS.items())
def test_levels_of_logging(level: int, expected: str) -> None:
    assert CheckpointConfig.from_mapping({"logging_level": level}, strict=False).log_level == expected


@pytest.mark.parametrize(
    "given",
    [
        {"keep_last": 0},
        {"async_save": "yes"},
        {"fully_parallel_save": 1},
        {"ckpt_format": "parquet"},
        {"logging_level": -1},
        {"logging_level": True},
        {"logging_level": 1.5},
    ],
    ids=str,
)
def test_a_section_with_a_setting_that_cannot_be_honoured_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CheckpointConfig.from_mapping(given, strict=False)
    with pytest.raises(ConfigError, match="expected a mapping"):
        CheckpointConfig.from_mapping([*given], strict=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("one", dataclasses.fields(CheckpointConfig), ids=lambda one: one.name)
def test_the_documented_default_is_the_default(one: Any) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split(" | ")] for line in page if f"| `{one.name}` |" in line]
    assert len(rows) == 1, "there is one row"
    documented = rows[0][2]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flag = f"--{one.name.replace('_', '-')}"
    if documented in ("off", "False", "True", "", "None"):
        expected = {"off": False, "False": False, "True": True}.get(documented, one.default)
        assert one.default in ("", None, False, True)
        assert one.default == expected
        return
    found = CheckpointConfig.from_args(parser.parse_args([flag, documented]))
    assert found == CheckpointConfig.from_args(parser.parse_args([])) == CheckpointConfig()

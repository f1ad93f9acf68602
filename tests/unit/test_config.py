"""Settings: what is accepted, what is refused and why, and the flags that follow from the fields."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import logging
import os
import pickle
import warnings
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from distckpt import config as config_module
from distckpt.arena import EXTENT_BYTES
from distckpt.config import CheckpointConfig, add_arguments, warn_async_workers
from distckpt.errors import ConfigError, DistckptWarning
from distckpt.worker import CHECKSUM_BLOCK_BYTES

DEFAULTS: dict[str, object] = {
    "dist_ckpt_workers": 1,
    "ckpt_worker_cores": "",
    "async_save": False,
    "distributed_timeout_minutes": 10.0,
    "ckpt_format": "torch_dist",
    "ckpt_objects": "auto",
    "ckpt_host_memory": "auto",
    "ckpt_bucket_bytes": "auto",
    "ckpt_direct_io": True,
    "ckpt_checksum": "crc32c",
    "ckpt_weights_only": True,
    "ckpt_fully_parallel_save": True,
    "ckpt_fully_parallel_load": True,
    "ckpt_on_failure": "raise",
    "ckpt_max_failures": 3,
    "ckpt_max_in_flight": 2,
    "ckpt_when_busy": "wait",
    "load_rng": False,
    "keep_last": None,
    "keep_every": None,
    "keep_best": None,
    "keep_best_mode": "min",
    "keep_hourly": None,
    "ckpt_incremental": False,
    "ckpt_local_dir": "",
    "ckpt_local_keep": 2,
    "log_level": "info",
}
FLAGS = {
    "--dist-ckpt-workers",
    "--ckpt-worker-cores",
    "--async-save",
    "--distributed-timeout-minutes",
    "--ckpt-format",
    "--ckpt-objects",
    "--ckpt-host-memory",
    "--ckpt-bucket-bytes",
    "--ckpt-direct-io",
    "--ckpt-checksum",
    "--ckpt-weights-only",
    "--ckpt-fully-parallel-save",
    "--ckpt-fully-parallel-load",
    "--ckpt-on-failure",
    "--ckpt-max-failures",
    "--ckpt-max-in-flight",
    "--ckpt-when-busy",
    "--load-rng",
    "--keep-last",
    "--keep-every",
    "--keep-best",
    "--keep-best-mode",
    "--keep-hourly",
    "--ckpt-incremental",
    "--ckpt-local-dir",
    "--ckpt-local-keep",
    "--log-level",
}
NEGATIVE_FLAGS = {
    "--no-ckpt-direct-io",
    "--no-ckpt-weights-only",
    "--no-ckpt-fully-parallel-save",
    "--no-ckpt-fully-parallel-load",
}


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "_warned_workers", set())


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def make(**settings: Any) -> CheckpointConfig:
    return CheckpointConfig.from_mapping(settings)


def test_defaults() -> None:
    assert dataclasses.asdict(CheckpointConfig()) == DEFAULTS


def test_frozen_hashable_and_copied_whole() -> None:
    config = make(ckpt_checksum="none", distributed_timeout_minutes=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.log_level = "debug"  # type: ignore[misc]
    for found in (pickle.loads(pickle.dumps(config)), copy.copy(config), copy.deepcopy(config)):
        assert found == config
        assert hash(found) == hash(config)
    assert dataclasses.replace(config, log_level="debug").log_level == "debug"
    assert isinstance(config.distributed_timeout_minutes, float)


def test_every_field_describes_itself() -> None:
    for field in dataclasses.fields(CheckpointConfig):
        assert field.metadata["help"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("dist_ckpt_workers", value) for value in (0, -1, True, 1.0, "2", None)),
        *(
            ("ckpt_worker_cores", value)
            for value in (
                *(None, 1, [0], ",", "0,", "-1", "1-0", "0-", "0-3:2", "0 1", "all", "0x1", "\u0661"),
                *("9" * 9, "0-" + "9" * 5000),
            )
        ),
        *(("async_save", value) for value in (1, 0, "yes", None)),
        *(
            ("distributed_timeout_minutes", value)
            for value in (0, -1, True, "10", None, float("nan"), float("inf"), 10**400)
        ),
        *(("ckpt_format", value) for value in ("", "torch", None, 1, ["torch_dist"])),
        *(
            ("ckpt_host_memory", value)
            for value in (
                *(0, -1, True, 1.5, None, "", "0", "-1", "0GiB", "0%", "101%", "-5%", "12 parsecs", "GiB"),
                *("1e9", "half", "%", "nan%", "9" * 5000, "9" * 400 + ".5GiB", "0.1"),
            )
        ),
        *(
            ("ckpt_bucket_bytes", value)
            for value in (
                *(
                    0,
                    -1,
                    True,
                    1.5,
                    None,
                    "",
                    "32",
                    "32MB",
                    "2MiB",
                    "12MiB",
                    "256MiB",
                    "1GiB",
                    "50%",
                    "large",
                ),
                *((4 << 20) + 1, [4 << 20]),
            )
        ),
        *(("ckpt_direct_io", value) for value in (1, "yes", None)),
        *(("ckpt_checksum", value) for value in ("md5", None, False)),
        *(("ckpt_fully_parallel_save", value) for value in (1, "yes", None)),
        *(("ckpt_fully_parallel_load", value) for value in (0, "no", None)),
        *(("ckpt_on_failure", value) for value in ("ignore", None)),
        *(("log_level", value) for value in ("INFO", "trace", 20, None)),
    ],
)
def test_bad_value_names_setting_and_value(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**{name: value})
    assert str(caught.value).startswith(f"{name}: expected ")
    assert repr(value) in str(caught.value)


def test_unknown_setting_is_a_config_error_with_a_suggestion() -> None:
    expected = "dist_ckpt_wokers: unknown setting; did you mean 'dist_ckpt_workers'"
    with pytest.raises(ConfigError, match=expected):
        CheckpointConfig(dist_ckpt_wokers=2)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=expected):
        make(dist_ckpt_wokers=2)
    with pytest.raises(ConfigError, match=expected):
        CheckpointConfig.build(CheckpointConfig(), {"dist_ckpt_wokers": 2})
    with pytest.raises(ConfigError, match="colour: unknown setting; available settings: dist_ckpt_workers"):
        make(colour="red")
    with pytest.raises(ConfigError, match="by name"):
        CheckpointConfig(2)  # type: ignore[call-arg]


def test_arguments_of_torch_s_own_writer_are_refused_with_what_to_use() -> None:
    for name, said in (
        ("thread_count", "dist_ckpt_workers says how many processes write"),
        ("overwrite", "a save always replaces what is there"),
    ):
        with pytest.raises(ConfigError, match=f"^{name}: .* here {said}.*docs/migrating.md") as caught:
            CheckpointConfig.build(None, {name: 4})
        assert "available settings" not in str(caught.value)
    ours = {"path", *(one.name for one in dataclasses.fields(CheckpointConfig))}
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    for name in {*signature(FileSystemWriter).parameters, *signature(FsspecWriter).parameters} - ours:
        if name != "kwargs":
            with pytest.raises(ConfigError, match=r"docs/migrating\.md"):
                CheckpointConfig.from_mapping({name: None})
            assert f"`{name}`" in page or name.startswith("_"), name


def test_build_lets_settings_override_the_config() -> None:
    config = make(dist_ckpt_workers=3, ckpt_checksum="none")
    assert CheckpointConfig.build(config, {}) is config
    assert CheckpointConfig.build(None, {}) == CheckpointConfig()
    assert CheckpointConfig.build(config, {"dist_ckpt_workers": 2}) == make(
        dist_ckpt_workers=2, ckpt_checksum="none"
    )
    with pytest.raises(ConfigError, match="expected a CheckpointConfig, got dict"):
        CheckpointConfig.build({"dist_ckpt_workers": 2}, {})  # type: ignore[arg-type]


@pytest.fixture
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the machine have cores 0 to 9 and 12."""
    path = tmp_path / "online"
    path.write_text("0-9,12\n")
    monkeypatch.setattr(config_module, "_ONLINE_CORES", path)
    return path


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", ()),
        (" ", ()),
        ("7", (7,)),
        ("12,3-5", (3, 4, 5, 12)),
        (" 4-4,4 ", (4,)),
    ],
)
def test_worker_cores(value: str, expected: tuple[int, ...]) -> None:
    # Not compared with what this process may use: trainers are pinned to be off the workers' cores.
    assert make(ckpt_worker_cores=value, dist_ckpt_workers=2).worker_cores() == expected


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize(
    ("value", "named"), [("11", "11"), ("0-3,10,12-14", "10, 13, 14"), ("13-99", "13, 14, .*, 20, ...")]
)
def test_core_that_the_machine_lacks_is_named(value: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"^ckpt_worker_cores: this machine has no core {named} online"):
        make(ckpt_worker_cores=value, dist_ckpt_workers=2)


@pytest.mark.parametrize("content", [None, "?"])
def test_cores_are_counted_where_no_list_of_them_can_be_read(
    content: str | None, online: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is None:
        online.unlink()
    else:
        online.write_text(content)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert make(ckpt_worker_cores="0-1", dist_ckpt_workers=2).worker_cores() == (0, 1)
    with pytest.raises(ConfigError, match="no core 2 online"):
        make(ckpt_worker_cores="2", dist_ckpt_workers=2)


def test_worker_cores_without_effect_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"only worker processes can be pinned.*dist_ckpt_workers=1 writes in"
    ):
        make(ckpt_worker_cores="0")
    with pytest.raises(ConfigError, match="only worker processes"):
        CheckpointConfig.from_args(parse("--ckpt-worker-cores", "0"))
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(ConfigError, match="does not pin processes"):
        make(ckpt_worker_cores="0", dist_ckpt_workers=2)


def test_a_cap_on_failures_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ckpt_max_failures: 5 has no effect with ckpt_on_failure='raise'"):
        make(ckpt_max_failures=5)
    assert make(ckpt_max_failures=5, ckpt_on_failure="warn").ckpt_max_failures == 5


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("auto", 500),
        ("50%", 500),
        ("100%", 1000),
        ("12.5 %", 125),
        (7, 7),
        ("7", 7),
        ("7B", 7),
        ("12GiB", 12 * 2**30),
        ("12G", 12 * 2**30),
        ("12gib", 12 * 2**30),
        ("12 GB", 12 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5KiB", 1536),
        ("1TiB", 2**40),
        (str(2**53 + 1), 2**53 + 1),
    ],
)
def test_host_memory(value: str | int, expected: int) -> None:
    assert make(ckpt_host_memory=value).host_memory_bytes(1000, 1) == expected


def test_relative_host_memory_is_shared_by_the_ranks_of_the_machine() -> None:
    assert make().host_memory_bytes(1000, 4) == 125
    assert make(ckpt_host_memory="80%").host_memory_bytes(1000, 4) == 200
    assert make(ckpt_host_memory=300).host_memory_bytes(1000, 4) == 300


@given(st.text() | st.integers() | st.floats() | st.none() | st.binary())
def test_host_memory_takes_anything_or_refuses_it(value: Any) -> None:
    try:
        config = make(ckpt_host_memory=value)
    except ConfigError:
        return
    assert config.host_memory_bytes(2**40, 1) > 0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("auto", 0),
        (4 << 20, 4 << 20),
        (str(8 << 20), 8 << 20),
        ("16M", 16 << 20),
        ("32MiB", 32 << 20),
        ("64 mib", 64 << 20),
        ("128MiB", 128 << 20),
    ],
)
def test_bucket_bytes(value: str | int, expected: int) -> None:
    config = make(ckpt_bucket_bytes=value)
    assert config.bucket_bytes() == config.bucket_bytes(2**30) == expected


def test_buckets_are_whole_blocks_and_fill_an_extent() -> None:
    sizes = config_module._BUCKET_BYTES
    assert (sizes[0], sizes[-1]) == (CHECKSUM_BLOCK_BYTES, EXTENT_BYTES)
    assert all(EXTENT_BYTES % each == each % CHECKSUM_BLOCK_BYTES == 0 for each in sizes)


@pytest.mark.parametrize(
    ("budget", "workers", "value", "fits"),
    [
        ("512MiB", 1, "128MiB", "128MiB"),
        ("512MiB", 2, "128MiB", "64MiB"),
        ("1MiB", 8, "8MiB", "4MiB"),
        ("1MiB", 8, "4MiB", "4MiB"),
    ],
)
def test_buckets_that_the_budget_does_not_hold_are_refused_with_what_it_holds(
    budget: str, workers: int, value: str, fits: str
) -> None:
    settings = {"dist_ckpt_workers": workers, "ckpt_bucket_bytes": value}
    relative = make(**settings)
    if value == fits:
        assert make(**settings, ckpt_host_memory=budget).ckpt_bucket_bytes == value
        return
    reason = rf"ckpt_bucket_bytes: .* dist_ckpt_workers={workers} .*at most {fits}, got '{value}'"
    with pytest.raises(ConfigError, match=reason):
        make(**settings, ckpt_host_memory=budget)
    # What a percentage comes to is known later.
    with pytest.raises(ConfigError, match=reason):
        relative.bucket_bytes(make(ckpt_host_memory=budget).host_memory_bytes(0, 1))


@given(st.integers(1, 64), st.integers(1, 2**40), st.sampled_from(config_module._BUCKET_BYTES))
def test_two_buckets_for_each_lane_and_two_more_fit_or_are_refused(
    workers: int, budget: int, nbytes: int
) -> None:
    config = make(dist_ckpt_workers=workers, ckpt_bucket_bytes=nbytes)
    try:
        assert config.bucket_bytes(budget) == nbytes
    except ConfigError:
        assert nbytes * (2 * workers + 2) > budget
    else:
        assert nbytes * (2 * workers + 2) <= budget or nbytes == CHECKSUM_BLOCK_BYTES


def test_flag_set_is_frozen() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    assert set(parser._option_string_actions) == FLAGS | NEGATIVE_FLAGS
    fields = [field.name for field in dataclasses.fields(CheckpointConfig)]
    assert {"--" + name.replace("_", "-") for name in fields} == FLAGS
    assert vars(parser.parse_args([])) == DEFAULTS


def test_flags_reach_the_config() -> None:
    arguments = (
        "--dist-ckpt-workers 1 --async-save --distributed-timeout-minutes 2.5 --ckpt-format torch_dist "
        "--ckpt-host-memory 50% --ckpt-bucket-bytes 8MiB --no-ckpt-direct-io "
        "--ckpt-checksum none --no-ckpt-weights-only --no-ckpt-fully-parallel-save "
        "--no-ckpt-fully-parallel-load --ckpt-on-failure raise --log-level debug"
    )
    assert CheckpointConfig.from_args(parse(*arguments.split())) == CheckpointConfig(
        async_save=True,
        distributed_timeout_minutes=2.5,
        ckpt_host_memory="50%",
        ckpt_bucket_bytes="8MiB",
        ckpt_direct_io=False,
        ckpt_checksum="none",
        ckpt_weights_only=False,
        ckpt_fully_parallel_save=False,
        ckpt_fully_parallel_load=False,
        log_level="debug",
    )
    assert CheckpointConfig.from_args(parse()) == CheckpointConfig()
    pinned = CheckpointConfig.from_args(parse("--dist-ckpt-workers", "2", "--ckpt-worker-cores", "0"))
    assert pinned == CheckpointConfig(dist_ckpt_workers=2, ckpt_worker_cores="0")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--dist-ckpt-workers", "0"], "an integer of at least 1"),
        (["--dist-ckpt-workers", "two"], "an integer of at least 1"),
        (["--ckpt-bucket-bytes", "1MiB"], "'auto' or one of 4MiB, 8MiB, 16MiB, 32MiB, 64MiB, 128MiB"),
        (["--ckpt-worker-cores", "all"], "a list of cores"),
        (["--ckpt-worker-cores", "99999"], "no core 99999 online"),
        (["--ckpt-format", "hdf5"], "ckpt_format: expected torch_dist, safetensors or zarr, got 'hdf5'"),
    ],
)
def test_bad_flag_is_a_usage_error(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*arguments)
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err


def test_help_shows_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert all(flag in text for flag in FLAGS)


@pytest.mark.parametrize("handler", ["error", "resolve"])
def test_flags_of_the_host_parser_are_left_alone_and_read(handler: str) -> None:
    parser = argparse.ArgumentParser(conflict_handler=handler)
    theirs = parser.add_argument("--ckpt-format", default="torch", choices=["torch", "torch_dist", "zarr"])
    parser.add_argument("--no-load-rng", action="store_true")
    parser.add_argument("--load-rng", action="store_true")
    parser.add_argument("--log-level", default=None)
    parser.add_argument(
        "--no-ckpt-fully-parallel-save", action="store_false", dest="ckpt_fully_parallel_save"
    )
    add_arguments(parser)
    add_arguments(parser)
    assert parser._option_string_actions["--ckpt-format"] is theirs

    ours = parser.parse_args(["--ckpt-format", "torch_dist", "--load-rng", "--no-ckpt-fully-parallel-save"])
    assert ours.load_rng is True
    assert CheckpointConfig.from_args(ours) == CheckpointConfig(ckpt_fully_parallel_save=False, load_rng=True)
    # Where the program can only switch it off, it is on.
    assert parser.parse_args([]).ckpt_fully_parallel_save is True
    with pytest.raises(
        ConfigError, match="ckpt_format: expected torch_dist, safetensors or zarr, got 'torch'"
    ):
        CheckpointConfig.from_args(parser.parse_args([]))
    assert CheckpointConfig.from_args(parser.parse_args(["--ckpt-format", "zarr"])).ckpt_format == "zarr"


def test_what_becomes_of_objects_depends_on_the_format() -> None:
    assert CheckpointConfig().puts_objects_aside
    assert not CheckpointConfig(ckpt_format="safetensors").puts_objects_aside
    assert CheckpointConfig(ckpt_format="safetensors", ckpt_objects="sidecar").puts_objects_aside
    assert CheckpointConfig(ckpt_format="zarr").puts_objects_aside
    assert not CheckpointConfig(ckpt_format="zarr", ckpt_objects="refuse").puts_objects_aside
    with pytest.raises(ConfigError, match="ckpt_objects: torch_dist holds objects as they are"):
        CheckpointConfig(ckpt_objects="refuse")


def test_async_workers_warn_once_for_each_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    cores = len(os.sched_getaffinity(0))
    with caplog.at_level(logging.WARNING), pytest.warns(DistckptWarning) as caught:
        CheckpointConfig(async_save=True, dist_ckpt_workers=3)
    [warning] = caught
    assert warning.filename == __file__
    for part in (
        "3 x 4 local ranks = 12 processes",
        f"on {cores} cores",
        "18 MiB",
        "216 MiB",
        "docs/adr/0001",
    ):
        assert part in str(warning.message)
        assert part in caplog.text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CheckpointConfig(async_save=True, dist_ckpt_workers=3)
    with pytest.warns(DistckptWarning, match="2 processes per rank"):
        CheckpointConfig(async_save=True, dist_ckpt_workers=2)


def test_nothing_to_warn_about() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CheckpointConfig(async_save=True)
        CheckpointConfig(dist_ckpt_workers=8)
        warn_async_workers(1, stacklevel=2)


@pytest.mark.parametrize("value", ["", "0", "-1", "many"])
def test_odd_local_world_size_counts_as_one(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    with pytest.warns(DistckptWarning, match="2 x 1 local ranks"):
        CheckpointConfig(async_save=True, dist_ckpt_workers=2)

"""A whole sweep, small: what it tries, what it answers, and that it leaves nothing behind."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from distckpt import CheckpointConfig, WriteError, add_arguments, cli
from distckpt.cli import main
from distckpt.storage import open_storage
from distckpt.tune import Trial, sweep
from faults.checkpoints import on_event, wait_until
from servers import S3Server

pytestmark = pytest.mark.slow

MIB = 1 << 20


def settings_of(flags: Sequence[str]) -> CheckpointConfig:
    """Return the settings that the flags mean; they are flags of a program."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return CheckpointConfig.from_args(parser.parse_args([word for flag in flags for word in flag.split()]))


def left_below(url: str, options: dict[str, Any]) -> list[str]:
    """Return what is left on an object store; its server may show the folder of what is gone for a while."""
    storage = open_storage(url, options)
    left = [name for name, _ in storage.unfinished()]
    for name in storage.list():
        left += left_below(f"{url}/{name[:-1]}", options) if name.endswith("/") else [name]
    return left


def tried(trials: Sequence[Trial], stage: str) -> list[tuple[int, int | None, bool | None]]:
    return [(each.workers, each.bucket_bytes, each.direct_io) for each in trials if each.stage == stage]


def test_a_local_directory(tmp_path: Path) -> None:
    said: list[str] = []
    found = sweep(tmp_path, nbytes=24 * MIB, seconds=4.0, workers=(2, 1), progress=said.append)
    assert not list(tmp_path.iterdir())
    assert json.loads(json.dumps(found.as_dict()))["nbytes"] == 24 * MIB
    has_direct_io = any("O_DIRECT" in name for name in found.ceilings)
    direct_io = True if has_direct_io else None
    assert tried(found.trials, "workers") == [(1, None, direct_io), (2, None, direct_io)]
    config = settings_of(found.flags)
    workers = config.dist_ckpt_workers
    assert {flag.partition(" ")[0].replace("--no-", "--") for flag in found.flags} == {
        "--dist-ckpt-workers", "--ckpt-bucket-bytes", *(["--ckpt-direct-io"] if has_direct_io else []),
    }  # fmt: skip
    assert len(found.reasons) == len(found.flags)
    # Each next stage goes on from what was chosen.
    if buckets := tried(found.trials, "buckets"):
        assert buckets == [(workers, None, direct_io), (workers, 8 * MIB, direct_io)]
    if direct := tried(found.trials, "direct"):
        bucket = config.bucket_bytes() or None
        assert direct == [(workers, bucket, True), (workers, bucket, False)]
    for each in found.trials:
        assert len(each.seconds) == len(each.write_seconds) >= 1
        assert all(0 < part < whole for part, whole in zip(each.write_seconds, each.seconds, strict=True))
    rounds = len(found.trials[0].seconds)
    assert found.ceilings
    assert {len(rates) for rates in found.ceilings.values()} == {rounds}
    assert "of plain writes" in found.reasons[0]
    assert said[0] == "workers: the first save of 1 worker"


def test_what_there_is_no_time_for_keeps_its_default(tmp_path: Path) -> None:
    found = sweep(tmp_path, nbytes=16 * MIB, seconds=0.001, workers=[1])
    assert [len(each.seconds) for each in found.trials] == [1]
    assert found.flags[:2] == ["--dist-ckpt-workers 1", "--ckpt-bucket-bytes auto"]
    assert found.reasons[1] == "left at its default: no time left of 0.001 s"


def test_the_size_is_found_when_none_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distckpt.tune._PROBE_BYTES", 2 * MIB)
    monkeypatch.setattr("distckpt.tune._MOST_BYTES", 5 * MIB)
    found = sweep(tmp_path, seconds=3.0, workers=[1])
    # In steps of the probe.
    assert found.nbytes in {2 * MIB, 4 * MIB}
    assert not list(tmp_path.iterdir())


def test_memory_has_neither_o_direct_nor_ceilings() -> None:
    url = f"memory://{uuid.uuid4().hex}/runs"
    found = sweep(url, nbytes=16 * MIB, seconds=2.0, workers=[1])
    assert [flag.partition(" ")[0] for flag in found.flags] == ["--dist-ckpt-workers", "--ckpt-bucket-bytes"]
    assert (found.ceilings, found.options) == ({}, {})
    assert {each.direct_io for each in found.trials} == {None}
    assert open_storage(url).list() == {}


def test_s3(s3_server: S3Server, s3_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(
        [
            "tune", s3_url, "--gib", "0.04", "--seconds", "8", "--workers", "1", "--json",
            "--storage-options", json.dumps(s3_server.options),
        ]
    )  # fmt: skip
    told = json.loads(capsys.readouterr().out)
    assert (status, told["exit_status"], told["command"], told["path"]) == (0, 0, "tune", s3_url)
    assert settings_of(told["flags"]).dist_ckpt_workers == 1
    # The usual part has 16 MiB there; of 128 MiB there is nothing to write.
    buckets = {each["bucket_bytes"] for each in told["trials"] if each["stage"] == "buckets"}
    assert buckets <= {None, 8 * MIB, 32 * MIB}
    # Nor are there as many parts as 8 or 16.
    parts = [each["parts_at_once"] for each in told["trials"] if each["stage"] == "parts"]
    assert set(parts) <= {4, 2}
    assert {each["parts_at_once"] for each in told["trials"] if each["stage"] == "workers"} == {4}
    assert told["options"]["max_concurrency"] in {4, 2}
    assert len(told["option_reasons"]) == 1
    assert parts or "no time left" in told["option_reasons"][0]
    assert left_below(s3_url, s3_server.options) == []


def test_s3_in_a_terminal(
    s3_server: S3Server, s3_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    monkeypatch.setattr(cli, "_console", lambda: Console(file=sys.stdout, width=100, markup=False))
    options = json.dumps(s3_server.options | {"max_concurrency": 3})
    command = ["tune", s3_url, "--gib", "0.02", "--seconds", "2", "--workers", "1"]
    assert main([*command, "--storage-options", options]) == 0
    out = capsys.readouterr().out
    heading, first = out.splitlines()[:2]
    assert heading.split()[:5] == ["compared", "workers", "bucket", "O_DIRECT", "parts"]
    assert first.split()[:5] == ["workers", "1", "auto", "-", "3"]
    assert '\nstorage_options {"max_concurrency": 3}  left as it is: ' in out


def test_parts_at_once_begin_with_what_they_are_set_to(s3_server: S3Server, s3_url: str) -> None:
    options = s3_server.options | {"max_concurrency": 1}
    found = sweep(s3_url, nbytes=40 * MIB, seconds=8.0, workers=[1], buckets=(), storage_options=options)
    assert [each.parts_at_once for each in found.trials if each.stage == "parts"] in ([1, 2], [])
    assert set(found.options) == {"max_concurrency"}
    few = sweep(s3_url, nbytes=20 * MIB, seconds=2.0, workers=[1], buckets=(), storage_options=options)
    assert few.options == {"max_concurrency": 1}
    assert "too few parts" in few.option_reasons[0]


# What ends it.


def test_a_target_that_fills_up_is_left_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, calls = os.pwritev, 0

    def write(*args: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwritev(*args)

    monkeypatch.setattr(os, "pwritev", write)
    with pytest.raises(WriteError) as caught:
        sweep(tmp_path, nbytes=16 * MIB, seconds=5.0, workers=[1])
    assert caught.value.errno == errno.ENOSPC
    assert calls > 12
    assert not list(tmp_path.iterdir())


def test_plain_writes_that_fail_are_an_error_that_names_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> float:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr("distckpt.tune.plain_write", refuse)
    with pytest.raises(WriteError, match=rf"cannot write to {tmp_path}/\.distckpt-tune-.*quota") as caught:
        sweep(tmp_path, nbytes=MIB, seconds=1.0, workers=[1])
    assert caught.value.errno == errno.EDQUOT
    assert not list(tmp_path.iterdir())


def test_ctrl_c_in_the_middle_of_a_save_leaves_nothing(tmp_path: Path) -> None:
    with (
        on_event("parts.pushed", lambda _: os.kill(os.getpid(), signal.SIGINT)),
        pytest.raises(KeyboardInterrupt),
    ):
        sweep(tmp_path, nbytes=16 * MIB, workers=[2])
    assert not list(tmp_path.iterdir())


def test_a_command_that_is_asked_to_end_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "distckpt", "tune", str(tmp_path), "--gib", "0.05", "--workers", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until(lambda: any(tmp_path.rglob("*.distcp*")), 40, "a save has begun")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=40)
    assert (process.returncode, out, err) == (130, b"", b"")
    assert not list(tmp_path.iterdir())


# What is shown.


def test_lines_of_columns_in_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(tmp_path), "--gib", "0.01", "--seconds", "1", "--workers", "1"]) == 0
    captured = capsys.readouterr()
    rows = [line.split("\t") for line in captured.out.splitlines()]
    assert captured.err == ""
    assert rows[0][:4] == ["trial", "workers", "1", "auto"]
    assert {row[0]: len(row) for row in rows} == {"trial": 10, "ceiling": 4, "flag": 3}
    assert next(row[1] for row in rows if row[0] == "flag") == "--dist-ckpt-workers 1"


def test_a_terminal_gets_a_table_and_sees_what_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    monkeypatch.setattr(cli, "_console", lambda: Console(file=sys.stdout, width=100, markup=False))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["tune", str(tmp_path), "--gib", "0.01", "--seconds", "1", "--workers", "1"]) == 0
    captured = capsys.readouterr()
    assert "\r\x1b[Kworkers, round 1: 1 worker\r\x1b[K" in captured.err
    assert captured.err.endswith("\r\x1b[K")
    heading, first = captured.out.splitlines()[:2]
    assert heading.split() == [
        "compared",
        "workers",
        "bucket",
        "O_DIRECT",
        "GiB/s",
        "seconds",
        "writing",
        "saves",
    ]
    assert first.split()[:3] == ["workers", "1", "auto"]
    assert "\n--dist-ckpt-workers 1  1 worker: " in captured.out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--workers", "1,0"], "'1,0' is no list such as 1,2,4: '0' is no number from 1"),
        (["--seconds", "0"], "'0' is no number above 0"),
        (["--gib", "inf"], "'inf' is no number above 0"),
        (["--gib", "1e9"], "saves of 1000000000.00 GiB are too large"),
    ],
)
def test_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    try:
        status: object = main(["tune", str(tmp_path), *arguments])
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_torch_the_error_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distckpt.tune", None)
    assert main(["tune", str(tmp_path)]) == 2
    assert "tune needs torch" in capsys.readouterr().err

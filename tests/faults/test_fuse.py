"""A file system in user space that refuses, dawdles, writes less than it was asked to, or lies."""

from __future__ import annotations

import ctypes.util
import errno
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distckpt import IntegrityError, WriteError, engine, lanes
from distckpt.storage import open_storage
from distckpt.verification import verify
from faults.checkpoints import (
    KIB,
    MIB,
    assert_is_clean,
    error_of,
    load,
    outcome_of,
    pids_of,
    same,
    save,
    save_in,
    start_save,
    state_of,
    wait_until,
)
from faults.conftest import OpenWriter

OLD, NEW, NEXT = state_of(1), state_of(2, 8 * MIB), state_of(3)
SMALL = 256 * KIB
# Of a direct write that is short the kernel makes an error of its own.
THROUGH_THE_CACHE = {"op": "direct", "errno": errno.EINVAL}
IMAGES, MANIFEST = "*/__0_*.distcp*", "*/rank-00000.json*"


class Fuse:
    """The mounted file system: `path` is where it is, `backing` what it shows."""

    def __init__(self, folder: Path) -> None:
        self.path, self.backing, self._rules = folder / "mount", folder / "backing", folder / "rules"
        self.path.mkdir()
        self.backing.mkdir()
        self.follow()
        program = Path(__file__).with_name("faultfs.py")
        self._errors = (folder / "errors").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", program, self.backing, self.path, self._rules],
            stderr=self._errors,
        )

    def wait(self) -> None:
        """Wait until it is mounted, or skip."""
        wait_until(lambda: os.path.ismount(self.path) or self._process.poll() is not None, 10, "mounted")
        if self._process.poll() is not None:
            pytest.skip(f"cannot mount: {Path(self._errors.name).read_text()[-200:]}")

    def follow(self, *rules: dict[str, Any]) -> None:
        """Follow these rules from now on, and no others."""
        partial = self._rules.with_suffix(".tmp")
        partial.write_text(json.dumps(rules))
        partial.rename(self._rules)

    def close(self) -> None:
        self.follow()
        self._process.terminate()
        self._process.wait(timeout=10)
        self._errors.close()


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuse]:
    if importlib.util.find_spec("mfusepy") is None:
        pytest.skip("mfusepy is not installed")
    if not Path("/dev/fuse").exists() or ctypes.util.find_library("fuse3") is None:
        pytest.skip("no /dev/fuse, or no libfuse3")
    opened = Fuse(tmp_path_factory.mktemp("fuse"))
    try:
        opened.wait()
        yield opened
    finally:
        opened.close()


@pytest.fixture
def fuse(mounted: Fuse) -> Iterator[Fuse]:
    mounted.follow()
    yield mounted
    mounted.follow()


@pytest.fixture
def path(fuse: Fuse, request: pytest.FixtureRequest) -> Path:
    """Where the test's checkpoint lies."""
    return fuse.path / f"checkpoint{abs(hash(request.node.nodeid))}"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("op", "what"),
    [
        ("create", IMAGES),
        ("open", IMAGES),
        ("write", IMAGES),
        ("fsync", IMAGES),
        ("flush", IMAGES),
        ("mkdir", "*/.distckpt/*"),
        ("create", MANIFEST),
        ("write", MANIFEST),
        ("fsync", MANIFEST),
        ("rename", MANIFEST),
        ("fsyncdir", "*"),
        ("rename", "*/.metadata.*"),
        ("fsync", "*/.metadata.*"),
    ],
)
def test_a_request_that_is_refused_is_named_and_survived(
    open_writer: OpenWriter, fuse: Fuse, path: Path, workers: int, op: str, what: str
) -> None:
    writer = open_writer(dist_ckpt_workers=workers)
    committed = state_of(1, SMALL)
    save(writer, path, committed)
    for seed, number in enumerate((errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EDQUOT), start=10):
        fuse.follow({"op": op, "path": what, "errno": number})
        error = error_of(functools.partial(save, writer, path, state_of(2, SMALL)))
        fuse.follow()
        assert isinstance(error, WriteError)
        assert (error.errno, error.rank) == (number, 0), error
        assert error.path is not None
        # Or the folder above it, in which its name is made durable.
        assert error.path == str(path.parent) or error.path.startswith(str(path))
        # What makes a file closes it before a lane has it.
        at_work = what == IMAGES and op not in {"create", "flush"}
        assert error.lane in range(workers) if at_work else True, error
        assert same(load(path, committed), committed)
        committed = state_of(seed, SMALL)
        save(writer, path, committed)
        assert same(load(path, committed), committed)
        assert_is_clean(path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "rules",
    [
        [THROUGH_THE_CACHE, {"op": "write", "short": 40_960, "every": 2}],
        [THROUGH_THE_CACHE, {"op": "write", "short": 7777, "every": 3}],
        [THROUGH_THE_CACHE, {"op": "write", "errno": errno.EINTR, "every": 2}],
        [{"op": "write", "errno": errno.EINTR, "count": 3}],
        [{"op": "fsync", "errno": errno.EINTR, "every": 2}],
        [{"op": "open", "errno": errno.EINTR, "every": 2}],
        [{"op": "write", "delay": 0.02}],
    ],
    ids=[
        "short",
        "odd",
        "interrupted",
        "interrupted-direct",
        "interrupted-fsync",
        "interrupted-open",
        "slow",
    ],
)
def test_short_interrupted_and_slow_writes_are_continued(
    open_writer: OpenWriter, fuse: Fuse, path: Path, rules: list[dict[str, Any]], workers: int, mode: str
) -> None:
    writer = open_writer(dist_ckpt_workers=workers)
    save_in(mode, writer, path, OLD)
    fuse.follow(*rules)
    save_in(mode, writer, path, NEW)
    fuse.follow()
    assert same(load(path, NEW), NEW)
    assert_is_clean(path)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_write_of_no_bytes_is_an_error(
    open_writer: OpenWriter, fuse: Fuse, path: Path, workers: int
) -> None:
    writer = open_writer(dist_ckpt_workers=workers)
    save(writer, path, OLD)
    fuse.follow({"op": "write", "path": IMAGES, "short": 0, "skip": 2})
    error = error_of(lambda: save(writer, path, NEW))
    fuse.follow()
    assert isinstance(error, WriteError)
    assert (error.errno, error.rank) == (errno.EIO, 0)
    assert error.lane in range(workers)
    assert same(load(path, OLD), OLD)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("rule", [{"torn": 0.5}, {"torn": 0}])
def test_what_the_disk_acknowledged_and_lost_is_found_when_it_is_read(
    open_writer: OpenWriter, fuse: Fuse, path: Path, rule: dict[str, Any], workers: int
) -> None:
    writer = open_writer(dist_ckpt_workers=workers)
    save(writer, path, OLD)
    fuse.follow({"op": "write", "path": IMAGES, "skip": 3, "count": 1, **rule}, {"op": "fsync", "lie": True})
    save(writer, path, NEW)
    fuse.follow()
    error = error_of(lambda: load(path, NEW))
    assert isinstance(error, IntegrityError)
    assert error.file is not None
    assert (path / error.file).exists()
    assert error.item is not None
    assert error.expected != error.found
    report = verify(open_storage(path))
    assert report.status == "damaged"
    assert (error.file, error.item) in {(finding.file, finding.item) for finding in report.findings}
    # And that it is damaged hinders nobody.
    save(writer, path, NEXT)
    assert same(load(path, NEXT), NEXT)
    assert_is_clean(path)


def test_a_disk_that_does_not_answer_is_given_up_and_used_again(
    open_writer: OpenWriter, fuse: Fuse, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((engine, "_ABORT_S"), (lanes, "_STOP_S"), (lanes, "_REAP_S")):
        monkeypatch.setattr(module, name, 0.5)
    writer = open_writer(dist_ckpt_workers=2, distributed_timeout_minutes=0.02)
    save(writer, path, OLD)
    pids = pids_of(writer)
    fuse.follow({"op": "fsync", "path": IMAGES, "freeze": True})
    saving = start_save(writer, path, NEW)
    error = outcome_of(lambda: saving.result(timeout=40))
    fuse.follow()
    assert isinstance(error, WriteError)
    assert (error.errno, error.rank) == (errno.ETIMEDOUT, 0)
    assert error.path is not None
    assert error.path.startswith(str(path))
    assert same(load(path, OLD), OLD)
    save(writer, path, NEXT)
    assert pids_of(writer) != pids, "a worker that hangs cannot be asked again"
    assert same(load(path, NEXT), NEXT)
    assert_is_clean(path)

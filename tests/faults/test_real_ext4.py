"""A real ext4 on a disk that loses its power or fails, in a virtual machine."""

from __future__ import annotations

import errno
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from faults.uml import machine

UML = Path(__file__).with_name("uml")


def run(program: str, *arguments: object, folder: Path, timeout_s: float) -> list[list[str]]:
    """Run a program in a virtual machine, or skip where none starts; returns the lines that it says."""
    missing = machine.why_not()
    if missing is not None:
        pytest.skip(missing)
    done = machine.run(UML / program, *arguments, folder=folder, timeout_s=timeout_s)
    assert done.status == 0, done.err + done.out
    return [line.split(" ") for line in done.out.splitlines()]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("workers", "mode", "step"), [(1, "sync", 7), (2, "async", 11)])
def test_power_loss_at_any_point_of_an_overwrite_leaves_old_or_new(
    tmp_path: Path,
    rng: random.Random,
    pytestconfig: pytest.Config,
    workers: int,
    mode: str,
    step: int,
) -> None:
    if pytestconfig.getoption("--every-point"):
        step = 1
    first = rng.randint(1, step)
    without_fsync, *rounds = run("power_loss.py", workers, mode, first, step, folder=tmp_path, timeout_s=1180)
    assert without_fsync[:2] == ["old", "returned"], "what was never made durable was not lost: no power loss"
    allowed = {"before": {"old"}, "during": {"old", "new"}, "after": {"new"}, "returned": {"new"}}
    for found, when, *what in rounds:
        assert found in allowed[when], f"{found} {when} {what}"
    assert Counter(when for _, when, *_ in rounds)["returned"] >= 2
    assert "before" in {when for _, when, *_ in rounds}
    assert "after" in {when for _, when, *_ in rounds} or step > 1
    assert len(rounds) * step > 30


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_a_disk_that_refuses_writes_is_named_and_survived(tmp_path: Path) -> None:
    lines = run("io_errors.py", folder=tmp_path, timeout_s=380)
    assert len(lines) == 10
    for moment, number, rank, lane, path in lines:
        # A journal that could not be written makes the file system read-only.
        assert int(number) in {errno.EIO, errno.EROFS}, lines
        assert rank == "0"
        # Or the folder above the checkpoint, in which its name is made durable.
        assert path == "/run/disk" or path.startswith("/run/disk/checkpoint/")
        if moment == "parts.pushed":
            assert int(number) == errno.EIO
            assert lane in {"0", "1"}
            assert re.search(r"/__0_\d\.distcp\.", path), path

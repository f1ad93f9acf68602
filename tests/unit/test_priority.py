"""Priorities of real processes, lists of cores, and NUMA nodes as sysfs shows them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distckpt.priority import lower, node_cpus, parse_cores

ADDRESS = "0000:17:00.0"
REPORT = """
process = psutil.Process()
print(json.dumps([process.nice(), list(process.ionice()), process.cpu_affinity()]))
"""


def run(code: str) -> Any:
    """Run code in a process of its own and return what it reports."""
    imports = "import json, os, threading\nimport psutil\nfrom distckpt import priority\n"
    done = subprocess.run(
        [sys.executable, "-c", imports + code], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def niceness() -> int:
    found = psutil.Process().nice()
    if found > 8:
        pytest.skip("this process is nice already")
    return found


@pytest.mark.slow
def test_lower_is_relative_to_what_was_inherited(niceness: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    level = [int(psutil.IOPRIO_CLASS_BE), 7]
    assert run("priority.lower()" + REPORT) == [niceness + 10, level, cores]
    assert run("os.nice(1)\npriority.lower()" + REPORT) == [niceness + 11, level, cores]
    assert run("priority.lower()\npriority.lower()" + REPORT) == [19, level, cores]


@pytest.mark.slow
def test_lower_pins_to_the_cores_also_from_others() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    assert run(f"priority.lower([{cores[-1]}])" + REPORT)[2] == cores[-1:]
    pinned_away = f"os.sched_setaffinity(0, [{cores[0]}])\n"
    assert run(pinned_away + f"priority.lower({cores[1:]})" + REPORT)[2] == cores[1:]


@pytest.mark.slow
def test_threads_that_start_later_are_lowered_too(niceness: int) -> None:
    code = """
priority.lower()
found = []
def look():
    thread = threading.get_native_id()
    found.append(os.getpriority(os.PRIO_PROCESS, thread))
    found.append(list(psutil.Process(thread).ionice()))
thread = threading.Thread(target=look)
thread.start()
thread.join()
print(json.dumps(found))
"""
    assert run(code) == [niceness + 10, [int(psutil.IOPRIO_CLASS_BE), 7]]


@pytest.mark.slow
def test_requests_that_are_idle_stay_idle() -> None:
    idle = "psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)\npriority.lower()"
    assert run(idle + REPORT)[1][0] == int(psutil.IOPRIO_CLASS_IDLE)


def test_cores_that_cannot_be_had_are_an_error() -> None:
    before = os.sched_getaffinity(0)
    missing = max(before) + 5000
    with pytest.raises(OSError, match="Invalid argument"):
        lower([missing])
    assert os.sched_getaffinity(0) == before


@pytest.mark.slow
def test_cores_of_which_one_cannot_be_had_are_an_error() -> None:
    code = """
core = min(os.sched_getaffinity(0))
try:
    priority.lower([core, core + 5000])
except OSError as error:
    print(json.dumps([core, str(error)]))
"""
    core, message = run(code)
    assert f"may not run on cores [{core + 5000}]" in message


class Refusing:
    """A process whose operating system allows nothing."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.asked: list[str] = []

    def nice(self, *values: int) -> int:
        self.asked.append("nice")
        raise self.error

    def ionice(self, *values: int) -> None:
        self.asked.append("ionice")
        raise self.error


@pytest.mark.parametrize("error", [psutil.AccessDenied(), PermissionError(1, "no"), OSError(38, "no")])
def test_what_the_operating_system_refuses_is_ignored(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Refusing(error)
    monkeypatch.setattr(psutil, "Process", lambda: process)
    lower()
    assert process.asked == ["nice", "ionice"]


def test_platform_without_priorities_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        niceness = 12

        def nice(self, *values: int) -> int:
            self.niceness = values[0] if values else self.niceness
            return self.niceness

    process = Process()
    monkeypatch.setattr(psutil, "Process", lambda: process)
    lower()
    assert process.niceness == 19


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("\n", ()),
        ("0\n", (0,)),
        ("8-10,24", (8, 9, 10, 24)),
        ("24,8-10,9", (8, 9, 10, 24)),
        ("3-3", (3,)),
        ("99998-99999", (99998, 99999)),
    ],
)
def test_lists_of_cores(text: str, expected: tuple[int, ...]) -> None:
    assert parse_cores(text) == expected


@pytest.mark.parametrize(
    "text",
    [",", "1,", ",1", "-1", "1-", "2-1", "1-2-3", "0-7:2", "1 2", "1, 2", "0x1", "\u0663", "100000", "all"],
)
def test_what_is_not_a_list_of_cores(text: str) -> None:
    with pytest.raises(ValueError, match="not a list of cores"):
        parse_cores(text)


@given(st.sets(st.integers(0, 9999), min_size=1))
def test_every_set_of_cores_can_be_written(cores: set[int]) -> None:
    assert parse_cores(",".join(map(str, cores))) == tuple(sorted(cores))


def sysfs(root: Path, node: str, memory: str = "0-1") -> Path:
    """Make the sysfs of a machine with two nodes, and of a third that has neither cores nor a device."""
    device = root / "bus" / "pci" / "devices" / "0000:17:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    nodes = root / "devices" / "system" / "node"
    for number, cores in enumerate(["0-3,8-11", "4-7,12-15", ""]):
        (nodes / f"node{number}").mkdir(parents=True)
        (nodes / f"node{number}" / "cpulist").write_text(f"{cores}\n")
    (nodes / "has_memory").write_text(f"{memory}\n")
    return root


def test_cores_of_the_node_of_a_device(tmp_path: Path) -> None:
    assert node_cpus(ADDRESS, sysfs(tmp_path / "a", "1")) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert node_cpus(ADDRESS, sysfs(tmp_path / "b", "0", memory="0-2")) == {0, 1, 2, 3, 8, 9, 10, 11}


def test_address_in_capitals_is_found(tmp_path: Path) -> None:
    root = sysfs(tmp_path, "1")
    devices = root / "bus" / "pci" / "devices"
    (devices / ADDRESS).rename(devices / "0000:ab:00.0")
    assert node_cpus("0000:AB:00.0", root) == {4, 5, 6, 7, 12, 13, 14, 15}


@pytest.mark.parametrize(
    ("node", "memory"),
    [("-1", "0-1"), ("7", "0-1"), ("", "0-1"), ("x", "0-1"), ("2", "0-2"), ("0", "0"), ("0", "")],
)
def test_no_cores_where_nearness_is_unknown_or_makes_no_difference(
    node: str, memory: str, tmp_path: Path
) -> None:
    assert node_cpus(ADDRESS, sysfs(tmp_path, node, memory)) is None


@pytest.mark.parametrize(
    "missing",
    [
        f"bus/pci/devices/{ADDRESS}/numa_node",
        "devices/system/node/has_memory",
        "devices/system/node/node1/cpulist",
    ],
)
def test_no_cores_where_sysfs_cannot_be_read(missing: str, tmp_path: Path) -> None:
    root = sysfs(tmp_path, "1")
    (root / missing).unlink()
    assert node_cpus(ADDRESS, root) is None
    assert node_cpus("0000:ff:00.0", root) is None


def test_this_machine_answers() -> None:
    devices = Path("/sys/bus/pci/devices")
    for device in sorted(devices.iterdir())[:3] if devices.is_dir() else ():
        found = node_cpus(device.name)
        assert found is None or found <= set(range(os.cpu_count() or 1))

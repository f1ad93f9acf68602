"""Storage, checkpoints and runs on a real NFS mount, by two hosts that cache each for itself: NFS 4.2 and 3.

What is tested stands in `faults/uml/nfs_checks.py`, which runs once, in one virtual machine.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from faults.uml import machine

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(330)]

VERSIONS = ("4.2", "3")
TESTS = (
    "TestContract",
    "test_a_checkpoint_is_written_and_overwritten",
    "test_what_another_save_left_is_swept",
    "test_files_that_others_read_are_removed_all_the_same",
    "test_the_command_line_finds_damage_done_on_the_server",
    "test_a_run_is_saved_step_by_step_and_restored",
    "test_what_another_host_makes_is_found_at_once",
    "test_a_save_that_another_host_has_overtaken_is_refused",
    "test_ranks_on_two_hosts_save_and_load",
)
_LEAST_OF_CONTRACT = 40
_PROGRAM = Path(__file__).parents[1] / "faults" / "uml" / "nfs_checks.py"
_DISK_BYTES = 2 << 30
_TIMEOUT_S = 300


class Outcomes(NamedTuple):
    """What became of the tests, by version and name without parameters, and what was told of failures."""

    by_test: dict[tuple[str, str], list[str]]
    told: str


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    missing = machine.why_not(*machine.NFS_TOOLS)
    if missing is not None:
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    done = machine.run(
        _PROGRAM,
        ",".join(VERSIONS),
        folder=tmp_path_factory.mktemp("nfs"),
        timeout_s=_TIMEOUT_S,
        disk_bytes=_DISK_BYTES,
    )
    by_test: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for line in done.out.splitlines():
        if line.startswith("test "):
            _, version, outcome, _, name = line.split(" ", 4)
            by_test[version, name.partition("[")[0].partition("::")[0]].append(outcome)
    return Outcomes(by_test, f"exit status {done.status}\n{done.err}")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", TESTS)
def test_on_nfs(outcomes: Outcomes, version: str, name: str) -> None:
    found = outcomes.by_test.get((version, name), [])
    assert set(found) - {"skipped"} == {"passed"}, f"{found}\n{outcomes.told}"
    if name == "TestContract":
        assert found.count("passed") >= _LEAST_OF_CONTRACT


def test_every_test_of_the_program_is_known_here(outcomes: Outcomes) -> None:
    assert {name for _, name in outcomes.by_test} == set(TESTS), outcomes.told
    assert outcomes.told.startswith("exit status 0"), outcomes.told

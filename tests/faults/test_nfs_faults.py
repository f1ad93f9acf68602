"""A real NFS server that is away, full or loses a file, under real mounts of each kind, in a virtual machine."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from faults.uml import machine
from faults.uml.nfs_faults import AWAY_S, CASES, DEADLINE_S, PATH

PROGRAM = Path(__file__).with_name("uml") / "nfs_faults.py"
CLEARING_UP_S = 25.0
"""What a save may take beyond its deadline: lanes are given time to end, and workers to die."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Seen = dict[str, Any]


@pytest.fixture(scope="module")
def all_seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """What every case has seen, by its name; one machine for all, which takes a while to import torch."""
    missing = machine.why_not(*machine.NFS_TOOLS)
    if missing is not None:
        pytest.skip(missing)
    done = machine.run(PROGRAM, folder=tmp_path_factory.mktemp("machine"), timeout_s=280)
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert done.status == 0, f"{done.err}\n{lines}"
    return {line["name"]: line for line in lines}


@pytest.fixture
def seen(all_seen: dict[str, Seen], request: pytest.FixtureRequest) -> Seen:
    """What one case has seen; it has checked that the next save works, and leaves nothing of those before."""
    found = all_seen[request.param]
    assert "failure" not in found, found["failure"]
    return found


def cases(*words: str) -> pytest.MarkDecorator:
    """Run a test with every case whose name begins with `words`."""
    names = [name for name in CASES if name.split()[: len(words)] == list(words)]
    assert names, words
    return pytest.mark.parametrize("seen", names, indirect=True)


def assert_names_the_file(seen: Seen) -> None:
    assert seen["path"].startswith(f"{PATH}/__0_"), seen
    assert seen["path"] in seen["message"], seen
    assert (seen["rank"], seen["lane"]) in {(0, 0), (0, 1)}, seen


@cases("outage")
def test_a_hard_mount_outlives_its_server(seen: Seen) -> None:
    assert (seen["error"], seen["found"]) == (None, "new"), seen
    assert seen["seconds"] >= AWAY_S


@cases("packets")
def test_a_hard_mount_outlives_its_network(seen: Seen) -> None:
    assert (seen["error"], seen["found"]) == (None, "new"), seen
    assert seen["seconds"] >= AWAY_S


@cases("refusal")
def test_a_soft_mount_without_its_server_fails_the_save(seen: Seen) -> None:
    assert (seen["error"], seen["found"]) == ("WriteError", "old"), seen
    assert seen["errno"] == (errno.ETIMEDOUT if "softerr" in seen["name"] else errno.EIO), seen
    assert_names_the_file(seen)


@cases("full")
def test_a_full_server_fails_the_save(seen: Seen) -> None:
    assert (seen["error"], seen["errno"], seen["found"]) == ("WriteError", errno.ENOSPC, "old"), seen
    assert_names_the_file(seen)
    assert not [name for name in seen["left"] if ".distcp" in name.split("/")[0]], "images are removed"


@cases("removed", "3")
def test_a_file_that_was_removed_on_the_server_fails_the_save(seen: Seen) -> None:
    assert (seen["error"], seen["errno"], seen["found"]) == ("WriteError", errno.ESTALE, "old"), seen
    assert_names_the_file(seen)


@cases("removed", "4.2")
def test_a_file_that_was_removed_without_any_error_is_not_published(seen: Seen) -> None:
    # By this version the client goes on writing to it.
    assert seen["error"] in {"WriteError", "CommitError"}, seen
    assert seen["found"] == "old", seen
    assert f"{PATH}/__0_" in seen["message"], seen


@cases("gone")
def test_a_hard_mount_whose_server_is_gone_ends_the_save_at_its_deadline(seen: Seen) -> None:
    assert (seen["error"], seen["errno"], seen["found"]) == ("WriteError", errno.ETIMEDOUT, "old"), seen
    assert seen["path"].startswith(PATH), seen
    assert PATH in seen["message"], seen
    assert DEADLINE_S <= seen["seconds"] < DEADLINE_S + CLEARING_UP_S, seen

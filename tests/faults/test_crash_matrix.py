"""The crash matrix: saves recorded once, every prefix of what they did, and every legal loss after it.

See lab/disk.py for what a crash may leave, lab/checks.py for what must hold then, lab/shim/sitecustomize.py
for how saves are recorded. crash.py beside this file kills real processes at the same points.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from distckpt import StorageWriter
from distckpt.storage.posix import PosixStorage
from faults.checkpoints import is_running, wait_until
from faults.lab.checks import Finding, Laboratory, RealDirectory, check_is_only, save_again, verify
from faults.lab.disk import Disk, State
from faults.lab.memory import MemoryStorage
from faults.lab.saves import (
    NUM_FILES,
    SETTINGS,
    Recording,
    Setting,
    dump,
    read_tree,
    record,
    record_after_crash,
    small_parts,
    step_path,
    write_tree,
)
from faults.lab.shim.sitecustomize import CHANGES, Config, Entry, environment, install, read_log
from faults.programs import Programs, Zygote

Record = Callable[[Setting], Recording]
FRESH = Setting("dcp", 1, 1, "fresh")
OVERWRITE = Setting("dcp", 1, 1, "overwrite")
TWO_RANKS = Setting("dcp", 2, 1, "overwrite")
STEPS = Setting("checkpointer", 2, 1, "fresh")
TYPICAL = {
    "dcp-1x1-fresh", "dcp-1x2-overwrite", "dcp-2x2-overwrite", "checkpointer-2x2-fresh",
    "checkpointer-2x1-beside",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _small_parts() -> Iterator[None]:
    with small_parts():
        yield


@pytest.fixture(scope="module")
def ranks(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    started = Programs(zygote, tmp_path_factory.mktemp("programs"))
    yield started
    assert not started.children


@pytest.fixture(scope="module")
def recorded(ranks: Programs, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Records a save, each setting once."""
    recordings: dict[Setting, Recording] = {}

    def get(setting: Setting) -> Recording:
        if setting not in recordings:
            recordings[setting] = record(ranks, setting, tmp_path_factory.mktemp(str(setting)))
        return recordings[setting]

    return get


def say(capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Print a line of the report, whatever becomes of the test."""
    with capsys.disabled():
        sys.stdout.write(f"\n{text} ")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "setting",
    [
        # These do together what any of the others does.
        pytest.param(one, marks=[pytest.mark.thorough] * (str(one) not in TYPICAL))
        for one in SETTINGS
    ],
    ids=str,
)
def test_every_point_and_every_loss(
    recorded: Record,
    tmp_path: Path,
    setting: Setting,
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    recording = recorded(setting)
    check_recording(recording)
    if setting.start == "beside":
        assert step_path(0) in recording.after
        assert step_path(1) in recording.before
        assert step_path(1) not in recording.after
    laboratory = Laboratory(recording)
    with StorageWriter(distributed_timeout_minutes=0.5) as writer:
        laboratory.run(RealDirectory(tmp_path, laboratory, writer))
    points, states, on_disk = laboratory.num_points, len(laboratory.checked), len(laboratory.on_disk)
    record_property("points", points)
    operations = sum(bool(re.fullmatch(CHANGES, entry["op"])) for entry in recording.entries)
    say(
        capsys,
        f"{setting}: {operations} operations, {points} points, {states} distinct states, 0 failures; "
        f"{on_disk} of them in a real directory too",
    )
    # What a shim or a disk that misses something would not reach.
    assert operations >= 40 * setting.world
    assert points >= 1000
    assert states >= 500
    assert on_disk >= 30


def check_recording(recording: Recording) -> None:
    """Check that the shim has seen everything, in every process, and the disk understood it."""
    setting, entries = recording.setting, recording.entries
    assert not [entry for entry in entries if entry["op"] == "unseen"]
    disk = Disk(recording.before)
    for entry in entries:
        disk.apply(entry)
    assert disk.tree() == recording.after
    written = Counter(
        entry["path"] for entry in entries if entry["op"] == "write" and ".distcp." in entry["path"]
    )
    for rank in range(setting.world):
        counts = [count for path, count in written.items() if f"/__{rank}_" in path]
        assert len(counts) >= NUM_FILES, dump(recording)
        assert min(counts) >= 4, dump(recording)
    writers = {entry["role"] for entry in entries if entry["op"] == "write" and ".distcp." in entry["path"]}
    # A worker takes what its neighbour leaves: all of it, if that is slow to start.
    expected = {role for role in setting.roles if ("worker" in role) == (setting.workers > 1)}
    assert writers <= expected
    assert {role.partition(".")[0] for role in writers} == {f"rank{rank}" for rank in range(setting.world)}
    assert {entry["role"] for entry in entries} >= {f"rank{rank}" for rank in range(setting.world)}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "setting", [FRESH, pytest.param(OVERWRITE, marks=pytest.mark.thorough), STEPS], ids=str
)
def test_a_save_after_a_crash_and_then_a_power_failure(
    recorded: Record,
    ranks: Programs,
    tmp_path: Path,
    setting: Setting,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a killed process did is not durable yet when the next one goes on from it."""
    crashed = recorded(setting)
    # Names are what a process that goes on takes for durable; in a larger world, those of directories only.
    names = {"mkdir", "rename"} if setting.world == 1 else {"mkdir"}
    done = [entry["op"] in names and "errno" not in entry for entry in crashed.entries]
    counts = [count for count, is_name in enumerate(done, 1) if is_name]
    assert len(counts) >= 4
    findings = []
    points = 0
    for count in counts:
        laboratory = Laboratory(record_after_crash(ranks, crashed, count, tmp_path / str(count)))
        first = 0 if setting.world == 1 else laboratory.recording.published - 3
        try:
            laboratory.run(first=first)
        except Finding as finding:
            findings.append(f"killed after operation {count}: {finding}")
        points += laboratory.num_points
    say(
        capsys,
        f"{setting}, saved again after {len(counts)} crashes: {points} points, {len(findings)} failures",
    )
    assert not findings, "\n".join(findings)
    assert points >= 20 * len(counts)


def omitting(recording: Recording, is_omitted: Callable[[int, Entry], bool]) -> Recording:
    """Return what would have been recorded without some of the fsyncs."""
    entries: list[Entry] = []
    for at, entry in enumerate(recording.entries, 1):
        if entry["op"] == "fsync" and is_omitted(at, entry):
            entry = entry.copy()
            entry["op"] = "omitted"
        entries.append(entry)
    assert entries != recording.entries, "there is no such fsync"
    return replace(recording, entries=entries)


FILES = {
    "images": r".*/__\d+_\d+\.distcp[^/]*",
    "manifests": r".*/rank-\d+\.json\.\w+\.tmp",
    "commit record": r".*/commit-\w+\.json\.\w+\.tmp",
    "metadata": r".*/\.metadata\.\w+\.tmp",
    "directory of the save": r".*/\.distckpt/\w+",
    "directory of records": r".*/\.distckpt",
}
"""Not the owner record: one that is lost or torn refuses a save that was under way, and the power failure
that lost it has ended that one."""
MUTATED = [FRESH, OVERWRITE, TWO_RANKS]


@pytest.mark.slow
@pytest.mark.parametrize("setting", MUTATED, ids=str)
@pytest.mark.parametrize("what", FILES)
def test_the_lab_notices_a_file_that_is_not_made_durable(
    recorded: Record, setting: Setting, what: str
) -> None:
    mutated = omitting(recorded(setting), lambda _, entry: bool(re.fullmatch(FILES[what], entry["path"])))
    with pytest.raises(Finding):
        Laboratory(mutated).run(first=mutated.published)


@pytest.mark.slow
@pytest.mark.parametrize("setting", MUTATED, ids=str)
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_lab_notices_names_that_are_not_made_durable(
    recorded: Record, setting: Setting, when: str
) -> None:
    recording = recorded(setting)
    published, path = recording.published, setting.checkpoint
    mutated = omitting(
        recording, lambda at, entry: entry["path"] == path and (at < published) == (when == "before")
    )
    with pytest.raises(Finding):
        Laboratory(mutated).run(first=published)


@pytest.mark.slow
def test_the_lab_notices_a_new_directory_that_is_not_made_durable(recorded: Record) -> None:
    recording = recorded(FRESH)
    with pytest.raises(Finding, match="published"):
        Laboratory(omitting(recording, lambda _, entry: entry["path"] == "")).run(first=recording.published)


@pytest.mark.slow
@pytest.mark.parametrize("earlier", [r".*/\.metadata(\.\w+\.tmp)?", "sweep"])
def test_the_lab_notices_steps_that_come_too_early(recorded: Record, earlier: str) -> None:
    """Publishes before the manifest is written, or sweeps before the publication."""
    recording = recorded(OVERWRITE)
    if earlier == "sweep":
        moved = [entry for entry in recording.entries if entry["op"] in {"unlink", "rmdir"}]
        before = recording.published - 1
    else:
        moved = [entry for entry in recording.entries if re.fullmatch(earlier, entry["path"])]
        paths = [entry["path"] for entry in recording.entries]
        before = next(at for at, path in enumerate(paths) if re.fullmatch(FILES["manifests"], path))
    assert moved
    kept = [entry for entry in recording.entries[:before] if entry not in moved]
    rest = [entry for entry in recording.entries[before:] if entry not in moved]
    with pytest.raises(Finding):
        Laboratory(replace(recording, entries=[*kept, *moved, *rest])).run()


@pytest.mark.slow
def test_the_next_save_does_in_memory_what_it_does_on_disk(recorded: Record, tmp_path: Path) -> None:
    recording = recorded(OVERWRITE)
    disk = recording.disk()
    for count, entry in enumerate(recording.entries):
        disk.apply(entry)
        if count % 4:
            continue
        memory = MemoryStorage(disk.tree(), setting_path := recording.setting.checkpoint)
        write_tree(disk.tree(), tmp_path / str(count))
        real = PosixStorage(str(tmp_path / str(count) / setting_path))
        for storage in (memory, real):
            save_again(storage)
            check_is_only(storage, verify(storage))
        found = read_tree(tmp_path / str(count))
        assert found.keys() == memory.tree.keys()
        assert {path for path in found if found[path] != memory.tree[path]} <= {
            f"{setting_path}/.distckpt/owner"
        }


def do(disk: Disk, *entries: tuple[str, str, str]) -> None:
    """Apply operations: (op, path, what it needs besides)."""
    for op, path, what in entries:
        entry: Entry = {"op": op, "path": path, "role": "", "handle": path}
        if op == "rename":
            entry["to"] = what
        if op == "fsync":
            disk.apply({"op": "open", "path": path, "role": "", "handle": path})
        if op == "write":
            entry["offset"], entry["data"] = 0, what
        disk.apply(entry)


# base64 of b"abcd"
DATA = "YWJjZA=="


def states(disk: Disk) -> set[State]:
    found = list(disk.losses())
    assert len(found) == len(set(found))
    return set(found)


def tree(**files: bytes) -> State:
    return frozenset(files.items())


def test_a_new_file_may_be_there_torn_or_empty_or_not() -> None:
    disk = Disk({})
    do(disk, ("create", "a", ""), ("write", "a", DATA))
    assert states(disk) == {tree(), tree(a=b""), tree(a=b"abcd"), tree(a=b"ab\0\0"), tree(a=b"\0\0\0\0")}
    do(disk, ("fsync", "a", ""))
    assert states(disk) == {tree(), tree(a=b"abcd")}
    do(disk, ("fsync", "", ""))
    assert states(disk) == {tree(a=b"abcd")}


def test_a_name_may_be_durable_before_what_it_names() -> None:
    disk = Disk({"a": b"old"})
    do(disk, ("create", "b", ""), ("fsync", "", ""), ("write", "b", DATA))
    assert tree(a=b"old", b=b"") in states(disk)
    assert tree(a=b"old") not in states(disk)


def test_a_rename_leaves_the_old_or_the_new() -> None:
    disk = Disk({"a": b"old", "b": b"new"})
    do(disk, ("rename", "b", "a"))
    assert states(disk) == {tree(a=b"old", b=b"new"), tree(a=b"new", b=b"new"), tree(a=b"new")}
    do(disk, ("fsync", "", ""))
    assert states(disk) == {tree(a=b"new")}


def test_a_removed_file_may_still_be_there() -> None:
    disk = Disk({"a": b"old"})
    do(disk, ("unlink", "a", ""))
    assert states(disk) == {tree(), tree(a=b"old")}


def test_a_directory_that_is_lost_takes_everything_with_it() -> None:
    disk = Disk({})
    do(disk, ("mkdir", "d", ""), ("create", "d/a", ""), ("write", "d/a", DATA), ("fsync", "d/a", ""))
    do(disk, ("fsync", "d", ""))
    whole: State = frozenset({("d", None), ("d/a", b"abcd")})
    assert states(disk) == {frozenset(), whole}
    do(disk, ("fsync", "", ""))
    assert states(disk) == {whole}


def test_where_much_is_pending_each_single_loss_is_there() -> None:
    disk = Disk({})
    names = "abcdefgh"
    for name in names:
        do(disk, ("create", name, ""), ("write", name, DATA))
    found = states(disk)
    whole = dict.fromkeys(names, b"abcd")
    for name, other in itertools.permutations(names, 2):
        assert tree(**{key: data for key, data in whole.items() if key != name}) in found
        assert tree(**whole | {name: b""}) in found
        assert tree(**whole | {name: b"ab\0\0"}) in found
        assert tree(**dict.fromkeys(names, b"") | {name: b"abcd"}) in found
        assert tree(**{name: b"abcd"}) in found
        assert tree(**{key: b"ab\0\0" if key == other else b"abcd" for key in names if key != name}) in found


@pytest.fixture
def shim(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Installs a shim with the rules given, on a directory that is returned."""
    removers: list[Callable[[], None]] = []

    def put_in(*rules: dict[str, object]) -> Path:
        config = config_in(tmp_path)
        config["rules"] = list(rules)
        removers.append(install(config))
        return tmp_path / "root"

    yield put_in
    for remove in removers:
        remove()


def config_in(folder: Path) -> Config:
    for name in ("root", "shim"):
        (folder / name).mkdir()
    return {"root": str(folder / "root"), "folder": str(folder / "shim"), "role": "test"}


def test_the_shim_sees_what_does_not_pass_through_it(shim: Callable[..., Path], tmp_path: Path) -> None:
    root = shim()
    (root / "a").mkdir()
    (root / "b").write_bytes(b"unseen")
    (root / "a").chmod(0o700)
    entries = read_log(tmp_path / "shim")
    unseen = ["b (open)", "a (os.chmod)"]
    assert [(entry["op"], entry["path"]) for entry in entries] == [
        ("mkdir", "a"),
        *(("unseen", p) for p in unseen),
    ]
    disk = Disk({})
    disk.apply(entries[0])
    assert disk.tree() != read_tree(root)


def test_the_shim_takes_itself_out_again(tmp_path: Path) -> None:
    real = {name: getattr(os, name) for name in ("open", "write", "remove", "unlink", "rename")}
    remove = install(config_in(tmp_path))
    assert all(getattr(os, name) != function for name, function in real.items())
    remove()
    assert all(getattr(os, name) == function for name, function in real.items())
    (tmp_path / "root" / "a").mkdir()
    assert read_log(tmp_path / "shim") == []


@pytest.mark.parametrize(
    ("n", "since", "expected"), [(0, False, "xxxx"), (2, False, ".x.."), (2, True, ".xxx")]
)
def test_the_shim_fails_what_it_is_told_to(
    shim: Callable[..., Path], n: int, since: bool, expected: str
) -> None:
    rule = {"do": "fail", "errno": errno.EDQUOT, "op": "mkdir", "path": "[a-d]", "n": n, "since": since}
    root = shim(rule)
    (root / "other").mkdir()
    for name, outcome in zip("abcd", expected, strict=True):
        if outcome == ".":
            os.mkdir(root / name)
        else:
            with pytest.raises(OSError, match="quota") as caught:
                os.mkdir(root / name)
            assert caught.value.errno == errno.EDQUOT
            assert caught.value.filename == str(root / name)
        assert (root / name).exists() == (outcome == ".")


def test_the_shim_fails_after_the_fact(shim: Callable[..., Path]) -> None:
    root = shim({"do": "fail", "errno": errno.EIO, "op": "mkdir", "when": "after"})
    with pytest.raises(OSError, match="Input/output"):
        os.mkdir(root / "a")
    assert (root / "a").exists()


PROGRAM = "import os, sys; os.mkdir(sys.argv[1] + '/a'); os.mkdir(sys.argv[1] + '/b')"


def start_program(folder: Path, rule: dict[str, object]) -> subprocess.Popen[bytes]:
    config = config_in(folder)
    config["rules"] = [rule]
    command = [sys.executable, "-c", PROGRAM, config["root"]]
    return subprocess.Popen(command, env=os.environ | environment(config))


@pytest.mark.parametrize(("when", "left"), [("before", {"a"}), ("after", {"a", "b"})])
def test_the_shim_kills_a_process(tmp_path: Path, when: str, left: set[str]) -> None:
    process = start_program(tmp_path, {"do": "kill", "op": "mkdir", "n": 2, "when": when})
    assert process.wait(20) == -signal.SIGKILL
    assert {path.name for path in (tmp_path / "root").iterdir()} == left
    assert {entry["role"] for entry in read_log(tmp_path / "shim")} == {"test.worker0"}


def test_the_shim_stops_a_process_without_holding_up_others(tmp_path: Path) -> None:
    process = start_program(
        tmp_path, {"do": "stop", "op": "mkdir", "path": "b", "n": 1, "role": "test.worker0"}
    )
    try:
        stopped = Path(f"/proc/{process.pid}/stat")
        wait_until(lambda: stopped.read_text().split()[2] == "T", 20, "it is stopped")
        remove = install(
            {"root": str(tmp_path / "root"), "folder": str(tmp_path / "shim"), "role": "other", "rules": []}
        )
        os.mkdir(tmp_path / "root" / "c")
        remove()
        assert is_running(process.pid)
        process.send_signal(signal.SIGCONT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
    assert [entry["path"] for entry in read_log(tmp_path / "shim")] == ["a", "c", "b"]

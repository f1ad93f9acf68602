"""Kills real processes, with SIGKILL, at points of the crash matrix: `make crash`.

In every setting of the matrix a save is recorded; then it is run again and again, and at one operation of one
process each time, just before or just after it, that process, another one or all of them are killed. Then the
checkpoint of before, or the new one, must load bit for bit, the next save must work and leave nothing but its
files, and no process may be left. The exit status is 1 if anything of that fails.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import psutil
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from distckpt import StorageWriter
from faults.checkpoints import is_running, wait_until
from faults.lab.checks import Laboratory, check_directory, require
from faults.lab.saves import (
    NEW,
    SETTINGS,
    Place,
    Recording,
    Setting,
    forget,
    read_tree,
    record,
    small_parts,
    start,
    write_tree,
)
from faults.lab.shim.sitecustomize import CHANGES, read_log
from faults.programs import Programs, Zygote

_WAIT_S = 2.0
"""For ranks whose peers are gone, where they agree through storage alone."""
_END_S = 20.0


@dataclass(frozen=True)
class Point:
    """Where to kill whom.

    Attributes:
        role: Whose operation.
        n: Which of its operations, from 1.
        op: What that was when it was recorded.
        when: "before" or "after" it.
        target: As the shim takes it.
    """

    role: str
    n: int
    op: str
    when: str
    target: str

    def __str__(self) -> str:
        """Return what names it in reports."""
        whom = {"self": "itself", "all": "all"}.get(self.target, self.target)
        return f"{self.role} kills {whom} {self.when} its operation {self.n} ({self.op})"

    def rule(self) -> dict[str, object]:
        """Return the rule for the shim."""
        role = re.escape(self.role)
        return {"do": "kill", "role": role, "n": self.n, "when": self.when, "target": self.target}


def points_of(recording: Recording) -> list[Point]:
    """Return every point of a recorded save, in order; whom to kill at it changes from one to the next."""
    points: list[Point] = []
    counts: Counter[tuple[str, str]] = Counter()
    roles = recording.setting.roles
    for entry in recording.entries:
        if not re.fullmatch(CHANGES, entry["op"]):
            continue
        role = entry["role"]
        for when in ("before", "after"):
            if when == "after" and "errno" in entry:
                continue
            counts[role, when] += 1
            others = [other for other in roles if other != role] or ["self"]
            target = ("self", "all", "self", others[len(points) % len(others)])[len(points) // 3 % 4]
            what = f"{entry['op']} {entry['path']}"
            points.append(Point(role, counts[role, when], what, when, target))
    return points


def spread(points: list[Point], count: int) -> list[Point]:
    """Return all points; first about `count`, as many of each rank as of all workers, at even distances."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(group_of(point), []).append(point)
    each = -(-count // len(groups))
    first = [
        [own[len(own) * number // each] for number in range(min(each, len(own)))] for own in groups.values()
    ]
    in_turn = [point for row in itertools.zip_longest(*first) for point in row if point is not None]
    return list(dict.fromkeys([*in_turn, *reversed(points)]))


def group_of(point: Point) -> str:
    """Return what the totals call the process whose operation it is."""
    return "workers" if ".worker" in point.role else point.role


def _processes_of(groups: set[int]) -> Iterator[int]:
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) in groups and is_running(pid):
                yield pid
        except ProcessLookupError:
            continue


class Killer:
    """Runs saves that are killed.

    Args:
        programs: Starts them.
        writer: For the saves after them.
    """

    def __init__(self, programs: Programs, writer: StorageWriter) -> None:
        self._programs = programs
        self._writer = writer

    def kill(self, recording: Recording, point: Point, folder: Path) -> bool:
        """Run a save that is killed at a point, and check what is left; returns whether it got there.

        Raises:
            AssertionError: Something does not hold.
        """
        setting = recording.setting
        place = Place(folder)
        write_tree(recording.before, place.root)
        children = start(self._programs, setting, place, seed=NEW, rules=[point.rule()], timeout_s=_WAIT_S)
        groups = {child.pid for child in children}
        try:
            statuses = [child.wait(_END_S).status for child in children]
            wait_until(lambda: not list(_processes_of(groups)), 3, "no process is left")
        finally:
            forget(self._programs, children)
        was_killed = (place.shim / "killed").exists()
        require(was_killed or not any(statuses), f"the save failed without being killed: {children[0].done}")
        seed = self._check_committed(recording, place)
        check_directory(place.root, setting, seed, self._writer)
        return was_killed

    def _check_committed(self, recording: Recording, place: Place) -> int | None:
        """Check that what is there is what the log says; returns the seed of the state."""
        setting, tree = recording.setting, read_tree(place.root)
        entries = read_log(place.shim)
        path = f"{setting.checkpoint}/.metadata"
        is_published = any(entry.get("to") == path and "errno" not in entry for entry in entries)
        laboratory = Laboratory(recording)
        if not is_published:
            require(tree.get(path) == recording.before.get(path), "the metadata is not the old one")
            return laboratory.check_committed(tree, has_returned=False)
        laboratory.check_beside(tree)
        require(tree.get(path) not in {None, recording.before.get(path)}, "the new metadata is not there")
        return NEW


def run(num_points: int, folder: Path, settings: list[Setting]) -> int:
    """Kill at `num_points` points, or a few more; returns the exit status.

    How many operations a worker has differs from run to run: a save that ends before its point does not
    count.
    """
    started = time.monotonic()
    programs_folder = folder / "programs"
    programs_folder.mkdir()
    zygote = Zygote()
    kills: Counter[str] = Counter()
    missed = failures = done = 0
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        disable=not sys.stdout.isatty(),
    )  # fmt: skip
    task = progress.add_task("killed", total=num_points)

    def say(text: str) -> None:
        progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    try:
        with small_parts(), StorageWriter(distributed_timeout_minutes=0.5) as writer, progress:
            programs = Programs(zygote, programs_folder)
            killer = Killer(programs, writer)
            for number, setting in enumerate(settings):
                recording = record(programs, setting, folder / f"recorded{number}")
                points = points_of(recording)
                quota = -(-num_points // len(settings))
                goal = kills.total() + quota
                for point in spread(points, quota):
                    if kills.total() + failures >= goal:
                        break
                    done += 1
                    place = folder / f"run{done}"
                    try:
                        was_killed = killer.kill(recording, point, place)
                    except Exception:  # noqa: BLE001 - each point is for itself
                        failures += 1
                        say(f"FAILED {setting}: {point}\n{traceback.format_exc()}")
                    else:
                        kills[group_of(point)] += was_killed
                        missed += not was_killed
                    progress.update(task, completed=kills.total())
                    shutil.rmtree(place, ignore_errors=True)
                seconds = time.monotonic() - started
                so_far = f"{kills.total()} kills, {failures} failures, {seconds:.0f} s"
                say(f"{setting}: {quota} of {len(points)} points; so far {so_far}")
    finally:
        zygote.close()
    by_role = ", ".join(f"{count} at operations of {role}" for role, count in sorted(kills.items()))
    say(
        f"{kills.total()} kills in {len(settings)} settings ({by_role}), {failures} failures; "
        f"{missed} saves ended before their point; {time.monotonic() - started:.0f} s"
    )
    return 1 if failures or kills.total() < num_points else 0


def main() -> int:
    """Read the command line, and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=240, metavar="N", help="kills (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="settings whose name contains TEXT")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    settings = [setting for setting in SETTINGS if arguments.only in str(setting)]
    with tempfile.TemporaryDirectory(prefix="crash-") as folder:
        return run(arguments.points, Path(folder), settings)


if __name__ == "__main__":
    sys.exit(main())

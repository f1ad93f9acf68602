"""Kills processes of jobs that save all the time, and checks that nothing is torn, lost or left behind.

    python tests/faults/soak.py --kills 200 --seed 7

One job saves below one folder: with a Checkpointer or a StorageWriter, on one rank or two, with one to four
lanes, in the background or not. At a random moment some of its processes are killed. A job that has lost a
rank is started again at once, as another kind of job, and resumes from the newest step; sometimes the rank
that is left lives on beside it for a while. Values are a function of the step and of the save, so that a
mixture of two saves is seen.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import distributed
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from distckpt import Checkpointer, StorageReader, StorageWriter
from distckpt.commit import leftovers, reclaim
from distckpt.storage import open_storage
from faults.programs import Child, Programs, Zygote

_RUN_VARIABLE = "DISTCKPT_TEST_RUN"
_NUM_PARTS = 8
_PART_NUMBERS = 1 << 16
_STATE_BYTES = 8 * (_NUM_PARTS + 1) * _PART_NUMBERS
_KEPT_STEPS = 3
_MOST_STATES = 24
"""Bound of the disk usage in states: those kept, those being replaced, and what kills leave meanwhile."""
_GRACE_S = 2.0
_STUCK_S = 30.0
_LOOK_S = 0.03
_KINDS = ("checkpointer", "save", "async_save")
_WORKER = re.compile(rb"distckpt\.worker import main; main\(\d+, (\d+)")


class Fault(Exception):
    """Something that must never happen."""


def step_path(root: Path | str, step: int) -> Path:
    return Path(root) / f"step-{step:08}"


def _numbers(step: int, version: int, part: int) -> torch.Tensor:
    seed = ((step * 1_000_003 + version) * 31 + part) * 2_654_435_761
    return (
        torch.arange(_PART_NUMBERS, dtype=torch.int64).mul_(6_364_136_223_846_793_005).add_(seed % (1 << 62))
    )


def state_of(step: int, version: int, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Return what one rank saves: its own parts, and what all ranks have alike."""
    parts = {f"part{n}": _numbers(step, version, n) for n in range(_NUM_PARTS) if n % world == rank}
    return {"version": version, "step": step, "common": _numbers(step, version, _NUM_PARTS), **parts}


def check_state(state: dict[str, Any], step: int) -> int:
    """Compare a state that was loaded, bit for bit, with what was saved; returns its version."""
    expected = state_of(step, state["version"])
    different = [
        name
        for name, value in expected.items()
        if not (torch.equal(value, state[name]) if isinstance(value, torch.Tensor) else value == state[name])
    ]
    if different:
        raise Fault(f"step {step}, version {state['version']}: {', '.join(different)} are not what was saved")
    return int(state["version"])


def empty_state() -> dict[str, Any]:
    """Return a state to load into."""
    state = state_of(0, 0)
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.fill_(-1)
    return state


def _tell(what: str, **fields: Any) -> None:
    # In one piece, whatever kills this process.
    os.write(1, (json.dumps({"what": what, **fields}) + "\n").encode())


def _text(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {_text(failure)}" for rank, (failure, _) in error.failures.items())
    return f"{type(error).__name__}: {error}"[:1000]


class _Rank:
    """One rank of a job: resumes, then saves until it is killed, or as often as it was told to."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.rank, self.world = int(order["rank"]), int(order["world"])
        self.root = Path(order["root"])
        settings = {
            "dist_ckpt_workers": order["workers"],
            "distributed_timeout_minutes": 0.25,
            "ckpt_host_memory": "96MiB",
            "log_level": "error",
        }
        self.checkpointer = Checkpointer(self.root, async_save=True, **settings)
        self.writer = None if order["kind"] == "checkpointer" else StorageWriter(**settings)
        self.pending: list[tuple[int, int, Any]] = []
        self.last_committed = -1
        self.beside_others: set[int] = set()
        """Steps that were saved while ranks of an earlier job lived: these may have been killed meanwhile."""

    def run(self) -> None:
        newest = self.resume()
        if "steps" in self.order:
            for count, step in enumerate(self.order["steps"]):
                self.save(step, 1000 * int(self.order["number"]) + count)
                self.settle(0)
            self.checkpointer.close()
            return
        # All ranks draw the same numbers, whatever becomes of the saves.
        rng = random.Random(self.order["seed"])
        for count in range(1000):
            if newest >= 0 and rng.random() < 0.4:
                step = rng.randint(max(0, newest - 1), newest)
            else:
                # A step that is left out, or was not completed, stays behind the newest.
                step = newest = newest + rng.randint(1, 2)
            drains = rng.random() < 0.4
            self.save(step, 1000 * int(self.order["number"]) + count)
            self.settle(0 if drains else 1)
            if drains and self.rank == 0:
                self.check_leftovers(step)
        _tell("worn out")
        time.sleep(_STUCK_S)

    def resume(self) -> int:
        for attempt in range(5):
            state = empty_state()
            try:
                step = self.checkpointer.restore(state)
            except Exception as error:
                # A rank of the job before this one may still replace what is being read.
                if not self.order["others"] or attempt == 4:
                    raise
                _tell("again", error=repr(error))
                continue
            if step is not None:
                check_state(state, step)
            _tell("restored", step=-1 if step is None else step, version=state["version"])
            return -1 if step is None else step
        raise AssertionError

    def save(self, step: int, version: int) -> None:
        _tell("begun", step=step, version=version)
        (self.beside_others.add if self.has_others() else self.beside_others.discard)(step)
        state = state_of(step, version, self.rank, self.world)
        path = os.fspath(step_path(self.root, step))
        try:
            if self.writer is None:
                ending = self.checkpointer.save(step, state).result
            elif self.order["kind"] == "save":
                state_dict_saver.save(state, storage_writer=self.writer, checkpoint_id=path)
                ending = None
            else:
                response: Any = state_dict_saver.async_save(
                    state, storage_writer=self.writer, checkpoint_id=path
                )
                ending = response.upload_completion.result
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - judged by whoever kills
            _tell("failed", step=step, version=version, error=_text(error))
            # Not again at once: without its peer a rank can do nothing else.
            time.sleep(0.02)
            return
        # It may change at once.
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.fill_(-2)
        self.pending.append((step, version, ending))

    def settle(self, left: int) -> None:
        """Wait until at most `left` saves are in flight; one, for what torch saves."""
        while len(self.pending) > (left if self.writer is None else 0):
            step, version, ending = self.pending.pop(0)
            try:
                if ending is not None:
                    ending(_STUCK_S)
            except (Exception, CheckpointException) as error:  # noqa: BLE001 - judged by whoever kills
                _tell("failed", step=step, version=version, error=_text(error))
            else:
                _tell("committed", step=step, version=version)
                self.last_committed = step
                if self.rank == 0:
                    self.retain()

    def retain(self) -> None:
        """Remove old steps, as a trainer does."""
        steps = self.checkpointer.steps()
        for step in steps:
            if step < steps[-1] - _KEPT_STEPS:
                # At once: a half of it would look like what a save has left.
                removed = self.root / f"removed-{uuid.uuid4().hex}"
                with contextlib.suppress(FileNotFoundError):
                    step_path(self.root, step).rename(removed)
                shutil.rmtree(removed, ignore_errors=True)

    def has_others(self) -> bool:
        """Say whether ranks of an earlier job live."""
        return any(os.path.exists(f"/proc/{pid}") for pid in self.order["others"])

    def check_leftovers(self, step: int) -> None:
        """See that nothing is left of saves that were killed or have failed, where nobody else saves."""
        if step in self.beside_others or self.has_others():
            return
        # With Checkpointers, another rank may have begun its next save.
        if self.world > 1 and self.writer is None:
            return
        path = step_path(self.root, step)
        if self.last_committed != step or not (path / ".metadata").exists():
            return
        if names := leftovers(open_storage(path)):
            _tell("dirty", step=step, names=names)
        if self.writer is None:
            partial = [
                entry.name
                for entry in self.root.glob("step-*")
                if entry.name < path.name and not (entry / ".metadata").exists()
            ]
            if partial:
                _tell("partial", step=step, names=partial)

    last_committed = -1


def run_rank(order: dict[str, Any]) -> None:
    """Be one rank of a job; see `Soak`."""
    if order["world"] > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{order['meeting']}",
            rank=order["rank"],
            world_size=order["world"],
            timeout=datetime.timedelta(seconds=20),
        )
    try:
        _Rank(order).run()
    except BaseException as error:
        _tell("ended", error=_text(error))
        raise
    # To end the interpreter takes a second.
    os._exit(0)


@dataclass
class Job:
    """Some ranks that save together."""

    number: int
    kind: str
    workers: int
    ranks: list[Child]
    newest_before: int
    others: list[int]
    is_disturbed: bool = False
    progress: float = field(default_factory=time.monotonic)
    read: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return f"job {self.number} ({self.kind}, ranks {len(self.ranks)}, workers {self.workers})"


class Soak:
    """Keeps a job saving, and kills.

    Args:
        kills: How often.
        seed: Of all choices; moments are as the machine has them.
        folder: For everything that is written.
        zygote: Forks the ranks.
    """

    def __init__(self, kills: int, seed: int, folder: Path, zygote: Zygote) -> None:
        self.kills = kills
        self.totals: Counter[str] = Counter()
        self.root = folder / "root"
        self.root.mkdir()
        self._rng = random.Random(seed)
        (folder / "programs").mkdir()
        self._programs = Programs(zygote, folder / "programs")
        self._number = 0
        self._newest = -1
        self._acknowledged: dict[int, int] = {}
        self._survivors: list[tuple[float, Child, Job]] = []
        self._orphans: dict[int, float] = {}
        self._shared_before = set(Path("/dev/shm").glob("distckpt*"))
        self._looked_at_disk = 0.0

    def run(self, progress: Iterator[None] | None = None) -> Counter[str]:
        """Kill as often as was asked for, then have everything cleaned up, and see that it is.

        Raises:
            Fault: Something was torn, lost, or left behind.
        """
        started = time.monotonic()
        try:
            job = self._start()
            while self.totals["kills"] < self.kills:
                self._watch(job, self._rng.choice((0.05, 0.3, 0.7, 1.2)) * (0.5 + self._rng.random()))
                job = self._strike(job)
                if progress is not None:
                    next(progress)
            self._end(job)
        finally:
            for child in self._programs.children:
                _end(child)
        self.totals["seconds"] = round(time.monotonic() - started)
        return self.totals

    def _start(self, **order: Any) -> Job:
        self._number += 1
        world = 1 if order else self._rng.choice((1, 1, 2))
        kind = "checkpointer" if order else self._rng.choice(_KINDS)
        workers = self._rng.choice((1, 2, 4))
        others = [child.pid for _, child, _ in self._survivors]
        meeting = self.root.parent / f"meeting-{self._number}"
        seed = self._rng.randrange(1 << 30)
        newest = max([-1, *self._acknowledged])
        ranks = [
            self._programs.start(
                run_rank,
                {
                    "root": str(self.root), "meeting": str(meeting), "rank": rank, "world": world,
                    "kind": kind, "workers": workers, "seed": seed, "number": self._number,
                    "others": others, **order,
                },
            )
            for rank in range(world)
        ]  # fmt: skip
        self.totals[f"jobs of {world} rank{'s' * (world > 1)}"] += 1
        return Job(self._number, kind, workers, ranks, newest, others, read=[0] * world)

    def _watch(self, job: Job, seconds: float) -> None:
        """Look on for a while: at what ranks say, at processes, and at the disk."""
        until = time.monotonic() + seconds
        while True:
            self._look(job)
            if time.monotonic() > until:
                return
            time.sleep(_LOOK_S)

    def _look(self, job: Job) -> None:
        for due, child, old in list(self._survivors):
            self._listen(old, is_current=False)
            if time.monotonic() > due:
                _end(child)
                self._survivors.remove((due, child, old))
        self._listen(job)
        for child in job.ranks:
            if _has_ended(child.pid):
                raise Fault(f"a rank of {job} has ended by itself: {child.wait(1).err[-3000:]}")
        if time.monotonic() - job.progress > _STUCK_S:
            raise Fault(f"{job} has committed nothing for {_STUCK_S} s")
        newest = max((step for step in self._steps() if self._is_committed(step)), default=-1)
        if newest < self._newest:
            raise Fault(f"the newest step was {self._newest}, and is {newest}")
        self._newest = newest
        self._look_for_orphans()
        if time.monotonic() - self._looked_at_disk > 0.3:
            self._looked_at_disk = time.monotonic()
            used = sum(_size(Path(folder, name)) for folder, _, names in os.walk(self.root) for name in names)
            self.totals["most MiB on disk"] = max(self.totals["most MiB on disk"], used >> 20)
            if used > _MOST_STATES * _STATE_BYTES:
                raise Fault(f"{used >> 20} MiB on disk: {sorted(map(str, self.root.rglob('*.distcp*')))}")

    def _listen(self, job: Job, *, is_current: bool = True) -> None:
        for rank, child in enumerate(job.ranks):
            with child.out.open("rb") as out:
                out.seek(job.read[rank])
                lines = out.read()
            lines = lines[: lines.rfind(b"\n") + 1]
            job.read[rank] += len(lines)
            for line in map(json.loads, lines.splitlines()):
                self._hear(job, rank, line, is_current=is_current)

    def _hear(self, job: Job, rank: int, line: dict[str, Any], *, is_current: bool) -> None:
        what, step = line["what"], line.get("step", -1)
        if what == "restored":
            self.totals["restored"] += 1
            job.progress = time.monotonic()
            if step < job.newest_before:
                raise Fault(f"{job} resumes from step {step}: step {job.newest_before} was committed")
        elif what == "committed":
            job.progress = time.monotonic()
            if rank == 0:
                self.totals["committed saves"] += 1
                self._acknowledged[step] = max(self._acknowledged.get(step, -1), line["version"])
        elif what == "failed":
            self.totals["failed saves"] += 1
            if not (job.is_disturbed or job.others or not is_current):
                raise Fault(f"a save of {job} has failed, and nothing of it was killed: {line['error']}")
        elif what == "ended" and is_current:
            raise Fault(f"rank {rank} of {job} has ended: {line['error']}")
        elif what == "partial":
            # Those that nobody has claimed are left for a while: the disk is bounded all the same.
            self.totals["most partial directories"] = max(
                self.totals["most partial directories"], len(line["names"])
            )
        elif what == "dirty":
            raise Fault(f"{job} has committed step {step}, and there stay {line['names']}")

    def _strike(self, job: Job) -> Job:
        """Kill something, and start anew what does not live on."""
        workers = [pid for child in job.ranks for pid in _workers_of(child.pid)]
        targets = ["rank", "rank", "everything"] + ["worker", "all workers"] * bool(workers)
        target = self._rng.choice(targets)
        self.totals["kills"] += 1
        self.totals[f"kills of {target}"] += 1
        if target in ("worker", "all workers"):
            job.is_disturbed = True
            for pid in [self._rng.choice(workers)] if target == "worker" else workers:
                _kill(pid)
            return job
        if target == "everything":
            for child in job.ranks:
                _kill(child.pid)
                # Its workers are of its group, unless it has only just been forked.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
        else:
            victim = self._rng.choice(job.ranks)
            _kill(victim.pid)
            left = [child for child in job.ranks if child is not victim]
            lives_on_s = self._rng.choice((0.0, 0.3, 1.5))
            for child in left:
                if lives_on_s:
                    self._survivors.append((time.monotonic() + lives_on_s, child, job))
                    self.totals["ranks that lived on"] += 1
                else:
                    _end(child)
        for child in job.ranks:
            if not any(child is one for _, one, _ in self._survivors):
                child.wait(5)
        self._listen(job, is_current=False)
        is_quiet = not self._survivors
        if is_quiet:
            self.verify()
            for removed in self.root.glob("removed-*"):
                shutil.rmtree(removed)
        started = self._start()
        if not is_quiet:
            self.verify()
        return started

    def verify(self) -> None:
        """Load all that is committed; what is replaced or removed meanwhile is looked at again."""
        for step in self._steps():
            path = step_path(self.root, step)
            while (metadata := _read(path / ".metadata")) is not None:
                state = empty_state()
                try:
                    state_dict_loader.load(state, storage_reader=StorageReader(path), no_dist=True)
                except (Exception, CheckpointException) as error:
                    if _read(path / ".metadata") == metadata:
                        raise Fault(f"step {step} is committed, and cannot be loaded: {error}") from error
                    continue
                version = check_state(state, step)
                self.totals["verified checkpoints"] += 1
                if version < self._acknowledged.get(step, -1):
                    raise Fault(
                        f"step {step} holds version {version}; {self._acknowledged[step]} was committed"
                    )
                break
        steps = [step for step in self._steps() if self._is_committed(step)]
        newest = max([-1, *self._acknowledged])
        lost = [step for step in self._acknowledged if step not in steps and step >= newest - 1]
        if lost:
            raise Fault(f"steps {lost} were committed, and are gone")

    def _end(self, job: Job) -> None:
        """Have a last job save every step again; then nothing is left but that."""
        for child in [*job.ranks, *(one for _, one, _ in self._survivors)]:
            _end(child)
        self._survivors.clear()
        self._listen(job, is_current=False)
        self.verify()
        committed = [step for step in self._steps() if self._is_committed(step)]
        self.totals["partial directories before the end"] = len(self._steps()) - len(committed)
        last = self._start(steps=[*committed, max(self._steps(), default=-1) + 1])
        done = last.ranks[0].wait(_STUCK_S)
        self._listen(last)
        if done.status != 0:
            raise Fault(f"the last job has ended with status {done.status}: {done.err[-3000:]}")
        self.verify()
        until = time.monotonic() + _GRACE_S
        while left := self._left_behind():
            if time.monotonic() > until:
                raise Fault(f"left behind: {', '.join(left)}")
            time.sleep(_LOOK_S)
        partial = {}
        for step in self._steps():
            path = step_path(self.root, step)
            if not self._is_committed(step):
                # What nobody had claimed goes once it has not changed for a while: soon, but not yet.
                if not (path / ".distckpt" / "owner").exists() and reclaim(
                    open_storage(path), "the-end", idle_s=0.0
                ):
                    continue
                partial[path.name] = sorted(str(name.relative_to(path)) for name in path.rglob("*"))
            elif names := leftovers(open_storage(path)):
                raise Fault(f"{path.name} was saved again, and there stay {names}")
        if partial:
            raise Fault(f"never completed, and not removed: {partial}")

    def _steps(self) -> list[int]:
        names = [name for name in os.listdir(self.root) if name.startswith("step-")]
        return sorted(int(name.removeprefix("step-")) for name in names)

    def _is_committed(self, step: int) -> bool:
        return (step_path(self.root, step) / ".metadata").exists()

    def _look_for_orphans(self) -> None:
        """No worker outlives its rank by more than two seconds."""
        orphans = {pid for pid, parent in _workers() if _has_ended(parent)}
        now = time.monotonic()
        self._orphans = {pid: self._orphans.get(pid, now) for pid in orphans}
        late = [pid for pid, since in self._orphans.items() if now - since > _GRACE_S]
        if late:
            raise Fault(f"workers {late} live on {_GRACE_S} s after their rank")

    def _left_behind(self) -> list[str]:
        """Return processes, and shared memory, that nobody needs any more."""
        found = [f"worker {pid}" for pid, _ in _workers()]
        found += [str(path) for path in set(Path("/dev/shm").glob("distckpt*")) - self._shared_before]
        for process in Path("/proc").glob("[0-9]*"):
            if _is_ours(process):
                with contextlib.suppress(OSError):
                    links = [os.readlink(fd) for fd in (process / "fd").iterdir()]
                    maps = (process / "maps").read_text()
                    if "memfd:distckpt" in maps or any("memfd:distckpt" in link for link in links):
                        found.append(f"memory in process {process.name}")
        return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _end(child: Child) -> None:
    """End a rank and its workers, even one that has only just been forked and is no group yet."""
    if child.done is None:
        _kill(child.pid)
    child.end()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _is_ours(process: Path) -> bool:
    try:
        environment = (process / "environ").read_bytes()
    except OSError:
        return False
    return f"{_RUN_VARIABLE}={os.environ[_RUN_VARIABLE]}".encode() in environment


def _workers() -> Iterator[tuple[int, int]]:
    """Yield (process, its rank's process) of the workers of this run."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            match = _WORKER.search((process / "cmdline").read_bytes())
        except OSError:
            continue
        if match is not None and _is_ours(process) and not _has_ended(int(process.name)):
            yield int(process.name), int(match[1])


def _workers_of(rank_pid: int) -> list[int]:
    return [pid for pid, parent in _workers() if parent == rank_pid]


def describe(totals: Counter[str]) -> str:
    """Return the totals in a line."""
    return ", ".join(f"{count} {what}" for what, count in totals.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=200, help="how often something is killed (default: 200)")
    parser.add_argument("--seed", type=int, default=None, help="of all choices (default: another every time)")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if arguments.seed is None else arguments.seed
    os.environ.setdefault(_RUN_VARIABLE, uuid.uuid4().hex)
    torch.set_num_threads(1)
    console = Console()
    console.print(f"seed {seed}")
    folder = Path(tempfile.mkdtemp(prefix="distckpt-soak-"))
    zygote = Zygote()
    soak = Soak(arguments.kills, seed, folder, zygote)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[saves]} saves committed, {task.fields[verified]} verified"),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("kills", total=arguments.kills, saves=0, verified=0)

        def advance() -> Iterator[None]:
            while True:
                totals = soak.totals
                bar.update(
                    task,
                    completed=totals["kills"],
                    saves=totals["committed saves"],
                    verified=totals["verified checkpoints"],
                )
                yield

        try:
            totals = soak.run(advance())
            zygote.close()
        except Fault as fault:
            zygote.close()
            bar.stop()
            console.print(f"FAULT: {fault}", markup=False, highlight=False)
            console.print(
                f"after {describe(soak.totals)}; seed {seed}; what is there: {folder}", markup=False
            )
            return 1
    shutil.rmtree(folder)
    console.print(f"0 torn, 0 lost, 0 left behind: {describe(totals)}; seed {seed}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

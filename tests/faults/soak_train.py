"""A training job for half an hour: saves every few steps to a local tier and S3, and processes that die.

    python tests/faults/soak_train.py --minutes 30 --seed 7

Two ranks train a small model with dropout and a shuffled loader. At random moments a rank, a worker process
or all of the job is killed, the server goes away, or the job gets SIGTERM; it is started again and resumes.
What each rank has computed is written down for every step, and has to be the same when a step is computed
again. At the end every checkpoint that is kept is verified, and what was used of disk, memory and descriptors
is compared with bounds.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import psutil
import torch
from rich.console import Console
from torch import distributed, nn
from torch.utils.data import TensorDataset

from distckpt import Checkpointer
from distckpt.coordination import SingleCoordinator
from distckpt.storage import open_storage
from distckpt.verification import verify
from servers import S3Server, SeaweedServer

_WORLD = 2
_SAVE_EVERY = 3
_KEEP_LAST, _KEEP_EVERY, _LOCAL_KEEP = 3, 150, 2
_WIDTH = 512
_STEP_S = 0.05
_MOST_LOCAL = 10
"""In states: those kept, uploaded and under way, and what a killed process has left until the next commit."""
_MOST_REMOTE = 10
"""In states, beside those that keep_every keeps: as above, for removal follows an upload."""
_LEAST_LIFE_SAVES = 30
"""Memory and descriptors are compared within lives of a process of so many saves."""
_MOST_RSS_GROWTH = 1.15
_MOST_DESCRIPTORS = 4
"""More at the end of a life: connections to the server, of which an upload uses as many at once."""
_STUCK_S = 120.0


class Fault(Exception):
    """Something that must never happen."""


def _digest(model: nn.Module) -> str:
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(parameter.detach().numpy().tobytes())
    return hashed.hexdigest()[:16]


def train(url: str, local: str, options: dict[str, Any], folder: Path) -> None:
    """Train until the process is killed, or told to end."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    faulthandler.register(signal.SIGUSR1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(4096, _WIDTH))
    loader = StatefulDataLoader(data, batch_size=8, shuffle=True)
    model = nn.Sequential(
        nn.Linear(_WIDTH, 2 * _WIDTH), nn.Dropout(0.1), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH)
    )
    for parameter in model.parameters():
        distributed.broadcast(parameter.data, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    process = psutil.Process()
    log = (folder / f"rank-{rank}.jsonl").open("a", buffering=1)
    with Checkpointer(
        url,
        async_save=True,
        load_rng=True,
        dist_ckpt_workers=2,
        keep_last=_KEEP_LAST,
        keep_every=_KEEP_EVERY,
        ckpt_local_dir=local,
        ckpt_local_keep=_LOCAL_KEEP,
        ckpt_on_failure="retry",
        ckpt_host_memory="256MiB",
        distributed_timeout_minutes=0.5,
        storage_options=options,
        log_level="error",
    ) as checkpointer:
        checkpointer.watch_preemption()
        step = checkpointer.restore(state) or 0
        log.write(json.dumps({"pid": os.getpid(), "resumed": step}) + "\n")
        while True:
            for (batch,) in loader:
                began = time.monotonic()
                (model(batch) - batch).square().mean().backward()
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    distributed.all_reduce(parameter.grad)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                log.write(
                    json.dumps({
                        "pid": os.getpid(), "step": step, "digest": _digest(model),
                        "rss": process.memory_info().rss, "fds": process.num_fds(),
                    })
                    + "\n"
                )  # fmt: skip
                is_due = checkpointer.preempted(step)
                if step % _SAVE_EVERY == 0 or is_due:
                    checkpointer.save(step, state)
                if is_due:
                    checkpointer.wait()
                    log.write(json.dumps({"pid": os.getpid(), "ended": step}) + "\n")
                    return
                time.sleep(max(0.0, _STEP_S - (time.monotonic() - began)))


class Soak:
    """The job, what happens to it, and what is looked at.

    Args:
        minutes: How long.
        seed: Of what happens.
        folder: For everything that is written.
        server: The S3 server, which runs.
    """

    def __init__(self, minutes: float, seed: int, folder: Path, server: S3Server) -> None:
        self._end_s = time.monotonic() + 60 * minutes
        self._random = random.Random(seed)
        self._folder = folder
        self._server = server
        self._url = server.new_prefix()
        self._local = folder / "local"
        self._ranks: list[subprocess.Popen[bytes]] = []
        self.events: Counter[str] = Counter()
        self.most_local = self.most_remote = 0

    def run(self) -> dict[str, Any]:
        """Run it all, and return figures.

        Raises:
            Fault: Something is not as it has to be.
        """
        try:
            while time.monotonic() < self._end_s:
                self._start()
                self._wait_for_a_save()
                self._live(min(self._random.choice([2, 5, 10, 60]), self._end_s - time.monotonic()))
                self._happen()
            # To the end: everything is uploaded and removed that is to be.
            self._start()
            self._wait_for_a_save()
            self._terminate()
        finally:
            for rank in self._ranks:
                rank.kill()
                rank.wait()
        return self._compare()

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [
            sys.executable, "-W", "ignore", __file__, "--train", self._url, str(self._local),
            json.dumps(self._server.options), str(self._folder),
        ]  # fmt: skip
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(_WORLD)}
        with (self._folder / "stderr.txt").open("ab") as errors:
            self._ranks = [
                subprocess.Popen(
                    command,
                    env={**os.environ, **shared, "RANK": str(rank), "LOCAL_WORLD_SIZE": str(_WORLD)},
                    stderr=errors,
                )
                for rank in range(_WORLD)
            ]
        self.events["starts"] += 1

    def _records(self, rank: int) -> list[dict[str, Any]]:
        path = self._folder / f"rank-{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        records = []
        for line in lines:
            try:
                records.append(json.loads(line))
            except ValueError:
                # Cut off by a kill.
                continue
        return records

    def _wait_for_a_save(self) -> None:
        """Wait until every rank has trained a few steps in this life."""
        deadline = time.monotonic() + _STUCK_S
        pids = {rank.pid for rank in self._ranks}
        while True:
            trained = Counter(
                one["pid"]
                for rank in range(_WORLD)
                for one in self._records(rank)[-200:]
                if one["pid"] in pids and "step" in one
            )
            if len(trained) == _WORLD and min(trained.values()) > 2 * _SAVE_EVERY:
                return
            ended = [rank.returncode for rank in self._ranks if rank.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise Fault(f"the job does not train: {ended or 'it hangs'}; {self._tail()}")
            time.sleep(0.2)

    def _tail(self) -> str:
        path = self._folder / "stderr.txt"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def _live(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(1.0, max(0.0, end - time.monotonic())))
            self._measure()
            ended = [rank.returncode for rank in self._ranks if rank.poll() is not None]
            if ended:
                raise Fault(f"a rank ended by itself with status {ended}: {self._tail()}")

    def _measure(self) -> None:
        local = 0
        # It is removed while it is walked.
        for folder, _, names in os.walk(self._local):
            for name in names:
                with contextlib.suppress(OSError):
                    local += (Path(folder) / name).stat().st_size
        self.most_local = max(self.most_local, local)
        remote = sum(
            nbytes for step, nbytes in self._remote_steps().items() if step is None or step % _KEEP_EVERY
        )
        self.most_remote = max(self.most_remote, remote)

    def _remote_steps(self) -> Counter[int | None]:
        """Return the bytes on the server of each step, and under None of what is of none."""
        found: Counter[int | None] = Counter()
        for key, nbytes in self._server.keys(self._url).items():
            step = key.split("/")[0].removeprefix("step-")
            found[int(step) if step.isdecimal() else None] += nbytes
        return found

    def _state_bytes(self) -> int:
        weights = 2 * 2 * _WIDTH * _WIDTH + 3 * _WIDTH
        return 3 * 4 * weights

    def _happen(self) -> None:
        what = self._random.choice(["rank", "worker", "worker", "all", "terminate", "server"])
        self.events[what] += 1
        if what == "terminate":
            self._terminate()
            return
        if what == "server":
            # It is away for a while: saves go on, for they are committed locally.
            self._server.kill()
            time.sleep(3)
            self._server.start()
            self._live(min(5.0, max(0.0, self._end_s - time.monotonic())))
            what = "all"
        if what == "worker":
            victims = [
                child
                for rank in self._ranks
                for child in psutil.Process(rank.pid).children()
                if "distckpt.worker" in " ".join(child.cmdline())
            ]
            if victims:
                self._random.choice(victims).kill()
            # The save is tried again, and the job goes on.
            self._live(5)
            what = "all"
        victim = self._random.choice(self._ranks)
        for rank in self._ranks if what == "all" else [victim]:
            rank.kill()
        # One that is left alone ends when its collectives fail.
        deadline = time.monotonic() + _STUCK_S
        for rank in self._ranks:
            try:
                rank.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._show_stacks()
                raise Fault(f"a rank hangs after the other was killed: {self._tail()}") from None

    def _show_stacks(self) -> None:
        for rank in self._ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGUSR1)
        time.sleep(1)

    def _terminate(self) -> None:
        self._random.choice(self._ranks).send_signal(signal.SIGTERM)
        try:
            statuses = [rank.wait(_STUCK_S) for rank in self._ranks]
        except subprocess.TimeoutExpired:
            self._show_stacks()
            raise Fault(f"the job does not end after SIGTERM: {self._tail()}") from None
        if any(statuses):
            raise Fault(f"the job ended with {statuses} after SIGTERM: {self._tail()}")
        ended = [self._records(rank)[-1].get("ended") for rank in range(_WORLD)]
        if None in ended or len(set(ended)) != 1:
            raise Fault(f"the ranks ended at steps {ended} after SIGTERM")
        self.events["saved at SIGTERM"] += 1

    def _compare(self) -> dict[str, Any]:
        known: dict[tuple[int, int], str] = {}
        num_again = 0
        for rank in range(_WORLD):
            for one in self._records(rank):
                if "step" in one:
                    before = known.setdefault((rank, one["step"]), one["digest"])
                    num_again += before == one["digest"]
                    if before != one["digest"]:
                        raise Fault(f"rank {rank} has computed step {one['step']} twice, and differently")
        storage_options = self._server.options
        with Checkpointer(
            self._url, participants=SingleCoordinator(), storage_options=storage_options
        ) as checkpointer:
            steps = checkpointer.steps()
        newest = max(step for _, step in known)
        if not steps or steps[-1] < newest - _SAVE_EVERY:
            raise Fault(f"steps {steps} are kept on the server, and {newest} was computed")
        expected = {step for step in steps if step % _KEEP_EVERY == 0} | set(steps[-_KEEP_LAST:])
        if set(steps) != expected:
            raise Fault(f"steps {steps} are kept, and {sorted(expected)} were to be")
        for step in steps:
            report = verify(open_storage(f"{self._url}/step-{step:08}", storage_options))
            if report.status != "complete":
                raise Fault(f"step {step} is {report.status}: {report.findings[:1]}")
        left = sorted(step for step in self._remote_steps() if step is not None and step not in steps)
        if left:
            raise Fault(f"of steps {left} there is something left on the server")
        uploads = self._server.unfinished_uploads(self._url)
        if uploads:
            raise Fault(f"unfinished uploads are left: {uploads}")
        state = self._state_bytes()
        if self.most_local > _MOST_LOCAL * state or self.most_remote > _MOST_REMOTE * state:
            raise Fault(
                f"disk: {self.most_local / state:.1f} states locally, {self.most_remote / state:.1f} beside "
                f"what is kept for good on the server"
            )
        growths, descriptors = self._growths()
        if growths and max(growths) > _MOST_RSS_GROWTH:
            raise Fault(f"memory has grown by {max(growths):.2f} within the life of a process")
        if descriptors and max(descriptors) > _MOST_DESCRIPTORS:
            raise Fault(f"{max(descriptors)} more descriptors at the end of a process than at the start")
        return {
            "events": dict(self.events),
            "steps": newest,
            "computed again, alike": num_again - len(known),
            "kept and verified": steps,
            "most local": f"{self.most_local / state:.1f} states",
            "most remote, beside keep_every": f"{self.most_remote / state:.1f} states",
            "lives compared": len(growths),
            "memory, last third to first": f"{max(growths, default=1.0):.3f}",
            "descriptors, last third to first": max(descriptors, default=0),
        }

    def _growths(self) -> tuple[list[float], list[int]]:
        """Return, for each long life of a process, by how much memory and descriptors have grown in it."""
        growths, descriptors = [], []
        for rank in range(_WORLD):
            lives: dict[int, list[dict[str, Any]]] = {}
            for one in self._records(rank):
                if "step" in one:
                    lives.setdefault(one["pid"], []).append(one)
            for life in lives.values():
                if len(life) < _LEAST_LIFE_SAVES * _SAVE_EVERY:
                    continue
                # Not the first: arenas, plans and clients are made there.
                third = len(life) // 3
                first, last = life[third : 2 * third], life[-third:]
                medians = [sorted(one["rss"] for one in part)[third // 2] for part in (first, last)]
                growths.append(medians[1] / medians[0])
                fds = [sorted(one["fds"] for one in part)[third // 2] for part in (first, last)]
                descriptors.append(fds[1] - fds[0])
        return growths, descriptors


def main() -> int:
    """Run it; returns the exit status."""
    if sys.argv[1:2] == ["--train"]:
        url, local, options, written = sys.argv[2:]
        train(url, local, json.loads(options), Path(written))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    arguments = parser.parse_args()
    console = Console()
    console.print(f"seed {arguments.seed}, {arguments.minutes:g} minutes")
    folder = Path(tempfile.mkdtemp(prefix="distckpt-soak-train-"))
    server = SeaweedServer(folder / "server")
    (folder / "server").mkdir()
    server.start()
    try:
        figures = Soak(arguments.minutes, arguments.seed, folder, server).run()
    except Fault as fault:
        console.print(f"{fault}\nleft for you to look at: {folder}")
        return 1
    finally:
        server.kill()
    for name, value in figures.items():
        console.print(f"{name}: {value}")
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

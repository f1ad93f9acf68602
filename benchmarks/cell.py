"""One part of a run, in processes of its own, one for each rank, which `run.py` starts.

echo '["measure", {"candidate": "distckpt", ...}, FILE, SECONDS, PORT]' | \
    RANK=0 WORLD_SIZE=1 ... python benchmarks/cell.py
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import training
from candidates import CANDIDATES, Candidate, Context, remove_tree
from ceilings import CopyCeiling, checksum_seconds, forget, read_seconds, write_seconds
from machine import cpu_seconds
from memory_sampler import sample, sampling
from ranks import Ranks
from results import GIB, Record, write_record
from torch.optim import SGD
from workloads import WORKLOADS, State, equal, make, size_of, zeros_like

from distckpt import Checkpointer

ROUNDS = 10
"""Saves, and then loads, of MLPerf Storage."""
_OURS = "distckpt"
_LIMIT_S = 300.0
_SAMPLE_S = 0.05
_COPY_BYTES = 1 << 30
_READ_THREADS = 8
_DUMP_S = 5.0
_UNTOLD = {"path", "file", "names", "save_id"}
_WARM_SAVES = 2
"""Saves until one replays captured copies."""


@dataclass(frozen=True)
class Spec:
    """What is asked of a part.

    Attributes:
        device: "cuda" or "cpu".
        folder: An empty directory on the target.
        nbytes: Of the state of a rank, at most.
        workers: Processes or threads of a rank.
        seconds: How long repetitions may go on.
        repeats: How many there are at most.
        host_memory: Bytes that a rank may use for staging.
        write: The fastest ways of plain writes, past the page cache and through it: threads, direct.
        candidate: Who saves.
        workload: What is saved.
        loads: How many there are after the first one of the process.
        guarded: Whether saves with a guarded optimizer are measured as well, and one of them is traced.
    """

    device: str
    folder: str
    nbytes: int
    workers: int
    seconds: float
    repeats: int
    host_memory: int
    write: tuple[tuple[int, bool], ...] = ((4, False),)
    candidate: str = _OURS
    workload: str = "llama-8b"
    loads: int = 1
    guarded: bool = False

    @property
    def place(self) -> Path:
        return Path(self.folder)


class Part:
    """A part that is measured: its ranks, and where its records go."""

    def __init__(self, spec: Spec, out: Path) -> None:
        self.spec = spec
        self.ranks = Ranks(spec.device)
        self._out = out

    def record(self, record: Record) -> None:
        """Write a record that every rank has made alike, once."""
        if self.ranks.rank == 0:
            write_record(self._out, record)

    def context(self) -> Context:
        spec, ranks = self.spec, self.ranks
        return Context(spec.device, ranks.rank, ranks.world, spec.workers, spec.host_memory)

    def state(self) -> State:
        spec = self.spec
        return make(WORKLOADS[spec.workload], spec.nbytes, spec.device, self.ranks.mesh)

    def repeat(self, action: Callable[[], object]) -> None:
        """Repeat something until the time is over; all ranks as often."""
        started = time.perf_counter()
        for _ in range(self.spec.repeats):
            action()
            if self.ranks.slowest(time.perf_counter() - started) > self.spec.seconds:
                break


def files_of(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


class Ceilings:
    """What bounds the figures of a state: measured again beside each sample."""

    def __init__(self, part: Part, nbytes: int) -> None:
        self._ranks, self._spec = part.ranks, part.spec
        self._nbytes = nbytes
        self._copy = CopyCeiling(part.spec.device, min(nbytes, _COPY_BYTES))
        self._ways = list(part.spec.write)

    def copy_s(self, repeats: int = 1) -> list[float]:
        """Return the seconds that a copy of the state's bytes takes the slowest rank, all at once."""
        seconds = [min(self._copy.seconds(2, self._ranks.barrier)) for _ in range(repeats)]
        return [self._ranks.slowest(one) * self._nbytes / self._copy.nbytes for one in seconds]

    def write_s(self) -> dict[tuple[int, bool], float]:
        """Return the seconds that plain writes of the state's bytes take all ranks at once, in each way.

        The last one comes first the next time, for a disk may remember what was before.
        """
        self._ways.reverse()
        return {(threads, direct): self._write_s(threads, direct) for threads, direct in self._ways}

    def _write_s(self, threads: int, direct: bool) -> float:
        folder = self._spec.place / f"plain-{self._ranks.rank}"
        folder.mkdir(exist_ok=True)
        self._ranks.barrier()
        seconds = write_seconds(folder, self._nbytes, direct=direct, threads=threads)
        folder.rmdir()
        return self._ranks.slowest(seconds)

    def ways(self) -> Iterator[tuple[int, bool, Callable[[], float]]]:
        """Give the ways of plain writes: threads, direct, and what measures them."""
        for direct in (True, False):
            for threads in (1, 4) if len(os.sched_getaffinity(0)) < 8 else (1, 4, 8):
                yield threads, direct, partial(self._write_s, threads, direct)


def measure_ceilings(part: Part) -> None:
    """Find out what the hardware gives; the fastest way of writing is repeated."""
    ranks, spec = part.ranks, part.spec
    total = spec.nbytes * ranks.world / GIB

    def ceiling(name: str, what: str, samples: list[float], **more: Any) -> None:
        part.record(
            {"kind": "ceiling", "name": name, "what": what, "unit": "GiB/s", "samples": samples, **more}
        )

    ceilings = Ceilings(part, spec.nbytes)
    if spec.device == "cuda":
        ceiling("d2h", "pinned copies off all GPUs at once", [total / s for s in ceilings.copy_s(5)])
        if ranks.world > 1:
            alone: list[float] = []
            if ranks.rank == 0:
                copy = CopyCeiling("cuda", min(spec.nbytes, _COPY_BYTES))
                alone = [copy.nbytes / GIB / s for s in copy.seconds(5)]
            ranks.barrier()
            ceiling("d2h_one", "pinned copy off one GPU alone", alone)
    del ceilings
    memory = CopyCeiling("cpu", min(spec.nbytes, _COPY_BYTES))
    copies = [ranks.slowest(one) for one in memory.seconds(5, ranks.barrier)]
    ceiling("memcpy", "copies in host memory", [memory.nbytes * ranks.world / GIB / s for s in copies])
    del memory
    sums = [(256 << 20) / GIB / checksum_seconds(256 << 20) for _ in range(3)]
    ceiling("checksum", "CRC32C, one core of one rank", sums)
    ceilings = Ceilings(part, spec.nbytes)
    best: dict[bool, tuple[float, int]] = {}
    for threads, direct, seconds in ceilings.ways():
        try:
            rate = total / seconds()
        except OSError as error:
            # A file system need not have O_DIRECT; all ranks write to one, so all get here.
            if not direct or error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
                raise
            continue
        best[direct] = max(best.get(direct, (0.0, 0)), (rate, threads))
    for direct, (_, threads) in best.items():
        samples: list[float] = []
        part.repeat(lambda: samples.append(total / ceilings._write_s(threads, direct)))  # noqa: B023, SLF001
        kind = "O_DIRECT" if direct else "buffered"
        ceiling(
            "write_direct" if direct else "write_buffered",
            f"plain writes to the target, {kind}, fsync, files of a rank: {threads}",
            samples,
            threads=threads,
        )
    folder = spec.place / f"reads-{ranks.rank}"
    folder.mkdir()
    total = _write_for_reading(folder, spec.nbytes) * ranks.world / GIB
    samples = []
    for _ in range(3):
        ranks.barrier()
        samples.append(total / ranks.slowest(read_seconds(files_of(folder), _READ_THREADS)))
    ceiling("read", f"plain reads from the target, not cached, threads of a rank: {_READ_THREADS}", samples)
    remove_tree(folder)


def _write_for_reading(folder: Path, nbytes: int) -> int:
    """Write about as many bytes; returns how many."""
    block = os.urandom(32 << 20)
    with (folder / "data").open("wb") as file:
        for _ in range(max(1, nbytes // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def measure_candidate(part: Part) -> None:
    """Save a state with one candidate, and load it: the first save, one watched, later ones, cold loads."""
    ranks, spec = part.ranks, part.spec
    state = part.state()
    nbytes = int(ranks.total(size_of(state)))
    record: Record = {
        "kind": "measurement", "candidate": spec.candidate, "workload": spec.workload,
        "title": WORKLOADS[spec.workload].title, "ranks": ranks.world, "nbytes": nbytes,
        "tensors": len(state), "workers": spec.workers, "figures": {}, "of_ceiling": {},
    }  # fmt: skip
    figures: dict[str, list[float]] = record["figures"]
    shares: dict[str, list[float]] = record["of_ceiling"]

    def add(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)

    ceilings = Ceilings(part, size_of(state))
    ranks.settle()
    before = sample(os.getpid())["pss_bytes"]
    candidate = CANDIDATES[spec.candidate](part.context())
    record["note"] = candidate.note
    steps = iter(range(1 << 20))

    def save() -> tuple[dict[str, float], Path]:
        path = spec.place / f"step-{next(steps)}"
        gc.collect()
        ranks.settle()
        found = candidate.save(state, path)
        return {name: ranks.slowest(value) for name, value in found.items()}, path

    try:
        found, path = save()
        add("first_stall_s", found["staged_s"])
        add("first_durable_s", found["total_s"])
        remove_once(ranks, path)
        with sampling(_SAMPLE_S) as sampler:
            _, path = save()
            peak = sampler.peak()[0]["pss_bytes"] - before
        add("host_bytes", ranks.total(peak))
        kept = [path]
        copies, writes = ceilings.copy_s(), [ceilings.write_s()]

        def one() -> None:
            cpu_before = cpu_seconds()
            found, path = save()
            add("cpu_s", ranks.total(cpu_seconds() - cpu_before) / (nbytes / GIB))
            remove_once(ranks, kept.pop())
            kept.append(path)
            copies.extend(ceilings.copy_s())
            writes.append(ceilings.write_s())
            add("returned_s", found["returned_s"])
            add("stall_s", found["staged_s"])
            add("durable_s", found["total_s"])

        part.repeat(one)
        # The same way for all samples: the faster of two at each of them would be faster than either is.
        way = min(writes[0], key=lambda way: sum(seconds[way] for seconds in writes))
        shares["stall_s"] = shares_of(figures["stall_s"], copies)
        shares["durable_s"] = shares_of(figures["durable_s"], [seconds[way] for seconds in writes])
        written = files_of(kept[0])
        add("files", len(written))
        add("bytes_ratio", sum(file.stat().st_size for file in written) / nbytes)
        record["equal"] = _load(part, candidate, state, kept[0], figures, shares)
        part.record(record)
        remove_once(ranks, kept[0])
    finally:
        candidate.close()
    if spec.guarded:
        _measure_guarded(part, state)


def shares_of(samples: Sequence[float], bounds: Sequence[float]) -> list[float]:
    """Return the share of its bound of each sample: of the mean of those before and after it."""
    return [
        (before + after) / 2 / one for one, before, after in zip(samples, bounds, bounds[1:], strict=False)
    ]


def remove_once(ranks: Ranks, path: Path) -> None:
    """Remove a checkpoint that all ranks are done with."""
    ranks.barrier()
    if ranks.rank == 0:
        remove_tree(path)
    ranks.barrier()


def _load(
    part: Part,
    candidate: Candidate,
    state: State,
    path: Path,
    figures: dict[str, list[float]],
    shares: dict[str, list[float]],
) -> bool:
    """Load into zeros what is on the disk; plain reads of the same files, before or after it, bound that.

    Returns:
        Whether it was what had been saved.
    """
    ranks = part.ranks
    files = files_of(path)
    # Each rank its share of the files, as evenly as they come.
    mine = sorted(files, key=lambda file: file.stat().st_size)[ranks.rank :: ranks.world]
    into = zeros_like(state)

    def plain() -> float:
        ranks.barrier()
        return ranks.slowest(read_seconds(mine, _READ_THREADS))

    def load() -> float:
        for value in into.values():
            value.zero_()
        ranks.settle()
        forget(files)
        ranks.barrier()
        started = time.perf_counter()
        candidate.load(into, path)
        if part.spec.device == "cuda":
            torch.cuda.synchronize()
        return ranks.slowest(time.perf_counter() - started)

    for number in range(1 + part.spec.loads):
        if number % 2:
            plain_s, load_s = plain(), load()
        else:
            load_s, plain_s = load(), plain()
        name = "load_s" if number else "first_load_s"
        figures.setdefault(name, []).append(load_s)
        shares.setdefault(name, []).append(plain_s / load_s)
        if not all(ranks.gather(equal(state, into))):
            return False
    return True


def _measure_guarded(part: Part, state: State) -> None:
    """Save a state whose optimizer is guarded: the call returns while the copy runs. One save is traced."""
    from distckpt.trace import Trace

    ranks, spec = part.ranks, part.spec
    fqns = [name.removeprefix("model.") for name in state if name.startswith("model.")]
    if not fqns:
        return
    parameters = {fqn: torch.nn.Parameter(state[f"model.{fqn}"]) for fqn in fqns}
    optimizer = SGD(parameters.values(), lr=1e-3)
    guarded: dict[str, torch.Tensor] = {}
    for fqn, parameter in parameters.items():
        kept = {
            kind: state[f"optimizer.{kind}.{fqn}"] for kind in ("master", "exp_avg", "exp_avg_sq", "step")
        }
        optimizer.state[parameter] = kept
        guarded[f"model.{fqn}"] = parameter
        guarded |= {f"optimizer.{kind}.{fqn}": tensor for kind, tensor in kept.items()}
    root = spec.place / "guarded"
    with Checkpointer(
        root,
        async_save=True,
        dist_ckpt_workers=spec.workers,
        ckpt_host_memory=spec.host_memory,
        log_level="error",
    ) as checkpointer:

        def step() -> None:
            with checkpointer.guard(optimizer):
                optimizer.step()

        step()
        checkpointer.prewarm(guarded).result(timeout=_LIMIT_S)
        returned: list[float] = []
        for number in range(_WARM_SAVES + min(4, spec.repeats)):
            ranks.settle()
            with Trace(ranks.rank) as trace:
                started = time.perf_counter()
                handle = checkpointer.save(number, guarded)
                returned_s = time.perf_counter() - started
                step()
                handle.result(timeout=_LIMIT_S)
            if number >= _WARM_SAVES:
                returned.append(ranks.slowest(returned_s))
            remove_once(ranks, root / str(handle.path))
    figures = {"guarded_s": returned}
    part.record({
        "kind": "guarded", "candidate": spec.candidate, "workload": spec.workload, "figures": figures,
    })  # fmt: skip
    # Without paths and names of files, which only this run knows.
    spans = ranks.gather([
        {name: each for name, each in span.items() if name not in _UNTOLD} for span in trace.spans
    ])  # fmt: skip
    part.record({
        "kind": "timeline", "candidate": spec.candidate, "workload": spec.workload,
        "nbytes": int(ranks.total(size_of(state))),
        "spans": {str(rank): each for rank, each in enumerate(spans)},
    })  # fmt: skip


def measure_rounds(part: Part) -> None:
    """MLPerf Storage's checkpointing: ten saves, then ten loads, none of them from the page cache.

    A save counts from the call until this rank's bytes are synced; the duration is that of the slowest rank,
    and so is the throughput.
    """
    ranks, spec = part.ranks, part.spec
    state = part.state()
    own = size_of(state)
    candidate = CANDIDATES[spec.candidate](part.context())
    figures: dict[str, list[float]] = {"save_s": [], "save_gib_s": [], "load_s": [], "load_gib_s": []}

    def add(kind: str, seconds: float) -> None:
        figures[f"{kind}_s"].append(ranks.slowest(seconds))
        figures[f"{kind}_gib_s"].append(min(ranks.gather(own / GIB / seconds)))

    try:
        paths = [spec.place / f"round-{number}" for number in range(ROUNDS)]
        for path in paths:
            ranks.settle()
            add("save", candidate.save(state, path)["total_s"])
        into = zeros_like(state)
        for path in paths:
            forget(files_of(path))
            ranks.settle()
            started = time.perf_counter()
            candidate.load(into, path)
            if spec.device == "cuda":
                torch.cuda.synchronize()
            add("load", time.perf_counter() - started)
        same = all(ranks.gather(equal(state, into)))
    finally:
        candidate.close()
    part.record({
        "kind": "rounds", "candidate": spec.candidate, "workload": spec.workload, "ranks": ranks.world,
        "nbytes": int(ranks.total(own)), "figures": figures, "equal": same,
    })  # fmt: skip


SECTIONS: dict[str, Callable[[Part], None]] = {
    "ceilings": measure_ceilings,
    "measure": measure_candidate,
    "rounds": measure_rounds,
    "training": training.measure,
}


def main() -> None:
    """Do what a line of standard input asks for: a section, its spec, a file for records, seconds, a port."""
    warnings.simplefilter("ignore")
    asked = sys.stdin.readline()
    if not asked:
        # Started in advance, and not needed.
        return
    section, spec, out, limit_s, port = json.loads(asked)
    os.environ["MASTER_PORT"] = str(port)
    # Says where it hangs, and ends it even if nobody is there to do so.
    faulthandler.dump_traceback_later(max(1.0, limit_s - _DUMP_S), exit=True)
    part = Part(Spec(**spec), Path(out))
    SECTIONS[section](part)
    part.ranks.close()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()

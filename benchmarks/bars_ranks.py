"""Several GPUs of one machine, a rank each: all of them save at once."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bars import (
    Found,
    Line,
    Report,
    Sizes,
    fitting,
    has,
    holds,
    host_memory,
    make_state,
    memory_place,
    milliseconds,
    open_checkpointer,
    settle,
    size_of,
    some_of,
    timed_save,
)
from ceilings import CopyCeiling
from machine import GIB, default_disk, scratch, storage_type
from peers import remove
from torch import distributed

_LIMIT_S = 240.0
_OF_CEILING = 0.98


def measure_ranks(report: Report, device: str, sizes: Sizes) -> None:
    """Start the ranks, and wait for what rank 0 has gathered.

    Raises:
        RuntimeError: A rank failed.
    """
    ranks = sizes.ranks
    nbytes = fitting(device, sizes.rank_bytes * ranks) // ranks
    place = default_disk() if sizes.rank_on_disk else memory_place(3 * ranks * nbytes)
    with scratch(place) as folder:
        report.add("storage", storage_type(folder))
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        running = []
        for rank in range(ranks):
            environment = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            command = [
                sys.executable, str(Path(__file__).with_name("gpu_check.py")), "--rank",
                "--device", device, "--sizes", json.dumps({**vars(sizes), "rank_bytes": nbytes}),
                "--out", str(folder / f"{rank}.json"), "--folders", str(folder),
            ]  # fmt: skip
            settings = {name: str(value) for name, value in environment.items()}
            running.append(subprocess.Popen(command, env={**os.environ, **settings}))
        statuses = _wait(running)
        found = folder / "0.json"
        if found.exists():
            for name, value in json.loads(found.read_text()).items():
                report.add(name, value)
    report.add("statuses", statuses)
    if any(statuses):
        raise RuntimeError(f"exit statuses of the ranks: {statuses}")


def _wait(running: list[subprocess.Popen[bytes]]) -> list[int]:
    """Wait for all of them; when one fails the others would wait for it, so they are ended soon after."""
    deadline = time.monotonic() + _LIMIT_S
    while any(process.poll() is None for process in running) and time.monotonic() < deadline:
        time.sleep(0.1)
        if any(process.poll() for process in running):
            deadline = min(deadline, time.monotonic() + 5)
    for process in running:
        if process.poll() is None:
            process.kill()
    return [process.wait() for process in running]


def run_rank(report: Report, device: str, sizes: Sizes, folder: Path) -> None:
    """Measure in this process, which is one rank; the figures of all are gathered on rank 0."""
    rank = int(os.environ["RANK"])
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("gloo")
    try:
        _measure_rank(report, device, sizes, folder, rank)
    finally:
        distributed.destroy_process_group()


def _measure_rank(report: Report, device: str, sizes: Sizes, folder: Path, rank: int) -> None:
    own: dict[str, Any] = {}
    ceiling = CopyCeiling(device, sizes.ceiling_bytes)
    own["alone_s"] = []
    for turn in range(distributed.get_world_size()):
        distributed.barrier()
        if turn == rank:
            own["alone_s"] = ceiling.seconds(5)
    distributed.barrier()
    own["ceiling_s"] = ceiling.seconds(8, distributed.barrier)
    parts = make_state(device, sizes.rank_tensors, sizes.rank_bytes)
    state = {f"rank{rank}.{name}": tensor for name, tensor in parts.items()}
    nbytes = size_of(state)
    with open_checkpointer(folder / "ours", sizes.workers, host_memory(nbytes)) as checkpointer:
        step = 0
        for kind, repeats in (("first", 1), ("second", 1), ("later", sizes.repeats)):
            for _ in range(repeats):
                step += 1
                settle(device)
                distributed.barrier()
                timing = timed_save(checkpointer, step, state)
                for figure in ("returned_s", "blocked_s", "staged_s", "total_s"):
                    own.setdefault(f"{kind}_{figure}", []).append(getattr(timing, figure))
                distributed.barrier()
                if rank == 0:
                    remove(timing.path)
        for tensor in state.values():
            tensor.mul_(1.5)
        expected = some_of(state)
        distributed.barrier()
        timing = timed_save(checkpointer, step + 1, state)
        distributed.barrier()
        own["equal"] = holds(timing.path, expected)
        distributed.barrier()
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, own)
    report.add("ceiling_bytes", ceiling.nbytes)
    report.add("nbytes", nbytes)
    report.add("ranks", gathered)
    report.add("equal", all(one["equal"] for one in gathered))


def lines_of_ranks(found: Found) -> list[Line]:
    """Return the rows of `measure_ranks`: each figure the slowest rank's, with the others beside it."""
    lines: list[Line] = []
    if not has(found, "ranks", "nbytes"):
        return lines
    ranks, nbytes = found["ranks"], found["nbytes"]
    what = f"{len(ranks)} ranks, {nbytes / GIB:.1f} GiB each, all at once"

    def rates(name: str, size: int) -> list[float]:
        return [size / GIB / median(one[name]) for one in ranks]

    together, alone = (rates(name, found["ceiling_bytes"]) for name in ("ceiling_s", "alone_s"))
    reached = rates("later_staged_s", nbytes)
    ratios = [mine / best for mine, best in zip(reached, together, strict=True)]
    lines.append(
        Line(
            "1",
            f"{what}: later saves, until staged, slowest of the ranks",
            f"{min(reached):.2f} GiB/s = {100 * min(ratios):.1f} % ({_each(reached)})",
            f"pinned copies at once {_each(together)} GiB/s; one alone {_each(alone)}",
            ">= 98 %",
            min(ratios) >= _OF_CEILING,
        )
    )
    for name, label in (("returned_s", "save() returns"), ("staged_s", "staged"), ("total_s", "committed")):
        text = {
            kind: max(median(one[f"{kind}_{name}"]) for one in ranks) for kind in ("first", "second", "later")
        }
        lines.append(
            Line(
                "",
                f"{what}: {label} after, slowest of the ranks",
                milliseconds(text["later"]) if text["later"] < 1 else f"{text['later']:.3f} s",
                f"first save {text['first']:.3f} s, second {text['second']:.3f} s",
            )
        )
    return lines


def _each(values: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)

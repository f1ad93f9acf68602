"""Bar 8: the same state saved by each peer, in turn, each in a process of its own."""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from bars import (
    MIB,
    Found,
    Line,
    Report,
    Sizes,
    fitting,
    host_memory,
    make_state,
    memory_place,
    settle,
    size_of,
    some_of,
)
from machine import GIB, default_disk, scratch, storage_type
from memory_sampler import sample, sampling
from peers import candidates, remove

_START_LIMIT_S = 60.0
_LIMIT_S = 45.0
_LIMIT_BYTES = 4 * GIB
"""What that limit is for; with more it is longer."""
_DUMP_S = 3.0
_SAMPLE_S = 0.05
_OURS = ("distckpt", "distckpt, prewarmed")
_PREWARMED = ", prewarmed"
STOCK = ("stock save", "stock async_save", "stock async_save, pinned")
_NEED_CUDA = ("nvidia-resiliency-ext, CUDA IPC", "nvidia-resiliency-ext, shm")
PEERS = ("torch_checkpointing", "torch_checkpointing, prewarmed", *_NEED_CUDA)


def measure_stock(report: Report, device: str, sizes: Sizes) -> None:
    """Compare with what torch brings along."""
    _measure(report, device, sizes, [*_OURS, *STOCK])


def measure_peers(report: Report, device: str, sizes: Sizes) -> None:
    """Compare with the peers that are installed."""
    known = candidates(device, 0, 1)
    missing = {name: "not installed" for name in PEERS if importlib.util.find_spec(known[name][0]) is None}
    if device != "cuda":
        missing |= dict.fromkeys(_NEED_CUDA, "CUDA only")
    report.add("missing", missing)
    found = [name for name in PEERS if name not in missing]
    if found:
        _measure(report, device, sizes, [*_OURS, *found])


def _measure(report: Report, device: str, sizes: Sizes, names: list[str]) -> None:
    """Start a process for each, and when all are ready let one after the other go.

    Only the last `peer_processes` have one; the others are measured here meanwhile.
    """
    nbytes = fitting(device, sizes.peer_bytes)
    places = {"tmpfs": memory_place(3 * nbytes), "disk": default_disk()}
    report.add("storage", {name: storage_type(place) for name, place in places.items()})
    with ExitStack() as stack:
        folders = {name: stack.enter_context(scratch(place)) for name, place in places.items()}
        running: dict[str, subprocess.Popen[bytes]] = {}
        for index, name in list(enumerate(names))[-sizes.peer_processes :]:
            command = [
                sys.executable, str(Path(__file__).with_name("gpu_check.py")), "--candidate", name,
                "--device", device, "--sizes", json.dumps({**vars(sizes), "peer_bytes": nbytes}),
                "--out", str(folders["tmpfs"] / f"{index}.json"), "--limit", "600",
                "--folders", *(str(folder / str(index)) for folder in folders.values()),
            ]  # fmt: skip
            running[name] = subprocess.Popen(command, stdin=subprocess.PIPE)
            stack.callback(_end, running[name])
        for index, name in enumerate(names):
            out = folders["tmpfs"] / f"{index}.json"
            with report.trying(name):
                if name in running:
                    found = _run_one(running[name], out, _limit_s(nbytes))
                else:
                    here, places_here = Report(out), [folder / str(index) for folder in folders.values()]
                    _measure_candidate(here, name, device, replace(sizes, peer_bytes=nbytes), places_here)
                    found = {**here.figures, "status": 0}
                report.add(f"candidate {name}", found)
            for folder in folders.values():
                remove(folder / str(index))


def _limit_s(nbytes: int) -> float:
    return _LIMIT_S * max(1.0, nbytes / _LIMIT_BYTES)


def _run_one(process: subprocess.Popen[bytes], out: Path, limit_s: float) -> Found:
    """Let a process that waits go, and return what it has found, complete or not.

    Raises:
        RuntimeError: It found nothing.
    """
    deadline = time.monotonic() + _START_LIMIT_S
    while not out.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.stdin is not None
    status: int | str = "did not start"
    if out.exists() and process.poll() is None:
        process.stdin.write(b"\n")
        process.stdin.flush()
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = "over its time limit"
            _end(process)
    if not out.exists():
        raise RuntimeError(f"no figures: {status}, exit status {process.poll()}")
    found: Found = json.loads(out.read_text())
    found["status"] = status
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started."""
    if process.poll() is None:
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in started:
            child.kill()
    if process.stdin is not None:
        process.stdin.close()
    process.wait()


def run_candidate(report: Report, name: str, device: str, sizes: Sizes, folders: list[Path]) -> None:
    """Measure one candidate in this process, once a line arrives on standard input."""
    if device == "cuda":
        torch.cuda.synchronize()
    report.add("is_ready", True)
    if not sys.stdin.readline():
        return
    # Should it hang, this says where before the parent ends it.
    faulthandler.dump_traceback_later(_limit_s(sizes.peer_bytes) - _DUMP_S)
    _measure_candidate(report, name, device, sizes, folders)


def _measure_candidate(report: Report, name: str, device: str, sizes: Sizes, folders: list[Path]) -> None:
    """Measure one candidate.

    Later saves are repeated until `peer_budget_s` is used up, five times at most. Host memory is sampled in
    the first save to disk, against the level before the candidate was made. Of a prewarmed one only the first
    save to memory and one more are of interest.
    """
    state = make_state(device, sizes.peer_tensors, sizes.peer_bytes)
    nbytes = size_of(state)
    settle(device)
    report.add("nbytes", nbytes)
    before = sample(os.getpid())["pss_bytes"]
    candidate = candidates(device, host_memory(nbytes), sizes.workers)[name][1]()
    saves = count(1)
    try:

        def save(kind: str, folder: Path) -> Path:
            settle(device)
            figures, path = candidate.save(state, folder / f"save-{next(saves)}")
            for figure, seconds in figures.items():
                report.append(f"{kind}_{figure}", seconds)
            return path

        memory, disk = folders
        for folder in folders:
            folder.mkdir()
        if name.endswith(_PREWARMED):
            started = time.perf_counter()
            candidate.prewarm(state, memory)
            report.add("prewarm_s", time.perf_counter() - started)
            for kind in ("first", "later"):
                remove(save(kind, memory))
        else:
            remove(save("first", memory))
            _repeat(lambda: remove(save("later", memory)), sizes.peer_budget_s)
            with sampling(_SAMPLE_S) as sampler:
                path = save("disk_first", disk)
                report.add("host_bytes", sampler.peak()[0]["pss_bytes"] - before)
            report.add("equal", candidate.holds(path, some_of(state)))
            remove(path)
            if report.figures["disk_first_total_s"][0] > sizes.peer_budget_s:
                for figure in ("returned_s", "staged_s", "total_s"):
                    report.add(f"disk_{figure}", report.figures[f"disk_first_{figure}"])
            else:
                _repeat(lambda: remove(save("disk", disk)), sizes.peer_budget_s)
    finally:
        candidate.close()


def _repeat(action: Callable[[], object], budget_s: float) -> None:
    started = time.perf_counter()
    for _ in range(5):
        action()
        if time.perf_counter() - started > budget_s:
            break


_COLUMNS = {
    "first stall": ("first_staged_s", "s"),
    "later stall": ("later_staged_s", "s"),
    "durable total, memory": ("later_total_s", "s"),
    "durable total, disk": ("disk_total_s", "s"),
    "host peak": ("host_bytes", "GiB"),
}


def _candidates_of(found: Found) -> dict[str, Found]:
    prefix = "candidate "
    return {name.removeprefix(prefix): figures for name, figures in found.items() if name.startswith(prefix)}


def _value(figures: Found, name: str) -> float | None:
    value: Any = figures.get(name)
    if value is None:
        return None
    return float(median(value) if isinstance(value, list) else value)


def table_of_peers(found: Found) -> list[list[str]]:
    """Return a table with one row for each candidate, its header first."""
    rows = [["candidate", "save() returns", *_COLUMNS, "saves", "read back"]]
    for name, figures in _candidates_of(found).items():
        row = [name]
        for figure, unit in (("later_returned_s", "s"), *_COLUMNS.values()):
            value = _value(figures, figure)
            if value is None:
                row.append("-")
            else:
                row.append(f"{value:.3f} s" if unit == "s" else f"{value / GIB:.2f} GiB")
        numbers = [str(len(figures.get(figure, []))) for figure in ("later_total_s", "disk_total_s")]
        row += [" + ".join(numbers), {True: "equal", False: "DIFFERS", None: "-"}[figures.get("equal")]]
        rows.append(row)
    for name, reason in found.get("missing", {}).items():
        rows.append([name, *[reason] * (len(rows[0]) - 1)])
    return rows if len(rows) > 1 else []


def lines_of_peers(found: Found) -> list[Line]:
    """Return for each column whether this project is ahead of each peer, and where it is not."""
    lines: list[Line] = []
    compared = _candidates_of(found)
    ours = compared.get(_OURS[0])
    others = {name: figures for name, figures in compared.items() if name not in _OURS}
    if ours is None or not others:
        return lines
    size = f"{ours['nbytes'] / MIB:.0f} MiB in equal tensors"
    for column, (figure, unit) in _COLUMNS.items():
        mine, behind, best = _value(ours, figure), [], ("", float("inf"))
        if mine is None:
            continue
        for name, figures in others.items():
            # Like with like: prewarmed beside prewarmed.
            own = compared.get(_OURS[1], ours) if name.endswith(_PREWARMED) else ours
            value, own_value = _value(figures, figure), _value(own, figure)
            if value is None or own_value is None:
                continue
            best = min(best, (name, value), key=lambda pair: pair[1])
            if own_value >= value:
                behind.append(name)
        scale, digits = (1, 3) if unit == "s" else (GIB, 2)
        lines.append(
            Line(
                "8",
                f"{column}, {size}",
                f"{mine / scale:.{digits}f} {unit}" + (f"; behind {', '.join(behind)}" if behind else ""),
                f"best of the others: {best[1] / scale:.{digits}f} {unit} ({best[0]})",
                "ahead of each",
                not behind,
            )
        )
    return lines

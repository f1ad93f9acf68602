"""Bars 5, 6 and 7: how fast a checkpoint gets durable, in how much memory, and what fifty leave behind."""

from __future__ import annotations

import os
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import linear_regression, median

import psutil
import torch
from bars import (
    MIB,
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
    open_checkpointer,
    rate,
    repeat_saves,
    settle,
    size_of,
    some_of,
    timed_save,
)
from ceilings import Way, process_write_seconds, write_seconds
from machine import GIB, default_disk, scratch, storage_type
from memory_sampler import Sample, Sampler, memfd_bytes, sample, sampling
from peers import State, remove

from distckpt import Checkpointer

_DISK_WORKERS = (1, 2, 4, 8)
_OF_CEILING = 0.95
_LANES_MATTER = 0.9
_TMPFS_GIB_S = 14.0
_BUDGET_SLACK_BYTES = 300 * MIB
_BUDGET_RATIO = 1.1
_RSS_SLOPE_BYTES = 64 << 10
_SAMPLE_S = 0.02
_WARM_SAVES = 5


def measure_disk(report: Report, device: str, sizes: Sizes) -> None:
    """Time saves to the disk with 1, 2, 4 and 8 workers in turn, and each time as many bytes written plainly.

    The two best ways to do that are looked for first, on half as many bytes: with O_DIRECT or buffered, 4 or
    8 threads, reserved or not. The better one of them is the ceiling.
    """
    state = make_state(device, sizes.disk_tensors, fitting(device, sizes.disk_bytes))
    nbytes = size_of(state)
    report.add("nbytes", nbytes)
    with scratch(default_disk()) as folder, ExitStack() as stack:
        report.add("storage", storage_type(folder))
        opened: dict[int, Checkpointer] = {}
        for workers in _DISK_WORKERS:
            if not min(sizes.disk_least_workers, sizes.workers) <= workers <= sizes.workers:
                continue
            checkpointer = open_checkpointer(folder / str(workers), workers, host_memory(nbytes))
            opened[workers] = stack.enter_context(checkpointer)
            checkpointer.prewarm(state).result(timeout=60)
        ways = _best_ways(report, folder, nbytes // 2)
        seconds: dict[Way, list[float]] = {way: [] for way in ways}
        steps = count(1)
        for _ in range(sizes.repeats):
            for workers, checkpointer in opened.items():
                repeat_saves(report, f"workers_{workers}", checkpointer, state, steps, device, 1)
            for way in ways:
                seconds[way].append(_plain_seconds(folder, nbytes, way))
            best = min(ways, key=lambda way: median(seconds[way]))
            report.add("ceiling_way", str(best))
            report.add("ceiling_s", seconds[best])
            report.add("ceilings_s", {str(way): found for way, found in seconds.items()})
        timing = timed_save(opened[max(opened)], next(steps), state)
        report.add("equal", holds(timing.path, some_of(state)))


def _plain_seconds(folder: Path, nbytes: int, way: Way) -> float:
    return write_seconds(folder, nbytes, direct=way.direct, threads=way.threads, preallocate=way.preallocate)


def _best_ways(report: Report, folder: Path, nbytes: int) -> list[Way]:
    """Return the two fastest ways to write plainly, each tried once."""
    found: dict[Way, float] = {}
    for way in (
        Way(8, direct=True),
        Way(8, direct=True, preallocate=True),
        Way(4, direct=True),
        Way(4, direct=True, preallocate=True),
        Way(8),
    ):
        try:
            found[way] = _plain_seconds(folder, nbytes, way)
        except OSError:
            # Not every file system takes O_DIRECT.
            continue
    report.add("ways_s", {str(way): seconds for way, seconds in found.items()})
    return sorted(found, key=lambda way: found[way])[:2]


def measure_tmpfs(report: Report, device: str, sizes: Sizes) -> None:
    """Time saves of 12 GiB into memory with 16 workers, beside 16 processes that write as much."""
    state = make_state(device, sizes.staging_tensors, fitting(device, sizes.tmpfs_bytes))
    nbytes = size_of(state)
    report.add("nbytes", nbytes)
    report.add("workers", sizes.tmpfs_workers)
    with scratch(memory_place(2 * nbytes)) as folder:
        report.add("storage", storage_type(folder))
        report.append("ceiling_s", process_write_seconds(folder, nbytes, sizes.tmpfs_workers))
        with open_checkpointer(folder / "ours", sizes.tmpfs_workers, host_memory(nbytes)) as checkpointer:
            checkpointer.prewarm(state).result(timeout=60)
            steps = count(1)
            repeat_saves(report, "first", checkpointer, state, steps, device, 1)
            repeat_saves(report, "later", checkpointer, state, steps, device, sizes.repeats)
        for _ in range(2):
            report.append("ceiling_s", process_write_seconds(folder, nbytes, sizes.tmpfs_workers))


def measure_budget(report: Report, device: str, sizes: Sizes) -> None:
    """Time saves of 12 GiB under a budget of 2 GiB beside saves without that limit, and watch host memory.

    In memory with the whole state, on disk with a part of it. Memory is sampled in saves that are not timed,
    from the level before the Checkpointer was made. Then one tensor of three times the budget.
    """
    state = make_state(device, sizes.staging_tensors, fitting(device, sizes.staging_bytes))
    nbytes = size_of(state)
    report.add("nbytes", nbytes)
    report.add("budget_bytes", sizes.budget_bytes)
    with scratch(memory_place(3 * nbytes)) as folder:
        with report.trying("memory"), sampling(_SAMPLE_S) as sampler:
            for name, budget_bytes in (("budget", sizes.budget_bytes), ("unbounded", host_memory(nbytes))):
                settle(device)
                before = sampler.now()
                with open_checkpointer(
                    folder / f"sampled-{name}", sizes.workers, budget_bytes
                ) as checkpointer:
                    _sample_saves(report, name, checkpointer, state, before, sampler)
        with report.trying("tmpfs"):
            _compare_budgets(report, "tmpfs", device, sizes, state, folder)
    with report.trying("disk"), scratch(default_disk()) as folder:
        share = max(1, len(state) * sizes.budget_disk_bytes // nbytes)
        _compare_budgets(report, "disk", device, sizes, dict([*state.items()][:share]), folder)
    del state
    with report.trying("one tensor"):
        _save_one_tensor(report, device, sizes)


def _sample_saves(
    report: Report, name: str, checkpointer: Checkpointer, state: State, before: Sample, sampler: Sampler
) -> None:
    for step in range(1, 4):
        timing = timed_save(checkpointer, step, state)
        found, number = sampler.peak()
        for figure in ("pss_bytes", "memfd_bytes"):
            report.append(f"{name}_{figure}", found[figure] - before[figure])
        report.append(f"{name}_samples", number)
        if step == 3:
            report.add(f"{name}_equal", holds(timing.path, some_of(state)))
        remove(timing.path)
        sampler.peak()


def _compare_budgets(
    report: Report, place: str, device: str, sizes: Sizes, state: State, folder: Path
) -> None:
    nbytes = size_of(state)
    report.add(f"{place}_bytes", nbytes)
    report.add(f"{place}_storage", storage_type(folder))
    with (
        open_checkpointer(folder / "budget", sizes.workers, sizes.budget_bytes) as bounded,
        open_checkpointer(folder / "unbounded", sizes.workers, host_memory(nbytes)) as unbounded,
    ):
        unbounded.prewarm(state).result(timeout=60)
        bounded.prewarm(state).result(timeout=60)
        steps = count(1)
        # The first save plans.
        for turn in range(sizes.repeats if place == "disk" else sizes.repeats + 1):
            for name, checkpointer in (("budget", bounded), ("unbounded", unbounded)):
                kind = f"{place}_{name}" if turn else f"{place}_{name}_first"
                repeat_saves(report, kind, checkpointer, state, steps, device, 1)


def _save_one_tensor(report: Report, device: str, sizes: Sizes) -> None:
    nbytes = fitting(device, sizes.one_tensor_bytes)
    state = {"weight": torch.randn(nbytes // 4096, 1024, device=device)}
    report.add("one_bytes", size_of(state))
    with (
        scratch(memory_place(2 * nbytes)) as folder,
        open_checkpointer(folder, sizes.workers, sizes.budget_bytes) as checkpointer,
        sampling(_SAMPLE_S) as sampler,
    ):
        before = sampler.now()
        timing = timed_save(checkpointer, 1, state)
        report.add("one_pss_bytes", sampler.peak()[0]["pss_bytes"] - before["pss_bytes"])
        report.timing("one", timing)
        report.add("one_equal", holds(timing.path, state))


def measure_fifty(report: Report, device: str, sizes: Sizes) -> None:
    """Save 200 MiB fifty times and see what grows; then have two saves in flight, with different values."""
    state = make_state(device, 20, sizes.fifty_bytes)
    nbytes = size_of(state)
    report.add("nbytes", nbytes)
    # Room for two saves in flight.
    with (
        scratch(memory_place(8 * nbytes)) as folder,
        open_checkpointer(folder, sizes.workers, 3 * host_memory(nbytes)) as checkpointer,
    ):
        for step in range(1, sizes.fifty_saves + 1):
            timing = timed_save(checkpointer, step, state)
            remove(timing.path)
            settle(device)
            for name, value in _levels(device).items():
                report.append(name, value)
        for turn in range(3):
            _save_two_at_once(report, checkpointer, state, 1000 + 10 * turn)


def _levels(device: str) -> dict[str, int]:
    """Return what this process holds, and the number of its children; bytes."""
    pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    found = {
        "rss_bytes": psutil.Process().memory_info().rss,
        "pss_bytes": sample(os.getpid())["pss_bytes"],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "memfd_bytes": memfd_bytes(pids),
        "children": len(pids) - 1,
        "threads": len(os.listdir("/proc/self/task")),
    }
    if device == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        found["gpu_allocated_bytes"] = torch.cuda.memory_allocated()
        found["gpu_reserved_bytes"] = torch.cuda.memory_reserved()
        found["gpu_used_bytes"] = total_bytes - free_bytes
    return found


def _save_two_at_once(report: Report, checkpointer: Checkpointer, state: State, step: int) -> None:
    handles, expected = [], []
    for turn in range(2):
        for tensor in state.values():
            tensor.fill_(step + turn)
        expected.append(some_of(state))
        handles.append(checkpointer.save(step + turn, state))
    report.append("two_in_flight", sum(not handle.committed for handle in handles))
    paths = [Path(handle.result(timeout=60)) for handle in handles]
    report.append("two_equal", all(holds(*pair) for pair in zip(paths, expected, strict=True)))
    for path in paths:
        remove(path)


def lines_of_disk(found: Found) -> list[Line]:
    """Return the rows of `measure_disk`."""
    lines: list[Line] = []
    if not has(found, "ceiling_s"):
        return lines
    nbytes, ceiling = found["nbytes"], rate(found["nbytes"], found["ceiling_s"])
    fastest = nbytes / GIB / min(found["ceiling_s"])
    reached: dict[int, float] = {}
    timed = [found[key] for workers in _DISK_WORKERS if has(found, key := f"workers_{workers}_total_s")]
    best_s = min(timed, key=median, default=None)
    for workers in _DISK_WORKERS:
        if not has(found, f"workers_{workers}_total_s"):
            continue
        seconds = found[f"workers_{workers}_total_s"]
        reached[workers] = rate(nbytes, seconds)
        ratio = reached[workers] / ceiling
        has_bar = seconds is best_s
        lines.append(
            Line(
                "5",
                f"{nbytes / GIB:.1f} GiB to {found['storage']}, {workers} worker(s), "
                f"median of {len(seconds)}: durable",
                f"{reached[workers]:.2f} GiB/s = {100 * ratio:.1f} % ({median(seconds):.3f} s)",
                f"plain writes ({found['ceiling_way']}) {ceiling:.2f} GiB/s, at best {fastest:.2f}",
                ">= 95 %" if has_bar else "",
                ratio >= _OF_CEILING if has_bar else None,
            )
        )
    if 1 in reached and 2 in reached:
        matters = reached[1] < _LANES_MATTER * ceiling
        lines.append(
            Line(
                "5",
                "disk: 2 workers beside 1",
                f"{reached[2]:.2f} GiB/s",
                f"{reached[1]:.2f} GiB/s = {100 * reached[1] / ceiling:.1f} % of plain writes",
                "faster" if matters else "none: 1 worker reaches 90 %",
                reached[2] > reached[1] if matters else None,
            )
        )
    return lines


def lines_of_tmpfs(found: Found) -> list[Line]:
    """Return the rows of `measure_tmpfs`."""
    if not has(found, "later_total_s", "ceiling_s"):
        return []
    nbytes, seconds = found["nbytes"], found["later_total_s"]
    reached, ceiling = rate(nbytes, seconds), rate(nbytes, found["ceiling_s"])
    return [
        Line(
            "5",
            f"{nbytes / GIB:.1f} GiB to {found['storage']}, {found['workers']} workers, "
            f"median of {len(seconds)}: committed",
            f"{reached:.2f} GiB/s ({median(seconds):.3f} s)",
            f"{found['workers']} processes writing from memory: {ceiling:.2f} GiB/s",
            f">= {_TMPFS_GIB_S:.0f} GiB/s",
            reached >= _TMPFS_GIB_S,
        )
    ]


def lines_of_budget(found: Found) -> list[Line]:
    """Return the rows of `measure_budget`."""
    lines: list[Line] = []
    budget_bytes = found.get("budget_bytes", 0)
    limit = f"budget of {budget_bytes / GIB:.1f} GiB"
    if has(found, "budget_pss_bytes"):
        peak = max(found["budget_pss_bytes"])
        unbounded = max(found.get("unbounded_pss_bytes", [0]))
        lines.append(
            Line(
                "6",
                f"{found['nbytes'] / GIB:.1f} GiB, {limit}: host memory (PSS, all processes) above the level "
                "before",
                f"{peak / MIB:.0f} MiB = budget {(peak - budget_bytes) / MIB:+.0f} MiB",
                f"without the limit {unbounded / MIB:.0f} MiB; {min(found['budget_samples'])} samples a save",
                "<= budget + 300 MiB",
                peak <= budget_bytes + _BUDGET_SLACK_BYTES,
            )
        )
    for place in ("tmpfs", "disk"):
        if has(found, f"{place}_budget_total_s", f"{place}_unbounded_total_s"):
            seconds = found[f"{place}_budget_total_s"]
            mine, theirs = median(seconds), median(found[f"{place}_unbounded_total_s"])
            lines.append(
                Line(
                    "6",
                    f"{found[f'{place}_bytes'] / GIB:.1f} GiB to {place}, {limit}, "
                    f"median of {len(seconds)}: total",
                    f"{mine:.3f} s = {mine / theirs:.3f} x",
                    f"without the limit {theirs:.3f} s",
                    f"<= {_BUDGET_RATIO} x",
                    mine <= _BUDGET_RATIO * theirs,
                )
            )
    if has(found, "one_total_s"):
        lines.append(
            Line(
                "6",
                f"one tensor of {found['one_bytes'] / GIB:.1f} GiB, {limit}",
                f"{found['one_total_s'][0]:.3f} s, {found['one_pss_bytes'] / MIB:.0f} MiB of host memory",
                "read back by torch",
                "equal",
                bool(found.get("one_equal")),
            )
        )
    return lines


def lines_of_fifty(found: Found) -> list[Line]:
    """Return the rows of `measure_fifty`: slopes by least squares, the first five saves left out."""
    lines: list[Line] = []
    saves = len(found.get("rss_bytes", []))
    if saves <= _WARM_SAVES + 1:
        return lines
    for name, what, unit, most in (
        ("rss_bytes", "RSS", "KiB", _RSS_SLOPE_BYTES),
        ("descriptors", "descriptors", "", 0),
        ("memfd_bytes", "shared memory", "KiB", 0),
        ("gpu_allocated_bytes", "GPU memory allocated", "KiB", 0),
        ("gpu_reserved_bytes", "GPU memory reserved", "KiB", 0),
        ("gpu_used_bytes", "GPU memory used, as the driver says", "KiB", 0),
        ("children", "processes", "", 0),
        ("threads", "threads", "", 0),
        ("pss_bytes", "PSS of all processes", "KiB", None),
    ):
        if not has(found, name):
            continue
        values = found[name][_WARM_SAVES:]
        slope = linear_regression(range(len(values)), values).slope
        shown = f"{slope / 1024:+.2f} KiB" if unit else f"{slope:+.3f}"
        limit = "" if most is None else f"<= {most // 1024} KiB" if most else "0"
        first, last = (_amount(value, unit) for value in (values[0], values[-1]))
        lines.append(
            Line(
                "7",
                f"{saves} saves of {found['nbytes'] / MIB:.0f} MiB: {what}, for each save",
                shown,
                f"saves {_WARM_SAVES + 1} to {saves}: {first} to {last}",
                limit,
                None if most is None else slope <= (most or (1024 if unit else 0.01)),
            )
        )
    if has(found, "two_equal"):
        lines.append(
            Line(
                "7",
                f"two saves in flight, {len(found['two_equal'])} times "
                f"({', '.join(map(str, found['two_in_flight']))} not yet committed)",
                "each holds its own values" if all(found["two_equal"]) else "MIXED",
                "read back by torch",
                "equal",
                all(found["two_equal"]),
            )
        )
    return lines


def _amount(value: float, unit: str) -> str:
    return f"{value / MIB:.1f} MiB" if unit else f"{value:.0f}"

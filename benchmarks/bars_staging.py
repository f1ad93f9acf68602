"""Bars 1, 2 and 4: how fast a state gets off the device, at first and later, in few tensors and in many."""

from __future__ import annotations

import time
from concurrent.futures import Future
from itertools import count
from statistics import median
from typing import Any

import torch
from bars import (
    Found,
    Line,
    Report,
    Sizes,
    ceiling_rate,
    fitting,
    has,
    holds,
    host_memory,
    make_many,
    make_state,
    memory_place,
    milliseconds,
    open_checkpointer,
    rate,
    ratio_line,
    repeat_saves,
    settle,
    size_of,
    some_of,
    timed_save,
)
from ceilings import CopyCeiling
from machine import GIB, scratch, storage_type
from peers import State, remove

from distckpt import Checkpointer, StorageWriter

_OF_CEILING = 0.98
_BEYOND_COPY_S = 0.005
_PREWARMED_RATIO = 1.1
_COLD_S = 1.8
_MANY_GIB_S = 46.0
_TINY_GIB_S = 25.0
_MANY_BUDGET_S = 20.0


def measure_staging(report: Report, device: str, sizes: Sizes) -> None:
    """Time 12 GiB in 200 tensors: a cold first save, later ones, a prewarmed one, `StorageWriter.stage`.

    The ceiling is one pinned copy of 2 GiB, again and again, before and after.
    """
    ceiling = CopyCeiling(device, sizes.ceiling_bytes)
    report.add("ceiling_bytes", ceiling.nbytes)
    report.append("ceiling_s", *ceiling.seconds(5))
    state = make_state(device, sizes.staging_tensors, fitting(device, sizes.staging_bytes))
    nbytes = size_of(state)
    report.add("nbytes", nbytes)
    if device == "cuda":
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        report.add("expandable", any(segment.get("is_expandable") for segment in segments))
    budget_bytes = host_memory(nbytes)
    with scratch(memory_place(2 * nbytes)) as folder:
        report.add("storage", storage_type(folder))
        with report.trying("cold"), open_checkpointer(folder, sizes.workers, budget_bytes) as checkpointer:
            steps = count(1)
            repeat_saves(report, "cold", checkpointer, state, steps, device, 1)
            repeat_saves(report, "later", checkpointer, state, steps, device, sizes.repeats)
        with (
            report.trying("prewarmed"),
            open_checkpointer(folder, sizes.workers, budget_bytes) as checkpointer,
        ):
            steps = count(1001)
            started = time.perf_counter()
            future = checkpointer.prewarm(state)
            report.add("prewarm_call_s", time.perf_counter() - started)
            future.result(timeout=60)
            report.add("prewarm_s", time.perf_counter() - started)
            repeat_saves(report, "prewarmed", checkpointer, state, steps, device, 1)
            repeat_saves(report, "after_prewarmed", checkpointer, state, steps, device, sizes.repeats)
            _check(report, checkpointer, state, steps)
            if device == "cuda" and report.figures["expandable"]:
                _check_moved(report, checkpointer, state, steps)
    report.append("ceiling_s", *ceiling.seconds(5))
    settings: dict[str, Any] = {"ckpt_host_memory": budget_bytes, "log_level": "warning"}
    with report.trying("stage"), StorageWriter(**settings) as writer:
        writer.prewarm(state).result(timeout=60)
        for _ in range(sizes.repeats + 1):
            _stage(report, writer, state, device)


def _check(report: Report, checkpointer: Checkpointer, state: State, steps: count[int]) -> None:
    """Change all values before a save and after its return: the checkpoint holds the first change only."""
    for tensor in state.values():
        tensor.mul_(1.5)
    expected = some_of(state)
    timing = timed_save(
        checkpointer, next(steps), state, lambda: [tensor.add_(1) for tensor in state.values()]
    )
    report.add("isolated_equal", holds(timing.path, expected))
    remove(timing.path)


def _check_moved(report: Report, checkpointer: Checkpointer, state: State, steps: count[int]) -> None:
    """Let storages move and the allocator give memory back between saves: there is no stale copy."""
    for turn in range(3):
        for name in [*state][turn::7]:
            # The old storage may be the next tensor's new one.
            state[name] = state[name] + 1
        waste = torch.empty(GIB, dtype=torch.uint8, device="cuda")
        del waste
        torch.cuda.empty_cache()
        expected = some_of(state, 15)
        timing = timed_save(checkpointer, next(steps), state)
        report.add(f"moved_{turn}_equal", holds(timing.path, expected))
        remove(timing.path)
    report.append("unchanged_staged_s", timed_save(checkpointer, next(steps), state).staged_s)


def _stage(report: Report, writer: StorageWriter, state: State, device: str) -> None:
    """Time one call of `stage`: until it returned, and until the state was staged.

    Raises:
        CheckpointError: It could not be staged.
    """
    settle(device)
    first = "stage_first_s" not in report.figures
    started = time.perf_counter()
    future: Future[dict[str, Any]] = writer.stage(state)
    returned_s = time.perf_counter() - started
    staged = future.result(timeout=60)
    staged_s = time.perf_counter() - started
    for value in staged.values():
        if not isinstance(value, torch.Tensor):
            raise value.error
    if first:
        report.add("stage_first_s", staged_s)
        report.add("stage_pinned", all(tensor.is_pinned() for tensor in staged.values()))
        report.add("stage_equal", all(torch.equal(staged[n], t) for n, t in some_of(state).items()))
    else:
        report.append("stage_returned_s", returned_s)
        report.append("stage_s", staged_s)


def measure_many(report: Report, device: str, sizes: Sizes) -> None:
    """Time 30,000 tensors of 64 KiB and 100,000 of 4 KiB: the first save, the second, and later ones."""
    ceiling = CopyCeiling(device, min(sizes.ceiling_bytes, GIB))
    report.add("ceiling_bytes", ceiling.nbytes)
    report.append("ceiling_s", *ceiling.seconds(5))
    for name, tensors, tensor_bytes in (
        ("many", sizes.many_tensors, sizes.many_tensor_bytes),
        ("tiny", sizes.tiny_tensors, sizes.tiny_tensor_bytes),
    ):
        with report.trying(name):
            _measure_one_of_many(report, name, device, sizes, tensors, tensor_bytes)
    report.append("ceiling_s", *ceiling.seconds(5))


def _measure_one_of_many(
    report: Report, name: str, device: str, sizes: Sizes, tensors: int, tensor_bytes: int
) -> None:
    state = make_many(device, tensors, tensor_bytes)
    nbytes = size_of(state)
    report.add(f"{name}_bytes", nbytes)
    report.add(f"{name}_tensors", tensors)
    with (
        scratch(memory_place(4 * nbytes)) as folder,
        open_checkpointer(folder, sizes.workers, 2 * host_memory(nbytes, tensors)) as checkpointer,
    ):
        steps = count(1)
        for kind, repeats in (("first", 1), ("second", 1), ("third", 1), ("later", sizes.repeats)):
            repeat_saves(
                report, f"{name}_{kind}", checkpointer, state, steps, device, repeats, _MANY_BUDGET_S
            )
        for tensor in [*state.values()][::97]:
            tensor.mul_(1.5)
        expected = some_of(state, 30)
        timing = timed_save(checkpointer, next(steps), state)
        report.add(f"{name}_equal", holds(timing.path, expected))


def lines_of_staging(found: Found) -> list[Line]:
    """Return the rows of `measure_staging`."""
    lines: list[Line] = []
    if not has(found, "ceiling_s", "nbytes"):
        return lines
    nbytes, ceiling = found["nbytes"], ceiling_rate(found)
    size = f"{nbytes / GIB:.1f} GiB"
    reference = (ceiling, f"pinned copy {ceiling:.2f} GiB/s")
    for name, what in (("later", "later saves"), ("after_prewarmed", "later saves after prewarm")):
        if has(found, f"{name}_staged_s"):
            seconds = found[f"{name}_staged_s"]
            lines.append(
                ratio_line(
                    "1",
                    f"{size}, {what}, median of {len(seconds)}: until staged",
                    (rate(nbytes, seconds), f"{rate(nbytes, seconds):.2f} GiB/s ({median(seconds):.4f} s)"),
                    reference,
                    _OF_CEILING,
                )
            )
            beyond_s = median(seconds) - nbytes / GIB / ceiling
            lines.append(
                Line(
                    "1",
                    f"{size}, {what}: blocking beyond the copy",
                    milliseconds(beyond_s),
                    f"save() returned after {median(found[f'{name}_returned_s']):.4f} s",
                    "<= 5 ms",
                    beyond_s <= _BEYOND_COPY_S,
                )
            )
    if has(found, "stage_s"):
        seconds = found["stage_s"]
        text = f"{rate(nbytes, seconds):.2f} GiB/s ({median(seconds):.4f} s)"
        lines.append(
            ratio_line(
                "1",
                f"{size}, StorageWriter.stage, later",
                (rate(nbytes, seconds), text),
                reference,
                _OF_CEILING,
            )
        )
        first_s = found["stage_first_s"]
        lines.append(_first_line(f"{size}, StorageWriter.stage, prewarmed", first_s, median(seconds)))
    if has(found, "prewarmed_staged_s", "after_prewarmed_staged_s"):
        later_s = median(found["after_prewarmed_staged_s"])
        lines.append(_first_line(f"{size}, prewarmed", found["prewarmed_staged_s"][0], later_s))
        lines.append(
            Line(
                "2",
                f"{size}: prewarm() until its future is done",
                f"{found['prewarm_s']:.3f} s",
                f"the call returned after {milliseconds(found['prewarm_call_s'])}",
            )
        )
    if has(found, "cold_staged_s"):
        stall_s = max(found["cold_staged_s"][0], found["cold_blocked_s"][0])
        lines.append(
            Line(
                "2",
                f"{size}, first save, cold: until staged",
                f"{stall_s:.3f} s",
                f"save() returned after {found['cold_returned_s'][0]:.3f} s",
                f"<= {_COLD_S} s",
                stall_s <= _COLD_S,
            )
        )
    return lines


def _first_line(what: str, first_s: float, later_s: float) -> Line:
    return Line(
        "2",
        f"{what}, first save: until staged",
        f"{first_s:.4f} s = {first_s / later_s:.3f} x",
        f"later {later_s:.4f} s",
        f"<= {_PREWARMED_RATIO} x",
        first_s <= _PREWARMED_RATIO * later_s,
    )


def lines_of_many(found: Found) -> list[Line]:
    """Return the rows of `measure_many`."""
    lines: list[Line] = []
    for name, least in (("many", _MANY_GIB_S), ("tiny", _TINY_GIB_S)):
        if not has(found, f"{name}_later_staged_s", "ceiling_s"):
            continue
        nbytes, tensors, ceiling = found[f"{name}_bytes"], found[f"{name}_tensors"], ceiling_rate(found)
        what = f"{tensors:,} tensors of {nbytes // tensors / 1024:.0f} KiB"
        staged = found[f"{name}_later_staged_s"]
        if has(found, f"{name}_later_prepared_s"):
            prepared = found[f"{name}_later_prepared_s"]
            copies = [end - begin for end, begin in zip(staged, prepared, strict=True)]
            reached = rate(nbytes, copies)
            lines.append(
                Line(
                    "4",
                    f"{what}, later saves, median of {len(copies)}: copies, from the first launch to the "
                    "last arrival",
                    f"{reached:.1f} GiB/s ({milliseconds(median(copies))})",
                    f"{100 * reached / ceiling:.1f} % of the pinned copy, {ceiling:.2f} GiB/s",
                    f">= {least:.0f} GiB/s",
                    reached >= least,
                )
            )
            text = f"{milliseconds(median(prepared))} of it comparing, before the first launch"
        else:
            text = ""
        lines.append(
            Line(
                "4",
                f"{what}, later saves: from save() until staged",
                f"{milliseconds(median(staged))} ({rate(nbytes, staged):.1f} GiB/s)",
                text,
            )
        )
        early = [
            f"{found[f'{name}_{kind}_staged_s'][0]:.3f} s"
            for kind in ("first", "second", "third")
            if has(found, f"{name}_{kind}_staged_s")
        ]
        lines.append(
            Line(
                "4",
                f"{what}, first three saves: until staged",
                ", ".join(early),
                f"later save() returns after {milliseconds(median(found[f'{name}_later_returned_s']))}",
            )
        )
    return lines

"""Theme `planning`: what many items cost, once when a state is seen first, and in each save after that."""

from __future__ import annotations

import threading
import time
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import TMPFS, scratch
from measurement import Figures, Outcome, Row, alternate, middle
from peers import NullWriter, State, StockAsync, remove, save

from distckpt import Checkpointer
from distckpt.errors import DistckptWarning

_NUMBERS = (16_384, 65_536, 131_072)
_STEADY = 10_000
_ITEM_BYTES = 1024
_WORKERS = 2
"""They write, so that the checkpointer's own thread does nothing but what each save asks for."""
_SAVES_BEFORE = 3
_LIMIT_S = 120.0


def run(disk: Path, *, smoke: bool) -> Outcome:
    """Time planning and layout of more and more items, and saves of 10,000 once all is planned; in memory."""
    numbers, steady, repeats = ((64, 256), 64, 1) if smoke else (_NUMBERS, _STEADY, 2)
    steady_repeats = 1 if smoke else 5
    outcome = Outcome(
        f"planning: CPU tensors of {_ITEM_BYTES} B, median of {repeats}, of saves {steady_repeats}",
        {"items": numbers, "steady_items": steady, "item_bytes": _ITEM_BYTES, "repeats": repeats},
    )
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", DistckptWarning)
        folder = stack.enter_context(scratch(TMPFS))
        for number in numbers:
            state = _make_state(number)
            first, samples = alternate(
                {
                    f"stock {number}": partial(_stock_planning, state),
                    f"distckpt {number}": partial(_planning, state, folder),
                },
                repeats,
            )
            outcome.first |= first
            outcome.samples |= samples
            del state
        state = _make_state(steady)
        checkpointer = stack.enter_context(_open(folder / "steady", steady))
        for step in range(_SAVES_BEFORE):
            checkpointer.save(step, state).result(_LIMIT_S)
        stock = StockAsync("cpu", pinned=False)
        first, samples = alternate(
            {
                "stock steady": partial(_stock_save, state, stock, folder / "stock"),
                "distckpt steady": partial(_save, state, checkpointer),
            },
            steady_repeats,
        )
        outcome.first |= first
        outcome.samples |= samples
    _report(outcome, numbers, steady)
    return outcome


def _make_state(number: int) -> State:
    parts = torch.randn(number, _ITEM_BYTES // 4)
    return {f"layers.{index // 10}.weight_{index % 10}": part.clone() for index, part in enumerate(parts)}


def _open(folder: Path, number: int) -> Checkpointer:
    return Checkpointer(
        folder,
        async_save=True,
        dist_ckpt_workers=_WORKERS,
        ckpt_host_memory=(256 << 20) + 4 * (_ITEM_BYTES + 4096) * number,
        log_level="error",
    )


def _planning(state: State, folder: Path) -> Figures:
    """Time `prewarm` of a Checkpointer that knows nothing yet: the call plans, the rest is memory."""
    with _open(folder / "planning", len(state)) as checkpointer:
        started = time.perf_counter()
        future = checkpointer.prewarm(state)
        plan_s = time.perf_counter() - started
        future.result(_LIMIT_S)
    return {"plan_s": plan_s}


def _stock_planning(state: State) -> Figures:
    """Time a save that writes nothing: what is left is torch's planning."""
    return {"plan_s": save(state, TMPFS / "nothing", NullWriter())}


def _save(state: State, checkpointer: Checkpointer) -> Figures:
    clock = _writing_clock()
    before = time.clock_gettime(clock)
    started = time.perf_counter()
    handle = checkpointer.save(_SAVES_BEFORE, state)
    handle.result(_LIMIT_S)
    total_s = time.perf_counter() - started
    return {
        "blocked_s": handle.blocked_s,
        "prepared_s": handle.prepared_s,
        "writing_cpu_s": time.clock_gettime(clock) - before,
        "total_s": total_s,
    }


def _writing_clock() -> int:
    """Return the processor-time clock of the thread that writes and publishes."""
    [thread] = [one for one in threading.enumerate() if one.name.startswith("distckpt-write")]
    assert thread.ident is not None
    return time.pthread_getcpuclockid(thread.ident)


def _stock_save(state: State, stock: StockAsync, path: Path) -> Figures:
    figures, _ = stock.save(state, path)
    remove(path)
    return {"blocked_s": figures["staged_s"], "total_s": figures["total_s"]}


def _report(outcome: Outcome, numbers: tuple[int, ...], steady: int) -> None:
    def figure(name: str, which: str) -> float:
        return middle(outcome.samples, name, which)

    def per_item_us(name: str, number: int) -> float:
        return 1e6 * figure(f"{name} {number}", "plan_s") / number

    def add(ratio: float, what: str, ours: str, reference: str, bar: str = "") -> None:
        outcome.rows.append(Row(ratio, what, ours, reference, bar))

    for number in numbers:
        mine, theirs = (figure(f"{name} {number}", "plan_s") for name in ("distckpt", "stock"))
        add(
            theirs / mine,
            f"plan and lay out {number:,} items",
            f"{mine:.3f} s, {per_item_us('distckpt', number):.1f} us an item",
            f"torch's planning alone {theirs:.3f} s, {per_item_us('stock', number):.1f} us an item",
        )
    few, many = (per_item_us("distckpt", number) for number in (numbers[0], numbers[-1]))
    stock = per_item_us("stock", numbers[0]) / per_item_us("stock", numbers[-1])
    add(
        few / many,
        f"time for an item, {numbers[-1]:,} beside {numbers[0]:,} items (linear: 1)",
        f"{many:.1f} us",
        f"{few:.1f} us; torch's planning {stock:.2f}x",
    )
    ours: dict[str, Any] = {
        name: figure("distckpt steady", name)
        for name in ("blocked_s", "prepared_s", "writing_cpu_s", "total_s")
    }
    theirs = figure("stock steady", "blocked_s")
    what = f"{steady:,} items, after the third save"
    add(
        theirs / ours["blocked_s"],
        f"{what}: save() takes",
        f"{1000 * ours['blocked_s']:.2f} ms, {1000 * ours['prepared_s']:.2f} of it comparing",
        f"stock async_save {1000 * theirs:.2f} ms",
    )
    theirs = figure("stock steady", "total_s")
    add(
        theirs / ours["total_s"],
        f"{what}: durable",
        f"{1000 * ours['total_s']:.2f} ms, {1000 * ours['writing_cpu_s']:.2f} of it the writing thread's",
        f"stock async_save {1000 * theirs:.2f} ms, no fsync included",
    )

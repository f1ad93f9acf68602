"""Bar 3: what the steps of a training loop notice of saves."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import mean, median, quantiles
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
    make_parameters,
    make_state,
    memory_place,
    milliseconds,
    open_checkpointer,
    settle,
    size_of,
    some_of,
    state_of,
)
from ceilings import CopyCeiling
from machine import GIB, scratch
from peers import StockAsync, remove
from torch.optim import SGD, Optimizer

from distckpt import Checkpointer

_SLOWDOWN = 0.005
_P99_RATIO = 1.1
_HIDDEN = 1.25
"""How many times longer than the copy it takes to the next optimizer step, where the copy shall be hidden."""


@dataclass
class _Phase:
    """Seconds of each step of one kind of loop; `saves` those that began meanwhile."""

    steps: list[float] = field(default_factory=list)
    optimizer_steps: list[float] = field(default_factory=list)
    saves: int = 0
    pauses: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(self.steps) + sum(self.optimizer_steps)

    @property
    def number(self) -> int:
        return len(self.steps) + len(self.optimizer_steps)

    def as_record(self) -> dict[str, Any]:
        """Return the distribution instead of thousands of samples."""
        found: dict[str, Any] = {"saves": self.saves, "number": self.number, "seconds": self.seconds}
        for name, seconds in (("step", self.steps), ("optimizer_step", self.optimizer_steps)):
            if len(seconds) > 1:
                cuts = quantiles(seconds, n=1000, method="inclusive")
                found[f"{name}_s"] = {
                    "mean": mean(seconds), "p50": cuts[499], "p90": cuts[899], "p99": cuts[989],
                    "p99.9": cuts[998], "max": max(seconds),
                }  # fmt: skip
        if self.pauses:
            found["longest_call_s"] = max(self.pauses)
        return found


class _Loop:
    """A trainer: matrix products, small kernels as fast as the host launches them, an optimizer step.

    Args:
        device: "cuda" or "cpu".
        sizes: Of the matrices, and how many kernels.
        optimizer: Owns the state that is saved.
    """

    def __init__(self, device: str, sizes: Sizes, optimizer: Optimizer) -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        side = sizes.training_matrix
        self._factors = [torch.randn(side, side, device=device, dtype=dtype) for _ in range(2)]
        self._product = torch.empty_like(self._factors[0])
        self._small = torch.zeros(64, device=device)
        self._kernels = sizes.training_small_kernels
        self._is_cuda = device == "cuda"
        self.optimizer = optimizer

    def compute(self) -> None:
        for _ in range(8):
            torch.mm(self._factors[0], self._factors[1], out=self._product)
        for _ in range(self._kernels):
            self._small.add_(1)

    def synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.current_stream().synchronize()

    def run(
        self,
        steps: int,
        phase: _Phase,
        *,
        accumulate: int = 0,
        guard: Callable[[], AbstractContextManager[object]] = nullcontext,
        before_step: Callable[[_Phase], object] = lambda phase: None,
        stop_at: float = math.inf,
    ) -> None:
        """Take steps, each timed from before the save's call until the stream has done its work.

        Args:
            steps: How many.
            phase: Where their seconds go.
            accumulate: Steps for each optimizer step; 0: there are none.
            guard: Gives what the optimizer step stands in.
            before_step: Called within each step, first; with optimizer steps, only right after one of them,
                as trainers save.
            stop_at: End earlier at this reading of `time.perf_counter`.
        """
        for index in range(steps):
            started = time.perf_counter()
            if started > stop_at:
                break
            if not accumulate or index % accumulate == 0:
                before_step(phase)
            self.compute()
            updates = bool(accumulate) and (index + 1) % accumulate == 0
            if updates:
                with guard():
                    self.optimizer.step()
            self.synchronize()
            (phase.optimizer_steps if updates else phase.steps).append(time.perf_counter() - started)


class _Saving:
    """Saves again as soon as the last save has committed; a process of its own removes the checkpoints."""

    def __init__(self, checkpointer: Checkpointer, parameters: list[torch.nn.Parameter]) -> None:
        self._checkpointer, self._state = checkpointer, state_of(parameters)
        self._steps = count(1)
        self._handle: Any = None
        code = "import os, shutil, sys\nos.nice(19)\nfor line in sys.stdin: shutil.rmtree(line.strip(), True)"
        self._remover = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True)

    def before_step(self, phase: _Phase) -> None:
        if self._handle is not None:
            if not self._handle.committed:
                return
            self._remove(self._handle.result(timeout=60))
        phase.saves += 1
        started = time.perf_counter()
        self._handle = self._checkpointer.save(next(self._steps), self._state)
        phase.pauses.append(time.perf_counter() - started)

    def wait(self) -> None:
        if self._handle is not None:
            self._remove(self._handle.result(timeout=60))
            self._handle = None

    def _remove(self, path: Path) -> None:
        assert self._remover.stdin is not None
        self._remover.stdin.write(f"{path}\n")
        self._remover.stdin.flush()

    def close(self) -> None:
        self._remover.communicate()


class _StockSaving:
    """The same with `dcp.async_save`."""

    def __init__(self, stock: StockAsync, parameters: list[torch.nn.Parameter], folder: Path) -> None:
        self._stock, self._state, self._folder = stock, state_of(parameters), folder
        self._upload: Any = None

    def before_step(self, phase: _Phase) -> None:
        if self._upload is not None:
            if not self._upload.done():
                return
            self.wait()
        phase.saves += 1
        started = time.perf_counter()
        self._upload = self._stock.start(self._state, self._folder / "stock")[1]
        phase.pauses.append(time.perf_counter() - started)

    def wait(self) -> None:
        if self._upload is not None:
            self._upload.result()
            self._upload = None
            remove(self._folder / "stock")


def measure_training(report: Report, device: str, sizes: Sizes) -> None:
    """Time every step of a compute loop without saves and with saves back to back, in turn.

    Three loops: `compute` (what the bar asks for), `accumulating` (a guarded optimizer step so seldom that
    the copy is hidden before it) and `each` (a guarded optimizer step in each step: shorter than the copy,
    which it has to wait for). Then the first with stock `dcp.async_save`, and the trainer's own CUDA graphs.
    """
    ceiling = CopyCeiling(device, sizes.ceiling_bytes)
    report.add("ceiling_bytes", ceiling.nbytes)
    report.append("ceiling_s", *ceiling.seconds(5))
    del ceiling
    state = make_state(device, sizes.staging_tensors, fitting(device, sizes.training_bytes, 2))
    parameters = make_parameters(state)
    nbytes = size_of(state)
    del state
    report.add("nbytes", nbytes)
    copy_s = nbytes / GIB / ceiling_rate(report.figures)
    loop = _Loop(device, sizes, SGD(parameters, lr=1e-3, foreach=True))
    with (
        scratch(memory_place(2 * nbytes)) as folder,
        open_checkpointer(folder / "ours", sizes.workers, host_memory(nbytes)) as checkpointer,
    ):
        saving = _Saving(checkpointer, parameters)
        try:
            _measure_loops(report, sizes, loop, saving, checkpointer, copy_s)
        finally:
            saving.close()
        with report.trying("stock"):
            _measure_stock(report, device, sizes, loop, parameters, folder)
        # Last, for a capture that fails leaves the process of no use.
        if device == "cuda":
            with report.trying("trainer's graphs"):
                _check_graphs(report, checkpointer, loop, parameters)


def _measure_loops(
    report: Report, sizes: Sizes, loop: _Loop, saving: _Saving, checkpointer: Checkpointer, copy_s: float
) -> None:
    def guard() -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = checkpointer.guard(loop.optimizer)
        return context

    steps = sizes.training_steps
    # Warm up: the optimizer becomes known, the plan is made, the graph captured.
    loop.run(20, _Phase(), accumulate=20, guard=guard)
    for _ in range(4):
        loop.run(20, _Phase(), before_step=saving.before_step)
        saving.wait()
        loop.run(20, _Phase(), accumulate=20, guard=guard)
    warm = _Phase()
    loop.run(max(20, steps // 10), warm)
    step_s = median(warm.steps)
    often = max(2, math.ceil(_HIDDEN * copy_s / step_s))
    report.add("accumulate", often)
    plans = {
        "compute": (sizes.training_phases, steps, 0),
        "accumulating": (1, max(steps, 4 * often), often),
        "each": (1, max(steps // 3, 10), 1),
    }
    for name, (phases, number, accumulate) in plans.items():
        with report.trying(name):
            plain, saved = _Phase(), _Phase()
            means = []
            for turn in range(2 * phases + 1):
                gc.collect()
                phase = saved if turn % 2 else plain
                before = phase.seconds, phase.number
                before_step = saving.before_step if turn % 2 else lambda phase: None
                loop.run(number, phase, accumulate=accumulate, guard=guard, before_step=before_step)
                means.append((phase.seconds - before[0]) / (phase.number - before[1]))
                saving.wait()
                # The next phase shall not begin while checkpoints are being removed.
                time.sleep(0.3)
            report.add(f"{name}_plain", plain.as_record())
            report.add(f"{name}_saving", saved.as_record())
            report.add(f"{name}_phase_means_s", means)


def _measure_stock(
    report: Report,
    device: str,
    sizes: Sizes,
    loop: _Loop,
    parameters: list[torch.nn.Parameter],
    folder: Path,
) -> None:
    """Run the compute loop while stock `dcp.async_save`, with its pinned stager, saves again and again."""
    stock = StockAsync(device, pinned=True)
    saving = _StockSaving(stock, parameters, folder)
    try:
        # The first save pins its memory.
        saving.before_step(_Phase())
        saving.wait()
        plain, saved = _Phase(), _Phase()
        loop.run(sizes.training_steps, plain)
        stop_at = time.perf_counter() + sizes.training_stock_s
        loop.run(1_000_000, saved, before_step=saving.before_step, stop_at=stop_at)
        saving.wait()
    finally:
        stock.close()
    report.add("stock_plain", plain.as_record())
    report.add("stock_saving", saved.as_record())


def _check_graphs(
    report: Report, checkpointer: Checkpointer, loop: _Loop, parameters: list[torch.nn.Parameter]
) -> None:
    """Let the trainer capture and replay graphs of its own while a save is under way.

    Once with `torch.cuda.graph`, which waits for the device first, and once with `capture_begin` alone, so
    that copies of the save run during the capture.
    """
    factor = torch.randn(256, 256, device="cuda")
    entry = torch.randn(256, 256, device="cuda")

    def work() -> torch.Tensor:
        return (entry @ factor).relu() + 1

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    for number, (name, waits) in enumerate({"graph": True, "capture_begin": False}.items(), 1_000_001):
        expected = some_of(state_of(parameters))
        settle("cuda")
        handle = checkpointer.save(number, state_of(parameters))
        report.add(f"{name}_copies_before_capture", not handle.staged)
        graph = torch.cuda.CUDAGraph()
        if waits:
            with torch.cuda.graph(graph):
                result = work()
        else:
            with torch.cuda.stream(side):
                graph.capture_begin()
                result = work()
                graph.capture_end()
        report.add(f"{name}_copies_after_capture", not handle.staged)
        report.add(f"{name}_captured_before_commit", not handle.committed)
        entry.copy_(torch.randn(256, 256, device="cuda"))
        graph.replay()
        torch.cuda.current_stream().synchronize()
        is_right = torch.allclose(result, work())
        path = Path(handle.result(timeout=60))
        report.add(f"{name}_equal", is_right and holds(path, expected))
        remove(path)
        del graph
        with checkpointer.guard(loop.optimizer):
            loop.optimizer.step()


def lines_of_training(found: Found) -> list[Line]:
    """Return the rows of `measure_training`."""
    lines: list[Line] = []
    if not has(found, "nbytes"):
        return lines
    size = f"{found['nbytes'] / GIB:.1f} GiB"
    names = {
        "compute": "compute loop",
        "accumulating": f"guarded optimizer step every {found.get('accumulate')} steps",
        "each": "guarded optimizer step in each step",
        "stock": "compute loop, stock async_save (pinned)",
    }
    for name, what in names.items():
        if not has(found, f"{name}_plain", f"{name}_saving"):
            continue
        plain, saved = found[f"{name}_plain"], found[f"{name}_saving"]
        step_s = plain["seconds"] / plain["number"]
        slowdown = saved["seconds"] / saved["number"] / step_s - 1
        has_bar = name == "compute"
        if has_bar:
            means = found["compute_phase_means_s"]
            # Phases without saves differ from each other as well: what cannot be told from noise.
            noise = (max(means[::2]) - min(means[::2])) / step_s
            reference = f"without saves {milliseconds(step_s)}; between such phases +-{100 * noise / 2:.2f} %"
        else:
            lost_s = slowdown * step_s * saved["number"] / max(1, saved["saves"])
            copy_s = found["nbytes"] / GIB / ceiling_rate(found)
            reference = (
                f"{milliseconds(lost_s)} lost for each save; the copy alone takes {milliseconds(copy_s)}"
            )
        lines.append(
            Line(
                "3",
                f"{what}, {size} saved {saved['saves']} times back to back: mean step",
                f"{100 * slowdown:+.2f} %, longest call {milliseconds(saved.get('longest_call_s', 0.0))}",
                reference,
                "<= +0.5 %" if has_bar else "",
                slowdown <= _SLOWDOWN if has_bar else None,
            )
        )
        if "step_s" in plain and "step_s" in saved:
            lines.append(_tail_line(what, plain["step_s"], saved["step_s"], has_bar))
    return lines


def _tail_line(what: str, plain: dict[str, float], saved: dict[str, float], has_bar: bool) -> Line:
    ratio = saved["p99"] / plain["p99"]
    return Line(
        "3",
        f"{what}: p99 step",
        f"{milliseconds(saved['p99'])} = {ratio:.3f} x (p50 {milliseconds(saved['p50'])}, "
        f"max {milliseconds(saved['max'])})",
        f"without saves {milliseconds(plain['p99'])} (p50 {milliseconds(plain['p50'])}, "
        f"max {milliseconds(plain['max'])})",
        f"<= {_P99_RATIO} x" if has_bar else "",
        ratio <= _P99_RATIO if has_bar else None,
    )

"""Bar 3: what the steps of a training loop notice of saves."""

from __future__ import annotations

import contextlib
import gc
import math
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean, median, quantiles, stdev
from typing import Any

import torch
from bare import BareSave
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
from cores import Cores
from edges import Edges, interval, lost
from machine import GIB, default_disk, scratch, storage_type
from peers import StockAsync, remove
from torch.optim import SGD, Optimizer

from distckpt import Checkpointer

_SLOWDOWN = 0.005
_P99_RATIO = 1.1
_LIMIT_S = 60.0
_LOOK_EVERY = 200
"""How often to look whether a save failed: raising what says that it has not takes a while."""
_BLOCK_STEPS = 200
_WARM = 0.01
_POLL_S = 0.001
_WARM_SAVES = 3
"""Saves until one replays a captured graph."""
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

    @property
    def mean(self) -> float:
        return self.seconds / self.number

    def extend(self, other: _Phase) -> None:
        self.steps += other.steps
        self.optimizer_steps += other.optimizer_steps
        self.pauses += other.pauses
        self.saves += other.saves

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
        phase: _Phase,
        *,
        steps: int = 0,
        seconds: float = 0.0,
        accumulate: int = 0,
        guard: Callable[[], AbstractContextManager[object]] = nullcontext,
        before_step: Callable[[_Phase, bool], object] = lambda phase, more: None,
        is_over: Callable[[], bool] = lambda: True,
    ) -> None:
        """Take steps, each timed from before the save's call until the stream has done its work.

        Args:
            phase: Where their seconds go.
            steps: At least how many.
            seconds: At least how long.
            accumulate: Steps for each optimizer step; 0: there are none.
            guard: Gives what the optimizer step stands in.
            before_step: Called within each step, first, and told whether there is still time; with optimizer
                steps, only right after one of them, as trainers save.
            is_over: Asked when there have been enough steps for long enough: may it end?

        Raises:
            TimeoutError: It never did.
        """
        begun = time.perf_counter()
        index = 0
        while True:
            started = time.perf_counter()
            has_time = index < steps or started < begun + seconds
            if not has_time and is_over():
                break
            if started > begun + seconds + _LIMIT_S:
                raise TimeoutError("a save did not end")
            if not accumulate or index % accumulate == 0:
                before_step(phase, has_time)
            self.compute()
            index += 1
            updates = bool(accumulate) and index % accumulate == 0
            if updates:
                with guard():
                    self.optimizer.step()
            self.synchronize()
            (phase.optimizer_steps if updates else phase.steps).append(time.perf_counter() - started)


class _Saving(ABC):
    """Saves again as soon as the last save has committed; a process of its own removes the checkpoints.

    Args:
        cores: Where the threads go that a save starts.
    """

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._steps = count(1)
        self._is_saving = False
        self._to_remove = 0
        code = (
            "import os, shutil, sys\n"
            "os.nice(19)\n"
            "for line in sys.stdin:\n"
            "    shutil.rmtree(line.strip(), True)\n"
            "    print(flush=True)\n"
        )
        self._remover = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @abstractmethod
    def _start(self, step: int) -> None:
        """Begin a save."""

    @abstractmethod
    def _is_done(self) -> bool:
        """Say whether it has committed."""

    @abstractmethod
    def _result(self) -> Path:
        """Wait for it; returns where it is."""

    def before_step(self, phase: _Phase, has_time: bool) -> None:
        """Begin a save if none is under way and there is time for one."""
        if self._is_saving:
            if not self._is_done():
                return
            self.reap()
        if has_time:
            phase.saves += 1
            started = time.perf_counter()
            with self._cores.starting():
                self._start(next(self._steps))
            phase.pauses.append(time.perf_counter() - started)
            self._is_saving = True

    def is_over(self) -> bool:
        """Say whether no save is under way."""
        return not self._is_saving or self._is_done()

    def wait(self) -> None:
        """Wait for the save and until all checkpoints are removed."""
        if self._is_saving:
            self.reap()
        assert self._remover.stdout is not None
        for _ in range(self._to_remove):
            self._remover.stdout.readline()
        self._to_remove = 0

    def reap(self) -> None:
        """Have the checkpoint removed of a save that is over."""
        self._is_saving = False
        assert self._remover.stdin is not None
        self._remover.stdin.write(f"{self._result()}\n")
        self._remover.stdin.flush()
        self._to_remove += 1

    def close(self) -> None:
        self._remover.communicate()


class _OurSaving(_Saving):
    """With `Checkpointer.save`."""

    def __init__(
        self, cores: Cores, checkpointer: Checkpointer, parameters: list[torch.nn.Parameter]
    ) -> None:
        super().__init__(cores)
        self._checkpointer, self._state = checkpointer, state_of(parameters)
        self._asked = 0
        self._handle: Any = None

    def _start(self, step: int) -> None:
        self._handle = self._checkpointer.save(step, self._state)

    def _is_done(self) -> bool:
        self._asked += 1
        if self._asked % _LOOK_EVERY == 0:
            # One that failed is never committed.
            with contextlib.suppress(TimeoutError):
                self._handle.result(timeout=0)
        return bool(self._handle.committed)

    def _result(self) -> Path:
        return Path(self._handle.result(timeout=_LIMIT_S))


class _StockSaving(_Saving):
    """With stock `dcp.async_save`."""

    def __init__(
        self, cores: Cores, stock: StockAsync, parameters: list[torch.nn.Parameter], folder: Path
    ) -> None:
        super().__init__(cores)
        self._stock, self._state, self._folder = stock, state_of(parameters), folder
        self._path = folder
        self._upload: Any = None

    def _start(self, step: int) -> None:
        self._path = self._folder / f"stock-{step}"
        self._upload = self._stock.start(self._state, self._path)[1]

    def _is_done(self) -> bool:
        return bool(self._upload.done())

    def _result(self) -> Path:
        self._upload.result(_LIMIT_S)
        return self._path


class _BareSaving(_Saving):
    """With nothing but a plain copy and plain writes."""

    def __init__(self, cores: Cores, parameters: list[torch.nn.Parameter], folder: Path) -> None:
        super().__init__(cores)
        self._bare = BareSave(parameters, cores.settings.get("ckpt_worker_cores", ""))
        self._path, self._folder = folder, folder

    def _start(self, step: int) -> None:
        self._path = self._folder / f"bare-{step}"
        self._bare.start(self._path)

    def _is_done(self) -> bool:
        return self._bare.is_done()

    def _result(self) -> Path:
        self._bare.finish()
        return self._path

    def close(self) -> None:
        super().close()
        self._bare.close()


def measure_training(report: Report, device: str, sizes: Sizes) -> None:
    """Time every step of a compute loop without saves and with saves back to back, in turn.

    `compute` saves to the disk, which is what the bar asks for; `bare` copies and writes as much there by the
    plainest means. To memory: `memory`, the same loop;
    `accumulating`, a guarded optimizer step so seldom that the copy is hidden before it; `each`, a guarded
    optimizer step in each step, shorter than the copy, which it has to wait for; `stock`, the first loop with
    stock `dcp.async_save`. Then the trainer's own CUDA graphs.

    The trainer is this thread, on a core of its own where there are four or more; all other threads and the
    workers are kept off it.
    """
    cores = Cores()
    report.add("cores", cores.as_record())
    ceiling = CopyCeiling(device, sizes.ceiling_bytes)
    report.add("ceiling_bytes", ceiling.nbytes)
    report.append("ceiling_s", *ceiling.seconds(5))
    del ceiling
    state = make_state(device, sizes.staging_tensors, fitting(device, sizes.training_bytes, 2))
    parameters = make_parameters(state)
    nbytes = size_of(state)
    del state
    report.add("nbytes", nbytes)
    trainer = _Trainer(
        report, sizes, cores, parameters, _Loop(device, sizes, SGD(parameters, lr=1e-3, foreach=True))
    )
    trainer.warm_up()
    with report.trying("compute"), scratch(default_disk()) as folder:
        report.add("compute_storage", storage_type(folder))
        with trainer.opened(folder) as (checkpointer, saving):
            trainer.measure_alone(saving)
            trainer.measure_edges("compute", saving)
            trainer.measure("compute", sizes.training_phases, saving, checkpointer)
        with report.trying("bare"):
            trainer.measure_bare(folder)
    with scratch(memory_place(3 * nbytes)) as folder, trainer.opened(folder) as (checkpointer, saving):
        report.add("accumulate", trainer.often)
        for name, phases, accumulate in (
            ("memory", sizes.training_memory_phases, 0),
            ("accumulating", 1, trainer.often),
            ("each", 1, 1),
        ):
            with report.trying(name):
                trainer.measure(name, phases, saving, checkpointer, accumulate)
        with report.trying("stock"):
            trainer.measure_stock(device, folder)
        # Last, for a capture that fails leaves the process of no use.
        if device == "cuda":
            with report.trying("trainer's graphs"):
                _check_graphs(report, checkpointer, trainer.loop, parameters)


class _Trainer:
    """The loop, on its core, and what is found in its phases."""

    def __init__(
        self, report: Report, sizes: Sizes, cores: Cores, parameters: list[torch.nn.Parameter], loop: _Loop
    ) -> None:
        self._report, self._sizes, self._cores, self._parameters = report, sizes, cores, parameters
        self._nbytes = report.figures["nbytes"]
        self.loop = loop
        self.often = 2
        """Steps for each optimizer step so that the copy is hidden before it."""

    def warm_up(self) -> None:
        """Take steps until two blocks of them take the same time: clocks rise, caches fill."""
        self.loop.run(_Phase(), steps=20, accumulate=10)
        blocks: list[float] = []
        deadline = time.perf_counter() + self._sizes.training_warm_ms / 1000
        with self._cores.apart():
            while time.perf_counter() < deadline:
                phase = _Phase()
                self.loop.run(phase, steps=_BLOCK_STEPS)
                blocks.append(phase.mean)
                if len(blocks) > 1 and abs(blocks[-1] / blocks[-2] - 1) < _WARM:
                    break
        self._report.add("warm_up_means_s", blocks)
        copy_s = self._nbytes / GIB / ceiling_rate(self._report.figures)
        self.often = max(2, math.ceil(_HIDDEN * copy_s / blocks[-1]))

    @contextmanager
    def opened(self, folder: Path) -> Iterator[tuple[Checkpointer, _Saving]]:
        """Give a Checkpointer that has planned and captured, and whose threads run."""
        settings = self._cores.settings if self._sizes.workers > 1 else {}
        with open_checkpointer(
            folder / "ours", self._sizes.workers, host_memory(self._nbytes), **settings
        ) as checkpointer:
            guard = partial(checkpointer.guard, self.loop.optimizer)
            # The optimizer becomes known.
            self.loop.run(_Phase(), steps=2, accumulate=2, guard=guard)
            checkpointer.prewarm(state_of(self._parameters)).result(timeout=_LIMIT_S)
            saving = _OurSaving(self._cores, checkpointer, self._parameters)
            try:
                for _ in range(_WARM_SAVES):
                    self.loop.run(_Phase(), steps=1, before_step=saving.before_step, is_over=saving.is_over)
                    saving.wait()
                    self.loop.run(_Phase(), steps=2, accumulate=2, guard=guard)
                yield checkpointer, saving
            finally:
                saving.close()

    def measure(
        self, name: str, phases: int, saving: _Saving, checkpointer: Checkpointer | None, accumulate: int = 0
    ) -> None:
        """Run phases without and with saves in turn, each after some steps that do not count."""
        sizes = self._sizes
        guard: Callable[[], AbstractContextManager[object]] = nullcontext
        if checkpointer is not None:
            guard = partial(checkpointer.guard, self.loop.optimizer)
        plain, saved = _Phase(), _Phase()
        means = []
        with self._cores.apart():
            for turn in range(2 * phases + 1):
                gc.collect()
                self.loop.run(
                    _Phase(), seconds=sizes.training_lead_in_ms / 1000, accumulate=accumulate, guard=guard
                )
                phase = _Phase()
                run = partial(self.loop.run, phase, steps=3 * accumulate, accumulate=accumulate, guard=guard)
                if turn % 2:
                    # Until the last save that it began has committed: all its steps are beside one.
                    run(
                        seconds=sizes.training_saving_ms / 1000,
                        before_step=saving.before_step,
                        is_over=saving.is_over,
                    )
                    saving.wait()
                    saved.extend(phase)
                else:
                    run(seconds=sizes.training_plain_ms / 1000)
                    plain.extend(phase)
                means.append(phase.mean)
        self._report.add(f"{name}_plain", plain.as_record())
        self._report.add(f"{name}_saving", saved.as_record())
        self._report.add(f"{name}_phase_means_s", means)

    def measure_alone(self, saving: _Saving) -> None:
        """Save with no loop beside it: the call, and the processor time of other threads until the commit."""
        for _ in range(self._sizes.training_alone):
            phase, before = _Phase(), _thread_seconds()
            saving.before_step(phase, True)
            started = time.perf_counter()
            while not saving.is_over():
                time.sleep(_POLL_S)
            self._report.append("alone_s", phase.pauses[0] + time.perf_counter() - started)
            self._report.append("alone_call_s", phase.pauses[0])
            after, mine = _thread_seconds(), threading.get_native_id()
            others = sum(seconds - before.get(task, 0.0) for task, seconds in after.items() if task != mine)
            self._report.append("alone_threads_s", others)
            saving.wait()

    def measure_edges(self, name: str, saving: _Saving) -> None:
        """Take steps without a gap while saves begin and end, as far apart as `training_plain_ms` says."""
        edges, phase = Edges(), _Phase()
        gap_s = self._sizes.training_plain_ms / 1000
        ended_s, is_reaped = time.perf_counter(), True

        def before_step(_: _Phase, has_time: bool) -> None:
            nonlocal ended_s, is_reaped
            now_s = time.perf_counter()
            if len(edges.ends) < len(edges.begins):
                if saving.is_over():
                    edges.ends.append(len(phase.steps))
                    ended_s, is_reaped = now_s, False
            elif not is_reaped and now_s > ended_s + gap_s / 2:
                # Not at the end: removing it is work, too.
                saving.reap()
                is_reaped = True
            elif is_reaped and has_time and now_s > ended_s + gap_s:
                edges.begins.append(len(phase.steps))
                saving.before_step(phase, True)

        gc.collect()
        gc.disable()
        try:
            with self._cores.apart():
                self.loop.run(
                    phase,
                    seconds=self._sizes.training_edges_ms / 1000,
                    before_step=before_step,
                    # Until some steps after the last save.
                    is_over=lambda: is_reaped and len(edges.ends) == len(edges.begins),
                )
        finally:
            gc.enable()
            saving.wait()
        edges.steps, edges.calls = phase.steps, phase.pauses
        self._report.add(f"{name}_changes", edges.changes())
        self._report.add(f"{name}_edge_save_s", edges.seconds())
        self._report.add(f"{name}_edge_call_s", edges.calls)

    def measure_bare(self, folder: Path) -> None:
        """Run the compute loop beside a plain copy and plain writes, again and again."""
        saving = _BareSaving(self._cores, self._parameters, folder)
        try:
            self.loop.run(_Phase(), steps=1, before_step=saving.before_step, is_over=saving.is_over)
            saving.wait()
            self.measure_edges("bare", saving)
            self.measure("bare", self._sizes.training_phases, saving, None)
        finally:
            saving.close()

    def measure_stock(self, device: str, folder: Path) -> None:
        """Run the compute loop beside stock `dcp.async_save`, with its pinned stager, again and again."""
        stock = StockAsync(device, pinned=True)
        saving = _StockSaving(self._cores, stock, self._parameters, folder)
        try:
            # The first save pins its memory.
            saving.before_step(_Phase(), True)
            saving.wait()
            self.measure("stock", 1, saving, None)
        finally:
            saving.close()
            stock.close()


def _thread_seconds() -> dict[int, float]:
    """Return the processor seconds of each thread of this process, by its native id."""
    # psutil's are in hundredths.
    found = {}
    for task in Path("/proc/self/task").iterdir():
        # It may have ended.
        with contextlib.suppress(OSError):
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


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
        "compute": f"compute loop, to {found.get('compute_storage')}",
        "bare": f"compute loop, plain copy and writes to {found.get('compute_storage')}",
        "memory": "compute loop, to memory",
        "accumulating": f"guarded optimizer step every {found.get('accumulate')} steps",
        "each": "guarded optimizer step in each step",
        "stock": "compute loop, stock async_save (pinned)",
    }
    apart = _apart(found.get("cores", {}))
    if has(found, "alone_s", "alone_call_s", "alone_threads_s"):
        whole_s, call_s, threads_s = (median(found[f"alone_{name}"]) for name in ("s", "call_s", "threads_s"))
        lines.append(
            Line(
                "3",
                f"{size}, nothing beside it: the call, and processor time of other threads of the process",
                f"call {milliseconds(call_s)}, other threads {milliseconds(threads_s)}",
                f"{100 * (call_s + threads_s) / whole_s:.2f} % of the {whole_s:.2f} s of a save",
                "",
                None,
            )
        )
    for name, what in names.items():
        if found.get(f"{name}_edge_save_s"):
            lines.append(_edges_line(found, name, what, size))
        if not has(found, f"{name}_plain", f"{name}_saving"):
            continue
        plain, saved = found[f"{name}_plain"], found[f"{name}_saving"]
        means = found[f"{name}_phase_means_s"]
        step_s = median(means[::2])
        # Each phase with saves beside the two around it: what drifts slowly cancels out.
        slowdowns = [
            2 * mine / (before + after) - 1
            for before, mine, after in zip(means[::2], means[1::2], means[2::2], strict=False)
        ]
        slowdown = median(slowdowns)
        has_bar = name == "compute"
        average = f"{100 * mean(slowdowns):+.2f} %"
        if len(slowdowns) > 1:
            average += f" +-{100 * stdev(slowdowns) / len(slowdowns) ** 0.5:.2f}"
        spread = (max(means[::2]) - min(means[::2])) / step_s / 2
        number = len(means[::2])
        reference = (
            f"without saves {milliseconds(step_s)}, {number} such phases within +-{100 * spread:.2f} %"
        )
        if name in ("compute", "bare"):
            reference += f"; mean of all phases, and its standard error: {average}; {apart}"
        else:
            lost_s = slowdown * step_s * saved["number"] / max(1, saved["saves"])
            copy_s = found["nbytes"] / GIB / ceiling_rate(found)
            reference += (
                f"; {milliseconds(lost_s)} lost for each save; the copy alone takes {milliseconds(copy_s)}"
            )
        lines.append(
            Line(
                "3",
                f"{what}, {size} saved {saved['saves']} times back to back: mean step",
                f"{100 * slowdown:+.2f} %, longest call {milliseconds(saved.get('longest_call_s', 0.0))}",
                reference,
                # Told by the edges.
                "",
                None,
            )
        )
        if "step_s" in plain and "step_s" in saved:
            lines.append(_tail_line(what, plain["step_s"], saved["step_s"], has_bar))
    return lines


def _edges_line(found: Found, name: str, what: str, size: str) -> Line:
    changes = found[f"{name}_changes"]
    save_s, call_s = (median(found[f"{name}_edge_{kind}_s"]) for kind in ("save", "call"))
    slowdown = lost(changes, save_s, call_s)
    windows = "; ".join(
        f"{window} {100 * median(samples):+.2f} % "
        f"({' to '.join(f'{100 * bound:+.2f}' for bound in interval(samples))})"
        for window, samples in changes.items()
    )
    has_bar = name == "compute"
    return Line(
        "3",
        f"{what}, {size}, {len(changes.get('end', ()))} saves, steps beside those next to them: mean step",
        f"{100 * slowdown:+.2f} % of a save of {save_s:.2f} s, call {milliseconds(call_s)}",
        f"medians and their 90 % intervals: {windows}",
        "<= +0.5 %" if has_bar else "",
        slowdown <= _SLOWDOWN if has_bar else None,
    )


def _apart(cores: dict[str, Any]) -> str:
    """Say whether the trainer had a core of its own."""
    if cores.get("trainer") is None:
        return "nothing pinned, too few cores"
    if cores.get("workers") is None:
        return f"cores kept apart: trainer on {cores['trainer']}, other threads off it"
    return f"cores kept apart: trainer on {cores['trainer']}, workers on {cores['workers']}"


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

"""What the parts of `gpu_check.py` share: their sizes, what they report, and how a save is timed."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil
import torch
from machine import GIB, default_disk, tmpfs_for
from peers import State, remove
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from distckpt import Checkpointer

if TYPE_CHECKING:
    from torch.nn import Parameter

POLL_S = 0.0001
"""How long to sleep between asking a save whether it has staged, which is one look at shared memory.

The kernel adds some 0.05 ms; `Timing.poll_s` says what it came to.
"""
STAGED_LIMIT_S = 30.0
_PROBE_S = 10.0
RESULT_LIMIT_S = 90.0
MIB = 1 << 20
FAILURES = (Exception, CheckpointException)
"""What a save may raise: torch's exception is none to Python."""
Found = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How much each part works on; bytes are those of the tensors."""

    repeats: int = 5
    workers: int = 8
    ceiling_bytes: int = 2 * GIB
    staging_bytes: int = 12 * GIB
    staging_tensors: int = 200
    guarded_saves: int = 7
    many_tensors: int = 30_000
    many_tensor_bytes: int = 64 << 10
    tiny_tensors: int = 100_000
    tiny_tensor_bytes: int = 4 << 10
    training_bytes: int = 4 * GIB
    training_alone: int = 10
    training_phases: int = 12
    training_memory_phases: int = 2
    training_edges_ms: int = 40_000
    """Of one loop in which saves begin and end again and again."""
    training_plain_ms: int = 1000
    training_saving_ms: int = 500
    training_lead_in_ms: int = 100
    training_warm_ms: int = 3000
    training_matrix: int = 4096
    training_small_kernels: int = 300
    disk_bytes: int = 4 * GIB
    disk_tensors: int = 64
    disk_least_workers: int = 1
    tmpfs_bytes: int = 12 * GIB
    tmpfs_workers: int = 16
    budget_bytes: int = 2 * GIB
    budget_disk_bytes: int = 4 * GIB
    one_tensor_bytes: int = 6 * GIB
    fifty_bytes: int = 200 * MIB
    fifty_saves: int = 50
    peer_bytes: int = 4 * GIB
    peer_tensors: int = 64
    peer_budget_s: int = 4
    peer_processes: int = 99
    ranks: int = 2
    rank_bytes: int = 4 * GIB
    rank_tensors: int = 64
    rank_on_disk: int = 0

    @classmethod
    def smoke(cls) -> Sizes:
        """Return sizes that say whether it runs, not how fast."""
        small = {one.name: 8 * MIB for one in fields(cls) if one.name.endswith("_bytes")}
        some = {one.name: 8 for one in fields(cls) if one.name.endswith("_tensors")}
        return cls(
            **small | some | {"many_tensor_bytes": 1024, "tiny_tensor_bytes": 256, "budget_bytes": 24 * MIB},
            repeats=1, workers=2, tmpfs_workers=2, guarded_saves=2, training_alone=2, training_phases=2,
            training_memory_phases=1, training_edges_ms=500, training_plain_ms=50, training_saving_ms=50,
            training_lead_in_ms=10, training_warm_ms=50, training_matrix=64, training_small_kernels=4,
            fifty_saves=8, peer_budget_s=0, peer_processes=1,
        )  # fmt: skip

    def changed(self, settings: list[str]) -> Sizes:
        """Return these sizes with some replaced.

        Args:
            settings: As `name=value`; a value is a number, of bytes with MiB or GiB behind it if wanted.

        Raises:
            ValueError: There is no such size, or the value is no number.
        """
        units = {"MiB": MIB, "GiB": GIB}
        changes: dict[str, Any] = {}
        for setting in settings:
            name, _, value = setting.partition("=")
            if name not in {one.name for one in fields(self)}:
                raise ValueError(f"no size is called {name!r}")
            unit = next((unit for unit in units if value.endswith(unit)), "")
            changes[name] = int(float(value.removesuffix(unit)) * units.get(unit, 1))
        return replace(self, **changes)


class Report:
    """Figures of one part, kept in a file after each of them; seconds and bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.figures: Found = {}

    def add(self, name: str, value: Any) -> None:
        self.figures[name] = value
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.figures))
        temporary.replace(self._path)

    def append(self, name: str, *values: float) -> None:
        self.add(name, [*self.figures.get(name, []), *values])

    def timing(self, name: str, timing: Timing) -> None:
        """Append each figure of a save under `name`, as in `later_staged_s`."""
        for figure in fields(timing):
            if figure.name.endswith("_s"):
                self.append(f"{name}_{figure.name}", getattr(timing, figure.name))

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Record an error in a `with` block and go on: what comes next is still worth the machine's time."""
        started = time.perf_counter()
        try:
            yield
        except FAILURES:
            # The part's status tells of it.
            self.add("errors", {**self.figures.get("errors", {}), what: traceback.format_exc()})
        self.add("section_s", {**self.figures.get("section_s", {}), what: time.perf_counter() - started})


@dataclass(frozen=True)
class Line:
    """One row of the table: a figure beside its reference, and whether the bar is met.

    Attributes:
        number: Of the bar; may be empty.
        what: What was measured.
        measured: The figure with its unit.
        reference: What it is compared with, measured in the same process.
        bar: What is asked for.
        is_met: None if nothing is asked for.
    """

    number: str
    what: str
    measured: str
    reference: str = ""
    bar: str = ""
    is_met: bool | None = None


@dataclass(frozen=True)
class Timing:
    """One save.

    Attributes:
        returned_s: Seconds until the call returned.
        blocked_s: How long the handle says that the call kept its caller.
        prepared_s: How much of that came before the first copy was launched.
        staged_s: Seconds from the call until all copies off the device had ended.
        total_s: Seconds from the call until the checkpoint was committed.
        poll_s: The longest time between two looks at whether it had staged.
        path: Where it is.
    """

    returned_s: float
    blocked_s: float
    prepared_s: float
    staged_s: float
    total_s: float
    poll_s: float
    path: Path


def timed_save(
    checkpointer: Checkpointer,
    step: int,
    state: Mapping[str, Any],
    meanwhile: Callable[[], object] | None = None,
) -> Timing:
    """Save, and wait until it is committed.

    Args:
        checkpointer: Where to.
        step: Its number.
        state: What.
        meanwhile: Called when the call has returned.

    Raises:
        CheckpointError: The save failed.
    """
    started = time.perf_counter()
    handle = checkpointer.save(step, state)
    returned_s = time.perf_counter() - started
    if meanwhile is not None:
        meanwhile()
    probe_at = started + _PROBE_S
    looked_at, poll_s = time.perf_counter(), 0.0
    while not (handle.staged or handle.committed):
        time.sleep(POLL_S)
        now = time.perf_counter()
        looked_at, poll_s = now, max(poll_s, now - looked_at)
        if now > probe_at:
            probe_at += _PROBE_S
            # One that failed may never be staged: its result raises the reason.
            with contextlib.suppress(TimeoutError):
                handle.result(timeout=POLL_S)
            if now - started > STAGED_LIMIT_S:
                break
    staged_s = time.perf_counter() - started
    path = Path(handle.result(timeout=RESULT_LIMIT_S))
    total_s = time.perf_counter() - started
    return Timing(returned_s, handle.blocked_s, handle.prepared_s, staged_s, total_s, poll_s, path)


def repeat_saves(
    report: Report,
    name: str,
    checkpointer: Checkpointer,
    state: Mapping[str, Any],
    steps: Iterator[int],
    device: str,
    repeats: int,
    budget_s: float = math.inf,
) -> None:
    """Save again and again, until `budget_s` seconds are used up; remove each checkpoint before the next."""
    started = time.perf_counter()
    for _ in range(repeats):
        settle(device)
        timing = timed_save(checkpointer, next(steps), state)
        report.timing(name, timing)
        remove(timing.path)
        if time.perf_counter() - started > budget_s:
            break


def settle(device: str) -> None:
    """Let everything before end, so that it does not count in what is measured next."""
    gc.collect()
    for thread in threading.enumerate():
        # Until it has ended, it holds what was staged last.
        if thread.name == "distckpt-staging":
            thread.join(30)
    # torch's threads let go of what they saved a moment after its future is done.
    time.sleep(0.05)
    if device == "cuda":
        torch.cuda.synchronize()


def make_state(device: str, count: int, nbytes: int) -> State:
    """Return `count` fp32 tensors of `nbytes` bytes in all, with a storage each."""
    rows = max(1, nbytes // count // (4 * 1024))
    return {f"layers.{index}.weight": torch.randn(rows, 1024, device=device) for index in range(count)}


def make_many(device: str, count: int, tensor_bytes: int) -> State:
    """Return `count` fp32 tensors of `tensor_bytes` bytes each, with a storage each, as parameters have."""
    parts = torch.randn(count, tensor_bytes // 4, device=device)
    return {f"layers.{index}": part.clone() for index, part in enumerate(parts)}


def make_parameters(state: State) -> list[Parameter]:
    """Return the tensors as parameters that have gradients."""
    parameters = [torch.nn.Parameter(tensor) for tensor in state.values()]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.5)
    return parameters


def state_of(parameters: list[Parameter]) -> dict[str, torch.Tensor]:
    """Return what `Module.state_dict` would: new tensor objects for the same storages."""
    return {f"layers.{index}.weight": parameter.detach() for index, parameter in enumerate(parameters)}


def size_of(state: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def fitting(device: str, wanted: int, copies: int = 1) -> int:
    """Return `wanted`, or what a third of the host's and nine tenths of the device's free memory allow.

    Args:
        device: "cuda" or "cpu".
        wanted: Bytes.
        copies: How many times as much will be held where the tensors are, with gradients twice.
    """
    limit = psutil.virtual_memory().available // 3
    if device == "cuda":
        limit = min(limit, torch.cuda.mem_get_info()[0] * 9 // 10 // copies)
    return min(wanted, limit)


def open_checkpointer(folder: Path, workers: int, budget_bytes: int, **settings: Any) -> Checkpointer:
    """Return a Checkpointer for a new directory, with further settings."""
    folder.mkdir(exist_ok=True)
    return Checkpointer(
        folder,
        async_save=True,
        dist_ckpt_workers=workers,
        ckpt_host_memory=budget_bytes,
        log_level="warning",
        **settings,
    )


def host_memory(nbytes: int, tensors: int = 0) -> int:
    """Return a budget that holds a state, with what surrounds each tensor, and leaves room."""
    return nbytes + nbytes // 8 + 4096 * tensors + 256 * MIB


def memory_place(nbytes: int) -> Path:
    """Return a directory in memory with room for `nbytes`; the disk if there is none."""
    return tmpfs_for(nbytes) or default_disk()


def some_of(state: Mapping[str, torch.Tensor], count: int = 5) -> dict[str, torch.Tensor]:
    """Return copies of a few tensors in host memory, the first and the last among them."""
    names = list(state)
    chosen = {names[index * (len(names) - 1) // max(1, count - 1)] for index in range(count)}
    return {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()
        for name, tensor in state.items()
        if name in chosen
    }


def holds(path: Path, expected: Mapping[str, torch.Tensor]) -> bool:
    """Say whether torch's own reader finds these tensors in the checkpoint, bit for bit."""
    loaded = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in expected.items()}
    state_dict_loader.load(loaded, checkpoint_id=path, no_dist=True)
    return all(
        torch.equal(loaded[name].view(torch.uint8), tensor.cpu().view(torch.uint8))
        for name, tensor in expected.items()
    )


def has(found: Found, *names: str) -> bool:
    """Say whether all these figures were measured."""
    return all(found.get(name) not in (None, []) for name in names)


def ratio_line(
    number: str, what: str, ours: tuple[float, str], reference: tuple[float, str], least: float | None = None
) -> Line:
    """Return the row of a rate beside a reference rate, each with its text."""
    ratio = ours[0] / reference[0]
    return Line(
        number,
        what,
        f"{ours[1]} = {100 * ratio:.1f} %",
        reference[1],
        "" if least is None else f">= {100 * least:.0f} %",
        None if least is None else ratio >= least,
    )


def ceiling_rate(found: Found) -> float:
    """Return the pinned-copy ceiling in GiB/s."""
    return float(found["ceiling_bytes"] / GIB / median(found["ceiling_s"]))


def rate(nbytes: int, seconds: list[float]) -> float:
    """Return the median rate in GiB/s."""
    return nbytes / GIB / median(seconds)


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"

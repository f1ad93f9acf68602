"""Bar 3: how long `save` keeps its caller where the optimizer is guarded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from statistics import median

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
    make_many,
    make_parameters,
    make_state,
    memory_place,
    milliseconds,
    open_checkpointer,
    rate,
    settle,
    some_of,
    state_of,
    timed_save,
)
from machine import scratch
from peers import remove
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD

_RETURN_S = {"large": 0.003, "sharded": 0.003, "many": 0.015}


def measure_guarded(report: Report, device: str, sizes: Sizes) -> None:
    """Time `save` of 200 tensors of 60 MiB, the same as DTensors, and 30,000 of 64 KiB, and the guard after.

    The first two saves (planning, capture) are kept apart. Then the same with a tenth of a second of work
    waiting on the device, which shows whether the call waits for it.
    """
    for name in _RETURN_S:
        with report.trying(name):
            if name != "many":
                state = make_state(device, sizes.staging_tensors, fitting(device, sizes.staging_bytes, 2))
            else:
                state = make_many(device, sizes.many_tensors, sizes.many_tensor_bytes)
            with _mesh(device) if name == "sharded" else nullcontext() as mesh:
                if mesh is not None:
                    state = {
                        key: DTensor.from_local(tensor, mesh, [Shard(0)]) for key, tensor in state.items()
                    }
                _measure_one_guarded(report, name, device, sizes, make_parameters(state))
            del state
            settle(device)


@contextmanager
def _mesh(device: str) -> Iterator[DeviceMesh]:
    """Return a mesh of this process alone."""
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh(device, (1,))
    finally:
        distributed.destroy_process_group()


def _measure_one_guarded(
    report: Report, name: str, device: str, sizes: Sizes, parameters: list[torch.nn.Parameter]
) -> None:
    optimizer = SGD(parameters, lr=1e-3, foreach=True)
    nbytes = sum(parameter.nbytes for parameter in parameters)
    report.add(f"{name}_bytes", nbytes)
    report.add(f"{name}_tensors", len(parameters))
    with (
        scratch(memory_place(2 * nbytes)) as folder,
        open_checkpointer(folder, sizes.workers, host_memory(nbytes, len(parameters))) as checkpointer,
    ):
        steps = count(1)

        host_s: list[float] = []
        free_s: list[float] = []

        def guarded_step() -> None:
            if device == "cuda":
                torch.zeros(1, device=device)
                torch.cuda.current_stream().synchronize()
            free_s.append(time.perf_counter())
            started = time.perf_counter()
            with checkpointer.guard(optimizer):
                optimizer.step()
            host_s.append(time.perf_counter() - started)

        guarded_step()
        checkpointer.prewarm(state_of(parameters)).result(timeout=60)
        saves = [("first", 1), ("second", 1), ("third", 1), ("later", sizes.guarded_saves)]
        if device == "cuda":
            saves.append(("busy", 2))
        for kind, repeats in saves:
            for _ in range(repeats):
                settle(device)
                state = state_of(parameters)
                expected = some_of(state)
                if kind == "busy":
                    # Clock cycles: about 0.1 s.
                    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # noqa: SLF001
                begun_s = time.perf_counter()
                timing = timed_save(checkpointer, next(steps), state, guarded_step)
                report.timing(f"{name}_{kind}", timing)
                report.append(f"{name}_{kind}_guarded_step_s", host_s[-1])
                report.append(f"{name}_{kind}_free_s", free_s[-1] - begun_s)
                if kind in ("third", "busy"):
                    report.add(f"{name}_{kind}_equal", holds(timing.path, expected))
                remove(timing.path)


def lines_of_guarded(found: Found) -> list[Line]:
    """Return the rows of `measure_guarded`."""
    lines: list[Line] = []
    for name, limit_s in _RETURN_S.items():
        if not has(found, f"{name}_later_returned_s"):
            continue
        nbytes, tensors = found[f"{name}_bytes"], found[f"{name}_tensors"]
        kind = "DTensors" if name == "sharded" else "tensors"
        what = f"{tensors:,} {kind} of {nbytes / tensors / 1024:.0f} KiB, guarded"
        returned = found[f"{name}_later_returned_s"]
        lines.append(
            Line(
                "3",
                f"{what}: save() returns, median of {len(returned)}",
                f"{milliseconds(median(returned))}, at most {milliseconds(max(returned))}",
                f"staged after {milliseconds(median(found[f'{name}_later_staged_s']))}, "
                f"{rate(nbytes, found[f'{name}_later_staged_s']):.1f} GiB/s",
                f"<= {1000 * limit_s:.0f} ms",
                median(returned) <= limit_s,
            )
        )
        early = [
            milliseconds(found[f"{name}_{kind}_returned_s"][0])
            for kind in ("first", "second", "third")
            if has(found, f"{name}_{kind}_returned_s")
        ]
        guarded = median(found[f"{name}_later_guarded_step_s"])
        text = f"host time of the guarded step after it {milliseconds(guarded)}"
        if has(found, f"{name}_later_free_s"):
            free = milliseconds(median(found[f"{name}_later_free_s"]))
            text += f"; a kernel that follows the call has run after {free}"
        lines.append(Line("3", f"{what}: the first three saves return", ", ".join(early), text))
        if has(found, f"{name}_busy_returned_s"):
            busy = found[f"{name}_busy_returned_s"]
            lines.append(
                Line(
                    "3",
                    f"{what}, 0.1 s of work waiting on the device: save() returns",
                    milliseconds(median(busy)),
                    "",
                    f"<= {1000 * limit_s:.0f} ms",
                    median(busy) <= limit_s,
                )
            )
    return lines

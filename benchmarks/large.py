"""Theme `large`: a few large tensors, where storage is the ceiling."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from ceilings import write_seconds
from machine import GIB, TMPFS, cpu_seconds, scratch, storage_type
from measurement import Figures, Outcome, Row, alternate, middle
from peers import TimedStock, remove, save

from distckpt import StorageWriter

_COUNT = 32
_TICK_S = 0.01
"""What processor time is counted in."""
_COUNTS = (1, 2)
"""Threads of stock, workers of distckpt, threads of the ceiling."""


def make_state(*, smoke: bool) -> dict[str, torch.Tensor]:
    """Return 32 CPU tensors, 2 GiB in all."""
    tensor_bytes = 1 << (18 if smoke else 26)
    return {f"layers.{index}.weight": torch.randn(tensor_bytes // 4) for index in range(_COUNT)}


def run(disk: Path, *, smoke: bool) -> Outcome:
    """Compare stock, distckpt and plain writes, in memory and on disk."""
    state = make_state(smoke=smoke)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    repeats = 1 if smoke else 3
    places = {"tmpfs": TMPFS, "disk": disk}
    outcome = Outcome(
        f"large: {nbytes / GIB:.2f} GiB in {_COUNT} CPU tensors, dcp.save, median of {repeats}",
        {
            "nbytes": nbytes,
            "tensors": _COUNT,
            "repeats": repeats,
            "storage": {name: storage_type(place) for name, place in places.items()},
        },
    )
    for name, place in places.items():
        with ExitStack() as stack:
            folder = stack.enter_context(scratch(place))
            candidates: dict[str, Callable[[], Figures]] = {}
            for count in _COUNTS:
                writer = stack.enter_context(StorageWriter(dist_ckpt_workers=count))
                candidates[f"{name} stock {count}"] = partial(_stock, state, folder / "stock", count)
                candidates[f"{name} distckpt {count}"] = partial(_save, state, folder / "distckpt", writer)
                candidates[f"{name} buffered {count}"] = partial(_plain, folder, nbytes, False, count)
                if _takes_direct(folder):
                    candidates[f"{name} direct {count}"] = partial(_plain, folder, nbytes, True, count)
            first, samples = alternate(candidates, repeats)
        outcome.first |= first
        outcome.samples |= samples
        _report(outcome, name, nbytes)
    return outcome


def _takes_direct(folder: Path) -> bool:
    try:
        write_seconds(folder, 1 << 20, direct=True)
    except OSError:
        return False
    return storage_type(folder).split()[0] != "tmpfs"


def _stock(state: dict[str, torch.Tensor], path: Path, threads: int) -> Figures:
    return _save(state, path, TimedStock(str(path), thread_count=threads))


def _save(state: dict[str, torch.Tensor], path: Path, writer: TimedStock | StorageWriter) -> Figures:
    cpu_before = cpu_seconds()
    seconds = save(state, path, writer)
    figures = {"save_s": seconds, "cpu_s": cpu_seconds() - cpu_before}
    remove(path)
    return figures


def _plain(folder: Path, nbytes: int, direct: bool, threads: int) -> Figures:
    cpu_before = cpu_seconds()
    seconds = write_seconds(folder, nbytes, direct=direct, threads=threads)
    return {"save_s": seconds, "cpu_s": cpu_seconds() - cpu_before}


def _report(outcome: Outcome, place: str, nbytes: int) -> None:
    samples = outcome.samples

    def best(kind: str) -> str:
        names = [name for name in samples if name.startswith(f"{place} {kind} ")]
        return min(names, key=lambda name: middle(samples, name, "save_s"), default="")

    def shown(name: str) -> str:
        seconds = middle(samples, name, "save_s")
        return f"{name.partition(' ')[2]}: {seconds:.2f} s, {nbytes / GIB / seconds:.2f} GiB/s"

    stock, ours = best("stock"), best("distckpt")
    ceiling = min(
        filter(None, (best("buffered"), best("direct"))), key=lambda name: middle(samples, name, "save_s")
    )
    for count in _COUNTS:
        mine = f"{place} distckpt {count}"
        ratio = middle(samples, stock, "save_s") / middle(samples, mine, "save_s")
        outcome.rows.append(Row(ratio, f"whole save, {place}", shown(mine), shown(stock)))
    for name in filter(None, (best("buffered"), best("direct"))):
        ratio = middle(samples, name, "save_s") / middle(samples, ours, "save_s")
        bar = ">= 0.9" if name == ceiling else ""
        outcome.rows.append(Row(ratio, f"of plain writes, {place}", shown(ours), shown(name), bar))
    mine_cpu, stock_cpu = (middle(samples, name, "cpu_s") / (nbytes / GIB) for name in (ours, stock))
    outcome.rows.append(
        Row(
            stock_cpu / max(mine_cpu, _TICK_S * GIB / nbytes),
            f"processor seconds per GiB, {place}",
            f"{ours.partition(' ')[2]}: {mine_cpu:.2f} s",
            f"{stock.partition(' ')[2]}: {stock_cpu:.2f} s",
        )
    )

"""Theme `async`: how long `dcp.async_save` keeps the trainer, and when the checkpoint is durable."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from large import make_state
from machine import GIB, TMPFS, scratch, storage_type
from measurement import Figures, Outcome, Row, Samples, alternate, middle
from peers import State, async_save, remove

from distckpt import StorageWriter
from distckpt.errors import DistckptWarning

_WORKERS = (1, 2)


def run(disk: Path, *, smoke: bool) -> Outcome:
    """Compare what torch does by default with distckpt, in memory and on disk."""
    state: State = make_state(smoke=smoke)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    repeats = 1 if smoke else 3
    places = {"tmpfs": TMPFS, "disk": disk}
    outcome = Outcome(
        f"async: {nbytes / GIB:.2f} GiB in {len(state)} CPU tensors, dcp.async_save, median of {repeats}",
        {
            "nbytes": nbytes,
            "tensors": len(state),
            "repeats": repeats,
            "storage": {name: storage_type(place) for name, place in places.items()},
        },
    )
    for name, place in places.items():
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", DistckptWarning)
            folder = stack.enter_context(scratch(place))
            candidates: dict[str, Callable[[], Figures]] = {
                f"{name} stock": partial(_save, state, folder / "stock", None)
            }
            for workers in _WORKERS:
                writer = stack.enter_context(StorageWriter(dist_ckpt_workers=workers))
                candidates[f"{name} distckpt {workers}"] = partial(_save, state, folder / "distckpt", writer)
            first, samples = alternate(candidates, repeats)
        outcome.first |= first
        outcome.samples |= samples
        for workers in _WORKERS:
            _report(outcome, name, workers)
    return outcome


def _save(state: State, path: Path, writer: StorageWriter | None) -> Figures:
    figures = async_save(state, path, writer)
    remove(path)
    return figures


def _report(outcome: Outcome, place: str, workers: int) -> None:
    ours, stock = f"{place} distckpt {workers}", f"{place} stock"

    def compare(what: str, samples: Samples, figure: str) -> None:
        mine, theirs = middle(samples, ours, figure), middle(samples, stock, figure)
        outcome.rows.append(
            Row(
                theirs / mine,
                f"{what}, {place}",
                f"{workers} worker(s): {mine:.3f} s",
                f"stock: {theirs:.3f} s",
            )
        )

    compare("first stall", outcome.first, "stall_s")
    compare("later stalls", outcome.samples, "stall_s")
    compare("until durable", outcome.samples, "total_s")

"""Theme `small`: very many very small tensors, where every byte and every call around them counts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from machine import TMPFS, scratch, storage_type
from measurement import Figures, Outcome, Row, alternate, middle
from peers import NullWriter, TimedStock, TimedWriter, remove, save, sizes

_TENSOR_BYTES = 256
_BAR = 8.0


def run(disk: Path, *, smoke: bool) -> Outcome:
    """Compare stock and distckpt, in memory and on disk."""
    count, repeats = (200, 1) if smoke else (20_000, 5)
    state = {
        f"layers.{index // 10}.weight_{index % 10}": torch.randn(_TENSOR_BYTES // 4) for index in range(count)
    }
    places = {"tmpfs": TMPFS, "disk": disk}
    outcome = Outcome(
        f"small: {count} tensors of {_TENSOR_BYTES} B, dcp.save, median of {repeats}",
        {
            "tensors": count,
            "tensor_bytes": _TENSOR_BYTES,
            "repeats": repeats,
            "storage": {name: storage_type(place) for name, place in places.items()},
        },
    )
    with ExitStack() as stack:
        candidates: dict[str, Callable[[], Figures]] = {}
        for name, place in places.items():
            folder = stack.enter_context(scratch(place))
            writer = stack.enter_context(TimedWriter())
            candidates[f"stock {name}"] = partial(_stock, state, folder / "stock")
            candidates[f"distckpt {name}"] = partial(_distckpt, state, folder / "distckpt", writer)
        candidates["nothing"] = lambda: {"save_s": save(state, TMPFS / "nothing", NullWriter())}
        outcome.first, outcome.samples = alternate(candidates, repeats)
    for name in places:
        _report(outcome, name)
    return outcome


def _stock(state: dict[str, torch.Tensor], path: Path) -> Figures:
    writer = TimedStock(str(path))
    return _figures(state, path, writer, save(state, path, writer))


def _distckpt(state: dict[str, torch.Tensor], path: Path, writer: TimedWriter) -> Figures:
    writer.watch.seconds = 0.0
    return _figures(state, path, writer, save(state, path, writer))


def _figures(
    state: dict[str, torch.Tensor], path: Path, writer: TimedStock | TimedWriter, save_s: float
) -> Figures:
    data_bytes, all_bytes = sizes(path)
    remove(path)
    payload = len(state) * _TENSOR_BYTES
    return {
        "write_s": writer.watch.seconds,
        "save_s": save_s,
        "overhead_bytes": (data_bytes - payload) / len(state),
        "overhead_all_bytes": (all_bytes - payload) / len(state),
    }


def _report(outcome: Outcome, place: str) -> None:
    stock, ours = f"stock {place}", f"distckpt {place}"
    samples = outcome.samples
    planning = middle(samples, "nothing", "save_s")

    def compare(what: str, figure: str, unit: str, bar: str = "", note: str = "") -> None:
        theirs, mine = middle(samples, stock, figure), middle(samples, ours, figure)
        shown = "{:.3f} s" if unit == "s" else "{:.0f} B"
        outcome.rows.append(
            Row(
                theirs / mine,
                f"{what}, {place}",
                shown.format(mine),
                f"stock {shown.format(theirs)}{note}",
                bar,
            )
        )

    compare("write_data + finish", "write_s", "s", f">= {_BAR:.0f}")
    compare("whole save", "save_s", "s", note=f" (writing nothing {planning:.3f} s)")
    if place == "tmpfs":
        compare("bytes around a tensor, data files", "overhead_bytes", "B")
        compare("bytes around a tensor, all files", "overhead_all_bytes", "B")

"""Theme `checksum`: what taking checksums costs a save, and comparing them a load."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from large import make_state
from machine import GIB, TMPFS, cpu_seconds, scratch, storage_type
from measurement import Figures, Outcome, Row, alternate, middle
from peers import remove, save
from torch.distributed.checkpoint import state_dict_loader

from distckpt import StorageReader, StorageWriter

State = dict[str, torch.Tensor]
_COUNTS = (1, 2)


def run(disk: Path, *, smoke: bool) -> Outcome:
    """Save and load with checksums and without, in turn, on disk and in memory."""
    state = make_state(smoke=smoke)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    repeats = 1 if smoke else 9
    places = {"disk": disk, "tmpfs": TMPFS}
    outcome = Outcome(
        f"checksum: {nbytes / GIB:.2f} GiB in {len(state)} CPU tensors, median of {repeats}",
        {
            "nbytes": nbytes,
            "tensors": len(state),
            "repeats": repeats,
            "storage": {name: storage_type(place) for name, place in places.items()},
        },
    )
    for name, place in places.items():
        with ExitStack() as stack:
            folder = stack.enter_context(scratch(place))
            candidates: dict[str, Callable[[], Figures]] = {}
            for count in _COUNTS:
                for kind in ("crc32c", "none"):
                    writer = stack.enter_context(StorageWriter(dist_ckpt_workers=count, ckpt_checksum=kind))
                    candidates[f"{name} save {count} {kind}"] = partial(
                        _save, state, folder / "saved", writer
                    )
            # One for each, lest one finds in some cache what the other has just read.
            for kind, verify in (("crc32c", True), ("none", False)):
                source = folder / f"loaded {kind}"
                save(state, source, stack.enter_context(StorageWriter()))
                candidates[f"{name} load {kind}"] = partial(_load, state, source, verify)
            first, samples = alternate(candidates, repeats)
        outcome.first |= first
        outcome.samples |= samples
        for what in (*(f"save {count}" for count in _COUNTS), "load"):
            _report(outcome, f"{name} {what}", nbytes)
    return outcome


def _save(state: State, path: Path, writer: StorageWriter) -> Figures:
    cpu_before = cpu_seconds()
    seconds = save(state, path, writer)
    figures = {"seconds": seconds, "cpu_s": cpu_seconds() - cpu_before}
    remove(path)
    return figures


def _load(state: State, path: Path, verify: bool) -> Figures:
    for file in path.iterdir():
        _forget(file)
    target = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    cpu_before, started = cpu_seconds(), time.perf_counter()
    state_dict_loader.load(target, storage_reader=StorageReader(path, verify=verify))
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "cpu_s": cpu_seconds() - cpu_before}


def _forget(path: Path) -> None:
    """Have a file read from the disk again, where it is on one."""
    if path.is_file():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _report(outcome: Outcome, what: str, nbytes: int) -> None:
    ours, reference = f"{what} crc32c", f"{what} none"
    with_s, without_s = (middle(outcome.samples, name, "seconds") for name in (ours, reference))
    cpu_s = middle(outcome.samples, ours, "cpu_s") - middle(outcome.samples, reference, "cpu_s")
    outcome.rows.append(
        Row(
            without_s / with_s,
            f"speed with checksums, {what}",
            f"{with_s:.2f} s, {nbytes / GIB / with_s:.2f} GiB/s, {cpu_s / (nbytes / GIB):+.2f} CPU-s per GiB",
            f"without: {without_s:.2f} s, {nbytes / GIB / without_s:.2f} GiB/s",
            ">= 0.98" if what.startswith("disk") else "",
        )
    )

"""Themes `formats` and `convert`: what a format costs, and how fast one becomes another in little memory."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from machine import GIB, ROOT, scratch, storage_type
from measurement import Figures, Outcome, Row, alternate, middle

from distckpt import Checkpointer
from distckpt.formats import open_format

_MIB = 1 << 20
_WORKERS = 2
_FORMATS = {"torch_dist": "", "safetensors": ">= 0.95", "zarr": ">= 0.80"}
_LIMIT_BYTES = 512 * _MIB
_CONVERT = """
import json, sys, time
from pathlib import Path
group, source, target, to = sys.argv[1:]
if group:
    import os
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
from distckpt.convert import convert
started = time.perf_counter()
done = convert(source, target, to=to, objects="auto" if to in ("torch_dist", "torch") else "sidecar")
print(json.dumps({"seconds": time.perf_counter() - started}))
"""


def _state(nbytes: int) -> dict[str, torch.Tensor]:
    """Return what one of 8 ranks has of blocks of Llama 3 8B: bf16 weights, fp32 weights and two moments."""
    state = {}
    shapes = {
        "attention.wq": (512, 4096),
        "attention.wk": (128, 4096),
        "attention.wv": (128, 4096),
        "attention.wo": (512, 4096),
        "mlp.gate": (1792, 4096),
        "mlp.up": (1792, 4096),
        "mlp.down": (512, 14336),
        "attention_norm": (512,),
        "mlp_norm": (512,),
    }
    kinds = {
        "model": torch.bfloat16,
        "master": torch.float32,
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
    }
    block_bytes = sum(math.prod(shape) for shape in shapes.values()) * sum(
        dtype.itemsize for dtype in kinds.values()
    )
    for number in range(max(1, nbytes // block_bytes)):
        for kind, dtype in kinds.items():
            for name, shape in shapes.items():
                state[f"{kind}.layers.{number}.{name}"] = torch.randn(shape).to(dtype)
    return state


def run(disk: Path, *, smoke: bool) -> Outcome:
    """Save one state in every format, and its arrays by what else writes zarr and safetensors."""
    nbytes, repeats = (64 * _MIB, 1) if smoke else (2 * GIB, 7)
    state = _state(nbytes)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    outcome = Outcome(
        f"formats: {nbytes / GIB:.2f} GiB in {len(state)} tensors, {_WORKERS} workers, median of {repeats}",
        {"nbytes": nbytes, "tensors": len(state), "workers": _WORKERS, "repeats": repeats,
         "storage": storage_type(disk)},
    )  # fmt: skip
    with ExitStack() as stack:
        folder = stack.enter_context(scratch(disk))
        candidates: dict[str, Callable[[], Figures]] = {}
        for name in _FORMATS:
            checkpointer = stack.enter_context(
                Checkpointer(
                    folder / name, ckpt_format=name, dist_ckpt_workers=_WORKERS, ckpt_host_memory=2 * nbytes
                )
            )
            checkpointer.prewarm(state).result(timeout=60)
            candidates[name] = partial(_save, checkpointer, state, folder / name, count())
        others = {"tensorstore": _tensorstore, "zarr-python": _zarr_python, "safetensors": _safetensors}
        for name, write in others.items():
            candidates[f"{name} alone"] = partial(_other, write, state, folder / name, count())
        outcome.first, outcome.samples = alternate(candidates, repeats)
    samples = outcome.samples

    def compare(ours: str, other: str, bar: str = "") -> None:
        mine, theirs = middle(samples, ours, "seconds"), middle(samples, other, "seconds")
        outcome.rows.append(
            Row(theirs / mine, f"{ours}, durable", f"{mine:.3f} s", f"{other} {theirs:.3f} s", bar)
        )

    compare("safetensors", "torch_dist", _FORMATS["safetensors"])
    compare("zarr", "torch_dist", _FORMATS["zarr"])
    compare("zarr", "tensorstore alone")
    compare("zarr", "zarr-python alone")
    compare("safetensors", "safetensors alone")
    return outcome


def _save(checkpointer: Checkpointer, state: dict[str, torch.Tensor], root: Path, steps: Any) -> Figures:
    step = next(steps)
    started = time.perf_counter()
    path = checkpointer.save(step, state).result()
    seconds = time.perf_counter() - started
    _empty(Path(path))
    return {"seconds": seconds}


def _other(
    write: Callable[[dict[str, torch.Tensor], Path], None],
    state: dict[str, torch.Tensor],
    place: Path,
    numbers: Iterator[int],
) -> Figures:
    path = Path(f"{place}-{next(numbers)}")
    started = time.perf_counter()
    write(state, path)
    seconds = time.perf_counter() - started
    _empty(path)
    return {"seconds": seconds}


def _empty(path: Path) -> None:
    """Free the space of what was written, and remove nothing before the end.

    To create a file just after hundreds were removed takes ten times as long on ext4, which passes over the
    inodes that were freed within five minutes one by one (Linux, fs/ext4/ialloc.c, recently_deleted): the
    next candidate would pay for the last one's files.
    """
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            os.truncate(file, 0)


def _chunk(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the chunk that distckpt cuts a tensor into."""
    shape = tuple(tensor.shape)
    return open_format("zarr").grid(shape, [((0,) * len(shape), shape)], tensor.dtype.itemsize)


def _numpy(tensor: torch.Tensor) -> Any:
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _tensorstore(state: dict[str, torch.Tensor], path: Path) -> None:
    """All arrays at once, each file synced by tensorstore, as it does unless it is told not to."""
    import tensorstore

    opened = [
        tensorstore.open(
            {
                "driver": "zarr3",
                "kvstore": {"driver": "file", "path": f"{path}/{name}/"},
                "metadata": {
                    "shape": list(tensor.shape),
                    "data_type": str(tensor.dtype).removeprefix("torch."),
                    "chunk_grid": {
                        "name": "regular", "configuration": {"chunk_shape": list(_chunk(tensor))},
                    },
                    "codecs": [
                        {"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"},
                    ],
                },
                "create": True,
            }
        )
        for name, tensor in state.items()
    ]  # fmt: skip
    writing = [
        array.result().write(_numpy(tensor)) for array, tensor in zip(opened, state.values(), strict=True)
    ]
    for each in writing:
        each.result()


def _zarr_python(state: dict[str, torch.Tensor], path: Path) -> None:
    """One array after the other; it syncs nothing, so that is done for it. It has no bfloat16: as uint16."""
    import zarr

    group = zarr.create_group(path)
    for name, tensor in state.items():
        data = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
        array = group.create_array(
            name,
            shape=tuple(data.shape),
            chunks=_chunk(tensor),
            dtype=str(data.dtype).removeprefix("torch."),
            compressors=[zarr.codecs.Crc32cCodec()],
        )
        array[...] = data.numpy()
    for folder, _, files in os.walk(path):
        for name in [*files, "."]:
            _sync(os.path.join(folder, name))


def _safetensors(state: dict[str, torch.Tensor], path: Path) -> None:
    """One file, synced for it."""
    from safetensors.torch import save_file

    save_file(state, path)
    _sync(path)
    _sync(path.parent)


def _sync(path: str | Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def run_convert(disk: Path, *, smoke: bool) -> Outcome:
    """Convert a checkpoint in a process that may have 512 MiB, beside cp and sync of the same bytes."""
    nbytes, repeats = (64 * _MIB, 1) if smoke else (4 * GIB, 3)
    state = _state(nbytes)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    outcome = Outcome(
        f"convert: {nbytes / GIB:.2f} GiB of torch_dist, median of {repeats}",
        {"nbytes": nbytes, "tensors": len(state), "repeats": repeats, "storage": storage_type(disk)},
    )
    with ExitStack() as stack:
        folder = stack.enter_context(scratch(disk))
        group = stack.enter_context(_memory_limit())
        outcome.config["memory_limit_mib"] = _LIMIT_BYTES // _MIB if group else None
        with Checkpointer(folder, ckpt_host_memory="1GiB") as checkpointer:
            source = Path(checkpointer.save(0, state).result())
        del state
        candidates: dict[str, Callable[[], Figures]] = {
            "cp and sync": partial(_copy, source, folder / "copy")
        }
        for to in ("safetensors", "zarr", "torch_dist", "torch"):
            candidates[to] = partial(_convert, group, source, folder / to, to)
        outcome.first, outcome.samples = alternate(candidates, repeats)
    copied = middle(outcome.samples, "cp and sync", "seconds")
    for to in list(candidates)[1:]:
        seconds = middle(outcome.samples, to, "seconds")
        what = f"to {to}" + ("" if to == "torch" else ", verified")
        outcome.rows.append(Row(copied / seconds, what, f"{seconds:.2f} s", f"cp and sync {copied:.2f} s"))
    return outcome


@contextlib.contextmanager
def _memory_limit() -> Iterator[str]:
    """Make a control group that may take little memory; yields nothing where none can be made."""
    first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root, limit = (first, "memory.limit_in_bytes") if first.is_dir() else (second, "memory.max")
    group = root / f"distckpt-bench-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(_LIMIT_BYTES))
    except OSError:
        yield ""
        return
    try:
        yield str(group)
    finally:
        group.rmdir()


def _convert(group: str, source: Path, target: Path, to: str) -> Figures:
    _drop_caches(source)
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", _CONVERT, group, source, target, to], check=True, cwd=ROOT,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    seconds = time.perf_counter() - started
    figures = {"seconds": seconds}
    if group:
        peak = Path(group, "memory.max_usage_in_bytes")
        if peak.exists():
            figures["peak_mib"] = int(peak.read_text()) / _MIB
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink()
    return figures


def _copy(source: Path, target: Path) -> Figures:
    _drop_caches(source)
    started = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    for file in target.rglob("*"):
        _sync(file)
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return {"seconds": seconds}


def _drop_caches(folder: Path) -> None:
    """Have the files of a folder read from the disk again."""
    for file in folder.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

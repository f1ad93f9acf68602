"""What has to be seen on a machine with a GPU: staging at the speed of the copy, and whole saves.

Every part runs in a process of its own under a time limit, and what it has measured is kept if it fails.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from ceilings import device_to_host_seconds, host_to_host_seconds, write_seconds
from machine import GIB, default_disk, describe, scratch, storage_type, tmpfs_for
from measurement import Row
from peers import State, async_save, remove
from torch.distributed.checkpoint import state_dict_loader

from distckpt import StorageWriter
from distckpt.errors import DistckptWarning

_EXPANDABLE = "expandable_segments:True"
_TOTAL_S = 350.0
_STAGING_BAR = 0.9


@dataclass(frozen=True)
class Sizes:
    """How much each part works on."""

    ceiling_bytes: int = 2 * GIB
    staging_bytes: int = 12 * GIB
    staging_tensors: int = 200
    save_bytes: int = 4 * GIB
    save_tensors: int = 64
    many_tensors: int = 30_000
    many_bytes: int = 64 << 10
    repeats: int = 5
    workers: int = 8

    @classmethod
    def smoke(cls) -> Sizes:
        return cls(1 << 20, 8 << 20, 10, 8 << 20, 4, 100, 1 << 10, 1, 2)


class Report:
    """Figures of one part, kept in a file after each of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.figures: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        self.figures[name] = value
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.figures))
        temporary.replace(self._path)


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
    """Return `count` fp32 tensors of `nbytes` bytes in all."""
    rows = max(1, nbytes // count // (4 * 1024))
    return {f"layers.{index}.weight": torch.randn(rows, 1024, device=device) for index in range(count)}


def fitting(device: str, wanted: int) -> int:
    """Return `wanted`, or what a third of the host's and nine tenths of the device's free memory allow."""
    limit = psutil.virtual_memory().available // 3
    if device == "cuda":
        limit = min(limit, torch.cuda.mem_get_info()[0] * 9 // 10)
    return min(wanted, limit)


def host_memory(nbytes: int) -> int:
    return nbytes + nbytes // 8 + (256 << 20)


def stage(writer: StorageWriter, state: State, device: str) -> tuple[float, float, dict[str, Any]]:
    """Return the seconds until `stage` returned and until the state was staged, and the staged state.

    Raises:
        CheckpointError: It could not be staged.
    """
    settle(device)
    started = time.perf_counter()
    future: Future[dict[str, Any]] = writer.stage(state)
    returned_s = time.perf_counter() - started
    staged = future.result(timeout=120)
    staged_s = time.perf_counter() - started
    for value in staged.values():
        if not isinstance(value, torch.Tensor):
            raise value.error
    return returned_s, staged_s, staged


def measure_staging(report: Report, device: str, sizes: Sizes) -> None:
    """Time the copy of a large state to the host, beside the best that the device can do."""
    copy_ceiling(report, device, sizes)
    state = make_state(device, sizes.staging_tensors, fitting(device, sizes.staging_bytes))
    if device == "cuda":
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        report.add("expandable", any(segment.get("is_expandable") for segment in segments))
    nbytes = sum(tensor.nbytes for tensor in state.values())
    report.add("staging_bytes", nbytes)
    with StorageWriter(ckpt_host_memory=host_memory(nbytes), log_level="warning") as writer:
        for turn in range(sizes.repeats + 1):
            returned_s, staged_s, staged = stage(writer, state, device)
            kind = "warm" if turn else "cold"
            report.add(f"{kind}_returned_s", [*report.figures.get(f"{kind}_returned_s", []), returned_s])
            report.add(f"{kind}_staged_s", [*report.figures.get(f"{kind}_staged_s", []), staged_s])
            if turn == 0:
                names = [*state][:: max(1, len(state) // 4)]
                report.add("is_pinned", all(tensor.is_pinned() for tensor in staged.values()))
                report.add("equal", all(torch.equal(staged[name], state[name].cpu()) for name in names))
            del staged


def copy_ceiling(report: Report, device: str, sizes: Sizes) -> None:
    measure = device_to_host_seconds if device == "cuda" else host_to_host_seconds
    report.add("ceiling_bytes", sizes.ceiling_bytes)
    report.add("ceiling_s", measure(sizes.ceiling_bytes, 7))


def measure_many(report: Report, device: str, sizes: Sizes) -> None:
    """Time the copy of very many small tensors to the host."""
    copy_ceiling(report, device, sizes)
    nbytes = sizes.many_tensors * sizes.many_bytes
    flat = torch.randn(nbytes // 4, device=device)
    # One storage each, as parameters have.
    parts = flat.view(sizes.many_tensors, -1)
    state = {f"layers.{index}": part.clone() for index, part in enumerate(parts)}
    del flat, parts
    report.add("many_bytes", nbytes)
    # Beside the payload there are about 1.6 KB of framing for each tensor.
    with StorageWriter(ckpt_host_memory=2 * host_memory(nbytes), log_level="warning") as writer:
        for turn in range(min(3, sizes.repeats) + 1):
            returned_s, staged_s, staged = stage(writer, state, device)
            kind = "warm" if turn else "cold"
            report.add(f"{kind}_returned_s", [*report.figures.get(f"{kind}_returned_s", []), returned_s])
            report.add(f"{kind}_staged_s", [*report.figures.get(f"{kind}_staged_s", []), staged_s])
            if turn == 0:
                report.add("equal", all(torch.equal(staged[n], state[n].cpu()) for n in [*state][::999]))
            del staged


def measure_saves(report: Report, device: str, sizes: Sizes) -> None:
    """Time `dcp.async_save` from call to durable, stock beside distckpt, in memory and on disk."""
    state = make_state(device, sizes.save_tensors, fitting(device, sizes.save_bytes))
    nbytes = sum(tensor.nbytes for tensor in state.values())
    report.add("save_bytes", nbytes)
    places = {"tmpfs": tmpfs_for(2 * nbytes), "disk": default_disk()}
    report.add("storage", {name: storage_type(place) if place else "none" for name, place in places.items()})
    # With one writer for both places the second begins warm, as every save but the first does.
    with StorageWriter(
        dist_ckpt_workers=sizes.workers, ckpt_host_memory=host_memory(nbytes), log_level="warning"
    ) as writer:
        for name, place in places.items():
            if place is None:
                continue
            with scratch(place) as folder:
                for turn in range(min(3, sizes.repeats)):
                    for peer, used in (("distckpt", writer), ("stock", None)):
                        if used is None and turn == 2:
                            continue
                        settle(device)
                        figures = async_save(state, folder / peer, used)
                        key = f"{name}_{peer}"
                        report.add(key, [*report.figures.get(key, []), figures])
                        if used is not None and turn == 0:
                            report.add(f"{name}_equal", equals(state, folder / peer))
                        remove(folder / peer)
                for direct in (False, True) if name == "disk" else (False,):
                    report.add(
                        f"{name}_plain_{'direct' if direct else 'buffered'}_s",
                        write_seconds(folder, nbytes, direct=direct, threads=sizes.workers),
                    )


def equals(state: State, path: Path) -> bool:
    """Say whether torch's own reader finds in the checkpoint what is in `state`."""
    loaded = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
    state_dict_loader.load(loaded, checkpoint_id=path, no_dist=True)
    return all(torch.equal(loaded[name], state[name].cpu()) for name in [*state][:: max(1, len(state) // 8)])


@dataclass(frozen=True)
class Part:
    """One process."""

    measure: Callable[[Report, str, Sizes], None]
    limit_s: float
    allocator: str | None = None


PARTS = {
    "staging": Part(measure_staging, 100),
    "staging, expandable segments": Part(measure_staging, 80, _EXPANDABLE),
    "saves": Part(measure_saves, 150),
    "many small tensors": Part(measure_many, 80),
}


def run_part(name: str, device: str, sizes: Sizes, path: Path) -> int:
    """Measure in this process; returns the exit status."""
    part = PARTS[name]
    # Should the process hang, this says where before the parent ends it.
    faulthandler.dump_traceback_later(max(1.0, part.limit_s - 5))
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    warnings.simplefilter("ignore", DistckptWarning)
    report = Report(path)
    report.add("device", torch.cuda.get_device_name() if device == "cuda" else "cpu")
    started = time.perf_counter()
    try:
        part.measure(report, device, sizes)
    except Exception:  # noqa: BLE001 - the top frame of a process: it goes into the report
        report.add("error", traceback.format_exc())
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
        report.add("seconds", time.perf_counter() - started)
    return 0


def start_part(name: str, device: str, smoke: bool, folder: Path, limit_s: float) -> dict[str, Any]:
    """Measure in a process of its own; returns its figures."""
    path = folder / f"{list(PARTS).index(name)}.json"
    command = [sys.executable, __file__, "--part", name, "--device", device, "--out", str(path)]
    environment = dict(os.environ)
    if PARTS[name].allocator is not None:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = str(PARTS[name].allocator)
    with subprocess.Popen(command + ["--smoke"] * smoke, env=environment, start_new_session=True) as process:
        try:
            status: int | str = process.wait(min(limit_s, PARTS[name].limit_s))
        except subprocess.TimeoutExpired:
            status = "over its time limit"
            os.killpg(process.pid, signal.SIGKILL)
    figures: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    figures["status"] = status
    return figures


def grow_memory(gib: float) -> None:
    """Touch memory once, on a virtual machine that is given its memory only as it asks for it."""
    code = (
        "import mmap, sys\n"
        "held = []\n"
        "for _ in range(int(sys.argv[1])):\n"
        "    held.append(mmap.mmap(-1, 1 << 30))\n"
        f"    for at in range(0, 1 << 30, {mmap.PAGESIZE}):\n"
        "        held[-1][at] = 1\n"
    )
    before = psutil.virtual_memory().total
    try:
        subprocess.run([sys.executable, "-c", code, str(int(gib))], check=False, timeout=90)
    except subprocess.TimeoutExpired:
        print("growing memory took too long; going on with what there is")
    print(f"memory: {before / GIB:.1f} GiB before, {psutil.virtual_memory().total / GIB:.1f} GiB now")


def rows_of(parts: dict[str, dict[str, Any]]) -> list[Row]:
    """Return what was found, as far as it goes."""
    rows: list[Row] = []
    for name, found in parts.items():
        nbytes = found.get("staging_bytes") or found.get("many_bytes")
        if nbytes and found.get("ceiling_s"):
            rows += _staging_rows(name, found, nbytes)
        for place in ("tmpfs", "disk"):
            ours, stock = found.get(f"{place}_distckpt", []), found.get(f"{place}_stock", [])
            for which, pick in (("first", slice(0, 1)), ("later", slice(1, None))):
                if ours[pick] and stock[pick]:
                    rows += _save_rows(f"{place}, {which}", ours[pick], stock[pick])
            plain = [found[key] for key in found if key.startswith(f"{place}_plain")]
            if ours[1:] and plain:
                mine = min(save["total_s"] for save in ours[1:])
                rows.append(
                    Row(
                        min(plain) / mine, f"{place}: of plain writes", f"{mine:.3f} s", f"{min(plain):.3f} s"
                    )
                )
    return rows


def _staging_rows(name: str, found: dict[str, Any], nbytes: int) -> list[Row]:
    ceiling = found["ceiling_bytes"] / GIB / median(found["ceiling_s"])
    rows = []
    for kind in ("cold", "warm"):
        if found.get(f"{kind}_staged_s"):
            seconds = median(found[f"{kind}_staged_s"])
            returned = median(found[f"{kind}_returned_s"])
            rate = nbytes / GIB / seconds
            rows.append(
                Row(
                    rate / ceiling,
                    f"{name}: {kind}, of the copy ceiling",
                    f"{rate:.2f} GiB/s ({seconds:.4f} s, stage() returns after {returned:.4f} s)",
                    f"{ceiling:.2f} GiB/s",
                    f">= {_STAGING_BAR}" if kind == "warm" and "staging" in name else "",
                )
            )
    return rows


def _save_rows(where: str, ours: list[dict[str, float]], stock: list[dict[str, float]]) -> list[Row]:
    rows = []
    for figure, what in (("stall_s", "stall"), ("staged_s", "staged after"), ("total_s", "durable after")):
        mine, theirs = (median(save[figure] for save in saves) for saves in (ours, stock))
        rows.append(Row(theirs / mine, f"{where}: {what}", f"{mine:.3f} s", f"stock {theirs:.3f} s"))
    return rows


def show(parts: dict[str, dict[str, Any]]) -> None:
    for row in rows_of(parts):
        print(f"  {row.ratio:6.2f}x  {row.bar:7} {row.what}: {row.ours} | {row.reference}")
    for name, found in parts.items():
        checks = {key: found[key] for key in found if key.endswith(("equal", "is_pinned", "expandable"))}
        verdict = "ok" if found["status"] == 0 and "error" not in found else f"FAILED ({found['status']})"
        print(f"  {verdict} {name}: {found.get('seconds', 0):.0f} s on {found.get('device')}, {checks}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small sizes, one repetition: does it run?")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    parser.add_argument("--only", choices=PARTS, action="append", help="run this part only")
    parser.add_argument("--grow-memory", type=float, default=0, metavar="GIB", help="touch that much first")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: gpu_check.json in $OUT or here")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.part is not None:
        return run_part(arguments.part, device, Sizes.smoke() if arguments.smoke else Sizes(), arguments.out)
    deadline = time.monotonic() + _TOTAL_S
    out = arguments.out or Path(os.environ.get("OUT", ".")) / "gpu_check.json"
    if arguments.grow_memory:
        grow_memory(arguments.grow_memory)
    record = {"theme": "gpu_check", **describe({"smoke": arguments.smoke})}
    parts: dict[str, dict[str, Any]] = {}
    with scratch(default_disk()) as folder:
        for name in arguments.only or PARTS:
            left_s = deadline - time.monotonic()
            if left_s < 10:
                parts[name] = {"status": "no time left"}
            else:
                print(f"{name} ...", flush=True)
                parts[name] = start_part(name, device, arguments.smoke, folder, left_s)
            out.write_text(json.dumps({**record, "parts": parts}, indent=1) + "\n")
    for name, found in parts.items():
        if "error" in found:
            print(f"{name}:\n{found['error']}")
    print(f"gpu_check: {record['commit']} on {record['hardware']}")
    show(parts)
    return 0 if all(found["status"] == 0 for found in parts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

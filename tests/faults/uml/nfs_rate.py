"""Runs in a virtual machine: how fast a checkpoint is written over NFS, as JSON; as a program: starts it.

usage: nfs_rate.py [--mib N] [--rounds N] [--options vers=4.2,hard] [--disk] [--loops] [--delay-ms N]

Every way is timed once in each round, one after the other, from the first byte to the end of fsync; the
figures are MB/s, and the first round counts for nothing (memory is touched for the first time).

    --disk                 the server writes to an ext4 on a disk, not to memory
    --delay-ms N           how late each packet is

The ways:


    dd 16M, dd 4M          what a user would compare with
    loop cached|direct N   pwritev in Python, N MiB at a time, through the page cache or past it (--loops)
    writer N               StorageWriter(dist_ckpt_workers=N) and dcp.save: planning, staging, checksums,
                           fsync of all files and folders, and the commit included
    background N           Checkpointer: from its return to the training loop to the commit
    whole N                the same, from its call
"""

from __future__ import annotations

import argparse
import functools
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20
_TENSORS = 8


def _dd(path: str, mib: int, block_mib: int) -> None:
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={path}", f"bs={block_mib}M", f"count={mib // block_mib}", "conv=fsync"],
        check=True,
        stderr=subprocess.DEVNULL,
    )


def _loop(path: str, data: memoryview, block: int, flag: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag, 0o644)
    try:
        for offset in range(0, data.nbytes, block):
            assert os.pwritev(fd, [data[offset : offset + block]], offset) == block
        os.fsync(fd)
    finally:
        os.close(fd)


def measure(given: argparse.Namespace) -> dict[str, object]:
    """Time every way in each round."""
    import torch

    from distckpt import Checkpointer, StorageWriter
    from faults.checkpoints import save
    from faults.uml.nfs import MOUNT, Server

    torch.set_num_threads(1)
    mib = given.mib
    server = Server(0 if given.disk else (mib + 256) * MIB)
    server.mount(given.options)
    if given.delay_ms:
        server.delay_packets(given.delay_ms)
    samples: dict[str, list[float]] = defaultdict(list)

    def clear() -> None:
        for path in Path(MOUNT).iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def timed(name: str, call: Callable[[], object]) -> None:
        started = time.perf_counter()
        call()
        samples[name].append(mib * MIB / 1e6 / (time.perf_counter() - started))
        clear()

    memory = mmap.mmap(-1, mib * MIB)
    state = {
        "model": {
            f"weight{i}": torch.frombuffer(
                memory,
                dtype=torch.float32,
                count=mib * MIB // _TENSORS // 4,
                offset=mib * MIB // _TENSORS * i,
            ).fill_(i + 1)
            for i in range(_TENSORS)
        }
    }
    writers = {workers: StorageWriter(dist_ckpt_workers=workers, log_level="error") for workers in (1, 2)}
    checkpointers = {
        workers: Checkpointer(
            f"{MOUNT}/run{workers}", async_save=True, dist_ckpt_workers=workers, log_level="error"
        )
        for workers in (1, 2)
    }

    def background(step: int, workers: int) -> None:
        started = time.perf_counter()
        handle = checkpointers[workers].save(step, state)
        returned = time.perf_counter()
        handle.result()
        ended = time.perf_counter()
        samples[f"background {workers}"].append(mib * MIB / 1e6 / (ended - returned))
        samples[f"whole {workers}"].append(mib * MIB / 1e6 / (ended - started))
        clear()

    for number in range(given.rounds + 1):
        timed("dd 16M", lambda: _dd(f"{MOUNT}/dd", mib, 16))
        for workers, writer in writers.items():
            timed(f"writer {workers}", functools.partial(save, writer, f"{MOUNT}/writer{workers}", state))
        timed("dd 4M", lambda: _dd(f"{MOUNT}/dd", mib, 4))
        for workers in checkpointers:
            background(number, workers)
        if given.loops:
            for name, flag in (("cached", 0), ("direct", os.O_DIRECT)):
                for block_mib in (1, 4, 16):
                    with memoryview(memory) as data:
                        call = functools.partial(_loop, f"{MOUNT}/loop", data, block_mib * MIB, flag)
                        timed(f"loop {name} {block_mib}", call)
        sys.stderr.write(f"round {number}\n")
    for writer in writers.values():
        writer.close()
    for checkpointer in checkpointers.values():
        checkpointer.close()
    mount = next(line for line in Path("/proc/self/mounts").read_text().splitlines() if f" {MOUNT} " in line)
    return {
        "mount": mount.split()[3],
        "server": "ext4 on a disk" if given.disk else "tmpfs",
        "mib": mib,
        "delay_ms": given.delay_ms,
        "medians": {name: round(statistics.median(found[1:]), 1) for name, found in samples.items()},
        "samples": {name: [round(one, 1) for one in found] for name, found in samples.items()},
    }


def main() -> None:
    """Measure in here, or start the machine that does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--options", default="vers=4.2,hard")
    parser.add_argument("--disk", action="store_true")
    parser.add_argument("--loops", action="store_true")
    parser.add_argument("--delay-ms", type=float, default=0)
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        result = measure(given)
        sys.stdout.write(json.dumps(result) + "\n")
        return
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from faults.uml import machine

    missing = machine.why_not(*machine.NFS_TOOLS)
    if missing is not None:
        sys.exit(missing)
    with tempfile.TemporaryDirectory() as folder:
        done = machine.run(
            Path(__file__).resolve(),
            "--inside",
            *sys.argv[1:],
            folder=Path(folder),
            timeout_s=given.timeout,
            disk_bytes=(given.mib * 2 + 512) * MIB,
            memory_mib=given.mib * 5 + 1200,
        )
    if done.status != 0:
        sys.exit(done.err + done.out)
    sys.stdout.write(done.out)


if __name__ == "__main__":
    main()

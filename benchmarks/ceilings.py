"""What the hardware gives at best: plain writes, and plain copies off the device."""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

import torch

BLOCK_BYTES = 32 << 20


def write_seconds(folder: Path, nbytes: int, *, direct: bool = False, threads: int = 1) -> float:
    """Return the time to write `nbytes` into one new file for each thread and to make them durable.

    Args:
        folder: Where to; the files are removed.
        nbytes: In all; rounded down to blocks of 32 MiB for each thread.
        direct: Whether to go past the page cache (O_DIRECT).
        threads: Number of files written at the same time.

    Raises:
        OSError: The file system refuses, for example O_DIRECT.
    """
    block = min(BLOCK_BYTES, max(mmap.PAGESIZE, nbytes // threads // mmap.PAGESIZE * mmap.PAGESIZE))
    with mmap.mmap(-1, block) as buffer:
        buffer.write(os.urandom(block))
        failures: list[OSError] = []

        def write(index: int) -> None:
            try:
                _write_file(folder / f"ceiling-{index}", nbytes // threads // block, buffer, direct)
            except OSError as error:
                failures.append(error)

        started = time.perf_counter()
        running = [threading.Thread(target=write, args=(index,)) for index in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        seconds = time.perf_counter() - started
    for path in folder.glob("ceiling-*"):
        path.unlink()
    if failures:
        raise failures[0]
    return seconds


def _write_file(path: Path, count: int, buffer: mmap.mmap, direct: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
    fd = os.open(path, flags, 0o600)
    try:
        for index in range(count):
            done = os.pwrite(fd, buffer, index * len(buffer))
            if done != len(buffer):
                raise OSError(f"short write of {done} bytes to {path}")
        os.fsync(fd)
    finally:
        os.close(fd)


def device_to_host_seconds(nbytes: int, repeats: int) -> list[float]:
    """Return the times of copies of `nbytes` off the CUDA device into pinned memory, by CUDA events."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda").fill_(7)
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    seconds = []
    with torch.cuda.stream(stream):
        for _ in range(repeats + 1):
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record(stream)
            target.copy_(source, non_blocking=True)
            end.record(stream)
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1000)
    assert int(target[-1]) == 7
    return seconds[1:]


def host_to_host_seconds(nbytes: int, repeats: int) -> list[float]:
    """Return the times of copies of `nbytes` within host memory: the ceiling where there is no device."""
    source = torch.full((nbytes,), 7, dtype=torch.uint8)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return seconds[1:]

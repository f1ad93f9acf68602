"""What the hardware gives at best: plain writes, and plain copies off the device."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import crc32c
import torch
from plain_writer import BLOCK_BYTES, make_buffer, write_file

_PROCESS_BUFFER_BYTES = 256 << 20
"""What each process writes from: with 16 of them 4 GiB, more than any cache holds."""
_START_S = 60.0


@dataclass(frozen=True)
class Way:
    """One way of writing plainly."""

    threads: int
    direct: bool = False
    preallocate: bool = False

    def __str__(self) -> str:
        kind = "O_DIRECT" if self.direct else "buffered"
        return f"{kind}, {self.threads} threads{', preallocated' if self.preallocate else ''}"


def write_seconds(
    folder: Path, nbytes: int, *, direct: bool = False, threads: int = 1, preallocate: bool = False
) -> float:
    """Return the seconds to write `nbytes` into one new file for each thread and to make them durable.

    Args:
        folder: Where to; the files are removed.
        nbytes: In all; rounded down to pages for each thread.
        direct: Whether to go past the page cache (O_DIRECT).
        threads: Number of files written at the same time.
        preallocate: Whether to reserve each file first; that counts.

    Raises:
        OSError: The file system refuses, for example O_DIRECT.
    """
    block = min(BLOCK_BYTES, max(mmap.PAGESIZE, nbytes // threads // mmap.PAGESIZE * mmap.PAGESIZE))
    failures: list[OSError] = []
    with make_buffer(block) as buffer:

        def write(index: int) -> None:
            try:
                write_file(
                    folder / f"ceiling-{index}",
                    nbytes // threads,
                    buffer,
                    direct=direct,
                    preallocate=preallocate,
                    block_bytes=block,
                )
            except OSError as error:
                failures.append(error)

        started = time.perf_counter()
        running = [threading.Thread(target=write, args=(index,)) for index in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        seconds = time.perf_counter() - started
    _remove(folder)
    if failures:
        raise failures[0]
    return seconds


def process_write_seconds(folder: Path, nbytes: int, processes: int) -> float:
    """Return the seconds in which that many processes write `nbytes` in all, one new file each, buffered.

    Each has 256 MiB of its own to write from, so that the bytes come from memory and not from a cache.
    They are started before and begin together.

    Args:
        folder: Where to; the files are removed.
        nbytes: In all; rounded down to blocks for each process.
        processes: How many.

    Raises:
        OSError: One of them failed.
    """
    share = nbytes // processes
    block = min(BLOCK_BYTES, max(mmap.PAGESIZE, share // mmap.PAGESIZE * mmap.PAGESIZE))
    script = Path(__file__).with_name("plain_writer.py")
    with ExitStack() as stack:
        running = []
        for index in range(processes):
            command = [
                sys.executable, str(script), str(share), str(folder / f"ceiling-{index}"),
                "--block-bytes", str(block),
                "--buffer-bytes", str(max(block, min(_PROCESS_BUFFER_BYTES, share) // block * block)),
            ]  # fmt: skip
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(_reap, process)
            running.append(process)
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()
        started = time.perf_counter()
        for process in running:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in running if process.stdout is not None]
        seconds = time.perf_counter() - started
    _remove(folder)
    if answers != ["done\n"] * processes:
        raise OSError(f"{answers.count('')} of {processes} plain writers failed")
    return seconds


def _reap(process: subprocess.Popen[str]) -> None:
    with process:
        try:
            process.communicate(timeout=_START_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _remove(folder: Path) -> None:
    for path in folder.glob("ceiling-*"):
        path.unlink()


class CopyCeiling:
    """The best that copies off the device into pinned memory do; where there is no device, copies in memory.

    Args:
        device: "cuda" or "cpu".
        nbytes: Bytes of each copy. As many are held on the device and on the host until this object goes.
    """

    def __init__(self, device: str, nbytes: int) -> None:
        self.nbytes = nbytes
        self._device = device
        self._source = torch.full((nbytes,), 7, dtype=torch.uint8, device=device)
        self._target = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device == "cuda")

    def seconds(self, repeats: int, before_each: Callable[[], object] = lambda: None) -> list[float]:
        """Return the seconds of each copy: by CUDA events, or by the clock where there is no device.

        Args:
            repeats: How many, after one that does not count.
            before_each: Called before each of them; a barrier, to copy on all devices of a machine at once.
        """
        measure = self._event_seconds if self._device == "cuda" else self._clock_seconds
        found = []
        for _ in range(repeats + 1):
            before_each()
            found.append(measure())
        assert int(self._target[-1]) == 7
        return found[1:]

    def _event_seconds(self) -> float:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record(stream)
            self._target.copy_(self._source, non_blocking=True)
            end.record(stream)
            end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def _clock_seconds(self) -> float:
        started = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - started


def forget(files: Sequence[Path]) -> None:
    """Have files read from their disk again: what of them is in the page cache is dropped."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_seconds(files: Sequence[Path], threads: int) -> float:
    """Return the seconds to read files in blocks of 32 MiB that so many threads take, after `forget`."""
    blocks = [
        (file, offset) for file in files for offset in range(0, file.stat().st_size, BLOCK_BYTES)
    ]  # fmt: skip
    forget(files)
    # Memory that is there already: to touch it for the first time takes as long as to read into it.
    buffers: SimpleQueue[mmap.mmap] = SimpleQueue()
    for _ in range(threads):
        buffers.put(make_buffer(BLOCK_BYTES))

    def read(block: tuple[Path, int]) -> None:
        file, offset = block
        buffer = buffers.get()
        fd = os.open(file, os.O_RDONLY)
        try:
            left = min(BLOCK_BYTES, os.fstat(fd).st_size - offset)
            if os.preadv(fd, [buffer], offset) != left:
                raise OSError(f"{file}: fewer than {left} bytes were read at {offset}")
        finally:
            os.close(fd)
            buffers.put(buffer)

    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        list(pool.map(read, blocks))
        return time.perf_counter() - started


def checksum_seconds(nbytes: int) -> float:
    """Return the seconds that one core takes for the CRC32C of so many bytes, in blocks of 4 MiB."""
    block = os.urandom(4 << 20)
    started = time.perf_counter()
    for _ in range(nbytes // len(block)):
        crc32c.crc32c(block)
    return time.perf_counter() - started

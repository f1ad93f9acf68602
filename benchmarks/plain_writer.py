"""Writes one file as plainly as it can be done: what the ceilings of storage are made of.

Run as a script it waits for a line on its standard input before it writes, so that several begin together;
with `--serve` it makes a directory of files for each path that it reads there.

Torch-free: a process of it starts in a few hundredths of a second.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BLOCK_BYTES = 32 << 20
_THREADS = 4


def make_buffer(nbytes: int) -> mmap.mmap:
    """Return page-aligned memory, as O_DIRECT wants it, filled with what no storage can shrink."""
    buffer = mmap.mmap(-1, max(mmap.PAGESIZE, nbytes))
    pattern = os.urandom(min(len(buffer), 1 << 20))
    while (left := len(buffer) - buffer.tell()) > 0:
        buffer.write(pattern[:left])
    return buffer


def write_file(
    path: Path, nbytes: int, buffer: mmap.mmap, *, direct: bool, preallocate: bool, block_bytes: int
) -> None:
    """Write `nbytes` bytes of `buffer`, again and again, in blocks, and make them durable.

    Args:
        path: A new file.
        nbytes: Rounded down to whole pages; the last block may be a shorter one.
        buffer: Page-aligned, at least a block long.
        direct: Whether to go past the page cache (O_DIRECT).
        preallocate: Whether to reserve the whole file first (posix_fallocate).
        block_bytes: Bytes for each call, a multiple of the page size.

    Raises:
        OSError: The file system refuses, for example O_DIRECT.
    """
    nbytes = nbytes // mmap.PAGESIZE * mmap.PAGESIZE
    turns = len(buffer) // block_bytes
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
    fd = os.open(path, flags, 0o600)
    try:
        if preallocate and nbytes:
            os.posix_fallocate(fd, 0, nbytes)
        with memoryview(buffer) as view:
            for index, offset in enumerate(range(0, nbytes, block_bytes)):
                start, size = index % turns * block_bytes, min(block_bytes, nbytes - offset)
                with view[start : start + size] as block:
                    done = os.pwrite(fd, block, offset)
                if done != size:
                    raise OSError(f"short write of {done} bytes to {path}")
        os.fsync(fd)
    finally:
        os.close(fd)


def serve(nbytes: int) -> None:
    """Write `nbytes` in files of each directory that a line names, past the page cache where it can be."""
    with make_buffer(BLOCK_BYTES) as buffer, ThreadPoolExecutor(_THREADS) as pool:
        print("ready", flush=True)
        for line in sys.stdin:
            path = Path(line.strip())
            path.mkdir()
            parts = [path / str(number) for number in range(_THREADS)]
            list(pool.map(lambda part: _write_past_the_cache(part, nbytes // _THREADS, buffer), parts))
            print("done", flush=True)


def _write_past_the_cache(path: Path, nbytes: int, buffer: mmap.mmap) -> None:
    for direct in (True, False):
        try:
            write_file(path, nbytes, buffer, direct=direct, preallocate=False, block_bytes=BLOCK_BYTES)
            break
        except OSError:
            if not direct:
                raise
            path.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nbytes", type=int)
    parser.add_argument("path", type=Path, nargs="?")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--cores", metavar="N[,N...]", help="run on these only")
    parser.add_argument("--buffer-bytes", type=int, default=BLOCK_BYTES)
    parser.add_argument("--block-bytes", type=int, default=BLOCK_BYTES)
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--preallocate", action="store_true")
    arguments = parser.parse_args()
    if arguments.cores:
        os.sched_setaffinity(0, map(int, arguments.cores.split(",")))
    if arguments.serve:
        serve(arguments.nbytes)
        return
    if arguments.path is None:
        parser.error("a path, or --serve")
    with make_buffer(arguments.buffer_bytes) as buffer:
        print("ready", flush=True)
        sys.stdin.readline()
        write_file(
            arguments.path,
            arguments.nbytes,
            buffer,
            direct=arguments.direct,
            preallocate=arguments.preallocate,
            block_bytes=arguments.block_bytes,
        )
        print("done", flush=True)


if __name__ == "__main__":
    main()

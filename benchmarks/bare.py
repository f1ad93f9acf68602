"""A checkpoint without a checkpointer: tensors copied to pinned memory, a process that writes as many bytes.

What a training notices of it, it notices of the bus, of the disk and of their interrupts, and of a call for
each tensor.
"""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor


class BareSave:
    """Copies tensors, and has as many bytes written, again and again; one at a time.

    Args:
        tensors: Of a state; of a DTensor the part of this rank.
        cores: For the process that writes, as `plain_writer.py` takes them; empty: all.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], cores: str = "") -> None:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
        self._sources = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in local]
        nbytes = sum(source.numel() for source in self._sources)
        is_cuda = any(source.is_cuda for source in self._sources)
        self._target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._stream = torch.cuda.Stream() if is_cuda else None  # type: ignore[no-untyped-call]
        command = [sys.executable, str(Path(__file__).with_name("plain_writer.py")), str(nbytes), "--serve"]
        if cores:
            command += ["--cores", cores]
        self._writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._writer.stdout is not None
        self._writer.stdout.readline()
        self._answer = self._writer.stdout

    def start(self, path: Path) -> None:
        """Begin to copy, and to write files in `path`, which is made."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            offset = 0
            for source in self._sources:
                self._target[offset : offset + source.numel()].copy_(source, non_blocking=True)
                offset += source.numel()
        assert self._writer.stdin is not None
        self._writer.stdin.write(f"{path}\n")
        self._writer.stdin.flush()

    def order_after(self) -> None:
        """Have what the caller gives its current stream from now on wait for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def is_done(self) -> bool:
        """Say whether all is written."""
        return bool(select.select([self._answer], [], [], 0)[0])

    def finish(self) -> None:
        """Wait until all is written.

        Raises:
            OSError: It could not be.
        """
        if self._answer.readline() != "done\n":
            raise OSError("the plain writer failed")

    def close(self) -> None:
        """End the process."""
        self._writer.communicate()

"""File images: what the files of a checkpoint look like inside, and nothing else.

A format frames each item: the literal bytes before its payload and after it. A file is a sequence of framed
items; where it lies in memory and how it reaches storage is the business of other rooms.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

from distckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

__all__ = ["Format", "Frame", "ImageLayout", "contiguous_strides", "lay_out", "open_format"]

SMALL_ALIGNMENT = 64
LARGE_ALIGNMENT = 4096
LARGE_BYTES = 1 << 20
"""Items from this size on begin on a page, so that a range of them can go to storage without a copy."""


class Frame(NamedTuple):
    """The literal bytes around the payload of an item."""

    prefix: bytes
    suffix: bytes


class Format(Protocol):
    """A file format, as far as the engine sees it."""

    suffix: str
    """End of the names of its files."""

    def frame(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Frame:
        """Return the bytes around the payload of a dense tensor.

        Args:
            dtype: Its dtype.
            shape: Its shape, in elements.
            strides: Its strides, in elements; non-overlapping and dense.
        """

    def decode(
        self,
        data: bytearray | memoryview,
        dtype: torch.dtype,
        shape: Sequence[int],
        *,
        weights_only: bool = True,
    ) -> torch.Tensor:
        """Return the tensor that the bytes of an item hold.

        Args:
            data: All bytes of the item; the tensor may view them.
            dtype: What the metadata says of it.
            shape: What the metadata says of it, in elements.
            weights_only: As for torch.load, if it is needed.

        Raises:
            Exception: Whatever torch.load raises, where the item is not what `frame` says.
        """


class ImageLayout(NamedTuple):
    """Where the items of a file begin, in bytes from its start, and its size."""

    offsets: list[int]
    nbytes: int


def lay_out(sizes: Iterable[int], most_bytes: float = math.inf) -> ImageLayout:
    """Place items one after the other, large ones on pages and small ones on 64 bytes.

    Args:
        sizes: Bytes of each.
        most_bytes: Where to stop: the first item that would end beyond is not placed, nor those after it.
    """
    offsets, position = [], 0
    for size in sizes:
        alignment = LARGE_ALIGNMENT if size >= LARGE_BYTES else SMALL_ALIGNMENT
        start = -(-position // alignment) * alignment
        if start + size > most_bytes:
            break
        offsets.append(start)
        position = start + size
    return ImageLayout(offsets, position)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of `shape`."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def open_format(name: str) -> Format:
    """Return the format of that name.

    Args:
        name: Value of `--ckpt-format`.

    Raises:
        ConfigError: There is no such format in this version.
    """
    if name == "torch_dist":
        from distckpt.formats.torch_dist import TorchDist

        return TorchDist()
    raise ConfigError(f"ckpt_format {name!r} is not available in this version of distckpt: use torch_dist")

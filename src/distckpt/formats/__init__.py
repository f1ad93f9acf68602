"""File images: what the files of a checkpoint look like inside, and nothing else.

A format frames each item: the literal bytes before its payload and after it. A file is a header, if the
format has one, and a sequence of framed items; where it lies in memory and how it reaches storage is the
business of other rooms.

    torch_dist    items are torch.save archives: anything at all, read by stock PyTorch
    safetensors   tensors by name, their bytes without gaps behind one header
    zarr          tensors as arrays, each of their chunks a file

What a format cannot hold, it may have put aside into files of torch_dist beside its own.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from distckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import torch

__all__ = [
    "FORMATS",
    "Arrays",
    "Documents",
    "Entry",
    "FileFormat",
    "FileLayout",
    "Format",
    "Frame",
    "ImageLayout",
    "Places",
    "contiguous_strides",
    "format_of",
    "lay_out",
    "open_format",
    "safetensors_dtypes",
]

FORMATS = ("torch_dist", "safetensors", "zarr")
_CHUNK_NAME = re.compile(r"(?:^|/)c(?:\.\d+)*$")
SMALL_ALIGNMENT = 64
LARGE_ALIGNMENT = 4096
LARGE_BYTES = 1 << 20
"""Items from this size on begin on a page, so that a range of them can go to storage without a copy."""


class Frame(NamedTuple):
    """The literal bytes around the payload of an item."""

    prefix: bytes
    suffix: bytes


class Entry(NamedTuple):
    """What a file may say of an item beside its bytes.

    Attributes:
        fqn: Name of the entry in the state.
        dtype: Of the tensor.
        shape: Of the chunk, in elements.
        offsets: Of the chunk in the tensor, in elements.
        path: Keys that lead to the entry in the state, if there is a grid.
        size: Shape of the tensor, if there is a grid.
        grid: Shape of a chunk of the grid, if there is one; the chunk may end with the tensor before that.
    """

    fqn: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    path: tuple[str | int, ...] = ()
    size: tuple[int, ...] = ()
    grid: tuple[int, ...] | None = None


Places = dict[str, list[tuple[str, int]]]
"""For each tensor, by fqn, the file and the bytes of each of its chunks."""
Arrays = dict[str, list[Any]]
"""For each tensor with a grid, by fqn: path, shape, name of the dtype, shape of a chunk; JSON values."""


class FileLayout(NamedTuple):
    """One file.

    Attributes:
        offsets: Where each item begins, in bytes from the start of the file.
        nbytes: Its size.
        header: Its first bytes.
        is_sealed: Whether its last 4 bytes are the CRC32C of all before them, which lanes fill in.
        name: Its name, if the format says it; else see `Format.image_name`.
    """

    offsets: list[int]
    nbytes: int
    header: bytes = b""
    is_sealed: bool = False
    name: str = ""


class FileFormat(Protocol):
    """How items lie in files."""

    def companions(self, entries: Sequence[Entry]) -> dict[str, bytes]:
        """Return the small files, by name, that whoever writes these items writes after them."""

    def split(self, entries: Sequence[Entry]) -> list[list[int]]:
        """Spread what could be one file over as many as it takes.

        Args:
            entries: What each item is.

        Returns:
            The places of the items of each file in `entries`, all of them once.
        """

    def lay_out(self, sizes: Sequence[int], entries: Sequence[Entry]) -> FileLayout:
        """Place the items of one file, in this order; see `split`."""

    def order(self, size: int, entry: Entry) -> int:
        """Return by what items of a file are sorted, if they may be."""


class Format(FileFormat, Protocol):
    """A file format, as far as the engine sees it.

    Attributes:
        name: Value of `--ckpt-format`.
        keeps_strides: Whether a tensor lies in a file in whatever order its memory has; else row by row.
        found_by: Names of the files that readers of the format take for a part of the checkpoint wherever
            they see them: see `commit.Exclusive`. None if they look only for what the metadata names.
        marker: As `commit.Exclusive.marker`.
        has_grid: Whether tensors are cut into chunks of one shape, each a file: see `grid`, `frame_chunk`.
    """

    name: str
    keeps_strides: bool
    has_grid: bool
    found_by: re.Pattern[str] | None
    marker: str

    def holds(self, dtype: torch.dtype) -> bool:
        """Say whether it has this dtype."""

    def image_name(self, rank: int, number: int, total: int, save_id: str) -> str:
        """Return the name of a file.

        Args:
            rank: Who writes it.
            number: Which of the rank's files it is, from 0.
            total: How many these are.
            save_id: The save, in hexadecimal digits: with it, the name is of no other save.
        """

    def check_name(self, fqn: str) -> None:
        """Refuse an entry whose name the format cannot spell.

        Raises:
            StagingError: It cannot.
        """

    def grid(
        self, shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], itemsize: int
    ) -> tuple[int, ...]:
        """Return the shape of the chunks of a tensor.

        Args:
            shape: Of the tensor, in elements.
            boxes: Offsets and sizes of what ranks have of it, as far as that is known.
            itemsize: Bytes of an element.

        Raises:
            CheckpointError: There is no grid that fits them.
        """

    def frame_chunk(self, entry: Entry) -> Frame:
        """Return the bytes around the payload of a chunk of a grid."""

    def documents(self, places: Places, arrays: Arrays, written: Collection[str]) -> dict[str, bytes]:
        """Return the other small files by which readers of the format find their way; the main one last.

        Args:
            places: Where the chunks of each tensor lie.
            arrays: What each is, if there is a grid.
            written: Names of all files that ranks have written.
        """

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


class Documents:
    """Small files of a format, each of one item, which is their bytes; its entry bears their names."""

    def split(self, entries: Sequence[Entry]) -> list[list[int]]:
        """See `Format.split`."""
        return [[place] for place in range(len(entries))]

    def order(self, size: int, entry: Entry) -> int:
        """See `Format.order`."""
        return 0

    def lay_out(self, sizes: Sequence[int], entries: Sequence[Entry]) -> FileLayout:
        """See `Format.lay_out`."""
        return FileLayout([0], sizes[0], name=entries[0].fqn)

    def companions(self, entries: Sequence[Entry]) -> dict[str, bytes]:
        """See `FileFormat.companions`."""
        return {}


def open_format(name: str, *, checksums: bool = True, is_whole: bool = False) -> Format:
    """Return the format of that name.

    Args:
        name: Value of `--ckpt-format`.
        checksums: Whether files hold checksums, if they can.
        is_whole: Whether one rank writes all of the checkpoint, every tensor in one piece: then the files are
            named as people who hand them on expect.

    Raises:
        ConfigError: There is no such format in this version.
    """
    if name == "torch_dist":
        from distckpt.formats.torch_dist import TorchDist

        return TorchDist()
    if name == "safetensors":
        from distckpt.formats.safetensors import Safetensors

        return Safetensors(is_whole=is_whole)
    if name == "zarr":
        from distckpt.formats.zarr import Zarr

        return Zarr(checksums=checksums)
    raise ConfigError(f"ckpt_format: there is no format {name!r}: use one of {', '.join(FORMATS)}")


def safetensors_dtypes() -> dict[str, torch.dtype]:
    """Return the dtypes of safetensors, by the names that they have there."""
    from distckpt.formats.safetensors import DTYPES

    return DTYPES


def format_of(file: str) -> Format:
    """Return the format of the items in a file of a checkpoint, by the file's name."""
    if file.endswith(".safetensors"):
        return open_format("safetensors")
    return open_format("zarr" if _CHUNK_NAME.search(file) else "torch_dist")

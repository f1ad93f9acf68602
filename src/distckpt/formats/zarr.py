"""zarr v3: every tensor an array, every chunk a file, read by zarr-python, tensorstore and xarray.

    <checkpoint>/zarr.json                   the root group, with all documents below it consolidated
    <checkpoint>/model/zarr.json             a group for each container of the state
    <checkpoint>/model/weight/zarr.json      an array for each tensor
    <checkpoint>/model/weight/c.0.0          a chunk: its elements row by row, little-endian, and their CRC32C

Source: the zarr v3 specification, zarr-specs.readthedocs.io/en/latest/v3/core; zarr-python's
`consolidated_metadata`; the names of data types beyond the core in zarr-extensions, as tensorstore has them.

Invariants:
    * A chunk is written by one rank. Its border is a border of what ranks have, or it is whole rows of what
      one of them has (docs/adr/0025-zarr-grids.md).
    * A chunk is padded only behind its last row, at the end of the tensor, so that its payload is contiguous.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch

from distckpt.errors import ConfigError, IntegrityError
from distckpt.formats import FileLayout, Frame
from distckpt.formats.safetensors import view_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from distckpt.formats import Arrays, Entry, Places

    Box = tuple[tuple[int, ...], tuple[int, ...]]

DOCUMENT = "zarr.json"
_CHECKSUM_BYTES = 4
_MOST_CHUNK_BYTES = 32 << 20
"""A larger chunk is cut: who reads some rows, reads and checks whole chunks."""
_MOST_CHUNKS = 1 << 16
_MOST_NAME_BYTES = 255
"""Source: NAME_MAX, limits.h(0p), of all common file systems."""
_BLOCK_BYTES = 4 << 20
"""As `worker.CHECKSUM_BLOCK_BYTES`: a checksum that lies in two of them could not be filled in."""
_SAFE = "".join(map(chr, range(0x21, 0x7F))).translate({ord(char): None for char in '%/\\:*?"<>|~'})
"""What stands for itself in the name of a node; everything else is percent-encoded."""
_TYPES: dict[torch.dtype, Any] = {
    torch.bool: False,
    **{getattr(torch, f"{sign}int{bits}"): 0 for sign in ("", "u") for bits in (8, 16, 32, 64)},
    torch.float16: 0.0,
    torch.float32: 0.0,
    torch.float64: 0.0,
    torch.complex64: [0.0, 0.0],
    torch.complex128: [0.0, 0.0],
    torch.bfloat16: 0.0,
    torch.float8_e4m3fn: 0.0,
    torch.float8_e4m3fnuz: 0.0,
    torch.float8_e5m2: 0.0,
    torch.float8_e5m2fnuz: 0.0,
}
"""Dtypes whose zarr name is torch's, and the value that stands for chunks that are not there."""


_BEYOND_CORE = {"bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"}


class Zarr:
    """Format zarr.

    Args:
        checksums: Whether chunks end with their CRC32C (codec `crc32c`).
    """

    name = "zarr"
    has_grid = True
    keeps_strides = False
    found_by: re.Pattern[str] | None = re.compile(r"[^._].*")
    marker = ""
    """None is needed: the document of the root is the last to be seen."""

    def __init__(self, *, checksums: bool = True) -> None:
        self._checksums = checksums

    def holds(self, dtype: torch.dtype) -> bool:
        """See `Format.holds`."""
        return dtype in _TYPES

    def frame(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Frame:
        """See `Format.frame`: before it is known how a tensor is cut, there is none."""
        return Frame(b"", b"")

    def check_name(self, fqn: str) -> None:
        """See `Format.check_name`: names are encoded; see `array_path`."""

    def grid(self, shape: tuple[int, ...], boxes: Sequence[Box], itemsize: int) -> tuple[int, ...]:
        """See `Format.grid`.

        Raises:
            ConfigError: It would have too many chunks.
        """
        grid = [_step(dim, n, boxes) for dim, n in enumerate(shape)]
        if math.prod(shape) and len(grid):
            grid[0] = _rows(grid, shape, boxes, itemsize)
            count = math.prod(-(-n // step) for n, step in zip(shape, grid, strict=True))
            if count > _MOST_CHUNKS:
                raise ConfigError(
                    f"the chunks that fit what ranks have of a tensor of {shape} are of {tuple(grid)}, "
                    f"and so {count} files: save as torch_dist, and convert"
                )
        return tuple(grid)

    def frame_chunk(self, entry: Entry) -> Frame:
        """See `Format.frame_chunk`: rows of padding, and room for the checksum."""
        assert entry.grid is not None, "what is cut has a grid"
        missing = math.prod(entry.grid) - math.prod(entry.shape)
        ending = bytes(_CHECKSUM_BYTES) if self._is_sealed(entry.grid, entry.dtype) else b""
        return Frame(b"", bytes(missing * entry.dtype.itemsize) + ending)

    def split(self, entries: Sequence[Entry]) -> list[list[int]]:
        """See `FileFormat.split`: a chunk is a file."""
        return [[place] for place in range(len(entries))]

    def order(self, size: int, entry: Entry) -> int:
        """See `FileFormat.order`."""
        return 0

    def lay_out(self, sizes: Sequence[int], entries: Sequence[Entry]) -> FileLayout:
        """See `FileFormat.lay_out`."""
        [size], [entry] = sizes, entries
        assert entry.grid is not None, "what is cut has a grid"
        index = (offset // step for offset, step in zip(entry.offsets, entry.grid, strict=True))
        name = f"{array_path(entry.path)}/{chunk_key(index)}"
        return FileLayout([0], size, is_sealed=self._is_sealed(entry.grid, entry.dtype), name=name)

    def image_name(self, rank: int, number: int, total: int, save_id: str) -> str:
        """See `Format.image_name`; a chunk is named by its place.

        Raises:
            AssertionError: Always.
        """
        raise AssertionError("a chunk has a name")

    def companions(self, entries: Sequence[Entry]) -> dict[str, bytes]:
        """See `FileFormat.companions`: after all chunks of an array comes what the array is.

        Not before: to readers, a chunk that is not there is zeros.
        """
        counts: Counter[str] = Counter()
        for entry in entries:
            counts[entry.fqn] += math.prod(entry.shape)
        documents = {}
        for entry in entries:
            if not any(entry.offsets) and counts[entry.fqn] == math.prod(entry.size):
                assert entry.grid is not None, "what is cut has a grid"
                document = self._array(entry.fqn, entry.size, entry.dtype, entry.grid)
                documents[f"{array_path(entry.path)}/{DOCUMENT}"] = _to_json(document)
        return documents

    def documents(self, places: Places, arrays: Arrays, written: Collection[str]) -> dict[str, bytes]:
        """See `Format.documents`.

        Raises:
            ConfigError: Two entries would be one node.
        """
        nodes: dict[str, dict[str, Any]] = {}
        fqns: dict[str, str] = {}
        groups: dict[str, None] = {}
        for fqn, (path, shape, dtype, grid) in arrays.items():
            where = array_path(path)
            if where in fqns:
                raise ConfigError(f"{fqn!r} and {fqns[where]!r} are both the array {where!r} of zarr")
            fqns[where] = fqn
            nodes[where] = self._array(fqn, shape, getattr(torch, dtype), grid)
            folder = where
            while "/" in folder:
                folder = folder.rpartition("/")[0]
                groups[folder] = None
        for folder in groups:
            if folder in fqns:
                raise ConfigError(f"{fqns[folder]!r} is an array of zarr, and there are entries below it")
            nodes[folder] = _group()
        inner = {where: nodes[where] for where in sorted(nodes)}
        # Those of arrays that one rank has written lie beside their chunks already.
        documents = {
            f"{where}/{DOCUMENT}": _to_json(node)
            for where, node in inner.items()
            if f"{where}/{DOCUMENT}" not in written
        }
        # As zarr-python writes it: groups below hold no documents of their own. One array of a type that it
        # does not know keeps it from opening the group.
        told = {
            where: {**node, "consolidated_metadata": _consolidated({})}
            if node["node_type"] == "group"
            else node
            for where, node in inner.items()
            if node.get("data_type") not in _BEYOND_CORE
        }
        return {**documents, DOCUMENT: _to_json(_group(told))}

    def decode(
        self,
        data: bytearray | memoryview,
        dtype: torch.dtype,
        shape: Sequence[int],
        *,
        weights_only: bool = True,
    ) -> torch.Tensor:
        """See `Format.decode`; padding and checksum stand behind the payload.

        Raises:
            IntegrityError: There are too few bytes.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if len(data) < nbytes:
            raise IntegrityError(f"it has {len(data)} bytes, where {dtype} of {tuple(shape)} has {nbytes}")
        return view_bytes(data, dtype, shape)

    def _is_sealed(self, grid: Sequence[int], dtype: torch.dtype) -> bool:
        nbytes = math.prod(grid) * dtype.itemsize
        return self._checksums and nbytes // _BLOCK_BYTES == (nbytes + _CHECKSUM_BYTES - 1) // _BLOCK_BYTES

    def _array(
        self, fqn: str, shape: Sequence[int], dtype: torch.dtype, grid: Sequence[int]
    ) -> dict[str, Any]:
        codecs: list[dict[str, Any]] = [{"name": "bytes"}]
        if dtype.itemsize > 1:
            codecs[0]["configuration"] = {"endian": "little"}
        if self._is_sealed(grid, dtype):
            codecs.append({"name": "crc32c"})
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(shape),
            "data_type": str(dtype).removeprefix("torch."),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(grid)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": _TYPES[dtype],
            "codecs": codecs,
            "attributes": {"fqn": fqn},
            # xarray opens a group only if dimensions of one name have one size.
            "dimension_names": _dimension_names(shape),
            "storage_transformers": [],
        }


def array_path(path: Iterable[str | int]) -> str:
    """Return where an array lies, by the keys that lead to its entry in the state.

    Raises:
        ConfigError: No file system takes the name of a key.
    """
    names = []
    for key in path:
        name = quote(str(key), safe=_SAFE, errors="surrogatepass")
        # What the specification reserves, what is a chunk or a document, and what is hidden.
        if re.match(r"\.|__|c(\.|$)|zarr\.json$", name) or not name:
            name = f"%{ord(name[0]):02X}{name[1:]}" if name else "%"
        if len(name) > _MOST_NAME_BYTES:
            raise ConfigError(f"{name[:40]!r}..., a key of the state, is too long for the name of a file")
        names.append(name)
    return "/".join(names)


def chunk_key(index: Iterable[int]) -> str:
    """Return the name of a chunk within its array, by its place in the grid."""
    return ".".join(("c", *map(str, index)))


def _step(dim: int, n: int, boxes: Sequence[Box]) -> int:
    """Return the largest step of which every border of `boxes` in a dimension of size `n` is a multiple."""
    borders = [border for offsets, sizes in boxes for border in (offsets[dim], offsets[dim] + sizes[dim])]
    step = math.gcd(*(border for border in borders if border < n))
    # Padding behind the last rows of all is behind the payload; elsewhere it would be within.
    if step and dim:
        step = math.gcd(step, n)
    # Who knows only the last rows has no other border than their offset. If they are an even share of all, so
    # are those of other ranks; if not, other ranks have more, and the offset is what there is to go by.
    own = max((sizes[dim] for _, sizes in boxes), default=0)
    if 0 < own < step and n % own == 0:
        step = math.gcd(step, own)
    return max(1, step or n)


def _rows(grid: Sequence[int], shape: Sequence[int], boxes: Sequence[Box], itemsize: int) -> int:
    """Return how many rows a chunk has, so that it is not too large."""
    rows, row_bytes = grid[0], math.prod(grid[1:]) * itemsize
    most = max(1, _MOST_CHUNK_BYTES // max(1, row_bytes))
    if rows <= most:
        return rows
    count = -(-rows // most)
    if rows >= shape[0]:
        # All rows are in one box: any number will do.
        return -(-rows // count)
    # The largest number that divides them; near to what was asked for, or there are too many chunks.
    return next((rows // k for k in range(count, 4 * count) if rows % k == 0), rows)


def _dimension_names(shape: Sequence[int]) -> list[str]:
    seen: dict[int, int] = {}
    names = []
    for n in shape:
        number = seen[n] = seen.get(n, 0) + 1
        names.append(f"dim_{n}" if number == 1 else f"dim_{n}_{number}")
    return names


def _group(documents: dict[str, Any] | None = None) -> dict[str, Any]:
    group: dict[str, Any] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    return group if documents is None else {**group, "consolidated_metadata": _consolidated(documents)}


def _consolidated(documents: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "inline", "must_understand": False, "metadata": documents}


def _to_json(document: dict[str, Any]) -> bytes:
    # Not indented: in Python, that takes ten times as long.
    return json.dumps(document).encode() + b"\n"

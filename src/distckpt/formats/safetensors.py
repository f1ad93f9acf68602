"""safetensors: tensors by name, their bytes one after the other behind a JSON header.

A rank's files say in their headers which chunk of which tensor they hold, as those of torch's own
HuggingFaceStorageWriter do; a checkpoint of which every tensor lies in one piece also has the index by which
transformers finds it.

Source: the format's own description, github.com/huggingface/safetensors; torch/distributed/checkpoint/
_hf_utils.py for what the headers of chunks hold.

Invariants:
    * Payloads follow each other without a gap, row by row, or the format's own library refuses the file.
    * A tensor begins at a multiple of its dtype's size, and one whose size is a multiple of a page on a page,
      as far as the order of items within a file is free.
    * A file has one chunk of a tensor at most: it knows tensors by their names.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from distckpt.errors import IntegrityError, StagingError
from distckpt.formats import LARGE_ALIGNMENT, FileLayout, Frame

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from distckpt.formats import Arrays, Entry, Places

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Those that the format's library loads as torch's: safetensors/torch.py, `_TYPES`."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_HEADER_BYTES = 100_000_000
"""Source: MAX_HEADER_SIZE in safetensors/src/tensor.rs."""
_LENGTH_BYTES = 8
_SHARDING_INFO = "DCP_SHARDING_INFO"
_NO_FRAME = Frame(b"", b"")


class Safetensors:
    """Format safetensors.

    Args:
        is_whole: See `open_format`.
    """

    name = "safetensors"
    has_grid = False
    keeps_strides = False
    found_by: re.Pattern[str] | None = re.compile(r".*\.safetensors(\.index\.json)?")
    marker = "unfinished-{save_id}.safetensors"

    def __init__(self, *, is_whole: bool = False) -> None:
        self._is_whole = is_whole

    def holds(self, dtype: torch.dtype) -> bool:
        """See `Format.holds`."""
        return dtype in _NAMES

    def frame(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Frame:
        """See `Format.frame`: there is none."""
        return _NO_FRAME

    def split(self, entries: Sequence[Entry]) -> list[list[int]]:
        """See `Format.split`: there are more files where a tensor has several chunks on this rank."""
        files: list[list[int]] = []
        num_chunks: Counter[str] = Counter()
        for place, entry in enumerate(entries):
            number = num_chunks[entry.fqn]
            num_chunks[entry.fqn] += 1
            if number == len(files):
                files.append([])
            files[number].append(place)
        return files

    def order(self, size: int, entry: Entry) -> int:
        """See `Format.order`: what is whole pages first, then by the size of elements, the largest first."""
        return -LARGE_ALIGNMENT if size and size % LARGE_ALIGNMENT == 0 else -entry.dtype.itemsize

    def lay_out(self, sizes: Sequence[int], entries: Sequence[Entry]) -> FileLayout:
        """See `Format.lay_out`.

        Raises:
            StagingError: The header is larger than readers take.
        """
        header: dict[str, Any] = {
            "__metadata__": {
                _SHARDING_INFO: json.dumps(
                    {entry.fqn: {"saved_offsets": entry.offsets} for entry in entries}
                ),
                "DCP_VERSION": "1.0",
                "format": "pt",
            }
        }
        ends: list[int] = []
        position = 0
        for size, entry in zip(sizes, entries, strict=True):
            header[entry.fqn] = {
                "dtype": _NAMES[entry.dtype],
                "shape": entry.shape,
                "data_offsets": (position, position + size),
            }
            position += size
            ends.append(position)
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) > _MOST_HEADER_BYTES - LARGE_ALIGNMENT:
            raise StagingError(
                f"{len(entries)} tensors have a header of {len(text)} bytes, and readers of safetensors take "
                f"at most {_MOST_HEADER_BYTES}: use more workers (--dist-ckpt-workers), or torch_dist"
            )
        # Blanks behind the header are allowed.
        text += b" " * (-(_LENGTH_BYTES + len(text)) % LARGE_ALIGNMENT)
        first = _LENGTH_BYTES + len(text)
        offsets = [first + end - size for end, size in zip(ends, sizes, strict=True)]
        return FileLayout(offsets, first + position, len(text).to_bytes(_LENGTH_BYTES, "little") + text)

    def image_name(self, rank: int, number: int, total: int, save_id: str) -> str:
        """See `Format.image_name`."""
        if self._is_whole:
            return f"model-{number + 1:05}-of-{total:05}{SUFFIX}"
        return f"shard-{rank:05}-{number:05}-{save_id}{SUFFIX}"

    def check_name(self, fqn: str) -> None:
        """See `Format.check_name`: names stand in a header of JSON, in UTF-8, beside one of the format's own.

        Raises:
            StagingError: This one cannot.
        """
        try:
            fqn.encode()
        except UnicodeEncodeError:
            raise StagingError(f"{fqn!r} cannot be a name in safetensors: it is no UTF-8") from None
        if fqn == "__metadata__":
            raise StagingError(f"{fqn!r} cannot be a name in safetensors, where it stands for something else")

    def grid(
        self, shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], itemsize: int
    ) -> tuple[int, ...]:
        """See `Format.grid`: there is none."""
        return ()

    def frame_chunk(self, entry: Entry) -> Frame:
        """See `Format.frame_chunk`."""
        return self.frame(entry.dtype, entry.shape, ())

    def companions(self, entries: Sequence[Entry]) -> dict[str, bytes]:
        """See `FileFormat.companions`."""
        return {}

    def documents(self, places: Places, arrays: Arrays, written: Collection[str]) -> dict[str, bytes]:
        """See `Format.documents`: the index, if every tensor lies in one piece."""
        weight_map: dict[str, str] = {}
        total_bytes = 0
        for fqn, chunks in places.items():
            if len(chunks) != 1:
                return {}
            [(file, nbytes)] = chunks
            if file.endswith(SUFFIX):
                weight_map[fqn] = file
                total_bytes += nbytes
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        return {INDEX: json.dumps(index, indent=2).encode() + b"\n"}

    def decode(
        self,
        data: bytearray | memoryview,
        dtype: torch.dtype,
        shape: Sequence[int],
        *,
        weights_only: bool = True,
    ) -> torch.Tensor:
        """See `Format.decode`.

        Raises:
            IntegrityError: The bytes are not as many as the tensor has.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if len(data) != nbytes:
            raise IntegrityError(f"it has {len(data)} bytes, where {dtype} of {tuple(shape)} has {nbytes}")
        return view_bytes(data, dtype, shape)


def view_bytes(data: bytearray | memoryview, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return the tensor whose elements, row by row, begin `data`; it views the memory if that is aligned."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    payload = torch.frombuffer(data, dtype=torch.uint8, count=nbytes)
    if payload.data_ptr() % dtype.itemsize:
        payload = payload.clone()
    return payload.view(dtype).reshape(tuple(shape))

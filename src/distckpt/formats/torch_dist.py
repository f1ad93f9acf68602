"""torch.save's own bytes around each payload, so that stock PyTorch reads every item with torch.load.

The bytes around a payload depend only on dtype, shape, strides and the torch version. They are taken from a
real torch.save under `skip_data`, once for each kind of tensor; around a small payload, only the records that
torch.load needs are kept (docs/adr/0009-torch-save-framing.md).

Invariants:
    * Payloads start 64-byte aligned within their item (torch.save's own alignment).
    * A template costs no memory for the payload, whatever its size.
"""

from __future__ import annotations

import functools
import io
import math
import zipfile
from typing import IO, TYPE_CHECKING, cast

import torch
from torch.serialization import skip_data

from distckpt.formats import SMALL_ALIGNMENT, FileLayout, Frame, contiguous_strides, lay_out

if TYPE_CHECKING:
    import re
    from collections.abc import Collection, Sequence

    from distckpt.formats import Arrays, Entry, Places

_TEMPLATES = 1 << 16
_SMALL_BYTES = 64 << 10
"""Below this the bytes of records that torch.load does not need are felt."""
_RECORDS = ("version", "byteorder", "data.pkl")
_LOCAL_HEADER_BYTES = 30
_PADDING_FIELD = b"FB\x00\x00"
"""Source: PKWARE APPNOTE 4.3.7 and 4.5.1; the kind is that of caffe2/serialize/inline_container.cc."""
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
"""Their tensors cannot be made without scales, and so have no template."""


_ALIGNMENT = 16
"""Of the address of a tensor's first element: the largest element, complex128, has as many bytes."""


class _FramingSink(io.RawIOBase):
    """Keeps what is written, and drops the payload, which `skip_data` seeks over."""

    def __init__(self) -> None:
        self._position = 0
        self._before = bytearray()
        self._after: bytearray | None = None

    def frame(self) -> Frame:
        return Frame(bytes(self._before), bytes(self._after or b""))

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        target = offset if whence == io.SEEK_SET else self._position + offset
        assert whence != io.SEEK_END, "torch.save never seeks from the end"
        if target != self._position:
            assert self._after is None, "one payload, one gap"
            self._after = bytearray()
        self._position = target
        return target

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        (self._before if self._after is None else self._after).extend(data)
        self._position += len(data)
        return len(data)


@functools.lru_cache(_TEMPLATES)
def _template(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Frame:
    # Its storage is never touched, and so costs address space only.
    nbytes = math.prod(shape) * dtype.itemsize
    storage = torch.UntypedStorage(nbytes, device="cpu")  # type: ignore[no-untyped-call]
    example = torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, strides)
    sink = _FramingSink()
    with skip_data():
        torch.save(example, cast("IO[bytes]", sink))
    frame = sink.frame()
    return _repack(frame, nbytes) if 0 < nbytes < _SMALL_BYTES else frame


def _repack(frame: Frame, nbytes: int) -> Frame:
    """Return the framing of a small payload with the records that torch.load needs, and no others."""
    with zipfile.ZipFile(io.BytesIO(frame.prefix + bytes(nbytes) + frame.suffix)) as archive:
        root = archive.namelist()[0].partition("/")[0]
        records = {name: archive.read(f"{root}/{name}") for name in _RECORDS}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name, record in records.items():
            archive.writestr(zipfile.ZipInfo(f"{root}/{name}"), record)
        payload = zipfile.ZipInfo(f"{root}/data/0")
        # An extra field of unknown kind is what torch.save pads with, too.
        begin = packed.tell() + _LOCAL_HEADER_BYTES + len(payload.filename) + len(_PADDING_FIELD)
        padding = -begin % SMALL_ALIGNMENT
        payload.extra = _PADDING_FIELD[:2] + padding.to_bytes(2, "little") + bytes(padding)
        archive.writestr(payload, bytes(nbytes))
        # The directory at the end would repeat it.
        payload.extra = b""
    data = packed.getvalue()
    begin += padding
    return Frame(data[:begin], data[begin + nbytes :])


class TorchDist:
    """Format torch_dist: items are torch.save archives of one tensor each."""

    name = "torch_dist"
    has_grid = False
    keeps_strides = True
    found_by: re.Pattern[str] | None = None
    marker = ""

    def holds(self, dtype: torch.dtype) -> bool:
        """See `Format.holds`: torch.save takes all."""
        return True

    def split(self, entries: Sequence[Entry]) -> list[list[int]]:
        """See `Format.split`: a file takes anything."""
        return [list(range(len(entries)))]

    def lay_out(self, sizes: Sequence[int], entries: Sequence[Entry]) -> FileLayout:
        """See `Format.lay_out`."""
        return FileLayout(*lay_out(sizes))

    def order(self, size: int, entry: Entry) -> int:
        """See `Format.order`: neighbours in the plan stay neighbours."""
        return 0

    def image_name(self, rank: int, number: int, total: int, save_id: str) -> str:
        """See `Format.image_name`."""
        return f"__{rank}_{number}.distcp.{save_id}"

    def check_name(self, fqn: str) -> None:
        """See `Format.check_name`: none is refused."""

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
        """See `Format.documents`: the metadata of torch says it all."""
        return {}

    def frame(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Frame:
        """See `Format.frame`."""
        return _template(dtype, shape, strides)

    def decode(
        self,
        data: bytearray | memoryview,
        dtype: torch.dtype,
        shape: Sequence[int],
        *,
        weights_only: bool = True,
    ) -> torch.Tensor:
        """See `Format.decode`.

        An item whose framing is what this torch would write is viewed in place; any other goes through
        torch.load.

        Raises:
            TypeError: That yields something else.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        # A sparse tensor may have more elements than there is memory, for a template, too.
        if 0 < nbytes <= len(data) and dtype not in _QUANTIZED:
            strides = contiguous_strides(shape)
            prefix, suffix = _template(dtype, tuple(shape), strides)
            if len(data) == len(prefix) + nbytes + len(suffix) and bytes(data[: len(prefix)]) == prefix:
                payload = torch.frombuffer(data, dtype=torch.uint8, offset=len(prefix), count=nbytes)
                if payload.data_ptr() % _ALIGNMENT:
                    # Items of another tool begin at any byte, and some dtypes are copied by aligned moves.
                    payload = payload.clone()
                viewed = torch.empty(0, dtype=dtype, device="cpu")
                return viewed.set_(payload.untyped_storage(), 0, tuple(shape), strides)
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
        if not isinstance(loaded, torch.Tensor):
            raise TypeError(f"a {type(loaded).__name__}, not a tensor")
        return loaded

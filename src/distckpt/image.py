"""The file images of one rank: which item lies where in which file, and in which parts files are written.

Pure: sizes in, places out; what the bytes are and where they lie in memory is the business of other rooms.

Invariants:
    * Every byte of every file is in exactly one part; parts of a file ascend.
    * Parts are in the order in which they are staged: some of each file in turn, so that no lane waits.
    * A span never crosses a part, and ends at every multiple of the checksum block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from distckpt.formats import FileLayout, lay_out
from distckpt.plan import pack
from distckpt.worker import ZEROS, Part, Plan, block_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distckpt.formats import Entry, FileFormat

_MAX_PIECES = 4096


@dataclass(frozen=True)
class ImageFile:
    """One file.

    Attributes:
        items: Number of each item, in the order of the file.
        offsets: Where each begins, in bytes from the start of the file.
        nbytes: Size of the file.
        num_unstaged: How many items are to be staged; the others are in the arena already.
        header: Its first bytes.
        is_sealed: Whether its last bytes are the checksum of all before them; see `worker.Part.sealed`.
        name: Its name, if the format says it.
        is_aside: Whether it holds what the format of the save does not, in the manner of torch_dist.
    """

    items: list[int]
    offsets: list[int]
    nbytes: int
    num_unstaged: int
    header: bytes = b""
    is_sealed: bool = False
    name: str = ""
    is_aside: bool = False


@dataclass
class ImagePart:
    """A stretch of a file that is staged and written as one.

    Attributes:
        file: Number of the file.
        low: First byte.
        high: Byte after the last.
        spans: Flat (start, bytes) within the part, one for each checksum.
        pieces: Where its bytes are, if they are in the arena already (see `worker.Part`); else empty.
        sealed: See `worker.Part.sealed`.
    """

    file: int
    low: int
    high: int
    spans: list[int]
    pieces: list[tuple[int, int, int]]
    sealed: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.high - self.low

    @property
    def is_staged(self) -> bool:
        """Whether its bytes are in the arena already."""
        return bool(self.pieces) or self.nbytes == 0


@dataclass(frozen=True)
class Image:
    """All files of one rank in one save.

    Attributes:
        sizes: Bytes of each item, framing included.
        files: The files.
        parts: All parts, in the order of staging.
        are_documents: Whether the files are the small ones of a format, and not those that hold its items.
    """

    sizes: list[int]
    files: list[ImageFile]
    parts: list[ImagePart]
    are_documents: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    @cached_property
    def parts_by_file(self) -> list[list[int]]:
        """For each file the numbers of its parts, in ascending order of their bytes."""
        numbers: list[list[int]] = [[] for _ in self.files]
        for number, part in enumerate(self.parts):
            numbers[part.file].append(number)
        return numbers

    @cached_property
    def num_spans(self) -> list[int]:
        """Number of checksums of each part, as `Board` wants it."""
        return [len(part.spans) // 2 for part in self.parts]

    def plan(self, plan_id: int, board: tuple[int, int]) -> Plan:
        """Return what the lanes are told of it, once each part has its place.

        Args:
            plan_id: See `worker.Plan`.
            board: See `worker.Plan`.
        """
        parts = (
            Part(part.file, part.low, tuple(part.pieces), tuple(part.spans), part.sealed)
            for part in self.parts
        )
        return Plan(plan_id, tuple(file.nbytes for file in self.files), tuple(parts), board)

    def places(self) -> tuple[list[int], list[int]]:
        """Return the file and the offset of each item, in the order of the items."""
        files, offsets = [0] * len(self.sizes), [0] * len(self.sizes)
        for number, file in enumerate(self.files):
            for index, offset in zip(file.items, file.offsets, strict=True):
                files[index], offsets[index] = number, offset
        return files, offsets


def lay_out_image(
    sizes: Sequence[int],
    num_files: int,
    part_bytes: int,
    *,
    file_format: FileFormat | None = None,
    entries: Sequence[Entry | None] = (),
    order: Sequence[int] = (),
    homes: Sequence[tuple[int, int] | None] = (),
    run: int = 1,
    checksums: bool = True,
    whole_parts: Callable[[int], int] | None = None,
    are_documents: bool = False,
    with_companions: bool = True,
) -> Image:
    """Lay out the files of one rank.

    Args:
        sizes: Bytes of each item, framing included.
        num_files: Number of files, at most.
        part_bytes: Bytes of a part, at most; a multiple of the checksum block.
        file_format: Lays out the files; None: one item after the other, as torch_dist has it.
        entries: For each item what a file of this format says of it; None puts it aside.
        order: For each item a class; within a file those of one class lie together, in ascending order.
        homes: For each item (slab, offset in the slab) at which it lies in the arena already, or None.
        run: How many parts of each file are staged in turn.
        checksums: Whether checksums are taken.
        whole_parts: If every part of a file but its last must have the same number of bytes: given the bytes
            of the file, returns that number. What is staged already has files of its own then.
        are_documents: See `Image`.
        with_companions: Whether what the format wants beside its files (`FileFormat.companions`) is among
            them: where no file is seen before it is completed, which is done in the order of the files.

    Returns:
        The image.
    """
    files, parts_by_file = [], []
    packed = _pack(sizes, num_files, entries, homes if whole_parts else (), file_format)
    for number, (is_aside, indices) in enumerate(packed):
        own_format = None if is_aside else file_format
        if own_format is not None:
            ranks = {index: own_format.order(sizes[index], _entry(entries, index)) for index in indices}
            indices.sort(key=ranks.__getitem__)
        if order:
            indices.sort(key=order.__getitem__)
        if homes:
            # What is not staged yet first: what was staged then lies in one stretch.
            indices.sort(key=lambda index: homes[index] is not None)
        num_unstaged = sum(homes[index] is None for index in indices) if homes else len(indices)
        own_sizes = [sizes[index] for index in indices]
        if own_format is None:
            layout = FileLayout(*lay_out(own_sizes))
        else:
            layout = own_format.lay_out(own_sizes, [_entry(entries, index) for index in indices])
        file = ImageFile(
            indices,
            layout.offsets,
            layout.nbytes,
            num_unstaged,
            layout.header,
            layout.is_sealed and checksums,
            layout.name,
            is_aside,
        )
        files.append(file)
        size = whole_parts(file.nbytes) if whole_parts else part_bytes
        parts_by_file.append(
            list(_parts(number, file, sizes, homes, size, checksums=checksums, are_whole=bool(whole_parts)))
        )
    for name, data in _companions(entries, file_format if with_companions else None):
        file = ImageFile([], [], len(data), 0, data, name=name)
        size = whole_parts(file.nbytes) if whole_parts else part_bytes
        parts_by_file.append(
            list(_parts(len(files), file, sizes, (), size, checksums=checksums, are_whole=bool(whole_parts)))
        )
        files.append(file)
    longest = max(map(len, parts_by_file), default=0)
    parts = [
        part for first in range(0, longest, run) for own in parts_by_file for part in own[first : first + run]
    ]
    image = Image(list(sizes), files, parts, are_documents)
    for number, file in enumerate(files):
        if file.is_sealed and checksums:
            *before, last = image.parts_by_file[number]
            parts[last].sealed = tuple(before)
    return image


def _pack(
    sizes: Sequence[int],
    num_files: int,
    entries: Sequence[Entry | None],
    homes: Sequence[object | None],
    file_format: FileFormat | None,
) -> Iterator[tuple[bool, list[int]]]:
    """Distribute items over files, and yield which lie in each, and whether these are put aside.

    Items that have a home and those that have none are in different files, as are those of the format and
    those put aside.
    """
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for index in range(len(sizes)):
        is_aside = file_format is not None and entries[index] is None
        kinds.setdefault((is_aside, bool(homes) and homes[index] is not None), []).append(index)
    for (is_aside, _), indices in sorted(kinds.items()):
        for places in pack([sizes[index] for index in indices], num_files):
            own = [indices[place] for place in places]
            if file_format is None or is_aside:
                yield is_aside, own
                continue
            for split in file_format.split([_entry(entries, index) for index in own]):
                yield False, [own[place] for place in split]


def _companions(
    entries: Sequence[Entry | None], file_format: FileFormat | None
) -> Iterator[tuple[str, bytes]]:
    if file_format is not None:
        yield from file_format.companions([entry for entry in entries if entry is not None]).items()


def _entry(entries: Sequence[Entry | None], index: int) -> Entry:
    entry = entries[index]
    assert entry is not None, "what has none is put aside"
    return entry


def _parts(
    number: int,
    file: ImageFile,
    sizes: Sequence[int],
    homes: Sequence[tuple[int, int] | None],
    part_bytes: int,
    *,
    checksums: bool,
    are_whole: bool,
) -> Iterator[ImagePart]:
    count = file.num_unstaged
    end = file.nbytes if count == len(file.items) else file.offsets[count]
    part = ImagePart(number, 0, min(part_bytes, end), [], [])
    places = [(0, len(file.header))] if file.header else []
    places += zip(file.offsets[:count], (sizes[index] for index in file.items[:count]), strict=True)
    for start, size in places:
        for offset, nbytes in block_spans(start, size):
            while offset >= part.high:
                yield part
                part = ImagePart(number, part.high, min(part.high + part_bytes, end), [], [])
            if checksums:
                part.spans += (offset - part.low, nbytes)
    assert part.high == end, "parts end on pages, and so does padding at the latest"
    # A file without a byte is a file all the same.
    if part.high > part.low or file.nbytes == 0:
        yield part
    if count < len(file.items):
        yield from _staged_parts(
            number, file, sizes, homes, part_bytes, checksums=checksums, are_whole=are_whole
        )


def _staged_parts(
    number: int,
    file: ImageFile,
    sizes: Sequence[int],
    homes: Sequence[tuple[int, int] | None],
    part_bytes: int,
    *,
    checksums: bool,
    are_whole: bool,
) -> Iterator[ImagePart]:
    first = file.num_unstaged
    part = ImagePart(number, file.offsets[first], file.offsets[first], [], [])
    for index, start in zip(file.items[first:], file.offsets[first:], strict=True):
        home = homes[index]
        assert home is not None
        slab, home_offset = home
        for offset, nbytes in block_spans(start, sizes[index]):
            if are_whole:
                is_full = offset >= part.low + part_bytes
            else:
                is_full = part.nbytes >= part_bytes or len(part.pieces) >= _MAX_PIECES
            if is_full:
                missing = part_bytes - part.nbytes
                if are_whole and missing:
                    part.pieces.append((ZEROS, 0, missing))
                    part.high += missing
                yield part
                part = ImagePart(number, part.high, part.high, [], [])
            gap = offset - part.high
            address = home_offset + offset - start
            last = part.pieces[-1] if part.pieces else None
            if last is not None and last[0] == slab and last[1] + last[2] + gap == address:
                # Neighbours in the arena as in the file, padding included.
                part.pieces[-1] = (slab, last[1], last[2] + gap + nbytes)
            else:
                if gap:
                    part.pieces.append((ZEROS, 0, gap))
                part.pieces.append((slab, address, nbytes))
            if checksums:
                part.spans += (offset - part.low, nbytes)
            part.high = offset + nbytes
    yield part

"""The layout of files: every byte in one part, checksums for every item, staged bytes where they lie."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distckpt.formats import LARGE_BYTES, lay_out
from distckpt.image import _MAX_PIECES, Image, ImagePart, lay_out_image
from distckpt.plan import pack
from distckpt.worker import CHECKSUM_BLOCK_BYTES, ZEROS, block_spans

KIB, MIB = 1 << 10, 1 << 20
SIZES = st.one_of(
    st.integers(0, 200),
    st.integers(0, 64 * KIB),
    st.integers(-2, 2).map(lambda delta: LARGE_BYTES + delta),
    st.integers(0, 3 * CHECKSUM_BLOCK_BYTES),
)


class Drawn(NamedTuple):
    """What an image is laid out for."""

    sizes: list[int]
    num_files: int
    part_bytes: int
    order: list[int]
    homes: list[tuple[int, int] | None]

    def lay_out(self, *, checksums: bool = True) -> Image:
        return lay_out_image(
            self.sizes,
            self.num_files,
            self.part_bytes,
            order=self.order,
            homes=self.homes,
            checksums=checksums,
        )


@st.composite
def drawn(draw: st.DrawFn, *, sizes: st.SearchStrategy[int] = SIZES, staged: bool = True) -> Drawn:
    """Draw items, some of which lie about in the arena, alone or one after the other as in a file."""
    chosen = draw(st.lists(sizes, max_size=24))
    homes: list[tuple[int, int] | None] = []
    slab, position = 0, 0
    for number, size in enumerate(chosen):
        # What was staged has a payload, and so a size.
        if not staged or not size or draw(st.booleans()):
            homes.append(None)
            continue
        if draw(st.booleans()):
            # Far from all others.
            slab, position = draw(st.integers(0, 2)), (1 + number) << 32
        layout = lay_out([position % 4096, size])
        position += layout.offsets[1] - position % 4096
        homes.append((slab, position))
        position += size
    return Drawn(
        chosen,
        draw(st.integers(1, 4)),
        CHECKSUM_BLOCK_BYTES * draw(st.integers(1, 3)),
        draw(st.one_of(st.just([]), st.lists(st.booleans(), min_size=len(chosen), max_size=len(chosen)))),
        homes if any(homes) or draw(st.booleans()) else [],
    )


def parts_of(image: Image, file: int) -> list[ImagePart]:
    return [image.parts[number] for number in image.parts_by_file[file]]


def spans_of(part: ImagePart) -> list[tuple[int, int]]:
    return [(part.low + start, n) for start, n in zip(part.spans[::2], part.spans[1::2], strict=True)]


@given(drawn())
def test_every_byte_is_in_one_part_and_the_parts_of_a_file_ascend(what: Drawn) -> None:
    image = what.lay_out()
    assert sorted(part.file for part in image.parts) == [
        number for number in range(len(image.files)) for _ in image.parts_by_file[number]
    ]
    for number, file in enumerate(image.files):
        end = 0
        for part in parts_of(image, number):
            assert part.low == end
            assert part.high > part.low or file.nbytes == 0
            end = part.high
        assert end == file.nbytes
    assert image.nbytes == sum(part.nbytes for part in image.parts)


@given(drawn())
def test_every_item_has_one_place_and_none_overlaps(what: Drawn) -> None:
    image = what.lay_out()
    assert sorted(index for file in image.files for index in file.items) == list(range(len(what.sizes)))
    assert len(image.files) <= what.num_files
    files, offsets = image.places()
    for number, file in enumerate(image.files):
        assert file.items
        layout = lay_out([what.sizes[index] for index in file.items])
        assert (file.offsets, file.nbytes) == (layout.offsets, layout.nbytes)
        assert [(files[index], offsets[index]) for index in file.items] == [
            (number, offset) for offset in file.offsets
        ]
    assert image.sizes == what.sizes


@given(drawn())
def test_what_is_not_staged_comes_first_and_classes_lie_together(what: Drawn) -> None:
    image = what.lay_out()
    for file in image.files:
        is_staged = [bool(what.homes) and what.homes[index] is not None for index in file.items]
        assert is_staged == [False] * file.num_unstaged + [True] * (len(file.items) - file.num_unstaged)
        for start, end in ((0, file.num_unstaged), (file.num_unstaged, len(file.items))):
            keys = [(what.order[index] if what.order else 0, index) for index in file.items[start:end]]
            assert keys == sorted(keys)


@given(drawn())
def test_parts_are_no_larger_than_asked_for(what: Drawn) -> None:
    image = what.lay_out()
    for part in image.parts:
        assert not part.is_staged or part.nbytes == 0 or part.pieces
        # What lies in the arena already is cut where a block ends, or an item does.
        most = what.part_bytes + (CHECKSUM_BLOCK_BYTES + 4096 if part.pieces else 0)
        assert part.nbytes <= most
        assert len(part.pieces) <= _MAX_PIECES + 1


@given(drawn(), st.booleans())
def test_checksums_cover_every_item_in_the_order_of_the_file(what: Drawn, checksums: bool) -> None:
    image = what.lay_out(checksums=checksums)
    for number, file in enumerate(image.files):
        found = []
        for part in parts_of(image, number):
            for start, nbytes in spans_of(part):
                assert part.low <= start < start + nbytes <= part.high
                found.append((start, nbytes))
        expected = [
            span
            for index, offset in zip(file.items, file.offsets, strict=True)
            for span in block_spans(offset, what.sizes[index])
        ]
        assert found == (expected if checksums else [])


@given(drawn(sizes=st.one_of(st.integers(0, 5000), st.integers(LARGE_BYTES, LARGE_BYTES + 5000))))
def test_pieces_give_the_bytes_of_the_items_and_zeros_between_them(what: Drawn) -> None:
    """Compared with a plain concatenation, byte by byte: each staged byte is told by slab and address."""
    image = what.lay_out()
    for number, file in enumerate(image.files):
        expected = list(zip(file.offsets, file.items, strict=True))[file.num_unstaged :]
        filled: list[tuple[int, int, int, int]] = []
        for part in parts_of(image, number):
            at = part.low
            for slab, address, nbytes in part.pieces:
                assert nbytes > 0
                filled.append((at, at + nbytes, slab, address))
                at += nbytes
            assert not part.pieces or at == part.high
        for offset, index in expected:
            home = what.homes[index]
            assert home is not None
            covered = 0
            for low, high, slab, address in filled:
                first, last = max(low, offset), min(high, offset + what.sizes[index])
                if first < last:
                    covered += last - first
                    assert (slab, address + first - low) == (home[0], home[1] + first - offset)
            assert covered == what.sizes[index]
        for (offset, index), (following, _) in itertools.pairwise(expected):
            # Padding is zeros, or what stands for it between neighbours in the arena.
            for low, high, slab, address in filled:
                first, last = max(low, offset + what.sizes[index]), min(high, following)
                if first < last:
                    home = what.homes[index]
                    assert home is not None
                    assert slab in {ZEROS, home[0]}
                    assert slab != ZEROS or last - first < 4096
                    assert slab == ZEROS or address + first - low == home[1] + first - offset


def test_neighbours_in_the_arena_are_one_piece() -> None:
    sizes = [100, 200, 2 * MIB, 64, 5 * MIB]
    layout = lay_out(sizes)
    homes = [(7, 4096 + offset) for offset in layout.offsets]
    [part, *others] = lay_out_image(sizes, 1, 4 * MIB, homes=homes).parts
    assert part.pieces == [(7, 4096, part.high)]
    for other in others:
        [(slab, address, nbytes)] = other.pieces
        assert (slab, nbytes) == (7, other.nbytes)
        assert address <= 4096 + other.low < address + 64


def test_padding_between_strangers_is_zeros() -> None:
    sizes = [100, LARGE_BYTES, 30]
    homes = [(0, 0), (1, 0), (0, 1 << 20)]
    [part] = lay_out_image(sizes, 1, 4 * MIB, homes=homes).parts
    assert part.pieces == [
        (0, 0, 100),
        (ZEROS, 0, 4096 - 100),
        (1, 0, LARGE_BYTES),
        (0, 1 << 20, 30),
    ]
    assert part.spans == [0, 100, 4096, LARGE_BYTES, 4096 + LARGE_BYTES, 30]


def test_padding_before_what_is_staged_is_filled() -> None:
    image = lay_out_image([10, LARGE_BYTES], 1, 4 * MIB, homes=[None, (0, 0)])
    filled, staged = image.parts
    assert (filled.low, filled.high, filled.is_staged) == (0, 4096, False)
    assert (staged.low, staged.high, staged.is_staged) == (4096, 4096 + LARGE_BYTES, True)
    # Also where the padding is all that is left of the last part before it.
    image = lay_out_image(
        [CHECKSUM_BLOCK_BYTES + 1, LARGE_BYTES], 1, CHECKSUM_BLOCK_BYTES, homes=[None, (0, 0)]
    )
    assert [part.low for part in image.parts] == [0, CHECKSUM_BLOCK_BYTES, CHECKSUM_BLOCK_BYTES + 4096]


def test_a_part_has_no_more_pieces_than_one_system_call_or_two_take() -> None:
    count = 3 * _MAX_PIECES
    homes = [(number % 2, 4096 * number) for number in range(count)]
    image = lay_out_image([65] * count, 1, 1 << 30, homes=homes)
    assert len(image.parts) > 3
    assert all(len(part.pieces) <= _MAX_PIECES + 1 for part in image.parts)
    assert sum(nbytes for part in image.parts for _, _, nbytes in part.pieces) == image.nbytes


@pytest.mark.parametrize("sizes", [[0], [0, 0, 0], [0, 5, 0], [5, 0]])
def test_nothing_has_its_place_too(sizes: list[int]) -> None:
    image = lay_out_image(sizes, 2, 4 * MIB)
    assert len(image.places()[0]) == len(sizes)
    assert all(image.parts_by_file[number] for number in range(len(image.files))), "a file without a part"
    [empty] = lay_out_image([0], 1, 4 * MIB).parts
    assert (empty.low, empty.high, empty.is_staged) == (0, 0, True)


def test_no_item_makes_no_file() -> None:
    image = lay_out_image([], 3, 4 * MIB)
    assert (image.files, image.parts, image.nbytes, image.places()) == ([], [], 0, ([], []))


@given(drawn(staged=False))
def test_files_take_turns(what: Drawn) -> None:
    image = what.lay_out()
    turns = itertools.zip_longest(*(parts_of(image, number) for number in range(len(image.files))))
    assert image.parts == [part for turn in turns for part in turn if part is not None]


def test_items_are_spread_as_planned() -> None:
    sizes = [9 * MIB, 3, 5 * MIB, 70 * KIB, 2 * MIB]
    image = lay_out_image(sizes, 2, 4 * MIB)
    assert [file.items for file in image.files] == pack(sizes, 2)


@pytest.mark.slow
@pytest.mark.parametrize("is_staged", [False, True])
def test_work_grows_with_the_items_and_not_faster(is_staged: bool) -> None:
    """Counted, not timed: how often a size or a home is looked at."""

    class Counted(list[int]):
        reads = 0

        def __getitem__(self, index: object) -> int:  # type: ignore[override]
            Counted.reads += 1
            return super().__getitem__(index)  # type: ignore[call-overload, no-any-return]

    reads = []
    for count in (2000, 8000):
        Counted.reads = 0
        homes = [(0, 4096 * number) for number in range(count)] if is_staged else ()
        image = lay_out_image(Counted([100] * count), 4, 4 * MIB, homes=homes)
        image.places()
        reads.append(Counted.reads)
    assert reads[1] <= 4 * reads[0] + 100

"""Arrays of zarr: grids that ranks find alone, names, documents, and the bytes around a chunk."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distckpt.errors import ConfigError
from distckpt.formats import Entry, format_of, open_format
from distckpt.formats.zarr import Zarr, array_path, chunk_key
from unit.tensors import payload_of

Box = tuple[tuple[int, ...], tuple[int, ...]]

HELD = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
]  # fmt: skip
PUT_ASIDE = [
    torch.complex32, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.qint8, torch.quint8, torch.qint32,
    torch.quint4x2, torch.quint2x4, torch.bits8, torch.bits16,
]  # fmt: skip
FORMAT = Zarr()
keys = st.one_of(
    st.integers(-1, 12),
    st.text(max_size=4),
    st.sampled_from(
        ["", "%", "/", "c", "c.0", "c.x", "cc", "zarr.json", ".", "..", "__a", "_a", "%63", "%2E"]
    ),
)


def documents_of(tensors: dict[tuple[str | int, ...], torch.Tensor], file_format: Zarr) -> dict[str, Any]:
    """Return the documents, by file, of tensors that lie in one box each."""
    arrays, files = {}, dict[str, bytes]()
    for path, tensor in tensors.items():
        shape, fqn = tuple(tensor.shape), ".".join(map(str, path))
        grid = file_format.grid(shape, [((0,) * len(shape), shape)], tensor.dtype.itemsize)
        arrays[fqn] = [list(path), list(shape), str(tensor.dtype).removeprefix("torch."), list(grid)]
        if tensor.numel():
            files |= file_format.companions(
                [Entry(fqn, tensor.dtype, shape, (0,) * len(shape), path, shape, grid)]
            )
    files |= file_format.documents({}, arrays, files)
    return {file: json.loads(data) for file, data in files.items()}


def boxes_along(shape: tuple[int, ...], dim: int, step: int) -> list[Box]:
    """Return what ranks have of a tensor that is split along `dim`, `step` elements each."""
    boxes = []
    for start in range(0, shape[dim], step):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = start, min(step, shape[dim] - start)
        boxes.append((tuple(offsets), tuple(sizes)))
    return boxes


@st.composite
def splits(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """Draw a shape, a dimension of it and how much of that each rank has; the last may have less."""
    shape = draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    return tuple(shape), dim, -(-shape[dim] // draw(st.integers(1, 8)))


@given(splits(), st.sampled_from([1, 4, 1 << 22]), st.randoms(use_true_random=False))
def test_the_grid_does_not_depend_on_the_order_of_ranks(
    split: tuple[tuple[int, ...], int, int], itemsize: int, random: Any
) -> None:
    shape, dim, step = split
    boxes = boxes_along(shape, dim, step)
    grid = FORMAT.grid(shape, boxes, itemsize)
    random.shuffle(boxes)
    assert FORMAT.grid(shape, boxes, itemsize) == grid


@given(splits())
def test_chunks_are_as_large_as_what_ranks_have(split: tuple[tuple[int, ...], int, int]) -> None:
    shape, dim, step = split
    grid = FORMAT.grid(shape, boxes_along(shape, dim, step), 1)
    # Padding within a chunk would tear its payload apart; behind the last rows it does not.
    step = step if dim == 0 or step == shape[dim] else math.gcd(step, shape[dim])
    assert grid == (*shape[:dim], step, *shape[dim + 1 :])


def even_grids(shape: tuple[int, ...], dim: int, parts: int) -> set[tuple[int, ...]]:
    """Return the grids that ranks find of which each knows its own box, all of the same size."""
    boxes = boxes_along(shape, dim, shape[dim] // parts)
    return {FORMAT.grid(shape, [own], 4) for own in boxes}


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_ranks_that_know_only_their_own_columns_find_one_grid(parts: int) -> None:
    assert even_grids((7, 24), 1, parts) == {(7, 24 // parts)}


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_ranks_that_know_only_their_own_rows_find_one_grid(parts: int) -> None:
    assert even_grids((24, 7), 0, parts) == {(24 // parts, 7)}


@given(splits(), st.sampled_from(HELD), st.booleans())
def test_every_chunk_is_a_file_of_its_own_and_of_one_size(
    split: tuple[tuple[int, ...], int, int], dtype: torch.dtype, checksums: bool
) -> None:
    shape, dim, step = split
    file_format = Zarr(checksums=checksums)
    grid = file_format.grid(shape, boxes_along(shape, dim, step), dtype.itemsize)
    size = math.prod(grid) * dtype.itemsize + 4 * checksums
    names = set()
    num_elements = 0
    for corner in itertools.product(*(range(0, n, each) for n, each in zip(shape, grid, strict=True))):
        own = tuple(min(each, n - at) for at, n, each in zip(corner, shape, grid, strict=True))
        entry = Entry("w", dtype, own, corner, ("m", "w"), shape, grid)
        prefix, suffix = file_format.frame_chunk(entry)
        assert not prefix
        assert not any(suffix)
        nbytes = math.prod(own) * dtype.itemsize + len(suffix)
        layout = file_format.lay_out([nbytes], [entry])
        assert (layout.offsets, layout.nbytes, layout.is_sealed) == ([0], size, checksums)
        assert format_of(layout.name).name == "zarr"
        names.add(layout.name)
        num_elements += math.prod(own)
    assert num_elements == math.prod(shape)
    assert names == {
        "m/w/" + chunk_key(index)
        for index in itertools.product(*(range(-(-n // each)) for n, each in zip(shape, grid, strict=True)))
    }


def test_names_of_chunks() -> None:
    assert (chunk_key(()), chunk_key((0,)), chunk_key((10, 0, 2))) == ("c", "c.0", "c.10.0.2")


@given(st.lists(st.lists(keys, min_size=1, max_size=3).map(tuple), min_size=2, max_size=6))
def test_different_entries_have_different_names(paths: list[tuple[str | int, ...]]) -> None:
    # 0 and "0" are one name; torch refuses a state that has both.
    entries = {tuple(map(str, path)) for path in paths}
    names = {array_path(path) for path in paths}
    assert len(names) == len(entries)
    for name in names:
        assert all(format_of(part).name != "zarr" for part in name.split("/")), "it looks like a chunk"


@pytest.mark.parametrize("length", [255, 256])
def test_names_of_255_bytes_are_the_longest(length: int) -> None:
    if length == 255:
        assert array_path(["m", "x" * length]) == "m/" + "x" * length
    else:
        with pytest.raises(ConfigError, match="too long for the name of a file"):
            array_path(["m", "x" * length])
    # It is bytes of the encoded name that count: three for each of a letter's.
    with pytest.raises(ConfigError, match="too long for the name of a file"):
        array_path(["m", "é" * 43])


@pytest.mark.parametrize("dtype", HELD, ids=str)
def test_documents_of_every_dtype(dtype: torch.dtype) -> None:
    assert FORMAT.holds(dtype)
    array = documents_of({("w",): torch.empty(2, 3, dtype=dtype)}, FORMAT)["w/zarr.json"]
    assert getattr(torch, array["data_type"]) is dtype
    fill_value = array["fill_value"]
    if dtype is torch.bool:
        assert fill_value is False
    elif dtype.is_complex:
        assert fill_value == [0.0, 0.0]
    else:
        assert fill_value == 0
        assert isinstance(fill_value, float if dtype.is_floating_point else int)
    first, last = array["codecs"]
    # What has one byte has no order of bytes: zarr-python takes either, the specification wants none.
    assert first == (
        {"name": "bytes"} if dtype.itemsize == 1 else {"name": "bytes", "configuration": {"endian": "little"}}
    )
    assert last == {"name": "crc32c"}
    assert (array["zarr_format"], array["node_type"]) == (3, "array")


@pytest.mark.parametrize("dtype", PUT_ASIDE, ids=str)
def test_dtypes_that_zarr_has_not(dtype: torch.dtype) -> None:
    assert not FORMAT.holds(dtype)


def test_without_checksums_there_is_no_codec_for_them() -> None:
    file_format = open_format("zarr", checksums=False)
    assert isinstance(file_format, Zarr)
    array = documents_of({("w",): torch.empty(2)}, file_format)["w/zarr.json"]
    assert [codec["name"] for codec in array["codecs"]] == ["bytes"]


@given(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=5))
def test_a_name_of_a_dimension_stands_for_one_size_and_once_in_an_array(shapes: list[list[int]]) -> None:
    """Else xarray opens no group of them, or warns."""
    tensors: dict[tuple[str | int, ...], torch.Tensor] = {
        ("m", number): torch.empty(shape) for number, shape in enumerate(shapes)
    }
    documents = documents_of(tensors, FORMAT)
    sizes: dict[str, int] = {}
    for number, shape in enumerate(shapes):
        names = documents[f"m/{number}/zarr.json"]["dimension_names"]
        assert len(set(names)) == len(names) == len(shape)
        for name, size in zip(names, shape, strict=True):
            assert sizes.setdefault(name, size) == size


@given(st.sets(st.lists(st.sampled_from("abd"), min_size=3, max_size=3).map(tuple), min_size=1))
def test_every_folder_is_a_group_and_the_root_knows_them_all(paths: set[tuple[str, ...]]) -> None:
    documents = documents_of({path: torch.empty(2) for path in sorted(paths)}, FORMAT)
    arrays = {"/".join(path) for path in paths}
    groups = {"/".join(path[:depth]) for path in paths for depth in (1, 2)}
    assert set(documents) == {"zarr.json", *(f"{node}/zarr.json" for node in arrays | groups)}
    told = documents["zarr.json"]["consolidated_metadata"]["metadata"]
    assert {node for node, one in told.items() if one["node_type"] == "array"} == arrays
    assert {node for node, one in told.items() if one["node_type"] == "group"} == groups
    for node in arrays:
        assert told[node] == documents[f"{node}/zarr.json"]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", HELD, ids=str)
def test_what_is_decoded_is_the_payload_before_padding_and_checksum(dtype: torch.dtype, shift: int) -> None:
    high = 2 if dtype is torch.bool else 256
    tensor = torch.randint(0, high, (6 * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(2, 3)
    entry = Entry("w", dtype, (2, 3), (4, 0), ("w",), (6, 3), (4, 3))
    data = bytearray(shift) + payload_of(tensor) + FORMAT.frame_chunk(entry).suffix
    found = FORMAT.decode(memoryview(data)[shift:], dtype, (2, 3))
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert payload_of(found) == payload_of(tensor)
    if shift == 0:
        data[0] ^= 1
        assert payload_of(found) != payload_of(tensor), "it views the memory"

"""The bytes around a payload: what torch.save would have written."""

from __future__ import annotations

import io
import math
import zipfile
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distckpt.formats import (
    LARGE_ALIGNMENT,
    LARGE_BYTES,
    SMALL_ALIGNMENT,
    contiguous_strides,
    lay_out,
    open_format,
)
from distckpt.formats.torch_dist import TorchDist

DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32,
    torch.complex64, torch.complex128,
]  # fmt: skip

FORMAT = TorchDist()


def payload_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.untyped_storage()[: tensor.numel() * tensor.element_size()])


def framed(tensor: torch.Tensor) -> bytes:
    prefix, suffix = FORMAT.frame(tensor.dtype, tensor.shape, tensor.stride())
    return prefix + payload_of(tensor) + suffix


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    # Bools are bytes of 0 or 1 only.
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, shape, contiguous_strides(shape))


def assert_same(loaded: Any, tensor: torch.Tensor) -> None:
    assert isinstance(loaded, torch.Tensor)
    assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
    assert payload_of(loaded.contiguous()) == payload_of(tensor.contiguous())


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 3)], ids=str)
def test_torch_loads_what_is_framed(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(dtype, shape)
    data = framed(tensor)
    assert_same(torch.load(io.BytesIO(data), weights_only=True), tensor)
    assert_same(FORMAT.decode(bytearray(data), dtype, shape), tensor)


@pytest.mark.parametrize("before", [0, 1, 8, 63])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.complex128], ids=str)
def test_what_begins_at_any_byte_is_aligned(dtype: torch.dtype, before: int) -> None:
    tensor = random_tensor(dtype, (257,))
    view = memoryview(bytearray(before) + framed(tensor))[before:]
    found = FORMAT.decode(view, dtype, (257,))
    assert found.data_ptr() % dtype.itemsize == 0
    assert_same(found.clone(), tensor)


@pytest.mark.parametrize("numel", [0, 1 << 16, (1 << 16) + 1])
def test_an_item_is_as_long_as_what_torch_saves(numel: int) -> None:
    tensor = random_tensor(torch.uint8, (numel,))
    saved = io.BytesIO()
    torch.save(tensor, saved)
    assert len(framed(tensor)) == len(saved.getvalue())


@pytest.mark.parametrize("numel", [1, 64, (1 << 14) - 1])
def test_a_small_item_has_the_records_that_torch_load_needs_and_no_others(numel: int) -> None:
    tensor = random_tensor(torch.float32, (numel,))
    saved = io.BytesIO()
    torch.save(tensor, saved)
    data = framed(tensor)
    assert len(data) - tensor.nbytes <= 720
    with zipfile.ZipFile(saved) as theirs, zipfile.ZipFile(io.BytesIO(data)) as ours:
        assert ours.namelist() == [
            f"archive/{name}" for name in ("version", "byteorder", "data.pkl", "data/0")
        ]
        for name in ours.namelist()[:3]:
            assert ours.read(name) == theirs.read(name)
        assert ours.getinfo("archive/data/0").file_size == tensor.nbytes


@pytest.mark.parametrize("dims", [(1, 0), (2, 0, 1), (0, 2, 1)], ids=str)
def test_torch_loads_what_is_dense_in_another_order(dims: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(range(2, 2 + len(dims)))).reshape(*range(2, 2 + len(dims))).permute(dims)
    data = framed(tensor)
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert torch.equal(loaded, tensor)
    assert loaded.stride() == tensor.stride()
    assert torch.equal(FORMAT.decode(bytearray(data), tensor.dtype, tensor.shape), tensor)


@given(st.integers(0, 3000))
def test_payloads_begin_on_64_bytes(count: int) -> None:
    prefix, _ = FORMAT.frame(torch.float32, (count,), (1,))
    assert len(prefix) % 64 == 0 or count == 0


def test_a_frame_costs_no_memory_for_its_payload() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    prefix, suffix = FORMAT.frame(torch.float32, (1 << 29,), (1,))
    assert process.memory_info().rss - before < 16 << 20
    assert len(prefix) + len(suffix) < 4096


def test_what_is_framed_as_expected_is_viewed_and_not_copied() -> None:
    data = bytearray(framed(torch.arange(1000)))
    decoded = FORMAT.decode(data, torch.int64, (1000,))
    data[len(FORMAT.frame(torch.int64, (1000,), (1,)).prefix)] = 7
    assert decoded[0] == 7


def test_what_another_torch_wrote_is_loaded() -> None:
    tensor = torch.arange(10)
    buffer = io.BytesIO()
    torch.save(tensor, buffer, _use_new_zipfile_serialization=False)
    assert_same(FORMAT.decode(bytearray(buffer.getvalue()), tensor.dtype, tensor.shape), tensor)


@given(st.lists(st.one_of(st.integers(0, 5000), st.integers(LARGE_BYTES - 9, LARGE_BYTES + 9)), max_size=50))
def test_items_of_a_file_are_aligned_and_do_not_overlap(sizes: list[int]) -> None:
    layout = lay_out(sizes)
    end = 0
    for size, offset in zip(sizes, layout.offsets, strict=True):
        alignment = LARGE_ALIGNMENT if size >= LARGE_BYTES else SMALL_ALIGNMENT
        assert offset % alignment == 0
        assert end <= offset < end + alignment
        end = offset + size
    assert layout.nbytes == end


@given(st.lists(st.integers(0, 4), max_size=4))
def test_contiguous_strides_are_those_of_torch(shape: list[int]) -> None:
    assert contiguous_strides(shape) == torch.empty(shape).stride()


def test_formats_are_opened_by_name() -> None:
    assert isinstance(open_format("torch_dist"), TorchDist)
    with pytest.raises(ValueError, match="no format 'hdf5': use one of torch_dist, safetensors, zarr"):
        open_format("hdf5")

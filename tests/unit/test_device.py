"""What concerns devices and needs none: bytes of tensors of any layout, no call of CUDA without reason."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from distckpt.arena import PAGE_BYTES, Slab
from distckpt.device import (
    DIGEST_WORDS,
    GATHERED_BYTES,
    Devices,
    Transfer,
    contiguous_span,
    flat_bytes,
    has_digest,
    host_view,
    take_digest,
)
from distckpt.staging import is_verbatim
from unit.tensors import memory_of, payload_of, tensors


@given(tensors(), st.data())
def test_any_span_of_any_tensor(tensor: torch.Tensor, data: st.DataObject) -> None:
    payload = payload_of(tensor)
    assume(payload)
    low = data.draw(st.integers(0, len(payload) - 1))
    high = data.draw(st.integers(low + 1, len(payload)))
    span = contiguous_span(tensor, low, high)
    assert (span.dtype, span.dim()) == (torch.uint8, 1)
    assert bytes(span.tolist()) == payload[low:high]


def digest(tensor: torch.Tensor) -> list[int]:
    sums = torch.full((DIGEST_WORDS,), 77)
    take_digest(tensor, sums)
    return sums.tolist()


@given(st.integers(0, 2000), st.data())
def test_a_digest_tells_of_any_change_of_a_byte(more: int, data: st.DataObject) -> None:
    tensor = torch.randn(GATHERED_BYTES // 8 + 3 + more, dtype=torch.float64)
    tensor = tensor[data.draw(st.integers(0, 3)) :]
    before = digest(tensor)
    assert before == digest(tensor.clone())
    flat = flat_bytes(tensor)
    place = data.draw(st.integers(0, flat.numel() - 1))
    flat[place] ^= data.draw(st.integers(1, 255))
    assert before != digest(tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.float32, torch.bfloat16])
def test_changes_that_are_the_same_everywhere_do_not_cancel_out(dtype: torch.dtype) -> None:
    """Sums over even numbers of them would: a sign is 2**63."""
    for count in (1 << 17, 3 << 16, (1 << 17) - 4096):
        ones = torch.ones(count, dtype=dtype)
        tensor = ones.copysign(torch.randn(count)) if dtype is torch.float32 else ones
        digests = [digest(changed) for changed in (tensor, -tensor, 2 * tensor, tensor / 2, 0 * tensor)]
        assert len(set(map(tuple, digests))) == len(digests), count


def test_what_has_no_digest() -> None:
    """Not of whole words, not aligned, or too small: none that could end in an error of the device."""
    large = torch.zeros(GATHERED_BYTES + 64, dtype=torch.uint8)
    assert has_digest(large)
    assert has_digest(large[8:])
    assert not has_digest(large[4:])
    assert not has_digest(large[:-4])
    assert not has_digest(large[: GATHERED_BYTES - 8])
    # What comes from elsewhere has no offset that says how it lies.
    foreign = torch.frombuffer(
        bytearray(GATHERED_BYTES + 64), dtype=torch.uint8, offset=4, count=GATHERED_BYTES
    )
    assert foreign.data_ptr() % 8 == 0 or not has_digest(foreign)


@given(tensors())
def test_the_memory_of_any_dense_tensor(tensor: torch.Tensor) -> None:
    assume(is_verbatim(tensor))
    flat = flat_bytes(tensor)
    assert (flat.dtype, flat.dim()) == (torch.uint8, 1)
    assert bytes(flat.tolist()) == (memory_of(tensor) if tensor.numel() else b"")
    assert not tensor.numel() or flat.data_ptr() == tensor.data_ptr(), "a view, not a copy"


def test_the_span_of_a_large_tensor_copies_about_that_much() -> None:
    rows = torch.empty(1 << 12, 2, 1 << 10, dtype=torch.int32).permute(0, 2, 1)
    rows[777] = torch.arange(1 << 11).reshape(1 << 10, 2)
    row_bytes = 4 << 11
    span = contiguous_span(rows, 777 * row_bytes + 5, 777 * row_bytes + 105)
    assert bytes(span.tolist()) == payload_of(rows[777])[5:105]
    assert span.untyped_storage().nbytes() < 1 << 10
    two = contiguous_span(rows, 777 * row_bytes + 5, 778 * row_bytes)
    assert bytes(two.tolist()) == payload_of(rows[777])[5:]
    assert two.untyped_storage().nbytes() <= row_bytes


def test_a_view_of_host_memory_shares_it() -> None:
    memory = ctypes.create_string_buffer(b"0123456789")
    view = host_view(ctypes.addressof(memory) + 2, 4)
    assert bytes(view.tolist()) == b"2345"
    view.fill_(ord("x"))
    assert memory.value == b"01xxxx6789"


@pytest.mark.slow
def test_nothing_of_cuda_is_touched_without_a_cuda_tensor(tmp_path: Path) -> None:
    code = """
import torch
from distckpt.config import CheckpointConfig
from distckpt.engine import Engine
from distckpt.storage import open_storage
def refuse(*args, **kwargs):
    raise AssertionError("CUDA was called")
for name in ("_lazy_init", "current_stream", "stream", "Stream", "cudart", "is_current_stream_capturing"):
    setattr(torch.cuda, name, refuse)
engine = Engine.open(CheckpointConfig(ckpt_host_memory="64MiB"))
state = {"a": torch.ones(9), "b": torch.ones(1 << 20)}
items = [engine.item(tensor) for tensor in state.values()]
residence = engine.reside(open_storage("checkpoint"), items)
for number in range(2):
    residence.stage(items)
    engine.write_staged(open_storage("checkpoint"), f"0{number}", 0, residence)
engine.write(open_storage("checkpoint"), "02", 0, items)
engine.stage(state)[1].wait(1)
engine.drop(residence)
engine.close()
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 0, done.stderr


def test_a_transfer_of_nothing_is_over_at_once() -> None:
    transfer = Transfer(Devices())
    assert transfer.is_empty
    for number in range(1, 4):
        transfer.launch([], caller_waits=True)
        assert transfer.tag == number
        assert transfer.settle()
    assert not transfer.is_captured
    transfer.order_after()
    transfer.check()
    transfer.begin()
    words = (ctypes.c_int64 * 3)(0, 0, 0)
    transfer.add_words(ctypes.addressof(words), 3)
    transfer.run([])
    assert transfer.settle(), "whatever was begun is ended first"
    assert list(words) == [0, 0, 0], "where nothing is on a device, who added the words knows"
    transfer.forget()


def test_no_slab_is_pinned_before_a_device_is_in_use() -> None:
    slab = Slab(0, PAGE_BYTES)
    devices = Devices()
    devices.pin(slab)
    assert slab.on_release == []
    assert not devices.refuses_to_pin
    devices.close()

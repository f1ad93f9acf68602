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
from distckpt.device import Devices, Transfer, contiguous_span, flat_bytes, host_view
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
        assert transfer.settle(0.0)
    assert not transfer.is_captured
    transfer.order_after()
    transfer.check()
    transfer.begin()
    words = (ctypes.c_int64 * 3)(0, 0, 0)
    transfer.add_words(ctypes.addressof(words), 3)
    transfer.run([])
    assert transfer.settle(0.0), "whatever was begun is ended first"
    assert list(words) == [0, 0, 0], "where nothing is on a device, who added the words knows"
    transfer.forget()


def test_no_slab_is_pinned_before_a_device_is_in_use() -> None:
    slab = Slab(0, PAGE_BYTES)
    devices = Devices()
    devices.pin(slab)
    assert slab.on_release == []
    assert not devices.refuses_to_pin
    devices.close()

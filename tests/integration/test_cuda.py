"""CUDA tensors: round trips, isolation from what the trainer does next, and memory that is given back."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from distckpt import CheckpointConfig, StagingError, StorageReader, StorageWriter
from distckpt.engine import Engine, Written
from distckpt.lanes import WorkerLanes
from distckpt.staging import Item
from distckpt.storage import Storage, open_storage
from slow_writes import hold_first_write

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

State = dict[str, Any]
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
READERS: list[Callable[[Path], Any]] = [FileSystemReader, StorageReader]
_MIB, _GIB = 1 << 20, 1 << 30


def some(dtype: torch.dtype, *shape: int, device: str = "cuda") -> torch.Tensor:
    if dtype.is_complex or dtype in (torch.float32, torch.float64):
        return torch.randn(shape, dtype=dtype, device=device)
    if dtype.is_floating_point:
        return torch.randn(shape, device=device).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, device=device).to(dtype)


def every_kind() -> State:
    """Return CUDA tensors of all dtypes and strides, from nothing to more than a part of a file."""
    square = some(torch.float32, 3000, 3100)
    state: State = {f"dtype.{dtype}": some(dtype, 33, 65) for dtype in DTYPES}
    state |= {f"scalar.{dtype}": some(dtype) for dtype in DTYPES}
    state |= {
        "empty": some(torch.float32, 0, 3),
        "transposed": some(torch.float32, 65, 33).t(),
        "transposed.large": square.t(),
        "rows": square[100:2900],
        "columns": square[:, 7:2907],
        "steps": square[::3, ::2],
        "offset": some(torch.int8, 1001)[1:],
        "expanded": some(torch.float32, 1, 64).expand(128, 64),
        "channels_last": some(torch.float16, 8, 16, 31, 29).to(memory_format=torch.channels_last),
        "permuted": some(torch.bfloat16, 5, 6, 7, 8).permute(2, 0, 3, 1),
        "conj": some(torch.complex64, 129, 257).conj(),
        "conj.large": some(torch.complex64, 1500, 2000).t().conj(),
        "neg": torch._neg_view(some(torch.float32, 64, 64)),
        "imag": some(torch.complex64, 77, 3).conj().imag,
        "parameter": torch.nn.Parameter(some(torch.float32, 64, 64)),
        "large": some(torch.float32, 40, _MIB // 4),
        "large.odd": some(torch.uint8, 33 * _MIB + 13),
    }
    return state


def values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of `tensor`, in contiguous order, on the CPU."""
    # `contiguous()` leaves any stride to a single element; a copy does not.
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8)


def copied(state: State) -> State:
    return {
        name: values(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()
    }


def check(path: Path, state: State, expected: State, *, thorough: bool = True) -> None:
    """Read `path` and compare with `expected`, from `copied`.

    Thorough: with both readers, to the CPU and to where `state` is; else with torch's reader, to the CPU.
    """
    for reader in READERS if thorough else READERS[:1]:
        for device in ("cpu", None) if thorough else ("cpu",):
            loaded = {
                name: torch.zeros(value.shape, dtype=value.dtype, device=device or value.device)
                if isinstance(value, torch.Tensor)
                else None
                for name, value in state.items()
            }
            state_dict_loader.load(loaded, storage_reader=reader(path), no_dist=True)
            for name, value in copied(loaded).items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(value, expected[name]), (name, reader, device)
                else:
                    assert value == expected[name], (name, reader, device)


def async_save(state: State, path: Path, writer: StorageWriter) -> AsyncSaveResponse:
    response = state_dict_saver.async_save(state, checkpoint_id=path, storage_writer=writer, no_dist=True)
    assert isinstance(response, AsyncSaveResponse)
    return response


def save(state: State, path: Path, writer: StorageWriter) -> None:
    state_dict_saver.save(state, checkpoint_id=path, storage_writer=writer, no_dist=True)


@contextmanager
def stopped(writer: StorageWriter) -> Iterator[None]:
    """Stop the workers of `writer`, which have been started by an earlier save."""
    engine = writer._engine
    assert engine is not None
    assert isinstance(engine.lanes, WorkerLanes)
    pids = engine.lanes.pids
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("is_async", [False, True], ids=["save", "async_save"])
def test_round_trip(tmp_path: Path, workers: int, is_async: bool) -> None:
    state = every_kind()
    expected = copied(state)
    with StorageWriter(dist_ckpt_workers=workers) as writer:
        for turn in range(2):
            path = tmp_path / str(turn)
            if is_async:
                async_save(state, path, writer).upload_completion.result(60)
            else:
                save(state, path, writer)
            check(path, state, expected, thorough=turn == 1)


@pytest.mark.parametrize("is_async", [False, True], ids=["save", "async_save"])
def test_waves_through_a_small_arena(tmp_path: Path, is_async: bool) -> None:
    state = {f"layer.{index}": some(torch.float32, 9, _MIB // 4) for index in range(8)}
    expected = copied(state)
    with StorageWriter(dist_ckpt_workers=2, ckpt_host_memory=(96 if is_async else 24) * _MIB) as writer:
        if is_async:
            for turn in range(3):
                async_save(state, tmp_path / str(turn), writer).upload_completion.result(60)
        else:
            save(state, tmp_path / "2", writer)
    check(tmp_path / "2", state, expected, thorough=False)


def test_copies_go_on_beside_a_slow_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_first_write(monkeypatch, until_bytes=60 * _MIB)
    state = {f"layer.{index}": some(torch.float32, 3, _MIB // 4) for index in range(40)}
    expected = copied(state)
    with StorageWriter(ckpt_host_memory=24 * _MIB) as writer:
        save(state, tmp_path / "1", writer)
    check(tmp_path / "1", state, expected)


@pytest.mark.parametrize("is_async", [False, True], ids=["save", "async_save"])
def test_mixed_with_host_tensors_and_objects(tmp_path: Path, is_async: bool) -> None:
    state: State = {
        "cuda": some(torch.float32, 300, 200),
        "cuda.scalar": some(torch.int64),
        "host": some(torch.float32, 300, 200, device="cpu"),
        "host.pinned": some(torch.float32, 300, 200, device="cpu").pin_memory(),
        "host.large": some(torch.float32, 40, _MIB // 4, device="cpu"),
        "step": 12,
        "name": "run",
        "schedule": [0.1, 0.2],
    }
    expected = copied(state)
    with StorageWriter(dist_ckpt_workers=2) as writer:
        if is_async:
            response = async_save(state, tmp_path, writer)
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
            state["schedule"].clear()
            response.upload_completion.result(60)
            expected["schedule"] = [0.1, 0.2]
        else:
            save(state, tmp_path, writer)
    check(tmp_path, state, expected)


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "stream of its own"])
@pytest.mark.parametrize("workers", [1, 2])
def test_what_the_trainer_does_next_does_not_show(tmp_path: Path, workers: int, side: bool) -> None:
    # 256 MiB: the copy takes far longer than the launch of the first update.
    state = {f"layer.{index}": some(torch.float32, 8, _MIB // 4) for index in range(32)}
    state |= {
        "transposed": some(torch.float32, 3000, 3100).t(),
        "conj": some(torch.complex64, 999, 999).conj(),
    }
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with StorageWriter(dist_ckpt_workers=workers) as writer, torch.cuda.stream(stream):
        for turn in range(2):
            # Given to the stream just before the save, which has to wait for it.
            for value in state.values():
                value.mul_(1.5)
            early = [value.clone() for value in state.values()]
            response = async_save(state, tmp_path / str(turn), writer)
            for _ in range(50):
                for value in state.values():
                    value.add_(1)
            expected = {name: values(value) for name, value in zip(state, early, strict=True)}
            del early
            response.upload_completion.result(60)
            check(tmp_path / str(turn), state, expected, thorough=False)
    torch.cuda.current_stream().wait_stream(stream)


def test_memory_that_the_trainer_frees_and_takes_again_does_not_show(tmp_path: Path) -> None:
    state = {f"layer.{index}": some(torch.float32, 8, _MIB // 4) for index in range(32)}
    shapes = {name: torch.empty(value.shape, device="meta") for name, value in state.items()}
    expected = copied(state)
    with StorageWriter() as writer:
        response = async_save(state, tmp_path, writer)
        state.clear()
        junk = [torch.full((8, _MIB // 4), 7.0, device="cuda") for _ in range(32)]
        response.upload_completion.result(60)
        del junk
    targets = {name: torch.empty(value.shape) for name, value in shapes.items()}
    check(tmp_path, targets, expected, thorough=False)


def test_device_memory_is_free_while_the_write_runs(tmp_path: Path) -> None:
    with StorageWriter(dist_ckpt_workers=2) as writer:
        # Starts the workers, and makes torch allocate what it keeps.
        save({"first": torch.ones(4, device="cuda")}, tmp_path / "0", writer)
        async_save({"first": torch.ones(4, device="cuda")}, tmp_path / "1", writer).upload_completion.result(
            60
        )
        gc.collect()
        baseline = torch.cuda.memory_allocated()
        model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
        expected = copied(model.state_dict())
        targets = {name: torch.empty(value.shape) for name, value in model.state_dict().items()}
        assert torch.cuda.memory_allocated() > baseline + 30 * _MIB
        with stopped(writer):
            response = async_save(model.state_dict(), tmp_path / "2", writer)
            response.staging_completion.result(30)
            del model
            # Not collected by hand: the engine must let go by itself, and at once.
            assert torch.cuda.memory_allocated() == baseline
            time.sleep(0.3)
            assert not response.upload_completion.done()
            assert torch.cuda.memory_allocated() == baseline
        response.upload_completion.result(60)
        assert torch.cuda.memory_allocated() == baseline
    check(tmp_path / "2", targets, expected)


def test_the_device_memory_of_a_save_is_bounded(tmp_path: Path) -> None:
    state = {f"layer.{index}": some(torch.float32, 8, _MIB // 4) for index in range(32)}
    with StorageWriter() as writer:
        save(state, tmp_path / "0", writer)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        save(state, tmp_path / "1", writer)
        async_save(state, tmp_path / "2", writer).upload_completion.result(60)
        assert torch.cuda.max_memory_allocated() - before < 4 * _MIB
        assert torch.cuda.memory_allocated() == before


def test_host_memory_is_pinned(tmp_path: Path) -> None:
    state = {"small": some(torch.float32, 3), "large": some(torch.float32, 40, _MIB // 4)}
    with StorageWriter() as writer:
        staged = writer.stage(state).result(30)
        assert all(tensor.device.type == "cpu" for tensor in staged.values())
        assert all(tensor.is_pinned() for tensor in staged.values())
        for name, tensor in staged.items():
            assert torch.equal(tensor, state[name].cpu())
        del staged, tensor
        save(state, tmp_path, writer)


def test_stage_does_not_wait_for_the_device() -> None:
    state = {f"layer.{index}": some(torch.float32, 8, _MIB // 4) for index in range(64)}
    with StorageWriter() as writer:
        writer.stage(state).result(30).clear()
        torch.cuda.synchronize()
        # Keeps the current stream busy for a second or more; the copies are ordered after it.
        torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
        started = time.monotonic()
        future = writer.stage(state)
        seconds = time.monotonic() - started
        assert not future.done()
        assert seconds < 0.3
        future.result(30)


_EXPANDABLE = """
import sys, torch
from pathlib import Path
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from distckpt import StorageWriter

path = Path(sys.argv[1])
state = {f"layer.{i}": torch.randn(8, 1 << 18, device="cuda") for i in range(16)}
state["small"] = torch.arange(7, device="cuda")
assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
expected = {name: value.cpu() for name, value in state.items()}
with StorageWriter(dist_ckpt_workers=2) as writer:
    save(state, checkpoint_id=path / "0", storage_writer=writer, no_dist=True)
    response = async_save(state, checkpoint_id=path / "1", storage_writer=writer, no_dist=True)
    for value in state.values():
        value.add_(1)
    response.upload_completion.result(60)
for turn in "01":
    loaded = {name: torch.zeros_like(value) for name, value in expected.items()}
    load(loaded, checkpoint_id=path / turn, no_dist=True)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected), turn
"""


def test_expandable_segments(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _EXPANDABLE, str(tmp_path)],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def opened(workers: int = 1) -> Engine:
    return Engine.open(CheckpointConfig(dist_ckpt_workers=workers, ckpt_host_memory=_GIB))


def items_of(engine: Engine, tensors: list[torch.Tensor]) -> list[Item]:
    return [engine.item(tensor) for tensor in tensors]


def overwrite(tensors: list[torch.Tensor], value: int) -> None:
    """Change what can be changed in place, as the next step does."""
    for tensor in tensors:
        if 0 not in tensor.stride():
            tensor.detach().fill_(value)


def assert_holds(storage: Storage, written: Written, expected: list[torch.Tensor]) -> None:
    """Assert that the files hold tensors of these bits, from `values`."""
    files, offsets = written.image.places()
    for number, (file, offset) in enumerate(zip(files, offsets, strict=True)):
        data = storage.read(written.names[file], offset, written.image.sizes[number])
        assert data is not None
        found = torch.load(io.BytesIO(data), weights_only=True)
        assert torch.equal(values(found), expected[number]), number


@pytest.mark.parametrize("workers", [1, 2])
def test_a_residence_replays_what_it_stages(tmp_path: Path, workers: int) -> None:
    tensors = [tensor for tensor in every_kind().values() if isinstance(tensor, torch.Tensor)]
    # One element of any stride, and something of the host in between.
    tensors += [some(torch.float32, 1, 7)[:, 3], some(torch.float32, 300, 200, device="cpu")]
    engine, storage = opened(workers), open_storage(tmp_path / "a")
    residence = engine.reside(storage, items_of(engine, tensors))
    assert residence is not None
    captured = []
    for turn in range(4):
        expected = [values(tensor) for tensor in tensors]
        residence.stage(items_of(engine, tensors))
        captured.append(residence.can_restage)
        overwrite(tensors, turn % 2)
        written = engine.write_staged(storage, f"0{turn}", 0, residence)
        assert_holds(storage, written, expected)
    assert captured == [False, True, True, True]
    engine.drop(residence)
    engine.close()


def test_late_copies_are_waited_for_where_they_are_told_to(tmp_path: Path) -> None:
    tensors = [some(torch.float32, 8, _MIB // 4) for _ in range(16)]
    late = list(range(4, 16))
    engine, storage = opened(), open_storage(tmp_path / "a")
    residence = engine.reside(storage, items_of(engine, tensors), late)
    assert residence is not None
    for turn in range(3):
        expected = [values(tensor) for tensor in tensors]
        residence.stage(items_of(engine, tensors))
        overwrite(tensors[:4], turn)
        residence.order_after()
        overwrite(tensors[4:], turn)
        assert_holds(storage, engine.write_staged(storage, f"0{turn}", 0, residence), expected)
    engine.drop(residence)
    engine.close()


def test_late_tensors_without_a_byte_hold_nothing_up(tmp_path: Path) -> None:
    tensors = [some(torch.float32, 1000), some(torch.float32, 0, 3)]
    engine, storage = opened(), open_storage(tmp_path / "a")
    residence = engine.reside(storage, items_of(engine, tensors), [1])
    assert residence is not None
    for turn in range(3):
        expected = [values(tensor) for tensor in tensors]
        residence.stage(items_of(engine, tensors))
        assert_holds(storage, engine.write_staged(storage, f"0{turn}", 0, residence), expected)
    engine.drop(residence)
    engine.close()


@pytest.mark.parametrize("staged_before", [0, 1, 2])
def test_nothing_is_staged_while_a_graph_is_captured(tmp_path: Path, staged_before: int) -> None:
    tensors = [some(torch.float32, 1000), some(torch.float32, 9, _MIB // 4)]
    engine, storage = opened(), open_storage(tmp_path / "a")
    residence = engine.reside(storage, items_of(engine, tensors))
    assert residence is not None
    for turn in range(staged_before):
        residence.stage(items_of(engine, tensors))
        engine.write_staged(storage, f"a{turn}", 0, residence)
    items = items_of(engine, tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensors[0].add_(1)
        with pytest.raises(StagingError, match="captures a CUDA graph"):
            residence.stage(items)
        with pytest.raises(StagingError, match="captures a CUDA graph"):
            engine.stage({"weight": tensors[0]})
    # Neither the capture nor the residence is the worse for it.
    graph.replay()
    assert not residence.is_lost
    for turn in range(3):
        expected = [values(tensor) for tensor in tensors]
        residence.stage(items)
        overwrite(tensors, turn)
        assert_holds(storage, engine.write_staged(storage, f"b{turn}", 0, residence), expected)
    engine.drop(residence)
    engine.close()


def test_a_residence_is_dropped_while_its_copies_run(tmp_path: Path) -> None:
    tensors = [some(torch.float32, 8, _MIB // 4) for _ in range(32)]
    engine, storage = opened(), open_storage(tmp_path / "a")
    for _ in range(3):
        residence = engine.reside(storage, items_of(engine, tensors))
        assert residence is not None
        residence.stage(items_of(engine, tensors))
        engine.drop(residence)
        taken = engine.arena.reserve(256 * _MIB, timeout_s=5)
        # Whatever is written there now stays.
        address = engine.arena.address(taken)
        ctypes.memset(address, 0x5A, taken.nbytes)
        torch.cuda.synchronize()
        assert ctypes.string_at(address, taken.nbytes).count(0x5A) == taken.nbytes
        engine.arena.release(taken)
    engine.close()

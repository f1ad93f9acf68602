"""Sources of checkpoints that others have written: torch, safetensors, zarr-python, and our own writer."""

from __future__ import annotations

import io
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from distckpt import StorageWriter
from distckpt.sources import ObjectSource, Source, TensorSource, open_source, write_torch_file

PEAK = """
import sys
from pathlib import Path
import torch
from distckpt.sources import open_source, write_torch_file

def peak():
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10

[source] = open_source(sys.argv[1]).entries
buffer = memoryview(bytearray(4 << 20))
buffer[:] = bytes(len(buffer))
Path("/proc/self/clear_refs").write_text("5")
before = peak()
if len(sys.argv) > 2:
    write_torch_file(sys.argv[2], [source])
else:
    for low in range(0, source.nbytes, len(buffer)):
        high = min(low + len(buffer), source.nbytes)
        source.read_into(low, high, buffer[: high - low])
print(source.nbytes, peak() - before)
"""


def raw(tensor: torch.Tensor) -> bytes:
    """The payload of a tensor."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def read(source: TensorSource, low: int = 0, high: int | None = None) -> bytes:
    high = source.nbytes if high is None else high
    data = bytearray(high - low)
    if high > low:
        source.read_into(low, high, memoryview(data))
    return bytes(data)


def plain_tensors() -> dict[str, torch.Tensor]:
    return {
        "w": torch.randn(64, 33),
        "scalar": torch.tensor(2.5),
        "bf16": torch.randn(7, 3).bfloat16(),
        "f8": torch.randn(9).to(torch.float8_e4m3fn),
        "u16": torch.arange(9).to(torch.uint16),
        "flags": torch.tensor([True, False]),
        "large": torch.randn(300, 500),
    }


def state() -> dict[str, Any]:
    large = torch.randn(300, 500)
    return {
        "model": {
            **plain_tensors(),
            "transposed": large.t(),
            "permuted": torch.randn(4, 5, 6).permute(2, 0, 1),
            "part": large[10:20, 3:9],
            "empty": torch.empty(0, 3),
            "c": torch.randn(5, dtype=torch.complex128),
            "trained": torch.randn(3, requires_grad=True),
        },
        "optimizer": {
            "step": 3,
            "moments": [torch.ones(2), {"m": torch.zeros(3)}],
            "groups": ["a", "b"],
        },
    }


def save(expected: dict[str, Any], folder: Path, **settings: Any) -> None:
    """Save with our own writer, which nobody holds afterwards."""
    writer = StorageWriter(folder, **settings)
    state_dict_saver.save(expected, checkpoint_id=folder, storage_writer=writer)


def check(source: Source, expected: dict[str, Any], *, with_grad: bool = True) -> None:
    """Compare what is read with a state, tensors by all their bytes and by some in between."""
    flat, paths = flatten_state_dict(expected)
    assert {entry.fqn for entry in source.entries} == set(flat)
    for entry in source.entries:
        value = flat[entry.fqn]
        assert tuple(entry.path) == tuple(paths[entry.fqn])
        if isinstance(entry, ObjectSource):
            assert torch.load(io.BytesIO(entry.read())) == value
            continue
        assert isinstance(value, torch.Tensor)
        assert (entry.dtype, entry.shape) == (value.dtype, tuple(value.shape))
        assert not with_grad or entry.requires_grad == value.requires_grad
        data = raw(value)
        assert read(entry) == data, entry.fqn
        low, high = len(data) // 3, len(data) - len(data) // 5
        assert read(entry, low, high) == data[low:high], entry.fqn


def test_stock_torch(tmp_path: Path) -> None:
    expected = state()
    state_dict_saver.save(expected, storage_writer=FileSystemWriter(tmp_path, thread_count=3))
    check(open_source(tmp_path), expected)


@pytest.mark.parametrize("file_format", ["torch_dist", "safetensors", "zarr"])
def test_our_own(file_format: str, tmp_path: Path) -> None:
    expected = state()
    settings = {} if file_format == "torch_dist" else {"ckpt_objects": "sidecar"}
    save(expected, tmp_path, ckpt_format=file_format, **settings)
    check(open_source(tmp_path), expected)


def test_damage_is_found(tmp_path: Path) -> None:
    expected = {"x": torch.randn(1 << 21)}
    save(expected, tmp_path)
    [image] = [path for path in tmp_path.iterdir() if ".distcp" in path.name]
    with image.open("r+b") as file:
        file.seek(5 << 20)
        file.write(b"damaged")
    [source] = open_source(tmp_path).entries
    assert isinstance(source, TensorSource)
    assert read(source, 0, 1 << 20) == raw(expected["x"])[: 1 << 20]
    with pytest.raises(Exception, match="damaged between bytes"):
        read(source)


def test_sharded_safetensors(tmp_path: Path) -> None:
    expected = plain_tensors()
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    state_dict_saver.save(expected, storage_writer=writer)
    check(open_source(tmp_path), expected)


def test_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    expected = plain_tensors()
    save_file(expected, tmp_path / "one.safetensors")
    for url in (tmp_path, tmp_path / "one.safetensors", str(tmp_path / "one.safetensors")):
        check(open_source(url), expected)


def test_zarr(tmp_path: Path) -> None:
    import numpy as np
    import zarr

    expected: dict[str, Any] = {
        "a": torch.randn(50, 60, dtype=torch.float64),
        "below": {"b": torch.arange(100, dtype=torch.int16), "c": torch.tensor(3.5)},
    }
    group = zarr.open_group(str(tmp_path), mode="w")
    for name, tensor, chunks in (
        ("a", expected["a"], (7, 9)),
        ("below/b", expected["below"]["b"], (33,)),
        ("below/c", expected["below"]["c"], ()),
    ):
        array = group.create_array(
            name, shape=tensor.shape, dtype=np.dtype(tensor.numpy().dtype), chunks=chunks
        )
        array[...] = tensor.numpy()
    check(open_source(tmp_path), expected)


def test_our_own_zarr_without_its_metadata(tmp_path: Path) -> None:
    expected = {"model": {"a/b": torch.ones(2), "c": torch.zeros(3), "bf16": torch.ones(2).bfloat16()}}
    save(expected, tmp_path, ckpt_format="zarr")
    (tmp_path / ".metadata").unlink()
    check(open_source(tmp_path), expected)


def test_torch_save(tmp_path: Path) -> None:
    expected = state()
    torch.save(expected, tmp_path / "x.pt")
    check(open_source(tmp_path / "x.pt"), expected, with_grad=False)


def test_torch_save_with_what_requires_grad(tmp_path: Path) -> None:
    expected = {"x": torch.ones(2, requires_grad=True)}
    torch.save(expected, tmp_path / "x.pt")
    check(open_source(tmp_path / "x.pt"), expected)


def test_an_empty_range_of_an_empty_tensor(tmp_path: Path) -> None:
    torch.save({"x": torch.empty(0, 3)}, tmp_path / "x.pt")
    [source] = open_source(tmp_path / "x.pt").entries
    assert isinstance(source, TensorSource)
    source.read_into(0, 0, memoryview(bytearray()))


def test_to_a_file_of_torch_save_and_back(tmp_path: Path) -> None:
    expected = state()
    state_dict_saver.save(expected, storage_writer=FileSystemWriter(tmp_path / "stock", thread_count=2))
    write_torch_file(tmp_path / "x.pt", open_source(tmp_path / "stock").entries)
    check(open_source(tmp_path / "x.pt"), expected, with_grad=False)
    for mmap in (False, True):
        flat, _ = flatten_state_dict(torch.load(tmp_path / "x.pt", mmap=mmap, weights_only=True))
        for fqn, value in flatten_state_dict(expected)[0].items():
            if isinstance(value, torch.Tensor):
                assert raw(flat[fqn]) == raw(value)
            else:
                assert flat[fqn] == value


def test_threads(tmp_path: Path) -> None:
    expected = state()
    state_dict_saver.save(expected, storage_writer=FileSystemWriter(tmp_path))
    flat, _ = flatten_state_dict(expected)
    payloads = {fqn: raw(value) for fqn, value in flat.items() if isinstance(value, torch.Tensor)}
    entries = [e for e in open_source(tmp_path).entries if isinstance(e, TensorSource) and e.nbytes]

    def is_right(number: int) -> bool:
        entry = entries[number % len(entries)]
        low = number * 7919 % entry.nbytes
        high = min(entry.nbytes, low + 5000)
        return read(entry, low, high) == payloads[entry.fqn][low:high]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(is_right, range(1000)))


def peak(*arguments: Path) -> tuple[int, int]:
    """Return the bytes of the only tensor of a checkpoint, and those by which the process has grown."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PEAK, *map(str, arguments)],
        capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    nbytes, grown = map(int, done.stdout.split())
    return nbytes, grown


@pytest.mark.thorough
@pytest.mark.slow
def test_memory_of_a_large_item(tmp_path: Path) -> None:
    state_dict_saver.save({"x": torch.zeros(1 << 28)}, storage_writer=FileSystemWriter(tmp_path / "stock"))
    nbytes, grown = peak(tmp_path / "stock")
    assert nbytes == 1 << 30
    assert grown < 48 << 20
    _, grown = peak(tmp_path / "stock", tmp_path / "x.pt")
    assert grown < 64 << 20


@pytest.mark.slow
def test_memory_of_a_long_row_of_zarr(tmp_path: Path) -> None:
    import zarr

    array = zarr.create_array(str(tmp_path / "z"), shape=(1, 1 << 25), dtype="f4", chunks=(1, 1 << 20))
    array[...] = 1
    nbytes, grown = peak(tmp_path / "z")
    assert nbytes == 1 << 27
    assert grown < 80 << 20

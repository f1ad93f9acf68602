"""What is written comes back bit for bit, through every way to write and every way to read."""

from __future__ import annotations

import collections
import enum
import io
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch._utils import _element_size
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from distckpt import StorageReader, StorageWriter
from integration.checkpoints import (
    WAIT_S,
    assert_every_reader_finds,
    assert_same,
    read_with_distckpt,
    read_with_torch,
    save,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


def _dtypes() -> tuple[list[torch.dtype], list[torch.dtype]]:
    """Every dtype of which torch.save saves a tensor: those that torch's planner can plan, and the others."""
    planned, others = [], []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support|torch.quantize_per_tensor")
        for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
            try:
                torch.save(torch.empty(2, dtype=dtype), io.BytesIO())
            except (KeyError, RuntimeError):
                # Torch has no storage for it (int4), or makes no tensor of it without scales (qint8).
                continue
            try:
                _element_size(dtype)  # type: ignore[no-untyped-call]
            except TypeError:
                others.append(dtype)
            else:
                planned.append(dtype)
    return sorted(planned, key=str), sorted(others, key=str)


DTYPES, UNPLANNED_DTYPES = _dtypes()


@pytest.fixture(params=[1, 2], ids=["1-worker", "2-workers"])
def writer(request: pytest.FixtureRequest) -> Iterator[StorageWriter]:
    with StorageWriter(dist_ckpt_workers=request.param) as opened:
        yield opened


@pytest.fixture(params=[False, True], ids=["save", "async_save"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A contiguous tensor of random bits: NaNs with payloads and denormals among them."""
    tensor = torch.empty(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    count = tensor.numel() * tensor.element_size()
    bits = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return tensor.set_(bits.untyped_storage(), 0, shape, tensor.stride()) if count else tensor


def test_the_dtypes_of_this_torch_were_found() -> None:
    names = {str(dtype).removeprefix("torch.") for dtype in DTYPES}
    assert names >= {"bool", "uint16", "uint32", "uint64", "complex32", "complex128", "bfloat16"}
    assert names >= {"float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2"}
    assert {str(dtype) for dtype in UNPLANNED_DTYPES} <= {
        "torch.bits8", "torch.bits16", "torch.bits1x8", "torch.bits2x4", "torch.bits4x2"
    }  # fmt: skip


def test_every_dtype(tmp_path: Path, writer: StorageWriter, is_async: bool) -> None:
    state: dict[str, Any] = {
        str(dtype): {
            "dense": random_tensor((5, 7), dtype),
            "scalar": random_tensor((), dtype),
            "one": random_tensor((1,), dtype),
            "empty": random_tensor((0, 3), dtype),
            "columns": random_tensor((6, 9), dtype)[:, 1::3],
            "transposed": random_tensor((4, 6), dtype).t(),
        }
        for dtype in DTYPES
    }
    # Torch's planner cannot compute their size, but it takes anything within a tuple.
    state["unplanned"] = {str(dtype): (random_tensor((3, 4), dtype)[:, 1:],) for dtype in UNPLANNED_DTYPES}
    save(state, tmp_path / "a", writer, is_async=is_async)
    assert_every_reader_finds(state, tmp_path / "a")


def _views() -> dict[str, torch.Tensor]:
    base = random_tensor((6, 8, 10), torch.float32)
    images = random_tensor((2, 3, 4, 5), torch.float16)
    volumes = random_tensor((2, 3, 4, 2, 3), torch.bfloat16)
    numbers = random_tensor((4, 6), torch.complex64)
    parameter = torch.nn.Parameter(random_tensor((3, 3), torch.float32))
    return {
        "0-dim": random_tensor((), torch.float64),
        "0-dim view": base[1, 2, 3],
        "size 1": base[:1, :1, :1],
        "size 1 with a foreign stride": base.as_strided((1, 5), (77, 1), 3),
        "empty": torch.empty(0),
        "empty in several dims": torch.empty(3, 0, 2),
        "empty view": base[6:],
        "at an offset": base.view(-1)[13:77],
        "at an odd offset": random_tensor((99,), torch.uint8)[3:50],
        "transposed": base.transpose(0, 2),
        "permuted": base.permute(1, 2, 0),
        "permuted at an offset": base[2:4].permute(2, 0, 1),
        "expanded": base[0, :1].expand(5, 10),
        "expanded scalar": base[0, 0, 0].expand(4, 4),
        "expanded in a new dim": base[0].unsqueeze(1).expand(8, 3, 10),
        "rows": base[::2],
        "columns": base[..., ::3],
        "both": base[1::2, 2:5, 1:9:4],
        "overlapping": base.as_strided((4, 5), (2, 1), 7),
        "diagonal": base[0].diagonal(),
        "flipped": base.flip(0),
        "channels_last": images.to(memory_format=torch.channels_last),
        "channels_last sliced": images.to(memory_format=torch.channels_last)[:, 1:],
        "channels_last_3d": volumes.to(memory_format=torch.channels_last_3d),
        "conj": numbers.conj(),
        "conj transposed": numbers.conj().t(),
        "conj sliced": numbers.conj()[:, ::2],
        "neg": torch._neg_view(base[0]),
        "neg by imag of conj": numbers.conj().imag,
        "real of complex": numbers.real,
        "parameter": parameter,
        "parameter view": parameter[1:],
        "without grad": torch.nn.Parameter(random_tensor((2,), torch.float32), requires_grad=False),
        "with grad": random_tensor((2, 2), torch.float64).requires_grad_(),
        "result of an operation": parameter * 2,
    }


def test_every_kind_of_view(tmp_path: Path, writer: StorageWriter, is_async: bool) -> None:
    state = _views()
    save(state, tmp_path / "a", writer, is_async=is_async)
    assert_every_reader_finds(state, tmp_path / "a")


@pytest.mark.parametrize("reader", [FileSystemReader, StorageReader])
def test_every_kind_of_view_into_an_existing_state(
    tmp_path: Path, writer: StorageWriter, is_async: bool, reader: Callable[[Path], TorchStorageReader]
) -> None:
    state = _views()
    save(state, tmp_path / "a", writer, is_async=is_async)
    # Another order in memory than the file's: strides are those of the target, values those of the file.
    target = {name: torch.zeros(view.shape[::-1], dtype=view.dtype).permute(list(range(view.dim()))[::-1])
              for name, view in state.items()}  # fmt: skip
    state_dict_loader.load(target, storage_reader=reader(tmp_path / "a"))
    assert_same(target, state)


def test_requires_grad_is_told_by_the_metadata(tmp_path: Path, writer: StorageWriter, is_async: bool) -> None:
    state = {"p": torch.nn.Parameter(torch.ones(2)), "t": torch.ones(2)}
    save(state, tmp_path / "a", writer, is_async=is_async)
    entries: Any = FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata
    assert {name: entry.properties.requires_grad for name, entry in entries.items()} == {
        "p": True,
        "t": False,
    }


def _big_views() -> dict[str, torch.Tensor]:
    mega = 1 << 20
    return {
        "one giant row": random_tensor((1, 5 * mega), torch.float16)[:, ::2],
        "giant rows": random_tensor((3, 5 * mega), torch.uint8)[:, 1::2],
        "giant columns": random_tensor((3 * mega, 3), torch.uint8)[:, :2],
        "one-dimensional": random_tensor((5 * mega,), torch.int16)[::2],
        "transposed": random_tensor((1 << 10, 5 << 10), torch.uint8).t(),
        "dense": random_tensor((5 * mega + 1,), torch.uint8),
        "channels_last": random_tensor((5, 16, 256, 256), torch.uint8).to(memory_format=torch.channels_last),
        "conj": random_tensor((700, 1 << 10), torch.complex64).conj(),
        "small": random_tensor((7,), torch.float64),
    }


def test_large_views_in_parts(tmp_path: Path, is_async: bool) -> None:
    """Many parts end in the middle of a row and of an element; `dcp.save` recycles their memory."""
    host_memory = "auto" if is_async else "12MiB"
    state = _big_views()
    for workers in (1, 2):
        path = tmp_path / str(workers)
        with StorageWriter(dist_ckpt_workers=workers, ckpt_host_memory=host_memory) as writer:
            save(state, path, writer, is_async=is_async)
            assert writer._engine is not None
            assert 0 < writer._engine.arena.reserved_bytes <= writer._engine.arena.budget_bytes
        assert_same(read_with_torch(path), state)
        assert_same(read_with_distckpt(path), state)


def test_large_views_cost_no_memory_beside_the_budget(tmp_path: Path) -> None:
    """Neither a part that ends in a row larger than itself, nor the staging of a view."""
    script = """
import sys, warnings
import torch
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from distckpt import StorageWriter

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) >> 10

warnings.simplefilter("ignore")
rows = torch.arange(3, dtype=torch.uint8).reshape(3, 1).expand(3, 32 << 20)
with StorageWriter(ckpt_host_memory="16MiB") as writer:
    save({"t": rows[:, :9]}, checkpoint_id=sys.argv[1] + "/warm", storage_writer=writer)
    before = peak()
    save({"t": rows}, checkpoint_id=sys.argv[1] + "/a", storage_writer=writer)
    waves = peak() - before
with StorageWriter(ckpt_host_memory="128MiB") as writer:
    before = peak()
    response = async_save({"t": rows}, checkpoint_id=sys.argv[1] + "/b", storage_writer=writer)
    response.upload_completion.result()
    staged = peak() - before
print(waves, staged)
"""
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=True, capture_output=True, text=True, timeout=50
    )
    waves_mib, staged_mib = map(int, result.stdout.split())
    assert waves_mib < 16 + 40
    assert staged_mib < 96 + 24
    for name in ("a", "b"):
        found = read_with_distckpt(tmp_path / name)["t"]
        assert [row.unique().tolist() for row in found] == [[0], [1], [2]]


class Colour(enum.IntEnum):
    RED = 3


class Point(NamedTuple):
    x: Any
    y: Any


class Chain(tuple[Any, ...]):
    __slots__ = ()


class Box(list[Any]):
    pass


@dataclass
class Schedule:
    step: int
    history: list[float] = field(default_factory=list)
    table: dict[str, torch.Tensor] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Schedule)
        assert_same(self.table, other.table)
        return (self.step, self.history) == (other.step, other.history)


def _objects() -> dict[str, Any]:
    return {
        "nested": {"a": {"b": [torch.arange(3), {"c": torch.ones(2)}]}, 7: {"int key": torch.zeros(1)}},
        "list": [torch.arange(2), [torch.arange(3), "word"], None],
        "list of lists": [[1, 2], [3, [4]]],
        "tuple": (torch.arange(4).reshape(2, 2).t(), 5, (torch.ones(()),)),
        "namedtuple": Point(torch.arange(3), {"z": torch.zeros(2)}),
        "subclass of tuple": Chain((1, torch.ones(1))),
        "subclass of list": Box([1, 2]),
        "parameter in a tuple": (torch.nn.Parameter(torch.ones(2)),),
        "empty list": [],
        "empty tuple": (),
        "dataclass": Schedule(3, [0.1, float("inf")], {"t": torch.arange(5)}),
        "none": None,
        "true": True,
        "str": "text \u00e9 \U0001f600 \0",
        "bytes": bytes(range(256)),
        "large int": 1 << 3000,
        "float": 0.1,
        "complex": 1j,
        "set": {1, "two", (3,)},
        "frozenset": frozenset({b"x"}),
        "enum": Colour.RED,
        "size": torch.Size([1, 2]),
        "dtype": torch.float8_e5m2,
        "device": torch.device("cpu"),
        "ordered": (collections.OrderedDict(b=1, a=2),),
        "range": range(5),
        "long text": "0123456789" * 100_000,
    }


def test_containers_and_objects(tmp_path: Path, writer: StorageWriter, is_async: bool) -> None:
    state = _objects()
    save(state, tmp_path / "a", writer, is_async=is_async)
    state["nested"]["7"] = state["nested"].pop(7)  # torch's flattening makes every key a string
    assert_every_reader_finds(state, tmp_path / "a")
    found = read_with_torch(tmp_path / "a")
    assert isinstance(found["parameter in a tuple"][0], torch.nn.Parameter)


NAMES = [
    "", ".", "..", "../../etc/passwd", "/absolute", "a/b/c", "a//b", "a.b.c", " ", "line\nbreak", "tab\t",
    "nul\0", "\u00fcn\u00efc\u00f6d\u00e9 \u5f20\u91cf \U0001f600", "\ud800 lone surrogate", "x" * 5000,
    ".metadata", ".distckpt/owner", "__0_0.distcp", "%s %d {}", "'quotes\"", "distckpt staging", "0",
]  # fmt: skip


def test_every_name(tmp_path: Path, writer: StorageWriter, is_async: bool) -> None:
    state = {name: torch.tensor([index]) for index, name in enumerate(NAMES)}
    objects = {f"{name}!": ("object", index) for index, name in enumerate(NAMES)}
    save({**state, **objects}, tmp_path / "a", writer, is_async=is_async)
    assert_every_reader_finds({**state, **objects}, tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".pt"] == ["a"]


def test_an_empty_state(tmp_path: Path, writer: StorageWriter, is_async: bool) -> None:
    for _ in range(2):
        save({}, tmp_path / "a", writer, is_async=is_async)
        assert_every_reader_finds({}, tmp_path / "a")


def test_an_empty_state_over_a_full_one_and_back(
    tmp_path: Path, writer: StorageWriter, is_async: bool
) -> None:
    state = {"t": torch.arange(5), "o": "object"}
    for one in (state, {}, state):
        save(one, tmp_path / "a", writer, is_async=is_async)
        assert_every_reader_finds(one, tmp_path / "a")


def test_bytes_between_items_are_zero(tmp_path: Path, writer: StorageWriter, is_async: bool) -> None:
    """What an earlier save left in host memory does not reach a file."""
    save({"t": random_tensor((8 << 20,), torch.uint8)}, tmp_path / "before", writer, is_async=is_async)
    state: dict[str, Any] = {f"small {i}": random_tensor((i % 9,), torch.int32) for i in range(600)}
    state |= {f"view {i}": random_tensor((4, 4 * i), torch.int16)[:, ::2] for i in range(1, 9)}
    state |= {f"large {i}": random_tensor(((1 << 20) + i,), torch.uint8) for i in range(3)}
    state |= {f"object {i}": "x" * i for i in range(9)}
    # The planner keeps the order: small items of all kinds lie beside large ones.
    save(
        dict(sorted(state.items(), key=lambda item: item[0][::-1])), tmp_path / "a", writer, is_async=is_async
    )
    metadata = FileSystemReader(tmp_path / "a").read_metadata()
    gaps = 0
    files = {info.relative_path for info in metadata.storage_data.values()}
    for name in files:
        content = bytearray((tmp_path / "a" / name).read_bytes())
        places = [info for info in metadata.storage_data.values() if info.relative_path == name]
        for info in places:
            content[info.offset : info.offset + info.length] = bytes(info.length)
        assert content == bytes(len(content)), name
        gaps += len(content) - sum(info.length for info in places)
    assert gaps > 600


def test_what_stock_torch_wrote(tmp_path: Path, is_async: bool) -> None:
    """The other direction: distckpt reads all that torch's own writer writes."""
    state: dict[str, Any] = {**_views(), **_objects(), "names": {name: torch.ones(2) for name in NAMES}}
    state |= {str(dtype): random_tensor((3, 5), dtype)[:, ::2] for dtype in DTYPES}
    stock = FileSystemWriter(tmp_path / "a")
    if is_async:
        upload = state_dict_saver.async_save(state, storage_writer=stock)
        assert isinstance(upload, Future)
        upload.result(WAIT_S)
    else:
        state_dict_saver.save(
            state, checkpoint_id=tmp_path / "a", storage_writer=FileSystemWriter(tmp_path / "a")
        )
    assert_same(read_with_distckpt(tmp_path / "a"), read_with_torch(tmp_path / "a"))


@st.composite
def strided_views(draw: st.DrawFn) -> torch.Tensor:
    """A view with any strides, overlapping ones included, on a base of random bits."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    strides = draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 5))
    extent = offset + 1 + sum(max(0, size - 1) * step for size, step in zip(shape, strides, strict=True))
    base = random_tensor((extent,), dtype, seed=draw(st.integers(0, 3)))
    view = base.as_strided(shape, strides, offset)
    if dtype in (torch.complex64, torch.complex128) and draw(st.booleans()):
        view = view.conj()
    if dtype in (torch.float32, torch.float16, torch.complex64, torch.int32) and draw(st.booleans()):
        view = torch._neg_view(view)
    return view


# The writer and the directory are meant to be the same for all examples: each overwrites the last.
@hypothesis.settings(max_examples=15, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(views=st.lists(strided_views(), min_size=1, max_size=20))
def test_any_strided_views(
    tmp_path: Path, writer: StorageWriter, is_async: bool, views: list[torch.Tensor]
) -> None:
    state = {str(index): view for index, view in enumerate(views)}
    save(state, tmp_path / "a", writer, is_async=is_async)
    assert_same(read_with_torch(tmp_path / "a"), state)
    assert_same(read_with_distckpt(tmp_path / "a"), state)

"""States saved as safetensors and zarr, in every way: what our reader and stock tools find, and refusals."""

from __future__ import annotations

import gc
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.testing._internal.two_tensor import TwoTensor

from distckpt import Checkpointer, CommitError, ConfigError, StagingError, StorageReader, StorageWriter
from distckpt.cli import main
from distckpt.formats import safetensors_dtypes
from distckpt.formats.zarr import array_path
from distckpt.storage import open_storage
from distckpt.verification import verify
from integration import test_sharded
from integration.checkpoints import WAIT_S, assert_same, bits, failure_of, read_with_distckpt, save
from integration.ranks import states
from integration.ranks.world import Ranks
from integration.test_round_trip import DTYPES, random_tensor
from servers import S3Server, split_url

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]

MIB = 1 << 20
FORMATS = ("safetensors", "zarr")
WAYS = ("save", "async_save", "checkpointer")
OBJECTS = {"safetensors": "sidecar", "zarr": "auto"}
IN_SAFETENSORS = set(safetensors_dtypes().values())
IN_ZARR_PYTHON = {
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip
IN_ZARR = IN_ZARR_PYTHON | {
    torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz
}  # fmt: skip
Keys = tuple[str | int, ...]


def write(
    state: dict[str, Any], root: Path | str, file_format: str, way: str, workers: int = 1, **settings: Any
) -> Path:
    """Save below `root` in one of `WAYS`, change the state while that goes on, and return the checkpoint."""
    settings = {"ckpt_objects": OBJECTS[file_format], **settings}
    settings |= {"ckpt_format": file_format, "dist_ckpt_workers": workers}
    path = Path(root) / "step-00000000"
    if way == "checkpointer":
        with Checkpointer(root, async_save=True, **settings) as checkpointer:
            handle = checkpointer.save(0, state)
            states.scramble(state)
            handle.result(WAIT_S)
        return path
    with StorageWriter(path, **settings) as writer:
        if way == "save":
            state_dict_saver.save(state, storage_writer=writer)
        else:
            response: Any = state_dict_saver.async_save(state, storage_writer=writer)
            response.staging_completion.result(WAIT_S)
            states.scramble(state)
            response.upload_completion.result(WAIT_S)
    return path


def leaves(state: Any, path: Keys = ()) -> Iterator[tuple[Keys, torch.Tensor]]:
    """Yield the tensors of a state that torch's planner finds, and the keys that lead to each."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, (*path, str(key)))
    elif isinstance(state, list):
        for index, value in enumerate(state):
            yield from leaves(value, (*path, index))


def fqn_of(path: Keys) -> str:
    return ".".join(map(str, path))


def assert_bits(found: Any, expected: torch.Tensor, where: str) -> None:
    """Compare an array of numpy, or of what has its interface."""
    assert tuple(found.shape) == tuple(expected.shape), where
    assert found.dtype.itemsize == expected.dtype.itemsize, where
    assert found.tobytes() == bits(expected).numpy().tobytes(), where


def stock_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Load all files with the format's own library, in both of its ways."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        loaded = load_file(file)
        assert not found.keys() & loaded.keys(), "a tensor of one rank lies in one piece"
        found |= loaded
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata()["format"] == "pt"
            assert set(opened.keys()) == set(loaded)
            for name in loaded:
                assert torch.equal(bits(opened.get_tensor(name)), bits(loaded[name]))
    return found


def assert_stock_safetensors(path: Path, state: dict[str, Any]) -> None:
    expected = {fqn_of(keys): one for keys, one in leaves(state) if one.dtype in IN_SAFETENSORS}
    found = stock_safetensors(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(bits(found[name]), bits(tensor)), name


def assert_hugging_face_reader(path: Path, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    expected = {fqn_of(keys): one for keys, one in leaves(state) if one.dtype in IN_SAFETENSORS}
    found = {name: states.zeros(one.shape, one.dtype) for name, one in expected.items()}
    state_dict_loader.load(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert_same(found, expected)


def assert_stock_zarr(path: Path, state: dict[str, Any]) -> None:
    import tensorstore
    import zarr

    # One array that it has no type for keeps zarr-python from listing a group, but not from opening an array.
    consolidated: Any = zarr.open_group(path, mode="r")
    assert consolidated.metadata.consolidated_metadata is not None
    listed = set()
    for keys, tensor in leaves(state):
        if tensor.dtype not in IN_ZARR:
            continue
        name, where = array_path(keys), fqn_of(keys)
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path / name}/"}}
        assert_bits(tensorstore.open(spec, read=True).result().read().result(), tensor, where)
        if tensor.dtype in IN_ZARR_PYTHON:
            opened: Any = zarr.open_array(path / name, mode="r")
            assert opened.attrs["fqn"] == where
            assert_bits(opened[...], tensor, where)
            assert_bits(consolidated[name][...], tensor, where)
            listed.add(name)
    members = consolidated.members(max_depth=None)
    assert {name for name, member in members if isinstance(member, zarr.Array)} == listed


def assert_stock_tools(path: Path, file_format: str, state: dict[str, Any]) -> None:
    if file_format == "zarr":
        assert_stock_zarr(path, state)
    else:
        assert_stock_safetensors(path, state)


def files_below(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def every_dtype() -> dict[str, Any]:
    """Every dtype that there is: those which a format has not are put aside."""
    return {
        str(dtype).removeprefix("torch."): {
            "dense": random_tensor((5, 7), dtype),
            "scalar": random_tensor((), dtype),
            "one": random_tensor((1,), dtype),
            "empty": random_tensor((0, 3), dtype),
            "no columns": random_tensor((3, 0, 2), dtype),
            "columns": random_tensor((6, 9), dtype)[:, 1::3],
            "transposed": random_tensor((4, 6), dtype).t(),
        }
        for dtype in DTYPES
    }


def containers() -> dict[str, Any]:
    return {
        "model": {"a": {"b": [torch.arange(3), {"c": torch.ones(2)}]}, "list": [torch.zeros(1)] * 12},
        "views": {
            "expanded": torch.arange(5.0).expand(4, 5),
            "conj": torch.randn(3, 4, dtype=torch.complex64).conj(),
            "imag of conj": torch.randn(3, 4, dtype=torch.complex64).conj().imag,
            "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "flipped": torch.arange(12).reshape(3, 4).flip(1),
            "parameter": torch.nn.Parameter(torch.ones(2, 3)),
        },
        "objects": {"epoch": 3, "schedule": [0.1, ("ü", None)], "bytes": b"\0\1", "none": None},
        "tuple": (torch.arange(4), "of tensors is an object"),
        "step": 7,
    }


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("file_format", FORMATS)
def test_dtypes_containers_and_objects(tmp_path: Path, file_format: str, way: str, workers: int) -> None:
    torch.manual_seed(1)
    expected = {**every_dtype(), **containers()}
    torch.manual_seed(1)
    path = write({**every_dtype(), **containers()}, tmp_path, file_format, way, workers)
    assert_same(read_with_distckpt(path), expected)
    report = verify(open_storage(str(path)))
    assert (report.status, report.findings) == ("complete", [])
    assert_stock_tools(path, file_format, expected)


@pytest.mark.parametrize("way", WAYS)
def test_torch_loads_safetensors(tmp_path: Path, way: str) -> None:
    def make() -> dict[str, Any]:
        torch.manual_seed(2)
        return {**containers(), **every_dtype()}

    path = write(make(), tmp_path, "safetensors", way, 2)
    assert_hugging_face_reader(path, make())


def large(seed: int) -> dict[str, Any]:
    """Tensors larger than a bucket, than the memory of a save in waves, and than a chunk of zarr."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    return {
        "flat": draw(72 * MIB).view(torch.int32),
        "one row": draw(1, 36 * MIB),
        "rows": draw(1031, 16 << 10).view(torch.float16),
        # Of 4 MiB less 2 bytes: a checksum behind them would lie in two blocks.
        "without room for a checksum": draw((4 * MIB) - 2).view(torch.int16),
        "columns": draw(1 << 10, 12 << 10)[:, 1::3],
        "transposed": draw(3 << 10, 1 << 10).t(),
        "small": [draw(number) for number in range(30)],
        "page": draw(4096),
        "object": "x" * MIB,
    }


@pytest.mark.parametrize(
    ("way", "workers"),
    [pytest.param("save", 1, marks=pytest.mark.thorough), ("save", 3), ("checkpointer", 2)],
)
@pytest.mark.parametrize("file_format", FORMATS)
def test_what_is_larger_than_the_memory(tmp_path: Path, file_format: str, way: str, workers: int) -> None:
    """`Checkpointer` without room for the state writes it in waves as well."""
    if way == "checkpointer":
        path = tmp_path / "step-00000000"
        settings: dict[str, Any] = {"ckpt_objects": OBJECTS[file_format], "dist_ckpt_workers": workers}
        with Checkpointer(
            tmp_path, ckpt_format=file_format, ckpt_host_memory="64MiB", async_save=False, **settings
        ) as checkpointer:
            checkpointer.save(0, large(1)).result(WAIT_S)
    else:
        path = write(large(1), tmp_path, file_format, way, workers, ckpt_host_memory="64MiB")
    expected = large(1)
    assert verify(open_storage(str(path))).status == "complete"
    assert_same(read_with_distckpt(path), expected)
    assert_stock_tools(path, file_format, expected)


@pytest.mark.parametrize("file_format", FORMATS)
def test_small_buckets(tmp_path: Path, file_format: str) -> None:
    def make() -> dict[str, Any]:
        return {**large(2), "flat": torch.arange(MIB), "one row": torch.arange(MIB + 7).unsqueeze(0)}

    expected = make()
    for way in ("async_save", "checkpointer"):
        state = make()
        path = write(state, tmp_path / way, file_format, way, 2, ckpt_bucket_bytes="4MiB")
        assert_stock_tools(path, file_format, expected)
        assert verify(open_storage(str(path))).status == "complete"
        shutil.rmtree(tmp_path / way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("file_format", FORMATS)
def test_without_checksums(tmp_path: Path, file_format: str, way: str) -> None:
    path = write(containers(), tmp_path, file_format, way, ckpt_checksum="none")
    torch.manual_seed(0)
    assert not [file for file in path.rglob("zarr.json") if b"crc32c" in file.read_bytes()]
    assert main(["verify", str(path)]) in {0, 1}
    loaded = read_with_distckpt(path)
    if file_format == "zarr":
        assert_stock_zarr(path, loaded)
    else:
        assert_stock_safetensors(path, loaded)


NAMES = [
    ".", "..", "../../etc/passwd", "/absolute", "a/b/c", "a//b", "d.e", " ", "line\nbreak", "tab\t", "nul\0",
    "c", "c.0", "C", "zarr.json", "zarr.jsonx", "__x", ".hidden", "%", "%63", "~", "?*<>|:\"\\'",
    "ünïcödé 张量 😀", "x" * 255, "x.0a1b.tmp", "model.safetensors", "__0_0.distcp", ".metadata", "0",
    "shard-00000-00000-ab.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("file_format", FORMATS)
def test_odd_names(tmp_path: Path, file_format: str, way: str) -> None:
    def make() -> dict[str, Any]:
        top = {name: torch.tensor([number]) for number, name in enumerate(["", *NAMES])}
        below = {name: {name: {"t": torch.tensor(number)}} for number, name in enumerate(NAMES)}
        objects = {name: ["object", number] for number, name in enumerate(NAMES)}
        return {**top, "m": below, "o": objects}

    path = write(make(), tmp_path, file_format, way, 2)
    assert [one.name for one in tmp_path.glob("[!.]*") if one.name != "latest"] == ["step-00000000"]
    assert_same(read_with_distckpt(path), make())
    assert verify(open_storage(str(path))).status == "complete"
    assert_stock_tools(path, file_format, make())
    if file_format == "zarr":
        # And back: the names of directories say the keys.
        assert {unquote(one.name) for one in (path / "m").iterdir()} == {*NAMES, "zarr.json"}


def error_of(state: dict[str, Any], path: Path, file_format: str, way: str, **settings: Any) -> BaseException:
    """Save what is refused, and return the refusal."""
    error: BaseException
    if way == "checkpointer":
        with Checkpointer(path, async_save=True, ckpt_format=file_format, **settings) as checkpointer:
            with pytest.raises(Exception) as caught:  # noqa: PT011 - looked at by the caller
                checkpointer.save(0, state).result(WAIT_S)
            error = caught.value
        del caught
    else:
        with StorageWriter(path, ckpt_format=file_format, **settings) as writer:
            with pytest.raises(CheckpointException) as failed:
                save(state, path, writer, is_async=way == "async_save")
            error = failure_of(failed.value)
        del failed
    # What was staged lives as long as the frames of the traceback, which are in a cycle.
    error.__traceback__ = error.__context__ = None
    gc.collect()
    return error


def nothing_is_there(path: Path) -> bool:
    """Neither files nor directories that a reader would look at."""
    return not [
        one for one in path.rglob("*")
        if ".distckpt" not in one.parts and not (one.is_dir() and one.name.startswith("step-"))
    ]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_what_safetensors_does_not_hold_is_refused(tmp_path: Path, way: str) -> None:
    refused = {
        "an object": [1, object],
        "complex": torch.ones(3, dtype=torch.complex128),
        "sparse": torch.eye(3).to_sparse(),
        "float4": torch.empty(2, dtype=torch.float4_e2m1fn_x2),
    }
    for number, (key, value) in enumerate(refused.items()):
        path = tmp_path / str(number)
        error = error_of({"x": torch.ones(3), "m": {key: value}}, path, "safetensors", way)
        assert isinstance(error, StagingError)
        assert f"m.{key}" in str(error)
        assert "--ckpt-objects sidecar" in str(error)
        assert not path.exists() or nothing_is_there(path)


def more_than_memory(seed: float) -> dict[str, torch.Tensor]:
    make: Any = TwoTensor
    values = torch.tensor([[0.0, seed], [seed + 1, 0.0]])
    return {
        "wrapper": make(values.clone(), values * 2),
        "parameter": torch.nn.Parameter(make(values.clone(), values * 2)),
        "coo": values.to_sparse(),
        "csr": values.to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(values, seed / 4, 3, torch.quint8),
        "empty": make(torch.empty(0, 2), torch.empty(0, 2)),
    }


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("file_format", FORMATS)
def test_what_is_more_than_memory_is_put_aside(tmp_path: Path, file_format: str, way: str) -> None:
    """Not listed for stock readers, to which an array without chunks is zeros."""
    state: dict[str, Any] = {"m": more_than_memory(1.0), "plain": torch.ones(3)}
    settings: dict[str, Any] = {"ckpt_format": file_format, "ckpt_objects": OBJECTS[file_format]}
    path = tmp_path / "step-00000000"
    if way == "checkpointer":
        with Checkpointer(tmp_path, async_save=True, **settings) as checkpointer:
            checkpointer.save(0, state).result(WAIT_S)
    else:
        with StorageWriter(path, **settings) as writer:
            save(state, path, writer, is_async=way == "async_save")
    assert_stock_tools(path, file_format, {"plain": torch.ones(3)})
    assert not (path / "m").exists()
    assert verify(open_storage(str(path))).status == "complete"
    target: dict[str, Any] = {"m": more_than_memory(3.0), "plain": torch.zeros(3)}
    with torch.serialization.safe_globals([TwoTensor]):
        state_dict_loader.load(target, storage_reader=StorageReader(path), no_dist=True)
    assert torch.equal(target["plain"], torch.ones(3))
    for name, expected in more_than_memory(1.0).items():
        found = target["m"][name]
        if isinstance(expected, TwoTensor):
            assert torch.equal(found.a, expected.a), name
            assert torch.equal(found.b, expected.b), name
        elif expected.is_quantized:
            assert torch.equal(found.dequantize(), expected.dequantize())
        else:
            assert found.layout == expected.layout
            assert torch.equal(found.to_dense(), expected.to_dense())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["__metadata__", "\ud800 lone surrogate"])
def test_names_that_safetensors_has_no_spelling_for(tmp_path: Path, name: str, way: str) -> None:
    """Either refused by name, or readable all the same: one of them must not spoil the whole file."""
    state = {name: torch.ones(2), "x": torch.ones(3)}
    error = error_of(state, tmp_path, "safetensors", way)
    assert repr(name) in str(error) or name in str(error)
    assert nothing_is_there(tmp_path)


@pytest.mark.parametrize("way", WAYS)
def test_a_name_that_is_too_long_for_zarr(tmp_path: Path, way: str) -> None:
    for number, name in enumerate(("x" * 256, "ü" * 50)):
        path = tmp_path / str(number)
        error = error_of({"y": torch.ones(2), name: torch.ones(2)}, path, "zarr", way)
        assert "too long" in str(error)
        assert nothing_is_there(path)


class Renamed(DefaultSavePlanner):
    """Says of entries that they came from other keys of the state."""

    paths: dict[str, tuple[str | int, ...]]

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.mappings = {**self.mappings, **self.paths}


@pytest.mark.parametrize("way", ["save", "async_save"])
@pytest.mark.parametrize(
    "paths",
    [{"a": ("m", 0), "b": ("m", "0")}, {"a": ("m",), "b": ("m", "below")}],
    ids=["the same array", "an array and a group"],
)
def test_two_entries_that_are_one_node(
    tmp_path: Path, way: str, paths: dict[str, tuple[str | int, ...]]
) -> None:
    planner = Renamed()
    planner.paths = paths
    state = {"a": torch.ones(3), "b": torch.zeros(3)}
    with StorageWriter(tmp_path / "a", ckpt_format="zarr") as writer:
        with pytest.raises(CheckpointException) as caught:
            save(state, tmp_path / "a", writer, is_async=way == "async_save", planner=planner)
        error = failure_of(caught.value)
    assert "'a'" in str(error) or "m/" in str(error)
    assert not (tmp_path / "a" / ".metadata").exists()
    assert not (tmp_path / "a" / "zarr.json").exists()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("file_format", FORMATS)
def test_a_committed_checkpoint_stays_whole(tmp_path: Path, file_format: str, way: str) -> None:
    for other_format in ("torch_dist", file_format):
        root = tmp_path / other_format
        path = root / "step-00000000"
        with StorageWriter(path, ckpt_format=other_format) as writer:
            save({"x": torch.arange(5)}, path, writer, is_async=False)
        before = files_below(path)
        where = root if way == "checkpointer" else path
        error = error_of({"x": torch.zeros(5), "y": torch.ones(3)}, where, file_format, way)
        assert isinstance(error, CommitError)
        assert "holds a committed checkpoint" in str(error)
        assert files_below(path) == before
        assert_same(read_with_distckpt(path), {"x": torch.arange(5)})
        assert main(["verify", str(path)]) == 0


def foreign(path: Path, file_format: str) -> None:
    """Leave what another tool has written."""
    if file_format == "zarr":
        import zarr

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            zarr.open_group(path, mode="w").create_array("theirs", shape=(3,), dtype="f4")[:] = 1.0
    else:
        from safetensors.torch import save_file

        path.mkdir(parents=True)
        save_file({"theirs": torch.ones(3)}, path / "model.safetensors")


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("way", WAYS)
def test_what_another_tool_has_written_is_not_mixed_with(tmp_path: Path, file_format: str, way: str) -> None:
    path = tmp_path / "step-00000000"
    foreign(path, file_format)
    before = files_below(path)
    where = tmp_path if way == "checkpointer" else path
    for _ in range(2):
        error = error_of({"x": torch.ones(3)}, where, file_format, way)
        assert isinstance(error, CommitError)
        assert "which no save of distckpt has written" in str(error)
        assert files_below(path) == before


class Failing(DefaultSavePlanner):
    """Fails when the directory is claimed."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        raise RuntimeError("no plan")


@pytest.mark.parametrize("file_format", FORMATS)
def test_what_another_tool_has_written_beside_an_unfinished_save(tmp_path: Path, file_format: str) -> None:
    """What the failed save had left is removed, what is foreign stays, and can be read."""
    path = tmp_path / "a"
    with StorageWriter(path, ckpt_format=file_format) as writer, pytest.raises(CheckpointException):
        save({"x": torch.ones(2)}, path, writer, is_async=False, planner=Failing())
    assert (path / ".distckpt" / "owner").exists()
    foreign(tmp_path / "other", file_format)
    shutil.copytree(tmp_path / "other", path, dirs_exist_ok=True)
    error = error_of({"x": torch.ones(3)}, path, file_format, "save")
    assert isinstance(error, CommitError)
    assert files_below(path).items() >= files_below(tmp_path / "other").items()
    assert not list(path.glob("unfinished-*"))


@pytest.mark.parametrize("file_format", FORMATS)
def test_parts_of_single_ranks_are_refused(tmp_path: Path, file_format: str) -> None:
    with (
        StorageWriter(tmp_path / "a", ckpt_format=file_format) as writer,
        pytest.raises(ConfigError, match="no checkpoints of single ranks"),
    ):
        state_dict_saver.save({"x": torch.ones(2)}, storage_writer=writer, use_collectives=False)
    assert not (tmp_path / "a").exists() or nothing_is_there(tmp_path / "a")


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("way", ["dcp", "checkpointer"])
def test_many_saves_of_one_plan(tmp_path: Path, file_format: str, way: str) -> None:
    """Cached plans, reused memory and templates: each save has its own values, names and objects."""

    def make(step: int) -> dict[str, Any]:
        more = {"more": torch.full((5, 3), step)} if step > 2 else {}
        return {"w": torch.full((300, 33), float(step)), "m": [torch.tensor(step)], **more, "step": step}

    settings: dict[str, Any] = {"ckpt_format": file_format, "ckpt_objects": OBJECTS[file_format]}
    if way == "dcp":
        with StorageWriter(**settings) as writer:
            for step in range(5):
                planner = DefaultSavePlanner(enable_plan_caching=True)
                path = tmp_path / f"step-{step:08}"
                save(make(step), path, writer, is_async=step % 2 == 1, planner=planner)
    else:
        with Checkpointer(tmp_path, async_save=True, **settings) as checkpointer:
            for step in range(5):
                checkpointer.save(step, make(step))
    for step in range(5):
        path = tmp_path / f"step-{step:08}"
        assert_same(read_with_distckpt(path), make(step))
        assert_stock_tools(path, file_format, make(step))
        assert main(["verify", str(path)]) == 0


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("way", WAYS)
def test_a_state_without_tensors(tmp_path: Path, file_format: str, way: str) -> None:
    all_states: list[dict[str, Any]] = [{}, {"o": [1]}, {"e": torch.empty(0, 3)}]
    for number, state in enumerate(all_states):
        path = write(state, tmp_path / str(number), file_format, way)
        assert_same(read_with_distckpt(path), state)
        assert_stock_tools(path, file_format, state)
        assert main(["verify", str(path)]) == 0


def test_xarray_opens_a_group(tmp_path: Path) -> None:
    import xarray

    state = {"m": {"a": torch.randn(7, 5), "b": torch.arange(5), "half": torch.ones(3).bfloat16()}}
    path = write({**state, "o": 1}, tmp_path, "zarr", "async_save")
    assert os.path.getsize(path / "zarr.json")
    dataset = xarray.open_zarr(path, group="m")
    assert set(map(str, dataset.data_vars)) == {"a", "b"}
    for name in ("a", "b"):
        assert dataset[name].shape == tuple(state["m"][name].shape)


def save_sharded(root: str, file_format: str, kind: str) -> list[str]:
    """Rank function: save parameters that are fused, in every way; returns what was refused."""
    state, expected = test_sharded._buffer() if kind == "flat" else test_sharded._tensor_parallel()
    for held, value in expected:
        held.copy_(value)
    settings: dict[str, Any] = {"ckpt_format": file_format, "ckpt_objects": "sidecar"}
    refused = []
    with StorageWriter(dist_ckpt_workers=2, **settings) as writer:
        for way in ("save", "async_save"):
            arguments: Any = {"checkpoint_id": f"{root}/{way}", "storage_writer": writer}
            try:
                if way == "save":
                    state_dict_saver.save(state, **arguments)
                else:
                    response: Any = state_dict_saver.async_save(state, **arguments)
                    response.upload_completion.result()
            except BaseException as error:  # noqa: BLE001 - told to the test
                refused.append(str(error))
    with Checkpointer(root, **settings) as checkpointer:
        for step in range(2):
            try:
                checkpointer.save(step, state).result(WAIT_S)
            except Exception as error:  # noqa: BLE001 - told to the test
                refused.append(str(error))
    return refused


def load_sharded(paths: list[str]) -> list[str]:
    """Rank function: load them split in two other ways."""
    found = []
    for path in paths:
        for make in (test_sharded._buffer, test_sharded._tensor_parallel):
            state, expected = make()
            state_dict_loader.load(state, storage_reader=states.open_reader("distckpt", path))
            for number, (held, value) in enumerate(expected):
                found += states.differences(held, value, f"{path} {make.__name__} {number}")
    return found


@pytest.mark.parametrize(
    ("file_format", "kind"), [("safetensors", "flat"), ("safetensors", "fused"), ("zarr", "fused")]
)
def test_fused_projections_of_ranks(ranks: Ranks, tmp_path: Path, file_format: str, kind: str) -> None:
    refused = ranks.run(2, save_sharded, root=str(tmp_path), file_format=file_format, kind=kind)
    assert refused == [[], []]
    paths = [tmp_path / name for name in ("save", "async_save", "step-00000000", "step-00000001")]
    for world in (1, 2):
        assert ranks.run(world, load_sharded, paths=list(map(str, paths))) == [[]] * world
    whole = {name: test_sharded._wholes(name) for name in test_sharded.FUSED}
    for path in paths:
        assert main(["verify", str(path)]) == 0
        if file_format == "zarr":
            assert_stock_zarr(path, whole)
        else:
            assert_hugging_face_reader(path, whole)


def test_buffers_cut_anywhere_have_no_grid(ranks: Ranks, tmp_path: Path) -> None:
    """Of such boxes a rank cannot know those of others: that grids differ is seen before it is published."""
    refused = ranks.run(3, save_sharded, root=str(tmp_path), file_format="zarr", kind="flat")
    for errors in refused:
        assert len(errors) == 4
        assert all("not published" in error and "common grid" in error for error in errors)
    for name in ("save", "async_save", "step-00000000", "step-00000001"):
        assert not (tmp_path / name / ".metadata").exists()
        assert not (tmp_path / name / "zarr.json").exists()


class FailingOnRank1(DefaultSavePlanner):
    """Gives no data of the last rank."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if distributed.get_rank() == 1:
            raise RuntimeError("no data")
        found: torch.Tensor | io.BytesIO = super().resolve_data(write_item)
        return found


def save_on_one_of_two(path: str, file_format: str) -> str:
    """Rank function: a save that rank 0 completes, and rank 1 does not begin."""
    weight = states.shard(torch.ones(8, 4), states.line_mesh(), [states.ROWS])
    with StorageWriter(path, ckpt_format=file_format) as writer:
        try:
            state_dict_saver.save({"m": {"w": weight}}, storage_writer=writer, planner=FailingOnRank1())
        except BaseException as error:  # noqa: BLE001 - told to the test
            return str(error)
    return ""


def test_no_reader_of_safetensors_takes_a_part_for_the_whole(ranks: Ranks, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    path = tmp_path / "a"
    errors = ranks.run(2, save_on_one_of_two, path=str(path), file_format="safetensors")
    assert all("no data" in error for error in errors)
    assert list(path.glob("shard-00000-*")), "rank 0 has written"
    with pytest.raises(CheckpointException):
        state_dict_loader.load(
            {"m.w": torch.zeros(8, 4)}, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True
        )


def test_no_reader_of_zarr_takes_a_part_for_the_whole(ranks: Ranks, tmp_path: Path) -> None:
    """A chunk that is not there is zeros: an array that is not complete must not be there either."""
    import tensorstore
    import zarr

    path = tmp_path / "a"
    errors = ranks.run(2, save_on_one_of_two, path=str(path), file_format="zarr")
    assert all("no data" in error for error in errors)
    with pytest.raises(FileNotFoundError):
        zarr.open_group(path, mode="r")
    with pytest.raises(FileNotFoundError):
        zarr.open_array(path / "m" / "w", mode="r")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/m/w/"}}
    with pytest.raises(ValueError, match="NOT_FOUND"):
        tensorstore.open(spec, read=True).result()


@pytest.mark.s3
def test_stock_tools_read_from_s3(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written with each of the clients, in several parts; distckpt's own reader is in test_storages.py."""
    import fsspec
    import safetensors.torch
    import tensorstore
    import zarr

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.options["secret"])
    state = {"m": {"w": random_tensor((3 << 18, 5), torch.float32), "s": torch.tensor(3)}, "b": torch.ones(7)}
    for client, way in ((None, "save"), ("s3fs", "async_save"), ("obstore", "save")):
        options = {**s3_server.options, **({} if client is None else {"s3_client": client})}
        for file_format in FORMATS:
            url = s3_server.new_prefix()
            with StorageWriter(url, ckpt_format=file_format, storage_options=options) as writer:
                save(state, url, writer, is_async=way == "async_save")
            assert verify(open_storage(url, options)).status == "complete"
            bucket, key = split_url(url)
            if file_format == "safetensors":
                files = fsspec.filesystem("s3", **s3_server.options)
                [file] = files.glob(f"{bucket}/{key}/*.safetensors")
                found: Any = safetensors.torch.load(files.cat_file(file))
                assert_same(found, {fqn_of(keys): one for keys, one in leaves(state)})
                continue
            group: Any = zarr.open_group(url, mode="r", storage_options=s3_server.options)
            for keys, tensor in leaves(state):
                assert_bits(group[array_path(keys)][...], tensor, fqn_of(keys))
                spec = {
                    "driver": "zarr3",
                    "kvstore": {
                        "driver": "s3",
                        "bucket": bucket,
                        "path": f"{key}/{array_path(keys)}/",
                        "endpoint": s3_server.endpoint,
                        "aws_region": s3_server.options["client_kwargs"]["region_name"],
                        "aws_credentials": {"type": "environment"},
                    },
                }
                assert_bits(tensorstore.open(spec, read=True).result().read().result(), tensor, fqn_of(keys))


KILLED = """
import json, os, signal, sys
import torch
from torch.distributed.checkpoint import state_dict_saver
from distckpt import StorageWriter
from distckpt.storage import open_storage

def die(self, *arguments):
    os.kill(os.getpid(), signal.SIGKILL)

url, options = sys.argv[1], json.loads(sys.argv[2])
type(open_storage(url, options)).complete_image = die
with StorageWriter(url, ckpt_format="zarr", storage_options=options) as writer:
    state_dict_saver.save({"m": {"w": torch.ones(20 << 20)}}, storage_writer=writer)
"""


@pytest.mark.s3
@pytest.mark.parametrize("client", ["botocore", "s3fs", "obstore"])
def test_no_array_is_seen_before_its_chunks_on_s3(s3_server: S3Server, client: str) -> None:
    """Killed when all is sent and nothing completed: small objects are there, those of several parts not."""
    import fsspec

    url = s3_server.new_prefix()
    options = {**s3_server.options, **({} if client == "botocore" else {"s3_client": client})}
    command = [sys.executable, "-W", "ignore", "-c", KILLED, url, json.dumps(options)]
    assert subprocess.run(command, check=False, timeout=50).returncode == -signal.SIGKILL
    names = {name.partition("/m/w/")[2] for name in fsspec.filesystem("s3", **s3_server.options).find(url)}
    assert "zarr.json" not in names or names >= {"c.0", "c.1", "c.2"}

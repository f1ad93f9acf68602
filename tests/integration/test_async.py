"""dcp.async_save: its futures, its failures, and states that are more than plain tensors."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import distributed
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor import distribute_tensor
from typing_extensions import Self

from distckpt import StagingError, StorageReader, StorageWriter
from integration.checkpoints import (
    WAIT_S,
    assert_every_reader_finds,
    assert_same,
    failure_of,
    finish,
    read_with_distckpt,
    read_with_torch,
    save,
    start,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader

pytestmark = pytest.mark.slow

READERS: list[type[Any]] = [FileSystemReader, StorageReader]


@pytest.fixture(params=[1, 2], ids=["1-worker", "2-workers"])
def writer(request: pytest.FixtureRequest) -> Iterator[StorageWriter]:
    with StorageWriter(dist_ckpt_workers=request.param) as opened:
        yield opened


@pytest.fixture(params=[False, True], ids=["save", "async_save"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def load_into(target: dict[str, Any], path: Path, reader: type[Any]) -> dict[str, Any]:
    storage_reader: TorchStorageReader = reader(path)
    state_dict_loader.load(target, storage_reader=storage_reader)
    return target


def test_both_futures(tmp_path: Path, writer: StorageWriter) -> None:
    for number in range(3):
        response = state_dict_saver.async_save(
            {"t": torch.full((1000,), number)}, checkpoint_id=tmp_path / str(number), storage_writer=writer
        )
        assert isinstance(response, AsyncSaveResponse)
        assert isinstance(response.staging_completion, Future)
        # Without a GPU everything is staged when the call returns.
        assert response.staging_completion.done()
        assert response.staging_completion.result() is None
        metadata = finish(response)
        assert metadata.state_dict_metadata.keys() == {"t"}
        assert_every_reader_finds({"t": torch.full((1000,), number)}, tmp_path / str(number))


def test_a_path_given_to_the_writer(tmp_path: Path) -> None:
    with StorageWriter(tmp_path / "a") as writer:
        response = state_dict_saver.async_save({"t": torch.ones(3)}, storage_writer=writer)
        assert isinstance(response, AsyncSaveResponse)
        finish(response)
    assert_every_reader_finds({"t": torch.ones(3)}, tmp_path / "a")


def test_many_threads_save_with_one_writer(tmp_path: Path, writer: StorageWriter) -> None:
    """Each save keeps its own directory, whichever thread begins when."""
    barrier = threading.Barrier(4)
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            for turn in range(3):
                barrier.wait(WAIT_S)
                path = tmp_path / f"{number} {turn}"
                save({"t": torch.full((9,), number)}, path, writer, is_async=number % 2 == 0)
        except BaseException as failure:  # noqa: BLE001 - raised by the test's own thread
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not failures
    for number in range(4):
        for turn in range(3):
            assert_same(read_with_distckpt(tmp_path / f"{number} {turn}"), {"t": torch.full((9,), number)})


PROCESS_MODE = """
import os, sys, warnings
import psutil, torch
from torch import distributed
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from distckpt import DistckptWarning, StorageWriter

def workers():
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            found += [process.pid] if any("distckpt.worker" in word for word in process.cmdline()) else []
        except psutil.Error:
            pass
    return found

if __name__ == "__main__":
    folder = sys.argv[1]
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    tensor = torch.zeros(1000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for lanes in (1, 2):
            with StorageWriter(dist_ckpt_workers=lanes) as writer:
                for number in range(2):
                    tensor.fill_(number)
                    response = async_save(
                        {"t": tensor, "o": ["object", number]},
                        checkpoint_id=f"{folder}/{lanes} {number}",
                        storage_writer=writer,
                        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                    )
                    response.staging_completion.result()
                    tensor.fill_(99)
                    response.upload_completion.result()
            print("workers", lanes, len(workers()))
    told = [str(one.message) for one in caught if one.category is DistckptWarning]
    print("warned", sum("PROCESS" in message for message in told))
    distributed.destroy_process_group()
"""


def test_process_mode(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROCESS_MODE)
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=55, check=False
    )
    assert result.returncode == 0, result.stderr
    for lanes in (1, 2):
        for number in range(2):
            state = {"t": torch.full((1000,), float(number)), "o": ["object", number]}
            assert_same(read_with_torch(tmp_path / f"{lanes} {number}"), state)
            assert_same(read_with_distckpt(tmp_path / f"{lanes} {number}"), state)
    assert re.findall(r"^warned .*", result.stdout, re.MULTILINE) == ["warned 1"]
    # torch unpickles a writer for each save; the workers of one must not outlive it.
    assert re.findall(r"^workers .*", result.stdout, re.MULTILINE) == ["workers 1 0", "workers 2 0"]


class Uncopyable:
    """Pickles, but cannot be copied."""

    def __deepcopy__(self, memo: object) -> Uncopyable:
        raise RuntimeError("not while I am holding a lock")


class Unpicklable:
    """Copies, but does not pickle."""

    def __deepcopy__(self, memo: object) -> Unpicklable:
        return self

    def __reduce__(self) -> str:
        raise TypeError("cannot pickle a socket")


def assert_next_save_works(writer: StorageWriter, tmp_path: Path) -> None:
    for is_async in (True, False):
        path = tmp_path / f"next {is_async}"
        save({"t": torch.arange(10), "o": "object"}, path, writer, is_async=is_async)
        assert_every_reader_finds({"t": torch.arange(10), "o": "object"}, path)


def test_an_object_that_cannot_be_copied(tmp_path: Path, writer: StorageWriter) -> None:
    response = start({"t": torch.ones(3), "a": {"b": [1, Uncopyable()]}}, tmp_path / "a", writer)
    assert response.staging_completion.result(WAIT_S) is None
    with pytest.raises(CheckpointException) as caught:
        finish(response)
    failure = failure_of(caught.value)
    assert isinstance(failure, StagingError)
    assert "a.b.1" in str(failure)
    assert "not while I am holding a lock" in str(failure)
    assert not (tmp_path / "a" / ".metadata").exists()
    assert_next_save_works(writer, tmp_path)


def test_an_object_that_cannot_be_pickled(tmp_path: Path, writer: StorageWriter, is_async: bool) -> None:
    with pytest.raises(CheckpointException, match="cannot pickle a socket"):
        save({"t": torch.ones(3), "o": Unpicklable()}, tmp_path / "a", writer, is_async=is_async)
    assert not (tmp_path / "a" / ".metadata").exists()
    assert_next_save_works(writer, tmp_path)


def test_a_state_that_exceeds_the_budget(tmp_path: Path) -> None:
    large = {"t": torch.arange(3 << 20, dtype=torch.int32)}
    with StorageWriter(ckpt_host_memory="8MiB") as writer:
        response = start(large, tmp_path / "a", writer)
        with pytest.raises(CheckpointException) as caught:
            finish(response)
        failure = failure_of(caught.value)
        assert isinstance(failure, StagingError)
        assert "--ckpt-host-memory" in str(failure)
        assert_next_save_works(writer, tmp_path)
        # What does not fit at once is written in waves by a save that knows its plan.
        save(large, tmp_path / "b", writer, is_async=False)
        assert_same(read_with_distckpt(tmp_path / "b"), large)


def test_a_state_that_exceeds_the_budget_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    small = {"t": torch.arange(10)}
    with StorageWriter(ckpt_host_memory="8MiB") as writer:
        save(small, tmp_path / "a", writer, is_async=True)
        with pytest.raises(CheckpointException):
            save({"t": torch.zeros(9 << 20, dtype=torch.uint8)}, tmp_path / "a", writer, is_async=True)
    assert_every_reader_finds(small, tmp_path / "a")


class FailingPlanner(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        raise RuntimeError("no plan today")


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
def test_a_failed_save_gives_its_memory_back(tmp_path: Path, is_async: bool) -> None:
    """Its error is part of a cycle with the frames that hold the staged state, until that is collected."""
    state = {"t": torch.arange(6 << 20, dtype=torch.uint8)}
    # A wait that memory does not end would last this long.
    with StorageWriter(ckpt_host_memory="8MiB", distributed_timeout_minutes=0.1) as writer:
        for number in range(2):
            with pytest.raises(CheckpointException, match="no plan today"):
                save(state, tmp_path / "a", writer, is_async=True, planner=FailingPlanner())
            save(state, tmp_path / str(number), writer, is_async=is_async)
            assert_same(read_with_torch(tmp_path / str(number)), state)


def test_aliases_and_tied_tensors(tmp_path: Path, writer: StorageWriter, is_async: bool) -> None:
    base = torch.arange(12.0)
    tied = torch.nn.Linear(3, 3)
    other = torch.nn.Linear(3, 3)
    other.weight = tied.weight
    shared = [1, 2]
    state = {
        "same": base,
        "same again": base,
        "view": base.view(3, 4),
        "transposed": base.view(3, 4).t(),
        "part": base[:4],
        "other dtype": base.view(torch.int32),
        "tied": tied.state_dict(),
        "other": other.state_dict(),
        "in a tuple": (base, base[2:], shared, shared),
        "list": [shared, shared],
    }
    save(state, tmp_path / "a", writer, is_async=is_async)
    expected = {**state, "tied": dict(tied.state_dict()), "other": dict(other.state_dict())}
    assert_every_reader_finds(expected, tmp_path / "a")


class OpaqueTensor(torch.Tensor):
    """A quantized weight as torchao has them: no memory of its own, and few operators."""

    quantized: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, quantized: torch.Tensor, scale: torch.Tensor) -> Self:  # noqa: ANN001
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, quantized.shape, strides=quantized.stride(), dtype=scale.dtype, device=quantized.device
        )
        assert isinstance(wrapper, cls)
        wrapper.quantized = quantized
        wrapper.scale = scale
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            return cls(func(args[0].quantized), func(args[0].scale))
        if func is aten.is_pinned.default:
            return False
        if func is aten.copy_.default:
            args[0].quantized.copy_(args[1].quantized)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        raise NotImplementedError(f"{cls.__name__} has no {func}")


class ScaledTensor(OpaqueTensor):
    """One that tells what it consists of."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["quantized", "scale"], None

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, torch.Tensor], context: None, size: torch.Size, stride: tuple[int, ...]
    ) -> ScaledTensor:
        scaled = cls(parts["quantized"], parts["scale"])
        assert isinstance(scaled, ScaledTensor)
        return scaled


@pytest.fixture
def scaled(request: pytest.FixtureRequest) -> Iterator[type[OpaqueTensor]]:
    with torch.serialization.safe_globals([ScaledTensor, OpaqueTensor]):
        yield request.param


@pytest.mark.parametrize("scaled", [ScaledTensor, OpaqueTensor], indirect=True)
def test_wrapper_subclasses_without_memory(
    tmp_path: Path, writer: StorageWriter, is_async: bool, scaled: type[OpaqueTensor]
) -> None:
    def make(seed: int) -> OpaqueTensor:
        torch.manual_seed(seed)
        return scaled(torch.randint(-9, 9, (5, 6), dtype=torch.int8).t(), torch.rand(()))

    tensor = make(1)
    with contextlib.suppress(RuntimeError):
        assert tensor.data_ptr() == 0
    expected = copy.deepcopy((tensor.quantized, tensor.scale))
    state: dict[str, Any] = {
        "weight": tensor,
        "plain": torch.ones(3),
        "in a tuple": (tensor, 1),
        "parameter": torch.nn.Parameter(make(1), requires_grad=False),
    }
    if is_async:
        response = start(state, tmp_path / "a", writer)
        tensor.quantized.zero_()
        tensor.scale.zero_()
        state["parameter"].quantized.zero_()
        finish(response)
    else:
        save(state, tmp_path / "a", writer, is_async=False)
    for reader in READERS:
        target = {"weight": make(2), "plain": torch.zeros(3), "in a tuple": None, "parameter": make(3)}
        found = load_into(target, tmp_path / "a", reader)
        for one in (found["weight"], found["in a tuple"][0], found["parameter"]):
            assert type(one) is scaled
            assert_same((one.quantized, one.scale), expected)
        assert_same(found["plain"], torch.ones(3))


def saved_item(path: Path, fqn: str) -> Any:
    """What torch.load makes of the bytes of one item: dcp.load cannot copy into every kind of tensor."""
    [(_, info)] = [
        item for item in FileSystemReader(path).read_metadata().storage_data.items() if item[0].fqn == fqn
    ]
    content = (path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
    return torch.load(io.BytesIO(content), weights_only=True)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_sparse_tensors(tmp_path: Path, writer: StorageWriter, is_async: bool) -> None:
    dense = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 0.0]])
    state = {"list": [dense.to_sparse()], "tuple": (dense.to_sparse(), dense.to_sparse_csr())}
    if is_async:
        response = start(state, tmp_path / "a", writer)
        state["list"][0]._values().zero_()
        state["tuple"][0]._values().zero_()
        state["tuple"][1].values().zero_()
        finish(response)
    else:
        save(state, tmp_path / "a", writer, is_async=False)
    found = [saved_item(tmp_path / "a", "list.0"), *saved_item(tmp_path / "a", "tuple")]
    assert [one.layout for one in found] == [torch.sparse_coo, torch.sparse_coo, torch.sparse_csr]
    for one in found:
        assert torch.equal(one.to_dense(), dense)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
def test_quantized_tensors(tmp_path: Path, writer: StorageWriter, is_async: bool) -> None:
    def quantize(values: torch.Tensor) -> torch.Tensor:
        return torch.quantize_per_tensor(values, 0.25, 3, torch.quint8)

    values = torch.arange(12.0).reshape(3, 4)
    channels = torch.quantize_per_channel(values, torch.ones(3) / 2, torch.arange(3), 0, torch.qint8)
    save({"q": quantize(values), "tuple": (channels,)}, tmp_path / "a", writer, is_async=is_async)
    for reader in READERS:
        found = load_into({"q": quantize(torch.zeros(3, 4)), "tuple": None}, tmp_path / "a", reader)
        assert (found["q"].q_scale(), found["q"].q_zero_point()) == (0.25, 3)
        assert torch.equal(found["q"].int_repr(), quantize(values).int_repr())
        assert torch.equal(found["tuple"][0].int_repr(), channels.int_repr())
        assert torch.equal(found["tuple"][0].q_per_channel_scales(), channels.q_per_channel_scales())


def test_a_meta_tensor_is_refused_by_name(tmp_path: Path, writer: StorageWriter, is_async: bool) -> None:
    state = {"t": torch.ones(2), "model": {"weight": torch.empty(3, device="meta")}}
    with pytest.raises(CheckpointException) as caught:
        save(state, tmp_path / "a", writer, is_async=is_async)
    failure = failure_of(caught.value)
    assert isinstance(failure, StagingError)
    assert re.search(r"model\.weight.* meta device", str(failure))
    assert not (tmp_path / "a" / ".metadata").exists()
    assert_next_save_works(writer, tmp_path)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_sharded_tensors_of_both_kinds(tmp_path: Path, writer: StorageWriter, is_async: bool) -> None:
    with warnings.catch_warnings():
        # torch's, for calling what replaces it.
        warnings.simplefilter("ignore", FutureWarning)
        upper, lower = torch.arange(12.0).reshape(2, 6), torch.arange(100.0, 118.0).reshape(3, 6)
        parts = [
            Shard.from_tensor_and_offsets(upper, [0, 0], 0),
            Shard.from_tensor_and_offsets(lower, [2, 0], 0),
        ]
        sharded = init_from_local_shards(parts, 5, 6)
        whole = torch.cat([upper, lower]).clone()
        local = torch.arange(20.0).reshape(4, 5)
        state: dict[str, Any] = {
            "sharded": sharded,
            "dtensor": distribute_tensor(local, DeviceMesh("cpu", [0]), [ShardPlacement(0)]),
        }
        if is_async:
            response = start(state, tmp_path / "a", writer)
            upper.zero_()
            lower.zero_()
            state["dtensor"].to_local().zero_()
            finish(response)
        else:
            save(state, tmp_path / "a", writer, is_async=False)
        expected = {"sharded": whole, "dtensor": torch.arange(20.0).reshape(4, 5)}
        assert_same(read_with_torch(tmp_path / "a"), expected)
        assert_same(read_with_distckpt(tmp_path / "a"), expected)


ONE_LANE = """
import sys
import distckpt.commit, distckpt.lanes, distckpt.worker
assert "torch" not in sys.modules
assert not any(name.partition(".")[0] == "multiprocessing" for name in sys.modules)

import json, warnings
import psutil, torch
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from distckpt import StorageWriter, observe

warnings.simplefilter("ignore")
process = psutil.Process()
seen = []
observe.subscribe(lambda event: seen.append((event.name, len(process.children(recursive=True)))))
state = {"t": torch.arange(1000), "o": "object"}
with StorageWriter(dist_ckpt_workers=int(sys.argv[2])) as writer:
    save(state, checkpoint_id=sys.argv[1] + "/a", storage_writer=writer)
    async_save(state, checkpoint_id=sys.argv[1] + "/b", storage_writer=writer).upload_completion.result()
print(json.dumps(seen))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_one_worker_is_no_process(tmp_path: Path, workers: int) -> None:
    result = subprocess.run(
        [sys.executable, "-c", ONE_LANE, str(tmp_path), str(workers)],
        check=True, capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    seen = json.loads(result.stdout)
    names = [name for name, _ in seen]
    assert names.count("committed") == 2
    assert "parts.pushed" in names
    # With more than one the same probe sees them.
    assert max(children for _, children in seen) == (0 if workers == 1 else workers)
    for name in ("a", "b"):
        assert_same(read_with_torch(tmp_path / name), {"t": torch.arange(1000), "o": "object"})

"""torch's cached plans: a plan that is replayed carries nothing of the save that it was made for."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from distckpt import StorageWriter
from integration.checkpoints import (
    assert_every_reader_finds,
    assert_same,
    read_with_distckpt,
    read_with_torch,
    save,
)

pytestmark = pytest.mark.slow


class CachingPlanner(DefaultSavePlanner):
    """Also says how often the cached plan was replayed."""

    replayed = 0

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if not new_plan.usable:
            CachingPlanner.replayed += 1
        return super().finish_plan(new_plan)


@pytest.fixture(autouse=True)
def empty_caches() -> Iterator[None]:
    """torch keeps them on the class, for the whole process."""
    caches: list[dict[str, Any]] = [
        SavePlanner._cached_save_plan,
        SavePlanner._cached_final_save_plan,
        SavePlanner._cached_all_plans,
        SavePlanner._cached_global_plan,
        SavePlanner._cached_metadata,
    ]
    for cache in caches:
        cache.clear()
    CachingPlanner.replayed = 0
    yield
    for cache in caches:
        cache.clear()


@pytest.fixture(params=[1, 2], ids=["1-worker", "2-workers"])
def writer(request: pytest.FixtureRequest) -> Iterator[StorageWriter]:
    with StorageWriter(dist_ckpt_workers=request.param) as opened:
        yield opened


@pytest.fixture(params=[False, True], ids=["save", "async_save"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def _state(number: int) -> dict[str, Any]:
    return {
        "a": torch.full((300, 4), float(number)),
        "b": {"c": torch.full((1 << 20,), number % 100, dtype=torch.int8)},
        "number": number,
    }


def _save_ids(path: Path) -> set[str]:
    return {entry.name for entry in (path / ".distckpt").iterdir() if entry.is_dir()}


def _images(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir() if ".distcp" in entry.name}


def _manifest(path: Path) -> dict[str, Any]:
    [file] = path.glob(".distckpt/*/rank-00000.json")
    manifest = json.loads(file.read_bytes())
    assert isinstance(manifest, dict)
    assert manifest["save_id"] == file.parent.name
    return manifest


def test_repeated_saves_into_one_directory(tmp_path: Path, writer: StorageWriter, is_async: bool) -> None:
    path = tmp_path / "a"
    save_ids: list[str] = []
    names: list[set[str]] = []
    for number in range(4):
        save(_state(number), path, writer, is_async=is_async, planner=CachingPlanner())
        assert_same(read_with_torch(path), _state(number))
        assert_same(read_with_distckpt(path), _state(number))
        manifest = _manifest(path)
        save_ids.append(manifest["save_id"])
        names.append(set(manifest["files"]))
        # The checkpoint before it was swept: what is there is what this save wrote.
        assert _images(path) == names[-1]
        assert _save_ids(path) == {save_ids[-1]}
    assert CachingPlanner.replayed == 3
    assert len(set(save_ids)) == 4
    # Not even a name that a sweep has freed comes back.
    for before, after in itertools.combinations(names, 2):
        assert before.isdisjoint(after)


def test_repeated_saves_into_other_directories(tmp_path: Path, writer: StorageWriter, is_async: bool) -> None:
    paths = [tmp_path / str(number) for number in range(4)]
    for number, path in enumerate(paths):
        save(_state(number), path, writer, is_async=is_async, planner=CachingPlanner())
    assert CachingPlanner.replayed == 3
    save_ids = set()
    for number, path in enumerate(paths):
        assert_same(read_with_torch(path), _state(number))
        assert_same(read_with_distckpt(path), _state(number))
        metadata = FileSystemReader(path).read_metadata()
        assert metadata.storage_meta is not None
        assert metadata.storage_meta.checkpoint_id == path
        assert metadata.storage_meta.save_id == _manifest(path)["save_id"]
        save_ids.add(metadata.storage_meta.save_id)
    assert len(save_ids) == 4


def test_a_key_that_appears_late_is_saved(tmp_path: Path, writer: StorageWriter, is_async: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    for number in range(4):
        # The optimizer has no state before its first step.
        state = {"parameter": parameter, "optimizer": optimizer.state_dict()}
        save(state, tmp_path / "a", writer, is_async=is_async, planner=CachingPlanner())
        found = read_with_distckpt(tmp_path / "a")
        assert_same(found["parameter"], parameter.detach())
        moments = found["optimizer"].get("state", {})
        assert (number > 0) == bool(moments)
        if moments:
            assert_same(moments["0"], optimizer.state_dict()["state"][0])
        parameter.grad = torch.ones(3)
        optimizer.step()
    # Twice another plan, then the same again.
    assert CachingPlanner.replayed == 2


def test_a_dtype_that_changes_under_a_cached_plan(
    tmp_path: Path, writer: StorageWriter, is_async: bool
) -> None:
    values = torch.tensor([1.0, 1e-7, 1 / 3])
    dtypes = [torch.float16, torch.float64, torch.float64, torch.bfloat16, torch.int32]
    for number, dtype in enumerate(dtypes):
        state = {"changes": values.to(dtype), "stays": values}
        path = tmp_path / str(number)
        save(state, path, writer, is_async=is_async, planner=CachingPlanner())
        # Into nothing: what is loaded has the dtype of the metadata, which the cached plan states wrongly.
        assert_every_reader_finds(state, path)
        target = {"changes": torch.zeros(3, dtype=dtype), "stays": torch.zeros(3)}
        state_dict_loader.load(target, storage_reader=FileSystemReader(path))
        assert_same(target, state, str(dtype))
    # torch takes plans for equal whatever their dtypes.
    assert CachingPlanner.replayed == len(dtypes) - 1


def test_a_shape_that_changes_under_a_cached_plan(
    tmp_path: Path, writer: StorageWriter, is_async: bool
) -> None:
    for shape in [(4, 3), (4, 3), (3, 4), (12,), (5, 3), (0, 3), ()]:
        state = {"t": torch.rand(shape), "o": shape}
        save(state, tmp_path / "a", writer, is_async=is_async, planner=CachingPlanner())
        assert_same(read_with_torch(tmp_path / "a"), state)
    assert CachingPlanner.replayed == 1


def test_a_cached_plan_after_a_failed_save(tmp_path: Path, writer: StorageWriter) -> None:
    (tmp_path / "file").write_text("no directory")
    for _ in range(2):
        save(_state(1), tmp_path / "a", writer, is_async=False, planner=CachingPlanner())
    with pytest.raises(BaseException, match="cannot make directory"):
        save(_state(2), tmp_path / "file" / "a", writer, is_async=False, planner=CachingPlanner())
    save(_state(3), tmp_path / "b", writer, is_async=False, planner=CachingPlanner())
    assert_every_reader_finds(_state(3), tmp_path / "b")
    assert_every_reader_finds(_state(1), tmp_path / "a")


def test_the_frame_of_a_large_tensor_costs_no_memory_for_its_payload() -> None:
    script = """
import torch
from distckpt.formats import open_format

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

file_format = open_format("torch_dist")
file_format.frame(torch.float32, (3,), (1,))
before = peak()
prefix, suffix = file_format.frame(torch.float32, (3 << 28,), (1,))
print(peak() - before, len(prefix) + len(suffix))
"""
    result = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=50
    )
    grown_kib, literal_bytes = map(int, result.stdout.split())
    assert grown_kib < 64 << 10
    assert 0 < literal_bytes < 10_000

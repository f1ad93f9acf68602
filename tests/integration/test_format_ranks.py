"""Saves of several ranks as safetensors and zarr: loaded at other world sizes, and read by stock tools."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from distckpt import Checkpointer, SavePlanner, StorageWriter
from distckpt.cli import main
from distckpt.errors import CheckpointError
from integration.ranks import states
from integration.ranks.world import Ranks

pytestmark = pytest.mark.slow

FORMATS = ("safetensors", "zarr")
WAYS = ("save", "async_save", "checkpointer", "checkpointer again")
SETTINGS: dict[str, dict[str, Any]] = {"safetensors": {"ckpt_objects": "sidecar"}, "zarr": {}}
UNKNOWN_TO_SAFETENSORS = {torch.complex128}
EMPTY = {"no rows", "no columns", "empty"}


def save_in_every_way(root: str, file_format: str) -> None:
    """Rank function: one checkpoint for each way to save."""
    settings = {"ckpt_format": file_format, **SETTINGS[file_format]}
    with StorageWriter(dist_ckpt_workers=2, **settings) as writer:
        state = states.make(0)
        state_dict_saver.save(state, checkpoint_id=f"{root}/save", storage_writer=writer)
        response: Any = state_dict_saver.async_save(
            state, checkpoint_id=f"{root}/async_save", storage_writer=writer
        )
        response.staging_completion.result()
        states.scramble(state)
        response.upload_completion.result()
    with Checkpointer(root, async_save=True, **settings) as checkpointer:
        # The first one shows what ranks have in common, the second one shares the writing.
        for step in range(2):
            state = states.make(0)
            handle = checkpointer.save(step, state)
            states.scramble(state)
            handle.result()


def paths_in(root: Path) -> list[Path]:
    return [root / "save", root / "async_save", root / "step-00000000", root / "step-00000001"]


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[Path]]:
    """Checkpoints in every way by a world of the given size."""
    written: dict[tuple[str, int], Path] = {}

    def get(file_format: str, world: int) -> list[Path]:
        if (file_format, world) not in written:
            root = tmp_path_factory.mktemp(f"{file_format}-{world}")
            ranks.run(world, save_in_every_way, root=str(root), file_format=file_format)
            written[file_format, world] = root
        return paths_in(written[file_format, world])

    return get


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 2), (2, 1), (2, 4), (4, 1), (4, 2), (4, 4)])
def test_every_layout_loads_at_every_world_size(
    ranks: Ranks, saved: Callable[[str, int], list[Path]], file_format: str, saved_by: int, loaded_by: int
) -> None:
    paths = saved(file_format, saved_by)
    found = ranks.run(loaded_by, states.load, reader="distckpt", checkpoints={str(path): 0 for path in paths})
    assert found == [[]] * loaded_by
    for path in paths:
        assert main(["verify", str(path)]) == 0


def expected_tensors() -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield container, name and values of all whole tensors."""
    for name, (shape, dtype, _) in {**states.SHARDED, **states.ON_A_GRID}.items():
        yield "sharded", name, states.values(name, shape, dtype, 0)
    for name, (shape, dtype) in states.PLAIN.items():
        yield "plain", name, states.values(name, shape, dtype, 0)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_torch_loads_safetensors(saved: Callable[[str, int], list[Path]], world: int) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    expected: dict[str, dict[str, torch.Tensor]] = {"sharded": {}, "plain": {}}
    for container, name, tensor in expected_tensors():
        if tensor.dtype not in UNKNOWN_TO_SAFETENSORS:
            expected[container][name] = tensor
    for path in saved("safetensors", world):
        found = {
            key: {name: torch.zeros_like(one) for name, one in own.items()} for key, own in expected.items()
        }
        state_dict_loader.load(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
        assert not states.differences(found, expected)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_tensorstore_reads_zarr(saved: Callable[[str, int], list[Path]], world: int) -> None:
    import tensorstore

    for path in saved("zarr", world):
        for container, name, tensor in expected_tensors():
            folder = path / container / quote(name, safe=",")
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}}
            array = tensorstore.open(spec, read=True).result()
            assert array.dtype.name.replace("2d", "2") == str(tensor.dtype).removeprefix("torch.")
            found = array.read().result()
            assert found.shape == tuple(tensor.shape)
            assert found.tobytes() == states.local_bytes(tensor.contiguous()).numpy().tobytes()


def test_zarr_and_xarray_read_what_they_have_types_for(saved: Callable[[str, int], list[Path]]) -> None:
    import xarray
    import zarr

    path = saved("zarr", 4)[3]
    for consolidated in (True, False):
        group: Any = zarr.open_group(path, mode="r", use_consolidated=consolidated)
        for container, name, tensor in expected_tensors():
            if tensor.dtype not in {torch.bfloat16, torch.float8_e4m3fn}:
                found: Any = group[f"{container}/{quote(name, safe=',')}"][...]
                assert found.shape == tuple(tensor.shape)
                assert found.tobytes() == tensor.numpy().tobytes()
    dataset = xarray.open_zarr(path, group="sharded", consolidated=True)
    assert dataset["even"].shape == (8, 6)


def save_different_tensors(path: str) -> str:
    """Rank function: a plain tensor of one name has another value on each rank."""
    rank = torch.distributed.get_rank()
    with Checkpointer(path, ckpt_format="zarr") as checkpointer:
        try:
            checkpointer.save(0, {"a": torch.full((3,), float(rank))}).result()
        except CheckpointError as error:
            return str(error)
    return ""


def test_different_tensors_of_one_name_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    errors = ranks.run(2, save_different_tensors, path=str(tmp_path))
    assert all(errors)
    assert any("a/c.0" in error for error in errors)
    assert not list(tmp_path.glob("*/.metadata"))


def save_with_our_planner(path: str) -> list[str]:
    """Rank function: replicas, through the planner that splits them."""
    told = []
    for file_format, is_parallel in (("zarr", True), ("zarr", False), ("safetensors", True)):
        state = {"a": torch.arange(1 << 20, dtype=torch.float32).reshape(1 << 10, -1), "b": torch.ones(3)}
        with StorageWriter(f"{path}/{file_format}-{is_parallel}", ckpt_format=file_format) as writer:
            planner = SavePlanner(fully_parallel_save=is_parallel)
            with contextlib.suppress(Exception):
                try:
                    state_dict_saver.save(state, storage_writer=writer, planner=planner)
                except BaseException as error:  # noqa: BLE001 - told to the test
                    told.append(str(error).strip().splitlines()[-1])
                else:
                    told.append("")
    return told


def test_the_planner_that_splits_replicas(ranks: Ranks, tmp_path: Path) -> None:
    for refused, lowest, safetensors in ranks.run(2, save_with_our_planner, path=str(tmp_path)):
        assert "SavePlanner(fully_parallel_save=False)" in refused
        assert (lowest, safetensors) == ("", "")
    for name in ("zarr-False", "safetensors-True"):
        assert main(["verify", str(tmp_path / name)]) == 0

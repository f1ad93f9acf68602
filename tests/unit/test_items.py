"""What a rank writes as items: what is cut along a grid, what is put aside in one piece, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.two_tensor import TwoTensor

from distckpt import Sharded, StagingError, StorageReader, StorageWriter
from distckpt.formats import FORMATS, open_format
from distckpt.items import cut
from distckpt.ownership import Piece

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
    from torch.distributed.device_mesh import DeviceMesh

ROWS = 9000
"""Of 4 KiB: more than fit a chunk."""


def wrapped(values: torch.Tensor) -> torch.Tensor:
    make: Any = TwoTensor
    wrapper: torch.Tensor = make(values, values)
    return wrapper


def sparse(rows: int, columns: int, device: str = "cpu") -> torch.Tensor:
    indices = torch.empty(2, 0, dtype=torch.int64, device=device)
    values = torch.empty(0, device=device)
    return torch.sparse_coo_tensor(indices, values, (rows, columns), check_invariants=True)


def num_cuts(value: torch.Tensor) -> int:
    """Return into how many chunks `value` is cut; 0: it is none."""
    pieces = [Piece(item, item) for item in _create_write_items("t", value)]
    found = cut(pieces, {"t": value}.__getitem__, open_format("zarr"))
    if all(piece.grid is None for piece in found):
        assert found == pieces
        return 0
    return len(found)


def test_only_plain_memory_is_cut() -> None:
    values = torch.zeros(1).expand(ROWS, 1024)
    assert num_cuts(values) == 2
    assert num_cuts(torch.nn.Parameter(values)) == 2
    assert num_cuts(AsyncCollectiveTensor(values)) == 2
    assert num_cuts(wrapped(values)) == 0
    assert num_cuts(torch.nn.Parameter(wrapped(values))) == 0
    assert num_cuts(sparse(ROWS, 1024)) == 0
    # More chunks than a directory takes, if it were cut.
    assert num_cuts(sparse(1 << 24, 1 << 24)) == 0


def test_of_a_global_tensor_what_this_rank_holds_is_looked_at(mesh: DeviceMesh) -> None:
    values = torch.zeros(1).expand(ROWS, 1024)
    for local, expected in ((values, 2), (AsyncCollectiveTensor(values), 2), (wrapped(values), 0)):
        assert num_cuts(DTensor.from_local(local, mesh, [Replicate()], run_check=False)) == expected
    for local, expected in ((values, 2), (wrapped(values), 0)):
        assert num_cuts(Sharded(local.shape, [((0, 0), local)])) == expected


def error_of_save(
    path: Path, value: torch.Tensor, file_format: str, planner: SavePlanner | None = None
) -> str:
    with (
        StorageWriter(path, ckpt_format=file_format, ckpt_host_memory="16MiB") as writer,
        pytest.raises(CheckpointException) as caught,
    ):
        state_dict_saver.save({"m": {"t": value}}, storage_writer=writer, planner=planner, no_dist=True)
    [(error, _)] = caught.value.failures.values()
    assert isinstance(error, StagingError)
    assert "'m.t'" in str(error)
    return str(error)


@pytest.mark.parametrize("file_format", ["torch_dist", "zarr"])
@pytest.mark.parametrize("kind", ["wrapper", "sparse"])
def test_what_torch_save_does_not_save_is_named(tmp_path: Path, file_format: str, kind: str) -> None:
    value = sparse(2, 2, "meta") if kind == "sparse" else wrapped(torch.ones(2, device="meta"))
    assert "meta" in error_of_save(tmp_path, value, file_format)


class Wrapping(DefaultSavePlanner):
    """Saves other tensors than those of the state."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - torch's name
        return wrapped(object)


def test_a_planner_that_makes_something_else_of_an_array(tmp_path: Path) -> None:
    assert "TwoTensor" in error_of_save(tmp_path, torch.ones(3), "zarr", Wrapping())


@pytest.mark.parametrize("file_format", FORMATS)
def test_what_a_collective_has_promised_is_plain_memory(
    tmp_path: Path, mesh: DeviceMesh, file_format: str
) -> None:
    promised: Any = AsyncCollectiveTensor(torch.arange(4.0))
    state = {"t": promised, "d": DTensor.from_local(promised, mesh, [Replicate()], run_check=False)}
    with StorageWriter(tmp_path, ckpt_format=file_format, ckpt_host_memory="16MiB") as writer:
        state_dict_saver.save(state, storage_writer=writer, no_dist=True)
    assert bool(list(tmp_path.glob("*.distcp*"))) == (file_format == "torch_dist")
    target = {name: torch.zeros(4) for name in state}
    state_dict_loader.load(target, storage_reader=StorageReader(tmp_path), no_dist=True)
    for found in target.values():
        assert torch.equal(found, torch.arange(4.0))

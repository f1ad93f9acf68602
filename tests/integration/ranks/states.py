"""States whose values follow from a seed, sharded in every way, and what a load of them must give.

Imports no distckpt at its top, so that its functions run on ranks without it.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

Layout = tuple[Sequence[int], torch.dtype, Sequence[Placement]]

ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()
SHARDED: dict[str, Layout] = {
    "even": ((8, 6), torch.float32, [ROWS]),
    "columns": ((5, 8), torch.bfloat16, [COLUMNS]),
    "uneven rows": ((7, 3), torch.float64, [ROWS]),
    "uneven columns": ((2, 7), torch.uint8, [COLUMNS]),
    "fewer rows than ranks": ((3, 5), torch.float16, [ROWS]),
    "one row": ((1, 4), torch.int64, [ROWS]),
    "no rows": ((0, 4), torch.float32, [ROWS]),
    "no columns": ((4, 0), torch.float32, [ROWS]),
    "one dim": ((13,), torch.int32, [ROWS]),
    "last of three dims": ((2, 3, 4), torch.int16, [Shard(2)]),
    "replicated": ((4, 3), torch.float32, [WHOLE]),
    "scalar": ((), torch.float32, [WHOLE]),
    "one element": ((1,), torch.complex128, [ROWS]),
    "float8": ((8, 4), torch.float8_e4m3fn, [ROWS]),
    "unsigned": ((6, 2), torch.uint16, [ROWS]),
    "larger than a page": ((640, 33), torch.float32, [ROWS]),
}
ON_A_GRID: dict[str, Layout] = {
    "rows and columns": ((8, 6), torch.float32, [ROWS, COLUMNS]),
    "columns and rows": ((6, 4), torch.complex64, [COLUMNS, ROWS]),
    "uneven grid": ((5, 3), torch.bfloat16, [ROWS, COLUMNS]),
    "grid of one row": ((1, 5), torch.float32, [ROWS, COLUMNS]),
    "rows twice": ((8, 3), torch.float32, [ROWS, ROWS]),
    "uneven rows twice": ((7, 2), torch.float32, [ROWS, ROWS]),
    "few rows twice": ((3, 2), torch.int8, [ROWS, ROWS]),
    "rows, replicated": ((6, 4), torch.float64, [ROWS, WHOLE]),
    "replicated, uneven rows": ((5, 4), torch.float16, [WHOLE, ROWS]),
    "replicated twice": ((3, 3), torch.int32, [WHOLE, WHOLE]),
    "scalar on a grid": ((), torch.float64, [WHOLE, WHOLE]),
}
PLAIN: dict[str, tuple[Sequence[int], torch.dtype]] = {
    "matrix": ((3, 4), torch.float32),
    "scalar": ((), torch.bfloat16),
    "empty": ((0,), torch.float32),
    "mask": ((9,), torch.bool),
    "counter": ((1,), torch.int64),
    "phase": ((2, 2), torch.complex64),
}


def values(name: str, shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits, NaNs and infinities among them, that follow from the name and the seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.randint(2, (count,), generator=generator).bool().reshape(shape)
    bits = torch.randint(256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return (
        torch.zeros(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(shape)
    )


def line_mesh(group: distributed.ProcessGroup | None = None) -> DeviceMesh:
    return DeviceMesh.from_group(group or distributed.group.WORLD, "cpu")  # type: ignore[arg-type]


def grid_mesh() -> DeviceMesh:
    """2 x 2 for four ranks, 1 x 2 for two, 1 x 1 for one."""
    world = distributed.get_world_size()
    columns = 2 if world % 2 == 0 else 1
    return init_device_mesh("cpu", (world // columns, columns), mesh_dim_names=("replicate", "shard"))


def shard(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Take this rank's part of `full`, which every rank has."""
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def _layouts() -> Iterator[tuple[str, DeviceMesh, Layout]]:
    mesh = line_mesh()
    for name, layout in SHARDED.items():
        yield name, mesh, layout
    mesh = grid_mesh()
    strided = [_StridedShard(0, split_factor=mesh.size(1)), Shard(0)]
    for name, layout in {**ON_A_GRID, "strided rows": ((8, 3), torch.float32, strided)}.items():
        yield name, mesh, layout


def make(seed: int | None, large_bytes: int = 0) -> dict[str, Any]:
    """Make the state of `seed` for this world.

    Args:
        seed: None for a state of the same form to load into, all zeros.
        large_bytes: Size of one tensor more, which is sharded by rows; a multiple of 64 for each rank.
    """

    def fill(name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return zeros(shape, dtype) if seed is None else values(name, shape, dtype, seed)

    sharded = {
        name: shard(fill(name, shape, dtype), mesh, placements)
        for name, mesh, (shape, dtype, placements) in _layouts()
    }
    if large_bytes:
        tile = fill("large", (large_bytes // 64,), torch.float64)
        sharded["large"] = shard(tile.repeat(8), line_mesh(), [ROWS])
    return {
        "sharded": sharded,
        "plain": {name: fill(name, shape, dtype) for name, (shape, dtype) in PLAIN.items()},
        "objects": {
            "epoch": seed,
            "schedule": [seed, {"warm-up": (seed, "ü")}],
            "nothing": None,
        },
    }


def scramble(state: Mapping[Any, Any]) -> None:
    """Overwrite every tensor in place."""
    for value in state.values():
        # A `Sharded` has its own tensors: this module is imported without distckpt, too.
        if hasattr(value, "tensors"):
            scramble(dict(enumerate(value.tensors)))
        elif isinstance(value, torch.Tensor):
            local_bytes(value).fill_(0xA5)
        elif isinstance(value, Mapping):
            scramble(value)


def local_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank's part of `tensor`."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = torch.empty(0, dtype=torch.uint8)
    return flat.set_(
        local.untyped_storage(), local.storage_offset() * local.element_size(), (local.nbytes,), (1,)
    )


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Say where two states differ: bits, dtypes, shapes, types and values."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(found, torch.Tensor) or (found.dtype, found.shape) != (
            expected.dtype,
            expected.shape,
        ):
            return [f"{where}: {type(found).__name__} instead of {expected.dtype} {tuple(expected.shape)}"]
        if hasattr(expected, "tensors"):
            return differences(
                dict(enumerate(getattr(found, "tensors", []))), dict(enumerate(expected.tensors)), where
            )
        same = torch.equal(local_bytes(found), local_bytes(expected))
        return [] if same else [f"{where}: other values"]
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or found.keys() != expected.keys():
            return [f"{where}: {found!r} instead of the keys {sorted(expected)}"]
        return [line for key in expected for line in differences(found[key], expected[key], f"{where}/{key}")]
    return (
        []
        if found == expected and type(found) is type(expected)
        else [f"{where}: {found!r} is not {expected!r}"]
    )


def open_reader(reader: str, path: str | Path) -> StorageReader:
    """Open a checkpoint with torch's reader ("torch") or ours ("distckpt")."""
    if reader == "torch":
        return FileSystemReader(path)
    from distckpt import StorageReader as DistckptReader

    return DistckptReader(path)


def load(reader: str, checkpoints: Mapping[str, int], large_bytes: int = 0) -> list[str]:
    """Load checkpoints of `make` on this world.

    Args:
        reader: "torch" or "distckpt".
        checkpoints: For each path, the seed of what it must hold.
        large_bytes: As for `make`.

    Returns:
        What differs.
    """
    found = []
    for path, seed in checkpoints.items():
        state = make(None, large_bytes)
        state_dict_loader.load(state, storage_reader=open_reader(reader, path))
        found += [f"{Path(path).name}{line}" for line in differences(state, make(seed, large_bytes))]
    return found


def digest(tensor: torch.Tensor) -> str:
    """Digest of the bits of a whole tensor, gathered from all ranks."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    raw = local_bytes(whole.detach().contiguous())
    return f"{whole.dtype} {tuple(whole.shape)} {hashlib.sha256(raw.numpy().tobytes()).hexdigest()}"

"""Arrays of zarr, opened by those who know nothing of distckpt: zarr-python, tensorstore and xarray.

zarr-python 3.1 knows neither bfloat16 nor float8, and xarray reads through it: these are tensorstore's alone.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crc32c
import pytest
import torch

from distckpt.formats import Entry
from distckpt.formats.zarr import Zarr, array_path
from unit.tensors import payload_of

Keys = tuple[str | int, ...]
Read = Callable[[Path, str], Any]

CORE = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
BEYOND_CORE = [
    torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
]  # fmt: skip
ODD_KEYS: list[str | int] = [
    "layers.0.weight", "", "%", "a/b", "a b", "é", "c", "c.0", "zarr.json", "__x", ".h", "..", "~", "\n", 0,
    "x" * 255,
]  # fmt: skip


def write(
    root: Path, state: dict[Keys, torch.Tensor], *, num_parts: int = 1, dim: int = 0, checksums: bool = True
) -> None:
    """Write a store by the words of the format alone: every tensor on `num_parts` ranks along `dim`."""
    file_format = Zarr(checksums=checksums)
    arrays = {}
    for path, tensor in state.items():
        shape, fqn = tuple(tensor.shape), ".".join(map(str, path))
        grid = file_format.grid(shape, _boxes(shape, num_parts, dim), tensor.dtype.itemsize)
        arrays[fqn] = [list(path), list(shape), str(tensor.dtype).removeprefix("torch."), list(grid)]
        if tensor.numel() == 0:
            continue
        for corner in itertools.product(*(range(0, n, step) for n, step in zip(shape, grid, strict=True))):
            part = tensor[tuple(slice(at, at + step) for at, step in zip(corner, grid, strict=True))]
            entry = Entry(fqn, tensor.dtype, tuple(part.shape), corner, path, shape, grid)
            prefix, suffix = file_format.frame_chunk(entry)
            data = bytearray(prefix + payload_of(part) + suffix)
            layout = file_format.lay_out([len(data)], [entry])
            if layout.is_sealed:
                data[-4:] = crc32c.crc32c(bytes(data[:-4])).to_bytes(4, "little")
            _put(root, layout.name, bytes(data))
    for name, document in file_format.documents({}, arrays, ()).items():
        _put(root, name, document)


def _boxes(shape: tuple[int, ...], num_parts: int, dim: int) -> list[Any]:
    if dim >= len(shape):
        return [((0,) * len(shape), shape)]
    boxes = []
    step = max(1, -(-shape[dim] // num_parts))
    for start in range(0, shape[dim], step):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = start, min(step, shape[dim] - start)
        boxes.append((tuple(offsets), tuple(sizes)))
    return boxes


def _put(root: Path, name: str, data: bytes) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)


def by_zarr_python(root: Path, name: str) -> Any:
    import zarr

    return zarr.open_array(str(root / name), mode="r")[...]


def by_consolidated_group(root: Path, name: str) -> Any:
    import zarr

    group: Any = zarr.open_group(str(root), mode="r", use_consolidated=True)
    return group[name][...]


def by_tensorstore(root: Path, name: str) -> Any:
    import tensorstore

    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{root / name}/"}}
    return tensorstore.open(spec, read=True).result().read().result()


def by_xarray(root: Path, name: str) -> Any:
    import xarray

    folder, _, own = name.rpartition("/")
    return xarray.open_zarr(str(root), group=folder or None, chunks=None)[own].values


READERS = [by_zarr_python, by_consolidated_group, by_tensorstore, by_xarray]


def assert_same(found: Any, tensor: torch.Tensor) -> None:
    assert found.shape == tuple(tensor.shape)
    assert str(found.dtype) == str(tensor.dtype).removeprefix("torch.")
    assert found.tobytes() == payload_of(tensor)


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    size = int(torch.tensor(shape).prod()) * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("reader", READERS)
def test_every_dtype_of_the_core(tmp_path: Path, reader: Read) -> None:
    state: dict[Keys, torch.Tensor] = {("m", str(dtype)): random_tensor(dtype, 5, 3) for dtype in CORE}
    # What stands for "missing" in the document is a value like any other.
    state["m", "zeros"] = torch.zeros(3, dtype=torch.int32)
    write(tmp_path, state, num_parts=2)
    for path, tensor in state.items():
        assert_same(reader(tmp_path, array_path(path)), tensor)


@pytest.mark.parametrize("dtype", BEYOND_CORE, ids=str)
def test_dtypes_beyond_the_core_are_read_by_tensorstore_alone(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype, 5, 3)
    write(tmp_path, {("m", "w"): tensor}, num_parts=2)
    assert_same(by_tensorstore(tmp_path, "m/w"), tensor)
    # When zarr-python learns them, `_BEYOND_CORE` can go.
    with pytest.raises(ValueError, match="No Zarr data type found"):
        by_zarr_python(tmp_path, "m/w")


def test_dtypes_beyond_the_core_keep_nobody_from_opening_the_others(tmp_path: Path) -> None:
    import xarray
    import zarr

    write(tmp_path, {("m", "b"): torch.ones(4).bfloat16(), ("m", "f"): torch.ones(4), ("s",): torch.ones(())})
    group = zarr.open_group(str(tmp_path), mode="r")
    assert sorted(name for name, _ in group.members(max_depth=None)) == ["m", "m/f", "s"]
    assert list(xarray.open_zarr(str(tmp_path), group="m", chunks=None).data_vars) == ["f"]
    # Without the document of the root there is no such help.
    with pytest.raises(ValueError, match="No Zarr data type found"):
        list(zarr.open_group(str(tmp_path), mode="r", use_consolidated=False).members(max_depth=None))
    with pytest.raises(ValueError, match="No Zarr data type found"):
        xarray.open_zarr(str(tmp_path), group="m", chunks=None, consolidated=False)


def test_tensorstore_has_more_dtypes_than_we_write(tmp_path: Path) -> None:
    """float8_e8m0fnu has no zero: as fill_value, 0.0 comes out as 2**-127, 1.0 as 2**-64."""
    import tensorstore

    metadata = {"shape": [1], "data_type": "float8_e8m0fnu", "fill_value": 1.0}
    spec = {"driver": "zarr3", "kvstore": {"driver": "memory"}, "metadata": metadata}
    array = tensorstore.open(spec, create=True).result()
    # When this fails, tensorstore has been mended, and `_TYPES` may take it in.
    assert array.read().result().tobytes() != b"\x7f"
    assert not Zarr().holds(torch.float8_e8m0fnu)


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("reader", READERS)
def test_padding_and_borders(tmp_path: Path, reader: Read, checksums: bool) -> None:
    state: dict[Keys, torch.Tensor] = {
        ("ragged",): torch.randn(10, 4),
        ("line",): torch.randn(7),
        ("cube",): torch.randn(5, 4, 6),
    }
    write(tmp_path, state, num_parts=3, checksums=checksums)
    assert sorted(file.name for file in (tmp_path / "ragged").glob("c*")) == ["c.0.0", "c.1.0", "c.2.0"]
    # 10 rows are 4, 4 and 2: the last chunk is as large as the others.
    assert {file.stat().st_size for file in (tmp_path / "ragged").glob("c*")} == {4 * 4 * 4 + 4 * checksums}
    for path, tensor in state.items():
        assert_same(reader(tmp_path, array_path(path)), tensor)


@pytest.mark.parametrize("reader", READERS)
def test_columns_that_ranks_share_unevenly(tmp_path: Path, reader: Read) -> None:
    tensor = torch.randn(3, 10)
    write(tmp_path, {("w",): tensor}, num_parts=3, dim=1)
    assert len(list((tmp_path / "w").glob("c*"))) == 5, "of 2 columns, for which no padding is needed"
    assert_same(reader(tmp_path, "w"), tensor)


@pytest.mark.parametrize("reader", READERS)
def test_scalars_and_arrays_without_elements(tmp_path: Path, reader: Read) -> None:
    state: dict[Keys, torch.Tensor] = {
        ("scalar",): torch.tensor(2.5),
        ("deep", "step"): torch.tensor(7),
        ("empty",): torch.empty(0),
        ("deep", "empty"): torch.empty(3, 0, 2),
    }
    write(tmp_path, state, num_parts=2)
    assert (tmp_path / "scalar" / "c").is_file()
    assert [file.name for file in (tmp_path / "empty").iterdir()] == ["zarr.json"]
    for path, tensor in state.items():
        assert_same(reader(tmp_path, array_path(path)), tensor)


@pytest.mark.parametrize("reader", READERS)
def test_keys_of_every_kind(tmp_path: Path, reader: Read) -> None:
    state: dict[Keys, torch.Tensor] = {
        ("m", key): torch.arange(number + 1) for number, key in enumerate(ODD_KEYS)
    }
    write(tmp_path, state)
    for path, tensor in state.items():
        assert_same(reader(tmp_path, array_path(path)), tensor)


@pytest.mark.parametrize("use_consolidated", [True, False, None])
def test_groups_are_listed_with_and_without_the_consolidated_document(
    tmp_path: Path, use_consolidated: bool | None
) -> None:
    import zarr

    state: dict[Keys, torch.Tensor] = {
        ("model", "layers.0.weight"): torch.ones(4, 3),
        ("optimizer", "state", 0, "exp_avg"): torch.ones(4, 3),
        ("optimizer", "state", 0, "step"): torch.ones(()),
        ("step",): torch.ones(()),
    }
    write(tmp_path, state)
    group = zarr.open_group(str(tmp_path), mode="r", use_consolidated=use_consolidated)
    assert (group.metadata.consolidated_metadata is None) == (use_consolidated is False)
    arrays = {"/".join(map(str, path)): ".".join(map(str, path)) for path in state}
    groups = {"model", "optimizer", "optimizer/state", "optimizer/state/0"}
    members = dict(group.members(max_depth=None))
    assert set(members) == set(arrays) | groups
    assert {name: members[name].attrs["fqn"] for name in arrays} == arrays
    below: Any = group["optimizer/state/0"]
    assert sorted(below.array_keys()) == ["exp_avg", "step"]
    # A group within a store is opened by itself, too.
    inner = zarr.open_group(str(tmp_path / "optimizer"), mode="r")
    assert set(dict(inner.members(max_depth=None))) == {
        "state", "state/0", "state/0/exp_avg", "state/0/step"
    }  # fmt: skip


def test_the_consolidated_document_is_what_zarr_python_would_write(tmp_path: Path) -> None:
    import zarr

    state: dict[Keys, torch.Tensor] = {
        ("m", "x", "w"): torch.ones(5, 3),
        ("m", "scalar"): torch.ones((), dtype=torch.complex64),
        ("m", "flags"): torch.ones(2, dtype=torch.bool),
        ("empty",): torch.empty(0, 3),
    }
    write(tmp_path, state, num_parts=2)
    ours = json.loads((tmp_path / "zarr.json").read_bytes())
    with warnings.catch_warnings():
        # That consolidated metadata are not in the specification yet.
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(str(tmp_path))
    assert ours == json.loads((tmp_path / "zarr.json").read_bytes())


@pytest.mark.parametrize("consolidated", [True, False, None])
def test_xarray_opens_groups_of_arrays_of_many_shapes(tmp_path: Path, consolidated: bool | None) -> None:
    """It wants a name for each dimension, of one size throughout a group, and once in an array."""
    import xarray

    state: dict[Keys, torch.Tensor] = {
        ("m", f"{rows}x{columns}"): torch.randn(rows, columns)
        for rows, columns in itertools.product((2, 3), (2, 3, 4))
    }
    state["m", "norm"] = torch.randn(4)
    state["m", "scalar"] = torch.randn(())
    # An entry may be called as a dimension is.
    state["m", "dim_2"] = torch.randn(2, 4)
    write(tmp_path, state)
    for dataset in (
        xarray.open_zarr(str(tmp_path), group="m", chunks=None, consolidated=consolidated),
        xarray.open_dataset(str(tmp_path), engine="zarr", group="m", consolidated=consolidated),
    ):
        assert {("m", str(name)) for name in dataset.variables} == set(state)
        for path, tensor in state.items():
            assert_same(dataset[path[1]].values, tensor)


def test_xarray_opens_all_groups_as_a_tree(tmp_path: Path) -> None:
    import xarray

    write(tmp_path, {("a", "b", "w"): torch.ones(3, 3), ("a", "v"): torch.ones(2), ("step",): torch.ones(())})
    tree = xarray.open_datatree(str(tmp_path), engine="zarr")
    assert set(tree.groups) == {"/", "/a", "/a/b"}
    assert tree["/a/b/w"].shape == (3, 3)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("damage", ["payload", "padding", "checksum", "shortened", "no checksum", "empty"])
def test_damage_is_seen(tmp_path: Path, reader: Read, damage: str) -> None:
    write(tmp_path, {("w",): torch.randn(10, 4)}, num_parts=3)
    file = tmp_path / "w" / "c.2.0"
    data = bytearray(file.read_bytes())
    if damage in {"payload", "padding", "checksum"}:
        data[{"payload": 1, "padding": -5, "checksum": -1}[damage]] ^= 1
    else:
        del data[{"shortened": len(data) - 9, "no checksum": len(data) - 4, "empty": 0}[damage] :]
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"checksum|Digest mismatch|Not enough data|Unexpected end of input"):
        reader(tmp_path, "w")


@pytest.mark.parametrize("reader", READERS)
def test_a_chunk_that_is_missing_is_zeros(tmp_path: Path, reader: Read) -> None:
    """So says the specification; hence nothing of a store may be seen before all of it is there."""
    tensor = torch.ones(9, 4)
    write(tmp_path, {("w",): tensor}, num_parts=3)
    (tmp_path / "w" / "c.1.0").unlink()
    tensor[3:6] = 0
    assert_same(reader(tmp_path, "w"), tensor)

"""Ranges of tensors out of chunks, and the rest of `distckpt.sources`, on checkpoints made byte by byte."""

from __future__ import annotations

import gc
import io
import json
import math
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from distckpt import sources
from distckpt.errors import CheckpointError, ConfigError, IntegrityError, WriteError
from distckpt.sources import ObjectSource, TensorSource, cast, open_source, select, strip, write_torch_file

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Box = tuple[tuple[int, ...], tuple[int, ...]]


def raw(tensor: torch.Tensor) -> bytes:
    """The payload of a tensor."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def read(source: TensorSource, low: int = 0, high: int | None = None) -> bytes:
    high = source.nbytes if high is None else high
    data = bytearray(high - low)
    source.read_into(low, high, memoryview(data))
    return bytes(data)


def tensors(source: sources.Source) -> dict[str, TensorSource]:
    return {entry.fqn: entry for entry in source.entries if isinstance(entry, TensorSource)}


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]


def write_checkpoint(
    folder: Path,
    tensor: torch.Tensor,
    boxes: list[Box],
    encode: Callable[[torch.Tensor], bytes] = saved,
    suffix: str = "",
) -> None:
    """Write a checkpoint of DCP with one tensor, x, each chunk between other bytes in a file of its own."""
    folder.mkdir(exist_ok=True)
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    entry = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, chunks)
    places: dict[MetadataIndex, _StorageInfo] = {}
    for number, box in enumerate(boxes):
        name = f"{number}{suffix}"
        data = encode(part(tensor, box))
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"before" + data + b"after")
        places[MetadataIndex("x", torch.Size(box[0]))] = _StorageInfo(name, 6, len(data))
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({"x": entry}, storage_data=places)))


def cut(draw: st.DrawFn, box: Box, depth: int) -> list[Box]:
    """Cut a box into boxes, not always along the same lines."""
    offsets, sizes = box
    axes = [axis for axis, n in enumerate(sizes) if n > 1]
    if not depth or not axes or not draw(st.booleans()):
        return [box]
    axis = draw(st.sampled_from(axes))
    at = draw(st.integers(1, sizes[axis] - 1))
    low = (*sizes[:axis], at, *sizes[axis + 1 :])
    high = (*sizes[:axis], sizes[axis] - at, *sizes[axis + 1 :])
    begin = (*offsets[:axis], offsets[axis] + at, *offsets[axis + 1 :])
    return cut(draw, (offsets, low), depth - 1) + cut(draw, (begin, high), depth - 1)


@dataclass
class Case:
    tensor: torch.Tensor
    boxes: list[Box]
    ranges: list[tuple[int, int]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.int32, torch.float64, torch.complex128]))
    tensor = torch.arange(math.prod(shape)).to(dtype).reshape(shape)
    boxes = draw(st.permutations(cut(draw, ((0,) * len(shape), shape), 4)))
    nbytes = tensor.numel() * tensor.itemsize
    bounds = st.tuples(st.integers(0, nbytes), st.integers(0, nbytes))
    return Case(tensor, boxes, [(min(pair), max(pair)) for pair in draw(st.lists(bounds, min_size=1))])


def permuted(tensor: torch.Tensor) -> bytes:
    order = tuple(reversed(range(tensor.dim())))
    return saved(tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(order))


def from_wider_storage(tensor: torch.Tensor) -> bytes:
    return saved(torch.zeros(tensor.numel() + 3, dtype=tensor.dtype)[3:].view(tensor.shape).copy_(tensor))


@pytest.mark.slow
@pytest.mark.parametrize("piece_bytes", [48, 8 << 20])
@pytest.mark.parametrize(
    ("encode", "suffix"),
    [
        (raw, ".safetensors"),
        (lambda tensor: raw(tensor) + bytes(20), "/c.0"),
        (lambda tensor: saved(tensor.clone()), ""),
        (lambda tensor: saved(torch.nn.Parameter(tensor.clone(), requires_grad=False)), ""),
        (from_wider_storage, ""),
    ],
    ids=["safetensors", "zarr", "archive", "parameter", "wider storage"],
)
def test_any_range_of_any_chunks(
    encode: Callable[[torch.Tensor], bytes],
    suffix: str,
    piece_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources, "_PIECE_BYTES", piece_bytes)

    @given(case=cases())
    def check(case: Case) -> None:
        folder = tmp_path_factory.mktemp("checkpoint")
        write_checkpoint(folder, case.tensor, case.boxes, encode, suffix)
        [source] = tensors(open_source(folder)).values()
        whole = raw(case.tensor)
        assert read(source) == whole
        for low, high in case.ranges:
            assert read(source, low, high) == whole[low:high]

    check()


def test_items_that_lie_in_another_order(tmp_path: Path) -> None:
    tensor = torch.arange(60.0).reshape(3, 4, 5)
    boxes: list[Box] = [((0, 0, 0), (3, 2, 5)), ((0, 2, 0), (3, 2, 5))]
    write_checkpoint(tmp_path, tensor, boxes, permuted)
    source = tensors(open_source(tmp_path))["x"]
    assert read(source) == raw(tensor)
    assert read(source, 33, 199) == raw(tensor)[33:199]


def test_kept_items_are_those_of_their_own_checkpoint(tmp_path: Path) -> None:
    for number in range(10):
        tensor = torch.full((4, 5), float(number))
        write_checkpoint(tmp_path, tensor, [((0, 0), (4, 5))], permuted)
        source = open_source(tmp_path)
        assert read(tensors(source)["x"]) == raw(tensor)
        del source
        gc.collect()


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0, 0), (2, 4))], "chunks hold 8 of the 16 elements"),
        ([((0, 0), (3, 4)), ((2, 0), (2, 4))], "chunks hold 20 of the 16"),
        ([], "chunks hold 0"),
    ],
)
def test_chunks_that_do_not_fill_a_tensor(boxes: list[Box], message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, torch.zeros(4, 4), boxes, raw, ".safetensors")
    with pytest.raises(IntegrityError, match=message) as caught:
        open_source(tmp_path)
    assert caught.value.item == "x"


def test_items_that_are_damaged(tmp_path: Path) -> None:
    big = torch.zeros(1 << 17)
    boxes: list[Box] = [((0,), (1 << 17,))]
    write_checkpoint(tmp_path, big, boxes, lambda tensor: bytes(1 << 19))
    with pytest.raises(IntegrityError, match="cannot be loaded"):
        read(tensors(open_source(tmp_path))["x"])
    write_checkpoint(tmp_path, big, boxes, lambda tensor: saved([1]))
    with pytest.raises(IntegrityError, match="not what the metadata says"):
        read(tensors(open_source(tmp_path))["x"])
    write_checkpoint(tmp_path, big, boxes)
    os.truncate(tmp_path / "0", 1 << 18)
    with pytest.raises(IntegrityError, match="bytes early") as caught:
        read(tensors(open_source(tmp_path))["x"])
    assert caught.value.file == "0"
    (tmp_path / "0").unlink()
    with pytest.raises(IntegrityError, match="is missing"):
        read(tensors(open_source(tmp_path))["x"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_an_item_of_another_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, torch.ones(99), [((0,), (99,))], lambda tensor: saved(tensor.to(dtype)))
    with pytest.raises(IntegrityError):
        read(tensors(open_source(tmp_path))["x"])


def test_an_item_that_is_a_conjugate_view(tmp_path: Path) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    write_checkpoint(tmp_path, tensor, [((0,), (2,))])
    assert read(tensors(open_source(tmp_path))["x"]) == raw(tensor.resolve_conj())


@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning")
def test_an_item_that_is_quantized(tmp_path: Path) -> None:
    tensor = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    write_checkpoint(tmp_path, tensor, [((0,), (4,))])
    [entry] = open_source(tmp_path).entries
    if isinstance(entry, ObjectSource):
        assert torch.equal(torch.load(io.BytesIO(entry.read())).dequantize(), tensor.dequantize())
    else:
        with pytest.raises(CheckpointError):
            read(entry)


def test_an_object_that_lies_nowhere(tmp_path: Path) -> None:
    metadata = Metadata({"o": BytesStorageMetadata()}, storage_data={})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(IntegrityError):
        open_source(tmp_path)


def header(entries: dict[str, Any], length: int | None = None) -> bytes:
    text = json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text


def entry(dtype: str = "U8", shape: Sequence[Any] = (4,), begin: Any = 0, end: Any = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "data",
    [
        b"abc",
        header({}, 1 << 40),
        header({}, 40),
        (4).to_bytes(8, "little") + b"nope",
        (2).to_bytes(8, "little") + b"[]",
        header({"x": entry("F4")}) + bytes(4),
        header({"x": entry(shape=[5])}) + bytes(4),
        header({"x": entry(shape=[-4])}) + bytes(4),
        header({"x": {"dtype": "U8"}}) + bytes(4),
    ],
)
def test_headers_of_safetensors(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(data)
    for url in (tmp_path, tmp_path / "m.safetensors"):
        with pytest.raises(CheckpointError, match=r"m\.safetensors"):
            open_source(url)


@pytest.mark.parametrize(
    "data",
    [
        header({"x": entry(), "y": entry(begin=2, end=6)}) + bytes(6),
        header({"x": entry(begin=4, end=8)}) + bytes(7),
    ],
    ids=["overlap", "beyond the end"],
)
def test_places_that_cannot_be(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(data)
    with pytest.raises(IntegrityError):
        open_source(tmp_path)


def test_a_file_that_the_index_names_is_missing(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(header({"x": entry()}) + bytes(4))
    weights = {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(IntegrityError):
        open_source(tmp_path)


def test_files_that_the_index_does_not_name(tmp_path: Path) -> None:
    for name in ("model-00001-of-00001", "consolidated"):
        (tmp_path / f"{name}.safetensors").write_bytes(header({"x": entry()}) + bytes(4))
    weights = {"x": "model-00001-of-00001.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    assert list(tensors(open_source(tmp_path))) == ["x"]


def write_safetensors(file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(header({"x": entry()}) + bytes(4))


def test_a_file_in_the_root_directory_is_not_one_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{tmp_path.name}.safetensors"
    write_safetensors(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert list(tensors(open_source(name))) == ["x"]
    with pytest.raises(CheckpointError, match=f"/{name} holds no complete checkpoint"):
        open_source(f"/{name}")


@pytest.mark.parametrize("folder", ["p::q", "a:"])
def test_files_below_colons(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_safetensors(tmp_path / folder / "m.safetensors")
    torch.save({"x": torch.ones(4)}, tmp_path / folder / "m.pt")
    monkeypatch.chdir(tmp_path)
    for name in ("m.safetensors", "m.pt"):
        for url in (Path(folder, name), f"{tmp_path}/{folder}//{name}", f"file://{tmp_path}/{folder}/{name}"):
            assert list(tensors(open_source(url))) == ["x"]


def test_a_directory_that_is_named_like_a_file(tmp_path: Path) -> None:
    import fsspec

    memory, root = fsspec.filesystem("memory"), f"/{tmp_path.name}"
    write_safetensors(tmp_path / "d.safetensors" / "m.safetensors")
    memory.pipe(f"{root}/d.safetensors/m.safetensors", header({"x": entry()}) + bytes(4))
    above = f"memory:/{root}"
    try:
        for url in (tmp_path, str(tmp_path), f"file://{tmp_path}", above):
            for name in ("d.safetensors", "d.safetensors/", "d.safetensors/m.safetensors"):
                if isinstance(url, str) or not name.endswith("/"):
                    found = open_source(f"{url}/{name}" if isinstance(url, str) else url / name)
                    assert list(tensors(found)) == ["x"]
    finally:
        memory.rm(root, recursive=True)


def test_a_server_that_refuses_to_read_a_directory() -> None:
    class Server:
        def read(self, name: str, offset: int, nbytes: int) -> bytes:
            raise WriteError("Failure")

        def list(self) -> dict[str, int]:
            return {"d.safetensors/": 0, "m.safetensors": 12}

    server: Any = Server()
    assert not sources._is_file(server, "d.safetensors")
    with pytest.raises(WriteError, match="Failure"):
        sources._is_file(server, "m.safetensors")


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    for url in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
            open_source(url)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(CheckpointError, match="text"):
        open_source(tmp_path / "text")


class Plain(TensorSource):
    """A tensor in memory."""

    def __init__(self, fqn: str, tensor: torch.Tensor) -> None:
        super().__init__(
            fqn, tuple(fqn.split(".")), tensor.dtype, tensor.shape, requires_grad=tensor.requires_grad
        )
        self.data = raw(tensor)

    def read_into(self, low: int, high: int, target: memoryview) -> None:
        target[:] = self.data[low:high]


@given(
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
    st.sampled_from([torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2]),
    st.data(),
)
def test_casts(source: torch.dtype, target: torch.dtype, data: st.DataObject) -> None:
    tensor = torch.randn(37, generator=torch.Generator().manual_seed(0)).to(source)
    changed = cast(Plain("x", tensor), target)
    expected = raw(tensor.to(target))
    assert (changed.dtype, changed.shape, changed.nbytes) == (target, (37,), len(expected))
    low = data.draw(st.integers(0, len(expected)))
    high = data.draw(st.integers(low, len(expected)))
    assert read(changed, low, high) == expected[low:high]


def test_casts_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_PIECE_BYTES", 24)
    tensor = torch.randn(50)
    assert read(cast(Plain("x", tensor), torch.bfloat16)) == raw(tensor.bfloat16())


def test_what_is_not_cast() -> None:
    for dtype in (torch.int32, torch.bool, torch.complex64, torch.float16):
        source = Plain("x", torch.ones(3).to(dtype))
        assert cast(source, torch.float16) is source


def test_what_torch_does_not_cast() -> None:
    packed = Plain("a[0].w", torch.zeros(4, dtype=torch.uint8))
    packed.dtype = torch.float4_e2m1fn_x2
    with pytest.raises(ConfigError, match=r"'a\[0\].w' is of torch.float4_e2m1fn_x2") as caught:
        cast(packed, torch.bfloat16)
    [pattern] = re.findall(r"--exclude '(.*)'\)", str(caught.value))
    with pytest.raises(ConfigError, match="nothing is left"):
        select([packed], [], [pattern])


def test_empty_tensors_are_cast() -> None:
    assert cast(Plain("x", torch.empty(0, 3)), torch.bfloat16).dtype is torch.bfloat16


def test_selection() -> None:
    entries = [Plain(name, torch.ones(1)) for name in ("model.a.w", "model.b.w", "optim.a.w")]

    def chosen(include: list[str], exclude: list[str]) -> list[str]:
        return [entry.fqn for entry in select(entries, include, exclude)]

    assert chosen([], []) == ["model.a.w", "model.b.w", "optim.a.w"]
    assert chosen(["model.*"], ["*.b.*"]) == ["model.a.w"]
    assert chosen(["optim.*", "*.b.w"], []) == ["model.b.w", "optim.a.w"]
    for include, exclude in ((["model.*", "modle.*"], []), ([], ["modle.*"])):
        with pytest.raises(ConfigError, match=r"'modle\.\*'"):
            chosen(include, exclude)
    with pytest.raises(ConfigError, match="nothing is left"):
        chosen([], ["*"])


def test_names_that_two_entries_bear() -> None:
    entries = [Plain("a.b", torch.ones(1)), Plain("c", torch.ones(1)), Plain("a.b", torch.ones(2))]
    entries[0].path = ("a.b",)
    with pytest.raises(CheckpointError, match=r"'a\.b', with the keys \['a\.b'\] and \['a', 'b'\]"):
        select(entries, [], [])
    assert select(entries, [], ["a.b"]) == entries[1:2]


def at(path: tuple[str | int, ...]) -> Plain:
    entry = Plain(".".join(map(str, path)), torch.ones(1))
    entry.path = path
    return entry


@pytest.mark.parametrize(
    ("path", "prefix", "expected"),
    [
        (("model", "a.w"), "model.", ("a.w",)),
        (("model", "model.w"), "model.", ("model.w",)),
        (("model", "module.a.w"), "model.module.", ("a.w",)),
        (("model.a.w",), "model.", ("a.w",)),
        (("model", "a", 0), "model.", ("a", 0)),
        # The state is a dict, whatever begins it.
        (("model", 1, 0), "model.", ("1", 0)),
        (("model", 10), "model.1", ("0",)),
        (("model_1", "w"), "model_", ("1", "w")),
        (("model", "w"), "model", ("", "w")),
        (("remodel", "model.w"), "model.", ("remodel", "model.w")),
    ],
)
def test_keys_without_a_prefix(
    path: tuple[str | int, ...], prefix: str, expected: tuple[str | int, ...]
) -> None:
    entry = at(path)
    [stripped, _], _ = strip([entry, at((f"{prefix}other",))], prefix)
    assert (stripped.fqn, stripped.path) == (".".join(map(str, expected)), expected)
    assert (stripped.origin, entry.path) == (entry.fqn, path)
    assert read(cast_to_tensor(stripped)) == raw(torch.ones(1))


def cast_to_tensor(entry: TensorSource | ObjectSource) -> TensorSource:
    assert isinstance(entry, TensorSource)
    return entry


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([("model", "a.w"), ("a", "w")], r"'model\.a\.w' and 'a\.w' would both be named 'a\.w'"),
        ([("a", "w"), ("model", "a.w")], r"'a\.w' and 'model\.a\.w' would both be named 'a\.w'"),
        ([("model", "w"), ("w", "x")], r"'model\.w' and 'w\.x'"),
        ([("w", "x"), ("model", "w")], r"'w\.x' and 'model\.w'"),
        ([("model", "w", 0), ("w", "x")], r"'model\.w\.0' and 'w\.x'"),
        ([("model", "w"), ("model.",)], r"nothing would be left of the name 'model\.'"),
        (
            [("modle", "w"), ("remodel.w",)],
            r"no entry .* begins with 'model\.'; there are modle\.w, remodel\.w",
        ),
    ],
)
def test_a_prefix_that_cannot_go(paths: list[tuple[str | int, ...]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        strip([at(path) for path in paths], "model.")


def converted(state: object, folder: Path, *, without: str = "", **chosen: list[str]) -> Any:
    """Return what a file of torch.save holds after it was made from one of `state`."""
    torch.save(state, folder / "in.pt")
    source = open_source(folder / "in.pt")
    entries = select(source.entries, chosen.get("include", []), chosen.get("exclude", []))
    tree = source.tree
    if without:
        entries, tree = strip(entries, without, tree)
    (folder / "out.pt").unlink(missing_ok=True)
    write_torch_file(folder / "out.pt", entries, tree=tree)
    return torch.load(folder / "out.pt")


def test_containers_and_keys_of_a_file_of_torch_save(tmp_path: Path) -> None:
    state = {
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0)}, 10: {}},
            "param_groups": [{"params": [0, 10]}],
        },
        (1, 2): {True: [1, 2], None: torch.ones(2), "text": ({}, [])},
        "lists": [{}, [torch.ones(1), 7, {}], []],
        "none": OrderedDict(),
    }
    found = converted(state, tmp_path)
    assert str(found) == str(state)
    assert converted(state, tmp_path, exclude=["lists.0", "lists.1.[01]", "optimizer.state.0.*", "(*"]) == {
        "optimizer": {"state": {10: {}}, "param_groups": [{"params": [0, 10]}]},
        "lists": [None, [None, None, {}], []],
        "none": {},
    }
    assert converted(state, tmp_path, include=["optimizer.state.0*"])["optimizer"].keys() == {"state"}


def test_containers_and_keys_without_a_prefix(tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(2).state_dict()
    state = {
        "model": model,
        "more": {"lists": [torch.ones(1), {7: 1}], 3: OrderedDict(a=2), "none": {}},
        "lists": [0, {"b": 5}],
    }
    found = converted(state, tmp_path, without="model.", include=["model.*"])
    assert type(found) is OrderedDict
    assert str(found) == str(model)
    assert found._metadata == model._metadata  # type: ignore[attr-defined]
    assert str(converted(state, tmp_path, without="more.", exclude=["model.*", "lists.0"])) == str(
        {
            "lists": [torch.ones(1), {7: 1, "b": 5}],
            3: OrderedDict(a=2),
            "none": {},
        }
    )
    assert converted(state, tmp_path, without="lists.", include=["lists.*"]) == {"0": 0, "1": {"b": 5}}
    assert converted(state, tmp_path, without="lists.1.", include=["lists.*"]) == {"lists": [0], "b": 5}
    with pytest.raises(ConfigError, match="'1' and 'True' would have one key"):
        converted({"model": {1: 2}, True: 3}, tmp_path, without="model.")
    # What is left out has no say in what others are named.
    state = {"model": {"w": 1, "x": 2}, "w": 3, "x": {"y": 4}}
    assert converted(state, tmp_path, without="model.", exclude=["w", "x.y"]) == {"w": 1, "x": 2}


def test_what_a_module_notes_beside_its_state(tmp_path: Path) -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()
    found = converted({"model": state}, tmp_path)["model"]
    assert type(found) is OrderedDict
    assert found._metadata == state._metadata  # type: ignore[attr-defined]
    assert found.keys() == state.keys()


def test_a_single_element_of_any_stride(tmp_path: Path) -> None:
    state = {"w": torch.arange(4.0)[2:3], "strided": torch.arange(4.0)[::2][:1]}
    state["deep"] = torch.arange(8.0).reshape(2, 4).t()[:1, :1]
    torch.save(state, tmp_path / "x.pt")
    for fqn, source in tensors(open_source(tmp_path / "x.pt")).items():
        assert read(source) == raw(state[fqn].clone(memory_format=torch.contiguous_format))


def test_meta_tensors_are_in_the_way_of_who_wants_them(tmp_path: Path) -> None:
    state = {"a b": torch.empty(3, device="meta"), "x": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"'a b' is a meta tensor.* \(--exclude 'a b'\)"):
        converted(state, tmp_path)
    assert list(converted(state, tmp_path, exclude=["a b"])) == ["x"]


@pytest.mark.filterwarnings("ignore:.*meta device:UserWarning")
def test_meta_tensors_in_an_object(tmp_path: Path) -> None:
    state = {"o": (torch.empty(3, device="meta"), torch.arange(3))}
    meta, count = converted(state, tmp_path)["o"]
    assert meta.is_meta
    assert torch.equal(count, torch.arange(3))


@pytest.mark.slow
def test_a_dtensor_is_not_taken_for_all_of_it(mesh: DeviceMesh, tmp_path: Path) -> None:
    state = {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}
    with pytest.raises(CheckpointError, match="'w' is what one rank had of a DTensor"):
        converted(state, tmp_path)


@pytest.mark.filterwarnings("ignore:.*(quantize|TypedStorage|nested tensors).*:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["quantized", "nested"],
)
def test_tensors_that_torch_writes_with_their_data_alone(
    make: Callable[[], torch.Tensor], tmp_path: Path
) -> None:
    value = make()
    for state in ({"w": value, "x": torch.ones(1)}, {"w": (value,), "x": torch.ones(1)}):
        with pytest.raises(
            CheckpointError, match=r"'w' .* \(--exclude w\), or convert to torch_dist"
        ) as caught:
            converted(state, tmp_path)
        assert "file an issue" not in str(caught.value)
        assert list(converted(state, tmp_path, exclude=["w"])) == ["x"]
    [whole] = (each for each in open_source(tmp_path / "in.pt").entries if each.fqn == "w")
    assert isinstance(whole, ObjectSource)
    assert torch.load(io.BytesIO(whole.read()))[0].dtype is value.dtype


def two_tensor(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return TwoTensor(a, b)  # type: ignore[no-untyped-call]


def test_tensors_that_wrap_others(tmp_path: Path) -> None:
    state = {
        "w": two_tensor(torch.ones(2), torch.zeros(2)),
        "o": [1, (two_tensor(torch.ones(3), torch.ones(3)),)],
    }
    torch.save(state, tmp_path / "in.pt")
    source = open_source(tmp_path / "in.pt", weights_only=False)
    write_torch_file(tmp_path / "out.pt", source.entries, tree=source.tree, weights_only=False)
    found = torch.load(tmp_path / "out.pt", weights_only=False)
    assert torch.equal(found["w"].a, torch.ones(2))
    assert torch.equal(found["w"].b, torch.zeros(2))
    assert torch.equal(found["o"][1][0].a, torch.ones(3))


def test_a_wrapping_tensor_in_a_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path, torch.ones(2), [((0,), (2,))], lambda tensor: saved(two_tensor(tensor, tensor))
    )
    source = tensors(open_source(tmp_path, weights_only=False))["x"]
    with pytest.raises(CheckpointError, match=r"'x' is a TwoTensor .* \(--exclude x\)"):
        read(source)


def test_objects_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'o' cannot be loaded .* \(--exclude o\)"):
        write_torch_file(tmp_path / "x.pt", [ObjectSource("o", ("o",), lambda: b"")])


def test_what_cannot_be_loaded_is_left_out_by_its_name_in_the_source(tmp_path: Path) -> None:
    [entry], _ = strip([ObjectSource("model.x", ("model", "x"), lambda: b"")], "model.")
    with pytest.raises(CheckpointError, match=r"'model\.x' cannot be loaded .*--exclude model\.x"):
        write_torch_file(tmp_path / "out.pt", [entry])


def test_where_a_file_of_torch_save_may_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a:", "p::q"):
        (tmp_path / folder).mkdir()
        for url in (Path(folder, "x.pt"), f"{tmp_path}/{folder}//y.pt", f"file://{tmp_path}/{folder}/z.pt"):
            path = write_torch_file(url, [Plain("a", torch.ones(1))])
            assert Path(path).parent == tmp_path / folder
            assert os.path.isfile(path)
    with pytest.raises(ConfigError, match="to a local path only"):
        write_torch_file("s3://bucket/x.pt", [])


def test_states_of_optimizers_are_below_numbers_again(tmp_path: Path) -> None:
    paths: dict[tuple[str | int, ...], object] = {
        ("all", 0, "state", "0", "step"): 1,
        ("all", 0, "state", "other"): 2,
        ("all", 0, "param_groups", 0, "params"): [0, 1],
        ("named", "state", "0"): 3,
        ("named", "param_groups", 0, "params"): ["0"],
        ("named", "param_groups", 1): "odd",
        ("state", "0"): 4,
    }
    entries = [
        ObjectSource(".".join(map(str, path)), path, lambda value=value: saved(value))  # type: ignore[misc]
        for path, value in paths.items()
    ]
    write_torch_file(tmp_path / "x.pt", entries)
    assert torch.load(tmp_path / "x.pt") == {
        "all": [{"state": {0: {"step": 1}, "other": 2}, "param_groups": [{"params": [0, 1]}]}],
        "named": {"state": {"0": 3}, "param_groups": [{"params": ["0"]}, "odd"]},
        "state": {"0": 4},
    }


def test_a_file_of_torch_save(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    values = {
        "model.w": torch.randn(300, 70),
        "model.empty": torch.empty(0, 3),
        "model.scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "count": torch.arange(7),
    }
    entries: list[TensorSource | ObjectSource] = [Plain(fqn, tensor) for fqn, tensor in values.items()]
    entries.insert(2, ObjectSource("extra.1", ("extra", 1), lambda: saved({"text": "x"})))
    file = tmp_path / "x.pt"
    write_torch_file(file, entries, tell=lambda done, total: told.append((done, total)))
    assert os.listdir(tmp_path) == ["x.pt"]
    assert told[-1] == (sum(tensor.nbytes for tensor in values.values()),) * 2
    for mmap in (False, True):
        loaded = torch.load(file, mmap=mmap, weights_only=True)
        assert list(loaded) == ["model", "extra", "count"]
        assert loaded["extra"] == [None, {"text": "x"}]
        found = {**{f"model.{name}": value for name, value in loaded["model"].items()}, **loaded}
        for fqn, tensor in values.items():
            assert torch.equal(found[fqn], tensor)
            assert found[fqn].dtype is tensor.dtype
    with pytest.raises(WriteError, match="there is something"):
        write_torch_file(file, entries)


def test_a_file_of_torch_save_says_what_requires_grad(tmp_path: Path) -> None:
    write_torch_file(tmp_path / "x.pt", [Plain("a", torch.ones(2, requires_grad=True))])
    assert torch.load(tmp_path / "x.pt")["a"].requires_grad


def test_a_file_of_torch_save_with_tensors_in_an_object(tmp_path: Path) -> None:
    pair = (torch.arange(5.0), "text")
    entries: list[TensorSource | ObjectSource] = [Plain("a", torch.ones(2))]
    entries.append(ObjectSource("b", ("b",), lambda: saved(pair)))
    write_torch_file(tmp_path / "x.pt", entries)
    assert torch.equal(torch.load(tmp_path / "x.pt")["b"][0], pair[0])


def test_a_file_of_torch_save_whose_containers_take_turns(tmp_path: Path) -> None:
    paths = [("a", "x"), ("b", "x"), ("a", "y"), ("b", "y"), ("a", "z", 1), ("a", "z", 0)]
    entries: list[TensorSource | ObjectSource] = []
    for number, path in enumerate(paths):
        source = Plain(".".join(map(str, path)), torch.full((3,), float(number)))
        source.path = path
        entries.append(source)
    write_torch_file(tmp_path / "x.pt", entries)
    found = torch.load(tmp_path / "x.pt")
    for number, (first, *rest) in enumerate(paths):
        value = found[first]
        for key in rest:
            value = value[key]
        assert torch.equal(value, torch.full((3,), float(number)))


def test_a_file_of_torch_save_written_little_by_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite

    def write_less(fd: int, data: bytes, offset: int) -> int:
        return write(fd, memoryview(data).cast("B")[:1000], offset)

    monkeypatch.setattr(os, "pwrite", write_less)
    write_torch_file(tmp_path / "x.pt", [Plain("a", torch.ones(1000))])
    assert torch.equal(torch.load(tmp_path / "x.pt")["a"], torch.ones(1000))


def test_nothing_is_left_of_a_file_that_failed(tmp_path: Path) -> None:
    class Damaged(Plain):
        def read_into(self, low: int, high: int, target: memoryview) -> None:
            raise IntegrityError("damaged")

    with pytest.raises(IntegrityError, match="damaged"):
        write_torch_file(tmp_path / "x.pt", [Plain("a", torch.ones(3)), Damaged("b", torch.ones(3))])
    assert os.listdir(tmp_path) == []


def test_objects_that_could_run_code(tmp_path: Path) -> None:
    odd = ObjectSource("o", ("o",), lambda: saved(print))
    with pytest.raises(CheckpointError, match="can run code"):
        write_torch_file(tmp_path / "x.pt", [odd])
    write_torch_file(tmp_path / "x.pt", [odd], weights_only=False)
    assert torch.load(tmp_path / "x.pt", weights_only=False) == {"o": print}

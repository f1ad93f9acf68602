"""Files of safetensors and zarr as their formats want them: headers, grids, names, documents, seals."""

from __future__ import annotations

import itertools
import json
import math
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import crc32c
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distckpt import Checkpointer
from distckpt.errors import ConfigError, IntegrityError, StagingError
from distckpt.formats import Entry, format_of, open_format
from distckpt.formats.safetensors import DTYPES, Safetensors
from distckpt.formats.zarr import Zarr, array_path
from distckpt.geometry import misfit, shard_chunks
from distckpt.image import lay_out_image

MIB = 1 << 20


def entry(fqn: str, dtype: torch.dtype, shape: tuple[int, ...], offsets: tuple[int, ...] = ()) -> Entry:
    return Entry(fqn, dtype, shape, offsets or (0,) * len(shape))


def nbytes_of(item: Entry) -> int:
    return math.prod(item.shape) * item.dtype.itemsize


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
entries = st.lists(
    st.builds(
        entry,
        st.sampled_from([f"layer.{n}" for n in range(6)]),
        st.sampled_from(list(DTYPES.values())),
        shapes,
    ),
    min_size=1,
    max_size=12,
)


@given(entries, st.integers(1, 4))
def test_files_of_safetensors_are_what_its_library_reads(items: list[Entry], num_files: int) -> None:
    from safetensors import deserialize

    sizes = [nbytes_of(item) for item in items]
    image = lay_out_image(sizes, num_files, 4 * MIB, file_format=Safetensors(), entries=items)
    seen = []
    for file in image.files:
        content = bytearray(file.nbytes)
        content[: len(file.header)] = file.header
        assert len(file.header) % 4096 == 0
        for index, offset in zip(file.items, file.offsets, strict=True):
            content[offset : offset + sizes[index]] = bytes([index + 1]) * sizes[index]
            assert offset % items[index].dtype.itemsize == 0
        found = dict(deserialize(bytes(content)))  # type: ignore[no-untyped-call]
        assert set(found) == {items[index].fqn for index in file.items}
        assert len(file.items) == len(found), "a name twice in one file"
        for index in file.items:
            told = found[items[index].fqn]
            assert DTYPES[told["dtype"]] is items[index].dtype
            assert tuple(told["shape"]) == items[index].shape
            assert bytes(told["data"]) == bytes([index + 1]) * sizes[index]
            seen.append(index)
    assert sorted(seen) == list(range(len(items)))


def test_headers_say_where_chunks_lie() -> None:
    item = entry("a", torch.float32, (2, 3), (4, 0))
    layout = Safetensors().lay_out([24], [item])
    header = json.loads(layout.header[8:])
    assert json.loads(header["__metadata__"]["DCP_SHARDING_INFO"]) == {"a": {"saved_offsets": [4, 0]}}
    assert header["__metadata__"]["format"] == "pt"


def test_whole_pages_come_first() -> None:
    items = [
        entry("small", torch.uint8, (3,)),
        entry("odd", torch.float64, (3,)),
        entry("page", torch.uint8, (8192,)),
    ]
    [file] = lay_out_image([3, 24, 8192], 1, 4 * MIB, file_format=Safetensors(), entries=items).files
    assert [items[index].fqn for index in file.items] == ["page", "odd", "small"]
    assert file.offsets[0] % 4096 == 0


def test_what_has_no_entry_is_put_aside() -> None:
    items: list[Entry | None] = [entry("a", torch.uint8, (3,)), None, entry("b", torch.uint8, (3,))]
    image = lay_out_image([3, 100, 3], 1, 4 * MIB, file_format=Safetensors(), entries=items)
    assert [(file.items, file.is_aside) for file in image.files] == [([0, 2], False), ([1], True)]
    assert image.files[1].header == b""


def test_a_header_that_no_reader_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distckpt.formats.safetensors._MOST_HEADER_BYTES", 5000)
    items = [entry(f"layer.{number}", torch.uint8, ()) for number in range(100)]
    with pytest.raises(StagingError, match=r"100 tensors have a header of .* bytes"):
        Safetensors().lay_out([1] * 100, items)


def test_whole_files_have_the_names_that_people_expect() -> None:
    whole = open_format("safetensors", is_whole=True)
    assert whole.image_name(0, 0, 2, "abc") == "model-00001-of-00002.safetensors"
    assert open_format("safetensors").image_name(3, 1, 2, "abc") == "shard-00003-00001-abc.safetensors"


def test_the_index_is_there_if_every_tensor_is_in_one_piece() -> None:
    places = {"a": [("x.safetensors", 4)], "b": [("y.safetensors", 8)]}
    [document] = Safetensors().documents(places, {}, ()).values()
    index = json.loads(document)
    assert index == {
        "metadata": {"total_size": 12}, "weight_map": {"a": "x.safetensors", "b": "y.safetensors"}
    }  # fmt: skip
    assert Safetensors().documents({"a": [("x.safetensors", 4), ("y.safetensors", 4)]}, {}, ()) == {}


def test_a_format_is_told_by_the_name_of_a_file() -> None:
    names = {
        "shard-00000-00000-ab.safetensors": "safetensors", "model-00001-of-00001.safetensors": "safetensors",
        "__0_0.distcp.ab": "torch_dist", "__0_0.distcp": "torch_dist", "model/w/c.0.1": "zarr", "w/c": "zarr",
    }  # fmt: skip
    assert {name: format_of(name).name for name in names} == names


@pytest.mark.parametrize("name", ["safetensors", "zarr"])
def test_too_few_bytes_are_damage(name: str) -> None:
    with pytest.raises(IntegrityError, match="it has 3 bytes"):
        open_format(name).decode(bytearray(3), torch.float32, (1,))


# zarr.

keys = st.one_of(st.integers(0, 99), st.text(max_size=12))


@given(st.lists(keys, min_size=1, max_size=4))
def test_names_of_arrays_are_names_of_files_and_can_be_read_back(path: list[Any]) -> None:
    parts = array_path(path).split("/")
    assert [unquote(part, errors="surrogatepass") if part != "%" else "" for part in parts] == list(
        map(str, path)
    )
    for part in parts:
        assert part not in {"", ".", "..", "zarr.json", "c"}
        assert not part.startswith((".", "__", "c."))
        assert part.isascii()
        assert part.isprintable()


def test_a_key_that_is_no_name_of_a_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="too long for the name of a file"):
        array_path(["a" * 256])


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Any]]:
    shape = tuple(draw(st.lists(st.integers(1, 24), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    placements = [
        draw(
            st.one_of(
                st.just(SimpleNamespace()), st.builds(SimpleNamespace, dim=st.integers(0, len(shape) - 1))
            )
        )
        for _ in mesh
    ]
    return shape, mesh, placements


@settings(max_examples=300)
@given(meshes(), st.sampled_from([1, 4, 1 << 22]))
def test_chunks_fill_an_array_and_each_is_of_one_rank(
    what: tuple[tuple[int, ...], tuple[int, ...], list[Any]], itemsize: int
) -> None:
    shape, mesh, placements = what
    boxes = {}
    for coordinate in itertools.product(*map(range, mesh)):
        for chunk in shard_chunks(shape, mesh, coordinate, placements)[1]:
            boxes[chunk.offsets, chunk.sizes] = coordinate
    grid = Zarr().grid(shape, list(boxes), itemsize)
    chunks = []
    for offsets, sizes in boxes:
        ranges = [range(at, at + size, step) for at, size, step in zip(offsets, sizes, grid, strict=True)]
        for corner in itertools.product(*ranges):
            assert all(at % step == 0 for at, step in zip(corner, grid, strict=True))
            lengths = tuple(
                min(step, at + size - start)
                for start, at, size, step in zip(corner, offsets, sizes, grid, strict=True)
            )
            # Shorter only at the end of the array, and only in the first dimension.
            for dim, (start, length, step) in enumerate(zip(corner, lengths, grid, strict=True)):
                assert length == step or (dim == 0 and start + length == shape[0])
            chunks.append((corner, lengths))
    assert misfit(shape, chunks) is None


def test_large_chunks_are_cut_by_rows() -> None:
    whole = ((0, 0), (1000, 1 << 20))
    assert Zarr().grid((1000, 1 << 20), [whole], 4) == (8, 1 << 20)
    even = [((0, 0), (512, 1 << 20)), ((512, 0), (512, 1 << 20))]
    assert Zarr().grid((1024, 1 << 20), even, 4) == (8, 1 << 20)
    # 7 rows of 16 MiB each on two ranks: nothing divides them but 1.
    assert Zarr().grid((14, 1 << 22), [((0, 0), (7, 1 << 22)), ((7, 0), (7, 1 << 22))], 4) == (1, 1 << 22)


def test_a_grid_of_too_many_chunks_is_refused() -> None:
    uneven = [((0, 0), (99_999, 64)), ((99_999, 0), (1, 64)), ((100_000, 0), (100_000, 64))]
    with pytest.raises(ConfigError, match=r"chunks that fit .* are of \(1, 64\), and so 200000 files"):
        Zarr().grid((200_000, 64), uneven, 4)


def test_documents_of_one_node_are_refused() -> None:
    array = [["a"], [2], "float32", [2]]
    with pytest.raises(ConfigError, match=r"'x' and 'y'|'y' and 'x'"):
        Zarr().documents({}, {"x": array, "y": array}, ())
    with pytest.raises(ConfigError, match="'x' is an array of zarr, and there are entries below it"):
        Zarr().documents({}, {"x": array, "y": [["a", "b"], [2], "float32", [2]]}, ())


def test_the_root_comes_last_and_holds_all_documents() -> None:
    arrays = {
        "a.b": [["a", "b"], [2, 2], "float32", [2, 2]],
        "a.e": [["a", "e"], [0, 2], "float32", [1, 2]],
        "a.h": [["a", "h"], [2], "bfloat16", [2]],
    }
    documents = Zarr().documents({}, arrays, {"a/b/zarr.json", "a/h/zarr.json", "a/h/c.0"})
    # An array without elements has no chunk, beside which its document would lie.
    assert list(documents) == ["a/zarr.json", "a/e/zarr.json", "zarr.json"]
    told = json.loads(documents["zarr.json"])["consolidated_metadata"]["metadata"]
    # zarr-python does not open a group that it is told has bfloat16 in it.
    assert list(told) == ["a", "a/b", "a/e"]


def test_a_document_lies_beside_the_first_chunk() -> None:
    first = Entry("a.h", torch.bfloat16, (2,), (0,), ("a", "h"), (4,), (2,))
    second = first._replace(offsets=(2,))
    [(name, text)] = Zarr().companions([second, first]).items()
    array = json.loads(text)
    assert (name, array["shape"], array["data_type"]) == ("a/h/zarr.json", [4], "bfloat16")
    assert [codec["name"] for codec in array["codecs"]] == ["bytes", "crc32c"]
    # To readers, a chunk that is not there is zeros: the document comes after all of them.
    assert not Zarr().companions([first])
    image = lay_out_image([8, 8], 1, 4 * MIB, file_format=Zarr(), entries=[first, second])
    assert [(file.name, file.items, file.header) for file in image.files] == [
        ("a/h/c.0", [0], b""),
        ("a/h/c.1", [1], b""),
        ("a/h/zarr.json", [], text),
    ]


def test_a_checksum_that_would_lie_in_two_blocks_is_left_out() -> None:
    shape = (4 * MIB - 2,)
    [text] = Zarr().companions([Entry("a", torch.uint8, shape, (0,), ("a",), shape, shape)]).values()
    assert [codec["name"] for codec in json.loads(text)["codecs"]] == ["bytes"]
    assert not Zarr(checksums=False).lay_out([8], [entry_of_chunk((2,), (2,))]).is_sealed


def entry_of_chunk(shape: tuple[int, ...], grid: tuple[int, ...]) -> Entry:
    return Entry("a", torch.float32, shape, (0,) * len(shape), ("a",), shape, grid)


def test_padding_and_checksum_stand_behind_a_chunk() -> None:
    assert Zarr().frame_chunk(entry_of_chunk((2, 3), (5, 3))).suffix == bytes(3 * 3 * 4 + 4)
    assert Zarr(checksums=False).frame_chunk(entry_of_chunk((2, 3), (5, 3))).suffix == bytes(36)


@pytest.mark.parametrize("workers", [1, 3])
def test_chunks_end_with_their_checksum_however_many_lanes_write_them(tmp_path: Path, workers: int) -> None:
    """A row of 18 MiB is no less than a chunk, in parts of 4 MiB; later saves use the same memory."""
    state = {
        "large": torch.zeros(2, 9 * MIB // 2),
        "padded": torch.zeros(33, MIB // 2),
        "odd": torch.zeros(7, dtype=torch.uint8),
    }
    with Checkpointer(
        tmp_path,
        ckpt_format="zarr",
        dist_ckpt_workers=workers,
        ckpt_bucket_bytes="4MiB",
        ckpt_host_memory="256MiB",
    ) as checkpointer:
        for step in range(3):
            for tensor in state.values():
                tensor.copy_(torch.randint(0, 100, tensor.shape))
            path = Path(checkpointer.save(step, state).result())
            for name, tensor in state.items():
                payload = b""
                for file in sorted(path.glob(f"{name}/c.*"), key=lambda each: int(each.name.split(".")[1])):
                    content = file.read_bytes()
                    assert struct.unpack("<I", content[-4:]) == (crc32c.crc32c(content[:-4]),)
                    payload += content[:-4]
                expected = tensor.numpy().tobytes()
                assert payload[: len(expected)] == expected
                assert not any(payload[len(expected) :])

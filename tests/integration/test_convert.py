"""Conversion between all formats: nothing lost, nothing believed unseen, nothing overwritten."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import distckpt
from distckpt.cli import main
from distckpt.convert import TARGETS, convert
from distckpt.errors import CommitError, ConfigError, IntegrityError, StagingError
from servers import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MIB = 1 << 20
SOURCES = ("stock", "torch_dist", "safetensors", "zarr", "torch")


def make_state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": {
            "weight": torch.randn(300, 400),
            "layers.0.bias": torch.arange(7, dtype=torch.uint8),
            "scalar": torch.tensor(3.5),
            "turned": torch.randn(64, 32).t(),
            "empty": torch.empty(0, 3),
            "half": torch.randn(33).half(),
            "bfloat16": torch.randn(500, 37).bfloat16(),
            "flags": torch.tensor([True, False]),
        },
        "optimizer": {"step": 3, "names": [0.1, "x"]},
    }


def emptied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: emptied(entry) for key, entry in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    flat, wanted = (flatten_state_dict(state)[0] for state in (found, expected))
    assert flat.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert flat[name].dtype is value.dtype
            assert torch.equal(flat[name], value), name
        else:
            assert flat[name] == value


def load(path: Any, like: dict[str, Any], **options: Any) -> dict[str, Any]:
    if os.path.isfile(path):
        loaded = torch.load(path, weights_only=True, mmap=True)
        assert isinstance(loaded, dict)
        return loaded
    target = emptied(like)
    dcp_load(target, storage_reader=distckpt.StorageReader(path, **options))
    assert isinstance(target, dict)
    return target


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, state = tmp_path_factory.mktemp("sources"), make_state()
    dcp_save(state, storage_writer=FileSystemWriter(root / "stock", thread_count=2))
    for name in ("torch_dist", "safetensors", "zarr"):
        objects = "sidecar" if name == "safetensors" else "auto"
        with distckpt.StorageWriter(root / name, ckpt_format=name, ckpt_objects=objects) as writer:
            dcp_save(state, storage_writer=writer)
    torch.save(state, root / "torch")
    return {name: root / name for name in SOURCES}


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_everything_arrives(sources: dict[str, Path], source: str, to: str, tmp_path: Path) -> None:
    state = make_state()
    told: list[tuple[str, int, int]] = []
    done = convert(
        sources[source],
        tmp_path / "target",
        to=to,
        objects="sidecar" if to == "safetensors" else "auto",
        on_progress=lambda *what: told.append(what),
    )
    assert (done.num_tensors, done.num_objects) == (8, 2)
    assert done.path == str(tmp_path / "target")
    assert_equal(load(tmp_path / "target", state), state)
    if to != "torch":
        assert main(["verify", done.path]) == 0


@pytest.mark.parametrize("by_way_of", [None, "stock", "torch_dist"])
def test_an_optimizer_loads_what_it_has_saved(by_way_of: str | None, tmp_path: Path) -> None:
    def make_optimizer() -> torch.optim.Optimizer:
        return torch.optim.Adam(torch.nn.Linear(3, 2).parameters())

    optimizer = make_optimizer()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"optimizer": optimizer.state_dict()}
    source = tmp_path / "in.pt"
    torch.save(state, source)
    if by_way_of == "stock":
        source = tmp_path / "stock"
        dcp_save(state, storage_writer=FileSystemWriter(source))
    elif by_way_of is not None:
        convert(source, tmp_path / by_way_of, to=by_way_of)
        source = tmp_path / by_way_of
    convert(source, tmp_path / "out.pt", to="torch")
    found = torch.load(tmp_path / "out.pt")["optimizer"]
    assert list(found["state"]) == [0, 1]
    restored = make_optimizer()
    restored.load_state_dict(found)
    assert_equal(restored.state_dict(), optimizer.state_dict())


def test_empty_dicts_go_where_there_is_a_place_for_them(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"state": {}, 1: {}}}
    torch.save(state, tmp_path / "in.pt")
    for to in TARGETS:
        convert(tmp_path / "in.pt", tmp_path / to, to=to)
    assert str(torch.load(tmp_path / "torch")) == str(state)
    convert(tmp_path / "safetensors", tmp_path / "back.pt", to="torch")
    assert list(torch.load(tmp_path / "back.pt")) == ["model"]


@pytest.mark.parametrize("to", TARGETS)
def test_what_cannot_be_converted_is_named(
    to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = {
        "meta": {"layer.w": torch.empty(3, device="meta"), "x": torch.ones(1)},
        "names": {"layer.w": torch.ones(1), "layer": {"w": torch.ones(2)}, "x": torch.ones(1)},
        "cast": {
            "layer.w": torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            "x": torch.ones(1),
        },
    }
    for name, state in states.items():
        torch.save(state, tmp_path / name)
        command = ["convert", str(tmp_path / name), str(tmp_path / f"{name}.out"), "--to", to]
        command += ["--dtype", "bfloat16"]
        assert main(command) == 2
        errors = capsys.readouterr().err
        assert "'layer.w'" in errors
        assert "--exclude layer.w" in errors
        assert not os.path.lexists(tmp_path / f"{name}.out")
        assert main([*command, "--exclude", "layer.w"]) == 0


def test_a_large_tensor_goes_through_little_memory(tmp_path: Path) -> None:
    state = {"a": torch.arange(50 * MIB, dtype=torch.int32).reshape(50, -1), "b": torch.ones(3)}
    with distckpt.Checkpointer(tmp_path / "source") as checkpointer:
        path = checkpointer.save(0, state).result()
    for to in ("safetensors", "zarr", "torch_dist"):
        convert(path, tmp_path / to, to=to, host_memory="32MiB", workers=2)
        assert_equal(load(tmp_path / to, state), state)


def test_a_part_in_another_dtype_is_what_transformers_would_read(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    target = tmp_path / "served"
    command = [
        "convert",
        str(sources["torch_dist"]),
        str(target),
        "--to",
        "safetensors",
        "--dtype",
        "bfloat16",
    ]
    assert main([*command, "--include", "model.*", "--exclude", "*.empty", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["num_tensors"], told["num_objects"], told["format"]) == (7, 0, "safetensors")
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model-00001-of-00001.safetensors"}
    found = load_file(target / "model-00001-of-00001.safetensors")
    assert found.keys() == index["weight_map"].keys()
    for name, value in make_state()["model"].items():
        if name != "empty":
            expected = value.bfloat16() if value.dtype.is_floating_point else value
            assert torch.equal(found[f"model.{name}"], expected)


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_prefix_goes_whatever_the_formats(
    sources: dict[str, Path], source: str, to: str, tmp_path: Path
) -> None:
    command = ["convert", str(sources[source]), str(tmp_path / "target"), "--to", to]
    command += ["--strip-prefix", "model.", "--exclude", "model.empty"]
    if to == "safetensors":
        command += ["--objects", "sidecar"]
    assert main(command) == 0
    expected: dict[str, Any] = make_state()
    expected.update(expected.pop("model"))
    del expected["empty"]
    assert_equal(load(tmp_path / "target", expected), expected)
    if to != "torch":
        assert main(["verify", str(tmp_path / "target")]) == 0
        convert(tmp_path / "target", tmp_path / "back.pt", to="torch")
        assert_equal(load(tmp_path / "back.pt", expected), expected)


def test_a_prefix_goes_from_tensors_in_chunks(tmp_path: Path) -> None:
    state = {"model": {"a": torch.arange(9 * MIB, dtype=torch.int32).reshape(9, -1)}}
    with distckpt.Checkpointer(tmp_path / "source") as checkpointer:
        path = checkpointer.save(0, state).result()
    convert(path, tmp_path / "chunks", to="zarr")
    for to in TARGETS:
        convert(tmp_path / "chunks", tmp_path / to, to=to, strip_prefix="model.", workers=2)
        assert_equal(load(tmp_path / to, state["model"]), state["model"])
    assert len([*(tmp_path / "zarr" / "a").glob("c.*")]) > 1
    assert json.loads((tmp_path / "zarr" / "a" / "zarr.json").read_text())["attributes"] == {"fqn": "a"}


def test_a_prefix_that_cannot_go_is_refused_before_anything_is_written(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "w": torch.ones(1)}, tmp_path / "twice.pt")
    for to in TARGETS:
        target = tmp_path / to
        with pytest.raises(ConfigError, match=r"begins with 'modle\.'"):
            convert(sources["stock"], target, to=to, strip_prefix="modle.")
        # Of those that are taken.
        with pytest.raises(ConfigError, match=r"begins with 'optimizer\.'"):
            convert(sources["stock"], target, to=to, strip_prefix="optimizer.", include=["model.*"])
        with pytest.raises(ConfigError, match=r"'model\.w' and 'w' would both be named 'w'"):
            convert(tmp_path / "twice.pt", target, to=to, strip_prefix="model.")
        assert not target.exists()
        convert(tmp_path / "twice.pt", target, to=to, strip_prefix="model.", exclude=["w"])
    with pytest.raises(StagingError, match=r"'optimizer\.step' is a Python object"):
        convert(sources["stock"], tmp_path / "named", to="safetensors", strip_prefix="optimizer.")


def test_a_module_loads_its_weights_by_the_names_without_the_prefix(tmp_path: Path) -> None:
    from safetensors.torch import load_model

    def make_model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))

    model = make_model()
    with distckpt.Checkpointer(tmp_path / "run") as checkpointer:
        path = checkpointer.save(0, {"model": model, "epoch": 3}).result()
    convert(path, tmp_path / "served", to="safetensors", include=["model.*"], strip_prefix="model.")
    loaded = make_model()
    load_model(loaded, tmp_path / "served" / "model-00001-of-00001.safetensors")
    assert_equal(loaded.state_dict(), model.state_dict())
    convert(path, tmp_path / "model.pt", to="torch", include=["model.*"], strip_prefix="model.")
    loaded = make_model()
    loaded.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert_equal(loaded.state_dict(), model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("num_files", [1, 2])
def test_transformers_loads_what_the_readme_says(
    num_files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", reason="`make setup` installs it")
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    [line] = re.findall(r"^    distckpt (convert .*)$", readme.replace("\\\n", ""), re.MULTILINE)
    config = transformers.BertConfig(
        vocab_size=16_000,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    model = transformers.BertModel(config)
    monkeypatch.chdir(tmp_path)
    with distckpt.Checkpointer("checkpoints/run-1") as checkpointer:
        checkpointer.save(3, {"model": model, "epoch": 3}).result()
    monkeypatch.setattr("distckpt.convert._FILE_BYTES", -(-12_000_000 // num_files))
    assert main(shlex.split(line)) == 0
    assert len([*Path("served").glob("model-*.safetensors")]) == num_files
    config.save_pretrained("served")
    found, told = transformers.AutoModel.from_pretrained("served", dtype="auto", output_loading_info=True)
    assert not any(told.values()), told
    assert_equal(found.state_dict(), model.bfloat16().state_dict())


def test_what_makes_no_sense_is_refused_before_anything_is_written(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = sources["torch_dist"], tmp_path / "target"
    with pytest.raises(StagingError, match=r"'optimizer\.step' is a Python object, which safetensors"):
        convert(source, target, to="safetensors")
    with pytest.raises(ConfigError, match="no entry has a name that fits 'nothing"):
        convert(source, target, to="zarr", include=["nothing*"])
    with pytest.raises(ConfigError, match="nothing is left"):
        convert(source, target, to="zarr", exclude=["*"])
    with pytest.raises(ConfigError, match="to: expected one of torch_dist"):
        convert(source, target, to="hdf5")
    with pytest.raises(ConfigError, match="ckpt_objects: torch_dist holds objects as they are"):
        convert(source, target, to="torch_dist", objects="sidecar")
    for dtype in (torch.uint8, torch.complex64, "float32"):
        with pytest.raises(ConfigError, match="dtype: expected a floating-point dtype"):
            convert(source, target, to="zarr", dtype=dtype)  # type: ignore[arg-type]
    assert main(["convert", str(source), str(target), "--to", "zarr", "--dtype", "int8"]) == 2
    assert "'int8' is no floating-point dtype" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "nowhere"), str(target), "--to", "zarr"]) == 2
    assert "holds no complete checkpoint" in capsys.readouterr().err
    assert not target.exists()


@pytest.mark.parametrize("to", TARGETS)
def test_nothing_is_overwritten(sources: dict[str, Path], to: str, tmp_path: Path) -> None:
    objects = "sidecar" if to == "safetensors" else "auto"
    convert(sources["stock"], tmp_path / "target", to=to, objects=objects)
    with pytest.raises(Exception, match="not written") as caught:
        convert(sources["zarr"], tmp_path / "target", to=to, objects=objects)
    assert isinstance(caught.value, (CommitError, OSError, distckpt.errors.CheckpointError))
    state = make_state()
    assert_equal(load(tmp_path / "target", state), state)


def test_files_of_others_stay(sources: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(b"theirs")
    with pytest.raises(CommitError, match="which no save of distckpt has written"):
        convert(sources["stock"], tmp_path, to="safetensors", objects="sidecar")
    assert (tmp_path / "model-00001-of-00001.safetensors").read_bytes() == b"theirs"


@pytest.mark.parametrize("source", ["torch_dist", "safetensors", "zarr"])
def test_a_damaged_source_is_noticed(source: str, tmp_path: Path) -> None:
    state = {"a": torch.randn(300, 300)}
    with distckpt.StorageWriter(tmp_path / "source", ckpt_format=source) as writer:
        dcp_save(state, storage_writer=writer)
    files = [each for each in (tmp_path / "source").rglob("*") if each.is_file()]
    [file] = (each for each in files if each.stat().st_size > 9 << 15)
    whole = file.read_bytes()
    data = bytearray(whole)
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    for to in TARGETS:
        with pytest.raises(IntegrityError, match="'a' is damaged between bytes"):
            convert(tmp_path / "source", tmp_path / to, to=to)
        if to == "torch":
            assert not [*tmp_path.glob("torch"), *tmp_path.glob("torch.*")]
        else:
            assert not (tmp_path / to / ".metadata").exists()
            assert main(["verify", str(tmp_path / to)]) == 4
    # What was left there is no hindrance.
    file.write_bytes(whole)
    convert(tmp_path / "source", tmp_path / "zarr", to="zarr")
    assert_equal(load(tmp_path / "zarr", state), state)


@pytest.mark.parametrize("to", ["torch_dist", "safetensors", "zarr"])
def test_from_s3_and_to_s3(s3_server: S3Server, sources: dict[str, Path], to: str, tmp_path: Path) -> None:
    state, options = make_state(), s3_server.options
    objects = "sidecar" if to == "safetensors" else "auto"
    url = s3_server.new_prefix()
    convert(sources["torch_dist"], url, to=to, objects=objects, target_options=options)
    assert_equal(load(url, state, storage_options=options), state)
    convert(url, tmp_path / "back", to="torch_dist", source_options=options)
    assert_equal(load(tmp_path / "back", state), state)


def test_ctrl_c_leaves_no_checkpoint_and_no_hindrance(tmp_path: Path) -> None:
    state = {f"layer.{number}": torch.randn(1024, 1024) for number in range(60)}
    with distckpt.Checkpointer(tmp_path / "source") as checkpointer:
        path = checkpointer.save(0, state).result()
    command = [sys.executable, "-m", "distckpt", "convert", path, str(tmp_path / "target"), "--to", "zarr"]
    with subprocess.Popen([*command, "--memory", "32MiB"], stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "target" / "layer.30").exists() and process.poll() is None:
            pass
        process.send_signal(2)
        _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    if process.returncode:
        assert process.returncode == 130
        assert not (tmp_path / "target" / ".metadata").exists()
        convert(path, tmp_path / "target", to="zarr")
    assert_equal(load(tmp_path / "target", state), state)
    assert main(["verify", str(tmp_path / "target")]) == 0

"""Megatron-Core on the CPU: its sharded states saved and loaded through the adapter."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from distckpt.geometry import misfit
from integration.checkpoints import read_with_torch
from integration.ranks import world
from integration.ranks.world import Ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Runs functions on worlds of gloo ranks that have Megatron-Core."""
    before, world._SERVER = world._SERVER, Path(world.__file__).with_name("megatron_server.py")
    server = Ranks()
    yield server
    server.close()
    world._SERVER = before


def act(what: str, root: str) -> Any:
    """Rank function: one that is named, of a module that imports Megatron-Core."""
    module, _, function = what.partition(".")
    return getattr(importlib.import_module(f"integration.ranks.{module}"), function)(root)


def assert_all(replies: list[dict[str, object]]) -> None:
    """Every entry of every rank is true."""
    for rank, reply in enumerate(replies):
        assert {name: value for name, value in reply.items() if value is not True} == {}, rank


def assert_written_once(path: Path) -> None:
    """Chunks tile their tensors."""
    for entry in FileSystemReader(path).read_metadata().state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            assert misfit(entry.size, boxes) is None


def test_gpt_in_every_way(ranks: Ranks, tmp_path: Path) -> None:
    assert_all(ranks.run(4, act, what="megatron_saves.gpt_in_every_way", root=str(tmp_path)))
    for path in tmp_path.iterdir():
        assert_written_once(path)


@pytest.mark.gpu
@pytest.mark.timeout(180)
def test_on_a_gpu(tmp_path: Path) -> None:
    """In a process of its own: with CUDA, importing Megatron-Core starts threads, and ranks are forked."""
    code = (
        "import json, sys; from torch import distributed\n"
        "from integration.ranks import megatron_saves\n"
        "distributed.init_process_group('gloo', store=distributed.HashStore(), rank=0, world_size=1)\n"
        "print(json.dumps(megatron_saves.on_a_gpu(sys.argv[1])))"
    )
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE, text=True, timeout=170.0, check=True,
    )  # fmt: skip
    assert_all([json.loads(found.stdout.splitlines()[-1])])


def test_ours_loads_theirs(ranks: Ranks, tmp_path: Path) -> None:
    assert_all(ranks.run(2, act, what="megatron_saves.theirs_and_ours", root=str(tmp_path)))


def test_replicas_and_late_keys(ranks: Ranks, tmp_path: Path) -> None:
    replies = ranks.run(4, act, what="megatron_saves.hand_made", root=str(tmp_path))
    for reply in replies:
        for mode in ("True", "False"):
            assert "'copy' at [0, 0] has 4 main replicas" in reply.pop(f"two mains {mode}")
            assert "'copy' at [0, 0] has 0 main replicas" in reply.pop(f"no main {mode}")
    assert_all(replies)
    for path in tmp_path.glob("first *"):
        assert_written_once(path)


def test_within_their_wrapper(ranks: Ranks, tmp_path: Path) -> None:
    replies = ranks.run(4, act, what="megatron_saves.wrapped", root=str(tmp_path))
    for reply in replies:
        # Once, of two saves.
        [text] = reply.pop("warnings")
        assert "give it unwrapped" in text
    assert_all(replies)
    for path in tmp_path.iterdir():
        assert_written_once(path)
        assert (path / "metadata.json").exists()


def test_two_of_four(ranks: Ranks, tmp_path: Path) -> None:
    replies = ranks.run(4, act, what="megatron_saves.some_save", root=str(tmp_path))
    assert replies[0] is None
    assert replies[2] is None
    assert replies[1].pop("alone") == ["MissingRanks", True, True]
    assert_all([replies[1], replies[3]])
    for path in tmp_path.glob("some-*"):
        assert_written_once(path)


def test_writer_swapped_in(ranks: Ranks, tmp_path: Path) -> None:
    replies = ranks.run(2, act, what="megatron_saves.writer_swapped_in", root=str(tmp_path))
    errors = [reply.pop("error 4") for reply in replies]
    assert "'late' would be lost" in errors[0]
    assert "CheckpointException" in errors[1]
    assert_all(replies)
    # What is not whole is not there.
    assert not (tmp_path / "step-4" / ".metadata").exists()
    for name in ("step-3", "late"):
        assert_written_once(tmp_path / name)


def test_with_resiliency_ext(ranks: Ranks, tmp_path: Path) -> None:
    reason = "nvidia-resiliency-ext is not installed: pip install --no-deps nvidia-resiliency-ext"
    pytest.importorskip("nvidia_resiliency_ext", reason=reason)
    assert_all(ranks.run(2, act, what="megatron_saves.resiliency", root=str(tmp_path)))
    for name in ("later", "resiliency-0", "resiliency-1"):
        assert_written_once(tmp_path / name)


def test_fsdp_without_collectives(ranks: Ranks, tmp_path: Path) -> None:
    assert_all(ranks.run(4, act, what="megatron_fsdp.prepare_and_save", root=str(tmp_path)))
    for name in ("sync", "async"):
        assert_written_once(tmp_path / name)
        found = read_with_torch(tmp_path / name)
        for file in tmp_path.glob("*.pt"):
            # Of both tensor-parallel ranks, section by section.
            assert torch.equal(found["model"][file.stem], torch.load(file)), file.stem
        for section in (".query", ".alpha"):
            name = f"decoder.gdn.in_proj.weight{section}"
            whole, moment = found["model"][name], found["optimizer"]["state"][f"module.{name}"]["exp_avg"]
            assert moment.shape == whole.shape
            assert moment.abs().sum() > 0


def test_without_megatron() -> None:
    code = (
        "import sys; sys.modules['megatron'] = None\n"
        "from distckpt import ConfigError\n"
        "try: import distckpt.integrations.megatron\n"
        "except ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "megatron-core>=0.16,<0.20" in done.stdout


@pytest.mark.thorough
def test_version_that_is_not_known() -> None:
    code = (
        "import warnings\n"
        "with warnings.catch_warnings():\n"
        "    warnings.simplefilter('ignore')\n"
        "    import megatron.core\n"
        "megatron.core.__version__ = '0.20.1'\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    from distckpt.integrations import megatron\n"
        "    for version in ('0.20.1', '0.16.0', '0.19.2', 'x'): megatron._check_version(version)\n"
        "print([str(one.message) for one in caught if 'knows megatron-core' in str(one.message)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # One for each version, however often.
    assert done.stdout.count("0.20.1") == 1
    assert done.stdout.count("knows megatron-core") == 2

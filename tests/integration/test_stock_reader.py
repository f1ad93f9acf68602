"""Stock PyTorch reads what distckpt wrote, in a process that cannot import distckpt."""

from __future__ import annotations

import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from distckpt import StorageWriter
from integration.checkpoints import assert_same, save

pytestmark = pytest.mark.slow

# No site: it would follow the .pth file of an installation that can be edited. The finder is for a distckpt
# that lies beside torch.
READ = """
import importlib.abc, os, sys, warnings
[output, packages, *checkpoints] = sys.argv[1:]
sys.path = [entry for entry in sys.path if entry and "distckpt" not in entry] + packages.split(os.pathsep)

class NoDistckpt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "distckpt":
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, NoDistckpt())
warnings.simplefilter("ignore")
import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

found = {}
for path in checkpoints:
    for name, reader in (("files", FileSystemReader(path)), ("fsspec", FsspecReader("file://" + path))):
        state = {}
        _load_state_dict(state, reader, no_dist=True, planner=_EmptyStateDictLoadPlanner())
        found[path, name] = state
    dcp_to_torch_save(path, output + ".converted")
    found[path, "converted"] = torch.load(output + ".converted", weights_only=False)
torch.save(found, output)
assert "distckpt" not in sys.modules
"""


def _state() -> dict[str, Any]:
    return {
        "weights": {"a": torch.arange(24.0).reshape(4, 6), "t": torch.arange(24).reshape(4, 6).t()},
        "columns": torch.arange(30, dtype=torch.int16).reshape(5, 6)[:, ::2],
        "float8": torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "scalar": torch.tensor(0.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "tuple": (torch.nn.Parameter(torch.ones(3)), torch.arange(6).reshape(2, 3).t(), {"k": [1, 2]}),
        "list": [torch.ones(1), {"step": torch.tensor(3)}],
        "object": {"lr": 0.1, "names": {"x", "y"}, "nothing": None, "large": 1 << 100},
    }


def _checkpoints(folder: Path) -> dict[str, dict[str, Any]]:
    """Write one checkpoint in each way; returns what each holds."""
    state = _state()
    written = {}
    for workers in (1, 2):
        with StorageWriter(dist_ckpt_workers=workers) as writer:
            for is_async in (False, True):
                path = folder / f"workers {workers} async {is_async}"
                save(state, path, writer, is_async=is_async)
                written[str(path)] = state
            save({"old": torch.ones(3)}, folder / f"overwritten {workers}", writer, is_async=False)
            save(state, folder / f"overwritten {workers}", writer, is_async=True)
            written[str(folder / f"overwritten {workers}")] = state
    with StorageWriter(ckpt_checksum="none") as writer:
        save({}, folder / "nothing", writer, is_async=False)
        written[str(folder / "nothing")] = {}
    return written


def test_without_distckpt(tmp_path: Path) -> None:
    written = _checkpoints(tmp_path)
    output = tmp_path / "found.pt"
    packages = str(Path(torch.__file__).parents[1])
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", READ, str(output), packages, *written], check=True, timeout=50
    )
    found = torch.load(output, weights_only=False)
    assert found.keys() == {(path, way) for path in written for way in ("files", "fsspec", "converted")}
    for (path, way), state in found.items():
        assert_same(state, written[path], f"{path} by {way}")


def test_the_metadata_names_no_class_of_distckpt(tmp_path: Path) -> None:
    for path in _checkpoints(tmp_path):
        content = (Path(path) / ".metadata").read_bytes()
        words = [argument for _, argument, _ in pickletools.genops(content) if isinstance(argument, str)]
        assert "torch.distributed.checkpoint.metadata" in words
        assert not [word for word in words if word.startswith("distckpt")]

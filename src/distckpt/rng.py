"""The random number generators of one rank, as tensors.

Python's, NumPy's global one, torch's on the CPU and on every CUDA device that this process uses, and the
states that DTensor keeps beside them, where this version of torch does.

Threads: the trainer's.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from distckpt.errors import CheckpointError


class RngState:
    """All generators of this rank; `PerRank` saves it."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the states now, as CPU tensors."""
        return _python_state() | _numpy_state() | _torch_state()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Set the generators.

        Args:
            state: What `state_dict` returned.

        Raises:
            CheckpointError: A generator does not take its state.
        """
        try:
            _set_python(state)
            _set_numpy(state)
            _set_torch(state)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"a random number generator does not take the state: {error}") from error


def _python_state() -> dict[str, torch.Tensor]:
    _, words, gauss = random.getstate()
    return {"python": torch.tensor(words, dtype=torch.int64), "python_gauss": _optional(gauss)}


def _set_python(state: dict[str, torch.Tensor]) -> None:
    version = random.getstate()[0]
    random.setstate((version, tuple(state["python"].tolist()), _value_of(state["python_gauss"])))


def _optional(value: float | None) -> torch.Tensor:
    """Return a number that may be missing as a tensor of fixed size: whether it is there, and it."""
    return torch.tensor([value is not None, value or 0.0], dtype=torch.float64)


def _value_of(pair: torch.Tensor) -> float | None:
    is_there, value = pair.tolist()
    return value if is_there else None


def _numpy_state() -> dict[str, torch.Tensor]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return {}
    state = numpy.random.get_state(legacy=False)
    kind = state["bit_generator"]
    if kind != "MT19937":
        raise CheckpointError(
            f"load_rng: NumPy's global generator is a {kind}, of which only MT19937 can be saved"
        )
    words, position = state["state"]["key"], state["state"]["pos"]
    return {
        "numpy": torch.tensor([*words.tolist(), position], dtype=torch.int64),
        "numpy_gauss": _optional(state["gauss"] if state["has_gauss"] else None),
    }


def _set_numpy(state: dict[str, torch.Tensor]) -> None:
    if "numpy" not in state:
        return
    import numpy

    *words, position = state["numpy"].tolist()
    gauss = _value_of(state["numpy_gauss"])
    numpy.random.set_state(
        ("MT19937", numpy.array(words, dtype=numpy.uint32), position, gauss is not None, gauss or 0.0)
    )


def _torch_state() -> dict[str, torch.Tensor]:
    found = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.stack(torch.cuda.get_rng_state_all())
        found["cuda_device"] = torch.tensor(torch.cuda.current_device())
    for name, state in _dtensor_states().items():
        found[f"dtensor_{name}"] = state.cpu()
    return found


def _set_torch(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        states = list(state["cuda"])
        for device, saved in enumerate(states[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(saved, device)
        # The device of this rank may be another one than it was.
        torch.cuda.set_rng_state(states[int(state["cuda_device"])], torch.cuda.current_device())
    kept = _dtensor_states()
    for name in kept:
        if f"dtensor_{name}" in state:
            kept[name] = state[f"dtensor_{name}"].to(kept[name].device)


def _dtensor_states() -> dict[str, Any]:
    """Return what DTensor's tracker keeps; newer versions of torch keep nothing beside the generators."""
    module = sys.modules.get("torch.distributed.tensor._random")
    tracker = getattr(module, "_rng_tracker", None)
    return getattr(tracker, "rng_states", {})

"""The random number generators of a rank: what they would have drawn next, they draw after a restore."""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy
import pytest
import torch

from distckpt.errors import CheckpointError
from distckpt.rng import RngState


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    python, theirs, torchs = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    numpy.random.set_state(theirs)
    torch.set_rng_state(torchs)


DRAWS: dict[str, Callable[[], list[float]]] = {
    "python": lambda: [random.random() for _ in range(9)],
    # Of which every second is kept for the next call.
    "python gauss": lambda: [random.gauss(0, 1)],
    "numpy": lambda: numpy.random.random(9).tolist(),
    "numpy gauss": lambda: [float(numpy.random.standard_normal())],
    "torch": lambda: torch.rand(9).tolist(),
    "torch normal": lambda: torch.randn(17).tolist(),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(64)).tolist(),
}


def all_draws() -> dict[str, list[float]]:
    return {name: draw() for name, draw in DRAWS.items()}


def scramble(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_what_would_have_been_drawn_is_drawn(before: int) -> None:
    scramble(5)
    for _ in range(before):
        all_draws()
    state = copy.deepcopy(RngState().state_dict())
    expected = [all_draws(), all_draws()]
    for seed in (6, 7):
        scramble(seed)
        all_draws()
        RngState().load_state_dict(copy.deepcopy(state))
        assert [all_draws(), all_draws()] == expected


def test_to_look_at_the_state_changes_nothing() -> None:
    scramble(5)
    expected = all_draws()
    scramble(5)
    RngState().state_dict()
    assert all_draws() == expected


def test_a_state_is_that_of_its_moment() -> None:
    scramble(5)
    state = RngState().state_dict()
    before = copy.deepcopy(state)
    all_draws()
    for name, tensor in state.items():
        assert torch.equal(tensor, before[name]), name


def test_the_state_is_of_one_size_whatever_was_drawn() -> None:
    """So that a plan of a whole state holds from step to step."""
    found = []
    for turn in range(3):
        found.append({name: (each.shape, each.dtype) for name, each in RngState().state_dict().items()})
        random.gauss(0, 1)
        if turn:
            numpy.random.standard_normal()
    assert found[0] == found[1] == found[2]


def test_generators_that_are_seeded_apart_come_back_apart() -> None:
    states = []
    for rank in range(3):
        scramble(100 + rank)
        states.append(copy.deepcopy(RngState().state_dict()))
    drawn = []
    for state in states:
        RngState().load_state_dict(state)
        drawn.append(torch.rand(3).tolist())
    assert len({tuple(each) for each in drawn}) == 3


def test_a_process_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    scramble(5)
    monkeypatch.delitem(sys.modules, "numpy")
    state = RngState().state_dict()
    assert not [name for name in state if "numpy" in name]
    monkeypatch.undo()
    theirs = numpy.random.random(2).tolist()
    scramble(5)
    RngState().load_state_dict(state)
    assert numpy.random.random(2).tolist() == theirs, "that of NumPy stays as it is"


def test_another_generator_of_numpy_is_refused_by_name() -> None:
    # Not among what its stubs export.
    theirs: Any = numpy.random
    before = theirs.get_bit_generator()
    theirs.set_bit_generator(numpy.random.PCG64(3))
    try:
        with pytest.raises(CheckpointError, match="PCG64"):
            RngState().state_dict()
    finally:
        theirs.set_bit_generator(before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("python", torch.zeros(3, dtype=torch.int64)),
        ("python_gauss", torch.zeros(5)),
        ("numpy", torch.zeros(9, dtype=torch.int64)),
        ("torch", torch.zeros(7, dtype=torch.uint8)),
        ("torch", None),
        ("python", None),
    ],
)
def test_a_state_that_fits_none_is_refused(name: str, value: torch.Tensor | None) -> None:
    state = RngState().state_dict()
    if value is None:
        del state[name]
    else:
        state[name] = value
    with pytest.raises(CheckpointError, match="random number generator"):
        RngState().load_state_dict(state)


def test_what_dtensor_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of torch that keep generators of DTensor beside the others have them saved, too."""
    from torch.distributed.tensor import _random

    class Tracker:
        rng_states: ClassVar[dict[str, torch.Tensor]] = {"parallel-rng": torch.arange(16, dtype=torch.uint8)}

    monkeypatch.setattr(_random, "_rng_tracker", Tracker())
    state = copy.deepcopy(RngState().state_dict())
    assert torch.equal(state["dtensor_parallel-rng"], torch.arange(16, dtype=torch.uint8))
    Tracker.rng_states["parallel-rng"] = torch.zeros(16, dtype=torch.uint8)
    RngState().load_state_dict(state)
    assert torch.equal(Tracker.rng_states["parallel-rng"], torch.arange(16, dtype=torch.uint8))
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RngState().load_state_dict(state)

"""One process that trains: objects with a state, retention, `latest`, policies, damaged checkpoints."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import random
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distckpt import (
    Checkpointer,
    CheckpointError,
    CommitError,
    ConfigError,
    IntegrityError,
    PerRank,
    StagingError,
    StorageReader,
    WriteError,
    observe,
)
from distckpt import checkpointer as checkpointing
from distckpt.archive import Archive
from distckpt.storage import open_storage
from integration.checkpoints import WAIT_S, assert_same, read_with_torch
from servers import S3Server

pytestmark = pytest.mark.slow


def path_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08}"


def latest_of(root: Path) -> str:
    return (root / "latest").read_text()


@contextmanager
def held_back(checkpointer: Checkpointer) -> Iterator[threading.Event]:
    """Keep everything that happens in the background from happening, until the event is set or at the end."""
    gate = threading.Event()
    checkpointer._thread.submit(gate.wait, WAIT_S)
    try:
        yield gate
    finally:
        gate.set()


def settle(checkpointer: Checkpointer) -> list[int]:
    """Wait for what retention does in the background, and return the steps that are there."""
    cleaner = checkpointer._archive._cleaner
    if cleaner is not None:
        cleaner.submit(lambda: None).result(WAIT_S)
    return checkpointer.steps()


def in_the_way(root: Path, step: int) -> Path:
    """Have saves of a step fail, as long as the file is there."""
    path = path_of(root, step)
    path.touch()
    return path


def flip(path: Path, fqn: str = "t") -> None:
    """Damage one tensor."""
    storage_data = FileSystemReader(path).read_metadata().storage_data
    info = next(info for index, info in storage_data.items() if index.fqn == fqn)
    file = path / info.relative_path
    data = bytearray(file.read_bytes())
    data[info.offset + info.length - 1] ^= 1
    file.write_bytes(data)


def small(step: int) -> dict[str, Any]:
    return {"t": torch.full((5,), float(step)), "step": step}


def save_and_wait(checkpointer: Checkpointer, step: int) -> None:
    checkpointer.save(step, small(step))
    checkpointer.wait()


class Cursor:
    """Has a state of its own."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Loop:
    """A model, an optimizer, a scheduler, and what else there is in a training loop."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.cursor = Cursor()
        self.state: dict[str, Any] = {
            "model": self.model,
            "loop": {"optimizer": self.optimizer, "schedulers": [self.scheduler]},
            "cursor": PerRank(self.cursor),
            "step": 0,
            "note": {"best": None, 7: "seven"},
        }

    def train(self, checkpointer: Checkpointer, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = self.model(torch.randn(4, 6)).square().mean() * random.random()
            loss.backward()
            with checkpointer.guard(self.optimizer):
                self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.cursor.position += 1
            self.state["step"] += 1
            self.state["note"]["best"] = loss.item()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("load_rng", [True, False], ids=["with-rng", "without"])
@pytest.mark.parametrize("ckpt_format", ["torch_dist", "zarr"])
def test_a_loop_goes_on_as_if_nothing_had_been(tmp_path: Path, load_rng: bool, ckpt_format: str) -> None:
    with Checkpointer(tmp_path, async_save=True, load_rng=load_rng, ckpt_format=ckpt_format) as checkpointer:
        loop = Loop(1)
        loop.train(checkpointer, 4)
        checkpointer.save(4, loop.state)
        expected = loop.train(checkpointer, 5)
        checkpointer.wait()
        other = Loop(2)
        assert checkpointer.restore(other.state) == 4
        assert other.state["step"] == 4, "plain values are given back, too"
        assert other.state.keys() == loop.state.keys()
        assert other.state["model"] is other.model
        assert other.state["note"].keys() == {"best", 7}
        assert other.cursor.position == 4
        assert other.scheduler.last_epoch == 4
        found = other.train(checkpointer, 5)
    assert (found == expected) == load_rng
    if load_rng:
        assert_same(dict(other.model.state_dict()), dict(loop.model.state_dict()))
        assert other.state["note"] == loop.state["note"]


def test_a_state_that_has_what_load_rng_keeps(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, load_rng=True) as checkpointer:
        with pytest.raises(ConfigError, match="'rng_state'"):
            checkpointer.save(0, {"rng_state": 1})
        checkpointer.save(0, small(0))
        with pytest.raises(ConfigError, match="'rng_state'"):
            checkpointer.restore({"rng_state": 1})


def test_generators_are_not_touched_without_being_asked(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, load_rng=True) as checkpointer:
        checkpointer.save(0, small(0))
    torch.manual_seed(9)
    with Checkpointer(tmp_path) as checkpointer:
        target = small(1)
        assert checkpointer.restore(target) == 0
    assert_same(target, small(0))
    drawn = torch.rand(2)
    torch.manual_seed(9)
    assert torch.equal(torch.rand(2), drawn)


def test_a_checkpoint_without_generators_is_restored_by_who_keeps_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, small(3))
    with Checkpointer(tmp_path, load_rng=True) as checkpointer:
        target = small(1)
        assert checkpointer.restore(target) == 0
    assert_same(target, small(3))
    assert "'rng_state' of rank 0" in caplog.text


def test_a_state_of_objects_is_planned_once(tmp_path: Path) -> None:
    """Also while their states are other objects each time, and a loader's is longer from time to time."""
    with Checkpointer(tmp_path, async_save=True, load_rng=True) as checkpointer:
        loop = Loop(1)
        plans = []
        for step in range(1, 7):
            loop.train(checkpointer, 1)
            loop.cursor.position = 10**step
            checkpointer.save(step, loop.state).result(WAIT_S)
            plans.append(checkpointer._planned)
        assert len({id(plan) for plan in plans[1:]}) == 1
        for step in range(1, 7):
            other = Loop(2)
            checkpointer.restore(other.state, step)
            assert other.cursor.position == 10**step


def test_entries_that_come_late_are_in_every_later_checkpoint(tmp_path: Path) -> None:
    """An optimizer has no state before its first step, and more of it whenever a parameter joins."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = torch.optim.Adam(model.parameters())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "ema": {}}
    with Checkpointer(tmp_path, async_save=True) as checkpointer:
        for step in range(12):
            if step >= 3:
                model[0](torch.ones(1, 2)).sum().backward()
            if step >= 6:
                model[1](torch.ones(1, 2)).sum().backward()
            if step >= 9:
                state["ema"]["weight"] = torch.full((2,), float(step))
            with checkpointer.guard(optimizer):
                optimizer.step()
            optimizer.zero_grad()
            checkpointer.save(step, state)
    for step in range(12):
        values = read_with_torch(path_of(tmp_path, step))
        expected = 0 if step < 3 else 2 if step < 6 else 4
        assert len(values["optimizer"].get("state", {})) == expected, step
        assert values.get("ema", {}) == {} if step < 9 else values["ema"]["weight"].tolist() == [step, step]


def test_a_checkpoint_of_before_the_first_step_is_restored_after_a_damaged_one(tmp_path: Path) -> None:
    """What was prepared for the damaged one does not stand in the way of the older one."""

    def make() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    state = make()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state)
        weights = {name: value.clone() for name, value in state["model"].state_dict().items()}
        state["model"](torch.ones(1, 2)).sum().backward()
        state["optimizer"].step()
        checkpointer.save(1, state)
        flip(path_of(tmp_path, 1), "model.weight")
        other = make()
        assert checkpointer.restore(other) == 0
    assert_same(dict(other["model"].state_dict()), weights)
    assert not other["optimizer"].state


# Optimizers, of which a checkpoint has what `load_state_dict` would be given.

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"amsgrad": True}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "tensor-lr": (torch.optim.Adam, {"lr": torch.tensor(0.01), "foreach": False}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adafactor": (torch.optim.Adafactor, {}),
    "asgd": (torch.optim.ASGD, {}),
    "nadam": (torch.optim.NAdam, {"decoupled_weight_decay": True}),
    "rprop": (torch.optim.Rprop, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "lbfgs": (torch.optim.LBFGS, {"max_iter": 3, "history_size": 4}),
}


class Heads:
    """A trunk and heads, of which a step may leave some out."""

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.parts = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)])
        make, settings = OPTIMIZERS[kind]
        self.optimizer = make(self.parts.parameters(), **settings)
        self.state = {"model": self.parts, "o": self.optimizer}

    def step(self, *heads: int) -> None:
        def loss() -> Any:
            self.optimizer.zero_grad()
            inner = self.parts[0](torch.linspace(-1, 1, 6).reshape(2, 3))
            total = sum(self.parts[head](inner).square().sum() for head in heads)
            total.backward()
            return total

        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(loss)  # type: ignore[no-untyped-call]
        else:
            loss()
            self.optimizer.step()
        self.optimizer.zero_grad()


def assert_as_if_loaded(found: Heads, saved: Heads, kind: str, *heads: int) -> None:
    """Compare with what `load_state_dict` makes of the same, and with what that makes of a further step."""
    expected = Heads(kind, 9)
    expected.parts.load_state_dict(saved.parts.state_dict())
    expected.optimizer.load_state_dict(saved.optimizer.state_dict())
    for _ in range(2):
        assert_same(found.optimizer.state_dict(), expected.optimizer.state_dict())
        assert_same(dict(found.parts.state_dict()), dict(expected.parts.state_dict()))
        for one in (found, expected):
            one.step(*heads)


@pytest.mark.parametrize("before", [(), (1,), (1, 2), (2,)], ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parameters_have_the_states_that_the_checkpoint_has(
    tmp_path: Path, kind: str, before: tuple[int, ...]
) -> None:
    """Whatever the optimizer that it is restored into has stepped, and whatever had a gradient before."""
    saved, other = Heads(kind, 1), Heads(kind, 2)
    for _ in range(3):
        saved.step(1)
    if before:
        for _ in range(2 if kind == "lbfgs" else 1):
            other.step(*before)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, saved.state)
        checkpointer.restore(other.state)
    assert_as_if_loaded(other, saved, kind, 1, 2)


def test_moments_of_what_is_frozen_since_are_kept(tmp_path: Path) -> None:
    saved, other = Heads("adam", 1), Heads("adam", 2)
    saved.step(1, 2)
    other.parts[2].requires_grad_(False)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, saved.state)
        checkpointer.restore(other.state)
    assert len(other.optimizer.state) == 6
    assert_as_if_loaded(other, saved, "adam", 1)


def test_an_optimizer_is_restored_without_a_step_of_it(tmp_path: Path) -> None:
    """No hook is called, no value changes, and gradients stay; nor does a scheduler see a step."""
    saved, other = Heads("adam", 1), Heads("adam", 2)
    scheduler = torch.optim.lr_scheduler.StepLR(saved.optimizer, 2)
    saved.step(1)
    called: list[object] = []
    torch.optim.lr_scheduler.StepLR(other.optimizer, 2)
    other.optimizer.register_step_pre_hook(lambda *_: called.append(0))
    other.optimizer.register_step_post_hook(lambda *_: called.append(1))
    seen = register_optimizer_step_pre_hook(lambda *_: called.append(2))
    values = [-torch.zeros_like(each) for each in other.parts.parameters()]
    with torch.no_grad():
        for parameter, value in zip(other.parts.parameters(), values, strict=True):
            parameter.copy_(value)
            parameter.grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter in other.parts.parameters()]
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, {"o": saved.optimizer, "s": scheduler})
        called.clear()
        checkpointer.restore({"o": other.optimizer})
    seen.remove()
    assert called == []
    assert not getattr(other.optimizer, "_opt_called", False)
    assert_same(list(other.parts.parameters()), values)
    assert all(p.grad is g for p, g in zip(other.parts.parameters(), gradients, strict=True))
    assert_same(other.optimizer.state_dict(), saved.optimizer.state_dict())


class Wrapping(torch.optim.Optimizer):
    """Hands on what it is asked, as some libraries' optimizers do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.num_steps = optimizer, 0

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        return self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


class Peculiar(torch.optim.Optimizer):
    """Its states are no tensors of the shape of parameters, and not of parameters alone."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["num_steps"] = group.get("num_steps", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["n"] = state.get("n", 0) + 1
                    state["none"], state["even"], state["empty"] = None, state["n"] % 2 == 0, {}
                    state[7] = {"rows": parameter.grad.sum(0), "history": [torch.ones(3)] * state["n"]}
                    state["half"] = parameter.grad.new_ones(5, dtype=torch.int16)
        self.state["all"]["norm"] = torch.ones(2)  # type: ignore[index]


@pytest.mark.parametrize("wraps", [False, True], ids=["itself", "wrapped"])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_states_of_any_kind(tmp_path: Path, wraps: bool, steps: int) -> None:
    def make(steps: int) -> torch.optim.Optimizer:
        parameters = [torch.nn.Parameter(torch.ones(2, 3)) for _ in range(12)]
        optimizer = Peculiar(parameters)
        for number in range(steps):
            for parameter in parameters[number::2]:
                parameter.grad = torch.ones(2, 3)
            optimizer.step()
        return optimizer

    saved, other = make(2), make(steps)
    had = set(other.state_dict()["state"])
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, {"o": saved})
        checkpointer.restore({"o": Wrapping(other) if wraps else other})
    loaded = make(0)
    loaded.load_state_dict(saved.state_dict())
    expected = loaded.state_dict()
    for number, entry in expected["state"].items():
        if wraps and number not in had and 7 in entry:
            # Nobody can tell that its keys are not text, nor that there is something without anything in it.
            entry["7"] = entry.pop(7)
            del entry["empty"]
    assert_same(other.state_dict(), expected)


def test_an_optimizer_that_does_not_fit_is_named(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        saved = Heads("adam", 1)
        saved.step(1, 2)
        checkpointer.save(0, {"o": saved.optimizer})
        few = torch.optim.Adam(saved.parts[0].parameters())
        with pytest.raises(CheckpointError, match=r"o\.state\.2: the optimizer has no such parameter, but 2"):
            checkpointer.restore({"o": few})
        few.add_param_group({"params": list(saved.parts[1].parameters())})
        with pytest.raises(CheckpointError, match=r"o\.param_groups: the optimizer has 2, the checkpoint 1"):
            checkpointer.restore({"o": few})
        assert not few.state


# Objects whose states are of any kind, in containers of any kind.


class Holder:
    """Has whatever it is given as its state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


@pytest.mark.parametrize(
    ("saved", "other"),
    [
        ([1, 2], [3]),
        ([torch.ones(2), 4, "x"], [torch.zeros(2), 5, "y"]),
        ([{"a": 1}, [torch.ones(1)]], [{"a": 2}, [torch.zeros(1)]]),
        ((1, "x"), (2,)),
        ("text", ""),
        (b"bytes", b""),
        (7, 8),
        (None, 1),
        (torch.tensor(3.0), torch.tensor(4.0)),
        (torch.ones(2), torch.zeros(2)),
        ({"a": 1, 2: torch.ones(1)}, {"a": 2, 2: torch.zeros(1)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["top", "mapping", "list"])
def test_a_state_need_not_be_a_mapping(tmp_path: Path, saved: Any, other: Any, where: str) -> None:
    def make(value: Any) -> tuple[Holder, dict[str, Any]]:
        holder = Holder(copy.deepcopy(value))
        states: dict[str, dict[str, Any]] = {
            "top": {"o": holder},
            "mapping": {"m": {3: holder, "n": 1}},
            "list": {"l": [0, [holder, "x"]]},
        }
        return holder, states[where]

    (_, state), (holder, target) = make(saved), make(other)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state)
        checkpointer.save(1, state)
        checkpointer.restore(target)
    assert_same(holder.value, saved)


def test_what_is_in_lists_stays_there(tmp_path: Path) -> None:
    saved, other = nn.Linear(2, 2), nn.Linear(2, 2)
    inner = [other, 0]
    target = {"l": [inner, "y"]}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, {"l": [[saved, 5], "x"]})
        checkpointer.restore(target)
    assert target["l"][0] is inner
    assert inner[0] is other
    assert (inner[1], target["l"][1]) == (5, "x")
    assert_same(dict(other.state_dict()), dict(saved.state_dict()))


@dataclass
class Pair:
    first: Any
    second: Any = 0


@pytest.mark.parametrize(
    "hide",
    [
        lambda one: (1, one), lambda one: {one}, lambda one: Pair(one), lambda one: (1, [{"x": (one,)}]),
        lambda one: Pair(0, (PerRank(Cursor()),)),
    ],
)  # fmt: skip
def test_what_would_be_pickled_as_a_whole_is_refused(tmp_path: Path, hide: Any) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for state, name in (
            ({"of": hide(nn.Linear(1, 1))}, "of"),
            ({"a": {"b": [0, hide(nn.Linear(1, 1))]}}, "a.b.1"),
            ({"h": Holder({"x": hide(nn.Linear(1, 1))})}, "h.x"),
        ):
            with pytest.raises(ConfigError, match=rf"^{name}: a (Linear|PerRank) in a .*: use a list or a"):
                checkpointer.save(0, state)
        assert checkpointer.steps() == []
        checkpointer.save(0, {"t": (1, 2, {"x": {3}}), "c": (nn.Linear, [1])})


@pytest.mark.parametrize("nested", [False, True])
def test_what_has_no_memory_is_not_restored(tmp_path: Path, nested: bool) -> None:
    with torch.device("meta"):
        other: Any = nn.Sequential(nn.Linear(2, 2))
    with Checkpointer(tmp_path) as checkpointer:
        saved: Any = nn.Sequential(nn.Linear(2, 2))
        checkpointer.save(0, {"n": [{"m": saved}], "t": torch.ones(2)} if nested else {"m": saved})
        name, state = ("n.0.m", {"n": [{"m": other}]}) if nested else ("m", {"m": other})
        with pytest.raises(ConfigError, match=rf"^{name}\.0\.weight: .*meta device.*to_empty"):
            checkpointer.restore(state)
        other.to_empty(device="cpu")
        assert checkpointer.restore(state) == 0
        assert_same(dict(other.state_dict()), dict(saved.state_dict()))
        if nested:
            with pytest.raises(ConfigError, match=r"^t: .*meta device"):
                checkpointer.restore({"t": torch.ones(2, device="meta")})


@pytest.mark.parametrize("step", ["latest", 0])
@pytest.mark.parametrize(
    ("saved", "other", "names"),
    [
        ({"history": {"loss": 1.0, "rate": 2.0}}, {"history": {}}, ["o.history.loss, o.history.rate"]),
        ({"all": [{"loss": 1}, {"loss": 2}]}, {"all": [{"loss": 0}]}, ["1 entries", "o.all.1.loss"]),
        ({"t": {str(n): torch.ones(1) for n in range(9)}}, {"t": {}}, ["9 entries", "o.t.4, ..."]),
        ([torch.ones(1), torch.ones(1)], [torch.ones(1)], ["o.1"]),
        ({"a": 1}, {"a": 2}, []),
        ({"rows": [1, 2, 3]}, {"rows": []}, []),
    ],
    ids=str,
)
def test_what_an_object_has_no_place_for_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, saved: Any, other: Any, names: list[str], step: Any
) -> None:
    model = nn.Linear(1, 1)
    cursor = PerRank(Cursor())
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, {"o": Holder(saved), "m": model, "p": cursor, "not": {"asked": {"for": 1}}})
        target = {"o": Holder(other), "m": model, "p": cursor}
        checkpointer.restore(target, step)
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(found) == bool(names)
    assert all(name in found[0] for name in [*names, "of 'o' for which the state has no place"] if names)


def test_an_optimizer_that_is_made_room_for_leaves_nothing_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved, other = Heads("adam", 1), Heads("adam", 2)
    saved.step(1)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, saved.state)
        checkpointer.restore(other.state)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def cyclic() -> dict[str, Any]:
    entries: list[Any] = [torch.ones(1)]
    entries.append(entries)
    return {"a": {"b": entries}}


class Local:
    """Of no class that torch.load takes unasked."""


@pytest.mark.parametrize(
    ("state", "kind", "text"),
    [
        ({"m": {"fn": lambda: 1}}, StagingError, r"^'m\.fn': a function cannot be pickled"),
        ({"m": [torch.ones(1), threading.Lock()]}, StagingError, r"^'m\.1': a lock cannot be pickled"),
        ({"a.b": 1, "a": {"b": 2}}, ConfigError, "name 'a.b'"),
        (cyclic(), ConfigError, r"^a\.b\.1\.1\.\.\.: .*contains itself"),
        (nn.Linear(1, 1), ConfigError, "^state: expected a mapping, got Linear"),
    ],
    ids=["lambda", "lock", "twice", "cycle", "module"],
)
@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_errors_name_the_entry(
    tmp_path: Path, state: Any, kind: type[Exception], text: str, policy: str
) -> None:
    settings: dict[str, Any] = {"ckpt_max_failures": 1} if policy == "warn" else {}
    with Checkpointer(tmp_path, ckpt_on_failure=policy, **settings) as checkpointer:
        with pytest.raises(kind, match=text):
            checkpointer.save(0, state)
        checkpointer.save(1, {"m": {"fn": 1}, "a": 1})
        if kind is ConfigError:
            with pytest.raises(ConfigError, match=r"state|contains itself"):
                checkpointer.restore(state)
            with pytest.raises(ConfigError, match=r"state|contains itself"):
                checkpointer.prewarm(state)
        else:
            changed = {"m": {"fn": (threading.Lock(),)}, "a": 1}
            with pytest.raises(StagingError, match=r"'m\.fn': a tuple cannot be pickled"):
                checkpointer.save(2, changed)


def test_errors_of_the_caller_are_not_borne(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, ckpt_on_failure="warn") as checkpointer:
        with pytest.raises(ConfigError, match="use a list"):
            checkpointer.save(0, {"of": (nn.Linear(1, 1),)})
        checkpointer.save(1, small(1))


def test_numbers_of_any_size_are_compared(tmp_path: Path) -> None:
    state = {"t": torch.ones(1), "n": 10**5000, "x": -0.0, "nan": float("nan"), "c": complex(0, -0.0)}
    with Checkpointer(tmp_path, ckpt_weights_only=False) as checkpointer:
        plans = []
        for step in range(3):
            checkpointer.save(step, state)
            plans.append(checkpointer._planned)
        assert len({id(plan) for plan in plans}) == 1
        checkpointer.save(3, {**state, "n": 10**5000 + 1, "x": 0.0})
        for step, (n, x) in {2: (10**5000, "-0.0"), 3: (10**5000 + 1, "0.0")}.items():
            target: dict[str, Any] = {"t": torch.ones(1), "n": 0, "x": 1.0}
            checkpointer.restore(target, step)
            assert target["n"] == n
            assert str(target["x"]) == x


def test_steps_are_taken_as_save_takes_them(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(torch.tensor(7), small(7))  # type: ignore[arg-type]
        for step in (torch.tensor(7), 7, "7", "007", None, "latest"):
            assert checkpointer.restore(small(0), step) == 7  # type: ignore[arg-type]
        for wrong in (
            "\u0667",
            "\u00b2",
            "",
            "-7",
            " 7",
            True,
            7.0,
            torch.tensor(7.0),
            torch.ones(2),
            -1,
            [7],
        ):
            with pytest.raises(ConfigError, match="step: expected a number from 0, or 'latest'"):
                checkpointer.restore(small(0), wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (np.float64(1), "'o.x' names numpy"),
        ((1, [np.float64(1)]), "'o.x' names numpy"),
        (Local(), "'o.x' names .*Local"),
        ({1, 2}, ""),
        (10**700, "'o.x' is more"),
        ((1, [2.0, None, {"a": b"x", 3: (True, 1j)}], torch.float32), ""),
        ((OrderedDict(a=1),), ""),
        (b"", "'o.x' names bytes"),
    ],
    ids=["numpy", "deep", "class", "set", "large", "plain", "ordered", "no-bytes"],
)
def test_what_restore_will_refuse_is_said_when_it_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: Any, why: str
) -> None:
    for is_asked in (False, True):
        caplog.clear()
        with Checkpointer(tmp_path, ckpt_weights_only=is_asked) as checkpointer:
            for step in range(3):
                checkpointer.save(step, {"o": {"x": value}, f"{step}": (np.float64(1), 2) if why else 2})
            found = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
            assert len(found) == (bool(why) and is_asked)
            if not is_asked:
                continue
            target: dict[str, Any] = {"o": {"x": 0}}
            if why:
                assert re.search(why, found[0])
                with pytest.raises(CheckpointError, match=r"o\.x"):
                    checkpointer.restore(target)
            else:
                checkpointer.restore(target)
                assert target["o"]["x"] == value


# Retention, and the file `latest`.


def test_steps_that_no_policy_keeps_go(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, async_save=True, keep_last=2, keep_every=4, keep_best=1) as checkpointer:
        for step in range(1, 11):
            checkpointer.save(step, small(step), metric=abs(step - 3.2))
        checkpointer.wait()
        assert settle(checkpointer) == [3, 4, 8, 9, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        *(f"step-{step:08}" for step in (3, 4, 8, 9, 10)),
    ]
    for step in (3, 4, 8, 9, 10):
        assert_same(read_with_torch(path_of(tmp_path, step)), small(step))


def test_what_a_killed_process_was_about_to_name_the_latest_goes(tmp_path: Path) -> None:
    left = tmp_path / "latest.0123456789abcdef.tmp"
    left.write_text("step-000")
    (tmp_path / "latest.mine").touch()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, small(1))
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "latest.mine", "step-00000001"}
    assert latest_of(tmp_path) == "step-00000001\n"


def test_a_later_process_goes_by_what_earlier_ones_have_saved(tmp_path: Path) -> None:
    """The metrics, and the times, are those of the checkpoints."""
    metrics = {1: 0.5, 2: 0.1, 3: float("nan"), 4: None, 5: 0.3, 6: float("inf")}
    for step, metric in metrics.items():
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(step, small(step), metric=metric)
            assert checkpointer.steps() == list(range(1, step + 1))
    with Checkpointer(tmp_path, keep_best=2) as checkpointer:
        checkpointer.save(7, small(7))
        assert settle(checkpointer) == [2, 5, 7]
    with Checkpointer(tmp_path, keep_best=1, keep_best_mode="max") as checkpointer:
        checkpointer.save(8, small(8), metric=-1)
        assert settle(checkpointer) == [5, 8]


def test_the_hours_are_those_of_the_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1.8e9]
    monkeypatch.setattr(time, "time", lambda: now[0])
    with Checkpointer(tmp_path, keep_hourly=3) as checkpointer:
        for step in range(10):
            checkpointer.save(step, small(step))
            now[0] += 1500
        # Of the hours in which there are 0 to 2, 3 and 4, 5 to 7, and the last two.
        assert settle(checkpointer) == [4, 7, 9]


@pytest.mark.parametrize("value", ["good", None.__class__, [1], {}])
def test_a_metric_that_is_no_number(tmp_path: Path, value: Any) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ConfigError, match="metric: expected a number"):
            checkpointer.save(0, small(0), metric=value)
        assert checkpointer.save(0, small(0), metric=torch.tensor(0.5)).metric == 0.5  # type: ignore[arg-type]


def test_the_last_good_one_stays_while_the_next_is_under_way_or_fails(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, async_save=True, keep_last=1, ckpt_max_in_flight=4) as checkpointer:
        checkpointer.save(1, small(1)).result(WAIT_S)
        with held_back(checkpointer):
            handle = checkpointer.save(2, small(2))
            assert settle(checkpointer) == [1]
            assert latest_of(tmp_path) == "step-00000001\n"
        handle.result(WAIT_S)
        assert settle(checkpointer) == [2]
        for step in (3, 4):
            in_the_way(tmp_path, step)
            with pytest.raises(WriteError):
                checkpointer.save(step, small(step)).result(WAIT_S)
            assert settle(checkpointer) == [2]
            assert latest_of(tmp_path) == "step-00000002\n"

        def remove(event: observe.Event) -> None:
            if event.name == "files.written":
                for path in path_of(tmp_path, 5).glob("__*"):
                    path.unlink()

        end = observe.subscribe(remove)
        with pytest.raises(CommitError):
            checkpointer.save(5, small(5)).result(WAIT_S)
        end()
        assert settle(checkpointer) == [2]
        assert latest_of(tmp_path) == "step-00000002\n"
        assert_same(read_with_torch(path_of(tmp_path, 2)), small(2))
        with pytest.raises(CheckpointError):
            checkpointer.wait()


def test_a_step_that_is_saved_again_meanwhile_is_not_removed(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, async_save=True, keep_last=1, ckpt_max_in_flight=4) as checkpointer:
        checkpointer.save(1, small(1)).result(WAIT_S)
        with held_back(checkpointer):
            for step in (2, 1):
                checkpointer.save(step, small(10 * step))
        checkpointer.wait()
        steps = settle(checkpointer)
        assert 2 in steps
        for step in steps:
            assert_same(read_with_torch(path_of(tmp_path, step)), small(10 * step))


@pytest.mark.parametrize("policy", [{"keep_last": 1}, {"keep_every": 100}, {"keep_best": 1}], ids=str)
def test_a_run_that_went_back_keeps_what_it_lives_on(tmp_path: Path, policy: dict[str, Any]) -> None:
    """The newest is damaged; the run goes on from the one before it, and dies before it gets as far again."""
    with Checkpointer(tmp_path) as checkpointer:
        for step in (4, 8):
            checkpointer.save(step, small(step), metric=-step)
    flip(path_of(tmp_path, 8))
    with Checkpointer(tmp_path, **policy) as checkpointer:
        target = small(0)
        assert checkpointer.restore(target) == 4
        for step in (5, 6):
            checkpointer.save(step, small(step), metric=1.0)
            settle(checkpointer)
    with Checkpointer(tmp_path, **policy) as checkpointer:
        target = small(0)
        assert checkpointer.restore(target) == 6
        assert_same(target, small(6))


def test_latest_names_the_newest_by_number_or_else_the_last_that_is_complete(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step, named in ((3, 3), (7, 7), (5, 7)):
            checkpointer.save(step, small(step))
            assert latest_of(tmp_path) == f"step-{named:08}\n"
        (path_of(tmp_path, 7) / ".metadata").unlink()
        checkpointer.save(6, small(6))
        assert latest_of(tmp_path) == "step-00000006\n", "what is named is complete"
        for odd in ("", "step-", "elsewhere", "step-99999999", "ü", "step-00000007\nx"):
            (tmp_path / "latest").write_text(odd)
            checkpointer.save(6, small(6))
            assert latest_of(tmp_path) == "step-00000006\n"
        assert (tmp_path / latest_of(tmp_path).strip() / ".metadata").exists()
        # Nothing here trusts it.
        (tmp_path / "latest").write_text("step-00000003\n")
        assert checkpointer.restore(small(0)) == 6


def test_a_latest_that_cannot_be_written_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latest").mkdir()
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.save(1, small(1)).committed
        assert checkpointer.latest() == 1
    assert "latest still names" in caplog.text


def test_files_of_others_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        checkpointer.save(1, small(1))
        (path_of(tmp_path, 1) / "notes.txt").write_text("mine")
        (tmp_path / "step-1").mkdir()
        (tmp_path / "step-00000000x").mkdir()
        checkpointer.save(2, small(2))
        assert settle(checkpointer) == [2]
    assert [path.name for path in path_of(tmp_path, 1).iterdir()] == ["notes.txt"]
    assert (tmp_path / "step-1").exists()
    assert (tmp_path / "step-00000000x").exists()
    assert "is no checkpoint any more" in caplog.text


# Restoring what is damaged.


def test_damaged_ones_are_passed_over_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(4):
            checkpointer.save(step, small(step))
        flip(path_of(tmp_path, 3))
        (path_of(tmp_path, 2) / ".metadata").write_bytes(b"nonsense")
        target = small(9)
        assert checkpointer.restore(target) == 1
        assert_same(target, small(1))
        said = [record.getMessage() for record in caplog.records if "is damaged" in record.getMessage()]
        assert ["step-00000003" in said[0], "step-00000002" in said[1], len(said)] == [True, True, 2]
        for step in (2, 3):
            with pytest.raises(IntegrityError):
                checkpointer.restore(small(9), step)
        for step in (0, 1):
            flip(path_of(tmp_path, step))
        with pytest.raises(IntegrityError, match="step-00000003"):
            checkpointer.restore(small(9))
        # The run goes on where it is, and the next restore has something to find.
        checkpointer.save(4, small(4))
        assert checkpointer.restore(small(9)) == 4


def test_a_state_that_does_not_fit_is_no_damage(tmp_path: Path) -> None:
    """An older checkpoint that fits by chance would be the wrong one."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, {"t": torch.ones(3), "extra": torch.ones(1)})
        checkpointer.save(1, {"t": torch.ones(3)})
        with pytest.raises(CheckpointError) as caught:
            checkpointer.restore({"t": torch.zeros(3), "extra": torch.zeros(1)})
        assert not isinstance(caught.value, IntegrityError)


# Policies.


def test_a_handle_has_milestones(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, async_save=True) as checkpointer:
        with held_back(checkpointer):
            handle = checkpointer.save(1, small(1))
            handle.staged.result(WAIT_S)
            assert handle.staged
            assert handle.staged.done()
            assert not handle.committed
            assert not handle.committed.done()
            started = time.monotonic()
            with pytest.raises(TimeoutError):
                handle.committed.result(0.05)
            assert time.monotonic() - started > 0.04
            committed = handle.committed
        committed.result(WAIT_S)
        assert committed, "it tells how things are, not how they were"
        in_the_way(tmp_path, 2)
        failed = checkpointer.save(2, small(2))
        for milestone in (failed.committed, failed.staged):
            with pytest.raises(WriteError):
                failed.committed.result(WAIT_S)
            with pytest.raises(WriteError):
                milestone.result(0)
        assert not failed.committed
        assert not failed.committed.done()


@pytest.mark.parametrize("most", [1, 3])
def test_so_many_saves_are_under_way(tmp_path: Path, most: int) -> None:
    with Checkpointer(tmp_path, async_save=True, ckpt_max_in_flight=most) as checkpointer:
        with held_back(checkpointer) as gate:
            for step in range(most):
                assert checkpointer.save(step, small(step)).blocked_s < 5
            assert not gate.is_set()
            threading.Timer(0.3, gate.set).start()
            handle = checkpointer.save(most, small(most))
            assert gate.is_set()
            assert handle.blocked_s > 0.2
        checkpointer.wait()
        assert checkpointer.steps() == list(range(most + 1))


def test_a_save_is_skipped_or_fails_when_storage_is_slow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for policy in ("skip", "fail"):
        root = tmp_path / policy
        with Checkpointer(root, async_save=True, ckpt_max_in_flight=2, ckpt_when_busy=policy) as checkpointer:
            with held_back(checkpointer):
                for step in range(2):
                    assert not checkpointer.save(step, small(step)).is_skipped
                if policy == "fail":
                    with pytest.raises(CheckpointError, match=r"step 2 .*--ckpt-max-in-flight"):
                        checkpointer.save(2, small(2))
                else:
                    skipped = checkpointer.save(2, small(2))
                    assert skipped.is_skipped
                    assert not skipped.committed
                    with pytest.raises(CheckpointError, match=r"step 2 .*--ckpt-max-in-flight"):
                        skipped.result(0)
            # What was left out is no failure of the run.
            checkpointer.wait()
            checkpointer.save(3, small(3)).result(WAIT_S)
            assert checkpointer.steps() == [0, 1, 3]
    assert "step 2 is not saved" in caplog.text


@pytest.mark.parametrize("is_async", [False, True], ids=["save", "async_save"])
def test_failures_are_borne(tmp_path: Path, is_async: bool, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(
        tmp_path, async_save=is_async, ckpt_on_failure="warn", ckpt_max_failures=3
    ) as checkpointer:
        for step in (1, 2, 4, 5, 6, 7):
            in_the_way(tmp_path, step)
        for step in range(6):
            handle = checkpointer.save(step, small(step))
            checkpointer.wait()
            assert bool(handle.committed) == (step in (0, 3))
        levels = {record.levelno for record in caplog.records if "failed" in record.getMessage()}
        assert levels == {logging.WARNING}
        for step in (6, 7):
            with pytest.raises(WriteError):
                save_and_wait(checkpointer, step)
        checkpointer.save(8, small(8))
        checkpointer.wait()
        assert checkpointer.steps() == [0, 3, 8]


def test_too_many_failures_reach_a_loop_that_waits_for_none(tmp_path: Path) -> None:
    """It saves and trains on; the next `save` tells it that nothing has been saved for long."""
    checkpointer = Checkpointer(
        tmp_path, async_save=True, ckpt_on_failure="warn", ckpt_max_failures=2, log_level="error"
    )
    try:
        for step in range(3):
            in_the_way(tmp_path, step)
        for step in range(2):
            checkpointer.save(step, small(step))._future.exception(WAIT_S)
        with pytest.raises(WriteError):
            checkpointer.save(2, small(2))
    finally:
        with contextlib.suppress(WriteError):
            checkpointer.close()


def test_failures_while_the_state_is_staged_count_as_well(tmp_path: Path) -> None:
    with Checkpointer(
        tmp_path, async_save=True, ckpt_on_failure="warn", ckpt_max_failures=2, log_level="error"
    ) as checkpointer:
        bad = {"t": torch.ones(2, device="meta")}
        handle = checkpointer.save(0, bad)
        assert not handle.committed
        with pytest.raises(CheckpointError, match="'t'"):
            checkpointer.save(1, bad)
        assert checkpointer.save(2, small(2)).result(WAIT_S)


@pytest.mark.parametrize("is_async", [False, True], ids=["save", "async_save"])
@pytest.mark.parametrize("is_large", [False, True], ids=["staged", "over-the-budget"])
def test_a_save_is_tried_again(
    tmp_path: Path, is_async: bool, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "_FIRST_PAUSE_S", 0.3)
    state = {"t": torch.full(((40 if is_large else 1) << 18,), 3.0)}
    with Checkpointer(
        tmp_path, async_save=is_async, ckpt_on_failure="retry", ckpt_max_failures=2, ckpt_host_memory="24MiB"
    ) as checkpointer:
        file = in_the_way(tmp_path, 1)
        timer = threading.Timer(0.15, file.unlink)
        timer.start()
        handle = checkpointer.save(1, state)
        if is_async and not is_large:
            state["t"].fill_(4.0)
        handle.result(WAIT_S)
        timer.join()
        in_the_way(tmp_path, 2)
        with pytest.raises(WriteError):
            checkpointer.save(2, state).result(WAIT_S)
    found = read_with_torch(path_of(tmp_path, 1))["t"]
    assert found.unique().tolist() == [3.0], "what was staged by the first attempt"


def test_what_another_attempt_would_meet_as_well_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "_FIRST_PAUSE_S", 20.0)
    with Checkpointer(tmp_path, async_save=True, ckpt_on_failure="retry") as checkpointer:
        started = time.monotonic()
        with pytest.raises(CheckpointError):
            checkpointer.save(1, {"t": torch.ones(2, device="meta")})
        assert time.monotonic() - started < 10


def test_saves_that_are_tried_again_keep_their_order_and_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later save is staged while an earlier one is waiting for its second attempt."""
    monkeypatch.setattr(checkpointing, "_FIRST_PAUSE_S", 0.3)
    tensor = torch.zeros(1 << 18)
    with Checkpointer(
        tmp_path, async_save=True, ckpt_on_failure="retry", ckpt_max_in_flight=3, log_level="error"
    ) as checkpointer:
        file = in_the_way(tmp_path, 0)
        timer = threading.Timer(0.15, file.unlink)
        timer.start()
        for step in range(4):
            tensor.fill_(step + 1)
            checkpointer.save(step, {"t": tensor})
        checkpointer.wait()
        timer.join()
    for step in range(4):
        assert read_with_torch(path_of(tmp_path, step))["t"].unique().tolist() == [step + 1]


# On an object store.


@pytest.mark.s3
def test_everything_goes_to_the_object_store(
    s3_server: S3Server, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`latest`, retention, reclaiming and restoring, none of which leaves anything on this machine."""
    monkeypatch.chdir(tmp_path)
    root = open_storage(s3_url, s3_server.options)

    def latest() -> str:
        data = root.read("latest")
        assert data is not None
        return bytes(data).decode()

    def what_is_there() -> set[int]:
        """Not by the names of directories alone: a server may keep those that are empty."""
        steps = [int(name[5:-1]) for name in root.list() if name != "latest"]
        return {step for step in steps if open_storage(f"{s3_url}/step-{step:08}", s3_server.options).list()}

    with Checkpointer(
        s3_url, storage_options=s3_server.options, async_save=True, keep_last=2, keep_best=1, load_rng=True
    ) as checkpointer:
        assert checkpointer.restore(small(9)) is None
        for step in range(1, 6):
            checkpointer.save(step, small(step), metric=abs(step - 2)).result(WAIT_S)
            assert latest() == f"step-{step:08}\n"
        assert settle(checkpointer) == [2, 4, 5]
        assert what_is_there() == {2, 4, 5}
        target = small(9)
        assert checkpointer.restore(target) == 5
        assert_same(target, small(5))
        # A damaged one is passed over there, too.
        newest = open_storage(f"{s3_url}/step-00000005", s3_server.options)
        newest.put(".metadata", b"nonsense")
        assert checkpointer.restore(target) == 4
        assert_same(target, small(4))
    with Checkpointer(s3_url, storage_options=s3_server.options, keep_last=1) as checkpointer:
        checkpointer.save(6, small(6))
        assert settle(checkpointer) == [6]
    assert what_is_there() == {6}
    assert s3_server.unfinished_uploads(s3_url) == []
    assert list(tmp_path.iterdir()) == []


def test_what_a_commit_says_is_json_for_others(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep_best=1) as checkpointer:
        checkpointer.save(1, small(1), metric=0.25)
    [file] = (path_of(tmp_path, 1) / ".distckpt").glob("commit-*")
    record = json.loads(file.read_text())
    assert record["metric"] == 0.25
    assert abs(record["time"] - time.time()) < 60
    assert record["world"] == 1


def test_an_interrupt_in_a_save_leaves_nothing_that_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with Checkpointer(tmp_path, log_level="error") as checkpointer:
        monkeypatch.setattr(Archive, "expect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(1, {"x": torch.ones(2)})
        assert checkpointer.save(2, {"x": torch.ones(2)}).result(WAIT_S)
        with contextlib.suppress(CheckpointError):
            checkpointer.wait()


@pytest.mark.parametrize("code", [None, 0, 1, "told to end"])
def test_leaving_a_block_in_order_raises_what_failed(tmp_path: Path, code: Any) -> None:
    step = tmp_path / "step-00000001"
    step.touch()

    def leave() -> None:
        with Checkpointer(tmp_path, async_save=True, log_level="error") as checkpointer:
            checkpointer.save(1, {"x": torch.ones(2)})
            sys.exit(code)

    with pytest.raises(CheckpointError if code in (None, 0) else SystemExit):
        leave()


def test_a_save_of_another_process_is_not_waited_for(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        child = os.fork()
        if child == 0:
            try:
                checkpointer.wait()
            except CheckpointError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_what_was_committed_last_stays_though_the_clock_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in (9, 10):
            checkpointer.save(step, {"x": torch.ones(2)})
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    # The run goes back, on another machine.
    for step in (6, 7):
        with Checkpointer(tmp_path, keep_last=2) as checkpointer:
            checkpointer.save(step, {"x": torch.ones(2)})
        assert checkpointer.steps() == [step, 9, 10]


def test_what_the_state_has_no_place_for_is_named_unless_the_whole_entry_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with Checkpointer(tmp_path) as checkpointer:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "metrics": {"loss": 1.0}}
        checkpointer.save(1, state)
        fresh = torch.optim.Adam(nn.Linear(2, 2).parameters())
        checkpointer.restore({"model": model.state_dict(), "optimizer": fresh.state_dict()})
    [record] = [each for each in caplog.records if each.levelno == logging.WARNING]
    text = record.getMessage()
    assert "6 entries of 'optimizer'" in text
    assert "optimizer.state.0.exp_avg" in text
    assert "not their state_dict()" in text
    assert "metrics" not in text


def test_a_root_that_is_a_checkpoint_or_has_steps_of_other_names_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"x": torch.ones(2)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, state)
        with pytest.raises(CheckpointError, match=r"no complete checkpoint; there are 3$"):
            checkpointer.restore(state, 4)
    with (
        Checkpointer(tmp_path / "step-00000003") as checkpointer,
        pytest.raises(ConfigError, match="itself a checkpoint"),
    ):
        checkpointer.restore(state)
    (tmp_path / "step-00000003").rename(tmp_path / "step-3")
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state) is None
    assert "it has step-3, and only step-NNNNNNNN is looked at" in caplog.text


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_loaded_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_data = StorageReader.read_data

    def replace_and_read(*arguments: Any) -> Any:
        monkeypatch.undo()
        trainer.save(1, {"x": torch.full((2,), 2.0)})
        return read_data(*arguments)

    with Checkpointer(tmp_path) as trainer, Checkpointer(tmp_path) as other:
        for step in range(2):
            trainer.save(step, {"x": torch.full((2,), float(step))})
        for asked in ("latest", 1):
            trainer.save(1, {"x": torch.ones(2)})
            monkeypatch.setattr(StorageReader, "read_data", replace_and_read)
            loaded = {"x": torch.zeros(2)}
            assert other.restore(loaded, asked) == 1
            assert loaded["x"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit("told to end")])
def test_what_ends_the_program_ends_a_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def end(*_: object) -> None:
        raise error

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(2)})
        monkeypatch.setattr(StorageReader, "read_data", end)
        with pytest.raises(type(error)):
            checkpointer.restore({"x": torch.ones(2)})

"""Checkpointer in one process: what is saved comes back, whatever happens to the state meanwhile."""

from __future__ import annotations

import copy
import gc
import io
import logging
import os
import random
import signal
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor

from distckpt import (
    Checkpointer,
    CheckpointError,
    ConfigError,
    SaveHandle,
    StagingError,
    WorkerDied,
    WriteError,
    observe,
)
from distckpt.checkpointer import _addresses_of
from distckpt.lanes import WorkerLanes
from integration.checkpoints import (
    WAIT_S,
    assert_every_reader_finds,
    assert_same,
    read_with_distckpt,
    read_with_torch,
)
from integration.test_isolation import Trainer, assert_holds
from integration.test_round_trip import DTYPES, random_tensor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]

MIB = 1 << 20
State = dict[str, Any]


def path_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08}"


@pytest.fixture(params=[1, 2], ids=["1-worker", "2-workers"])
def workers(request: pytest.FixtureRequest) -> int:
    return int(request.param)


MANY = 8
"""Saves that may be under way at once: while they are held back, none waits for another."""


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    """Saves in the background, to the test's own directory."""
    with Checkpointer(tmp_path, async_save=True, ckpt_max_in_flight=MANY) as opened:
        yield opened


@pytest.fixture
def either(tmp_path: Path, workers: int) -> Iterator[Checkpointer]:
    """The same, in this process or in two of its own."""
    with Checkpointer(
        tmp_path, async_save=True, dist_ckpt_workers=workers, ckpt_max_in_flight=MANY
    ) as opened:
        yield opened


@contextmanager
def held_back(checkpointer: Checkpointer) -> Iterator[threading.Event]:
    """Keep everything that happens in the background from happening, until the event is set or at the end."""
    gate = threading.Event()
    checkpointer._thread.submit(gate.wait, WAIT_S)
    try:
        yield gate
    finally:
        gate.set()


def used_bytes(checkpointer: Checkpointer) -> int:
    arena = checkpointer._engine.arena
    return arena.reserved_bytes - arena.unused_bytes


def blank(value: Any) -> Any:
    """Return what `value` can be restored into."""
    if isinstance(value, torch.Tensor):
        # Not zeros: there are dtypes that cannot be filled.
        return random_tensor(tuple(value.shape), value.dtype, seed=1)
    if isinstance(value, dict):
        return {key: blank(entry) for key, entry in value.items()}
    if isinstance(value, list) and any(isinstance(entry, torch.Tensor) for entry in value):
        return [blank(entry) for entry in value]
    return None


def every_kind() -> State:
    tied = random_tensor((7, 3), torch.float32)
    base = random_tensor((6, 8, 10), torch.float32)
    phases = random_tensor((4, 6), torch.complex64)
    return {
        "dtypes": {
            str(dtype): {
                "dense": random_tensor((5, 7), dtype),
                "scalar": random_tensor((), dtype),
                "empty": random_tensor((0, 3), dtype),
                "columns": random_tensor((6, 9), dtype)[:, 1::3],
            }
            for dtype in DTYPES
        },
        "views": [
            base.transpose(0, 2), base[1, 2, 3], base[6:], base[..., ::3], base.view(-1)[13:77],
            base[0, :1].expand(5, 10), base.as_strided((4, 5), (2, 1), 7),
            phases.conj(), phases.conj().t(), phases.conj().imag, torch._neg_view(base[0]),
        ],
        "parameters": OrderedDict(
            a=torch.nn.Parameter(random_tensor((3, 3), torch.float32)),
            b=torch.nn.Parameter(torch.ones(2), requires_grad=False),
        ),
        "large": random_tensor((3 * MIB + 5,), torch.uint8),
        "tied": {"one": tied, "other": tied, "alias": tied.detach(), "transposed": tied.t()},
        "objects": {
            "step": 3, "name": "run ü", "nothing": None, "rate": 0.1, "nan": float("inf"), "raw": b"\0\1",
            "yes": True, "list": [1, [2, "x"]], "tuple": (1, torch.ones(2)), "set": {1, 2},
        },
    }  # fmt: skip


@pytest.mark.parametrize("is_async", [False, True], ids=["save", "async_save"])
def test_round_trip(tmp_path: Path, workers: int, is_async: bool) -> None:
    state = every_kind()
    expected = copy.deepcopy({name: value for name, value in state.items() if name != "views"})
    with Checkpointer(tmp_path, async_save=is_async, dist_ckpt_workers=workers) as checkpointer:
        handles = [checkpointer.save(step, state) for step in range(3)]
        for step, handle in enumerate(handles):
            assert handle.result(WAIT_S) == str(path_of(tmp_path, step))
        for step in (0, 2):
            target = blank(state)
            assert checkpointer.restore(target, step) == step
            assert_same(target["views"], state["views"])
            del target["views"]
            assert_same(target, expected)
        plain = {name: value for name, value in state.items() if name != "tied"}
        checkpointer.save(3, plain).result(WAIT_S)
    for step in (0, 2):
        assert_same(read_with_torch(path_of(tmp_path, step)), state)
        assert_same(read_with_distckpt(path_of(tmp_path, step)), state)
    assert_every_reader_finds(plain, path_of(tmp_path, 3))


def test_stock_load_into_a_state(tmp_path: Path) -> None:
    state = every_kind()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state)
    target = blank(state)
    state_dict_loader.load(target, storage_reader=FileSystemReader(path_of(tmp_path, 0)))
    assert_same(target, state)


def test_a_model_and_its_optimizer_resume(checkpointer: Checkpointer) -> None:
    def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        train(model, optimizer)
        return model, optimizer

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.linspace(0, 1, 24).reshape(4, 6)).sum().backward()
        with checkpointer.guard(optimizer):
            optimizer.step()

    model, optimizer = make(1)
    plans = []
    for step in range(4):
        train(model, optimizer)
        checkpointer.save(
            step, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        )
        plans.append(checkpointer._planned)
    train(model, optimizer)
    checkpointer.wait()
    resumed, its_optimizer = make(2)
    state: State = {"model": resumed.state_dict(), "optimizer": its_optimizer.state_dict(), "step": None}
    assert checkpointer.restore(state) == 3 == state["step"]
    its_optimizer.load_state_dict(state["optimizer"])
    train(resumed, its_optimizer)
    assert_same(dict(resumed.state_dict()), dict(model.state_dict()))
    assert plans[1] is plans[2] is plans[3], "what has keys that are numbers is planned once, too"


def test_keys_that_are_no_strings(checkpointer: Checkpointer, tmp_path: Path) -> None:
    state: State = {
        "objects": {0: 5, (1, 2): "x"},
        "tensors": {1: torch.ones(2)},
        "list": [{2: "y", "t": torch.ones(1)}],
    }
    expected: list[State] = []
    for step in range(4):
        state["objects"][0] = step
        state["tensors"][1].fill_(step)
        expected.append({
            "objects": {"0": step, "(1, 2)": "x"},
            "tensors": {"1": torch.full((2,), float(step))},
            "list": [{"2": "y", "t": torch.ones(1)}],
        })  # fmt: skip
        if step == 2:
            # The objects alone, which is another state.
            checkpointer.save(9, {"objects": state["objects"]}).result(WAIT_S)
            checkpointer.save(9, {"objects": state["objects"]}).result(WAIT_S)
        checkpointer.save(step, state).result(WAIT_S)
    for step, values in enumerate(expected):
        assert_same(read_with_torch(path_of(tmp_path, step)), values)
    assert_same(read_with_torch(path_of(tmp_path, 9)), {"objects": expected[2]["objects"]})


def test_a_state_of_nothing(checkpointer: Checkpointer, tmp_path: Path) -> None:
    states: list[State] = [{}, {}, {"a": {}, "b": []}, {"a": torch.ones(1)}, {}]
    for step, state in enumerate(states):
        checkpointer.save(step, state).result(WAIT_S)
    assert checkpointer.steps() == [0, 1, 2, 3, 4]
    assert_same(read_with_torch(path_of(tmp_path, 1)), {})
    assert_same(read_with_torch(path_of(tmp_path, 3)), {"a": torch.ones(1)})


@pytest.mark.parametrize("name", ["prüfung", "検査 ü" * 9, "a b", "%41#?"])
def test_any_name_of_the_directory(tmp_path: Path, name: str) -> None:
    with Checkpointer(tmp_path / name) as checkpointer:
        for step in range(2):
            checkpointer.save(step, {"t": torch.full((3,), float(step))})
        target = {"t": torch.zeros(3)}
        assert checkpointer.restore(target) == 1
    metadata = FileSystemReader(path_of(tmp_path / name, 1)).read_metadata()
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.checkpoint_id == str(path_of(tmp_path / name, 1))
    assert_same(read_with_torch(path_of(tmp_path / name, 1)), {"t": torch.ones(3)})


def test_a_directory_whose_name_is_no_text(tmp_path: Path) -> None:
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    # Its name in a message could not be sent between processes of the test run.
    with Checkpointer(root, log_level="warning") as checkpointer:
        checkpointer.save(0, {"t": torch.ones(3)})
        assert checkpointer.steps() == [0]
    assert_same(read_with_torch(path_of(root, 0)), {"t": torch.ones(3)})


def test_the_directory_is_the_same_wherever_the_process_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with Checkpointer("root") as checkpointer:
        monkeypatch.chdir(tmp_path / "elsewhere")
        checkpointer.save(0, {"t": torch.ones(1)})
        assert checkpointer.steps() == [0]
    assert_same(read_with_torch(path_of(tmp_path / "root", 0)), {"t": torch.ones(1)})


def sharp() -> torch.Tensor:
    return torch.eye(3).to_sparse()


def wrapped() -> torch.Tensor:
    wrapper: torch.Tensor = TwoTensor(torch.ones(4), torch.arange(4.0))  # type: ignore[no-untyped-call]
    return wrapper


class Tagged(torch.Tensor):
    """A subclass with memory of its own."""


@pytest.mark.parametrize("make", [sharp, wrapped, lambda: torch.ones(3).as_subclass(Tagged)])
def test_tensors_that_are_more_than_memory(
    checkpointer: Checkpointer, tmp_path: Path, make: Callable[[], torch.Tensor]
) -> None:
    state = {"special": make(), "plain": torch.zeros(3)}
    for step in range(3):
        state["plain"].fill_(step)
        handle = checkpointer.save(step, state)
        state["plain"].fill_(-1)
        handle.result(WAIT_S)
    for step in range(3):
        info = next(
            info
            for index, info in FileSystemReader(path_of(tmp_path, step)).read_metadata().storage_data.items()
            if index.fqn == "special"
        )
        with open(path_of(tmp_path, step) / info.relative_path, "rb") as file:
            file.seek(info.offset)
            found = torch.load(io.BytesIO(file.read(info.length)), weights_only=False)
        expected = make()
        if expected.is_sparse:
            assert torch.equal(found.to_dense(), expected.to_dense())
        else:
            assert type(found) in (type(expected), torch.Tensor)
            assert torch.equal(found, expected)
        target = {"plain": torch.ones(3)}
        assert checkpointer.restore(target, step) == step
        assert_same(target, {"plain": torch.full((3,), float(step))})


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_buffers_that_are_more_than_memory(checkpointer: Checkpointer) -> None:
    """`state_dict` hands out aliases of them: what is loaded reaches the module by `load_state_dict`."""

    def make(values: torch.Tensor) -> torch.nn.Module:
        module = torch.nn.Module()
        module.register_buffer("coo", values.to_sparse())
        module.register_buffer("csr", values.to_sparse_csr())
        module.register_parameter("parameter", torch.nn.Parameter(values.to_sparse()))
        return module

    values = torch.eye(3) * 5
    checkpointer.save(0, {"model": make(values)}).result(WAIT_S)
    model: Any = make(torch.zeros(3, 3))
    assert checkpointer.restore({"model": model}) == 0
    for found in (model.coo, model.csr, model.parameter):
        assert torch.equal(found.to_dense(), values)


def test_tensors_that_cannot_be_saved(checkpointer: Checkpointer) -> None:
    gone = torch.ones(1000)
    good = {"a": torch.ones(2), "b": torch.ones(1000)}
    checkpointer.save(0, good).result(WAIT_S)
    for step, bad in enumerate((torch.ones(3, device="meta"), gone), start=1):
        if bad is gone:
            gone.untyped_storage().resize_(0)
        with pytest.raises(StagingError, match="'b'"):
            checkpointer.save(step, {"a": torch.ones(2), "b": bad})
        checkpointer.save(10 + step, good).result(WAIT_S)
    # The storage is freed under a tensor whose state has been planned.
    good["b"].untyped_storage().resize_(0)
    with pytest.raises(StagingError, match="'b'"):
        checkpointer.save(3, good)
    good["b"].untyped_storage().resize_(4000)
    good["b"].fill_(4)
    checkpointer.save(4, good).result(WAIT_S)
    assert checkpointer.steps() == [0, 4, 11, 12]
    target = {"b": torch.zeros(1000)}
    checkpointer.restore(target, 4)
    assert_same(target, {"b": torch.full((1000,), 4.0)})


@pytest.mark.parametrize("earlier", [0, 2])
def test_changes_after_the_save_returned(tmp_path: Path, either: Checkpointer, earlier: int) -> None:
    trainer = Trainer(tmp_path)
    for step in range(earlier):
        either.save(step, trainer.state).result(WAIT_S)
        trainer.step()
    expected = trainer.values()
    with held_back(either):
        handle = either.save(9, trainer.state)
        assert handle.staged
        trainer.step()
        trainer.rearrange()
    handle.result(WAIT_S)
    assert_holds(path_of(tmp_path, 9), expected)


class Walk:
    """A state that changes in any way between two saves, and what it is expected to hold."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._number = 0
        self._kept: list[torch.Tensor] = []
        self.state: State = {
            "model": {f"p{number}": torch.nn.Parameter(torch.ones(number, 3)) for number in range(5)},
            "buffers": [torch.zeros(4), torch.zeros(3, 5).t(), torch.ones(2, dtype=torch.bfloat16)],
            "step": 0,
            "history": [0],
            "large": torch.zeros(MIB, dtype=torch.uint8),
        }

    def go(self) -> None:
        for change in self._rng.sample(self.changes, self._rng.randrange(3)):
            change(self)
        self.values()

    def values(self) -> None:
        self._number += 1
        with torch.no_grad():
            for tensor in (*self.state["model"].values(), *self.state["buffers"], self.state["large"]):
                if 0 not in tensor.stride():
                    tensor.fill_(self._number % 250)

    def move(self) -> None:
        for parameter in self.state["model"].values():
            self._kept.append(parameter.data)
            parameter.data = parameter.data.clone()

    def move_and_free(self) -> None:
        self.state["large"] = self.state["large"].clone()

    def count(self) -> None:
        if type(self.state["step"]) is int:
            self.state["step"] += 1

    def grow_objects(self) -> None:
        self.state["step"] = 10 ** len(self.state["history"])
        self.state["history"].append(self._number)

    def other_type(self) -> None:
        self.state["step"] = str(self.state["step"]) if type(self.state["step"]) is int else 7

    def add(self) -> None:
        self.state["model"][f"new {self._number}"] = torch.nn.Parameter(torch.ones(self._rng.randrange(9)))
        self.state[f"object {self._number}"] = {"x": self._number}

    def remove(self) -> None:
        # One stays: torch writes nothing of an empty container, so who reads without a template finds none.
        if len(self.state["model"]) > 1:
            del self.state["model"][next(iter(self.state["model"]))]

    def reorder(self) -> None:
        names = list(self.state["model"])
        self._rng.shuffle(names)
        self.state["model"] = {name: self.state["model"][name] for name in names}

    def reshape(self) -> None:
        buffers = self.state["buffers"]
        buffers[0] = buffers[0].view(-1).view(2, 2) if buffers[0].dim() == 1 else buffers[0].view(4)

    def transpose(self) -> None:
        self.state["buffers"][1] = self.state["buffers"][1].t()

    def reinterpret(self) -> None:
        other = torch.float16 if self.state["buffers"][2].dtype is torch.bfloat16 else torch.bfloat16
        self.state["buffers"][2] = self.state["buffers"][2].view(other)

    def tie(self) -> None:
        self.state["tied"] = self.state["buffers"][0]

    def freeze(self) -> None:
        for parameter in self.state["model"].values():
            parameter.requires_grad_(not parameter.requires_grad)

    changes = (
        move, move_and_free, count, grow_objects, other_type, add, remove, reorder, reshape, transpose,
        reinterpret, tie, freeze,
    )  # fmt: skip


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad], ids=["grad", "no_grad"])
def test_any_walk_of_a_state(
    tmp_path: Path,
    either: Checkpointer,
    rng: random.Random,
    mode: Callable[[], AbstractContextManager[Any]],
) -> None:
    walk = Walk(rng)
    expected, handles = [], []
    for step in range(30):
        expected.append(copy.deepcopy(walk.state))
        with mode():
            handles.append(either.save(step, walk.state))
        if rng.random() < 0.3:
            handles[-1].result(WAIT_S)
        walk.go()
    either.wait()
    for step, state in enumerate(expected):
        read = read_with_torch if step % 2 else read_with_distckpt
        assert_same(read(path_of(tmp_path, step)), state, str(step))
        entries = FileSystemReader(path_of(tmp_path, step)).read_metadata().state_dict_metadata
        for name, parameter in state["model"].items():
            entry = entries[f"model.{name}"]
            assert isinstance(entry, TensorStorageMetadata)
            assert entry.properties.requires_grad == parameter.requires_grad


def test_what_is_planned_anew(checkpointer: Checkpointer) -> None:
    walk = Walk(random.Random(0))

    def is_planned_anew() -> bool:
        before = checkpointer._planned
        checkpointer.save(0, walk.state).result(WAIT_S)
        return checkpointer._planned is not before

    assert is_planned_anew()
    for change in (lambda walk: None, Walk.values, Walk.count):
        change(walk)
        assert not is_planned_anew(), change
    walk.state = {name: copy.copy(value) for name, value in walk.state.items()}
    walk.state["buffers"] = [buffer.detach() for buffer in walk.state["buffers"]]
    walk.state["large"] = walk.state["large"].detach()
    assert not is_planned_anew()
    for change in (
        Walk.move, Walk.move_and_free, Walk.grow_objects, Walk.other_type, Walk.add, Walk.remove,
        Walk.reshape, Walk.transpose, Walk.reinterpret, Walk.tie, Walk.freeze,
    ):  # fmt: skip
        change(walk)
        assert is_planned_anew(), change
        assert not is_planned_anew(), change


def test_steps(tmp_path: Path) -> None:
    state: State = {"t": torch.zeros(3), "step": None}
    with Checkpointer(tmp_path / "not" / "there", async_save=True) as checkpointer:
        assert checkpointer.steps() == []
        assert checkpointer.latest() is None
        assert checkpointer.restore(state) is None
        assert checkpointer.restore(state, None) is None
        assert_same(state, {"t": torch.zeros(3), "step": None})
        for step in (7, 0, 123456789, 30):
            checkpointer.save(step, {"t": torch.full((3,), float(step)), "step": step})
        checkpointer.wait()
        # What is not a step that is complete.
        root = tmp_path / "not" / "there"
        for name in ("step-00000099", "step-x", "step-", "other", "step-00000098/.distckpt"):
            (root / name).mkdir(parents=True)
        (root / "step-00000097").touch()
        (root / "step-00000096.tmp").mkdir()
        (root / "step-00000096.tmp" / ".metadata").touch()
        assert checkpointer.steps() == [0, 7, 30, 123456789]
        assert checkpointer.latest() == 123456789
        for asked, found in ((None, 123456789), ("latest", 123456789), (7, 7), (0, 0), ("30", 30)):
            assert checkpointer.restore(state, asked) == found
            assert_same(state, {"t": torch.full((3,), float(found)), "step": found})


def test_a_step_that_is_not_there(checkpointer: Checkpointer, tmp_path: Path) -> None:
    state = {"t": torch.zeros(3)}
    checkpointer.save(0, state).result(WAIT_S)
    path_of(tmp_path, 2).mkdir()
    for step in (1, 2):
        with pytest.raises(CheckpointError, match=f"step-0000000{step}"):
            checkpointer.restore(state, step)
    with pytest.raises(CheckpointError, match="first"):
        checkpointer.restore(state, "first")
    with pytest.raises(CheckpointError):
        checkpointer.restore({"another": torch.zeros(3)}, 0)
    assert checkpointer.restore(state, 0) == 0


def test_a_step_is_saved_again(either: Checkpointer, tmp_path: Path) -> None:
    state: State = {"t": torch.zeros(3), "step": 0}
    for turn in range(4):
        state["t"].fill_(turn)
        with held_back(either):
            handle = either.save(5, state)
            if turn:
                assert_same(
                    read_with_distckpt(path_of(tmp_path, 5)), {"t": torch.full((3,), turn - 1.0), "step": 0}
                )
        handle.result(WAIT_S)
        assert_every_reader_finds(state, path_of(tmp_path, 5))
        metadata = FileSystemReader(path_of(tmp_path, 5)).read_metadata()
        named = {info.relative_path for info in metadata.storage_data.values()}
        assert named == {path.name for path in path_of(tmp_path, 5).glob("__*")}
    assert either.steps() == [5]
    # Two at once: the later one is what stays.
    with held_back(either):
        for turn in (7, 8):
            state["t"].fill_(turn)
            either.save(5, state)
    either.wait()
    assert_same(read_with_torch(path_of(tmp_path, 5)), {"t": torch.full((3,), 8.0), "step": 0})


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="async_saves"):
        Checkpointer(tmp_path, async_saves=True)
    with pytest.raises(ConfigError, match="ckpt_format"):
        Checkpointer(tmp_path, ckpt_format="zip")
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(ConfigError, match="step: expected a number from 0, got -1"):
        checkpointer.save(-1, {})
    checkpointer.save(0, {"t": torch.ones(2)})
    checkpointer.close()
    checkpointer.close()
    for call in (lambda: checkpointer.save(1, {}), lambda: checkpointer.prewarm({})):
        with pytest.raises(CheckpointError, match="closed"):
            call()
    # What reads only can do without.
    assert checkpointer.steps() == [0]


def test_prewarmed(checkpointer: Checkpointer, tmp_path: Path) -> None:
    state: State = {"t": torch.zeros(20 * MIB, dtype=torch.uint8), "small": torch.ones(3), "step": 1}
    reserved = checkpointer.prewarm(state).result(WAIT_S)
    planned = checkpointer._planned
    assert reserved >= 20 * MIB
    assert checkpointer._engine.arena.reserved_bytes == reserved
    for step in range(2):
        state["t"].fill_(step)
        checkpointer.save(step, state).result(WAIT_S)
        assert checkpointer._planned is planned
        assert checkpointer._engine.arena.reserved_bytes == reserved
        assert_same(read_with_torch(path_of(tmp_path, step)), state)
    # A state that is not the one that is saved harms nothing.
    checkpointer.prewarm({"other": torch.ones(2)}).result(WAIT_S)
    checkpointer.save(2, state).result(WAIT_S)
    assert_same(read_with_torch(path_of(tmp_path, 2)), state)


def test_a_state_over_the_budget_is_written_through(
    tmp_path: Path, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    state: State = {f"t{number}": torch.zeros(3 * MIB, dtype=torch.uint8) for number in range(7)}
    state |= {"larger than the budget": torch.zeros(10 * MIB, dtype=torch.float32), "step": 0}
    small = {"t": torch.ones(9)}
    with Checkpointer(
        tmp_path, async_save=True, dist_ckpt_workers=workers, ckpt_host_memory=24 * MIB
    ) as checkpointer:
        checkpointer.save(8, small)
        for step in range(3):
            for number, tensor in enumerate(
                value for value in state.values() if isinstance(value, torch.Tensor)
            ):
                tensor.fill_(10 * step + number)
            state["step"] = step
            handle = checkpointer.save(step, state)
            assert handle.committed
            assert handle.staged
            assert handle.blocked_s > 0
            assert_same(read_with_torch(path_of(tmp_path, step)), state)
            assert checkpointer._engine.arena.reserved_bytes <= 24 * MIB
        checkpointer.save(9, small).result(WAIT_S)
        assert checkpointer.steps() == [0, 1, 2, 8, 9]
        checkpointer.wait()
    said = [record for record in caplog.records if "host memory budget" in record.getMessage()]
    assert len(said) == 1
    assert said[0].levelno == logging.WARNING
    assert "--ckpt-host-memory" in said[0].getMessage()


def test_a_failure_over_the_budget(tmp_path: Path, workers: int) -> None:
    state = {"t": torch.zeros(40 * MIB, dtype=torch.uint8)}
    path_of(tmp_path, 0).touch()
    with Checkpointer(
        tmp_path, async_save=True, dist_ckpt_workers=workers, ckpt_host_memory=24 * MIB
    ) as checkpointer:
        with pytest.raises(WriteError):
            checkpointer.save(0, state)
        assert used_bytes(checkpointer) == 0
        assert checkpointer.save(1, state).committed
        assert used_bytes(checkpointer) == 0
        assert checkpointer.steps() == [1]


def test_two_saves_in_flight_never_mix(either: Checkpointer, tmp_path: Path) -> None:
    state = {f"t{number}": torch.zeros(MIB + number, dtype=torch.uint8) for number in range(5)}
    for first in range(0, 8, 2):
        with held_back(either):
            handles = []
            for step in (first, first + 1):
                for tensor in state.values():
                    tensor.fill_(step)
                handles.append(either.save(step, state))
            assert [bool(handle.committed) for handle in handles] == [False, False]
            assert [bool(handle.staged) for handle in handles] == [True, True]
            for tensor in state.values():
                tensor.fill_(77)
    either.wait()
    for step in range(8):
        expected = {name: torch.full_like(tensor, step) for name, tensor in state.items()}
        assert_same(read_with_torch(path_of(tmp_path, step)), expected, str(step))


BUDGET_FOR_ONE = 24 * MIB
STATE_BYTES = 6 * MIB


def test_a_second_save_waits_for_the_memory_of_the_first(tmp_path: Path, workers: int) -> None:
    tensor = torch.zeros(STATE_BYTES, dtype=torch.uint8)
    with Checkpointer(
        tmp_path, async_save=True, dist_ckpt_workers=workers, ckpt_host_memory=BUDGET_FOR_ONE
    ) as checkpointer:
        for first in (0, 2):
            with held_back(checkpointer) as gate:
                tensor.fill_(first)
                checkpointer.save(first, {"t": tensor})
                tensor.fill_(first + 1)
                timer = threading.Timer(0.3, gate.set)
                timer.start()
                handle = checkpointer.save(first + 1, {"t": tensor})
                assert gate.is_set()
                assert handle.blocked_s >= handle.prepared_s > 0.2
                tensor.fill_(77)
                timer.join()
            checkpointer.wait()
    for step in range(4):
        assert_same(read_with_torch(path_of(tmp_path, step)), {"t": torch.full_like(tensor, step)})


def test_the_wait_for_memory_has_an_end(tmp_path: Path) -> None:
    tensor = torch.zeros(STATE_BYTES, dtype=torch.uint8)
    with Checkpointer(
        tmp_path, async_save=True, ckpt_host_memory=BUDGET_FOR_ONE, distributed_timeout_minutes=0.01
    ) as checkpointer:
        with held_back(checkpointer):
            checkpointer.save(0, {"t": tensor})
            with pytest.raises(StagingError, match=r"waited 1 s .*--ckpt-host-memory"):
                checkpointer.save(1, {"t": tensor})
        checkpointer.wait()
        checkpointer.save(2, {"t": tensor}).result(WAIT_S)
        assert checkpointer.steps() == [0, 2]


def test_states_that_take_turns_within_the_budget(tmp_path: Path) -> None:
    states = [{f"of {number}": torch.zeros(STATE_BYTES, dtype=torch.uint8)} for number in range(3)]
    with Checkpointer(tmp_path, async_save=True, ckpt_host_memory=BUDGET_FOR_ONE) as checkpointer:
        for step in range(12):
            for tensor in states[step % 3].values():
                tensor.fill_(step)
            checkpointer.save(step, states[step % 3])
            assert checkpointer._engine.arena.reserved_bytes <= BUDGET_FOR_ONE
            for tensor in states[step % 3].values():
                tensor.fill_(77)
        checkpointer.wait()
    for step in range(12):
        expected = {f"of {step % 3}": torch.full((STATE_BYTES,), step, dtype=torch.uint8)}
        assert_same(read_with_torch(path_of(tmp_path, step)), expected, str(step))


@contextmanager
def file_in_the_way(root: Path, checkpointer: Checkpointer) -> Iterator[None]:
    path_of(root, 1).touch()
    yield
    path_of(root, 1).unlink()


@contextmanager
def metadata_in_the_way(root: Path, checkpointer: Checkpointer) -> Iterator[None]:
    (path_of(root, 1) / ".metadata" / "x").mkdir(parents=True)
    yield
    (path_of(root, 1) / ".metadata" / "x").rmdir()
    (path_of(root, 1) / ".metadata").rmdir()


@contextmanager
def directory_taken_away(root: Path, checkpointer: Checkpointer) -> Iterator[None]:
    """Somebody removes a file of the save before it is published."""

    def remove(event: observe.Event) -> None:
        if event.name == "files.written":
            for path in path_of(root, 1).glob("__*"):
                path.unlink()

    end = observe.subscribe(remove)
    yield
    end()


@contextmanager
def workers_killed(root: Path, checkpointer: Checkpointer) -> Iterator[None]:
    lanes = checkpointer._engine.lanes
    if not isinstance(lanes, WorkerLanes):
        pytest.skip("writes in this process")

    def kill(event: observe.Event) -> None:
        if event.name == "parts.pushed":
            for pid in lanes.pids:
                os.kill(pid, signal.SIGKILL)

    # Stopped, so that they have not written everything before they die.
    for pid in lanes.pids:
        os.kill(pid, signal.SIGSTOP)
    end = observe.subscribe(kill)
    yield
    end()


FAULTS = [file_in_the_way, metadata_in_the_way, directory_taken_away, workers_killed]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_fails_in_the_background(
    either: Checkpointer,
    tmp_path: Path,
    fault: Callable[[Path, Checkpointer], AbstractContextManager[None]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    state: State = {"t": torch.zeros(5 * MIB, dtype=torch.uint8), "step": 0}
    either.save(0, state).result(WAIT_S)
    used = used_bytes(either)
    with fault(tmp_path, either):
        handle = either.save(1, state)
        with pytest.raises(CheckpointError) as caught:
            handle.result(WAIT_S)
        assert isinstance(caught.value, WorkerDied) == (fault is workers_killed)
    assert handle.staged
    assert not handle.committed
    with pytest.raises(type(caught.value)):
        handle.result(0)
    assert "the save of step 1 failed" in caplog.text
    assert either.steps() == [0]
    assert used_bytes(either) == used
    for step in (1, 2):
        state["t"].fill_(step)
        either.save(step, state).result(WAIT_S)
        assert_same(read_with_torch(path_of(tmp_path, step)), state)
        assert used_bytes(either) == used
    # Told once more, and then not again.
    with pytest.raises(type(caught.value)):
        either.wait()
    either.wait()
    # A state of another kind takes the place of the first: nothing of that is kept.
    either.save(3, {"small": torch.ones(1)}).result(WAIT_S)
    either.save(4, {}).result(WAIT_S)
    assert used_bytes(either) == 0


def test_a_loop_that_only_saves_hears_of_a_failure(checkpointer: Checkpointer, tmp_path: Path) -> None:
    """It would go on for days otherwise, and save nothing."""
    state = {"t": torch.zeros(9)}
    path_of(tmp_path, 0).touch()
    handle = checkpointer.save(0, state)
    handle._future.exception(WAIT_S)
    with pytest.raises(WriteError, match="step-00000000"):
        checkpointer.save(1, state)
    assert checkpointer.steps() == []
    # Once; and not what somebody has asked for.
    checkpointer.save(2, state).result(WAIT_S)
    path_of(tmp_path, 3).touch()
    with pytest.raises(WriteError):
        checkpointer.save(3, state).result(WAIT_S)
    checkpointer.save(4, state).result(WAIT_S)
    assert checkpointer.steps() == [2, 4]
    with pytest.raises(WriteError):
        checkpointer.wait()


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_directory_that_is_read_only(checkpointer: Checkpointer, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    handle = checkpointer.save(0, {"t": torch.ones(2)})
    with pytest.raises(WriteError):
        handle.result(WAIT_S)
    tmp_path.chmod(0o700)
    checkpointer.save(1, {"t": torch.ones(2)}).result(WAIT_S)
    assert checkpointer.steps() == [1]


def test_a_save_fails_while_others_are_under_way(checkpointer: Checkpointer, tmp_path: Path) -> None:
    state = {"t": torch.zeros(MIB)}
    path_of(tmp_path, 1).touch()
    with held_back(checkpointer):
        handles = []
        for step in range(3):
            state["t"].fill_(step)
            handles.append(checkpointer.save(step, state))
    with pytest.raises(WriteError):
        checkpointer.wait()
    assert [bool(handle.committed) for handle in handles] == [True, False, True]
    for step in (0, 2):
        assert_same(read_with_torch(path_of(tmp_path, step)), {"t": torch.full((MIB,), float(step))})


def test_what_cannot_be_pickled_fails_at_once(checkpointer: Checkpointer, tmp_path: Path) -> None:
    state: State = {"t": torch.ones(3), "object": "good"}
    checkpointer.save(0, state).result(WAIT_S)
    used = used_bytes(checkpointer)
    for step, bad in enumerate((threading.Lock(), [threading.Lock()], lambda: None), start=1):
        with pytest.raises(Exception, match="pickle"):
            checkpointer.save(step, {**state, "object": bad})
    checkpointer.save(9, state).result(WAIT_S)
    assert checkpointer.steps() == [0, 9]
    assert used_bytes(checkpointer) == used
    checkpointer.wait()


def test_without_async_save_the_end_is_waited_for(tmp_path: Path, workers: int) -> None:
    state = {"t": torch.zeros(3 * MIB)}
    with Checkpointer(tmp_path, dist_ckpt_workers=workers) as checkpointer:
        handle = checkpointer.save(0, state)
        assert handle.committed
        assert handle.staged
        assert handle.result(0) == handle.path == str(path_of(tmp_path, 0))
        path_of(tmp_path, 1).touch()
        with pytest.raises(WriteError):
            checkpointer.save(1, state)
        checkpointer.save(2, state)
        assert checkpointer.steps() == [0, 2]


def test_what_a_handle_tells(checkpointer: Checkpointer, tmp_path: Path) -> None:
    state = {"t": torch.zeros(MIB)}
    with held_back(checkpointer):
        started = time.perf_counter()
        handle = checkpointer.save(3, state)
        took = time.perf_counter() - started
        assert isinstance(handle, SaveHandle)
        assert (handle.step, handle.path) == (3, str(path_of(tmp_path, 3)))
        assert 0 < handle.prepared_s <= handle.blocked_s <= took
        assert (bool(handle.staged), bool(handle.committed)) == (True, False)
        with pytest.raises(TimeoutError):
            handle.result(0.01)
        assert checkpointer.latest() is None
    assert handle.result() == handle.path
    assert handle.staged
    assert handle.committed
    assert handle.result(0) == handle.path


def test_staged_stays_staged(checkpointer: Checkpointer) -> None:
    """Watched without a pause: there is no instant at which it is not."""
    for step in range(4):
        handle = checkpointer.save(step, {"t": torch.zeros(1000)})
        is_over = False
        while not is_over:
            is_over = bool(handle.committed)
            assert handle.staged, step


def test_close_waits_for_saves_that_are_under_way(tmp_path: Path, workers: int) -> None:
    state = {"t": torch.zeros(MIB)}
    # None waits for its turn as long as all are held back.
    with Checkpointer(
        tmp_path, async_save=True, dist_ckpt_workers=workers, ckpt_max_in_flight=MANY
    ) as checkpointer:
        with held_back(checkpointer) as gate:
            handles = []
            for step in range(3):
                state["t"].fill_(step)
                handles.append(checkpointer.save(step, state))
            threading.Timer(0.2, gate.set).start()
            checkpointer.close()
        assert all(handle.committed for handle in handles)
        assert checkpointer.steps() == [0, 1, 2]
    for step in range(3):
        assert_same(read_with_torch(path_of(tmp_path, step)), {"t": torch.full((MIB,), float(step))})


def test_a_checkpointer_that_failed_is_closed_all_the_same(tmp_path: Path, workers: int) -> None:
    path_of(tmp_path, 0).touch()
    checkpointer = Checkpointer(tmp_path, async_save=True, dist_ckpt_workers=workers, ckpt_max_in_flight=MANY)
    handle = checkpointer.save(0, {"t": torch.zeros(MIB)})
    with pytest.raises(WriteError):
        checkpointer.close()
    with pytest.raises(WriteError):
        handle.result(0)


def test_twenty_saves_leave_nothing_more_behind(either: Checkpointer) -> None:
    state: State = {
        "t": torch.zeros(2 * MIB),
        "small": [torch.ones(number) for number in range(9)],
        "step": 0,
    }
    counts = []
    for step in range(20):
        state["step"] = step
        either.save(step % 7, state).result(WAIT_S)
        counts.append((
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/dev/shm")),
            # One that waits for the next call to a storage ends by itself.
            sum(not thread.name.startswith("distckpt-storage") for thread in threading.enumerate()),
            either._engine.arena.reserved_bytes,
            used_bytes(either),
            len(either._handles),
        ))  # fmt: skip
    assert counts[3:] == [counts[2]] * 17


def reusable() -> State:
    return {"t": torch.ones(MIB), "p": [torch.nn.Parameter(torch.ones(3))], "step": 1}


def not_reusable() -> State:
    return {"t": torch.ones(MIB), "w": wrapped(), "tuple": (torch.ones(3), 1)}


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, TwoTensor):
        return [value, value.a, value.b]
    if isinstance(value, torch.Tensor):
        return [value]
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for entry in entries for tensor in tensors_of(entry)]


def watch(state: State) -> Callable[[], list[str]]:
    """Return what says which tensors and which of their memory are still alive."""
    names = weakref.WeakValueDictionary(enumerate(tensors_of(state)))
    memory = [
        StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        for tensor in tensors_of(state)
        if type(tensor) is not TwoTensor
    ]
    return lambda: (
        [f"tensor {number}" for number in names]
        + [f"memory {number}" for number, one in enumerate(memory) if not one.expired()]  # type: ignore[no-untyped-call]
    )


@pytest.mark.parametrize("make", [reusable, not_reusable])
def test_no_tensor_of_a_state_is_kept_alive(either: Checkpointer, make: Callable[[], State]) -> None:
    with held_back(either):
        for step in range(3):
            state = make()
            alive = watch(state)
            assert alive()
            either.save(step, state)
            if step:
                either.save(10 + step, state)
            del state
            gc.collect()
            assert not alive(), "staged, but not written yet"
    either.wait()
    state = make()
    alive = watch(state)
    either.prewarm(state).result(WAIT_S)
    del state
    gc.collect()
    assert not alive(), "prewarmed"


def test_no_tensor_is_kept_alive_by_a_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(
        tmp_path, async_save=True, ckpt_host_memory=BUDGET_FOR_ONE, distributed_timeout_minutes=0.005
    ) as checkpointer:
        # A record that is kept holds the error, and with it the frames that it passed through.
        caplog.set_level(logging.CRITICAL, "distckpt")
        with held_back(checkpointer):
            state: State = {"t": torch.zeros(STATE_BYTES, dtype=torch.uint8)}
            alive = watch(state)
            checkpointer.save(0, state)
            with pytest.raises(StagingError, match="waited"):
                checkpointer.save(1, state)
            del state
            gc.collect()
            assert not alive()
        checkpointer.wait()
        others: list[State] = [{"object": threading.Lock()}, {"no values": torch.ones(2, device="meta")}]
        for step, other in enumerate(others):
            state = {"t": torch.zeros(STATE_BYTES, dtype=torch.uint8), **other}
            alive = watch({"t": state["t"]})
            with pytest.raises(Exception, match=r"pickle|meta"):
                checkpointer.save(step, state)
            del state
            gc.collect()
            assert not alive()
        state = {"t": torch.zeros(STATE_BYTES, dtype=torch.uint8)}
        alive = watch(state)
        path_of(tmp_path, 9).touch()
        handle = checkpointer.save(9, state)
        error = handle._future.exception(WAIT_S)
        del state
        gc.collect()
        assert isinstance(error, WriteError)
        assert not alive()
        with pytest.raises(WriteError):
            handle.result()


def test_no_tensor_is_kept_alive_after_it_was_written_through(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, async_save=True, ckpt_host_memory=BUDGET_FOR_ONE) as checkpointer:
        for step in range(2):
            state: State = {"t": torch.zeros(2 * BUDGET_FOR_ONE, dtype=torch.uint8)}
            alive = watch(state)
            checkpointer.save(step, state)
            del state
            gc.collect()
            assert not alive()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_modes_of_torch(
    checkpointer: Checkpointer, tmp_path: Path, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    model = torch.nn.Linear(5, 3)
    state: State = {
        "model": dict(model.named_parameters()),
        "view": torch.arange(12.0).reshape(3, 4).t(),
        "step": 0,
    }
    expected = []
    for step in range(6):
        state["step"] = step
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
            state["view"].fill_(step)
        expected.append(copy.deepcopy(state))
        # Within, without, and within again: what is kept from one is used in the other.
        with mode() if step in (0, 1, 4) else nullcontext():
            if step == 0:
                state["made here"] = torch.ones(3) * 2
                expected[0]["made here"] = torch.full((3,), 2.0)
            handle = checkpointer.save(step, state)
            state.pop("made here", None)
        handle.result(WAIT_S)
    for step, values in enumerate(expected):
        assert_same(read_with_torch(path_of(tmp_path, step)), values)
        entry = FileSystemReader(path_of(tmp_path, step)).read_metadata().state_dict_metadata["model.weight"]
        assert isinstance(entry, TensorStorageMetadata)
        assert entry.properties.requires_grad, step


def by_hand(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def by_closure(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step(lambda: 0.0)


def by_compiled_code(optimizer: torch.optim.Optimizer) -> None:
    torch.compile(optimizer.step, backend="eager")()


def by_scaler(optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("step", [by_hand, by_closure, by_compiled_code, by_scaler])
@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_before_an_optimizer_steps_that_was_guarded_copies_are_waited_for(
    checkpointer: Checkpointer,
    kind: type[torch.optim.AdamW | torch.optim.SGD],
    settings: dict[str, Any],
    step: Callable[[torch.optim.Optimizer], None],
) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = kind([weight], lr=0.1, **settings)
    checkpointer.guard(optimizer)
    found: list[torch.Tensor] = []

    class Copies:
        is_over = False

        def guard(self) -> None:
            found.append(weight.detach().clone())
            self.is_over = True

    for _ in range(3):
        before = weight.detach().clone()
        checkpointer._late = [Copies()]  # type: ignore[list-item]
        step(optimizer)
        assert len(found) == 1
        assert torch.equal(found.pop(), before)
        assert not torch.equal(weight, before)
        assert checkpointer._late == []


def test_a_step_that_a_cuda_graph_captures_changes_nothing_yet(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on nothing tells when it is replayed: what it changes is digested, and so planned anew."""
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    checkpointer.guard(optimizer)
    checkpointer.save(0, {"w": weight}).result(WAIT_S)
    plans = [checkpointer._planned]
    late: list[Any] = [object()]
    checkpointer._late = late
    for step in (1, 2):
        with monkeypatch.context() as patched:
            patched.setattr("distckpt.checkpointer.is_capturing", lambda: True)
            optimizer.step()
        assert checkpointer._late is late
        assert optimizer in checkpointer._captured
        checkpointer._late = []
        checkpointer.save(step, {"w": weight}).result(WAIT_S)
        plans.append(checkpointer._planned)
        checkpointer._late = late
    checkpointer._late = []
    assert plans[0] is not plans[1]
    assert plans[1] is plans[2]


@pytest.mark.parametrize(
    ("capturable", "is_captured", "expected"),
    [(False, False, False), (False, True, True), (True, False, True)],
)
def test_whose_steps_may_count_no_versions(*, capturable: bool, is_captured: bool, expected: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], capturable=capturable)
    moment = optimizer.state[weight]["exp_avg"] = torch.zeros(3)
    found = list(_addresses_of(optimizer, is_captured=is_captured))
    assert found == [(weight.data_ptr(), expected), (moment.data_ptr(), expected)]


def test_two_threads_that_step_both_wait(checkpointer: Checkpointer) -> None:
    """As those of a backward pass in which optimizers step: one may not pass while the other compares."""
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(3))]) for _ in range(2)]
    checkpointer.guard(*optimizers)
    order: list[str] = []
    begun = threading.Event()

    class Copies:
        is_over = False

        def guard(self) -> None:
            begun.set()
            time.sleep(0.1)
            order.append("guard")

    checkpointer._late = [Copies()]  # type: ignore[list-item]

    def step(number: int) -> None:
        optimizers[number].step()
        order.append("step")

    first = threading.Thread(target=step, args=(0,))
    first.start()
    assert begun.wait(WAIT_S)
    step(1)
    first.join()
    assert order[0] == "guard"
    assert sorted(order) == ["guard", "guard", "step", "step"]


def test_an_optimizer_that_is_gone_guards_nothing(checkpointer: Checkpointer) -> None:
    """Another one may step its parameters, of which nothing would tell."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizers = [torch.optim.SGD([weight])]
    checkpointer.guard(optimizers[0])
    plans = []
    for step in range(4):
        if step == 2:
            optimizers.clear()
            gc.collect()
        checkpointer.save(step, {"w": weight}).result(WAIT_S)
        plans.append(checkpointer._planned)
    assert plans[0] is plans[1]
    assert plans[1] is not plans[2]
    assert plans[2] is plans[3]


def test_guard_wants_an_optimizer_that_tells_before_it_steps(checkpointer: Checkpointer) -> None:
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self.optimizer, name)

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight])
    with pytest.raises(ConfigError, match=r"a Wrapper does not tell before it steps.*that it wraps"):
        checkpointer.guard(Wrapper(optimizer))  # type: ignore[arg-type]
    checkpointer.guard(Wrapper(optimizer).optimizer)


def test_an_optimizer_outlives_the_checkpointer_that_guarded_it(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight])
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.guard(optimizer)
        optimizer.step()
    optimizer.step()
    reference = weakref.ref(checkpointer)
    del checkpointer
    gc.collect()
    assert reference() is None
    optimizer.step()
    copy.deepcopy(optimizer).step()


def test_inside_a_guard_tensors_of_the_host_may_change_at_once(
    checkpointer: Checkpointer, tmp_path: Path
) -> None:
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    expected = []
    for step in range(4):
        with checkpointer.guard(optimizer):
            model.weight.data.fill_(step)
        expected.append(copy.deepcopy(dict(model.state_dict())))
        checkpointer.save(step, {"model": model.state_dict()})
        if step == 2:
            with torch.no_grad():
                model.weight.fill_(77)
    checkpointer.wait()
    for step, values in enumerate(expected):
        assert_same(read_with_torch(path_of(tmp_path, step)), {"model": values})


def test_two_checkpointers_of_one_directory(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, async_save=True) as one, Checkpointer(tmp_path, async_save=True) as other:
        handles = []
        for step in range(6):
            handles.append((one, other)[step % 2].save(step, {"t": torch.full((3,), float(step))}))
        for handle in handles:
            handle.result(WAIT_S)
        assert one.steps() == other.steps() == list(range(6))
    for step in range(6):
        assert_same(read_with_torch(path_of(tmp_path, step)), {"t": torch.full((3,), float(step))})


def test_a_later_process_goes_on(tmp_path: Path) -> None:
    for turn in range(3):
        with Checkpointer(tmp_path, async_save=True) as checkpointer:
            state = {"t": torch.zeros(3)}
            assert checkpointer.restore(state) == (turn - 1 if turn else None)
            assert_same(state, {"t": torch.full((3,), float(turn - 1 if turn else 0))})
            for step in (turn, 100):
                checkpointer.save(step, {"t": torch.full((3,), float(turn))})
            checkpointer.wait()
            path_of(tmp_path, 100).rename(tmp_path / f"moved {turn}")
        assert_same(read_with_torch(tmp_path / f"moved {turn}"), {"t": torch.full((3,), float(turn))})


def test_a_failure_that_nobody_asked_for_is_raised_by_close(tmp_path: Path) -> None:
    state = {"t": torch.zeros(3)}
    (tmp_path / "step-00000001").touch()
    checkpointer = Checkpointer(tmp_path, async_save=True)
    checkpointer.save(1, state)
    with pytest.raises(WriteError):
        checkpointer.close()
    checkpointer.close()
    with pytest.raises(WriteError), Checkpointer(tmp_path, async_save=True) as checkpointer:
        checkpointer.save(1, state)
    checkpointer = Checkpointer(tmp_path, async_save=True)
    checkpointer.save(1, state)
    checkpointer.__exit__(KeyError, KeyError(), None)
    with Checkpointer(tmp_path, async_save=True) as checkpointer:
        handle = checkpointer.save(1, state)
        with pytest.raises(WriteError):
            handle.result(WAIT_S)
        checkpointer.save(2, state)
    assert not handle.committed

"""States of a training loop as plain containers, and back to the objects that they are of."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from distckpt.errors import CheckpointError, ConfigError
from distckpt.rng import RngState
from distckpt.stateful import Gathered, PerRank, name_of

TORCHDATA = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class Loader:
    """Has a state that is its rank's alone."""

    def __init__(self, position: Any = 0) -> None:
        self.position = position
        self.num_taken = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.num_taken += 1


class Stranger:
    """Of no class that torch.load takes unasked."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stranger)

    __hash__ = None  # type: ignore[assignment]


def gather(state: Mapping[str, Any], rank: int = 0) -> Gathered:
    return Gathered(state, rank, {})


def metadata_of(values: Any) -> Metadata:
    """Return what a checkpoint of `values` would have."""
    leaves, paths = flatten_state_dict(values)
    entries: dict[str, Any] = {
        name: TensorStorageMetadata(TensorProperties(dtype=leaf.dtype), leaf.size(), [])
        if isinstance(leaf, torch.Tensor)
        else BytesStorageMetadata()
        for name, leaf in leaves.items()
    }
    return Metadata(entries, planner_data=paths)


def fill(target: Any, source: Any) -> None:
    """Load `source` into `target` as planners do: tensors in place, objects replaced."""
    for key in list(target) if isinstance(target, Mapping) else range(len(target)):
        if isinstance(target[key], torch.Tensor):
            with torch.no_grad():
                target[key].copy_(source[key])
        elif isinstance(target[key], (Mapping, list)):
            fill(target[key], source[key])
        else:
            target[key] = copy.deepcopy(source[key])


def restore(state: Mapping[str, Any], saved: Any, rank: int = 0, *, weights_only: bool = True) -> Gathered:
    found = Gathered(state, rank, {}, lambda: metadata_of(saved))
    fill(found.values, saved)
    found.hand_back(weights_only=weights_only)
    return found


def test_a_state_of_plain_containers_is_passed_on_as_it_is() -> None:
    state = {
        "t": torch.ones(2),
        "nested": OrderedDict(p=torch.nn.Parameter(torch.ones(1)), deep=[torch.zeros(1), {"x": 1}]),
        "objects": [1, "x", None, (1, 2), {3}],
        "empty": {},
    }
    assert gather(state).values is state


def test_objects_stand_in_place_of_their_states() -> None:
    model = torch.nn.Linear(2, 3)
    found = gather({"model": model, "deep": [{"loader": Loader(7)}], "n": 1}).values
    assert found["model"]["weight"].data_ptr() == model.weight.data_ptr(), "not copied"
    assert found["deep"] == [{"loader": {"position": 7}}]
    assert found["n"] == 1


def test_a_training_loop_comes_back() -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": Loader(seed)}

    def train(loop: dict[str, Any]) -> None:
        loop["model"](torch.linspace(0, 1, 15).reshape(5, 3)).square().sum().backward()
        loop["optimizer"].step()
        loop["optimizer"].zero_grad()
        loop["scheduler"].step()

    one, other = make(1), make(2)
    for _ in range(3):
        train(one)
    restore(other, copy.deepcopy(gather(one).values))
    for loop in (one, other):
        train(loop)
    found = other["model"].state_dict()
    assert all(torch.equal(found[name], value) for name, value in one["model"].state_dict().items())
    assert other["optimizer"].param_groups[0]["lr"] == one["optimizer"].param_groups[0]["lr"]
    assert other["scheduler"].last_epoch == 4
    assert (other["loader"].position, other["loader"].num_taken) == (1, 1)


def test_an_optimizer_that_has_not_stepped_is_prepared_only_if_there_is_what_to_load() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    weights = copy.deepcopy(model.state_dict())
    fresh = copy.deepcopy(gather({"optimizer": optimizer}).values)
    restore({"optimizer": optimizer}, fresh)
    assert not optimizer.state, "as it was saved"
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    stepped = copy.deepcopy(gather({"optimizer": optimizer}).values)
    other = torch.nn.Linear(2, 2)
    other.load_state_dict(weights)
    another = torch.optim.Adam(other.parameters())
    restore({"optimizer": another}, stepped)
    assert all(torch.equal(other.state_dict()[name], weights[name]) for name in weights), "no step was made"
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[mine]["exp_avg"], another.state[theirs]["exp_avg"])
        assert float(another.state[theirs]["step"]) == 1


def test_plain_values_beside_objects_are_replaced_in_the_containers_of_the_caller() -> None:
    inner: dict[Any, Any] = {"loader": Loader(1), "epoch": 1, 3: "three", "list": [Loader(2), "a", None]}
    state: dict[str, Any] = {"inner": inner, "best": 0.5}
    saved = {
        "inner": {"loader": {"position": 8}, "epoch": 9, "3": "drei", "list": [{"position": 6}, "b", [4]]},
        "best": 0.1,
    }
    kept = inner["list"]
    restore(state, saved)
    assert state["inner"] is inner
    assert inner["list"] is kept
    assert (inner["epoch"], inner[3], kept[1], kept[2], state["best"]) == (9, "drei", "b", [4], 0.1)
    assert isinstance(inner["loader"], Loader)
    assert (inner["loader"].position, kept[0].position) == (8, 6)
    assert inner.keys() == {"loader", "epoch", 3, "list"}


def test_objects_take_their_states_in_the_order_of_the_state() -> None:
    order: list[str] = []

    class Noting(Loader):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            order.append(self.position)

    state = {name: Noting() for name in "cab"}
    restore(state, {name: {"position": name} for name in "abc"})
    assert order == ["c", "a", "b"]


@pytest.mark.parametrize("keys", [(1, "1"), ((1, 2), "(1, 2)"), (True, "True")], ids=str)
def test_two_keys_that_are_spelt_alike(keys: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="of: two keys are spelt alike"):
        gather({"of": dict.fromkeys(keys, 0)})


@pytest.mark.parametrize("wrapped", [7, {}, object(), None])
def test_only_what_has_a_state_is_wrapped(wrapped: Any) -> None:
    with pytest.raises(ConfigError, match=type(wrapped).__name__):
        PerRank(wrapped)


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=30))
def test_any_state_of_a_rank(position: Any) -> None:
    wrapper = PerRank(Loader(position))
    saved = {"rank-00002": wrapper.state_of(2)[name_of(2)].clone()}
    other = Loader()
    restore({"loader": PerRank(other)}, {"loader": saved}, 2)
    assert other.position == position


def pickled(size: int) -> bytes:
    buffer = io.BytesIO()
    torch.save({"position": "x" * size}, buffer)
    return buffer.getvalue()


@given(st.lists(st.integers(0, 30_000), min_size=2, max_size=6))
def test_the_tensor_of_a_rank_keeps_its_place_as_long_as_the_state_fits(sizes: list[int]) -> None:
    loader = Loader()
    wrapper = PerRank(loader)
    addresses = set()
    for size in sizes:
        loader.position = "x" * size
        [(name, tensor)] = wrapper.state_of(3).items()
        assert name == "rank-00003"
        assert (tensor.dtype, tensor.dim(), tensor.numel() % 4096) == (torch.uint8, 1, 0)
        addresses.add((tensor.data_ptr(), tensor.numel()))
        taking = Loader()
        other = PerRank(taking)
        other.room_for(3, tensor.numel())["rank-00003"].copy_(tensor)
        other.take(weights_only=True)
        assert taking.position == loader.position
    needed = [8 + len(pickled(size)) for size in sizes]
    grown, room = 0, 4096
    for each in needed:
        if each > room:
            grown, room = grown + 1, each
    assert len({number for _, number in addresses}) <= 1 + grown


def test_a_state_that_shrinks_leaves_nothing_of_the_larger_behind() -> None:
    loader = Loader("y" * 9000)
    wrapper = PerRank(loader)
    wrapper.state_of(0)
    loader.position = "z"
    saved = wrapper.state_of(0)["rank-00000"].clone()
    other = Loader()
    restore({"loader": PerRank(other)}, {"loader": {"rank-00000": saved}})
    assert other.position == "z"


def test_a_rank_that_the_checkpoint_has_nothing_of_keeps_what_it_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = copy.deepcopy(gather({"a": {"loader": PerRank(Loader(5))}}, 0).values)
    there, not_there = Loader(1), Loader(2)
    restore({"a": {"loader": PerRank(there)}}, saved, 0)
    assert not caplog.text
    found = Gathered({"a": {"loader": PerRank(not_there)}}, 1, {}, lambda: metadata_of(saved))
    assert found.values == {"a": {"loader": {}}}
    found.hand_back(weights_only=True)
    assert (there.position, not_there.position, not_there.num_taken) == (5, 2, 0)
    assert "'a.loader' of rank 1" in caplog.text


def test_code_of_an_author_is_run_only_where_that_is_wanted() -> None:
    saved = copy.deepcopy(gather({"loader": PerRank(Loader(Stranger()))}).values)
    loader = Loader()
    with pytest.raises(CheckpointError, match="the state of a Loader cannot be read"):
        restore({"loader": PerRank(loader)}, saved)
    assert loader.num_taken == 0
    restore({"loader": PerRank(loader)}, saved, weights_only=False)
    assert loader.position == Stranger()


def test_what_the_object_itself_raises_is_not_said_to_be_the_checkpoints() -> None:
    class Picky(Loader):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise LookupError("no such position")

    saved = copy.deepcopy(gather({"loader": PerRank(Loader(5))}).values)
    with pytest.raises(LookupError, match="no such position"):
        restore({"loader": PerRank(Picky())}, saved)


@TORCHDATA
def test_loaders_of_torchdata_are_each_ranks_own() -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        return torchdata.StatefulDataLoader(list(range(12)), batch_size=2)

    wrappers: dict[int, PerRank] = {}
    loader = make()
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    first = Gathered({"loader": loader}, 1, wrappers).values["loader"]
    assert first.keys() == {"rank-00001"}
    again = Gathered({"loader": loader}, 1, wrappers).values["loader"]
    assert again["rank-00001"] is first["rank-00001"], "the place is kept from save to save"
    other = make()
    restore({"loader": other}, copy.deepcopy({"loader": first}), 1)
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in batches]


@TORCHDATA
def test_what_a_restored_loader_draws_to_begin_is_drawn_before_the_generators_are_set() -> None:
    """The run that was not interrupted had begun to read, so that its loader draws nothing more."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    generators = PerRank(RngState())

    def make() -> dict[str, Any]:
        loader = torchdata.StatefulDataLoader(list(range(12)), batch_size=2, shuffle=True)
        return {"loader": loader, "rng_state": generators}

    def draw(batches: Iterator[Any]) -> list[list[float]]:
        return [[*next(batches).tolist(), *torch.rand(2).tolist()] for _ in range(3)]

    state = make()
    batches = iter(state["loader"])
    draw(batches)
    saved = copy.deepcopy(gather(state).values)
    expected = draw(batches)
    torch.manual_seed(99)
    other = make()
    restore(other, saved)
    assert draw(iter(other["loader"])) == expected


@TORCHDATA
def test_loaders_that_are_gone_are_not_kept_alive() -> None:
    """A loader for each epoch would otherwise be kept with all that it has read."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    wrappers: dict[int, PerRank] = {}
    alive = []
    for _ in range(3):
        loader = torchdata.StatefulDataLoader(list(range(4)))
        Gathered({"loader": loader}, 0, wrappers)
        alive.append(weakref.ref(loader))
        del loader
    gc.collect()
    assert sum(each() is not None for each in alive) <= 1

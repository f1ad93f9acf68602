"""Two states have equal signatures only if a plan of the one holds for the other."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard

from distckpt import Sharded, signature
from distckpt.sharded import fused
from distckpt.signature import Signature, View, local_tensors
from unit.tensors import tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

State = dict[str, Any]


@pytest.fixture(params=["guards", "attributes"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compare with the guards of compiled functions, and without."""
    if request.param == "attributes":
        monkeypatch.setattr(signature, "TensorGuards", None)
    else:
        assert signature.TensorGuards is not None
    return str(request.param)


class Pair(NamedTuple):
    """A tuple with names."""

    first: Any
    second: Any


def matches(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> bool:
    """Compare in both directions."""
    found = Signature(View(before)).matches(View(after))
    assert Signature(View(after)).matches(View(before)) == found
    return found


def aliases(value: Any) -> Any:
    """Return the same tensors under new containers and new names."""
    if isinstance(value, torch.nn.Parameter):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return type(value)({key: aliases(entry) for key, entry in value.items()})  # type: ignore[call-arg]
    if isinstance(value, Pair):
        return Pair(*map(aliases, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(aliases, value))
    return value


objects = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(allow_nan=False)
parameters = tensors().map(
    lambda tensor: torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
)
leaves = tensors() | parameters | objects
states = st.dictionaries(
    st.text(max_size=3),
    st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.text(max_size=2) | st.integers(0, 9), inner, max_size=3)
            | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict)
            | st.tuples(inner, inner).map(lambda both: Pair(*both))
        ),
        max_leaves=12,
    ),
    max_size=4,
)


@hypothesis.given(states)
def test_new_names_of_the_same_tensors(state: State) -> None:
    assert matches(state, state)
    assert matches(state, aliases(state))


@pytest.mark.slow
@hypothesis.given(states, tensors(), st.data())
def test_whatever_else_a_tensor_becomes(state: State, tensor: torch.Tensor, data: st.DataObject) -> None:
    state[data.draw(st.text(max_size=3))] = tensor
    view = View(state, with_paths=True)
    paths = [
        path for path in view.paths if all(isinstance(container, dict) for container in _along(state, path))
    ]
    path = data.draw(st.sampled_from(paths))
    before = Signature(view)
    container = _along(state, path)[-1]
    key = next(key for key in container if str(key) == path[-1])
    tensor = container[key]
    others = [tensor.detach().unsqueeze(0), tensor.detach().clone() if tensor.numel() else None, "object"]
    if tensor.requires_grad:
        others.append(tensor.detach())
    container[key] = data.draw(st.sampled_from(others))
    assert not before.matches(View(state))
    container[key] = tensor
    assert before.matches(View(state))
    del container[key]
    assert not before.matches(View(state))


def _along(state: State, path: tuple[Any, ...]) -> list[Any]:
    """Return the containers on the way to the tensor at `path`."""
    containers: list[Any] = [state]
    for name in path[:-1]:
        container = containers[-1]
        is_mapping = isinstance(container, Mapping)
        key = next(key for key in container if str(key) == name) if is_mapping else name
        containers.append(container[key])
    return containers


def grid() -> torch.Tensor:
    return torch.arange(36.0).reshape(6, 6)


def numbers() -> torch.Tensor:
    return torch.arange(36.0).reshape(6, 6) * (1 + 2j)


def moved(tensor: torch.Tensor) -> torch.Tensor:
    kept.append(tensor.data)
    tensor.data = tensor.data.clone()
    return tensor


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def conj_imag(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor._base is not None
    return tensor._base.conj().imag


kept: list[torch.Tensor] = []
"""Memory that must not be taken for what comes after it."""

CHANGES: dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], Any]]] = {
    "shape": (grid, lambda t: t.view(4, 9)),
    "number of dims": (grid, lambda t: t.view(36)),
    "a dim of one": (grid, lambda t: t.unsqueeze(1)),
    "fewer rows": (grid, lambda t: t[:5]),
    "dtype": (grid, lambda t: t.view(torch.int32)),
    "dtype of the same bits": (lambda: grid().to(torch.bfloat16), lambda t: t.view(torch.float16)),
    "strides, transposed": (grid, lambda t: t.t()),
    "strides": (grid, lambda t: t.as_strided((6, 6), (6, 0))),
    "address": (lambda: torch.arange(40.0)[:36].view(6, 6), lambda t: t.as_strided((6, 6), (6, 1), 3)),
    "storage": (grid, lambda t: t.clone()),
    "storage of a parameter": (lambda: torch.nn.Parameter(grid()), moved),
    "storage that was freed": (grid, freed),
    "storage that was freed under a view": (lambda: grid()[2:], freed),
    "requires_grad": (grid, lambda t: t.requires_grad_()),
    "requires_grad no more": (lambda: torch.nn.Parameter(grid()), lambda t: t.requires_grad_(False)),
    "a parameter": (grid, lambda t: torch.nn.Parameter(t, requires_grad=False)),
    "conj": (numbers, lambda t: t.conj()),
    "no longer conj": (lambda: numbers().conj(), lambda t: t.conj()),
    "neg": (grid, torch._neg_view),
    "neg by imag of conj": (lambda: numbers().imag, conj_imag),
    "an object": (grid, lambda t: t.tolist()),
    "nothing": (grid, lambda t: None),
    "a list": (grid, lambda t: [t]),
}  # fmt: skip


@pytest.mark.parametrize("place", [0, 3, 255, 256, 999])
@pytest.mark.parametrize("change", CHANGES)
def test_one_of_many_tensors_changes(change: str, place: int) -> None:
    make, alter = CHANGES[change]
    state: State = {str(number): torch.empty(1) for number in range(1000)}
    state[str(place)] = make()
    before = Signature(View(state))
    assert before.matches(View(state))
    state[str(place)] = alter(state[str(place)])
    assert not before.matches(View(state))
    kept.clear()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_requires_grad_whatever_the_mode(mode: Callable[[], Any]) -> None:
    state = {"a": grid(), "b": torch.nn.Parameter(grid())}
    with mode():
        before = Signature(View(state))
        assert before.matches(View(state))
    for name, wanted in (("a", True), ("b", False)):
        state[name].requires_grad_(wanted)
        with mode():
            assert not before.matches(View(state)), name
        state[name].requires_grad_(not wanted)
        with mode():
            assert before.matches(View(state)), name


def test_the_grad_mode_makes_no_other_state() -> None:
    state = {"a": grid(), "b": torch.nn.Parameter(grid())}
    before = Signature(View(state))
    with torch.no_grad():
        assert before.matches(View(state))
        before = Signature(View(state))
    assert before.matches(View(state))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": 1}, {"b": 1}),
        ({"a": 1, "b": 1}, {"b": 1, "a": 1}),
        ({"a": {0: 1}}, {"a": {"0": 1}}),
        ({"a": [1]}, {"a": (1,)}),
        ({"a": [1]}, {"a": {0: 1}}),
        ({"a": {}}, {"a": []}),
        ({"a": {}}, {}),
        ({"a": [[1], 1]}, {"a": [[1, 1]]}),
        ({"a": [[1]], "b": 1}, {"a": [[1], "b"]}),
        ({"a": {"b": 1}, "c": 1}, {"a": {"b": 1, "c": 1}}),
        ({"a": {}}, {"a": OrderedDict()}),
        ({"a": (1, 2)}, {"a": Pair(1, 2)}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": True}, {"a": 1}),
        ({"a": 1}, {"a": None}),
    ],
    ids=str,
)
def test_other_containers_keys_and_types(before: State, after: State) -> None:
    assert not matches(before, after)
    assert not Signature(View(before)).is_like(View(after))
    tensor = torch.ones(2)
    assert not matches({**before, "t": tensor}, {**after, "t": tensor})


def test_values_of_objects_are_none_of_its_business() -> None:
    assert matches({"a": 1, "b": ["x"]}, {"a": 2, "b": ["y"]})


def test_tensors_that_change_places() -> None:
    one, other = torch.ones(4), torch.ones(4)
    assert not matches({"a": one, "b": other}, {"a": other, "b": one})
    assert Signature(View({"a": one})).is_like(View({"a": other}))


def test_tied_tensors() -> None:
    one, other = grid(), grid()
    tied = {"a": one, "b": one, "c": [one]}
    before = Signature(View(tied))
    assert before.matches(View(tied))
    assert before.matches(View(aliases(tied)))
    for changed in ({**tied, "b": other}, {**tied, "b": one.t()}, {**tied, "c": [other]}):
        assert not matches(tied, changed)
    for change in (lambda t: t.t(), torch._neg_view, lambda t: t.view(torch.int32), lambda t: t.view(4, 9)):
        assert not matches(tied, {**tied, "b": change(one)})
        assert not matches(tied, {"a": change(one), "b": change(one), "c": [change(one)]})
    one.requires_grad_()
    assert not matches({"a": one, "b": one}, {"a": one, "b": one.detach()})


def test_a_thousand_tensors() -> None:
    state = {str(number): torch.full((number % 7,), number) for number in range(1000)}
    before = Signature(View(state))
    assert before.addresses == [tensor.data_ptr() for tensor in state.values()]
    assert before.matches(View(aliases(state)))
    del state["999"]
    assert not before.matches(View(state))
    state["999"] = torch.ones(999 % 7)
    assert not before.matches(View(state))


def test_no_tensor_is_kept_alive(way: str) -> None:
    tensors = [torch.ones(3), torch.nn.Parameter(torch.ones(3)), *(torch.ones(2) for _ in range(300))]
    tied = [torch.ones(2)] * 2
    references = [weakref.ref(tensor) for tensor in (*tensors, *tied)]
    view = View({"a": tensors, "b": {"c": tied}})
    found = Signature(view)
    assert found.matches(view)
    del view, tensors, tied
    gc.collect()
    assert not any(reference() is not None for reference in references), way
    assert len(found.addresses) == 304


def test_a_state_with_nothing_in_it() -> None:
    assert matches({}, {})
    assert not matches({}, {"a": torch.ones(1)})
    assert Signature(View({})).addresses == []


def test_placements_and_meshes(mesh: DeviceMesh) -> None:
    local = grid()

    plain = torch.ones(1)

    def make(part: torch.Tensor, placement: Any, shape: tuple[int, ...] | None = None) -> State:
        size = None if shape is None else torch.Size(shape)
        stride = None if shape is None else (shape[1], 1)
        found = DTensor.from_local(part, mesh, [placement], run_check=False, shape=size, stride=stride)
        return {"before": plain, "d": found}

    rows = make(local, Shard(0))
    assert View(rows).is_simple
    assert matches(rows, make(local, Shard(0)))
    assert not matches(rows, make(local, Shard(1)))
    assert not matches(rows, make(local, Replicate()))
    assert not matches(rows, make(local, Shard(0), (12, 6)))
    assert not matches(rows, make(local.clone(), Shard(0)))
    assert not matches(rows, make(local.view(torch.int32), Shard(0)))
    assert not matches(rows, {**rows, "d": local})
    assert Signature(View(rows)).addresses[1] == local.data_ptr()


def test_requires_grad_of_a_dtensor(mesh: DeviceMesh) -> None:
    tensor = DTensor.from_local(grid(), mesh, [Shard(0)], run_check=False)
    before = Signature(View({"d": tensor}))
    tensor.requires_grad_()
    assert not before.matches(View({"d": tensor}))


def test_a_dtensor_that_counts_no_versions(mesh: DeviceMesh) -> None:
    """One that was made in inference mode, of the same memory."""
    local = grid()
    before = Signature(View({"d": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}))
    with torch.inference_mode():
        other = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    assert other.is_inference()
    assert not before.matches(View({"d": other}))


def test_the_storage_of_a_dtensor_moves(mesh: DeviceMesh) -> None:
    tensor = DTensor.from_local(grid(), mesh, [Shard(0)], run_check=False)
    before = Signature(View({"d": tensor}))
    kept.append(tensor._local_tensor)
    tensor._local_tensor = tensor._local_tensor.clone()
    assert not before.matches(View({"d": tensor}))
    kept.clear()


def test_what_a_view_finds(mesh: DeviceMesh) -> None:
    plain, parameter = torch.ones(1), torch.nn.Parameter(torch.ones(2))
    sharded = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=False)
    state = {"a": [plain, {"b": parameter, 3: 1}], "c": (sharded, "x"), "d": 1}
    view = View(state, with_paths=True)
    assert view.paths == [("a", 0), ("a", 1, "b"), ("c", 0)]
    assert [id(leaf) for leaf in view.leaves] == [id(plain), id(parameter), id(sharded)]
    assert [id(local) for local in view.locals] == [id(plain), id(parameter), id(sharded._local_tensor)]
    assert [id(tensor) for tensor in local_tensors(state)] == [id(local) for local in view.locals]
    assert view.wrapped == [2]
    assert view.is_simple
    assert View(state).paths == []


def test_boxes_of_a_sharded() -> None:
    memory = torch.arange(24.0).reshape(6, 4)
    plain = torch.ones(1)

    def make(shape: tuple[int, ...], *places: tuple[tuple[int, int], torch.Tensor]) -> State:
        return {"plain": [plain], "s": Sharded(shape, places), "end": plain}

    boxes = ((0, 0), memory[:2]), ((4, 1), memory[3:4, 1:])
    state = make((6, 4), *boxes)
    assert matches(state, make((6, 4), *boxes))
    others = [
        make((7, 4), *boxes),
        make((6, 4), boxes[0], ((5, 1), boxes[1][1])),
        make((6, 4), boxes[0], ((4, 1), memory[4:5, 1:])),
        make((6, 4), boxes[0], ((4, 1), memory[3:4, 1:3])),
        make((6, 4), boxes[0]),
        make((6, 4), boxes[0], ((4, 1), boxes[1][1].clone())),
        {**state, "s": memory},
    ]
    for number, other in enumerate(others):
        assert not matches(state, other), number
    assert Signature(View(state)).is_like(View(others[5]))
    assert not Signature(View(state)).is_like(View(others[1]))


def test_what_a_view_finds_in_a_sharded() -> None:
    value = torch.arange(10.0).reshape(5, 2)
    nothing = Sharded((2, 2), [], dtype=torch.half)
    parts = fused(torch.nn.Parameter(value), [3, 2], tensor_parallel=None)
    boxes = Sharded((4,), [((0,), value[0]), ((3,), value[1, :1])])
    state = {"fused": parts, "a": {1: boxes}, "nothing": nothing}
    view = View(state, with_paths=True)
    assert view.is_simple
    assert view.paths == [("fused", 0, (0, 0)), ("fused", 1, (0, 0)), ("a", "1", (0,)), ("a", "1", (3,))]
    assert [leaf.data_ptr() for leaf in view.leaves] == [
        tensor.data_ptr() for tensor in (value, value[3:], value[0], value[1])
    ]
    assert [id(tensor) for tensor in local_tensors(state)] == [id(leaf) for leaf in view.leaves]
    assert matches(state, {"fused": parts, "a": {1: boxes}, "nothing": nothing})
    assert not matches(state, {"fused": parts, "a": {1: boxes}, "nothing": None})
    assert not View({"s": Sharded((2,), [((0,), torch.ones(2).as_subclass(Tagged))])}).is_simple


class Tagged(torch.Tensor):
    """A subclass of which nothing is known."""


def test_what_is_not_known_in_full_is_not_simple(mesh: DeviceMesh) -> None:
    tagged = torch.ones(2).as_subclass(Tagged)
    assert not View({"a": torch.ones(1), "b": [tagged]}).is_simple
    assert not View({"d": DTensor.from_local(tagged, mesh, [Shard(0)], run_check=False)}).is_simple
    assert View({"a": (torch.ones(1),)}).is_simple

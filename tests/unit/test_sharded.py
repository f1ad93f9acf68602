"""Tensors that are no DTensors make up the global tensor, whatever the layout, and load into any other."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from distckpt import ConfigError, SavePlanner, Sharded, StorageReader, StorageWriter
from distckpt.geometry import TensorParallel
from distckpt.sharded import flat, fused, optimizer_state, sharded_like

State = dict[str, Any]


def load_into(targets: Sequence[State], sources: Sequence[State]) -> None:
    """Save the states of some ranks, and load them into those of others, by torch's planners."""
    planners = [DefaultSavePlanner() for _ in sources]
    for rank, (planner, state) in enumerate(zip(planners, sources, strict=True)):
        planner.set_up_planner(state, is_coordinator=rank == 0)
    # Refuses gaps and overlaps.
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    stored: dict[MetadataIndex, torch.Tensor] = {}
    for planner, plan in zip(planners, plans, strict=True):
        for item in plan.items:
            data = planner.resolve_data(item)
            assert isinstance(data, torch.Tensor)
            stored[item.index] = data.clone()
    for rank, state in enumerate(targets):
        loader = DefaultLoadPlanner()
        loader.set_up_planner(state, metadata, rank == 0)
        for request in loader.create_local_plan().items:
            part = narrow_tensor_by_index(
                stored[request.storage_index], request.storage_offsets, request.lengths
            )
            loader.resolve_tensor(request).copy_(part)


Slices = list[tuple[torch.Tensor, torch.Tensor]]


@st.composite
def layouts(draw: st.DrawFn, wholes: list[torch.Tensor], dim: int) -> tuple[list[State], Slices]:
    """Draw how ranks hold `wholes`, fused in one flat parameter; returns their states, with zeros in them.

    And for each rank its slice, and what belongs there.
    """
    size = draw(st.sampled_from([1, 2, 4]))
    states, slices = [], []
    for rank in range(size):
        parts = [whole.tensor_split(size, dim)[rank] for whole in wholes]
        fused_parts = torch.cat(parts)
        parameter = fused_parts.reshape(-1)
        cuts = sorted(draw(st.lists(st.integers(0, parameter.numel()), max_size=4)))
        for start, stop in itertools.pairwise([0, *cuts, parameter.numel()]):
            held = torch.zeros(stop - start, dtype=parameter.dtype)
            tensor_parallel = TensorParallel(rank, size, dim) if size > 1 else None
            if len(wholes) == 1:
                found = [flat(held, fused_parts.shape, start, stop, tensor_parallel=tensor_parallel)]
            else:
                found = flat(
                    held,
                    fused_parts.shape,
                    start,
                    stop,
                    sections=[len(part) for part in parts],
                    tensor_parallel=tensor_parallel,
                )
            states.append({"sections": found})
            slices.append((held, parameter[start:stop]))
    return states, slices


def fill(slices: Slices) -> None:
    for held, expected in slices:
        held.copy_(expected)


@settings(max_examples=100)
@given(st.data())
def test_every_layout_loads_into_every_other(data: st.DataObject) -> None:
    rest = data.draw(st.lists(st.integers(1, 3), max_size=2))
    dim = data.draw(st.integers(0, len(rest)))
    wholes = []
    for rows in data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)):
        shape = [rows, *rest]
        shape[dim] *= 4
        wholes.append(torch.randint(1 << 60, shape))
    sources, source_slices = data.draw(layouts(wholes, dim))
    fill(source_slices)
    targets, target_slices = data.draw(layouts(wholes, dim))
    load_into(targets, sources)
    assert all(torch.equal(held, expected) for held, expected in target_slices)
    # Into plain tensors, and from there back.
    whole: State = {"sections": [torch.zeros_like(one) for one in wholes]}
    load_into([whole], sources)
    assert all(torch.equal(found, one) for found, one in zip(whole["sections"], wholes, strict=True))
    for held, _ in source_slices:
        held.zero_()
    load_into(sources, [whole])
    assert all(torch.equal(held, expected) for held, expected in source_slices)


def grid(*shape: int) -> torch.Tensor:
    return torch.arange(float(math.prod(shape))).reshape(shape)


def boxes_of_a_matrix() -> Sharded:
    """Two boxes of a matrix, which lie in one row of memory with holes."""
    memory = grid(4, 6)
    return Sharded((5, 4), [((0, 1), memory[:2, ::2]), ((4, 0), memory[3:, 1:4])])


def test_boxes_given_one_by_one() -> None:
    memory = grid(4, 6)
    found = Sharded((5, 4), [((0, 1), memory[:2, ::2]), ((2, 0), memory[:0, :4]), ((4, 0), memory[3:, 1:4])])
    assert found.shape == (5, 4)
    assert found.dtype is torch.float32
    # Without the empty one.
    assert found.boxes == (((0, 1), (2, 3)), ((4, 0), (1, 3)))
    assert [tensor.data_ptr() for tensor in found.tensors] == [memory.data_ptr(), memory[3:, 1:].data_ptr()]
    assert "(5, 4)" in repr(found)
    assert "(4, 0) of (1, 3)" in repr(found)
    with pytest.raises(ValueError, match="no box"):
        found.__get_tensor_shard__(MetadataIndex("x", torch.Size((1, 1))))


def test_gradients_stay_outside() -> None:
    parameter = torch.nn.Parameter(grid(2, 3))
    found = Sharded((2, 3), [((0, 0), parameter)])
    assert not found.requires_grad
    assert not found.tensors[0].requires_grad
    [item] = found.__create_write_items__("x", found)
    assert item.tensor_data is not None
    assert not item.tensor_data.properties.requires_grad
    # A guard notices what changes.
    with torch.no_grad():
        parameter.add_(1)
    assert found.tensors[0]._version == parameter._version


def test_a_rank_that_holds_nothing() -> None:
    nothing = Sharded((2, 3), [], dtype=torch.float32)
    assert nothing.boxes == ()
    assert nothing.__create_write_items__("x", nothing) == []
    assert nothing.__create_chunk_list__() == []
    target = grid(2, 3).zero_()
    load_into(
        [{"x": target}, {"x": nothing}], [{"x": nothing}, {"x": Sharded((2, 3), [((0, 0), grid(2, 3))])}]
    )
    assert torch.equal(target, grid(2, 3))


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_a_tensor_without_elements_is_saved_all_the_same(shape: tuple[int, ...]) -> None:
    one = flat(torch.empty(0), shape, 0, 0, tensor_parallel=None)
    other = Sharded(shape, [], dtype=torch.float32)
    assert one.boxes == other.boxes == (((0,) * len(shape), shape),)
    load_into([{"x": torch.empty(shape)}, {"x": other}], [{"x": one}, {"x": sharded_like(other, one)}])
    assert sharded_like(one, torch.empty(0, dtype=torch.int8)).dtype is torch.int8


def test_a_scalar() -> None:
    target = torch.tensor(0.0)
    load_into(
        [{"x": Sharded((), [((), target)])}],
        [{"x": flat(torch.ones(1), (), 0, 1, tensor_parallel=None)}],
    )
    assert target == 1


def test_fused_is_views() -> None:
    value = grid(5, 2)
    gate, up = fused(value, [3, 2], tensor_parallel=TensorParallel(1, 2, 0))
    assert (gate.shape, up.shape) == ((6, 2), (4, 2))
    assert (gate.boxes, up.boxes) == ((((3, 0), (3, 2)),), (((2, 0), (2, 2)),))
    up.tensors[0].fill_(-1)
    assert value[3:].eq(-1).all()
    assert value[:3].ge(0).all()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Sharded((2, -3), []), r"no tensor has the shape \(2, -3\)"),
        (lambda: Sharded((2, 3), []), "say its dtype"),
        (lambda: Sharded((2, 3), [((0, 0), [1, 2])]), "not a list"),  # type: ignore[list-item]
        (lambda: Sharded((2, 3), [((0, 0), boxes_of_a_matrix())]), "not a Sharded"),
        (lambda: Sharded((2, 3), [((0,), grid(3))]), r"a box at \(0,\) of \(3,\).*2 dimensions"),
        (lambda: Sharded((2, 3), [((0,), grid(1, 3))]), "2 dimensions"),
        (lambda: Sharded((2, 3), [((1, 1), grid(1, 3))]), r"\(1, 1\) of \(1, 3\) lies outside \(2, 3\)"),
        (
            lambda: Sharded((2, 3), [((0, 0), grid(1, 3)), ((0, 2), grid(2, 1))]),
            r"\(0, 0\).*\(0, 2\).*overlap",
        ),
        (
            lambda: Sharded((2, 3), [((0, 0), grid(1, 3)), ((1, 0), grid(1, 3).half())]),
            "float32 and of torch.float16",
        ),
        (lambda: Sharded((2, 3), [((0, 0), grid(1, 3))], dtype=torch.half), "float16"),
        (lambda: flat(grid(5), (4, 3), 0, 6, tensor_parallel=None), r"\[0, 6\).*\(5,\)"),
        (lambda: flat(grid(3, 2).t(), (4, 3), 0, 6, tensor_parallel=None), "one after the other"),
        (lambda: flat(grid(6), (2, 2), 0, 6, tensor_parallel=None), "no slice"),
        (lambda: flat(boxes_of_a_matrix(), (5, 4), 0, 20, tensor_parallel=None), "not a Sharded"),
        (lambda: fused(grid(4, 2), [3, 2], tensor_parallel=None), "do not make up"),
        (lambda: fused(grid(4, 2).t(), [1, 1], tensor_parallel=None), "one after the other"),
        (lambda: sharded_like(boxes_of_a_matrix(), grid(2, 3)), "not cut from one tensor"),
        (lambda: sharded_like(Sharded((2, 3), [((0, 0), grid(1, 3))]), grid(3)), r"\(3,\).*\(1, 3\)"),
        (lambda: sharded_like(fused(grid(4, 2), [2, 2], tensor_parallel=None), grid(2, 4).t()), "contiguous"),
        (lambda: boxes_of_a_matrix() + 1, "compute with .tensors"),
        (lambda: boxes_of_a_matrix().new_empty(3), "compute with .tensors"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], object], text: str) -> None:
    with pytest.raises((ConfigError, NotImplementedError), match=text):
        call()


def test_how_a_parameter_is_split_must_be_said() -> None:
    with pytest.raises(TypeError, match="tensor_parallel"):
        flat(grid(4), [4], 0, 4)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="tensor_parallel"):
        fused(grid(4), [4])  # type: ignore[call-arg]


def by_stock_stager(value: Sharded) -> Sharded:
    staged: Sharded = StateDictStager(pin_memory=False, share_memory=False).stage({"x": value})["x"]
    return staged


@pytest.mark.parametrize(
    "make",
    [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s)), torch.Tensor.cpu, torch.clone, by_stock_stager],
    ids=["deepcopy", "pickle", "cpu", "clone", "stager"],
)
def test_copies(make: Callable[[Sharded], Sharded]) -> None:
    for made_of in (boxes_of_a_matrix(), Sharded((2, 3), [], dtype=torch.half)):
        found = make(made_of)
        assert type(found) is Sharded
        assert (found.shape, found.boxes, found.dtype) == (made_of.shape, made_of.boxes, made_of.dtype)
        assert all(map(torch.equal, found.tensors, made_of.tensors))
        if make is not torch.Tensor.cpu:
            addresses = {tensor.data_ptr() for tensor in made_of.tensors}
            assert addresses.isdisjoint(tensor.data_ptr() for tensor in found.tensors)
    half: Any = boxes_of_a_matrix().half()
    assert half.dtype is half.tensors[0].dtype is torch.half


@pytest.mark.parametrize("reader", ["torch", "distckpt"])
@pytest.mark.parametrize("writer", ["torch", "distckpt", "async"])
def test_saved_and_loaded_by_either(tmp_path: Path, writer: str, reader: str) -> None:
    value = grid(6, 2)
    state = {"mlp": dict(zip(("gate", "up"), fused(value, [4, 2], tensor_parallel=None), strict=True))}
    expected = value.clone()
    if writer == "torch":
        state_dict_saver.save(state, storage_writer=FileSystemWriter(tmp_path))
    else:
        with StorageWriter(tmp_path) as ours:
            if writer == "distckpt":
                state_dict_saver.save(state, storage_writer=ours, planner=SavePlanner())
            else:
                # It is staged box by box.
                staged = ours.stage(dict(state)).result(30)
                assert type(staged["mlp"]["up"]) is Sharded
                value.zero_()
                state_dict_saver.save(staged, storage_writer=ours)
    value.zero_()
    open_reader = FileSystemReader if reader == "torch" else StorageReader
    state_dict_loader.load(state, storage_reader=open_reader(tmp_path))
    assert torch.equal(value, expected)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    store = torch._C._distributed_c10d.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def sharded_parameter(local: torch.Tensor, shape: tuple[int, ...], device: str = "cpu") -> DTensor:
    mesh = DeviceMesh(device, [0], _init_backend=False)
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, (Shard(0),), meta), requires_grad=True)  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_place_of_a_dtensor(device: str) -> None:
    # As on the first of two ranks.
    parameter = sharded_parameter(grid(3, 2).bfloat16(), (5, 2), device)
    value = grid(3, 2).double()
    found = sharded_like(parameter, value)
    assert type(found) is DTensor
    assert (found.shape, found.stride(), found.dtype) == ((5, 2), (2, 1), torch.float64)
    assert (found.placements, found.device_mesh) == (parameter.placements, parameter.device_mesh)
    assert not found.requires_grad
    # On the CPU, wherever the mesh is: a load fills the optimizer's own.
    assert found._local_tensor.data_ptr() == value.data_ptr()
    empty = sharded_like(sharded_parameter(grid(0, 2), (5, 2), device), torch.empty(0))
    assert empty._local_tensor.shape == (0, 2)
    step = torch.tensor(7)
    assert sharded_like(parameter, step) is step
    assert sharded_like(parameter, found) is found
    assert sharded_like(parameter, None) is None
    assert sharded_like(value, step) is step
    with pytest.raises(ConfigError, match=r"\(6,\).*\(3, 2\)"):
        sharded_like(parameter, grid(6))


def test_the_place_of_a_sharded() -> None:
    shape, start, stop = (6, 4), 3, 18
    sections = flat(grid(15), shape, start, stop, sections=[4, 2], tensor_parallel=None)
    value = grid(15).int()
    found = sharded_like(sections, value)
    for one, section in zip(found, sections, strict=True):
        assert (one.shape, one.boxes, one.dtype) == (section.shape, section.boxes, torch.int32)
        assert all(map(torch.equal, one.tensors, section.tensors))
    again = sharded_like(found, grid(15))
    again[1].tensors[0].fill_(-1)
    assert not value.eq(-1).any()
    found[1].tensors[0].fill_(-1)
    assert value.eq(-1).sum() == 2
    single = Sharded((2, 3), [((0, 0), grid(1, 3))])
    assert sharded_like(single, grid(3, 1).t()).boxes == single.boxes
    nothing = sharded_like(Sharded((2, 3), [], dtype=torch.half), torch.empty(0, 3))
    assert (nothing.shape, nothing.dtype, nothing.boxes) == ((2, 3), torch.float32, ())


def trained(steps: int) -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
    torch.manual_seed(steps)
    parameters = {name: torch.nn.Parameter(torch.randn(4, 3)) for name in ("fc1", "fc2", "frozen")}
    groups: list[State] = [
        {"params": [parameters["fc1"]], "lr": 0.1 * steps},
        {"params": [*parameters.values()][1:]},
    ]
    optimizer = torch.optim.AdamW(groups)
    for _ in range(steps):
        for name in ("fc1", "fc2"):
            parameters[name].grad = torch.randn(4, 3)
        optimizer.step()
    return parameters, optimizer


def test_state_of_an_optimizer(tmp_path: Path) -> None:
    def state_of(parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> State:
        like = {"fc1": fused(parameters["fc1"], [2, 2], tensor_parallel=None)}
        return optimizer_state(optimizer, parameters.items(), like=like)

    parameters, optimizer = trained(3)
    state = state_of(parameters, optimizer)
    assert state["state"].keys() == {"fc1", "fc2"}
    assert [type(one) for one in state["state"]["fc1"]["exp_avg"]] == [Sharded, Sharded]
    assert state["state"]["fc2"]["exp_avg"] is optimizer.state[parameters["fc2"]]["exp_avg"]
    assert [group["params"] for group in state["param_groups"]] == [["fc1"], ["fc2", "frozen"]]
    with StorageWriter(tmp_path) as writer:
        state_dict_saver.save({"optimizer": state}, storage_writer=writer)
    others, other = trained(1)
    loaded = {"optimizer": state_of(others, other)}
    state_dict_loader.load(loaded, storage_reader=StorageReader(tmp_path))
    for group, values in zip(other.param_groups, loaded["optimizer"]["param_groups"], strict=True):
        group.update((key, value) for key, value in values.items() if key != "params")
    assert other.param_groups[0]["lr"] == pytest.approx(0.3)
    for name in ("fc1", "fc2"):
        for key, value in optimizer.state[parameters[name]].items():
            assert torch.equal(other.state[others[name]][key], value)


def test_state_of_an_optimizer_that_cannot_be_named() -> None:
    parameters, optimizer = trained(1)
    with pytest.raises(ConfigError, match=r"\(4, 3\) in group 1 of the optimizer has no name"):
        optimizer_state(optimizer, [("fc1", parameters["fc1"])])
    parameters, optimizer = trained(0)
    with pytest.raises(ConfigError, match="step it once"):
        optimizer_state(optimizer, parameters.items())
    parameters, optimizer = trained(1)
    wrong = Sharded((8, 3), [((0, 0), grid(2, 3))])
    with pytest.raises(ConfigError, match=r"a state of 'fc2': .*\(4, 3\).*\(2, 3\)"):
        optimizer_state(optimizer, parameters.items(), like={"fc2": wrong})

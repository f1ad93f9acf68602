"""Checkpointer and CUDA tensors: replayed copies, guarded tensors, the trainer's own graphs and streams."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from distckpt import Checkpointer, SaveHandle, StagingError, StorageWriter, WriteError
from distckpt.device import Transfer
from integration.checkpoints import WAIT_S, assert_same, bits, read_with_distckpt, read_with_torch
from integration.test_checkpointer import held_back, path_of, used_bytes
from integration.test_cuda import DTYPES, State, check, copied, every_kind, overwrite, some

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

MIB = 1 << 20
CYCLES = 400_000_000
"""Keeps a stream busy for a fifth of a second or more."""


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    """Saves in the background, to the test's own directory."""
    with Checkpointer(tmp_path, async_save=True, dist_ckpt_workers=2) as opened:
        yield opened


def busy(cycles: int = CYCLES) -> None:
    """Give the current stream something to do before whatever comes next."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def mesh_of_one() -> DeviceMesh:
    return init_device_mesh("cuda", (1,))


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def replays(checkpointer: Checkpointer) -> bool:
    """Say whether the last state is copied by a graph from now on."""
    planned = checkpointer._planned
    assert planned is not None
    return any(residence.can_restage for residence in planned._residences)


def on_host(value: Any) -> Any:
    """Return a copy of the values of now, all of them on the CPU."""
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        plain = whole.detach().resolve_conj().resolve_neg()
        return plain.contiguous().cpu().clone()
    if isinstance(value, dict):
        return {str(key): on_host(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [on_host(entry) for entry in value]
    return copy.deepcopy(value)


def tensors_in(state: State) -> list[torch.Tensor]:
    return [value for value in state.values() if isinstance(value, torch.Tensor)]


def wait_until_staged(handle: SaveHandle) -> None:
    deadline = time.monotonic() + WAIT_S
    while not handle.staged:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def mixed() -> State:
    """Every kind of tensor on the device and on the host, small and large, and objects."""
    state = every_kind()
    state |= {f"host.{number}": some(torch.float32, number, 3, device="cpu") for number in range(9)}
    state |= {
        "host.large": some(torch.float32, 5, MIB // 4, device="cpu"),
        "host.pinned": some(torch.float32, 300, 200, device="cpu").pin_memory(),
        "step": 1,
        "name": "run",
    }
    state |= {f"small.{number}": some(DTYPES[number % len(DTYPES)], number) for number in range(200)}
    return state


@pytest.mark.parametrize("workers", [1, 2])
def test_from_the_third_save_on_a_graph_is_replayed(tmp_path: Path, workers: int) -> None:
    state = mixed()
    captured = []
    with Checkpointer(tmp_path, async_save=True, dist_ckpt_workers=workers) as checkpointer:
        for step in range(5):
            state["step"] = step
            expected = copied(state)
            handle = checkpointer.save(step, state)
            captured.append(replays(checkpointer))
            overwrite(tensors_in(state), step % 2)
            handle.result(WAIT_S)
            check(path_of(tmp_path, step), state, expected, thorough=step == 4)
    assert captured == [False, True, True, True, True]


def test_storages_that_move(checkpointer: Checkpointer, tmp_path: Path) -> None:
    state: State = {f"t{number}": some(torch.float32, 1 + 1000 * number) for number in range(40)}
    state["large"] = some(torch.float32, 5, MIB // 4)
    state["p"] = torch.nn.Parameter(some(torch.float32, 64, 64))
    captured = []
    for step in range(9):
        if step == 3:
            for name in list(state):
                if name != "p":
                    # The old memory is free for whoever comes next.
                    state[name] = state[name] + 1
        elif step == 6:
            state["p"].data = state["p"].data.clone() + 2
        expected = copied(state)
        handle = checkpointer.save(step, state)
        captured.append(replays(checkpointer))
        junk = [torch.full_like(tensor, 7) for tensor in tensors_in(state)]
        overwrite(tensors_in(state), step)
        handle.result(WAIT_S)
        del junk
        check(path_of(tmp_path, step), state, expected, thorough=False)
    assert captured == [False, True, True] * 3


def test_memory_that_is_given_back_and_taken_again(checkpointer: Checkpointer, tmp_path: Path) -> None:
    state: State = {f"t{number}": some(torch.float32, 100 * number) for number in range(40)}
    state |= {"columns": some(torch.float32, 500, 700)[:, 3:300], "large": some(torch.float32, 9, MIB // 4)}
    for step in range(6):
        junk = [torch.full((MIB,), float(step), device="cuda") for _ in range(50)]
        del junk
        torch.cuda.empty_cache()
        expected = copied(state)
        handle = checkpointer.save(step, state)
        overwrite(tensors_in(state), step)
        torch.cuda.empty_cache()
        junk = [torch.full((MIB,), 77.0, device="cuda") for _ in range(50)]
        handle.result(WAIT_S)
        del junk
        check(path_of(tmp_path, step), state, expected, thorough=False)
    assert replays(checkpointer)


class Training:
    """A model with buffers, and an optimizer with states; under FSDP2 if there is a process group."""

    def __init__(self, *, fused: bool = False) -> None:
        layers: list[torch.nn.Module] = []
        for width in (7, 64, 1000):
            layers += [
                torch.nn.Linear(1000, width),
                torch.nn.BatchNorm1d(width),
                torch.nn.Linear(width, 1000),
            ]
        self.model = torch.nn.Sequential(*layers).cuda()
        if distributed.is_initialized():
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=fused)

    @property
    def state(self) -> State:
        return {"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict()}

    def forward_and_backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 1000, device="cuda")).square().mean().backward()


@pytest.fixture(params=["plain", "fsdp2"])
def group(request: pytest.FixtureRequest) -> Iterator[str]:
    """For each: whether there is a process group, of one rank."""
    kind: str = request.param
    if kind == "fsdp2":
        store = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group(
            "nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0)
        )
    yield kind
    if kind == "fsdp2":
        distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_parameters_change_inside_the_guard(checkpointer: Checkpointer, tmp_path: Path) -> None:
    training = Training()
    for step in range(7):
        training.forward_and_backward()
        with checkpointer.guard(training.optimizer):
            training.optimizer.step()
        expected = on_host(training.state)
        # The copies begin long after the save has returned, once everything is built.
        busy()
        handle = checkpointer.save(step, training.state)
        assert step < 3 or handle.blocked_s < 0.15
        assert step < 3 or not handle.staged
        # Buffers are changed by this, without a guard.
        training.forward_and_backward()
        with checkpointer.guard(training.optimizer):
            training.optimizer.step()
            for parameter in training.model.parameters():
                parameter.data.fill_(step)
        assert step < 3 or not handle.staged, "the device waits for the copies, the host does not"
        handle.result(WAIT_S)
        assert_same(read_with_torch(path_of(tmp_path, step)), expected, str(step))
    assert replays(checkpointer)
    planned = checkpointer._planned
    assert planned is not None
    names = {planned.fqn(number) for number in planned.late}
    assert "model.6.weight" in names
    assert "optimizer.state.12.exp_avg" in names
    assert not any("running_mean" in name or name.endswith(".step") for name in names)


def test_a_guard_for_each_of_several_optimizers(checkpointer: Checkpointer, tmp_path: Path) -> None:
    weights = [torch.nn.Parameter(some(torch.float32, 1000, 1000)) for _ in range(3)]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights[:2]]
    state = {f"w{number}": weight for number, weight in enumerate(weights)}
    for step in range(4):
        expected = on_host(state)
        busy()
        handle = checkpointer.save(step, state)
        with torch.no_grad():
            # Nobody guards this one.
            weights[2].add_(1)
            with checkpointer.guard(*optimizers):
                weights[0].add_(1)
                weights[1].add_(1)
        handle.result(WAIT_S)
        assert_same(read_with_torch(path_of(tmp_path, step)), expected)


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each copy of a large tensor begin a hundredth of a second late, in captured graphs, too."""
    copy_one = Transfer._copy

    def slowed(transfer: Transfer, step: Any, *args: Any) -> None:
        with torch.cuda.stream(transfer._devices.streams(step.device).copy):
            busy(CYCLES // 20)
        copy_one(transfer, step, *args)

    monkeypatch.setattr(Transfer, "_copy", slowed)


def by_foreach(weight: torch.nn.Parameter) -> None:
    # Of a DTensor it counts up no version.
    torch._foreach_add_([weight], 1)


def by_foreach_at_a_place(weight: torch.nn.Parameter) -> None:
    torch._foreach_add_([weight.to_local()[-1, -1:] if isinstance(weight, DTensor) else weight[-1, -1:]], 1)


def there_and_back(weight: torch.nn.Parameter) -> None:
    weight.neg_()
    weight.neg_()


@pytest.mark.usefixtures("group", "slow_copies")
@pytest.mark.parametrize("change", [by_foreach, by_foreach_at_a_place, there_and_back])
@pytest.mark.parametrize("earlier", [0, 3])
def test_a_change_before_the_guard(
    checkpointer: Checkpointer, tmp_path: Path, earlier: int, change: Callable[[torch.nn.Parameter], None]
) -> None:
    training = Training()
    training.forward_and_backward()
    with torch.no_grad():
        # Kernels are loaded when they are first launched, and the device then waits for the copies.
        change(training.model.get_parameter("6.weight"))
    with checkpointer.guard(training.optimizer):
        training.optimizer.step()
    for step in range(earlier):
        checkpointer.save(step, training.state).result(WAIT_S)
    for step, by_guard in ((10, True), (11, False)):
        with held_back(checkpointer):
            handle = checkpointer.save(step, training.state)
            with torch.no_grad():
                change(training.model.get_parameter("6.weight"))
            assert not handle.staged
            if by_guard:
                with checkpointer.guard(training.optimizer):
                    training.optimizer.step()
        with pytest.raises(StagingError, match=r"'model\.6\.weight' was changed .*guard"):
            handle.result(WAIT_S)
        assert not (path_of(tmp_path, step) / ".metadata").exists()
    assert checkpointer.steps() == list(range(earlier))
    used = used_bytes(checkpointer)
    expected = on_host(training.state)
    handle = checkpointer.save(12, training.state)
    with checkpointer.guard(training.optimizer):
        training.optimizer.step()
    handle.result(WAIT_S)
    assert_same(read_with_torch(path_of(tmp_path, 12)), expected)
    assert used_bytes(checkpointer) == used


@pytest.mark.parametrize("group", ["fsdp2"], indirect=True)
@pytest.mark.usefixtures("group", "slow_copies")
def test_a_part_of_a_dtensor_that_is_saved_as_a_plain_tensor(checkpointer: Checkpointer) -> None:
    """Its own version says nothing of what the optimizer does to the DTensor."""
    weight: Any = torch.nn.Parameter(DTensor.from_local(some(torch.float32, 1000, 1000), mesh_of_one()))
    optimizer = torch.optim.SGD([weight])
    with checkpointer.guard(optimizer):
        pass
    for step in range(4):
        handle = checkpointer.save(step, {"part": weight.detach().to_local()})
        assert not handle.staged
        with torch.no_grad():
            torch._foreach_add_([weight], 1)
        with pytest.raises(StagingError, match=r"'part' was changed"):
            handle.result(WAIT_S)


@pytest.mark.parametrize("group", ["fsdp2"], indirect=True)
@pytest.mark.usefixtures("group", "slow_copies")
def test_dtensors_of_any_bytes(checkpointer: Checkpointer, tmp_path: Path) -> None:
    """Those that have no cheap digest are there when the save returns, and may change."""
    mesh = mesh_of_one()
    tensors = {
        "even": some(torch.float32, 600, 1000),
        "odd": some(torch.bfloat16, 1001, 1003),
        "bytes": some(torch.uint8, MIB + 3),
        "small": some(torch.float32, 30, 10),
        "transposed": some(torch.float32, 900, 800).t(),
        "strided": some(torch.float32, 2000, 900)[::2],
        "double": some(torch.float64, 512, 600),
        "none": some(torch.float32, 0, 7),
    }
    state: dict[str, Any] = {
        name: torch.nn.Parameter(DTensor.from_local(tensor, mesh), False) for name, tensor in tensors.items()
    }
    optimizer = torch.optim.SGD(list(state.values()))
    with checkpointer.guard(optimizer):
        pass
    for step in range(5):
        expected = on_host(state)
        handle = checkpointer.save(step, state)
        assert not handle.staged
        with torch.no_grad():
            for name in ("odd", "bytes", "small", "strided"):
                state[name].to_local().add_(1)
            with checkpointer.guard(optimizer):
                for parameter in state.values():
                    parameter.add_(1)
        handle.result(WAIT_S)
        assert_same(read_with_torch(path_of(tmp_path, step)), expected, str(step))
    assert replays(checkpointer)
    planned = checkpointer._planned
    assert planned is not None
    assert {planned.fqn(number) for number in planned.late} == {"even", "transposed", "double"}


@pytest.mark.usefixtures("group", "slow_copies")
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_outside_a_with_block(checkpointer: Checkpointer, tmp_path: Path, *, fused: bool) -> None:
    """Fused steps count up no version, but an optimizer that a guard has seen tells before each of them."""
    training = Training(fused=fused)
    checkpointer.guard(training.optimizer)
    for step in range(6):
        training.forward_and_backward()
        training.optimizer.step()
        expected = on_host(training.state)
        handle = checkpointer.save(step, training.state)
        training.forward_and_backward()
        assert step == 0 or not handle.staged
        training.optimizer.step()
        handle.result(WAIT_S)
        assert_same(read_with_torch(path_of(tmp_path, step)), expected, str(step))
    assert replays(checkpointer)


@pytest.mark.usefixtures("slow_copies")
def test_steps_on_two_streams_both_wait(checkpointer: Checkpointer, tmp_path: Path) -> None:
    weights = [torch.nn.Parameter(some(torch.float32, 700, 1000)) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizers = [torch.optim.SGD(weights[half::2], lr=0.1, fused=True) for half in range(2)]
    checkpointer.guard(*optimizers)
    state = {f"w{number}": weight for number, weight in enumerate(weights)}
    streams = [new_stream() for _ in optimizers]
    for step in range(5):
        expected = on_host(state)
        handle = checkpointer.save(step, state)
        for stream, optimizer in zip(streams, optimizers, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            assert step == 0 or not handle.staged
            with torch.cuda.stream(stream):
                optimizer.step()
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        handle.result(WAIT_S)
        assert_same(read_with_torch(path_of(tmp_path, step)), expected, str(step))


@pytest.mark.usefixtures("slow_copies")
@pytest.mark.parametrize("is_seen", [True, False])
def test_a_step_that_is_replayed(checkpointer: Checkpointer, tmp_path: Path, *, is_seen: bool) -> None:
    """It counts up no version and calls no hook: without a guard, the save that it spoils fails too."""
    weights = [torch.nn.Parameter(some(torch.float32, 700, 1000)) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    state = {f"w{number}": weight for number, weight in enumerate(weights)}
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(weights, capturable=True)
    if is_seen:
        optimizer = torch.optim.SGD(weights, lr=0.1)
        checkpointer.guard(optimizer)
        checkpointer.save(100, state).result(WAIT_S)
    stream = new_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    checkpointer.guard(optimizer)
    for step in range(4):
        expected = on_host(state)
        handle = checkpointer.save(2 * step, state)
        assert not handle.staged
        with checkpointer.guard(optimizer):
            graph.replay()
        handle.result(WAIT_S)
        assert_same(read_with_torch(path_of(tmp_path, 2 * step)), expected)
        with held_back(checkpointer):
            handle = checkpointer.save(2 * step + 1, state)
            graph.replay()
        with pytest.raises(StagingError, match=r"'w\d' was changed"):
            handle.result(WAIT_S)


def test_a_guard_around_every_step_with_saves_at_some(checkpointer: Checkpointer, tmp_path: Path) -> None:
    training = Training()
    expected: dict[int, Any] = {}
    for step in range(20):
        training.forward_and_backward()
        with checkpointer.guard(training.optimizer):
            training.optimizer.step()
        if step % 4 == 0:
            expected[step] = on_host(training.state)
            checkpointer.save(step, training.state)
    checkpointer.wait()
    assert checkpointer.steps() == list(expected)
    for step, values in expected.items():
        assert_same(read_with_torch(path_of(tmp_path, step)), values, str(step))


def test_a_resumed_training_goes_on_alike(checkpointer: Checkpointer) -> None:
    training = Training()
    for step in range(4):
        training.forward_and_backward()
        with checkpointer.guard(training.optimizer):
            training.optimizer.step()
        checkpointer.save(step, training.state)
    checkpointer.wait()
    expected = on_host(training.state)
    resumed = Training()
    resumed.forward_and_backward()
    resumed.optimizer.step()
    state = resumed.state
    assert checkpointer.restore(state) == 3
    resumed.model.load_state_dict(state["model"])
    resumed.optimizer.load_state_dict(state["optimizer"])
    assert_same(on_host(resumed.state), expected)


def test_what_another_stream_still_writes(checkpointer: Checkpointer, tmp_path: Path) -> None:
    state = {f"t{number}": torch.zeros(1000 * (1 + number), device="cuda") for number in range(40)}
    state["large"] = torch.zeros(5 * MIB, device="cuda")
    side = new_stream()
    for step in range(1, 6):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            busy()
            for tensor in state.values():
                tensor.fill_(step)
        if step % 2:
            torch.cuda.current_stream().wait_stream(side)
            handle = checkpointer.save(step, state)
        else:
            with torch.cuda.stream(side):
                handle = checkpointer.save(step, state)
            # The stream that the save was called on waits, and this one with it.
            torch.cuda.current_stream().wait_stream(side)
        for tensor in state.values():
            tensor.fill_(77)
        handle.result(WAIT_S)
        expected = {name: torch.full(tensor.shape, float(step)) for name, tensor in state.items()}
        assert_same(read_with_torch(path_of(tmp_path, step)), expected, str(step))


def test_the_trainer_captures_a_graph_while_a_save_is_under_way(
    checkpointer: Checkpointer, tmp_path: Path
) -> None:
    state: State = {f"t{number}": some(torch.float32, 100 * number) for number in range(40)}
    state |= {f"large {number}": some(torch.float32, 8, MIB // 4) for number in range(20)}
    static = torch.zeros(1000, device="cuda")
    for step in range(5):
        expected = copied(state)
        handle = checkpointer.save(step, state)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(300):
                static.add_(1)
            for tensor in tensors_in(state):
                tensor.mul_(2)
        static.zero_()
        graph.replay()
        graph.replay()
        handle.result(WAIT_S)
        check(path_of(tmp_path, step), state, expected, thorough=False)
        assert set(static.tolist()) == {600.0}


@pytest.mark.parametrize("earlier", [0, 1, 2, 3])
def test_a_save_while_its_thread_captures_a_graph(
    checkpointer: Checkpointer, tmp_path: Path, earlier: int
) -> None:
    state: State = {f"t{number}": some(torch.float32, 100 * number) for number in range(40)}
    state |= {"large": some(torch.float32, 9, MIB // 4), "host": torch.ones(5), "step": 0}
    for step in range(earlier):
        checkpointer.save(step, state).result(WAIT_S)
    static = torch.zeros(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.add_(1)
        with pytest.raises(StagingError, match="captures a CUDA graph"):
            checkpointer.save(9, state)
        static.add_(1)
    static.zero_()
    graph.replay()
    assert set(static.tolist()) == {2.0}
    for step in range(10, 14):
        expected = copied(state)
        handle = checkpointer.save(step, state)
        overwrite(tensors_in(state), step)
        handle.result(WAIT_S)
        check(path_of(tmp_path, step), state, expected, thorough=False)
    assert checkpointer.steps() == [*range(earlier), 10, 11, 12, 13]
    assert replays(checkpointer)


def odd_ones(seed: int) -> State:
    """Return 3000 small tensors on the host: random bits, and odd sizes that are always the same."""
    sizes, generator = torch.Generator().manual_seed(5), torch.Generator().manual_seed(seed)
    host: State = {}
    for number in range(3000):
        dtype = DTYPES[number % len(DTYPES)]
        nbytes = int(torch.randint(1, 5001, (), generator=sizes))
        count = max(1, nbytes // dtype.itemsize)
        high = 2 if dtype is torch.bool else 256
        raw = torch.randint(high, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        host[f"t{number}"] = raw.view(dtype)
    return host


def test_thousands_of_small_tensors_of_odd_sizes(checkpointer: Checkpointer, tmp_path: Path) -> None:
    state = {name: tensor.cuda() for name, tensor in odd_ones(0).items()}
    for step in range(4):
        # Other bits at the same places: what is replayed copies anew.
        host = odd_ones(step)
        for name, tensor in host.items():
            state[name].copy_(tensor)
        handle = checkpointer.save(step, state)
        overwrite(tensors_in(state), 1)
        handle.result(WAIT_S)
        read = read_with_distckpt if step == 2 else read_with_torch
        assert_same(read(path_of(tmp_path, step)), host, str(step))
    assert replays(checkpointer)


@pytest.mark.parametrize("way", ["stage", "async_save", "save", "write-through"])
def test_thousands_of_small_tensors_through_a_writer(tmp_path: Path, way: str) -> None:
    host = odd_ones(1)
    state = {name: tensor.cuda() for name, tensor in host.items()}
    settings: dict[str, Any] = {"ckpt_host_memory": 24 * MIB} if way == "write-through" else {}
    if way == "write-through":
        state["large"] = some(torch.float32, 40, MIB // 4)
        host["large"] = state["large"].cpu()
    with StorageWriter(dist_ckpt_workers=2, **settings) as writer:
        if way == "stage":
            staged = writer.stage(state).result(WAIT_S)
            for name, tensor in host.items():
                assert torch.equal(bits(staged[name]), bits(tensor)), name
            del staged
            return
        for turn in range(2):
            path = tmp_path / str(turn)
            if way == "async_save":
                response = state_dict_saver.async_save(
                    state, checkpoint_id=path, storage_writer=writer, no_dist=True
                )
                assert isinstance(response, AsyncSaveResponse)
                overwrite(tensors_in(state), 1)
                response.upload_completion.result(WAIT_S)
                for name in state:
                    state[name].copy_(host[name])
            else:
                state_dict_saver.save(state, checkpoint_id=path, storage_writer=writer, no_dist=True)
            assert_same(read_with_torch(path), host, str(turn))


def test_over_the_budget(tmp_path: Path) -> None:
    state: State = {f"t{number}": some(torch.float32, 3, MIB // 4) for number in range(12)}
    state |= {
        "larger than the budget": some(torch.float32, 30, MIB // 4),
        "transposed": some(torch.int16, 999, 5000).t(),
    }
    with Checkpointer(tmp_path, async_save=True, ckpt_host_memory=24 * MIB) as checkpointer:
        for step in range(3):
            expected = copied(state)
            handle = checkpointer.save(step, state)
            overwrite(tensors_in(state), step)
            assert handle.committed
            check(path_of(tmp_path, step), state, expected, thorough=False)
        assert used_bytes(checkpointer) == 0


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("within", [{0}, {0, 1, 2}, {1}, {3, 4}], ids=str)
def test_modes_of_torch(
    checkpointer: Checkpointer,
    tmp_path: Path,
    mode: Callable[[], AbstractContextManager[Any]],
    within: set[int],
) -> None:
    """What is kept of a save within a mode is used by those outside, and the other way round."""
    state: State = {f"t{number}": some(torch.float32, 100 * number) for number in range(40)}
    state |= {
        "columns": some(torch.float32, 500, 700)[:, 3:300],
        "large": some(torch.float32, 9, MIB // 4),
        "parameter": torch.nn.Parameter(some(torch.float32, 9)),
    }
    for step in range(6):
        expected = copied(state)
        with mode() if step in within else nullcontext():
            handle = checkpointer.save(step, state)
        overwrite(tensors_in(state), step)
        handle.result(WAIT_S)
        check(path_of(tmp_path, step), state, expected, thorough=False)


def test_two_saves_in_flight_never_mix(checkpointer: Checkpointer, tmp_path: Path) -> None:
    state: State = {f"t{number}": torch.zeros(MIB // 4 + number, device="cuda") for number in range(30)}
    state["host"] = torch.zeros(1000)
    for first in range(0, 8, 2):
        with held_back(checkpointer):
            for step in (first, first + 1):
                for tensor in state.values():
                    tensor.fill_(step)
                checkpointer.save(step, state)
            for tensor in state.values():
                tensor.fill_(77)
    checkpointer.wait()
    for step in range(8):
        expected = {name: torch.full(tensor.shape, float(step)) for name, tensor in state.items()}
        assert_same(read_with_torch(path_of(tmp_path, step)), expected, str(step))


def test_staged_is_told_when_the_copies_have_ended(checkpointer: Checkpointer) -> None:
    state: State = {"t": some(torch.float32, 40, MIB // 4), "small": some(torch.float32, 3)}
    checkpointer.prewarm(state).result(WAIT_S)
    for step in range(4):
        with held_back(checkpointer):
            busy()
            handle = checkpointer.save(step, state)
            if step:
                assert handle.blocked_s < 0.15
                assert not handle.staged
            wait_until_staged(handle)
            assert not handle.committed
        handle.result(WAIT_S)


def test_device_memory_is_let_go_once_it_was_copied(checkpointer: Checkpointer) -> None:
    def make() -> State:
        return {"t": some(torch.float32, 40, MIB // 4), "small": [some(torch.float32, 3) for _ in range(9)]}

    # Makes torch and the checkpointer allocate what they keep.
    checkpointer.save(0, make()).result(WAIT_S)
    gc.collect()
    baseline = torch.cuda.memory_allocated()
    state = make()
    for step in range(1, 5):
        if step == 4:
            with held_back(checkpointer):
                handle = checkpointer.save(step, state)
                del state
                wait_until_staged(handle)
                assert torch.cuda.memory_allocated() <= baseline + MIB
        else:
            checkpointer.save(step, state).result(WAIT_S)
    checkpointer.wait()


def test_a_failure_leaves_the_next_save_alone(checkpointer: Checkpointer, tmp_path: Path) -> None:
    state: State = {f"t{number}": some(torch.float32, 100 * number) for number in range(40)}
    state["large"] = some(torch.float32, 9, MIB // 4)
    for step in range(8):
        fails = step in (1, 4, 5)
        if fails:
            path_of(tmp_path, step).touch()
        expected = copied(state)
        handle = checkpointer.save(step, state)
        overwrite(tensors_in(state), step)
        if fails:
            with pytest.raises(WriteError, match="File exists"):
                handle.result(WAIT_S)
        else:
            handle.result(WAIT_S)
            check(path_of(tmp_path, step), state, expected, thorough=False)
    assert checkpointer.steps() == [0, 2, 3, 6, 7]


def test_planning_and_commit_allocate_no_memory_of_the_device(
    checkpointer: Checkpointer, tmp_path: Path
) -> None:
    state: State = {f"t{number}": some(torch.float32, 100 * number) for number in range(40)}
    state |= {f"large{number}": some(torch.float32, 9, MIB // 4) for number in range(3)}
    for step in range(3):
        checkpointer.save(step, state).result(WAIT_S)

    def allocations() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    before = allocations()
    for step in range(3, 6):
        state["step"] = step
        # Planned anew, for there is another entry each time.
        state[f"host{step}"] = torch.ones(1000)
        checkpointer.prewarm(state).result(WAIT_S)
        assert allocations() == before
    for step in range(6, 9):
        checkpointer.save(step, state).result(WAIT_S)
    before = allocations()
    checkpointer.save(9, state).result(WAIT_S)
    assert allocations() == before


@pytest.mark.parametrize("readers", [1, 3])
def test_an_optimizer_on_the_cpu(tmp_path: Path, readers: int) -> None:
    """Two ranks save, of one or two GPUs; others load."""
    script = Path(__file__).parent / "ranks" / "offloaded.py"
    for what, world in (("save", 2), ("load", readers)):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        done = subprocess.run(
            [sys.executable, *launch, str(script), what, str(tmp_path / "root")],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr

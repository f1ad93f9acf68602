"""What a save's caller holds of it; and tensors that are still copied: whatever changes them is noticed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from distckpt.checkpointer import Checkpointer
from distckpt.errors import CheckpointError, StagingError, WriteError
from distckpt.formats import Frame
from distckpt.handle import Late, SaveHandle
from distckpt.residence import late_copies
from distckpt.signature import View, version_of
from distckpt.staging import Item

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

COUNT = 700
"""Of tensors: more than are compared at once."""


class Planned:
    """What `Late` asks of a plan: every second leaf may be copied late."""

    def __init__(self) -> None:
        self.late_leaves = {leaf: 1000 + leaf for leaf in range(0, COUNT, 2)}

    def fqn(self, number: int) -> str:
        return f"t{number - 1000}"


class Copies:
    """What `Late` asks of copies that are still under way."""

    def __init__(self) -> None:
        self.num_waits = 0
        self.arrived = False
        self.differ: list[int] = []

    def has_arrived(self) -> bool:
        return self.arrived

    def order_after(self) -> None:
        self.num_waits += 1

    def changed(self) -> list[int]:
        return self.differ


def add(tensor: Any) -> None:
    tensor.add_(1)


def add_locally(tensor: Any) -> None:
    (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(1)


@pytest.mark.parametrize("by_guard", [True, False])
@pytest.mark.parametrize("known", [True, False], ids=["compared", "first"])
@pytest.mark.parametrize("change", [add, add_locally])
@pytest.mark.parametrize("at", [0, 1, 3, 4, 510, 512, 514, 698, 699])
def test_the_tensor_that_changed_is_named(
    mesh: DeviceMesh, at: int, change: Callable[[Any], None], *, known: bool, by_guard: bool
) -> None:
    """Every third is a DTensor."""
    state = {
        f"t{leaf}": torch.zeros(2) if leaf % 3 else DTensor.from_local(torch.zeros(2), mesh)
        for leaf in range(COUNT)
    }
    view, planned, copies = View(state), Planned(), Copies()
    versions = list(map(version_of, view.locals)) if known else []
    late = Late(planned, view, versions, copies)  # type: ignore[arg-type]
    change(state[f"t{at}"])
    if by_guard:
        late.guard()
        assert copies.num_waits == 1
        # What happens after it is no matter.
        change(state["t2"])
    if at % 2:
        late.check()
    else:
        with pytest.raises(StagingError, match=f"'t{at}' was changed .*guard"):
            late.check()


def test_what_only_digests_tell_fails_the_save_after_a_guard_as_well(mesh: DeviceMesh) -> None:
    weight = DTensor.from_local(torch.zeros(2), mesh)
    copies = Copies()
    late = Late(Planned(), View({"t0": weight}), [], copies)  # type: ignore[arg-type]
    torch._foreach_add_([weight], 1)
    late.guard()
    copies.differ = [1000]
    with pytest.raises(StagingError, match="'t0' was changed"):
        late.check()


def test_who_changes_tensors_on_another_stream_waits_as_well() -> None:
    """Until the copies have ended; what they belong to may be used again then."""
    tensor, copies = torch.zeros(2), Copies()
    late = Late(Planned(), View({"t0": tensor}), [], copies)  # type: ignore[arg-type]
    for number in range(1, 4):
        late.guard()
        assert (copies.num_waits, late.is_over) == (number, False)
        tensor.add_(1)
    copies.arrived = True
    late.guard()
    assert (copies.num_waits, late.is_over) == (3, True)
    copies.arrived = False
    late.guard()
    assert copies.num_waits == 3
    late.check()


def test_a_save_that_ended_is_waited_for_no_more() -> None:
    copies = Copies()
    late = Late(Planned(), View({"t0": torch.zeros(2)}), [], copies)  # type: ignore[arg-type]
    late.end()
    late.guard()
    assert (copies.num_waits, late.is_over) == (0, True)


@pytest.mark.parametrize(("second", "expected"), [("cuda:0", {0, 2}), ("cuda:1", set()), ("cpu", {0})])
def test_what_is_copied_late(second: str, expected: set[int]) -> None:
    """Nothing where it lies on several devices."""
    with FakeTensorMode():
        tensors = [torch.empty(5, device="cuda:0"), torch.empty(0, device="cuda:0")]
        tensors.append(torch.empty(5, device=second))
        items = [Item(Frame(b"", b""), tensor, tensor.nbytes, True) for tensor in tensors]
        assert late_copies(items, [0, 1, 2]) == expected


# What its caller holds of a save.

WAITS: dict[str, Callable[[SaveHandle, float], object]] = {
    "result": lambda handle, timeout_s: handle.result(timeout_s),
    "committed": lambda handle, timeout_s: handle.committed.result(timeout_s),
    "staged": lambda handle, timeout_s: handle.staged.result(timeout_s),
}


def failure() -> CheckpointError:
    return WriteError("no space")


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_who_waits_in_vain_has_not_been_told(wait: Callable[[SaveHandle, float], object]) -> None:
    handle = SaveHandle(7, "there")
    with pytest.raises(TimeoutError, match=r"step 7 is not \w+ after 0.001 s"):
        wait(handle, 0.001)
    assert not handle._is_asked
    handle._future.set_exception(failure())
    assert not handle._is_asked
    with pytest.raises(WriteError, match="no space"):
        wait(handle, 0)
    assert handle._is_asked


def test_who_is_interrupted_has_not_been_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(timeout: float | None) -> str:
        raise KeyboardInterrupt

    handle = SaveHandle(7, "there")
    with monkeypatch.context() as interrupted:
        interrupted.setattr(handle._future, "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            handle.result()
    assert not handle._is_asked


@pytest.mark.parametrize("hears", ["save", "close"])
def test_a_failure_after_a_wait_in_vain_is_heard_of(tmp_path: Path, hears: str) -> None:
    (tmp_path / "step-00000001").write_bytes(b"in the way")
    gate = threading.Event()
    checkpointer = Checkpointer(tmp_path, async_save=True)
    checkpointer._thread.submit(gate.wait, 10)
    handle = checkpointer.save(1, {"x": torch.ones(4)})
    with pytest.raises(TimeoutError):
        handle.result(0.001)
    gate.set()
    futures.wait([handle._future], 10)
    # The thread is through with it.
    checkpointer._thread.submit(int).result(10)
    with pytest.raises(CheckpointError, match="step-00000001"):
        checkpointer.save(2, {"x": torch.ones(4)}) if hears == "save" else checkpointer.close()
    checkpointer.close()


def test_a_wait_in_vain_is_the_timeout_error_that_everybody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older(Exception):
        """The one of `concurrent.futures`, before Python 3.11."""

    def time_out(timeout: float | None) -> str:
        raise Older

    handle = SaveHandle(7, "there")
    monkeypatch.setattr(futures, "TimeoutError", Older)
    monkeypatch.setattr(handle._future, "result", time_out)
    with pytest.raises(TimeoutError, match="step 7"):
        handle.result(1)


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_forked_child_does_not_wait(wait: Callable[[SaveHandle, float], object]) -> None:
    handle = SaveHandle(7, "there")
    owner_pid = os.getpid()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            wait(handle, 0.1)
        except CheckpointError as error:
            status = 0 if f"step 7 belongs to process {owner_pid}" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not handle._is_asked

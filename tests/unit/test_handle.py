"""Tensors that are still copied when a save has returned: whatever changes them too early is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from distckpt.errors import StagingError
from distckpt.formats import Frame
from distckpt.handle import Late
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

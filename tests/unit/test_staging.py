"""Copies into the arena: every kind of tensor, any part of a file, and who holds what for how long."""

from __future__ import annotations

import collections
import collections.abc
import ctypes
import gc
import io
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from distckpt.arena import PAGE_BYTES, Arena
from distckpt.device import Devices, Transfer
from distckpt.errors import StagingError
from distckpt.formats import Frame, lay_out, open_format
from distckpt.image import lay_out_image
from distckpt.staging import CopyTicket, HostCopy, Item, Stager, StagingFailure, is_dense, is_raw, is_verbatim
from unit.tensors import memory_of, payload_of, tensors

MIB = 1 << 20
FORMAT = open_format("torch_dist")


@pytest.fixture
def stager() -> Iterator[Stager]:
    arena = Arena(32 * MIB)
    opened = Stager(arena, FORMAT, 5.0)
    yield opened
    opened.close()
    arena.close()


@given(tensors())
def test_dense_is_without_holes_and_overlaps(tensor: torch.Tensor) -> None:
    if tensor.numel() == 0:
        return
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = (places.unsqueeze(-1) + torch.arange(size) * stride).flatten()
    assert is_dense(tensor) == (sorted(places.tolist()) == list(range(tensor.numel())))
    assert is_verbatim(tensor) == (is_dense(tensor) and not tensor.is_conj() and not tensor.is_neg())


def two_of(left: torch.Tensor, right: torch.Tensor) -> Any:
    """Return a wrapper subclass around two tensors."""
    make: Any = TwoTensor
    return make(left, right)


class OddTensor(torch.Tensor):
    """A subclass that is plain memory all the same."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_plain_memory_is_told_from_the_rest() -> None:
    dense = torch.ones(4, 4)
    plain = [
        dense,
        torch.nn.Parameter(dense),
        dense.t(),
        dense[:0],
        dense.as_subclass(OddTensor),
        dense.conj(),
    ]
    other = [
        dense.to_sparse(),
        torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([dense]),
        two_of(dense, dense),
    ]
    assert [is_raw(tensor) for tensor in plain] == [True] * len(plain)
    assert [is_raw(tensor) for tensor in other] == [False] * len(other)


def filled(stager: Stager, items: list[Item], low: int, high: int) -> tuple[bytes, list[HostCopy], int]:
    """Fill that part of the file of `items`; returns it, what `refill` takes, and where it is."""
    target = stager._arena.try_reserve(high - low + 2 * PAGE_BYTES)
    assert target is not None
    address = stager._arena.address(target)
    ctypes.memset(address, 0xAA, target.nbytes)
    [file] = lay_out_image([item.size for item in items], 1, 1 << 30).files
    transfer = Transfer(stager.devices)
    host = stager.fill(items, file, low, high, address + PAGE_BYTES, (transfer, transfer))
    assert transfer.is_empty
    # Not a byte before it or after it.
    assert ctypes.string_at(address, PAGE_BYTES) == b"\xaa" * PAGE_BYTES
    assert ctypes.string_at(address + PAGE_BYTES + high - low, 64) == b"\xaa" * 64
    return ctypes.string_at(address + PAGE_BYTES, high - low), host, address + PAGE_BYTES


def whole_of(items: list[Item]) -> bytes:
    """Return the file of `items`, put together without the stager."""
    layout = lay_out([item.size for item in items])
    whole = bytearray(layout.nbytes)
    for item, offset in zip(items, layout.offsets, strict=True):
        payload = b""
        if item.tensor is not None and item.nbytes:
            payload = memory_of(item.tensor) if item.verbatim else payload_of(item.tensor)
        framed = item.frame.prefix + payload + item.frame.suffix
        assert len(framed) == item.size
        whole[offset : offset + item.size] = framed
    return bytes(whole)


@given(st.lists(tensors(), min_size=1, max_size=6), st.data())
def test_any_part_of_a_file_is_what_the_whole_has_there(
    parts: list[torch.Tensor], data: st.DataObject
) -> None:
    arena = Arena(4 * MIB)
    stager = Stager(arena, FORMAT, 5.0)
    try:
        items = [stager.item(part) for part in parts]
        items.insert(len(items) // 2, Item(Frame(b"literal" * 30, b"")))
        whole = whole_of(items)
        layout = lay_out([item.size for item in items])
        for item, offset in zip(items, layout.offsets, strict=True):
            if item.tensor is not None:
                framed = whole[offset : offset + item.size]
                assert torch.equal(torch.load(io.BytesIO(framed), weights_only=True), item.tensor)
        low = data.draw(st.integers(0, len(whole) // PAGE_BYTES)) * PAGE_BYTES
        high = data.draw(st.integers(low, len(whole)))
        assert filled(stager, items, low, high)[0] == whole[low:high]
    finally:
        arena.close()


LARGER = st.sampled_from([
    torch.empty(0, 5),
    torch.arange(20_000.0),
    torch.arange(300_000.0),
    torch.arange(2_400_000, dtype=torch.int16),
    torch.arange(90_000.0).reshape(300, 300).t(),
    torch.arange(90_000.0).reshape(300, 300)[:, ::2],
    torch.arange(1_200_000.0).reshape(600, 2000)[:, 3:],
    torch.arange(40_000).to(torch.complex64).conj(),
])  # fmt: skip
"""What is not joined with its neighbours, copied as a whole or in several parts."""


@given(st.lists(st.one_of(tensors(), LARGER), min_size=1, max_size=5), st.booleans(), st.data())
def test_what_changed_is_filled_anew(parts: list[torch.Tensor], in_two: bool, data: st.DataObject) -> None:
    arena = Arena(64 * MIB)
    stager = Stager(arena, FORMAT, 5.0)
    try:
        items = [stager.item(part) for part in parts]
        items.insert(data.draw(st.integers(0, len(items))), Item(Frame(b"before" * 30, b"")))
        whole = whole_of(items)
        cut = data.draw(st.integers(0, len(whole) // PAGE_BYTES)) * PAGE_BYTES if in_two else 0
        pieces = [filled(stager, items, low, high) for low, high in ((0, cut), (cut, len(whole)))]
        assert b"".join(piece[0] for piece in pieces) == whole
        changed = []
        for item in items:
            if item.tensor is None:
                changed.append(Item(Frame(b"after!" * 30, b"")))
                continue
            # As the trainer's next step does, in place or not.
            other = torch.empty_strided(item.tensor.shape, item.tensor.stride(), dtype=item.tensor.dtype)
            other = other if item.verbatim else torch.empty_like(item.tensor.resolve_conj())
            torch.nn.init.constant_(other, 1) if other.is_floating_point() else other.fill_(1)
            changed.append(Item(item.frame, other, item.nbytes, item.verbatim))
        for _, host, _ in pieces:
            stager.refill(dict(enumerate(changed)), host)
        found = b"".join(
            ctypes.string_at(address, high - low)
            for (_, _, address), (low, high) in zip(pieces, ((0, cut), (cut, len(whole))), strict=True)
        )
        assert found == whole_of(changed)
    finally:
        arena.close()


def test_what_was_filled_is_let_go_with_its_item(stager: Stager) -> None:
    tensor = torch.arange(1000)
    item = stager.item(tensor)
    gone = weakref.ref(tensor)
    del tensor
    _, host, _ = filled(stager, [item], 0, item.size)
    assert host
    item.tensor = None
    assert gone() is None


class Pair(NamedTuple):
    left: torch.Tensor
    right: object


class Thing:
    def __init__(self) -> None:
        self.values = [1, 2]


def state() -> dict[str, Any]:
    shared = torch.arange(4.0)
    return {
        "plain": shared,
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "nested": {"list": [torch.zeros(2), {"deep": torch.ones(1)}], "tuple": (torch.ones(2), 5)},
        "named": Pair(torch.ones(2), "right"),
        "ordered": collections.OrderedDict(a=torch.ones(2)),
        "thing": Thing(),
        "numbers": [1, 2.5, None, True, "text", b"bytes"],
        "view": shared[1:],
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 5),
        "wrapper": two_of(torch.ones(2), torch.zeros(2)),
        "sparse": torch.eye(3).to_sparse(),
    }


def test_a_staged_state_is_a_copy_of_the_same_structure(stager: Stager) -> None:
    original = state()
    staged, ticket = stager.stage(original)
    assert ticket.done()
    for value in (
        original["plain"],
        original["nested"]["list"][0],
        original["named"].left,
        original["scalar"],
    ):
        value.fill_(99)
    original["parameter"].data.fill_(99)
    original["wrapper"].a.fill_(99)
    original["thing"].values.append(99)
    original["numbers"].append(99)
    expected = state()
    assert torch.equal(staged["plain"], expected["plain"])
    assert torch.equal(staged["view"], expected["view"])
    assert torch.equal(staged["parameter"], torch.ones(3))
    assert type(staged["parameter"]) is torch.nn.Parameter
    assert torch.equal(staged["nested"]["list"][0], torch.zeros(2))
    assert torch.equal(staged["nested"]["list"][1]["deep"], torch.ones(1))
    assert type(staged["nested"]["tuple"]) is tuple
    assert type(staged["named"]) is Pair
    assert torch.equal(staged["named"].left, torch.ones(2))
    assert type(staged["ordered"]) is collections.OrderedDict
    assert staged["thing"].values == [1, 2]
    assert staged["numbers"] == expected["numbers"]
    assert torch.equal(staged["transposed"], expected["transposed"])
    assert staged["scalar"] == 3
    assert staged["empty"].shape == (0, 5)
    assert type(staged["wrapper"]) is TwoTensor
    assert torch.equal(staged["wrapper"].a, torch.ones(2))
    assert torch.equal(staged["sparse"].to_dense(), torch.eye(3))


def test_staged_items_are_found_where_they_were_staged(stager: Stager) -> None:
    tensors = {f"weight{number}": torch.full((number,), number) for number in range(1, 50)}
    staged, _ = stager.stage(tensors)
    for name, tensor in tensors.items():
        item = stager.item(staged[name])
        assert item.home is not None
        slab, offset = item.home
        data = ctypes.string_at(stager._arena.slabs[slab].address + offset, item.size)
        assert torch.equal(torch.load(io.BytesIO(data), weights_only=True), tensor)
    # A part of it, or another view of it, is another item.
    assert stager.item(staged["weight9"][1:]).home is None
    assert stager.item(staged["weight9"][:5]).home is None
    assert stager.item(staged["weight8"].view(2, 4)).home is None
    assert stager.item(torch.ones(3)).home is None


def test_the_memory_goes_with_the_last_staged_tensor(stager: Stager) -> None:
    arena = stager._arena
    staged, ticket = stager.stage({"a": torch.ones(1000), "b": torch.ones(1000)})
    arena._take_back()
    free = arena._left()
    last = staged["b"]
    gc.disable()
    try:
        del staged, ticket
        arena._take_back()
        assert arena._left() == free
        assert torch.equal(last, torch.ones(1000))
        del last
        arena._take_back()
        assert arena._left() == arena.budget_bytes
    finally:
        gc.enable()


def test_staged_tensors_outlive_the_arena() -> None:
    arena = Arena(32 * MIB)
    stager = Stager(arena, FORMAT, 5.0)
    staged, _ = stager.stage({"a": torch.arange(1000)})
    stager.close()
    arena.close()
    assert torch.equal(staged["a"], torch.arange(1000))


def test_what_cannot_be_staged_is_named(stager: Stager) -> None:
    with pytest.raises(StagingError, match=r"cannot copy nested\.0 \(lock\)"):
        stager.stage({"nested": [threading.Lock()]})
    with pytest.raises(StagingError, match=r"weight is on the meta device"):
        stager.stage({"weight": torch.ones(3, device="meta")})
    with pytest.raises(StagingError, match="meta device"):
        stager.item(torch.ones(3, device="meta"))
    with pytest.raises(StagingError, match=r"--ckpt-host-memory, or save with dcp\.save"):
        stager.stage({"weight": torch.ones(32 * MIB)})
    stager._arena._take_back()
    assert stager._arena._left() == stager._arena.budget_bytes


def test_a_staging_failure_raises_where_the_plan_is_made() -> None:
    raised: list[bool] = []
    error = StagingError("it does not fit")
    failure = StagingFailure(error, lambda: raised.append(True))
    with pytest.raises(StagingError, match="it does not fit"):
        failure.__create_write_items__("fqn", failure)
    assert raised == [True]


def test_a_ticket_is_done_when_its_word_says_so() -> None:
    transfer = Transfer(Devices())
    transfer.begin()
    word = ctypes.c_int64(0)
    kept = [torch.ones(1)]
    given_back: list[ctypes.c_int64] = []
    ticket = CopyTicket(transfer, word, kept, given_back.append)
    assert not ticket.done()
    assert kept
    threading.Timer(0.05, setattr, (word, "value", transfer.tag)).start()
    ticket.wait(5)
    assert ticket.done()
    assert not kept
    assert given_back == [word]


def test_a_wait_for_copies_has_an_end() -> None:
    transfer = Transfer(Devices())
    transfer.begin()
    lost: list[bool] = []
    ticket = CopyTicket(transfer, ctypes.c_int64(0), [torch.ones(1)], lambda word: None)
    ticket.on_loss = lambda: lost.append(True)
    with pytest.raises(StagingError, match="has not ended within 0 s"):
        ticket.wait(0.01)
    assert lost == [True]


class Registry(collections.abc.MutableMapping[str, Any]):
    """A mapping whose shallow copy shares its entries."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self._entries = entries

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._entries[key] = value

    def __delitem__(self, key: str) -> None:
        del self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def test_the_mapping_of_the_trainer_keeps_its_tensors(stager: Stager) -> None:
    tensor = torch.ones(3)
    registry = Registry({"weight": tensor})
    staged, _ = stager.stage({"registry": registry})
    assert registry["weight"] is tensor
    assert staged["registry"]["weight"] is not tensor


@pytest.mark.parametrize("numel", [4, 4 * MIB])
def test_a_tensor_whose_storage_was_freed_is_refused(stager: Stager, numel: int) -> None:
    tensor = torch.ones(numel)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(StagingError, match="it was freed"):
        stager.item(tensor)
    with pytest.raises(StagingError, match=r"model\.weight: .* it was freed"):
        stager.stage({"model": {"weight": tensor}})


def test_the_default_device_of_the_caller_does_not_matter(stager: Stager) -> None:
    tensor = torch.arange(77.0)
    with torch.device("meta"):
        # A shape that no template was made for yet.
        staged, _ = stager.stage({"weight": tensor})
        item = stager.item(staged["weight"])
    assert torch.equal(staged["weight"], tensor)
    data = bytearray(item.frame.prefix + payload_of(tensor) + item.frame.suffix)
    assert torch.equal(torch.load(io.BytesIO(data), weights_only=True), tensor)
    with torch.device("meta"):
        assert FORMAT.decode(data, tensor.dtype, tensor.shape).device.type == "cpu"


def test_what_is_staged_in_inference_mode_can_be_revoked(stager: Stager) -> None:
    with torch.inference_mode():
        staged, _ = stager.stage({"weight": torch.ones(5)})
    [lease] = stager._live_leases()
    lease.revoke()
    assert staged["weight"].numel() == 0


def test_a_revoked_tensor_does_not_free_what_a_save_is_writing(stager: Stager) -> None:
    staged, _ = stager.stage({"weight": torch.ones(5)})
    item = stager.item(staged["weight"])
    [lease] = stager._live_leases()
    lease.revoke()
    del lease, staged
    gc.collect()
    assert len(stager._live_leases()) == 1
    assert item.tensor is not None
    assert torch.equal(item.tensor, torch.ones(5))


def test_a_state_that_fails_half_way_gives_its_memory_back(
    stager: Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    stager.stage({"weight": torch.ones(5)})
    gc.collect()
    stager._arena._take_back()
    free = stager._arena._left()

    def fail(*_: Any) -> torch.Tensor:
        raise MemoryError("no memory for a piece")

    with monkeypatch.context() as patched:
        patched.setattr("distckpt.staging.host_view", fail)
        patched.setattr("distckpt.staging.flat_bytes", fail)
        with pytest.raises(MemoryError):
            stager.stage({"first": torch.ones(4 * MIB), "second": torch.ones(7)})
    gc.collect()
    stager._arena._take_back()
    assert stager._arena._left() == free


def test_a_state_lies_in_whatever_stretches_are_free(stager: Stager) -> None:
    arena = stager._arena
    taken = [arena.reserve(2 * MIB, timeout_s=1, want_bytes=20 * MIB) for _ in range(8)]
    for one in taken[::2]:
        arena.release(one)
    tensors = {f"weight{number}": torch.arange(number * 9000.0) for number in range(1, 29)}
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert total > 12 * MIB
    staged, ticket = stager.stage(tensors)
    ticket.wait(5)
    [lease] = stager._live_leases()
    assert len(lease._ranges) > 2
    # Not much more than that is held.
    assert sum(one.nbytes for one in lease._ranges) < total + MIB
    for name, tensor in tensors.items():
        item = stager.item(staged[name])
        assert item.home is not None
        slab, offset = item.home
        data = ctypes.string_at(arena.slabs[slab].address + offset, item.size)
        assert torch.equal(torch.load(io.BytesIO(data), weights_only=True), tensor)
        assert any(
            one.slab == slab and one.offset <= offset and offset + item.size <= one.offset + one.nbytes
            for one in lease._ranges
        )
        del item
    del staged, ticket, lease
    for one in taken[1::2]:
        arena.release(one)
    gc.collect()
    arena._take_back()
    assert arena._left() == arena.budget_bytes


def test_quarantined_memory_is_never_handed_out_again(
    stager: Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distckpt.staging._LOST_SLABS", [])
    staged, _ = stager.stage({"weight": torch.ones(6 * MIB)})
    free = stager._arena._left()
    [lease] = stager._live_leases()
    lease.quarantine()
    del lease, staged
    gc.collect()
    stager._arena.reserve(PAGE_BYTES, timeout_s=1)
    assert stager._arena._left() == free - PAGE_BYTES

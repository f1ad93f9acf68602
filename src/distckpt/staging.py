"""Device to host: tensors straight to their place in the arena, framed as they will stand in their file.

Two ways in. `Stager.fill` materialises a range of a file image whose plan is known (`dcp.save`). When there
is no plan yet (`dcp.async_save`), `Stager.stage` copies the whole local state as self-contained framed items;
the tensors that it returns view the arena, and the plan later finds the items by their address.

Invariants:
    * What was staged holds the values of the call; CUDA streams are ordered by events in both directions, and
      nothing synchronises a device.
    * References to CUDA tensors are held until the copy has ended, then dropped.
    * Only plain memory is copied raw: wrapper subclasses and unusual layouts are left to torch.save.

Threads: `fill` is called by one thread at a time (the engine's lock), `stage` and `CopyTicket` by any.
"""

from __future__ import annotations

import bisect
import copy
import ctypes
import gc
import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distckpt.arena import PAGE_BYTES, Arena, Range, Slab, align
from distckpt.device import (
    GATHERED_BYTES,
    Devices,
    Transfer,
    contiguous_span,
    flat_bytes,
    host_view,
    refuse_capture,
)
from distckpt.errors import StagingError
from distckpt.formats import LARGE_ALIGNMENT, Format, Frame, contiguous_strides, lay_out
from distckpt.threads import Threads

if TYPE_CHECKING:
    from typing import NoReturn

    from distckpt.formats import Entry
    from distckpt.image import ImageFile

_LOG = logging.getLogger(__name__)
_LOST_SLABS: list[Slab] = []
"""Slabs to which a copy that nobody waits for any more may write: mapped until the process ends."""
_MEMMOVE_BYTES = 1 << 20
"""Above this, torch's copy, whose threads have nothing else to do, is faster than memmove."""
_SMALL_BYTES = 64 << 10
_RUN_BYTES = 1 << 20
_PADDING = bytes(LARGE_ALIGNMENT)
_WORDS = PAGE_BYTES // 8
_READERS = 8
"""How many ranges of sources are read at once."""
_POLL_S = 0.0005
_PICK_UP_S = 1.0
"""A save thread that exists asks for what was staged within this."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class Source(Protocol):
    """Bytes that are not in memory yet: they are read when there is room for them, in whatever order."""

    def read_into(self, low: int, high: int, target: memoryview) -> None:
        """Fill `target` with bytes [low, high); called by several threads at once.

        Raises:
            CheckpointError: They cannot be read.
        """


class Item:
    """One item of a file: literal bytes around the payload of a tensor, or literal bytes alone.

    Args:
        frame: Bytes before and after the payload.
        tensor: Detached tensor of any device that holds the payload; None for literal bytes.
        nbytes: Size of the payload.
        verbatim: Whether the payload is the tensor's memory as it lies; else it is made contiguous.
        home: (slab, offset) at which the whole framed item lies in the arena already, or None.
        source: Holds the payload in place of a tensor.

    Attributes:
        entry: What its file says of it; None if that is nothing, or for what is put aside.
        size: Bytes of the item in its file, framing included.
    """

    __slots__ = ("entry", "frame", "home", "nbytes", "size", "source", "tensor", "verbatim")

    def __init__(
        self,
        frame: Frame,
        tensor: torch.Tensor | None = None,
        nbytes: int = 0,
        verbatim: bool = True,
        home: tuple[int, int] | None = None,
        source: Source | None = None,
    ) -> None:
        self.source = source
        self.entry: Entry | None = None
        self.frame = frame
        self.tensor = tensor
        self.nbytes = nbytes
        self.verbatim = verbatim
        self.home = home
        self.size = len(frame.prefix) + nbytes + len(frame.suffix)


def is_raw(tensor: torch.Tensor) -> bool:
    """Say whether the values of `tensor` are plain memory that may be copied as bytes.

    Wrapper subclasses have no memory of their own (their data_ptr is 0 or raises); sparse, quantized and
    nested tensors are more than their bytes.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return False
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return True
    if _is_wrapper(tensor):
        return False
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:
        return False


def _is_wrapper(tensor: torch.Tensor) -> bool:
    # torch states this as a TypeIs of a class that mypy takes for impossible.
    return bool(is_traceable_wrapper_subclass(tensor))


def is_dense(tensor: torch.Tensor) -> bool:
    """Say whether `tensor` fills its span of memory without holes or overlaps, in whatever order of dims."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def is_verbatim(tensor: torch.Tensor) -> bool:
    """Say whether the memory of `tensor`, as it lies, is what a file may hold of it."""
    return is_dense(tensor) and not tensor.is_conj() and not tensor.is_neg()


def _check_memory(tensor: torch.Tensor, nbytes: int, verbatim: bool) -> None:
    """Refuse a tensor whose storage was freed under it, as FSDP frees unsharded parameters.

    Raises:
        StagingError: Its storage holds less than it claims.
    """
    held = tensor.untyped_storage().nbytes()
    if nbytes and held < (nbytes if verbatim else 1):
        raise StagingError(f"the tensor claims {nbytes} bytes and its storage holds {held}: it was freed")


class StagingFailure:
    """Stands in a staged state for the error that kept the state from being staged.

    A rank that fails alone before the first gather would leave the others waiting for it. This object raises
    while the rank makes its local plan, where torch carries the error to all of them.

    Args:
        error: What happened.
        on_raise: Called before the error is raised.
    """

    def __init__(self, error: StagingError, on_raise: Callable[[], None]) -> None:
        self.error = error
        self._on_raise = on_raise

    def __create_write_items__(self, fqn: str, value: object) -> NoReturn:
        """Raise the error; torch's planners call this for every object that has it."""
        self._on_raise()
        raise self.error


class CopyTicket:
    """The end of a transfer, seen in host memory: no thread asks CUDA for it.

    Args:
        transfer: What was launched.
        word: Tells when it has arrived; None if there is nothing to wait for.
        keep: Tensors that the copies read.
        give_back: Called with `word` once the copies have ended.
        memory: What keeps the word mapped.
    """

    def __init__(
        self,
        transfer: Transfer,
        word: ctypes.c_int64 | None,
        keep: list[torch.Tensor],
        give_back: Callable[[ctypes.c_int64], None],
        memory: object = None,
    ) -> None:
        self._transfer = transfer
        self._word = word
        self._keep = keep
        self._give_back = give_back
        self._memory = memory
        self.on_loss: Callable[[], object] = lambda: None
        """Called if the wait for the copies is given up: they may still write where they go."""

    @property
    def began_s(self) -> float:
        """When the copies were launched, by `time.monotonic()`."""
        return self._transfer.began_s

    def done(self) -> bool:
        """Say whether every copy has ended; if so, the tensors that were copied are let go."""
        if self._word is not None:
            if self._word.value != self._transfer.tag:
                return False
            self._give_back(self._word)
            self._word = None
            self._transfer.forget()
        self._keep.clear()
        return True

    def wait(self, timeout_s: float) -> None:
        """Wait until `done`.

        Raises:
            StagingError: CUDA reports an error, or the copies took longer than `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        pause = threading.Event()
        while not self.done():
            if time.monotonic() > deadline:
                self.on_loss()
                self._transfer.check()
                raise StagingError(f"the copy off the device has not ended within {timeout_s:.0f} s")
            pause.wait(_POLL_S)


class StagedUse:
    """Who works on a staged state: torch's save thread asks for it first of all, and ends with its save."""

    def __init__(self) -> None:
        self._stager = threading.current_thread()
        self._staged_at = time.monotonic()
        self._askers: set[threading.Thread] = set()
        self._ended = False
        self.completer: threading.Thread | None = None
        """The thread that completes the state, and so runs torch's callbacks, which ask for it too."""

    def ask(self) -> None:
        """Note that the current thread asks for the state."""
        if threading.current_thread() is not self.completer:
            self._askers.add(threading.current_thread())

    def end(self) -> None:
        """Note that a save on the current thread has ended."""
        self._ended = self._ended or threading.current_thread() in self._askers

    @property
    def awaits_save(self) -> bool:
        """Whether a thread saves the state, or may be about to."""
        askers = self._askers.copy()
        if not askers:
            return time.monotonic() - self._staged_at < _PICK_UP_S
        return not self._ended and any(t.is_alive() for t in askers if t is not self._stager)

    @property
    def is_over(self) -> bool:
        """Whether all threads that have asked for the state, and the stager is none of them, have ended."""
        askers = self._askers.copy()
        return bool(askers) and self._stager not in askers and not any(t.is_alive() for t in askers)


class _Home(NamedTuple):
    """A staged tensor: what it is, how it is framed, and where the framed item lies in the arena."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    frame: Frame
    slab: int
    offset: int


class HostCopy(NamedTuple):
    """Bytes [low, high) of an item's payload, or of its literals if it has none, that go to `address`."""

    item: int
    low: int
    high: int
    address: int


class Lease:
    """Arena memory under staged tensors; given back when the last of them is gone.

    Args:
        arena: Where the memory is from.
        use: Who works on the tensors.
    """

    def __init__(self, arena: Arena, use: StagedUse) -> None:
        self._arena = arena
        self._ranges: list[Range] = []
        self.use = use
        self.tensors: list[weakref.ref[torch.Tensor]] = []
        # An arena may be closed while staged tensors are alive: they keep their slabs mapped.
        self._slabs: list[Slab] = []
        self.items: dict[int, _Home] = {}

    def add(self, taken: Range) -> None:
        """Take charge of `taken`."""
        self._ranges.append(taken)
        self._slabs.append(self._arena.slabs[taken.slab])

    def trim(self, nbytes: int) -> None:
        """Give back what the last range holds beyond `nbytes`."""
        slab, offset, held = self._ranges[-1]
        used = align(nbytes, PAGE_BYTES)
        if used < held:
            self._ranges[-1] = Range(slab, offset, used)
            self._arena.release(Range(slab, offset + used, held - used))

    def quarantine(self) -> None:
        """Never give the memory back: a copy off the device may still write to it."""
        _LOST_SLABS.extend(self._slabs)
        self._ranges.clear()

    def revoke(self) -> None:
        """Take the memory from the tensors that are still alive; they are empty afterwards."""
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
        with torch.no_grad():
            for reference in self.tensors:
                tensor = reference()
                if tensor is not None:
                    tensor.set_(nothing, 0, (0,), (1,))

    def __del__(self) -> None:
        for taken in self._ranges:
            self._arena.release(taken)


class Stager:
    """Copies tensors and framing into the arena.

    Args:
        arena: Where to.
        file_format: Frames the items.
        timeout_s: Seconds that any wait may take.
    """

    def __init__(self, arena: Arena, file_format: Format, timeout_s: float) -> None:
        self._arena = arena
        # A save that was staged still needs memory for what is no tensor, or it would wait for its own end.
        self._spare_bytes = arena.spare_bytes
        self._frame = file_format.frame
        self._keeps_strides = file_format.keeps_strides
        self._timeout_s = timeout_s
        self.devices = Devices()
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._words: deque[ctypes.c_int64] = deque()
        self._word_home: Range | None = None
        self._word_lock = threading.Lock()
        self._lease_lock = threading.Lock()
        self._readers: Threads | None = None
        self._reads: list[Future[None]] = []

    def item(self, data: torch.Tensor) -> Item:
        """Frame a raw tensor; if it was staged, the item is where it was staged.

        Args:
            data: Tensor for which `is_raw` holds, of any device and strides.

        Raises:
            StagingError: It has no values: it is on the meta device, or its storage was freed.
        """
        if data.is_meta:
            raise StagingError("a tensor is on the meta device and has no values to save")
        if data.requires_grad:
            data = data.detach()
        nbytes = data.nbytes
        verbatim = self._is_verbatim(data)
        _check_memory(data, nbytes, verbatim)
        strides = data.stride() if verbatim else contiguous_strides(data.shape)
        if self._leases and nbytes and verbatim and data.is_cpu:
            address = data.data_ptr()
            for lease in self._live_leases():
                found = lease.items.get(address)
                if found is not None and found[:3] == (data.dtype, data.shape, strides):
                    # Detached: an owner of the memory that no revocation reaches.
                    return Item(found.frame, data.detach(), nbytes, True, (found.slab, found.offset))
        return Item(self._frame(data.dtype, data.shape, strides), data, nbytes, verbatim)

    def _is_verbatim(self, tensor: torch.Tensor) -> bool:
        return is_verbatim(tensor) and (self._keeps_strides or tensor.is_contiguous())

    def use_devices(self, devices: set[torch.device]) -> None:
        """Get ready for copies off `devices`; slabs are pinned from now on, those that there are at once."""
        if devices:
            refuse_capture()
        for device in devices:
            self.devices.use(device, list(self._arena.slabs.values()))

    def fill(
        self,
        items: Sequence[Item],
        file: ImageFile,
        low: int,
        high: int,
        address: int,
        transfers: Sequence[Transfer],
        late: Container[int] = (),
        *,
        spread: bool = True,
    ) -> list[HostCopy]:
        """Materialise bytes [low, high) of a file image: host bytes now, device bytes with the transfers.

        Args:
            items: All items of the plan.
            file: The file; what is filled of it is not staged yet.
            low: First byte of the file to materialise.
            high: Byte after the last.
            address: Where to, in the arena.
            transfers: Take what lies on devices; the second, what is in `late`.
            late: Numbers of items.
            spread: Whether torch's threads may help; see `_copy_on_host`.

        Returns:
            What was copied on the host and is not the same every time.
        """
        host: list[HostCopy] = []
        base = address - low
        position = low
        if low < len(file.header):
            literal = file.header[low:high]
            ctypes.memmove(address, literal, len(literal))
            position += len(literal)
        small = _SmallRun(base)
        offsets = file.offsets
        for place in range(max(0, bisect.bisect_right(offsets, low) - 1), len(offsets)):
            start = offsets[place]
            if start >= high:
                break
            index = file.items[place]
            item = items[index]
            tensor = item.tensor
            whole = start >= low and start + item.size <= high
            if whole and item.size <= GATHERED_BYTES and item.verbatim and item.source is None:
                if tensor is None or (tensor.is_cpu and item.size <= _SMALL_BYTES):
                    small.add(start, item.frame, tensor, item.nbytes, position)
                    if tensor is None:
                        host.append(HostCopy(index, 0, item.size, base + start))
                    elif item.nbytes:
                        begin = start + len(item.frame.prefix)
                        host.append(HostCopy(index, 0, item.nbytes, base + begin))
                    position = start + item.size
                    continue
                if tensor.is_cuda and item.nbytes:
                    transfer = transfers[index in late]
                    if transfer.add_framed(index, tensor, base + start, item.frame, base + position):
                        small.end()
                        if start > position:
                            ctypes.memset(base + position, 0, start - position)
                        position = start + item.size
                        continue
            # What lies between two small items would be taken for padding.
            small.end()
            if start > position:
                ctypes.memset(base + position, 0, start - position)
            prefix, suffix = item.frame
            for literal, begin in ((prefix, start), (suffix, start + len(prefix) + item.nbytes)):
                first, last = max(begin, low), min(begin + len(literal), high)
                if first < last:
                    part = literal if last - first == len(literal) else literal[first - begin : last - begin]
                    ctypes.memmove(base + first, part, last - first)
                    if tensor is None and item.source is None:
                        host.append(HostCopy(index, first - begin, last - begin, base + first))
            begin = start + len(prefix)
            first, last = max(begin, low), min(begin + item.nbytes, high)
            if item.source is not None and first < last:
                self._read(item.source, first - begin, last - begin, base + first)
            elif tensor is not None:
                if first < last and tensor.is_cuda:
                    transfers[index in late].add(
                        index, tensor, first - begin, last - begin, base + first, verbatim=item.verbatim
                    )
                elif first < last:
                    _copy_on_host(
                        tensor,
                        first - begin,
                        last - begin,
                        base + first,
                        verbatim=item.verbatim,
                        spread=spread,
                    )
                    host.append(HostCopy(index, first - begin, last - begin, base + first))
            position = start + item.size
        small.end()
        if position < high:
            ctypes.memset(base + position, 0, high - position)
        return host

    def _read(self, source: Source, low: int, high: int, address: int) -> None:
        if self._readers is None:
            self._readers = Threads(_READERS, "distckpt-source")
        memory = (ctypes.c_char * (high - low)).from_address(address)
        target = memoryview(memory).cast("B")
        self._reads.append(self._readers.submit(source.read_into, low, high, target))

    def await_reads(self) -> None:
        """Wait until what `fill` has begun to read from sources is there.

        Raises:
            CheckpointError: Some of it cannot be read; none is being read any more.
        """
        reads, self._reads = self._reads, []
        wait(reads)
        for read in reads:
            read.result()

    def refill(self, items: Mapping[int, Item], copies: Sequence[HostCopy]) -> None:
        """Copy anew what `fill` returned; the items have the same sizes as then."""
        for index, low, high, address in copies:
            item = items[index]
            if item.tensor is None:
                ctypes.memmove(address, item.frame.prefix[low:high], high - low)
            else:
                _copy_on_host(item.tensor, low, high, address, verbatim=item.verbatim)

    def stage(
        self, state: Mapping[str, Any], use: StagedUse | None = None
    ) -> tuple[dict[str, Any], CopyTicket]:
        """Copy a whole state, before there is a plan.

        Args:
            state: Nested containers of tensors of any kind and Python objects.
            use: Says when nobody needs the staged state any more: what keeps it alive then, such as a planner
                or the error of a failed save, loses its tensors to the next state that needs the memory.

        Returns:
            The same structure, whose tensors view the arena and whose objects are copies, and a ticket: the
            tensors hold the values of the call once it is done. Work that the caller gives to its current
            CUDA streams after this call runs after the copies.

        Raises:
            StagingError: Something cannot be copied, or the state does not fit the host memory budget.
        """
        slots: list[_Slot] = []
        build = self._prepare(state, (), slots)
        sizes = [slot.size for slot in slots]
        total = align(lay_out(sizes).nbytes, PAGE_BYTES)
        if total + self._spare_bytes > self._arena.budget_bytes:
            left = self._arena.budget_bytes - self._spare_bytes
            raise StagingError(
                f"the state takes {total / 2**30:.2f} GiB of host memory and the budget leaves it "
                f"{left / 2**30:.2f} GiB: raise --ckpt-host-memory, or save with dcp.save"
            )
        self._arena.check(total)
        lease = Lease(self._arena, use or StagedUse())
        self.use_devices({slot.tensor.device for slot in slots if slot.tensor.is_cuda})
        prepared = self._arena.prepare(self._arena.reserved_bytes - self._arena.unused_bytes + total)
        if any(slot.tensor.is_cuda for slot in slots):
            # See Residence: not slab by slab.
            prepared.result(self._timeout_s)
        transfer = Transfer(self.devices)
        sources = [slot.tensor.detach() if slot.tensor.is_cuda else None for slot in slots]
        try:
            # Not inference tensors, whoever calls: those could not be revoked.
            with torch.inference_mode(mode=False), torch.no_grad():
                transfer.begin()
                first, left = 0, total
                while first < len(slots):
                    # As many items as there is room for in one stretch: each lies in one piece.
                    taken = self._reserve(max(left, sizes[first]), sizes[first])
                    lease.add(taken)
                    offsets, nbytes = lay_out(itertools.islice(sizes, first, None), taken.nbytes)
                    block = range(first, first + len(offsets))
                    self._fill_block(slots, block, offsets, nbytes, taken, lease, transfer)
                    transfer.run(sources)
                    lease.trim(nbytes)
                    first, left = block.stop, left - nbytes
                word = None if transfer.is_empty else self._take_word()
                if word is not None:
                    transfer.add_words(ctypes.addressof(word), 1)
                    transfer.run(sources)
                transfer.end(caller_waits=True)
                lease.tensors = [weakref.ref(slot.staged) for slot in slots]
                staged = build()
        except BaseException:
            if not transfer.settle():
                lease.quarantine()
            raise
        keep = [source for source in sources if source is not None]
        memory = None if word is None else self._word_slab()
        ticket = CopyTicket(transfer, word, keep, self._words.append, memory)
        ticket.on_loss = lease.quarantine
        with self._lease_lock:
            self._leases.add(lease)
        for slot in slots:
            del slot.tensor, slot.staged
        return staged, ticket

    def quarantine(self, ranges: Sequence[Range]) -> None:
        """Keep `ranges`, which are never released, mapped: a copy off the device may still write there."""
        _LOST_SLABS.extend(self._arena.slabs[taken.slab] for taken in ranges)

    def _live_leases(self) -> list[Lease]:
        # Another thread may stage meanwhile, and a set that grows cannot be walked.
        with self._lease_lock:
            return list(self._leases)

    def _reserve(self, most: int, least: int) -> Range:
        # Again and again: the save that holds the memory may end, or fail, while this one waits.
        return self._arena.reserve_some(
            max(1, most),
            max(1, least),
            timeout_s=self._timeout_s,
            spare_bytes=self._spare_bytes,
            on_wait=self.collect,
        )

    def collect(self) -> None:
        """Free what saves that are over have staged.

        A planner that is kept holds the state of its last save, and the error of a failed save, which may be
        kept too, holds the frames of its traceback.
        """
        for lease in self._live_leases():
            if lease.use.is_over:
                lease.revoke()
            # Local names would hold what has just been let go.
            del lease
        if self._leases:
            gc.collect()

    def close(self) -> None:
        """Give back what the stager itself holds of the arena."""
        self.collect()
        if self._readers is not None:
            self._readers.close(0.0)
        self.devices.close()
        self._words.clear()
        if self._word_home is not None:
            self._arena.release(self._word_home)
            self._word_home = None

    def _fill_block(
        self,
        slots: list[_Slot],
        block: range,
        offsets: list[int],
        nbytes: int,
        taken: Range,
        lease: Lease,
        transfer: Transfer,
    ) -> None:
        address = self._arena.address(taken)
        memory = (ctypes.c_char * nbytes).from_address(address)
        # Every staged tensor has a storage of its own over this buffer, and so keeps the lease alive.
        memory.lease = lease  # type: ignore[attr-defined]
        position = 0
        for index, offset in zip(block, offsets, strict=True):
            slot = slots[index]
            if offset > position:
                ctypes.memset(address + position, 0, offset - position)
            prefix, suffix = slot.frame
            begin = offset + len(prefix)
            payload_bytes = slot.size - len(prefix) - len(suffix)
            tensor = slot.tensor
            dtype, shape = tensor.dtype, tensor.shape
            slot.staged = torch.empty(0, dtype=dtype, device="cpu")
            is_gathered = (
                tensor.is_cuda
                and payload_bytes > 0
                and slot.size <= GATHERED_BYTES
                and slot.verbatim
                and transfer.add_framed(index, tensor, address + offset, slot.frame, address + position)
            )
            position = offset + slot.size
            if not is_gathered:
                ctypes.memmove(address + offset, prefix, len(prefix))
                ctypes.memmove(address + begin + payload_bytes, suffix, len(suffix))
            if payload_bytes == 0:
                slot.staged = torch.empty_strided(shape, slot.strides, dtype=dtype, device="cpu")
                slot.finish()
                continue
            raw = torch.frombuffer(memory, dtype=torch.uint8, count=payload_bytes, offset=begin)
            slot.staged.set_(raw.untyped_storage(), 0, shape, slot.strides)
            slot.finish()
            if not tensor.is_cuda:
                _copy_on_host(
                    tensor.detach(), 0, payload_bytes, address + begin, verbatim=slot.verbatim, target=raw
                )
            elif not is_gathered:
                transfer.add(index, tensor, 0, payload_bytes, address + begin, verbatim=slot.verbatim)
            home = _Home(dtype, shape, slot.strides, slot.frame, taken.slab, taken.offset + offset)
            lease.items[address + begin] = home

    def _prepare(self, value: Any, path: tuple[object, ...], slots: list[_Slot]) -> Callable[[], Any]:
        """Copy all but raw tensors now and list those in `slots`; the result builds the staged value.

        Raises:
            StagingError: An object cannot be copied; the message names the entry.
        """
        if isinstance(value, torch.Tensor):
            return self._prepare_tensor(value, path, slots)
        if type(value) in _PLAIN:
            return lambda: value
        if isinstance(value, Mapping):
            parts = {key: self._prepare(entry, (*path, key), slots) for key, entry in value.items()}
            # A copy of any other mapping may share what it keeps its entries in with the trainer's.
            if type(value) is dict or not isinstance(value, dict):
                return lambda: {key: build() for key, build in parts.items()}
            shell = copy.copy(value)

            def fill_shell() -> dict[Any, Any]:
                for key, build in parts.items():
                    shell[key] = build()
                return shell

            return fill_shell
        if type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
            entries = [self._prepare(entry, (*path, i), slots) for i, entry in enumerate(value)]
            if type(value) is list:
                return lambda: [build() for build in entries]
            if type(value) is tuple:
                return lambda: tuple([build() for build in entries])
            return lambda: type(value)(*[build() for build in entries])
        try:
            twin = copy.deepcopy(value)
        except Exception as error:  # noqa: BLE001 - whatever an object of the user's raises becomes our error
            name = ".".join(map(str, path))
            raise StagingError(f"cannot copy {name} ({type(value).__name__}): {error}") from None
        return lambda: twin

    def _prepare_tensor(
        self, value: torch.Tensor, path: tuple[object, ...], slots: list[_Slot]
    ) -> Callable[[], Any]:
        if isinstance(value, ShardedTensor):
            return self._prepare_sharded(value, path, slots)
        if isinstance(value, AsyncCollectiveTensor):
            # Its memory is filled by a collective that may still run.
            value = value.wait()
        if is_raw(value):
            if value.device.type == "meta":
                name = ".".join(map(str, path))
                raise StagingError(f"{name} is on the meta device and has no values to save")
            verbatim = self._is_verbatim(value)
            try:
                _check_memory(value, value.nbytes, verbatim)
            except StagingError as error:
                raise StagingError(f"{'.'.join(map(str, path))}: {error}") from None
            strides = value.stride() if verbatim else contiguous_strides(value.shape)
            frame = self._frame(value.dtype, value.shape, strides)
            slot = _Slot(value, strides, frame, verbatim)
            slots.append(slot)
            return lambda: slot.staged
        if _is_wrapper(value):
            wrapper: Any = value
            names, context = wrapper.__tensor_flatten__()
            parts = {name: self._part(getattr(value, name), (*path, name), slots) for name in names}
            kind, size_, stride = type(wrapper), value.size(), value.stride()
            return lambda: kind.__tensor_unflatten__(
                {name: build() for name, build in parts.items()}, context, size_, stride
            )
        twin = value.detach().cpu().clone()
        return lambda: twin

    def _part(self, value: Any, path: tuple[object, ...], slots: list[_Slot]) -> Callable[[], Any]:
        # A wrapper may hand out parts that are no tensors, such as a DTensor's mesh: they are shared.
        return self._prepare_tensor(value, path, slots) if isinstance(value, torch.Tensor) else lambda: value

    def _prepare_sharded(
        self, value: ShardedTensor, path: tuple[object, ...], slots: list[_Slot]
    ) -> Callable[[], Any]:
        shards = [
            (self._prepare_tensor(shard.tensor, (*path, i), slots), shard.metadata)
            for i, shard in enumerate(value.local_shards())
        ]

        def build() -> ShardedTensor:
            # The constructor communicates; the twin shares everything but the shards' memory.
            twin: ShardedTensor = ShardedTensor.__new__(
                ShardedTensor,
                value.sharding_spec(),
                *value.size(),
                dtype=value.dtype,
                layout=value.layout,
                pin_memory=False,
                requires_grad=value.requires_grad,
            )
            local_shards = [Shard(part(), metadata) for part, metadata in shards]
            # The id is the original's, which its end takes out of a register.
            twin.__dict__.update(value.__dict__, _local_shards=local_shards, _sharded_tensor_id=None)
            return twin

        return build

    def _take_word(self) -> ctypes.c_int64:
        """Return a word of pinned memory that is 0.

        Raises:
            StagingError: All words are in use.
        """
        with self._word_lock:
            if self._word_home is None:
                self._word_home = self._arena.reserve(PAGE_BYTES, timeout_s=self._timeout_s)
                address = self._arena.address(self._word_home)
                self._words.extend(ctypes.c_int64.from_address(address + 8 * i) for i in range(_WORDS))
            if not self._words:
                raise StagingError(f"more than {_WORDS} groups of copies are under way")
            word = self._words.popleft()
        word.value = 0
        return word

    def _word_slab(self) -> Slab:
        """Return what keeps the words mapped."""
        assert self._word_home is not None
        return self._arena.slabs[self._word_home.slab]


class _Slot:
    __slots__ = ("frame", "size", "staged", "strides", "tensor", "verbatim")

    def __init__(self, tensor: torch.Tensor, strides: tuple[int, ...], frame: Frame, verbatim: bool) -> None:
        self.tensor = tensor
        self.strides = strides
        self.frame = frame
        self.verbatim = verbatim
        self.size = len(frame.prefix) + tensor.nbytes + len(frame.suffix)
        self.staged: torch.Tensor

    def finish(self) -> None:
        """Give the staged tensor what else is saved of the tensor, be it only within a pickled tuple."""
        self.staged.requires_grad_(self.tensor.requires_grad)
        if type(self.tensor) is torch.nn.Parameter:
            # A tenth of the cost of making one; torch turns its lazy parameters into real ones like this.
            self.staged.__class__ = torch.nn.Parameter


class _SmallRun:
    """Small items of the host, joined before they are copied: three calls for each of them cost more.

    Args:
        address: Where the file's first byte would lie in memory.
    """

    def __init__(self, address: int) -> None:
        self._address = address
        self._parts: list[bytes] = []
        self._start = self._end = 0

    def add(self, offset: int, frame: Frame, tensor: torch.Tensor | None, nbytes: int, position: int) -> None:
        """Add the item at `offset` of the file, and the padding since `position`, where the last ended."""
        parts = self._parts
        if parts and self._end - self._start < _RUN_BYTES and offset - self._end < LARGE_ALIGNMENT:
            parts.append(_PADDING[: offset - self._end])
        else:
            self.end()
            ctypes.memset(self._address + position, 0, offset - position)
            self._start = offset
        parts.append(frame.prefix)
        if nbytes and tensor is not None:
            parts.append(ctypes.string_at(tensor.data_ptr(), nbytes))
        parts.append(frame.suffix)
        self._end = offset + len(frame.prefix) + nbytes + len(frame.suffix)

    def end(self) -> None:
        """Copy what was added."""
        if self._parts:
            ctypes.memmove(self._address + self._start, b"".join(self._parts), self._end - self._start)
            self._parts.clear()


def _copy_on_host(
    source: torch.Tensor,
    low: int,
    high: int,
    address: int,
    *,
    verbatim: bool,
    target: torch.Tensor | None = None,
    spread: bool = True,
) -> None:
    """Copy bytes [low, high) of the payload of a tensor that is on no GPU to `address`.

    Args:
        source: The tensor.
        low: First byte.
        high: End.
        address: Of the memory.
        verbatim: As `Item.verbatim`.
        target: A view of that memory, if there is one.
        spread: Whether torch's threads may help. They look for more to do for milliseconds after each copy.
    """
    nbytes = high - low
    if source.is_cpu and verbatim and (nbytes <= _MEMMOVE_BYTES or not spread):
        ctypes.memmove(address, source.data_ptr() + low, nbytes)
        return
    if target is None:
        target = host_view(address, nbytes)
    if not verbatim and nbytes == source.nbytes:
        # Rearranged on the way, without a copy in between.
        dense = torch.empty(0, dtype=source.dtype, device="cpu").set_(
            target.untyped_storage(), 0, source.shape, contiguous_strides(source.shape)
        )
        dense.copy_(source)
        return
    target.copy_(flat_bytes(source)[low:high] if verbatim else contiguous_span(source, low, high))

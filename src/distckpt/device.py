"""Everything that is asked of CUDA: pinned memory, side streams, gathers, captured graphs.

A `Transfer` is what one staging copies off the devices. It is built once, step by step, and may be launched
any number of times; what it copies is named by numbers, so that it holds no tensor between launches.

Invariants:
    * Streams are ordered by events in both directions; nothing synchronises a device, and nothing here is
      called by a background thread but `Devices.pin`.
    * Copies of one device leave in order on one stream, so that a word that is copied last tells of all.
    * GPU memory: two packing buffers for each device, the literal bytes around small tensors, digests, and
      what torch keeps for the sums of a captured graph.

Threads: a transfer is used by one thread at a time; `pin` by any.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from distckpt.errors import StagingError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distckpt.arena import Slab

_LOG = logging.getLogger(__name__)
GATHERED_BYTES = 1 << 20
"""Tensors below this are gathered on the device: a copy of its own costs more host time than it takes."""
DIGEST_WORDS = 512
"""So many that torch sums each in one step, on an H200 below 512 MiB; two need memory, and more launches."""
_PACKING_BYTES = 64 << 20
_LITERAL_BYTES = 16 << 20
"""Literal bytes that a transfer keeps on the device at most; beyond, tensors are copied one by one."""
_GAP_BYTES = 4096
_WORDS = 256
_PIECE_BYTES = 32 << 20
_PORTABLE = 1
"""Source: cudaHostRegisterPortable, CUDA runtime API: pinned for every device's context."""
_POLL_S = 0.0005
_SETTLE_S = 5.0
_FIRST_LAUNCHES = 1
"""Launches before a graph is captured: what comes once is not worth it."""


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as one-dimensional uint8, whatever its dtype and order of dims."""
    # A single element may have any stride, which a view as bytes does not allow.
    if tensor.is_contiguous() and tensor.numel() > 1:
        return tensor.view(-1).view(torch.uint8)
    size = tensor.element_size()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(), tensor.storage_offset() * size, (tensor.numel() * size,), (1,)
    )


def contiguous_span(tensor: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Return bytes [low, high), at least one, of `tensor` in contiguous order, copying about that much."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return flat_bytes(tensor)[low:high]
    row_bytes = tensor.numel() * tensor.element_size() // max(1, tensor.shape[0]) if tensor.dim() else 0
    if row_bytes:
        first, last = low // row_bytes, -(-high // row_bytes)
        if tensor.dim() > 1 and row_bytes > high - low:
            parts = [
                contiguous_span(
                    tensor[row], max(0, low - row * row_bytes), min(row_bytes, high - row * row_bytes)
                )
                for row in range(first, last)
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        tensor, low, high = tensor[first:last], low - first * row_bytes, high - first * row_bytes
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    whole.copy_(tensor)
    return flat_bytes(whole)[low:high]


def has_digest(tensor: torch.Tensor) -> bool:
    """Say whether `take_digest` takes a dense tensor, and costs little beside its copy."""
    offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
    is_aligned = tensor.nbytes % 8 == tensor.data_ptr() % 8 == offset_bytes % 8 == 0
    return is_aligned and tensor.nbytes >= GATHERED_BYTES


def take_digest(tensor: torch.Tensor, out: torch.Tensor) -> None:
    """Put `DIGEST_WORDS` sums modulo 2**64 of the memory of a dense tensor, as int64, to `out`.

    Each is of one stretch; together they cover all of it. A change of one integer is always seen. The
    stretches' lengths are odd: a change that is the same everywhere does not cancel out modulo a power of
    two. Integers that change places within a stretch are not seen.
    """
    # Of any other width, a sum would first make integers of this width of everything.
    words = flat_bytes(tensor).view(torch.int64)
    count, gaps = words.numel(), DIGEST_WORDS - 1
    least = -(-count // DIGEST_WORDS)
    # Stretches that overlap as much as lets all begin equally far apart; the number of gaps is odd.
    length = least + (count - least) % gaps
    length += 0 if length % 2 else gaps
    stretches = words.as_strided((DIGEST_WORDS, length), ((count - length) // gaps, 1))
    torch.sum(stretches, dim=1, out=out)


def host_view(address: int, nbytes: int) -> torch.Tensor:
    """Return host memory as uint8; who asks keeps it mapped for as long as the view is used."""
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


class _SideStreams:
    """The streams and packing buffers of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copy = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.gather = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers: list[torch.Tensor] = []

    def buffer(self, number: int) -> torch.Tensor:
        """Return one of the two packing buffers."""
        if not self._buffers:
            # Not inference tensors, whoever asks first.
            with torch.inference_mode(mode=False), torch.cuda.stream(self.gather):
                self._buffers = [
                    torch.empty(_PACKING_BYTES, dtype=torch.uint8, device=self.device) for _ in range(2)
                ]
        return self._buffers[number % 2]


class Devices:
    """The CUDA devices of this process, as far as one stager uses them."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, _SideStreams] = {}
        self._lock = threading.Lock()
        self.launching = threading.RLock()
        """Held while copies are launched: packing buffers and streams are the same for all transfers."""
        self._pinned: set[int] = set()
        self.refuses_to_pin = False
        """Whether a slab could not be registered: copies to it block, and cannot be captured."""

    def use(self, device: torch.device, slabs: Sequence[Slab] = ()) -> None:
        """Get ready for copies from `device`: its streams, its packing buffers, and `slabs` pinned.

        Args:
            device: A CUDA device with its index.
            slabs: What was reserved before any device was known.
        """
        self.streams(device).buffer(0)
        for slab in slabs:
            self.pin(slab)

    def streams(self, device: torch.device) -> _SideStreams:
        """Return the side streams of `device`."""
        with self._lock:
            if device not in self._streams:
                self._streams[device] = _SideStreams(device)
            return self._streams[device]

    def pin(self, slab: Slab) -> None:
        """Register a slab with CUDA, if a device is in use; it is undone before the slab is unmapped."""
        with self._lock:
            device = next(iter(self._streams), None)
            if device is None or slab.index in self._pinned:
                return
            self._pinned.add(slab.index)
        # In a thread of its own the current device is the first, whose context this process may not want.
        with torch.cuda.device(device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = int(runtime.cudaHostRegister(slab.address, slab.nbytes, _PORTABLE))
        if status == 0:
            slab.on_release.append(functools.partial(runtime.cudaHostUnregister, slab.address))
            return
        with contextlib.suppress(RuntimeError), torch.cuda.device(device):
            # The next launch would report the error that was left behind.
            torch.empty(1, device=device).fill_(1)
        with self._lock:
            warned, self.refuses_to_pin = self.refuses_to_pin, True
        if not warned:
            _LOG.warning(
                "cannot pin host memory (cudaHostRegister: error %d): copies off the GPU will be slow; "
                "raise the limit on locked memory (ulimit -l)",
                status,
            )

    def close(self) -> None:
        """Let streams and buffers go; nothing is copied any more."""
        with self._lock:
            self._streams.clear()


class _Copy(NamedTuple):
    """Bytes [low, high) of a source to `target`, a view of host memory."""

    device: torch.device
    source: int
    low: int
    high: int
    target: torch.Tensor
    verbatim: bool


class _Gather(NamedTuple):
    """Sources and literals, one after the other, through a packing buffer to `target`.

    A source is its number; literal number n is `-1 - n`.
    """

    device: torch.device
    pieces: list[int]
    target: torch.Tensor


class _Words(NamedTuple):
    """The number of the launch, to each of the words of `target`."""

    target: torch.Tensor


class _Digests(NamedTuple):
    """The digest of what each source holds at that time, to `target`."""

    device: torch.device
    sources: Sequence[int]
    target: torch.Tensor


@dataclass
class _Window:
    """Small tensors that will leave in one gather."""

    device: torch.device
    address: int
    end: int
    pieces: list[int]
    trailer: bytes


@dataclass
class _Round:
    """One launch that is under way: where each device's packing buffers are in use until."""

    streams: list[_SideStreams]
    turn: int = 0
    free: dict[tuple[torch.device, int], torch.cuda.Event] = field(default_factory=dict)


class Transfer:
    """What one staging copies off the devices; see the module.

    Args:
        devices: The devices.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._steps: list[_Copy | _Gather | _Words | _Digests] = []
        self._window: _Window | None = None
        self._literals: dict[bytes, int] = {}
        self._literal_bytes = 0
        self._on_device: dict[torch.device, list[torch.Tensor]] = {}
        self._tags: dict[torch.device, torch.Tensor] = {}
        self._sums: torch.Tensor | None = None
        self._used: dict[torch.device, None] = {}
        self._round: _Round | None = None
        self._next_step = 0
        self._graph: Any = None
        self._can_capture = True
        self._events: list[torch.cuda.Event] = []
        self.tag = 0
        """Number of launches so far: what the words hold once the last of them has arrived."""
        self.began_s = 0.0
        """When the last launch began, by `time.monotonic()`."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to copy off any device."""
        return not self._used

    @property
    def is_captured(self) -> bool:
        """Whether a launch replays a graph."""
        return self._graph is not None

    def add(
        self, source: int, tensor: torch.Tensor, low: int, high: int, address: int, *, verbatim: bool
    ) -> None:
        """Copy bytes [low, high) of the payload of a source to `address`.

        Args:
            source: Its number at `launch`.
            tensor: The source, a CUDA tensor; not kept.
            low: First byte, of the payload in contiguous order or, verbatim, as it lies.
            high: Byte after the last.
            address: Where to, in host memory.
            verbatim: Whether its memory is taken as it lies.
        """
        self._used[tensor.device] = None
        if not verbatim and high - low > _PACKING_BYTES:
            # Made contiguous in memory that is allocated for it, which a graph would keep.
            self._can_capture = False
        self._steps.append(_Copy(tensor.device, source, low, high, host_view(address, high - low), verbatim))

    def add_framed(
        self, source: int, tensor: torch.Tensor, address: int, frame: tuple[bytes, bytes], after: int
    ) -> bool:
        """Copy a small source, whole and verbatim, with the literal bytes around it, to `address`.

        Args:
            source: Its number at `launch`.
            tensor: The source, a CUDA tensor; not kept.
            address: Where its frame goes, in host memory.
            frame: Literal bytes before and after the payload.
            after: Where the item before it ends in memory; if that came this way too, they leave together,
                with zeros in between.

        Returns:
            False if there is no room for more literals on the device: nothing was added.
        """
        window = self._window
        prefix, suffix = frame
        size = len(prefix) + tensor.nbytes + len(suffix)
        if (
            window is not None
            and window.device == tensor.device
            and window.end == after
            and address - after < _GAP_BYTES
            and address + size - window.address <= _PACKING_BYTES
        ):
            before = window.trailer + bytes(address - window.end) + prefix
            if self._literal_bytes + len(before) + len(suffix) > _LITERAL_BYTES:
                return False
        else:
            if self._literal_bytes + len(prefix) + len(suffix) > _LITERAL_BYTES:
                return False
            self._close_window()
            self._used[tensor.device] = None
            window = self._window = _Window(tensor.device, address, address, [], b"")
            before = prefix
        if before:
            window.pieces.append(self._literal(before))
        window.pieces.append(source)
        window.trailer = suffix
        window.end = address + size
        return True

    def add_words(self, address: int, count: int) -> None:
        """Tell `count` words of host memory when everything that was added so far has arrived."""
        self._close_window()
        for first in range(0, count, _WORDS):
            words = host_view(address + 8 * first, 8 * min(_WORDS, count - first))
            self._steps.append(_Words(words.view(torch.int64)))

    def add_digests(self, device: torch.device, sources: Sequence[int], address: int) -> None:
        """Take digests of what sources hold once everything that was added so far has left; once at most.

        Args:
            device: Where they lie.
            sources: Their numbers at `launch`; see `has_digest`.
            address: Where to, `DIGEST_WORDS` words for each, in host memory.
        """
        self._close_window()
        self._used[device] = None
        target = host_view(address, 8 * DIGEST_WORDS * len(sources)).view(torch.int64)
        self._steps.append(_Digests(device, sources, target.view(-1, DIGEST_WORDS)))

    def launch(self, sources: Sequence[torch.Tensor | None], *, caller_waits: bool) -> None:
        """Copy everything again; the calls return before the copies end.

        Args:
            sources: What was added, by number, at the same addresses as then.
            caller_waits: Whether work that the caller gives its current streams from now on waits for it.

        Raises:
            StagingError: The calling thread is capturing a CUDA graph.
        """
        self._close_window()
        if self.tag >= _FIRST_LAUNCHES and self._graph is None and self._may_capture():
            self._capture(sources)
        if self._graph is None:
            self.begin()
            self.run(sources)
            self.end(caller_waits=caller_waits)
            return
        refuse_capture()
        self.tag += 1
        self.began_s = time.monotonic()
        device = next(iter(self._used))
        streams = self._devices.streams(device)
        with self._devices.launching:
            streams.copy.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(streams.copy):
                # Not counted up within the graph: a launch that fails would count on one side only.
                self._tags[device].fill_(self.tag)
                self._graph.replay()
            self._finish([streams], caller_waits=caller_waits)

    def begin(self) -> None:
        """Begin a launch in steps: `run` whenever something was added, then `end`.

        Raises:
            StagingError: The calling thread is capturing a CUDA graph.
        """
        self.tag += 1
        self.began_s = time.monotonic()
        self._next_step = 0
        self._round = _Round([])

    def run(self, sources: Sequence[torch.Tensor | None]) -> None:
        """Copy what was added and not run since `begin`."""
        self._close_window()
        assert self._round is not None
        with self._devices.launching, torch.no_grad():
            for streams in self._round.streams:
                # Another transfer may have used the packing buffers meanwhile.
                streams.gather.wait_stream(streams.copy)
            self._enter(self._round)
            steps, self._next_step = self._steps[self._next_step :], len(self._steps)
            for step in steps:
                if isinstance(step, _Copy):
                    self._copy(step, sources, self._round)
                elif isinstance(step, _Gather):
                    self._gather(step, sources, self._round)
                elif isinstance(step, _Digests):
                    self._take_digests(step, sources)
                else:
                    self._tell(step, self._round)
            for streams in self._round.streams:
                streams.copy.wait_stream(streams.gather)

    def end(self, *, caller_waits: bool) -> None:
        """End the launch; see `launch`."""
        assert self._round is not None
        streams = self._round.streams
        self._round = None
        for each in streams:
            each.copy.wait_stream(each.gather)
        self._finish(streams, caller_waits=caller_waits)

    def order_after(self) -> None:
        """Make what the caller gives its current streams from now on wait for the copies."""
        for event, device in zip(self._events, self._used, strict=True):
            torch.cuda.current_stream(device).wait_event(event)

    def check(self) -> None:
        """Raise the CUDA error that a copy ran into, if it did.

        Raises:
            StagingError: CUDA reports an error.
        """
        for event in self._events:
            _query(event)

    def settle(self) -> bool:
        """Wait for copies that nobody needs any more; returns whether they have ended."""
        if self._round is not None:
            with contextlib.suppress(RuntimeError, StagingError):
                self.end(caller_waits=False)
        deadline, pause = time.monotonic() + _SETTLE_S, threading.Event()
        try:
            while not all(_query(event) for event in self._events):
                if time.monotonic() > deadline:
                    return False
                pause.wait(_POLL_S)
        except StagingError:
            return False
        return True

    def forget(self) -> None:
        """Keep nothing on the devices."""
        self._graph = None
        self._on_device.clear()
        self._tags.clear()
        self._sums = None
        self._steps.clear()

    def _enter(self, round_: _Round) -> None:
        """Make the side streams of devices that are new to the launch wait for the caller's."""
        entered = {streams.device for streams in round_.streams}
        for device in self._used:
            if device in entered:
                continue
            refuse_capture()
            streams = self._devices.streams(device)
            self._upload(device, streams)
            streams.copy.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(streams.copy):
                # Not counted up: a launch that failed half way may have counted only here, or only there.
                self._tags[device].fill_(self.tag)
            self._start(streams, round_)
        for streams in round_.streams:
            self._upload(streams.device, streams)

    def _start(self, streams: _SideStreams, round_: _Round) -> None:
        # The packing buffers may still be copied out for an earlier launch.
        streams.gather.wait_stream(streams.copy)
        round_.streams.append(streams)

    def _upload(self, device: torch.device, streams: _SideStreams) -> None:
        known = self._on_device.setdefault(device, [])
        literals = list(self._literals)[len(known) :]
        with torch.cuda.stream(streams.gather):
            if literals:
                whole = torch.frombuffer(bytearray(b"".join(literals)), dtype=torch.uint8)
                # From pageable memory: it has been read when the call returns.
                known += torch.split(whole.to(device, non_blocking=True), [len(one) for one in literals])
            if device not in self._tags:
                tag = torch.empty(_WORDS, dtype=torch.int64, device=device)
                streams.copy.wait_stream(streams.gather)
                self._tags[device] = tag

    def _copy(self, step: _Copy, sources: Sequence[torch.Tensor | None], round_: _Round) -> None:
        streams = self._devices.streams(step.device)
        source = _given(sources, step.source)
        if step.verbatim:
            with torch.cuda.stream(streams.copy):
                step.target.copy_(flat_bytes(source)[step.low : step.high], non_blocking=True)
            return
        nbytes = step.high - step.low
        if nbytes == source.nbytes <= _PACKING_BYTES:
            buffer = self._take_buffer(streams, round_)
            with torch.cuda.stream(streams.gather):
                buffer[:nbytes].view(source.dtype).view(source.shape).copy_(source)
            self._send(streams, buffer[:nbytes], step.target, round_)
            return
        with torch.cuda.stream(streams.copy):
            # Each piece is let go at once: what is allocated next on this stream is written after its copy.
            for start in range(step.low, step.high, _PIECE_BYTES):
                end = min(start + _PIECE_BYTES, step.high)
                piece = contiguous_span(source, start, end)
                step.target[start - step.low : end - step.low].copy_(piece, non_blocking=True)

    def _gather(self, step: _Gather, sources: Sequence[torch.Tensor | None], round_: _Round) -> None:
        streams = self._devices.streams(step.device)
        literals = self._on_device[step.device]
        buffer = self._take_buffer(streams, round_)[: step.target.numel()]
        pieces = [
            flat_bytes(_given(sources, piece)) if piece >= 0 else literals[-1 - piece]
            for piece in step.pieces
        ]
        with torch.cuda.stream(streams.gather):
            torch.cat(pieces, out=buffer)
        self._send(streams, buffer, step.target, round_)

    def _take_buffer(self, streams: _SideStreams, round_: _Round) -> torch.Tensor:
        round_.turn += 1
        free = round_.free.get((streams.device, round_.turn % 2))
        if free is not None:
            streams.gather.wait_event(free)
        return streams.buffer(round_.turn)

    def _send(
        self, streams: _SideStreams, packed: torch.Tensor, target: torch.Tensor, round_: _Round
    ) -> None:
        streams.copy.wait_event(streams.gather.record_event())
        with torch.cuda.stream(streams.copy):
            target.copy_(packed, non_blocking=True)
        round_.free[streams.device, round_.turn % 2] = streams.copy.record_event()

    def _tell(self, step: _Words, round_: _Round) -> None:
        if not round_.streams:
            # Nothing is on any device so far: whoever added the words knows.
            return
        # One device tells of all: its stream waits for the others'.
        first, *others = round_.streams
        for other in others:
            first.copy.wait_event(other.copy.record_event())
        with torch.cuda.stream(first.copy):
            step.target.copy_(self._tags[first.device][: step.target.numel()], non_blocking=True)

    def _take_digests(self, step: _Digests, sources: Sequence[torch.Tensor | None]) -> None:
        # On the stream of the copies: after those before it, before those that follow.
        with torch.cuda.stream(self._devices.streams(step.device).copy):
            if self._sums is None:
                with torch.inference_mode(mode=False):
                    self._sums = torch.empty_like(step.target, device=step.device)
            for number, source in enumerate(step.sources):
                take_digest(_given(sources, source), self._sums[number])
            step.target.copy_(self._sums, non_blocking=True)

    def _finish(self, streams: list[_SideStreams], *, caller_waits: bool) -> None:
        self._events = [each.copy.record_event() for each in streams]
        if caller_waits:
            for each, event in zip(streams, self._events, strict=True):
                torch.cuda.current_stream(each.device).wait_event(event)

    def _may_capture(self) -> bool:
        return self._can_capture and len(self._used) == 1 and not self._devices.refuses_to_pin

    def _capture(self, sources: Sequence[torch.Tensor | None]) -> None:
        refuse_capture()
        device = next(iter(self._used))
        streams = self._devices.streams(device)
        graph = torch.cuda.CUDAGraph()
        round_ = _Round([])
        try:
            # Alone: what another thread launched meanwhile would become part of the graph.
            with self._devices.launching, torch.cuda.stream(streams.copy):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._start(streams, round_)
                    self._round, self._next_step = round_, 0
                    self.run(sources)
                    streams.copy.wait_stream(streams.gather)
                finally:
                    self._round = None
                    graph.capture_end()
        except RuntimeError as error:
            self._can_capture = False
            _LOG.warning(
                "the copies cannot be captured in a CUDA graph, and are launched one by one: %s", error
            )
            return
        self._graph = graph

    def _close_window(self) -> None:
        window, self._window = self._window, None
        if window is None:
            return
        if window.trailer:
            window.pieces.append(self._literal(window.trailer))
        target = host_view(window.address, window.end - window.address)
        self._steps.append(_Gather(window.device, window.pieces, target))

    def _literal(self, data: bytes) -> int:
        number = self._literals.get(data)
        if number is None:
            number = self._literals[data] = len(self._literals)
            self._literal_bytes += len(data)
        return -1 - number


def _given(sources: Sequence[torch.Tensor | None], number: int) -> torch.Tensor:
    source = sources[number]
    assert source is not None
    return source


def _query(event: torch.cuda.Event) -> bool:
    try:
        return bool(event.query())  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise StagingError(f"the copy off the device failed: {error}") from error


def is_capturing() -> bool:
    """Say whether the calling thread is capturing a CUDA graph."""
    is_initialized: Callable[[], bool] = torch.cuda.is_initialized
    return is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture() -> None:
    """Refuse to copy what a CUDA graph that is being captured will compute; it can go on.

    Raises:
        StagingError: The calling thread is capturing one.
    """
    if is_capturing():
        raise StagingError(
            "a state cannot be saved while its thread captures a CUDA graph: nothing has run yet"
        )

"""Which settings suit a target: saves of a made-up state, in turn, beside plain writes of the same bytes.

    workers at the default bucket -> bucket sizes -> O_DIRECT, or on S3 parts at once

Each stage compares one setting and hands its choice to the next: the whole grid would take too long.

Invariants:
    * What is compared is measured in turn, round by round, so that a busy machine is busy for all.
    * Nothing is written before path, numbers, memory and space were checked, and nothing stays on the target,
      whatever ends the sweep short of SIGKILL.
    * A default is left only for what is faster beyond noise, by a tenth at least.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import math
import mmap
import os
import statistics
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from distckpt import observe
from distckpt.arena import align, available_memory
from distckpt.checkpointer import Checkpointer
from distckpt.errors import CheckpointError, ConfigError, WriteError
from distckpt.storage import open_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from distckpt.observe import Event

__all__ = [
    "BUCKETS",
    "PARTS",
    "Trial",
    "Tuning",
    "choose",
    "default_workers",
    "noise_of",
    "plain_write",
    "reason_for",
    "sweep",
]

_LOG = logging.getLogger(__name__)
_MIB = 1 << 20
_GIB = 1 << 30
_NOTHING: Mapping[str, Any] = MappingProxyType({})
BUCKETS = (8 * _MIB, 32 * _MIB, 128 * _MIB)
"""Bucket sizes that are tried beside the default."""
_USUAL_BUCKET_BYTES = 32 * _MIB
"""What auto comes to where host memory is not short (`Arena.window_bytes`)."""
_FEWEST_SPARE = 4
"""Buckets for which a budget must have room beside a state that is to lie in it as a whole (`Engine`)."""
_MOST_WORKERS = 8
_LEAST_BYTES = _MIB
_MOST_BYTES = 4 * _GIB
_PROBE_BYTES = 64 * _MIB
_NUM_TENSORS = 64
_PLAIN_BLOCK_BYTES = 32 * _MIB
_PAGE_BYTES = mmap.PAGESIZE
_FREE_FACTOR = 2
"""How many times the bytes of a save the target must have free: nobody wants it full."""
_MEMORY_FACTOR = 3
"""So many states are to be free beside one for each candidate: the state itself, and that the half of what is
available, the default budget, holds another."""
_MOST_ROUNDS = 7
_SAVES = 40
"""About how many a whole sweep makes."""
PARTS = (2, 8, 16)
"""Numbers of parts that each worker has under way at once, which are tried beside the default on S3."""
_SHARES = {"workers": 0.55, "buckets": 0.8, "direct": 1.0, "parts": 1.0}
"""Part of the time that is up at the end of each stage."""
_SIGMAS = 1.5
"""A standard deviation is about so many median distances."""
_LEAST_NOISE = 0.02
_ENOUGH_SAVES, _UNKNOWN_NOISE = 5, 0.25
"""Fewer saves do not tell how much they vary: then it is taken for so much at least."""
_LEAST_GAIN = 0.1
"""What is gained by less than that is not worth a setting, nor the same in the next sweep."""
_SCRATCH = ".distckpt-tune-"


@dataclass(frozen=True)
class Trial:
    """One setting of one stage.

    Attributes:
        stage: What is compared: workers, buckets, direct or parts.
        workers: As `dist_ckpt_workers`.
        bucket_bytes: As `ckpt_bucket_bytes`; None is auto.
        direct_io: As `ckpt_direct_io`; None where the target has no O_DIRECT.
        nbytes: Bytes of the state.
        seconds: Of each save, from the call until it was committed.
        write_seconds: Of each save, those in which its files were written and made durable.
        parts_at_once: As `max_concurrency` among the storage options; None where the target has none.
    """

    stage: str
    workers: int
    bucket_bytes: int | None
    direct_io: bool | None
    nbytes: int
    seconds: list[float]
    write_seconds: list[float] = field(default_factory=list)
    parts_at_once: int | None = None

    @property
    def gib_per_s(self) -> float:
        """The median, from the call until committed."""
        return self.nbytes / _GIB / statistics.median(self.seconds)

    @property
    def label(self) -> str:
        """What it is compared by."""
        if self.stage == "workers":
            return f"{self.workers} worker{'s' * (self.workers > 1)}"
        if self.stage == "buckets":
            return "auto" if self.bucket_bytes is None else f"{self.bucket_bytes // _MIB}MiB"
        if self.stage == "parts":
            return f"{self.parts_at_once} at once"
        return "O_DIRECT" if self.direct_io else "page cache"

    def as_dict(self) -> dict[str, Any]:
        """Return it in JSON values."""
        return {**asdict(self), "gib_per_s": self.gib_per_s}


@dataclass(frozen=True)
class Tuning:
    """What a sweep found.

    Attributes:
        path: The target.
        nbytes: Bytes of each save.
        seconds: How long the sweep took.
        trials: What was measured, in the order of the stages.
        ceilings: GiB/s of each plain write, by its name; empty where the target is no local directory.
        flags: What to use.
        reasons: Why, for each flag.
        options: What to have among the storage options.
        option_reasons: Why, for each of them.
    """

    path: str
    nbytes: int
    seconds: float
    trials: list[Trial]
    ceilings: dict[str, list[float]]
    flags: list[str]
    reasons: list[str]
    options: dict[str, int]
    option_reasons: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return it in JSON values."""
        return {**asdict(self), "trials": [trial.as_dict() for trial in self.trials]}


def noise_of(trials: Sequence[Trial]) -> float:
    """Return by what part of itself the time of a save varies under one setting.

    A standard deviation, from the median distance to the median: a single save that something held up does
    not count. Of several settings the one in the middle. Fewer than five saves of each do not tell.

    Args:
        trials: Those that are compared.
    """
    spreads = []
    for trial in trials:
        middle = statistics.median(trial.seconds)
        if len(trial.seconds) > 1:
            spreads.append(_SIGMAS * statistics.median(abs(each - middle) for each in trial.seconds) / middle)
    least = _LEAST_NOISE if _num_saves(trials) >= _ENOUGH_SAVES else _UNKNOWN_NOISE
    return max(least, statistics.median(spreads)) if spreads else _UNKNOWN_NOISE


def _num_saves(trials: Sequence[Trial]) -> int:
    return min(len(trial.seconds) for trial in trials)


def choose(trials: Sequence[Trial]) -> Trial:
    """Return the first that is as fast as the fastest, but for noise or a tenth.

    Args:
        trials: At least one; first those that one would rather have.
    """
    margin = max(noise_of(trials), _LEAST_GAIN)
    limit_s = min(statistics.median(trial.seconds) for trial in trials) * (1 + margin)
    return next(trial for trial in trials if statistics.median(trial.seconds) <= limit_s)


_PREFERENCE = {
    "workers": "fewer workers leave memory and cores to the trainer",
    "buckets": "smaller ones take less host memory",
    "direct": "O_DIRECT leaves the page cache to others",
    "parts": "so it is now",
}


def reason_for(trials: Sequence[Trial], ceilings: Mapping[str, Sequence[float]]) -> str:
    """Say why `choose` chooses what it does.

    Args:
        trials: As for `choose`.
        ceilings: GiB/s of plain writes, by their names.
    """
    chosen = choose(trials)
    fastest = min(trials, key=lambda trial: statistics.median(trial.seconds))
    noise, saves = f"±{noise_of(trials):.0%}", _num_saves(trials)
    if saves < _ENOUGH_SAVES:
        noise += f", assumed: there was time for {saves}"
    rate = f"{chosen.label}: {chosen.gib_per_s:.2f} GiB/s"
    others = ", ".join(f"{each.label} {each.gib_per_s:.2f}" for each in trials if each is not chosen)
    if len(trials) == 1:
        text = f"{rate}; nothing else was tried"
    elif chosen is fastest:
        text = f"{rate}, the fastest ({others}; noise {noise})"
    else:
        why = _PREFERENCE[chosen.stage]
        if chosen.stage == "buckets" and chosen.bucket_bytes is None:
            why = "it is the default"
        text = f"{rate}, nearly as fast as {fastest.label} ({others}; noise {noise}): {why}"
    if ceilings and chosen.stage == "workers":
        name, samples = max(ceilings.items(), key=lambda each: statistics.median(each[1]))
        ceiling = statistics.median(samples)
        text += f"; {chosen.gib_per_s / ceiling:.0%} of plain writes ({name}: {ceiling:.2f} GiB/s)"
    return text


def default_workers() -> tuple[int, ...]:
    """Return the numbers of workers that are tried by default: powers of two, up to the cores or 8."""
    most = min(_MOST_WORKERS, len(os.sched_getaffinity(0)))
    return tuple(1 << doublings for doublings in range(most.bit_length()))


def plain_write(folder: str | os.PathLike[str], nbytes: int, *, direct: bool, files: int) -> float:
    """Return the seconds to write `nbytes` into new files at the same time, and to make them durable.

    As plainly as it can be done: a thread for each file writes blocks of 32 MiB from one buffer, and syncs.

    Args:
        folder: Where to; the files are removed.
        nbytes: In all; rounded up to a page for each file.
        direct: Whether to go past the page cache (O_DIRECT).
        files: How many.

    Raises:
        OSError: The file system refuses, for example O_DIRECT.
    """
    share = max(_PAGE_BYTES, align(-(-nbytes // files), _PAGE_BYTES))
    paths = [os.path.join(folder, f"plain-{number}") for number in range(files)]
    try:
        with (
            mmap.mmap(-1, min(share, _PLAIN_BLOCK_BYTES)) as buffer,
            memoryview(buffer) as block,
            ThreadPoolExecutor(files) as pool,
        ):
            # What no storage can shrink.
            pattern = os.urandom(min(len(buffer), _MIB))
            while (left := len(buffer) - buffer.tell()) > 0:
                buffer.write(pattern[:left])
            # Threads that have started already.
            list(pool.map(lambda _: None, paths))
            started = time.perf_counter()
            list(pool.map(lambda path: _write_plainly(path, share, block, direct=direct), paths))
            return time.perf_counter() - started
    finally:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _write_plainly(path: str, nbytes: int, block: memoryview, *, direct: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    fd = os.open(path, flags, 0o600)
    try:
        done = 0
        while done < nbytes:
            with block[: nbytes - done] as piece:
                written = os.pwrite(fd, piece, done)
            if written % _PAGE_BYTES:
                raise OSError(errno.EIO, f"wrote {written} bytes", path)
            done += written
        os.fsync(fd)
    finally:
        os.close(fd)


def sweep(
    path: str | os.PathLike[str],
    *,
    nbytes: int | None = None,
    seconds: float = 60.0,
    workers: Sequence[int] | None = None,
    buckets: Sequence[int] = BUCKETS,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[str], object] | None = None,
) -> Tuning:
    """Measure which settings suit a target, by saves of one process from host memory.

    Args:
        path: A directory that exists, or a URL. What is written below it is removed again.
        nbytes: Bytes of each save; None: by free memory, free space, and how fast the target is.
        seconds: About how long it may take; what there is no time for is left at its default.
        workers: Numbers of workers to try; None: `default_workers`.
        buckets: Bucket sizes to try beside the default.
        storage_options: As for `Checkpointer`.
        progress: Told in a few words what is measured next.

    Returns:
        The figures, and the flags that follow from them.

    Raises:
        ConfigError: An argument is wrong, there is no such directory, or memory or space are too little.
        CheckpointError: A save failed.
    """
    started = time.monotonic()
    counts = default_workers() if workers is None else workers
    _check_numbers(counts, nbytes, seconds)
    counts = sorted(set(counts))
    target = _Target(path, dict(storage_options or {}))
    most_bytes, why = target.most_bytes(num_candidates=max(len(counts), 1 + len(buckets), 2))
    if most_bytes < (nbytes or _LEAST_BYTES):
        raise ConfigError(f"saves of {_size(nbytes or _LEAST_BYTES)} are too large: {why}")
    with target.scratch() as place, contextlib.ExitStack() as candidates:
        run = _Sweep(target, place, candidates, started, seconds, progress or (lambda _: None))
        run.make_state(nbytes or run.suitable_bytes(counts[0], most_bytes))
        chosen = run.compare_workers(counts)
        chosen = run.compare_buckets(chosen, sorted(set(buckets)))
        run.compare_direct(chosen)
        run.compare_parts(chosen)
    return Tuning(
        os.fspath(path),
        run.nbytes,
        time.monotonic() - started,
        run.trials,
        run.ceilings,
        [flag for flag, _ in run.answers],
        [reason for _, reason in run.answers],
        run.options,
        run.option_reasons,
    )


def _check_numbers(workers: Sequence[int], nbytes: int | None, seconds: float) -> None:
    if not workers or not all(type(each) is int and each >= 1 for each in workers):
        raise ConfigError(f"workers: expected integers of at least 1, got {list(workers)}")
    if nbytes is not None and nbytes < _LEAST_BYTES:
        raise ConfigError(f"nbytes: expected at least {_LEAST_BYTES}, got {nbytes}")
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"seconds: expected a finite number greater than 0, got {seconds}")


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB" if nbytes >= _GIB else f"{nbytes / _MIB:.0f} MiB"


class _Target:
    """Where the sweep writes.

    Args:
        path: As for `sweep`.
        options: As for `open_storage`.

    Raises:
        ConfigError: It is a local path, and no directory that can be written to.
    """

    def __init__(self, path: str | os.PathLike[str], options: dict[str, Any]) -> None:
        self.options = options
        storage = open_storage(path, options)
        self.url = storage.url.rstrip("/")
        self.part_bytes = storage.part_bytes(0)
        self.parts_at_once = storage.in_flight if storage.spec.get("kind") == "s3" else None
        """Of each worker, where it can be set."""
        self.root = Path(storage.spec["root"]) if storage.spec.get("kind") == "posix" else None
        """Of a local directory."""
        if self.root is None:
            return
        if not self.root.is_dir():
            raise ConfigError(f"there is no directory {self.root}")
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise ConfigError(f"{self.root} cannot be written to")

    def most_bytes(self, num_candidates: int) -> tuple[int, str]:
        """Return the most bytes that a save may have, and why no more.

        Args:
            num_candidates: How many at a time keep a state in host memory.
        """
        available, states = available_memory(), num_candidates + _MEMORY_FACTOR
        most_bytes = available // states
        why = f"host memory must hold {states} of them, and {_size(available)} are available"
        if self.root is not None:
            status = os.statvfs(self.root)
            free = status.f_bavail * status.f_frsize
            if free // _FREE_FACTOR < most_bytes:
                most_bytes = free // _FREE_FACTOR
                why = f"{self.root} must have room for {_FREE_FACTOR} of them, and {_size(free)} are free"
        return most_bytes, f"{why}: at most {_size(most_bytes)}"

    @contextlib.contextmanager
    def scratch(self) -> Iterator[str]:
        """Make a directory below the target, and remove it with all that is in it at the end."""
        url = f"{self.url}/{_SCRATCH}{uuid.uuid4().hex}"
        has_begun = False
        try:
            open_storage(url, self.options).prepare()
            has_begun = True
            yield url
        except BaseException:
            if has_begun or self.root is not None:
                try:
                    self.remove(url)
                except CheckpointError as error:
                    _LOG.warning("%s was not removed: %s", url, error)
            raise
        self.remove(url)

    def remove(self, url: str) -> None:
        """Remove a directory and all that is in it."""
        storage = open_storage(url, self.options)
        for name, handle in storage.unfinished():
            storage.abort(name, handle)
        for name in storage.list():
            if name.endswith("/"):
                self.remove(f"{url}/{name.rstrip('/')}")
            else:
                storage.delete(name)
        storage.remove_directory()


class _Candidate:
    """A `Checkpointer` with the settings that are tried, and what its saves took.

    Args:
        target: Where it saves,
        url: and in which directory below.
        workers: As `dist_ckpt_workers`.
        bucket_bytes: As `ckpt_bucket_bytes`; None is auto.
        direct_io: As `ckpt_direct_io`.
        parts_at_once: As `max_concurrency` among the storage options; None: as it is.

    Raises:
        ConfigError: A setting cannot be honoured here.
    """

    def __init__(
        self,
        target: _Target,
        url: str,
        *,
        workers: int,
        bucket_bytes: int | None = None,
        direct_io: bool = True,
        parts_at_once: int | None = None,
    ) -> None:
        self.workers = workers
        self.bucket_bytes = bucket_bytes
        self.direct_io = direct_io
        self.parts_at_once = parts_at_once or target.parts_at_once
        self.seconds: list[float] = []
        self.write_seconds: list[float] = []
        self.is_cold = True
        """Whether its first save, which reserves memory and starts workers, is still to come."""
        self._target = target
        options = {} if parts_at_once is None else {"max_concurrency": parts_at_once}
        self._checkpointer = Checkpointer(
            url,
            participants=_only_this_rank(),
            storage_options=target.options | options,
            dist_ckpt_workers=workers,
            ckpt_bucket_bytes=bucket_bytes or "auto",
            ckpt_direct_io=direct_io,
        )
        self._num_saves = 0

    def save(self, state: Mapping[str, Any]) -> None:
        """Save `state`, note what it took, and remove the checkpoint."""
        spans: list[float] = []

        def note(event: Event) -> None:
            if event.name == "files.written":
                spans.append(float(event.fields["end_s"]) - float(event.fields["start_s"]))  # type: ignore[arg-type]

        end = observe.subscribe(note)
        try:
            started = time.perf_counter()
            handle = self._checkpointer.save(self._num_saves, state)
            seconds = time.perf_counter() - started
        finally:
            end()
        self._num_saves += 1
        self._target.remove(handle.path)
        self.is_cold = False
        self.seconds.append(seconds)
        self.write_seconds += spans[-1:]

    def close(self) -> None:
        """Wait for a save that was interrupted, and give memory and workers back; idempotent."""
        # What failed has been raised already.
        with contextlib.suppress(CheckpointError):
            self._checkpointer.close()


def _only_this_rank() -> list[int] | None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return [distributed.get_rank()]
    return None


def _make_state(nbytes: int) -> dict[str, torch.Tensor]:
    """Return tensors of `nbytes` together, of bytes that no storage can shrink."""
    count = min(_NUM_TENSORS, nbytes // _LEAST_BYTES)
    sizes = [nbytes * (number + 1) // count - nbytes * number // count for number in range(count)]
    pattern = torch.frombuffer(bytearray(os.urandom(_MIB)), dtype=torch.uint8)
    return {
        f"layer-{number}": pattern.repeat(-(-size // _MIB))[:size].clone()
        for number, size in enumerate(sizes)
    }


class _Sweep:
    """The stages of one sweep, and what they have found.

    Args:
        target: What is measured.
        place: A directory of its own there, as a URL.
        closing: Closes the candidates at the end.
        started: When the sweep began, by `time.monotonic()`.
        seconds: How long it may take.
        tell: See `sweep`.
    """

    def __init__(
        self,
        target: _Target,
        place: str,
        closing: contextlib.ExitStack,
        started: float,
        seconds: float,
        tell: Callable[[str], object],
    ) -> None:
        self.nbytes = 0
        self.trials: list[Trial] = []
        self.ceilings: dict[str, list[float]] = {}
        self.answers: list[tuple[str, str]] = []
        """Flags with their reasons."""
        self.options: dict[str, int] = {}
        self.option_reasons: list[str] = []
        self._target = target
        self._place = place
        self._closing = closing
        self._started = started
        self._seconds = seconds
        self._tell = tell
        self._state: dict[str, torch.Tensor] = {}
        self._num_opened = 0
        self._has_direct_io = target.root is not None and _takes_direct_io(place)

    def make_state(self, nbytes: int) -> None:
        """Make what is saved from now on."""
        self.nbytes = nbytes
        self._state = _make_state(nbytes)

    def suitable_bytes(self, workers: int, most_bytes: int) -> int:
        """Return the bytes of a save of which as many as it takes fit into the time; found by a small one."""
        probe_bytes = min(_PROBE_BYTES, most_bytes)
        state, candidate = _make_state(probe_bytes), self._open(workers=workers)
        self._tell(f"how large a save may be, by one of {_size(probe_bytes)}")
        for _ in range(2):
            candidate.save(state)
        candidate.close()
        nbytes = int(probe_bytes / candidate.seconds[-1] * self._seconds / _SAVES)
        return max(probe_bytes, min(nbytes, most_bytes, _MOST_BYTES) // _PROBE_BYTES * _PROBE_BYTES)

    def compare_workers(self, counts: Sequence[int]) -> _Candidate:
        """Compare numbers of workers; returns the best."""
        candidates = [self._open(workers=count) for count in counts]
        chosen = self._compare("workers", candidates, self._plain_writes(max(counts)))
        self._answer(f"--dist-ckpt-workers {chosen.workers}", "workers")
        return chosen

    def compare_buckets(self, incumbent: _Candidate, buckets: Sequence[int]) -> _Candidate:
        """Compare bucket sizes with the default; returns the best."""
        flag = "--ckpt-bucket-bytes"
        # What auto comes to is not tried twice; nor what is more than a lane writes.
        usual, share = self._target.part_bytes or _USUAL_BUCKET_BYTES, self.nbytes // incumbent.workers
        sizes = [each for each in buckets if each != usual and each <= share]
        # One whose state passes through the budget in waves is not like the others.
        room = available_memory() // 2 - self.nbytes
        sizes = [each for each in sizes if max(_FEWEST_SPARE, incumbent.workers + 2) * each <= room]
        if not sizes:
            self._leave(
                f"{flag} auto",
                f"{_size(self.nbytes)} and the memory that is free are too few to tell sizes apart",
            )
            return incumbent
        if not self._has_time("buckets", incumbent, len(sizes)):
            self._leave(f"{flag} auto", f"no time left of {self._seconds:g} s")
            return incumbent
        candidates, refusal = [incumbent], ""
        for size in sizes:
            try:
                candidates.append(self._open(workers=incumbent.workers, bucket_bytes=size))
            except ConfigError as error:
                refusal = str(error)
        if len(candidates) == 1:
            self._leave(f"{flag} auto", refusal)
            return incumbent
        chosen = self._compare("buckets", candidates)
        size_text = "auto" if chosen.bucket_bytes is None else f"{chosen.bucket_bytes // _MIB}MiB"
        self._answer(f"{flag} {size_text}", "buckets")
        return chosen

    def compare_direct(self, incumbent: _Candidate) -> None:
        """Compare O_DIRECT with the page cache, where there is O_DIRECT."""
        if not self._has_direct_io:
            return
        if not self._has_time("direct", incumbent, 1):
            self._leave("--ckpt-direct-io", f"no time left of {self._seconds:g} s")
            return
        cached = self._open(workers=incumbent.workers, bucket_bytes=incumbent.bucket_bytes, direct_io=False)
        chosen = self._compare("direct", [incumbent, cached])
        self._answer("--ckpt-direct-io" if chosen.direct_io else "--no-ckpt-direct-io", "direct")

    def compare_parts(self, incumbent: _Candidate) -> None:
        """Compare numbers of parts that each worker has under way, where it can be told."""
        usual = self._target.parts_at_once
        if usual is None:
            return
        # What is under way at once must be there.
        most = self.nbytes // incumbent.workers // (incumbent.bucket_bytes or self._target.part_bytes)
        numbers = [number for number in PARTS if number != usual and number <= most]
        if numbers and self._has_time("parts", incumbent, len(numbers)):
            settings = {"workers": incumbent.workers, "bucket_bytes": incumbent.bucket_bytes}
            others = [self._open(**settings, parts_at_once=number) for number in numbers]
            chosen = self._compare("parts", [incumbent, *others])
            usual = chosen.parts_at_once or usual
            reason = reason_for([trial for trial in self.trials if trial.stage == "parts"], self.ceilings)
        elif numbers:
            reason = f"left as it is: no time left of {self._seconds:g} s"
        else:
            reason = f"left as it is: {_size(self.nbytes)} are too few parts"
        self.options["max_concurrency"] = usual
        self.option_reasons.append(reason)

    def _open(self, **settings: Any) -> _Candidate:
        candidate = _Candidate(self._target, f"{self._place}/{self._num_opened}", **settings)
        self._num_opened += 1
        self._closing.callback(candidate.close)
        return candidate

    def _compare(
        self,
        stage: str,
        candidates: Sequence[_Candidate],
        others: Mapping[str, Callable[[], object]] = _NOTHING,
    ) -> _Candidate:
        """Measure candidates in turn, with `others`; returns the one that is chosen, and closes the rest."""
        for each in candidates:
            if each.is_cold:
                self._tell(f"{stage}: the first save of {self._trial(stage, each).label}")
                each.save(self._state)
            each.seconds, each.write_seconds = [], []
        turns = dict(others)
        for each in candidates:
            turns[self._trial(stage, each).label] = functools.partial(each.save, self._state)
        for number in range(_MOST_ROUNDS):
            began = time.monotonic()
            # There and back: who comes after whom matters on a disk that has a cache.
            for label, measure in list(turns.items())[:: -1 if number % 2 else 1]:
                self._tell(f"{stage}, round {number + 1}: {label}")
                measure()
            now = time.monotonic()
            if now + (now - began) > self._deadline(stage):
                break
        trials = [self._trial(stage, each) for each in candidates]
        self.trials += trials
        chosen = candidates[trials.index(choose(trials))]
        for each in candidates:
            if each is not chosen:
                each.close()
        return chosen

    def _plain_writes(self, files: int) -> dict[str, Callable[[], object]]:
        """Return what measures the ceilings, by their names."""
        if self._target.root is None:
            return {}
        kinds = {"O_DIRECT": True, "page cache": False} if self._has_direct_io else {"page cache": False}
        return {
            f"plain writes, {kind}, {files} file{'s' * (files > 1)}": functools.partial(
                self._write_plainly, f"{kind}, {files} file{'s' * (files > 1)}", files, direct=direct
            )
            for kind, direct in kinds.items()
        }

    def _write_plainly(self, name: str, files: int, *, direct: bool) -> None:
        try:
            seconds = plain_write(self._place, self.nbytes, direct=direct, files=files)
        except OSError as error:
            raise WriteError(
                f"cannot write to {self._place}: {error}", errno=error.errno, path=self._place
            ) from error
        self.ceilings.setdefault(name, []).append(self.nbytes / _GIB / seconds)

    def _trial(self, stage: str, candidate: _Candidate) -> Trial:
        return Trial(
            stage,
            candidate.workers,
            candidate.bucket_bytes,
            candidate.direct_io if self._has_direct_io else None,
            self.nbytes,
            candidate.seconds,
            candidate.write_seconds,
            candidate.parts_at_once,
        )

    def _deadline(self, stage: str) -> float:
        return self._started + self._seconds * _SHARES[stage]

    def _has_time(self, stage: str, incumbent: _Candidate, num_new: int) -> bool:
        """Say whether there is time for the first saves of new candidates and for one round."""
        expected_s = statistics.median(incumbent.seconds) * (2 * num_new + 1)
        return time.monotonic() + expected_s <= self._deadline(stage)

    def _answer(self, flag: str, stage: str) -> None:
        trials = [trial for trial in self.trials if trial.stage == stage]
        self.answers.append((flag, reason_for(trials, self.ceilings)))

    def _leave(self, flag: str, why: str) -> None:
        self.answers.append((flag, f"left at its default: {why}"))


def _takes_direct_io(folder: str) -> bool:
    try:
        plain_write(folder, _PAGE_BYTES, direct=True, files=1)
    except OSError:
        return False
    return True

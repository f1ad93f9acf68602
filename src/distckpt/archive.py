"""All steps of a training job: where they lie, which are complete, which stay, and their copies elsewhere.

    commit of a step   -> the file `latest` names it
                       -> what steps before it have left unfinished is removed
                       -> in the background: it is uploaded, and what no policy keeps is removed

With a local tier, checkpoints are committed in a directory of this machine, and uploaded from there to the
root one at a time, the newest first. A checkpoint is nearest where it is local.

Invariants:
    * What is newer than the newest committed checkpoint is not touched, nor what a save is under way to.
    * What is behind a link can be read, and is never removed.
    * A local checkpoint is not removed while it is uploaded; the newest stays.
    * A local checkpoint that is damaged keeps no other from being uploaded, nor takes its place here.

Threads: the caller's; one that removes, and one that uploads, of its own. Torch-free.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import threading
import time
import uuid
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from distckpt.commit import committed_by, details_of, reclaim, remove_checkpoint, writer_may_live
from distckpt.errors import CheckpointError, CommitError, ConfigError, IntegrityError, WriteError
from distckpt.exitstatus import note_failure
from distckpt.manifest import METADATA
from distckpt.mirror import mirror
from distckpt.retention import LATEST, Saved, committed_at, kept_steps
from distckpt.storage import linked_directories, open_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from distckpt.config import CheckpointConfig
    from distckpt.storage import Storage

__all__ = ["Archive", "Copy"]

_LOG = logging.getLogger(__name__)
_PREFIX = "step-"
_STEP_DIGITS = 8
_BAD_MEDIUM = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA})
_IDLE_TIMEOUTS = 2.0
"""A save in whose directory nothing has changed for so many deadlines is over."""
_TICK_S = 0.001

_archives: weakref.WeakSet[Archive] = weakref.WeakSet()
"""Those of this process."""


def _step_of(name: str) -> int | None:
    """Return the step whose directory has this name, as `Storage.list` spells it."""
    text = name.removeprefix(_PREFIX).removesuffix("/")
    is_step = text.isdecimal() and name == f"{_PREFIX}{int(text):0{_STEP_DIGITS}}/"
    return int(text) if is_step else None


class Copy(NamedTuple):
    """One place where a step may be.

    Attributes:
        step: The step.
        tier: 0: where saves are committed; 1: where they are uploaded to.
    """

    step: int
    tier: int


class Archive:
    """The steps under one root, and under the local directory before it if there is one.

    Args:
        root: Directory of all steps, or a URL.
        options: Storage options of `root`.
        config: Settings.
        under_way: Returns the steps to which a save is under way, with that of the caller.

    Attributes:
        url: Where saves are committed.

    Raises:
        ConfigError: A directory, the URL or an option cannot be honoured.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        options: Mapping[str, Any],
        config: CheckpointConfig,
        under_way: Callable[[], Collection[int]],
    ) -> None:
        self._config = config
        self._options = options
        self._under_way = under_way
        # Absolute, wherever the process goes meanwhile.
        url = self._open_at(root, is_root=True).url.rstrip("/") or "/"
        self._urls = [url]
        if config.ckpt_local_dir:
            # Jobs with other roots share the directory, and their steps have the same names; one root may be
            # spelt in more than one way.
            named = os.path.realpath(url) if os.path.isabs(url) else url
            name = hashlib.sha256(named.encode("utf-8", "surrogatepass")).hexdigest()[:12]
            local = os.path.join(os.path.abspath(os.path.expanduser(config.ckpt_local_dir)), name)
            self._urls.insert(0, local)
        self._known: list[dict[int, Saved]] = [{} for _ in self._urls]
        """Committed checkpoints of each tier, as far as something was asked of them."""
        self._empty: list[set[int]] = [set() for _ in self._urls]
        """Steps of each tier whose directories hold no checkpoint: some servers list those that are gone."""
        self._settled: list[set[int]] = [set() for _ in self._urls]
        """Steps of each tier in whose directories nothing is to be cleared away."""
        self._has_cleared: set[int] = set()
        """Tiers without what an earlier process may have left of the file `latest`."""
        self._cleaner: ThreadPoolExecutor | None = None
        self._uploader: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._uploading: int | None = None
        self._stop = threading.Event()
        self._going: set[int] = set()
        """Local steps that are removed."""
        self._has_saved = self._has_ended = False
        self._last: Saved | None = None
        """What was committed here last, whatever the clock says: another machine's may have been ahead."""
        self._upload_error: CheckpointError | None = None
        self._damaged: dict[Saved, str] = {}
        """Local checkpoints that cannot be uploaded, and why."""
        self._has_news_of_damage = False
        self._sent: set[Saved] = set()
        """Local checkpoints that were uploaded: retention may have removed them from the root since."""
        self._own: set[Saved] = set()
        """Local checkpoints that were committed here since there was news of damage."""
        self._over: set[str] = set()
        """Ids of removals, and of saves that are not uploaded any more."""
        _archives.add(self)

    @property
    def url(self) -> str:
        """Where saves are committed."""
        return self._urls[0]

    @property
    def root(self) -> Storage:
        """The directory of all steps that are committed here."""
        return self._open_tier(0)

    def path(self, step: int, tier: int = 0) -> str:
        """Return the directory of a step."""
        return f"{self._urls[tier].rstrip('/')}/{_PREFIX}{step:0{_STEP_DIGITS}}"

    def options_of(self, tier: int) -> Mapping[str, Any]:
        """Return the storage options of a tier."""
        return self._options if tier == len(self._urls) - 1 else {}

    def open(self, step: int, tier: int = 0) -> Storage:
        """Open the directory of a step; nothing is asked of the storage."""
        return self._open_at(self.path(step, tier), is_root=tier == len(self._urls) - 1)

    def _open_tier(self, tier: int) -> Storage:
        return self._open_at(self._urls[tier], is_root=tier == len(self._urls) - 1)

    def _open_at(self, path: str | os.PathLike[str], *, is_root: bool) -> Storage:
        return open_storage(
            path,
            self._options if is_root else {},
            timeout_s=self._timeout_s,
            direct_io=self._config.ckpt_direct_io,
            bucket_bytes=self._config.bucket_bytes() if is_root else 0,
        )

    @property
    def _timeout_s(self) -> float:
        return self._config.distributed_timeout_minutes * 60

    @property
    def _idle_s(self) -> float:
        return _IDLE_TIMEOUTS * self._timeout_s

    def steps(self) -> list[int]:
        """Return the steps that are complete anywhere, ascending."""
        return sorted({copy.step for copy in self.copies()})

    def copies(self) -> Iterator[Copy]:
        """Yield all that is complete, the newest step first, and of a step the place of `find` first.

        Nothing is asked of a directory before it is its turn.
        """
        steps = {step for tier in range(len(self._urls)) for step in self._directories(tier, with_links=True)}
        for step in sorted(steps, reverse=True):
            yield from self._places(step)

    def find(self, step: int, leave_out: Collection[Copy] = ()) -> Copy | None:
        """Return where a step is complete: in the place of the later save, and of one save in the nearest.

        Args:
            step: The step.
            leave_out: Places that are no use.
        """
        return next((place for place in self._places(step) if place not in leave_out), None)

    def has_local(self, url: str) -> bool:
        """Say whether this uploads the checkpoints of a local directory, until it is closed."""
        return self.has_tiers and self._urls[0] == url and not self._has_ended

    @property
    def has_tiers(self) -> bool:
        """Whether a step may be complete in more than one place."""
        return len(self._urls) > 1

    def _places(self, step: int) -> list[Copy]:
        places = [Copy(step, tier) for tier in range(len(self._urls)) if self._is_readable(step, tier)]
        if len(places) > 1:
            times = {place: self._time_s(place) for place in places}
            places.sort(key=lambda place: (-times[place], place.tier))
        return places

    def _is_readable(self, step: int, tier: int) -> bool:
        try:
            return self.is_complete(step, tier)
        except WriteError as error:
            if tier or not self.has_tiers or not self._is_of_medium(error, step):
                raise
            _LOG.warning("left out: %s", error)
            return False

    def _time_s(self, place: Copy) -> float:
        try:
            return self._details(place).time_s or 0.0
        except WriteError as error:
            if place.tier or not self._is_of_medium(error, place.step):
                raise
            # The other place is the better one.
            return 0.0

    def _details(self, place: Copy) -> Saved:
        details = details_of(self.open(*place)) or {}
        return Saved(place.step, _number(details.get("time")), _number(details.get("metric")))

    def is_complete(self, step: int, tier: int = 0) -> bool:
        """Say whether a step is complete in a tier."""
        return self.open(step, tier).read(METADATA, nbytes=0) is not None

    def _directories(self, tier: int, *, with_links: bool = False) -> list[int]:
        """Return the steps that have a directory, or a link to one: to be read, and never removed."""
        storage = self._open_tier(tier)
        names = list(storage.list())
        if with_links:
            names += linked_directories(storage)
        return sorted(step for name in names if (step := _step_of(name)) is not None)

    def why_nothing(self) -> str:
        """Return what may be wrong about a root without checkpoints; nothing if it looks like a new one.

        Raises:
            ConfigError: It is a checkpoint itself.
        """
        names = list(self._open_tier(len(self._urls) - 1).list())
        if METADATA in names:
            url = self._urls[-1].rstrip("/")
            raise ConfigError(
                f"{url} is itself a checkpoint: the root is the directory of all steps, above it"
            )
        alike = [name for name in sorted(names) if name.endswith("/") and re.search(r"\d/$", name)]
        others = [name.rstrip("/") for name in alike if _step_of(name) is None]
        if not others:
            return ""
        return f"it has {', '.join(others[:3])}, and only {_PREFIX}{'N' * _STEP_DIGITS} is looked at"

    def take(
        self, step: int, save_id: str, failed: Collection[str], metric: float | None, time_s: float
    ) -> None:
        """See to what is due after the commit of a step; failures are said in the log.

        Args:
            step: The step.
            save_id: Of its save.
            failed: Ids of saves that are known to be over.
            metric: What it was saved with.
            time_s: When it was committed, in seconds since the epoch.
        """
        saved = Saved(step, time_s, metric)
        with self._lock:
            self._known[0][step] = saved
            self._empty[0].discard(step)
            self._own.add(saved)
            self._last = saved
        self._has_saved = True
        self._point_to(step, 0)
        self._reclaim(0, step, save_id, {*failed, *self._over})
        if self._cleaner is None:
            self._cleaner = ThreadPoolExecutor(1, thread_name_prefix="distckpt-retention")
        if len(self._urls) > 1:
            _submit(self._cleaner, self._trim)
            self.upload()
        elif self._config.has_retention:
            _submit(self._cleaner, self._retain, 0)

    def expect(self, step: int) -> None:
        """Note that a save to `step` begins: what it may leave there is to be cleared away again."""
        for settled in self._settled:
            settled.discard(step)

    def resume(self) -> None:
        """Begin to upload what a process before this one has left; not what one that may live will upload."""
        if len(self._urls) == 1 or any(other.has_local(self._urls[0]) for other in {*_archives} - {self}):
            return
        try:
            steps = self._directories(0)
            is_anothers = bool(steps) and self._is_anothers(steps[-1])
        except CheckpointError as error:
            _LOG.warning("what was not uploaded is after the next save: %s", error)
            return
        if not is_anothers:
            self.upload()

    def _is_anothers(self, step: int) -> bool:
        try:
            return writer_may_live(self.open(step))
        except WriteError as error:
            if not self._is_of_medium(error, step):
                raise
            # As one that is damaged tells of nobody.
            return False

    def upload(self) -> None:
        """Begin to upload what the root lacks."""
        if len(self._urls) == 1:
            return
        if self._uploader is None:
            self._uploader = ThreadPoolExecutor(1, thread_name_prefix="distckpt-upload")
        _submit(self._uploader, self._upload_all)

    def close(self) -> None:
        """Wait until all is uploaded and removed that is to be; idempotent.

        Raises:
            CheckpointError: The newest checkpoint could not be uploaded: it is on this machine alone.
        """
        for pool in (self._uploader, self._cleaner):
            if pool is not None:
                pool.shutdown(wait=True)
        self._uploader = self._cleaner = None
        self._has_ended = True
        error, self._upload_error = self._upload_error, None
        if error is not None:
            raise error

    def take_news_of_damage(self) -> bool:
        """Say, once, whether an upload has found damage in a checkpoint that was committed since it last did.

        Whoever shares files with that checkpoint shares its damage.
        """
        with self._lock:
            news, self._has_news_of_damage = self._has_news_of_damage, False
            if news:
                self._own.clear()
        return news

    def stop(self) -> None:
        """Have uploads end soon; the next process goes on with them."""
        self._stop.set()

    def _point_to(self, step: int, tier: int) -> None:
        """Have the file `latest` name a step that is committed, unless a newer one is."""
        storage = self._open_tier(tier)
        try:
            known = storage.read(LATEST)
            named = "" if known is None else known.decode(errors="replace").strip()
            text = named.removeprefix(_PREFIX)
            if text.isdecimal() and int(text) > step and self.is_complete(int(text), tier):
                return
            storage.put(LATEST, f"{_PREFIX}{step:0{_STEP_DIGITS}}\n".encode())
        except CheckpointError as error:
            _LOG.warning("%s/%s still names what was the latest before: %s", storage.url, LATEST, error)

    def _reclaim(self, tier: int, committed: int, save_id: str, failed: Collection[str]) -> None:
        """Remove what is left of earlier steps that were never completed, be it by a process before this.

        And of a file `latest` that one was about to replace when it was killed; if it lives, it hears so.
        """
        settled = self._settled[tier]
        settled.add(committed)
        under_way = set(self._under_way())
        try:
            if tier not in self._has_cleared:
                self._open_tier(tier).revoke(LATEST)
                self._has_cleared.add(tier)
            steps = self._directories(tier)
            if tier:
                # To be uploaded yet, perhaps; what is not local any more will not be.
                under_way.update(self._directories(0))
        except CheckpointError as error:
            # What was committed is, whatever becomes of this.
            _LOG.warning("what is left of earlier steps stays: %s", error)
            return
        for step in steps:
            if step >= committed or step in under_way or step in settled:
                continue
            try:
                storage = self.open(step, tier)
                if (
                    self.is_complete(step, tier)
                    or reclaim(storage, save_id, failed=failed, idle_s=self._idle_s)
                    # Some servers list directories that are gone.
                    or storage.last_change() is None
                ):
                    settled.add(step)
            except CheckpointError as error:
                _LOG.warning("what is left of step %d at %s stays: %s", step, self._urls[tier], error)

    def _retain(self, tier: int) -> None:
        """Remove the committed checkpoints of a tier that no policy keeps."""
        try:
            saved = self._saved(tier)
        except CheckpointError as error:
            _LOG.warning("no checkpoint is removed: %s", error)
            return
        kept = self._kept(saved)
        for one in sorted(saved, key=lambda one: one.step):
            if one.step not in kept:
                self._remove(one, tier)

    def _kept(self, saved: Collection[Saved]) -> set[int]:
        """Return the steps that stay."""
        return kept_steps(saved, self._config) | {one.step for one in [self._last] if one is not None}

    def _committed_at(self, one: Saved) -> tuple[bool, float, int]:
        """Return what orders local checkpoints by when they were committed: this process knows its last."""
        return one == self._last, *committed_at(one)

    def time_of_commit(self, step: int) -> float:
        """Return the time that the record of a commit is to bear, in seconds since the epoch.

        After that of the same step elsewhere: of two copies the later one counts. As far as is known here:
        the root may be away.
        """
        before = [tier.get(step) for tier in self._known]
        if self.has_tiers:
            with contextlib.suppress(CheckpointError):
                before.append(self._details(Copy(step, 0)))
        times = [one.time_s + _TICK_S for one in before if one is not None and one.time_s is not None]
        return max([time.time(), *times])

    def _saved(self, tier: int) -> list[Saved]:
        """Return the committed checkpoints of a tier, with what retention goes by.

        Raises:
            WriteError: The storage refuses; not where one local checkpoint cannot be read.
        """
        known = self._known[tier]
        before = set(known)
        steps = self._directories(tier)
        for step in steps:
            if step in known or step in self._empty[tier]:
                continue
            try:
                is_complete = self.is_complete(step, tier)
                details = self._details(Copy(step, tier)) if is_complete else None
            except WriteError as error:
                if tier or not self._is_of_medium(error, step):
                    raise
                details = Saved(step)
                self._note_damage(details, str(error))
            with self._lock:
                if details is not None:
                    # It may have been saved again meanwhile.
                    known.setdefault(step, details)
                elif step not in known:
                    self._empty[tier].add(step)
        for gone in before - set(steps):
            known.pop(gone, None)
        return list(known.values())

    def _remove(self, one: Saved, tier: int) -> None:
        """Remove a checkpoint, unless its step was saved again since it was chosen."""
        step = one.step
        # In this order: a save is under way until what is known of its step was replaced.
        if tier == 0 and (step in self._under_way() or self._known[0].get(step) is not one):
            return
        removal = uuid.uuid4().hex
        self._over.add(removal)
        try:
            storage = self.open(step, tier)
            if remove_checkpoint(storage, removal, failed=self._over, idle_s=self._idle_s):
                self._known[tier].pop(step, None)
                self._empty[tier].add(step)
                if tier == 0:
                    with self._lock:
                        self._own.discard(one)
                        self._sent.discard(one)
                        self._damaged.pop(one, None)
                _LOG.info("removed %s", self.path(step, tier))
        except CheckpointError as error:
            _LOG.warning("%s stays: %s", self.path(step, tier), error)

    def _upload_all(self) -> None:
        """Upload what the root lacks, and remove what is to go there and here."""
        while not self._stop.is_set():
            try:
                saved = self._next_upload()
                if saved is None:
                    return
                self._upload(saved)
                if self._has_saved:
                    # Who only looks has not been told how many are to stay.
                    self._trim()
            except BaseException as error:  # noqa: BLE001 - the top frame of a thread: close() raises it
                if not isinstance(error, CheckpointError):
                    error = CheckpointError(f"{type(error).__name__}: {error}")
                _LOG.error("the upload to %s failed: %s", self._urls[1], error)
                note_failure()
                self._upload_error = error
                return

    def _next_upload(self) -> Saved | None:
        """Return the newest step that is to be uploaded and can be; it is not removed here until it is."""
        here, there = self._saved(0), self._saved(1)
        # What is damaged is no reason for another to stay behind.
        whole = [one for one in here if one not in self._damaged]
        kept = self._kept([*{one.step: one for one in (*there, *whole)}.values()])
        uploaded = {one.step: one for one in there}
        timed = sorted((one for one in whole if one.time_s is not None), key=self._committed_at)
        # Without a time, a record is damaged: it comes last. Of the others, older ones are about to go.
        untimed = [one for one in whole if one.time_s is None]
        missing = [
            one
            for one in (*untimed, *timed[-self._config.ckpt_local_keep :])
            if one.step in kept and one not in self._sent and _is_newer(one, uploaded.get(one.step))
        ]
        with self._lock:
            left = [
                one for one in missing if one.step not in self._going and self._known[0].get(one.step) is one
            ]
            # What was committed last comes first.
            found = left[-1] if left else None
            self._uploading = found.step if found else None
        if found is None:
            last = [max(here, key=self._committed_at), max(here, key=lambda one: one.step)] if here else []
            texts = [
                self._damaged[one]
                for one in last
                if one in self._damaged and _is_newer(one, uploaded.get(one.step))
            ]
            self._upload_error = IntegrityError(texts[0]) if texts else None
            if texts:
                note_failure()
        return found

    def _upload(self, saved: Saved) -> None:
        step = saved.step
        try:
            mirror(self.open(step, 0), self.open(step, 1), stop=self._stop, timeout_s=self._timeout_s)
            if self._stop.is_set():
                return
        except (CommitError, IntegrityError, WriteError) as error:
            if isinstance(error, IntegrityError) and error.item is not None:
                # Bytes that have changed: those of other steps that share them, even if it is saved again.
                with self._lock:
                    self._has_news_of_damage |= saved in self._own
            if not self._is_damage(error, saved):
                raise
            self._note_damage(saved, str(error))
            return
        finally:
            with self._lock:
                self._uploading = None
        # As it was before: it may have been saved again meanwhile.
        with self._lock:
            self._known[1][step] = saved
            self._empty[1].discard(step)
            self._sent.add(saved)
        self._upload_error = None
        self._point_to(step, 1)
        _LOG.info("uploaded %s", self.path(step, 1))
        self._reclaim(1, step, uuid.uuid4().hex, self._over)
        if self._config.has_retention:
            self._retain(1)

    def _is_damage(self, error: CheckpointError, saved: Saved) -> bool:
        """Say whether an upload failed for what lies here, and not because its step is saved again."""
        step = saved.step
        if isinstance(error, WriteError):
            return self._is_of_medium(error, step)
        if self._known[0].get(step) is not saved or step in self._under_way():
            return False
        # Else the root refuses.
        return isinstance(error, IntegrityError) or details_of(self.open(step)) is None

    def _is_of_medium(self, error: WriteError, step: int) -> bool:
        """Say whether a local checkpoint cannot be read where it lies."""
        folder = self.path(step)
        return error.errno in _BAD_MEDIUM and f"{error.path}/".startswith(f"{folder}/")

    def _note_damage(self, saved: Saved, text: str) -> None:
        """Leave a local checkpoint alone from now on; as text, for an error holds frames, and they states."""
        with self._lock:
            self._damaged[saved] = text
            self._has_news_of_damage |= saved in self._own
        _LOG.error("not uploaded to %s: %s", self._urls[1], text)

    def _trim(self) -> None:
        """Remove the oldest local checkpoints, so that no more stay than are to."""
        try:
            saved = {one.step: one for one in self._saved(0)}
        except CheckpointError as error:
            _LOG.warning("no local checkpoint is removed: %s", error)
            return
        # A run that went back has saved lower steps last.
        ordered = sorted(saved.values(), key=self._committed_at)
        whole = [one for one in ordered if one not in self._damaged]
        stay = {*ordered[-self._config.ckpt_local_keep :], *whole[-self._config.ckpt_local_keep :]}
        newest = max(saved, default=None)
        for one in ordered:
            if one in stay:
                continue
            step = one.step
            with self._lock:
                if step in (self._uploading, newest) or step in self._going:
                    continue
                self._going.add(step)
            if _is_newer(one, self._known[1].get(step)):
                why = "saves come faster than uploads (--ckpt-local-keep)"
                _LOG.warning(
                    "step %d is removed from %s before it was uploaded: %s",
                    step,
                    self._urls[0],
                    "it is damaged" if one in self._damaged else why,
                )
                with contextlib.suppress(CheckpointError):
                    self._over.add(str(committed_by(self.open(step))))
            self._remove(one, 0)
            with self._lock:
                self._going.discard(step)


def _submit(pool: ThreadPoolExecutor, function: Callable[..., None], *args: Any) -> None:
    """Have `function` called on a thread of `pool`; here if the interpreter ends: there are no more then."""
    try:
        pool.submit(function, *args)
    except RuntimeError:
        function(*args)


def _is_newer(one: Saved, other: Saved | None) -> bool:
    """Say whether a checkpoint is of a later save than that of the same step elsewhere."""
    return other is None or (one.time_s or 0.0) > (other.time_s or 0.0)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

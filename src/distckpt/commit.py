"""From written files to a checkpoint: claims, publication, sweep.

Invariants:
    * `.metadata` is published last, in one atomic step; before it, the commit record that bears its digest.
    * Names are new for each save, so that nothing of a committed checkpoint is ever written to.
    * A claim revokes the earlier ones: a save that was overtaken is refused, whenever it goes on.
    * Sweep removes only what was there when the save claimed the directory, and what no committed checkpoint
      names.

Torch-free: the pickled metadata arrives as bytes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import math
import os
import re
import socket
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psutil

from distckpt.errors import CheckpointError, CommitError, IntegrityError, WriteError
from distckpt.integrity import extents, find_record, read_manifest
from distckpt.manifest import (
    FOLDER,
    IMAGE_NAME,
    METADATA,
    METADATA_NAME,
    OWNER,
    PARTIAL_NAME,
    TRAILER,
    UNFINISHED_METADATA_NAME,
    is_names,
    metadata_name,
    read_names,
    record_name,
    seal,
    unseal,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from distckpt.formats import Format
    from distckpt.manifest import ManifestRef
    from distckpt.storage import Storage

_LOG = logging.getLogger(__name__)
_SETTLE_ATTEMPTS = 3
_PUBLISH_ATTEMPTS = 3
_CLOCK_S = 5.0
"""By which the time of a record and that of the start of a process may be off."""


def committed_by(storage: Storage) -> str | None:
    """Return the id of the save that published the checkpoint of all ranks.

    Reads all of `.metadata`, and its record, whatever version wrote it.

    Args:
        storage: The checkpoint's directory.

    Returns:
        The id, as `publish` was told; None without a checkpoint, for one of another tool, one that is damaged
        and one that is replaced again and again meanwhile.

    Raises:
        WriteError: The storage refuses.
    """
    for _ in range(_SETTLE_ATTEMPTS):
        try:
            metadata = storage.read(METADATA)
            if metadata is None:
                return None
            record = storage.read(record_name(metadata))
            if record is not None:
                return _save_id_of(record)
            # The next save may have published, and swept the record, between the two reads.
            if storage.read(METADATA) == metadata:
                return None
        except WriteError as error:
            # NFS: another host replaced the file after it was opened here.
            if error.errno != errno.ESTALE:
                raise
    return None


def _save_id_of(record: bytearray) -> str | None:
    try:
        save_id = json.loads(record)["save_id"]
    except (ValueError, LookupError, TypeError):
        return None
    return None if save_id is None else str(save_id)


@dataclass(frozen=True)
class Claim:
    """The right of one save to publish in a directory, until another one claims it.

    Attributes:
        save_id: The save.
        rank: None for the whole checkpoint; else the rank that publishes only its own part, uncontested.
        found: What saves before it have left or committed, in an order in which it can be removed.
        unfinished: What they began and neither completed nor gave up (`Storage.unfinished`).
        marker: A file that keeps readers that go by names from what is not complete, until it is.
    """

    save_id: str
    rank: int | None
    found: tuple[str, ...]
    unfinished: tuple[tuple[str, str], ...] = ()
    marker: str | None = None

    def explain(self, storage: Storage, error: BaseException) -> BaseException:
        """Return what `error`, which failed the save, comes from: another one may have swept its files."""
        if isinstance(error, WriteError) and error.errno in {errno.ENOENT, errno.EEXIST}:
            try:
                self.check(storage)
            except CommitError as overtaken:
                return overtaken
            except CheckpointError:
                pass
        return error

    def check(self, storage: Storage) -> None:
        """Refuse to go on if another save has claimed the directory since.

        Raises:
            CommitError: One has; it has `is_overtaken` then.
            IntegrityError: The owner record is damaged.
            WriteError: The storage refuses.
        """
        if self.rank is None and not self.is_owner(storage):
            data = storage.read(OWNER)
            who = "nobody" if data is None else data.decode(errors="replace")
            overtaken = CommitError(
                f"not published: {storage.url} was claimed by another save while this one ({self.save_id}) "
                f"ran: {who}"
            )
            overtaken.is_overtaken = True  # type: ignore[attr-defined]
            raise overtaken

    def is_owner(self, storage: Storage) -> bool:
        """Say whether this is the claim that stands.

        Raises:
            IntegrityError: The owner record is damaged.
            WriteError: The storage refuses.
        """
        return _owner(storage).get("save_id") == self.save_id


def _owner(storage: Storage) -> dict[str, Any]:
    """Return what the owner record says; nothing if there is none.

    Raises:
        IntegrityError: It is damaged.
        WriteError: The storage refuses.
    """
    for attempt in range(_SETTLE_ATTEMPTS):
        try:
            data = storage.read(OWNER)
            return {} if data is None else unseal(storage, OWNER, data)
        except WriteError as error:
            # NFS: another host replaced the file after it was opened here.
            if error.errno != errno.ESTALE or attempt + 1 == _SETTLE_ATTEMPTS:
                raise
    return {}


@dataclass(frozen=True)
class Exclusive:
    """What a format asks of a directory whose readers take files for a part of the checkpoint by their names.

    Attributes:
        format: Its name.
        pattern: The names.
        marker: A file with `{save_id}` in its name, which such readers cannot read: it stands there as long
            as the files of a save are not complete.
    """

    format: str
    pattern: re.Pattern[str]
    marker: str

    def check(self, storage: Storage) -> None:
        """Refuse a directory that holds a checkpoint, or what readers would take for a part of one.

        Raises:
            CommitError: It does.
            WriteError: The storage refuses.
        """
        if storage.read(METADATA, nbytes=0) is not None:
            raise CommitError(
                f"not written: {storage.url} holds a committed checkpoint, and readers of {self.format} find "
                f"files by their names: they would mix the two; save to another directory, or remove this one"
            )
        foreign = [
            name for name in storage.list() if self.pattern.fullmatch(name) and not IMAGE_NAME.fullmatch(name)
        ]
        # Names that any save may use are looked into once it is known which saves have: see `_clear`.
        if storage.read(OWNER, nbytes=0) is None:
            self.refuse(storage, foreign, "which no save of distckpt has written")

    def refuse(self, storage: Storage, names: Sequence[str], what: str) -> None:
        """Refuse a directory that holds `names`, if there are any.

        Raises:
            CommitError: There are.
        """
        if names:
            others = f" and {len(names) - 1} others" if len(names) > 1 else ""
            raise CommitError(
                f"not written: {storage.url} holds {names[0]}{others}, {what}: readers of {self.format} "
                f"would take it for a part of the checkpoint; save to another directory"
            )


def exclusive_of(file_format: Format) -> Exclusive | None:
    """Return what a format asks of a directory, if it does."""
    if file_format.found_by is None:
        return None
    return Exclusive(file_format.name, file_format.found_by, file_format.marker)


def seen_claim(storage: Storage) -> Claim:
    """Return the claim of whoever has claimed a directory, as another rank of the same save sees it.

    Raises:
        CommitError: Nobody has.
        IntegrityError: The owner record is damaged.
        WriteError: The storage refuses.
    """
    save_id = _owner(storage).get("save_id")
    if save_id is None:
        raise CommitError(f"not written: nobody has claimed {storage.url}")
    return Claim(str(save_id), None, ())


def claim(
    storage: Storage, save_id: str, rank: int | None = None, exclusive: Exclusive | None = None
) -> Claim:
    """Take a directory for the save `save_id`: saves that have claimed it earlier will be refused.

    Args:
        storage: The checkpoint's directory, which exists.
        save_id: The save.
        rank: None for the whole checkpoint; else the rank that will publish only its own part.
        exclusive: What the format asks of the directory; what earlier saves have left there is removed first.

    Raises:
        CommitError: The directory is not what `exclusive` asks for.
        WriteError: The storage refuses.
    """
    if exclusive is not None:
        exclusive.check(storage)
    # What is in the way of the publication is found before anything is written.
    storage.read(METADATA, nbytes=0)
    if rank is None:
        storage.put(
            OWNER, seal({"save_id": save_id, "host": _host(), "pid": os.getpid(), "time": time.time()})
        )
        # A save that saw its own claim a moment ago may be about to publish: it does so now, or not at all.
        storage.revoke(METADATA)
        found = tuple(_find(storage))
        claimed = Claim(save_id, None, found, tuple(_find_unfinished(storage, found)))
        return claimed if exclusive is None else _clear(storage, claimed, exclusive)
    # Unfinished files of one rank cannot be told from those that other ranks are writing.
    return Claim(save_id, rank, tuple(_find(storage, rank)))


def _clear(storage: Storage, claimed: Claim, exclusive: Exclusive) -> Claim:
    """Remove what earlier saves have left, before there is anything else.

    Raises:
        CommitError: Some of it stays, or a save has published meanwhile.
    """
    # A save that was about to publish has done so before it was revoked, or never will.
    exclusive.check(storage)
    marker = exclusive.marker.format(save_id=claimed.save_id) or None
    if marker is not None:
        storage.put(marker, b"unfinished")
        try:
            claimed.check(storage)
        except CommitError:
            storage.delete(marker)
            raise
    _remove(storage, claimed.found, "is claimed", claimed.unfinished, check=lambda: claimed.check(storage))
    left = [name for name in storage.list() if exclusive.pattern.fullmatch(name) and name != marker]
    if left and marker is not None:
        # Whatever these files are, they can be read.
        storage.delete(marker)
    exclusive.refuse(storage, left, "which stays, and is not known to be of an earlier save")
    return replace(claimed, found=(), unfinished=(), marker=marker)


def publish(
    storage: Storage,
    metadata: bytes,
    claimed: Claim,
    manifests: Sequence[ManifestRef],
    details: dict[str, Any] | None = None,
) -> None:
    """Make the files that `manifests` list the checkpoint.

    Args:
        storage: The checkpoint's directory.
        metadata: Pickled metadata.
        claimed: The save's claim.
        manifests: One for each rank that wrote something.
        details: What else the commit record shall say.

    Raises:
        CommitError: Another save has claimed the directory, or a file is missing or has another size.
        WriteError: The storage refuses.
    """
    claimed.check(storage)
    listed: dict[str, dict[str, int]] = {}
    for ref in manifests:
        for name, nbytes in ref.files.items():
            folder, slash, base = name.rpartition("/")
            if folder not in listed:
                listed[folder] = storage.list(folder + slash)
            found = listed[folder].get(base)
            if found != nbytes:
                raise CommitError(
                    f"not published: {storage.url}/{name} should hold {nbytes} bytes and "
                    f"{'is missing' if found is None else f'holds {found}'}"
                )
    data = metadata + TRAILER
    published = metadata_name(claimed.rank)
    record = {
        "name": record_name(data),
        "save_id": claimed.save_id,
        "metadata": published,
        "manifests": [{"name": ref.name, "sha256": ref.sha256} for ref in manifests],
        **(details or {}),
    }
    storage.put(record_name(data), seal(record))
    if claimed.marker is not None:
        # All files are complete and durable: who reads them from now on reads the whole checkpoint.
        storage.delete(claimed.marker)
    for attempt in range(_PUBLISH_ATTEMPTS):
        try:
            storage.put(published, data, last_check=lambda: claimed.check(storage))
            break
        except WriteError as error:
            # Revoked at the last moment, or a failure of the storage.
            claimed.check(storage)
            # Or revoked by a save whose claim is older than this one, and which was slow to finish it.
            if error.errno != errno.ENOENT or attempt + 1 == _PUBLISH_ATTEMPTS:
                raise
    keep = {record_name(data), published}
    for ref in manifests:
        folder = ref.name.rpartition("/")[0] + "/"
        keep |= {ref.name, folder, *ref.files, *(name for name in claimed.found if is_names(name, folder))}
    _remove(storage, [name for name in claimed.found if name not in keep], "is committed", claimed.unfinished)


def refuse_part(storage: Storage) -> None:
    """Refuse to write a part of a checkpoint without collectives where there is one of all ranks.

    Readers look for the metadata of all ranks first: they would not find the part, and what the sweep removes
    would be missing to the whole.

    Raises:
        CommitError: There is one.
    """
    if storage.read(METADATA, nbytes=0) is not None:
        raise CommitError(
            f"not written: {storage.url} holds a checkpoint that was saved with collectives, which readers "
            f"would go on finding: remove it, or save without collectives to another directory"
        )


def reclaim(storage: Storage, save_id: str, *, failed: Collection[str] = (), idle_s: float) -> bool:
    """Remove a directory in which nothing was ever committed, if the save that wrote there is over.

    Args:
        storage: The directory.
        save_id: Of the save on whose behalf this is done; it never saved there.
        failed: Saves that are known to be over.
        idle_s: Seconds without any change after which a save is over, whoever's it is; more than any wait of
            a save lasts.

    Returns:
        Whether the directory is gone.

    Raises:
        WriteError: The storage refuses.
    """
    if _has_metadata(storage) or not _is_over(storage, failed, idle_s):
        return False
    claimed = claim(storage, save_id)
    # Whoever claimed before and was about to publish has done so by now, or never will; who claims from now
    # on has written nothing yet, and so nothing of it was found.
    if _has_metadata(storage) or not claimed.is_owner(storage):
        return False
    try:
        _remove(
            storage,
            claimed.found,
            "was never completed",
            claimed.unfinished,
            check=lambda: claimed.check(storage),
        )
    except CommitError:
        return False
    if not claimed.is_owner(storage):
        return False
    _remove(storage, [OWNER, FOLDER], "was never completed")
    return storage.remove_directory()


def remove_checkpoint(
    storage: Storage, save_id: str, *, failed: Collection[str] = (), idle_s: float = math.inf
) -> bool:
    """Remove a committed checkpoint: first what makes it one, then the rest.

    Files that no save has written stay, and their directory with them.

    Args:
        storage: Its directory.
        save_id: On whose behalf; no save ever had it.
        failed: As for `reclaim`: saves, and removals, that are known to be over.
        idle_s: As for `reclaim`.

    Returns:
        Whether the checkpoint is gone; False where another save has claimed its directory.

    Raises:
        IntegrityError: The owner record is damaged.
        WriteError: The storage refuses.
    """
    committed = committed_by(storage)
    is_claimed = committed is not None and _owner(storage).get("save_id") != committed
    if is_claimed and not _is_over(storage, failed, idle_s):
        # A save is on its way to replace it.
        return False
    claimed = claim(storage, save_id)
    try:
        claimed.check(storage)
        # Before anything else, whatever the order in which it was found.
        storage.delete(METADATA)
        _remove(
            storage, claimed.found, "is removed", claimed.unfinished, check=lambda: claimed.check(storage)
        )
        claimed.check(storage)
    except CommitError:
        return False
    _remove(storage, [OWNER, FOLDER], "is removed")
    if not storage.remove_directory():
        _LOG.warning("%s is no checkpoint any more; files that no save has written stay there", storage.url)
    return True


def details_of(storage: Storage) -> dict[str, Any] | None:
    """Return what the commit record of a checkpoint says; None where there is no checkpoint or no record.

    Raises:
        WriteError: The storage refuses.
    """
    metadata = storage.read(METADATA)
    record = None if metadata is None else storage.read(record_name(metadata))
    if record is None:
        return None
    with contextlib.suppress(ValueError):
        details = json.loads(record)
        return details if isinstance(details, dict) else None
    return None


def _is_over(storage: Storage, failed: Collection[str], idle_s: float) -> bool:
    present = storage.list()
    if present and FOLDER not in present and not any(map(IMAGE_NAME.fullmatch, present)):
        # No save has ever been here.
        return False
    data = storage.read(OWNER)
    # Not claimed yet: the save may be about to.
    owner: dict[str, Any] = {}
    if data is not None:
        with contextlib.suppress(CheckpointError):
            owner = unseal(storage, OWNER, data)
    if owner.get("save_id") in failed:
        return True
    lives = _lives(owner)
    if lives is not None:
        return not lives
    changed = storage.last_change()
    return changed is not None and time.time() - changed > idle_s


def writer_may_live(storage: Storage) -> bool:
    """Say whether another process that has claimed a directory may still be there.

    Raises:
        WriteError: The storage refuses.
    """
    owner: dict[str, Any] = {}
    with contextlib.suppress(IntegrityError):
        owner = _owner(storage)
    lives = _lives(owner)
    # Of another machine nothing is known.
    return bool(owner) and owner.get("host") != _host() if lives is None else lives


def _lives(owner: Mapping[str, Any]) -> bool | None:
    """Say whether the process of an owner record is there; None where that cannot be told.

    Of this process it cannot: it may have given up the save.
    """
    pid, claimed_s = owner.get("pid"), owner.get("time")
    if owner.get("host") != _host() or not isinstance(pid, int) or pid == os.getpid():
        return None
    try:
        process = psutil.Process(pid)
        started_s = process.create_time()
        has_ended = process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return None
    # Another one may have the number by now.
    is_another = isinstance(claimed_s, (int, float)) and started_s > claimed_s + _CLOCK_S
    return not (has_ended or is_another)


def _host() -> str:
    """Return what tells processes apart that see each other's ids from those that do not."""
    return _host_of(os.getpid())


@functools.lru_cache(maxsize=1)
def _host_of(_pid: int) -> str:
    # One that is forked may see other ids.
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def leftovers(storage: Storage) -> list[str]:
    """Return what saves have left in a directory and no committed checkpoint names.

    What a save that is under way has written so far is among it.

    Raises:
        CheckpointError: The checkpoint there is damaged, or of another version.
        WriteError: The storage refuses.
    """
    return _unnamed(storage, _find(storage))


def sweep(storage: Storage, save_id: str) -> list[str]:
    """Remove what saves have left in a directory and no committed checkpoint names.

    Args:
        storage: The directory. A save that is still under way there will be refused.
        save_id: On whose behalf; no save ever had it.

    Returns:
        What was removed; what could not be is said in the log.

    Raises:
        CheckpointError: The checkpoint there is damaged, or of another version, or a save has claimed the
            directory meanwhile: nothing was removed.
        WriteError: The storage refuses.
    """
    claimed = claim(storage, save_id)
    found = _unnamed(storage, claimed.found)
    # Nothing of a save that claims after this was found: no save writes before its claim.
    claimed.check(storage)
    return _remove(storage, found, "is swept", claimed.unfinished)


def _unnamed(storage: Storage, found: Iterable[str]) -> list[str]:
    found = list(found)
    keep = {OWNER}
    # What lies there in place of a file, such as a link, is not listed.
    for name in sorted({METADATA, *filter(METADATA_NAME.fullmatch, storage.list())}):
        keep.add(name)
        data = storage.read(name)
        if data is None:
            continue
        record = find_record(storage, bytes(data), name)
        if record is None:
            # Of another tool: nobody knows which files are its.
            return []
        keep.add(record.name)
        for manifest, sha256 in record.manifests:
            folder = manifest.rpartition("/")[0] + "/"
            keep |= {manifest, folder, *(name for name in found if is_names(name, folder))}
            parsed = read_manifest(storage, manifest, sha256)
            for file, _, _ in extents(storage, manifest, parsed):
                keep |= {file, *_folders_of(file)}
    return [name for name in found if name not in keep]


def _has_metadata(storage: Storage) -> bool:
    is_listed = any(map(METADATA_NAME.fullmatch, storage.list()))
    return is_listed or storage.read(METADATA, nbytes=0) is not None


def _find(storage: Storage, rank: int | None = None) -> list[str]:
    """Return what saves, or those of one rank, have left, in an order in which it can be removed."""
    found = []
    for name in storage.list():
        patterns = (IMAGE_NAME, METADATA_NAME, UNFINISHED_METADATA_NAME)
        ours = next(filter(None, (pattern.fullmatch(name) for pattern in patterns)), None)
        if ours is not None and (rank is None or ours[1] == str(rank)):
            found.append(name)
    # Metadata first: what has none any more is not taken for a checkpoint that lost its files.
    # What keeps readers that go by names from the others, last.
    found.sort(key=lambda name: (METADATA_NAME.fullmatch(name) is None, name.startswith("unfinished-")))
    records = _find_records(storage, rank)
    return found + _find_named(storage, records) + records


def _find_named(storage: Storage, records: Sequence[str]) -> list[str]:
    """Return what saves have written under names of their own, as far as it is there, and its directories."""
    names = {name for record in records for name in read_names(storage, record)}
    folders: dict[str, set[str]] = {}
    for name in names:
        folder, slash, base = name.rpartition("/")
        folders.setdefault(folder + slash, set()).add(base)
        for above in _folders_of(name):
            folders.setdefault(above, set())
    found = []
    # What leads readers to the others first.
    for folder, bases in sorted(folders.items(), key=lambda each: len(each[0])):
        found += [
            folder + entry
            for entry in storage.list(folder)
            if entry in bases or PARTIAL_NAME.sub("", entry) in bases
        ]
    found.sort(key=lambda name: not name.endswith(".json"))
    return found + [folder for folder in sorted(folders, key=len, reverse=True) if folder]


def _find_unfinished(storage: Storage, found: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield what saves have begun here; others may have, too, and below may be other checkpoints."""
    names: set[str] | None = None
    patterns = (IMAGE_NAME, METADATA_NAME, UNFINISHED_METADATA_NAME)
    for name, handle in storage.unfinished():
        if not name.startswith(FOLDER) and not any(pattern.fullmatch(name) for pattern in patterns):
            if names is None:
                records = (record for record in found if record.startswith(FOLDER))
                names = {each for record in records for each in read_names(storage, record)}
            if PARTIAL_NAME.sub("", name) not in names:
                continue
        yield name, handle


def _folders_of(name: str) -> Iterator[str]:
    """Yield the directories that a file of a checkpoint lies in, as `Storage.list` spells them."""
    folder = name.rpartition("/")[0]
    while folder:
        yield f"{folder}/"
        folder = folder.rpartition("/")[0]


def _find_records(storage: Storage, rank: int | None) -> list[str]:
    found = []
    prefix = "" if rank is None else f"rank-{rank:05}."
    for entry in storage.list(FOLDER):
        name = FOLDER + entry
        if name == OWNER:
            continue
        if entry.endswith("/"):
            inners = storage.list(name)
            ours = [inner for inner in inners if inner.startswith(prefix)]
            found += [name + inner for inner in ours]
            # An empty folder may be one that another rank has just made.
            if len(ours) == len(inners) and (ours or rank is None):
                found.append(name)
        elif rank is None or _belongs_to(storage, name, rank):
            found.append(name)
    return found


def _belongs_to(storage: Storage, name: str, rank: int) -> bool:
    record = storage.read(name)
    return record is not None and f'"metadata":"{metadata_name(rank)}"'.encode() in record


def _remove(
    storage: Storage,
    names: Iterable[str],
    what: str,
    unfinished: Iterable[tuple[str, str]] = (),
    check: Callable[[], None] | None = None,
) -> list[str]:
    """Remove `names`, and return those that are gone; a failure costs disk space and is said.

    Args:
        storage: Where they are.
        names: What to remove.
        what: What has become of the directory, for the log.
        unfinished: What to give up (`Storage.unfinished`).
        check: Called before what another save may have put in the place of what was found; raises if one has.
    """
    refused: list[WriteError] = []
    removed: list[str] = []
    for name, handle in unfinished:
        if check is not None:
            check()
        try:
            storage.abort(name, handle)
        except WriteError as error:
            refused.append(error)
    for name in names:
        if check is not None and not IMAGE_NAME.fullmatch(name):
            check()
        try:
            storage.delete(name)
            removed.append(name)
        except WriteError as error:
            # A folder in which somebody left something since: the next save sees it.
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                refused.append(error)
    if refused:
        _LOG.warning(
            "%s %s; what saves before it left there stays, in %d places: %s",
            storage.url,
            what,
            len(refused),
            refused[0],
        )
    return removed

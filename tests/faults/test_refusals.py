"""Storage that refuses one call, whichever it is: the error says which, and what was committed stays."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from distckpt import Checkpointer, CheckpointError, StorageReader, StorageWriter, WriteError
from faults.checkpoints import (
    KIB,
    MIB,
    NO_MOUNT,
    assert_is_clean,
    error_of,
    files_in,
    load,
    mount_tmpfs,
    on_event,
    outcome_of,
    same,
    save,
    save_in,
    say,
    state_of,
)
from faults.conftest import OpenWriter
from faults.mounts import read_only
from faults.programs import Programs
from faults.refusal.sitecustomize import Hit, Refusals

State = dict[str, Any]
SMALL, LARGE = 64 * KIB, 4096 * KIB
"""Only of the large one something is written past the page cache."""
# What the save can do without: it writes through the page cache, or looks again.
OPTIONAL = {"direct", "stat"}
AT_FSYNC = ("fsync",)
AT_OPEN = ("create", "open", "opendir")
ALL = (
    "create", "open", "opendir", "write", "pwritev", "preadv", "fsync", "close", "rename", "unlink",
    "rmdir", "mkdir", "scandir", "stat",
)  # fmt: skip
BUT_STAT = tuple(op for op in ALL if op != "stat")
CHANGES = ("create", "mkdir", "rename", "unlink", "rmdir")
OPENS = ("create", "open", "opendir")
FAULTS = [
    pytest.param(errno.ENOSPC, False, ALL, id="ENOSPC"),
    pytest.param(errno.ENOSPC, True, BUT_STAT, id="ENOSPC-since"),
    pytest.param(errno.EIO, False, ALL, id="EIO"),
    pytest.param(errno.EIO, True, BUT_STAT, id="EIO-since"),
    pytest.param(errno.EDQUOT, False, ("write", "pwritev", "fsync", "close"), id="EDQUOT"),
    pytest.param(errno.EDQUOT, True, ("fsync",), id="EDQUOT-since"),
    pytest.param(errno.ESTALE, False, ("opendir", "fsync", "rename", "scandir", "preadv"), id="ESTALE"),
    pytest.param(errno.ESTALE, True, ("fsync",), id="ESTALE-since"),
    pytest.param(errno.EROFS, False, OPENS, id="EROFS"),
    pytest.param(errno.EROFS, True, CHANGES, id="EROFS-since"),
    pytest.param(errno.EMFILE, False, OPENS, id="EMFILE"),
    pytest.param(errno.EMFILE, True, OPENS, id="EMFILE-since"),
    pytest.param(errno.EACCES, False, CHANGES, id="EACCES"),
    pytest.param(errno.EIO, False, ("direct",), id="EIO-direct"),
]


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory if there is one, where thousands of fsyncs take no time."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


@pytest.fixture
def refusals(storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Refusals]:
    """Refuses calls in the folder `storage`, where asked to."""
    opened = Refusals(storage, tmp_path / "control")
    for name, value in opened.environment.items():
        monkeypatch.setenv(name, value)
    opened.install()
    yield opened
    opened.remove()


def check_error(error: CheckpointError, number: int, path: Path) -> None:
    """Assert that `error` says what was refused, where, and whose save it was, also after a journey."""
    assert isinstance(error, WriteError), repr(error)
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert (each.errno, each.rank) == (number, 0), each
        assert each.path is not None
        # Or the folder above it, in which its name is made durable.
        assert each.path == str(path.parent) or each.path.startswith(str(path)), each
        assert each.path in str(each)
        assert errno.errorcode[number] in str(each), each


def check_place(error: CheckpointError, hit: Hit, workers: int) -> None:
    """Assert that `error` says which file, and which lane if it was at work."""
    assert isinstance(error, WriteError)
    assert error.path is not None
    # A file that is put in place has another name before; a folder is made with all above it.
    assert hit.path.startswith(error.path) or error.path.startswith(hit.path), (error, hit)
    at_work = hit.by_worker or (".distcp" in hit.path and hit.op in {"open", "pwritev", "fsync"})
    # The process that made a file has closed it before a lane, of this process maybe, does.
    may_be_at_work = ".distcp" in hit.path and hit.op == "close"
    assert (error.lane in range(workers)) == at_work or may_be_at_work, (error, hit)


def refuse_every_call(
    refusals: Refusals,
    path: Path,
    save_one: Callable[[State], object],
    workers: int,
    number: int,
    goes_on: bool,
    ops: tuple[str, ...],
) -> None:
    """Overwrite the checkpoint in `path` as often as there are calls to be refused."""
    seeds = itertools.count()
    size = LARGE if "direct" in ops else SMALL
    committed = state_of(next(seeds), size)
    save_one(committed)
    points = 0
    for op in ops:
        for n in itertools.count(1):
            new, third = state_of(next(seeds), size), state_of(next(seeds), size)
            refusals.arm(op, n, number, ops if goes_on else ())
            error = outcome_of(functools.partial(save_one, new))
            hit = refusals.disarm()
            found = load(path, new)
            is_new = same(found, new)
            assert is_new or same(found, committed), (hit, error)
            if hit is None:
                assert error is None, error
                assert is_new
                assert n > 1, f"there was no {op} to be refused"
                committed = new
                break
            points += 1
            # After the publication comes the sweep, of other steps too. What is refused before that
            # must not be passed over.
            if error is None:
                assert is_new, f"reported success, and holds the old one: {hit}"
                is_sweep = op in {"unlink", "rmdir"} or hit.path == str(path.parent)
                # What only looks is tried again after an error that may pass.
                looks = op in {"preadv", "scandir"} or (
                    op in {"open", "opendir", "close"} and ".distcp" not in str(hit.path)
                )
                is_read_again = looks and number in {errno.ESTALE, errno.EIO}
                # It is for people, and moved after the commit: that it was not is said in the log.
                is_pointer = "/latest" in str(hit.path)
                assert op in OPTIONAL or is_sweep or is_read_again or is_pointer, f"passed over: {hit}"
            else:
                check_error(error, number, path)
                if not goes_on:
                    check_place(error, hit, workers)
                # The metadata was renamed, and could not be made durable: one of the two, all the same.
                is_late = op in {"opendir", "fsync", "close"} and hit.path == str(path)
                assert not is_new or is_late, (hit, error)
            save_one(third)
            assert same(load(path, third), third), hit
            assert_is_clean(path)
            committed = third
    assert points >= len(ops)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("workers", "mode", "number", "goes_on", "ops"),
    [
        pytest.param(
            workers,
            mode,
            *fault.values,
            id=f"{workers}-{mode}-{fault.id}",
            marks=[pytest.mark.thorough] * late,
        )
        for turn, fault in enumerate(FAULTS)
        for workers, mode, late in [(1, "sync", turn % 2), (2, "async", 1 - turn % 2)]
    ],
)
def test_whichever_call_of_a_writer_is_refused(
    open_writer: OpenWriter,
    refusals: Refusals,
    storage: Path,
    workers: int,
    mode: str,
    number: int,
    goes_on: bool,
    ops: tuple[str, ...],
) -> None:
    path = storage / "checkpoint"
    writer = open_writer(dist_ckpt_workers=workers)
    save_one = functools.partial(save_in, mode, writer, path)
    refuse_every_call(refusals, path, save_one, workers, number, goes_on, ops)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("workers", "number", "goes_on", "ops"),
    [
        pytest.param(1, errno.ENOSPC, False, ALL, id="1-ENOSPC", marks=pytest.mark.thorough),
        pytest.param(1, errno.EIO, True, BUT_STAT, id="1-EIO-since"),
        pytest.param(2, errno.EIO, False, ALL, id="2-EIO"),
        pytest.param(2, errno.ENOSPC, True, BUT_STAT, id="2-ENOSPC-since", marks=pytest.mark.thorough),
        pytest.param(2, errno.ESTALE, True, ("fsync",), id="2-ESTALE-since"),
    ],
)
def test_whichever_call_of_a_checkpointer_is_refused(
    refusals: Refusals, storage: Path, workers: int, number: int, goes_on: bool, ops: tuple[str, ...]
) -> None:
    with Checkpointer(storage, dist_ckpt_workers=workers, async_save=True) as checkpointer:

        def save_one(state: State) -> None:
            checkpointer.save(1, state).result(timeout=30)

        path = storage / "step-00000001"
        refuse_every_call(refusals, path, save_one, workers, number, goes_on, ops)


def test_a_directory_that_cannot_be_looked_at_is_named(
    open_writer: OpenWriter, refusals: Refusals, storage: Path
) -> None:
    path = storage / "checkpoint"
    writer = open_writer()
    save(writer, path, state_of(1, SMALL))
    refusals.arm("stat", 1, errno.ESTALE, since=("stat",))
    error = error_of(lambda: save(writer, path, state_of(2, SMALL)))
    assert refusals.disarm() is not None
    check_error(error, errno.ESTALE, path)
    assert same(load(path, state_of(1, SMALL)), state_of(1, SMALL))


def put_in_the_way(kind: str, path: Path) -> Callable[[], None]:
    """Put something where a save wants to write; returns how to remove it."""
    blocked = path / {"folder": ".distckpt", "owner": ".distckpt/owner", "metadata": ".metadata"}[kind]
    away = blocked.with_name(blocked.name + "-away")
    if blocked.exists():
        blocked.rename(away)
    if kind == "folder":
        blocked.touch()
    else:
        blocked.mkdir(parents=True)

    def unblock() -> None:
        blocked.unlink() if kind == "folder" else blocked.rmdir()
        if away.exists():
            away.rename(blocked)

    return unblock


@pytest.mark.parametrize("is_overwrite", [False, True])
@pytest.mark.parametrize("kind", ["folder", "owner", "metadata"])
@pytest.mark.parametrize("workers", [1, 2])
def test_something_in_the_place_of_our_own_files_is_named_early(
    open_writer: OpenWriter, tmp_path: Path, workers: int, kind: str, is_overwrite: bool
) -> None:
    path = tmp_path / "checkpoint"
    path.mkdir()
    writer = open_writer(dist_ckpt_workers=workers)
    old = state_of(1, SMALL)
    if is_overwrite:
        save(writer, path, old)
    unblock = put_in_the_way(kind, path)
    before = set(path.rglob("*"))
    for mode in ("sync", "async"):
        with on_event("parts.pushed", lambda _: pytest.fail("it wrote before it looked")):
            error = error_of(functools.partial(save_in, mode, writer, path, state_of(2, SMALL)))
        assert isinstance(error, WriteError), repr(error)
        assert error.errno in {errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.EINVAL}, error
        assert error.rank == 0
        assert error.path is not None
        assert error.path.startswith(str(path))
        assert error.path in str(error)
        assert before <= set(path.rglob("*"))
    unblock()
    if is_overwrite:
        assert same(load(path, old), old)
    save(writer, path, state_of(3, SMALL))
    assert same(load(path, state_of(3, SMALL)), state_of(3, SMALL))
    assert_is_clean(path)


@pytest.mark.parametrize("number", [errno.EEXIST, errno.ENOENT])
def test_a_mkdir_that_loses_a_race_is_tried_again(
    open_writer: OpenWriter, refusals: Refusals, storage: Path, number: int
) -> None:
    # Network file systems say that a directory is there before it can be seen, or that its parent is not.
    writer = open_writer()
    for n in itertools.count(1):
        path = storage / f"new{n}" / "checkpoint"
        refusals.arm("mkdir", n, number)
        save(writer, path, state_of(n, SMALL))
        hit = refusals.disarm()
        assert same(load(path, state_of(n, SMALL)), state_of(n, SMALL))
        assert_is_clean(path)
        if hit is None:
            break
    assert n > 3, "the parent, the checkpoint and the folder in it are made"


def test_parents_that_do_not_exist_are_made(open_writer: OpenWriter, tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "checkpoint"
    save(open_writer(), path, state_of(1, SMALL))
    assert same(load(path, state_of(1, SMALL)), state_of(1, SMALL))


@pytest.mark.parametrize("kind", ["root", "step"])
def test_a_file_in_the_place_of_a_checkpointers_folder_is_named(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "checkpoints"
    blocked = root if kind == "root" else root / "step-00000002"
    with Checkpointer(root, async_save=True) as checkpointer:
        if kind == "step":
            checkpointer.save(1, state_of(1, SMALL)).result(timeout=30)
        blocked.touch()
        error = error_of(lambda: checkpointer.save(2, state_of(2, SMALL)).result(timeout=30))
        assert isinstance(error, WriteError)
        assert error.errno in {errno.ENOTDIR, errno.EEXIST}
        assert error.rank == 0
        assert error.path == str(blocked)
        if kind == "step":
            assert checkpointer.latest() == 1
        blocked.unlink()
        checkpointer.save(2, state_of(3, SMALL)).result(timeout=30)
        assert checkpointer.latest() == 2
    assert same(load(root / "step-00000002", state_of(3, SMALL)), state_of(3, SMALL))


def save_where_nothing_may_change(folder: str, workers: int) -> None:
    mount_tmpfs(folder, 16 * MIB)
    path = Path(folder, "checkpoints", "one")
    committed = state_of(1, SMALL)
    with StorageWriter(dist_ckpt_workers=workers) as writer:
        save(writer, path, committed)
        # The checkpoint itself; a new one beside it.
        for target in (path, path.with_name("two")):
            for mode in ("sync", "async"):
                new = state_of(2, SMALL)
                with read_only(str(path.parent)):
                    error = error_of(functools.partial(save_in, mode, writer, target, new))
                    assert same(load(path, committed), committed)
                assert isinstance(error, WriteError), repr(error)
                assert (error.errno, error.rank) == (errno.EROFS, 0), error
                assert error.path is not None
                assert error.path.startswith(str(target))
                assert str(target) in str(error)
                save_in(mode, writer, target, new)
                assert same(load(target, new), new)
                assert_is_clean(target)
                save(writer, path, committed)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_read_only_directory_is_named_and_survived(
    programs: Programs, tmp_path: Path, workers: int
) -> None:
    done = programs.run(save_where_nothing_may_change, str(tmp_path), workers)
    if done.status == NO_MOUNT:
        pytest.skip(done.out)
    assert done.status == 0, done


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Have no right to write to what others may not write to."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_directory_of_somebody_else_is_named_and_survived(
    open_writer: OpenWriter, storage: Path, workers: int, mode: str
) -> None:
    path = storage / "checkpoint"
    writer = open_writer(dist_ckpt_workers=workers)
    save_in(mode, writer, path, state_of(1, SMALL))
    storage.chmod(0o755)
    path.chmod(0o555)
    (path / ".distckpt").chmod(0o555)
    for target in (path, path / "new"):
        with as_nobody():
            error = error_of(functools.partial(save_in, mode, writer, target, state_of(2, SMALL)))
        assert isinstance(error, WriteError), repr(error)
        assert (error.errno, error.rank) == (errno.EACCES, 0), error
        assert error.path is not None
        assert error.path.startswith(str(target))
    assert same(load(path, state_of(1, SMALL)), state_of(1, SMALL))
    path.chmod(0o755)
    (path / ".distckpt").chmod(0o755)
    save_in(mode, writer, path, state_of(3, SMALL))
    assert same(load(path, state_of(3, SMALL)), state_of(3, SMALL))
    assert_is_clean(path)


def see_late(root: str, delay_s: float) -> None:
    """See what others make below `root` only a while after it was first looked for, as an NFS client does."""
    asked: dict[str, float] = {}
    own: set[str] = set()

    def is_hidden(path: Any) -> bool:
        text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        if not text.startswith(root) or text in own:
            return False
        return time.monotonic() < asked.setdefault(text, time.monotonic()) + delay_s

    def late(name: str, makes: bool = False) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if makes or (name == "open" and arguments[0] & os.O_CREAT):
                # The server answers that, also if the answer is that it is there.
                own.add(os.fspath(arguments[0] if name == "rename" else path))
                return real(path, *arguments, **options)
            if is_hidden(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return real(path, *arguments, **options)

        return call

    for name in ("stat", "lstat", "scandir", "open"):
        setattr(os, name, late(name))
    for name in ("mkdir", "rename"):
        setattr(os, name, late(name, makes=True))


def save_and_restore_as_rank(root: str, rank: int) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{root}-store", rank=rank, world_size=2)
    if rank == 1:
        see_late(root, 0.3)
    with StorageWriter(distributed_timeout_minutes=0.5) as writer:
        for number in range(2):
            mine = {f"{name}.{rank}": value for name, value in state_of(number, SMALL)["model"].items()}
            state_dict_saver.save(mine, storage_writer=writer, checkpoint_id=f"{root}/writer")
            say("saved")
    with Checkpointer(f"{root}/steps", distributed_timeout_minutes=0.5) as checkpointer:
        for step in range(2):
            mine = {f"{name}.{rank}": value for name, value in state_of(step, SMALL)["model"].items()}
            checkpointer.save(step, mine).result(timeout=30)
            found = {name: torch.zeros_like(value) for name, value in mine.items()}
            try:
                say("restored", checkpointer.restore(found))
            except CheckpointError as error:
                say(type(error).__name__)
            else:
                assert all(torch.equal(value, mine[name]) for name, value in found.items())
    distributed.destroy_process_group()


@pytest.mark.slow
def test_a_rank_that_sees_late_what_others_made_decides_nothing(programs: Programs, tmp_path: Path) -> None:
    root = tmp_path / "storage"
    root.mkdir()
    children = [programs.start(save_and_restore_as_rank, str(root), rank) for rank in range(2)]
    done = [child.wait(50) for child in children]
    assert [one.status for one in done] == [0, 0], done
    assert done[0].out == done[1].out, "the ranks disagree"
    assert done[0].out.splitlines()[:2] == ["saved", "saved"]
    assert_is_clean(root / "steps" / "step-00000001")
    for name in ("writer", "steps/step-00000001"):
        assert len(files_in(root / name)) == 7, "two images, two manifests, record, metadata, owner"
        for rank in range(2):
            want = {f"{key}.{rank}": value for key, value in state_of(1, SMALL)["model"].items()}
            found = {name: torch.zeros_like(value) for name, value in want.items()}
            state_dict_loader.load(found, storage_reader=StorageReader(root / name), no_dist=True)
            assert all(torch.equal(value, want[name]) for name, value in found.items())

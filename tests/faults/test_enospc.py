"""Storage that is full, refuses or lies: the error says which and where, and what is committed stays."""

from __future__ import annotations

import errno
import functools
import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distckpt import Checkpointer, StorageWriter, WriteError, engine, lanes
from faults.checkpoints import (
    KIB,
    MIB,
    NO_MOUNT,
    assert_is_clean,
    engine_of,
    error_of,
    is_running,
    load,
    mount_tmpfs,
    outcome_of,
    pids_of,
    same,
    save,
    save_in,
    say,
    start_save,
    state_of,
    stopping,
    wait_until,
    without_the_others,
)
from faults.conftest import OpenWriter
from faults.mounts import make_image, mount_image, resize_tmpfs, unmount
from faults.programs import Programs

OLD, NEW, NEXT = state_of(1), state_of(2, 8 * MIB), state_of(3)


def fill_up_and_free(folder: str, workers: int) -> None:
    mount_tmpfs(folder, 12 * MIB)
    with StorageWriter(dist_ckpt_workers=workers) as writer:
        save(writer, f"{folder}/checkpoint", OLD)
        for mode in ("sync", "async"):
            error = error_of(functools.partial(save_in, mode, writer, f"{folder}/checkpoint", NEW))
            assert isinstance(error, WriteError), repr(error)
            assert (error.errno, error.rank) == (errno.ENOSPC, 0)
            assert error.lane in range(workers)
            assert error.path is not None
            # Whichever lane is free writes the next part of any file.
            assert re.match(rf"{folder}/checkpoint/__0_\d\.distcp", error.path), error.path
            assert "ENOSPC" in str(error)
            assert error.path in str(error)
            assert same(load(f"{folder}/checkpoint", OLD), OLD)
            # All that the failed save had written is free again.
            assert_is_clean(f"{folder}/checkpoint")
        save(writer, f"{folder}/checkpoint", NEXT)
        assert same(load(f"{folder}/checkpoint", NEXT), NEXT)
        shutil.rmtree(f"{folder}/checkpoint")
        save(writer, f"{folder}/checkpoint", NEW)
        assert same(load(f"{folder}/checkpoint", NEW), NEW)
        assert_is_clean(f"{folder}/checkpoint")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_named_and_survived(programs: Programs, tmp_path: Path, workers: int) -> None:
    done = programs.run(fill_up_and_free, str(tmp_path), workers)
    if done.status == NO_MOUNT:
        pytest.skip(done.out)
    assert done.status == 0, done


def fill_up_to_the_last_byte(folder: str) -> None:
    mount_tmpfs(folder, 24 * MIB)
    committed = OLD
    path = f"{folder}/checkpoint"
    failed = set()
    with StorageWriter() as writer:
        save(writer, path, OLD)
        # Leave a page less each time: first nothing is missing, then the metadata, the record, and so on.
        for number, pages in enumerate(range(1070, 1010, -1), start=100):
            filler = Path(folder, "filler")
            free = os.statvfs(folder)
            filler.write_bytes(bytes(free.f_bavail * 4096 - pages * 4096))
            state = state_of(number)
            error = outcome_of(functools.partial(save, writer, path, state))
            filler.unlink()
            if error is None:
                committed = state
            else:
                assert isinstance(error, WriteError), repr(error)
                assert error.errno == errno.ENOSPC
                assert error.path is not None
                failed.add(os.path.relpath(error.path, path).split("/")[0].split(".")[1])
            assert same(load(path, committed), committed)
            if len(failed) == 3 and error is not None:
                break
    assert committed is not OLD, "there was never enough room"
    assert "distcp" in failed, failed
    assert "distckpt" in failed, failed


def test_a_disk_that_fills_up_at_any_step_leaves_old_or_new(programs: Programs, tmp_path: Path) -> None:
    done = programs.run(fill_up_to_the_last_byte, str(tmp_path))
    if done.status == NO_MOUNT:
        pytest.skip(done.out)
    assert done.status == 0, done


SMALL = 256 * KIB
PAGE = 4096


def save_with(api: str, workers: int, folder: str) -> tuple[str, Callable[[Any], object], Callable[[], None]]:
    """Return the checkpoint's path, how to save to it, and what ends that."""
    if api == "checkpointer":
        checkpointer = Checkpointer(folder, dist_ckpt_workers=workers, async_save=True)
        return (
            f"{folder}/step-00000001",
            lambda state: checkpointer.save(1, state).result(timeout=30),
            checkpointer.close,
        )
    writer = StorageWriter(dist_ckpt_workers=workers)
    return (
        f"{folder}/checkpoint",
        functools.partial(save_in, api, writer, f"{folder}/checkpoint"),
        writer.close,
    )


def fill_up_at_any_size(folder: str, api: str, workers: int) -> None:
    """Overwrite a checkpoint with less and less room left, from what suffices to none at all."""
    mount_tmpfs(folder, 8 * MIB)
    path, save_one, close = save_with(api, workers, f"{folder}/storage")
    filler = Path(folder, "filler")
    committed = state_of(0, SMALL)
    save_one(committed)
    used = 8 * MIB - os.statvfs(folder).f_bavail * PAGE
    most = used // PAGE + 8
    sizes = [*range(most, most - 32, -1), *range(most - 32, 0, -3), 0]
    outcomes = []
    for number, pages in enumerate(sizes, start=1):
        filler.write_bytes(bytes((os.statvfs(folder).f_bavail - pages) * PAGE))
        new, third = state_of(2 * number, SMALL), state_of(2 * number + 1, SMALL)
        error = outcome_of(functools.partial(save_one, new))
        filler.unlink()
        outcomes.append(error is None)
        if error is None:
            assert same(load(path, new), new)
        else:
            assert isinstance(error, WriteError), repr(error)
            assert (error.errno, error.rank) == (errno.ENOSPC, 0), error
            assert error.path is not None
            assert error.path.startswith(path)
            assert (error.lane is not None) == (".distcp" in error.path), error
            assert same(load(path, committed), committed)
        save_one(third)
        assert same(load(path, third), third)
        assert_is_clean(path)
        committed = third
    close()
    assert outcomes[0], "there was never enough room"
    assert outcomes == sorted(outcomes, reverse=True), "less room was enough"
    say(len(outcomes), outcomes.index(False))


@pytest.mark.slow
@pytest.mark.parametrize(("api", "workers"), [("sync", 1), ("async", 2), ("checkpointer", 2)])
def test_a_disk_of_any_size_that_is_too_small(
    programs: Programs, tmp_path: Path, api: str, workers: int
) -> None:
    done = programs.run(fill_up_at_any_size, str(tmp_path), api, workers)
    if done.status == NO_MOUNT:
        pytest.skip(done.out)
    assert done.status == 0, done


def fill_up_behind_the_cache(folder: str, workers: int) -> None:
    """Save to an ext4 that believes in more room than there is: only fsync, or O_DIRECT, can tell."""
    mount_tmpfs(folder, 24 * MIB)
    image, storage = Path(folder, "image"), Path(folder, "storage")
    make_image(image, 64 * MIB)
    mount_image(image, storage)
    path = storage / "checkpoint"
    large = state_of(2, 32 * MIB)
    with StorageWriter(dist_ckpt_workers=workers) as writer:
        save(writer, path, OLD)
        error = error_of(lambda: save(writer, path, large))
        assert isinstance(error, WriteError), repr(error)
        # The kernel makes EIO of it when it comes from below a file system.
        assert error.errno in {errno.ENOSPC, errno.EIO}, error
        assert error.rank == 0
        assert error.lane in range(workers)
        assert error.path is not None
        assert ".distcp" in error.path
        assert same(load(path, OLD), OLD)
        resize_tmpfs(folder, 128 * MIB)
        # A journal that could not be written has made it read-only.
        unmount(storage)
        mount_image(image, storage)
        assert same(load(path, OLD), OLD)
        save(writer, path, large)
        assert same(load(path, large), large)
        assert_is_clean(path)
    unmount(storage)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_is_full_below_the_file_system(programs: Programs, tmp_path: Path, workers: int) -> None:
    done = programs.run(fill_up_behind_the_cache, str(tmp_path), workers)
    if done.status == NO_MOUNT:
        pytest.skip(done.out)
    assert done.status == 0, done


@contextmanager
def file_size_limit(pids: list[int], nbytes: int) -> Iterator[None]:
    """Let processes write no file beyond `nbytes`: a write that crosses it is short, the next one fails."""
    before = [resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids]
    for pid, (_, hard) in zip(pids, before, strict=True):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        for pid, limits in zip(pids, before, strict=True):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("limit", [0, 1000, MIB + 1000])
def test_a_file_that_may_not_grow_is_named_and_survived(
    open_writer: OpenWriter, tmp_path: Path, workers: int, mode: str, limit: int
) -> None:
    writer = open_writer(dist_ckpt_workers=workers)
    # The limit holds for the arena of the calling process as well: let that have grown.
    save_in(mode, writer, tmp_path, NEW)
    save(writer, tmp_path, OLD)
    with file_size_limit(pids_of(writer) if workers > 1 else [os.getpid()], limit):
        error = error_of(lambda: save_in(mode, writer, tmp_path, NEW))
    assert isinstance(error, WriteError)
    assert (error.errno, error.rank) == (errno.EFBIG, 0)
    if workers > 1 or limit > 1000:
        # Before that, the manifest and the owner record of the calling process do not fit either.
        assert error.lane in range(workers)
        assert error.path is not None
        assert re.match(rf"{tmp_path}/__0_\d\.distcp", error.path), error.path
        assert error.offset == limit, "what was accepted before the error was not counted"
    assert same(load(tmp_path, OLD), OLD)
    save_in(mode, writer, tmp_path, NEXT)
    assert same(load(tmp_path, NEXT), NEXT)
    assert_is_clean(tmp_path)


def test_short_writes_are_continued(
    open_writer: OpenWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_writer()
    pwritev, write = os.pwritev, os.write
    calls = 0

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        nbytes = 1 + calls * 4099 % 65_536
        return pwritev(fd, [memoryview(buffers[0]).cast("B")[:nbytes]], offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", short)
        patched.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:100])))
        save(writer, tmp_path, NEW)
    assert calls > 100
    assert same(load(tmp_path, NEW), NEW)


def tracing(pid: int, *arguments: str) -> subprocess.Popen[bytes]:
    """Attach strace to a process, or skip where that is not possible."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    tracer = subprocess.Popen([strace, "-f", "-p", str(pid), *arguments], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        status = Path(f"/proc/{pid}/status").read_text()
        if f"TracerPid:\t{tracer.pid}\n" in status:
            return tracer
        if tracer.poll() is not None:
            break
        time.sleep(0.01)
    tracer.kill()
    _, text = tracer.communicate()
    pytest.skip(f"strace cannot attach: {text.decode(errors='replace')}")


@contextmanager
def injecting(pid: int, *rules: str) -> Iterator[None]:
    """Have system calls of a process answered as `rules` say (see `inject` in strace(1))."""
    # Python calls one or the other, by its version.
    rules = tuple(rule.replace("pwritev:", "pwritev,pwritev2:") for rule in rules)
    calls = ",".join(rule.partition(":")[0] for rule in rules)
    tracer = tracing(pid, "-o", "/dev/null", "-e", f"trace={calls}", *(f"--inject={rule}" for rule in rules))
    try:
        yield
    finally:
        tracer.terminate()
        try:
            tracer.communicate(timeout=2)
        except subprocess.TimeoutExpired:
            # It waits for a thread of a killed process that it holds itself.
            tracer.kill()
            tracer.communicate(timeout=10)


@pytest.mark.parametrize(
    ("rule", "number", "doing"),
    [
        ("fsync:error=EIO", errno.EIO, "cannot make durable"),
        ("fsync:error=ENOSPC", errno.ENOSPC, "cannot make durable"),
        ("pwritev:error=EIO", errno.EIO, "cannot write"),
        ("pwritev:error=EDQUOT", errno.EDQUOT, "cannot write"),
        ("pwritev:error=ESTALE", errno.ESTALE, "cannot write"),
        ("pwritev:retval=0", errno.EIO, "cannot write"),
    ],
)
def test_an_error_of_any_system_call_reaches_the_caller(
    open_writer: OpenWriter, tmp_path: Path, rule: str, number: int, doing: str
) -> None:
    writer = open_writer(dist_ckpt_workers=2)
    save(writer, tmp_path, OLD)
    with injecting(pids_of(writer)[1], rule), without_the_others(writer, 1):
        error = error_of(lambda: save(writer, tmp_path, NEW))
    assert isinstance(error, WriteError)
    assert (error.errno, error.rank, error.lane) == (number, 0, 1)
    assert error.path is not None
    assert re.match(rf"{tmp_path}/__0_\d\.distcp\.", error.path), error.path
    assert doing in str(error)
    assert errno.errorcode[number] in str(error)
    assert same(load(tmp_path, OLD), OLD)
    save(writer, tmp_path, NEXT)
    assert same(load(tmp_path, NEXT), NEXT)
    assert_is_clean(tmp_path)


def test_a_file_that_lost_its_end_is_found_by_its_size(open_writer: OpenWriter, tmp_path: Path) -> None:
    writer = open_writer(dist_ckpt_workers=2)
    save(writer, tmp_path / "old", OLD)
    # Every write has been accepted; somebody truncates the file before it is made durable.
    first, second = (injecting(pid, f"fsync:delay_enter={10**6}") for pid in pids_of(writer))
    with first, second:
        saving: Any = start_save(writer, tmp_path / "new", NEW)
        written: list[Path] = []

        def find() -> list[Path]:
            files = (tmp_path / "new").glob("__0_1.distcp*")
            written[:] = [file for file in files if file.stat().st_size > 4 * MIB]
            return written

        wait_until(find, 20, "the file is written")
        [file] = written
        time.sleep(0.2)
        os.truncate(file, 4 * MIB)
        error = error_of(lambda: saving.result(timeout=20))
    assert isinstance(error, WriteError)
    assert (error.rank, error.path) == (0, str(file))
    assert f"holds {4 * MIB} bytes" in str(error)
    assert not (tmp_path / "new" / ".metadata").exists()


@pytest.mark.slow
def test_a_worker_that_hangs_in_the_kernel_is_given_up_and_its_memory_is_not_used_again(
    open_writer: OpenWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((engine, "_ABORT_S"), (lanes, "_STOP_S"), (lanes, "_REAP_S")):
        monkeypatch.setattr(module, name, 0.5)
    writer = open_writer(dist_ckpt_workers=2, distributed_timeout_minutes=0.02)
    save(writer, tmp_path, OLD)
    arena = engine_of(writer).arena
    arena._take_back()
    left = arena._left()
    hanging = pids_of(writer)[0]
    # As with a hung disk, SIGKILL has no effect before the call returns.
    with injecting(hanging, f"fsync:delay_enter={60 * 10**6}"):
        with without_the_others(writer, 0):
            error = error_of(lambda: save(writer, tmp_path, NEW))
        assert isinstance(error, WriteError)
        assert (error.errno, error.lane) == (errno.ETIMEDOUT, 0)
        assert same(load(tmp_path, OLD), OLD)
        save(writer, tmp_path, NEXT)
        arena._take_back()
        assert left - 9 * MIB < arena._left() < left - 8 * MIB, "what the worker may still read"
    assert same(load(tmp_path, NEXT), NEXT)
    wait_until(lambda: not is_running(hanging), 10, "the worker has ended")
    save(writer, tmp_path, OLD)
    assert same(load(tmp_path, OLD), OLD)
    assert_is_clean(tmp_path)


def blocked_by(kind: str, path: Path) -> Callable[[], None]:
    """Put something in the way of `path`; returns how to remove it."""
    if kind == "a file":
        path.touch()
        return path.unlink
    if kind == "a file above":
        path.parent.rmdir()
        path.parent.touch()

        def unblock() -> None:
            path.parent.unlink()
            path.parent.mkdir()

        return unblock
    path.symlink_to(path.parent / "loop")
    (path.parent / "loop").symlink_to(path)
    return path.unlink


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["a file", "a file above", "a loop"])
def test_something_in_the_way_is_named_and_survived(
    open_writer: OpenWriter, tmp_path: Path, kind: str, workers: int
) -> None:
    path = tmp_path / "checkpoints" / "new"
    path.parent.mkdir()
    unblock = blocked_by(kind, path)
    writer = open_writer(dist_ckpt_workers=workers)
    for mode in ("sync", "async"):
        error = error_of(functools.partial(save_in, mode, writer, path, OLD))
        assert isinstance(error, WriteError)
        assert error.errno in {errno.EEXIST, errno.ENOTDIR, errno.ELOOP}
        assert error.path is not None
        assert str(path.parent) in error.path
    unblock()
    save(writer, path, OLD)
    assert same(load(path, OLD), OLD)


def test_a_directory_that_vanishes_during_the_save(open_writer: OpenWriter, tmp_path: Path) -> None:
    writer = open_writer(dist_ckpt_workers=2)
    save(writer, tmp_path / "old", OLD)
    path = tmp_path / "new"
    with stopping(writer, 0) as stopped:
        saving: Any = start_save(writer, path, NEW)
        assert stopped.wait(20)
        images = list(path.glob("__0_?.distcp*"))
        assert len(images) == 2
        wait_until(lambda: any(image.stat().st_size for image in images), 20, "something is written")
        shutil.rmtree(path)
    error = outcome_of(lambda: saving.result(timeout=20))
    assert error is not None, "reported success for files that are gone"
    assert not (path / ".metadata").exists()
    assert engine_of(writer).arena.reserved_bytes > 0
    save(writer, path, NEXT)
    assert same(load(path, NEXT), NEXT)

"""An S3 server that fails: killed, busy, mute, lying, gone, or letting nobody in; for one rank or for all."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import distributed
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from distckpt import Checkpointer, StorageReader, StorageWriter, WriteError
from faults.checkpoints import (
    MIB,
    empty_like,
    error_of,
    on_event,
    same,
    save,
    save_in,
    say,
    start_save,
    state_of,
    wait_until,
)
from faults.programs import Programs
from integration.ranks.world import Ranks
from servers import FaultProxy, S3Server

pytestmark = [pytest.mark.s3, pytest.mark.slow]

OLD, NEXT = state_of(1), state_of(3)
NEW = {1: state_of(2, 18 * MIB), 2: state_of(2, 36 * MIB)}
"""By number of workers: every lane has a file of two parts."""
READ_S = 1.0
"""Until the client takes a request for lost."""
DEADLINE_S = 3.0
"""Until a save that is to fail does so, without progress."""
GRACE_S = 10.0
"""What it may take longer than that."""
PATIENCE_S = 30.0
"""The deadline of a save that is to succeed, after pauses between attempts that chance decides."""
WORLD = 4

UPLOAD, COMPLETE = "UploadPart", "CompleteMultipartUpload"
FILE: dict[str, Any] = {"op": [UPLOAD, "PutObject"], "key": r"\.distcp"}
SECOND: dict[str, Any] = {"op": UPLOAD, "query": {"partNumber": "2"}}
METADATA: dict[str, Any] = {"op": ["PutObject", COMPLETE], "key": r"/\.metadata$"}
SURVIVED: dict[str, dict[str, Any]] = {
    "busy": {"probability": 0.3, "status": 503, "code": "SlowDown"},
    "busy, and says for how long": {"op": UPLOAD, "count": 1, "status": 503, "retry_after": 1},
    "internal errors": {"every": 3, "count": 9, "status": 500, "code": "InternalError"},
    "connections are reset": {"every": 4, "count": 9, "reset": True},
    "a part is cut": SECOND | {"count": 1, "cut": MIB},
    "a part is not answered": SECOND | {"count": 1, "hang": "answer"},
    "a part is not read": FILE | {"count": 1, "hang": "body"},
    "a part arrives corrupted": SECOND | {"count": 1, "corrupt": -1},
    "the answer to a part is lost": SECOND | {"count": 1, "lost": True},
    "the answer to a begin is lost": {"op": "CreateMultipartUpload", "count": 1, "lost": True},
    "the answer to an end is lost": {"op": COMPLETE, "count": 1, "lost": True},
    "all answers to ends are lost": {"op": COMPLETE, "lost": True},
    "an end fails with status 200": {"op": COMPLETE, "count": 1, "error_body": "InternalError"},
    "an end is not answered": {"op": COMPLETE, "count": 1, "hang": "answer"},
    "the answer to the publication is lost": METADATA | {"count": 1, "lost": True},
    "the publication is not answered": METADATA | {"count": 1, "hang": "answer"},
}
TIMED_OUT = {errno.ETIMEDOUT}
FATAL: dict[str, tuple[dict[str, Any], set[int], str]] = {
    "internal errors": (FILE | {"status": 500, "code": "InternalError"}, {errno.EIO}, "InternalError"),
    "busy": (FILE | {"status": 503, "code": "SlowDown"}, {errno.EAGAIN}, "SlowDown"),
    "a part is not answered": (SECOND | {"hang": "answer"}, TIMED_OUT, ""),
    "a part is not read": (FILE | {"hang": "body"}, TIMED_OUT, ""),
    "a part arrives corrupted": (SECOND | {"corrupt": -1}, {errno.EIO}, ""),
    "credentials expire": (FILE | {"status": 403, "code": "ExpiredToken"}, {errno.EACCES}, "ExpiredToken"),
    "no end": ({"op": COMPLETE, "error_body": "InternalError"}, {errno.EIO}, "InternalError"),
    "no publication": (METADATA | {"status": 500, "code": "InternalError"}, {errno.EIO}, "InternalError"),
}


def in_turns(faults: dict[str, Any]) -> list[Any]:
    """Return each fault with a way to save, of which each has its share.

    Those that lanes meet have both numbers of workers, the second one where time does not matter.
    """
    found: list[Any] = []
    for number, (fault, rule) in enumerate(faults.items()):
        ways = [("sync", 1), (("async", "checkpointer")[number % 2], 2)]
        op = (rule if isinstance(rule, dict) else rule[0]).get("op", UPLOAD)
        first, second = ways if number % 3 else reversed(ways)
        if UPLOAD not in op:
            found.append((fault, *ways[number // 2 % 2]))
            continue
        found += [(fault, *first), pytest.param(fault, *second, marks=pytest.mark.thorough)]
    return found


def settings_of(options: dict[str, Any], attempts: int = 9) -> dict[str, Any]:
    """Return storage options with the timeouts of these tests."""
    return options | {
        "config_kwargs": {
            "connect_timeout": READ_S,
            "read_timeout": READ_S,
            "retries": {"total_max_attempts": attempts, "mode": "standard"},
        }
    }


def load(url: str, options: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """Return what the checkpoint holds, with every checksum compared."""
    state = empty_like(like)
    state_dict_loader.load(state, storage_reader=StorageReader(url, storage_options=options))
    return state


@dataclass
class Job:
    """Saves to one checkpoint again and again.

    Attributes:
        url: The checkpoint.
        save: Saves a state and waits for the end.
    """

    url: str
    save: Callable[[dict[str, Any]], None]


OpenJob = Callable[..., Job]


@pytest.fixture
def open_job(s3_server: S3Server, fault_proxy: FaultProxy) -> Iterator[OpenJob]:
    """Opens jobs that save by the proxy, and are closed after the test."""
    opened: list[StorageWriter | Checkpointer] = []

    def open_one(
        how: str,
        workers: int,
        url: str | None = None,
        *,
        timeout_s: float = PATIENCE_S,
        attempts: int = 9,
        **options: Any,
    ) -> Job:
        # Calls that are stuck in one job hold up what lies beside it.
        url = url or f"{s3_server.new_prefix()}/job"
        settings: dict[str, Any] = {
            "dist_ckpt_workers": workers,
            "distributed_timeout_minutes": timeout_s / 60,
            "storage_options": settings_of(fault_proxy.options, attempts) | options,
        }
        if how == "checkpointer":
            checkpointer = Checkpointer(url, **settings)
            opened.append(checkpointer)

            def save(state: dict[str, Any]) -> None:
                checkpointer.save(0, state)

            return Job(f"{url}/step-00000000", save)
        writer = StorageWriter(**settings)
        opened.append(writer)
        return Job(url, lambda state: save_in(how, writer, url, state))

    yield open_one
    # A request that hangs would make them wait.
    fault_proxy.set_rules()
    for one in opened:
        one.close()


def check_next(server: S3Server, job: Job) -> None:
    """Save once more; nothing is left of the saves before."""
    job.save(NEXT)
    assert same(load(job.url, server.options, NEXT), NEXT)
    assert not server.unfinished_uploads(job.url)
    files = [key for key in server.keys(job.url) if ".distcp." in key]
    named = {name.rpartition(".")[2] for name in files}
    assert len(named) == 1, f"files of several saves are left: {files}"


@pytest.mark.parametrize(("fault", "how", "workers"), in_turns(SURVIVED))
def test_a_fault_that_ends_is_survived(
    open_job: OpenJob, s3_server: S3Server, fault_proxy: FaultProxy, fault: str, how: str, workers: int
) -> None:
    job = open_job(how, workers)
    job.save(OLD)
    fault_proxy.set_rules(SURVIVED[fault])
    job.save(NEW[workers])
    assert fault_proxy.faults() > 0, "nothing failed"
    fault_proxy.set_rules()
    assert same(load(job.url, s3_server.options, NEW[workers]), NEW[workers])
    check_next(s3_server, job)


@pytest.mark.parametrize(("fault", "how", "workers"), in_turns(FATAL))
def test_a_fault_without_end_is_named_and_changes_nothing(
    open_job: OpenJob, s3_server: S3Server, fault_proxy: FaultProxy, fault: str, how: str, workers: int
) -> None:
    rule, numbers, code = FATAL[fault]
    jobs = [open_job(how, workers, timeout_s=2 * DEADLINE_S, attempts=2) for _ in range(2)]
    job, fresh = jobs
    job.save(OLD)
    before = s3_server.keys(job.url)
    # Of the last save that began.
    before.pop(".distckpt/owner")
    fault_proxy.set_rules(rule)
    with ThreadPoolExecutor(2) as threads:
        started = time.monotonic()
        errors = list(threads.map(lambda one: error_of(lambda: one.save(NEW[workers])), jobs))
        assert time.monotonic() - started < 2 * DEADLINE_S + GRACE_S
    for one, error in zip(jobs, errors, strict=True):
        assert isinstance(error, WriteError), repr(error)
        assert error.errno in numbers, repr(error)
        assert error.rank == 0
        assert error.path is not None
        assert error.path.startswith(f"{one.url}/"), error.path
        assert error.path in str(error)
        assert code in str(error)
    assert fault_proxy.faults() > 0, "nothing failed"
    wait_until(lambda: "distckpt-storage" not in remains(), GRACE_S, "calls that were given up end")
    assert before.items() <= s3_server.keys(job.url).items()
    assert same(load(job.url, s3_server.options, OLD), OLD)
    assert ".metadata" not in s3_server.keys(fresh.url)
    fault_proxy.set_rules()
    for one in jobs:
        check_next(s3_server, one)


def remains() -> list[str]:
    """Return the threads of distckpt, and its memory, that this process has."""
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("distckpt")]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return threads + [line for line in maps if "/memfd:distckpt" in line]


def save_in_a_thread(thread: ThreadPoolExecutor, job: Job, proxy: FaultProxy, state: dict[str, Any]) -> Any:
    """Begin a save over a slow link; returns its future, with some of its parts sent and others not."""
    proxy.reset()
    proxy.set_rules(FILE | {"bandwidth": 24 * MIB})
    saving = thread.submit(job.save, state)
    wait_until(lambda: proxy.count(UPLOAD) or saving.done(), 10, "a part has arrived")
    assert not saving.done()
    return saving


@pytest.mark.parametrize(
    ("how", "workers"),
    [
        pytest.param("sync", 1, marks=pytest.mark.thorough),
        ("async", 2),
        pytest.param("checkpointer", 2, marks=pytest.mark.thorough),
    ],
)
def test_a_server_that_is_killed_and_comes_back(
    open_job: OpenJob, s3_server: S3Server, fault_proxy: FaultProxy, how: str, workers: int
) -> None:
    job = open_job(how, workers)
    job.save(OLD)
    with ThreadPoolExecutor(1) as thread:
        saving = save_in_a_thread(thread, job, fault_proxy, NEW[workers])
        s3_server.kill()
        time.sleep(2)
        s3_server.start()
        saving.result(timeout=40)
    fault_proxy.set_rules()
    assert same(load(job.url, s3_server.options, NEW[workers]), NEW[workers])
    check_next(s3_server, job)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_that_is_killed_and_stays_away(
    open_job: OpenJob, s3_server: S3Server, fault_proxy: FaultProxy, workers: int
) -> None:
    job = open_job("async", workers, timeout_s=2 * DEADLINE_S, attempts=2)
    job.save(OLD)
    with ThreadPoolExecutor(1) as thread:
        saving = save_in_a_thread(thread, job, fault_proxy, NEW[workers])
        started = time.monotonic()
        s3_server.kill()
        try:
            error = error_of(lambda: saving.result(timeout=40))
            assert time.monotonic() - started < 2 * DEADLINE_S + GRACE_S
        finally:
            s3_server.start()
    assert isinstance(error, WriteError), repr(error)
    assert error.path is not None
    assert error.path.startswith(f"{job.url}/"), error.path
    # While a call that was given up goes on, others may be refused.
    wait_until(lambda: "distckpt-storage" not in remains(), GRACE_S, "calls that were given up end")
    assert same(load(job.url, s3_server.options, OLD), OLD)
    fault_proxy.set_rules()
    check_next(s3_server, job)


def meet_a_server_that_stalls(
    url: str, options: dict[str, Any], server: int, workers: int, event: str, leave: str
) -> None:
    """Program: save, while the server is stopped for good when `event` happens; say what came of it."""
    writer = StorageWriter(
        dist_ckpt_workers=workers, distributed_timeout_minutes=DEADLINE_S / 60, storage_options=options
    )
    stalled = threading.Event()

    def stall(_: object) -> None:
        os.kill(server, signal.SIGSTOP)
        stalled.set()

    with on_event(event, stall):
        if leave == "with the save in flight":
            start_save(writer, url, NEW[workers])
            stalled.wait(20)
            say("left", time.monotonic())
            return
        started = time.monotonic()
        error = error_of(lambda: save(writer, url, NEW[workers]))
    assert isinstance(error, WriteError), repr(error)
    assert error.errno == errno.ETIMEDOUT, repr(error)
    assert error.path is not None
    assert error.path.startswith(url), error.path
    say("failed after", time.monotonic() - started)
    if leave == "closed":
        # What is in the way already does not pile up.
        error_of(lambda: save(writer, url, OLD))
        say("failed again after", time.monotonic() - started)
        writer.close()
        say("closed after", time.monotonic() - started)
        say("remains within", wait_until(lambda: not remains(), GRACE_S, f"all is given back: {remains()}"))
    say("left", time.monotonic())


@pytest.mark.parametrize(
    ("workers", "event", "leave"),
    [
        pytest.param(1, "parts.pushed", "closed", marks=pytest.mark.thorough),
        pytest.param(2, "parts.pushed", "closed", marks=pytest.mark.thorough),
        pytest.param(1, "files.written", "at once", marks=pytest.mark.thorough),
        pytest.param(2, "parts.pushed", "at once", marks=pytest.mark.thorough),
        (1, "parts.pushed", "with the save in flight"),
    ],
)
def test_a_server_that_stalls_for_ever(
    programs: Programs, s3_server: S3Server, s3_url: str, workers: int, event: str, leave: str
) -> None:
    assert s3_server.process is not None
    server, options = s3_server.process.pid, settings_of(s3_server.options, 2)
    with StorageWriter(storage_options=s3_server.options) as writer:
        save(writer, s3_url, OLD)
    try:
        done = programs.run(meet_a_server_that_stalls, s3_url, options, server, workers, event, leave)
        ended = time.monotonic()
    finally:
        os.kill(server, signal.SIGCONT)
    is_lost = leave == "with the save in flight"
    assert done.status == int(is_lost), done
    assert ("the last checkpoint was lost" in done.err) == is_lost, done
    said = [line.rpartition(" ") for line in done.out.splitlines()]
    assert ended - float(said[-1][2]) < (DEADLINE_S + GRACE_S if is_lost else GRACE_S), done
    if not is_lost:
        assert float(said[0][2]) < DEADLINE_S + GRACE_S, done
    assert same(load(s3_url, s3_server.options, OLD), OLD)
    with StorageWriter(storage_options=s3_server.options) as writer:
        check_next(s3_server, Job(s3_url, lambda state: save(writer, s3_url, state)))


@pytest.mark.parametrize(("how", "workers"), [("sync", 1), ("async", 2), ("checkpointer", 2)])
@pytest.mark.parametrize(
    ("bucket", "options", "number"),
    [
        ("ckpt", {"secret": "wrong"}, errno.EACCES),
        ("ckpt", {"key": "nobody"}, errno.EACCES),
        ("no-such-bucket", {}, errno.ENOENT),
    ],
)
def test_no_entry_is_told_before_anything_is_sent(
    open_job: OpenJob,
    s3_server: S3Server,
    fault_proxy: FaultProxy,
    how: str,
    workers: int,
    bucket: str,
    options: dict[str, Any],
    number: int,
) -> None:
    url = s3_server.new_prefix().replace("//ckpt/", f"//{bucket}/")
    job = open_job(how, workers, url, **options)
    error = error_of(lambda: job.save(NEW[1]))
    assert isinstance(error, WriteError), repr(error)
    assert error.errno == number, repr(error)
    assert error.path is not None
    assert error.path.startswith(url), error.path
    assert fault_proxy.count() <= 1, "one question, and not another attempt"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Runs functions on worlds of gloo ranks."""
    world = Ranks()
    yield world
    world.close()


def states_of(bad: int) -> list[dict[str, Any]]:
    """Return what each rank saves; the files of `bad` have several parts."""
    return [{f"rank{rank}": state_of(rank, 36 * MIB if rank == bad else 4 * MIB)} for rank in range(WORLD)]


def save_on_rank(how: str, url: str, options: list[dict[str, Any]], bad: int) -> str:
    """Rank function: save; each rank has its own way to the server."""
    rank = distributed.get_rank()
    settings: dict[str, Any] = {
        "dist_ckpt_workers": 2 if rank % 2 else 1,
        "distributed_timeout_minutes": PATIENCE_S / 60,
        "storage_options": settings_of(options[rank]),
    }
    state = states_of(bad)[rank]
    if how == "checkpointer":
        with Checkpointer(url, **settings) as checkpointer:
            return checkpointer.save(0, state).result(30)
    with StorageWriter(**settings) as writer:
        state_dict_saver.save(state, storage_writer=writer, checkpoint_id=url)
    return url


@pytest.mark.parametrize(
    ("bad", "how", "rule"),
    [
        pytest.param(
            0, "sync", {"probability": 0.3, "status": 503, "code": "SlowDown"}, id="busy to the first"
        ),
        pytest.param(
            2,
            "checkpointer",
            {"probability": 0.3, "status": 503, "code": "SlowDown"},
            id="busy to another",
            marks=pytest.mark.thorough,
        ),
        pytest.param(1, "checkpointer", FILE | {"count": 1, "hang": "body"}, id="not read"),
        pytest.param(
            2, "sync", FILE | {"count": 1, "hang": "answer"}, id="not answered", marks=pytest.mark.thorough
        ),
        pytest.param(
            3, "sync", FILE | {"count": 1, "corrupt": -1}, id="corrupted", marks=pytest.mark.thorough
        ),
    ],
)
def test_one_rank_of_four_whose_way_to_the_server_is_bad(
    ranks: Ranks, s3_server: S3Server, fault_proxy: FaultProxy, rule: dict[str, Any], bad: int, how: str
) -> None:
    fault_proxy.set_rules(rule | {"port": bad})
    options = [fault_proxy.options_of(rank) for rank in range(WORLD)]
    [url, *others] = ranks.run(
        WORLD, save_on_rank, how=how, url=s3_server.new_prefix(), options=options, bad=bad
    )
    assert others == [url] * (WORLD - 1)
    assert fault_proxy.faults() > 0, "nothing failed"
    assert {request.port for request in fault_proxy.requests() if ".distcp" in request.path} == set(
        range(WORLD)
    )
    expected = {name: state for part in states_of(bad) for name, state in part.items()}
    loaded = {name: empty_like(state) for name, state in expected.items()}
    state_dict_loader.load(loaded, storage_reader=StorageReader(url, storage_options=s3_server.options))
    assert all(same(loaded[name], state) for name, state in expected.items())
    assert not s3_server.unfinished_uploads(url)

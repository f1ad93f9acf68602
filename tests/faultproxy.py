"""An S3 endpoint that passes everything on to a server, but for what its rules say.

usage: faultproxy.py SERVER RULES REQUESTS PORT...

It listens on several ports of the loopback interface, all in front of one server (`http://host:port`), so
that each rank of a job can have its own. Clients sign the host that they connect to: it is passed on as it
came.

RULES is a JSON file, read again whenever it has changed: a list of rules, of which the first that matches is
followed:

    op              the request: CreateBucket, PutObject, CopyObject, GetObject, HeadObject, DeleteObject,
                    DeleteObjects, ListObjects, CreateMultipartUpload, UploadPart, CompleteMultipartUpload,
                    AbortMultipartUpload, ListParts, ListMultipartUploads, Other; a list of them; default: any
    key             regular expression that is searched in the path, /BUCKET/KEY
    query           parameters of the query that must have these values, as {"partNumber": "2"}
    header          headers that must have these values
    port            number of the port that it came by, from 0
    skip            how many matching requests it lets pass first
    count           how many it is followed for, after that; default: all
    every           it is followed for each `every`-th of these only
    probability     it is followed for so large a part of these only
    seed            of the numbers that decide that; default: 0

    status          answer with this status and an error, once the body is read; nothing is passed on
    code            of that error; default: SlowDown
    retry_after     seconds that the answer says to wait
    error_body      answer 200, with an error of this code in the body; nothing is passed on
    reset           reset the connection without a look at the body
    cut             reset it after so many bytes of the request's body were passed on
    cut_answer      reset it after so many bytes of the answer's body
    lost            pass the request on, and reset the connection when the answer is there
    hang            "body": never read the body, of which 4 MiB or so fit into the kernel's buffers; "answer":
                    read it, and pass nothing on; either way never answer, until the rules change: then the
                    connection is reset
    delay           pass it on after so many seconds
    corrupt         invert the bits of this byte of the request's body; -1 is the last one
    corrupt_answer  the same of the answer's body
    bandwidth       bytes in a second that the bodies of all requests that the rule is followed for share

REQUESTS is a file of JSON lines, one for each request that has ended or hangs: op, path, query, port, nbytes
of its body that were read, status (None: no answer), rule (number of the one that was followed, or None),
range (the header), started and ended (seconds on the monotonic clock).
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
from aiohttp import web

_CHUNK_BYTES = 1 << 18
_RECEIVE_BYTES = 1 << 18
"""Of the kernel, for a connection: a body that is not read must not fit in there."""
# Of one connection, not of the message. The server has answered `Expect` itself when a handler is called.
_HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "expect"}
_ERROR = '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{}</Code><Message>injected</Message></Error>'


def name_request(method: str, path: str, query: dict[str, str], headers: dict[str, str]) -> str:
    """Return S3's name of a request."""
    _, _, key = path.lstrip("/").partition("/")
    if method == "PUT":
        if not key:
            return "CreateBucket"
        if "partNumber" in query:
            return "UploadPart"
        return "CopyObject" if "x-amz-copy-source" in headers else "PutObject"
    if method == "POST":
        named = {"uploads": "CreateMultipartUpload", "uploadId": "CompleteMultipartUpload"}
        named["delete"] = "DeleteObjects"
        return next((name for parameter, name in named.items() if parameter in query), "Other")
    if method == "DELETE":
        return "AbortMultipartUpload" if "uploadId" in query else "DeleteObject"
    if method == "HEAD":
        return "HeadObject"
    if method != "GET":
        return "Other"
    if "uploads" in query:
        return "ListMultipartUploads"
    if not key:
        return "ListObjects"
    return "ListParts" if "uploadId" in query else "GetObject"


class _Rules:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._rules: list[dict[str, Any]] = []
        self._chances: list[random.Random] = []
        self._version = (0, 0)

    def version(self) -> tuple[int, int]:
        """Read the rules again if they have changed; returns which they are."""
        status = self._path.stat()
        # Two changes within one tick of the file system's clock are told apart by the file.
        version = (status.st_mtime_ns, status.st_ino)
        if version != self._version:
            self._version = version
            self._rules = json.loads(self._path.read_text())
            self._chances = [random.Random(rule.get("seed", 0)) for rule in self._rules]
        return self._version

    def match(self, op: str, port: int, request: web.Request) -> tuple[int | None, dict[str, Any]]:
        """Return the rule that is to be followed, with its number, or (None, {})."""
        self.version()
        for index, rule in enumerate(self._rules):
            if not _matches(rule, op, port, request):
                continue
            seen = rule["seen"] = rule.get("seen", 0) + 1
            number = seen - rule.get("skip", 0)
            if (
                0 < number <= rule.get("count", number)
                and number % rule.get("every", 1) == 0
                and self._chances[index].random() < rule.get("probability", 1)
            ):
                return index, rule
        return None, {}


def _matches(rule: dict[str, Any], op: str, port: int, request: web.Request) -> bool:
    ops = rule.get("op", op)
    return (
        op in ([ops] if isinstance(ops, str) else ops)
        and re.search(rule.get("key", ""), request.path) is not None
        and rule.get("port", port) == port
        and all(request.query.get(name) == value for name, value in rule.get("query", {}).items())
        and all(request.headers.get(name) == value for name, value in rule.get("header", {}).items())
    )


class _Body:
    """A body on its way, changed as a rule says."""

    def __init__(self, rule: dict[str, Any], content: aiohttp.StreamReader, nbytes: int, suffix: str) -> None:
        self.passed = 0
        self._rule = rule
        self._content = content
        self._cut = rule.get(f"cut{suffix}")
        self._corrupt = rule.get(f"corrupt{suffix}")
        if self._corrupt is not None and self._corrupt < 0:
            self._corrupt += nbytes

    async def chunks(self) -> AsyncIterator[bytes]:
        async for chunk in self._content.iter_chunked(_CHUNK_BYTES):
            begin, end = self.passed, self.passed + len(chunk)
            if self._cut is not None and end > self._cut:
                self.passed = self._cut
                yield chunk[: self._cut - begin]
                # Time for it to arrive: what is still in a buffer is lost with the connection.
                await asyncio.sleep(0.05)
                raise ConnectionResetError
            if self._corrupt is not None and begin <= self._corrupt < end:
                at = self._corrupt - begin
                chunk = chunk[:at] + bytes([chunk[at] ^ 0xFF]) + chunk[at + 1 :]
            if "bandwidth" in self._rule:
                now = time.monotonic()
                free_at = max(self._rule.get("free_at", now), now) + len(chunk) / self._rule["bandwidth"]
                self._rule["free_at"] = free_at
                await asyncio.sleep(free_at - now)
            self.passed = end
            yield chunk


class Proxy:
    """Passes requests on.

    Args:
        server: Where to, `http://host:port`.
        rules: The file of the rules.
        requests: The file of what came; it is begun anew.
    """

    def __init__(self, server: str, rules: Path, requests: Path) -> None:
        self._server = server
        self._rules = _Rules(rules)
        self._log = requests.open("w")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def listen(self, number: int, port: int) -> web.AppRunner:
        """Listen on one port, the `number`-th."""

        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._handle(number, request)

        application = web.Application(client_max_size=1 << 40)
        application.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0)
        await runner.setup()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        listener.bind(("127.0.0.1", port))
        await web.SockSite(runner, listener).start()
        return runner

    async def _handle(self, port: int, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        op = name_request(request.method, request.path, dict(request.query), headers)
        number, rule = self._rules.match(op, port, request)
        body = _Body(rule, request.content, request.content_length or 0, "")
        line: dict[str, Any] = {
            "op": op,
            "path": request.path,
            "query": dict(request.query),
            "port": port,
            "rule": number,
            "range": headers.get("range"),
            "started": time.monotonic(),
        }
        status: int | None = None
        try:
            if "hang" in rule:
                await self._hang(rule["hang"], request, body, line)
            response = await self._follow(rule, request, body, line)
            status = response.status
        except OSError:
            # Whatever went wrong on either side: the client learns of it as from a server that is gone.
            _reset(request)
        else:
            return response
        finally:
            if "status" not in line and "hang" not in rule:
                self._write_line(line, body, status)

    def _write_line(self, line: dict[str, Any], body: _Body, status: int | None) -> None:
        line |= {"nbytes": body.passed, "status": status, "ended": time.monotonic()}
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()

    async def _hang(self, where: str, request: web.Request, body: _Body, line: dict[str, Any]) -> NoReturn:
        version = self._rules.version()
        transport = request.transport
        if transport is None:
            raise ConnectionResetError
        if where == "body":
            transport.pause_reading()
        else:
            async for _ in body.chunks():
                pass
        self._write_line(line, body, None)
        while self._rules.version() == version and not transport.is_closing():
            await asyncio.sleep(0.05)
        raise ConnectionResetError

    async def _follow(
        self, rule: dict[str, Any], request: web.Request, body: _Body, line: dict[str, Any]
    ) -> web.StreamResponse:
        await asyncio.sleep(rule.get("delay", 0))
        if rule.get("reset"):
            raise ConnectionResetError
        if "status" in rule or "error_body" in rule:
            async for _ in body.chunks():
                pass
            answer = web.Response(status=rule.get("status", 200), content_type="application/xml")
            answer.text = _ERROR.format(rule.get("error_body", rule.get("code", "SlowDown")))
            if "retry_after" in rule:
                answer.headers["Retry-After"] = str(rule["retry_after"])
            return answer
        return await self._pass_on(rule, request, body, line)

    async def _pass_on(
        self, rule: dict[str, Any], request: web.Request, body: _Body, line: dict[str, Any]
    ) -> web.StreamResponse:
        headers = _own(request.headers)
        async with self._session.request(
            request.method,
            self._server + request.raw_path,
            headers=headers,
            data=body.chunks() if request.can_read_body else None,
            allow_redirects=False,
            skip_auto_headers=("User-Agent", "Content-Type", "Accept", "Accept-Encoding"),
        ) as answer:
            if rule.get("lost"):
                await answer.read()
                raise ConnectionResetError
            response = web.StreamResponse(status=answer.status)
            response.headers.extend(_own(answer.headers))
            if request.method != "GET":
                # Before the client has the answer: whoever waits for that may count requests next.
                self._write_line(line, body, answer.status)
            await response.prepare(request)
            if request.method != "HEAD":
                content = _Body(rule, answer.content, answer.content_length or 0, "_answer")
                async for chunk in content.chunks():
                    await response.write(chunk)
            await response.write_eof()
            return response


def _own(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the headers of a message that belong to it and not to its connection."""
    return [(name, value) for name, value in headers.items() if name.lower() not in _HOP_HEADERS]


def _reset(request: web.Request) -> NoReturn:
    """End the connection of a request with RST."""
    transport = request.transport
    if transport is not None:
        peer: socket.socket = transport.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    raise ConnectionResetError


async def serve(server: str, rules: Path, requests: Path, ports: list[int]) -> None:
    """Serve until SIGTERM."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    proxy = Proxy(server, rules, requests)
    for number, port in enumerate(ports):
        await proxy.listen(number, port)
    await ended.wait()


if __name__ == "__main__":
    asyncio.run(
        serve(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), [int(port) for port in sys.argv[4:]])
    )

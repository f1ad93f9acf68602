"""S3 and what speaks its protocol, through botocore's own client and with the options of s3fs.

A file of more than one part is a multipart upload: each part is one request, sent straight from the memory
that it lies in, by whichever lane is free. Readers see a file once it is completed, and none before.

Invariants:
    * Every part and every object is sent with its CRC32C. Bytes that a server finds changed are sent again,
      and never kept; what a server does not compare, readers do.
    * A part counts as written once the server has answered for all of it, a file once all of its parts were
      put together and the server says that it has the size it must have.
    * A request whose answer may have been lost is settled by looking at what is there, not by guessing.
    * `put` with a last check uploads before the check and completes after it. `revoke` aborts uploads, so a
      save that was overtaken between the two finds its upload gone.
    * Memory that a part lies in is not referred to after `ImageFile.write`, whatever it raised.
    * Credentials stand in `S3Storage.spec` and nowhere else: not in URLs, messages or names.

Threads: one client for a process and a set of options, which all threads share.

Torch-free.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import errno
import inspect
import json
import logging
import os
import random
import re
import ssl
import threading
import time
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import crc32c

from distckpt.errors import ConfigError, WriteError
from distckpt.storage import check_name, refuse_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from distckpt.storage import Receipt, Storage, StorageSpec

_Room = TypeVar("_Room", bytearray, memoryview)

_LOG = logging.getLogger(__name__)
_MIB = 1 << 20
_PART_BYTES = 16 * _MIB
_PART_STEP_BYTES = 4 * _MIB
_LEAST_PART_BYTES = 5 * _MIB
_MOST_PARTS = 10_000
"""Source: Amazon S3 multipart upload limits, docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html."""
_MOST_COPIED_BYTES = 1 << 30
"""By one request; Amazon allows 5 GiB, and copies parts side by side no slower."""
_SEND_BYTES = _MIB
"""What one call hands to the socket: it is what must get on within the socket's timeout."""
_READ_BYTES = _MIB
_CONNECTIONS = 32
_ATTEMPTS = 10
_ATTEMPTS_IF_CORRUPTED = 4
_LONGEST_PAUSE_S = 20.0
"""As botocore in its standard mode: ten attempts are 111 s apart in all at most, half of it on average."""
_PATIENCE_S = 150.0
"""After so long no other attempt begins: attempts that time out take a minute each."""
_MESSAGE_LENGTH = 300

_CLIENTS = ("botocore", "s3fs", "obstore")
_INSTALL = "pip install 'distckpt[s3]'"
_ONLY_S3FS = frozenset(
    {
        "session", "loop", "asynchronous", "version_aware", "event_hooks", "session_vars",
        "include_builtin_handlers",
    }
)  # fmt: skip
_ONLY_AIOBOTOCORE = ("connector_args", "http_session_cls", "warm_up_loader_caches")
_OF_SESSION = frozenset({"profile"})
_OF_FSSPEC = frozenset({"skip_instance_cache", "use_listings_cache", "listings_expiry_time", "max_paths"})

_SCHEME = re.compile(r"s3a?://")
_BUCKET = re.compile(
    r"arn:aws[^/]*:s3[^/]*:accesspoint[:/][^/]+"
    r"|arn:aws[^/]*:s3-outposts:[^/]*:outpost[/:][^/:]+[/:](?:bucket|accesspoint)[/:][^/]+"
    r"|[a-zA-Z0-9._-]{1,255}"
)
"""A bucket, or what stands for one."""

_NUMBERS = {
    "NoSuchBucket": errno.ENOENT,
    "NoSuchKey": errno.ENOENT,
    "NoSuchUpload": errno.ENOENT,
    "PreconditionFailed": errno.EEXIST,
    "ConditionalRequestConflict": errno.EAGAIN,
    "SlowDown": errno.EAGAIN,
    "RequestTimeout": errno.ETIMEDOUT,
    "QuotaExceeded": errno.EDQUOT,
    "XMinioStorageFull": errno.ENOSPC,
    "ExpiredToken": errno.EACCES,
    "InvalidToken": errno.EACCES,
    "TokenRefreshRequired": errno.EACCES,
}
_NUMBERS_OF_STATUS = {
    401: errno.EACCES,
    403: errno.EACCES,
    404: errno.ENOENT,
    412: errno.EEXIST,
    429: errno.EAGAIN,
    503: errno.EAGAIN,
    507: errno.ENOSPC,
}
_CORRUPTED = frozenset(
    {
        "BadDigest", "IncompleteBody", "InvalidDigest", "XAmzContentChecksumMismatch",
        "XAmzContentSHA256Mismatch",
    }
)  # fmt: skip
_PASSING = frozenset(
    {"RequestLimitExceeded", "RequestTimeout", "RequestTimeoutException", "SlowDown", "Throttling"}
)
_PASSING_STATUS = frozenset({429, 500, 502, 503, 504})
_CANNOT_LIST_STATUS = frozenset({403, 405, 501})


def open_s3(url: str, options: Mapping[str, Any]) -> Storage:
    """Open a checkpoint on S3; nothing is asked of the server.

    Args:
        url: `s3://bucket/prefix`.
        options: Those of s3fs. `s3_client` is ours: `botocore` (default), `s3fs` or `obstore`.

    Raises:
        ConfigError: An option or the URL is wrong, or a package is missing.
    """
    options = dict(options)
    client = options.pop("s3_client", _CLIENTS[0])
    if client not in _CLIENTS:
        raise ConfigError(f"{_shown(url)}: s3_client is one of {', '.join(_CLIENTS)}, not {client!r}")
    if client != "botocore":
        from distckpt.storage.streams import open_fsspec

        return open_fsspec(url, {**options, "s3_client": client})
    bucket, prefix = _split_url(url)
    url = _join_url(bucket, prefix)
    options = _resolve_options(url, options)
    try:
        dumped = json.dumps(options, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{url}: a storage option cannot be handed to worker processes: {error}") from error
    return reopen_s3({"kind": "s3", "url": url, "options": dumped})


def reopen_s3(spec: StorageSpec) -> Storage:
    """Open, in whatever process, the checkpoint that `spec` describes; nothing is asked of the server.

    Raises:
        ConfigError: An option cannot be honoured here, or a package is missing.
    """
    return S3Storage(spec)


def _shown(url: str) -> str:
    """Return a URL for a message, without what somebody may have put before its bucket."""
    scheme, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    return repr(f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}")


def _split_url(url: str) -> tuple[str, str]:
    """Return the bucket and the prefix, without `/` at its ends and without empty parts.

    Several servers keep keys as paths of files: those with empty parts they refuse, or change.

    Raises:
        ConfigError: There is no bucket, or a prefix that is none.
    """
    scheme = _SCHEME.match(url)
    path = url[scheme.end() :] if scheme else url
    bucket = _BUCKET.match(path)
    if bucket is None or path[bucket.end() : bucket.end() + 1] not in {"", "/"}:
        raise ConfigError(f"{_shown(url)} names no bucket: s3://BUCKET/PREFIX is expected")
    parts = [part for part in path[bucket.end() :].split("/") if part]
    if not {".", ".."}.isdisjoint(parts):
        raise ConfigError(f"{_shown(url)}: a prefix has no parts . or ..")
    return bucket[0], "/".join(parts)


def _join_url(bucket: str, prefix: str) -> str:
    return f"s3://{bucket}/{prefix}".removesuffix("/")


def _resolve_options(url: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options as s3fs would have them, with fsspec's own configuration.

    Raises:
        ConfigError: One is unknown, or something that s3fs alone could honour.
    """
    try:
        from fsspec.config import apply_config
        from s3fs import S3FileSystem
    except ImportError as error:
        raise ConfigError(f"{url}: {error.name or 's3fs'} is missing: {_INSTALL}") from error
    options = dict(apply_config(S3FileSystem, options))
    known = set(inspect.signature(S3FileSystem.__init__).parameters) - {"self", "kwargs"}
    unknown = sorted(set(options) - known - _OF_SESSION - _OF_FSSPEC - _ONLY_S3FS)
    if unknown:
        raise ConfigError(f"{url}: storage options that s3fs does not know: {', '.join(unknown)}")
    # Buffering and caches of its files, and how it uploads, are of no effect on what is written.
    refused = sorted(name for name in _ONLY_S3FS & set(options) if options[name] not in (None, False))
    refused += [name for name in _ONLY_AIOBOTOCORE if name in (options.get("config_kwargs") or {})]
    if refused:
        raise ConfigError(
            f"{url}: storage options that only the client of s3fs can honour: {', '.join(refused)}; "
            f'leave them out, or choose s3_client="s3fs"'
        )
    for name, other in (("key", "username"), ("secret", "password")):
        if options.get(name) and options.get(other):
            raise ConfigError(f"{url}: storage options {name} and {other} are the same: give one of them")
    return {name: value for name, value in options.items() if name not in _ONLY_S3FS}


_clients: dict[tuple[int, str], Any] = {}
"""By process, as connections must not be shared with a fork, and by options."""


def _client_for(url: str, options: str) -> Any:
    """Return a client of botocore; making one takes 50 ms, and one serves all threads."""
    key = (os.getpid(), options)
    client = _clients.get(key)
    if client is None:
        # No lock, which a fork could find held. Two may be made: one of them is then used by few.
        client = _clients.setdefault(key, _new_client(url, json.loads(options)))
    return client


def _forget_client(client: Any) -> None:
    """Have the next storage begin anew: with credentials read again, and all of its attempts before it."""
    for key, known in list(_clients.items()):
        if known is client:
            _clients.pop(key, None)


def _new_client(url: str, options: dict[str, Any]) -> Any:
    """Make the client that s3fs would make, but for the defaults of its configuration.

    Raises:
        ConfigError: botocore is missing, or refuses an option.
    """
    try:
        import botocore.session
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise ConfigError(f"{url}: {error.name or 'botocore'} is missing: {_INSTALL}") from error
    client_kwargs = {"use_ssl": options.get("use_ssl", True), **(options.get("client_kwargs") or {})}
    named = {
        "aws_access_key_id": options.get("key") or options.get("username"),
        "aws_secret_access_key": options.get("secret") or options.get("password"),
        "aws_session_token": options.get("token"),
        "endpoint_url": options.get("endpoint_url"),
    }
    client_kwargs.update({name: value for name, value in named.items() if value is not None})
    _refuse_credentials_in(url, client_kwargs.get("endpoint_url"))
    try:
        session = botocore.session.Session(profile=options.get("profile"))
        config = _config_kwargs(session, options.get("config_kwargs") or {})
        if options.get("anon"):
            for name in ("aws_access_key_id", "aws_secret_access_key", "aws_session_token"):
                client_kwargs.pop(name, None)
            config["signature_version"] = UNSIGNED
        client = session.create_client("s3", config=Config(**config), **client_kwargs)
    except (BotoCoreError, TypeError, ValueError) as error:
        raise ConfigError(f"{url}: no client can be made with these storage options: {error}") from error
    _refuse_credentials_in(url, client.meta.endpoint_url)
    client.meta.events.register_first("needs-retry.s3", _limit_retries)
    return client


def _refuse_credentials_in(url: str, endpoint_url: object) -> None:
    # It stands in messages of others.
    if isinstance(endpoint_url, str) and "@" in urlsplit(endpoint_url).netloc:
        raise ConfigError(f"{url}: the endpoint's URL holds credentials: give them as key and secret")


def _config_kwargs(session: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of botocore's Config: what is given, over defaults for large bodies."""
    config = {
        "connect_timeout": 10,
        "read_timeout": 60,
        "tcp_keepalive": True,
        "max_pool_connections": _CONNECTIONS,
        "parameter_validation": False,
        # CRC32C is given with every body. SHA-256 of it would be 1 CPU second for each GiB.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        **given,
    }
    config["s3"] = {"payload_signing_enabled": False, **(given.get("s3") or {})}
    retries = dict(given.get("retries") or {})
    scoped = session.get_scoped_config()
    if "mode" not in retries and "AWS_RETRY_MODE" not in os.environ and "retry_mode" not in scoped:
        retries["mode"] = "standard"
    if (
        not {"total_max_attempts", "max_attempts"} & set(retries)
        and "AWS_MAX_ATTEMPTS" not in os.environ
        and "max_attempts" not in scoped
    ):
        retries["total_max_attempts"] = _ATTEMPTS
    config["retries"] = retries
    return config


def _limit_retries(
    operation: Any,
    attempts: int,
    request_dict: dict[str, Any],
    response: Any,
    caught_exception: Exception | None,
    **_: Any,
) -> bool | None:
    """Keep botocore from repeating what `S3Storage` repeats itself, and from repeating anything for too long.

    Called before botocore's own handler for the same event; False stops it, None leaves it to decide.
    """
    now = time.monotonic()
    began = request_dict["context"].setdefault("distckpt_first_attempt", now)
    if now - began > _PATIENCE_S or (caught_exception is not None and _is_not_trusted(caught_exception)):
        return False
    has_no_answer = caught_exception is not None
    if isinstance(request_dict.get("body"), _Body):
        # Not those that follow a bucket to its region.
        passing = response is not None and response[0].status_code in _PASSING_STATUS
        return False if has_no_answer or passing else None
    # Whether the end of an upload took place is to be looked at first.
    return False if has_no_answer and operation.name == "CompleteMultipartUpload" else None


class _Body:
    """The body of a request, straight from memory.

    There is no `read`: http.client would take 16 KiB at a time with it, and copy them.

    Args:
        buffers: The bytes, one buffer after the other.
        cancelled: Once it is set, no more of them are handed out.
    """

    def __init__(self, buffers: Sequence[memoryview], cancelled: threading.Event) -> None:
        self._buffers = tuple(buffer for buffer in buffers if buffer.nbytes)
        self._nbytes = sum(buffer.nbytes for buffer in self._buffers)
        self._cancelled = cancelled
        self._chunk: memoryview | None = None

    def __len__(self) -> int:
        return self._nbytes

    def __iter__(self) -> Iterator[memoryview]:
        for buffer in self._buffers:
            for start in range(0, buffer.nbytes, _SEND_BYTES):
                self._drop()
                if self._cancelled.is_set():
                    raise CancelledError
                self._chunk = buffer[start : start + _SEND_BYTES]
                yield self._chunk
        self._drop()

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go back to the start, as botocore does before it repeats a request."""
        return 0

    def tell(self) -> int:
        """Return where it stands: at the start."""
        return 0

    def close(self) -> None:
        """Let go of the memory, whatever traceback still holds this."""
        self._drop()
        self._buffers = ()

    def _drop(self) -> None:
        if self._chunk is not None:
            self._chunk.release()
            self._chunk = None


class _ReadBody(_Body):
    """One that can be read, too, for a client that was told to sign the bytes of bodies or to check types."""

    def __init__(self, buffers: Sequence[memoryview], cancelled: threading.Event) -> None:
        super().__init__(buffers, cancelled)
        self._at = 0

    def read(self, size: int | None = None) -> bytes:
        """Return the next bytes.

        Raises:
            CancelledError: No more are wanted.
        """
        if self._cancelled.is_set():
            raise CancelledError
        end = self._nbytes if size is None or size < 0 else min(self._nbytes, self._at + size)
        taken, start = bytearray(), 0
        for buffer in self._buffers:
            first, last = max(self._at - start, 0), min(end - start, buffer.nbytes)
            if first < last:
                with buffer[first:last] as chunk:
                    taken += chunk
            start += buffer.nbytes
        self._at = end
        return bytes(taken)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._nbytes)[whence]
        return self._at

    def tell(self) -> int:
        return self._at


class S3Image:
    """An object that was begun, open in one lane.

    Args:
        storage: The checkpoint.
        name: The file.
        token: What `S3Storage.create_image` returned.
    """

    def __init__(self, storage: S3Storage, name: str, token: str) -> None:
        self._storage = storage
        self._name = name
        self._upload = _Upload.from_token(token) if token else None
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._receipts: list[Receipt] = []

    def write(self, offset: int, buffers: Sequence[memoryview], crc32c: int | None = None) -> None:
        """See `ImageFile.write`: `buffers` are one part of the file, or all of it.

        Raises:
            WriteError: The storage refused.
        """
        if not any(buffer.nbytes for buffer in buffers):
            return
        receipt = self._storage.send(self._name, offset, buffers, crc32c, self._upload, self._cancelled)
        with self._lock:
            self._receipts.append(receipt)

    def finish(self) -> list[Receipt]:
        """See `ImageFile.finish`: the server has said so of each part."""
        with self._lock:
            return list(self._receipts)

    def cancel(self) -> None:
        """See `ImageFile.cancel`."""
        self._cancelled.set()

    def close(self) -> None:
        """See `ImageFile.close`."""


class _Upload:
    """A multipart upload.

    Args:
        upload_id: The server's name for it.
        part_bytes: Bytes of all parts but the last.
    """

    def __init__(self, upload_id: str, part_bytes: int) -> None:
        self.upload_id = upload_id
        self.part_bytes = part_bytes

    def token(self) -> str:
        return json.dumps([self.upload_id, self.part_bytes])

    @classmethod
    def from_token(cls, token: str) -> _Upload:
        return cls(*json.loads(token))


class S3Storage:
    """A checkpoint directory on S3.

    Args:
        spec: `url`, `options` as `open_s3` resolved them, and perhaps `part_bytes`, a multiple of 4 MiB.

    Raises:
        ConfigError: No client can be made, or S3 takes no parts of that size.
    """

    in_flight = 4
    is_stream = False
    at_once = 16
    """Files that may be created or completed at once, each on its own thread."""

    def __init__(self, spec: StorageSpec) -> None:
        self.url = spec["url"]
        self.spec = spec
        self._bucket, prefix = _split_url(self.url)
        # "a/b" must not match what lies in "a/bc".
        self._base = f"{prefix}/" if prefix else ""
        self._part_bytes = int(spec.get("part_bytes", _PART_BYTES))
        if self._part_bytes < _LEAST_PART_BYTES:
            raise ConfigError(
                f"ckpt_bucket_bytes: parts have at least 5 MiB on S3, got {self._part_bytes // _MIB}MiB for "
                f"{self.url}: 8MiB is the least"
            )
        self._client = _client_for(self.url, spec["options"])
        options = json.loads(spec["options"])
        self._additional = dict(options.get("s3_additional_kwargs") or {})
        if options.get("requester_pays"):
            self._additional.setdefault("RequestPayer", "requester")
        config = self._client.meta.config
        # Parts that are sent at once, as s3fs means it.
        in_flight = options.get("max_concurrency")
        if in_flight is not None:
            if type(in_flight) is not int or in_flight < 1:
                raise ConfigError(
                    f"storage options of {self.url}: max_concurrency: expected an integer of at least 1, "
                    f"got {in_flight!r}"
                )
            self.in_flight = in_flight
        self._attempts = int((config.retries or {}).get("total_max_attempts") or _ATTEMPTS)
        # The configuration of a client does not tell whether it checks types.
        reads = (options.get("config_kwargs") or {}).get("parameter_validation", False)
        reads = reads or (config.s3 or {}).get("payload_signing_enabled")
        self._body = _ReadBody if reads else _Body

    def part_bytes(self, file_bytes: int) -> int:
        """See `Storage.part_bytes`."""
        least = -(-file_bytes // _MOST_PARTS)
        return max(self._part_bytes, -(-least // _PART_STEP_BYTES) * _PART_STEP_BYTES)

    def prepare(self) -> None:
        """See `Storage.prepare`: there are no directories; says early what no save could do without.

        By a list of the prefix, which every save needs. HeadBucket answers 403 to those who may list and
        write below the prefix, and has no text of the server.

        Raises:
            WriteError: There is no such bucket, or the server lets nobody in.
        """
        try:
            self._call("list_objects_v2", Prefix=self._base, MaxKeys=1)
        except _errors() as error:
            if _code_of(error) == "NoSuchBucket":
                raise WriteError(
                    f"cannot use {self.url}: bucket {self._bucket!r} does not exist [ENOENT]",
                    errno=errno.ENOENT,
                    path=self.url,
                ) from error
            self._fail(error, "cannot use", None)

    def create_image(self, name: str, nbytes: int) -> str:
        """See `Storage.create_image`: names are new for each save, so that none is asked for."""
        check_name(self.url, name)
        if nbytes == 0:
            self.send(name, 0, (), 0)
            return ""
        part_bytes = self.part_bytes(nbytes)
        if nbytes <= part_bytes:
            return ""
        upload_id, attempts = self._begin_upload(name)
        if attempts > 1:
            # An answer was lost, and with it the id of an upload that nobody else can have begun.
            with contextlib.suppress(WriteError):
                self._abort_all(name, but=upload_id)
        return _Upload(upload_id, part_bytes).token()

    def open_image(self, name: str, token: str) -> S3Image:
        """See `Storage.open_image`."""
        check_name(self.url, name)
        return S3Image(self, name, token)

    def complete_image(self, name: str, token: str, nbytes: int, receipts: Sequence[Receipt]) -> None:
        """See `Storage.complete_image`.

        Raises:
            WriteError: Parts are missing, the server refuses, or has another number of bytes.
        """
        path = self._path(name)
        if token:
            upload = _Upload.from_token(token)
            parts = sorted(receipts, key=lambda part: int(part[0]))
            count = -(-nbytes // upload.part_bytes)
            if [part[0] for part in parts] != list(range(1, count + 1)):
                raise WriteError(
                    f"{path} has {len(parts)} parts, which are not the {count} of {nbytes} bytes [EIO]",
                    errno=errno.EIO,
                    path=path,
                )
            self._complete(name, upload.upload_id, parts, lambda: self._size_of(name) == nbytes)
        size = self._size_of(name)
        if size is None:
            raise WriteError(f"{path} is not there after writing it [ENOENT]", errno=errno.ENOENT, path=path)
        if size != nbytes:
            raise WriteError(f"{path} holds {size} bytes after writing {nbytes}", path=path, offset=size)

    def link(self, name: str, source: Storage, other: str, nbytes: int) -> None:
        """See `Linking.link`: the server copies the object.

        Raises:
            WriteError: There is no such object, the server refuses, or has another number of bytes.
        """
        bucket, prefix = _split_url(source.url)
        base = f"{prefix}/" if prefix else ""
        copied = {"Bucket": bucket, "Key": base + other}
        try:
            if nbytes <= _MOST_COPIED_BYTES:
                self._call("copy_object", Key=self._key(name), CopySource=copied)
            else:
                self._copy_parts(name, copied, nbytes)
        except _errors() as error:
            self._fail(error, "cannot copy", name)
        found = self._size_of(name)
        if found != nbytes:
            path = self._path(name)
            raise WriteError(f"{path} holds {found} bytes after copying {nbytes}", path=path)

    def _copy_parts(self, name: str, copied: Mapping[str, str], nbytes: int) -> None:
        answer = self._call("create_multipart_upload", Key=self._key(name))
        upload_id = answer["UploadId"]
        try:
            parts = []
            for number, first in enumerate(range(0, nbytes, _MOST_COPIED_BYTES), 1):
                last = min(first + _MOST_COPIED_BYTES, nbytes) - 1
                answer = self._call(
                    "upload_part_copy",
                    Key=self._key(name),
                    CopySource=copied,
                    CopySourceRange=f"bytes={first}-{last}",
                    UploadId=upload_id,
                    PartNumber=number,
                )
                parts.append({"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]})
            self._call(
                "complete_multipart_upload",
                Key=self._key(name),
                UploadId=upload_id,
                MultipartUpload={"Parts": parts},
            )
        except BaseException:
            with contextlib.suppress(WriteError):
                self._abort(name, upload_id)
            raise

    def discard_image(self, name: str, token: str) -> None:
        """See `Storage.discard_image`."""
        try:
            if token:
                self._abort(name, _Upload.from_token(token).upload_id)
        finally:
            self.delete(name)

    def unfinished(self) -> builtins.list[tuple[str, str]]:
        """See `Storage.unfinished`; none where the server does not list uploads."""
        return self._uploads("")

    def abort(self, name: str, handle: str) -> None:
        """See `Storage.abort`."""
        self._abort(name, handle)

    def put(self, name: str, data: bytes, last_check: Callable[[], None] | None = None) -> None:
        """See `Storage.put`."""
        if last_check is None:
            with memoryview(data) as view:
                self.send(name, 0, [view])
            return
        upload_id, _ = self._begin_upload(name)
        try:
            with memoryview(data) as view:
                part = self.send(name, 0, [view], upload=_Upload(upload_id, max(1, len(data))))
            last_check()
            self._complete(name, upload_id, [part], lambda: self._holds(name, data))
        except BaseException:
            with contextlib.suppress(WriteError):
                self._abort(name, upload_id)
            raise

    def revoke(self, name: str) -> None:
        """See `Storage.revoke`: without the upload that it is about to complete, the step fails."""
        self._abort_all(name)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray | None:
        """See `Storage.read`.

        Raises:
            WriteError: The server refuses, or breaks off again and again.
        """
        if nbytes is not None and nbytes <= 0:
            # Not by HEAD, whose answer does not tell whether it is the bucket that is missing.
            data = self._read(name, offset, 1, bytearray)
            return None if data is None else bytearray()
        return self._read(name, offset, nbytes, bytearray)

    def fill(self, name: str, offset: int, target: memoryview) -> int | None:
        """See `Filling.fill`.

        Raises:
            WriteError: As for `read`.
        """
        if not target:
            return None if self.read(name, offset, 0) is None else 0
        data = self._read(name, offset, len(target), lambda nbytes: target[:nbytes])
        return None if data is None else len(data)

    def list(self, prefix: str = "") -> dict[str, int]:
        """See `Storage.list`."""
        folder = self._base
        if prefix:
            folder = self._key(prefix.removesuffix("/")) + "/"
        found: dict[str, int] = {}
        for page in self._pages("list_objects_v2", "cannot list", Prefix=folder, Delimiter="/"):
            for entry in page.get("Contents", ()):
                found[entry["Key"].removeprefix(folder)] = entry["Size"]
            for entry in page.get("CommonPrefixes", ()):
                found[entry["Prefix"].removeprefix(folder)] = 0
        # An object that some tools make to stand for the directory; a part of a key without any letter.
        for name in ("", "/"):
            found.pop(name, None)
        return found

    def delete(self, name: str) -> None:
        """See `Storage.delete`: of a directory there is at most an object that stands for it."""
        key = self._key(name)
        try:
            self._call("delete_object", Key=key)
        except _errors() as error:
            if _code_of(error) != "NoSuchKey":
                self._fail(error, "cannot remove", name)

    def last_change(self) -> float | None:
        """See `Storage.last_change`: what was removed is not seen.

        Parts of uploads are: a file that takes long is no object before it is complete.
        """
        newest: float | None = None
        for page in self._pages("list_objects_v2", "cannot list", Prefix=self._base):
            for entry in page.get("Contents", ()):
                newest = max(newest or 0.0, entry["LastModified"].timestamp())
        for name, upload_id in self._uploads(""):
            parts = {"Key": self._key(name), "UploadId": upload_id}
            try:
                for page in self._paginate("list_parts", **parts):
                    for entry in page.get("Parts", ()):
                        newest = max(newest or 0.0, entry["LastModified"].timestamp())
            except _errors() as error:
                # Without them it would look idle; one that is complete by now is an object.
                if _code_of(error) != "NoSuchUpload":
                    self._fail(error, "cannot look at the parts of", name)
        return newest

    def remove_directory(self) -> bool:
        """See `Storage.remove_directory`: it is gone with its last object."""
        for page in self._pages("list_objects_v2", "cannot list", Prefix=self._base):
            if any(entry["Key"] != self._base for entry in page.get("Contents", ())):
                return False
            if page.get("Contents"):
                self._delete_marker()
        return True

    def send(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        checksum: int | None = None,
        upload: _Upload | None = None,
        cancelled: threading.Event | None = None,
    ) -> Receipt:
        """Send a part of an upload, or a whole object; of any number of threads.

        Args:
            name: The file.
            offset: Of the part, in bytes.
            buffers: Its bytes.
            checksum: CRC32C of them, if it is known.
            upload: What it is a part of; None: it is all of the object.
            cancelled: Give up once it is set.

        Returns:
            Number of the part, the server's tag of it, and its checksum in base 64.

        Raises:
            WriteError: The server refused it for good.
        """
        operation, number = "put_object", 1
        params: dict[str, Any] = {"Key": self._key(name)}
        if upload is not None:
            operation, number = "upload_part", offset // upload.part_bytes + 1
            params |= {"UploadId": upload.upload_id, "PartNumber": number}
        if offset != (number - 1) * (upload.part_bytes if upload else 0):
            raise WriteError(
                f"cannot write {self._path(name)} at byte {offset}: no part begins there [EINVAL]",
                errno=errno.EINVAL,
                path=self._path(name),
                offset=offset,
            )
        if checksum is None:
            checksum = 0
            for buffer in buffers:
                checksum = int(crc32c.crc32c(buffer, checksum))
        encoded = base64.b64encode(checksum.to_bytes(4, "big")).decode()
        cancelled = cancelled or threading.Event()
        with contextlib.closing(self._body(buffers, cancelled)) as body:
            params |= {"Body": body, "ContentLength": len(body), "ChecksumCRC32C": encoded}
            answer = self._send(operation, params, name, offset, cancelled)
        return [number, answer.get("ETag"), encoded]

    def _send(
        self, operation: str, params: dict[str, Any], name: str, offset: int, cancelled: threading.Event
    ) -> dict[str, Any]:
        """Make a request with a body, again and again if need be.

        botocore repeats no body that arrived damaged, and its pauses cannot be cut short.

        Raises:
            WriteError: The server refused it for good, or it was cancelled.
        """
        attempt = corrupted = 0
        deadline = time.monotonic() + _PATIENCE_S
        while not cancelled.is_set():
            attempt += 1
            try:
                params["Body"].seek(0)
                return self._call(operation, **params)
            except CancelledError:
                break
            except _errors() as error:
                doing = "cannot write"
                is_last = attempt >= self._attempts or time.monotonic() > deadline
                if _code_of(error) in _CORRUPTED:
                    corrupted += 1
                    doing = f"cannot write intact, tried {corrupted} times,"
                    is_last = is_last or corrupted >= _ATTEMPTS_IF_CORRUPTED
                elif not _may_pass(error):
                    is_last = True
                if is_last:
                    self._fail(error, doing, name, offset)
                _LOG.debug("%s at byte %d: %s", self._path(name), offset, _text_of(error))
            cancelled.wait(_pause_s(attempt))
        path = self._path(name)
        raise WriteError(
            f"cannot write {path} at byte {offset}: it was given up [ECANCELED]",
            errno=errno.ECANCELED,
            path=path,
            offset=offset,
        )

    def _begin_upload(self, name: str) -> tuple[str, int]:
        """Begin a multipart upload; returns its id, and how many attempts that took."""
        try:
            answer = self._call("create_multipart_upload", Key=self._key(name), ChecksumAlgorithm="CRC32C")
        except _errors() as error:
            self._fail(error, "cannot create", name)
        return answer["UploadId"], 1 + answer["ResponseMetadata"].get("RetryAttempts", 0)

    def _complete(
        self, name: str, upload_id: str, parts: Sequence[Receipt], is_there: Callable[[], bool]
    ) -> None:
        """Make an object of the parts of an upload.

        Args:
            name: The file.
            upload_id: The upload.
            parts: In order.
            is_there: Says whether it has taken place, where an answer may have been lost.
        """
        described = [
            {"PartNumber": number, "ETag": tag, "ChecksumCRC32C": checksum} for number, tag, checksum in parts
        ]
        attempt = 0
        while True:
            attempt += 1
            try:
                self._call(
                    "complete_multipart_upload",
                    Key=self._key(name),
                    UploadId=upload_id,
                    MultipartUpload={"Parts": described},
                )
                return
            except _errors() as error:
                is_gone = _code_of(error) == "NoSuchUpload"
                if not is_gone and not _may_pass(error):
                    self._fail(error, "cannot complete", name)
                if is_there():
                    return
                # Where there is an answer, botocore has asked often enough.
                if is_gone or _code_of(error) or attempt >= self._attempts:
                    self._fail(error, "cannot complete", name)
            threading.Event().wait(_pause_s(attempt))

    def _abort(self, name: str, upload_id: str) -> None:
        try:
            self._call("abort_multipart_upload", Key=self._key(name), UploadId=upload_id)
        except _errors() as error:
            if _code_of(error) != "NoSuchUpload":
                self._fail(error, "cannot abort the upload of", name)

    def _abort_all(self, name: str, but: str | None = None) -> None:
        for other, upload_id in self._uploads(name):
            if other == name and upload_id != but:
                self._abort(name, upload_id)

    def _uploads(self, name: str) -> builtins.list[tuple[str, str]]:
        """Return name and id of the uploads that are not completed nor aborted, of names that begin so."""
        prefix = self._key(name) if name else self._base
        found = []
        try:
            for page in self._paginate("list_multipart_uploads", Prefix=prefix):
                for entry in page.get("Uploads", ()):
                    # Some servers have their own idea of a prefix.
                    if entry["Key"].startswith(prefix):
                        found.append((entry["Key"].removeprefix(self._base), entry["UploadId"]))
        except _errors() as error:
            if _status_of(error) not in _CANNOT_LIST_STATUS:
                self._fail(error, "cannot list the uploads of", name or None)
            _LOG.warning(
                "%s: unfinished uploads cannot be listed (%s): those of saves that died stay until a "
                "lifecycle rule of the bucket aborts them",
                self.url,
                _text_of(error),
            )
        return found

    def _read(
        self, name: str, offset: int, nbytes: int | None, make_room: Callable[[int], _Room]
    ) -> _Room | None:
        """Return bytes of an object, in what `make_room` returns for so many; None if it is absent.

        Raises:
            WriteError: The server refuses, or breaks off again and again.
        """
        whole: _Room | None = None
        tag, done, attempt = None, 0, 0
        while True:
            answer = self._get(name, offset + done, None if nbytes is None else nbytes - done)
            if answer is None:
                return None
            if whole is not None and (answer.get("ETag") != tag or done + _length_of(answer) != len(whole)):
                # Replaced since: from the start.
                _close_body(answer)
                whole, done = None, 0
                continue
            if whole is None:
                tag = answer.get("ETag")
                try:
                    whole = make_room(_length_of(answer))
                except MemoryError as error:
                    _close_body(answer)
                    self._fail(error, "cannot read", name, offset)
            attempt += 1
            try:
                for got in _received(answer, whole, done):
                    done += got
                return whole
            except _body_errors() as error:
                # botocore repeats requests, but reads no body.
                if attempt >= self._attempts:
                    self._fail(error, "cannot read", name, offset + done)
            threading.Event().wait(_pause_s(attempt))

    def _get(self, name: str, offset: int, nbytes: int | None) -> dict[str, Any] | None:
        """Return the answer to a request for bytes of an object; None if it is absent.

        Raises:
            WriteError: The server refuses, or answers with other bytes.
        """
        params = {"Key": self._key(name)}
        if offset or nbytes is not None:
            params["Range"] = f"bytes={offset}-{'' if nbytes is None else offset + nbytes - 1}"
        try:
            answer = self._call("get_object", **params)
        except _errors() as error:
            if _status_of(error) == 416 or _code_of(error) == "InvalidRange":
                return {}
            if _status_of(error) == 404 and _code_of(error) != "NoSuchBucket":
                return None
            self._fail(error, "cannot read", name, offset)
        is_another = "Range" in params and not answer.get("ContentRange", "").startswith(f"bytes {offset}-")
        if is_another or (nbytes is not None and _length_of(answer) > nbytes):
            _close_body(answer)
            refuse_range(self._path(name), offset)
        return answer

    def _holds(self, name: str, data: bytes) -> bool:
        found = self.read(name)
        return found is not None and found == data

    def _size_of(self, name: str) -> int | None:
        """Return how many bytes an object has; None if it is absent."""
        try:
            return int(self._call("head_object", Key=self._key(name))["ContentLength"])
        except _errors() as error:
            if _status_of(error) == 404:
                return None
            self._fail(error, "cannot check", name)

    def _delete_marker(self) -> None:
        try:
            self._call("delete_object", Key=self._base)
        except _errors() as error:
            self._fail(error, "cannot remove", None)

    def _key(self, name: str) -> str:
        """Return the key of `name`.

        Raises:
            IntegrityError: The name leads out of the directory.
        """
        check_name(self.url, name)
        return self._base + name

    def _path(self, name: str | None) -> str:
        return self.url if name is None else f"{self.url}/{name}"

    def _arguments(self, operation: str, params: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call, with those that the options have for all calls that take them."""
        arguments = {"Bucket": self._bucket, **params}
        if self._additional:
            model = self._client.meta.service_model.operation_model(
                self._client.meta.method_to_api_mapping[operation]
            )
            known = model.input_shape.members
            taken = {name: value for name, value in self._additional.items() if name in known}
            arguments = taken | arguments
        return arguments

    def _call(self, operation: str, **params: Any) -> dict[str, Any]:
        answer: dict[str, Any] = getattr(self._client, operation)(**self._arguments(operation, params))
        return answer

    def _paginate(self, operation: str, **params: Any) -> Iterator[dict[str, Any]]:
        yield from self._client.get_paginator(operation).paginate(**self._arguments(operation, params))

    def _pages(self, operation: str, doing: str, **params: Any) -> Iterator[dict[str, Any]]:
        try:
            yield from self._paginate(operation, **params)
        except _errors() as error:
            self._fail(error, doing, None)

    def _fail(self, error: Exception, doing: str, name: str | None, offset: int | None = None) -> NoReturn:
        """Raise what `error` means.

        Raises:
            WriteError: Always.
        """
        number = _number_of(error)
        if number == errno.EACCES or _may_pass(error):
            _forget_client(self._client)
        path = self._path(name)
        where = f" at byte {offset}" if offset else ""
        code = errno.errorcode.get(number, "?")
        raise WriteError(
            f"{doing} {path}{where}: {_text_of(error)} [{code}]", errno=number, path=path, offset=offset
        ) from error


def _pause_s(attempt: int) -> float:
    """Return how long to wait after the first, second ... attempt that failed: chance decides how long."""
    return random.uniform(0, min(2.0 ** (attempt - 1), _LONGEST_PAUSE_S))


def _length_of(answer: dict[str, Any]) -> int:
    """Return how many bytes a server says that it sends; 0 for what lies past the end."""
    return int(answer.get("ContentLength", 0))


def _close_body(answer: dict[str, Any]) -> None:
    if "Body" in answer:
        answer["Body"].close()


def _received(answer: dict[str, Any], whole: bytearray | memoryview, start: int) -> Iterator[int]:
    """Receive a body into the end of `whole`, from `start`; yields how many bytes arrived each time.

    Raises:
        ConnectionResetError: There are fewer.
    """
    try:
        with memoryview(whole) as view:
            while start < len(view):
                with view[start : start + _READ_BYTES] as chunk:
                    got = answer["Body"].readinto(chunk)
                if not got:
                    raise ConnectionResetError(errno.ECONNRESET, "broken off")
                start += got
                yield got
    finally:
        _close_body(answer)


def _errors() -> tuple[type[Exception], ...]:
    """Return what a call of the client raises."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    return (BotoCoreError, ClientError, ResponseParserError, HTTPError)


def _body_errors() -> tuple[type[Exception], ...]:
    """Return what reading the body of an answer raises."""
    return (OSError, *_errors())


def _answer_of(error: Exception) -> dict[str, Any]:
    """Return the server's answer, empty if there was none."""
    answer = getattr(error, "response", None)
    return answer if isinstance(answer, dict) else {}


def _code_of(error: Exception) -> str:
    return str(_answer_of(error).get("Error", {}).get("Code", ""))


def _status_of(error: Exception) -> int | None:
    status = _answer_of(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) else None


def _may_pass(error: Exception) -> bool:
    """Say whether the same request may succeed later."""
    if _answer_of(error):
        return _code_of(error) in _PASSING or _status_of(error) in _PASSING_STATUS
    if _is_not_trusted(error):
        return False
    from botocore.exceptions import ConnectionError as NotConnected
    from botocore.exceptions import HTTPClientError, IncompleteReadError
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    passing = (NotConnected, HTTPClientError, IncompleteReadError, ResponseParserError, HTTPError, OSError)
    return isinstance(error, passing)


def _system_error(error: BaseException) -> OSError | None:
    """Return the error of a system call that `error` comes from."""
    waiting: list[object] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop(0)
        if not isinstance(one, BaseException) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, TimeoutError) or (isinstance(one, OSError) and one.errno):
            return one
        kwargs = getattr(one, "kwargs", None)
        inner = kwargs.get("error") if isinstance(kwargs, dict) else None
        waiting += [inner, *one.args, one.__cause__, one.__context__]
    return None


def _is_not_trusted(error: Exception) -> bool:
    """Say whether the server's certificate is wrong: no other attempt changes that."""
    return isinstance(_system_error(error), ssl.SSLCertVerificationError)


def _number_of(error: Exception) -> int:
    """Return the error number that says what `error` means."""
    if _answer_of(error):
        number = _NUMBERS.get(_code_of(error))
        return number or _NUMBERS_OF_STATUS.get(_status_of(error) or 0, errno.EIO)
    from botocore import exceptions

    if isinstance(error, (exceptions.ConnectTimeoutError, exceptions.ReadTimeoutError)):
        return errno.ETIMEDOUT
    if _is_about_credentials(error):
        return errno.EACCES
    if isinstance(error, exceptions.ParamValidationError):
        return errno.EINVAL
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    system = _system_error(error)
    if isinstance(system, TimeoutError):
        return errno.ETIMEDOUT
    if isinstance(system, ssl.SSLError):
        # Its number is one of OpenSSL's.
        return errno.EPROTO
    if system is not None and system.errno and system.errno > 0:
        return system.errno
    if isinstance(error, exceptions.EndpointConnectionError):
        return errno.ECONNREFUSED
    return errno.ECONNRESET if _may_pass(error) else errno.EIO


def _is_about_credentials(error: Exception) -> bool:
    from botocore import exceptions

    return isinstance(
        error,
        (
            exceptions.NoCredentialsError,
            exceptions.PartialCredentialsError,
            exceptions.CredentialRetrievalError,
            exceptions.NoAuthTokenError,
            exceptions.TokenRetrievalError,
            exceptions.SSOError,
        ),
    )


def _text_of(error: Exception) -> str:
    """Return what went wrong, on one line, without the URL that was asked: it is not ours to show."""
    answer = _answer_of(error)
    if answer:
        details = answer.get("Error", {})
        text = ": ".join(str(details[part]) for part in ("Code", "Message") if details.get(part))
        return " ".join((text or f"status {_status_of(error)}").split())[:_MESSAGE_LENGTH]
    if _is_about_credentials(error):
        return (
            f"{type(error).__name__}: no usable credentials: give key and secret as storage options, or set "
            f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE (anon=True asks without any)"
        )
    system = _system_error(error)
    reason = (system.strerror or "timed out") if system is not None else ""
    return f"{type(error).__name__}{reason and ': '}{reason}"

"""S3: what the storage promises, on two servers of different code, and what it does when they fail."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import mmap
import os
import pickle
import random
import socket
import ssl
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import crc32c
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distckpt import Checkpointer
from distckpt.commit import claim
from distckpt.errors import CommitError, ConfigError, IntegrityError, WriteError
from distckpt.manifest import names_name, write_names
from distckpt.storage import Storage, fill, open_storage, reopen_storage, s3, streams
from distckpt.storage.s3 import S3Image, S3Storage
from servers import FaultProxy, S3Server, split_url

pytestmark = pytest.mark.s3

MIB = 1 << 20
PART = 16 * MIB
QUICK: dict[str, Any] = {
    "connect_timeout": 5, "read_timeout": 20, "retries": {"mode": "standard", "total_max_attempts": 2},
}  # fmt: skip
IMPATIENT = QUICK | {"connect_timeout": 1, "read_timeout": 1}
"""For servers that do not answer; others may be slow on a machine that has much to do."""
SECRET = "correct-horse-battery"


def opened(url: str, options: dict[str, Any], **config: Any) -> S3Storage:
    storage = open_storage(url, {**options, "config_kwargs": {**options.get("config_kwargs", {}), **config}})
    assert isinstance(storage, S3Storage)
    return storage


def content(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(MIB) * (nbytes // MIB) + b"e" * (nbytes % MIB)


def write_part(image: S3Image, data: bytes, offset: int) -> None:
    with (
        memoryview(data) as view,
        view[offset : offset + PART] as part,
        part[:777] as first,
        part[777:] as second,
    ):
        image.write(offset, [first, second], crc32c.crc32c(part))


def write_image(storage: S3Storage, name: str, data: bytes) -> None:
    token = storage.create_image(name, len(data))
    image = storage.open_image(name, token)
    for offset in range(0, len(data), PART):
        write_part(image, data, offset)
    storage.complete_image(name, token, len(data), image.finish())


def read(storage: Storage, name: str, offset: int = 0, nbytes: int | None = None) -> bytes | None:
    data = storage.read(name, offset, nbytes)
    return None if data is None else bytes(data)


def filled(storage: Storage, name: str, offset: int = 0, nbytes: int | None = None) -> bytes | None:
    """Read into memory of our own."""
    memory = bytearray(4 * MIB if nbytes is None else nbytes)
    found = fill(storage, name, offset, memoryview(memory))
    return None if found is None else bytes(memory[:found])


def error_of(call: Any, *args: Any) -> WriteError:
    with pytest.raises(WriteError) as caught:
        call(*args)
    return caught.value


@pytest.fixture(params=["s3_server", "minio_like_server"])
def server(request: pytest.FixtureRequest) -> S3Server:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, S3Server)
    return found


@pytest.fixture
def storage(server: S3Server) -> S3Storage:
    return opened(server.new_prefix(), server.options)


@pytest.fixture
def faulty(s3_url: str, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> S3Storage:
    """Opened by the proxy; it pauses for a shorter time than it should."""
    monkeypatch.setattr(s3, "_pause_s", lambda attempt: 0.01 * attempt)
    return opened(s3_url, fault_proxy.options, **QUICK)


class RawServer:
    """Takes connections, and shows what arrives byte by byte; answers 200, or never reads."""

    def __init__(self, reads: bool) -> None:
        self.heads: list[str] = []
        self.bodies: list[bytes] = []
        self._reads = reads
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._held: list[socket.socket] = []
        self.options = {
            "endpoint_url": f"http://127.0.0.1:{self._socket.getsockname()[1]}",
            "key": "key",
            "secret": SECRET,
        }
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for one in self._held:
            one.close()
        self._thread.join(10)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                if self._reads:
                    self._serve(connection)
                else:
                    self._held.append(connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            head = b"".join(iter(file.readline, b"\r\n")).decode()
            if head:
                length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0] or 0)
                self.heads.append(head.lower())
                self.bodies.append(file.read(length))
                connection.sendall(
                    b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n'
                )


@pytest.fixture
def raw_server() -> Iterator[RawServer]:
    server = RawServer(reads=True)
    yield server
    server.close()


# --- URLs and options


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3a://bucket/a/b/", "s3://bucket/a/b"),
        ("s3://bucket//a//b//", "s3://bucket/a/b"),
        ("s3://bucket/a b/ü+%20#?", "s3://bucket/a b/ü+%20#?"),
        (
            "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/one/a",
            "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/one/a",
        ),
    ],
)
def test_a_url_names_a_bucket_and_a_prefix(url: str, expected: str) -> None:
    storage = open_storage(url, {"anon": True})
    assert storage.url == expected
    assert reopen_storage(json.loads(json.dumps(storage.spec))).url == expected


def test_the_bucket_of_an_access_point_is_all_of_its_name() -> None:
    arn = "arn:aws:s3:eu-west-1:123456789012:accesspoint/one"
    assert s3._split_url(f"s3://{arn}/a/b") == (arn, "a/b")


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///a", f"s3://key:{SECRET}@bucket/a", "s3://bu cket/a", "s3://b/a/../c"]
)
def test_what_names_no_place_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_storage(url, {"anon": True})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nonsense": 1, "secret": SECRET}, "nonsense"),
        ({"session": object()}, r's3_client="s3fs"'),
        ({"asynchronous": True}, "asynchronous"),
        ({"version_aware": True}, "version_aware"),
        ({"config_kwargs": {"connector_args": {}}}, "connector_args"),
        ({"config_kwargs": {"nonsense": 1}}, "nonsense"),
        ({"client_kwargs": {"nonsense": 1}}, "nonsense"),
        ({"key": "a", "username": "a"}, "username"),
        ({"s3_additional_kwargs": {"a": object()}}, "worker processes"),
        ({"profile": "no-such-profile"}, "no-such-profile"),
        ({"s3_client": "curl"}, "botocore, s3fs, obstore"),
        ({"endpoint_url": f"http://key:{SECRET}@127.0.0.1:1"}, "credentials"),
    ],
)
def test_an_option_without_effect_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        open_storage("s3://bucket/a", {"key": "k", "secret": SECRET, **options})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"session": None, "asynchronous": False, "version_aware": False},
        {
            "max_concurrency": 4,
            "default_block_size": 1,
            "use_listings_cache": False,
            "skip_instance_cache": True,
        },
    ],
)
def test_options_of_s3fs_that_change_nothing_here_are_taken(options: dict[str, Any]) -> None:
    assert open_storage("s3://bucket/a", options).url == "s3://bucket/a"


CONFIG_FILE = """
[profile one]
region = eu-west-3
aws_access_key_id = of-profile
aws_secret_access_key = of-profile-secret
max_attempts = 7
endpoint_url = http://127.0.0.1:9/profile
"""


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ({}, {}),
        ({"key": "a", "secret": "b", "token": "c", "endpoint_url": "http://127.0.0.1:9"}, {}),
        ({"username": "a", "password": "b", "use_ssl": False}, {}),
        (
            {
                "client_kwargs": {
                    "region_name": "eu-west-1",
                    "aws_access_key_id": "x",
                    "aws_secret_access_key": "y",
                }
            },
            {},
        ),
        ({"profile": "one"}, {}),
        ({}, {"AWS_PROFILE": "one"}),
        ({}, {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9", "AWS_REGION": "eu-west-2"}),
        ({}, {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "eu-west-2"}),
        ({"anon": True, "key": "a", "secret": "b"}, {}),
        ({"config_kwargs": {"signature_version": "s3v4", "s3": {"addressing_style": "path"}}}, {}),
    ],
)
def test_options_and_environment_mean_what_they_mean_to_s3fs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], environment: dict[str, str]
) -> None:
    import s3fs

    (tmp_path / "config").write_text(CONFIG_FILE)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ours = s3._new_client("s3://bucket", options)
    theirs = s3fs.S3FileSystem(**options, skip_instance_cache=True).s3
    assert ours.meta.endpoint_url == theirs.meta.endpoint_url
    assert ours.meta.region_name == theirs.meta.region_name
    assert ours.meta.config.signature_version == theirs.meta.config.signature_version
    assert (ours.meta.config.s3 or {}).get("addressing_style") == (theirs.meta.config.s3 or {}).get(
        "addressing_style"
    )
    mine, other = ours._request_signer._credentials, theirs._request_signer._credentials
    for name in ("access_key", "secret_key", "token"):
        assert getattr(mine, name, None) == getattr(other, name, None)


def test_an_option_given_by_name_is_preferred_to_one_for_the_client() -> None:
    client = s3._new_client(
        "s3://b",
        {"endpoint_url": "http://127.0.0.1:8", "client_kwargs": {"endpoint_url": "http://127.0.0.1:9"}},
    )
    assert client.meta.endpoint_url == "http://127.0.0.1:8"


def test_the_configuration_of_fsspec_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.config

    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": "http://127.0.0.1:9", "key": "a"})
    storage = open_storage("s3://bucket/a", {"key": "b", "secret": "c"})
    assert json.loads(storage.spec["options"]) == {
        "endpoint_url": "http://127.0.0.1:9", "key": "b", "secret": "c",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "config_kwargs", "attempts"),
    [
        ({}, {}, 10),
        ({"AWS_MAX_ATTEMPTS": "4"}, {}, 4),
        ({}, {"retries": {"max_attempts": 5}}, 6),
        ({"AWS_MAX_ATTEMPTS": "4"}, {"retries": {"total_max_attempts": 2}}, 2),
    ],
)
def test_how_often_to_try_can_be_chosen(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], config_kwargs: dict[str, Any], attempts: int
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    client = s3._new_client("s3://bucket", {"config_kwargs": config_kwargs})
    assert client.meta.config.retries["total_max_attempts"] == attempts
    assert client.meta.config.retries["mode"] == "standard"
    storage = opened(
        "s3://bucket/a", {"key": repr(environment), "secret": "s", "config_kwargs": config_kwargs}
    )
    assert storage._attempts == attempts


def test_defaults_of_the_client_can_be_overridden() -> None:
    config = s3._new_client("s3://bucket", {}).meta.config
    assert (config.connect_timeout, config.read_timeout, config.tcp_keepalive) == (10, 60, True)
    config = s3._new_client(
        "s3://bucket", {"config_kwargs": {"read_timeout": 3, "tcp_keepalive": False}}
    ).meta.config
    assert (config.connect_timeout, config.read_timeout, config.tcp_keepalive) == (10, 3, False)


@pytest.mark.parametrize("package", ["s3fs", "botocore.session"])
def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"pip install 'distckpt\[s3\]'"):
        open_storage("s3://bucket/a", {"key": package})


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_another_client_is_left_to_streams(monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(streams, "open_fsspec", lambda *args: seen.append(args))
    s3.open_s3("s3://bucket/a", {"key": "a", "s3_client": client})
    assert seen == [("s3://bucket/a", {"key": "a", "s3_client": client})]


def test_secrets_stand_in_the_spec_alone() -> None:
    storage = open_storage(
        "s3://bucket/a", {"key": "k", "secret": SECRET, "endpoint_url": "http://127.0.0.1:9"}
    )
    assert SECRET not in storage.url + repr(storage) + repr(storage._client)  # type: ignore[attr-defined]
    assert SECRET in storage.spec["options"]


def test_opening_asks_nothing_of_the_server(s3_url: str, fault_proxy: FaultProxy) -> None:
    reopen_storage(opened(s3_url, fault_proxy.options).spec).open_image(
        "image", '["upload", 16777216]'
    ).close()
    assert fault_proxy.count() == 0


def test_clients_are_shared_by_all_checkpoints_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"key": "a", "secret": "b"}
    one, other = opened("s3://bucket/a", options), opened("s3://bucket/b", options)
    assert one._client is other._client is reopen_storage(one.spec)._client  # type: ignore[attr-defined]
    assert opened("s3://bucket/a", {**options, "key": "c"})._client is not one._client
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert reopen_storage(one.spec)._client is not one._client  # type: ignore[attr-defined]


@given(st.integers(0, 50 * 10**12), st.sampled_from([0, 8 * MIB, 128 * MIB]))
def test_parts_suffice_for_a_file_of_any_size(nbytes: int, bucket_bytes: int) -> None:
    storage = open_storage("s3://bucket/a", {"key": "b", "secret": "c"}, bucket_bytes=bucket_bytes)
    least = bucket_bytes or PART
    size = storage.part_bytes(nbytes)
    assert reopen_storage(storage.spec).part_bytes(nbytes) == size
    assert size >= least
    assert size % (4 * MIB) == 0
    assert -(-nbytes // size) <= 10_000
    assert size == least or -(-nbytes // (size - 4 * MIB)) > 10_000


# --- Images


@pytest.mark.parametrize("nbytes", [0, 1, PART, PART + 1, 3 * PART - 5])
def test_an_image_holds_what_was_written(server: S3Server, storage: S3Storage, nbytes: int) -> None:
    data = content(nbytes)
    storage.prepare()
    token = storage.create_image("folder/image", nbytes)
    assert storage.list("folder") == ({} if nbytes else {"image": 0})
    offsets = list(range(0, nbytes, PART))[::-1]
    # Two lanes, each on threads of its own.
    lanes = [reopen_storage(storage.spec).open_image("folder/image", token) for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(write_part, lanes[at % 2], data, offset) for at, offset in enumerate(offsets)]  # type: ignore[arg-type]
        for one in work:
            one.result()
    receipts = json.loads(json.dumps([receipt for lane in lanes for receipt in lane.finish()]))
    storage.complete_image("folder/image", token, nbytes, receipts)
    assert storage.list("folder") == {"image": nbytes}
    assert read(storage, "folder/image") == data
    assert not server.unfinished_uploads(storage.url)
    for lane in lanes:
        lane.close()


def test_an_image_without_checksums_is_sent_with_its_own(raw_server: RawServer) -> None:
    storage = opened("s3://bucket/a", raw_server.options)
    image = storage.open_image("image", "")
    with memoryview(b"abc") as view:
        image.write(0, [view])
    assert "x-amz-checksum-crc32c: nks/tw==" in raw_server.heads[0]


def test_a_body_is_sent_as_it_lies_in_memory(raw_server: RawServer) -> None:
    options = {
        "s3_additional_kwargs": {"ServerSideEncryption": "AES256", "Delimiter": "x"},
        "requester_pays": True,
    }
    storage = opened("s3://bucket/a b", {**raw_server.options, **options})
    data = content(3 * MIB + 5)
    with memoryview(data) as view, view[:7] as first, view[7:] as second:
        image = storage.open_image("ü", "")
        image.write(0, [first, first[:0], second], crc32c.crc32c(data))
    assert raw_server.bodies == [data]
    [head] = raw_server.heads
    assert head.startswith("put /bucket/a%20b/%c3%bc http/1.1\r\n")
    assert f"content-length: {len(data)}\r\n" in head
    assert "chunked" not in head
    assert "expect" not in head
    assert "x-amz-content-sha256: unsigned-payload" in head
    assert "x-amz-server-side-encryption: aes256" in head
    assert "x-amz-request-payer: requester" in head
    assert SECRET not in head


@pytest.mark.parametrize("receipts", [[], [1], [2], [1, 2, 2], [1, 3], [1, 2, 3]])
def test_a_file_is_not_completed_of_other_parts_than_its_own(storage: S3Storage, receipts: list[int]) -> None:
    token = storage.create_image("image", PART + 1)
    error = error_of(
        storage.complete_image, "image", token, PART + 1, [[number, "tag", "AAAAAA=="] for number in receipts]
    )
    assert error.errno == errno.EIO
    assert error.path == f"{storage.url}/image"
    assert storage.list() == {}
    storage.discard_image("image", token)


def test_a_file_of_another_size_is_an_error(storage: S3Storage) -> None:
    storage.put("image", b"abc")
    storage.complete_image("image", "", 3, [])
    for nbytes in (2, 4):
        assert f"holds 3 bytes after writing {nbytes}" in str(
            error_of(storage.complete_image, "image", "", nbytes, [])
        )
    assert error_of(storage.complete_image, "other", "", 3, []).errno == errno.ENOENT


def test_a_stretch_that_is_no_part_is_refused(storage: S3Storage) -> None:
    image = storage.open_image("image", '["upload", 16777216]')
    with memoryview(b"abc") as view:
        assert error_of(image.write, 5, [view]).errno == errno.EINVAL
        assert error_of(storage.open_image("image", "").write, PART, [view]).errno == errno.EINVAL


@pytest.mark.parametrize("completed", [False, True])
def test_what_is_given_up_leaves_nothing(server: S3Server, storage: S3Storage, completed: bool) -> None:
    data = content(PART + 1)
    token = storage.create_image("image", len(data))
    image = storage.open_image("image", token)
    write_part(image, data, 0)
    if completed:
        write_part(image, data, PART)
        storage.complete_image("image", token, len(data), image.finish())
    image.close()
    for _ in range(2):
        storage.discard_image("image", token)
        assert not server.keys(storage.url)
        assert not server.unfinished_uploads(storage.url)
    assert error_of(write_part, image, data, 0).errno == errno.ENOENT


@pytest.mark.parametrize(
    ("given", "found"), [({}, 4), ({"max_concurrency": 1}, 1), ({"max_concurrency": 9}, 9)]
)
def test_as_many_parts_are_sent_at_once_as_asked_for(given: dict[str, int], found: int) -> None:
    assert open_storage("s3://bucket/a", {"anon": True, **given}).in_flight == found


@pytest.mark.parametrize("given", [0, -1, "4", 2.5, True])
def test_no_number_of_parts_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match=rf"s3://bucket/a: max_concurrency: .*at least 1, got {given!r}"):
        open_storage("s3://bucket/a", {"anon": True, "max_concurrency": given})


def test_unfinished_files_are_those_of_this_checkpoint_alone(s3_server: S3Server, s3_url: str) -> None:
    one, other = opened(f"{s3_url}/a", s3_server.options), opened(f"{s3_url}/ab", s3_server.options)
    for storage in (one, other):
        storage.create_image("image", PART + 1)
        storage.create_image("folder/image", PART + 1)
    found = one.unfinished()
    assert sorted(name for name, _ in found) == ["folder/image", "image"]
    for name, handle in found * 2:
        one.abort(name, handle)
    assert one.unfinished() == []
    assert len(other.unfinished()) == 2


def test_uploads_of_a_save_that_was_killed_are_given_up_by_the_next(s3_server: S3Server, s3_url: str) -> None:
    """Also of its records, and of files in folders whose names it had put down; not those of others there."""
    storage = opened(f"{s3_url}/step-00000001", s3_server.options)
    killed = uuid.uuid4().hex
    claim(storage, killed)
    write_names(storage, names_name(killed, 0), ["weight/c.0"])
    others = ["other/__0_0.distcp.ab12", "tokenizer.tar", "weight/c.1"]
    for name in ("__0_0.distcp.ab12", "weight/c.0", ".distckpt/owner", *others):
        storage.create_image(name, PART + 1)
    with Checkpointer(s3_url, storage_options=s3_server.options) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(3)})
    assert sorted(s3_server.unfinished_uploads(storage.url)) == others


def test_parts_that_arrive_are_a_change(s3_server: S3Server, s3_url: str) -> None:
    """A file that takes longer than a save may be idle is no object before it is complete."""
    storage = opened(s3_url, s3_server.options)
    assert storage.last_change() is None
    token = storage.create_image("image", 2 * PART)
    image = storage.open_image("image", token)
    before = time.time()
    with memoryview(bytes(PART)) as data:
        image.write(0, [data], crc32c.crc32c(data))
    changed = storage.last_change()
    assert changed is not None
    assert changed > before - 2.0
    image.close()
    storage.discard_image("image", token)


def test_parts_that_cannot_be_listed_are_not_taken_for_none(
    faulty: S3Storage, fault_proxy: FaultProxy
) -> None:
    """A save that is under way would look idle, and be removed."""
    token = faulty.create_image("image", 2 * PART)
    fault_proxy.set_rules({"op": "ListParts", "status": 403, "code": "AccessDenied"})
    with pytest.raises(WriteError, match=r"cannot look at the parts of .*image"):
        faulty.last_change()
    assert fault_proxy.faults() == 1
    fault_proxy.set_rules({"op": "ListParts", "status": 404, "code": "NoSuchUpload"})
    assert faulty.last_change() is None
    fault_proxy.set_rules()
    faulty.discard_image("image", token)


@pytest.mark.parametrize(
    ("status", "code"), [(501, "NotImplemented"), (403, "AccessDenied"), (405, "MethodNotAllowed")]
)
def test_a_server_that_lists_no_uploads(
    faulty: S3Storage, fault_proxy: FaultProxy, status: int, code: str
) -> None:
    fault_proxy.set_rules({"op": "ListMultipartUploads", "status": status, "code": code})
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    s3._LOG.addHandler(handler)
    try:
        assert faulty.unfinished() == []
    finally:
        s3._LOG.removeHandler(handler)
    [line] = lines
    assert code in line
    faulty.revoke(".metadata")


def test_an_upload_whose_begin_was_not_answered_is_aborted(
    faulty: S3Storage, fault_proxy: FaultProxy, s3_server: S3Server
) -> None:
    fault_proxy.set_rules({"op": "CreateMultipartUpload", "count": 1, "lost": True})
    token = faulty.create_image("image", PART + 1)
    assert fault_proxy.faults() == 1
    assert [handle for _, handle in faulty.unfinished()] == [json.loads(token)[0]]
    faulty.discard_image("image", token)
    assert not s3_server.unfinished_uploads(faulty.url)


# --- Publication


def test_put_makes_and_replaces(server: S3Server, storage: S3Storage) -> None:
    for last_check in (None, lambda: None):
        for data in (b"first", b"", b"3" * 100_000):
            storage.put("a/b/file", data, last_check)
            assert read(storage, "a/b/file") == data
    assert storage.list("a/b/") == {"file": 100_000}
    assert not server.unfinished_uploads(storage.url)


def test_a_check_that_fails_leaves_what_was_there(server: S3Server, storage: S3Storage) -> None:
    storage.put(".metadata", b"old")

    def refuse() -> None:
        assert read(storage, ".metadata") == b"old"
        raise CommitError("overtaken")

    with pytest.raises(CommitError, match="overtaken"):
        storage.put(".metadata", b"new", refuse)
    assert read(storage, ".metadata") == b"old"
    assert not server.unfinished_uploads(storage.url)


def test_a_put_that_was_revoked_fails(server: S3Server, storage: S3Storage) -> None:
    other = opened(storage.url, server.options)
    error = error_of(storage.put, ".metadata", b"new", lambda: other.revoke(".metadata"))
    assert error.errno == errno.ENOENT
    assert "NoSuchUpload" in str(error)
    assert server.keys(storage.url) == {}
    storage.put(".metadata", b"old")
    assert error_of(storage.put, ".metadata", b"new", lambda: other.revoke(".metadata")).errno == errno.ENOENT
    assert read(storage, ".metadata") == b"old"


def test_only_the_file_itself_is_revoked(server: S3Server, storage: S3Storage) -> None:
    token = storage.create_image(".metadata-of-another", PART + 1)
    storage.put(
        ".metadata", b"new", lambda: opened(f"{storage.url}/folder", server.options).revoke(".metadata")
    )
    storage.put(".metadata", b"newer", lambda: storage.revoke(".metadat"))
    storage.revoke(".metadata")
    assert read(storage, ".metadata") == b"newer"
    assert server.client.list_parts(
        Bucket=server.bucket,
        Key=f"{split_url(storage.url)[1]}/.metadata-of-another",
        UploadId=json.loads(token)[0],
    )
    storage.discard_image(".metadata-of-another", token)


@pytest.mark.slow
def test_a_put_is_done_or_revoked_and_never_both(server: S3Server, storage: S3Storage) -> None:
    """The other claims, revokes, and looks: what it does not find then must never appear."""
    other = opened(storage.url, server.options)
    with ThreadPoolExecutor(1) as pool:
        for number in range(50):
            name, go = f"metadata-{number}", threading.Event()
            # Now one and now the other has a start.
            start_s = (number % 10 - 5) * 0.006

            def revoke(name: str = name, go: threading.Event = go, start_s: float = start_s) -> bytes | None:
                go.wait(10)
                time.sleep(max(0.0, -start_s) / 3)
                other.revoke(name)
                return read(other, name)

            def check(go: threading.Event = go, start_s: float = start_s) -> None:
                go.set()
                time.sleep(max(0.0, start_s))

            revoking = pool.submit(revoke)
            error: WriteError | None = None
            try:
                storage.put(name, b"new", check)
            except WriteError as raised:
                error = raised
            assert error is None or error.errno == errno.ENOENT, error
            expected = b"new" if error is None else None
            assert revoking.result(10) == expected, "it appeared after it was revoked"
            assert read(storage, name) == expected
    assert not server.unfinished_uploads(storage.url)


@pytest.mark.parametrize("hurt", ["UploadPart", "CompleteMultipartUpload"])
def test_a_put_that_fails_leaves_no_upload(
    faulty: S3Storage, fault_proxy: FaultProxy, s3_server: S3Server, hurt: str
) -> None:
    fault_proxy.set_rules({"op": hurt, "status": 500, "code": "InternalError"})
    error = error_of(faulty.put, ".metadata", b"new", lambda: None)
    assert error.errno == errno.EIO
    assert "InternalError" in str(error)
    assert not s3_server.unfinished_uploads(faulty.url)
    assert s3_server.keys(faulty.url) == {}


LOST: dict[str, dict[str, Any]] = {
    "one lost": {"count": 1, "lost": True},
    "all lost": {"lost": True},
    "not answered": {"count": 1, "hang": "answer"},
    "busy": {"count": 1, "status": 503},
    "200 with an error": {"count": 1, "error_body": "InternalError"},
}


@pytest.mark.parametrize("fault", LOST)
def test_an_end_of_unknown_outcome_is_settled(
    faulty: S3Storage, fault_proxy: FaultProxy, s3_server: S3Server, fault: str
) -> None:
    if "hang" in LOST[fault]:
        faulty = opened(faulty.url, fault_proxy.options, **IMPATIENT)
    fault_proxy.set_rules({"op": "CompleteMultipartUpload", **LOST[fault]})
    data = content(PART + 1)
    write_image(faulty, "image", data)
    assert fault_proxy.faults() > 0
    assert read(faulty, "image") == data
    fault_proxy.reset()
    fault_proxy.set_rules({"op": "CompleteMultipartUpload", **LOST[fault]})
    faulty.put(".metadata", b"new", lambda: None)
    assert fault_proxy.faults() > 0
    assert read(faulty, ".metadata") == b"new"
    assert not s3_server.unfinished_uploads(faulty.url)


# --- Reading, listing, removing


def test_read_returns_what_there_is(storage: S3Storage) -> None:
    data = b"0123456789"
    storage.put("file", data)
    storage.put("empty", b"")
    for offset in (0, 3, 9, 10, 11, 500):
        for nbytes in (None, 0, 1, 7, 10, 11, 10**12):
            end = None if nbytes is None else offset + nbytes
            assert read(storage, "file", offset, nbytes) == data[offset:end], (offset, nbytes)
            assert read(storage, "empty", offset, nbytes) == b""
            assert storage.read("absent", offset, nbytes) is None
    assert storage.read("file/below") is None


def test_threads_read_by_one_client(storage: S3Storage) -> None:
    data = content(8 * MIB + 3)
    storage.put("file", data)

    def read_on_thread(at: int) -> bool:
        one = reopen_storage(storage.spec)
        return read(one, "file", at * 77_777, 3 * MIB) == data[at * 77_777 :][: 3 * MIB]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read_on_thread, range(24)))


@pytest.mark.parametrize("get", [read, filled])
@pytest.mark.parametrize("sent", [0, 1, 2 * MIB])
def test_a_body_that_breaks_off_is_resumed(
    faulty: S3Storage, fault_proxy: FaultProxy, sent: int, get: Any
) -> None:
    data = content(3 * MIB)
    faulty.put("file", data)
    fault_proxy.set_rules({"op": "GetObject", "count": 1, "cut_answer": sent})
    assert get(faulty, "file", 5, 3 * MIB - 9) == data[5:-4]
    assert fault_proxy.faults() == 1
    if sent > MIB:
        [_, *later] = [request.range for request in fault_proxy.requests("GetObject")]
        assert "bytes=5-3145720" not in later, "from the start again"
    fault_proxy.set_rules({"op": "GetObject", "cut_answer": min(sent, MIB)})
    error = error_of(faulty.read, "file")
    assert error.errno in {errno.ECONNRESET, errno.EIO}
    assert error.path == f"{faulty.url}/file"


@pytest.mark.parametrize("get", [read, filled])
@pytest.mark.parametrize("nbytes", [3 * MIB, MIB])
def test_what_is_replaced_while_it_is_read_is_read_anew(
    faulty: S3Storage, fault_proxy: FaultProxy, nbytes: int, get: Any
) -> None:
    old, new = content(3 * MIB, 1), content(nbytes, 2)
    faulty.put("file", old)
    fault_proxy.set_rules({"op": "GetObject", "count": 1, "cut_answer": 2 * MIB})
    calls: list[int] = []

    def pause(attempt: int) -> float:
        calls.append(attempt)
        faulty.put("file", new)
        return 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3, "_pause_s", pause)
        assert get(faulty, "file") == new
    assert calls


def test_list_names_files_with_sizes_and_directories(server: S3Server, storage: S3Storage) -> None:
    for name in (".hidden", "file ü+%", "folder/below", "folder/deeper/still", "folders"):
        storage.put(name, b"12345")
    assert storage.list() == {".hidden": 5, "file ü+%": 5, "folder/": 0, "folders": 5}
    assert storage.list("folder") == storage.list("folder/") == {"below": 5, "deeper/": 0}
    assert storage.list("absent") == storage.list("fold") == {}
    assert opened(storage.url[:-1], server.options).list() == {}


def test_an_object_that_stands_for_a_directory_is_none_of_its_files(s3_server: S3Server, s3_url: str) -> None:
    bucket, prefix = split_url(s3_url)
    storage = opened(s3_url, s3_server.options)
    for marker in (f"{prefix}/", f"{prefix}/folder/"):
        s3_server.client.put_object(Bucket=bucket, Key=marker, Body=b"")
    assert storage.list("folder") == {}
    assert "" not in storage.list()
    storage.delete("folder/")
    storage.delete("folder/")
    assert storage.list() == {}
    assert storage.remove_directory()
    assert s3_server.keys(s3_url) == {}


@pytest.mark.slow
def test_lists_have_more_than_one_page(s3_server: S3Server, s3_url: str) -> None:
    storage = opened(s3_url, s3_server.options)
    names = {f"file-{number:04}" for number in range(1005)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: reopen_storage(storage.spec).put(name, b""), names))
    assert storage.list() == dict.fromkeys(names, 0)


def test_delete_and_what_is_left(storage: S3Storage) -> None:
    assert storage.last_change() is None
    assert storage.remove_directory()
    storage.put("folder/file", b"")
    changed = storage.last_change()
    assert changed is not None
    assert abs(changed - time.time()) < 60
    assert not storage.remove_directory()
    for _ in range(2):
        storage.delete("folder/file")
        storage.delete("folder/")
    assert storage.list() == {}
    assert storage.remove_directory()


@pytest.mark.parametrize("name", ["../a", "/a", "a//b", "a/./b", "a\0"])
def test_no_name_leads_out(storage: S3Storage, name: str) -> None:
    for call in (
        lambda: storage.put(name, b""), lambda: storage.read(name), lambda: storage.list(name),
        lambda: storage.delete(name), lambda: storage.revoke(name), lambda: storage.create_image(name, 1),
        lambda: storage.open_image(name, ""), lambda: storage.complete_image(name, "", 0, []),
        lambda: storage.abort(name, "upload"),
    ):  # fmt: skip
        with pytest.raises(IntegrityError):
            call()


# --- Failures


def test_no_bucket_is_an_error_everywhere(server: S3Server) -> None:
    storage = opened("s3://no-such-bucket/a", server.options)
    error = error_of(storage.prepare)
    assert "bucket 'no-such-bucket' does not exist" in str(error)
    assert error.path == "s3://no-such-bucket/a"
    for call in (
        storage.prepare, storage.list, storage.last_change, lambda: storage.read("file"),
        lambda: storage.read("file", 0, 0),
    ):  # fmt: skip
        assert error_of(call).errno == errno.ENOENT


@pytest.mark.parametrize("wrong", [{"secret": SECRET}, {"key": "nobody"}])
def test_wrong_credentials_are_told_early(server: S3Server, wrong: dict[str, Any]) -> None:
    storage = opened(server.new_prefix(), {**server.options, **wrong})
    for call in (storage.prepare, lambda: storage.put("file", b"data"), lambda: storage.read("file")):
        error = error_of(call)
        assert error.errno == errno.EACCES
        assert "EACCES" in str(error)
        assert SECRET not in str(error)
        assert error.path is not None
        assert error.path in str(error)
        assert pickle.loads(pickle.dumps(error)).errno == errno.EACCES


def test_credentials_are_looked_for_again_after_they_were_refused(server: S3Server) -> None:
    options = {**server.options, "key": "nobody"}
    url = server.new_prefix()
    storage = opened(url, options)
    assert opened(url, options)._client is storage._client
    error_of(storage.prepare)
    assert opened(url, options)._client is not storage._client


def test_no_credentials_at_all_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: S3Server
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    storage = opened(s3_server.new_prefix(), {"endpoint_url": s3_server.endpoint})
    error = error_of(storage.prepare)
    assert error.errno == errno.EACCES
    assert "AWS_ACCESS_KEY_ID" in str(error)


@pytest.mark.parametrize(
    ("status", "code", "number"),
    [
        (503, "SlowDown", errno.EAGAIN),
        (429, "TooManyRequests", errno.EAGAIN),
        (500, "InternalError", errno.EIO),
        (403, "AccessDenied", errno.EACCES),
        (400, "ExpiredToken", errno.EACCES),
        (412, "PreconditionFailed", errno.EEXIST),
        (400, "EntityTooLarge", errno.EIO),
        (507, "XMinioStorageFull", errno.ENOSPC),
    ],
)
def test_what_the_server_says_is_told(
    faulty: S3Storage, fault_proxy: FaultProxy, status: int, code: str, number: int
) -> None:
    fault_proxy.set_rules({"status": status, "code": code})
    for call in (lambda: faulty.put("file", b"data"), lambda: faulty.read("file"), faulty.list):
        error = error_of(call)
        assert error.errno == number
        assert f"{code}: injected [{errno.errorcode[number]}]" in str(error)
        assert error.path is not None
        assert error.path.startswith(faulty.url)
        assert error.__cause__ is not None
    tries = 2 if status in {429, 500, 503} else 1
    assert fault_proxy.count("PutObject") == tries


@pytest.mark.parametrize(
    ("fault", "signed"),
    [
        ({"status": 503, "code": "SlowDown"}, False),
        ({"status": 500, "code": "InternalError"}, True),
        ({"reset": True}, False),
        ({"cut": 2 * MIB}, False),
        ({"cut": 2 * MIB}, True),
        ({"lost": True}, False),
        ({"hang": "answer"}, False),
        ({"hang": "body"}, False),
        ({"corrupt": -1}, False),
        ({"corrupt": 5}, True),
        ({"status": 400, "code": "RequestTimeout"}, False),
        ({"status": 400, "code": "IncompleteBody"}, False),
    ],
    ids=repr,
)
def test_a_part_is_sent_again(
    faulty: S3Storage, fault_proxy: FaultProxy, s3_server: S3Server, fault: dict[str, Any], signed: bool
) -> None:
    config = {
        **(IMPATIENT if "hang" in fault else QUICK),
        "s3": {"payload_signing_enabled": signed},
        "parameter_validation": signed,
    }
    storage = opened(faulty.url, fault_proxy.options, **config)
    fault_proxy.set_rules({"op": "UploadPart", "query": {"partNumber": "1"}, "count": 1, **fault})
    data = content(PART + 1)
    write_image(storage, "image", data)
    assert fault_proxy.faults() == 1
    assert read(opened(storage.url, s3_server.options), "image") == data


@pytest.mark.parametrize(
    ("fault", "numbers"),
    [
        ({"corrupt": -1}, {errno.EIO}),
        ({"hang": "body"}, {errno.ETIMEDOUT}),
        ({"hang": "answer"}, {errno.ETIMEDOUT}),
        ({"reset": True}, {errno.ECONNRESET, errno.EPIPE}),
    ],
    ids=repr,
)
def test_a_part_that_never_arrives_is_named_and_lets_go_of_memory(
    faulty: S3Storage, fault_proxy: FaultProxy, fault: dict[str, Any], numbers: set[int]
) -> None:
    if "hang" in fault:
        faulty = opened(faulty.url, fault_proxy.options, **IMPATIENT)
    fault_proxy.set_rules({"op": "UploadPart", **fault})
    token = faulty.create_image("image", PART + 8 * MIB)
    image = faulty.open_image("image", token)
    memory = mmap.mmap(-1, 8 * MIB)
    with memoryview(memory) as view, view[:MIB] as first, view[MIB:] as second:
        error = error_of(image.write, PART, [first, second], crc32c.crc32c(view))
    # The error, its causes and their tracebacks are still there.
    memory.close()
    assert error.errno in numbers
    assert error.offset == PART
    assert error.path == f"{faulty.url}/image"
    assert f"{faulty.url}/image at byte {PART}" in str(error)
    assert error.__traceback__ is not None
    assert fault_proxy.count("UploadPart") == 2


def test_a_server_that_never_reads_is_given_up(s3_url: str) -> None:
    server = RawServer(reads=False)
    try:
        storage = opened(s3_url, server.options, **IMPATIENT)
        started = time.monotonic()
        assert error_of(storage.put, "file", content(8 * MIB)).errno == errno.ETIMEDOUT
        assert time.monotonic() - started < 30
    finally:
        server.close()


def test_a_certificate_that_is_not_trusted_is_told_at_once(tmp_path: Path, s3_url: str) -> None:
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    waits = 0
    with context.wrap_socket(socket.create_server(("127.0.0.1", 0)), server_side=True) as listening:

        def refuse() -> None:
            nonlocal waits
            with contextlib.suppress(OSError):
                while True:
                    with contextlib.suppress(ssl.SSLError):
                        waits += 1
                        listening.accept()[0].close()

        thread = threading.Thread(target=refuse)
        thread.start()
        endpoint = f"https://127.0.0.1:{listening.getsockname()[1]}"
        storage = opened(s3_url, {"endpoint_url": endpoint, "key": "k", "secret": SECRET})
        for call in (storage.prepare, lambda: storage.put("file", b"data")):
            error = error_of(call)
            assert error.errno == errno.EPROTO
            assert "certificate verify failed" in str(error)
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    assert waits == 3, "one connection for each call, and none after them"


def test_a_server_that_is_away(s3_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    storage = opened(
        s3_url, {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k", "secret": SECRET}, **QUICK
    )
    for call in (lambda: storage.put("file", b"data"), storage.prepare):
        error = error_of(call)
        assert error.errno == errno.ECONNREFUSED
        assert str(port) not in str(error)
        assert SECRET not in str(error)


@pytest.mark.parametrize("op", ["PutObject", "ListObjects"])
def test_pauses_between_attempts_grow_and_vary(s3_url: str, fault_proxy: FaultProxy, op: str) -> None:
    retries = {"mode": "standard", "total_max_attempts": 3}
    storage = opened(s3_url, fault_proxy.options, **{**QUICK, "retries": retries})
    fault_proxy.set_rules({"op": op, "status": 503, "code": "SlowDown"})
    error_of(*((storage.put, "file", b"") if op == "PutObject" else (storage.list,)))
    requests = fault_proxy.requests(op)
    pauses = [after.started - before.ended for before, after in itertools.pairwise(requests)]
    assert len(pauses) == 2
    assert all(pause < 2**at + 0.5 for at, pause in enumerate(pauses))
    assert len({round(pause, 3) for pause in pauses}) > 1


def test_pauses_of_ten_attempts_end() -> None:
    assert all(
        0 <= s3._pause_s(attempt) <= min(2 ** (attempt - 1), 20)
        for attempt in range(1, 12)
        for _ in range(50)
    )
    assert sum(min(2 ** (attempt - 1), 20) for attempt in range(1, 10)) == 111


def test_no_attempt_begins_after_a_while(
    s3_url: str, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_PATIENCE_S", 0.0)
    storage = opened(s3_url, fault_proxy.options, **{**QUICK, "retries": {"total_max_attempts": 9}})
    fault_proxy.set_rules({"status": 500})
    error_of(storage.list)
    error_of(storage.put, "file", b"")
    assert fault_proxy.count() <= 4


@pytest.mark.parametrize("fault", [{"status": 503}, {"bandwidth": MIB // 4}], ids=["pausing", "sending"])
def test_a_write_can_be_cancelled(
    s3_url: str, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]
) -> None:
    monkeypatch.setattr(s3, "_pause_s", lambda attempt: 30.0)
    storage = opened(s3_url, fault_proxy.options)
    token = storage.create_image("image", 2 * PART)
    image = storage.open_image("image", token)
    fault_proxy.set_rules({"op": "UploadPart", **fault})
    data = content(2 * PART)
    with ThreadPoolExecutor(2) as pool:
        writing = [pool.submit(write_part, image, data, offset) for offset in (0, PART)]
        time.sleep(1)
        assert not any(one.done() for one in writing)
        image.cancel()
        for one in writing:
            assert error_of(one.result, 10).errno == errno.ECANCELED
    assert error_of(write_part, image, data, 0).errno == errno.ECANCELED
    fault_proxy.set_rules()
    storage.discard_image("image", token)


def test_what_failed_for_good_has_a_client_of_its_own_next_time(
    faulty: S3Storage, fault_proxy: FaultProxy
) -> None:
    """The attempts that botocore allows all requests of a client together are not spent on the next save."""
    fault_proxy.set_rules({"status": 503, "code": "SlowDown"})
    error_of(faulty.list)
    assert reopen_storage(faulty.spec)._client is not faulty._client  # type: ignore[attr-defined]

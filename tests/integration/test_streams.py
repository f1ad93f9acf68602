"""Checkpoints as streams of fsspec, against real servers."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from distckpt import StorageReader, StorageWriter
from distckpt.errors import WriteError
from distckpt.storage import Storage, fill, reopen_storage
from distckpt.storage.contract import StorageContract
from distckpt.storage.streams import open_fsspec
from servers import FaultProxy, S3Server

MIB = 1 << 20
CLIENTS = ["s3fs", "obstore"]


def open_s3(server: S3Server | FaultProxy, url: str, client: str, **options: Any) -> Storage:
    return open_fsspec(url, {**server.options, "s3_client": client, **options})


class TestS3fs(StorageContract):
    can_revoke = False

    @pytest.fixture
    def storage(self, s3_server: S3Server, s3_url: str) -> Storage:
        return open_s3(s3_server, f"{s3_url}/some/checkpoint", "s3fs")


class TestObstore(StorageContract):
    can_revoke = False
    keeps_no_rests = False

    @pytest.fixture
    def storage(self, s3_server: S3Server, s3_url: str) -> Storage:
        return open_s3(s3_server, f"{s3_url}/some/checkpoint", "obstore")


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "model": {f"layer-{number}": torch.randn(500, 700) for number in range(6)},
        "step": 17,
        "names": ["a", "b"],
    }


def zeros() -> dict[str, Any]:
    return {
        "model": {f"layer-{number}": torch.zeros(500, 700) for number in range(6)},
        "step": 0,
        "names": [],
    }


def round_trip(url: str, options: dict[str, Any], workers: int) -> None:
    for seed in range(2):
        with StorageWriter(url, storage_options=options, dist_ckpt_workers=workers) as writer:
            state_dict_saver.save(state(seed), storage_writer=writer, no_dist=True)
        loaded = zeros()
        state_dict_loader.load(
            loaded, storage_reader=StorageReader(url, storage_options=options), no_dist=True
        )
        expected = state(seed)
        assert (loaded["step"], loaded["names"]) == (17, ["a", "b"])
        for name, tensor in expected["model"].items():
            assert torch.equal(loaded["model"][name], tensor), name


def test_a_checkpoint_is_saved_to_memory_and_loaded() -> None:
    round_trip(f"memory://{uuid.uuid4().hex}/checkpoint", {}, 1)


def test_workers_have_no_memory_in_common() -> None:
    url = f"memory://{uuid.uuid4().hex}/checkpoint"
    with (
        StorageWriter(url, dist_ckpt_workers=2) as writer,
        pytest.raises(CheckpointException, match="dist-ckpt-workers 1"),
    ):
        state_dict_saver.save(state(), storage_writer=writer, no_dist=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_checkpoint_is_saved_to_s3_and_loaded(
    s3_server: S3Server, s3_url: str, client: str, workers: int
) -> None:
    url = f"{s3_url}/größe 1"
    round_trip(url, {**s3_server.options, "s3_client": client}, workers)
    keys = s3_server.keys(url)
    assert keys[".metadata"] > 0
    assert s3_server.unfinished_uploads(s3_url) == []
    names = open_s3(s3_server, url, client).list()
    assert {name: size for name, size in keys.items() if "/" not in name} == {
        name: size for name, size in names.items() if not name.endswith("/")
    }


@pytest.mark.parametrize("nbytes", [0, 3 * MIB, 20 * MIB])
def test_what_is_closed_and_not_finished_never_appears(
    s3_server: S3Server, s3_url: str, client: str, nbytes: int
) -> None:
    storage = open_s3(s3_server, s3_url, client)
    token = storage.create_image("image", 40 * MIB)
    image = storage.open_image("image", token)
    if nbytes:
        image.write(0, [memoryview(bytes(nbytes))])
    image.close()
    del image
    gc.collect()
    assert s3_server.keys(s3_url) == {}
    if client == "s3fs":
        assert s3_server.unfinished_uploads(s3_url) == []


@pytest.mark.parametrize("ending", ["del image", "import sys; sys.exit(0)"])
def test_what_nobody_closes_never_appears(s3_server: S3Server, s3_url: str, client: str, ending: str) -> None:
    storage = open_s3(s3_server, s3_url, client)
    code = (
        "import json, sys\n"
        "from distckpt.storage import reopen_storage\n"
        "storage = reopen_storage(json.loads(sys.stdin.read()))\n"
        "image = storage.open_image('image', storage.create_image('image', 10))\n"
        "image.write(0, [memoryview(b'abc')])\n"
        f"{ending}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(storage.spec),
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.stderr == ""
    # obstore's runtime now and then aborts a process that ends within milliseconds of a request.
    assert done.returncode in ({0} if client == "s3fs" else {0, -signal.SIGABRT})
    assert s3_server.keys(s3_url) == {}


def test_nothing_appears_before_it_is_finished(s3_server: S3Server, s3_url: str, client: str) -> None:
    storage = open_s3(s3_server, s3_url, client)
    data = os.urandom(20 * MIB)
    image = storage.open_image("image", storage.create_image("image", len(data)))
    image.write(0, [memoryview(data)])
    assert s3_server.keys(s3_url) == {}
    image.finish()
    assert s3_server.keys(s3_url) == {"image": len(data)}
    assert s3_server.unfinished_uploads(s3_url) == []


def test_parts_that_arrive_are_a_change(s3_server: S3Server, s3_url: str) -> None:
    storage = open_s3(s3_server, s3_url, "s3fs")
    assert storage.last_change() is None
    bucket, key = s3_server.bucket, f"{s3_url.rpartition('/')[2]}/image"
    upload = s3_server.client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    assert storage.last_change() is None
    s3_server.client.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=1, Body=b"x")
    changed = storage.last_change()
    assert changed is not None
    assert abs(changed - time.time()) < 30.0


def test_uploads_of_a_process_that_died_are_found_and_given_up(s3_server: S3Server, s3_url: str) -> None:
    storage = open_s3(s3_server, s3_url, "s3fs")
    bucket, prefix = s3_server.bucket, s3_url.rpartition("/")[2]
    for key in ("one", "two?x", "three", "below/four"):
        s3_server.client.create_multipart_upload(Bucket=bucket, Key=f"{prefix}/{key}")
    s3_server.client.create_multipart_upload(Bucket=bucket, Key=f"{prefix}0/beside")
    found = storage.unfinished()
    assert sorted(name for name, _ in found) == ["below/four", "one", "three", "two?x"]
    assert sorted(s3_server.unfinished_uploads(s3_url)) == ["below/four", "one", "three", "two?x"]
    storage.discard_image("three", storage.create_image("three", 1))
    assert sorted(s3_server.unfinished_uploads(s3_url)) == ["below/four", "one", "two?x"]
    for name, handle in found:
        storage.abort(name, handle)
    assert s3_server.unfinished_uploads(s3_url) == []
    assert s3_server.unfinished_uploads(f"{s3_url}0") == ["beside"]


def test_what_others_have_done_is_seen(s3_server: S3Server, s3_url: str, client: str) -> None:
    storage = open_s3(s3_server, s3_url, client)
    storage.put("file", b"old")
    assert storage.list() == {"file": 3}
    prefix = s3_url.rpartition("/")[2]
    s3_server.client.put_object(Bucket=s3_server.bucket, Key=f"{prefix}/file", Body=b"newer")
    s3_server.client.put_object(Bucket=s3_server.bucket, Key=f"{prefix}/other", Body=b"")
    assert storage.list() == {"file": 5, "other": 0}
    data = storage.read("file", 1, 100)
    assert data is not None
    assert bytes(data) == b"ewer"
    with pytest.raises(WriteError, match="holds 5 bytes after writing 3"):
        storage.complete_image("file", "3", 3, [])
    s3_server.client.delete_object(Bucket=s3_server.bucket, Key=f"{prefix}/file")
    assert storage.read("file") is None
    assert storage.list() == {"other": 0}


def test_no_bucket_is_made(s3_server: S3Server, client: str) -> None:
    bucket = f"absent-{uuid.uuid4().hex[:8]}"
    storage = open_s3(s3_server, f"s3://{bucket}/some/checkpoint", client)
    storage.prepare()
    buckets = s3_server.client.list_buckets()["Buckets"]
    assert bucket not in {entry["Name"] for entry in buckets}


def test_a_secret_that_is_wrong_is_an_error(s3_server: S3Server, s3_url: str, client: str) -> None:
    storage = open_s3(s3_server, s3_url, client, secret="another secret")
    with pytest.raises(WriteError) as caught:
        storage.put("file", b"data")
    assert caught.value.errno == errno.EACCES
    assert caught.value.path == f"{s3_url}/file"
    assert "another secret" not in str(caught.value)


def test_an_upload_that_cannot_be_completed_is_an_error(
    fault_proxy: FaultProxy, s3_server: S3Server, s3_url: str
) -> None:
    storage = open_s3(fault_proxy, s3_url, "s3fs")
    data = bytes(20 * MIB)
    image = storage.open_image("image", storage.create_image("image", len(data)))
    image.write(0, [memoryview(data)])
    fault_proxy.set_rules({"op": "CompleteMultipartUpload", "status": 403, "code": "AccessDenied"})
    with pytest.raises(WriteError) as caught:
        image.finish()
    assert (caught.value.errno, caught.value.offset) == (errno.EACCES, len(data))
    assert fault_proxy.faults() == 1
    image.close()
    assert s3_server.keys(s3_url) == {}
    assert s3_server.unfinished_uploads(s3_url) == []


def test_a_part_that_is_refused_is_an_error(
    fault_proxy: FaultProxy, s3_server: S3Server, s3_url: str
) -> None:
    storage = open_s3(fault_proxy, s3_url, "s3fs")
    fault_proxy.set_rules({"op": "UploadPart", "status": 403, "code": "AccessDenied"})
    image = storage.open_image("image", storage.create_image("image", 40 * MIB))
    with pytest.raises(WriteError) as caught:
        image.write(0, [memoryview(bytes(20 * MIB))])
    assert (caught.value.errno, caught.value.offset) == (errno.EACCES, 0)
    image.close()
    assert s3_server.keys(s3_url) == {}
    assert s3_server.unfinished_uploads(s3_url) == []


def test_a_server_that_is_away_is_an_error(s3_url: str, client: str) -> None:
    options: dict[str, Any] = {
        "endpoint_url": "http://127.0.0.1:9",
        "key": "k",
        "secret": "s",
        "s3_client": client,
    }
    if client == "s3fs":
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}, "connect_timeout": 1}
    storage = open_fsspec(s3_url, options)
    with pytest.raises(WriteError) as caught:
        storage.read("file")
    assert caught.value.errno in {errno.ECONNREFUSED, errno.EIO}


def test_what_may_not_be_listed_is_not_missed(fault_proxy: FaultProxy, s3_url: str) -> None:
    storage = open_s3(fault_proxy, s3_url, "s3fs")
    fault_proxy.set_rules({"op": "ListMultipartUploads", "status": 403, "code": "AccessDenied"})
    assert storage.unfinished() == []
    assert fault_proxy.faults() == 1
    fault_proxy.set_rules({"op": "ListMultipartUploads", "status": 400, "code": "InvalidRequest"})
    with pytest.raises(WriteError):
        storage.unfinished()


def test_a_write_that_is_cancelled_goes_no_further(s3_server: S3Server, s3_url: str, client: str) -> None:
    storage = open_s3(s3_server, s3_url, client)
    image = storage.open_image("image", storage.create_image("image", 10))
    image.write(0, [memoryview(b"abc")])
    image.cancel()
    with pytest.raises(WriteError) as caught:
        image.write(3, [memoryview(b"def")])
    assert caught.value.errno == errno.ECANCELED
    image.close()
    with pytest.raises(WriteError):
        image.write(3, [memoryview(b"def")])


def test_the_options_go_to_obstore_by_its_own_names(s3_server: S3Server, s3_url: str) -> None:
    options = s3_server.options
    within = {
        "region_name": "us-east-1",
        "endpoint_url": options["endpoint_url"],
        "aws_access_key_id": options["key"],
        "aws_secret_access_key": options["secret"],
    }
    storage = open_fsspec(s3_url, {"s3_client": "obstore", "client_kwargs": within})
    reopen_storage(storage.spec).put("file", b"data")
    assert s3_server.keys(s3_url) == {"file": 4}


def test_a_server_that_knows_no_ranges_is_refused(tmp_path: Path) -> None:
    """As Python's own does."""
    (tmp_path / "file").write_bytes(b"0123456789")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            storage = open_fsspec(f"http://127.0.0.1:{server.server_port}", {})
            assert bytes(storage.read("file") or b"") == b"0123456789"
            for read in (
                lambda: storage.read("file", 2, 3),
                lambda: fill(storage, "file", 2, memoryview(bytearray(3))),
            ):
                with pytest.raises(WriteError, match="another range") as caught:
                    read()
                assert caught.value.errno == errno.EIO
                assert caught.value.path == f"http://127.0.0.1:{server.server_port}/file"
        finally:
            server.shutdown()
            thread.join()

"""Which URL gets which storage, and what of it another process opens."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import uuid
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from distckpt import storage as door
from distckpt.errors import ConfigError, WriteError
from distckpt.storage import Storage, can_fill, fill, open_storage, register_storage, reopen_storage
from distckpt.storage.bounded import Bounded
from distckpt.storage.posix import PosixStorage
from distckpt.storage.streams import FsspecStorage

S3_OPTIONS = {
    "endpoint_url": "http://127.0.0.1:9",
    "key": "the-key",
    "secret": "the-secret",
    "client_kwargs": {"region_name": "us-east-1"},
}
OTHER_PROCESS = """
import json, sys
from distckpt.errors import ConfigError
from distckpt.storage import reopen_storage

try:
    storage = reopen_storage(json.loads(sys.stdin.read()))
except ConfigError as error:
    print(json.dumps({"refused": str(error)}))
else:
    file_system = getattr(storage, "_fs", None)
    told = {"kind": type(storage).__name__, "url": storage.url, "spec": storage.spec}
    told["options"] = getattr(file_system, "storage_options", None)
    told["files"] = storage.list() if storage.spec["kind"] == "posix" else None
    print(json.dumps(told))
"""


def open_elsewhere(storage: Storage, *folders: Path) -> dict[str, Any]:
    """Open it from its spec in a process of its own; returns what that says of it."""
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS],
        input=json.dumps(storage.spec),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.fixture(autouse=True)
def no_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_FACTORIES", {})


# Paths.


@pytest.mark.parametrize("kind", [str, Path, lambda path: f"file://{path}", lambda path: f"{path}/"])
@pytest.mark.parametrize("name", ["checkpoint", "a b", "größe", "日本", "a#b", "100%25", "a:b"])
def test_local_paths_and_urls_are_the_same(
    tmp_path: Path, kind: Callable[[Path], str | Path], name: str
) -> None:
    storage = open_storage(kind(tmp_path / name))
    assert storage.url == str(tmp_path / name)
    assert isinstance(storage, PosixStorage)


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("some/checkpoint", Path("some/checkpoint"), "./some/checkpoint/"):
        assert open_storage(path).url == str(tmp_path / "some" / "checkpoint")


def test_a_pathlib_path_is_local_whatever_it_looks_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_storage(Path("memory://x")).url == str(tmp_path / "memory:" / "x")


@pytest.mark.parametrize("name", ["a::b", "http::y", "memory:", "s3://bucket", "file://x", "~"])
@pytest.mark.parametrize("options", [{}, {"auto_mkdir": True}])
def test_an_absolute_path_is_local_whatever_it_looks_like(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    for path in (f"{tmp_path}/{name}", f"{tmp_path}/{name}/", Path(f"{tmp_path}/{name}")):
        storage = open_storage(path, options)
        assert isinstance(storage, PosixStorage)
        assert os.path.normpath(storage.url) == os.path.normpath(f"{tmp_path}/{name}")
    assert open_storage("/").url == "/"


def test_options_on_local_paths_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
        with pytest.raises(ConfigError, match=r"without effect on local paths: other"):
            open_storage(path, {"other": 1, "auto_mkdir": True})
        assert open_storage(path, {"auto_mkdir": True}).url == str(tmp_path)


@pytest.mark.parametrize("url", ["", "nothing-of-this-name://x"])
def test_what_nobody_knows_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        open_storage(url)


# URLs.


@pytest.mark.parametrize("url", ["s3://bucket/some/a b/größe", "s3a://bucket/checkpoint", "s3://bucket/x/"])
def test_s3_has_a_storage_of_its_own(url: str) -> None:
    storage = open_storage(url, S3_OPTIONS)
    assert type(storage).__name__ == "S3Storage"
    assert storage.part_bytes(1) > 0
    assert not storage.is_stream


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_s3_goes_through_fsspec_when_asked(client: str) -> None:
    storage = open_storage("s3://bucket/some/a b/größe/", {**S3_OPTIONS, "s3_client": client})
    assert isinstance(storage, FsspecStorage)
    assert storage.url == "s3://bucket/some/a b/größe"
    assert storage.is_stream
    assert storage.part_bytes(10**12) == 0
    assert storage._root == "bucket/some/a b/größe"
    assert storage._lists_uploads == (client == "s3fs")


@pytest.mark.parametrize("client", ["boto", "", 7])
def test_a_client_that_is_not_known_is_refused(client: object) -> None:
    with pytest.raises(ConfigError, match="s3_client"):
        open_storage("s3://bucket/x", {**S3_OPTIONS, "s3_client": client})


@pytest.mark.parametrize("url", ["memory://x", "/tmp/x", "file:///tmp/x"])
def test_a_client_of_s3_is_refused_elsewhere(url: str) -> None:
    with pytest.raises(ConfigError, match="s3_client"):
        open_storage(url, {"s3_client": "s3fs"})


def test_options_that_obstore_has_not_are_refused_by_name() -> None:
    options = {**S3_OPTIONS, "s3_client": "obstore", "profile": "p", "config_kwargs": {}}
    with pytest.raises(ConfigError, match="obstore has not: config_kwargs, profile"):
        open_storage("s3://bucket/x", options)
    options = {"s3_client": "obstore", "client_kwargs": {"verify": False, "region_name": "r"}}
    with pytest.raises(ConfigError, match=r"obstore has not: client_kwargs\.verify$"):
        open_storage("s3://bucket/x", options)


def test_without_obstore_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    # A name that maps to None counts as a module that does not exist.
    monkeypatch.setitem(sys.modules, "obstore.fsspec", None)
    with pytest.raises(ConfigError, match=r"pip install 'distckpt\[obstore\]'"):
        open_storage("s3://bucket/x", {**S3_OPTIONS, "s3_client": "obstore"})


@pytest.mark.parametrize(
    "url", ["memory://{}/some/a b/größe", "memory://{}/some/a b/größe//", "memory:///{}"]
)
def test_memory_is_a_stream(url: str) -> None:
    storage = open_storage(url.format(uuid.uuid4().hex))
    assert isinstance(storage, FsspecStorage)
    assert not storage.url.endswith("/")
    storage.prepare()
    storage.put("file", b"data")
    assert storage.list() == {"file": 4}
    assert open_storage(storage.url).list() == {"file": 4}
    assert open_storage(f"{storage.url}/").read("file") == bytearray(b"data")


@pytest.mark.parametrize("first", ["simplecache", "filecache", "blockcache", "dir"])
def test_chained_urls_that_do_not_show_what_is_there_are_refused(first: str) -> None:
    with pytest.raises(ConfigError, match=f"leave {first}:: out"):
        open_storage(f"{first}::memory://x")


def test_a_checkpoint_within_an_archive_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("some/checkpoint/file", b"0123456789")
        archive.writestr("some/checkpoint/folder/below", b"")
    storage = open_storage(f"zip://some/checkpoint::file://{tmp_path}/archive.zip")
    assert storage.list() == {"file": 10, "folder/": 0}
    for opened in (storage, reopen_storage(storage.spec)):
        assert opened.read("file", 2, 3) == bytearray(b"234")
        assert opened.read("absent") is None
    with pytest.raises(WriteError) as caught:
        storage.put("file", b"new")
    assert caught.value.errno is not None


def test_a_server_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WriteError) as caught:
        open_storage(f"zip://some/checkpoint::file://{tmp_path}/absent.zip")
    assert pickle.loads(pickle.dumps(caught.value)).errno == 2


def test_no_message_holds_a_password() -> None:
    storage = open_storage(f"memory://user:secret@{uuid.uuid4().hex}/x")
    assert "user" in storage.url
    assert "secret" not in storage.url
    with pytest.raises(WriteError) as caught:
        storage.complete_image("image", "3", 3, [])
    assert "image" in str(caught.value)
    with pytest.raises(ConfigError) as refused:
        open_storage("nothing-of-this-name://user:secret@host/x")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [("session", object()), ("client_kwargs", {"verify": {1, 2}}), ("config_kwargs", {"x": b"bytes"})],
)
def test_options_that_cannot_be_handed_on_are_refused_by_name(option: str, value: object) -> None:
    options = {"key": "k", "secret": "s", "s3_client": "s3fs", option: value}
    with pytest.raises(ConfigError, match=f"option {option} cannot be handed to worker processes"):
        open_storage("s3://bucket/x", options)


# Files that are given up, where bytes are visible as they are written.


def test_nothing_is_left_of_a_stream_that_was_closed() -> None:
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    storage.prepare()
    image = storage.open_image("image", storage.create_image("image", 10))
    image.write(0, [memoryview(b"abc")])
    image.close()
    image.close()
    assert storage.list() == {}
    image = storage.open_image("image", storage.create_image("image", 3))
    image.write(0, [memoryview(b"abc")])
    image.finish()
    image.close()
    assert storage.list() == {"image": 3}


@pytest.mark.parametrize("nbytes", [0, 10**9, 10**12, 5 * 10**12])
def test_a_file_fits_into_the_parts_of_an_upload(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage("s3://bucket/x", {**S3_OPTIONS, "s3_client": "s3fs"})
    assert isinstance(storage, FsspecStorage)
    sizes: list[int] = []

    def look(path: str, mode: str, block_size: int) -> None:
        sizes.append(block_size)

    monkeypatch.setattr(storage._fs, "open", look)
    storage.open_image("image", str(nbytes))
    assert sizes[0] >= 16 << 20
    assert sizes[0] % (1 << 20) == 0
    # Source: S3 takes 10,000 parts.
    assert nbytes / sizes[0] <= 10_000


# Other processes.


def test_another_process_opens_the_same_directory(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "a b" / "größe")
    storage.prepare()
    storage.put("file", b"data")
    told = open_elsewhere(storage)
    assert (told["kind"], told["url"], told["files"]) == ("PosixStorage", storage.url, {"file": 4})


def test_another_process_opens_s3_with_the_same_options() -> None:
    storage = open_storage("s3://bucket/a b/größe", S3_OPTIONS)
    told = open_elsewhere(storage)
    assert (told["kind"], told["url"], told["spec"]) == ("S3Storage", storage.url, storage.spec)


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_another_process_opens_a_stream_with_the_same_options(client: str) -> None:
    options = {**S3_OPTIONS, "s3_client": client, "token": None}
    storage = open_storage("s3://bucket/a b/größe/", options)
    assert isinstance(storage, FsspecStorage)
    told = open_elsewhere(storage)
    assert (told["kind"], told["url"], told["spec"]) == ("FsspecStorage", storage.url, storage.spec)
    assert told["options"] == storage._fs.storage_options
    assert "the-secret" in json.dumps(told["options"])


@pytest.mark.parametrize("url", ["memory://x", "zip://checkpoint::memory://{}"])
def test_another_process_does_not_see_memory(url: str) -> None:
    if "zip" in url:
        import fsspec

        name = f"{uuid.uuid4().hex}.zip"
        with fsspec.open(f"memory://{name}", "wb") as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr("checkpoint/file", b"data")
        url = url.format(name)
    storage = open_storage(url)
    assert reopen_storage(storage.spec).url == storage.url
    refused = open_elsewhere(storage)["refused"]
    assert "--dist-ckpt-workers 1" in refused
    assert str(os.getpid()) in refused


# Storages of one's own.


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module with factories, which can be imported here."""
    name = f"own_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(
        "from distckpt.storage.posix import PosixStorage\n"
        "CALLS = []\n"
        "class Own(PosixStorage):\n"
        "    pass\n"
        "class OwnParts(PosixStorage):\n"
        "    def part_bytes(self, file_bytes):\n"
        "        return 8 << 20\n"
        "def parts(url, options):\n"
        "    return OwnParts(options['root'])\n"
        "def factory(url, options):\n"
        "    CALLS.append((url, options))\n"
        "    return Own(options['root'])\n"
        "def no_storage(url, options):\n"
        "    return 7\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def test_a_registered_scheme_is_opened_by_its_factory(own_module: str, tmp_path: Path) -> None:
    register_storage("my-own+1.0", f"{own_module}:factory")
    options = {"root": str(tmp_path / "x"), "some": [1, {"a": None}]}
    storage = open_storage("my-own+1.0://a b/größe", options)
    assert type(storage).__name__ == "Own"
    assert [("my-own+1.0://a b/größe", options)] == sys.modules[own_module].CALLS
    told = open_elsewhere(storage, tmp_path)
    assert (told["kind"], told["spec"]) == ("Own", storage.spec)
    assert json.loads(told["spec"]["options"]) == options


def test_a_registered_scheme_goes_before_others(own_module: str, tmp_path: Path) -> None:
    register_storage("s3", f"{own_module}:factory")
    register_storage("memory", f"{own_module}:factory")
    for url in ("s3://bucket/x", "memory://x"):
        assert type(open_storage(url, {"root": str(tmp_path)})).__name__ == "Own"


class Reversing(PosixStorage):
    """Has a `read` of its own, and inherits `fill`."""

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray | None:
        data = super().read(name, offset, nbytes)
        return None if data is None else data[::-1]


class FillingItself(Reversing):
    def fill(self, name: str, offset: int, target: memoryview) -> int | None:
        target[:3] = b"own"
        return 3


class Wrapping:
    """Passes on whatever it is asked for, but for `read`."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray | None:
        return self._inner.read(name, offset, nbytes)


@pytest.mark.parametrize("timeout_s", [None, 5.0])
@pytest.mark.parametrize(
    ("kind", "expected", "fills"),
    [(PosixStorage, b"abc", True), (Reversing, b"cba", False), (FillingItself, b"own", True)],
)
def test_a_read_of_its_own_is_not_passed_by(
    tmp_path: Path, kind: type[PosixStorage], expected: bytes, fills: bool, timeout_s: float | None
) -> None:
    own = kind(str(tmp_path))
    own.put("file", b"abc")
    for storage, can in ((own, fills), (cast("Storage", Wrapping(Reversing(str(tmp_path)))), False)):
        asked = storage if timeout_s is None else Bounded(storage, timeout_s)
        assert can_fill(asked) is can
        memory = bytearray(5)
        assert fill(asked, "file", 0, memoryview(memory)) == 3
        assert memory[:3] == (expected if storage is own else b"cba")


def test_a_read_that_returns_more_than_was_asked_for_is_refused(tmp_path: Path) -> None:
    class Generous(PosixStorage):
        def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray | None:
            return super().read(name)

    storage = Generous(str(tmp_path))
    storage.put("file", b"0123456789")
    with pytest.raises(WriteError, match="another range") as caught:
        fill(storage, "file", 2, memoryview(bytearray(3)))
    assert (caught.value.path, caught.value.offset) == (f"{storage.url}/file", 2)


@pytest.mark.parametrize("scheme", ["", "S3", "1x", "a b", "a://", "größe", "-x"])
def test_what_is_no_scheme_is_refused(scheme: str) -> None:
    with pytest.raises(ConfigError, match="not the scheme of a URL"):
        register_storage(scheme, "module:factory")


@pytest.mark.parametrize(
    "factory", ["", "module", "module:", ":factory", "a b:c", "a..b:c", "a:b.c", "a:b:c"]
)
def test_what_is_no_factory_is_refused(factory: str) -> None:
    with pytest.raises(ConfigError, match="not the name of a factory"):
        register_storage("mine", factory)


@pytest.mark.parametrize("factory", ["not_there_at_all:factory", "json:not_there"])
def test_a_factory_that_is_not_there_is_refused_when_it_is_used(factory: str) -> None:
    register_storage("mine", factory)
    with pytest.raises(ConfigError, match="registered for mine:// cannot be had"):
        open_storage("mine://x")


def test_what_is_no_storage_is_refused(own_module: str, tmp_path: Path) -> None:
    register_storage("mine", f"{own_module}:no_storage")
    with pytest.raises(ConfigError, match="returned int, which is no Storage"):
        open_storage("mine://x")
    register_storage("mine", f"{own_module}:factory")
    with pytest.raises(ConfigError, match="cannot be handed to worker processes"):
        open_storage("mine://x", {"root": str(tmp_path), "some": object()})


# Settings.


@pytest.mark.parametrize("timeout_s", [None, 10.0])
def test_settings_go_with_the_spec(tmp_path: Path, timeout_s: float | None) -> None:
    plain = open_storage(tmp_path, timeout_s=timeout_s)
    assert plain.spec == {"kind": "posix", "root": str(tmp_path)}
    # What takes any number of bytes needs not be told of buckets.
    assert open_storage(tmp_path, bucket_bytes=8 << 20, timeout_s=timeout_s).spec == plain.spec
    cached = open_storage(tmp_path, direct_io=False, timeout_s=timeout_s)
    assert cached.spec == {**plain.spec, "direct_io": "off"}
    for storage, takes_direct_io in ((plain, True), (cached, False)):
        again = reopen_storage(json.loads(json.dumps(storage.spec)))
        for name, each in (("a", storage), ("b", again)):
            each.create_image(name, 0)
            image = each.open_image(name, "")
            has_direct_fd = image._direct_fd >= 0  # type: ignore[attr-defined]
            image.close()
            each.delete(name)
            assert has_direct_fd <= takes_direct_io
    s3 = open_storage("s3://bucket/x", S3_OPTIONS, bucket_bytes=64 << 20, timeout_s=timeout_s)
    assert s3.part_bytes(1) == reopen_storage(s3.spec).part_bytes(1) == 64 << 20
    assert "part_bytes" not in open_storage("s3://bucket/x", S3_OPTIONS).spec


def test_settings_that_a_storage_cannot_honour_are_refused(own_module: str, tmp_path: Path) -> None:
    register_storage("mine", f"{own_module}:factory")
    register_storage("parts", f"{own_module}:parts")
    options = {"root": str(tmp_path)}
    for url, given in (("s3://bucket/x", S3_OPTIONS), ("memory://x", {}), ("mine://x", options)):
        with pytest.raises(ConfigError, match=r"ckpt_direct_io: .*is not written through the page cache"):
            open_storage(url, given, direct_io=False)
    with pytest.raises(ConfigError, match=r"ckpt_bucket_bytes: .* chooses the size of its parts itself"):
        open_storage("parts://x", options, bucket_bytes=8 << 20)
    with pytest.raises(
        ConfigError, match="at least 5 MiB on S3, got 4MiB for s3://bucket/x: 8MiB is the least"
    ):
        open_storage("s3://bucket/x", S3_OPTIONS, bucket_bytes=4 << 20)
    for url, given in (("memory://x", {}), ("mine://x", options)):
        assert open_storage(url, given, bucket_bytes=8 << 20).part_bytes(0) == 0


@pytest.mark.parametrize("path", [b"/tmp/x", None, 5, ["/tmp"]])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(ConfigError, match="expected a path or a URL"):
        open_storage(path)


@pytest.mark.parametrize("url", ["s3:/bucket/x", "gs:/bucket", "file:/tmp/x", "file://localhost/x", "S3:/b"])
def test_a_url_without_a_slash_is_no_local_path(url: str) -> None:
    with pytest.raises(ConfigError, match="://"):
        open_storage(url)


def test_a_way_through_a_link_and_back_is_the_same_for_every_kind_of_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real/deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/deep")
    monkeypatch.chdir(tmp_path)
    paths: list[str | Path] = [
        f"{tmp_path}/link/../run",
        Path(f"{tmp_path}/link/../run"),
        "link/../run",
        Path("link/../run"),
    ]
    assert {os.path.realpath(open_storage(path).url) for path in paths} == {str(tmp_path / "real/run")}

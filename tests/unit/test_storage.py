"""What every storage promises, and local disk in particular."""

from __future__ import annotations

import errno
import json
import mmap
import os
import pickle
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distckpt.errors import ConfigError, WriteError
from distckpt.storage import Storage, open_storage, reopen_storage
from distckpt.storage.posix import PosixStorage


def views(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def read(storage: Storage, name: str, offset: int = 0, nbytes: int | None = None) -> bytes | None:
    data = storage.read(name, offset, nbytes)
    return None if data is None else bytes(data)


class StorageContract(ABC):
    """What the rooms above a storage rely on; each storage subclasses this with its own way to its bytes."""

    @pytest.fixture
    @abstractmethod
    def storage(self, tmp_path: Path) -> Storage:
        """Open a checkpoint that does not exist yet."""

    @abstractmethod
    def peek(self, storage: Storage, name: str) -> bytes | None:
        """Return the bytes of a file without using the storage; None if it is absent."""

    @abstractmethod
    def poke(self, storage: Storage, name: str, data: bytes) -> None:
        """Make a file without using the storage."""

    def write(self, storage: Storage, name: str, data: bytes) -> None:
        image = storage.create_image([name])
        image.write(0, views(data))
        image.finish(len(data))

    def test_it_can_be_opened_anew_from_plain_values(self, storage: Storage) -> None:
        storage.prepare()
        self.write(storage, "image", b"image")
        again = reopen_storage(json.loads(json.dumps(storage.spec)))
        assert again.url == storage.url
        assert read(again, "image") == b"image"
        again.put("file", b"file")
        assert read(storage, "file") == b"file"

    def test_prepare_may_be_called_by_many_and_again(self, storage: Storage) -> None:
        failures: list[WriteError] = []

        def prepare() -> None:
            try:
                reopen_storage(storage.spec).prepare()
            except WriteError as error:
                failures.append(error)

        threads = [threading.Thread(target=prepare) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        storage.prepare()
        assert failures == []
        assert storage.list() == {}

    def test_an_image_holds_what_was_written_wherever(self, storage: Storage) -> None:
        storage.prepare()
        image = storage.create_image(["image"])
        image.write(0, views(b"ab", b"", b"cde"))
        image.write(5, views(b"fg"))
        image.finish(7)
        assert self.peek(storage, "image") == b"abcdefg"
        assert storage.list() == {"image": 7}

    def test_an_image_takes_any_number_of_buffers(self, storage: Storage) -> None:
        storage.prepare()
        parts = [bytes([number % 251]) * (number % 7) for number in range(3000)]
        image = storage.create_image(["image"])
        image.write(0, views(*parts))
        image.finish(len(b"".join(parts)))
        assert self.peek(storage, "image") == b"".join(parts)

    def test_an_empty_image_is_a_file(self, storage: Storage) -> None:
        storage.prepare()
        storage.create_image(["image"]).finish(0)
        assert self.peek(storage, "image") == b""
        assert read(storage, "image") == b""

    def test_an_image_takes_the_first_name_that_is_free(self, storage: Storage) -> None:
        storage.prepare()
        self.poke(storage, "first", b"old")
        image = storage.create_image(["first", "second", "third"])
        assert image.name == "second"
        image.write(0, views(b"new"))
        image.finish(3)
        assert self.peek(storage, "first") == b"old"
        assert self.peek(storage, "second") == b"new"

    def test_an_image_never_replaces_a_file(self, storage: Storage) -> None:
        storage.prepare()
        self.poke(storage, "image", b"old")
        with pytest.raises(WriteError) as caught:
            storage.create_image(["image"])
        assert caught.value.errno == errno.EEXIST
        assert self.peek(storage, "image") == b"old"

    @pytest.mark.parametrize("nbytes", [0, 2, 4])
    def test_an_image_of_another_size_is_an_error(self, storage: Storage, nbytes: int) -> None:
        storage.prepare()
        image = storage.create_image(["image"])
        image.write(0, views(b"abc"))
        with pytest.raises(WriteError, match=f"holds 3 bytes after writing {nbytes}"):
            image.finish(nbytes)
        image.abort()
        assert storage.list() == {}

    def test_an_image_that_is_given_up_is_gone(self, storage: Storage) -> None:
        storage.prepare()
        unfinished, finished = storage.create_image(["unfinished"]), storage.create_image(["finished"])
        unfinished.write(0, views(b"abc"))
        finished.write(0, views(b"abc"))
        finished.finish(3)
        for image in (unfinished, finished, unfinished, finished):
            image.abort()
        assert storage.list() == {}
        assert self.peek(storage, "unfinished") is None
        assert self.peek(storage, "finished") is None

    def test_put_makes_and_replaces(self, storage: Storage) -> None:
        storage.prepare()
        for data in (b"first", b"", b"the second", b"3" * 100_000):
            storage.put("file", data)
            assert self.peek(storage, "file") == data
        assert storage.list() == {"file": 100_000}

    def test_put_makes_directories(self, storage: Storage) -> None:
        storage.prepare()
        storage.put("a/b/file", b"deep")
        assert self.peek(storage, "a/b/file") == b"deep"
        assert storage.list("a/b/") == {"file": 4}
        assert storage.list("a") == {"b/": 0}

    def test_put_shows_the_old_or_the_new(self, storage: Storage) -> None:
        storage.prepare()
        storage.put("file", b"\x00" * 200_000)
        stop = threading.Event()
        seen: set[bytes] = set()

        def look() -> None:
            reader = reopen_storage(storage.spec)
            while not stop.is_set():
                data = reader.read("file")
                assert data is not None
                assert len(data) == 200_000
                seen.update({bytes(data[:1]), bytes(data[-1:])} if data[:1] == data[-1:] else {b"mixed"})

        thread = threading.Thread(target=look)
        thread.start()
        for number in range(1, 30):
            storage.put("file", bytes([number]) * 200_000)
        stop.set()
        thread.join(10)
        assert b"mixed" not in seen
        assert seen

    @given(st.integers(0, 12), st.one_of(st.none(), st.integers(0, 12)))
    def test_read_returns_what_there_is(self, offset: int, nbytes: int | None) -> None:
        data = b"0123456789"
        storage = self.opened
        end = None if nbytes is None else offset + nbytes
        assert read(storage, "file", offset, nbytes) == data[offset:end]

    opened: Storage

    @pytest.fixture(autouse=True)
    def file_to_read(self, request: pytest.FixtureRequest, storage: Storage) -> None:
        # Not a fixture's value: hypothesis refuses those that are made once for all its examples.
        if request.node.originalname == "test_read_returns_what_there_is":
            storage.prepare()
            self.poke(storage, "file", b"0123456789")
            type(self).opened = storage

    def test_what_is_absent_reads_as_none_and_lists_as_nothing(self, storage: Storage) -> None:
        assert storage.read("file") is None
        assert storage.list() == {}
        storage.prepare()
        assert storage.read("file") is None
        assert storage.read("folder/file") is None
        assert storage.list("folder/") == {}
        self.poke(storage, "file", b"")
        assert storage.read("file/below") is None

    def test_list_names_files_with_sizes_and_directories(self, storage: Storage) -> None:
        storage.prepare()
        for name in (".hidden", "file", "folder/below", "folder/deeper/still"):
            self.poke(storage, name, b"12345")
        assert storage.list() == {".hidden": 5, "file": 5, "folder/": 0}
        assert storage.list("folder") == storage.list("folder/") == {"below": 5, "deeper/": 0}

    def test_delete_removes_files_and_empty_directories(self, storage: Storage) -> None:
        storage.prepare()
        self.poke(storage, "folder/file", b"")
        with pytest.raises(WriteError):
            storage.delete("folder/")
        storage.delete("folder/file")
        storage.delete("folder/file")
        storage.delete("folder/")
        storage.delete("folder/")
        assert storage.list() == {}

    def test_errors_say_where_and_can_be_pickled(self, storage: Storage) -> None:
        storage.prepare()
        self.poke(storage, "file", b"")
        with pytest.raises(WriteError) as caught:
            storage.put("file/below", b"")
        error = pickle.loads(pickle.dumps(caught.value))
        assert error.errno is not None
        assert errno.errorcode[error.errno] in str(error)
        assert error.path is not None
        assert "file" in error.path
        assert error.path in str(error)


class TestPosixStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return open_storage(tmp_path / "some" / "checkpoint")

    def peek(self, storage: Storage, name: str) -> bytes | None:
        path = Path(storage.url, name)
        return path.read_bytes() if path.exists() else None

    def poke(self, storage: Storage, name: str, data: bytes) -> None:
        path = Path(storage.url, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@pytest.fixture
def posix(tmp_path: Path) -> PosixStorage:
    return PosixStorage(str(tmp_path))


def open_files(folder: Path) -> list[str]:
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return [os.readlink(link) for link in links if os.path.lexists(link) and str(folder) in os.readlink(link)]


@pytest.mark.parametrize("shift", [0, 1, 4096])
@pytest.mark.parametrize("nbytes", [1 << 20, (1 << 20) + 1, (5 << 20) + 4095])
@pytest.mark.parametrize("offset", [0, 64, 4096])
def test_large_buffers_are_written_whatever_their_alignment(
    posix: PosixStorage, tmp_path: Path, shift: int, nbytes: int, offset: int
) -> None:
    with mmap.mmap(-1, nbytes + shift + 4096) as memory:
        memory[:] = os.urandom(4096) * (len(memory) // 4096) + bytes(len(memory) % 4096)
        with memoryview(memory) as whole, whole[shift : shift + nbytes] as part:
            image = posix.create_image(["image"])
            if offset:
                image.write(0, views(bytes(offset)))
            image.write(offset, [part])
            image.finish(offset + nbytes)
            assert (tmp_path / "image").read_bytes() == bytes(offset) + bytes(part)
    assert not open_files(tmp_path)


def test_a_file_system_without_direct_writes_is_written_too() -> None:
    # tmpfs takes them from Linux 6.6 on: before that, this goes through the page cache.
    name = f"distckpt-direct-{os.getpid()}"
    storage = PosixStorage("/dev/shm")
    image = storage.create_image([name])
    try:
        with mmap.mmap(-1, 2 << 20) as memory, memoryview(memory) as whole:
            image.write(0, [whole])
        image.finish(2 << 20)
        assert Path("/dev/shm", name).stat().st_size == 2 << 20
    finally:
        image.abort()


def test_nothing_stays_open_after_a_failure(posix: PosixStorage, tmp_path: Path) -> None:
    image = posix.create_image(["image"])
    with pytest.raises(WriteError):
        image.finish(5)
    image.abort()
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for doomed in ("folder", "file/below"):
        with pytest.raises(WriteError):
            posix.put(doomed, b"data")
    assert not open_files(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_a_directory_in_the_place_of_a_file_is_an_error(posix: PosixStorage, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    calls: list[Callable[[], object]] = [
        lambda: posix.read("folder"),
        lambda: posix.delete("folder"),
        lambda: posix.put("folder", b""),
    ]
    for call in calls:
        with pytest.raises(WriteError) as caught:
            call()
        assert caught.value.errno == errno.EISDIR
        assert caught.value.path == str(tmp_path / "folder")


def test_links_are_not_followed_when_listing(posix: PosixStorage, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_bytes(b"12")
    assert posix.list() == {"file": 2}


@pytest.mark.parametrize("kind", [str, Path, lambda path: f"file://{path}"])
def test_local_paths_and_urls_are_the_same(tmp_path: Path, kind: type[str]) -> None:
    storage = open_storage(kind(tmp_path))
    assert storage.url == str(tmp_path)
    assert isinstance(storage, PosixStorage)


@pytest.mark.parametrize("url", ["", "memory://checkpoint", "nothing-of-this-name://x"])
def test_other_storages_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        open_storage(url)

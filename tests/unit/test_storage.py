"""What local disk promises beyond the contract of every storage (test_storage_contract.py)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import pickle
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distckpt.errors import WriteError
from distckpt.storage import ImageFile, Storage, open_storage, reopen_storage
from distckpt.storage.posix import PosixImage, PosixStorage


def views(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def read(storage: Storage, name: str, offset: int = 0, nbytes: int | None = None) -> bytes | None:
    data = storage.read(name, offset, nbytes)
    return None if data is None else bytes(data)


class TestPosixStorage:
    """What local disk has beyond the contract, seen without the storage."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return open_storage(tmp_path / "some" / "checkpoint")

    def peek(self, storage: Storage, name: str) -> bytes | None:
        """Return the bytes of a file without using the storage; None if it is absent."""
        path = Path(storage.url, name)
        return path.read_bytes() if path.exists() else None

    def poke(self, storage: Storage, name: str, data: bytes) -> None:
        """Make a file without using the storage."""
        path = Path(storage.url, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def write(self, storage: Storage, name: str, data: bytes) -> None:
        image = self.create(storage, name)
        image.write(0, views(data))
        image.finish()

    def create(self, storage: Storage, name: str) -> ImageFile:
        storage.create_image(name, 0)
        return storage.open_image(name, "")

    def test_bytes_lie_where_the_url_says(self, storage: Storage) -> None:
        storage.prepare()
        self.write(storage, "image", b"image")
        storage.put("a/b/file", b"deep")
        assert self.peek(storage, "image") == b"image"
        assert self.peek(storage, "a/b/file") == b"deep"
        storage.put("a/b/file", b"")
        assert self.peek(storage, "a/b/file") == b""

    def test_an_image_holds_what_was_written_wherever(self, storage: Storage) -> None:
        storage.prepare()
        image = self.create(storage, "image")
        image.write(0, views(b"ab", b"", b"cde"))
        image.write(5, views(b"fg"))
        image.finish()
        assert self.peek(storage, "image") == b"abcdefg"
        assert storage.list() == {"image": 7}

    def test_an_image_takes_any_number_of_buffers(self, storage: Storage) -> None:
        storage.prepare()
        parts = [bytes([number % 251]) * (number % 7) for number in range(3000)]
        image = self.create(storage, "image")
        image.write(0, views(*parts))
        image.finish()
        assert self.peek(storage, "image") == b"".join(parts)

    def test_an_empty_image_is_a_file(self, storage: Storage) -> None:
        storage.prepare()
        self.create(storage, "image").finish()
        assert self.peek(storage, "image") == b""
        assert read(storage, "image") == b""

    def test_an_image_never_replaces_a_file(self, storage: Storage) -> None:
        storage.prepare()
        self.poke(storage, "image", b"old")
        with pytest.raises(WriteError) as caught:
            storage.create_image("image", 0)
        assert caught.value.errno == errno.EEXIST
        assert self.peek(storage, "image") == b"old"

    def test_nothing_is_replaced_if_the_last_check_fails(self, storage: Storage) -> None:
        storage.prepare()
        storage.put("file", b"old")
        checked: list[bytes | None] = []

        def refuse() -> None:
            checked.append(self.peek(storage, "file"))
            raise RuntimeError("refused")

        with pytest.raises(RuntimeError, match="refused"):
            storage.put("file", b"new", refuse)
        assert checked == [b"old"], "called once, before"
        assert os.listdir(storage.url) == ["file"], "the new file is gone"

    @pytest.mark.parametrize("name", ["file", "folder/file"])
    def test_what_is_revoked_leaves_no_partial_file(self, storage: Storage, name: str) -> None:
        storage.prepare()
        storage.put(name, b"old")
        other = reopen_storage(storage.spec)
        with pytest.raises(WriteError):
            storage.put(name, b"new", lambda: other.revoke(name))
        assert self.peek(storage, name) == b"old"
        storage.revoke("absent")
        left = [path.name for path in Path(storage.url).rglob("*") if path.is_file()]
        assert left == ["file"]

    def test_several_lanes_write_stretches_that_share_pages(self, storage: Storage) -> None:
        storage.prepare()
        storage.create_image("image", 0)
        images = [reopen_storage(storage.spec).open_image("image", "") for _ in range(3)]
        data = os.urandom(10_000)
        # The last lane first.
        for lane in (2, 1, 0):
            for offset in range(lane * 100, len(data), 300):
                images[lane].write(offset, views(data[offset : offset + 100]))
        for image in images:
            image.finish()
        assert self.peek(storage, "image") == data

    def test_an_image_that_was_not_created_cannot_be_opened(self, storage: Storage) -> None:
        storage.prepare()
        with pytest.raises(WriteError) as caught:
            storage.open_image("image", "")
        assert caught.value.errno == errno.ENOENT
        assert storage.list() == {}

    @pytest.mark.parametrize("nbytes", [0, 2, 4])
    def test_an_image_of_another_size_is_an_error(self, storage: Storage, nbytes: int) -> None:
        storage.prepare()
        self.write(storage, "image", b"abc")
        storage.complete_image("image", "", 3, [])
        with pytest.raises(WriteError, match=f"holds 3 bytes after writing {nbytes}") as caught:
            storage.complete_image("image", "", nbytes, [])
        assert caught.value.path is not None
        assert "image" in caught.value.path

    def test_an_image_that_is_gone_has_no_size(self, storage: Storage) -> None:
        storage.prepare()
        with pytest.raises(WriteError) as caught:
            storage.complete_image("image", "", 0, [])
        assert caught.value.errno == errno.ENOENT

    def test_an_image_that_is_given_up_stays_until_it_is_deleted(self, storage: Storage) -> None:
        storage.prepare()
        unfinished, finished = self.create(storage, "unfinished"), self.create(storage, "finished")
        unfinished.write(0, views(b"abc"))
        finished.write(0, views(b"abc"))
        finished.finish()
        for image in (unfinished, finished, unfinished, finished):
            image.close()
        assert storage.list() == {"unfinished": 3, "finished": 3}
        storage.delete("unfinished")
        storage.delete("finished")
        assert storage.list() == {}

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

    def test_list_names_what_others_have_made(self, storage: Storage) -> None:
        storage.prepare()
        for name in (".hidden", "file", "folder/below", "folder/deeper/still"):
            self.poke(storage, name, b"12345")
        assert storage.list() == {".hidden": 5, "file": 5, "folder/": 0}
        assert storage.list("folder") == storage.list("folder/") == {"below": 5, "deeper/": 0}

    def test_directories_go_when_they_are_deleted(self, storage: Storage) -> None:
        storage.prepare()
        self.poke(storage, "folder/file", b"")
        with pytest.raises(WriteError) as caught:
            storage.delete("folder/")
        assert caught.value.errno in {errno.ENOTEMPTY, errno.EEXIST}
        storage.delete("folder/file")
        storage.delete("folder/")
        assert storage.list() == {}
        assert os.listdir(storage.url) == []
        assert storage.remove_directory()
        assert not os.path.exists(storage.url)

    def test_a_path_through_a_file_is_an_error(self, storage: Storage) -> None:
        storage.prepare()
        self.poke(storage, "file", b"")
        assert storage.read("file/below") is None
        with pytest.raises(WriteError) as caught:
            storage.put("file/below", b"")
        error = pickle.loads(pickle.dumps(caught.value))
        assert error.errno is not None
        assert errno.errorcode[error.errno] in str(error)
        assert error.path is not None
        assert "file" in error.path
        assert error.path in str(error)


@pytest.fixture
def posix(tmp_path: Path) -> PosixStorage:
    return PosixStorage(str(tmp_path))


def create(posix: PosixStorage, name: str) -> PosixImage:
    posix.create_image(name, 0)
    return posix.open_image(name, "")


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
            image = create(posix, "image")
            if offset:
                image.write(0, views(bytes(offset)))
            image.write(offset, [part])
            image.finish()
            assert (tmp_path / "image").read_bytes() == bytes(offset) + bytes(part)
    assert not open_files(tmp_path)


PAGE = 4096
MIB = 1 << 20
sizes_of_buffers = st.lists(
    st.one_of(st.integers(1, 300).map(lambda pages: pages * PAGE), st.integers(0, 3 * PAGE)), max_size=12
)


@given(sizes_of_buffers, st.sampled_from([0, 1, PAGE]), st.sampled_from([0, PAGE]))
def test_buffers_in_a_row_are_written_in_order(sizes: list[int], shift: int, offset: int) -> None:
    with tempfile.TemporaryDirectory() as folder, mmap.mmap(-1, sum(sizes) + shift + PAGE) as memory:
        memory[:] = random.Random(1).randbytes(len(memory))
        image = create(PosixStorage(folder), "image")
        with contextlib.ExitStack() as opened:
            whole = opened.enter_context(memoryview(memory))
            buffers, start = [], shift
            for size in sizes:
                buffers.append(opened.enter_context(whole[start : start + size]))
                start += size
            image.write(offset, buffers)
            image.finish()
            assert Path(folder, "image").read_bytes()[offset:] == whole[shift:start]


class Writes:
    """Spy of `os.pwritev`: bytes that were written past the page cache, and through it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refusal: int = 0) -> None:
        self.direct = self.cached = self.refused = 0
        self.refusal = refusal
        self.pwritev = os.pwritev
        monkeypatch.setattr(os, "pwritev", self)

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        is_direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        if is_direct and self.refusal:
            self.refused += 1
            raise OSError(self.refusal, os.strerror(self.refusal))
        written = self.pwritev(fd, buffers, offset)
        if is_direct:
            self.direct += written
        else:
            self.cached += written
        return written


def takes_direct_writes(folder: Path) -> bool:
    with mmap.mmap(-1, PAGE) as page:
        try:
            fd = os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
            try:
                return os.pwrite(fd, page, 0) == PAGE
            finally:
                os.close(fd)
        except OSError:
            return False


def write_mapped(posix: PosixStorage, *sizes: int) -> bytes:
    """Write buffers that follow each other in memory, from the start of a page on."""
    with contextlib.ExitStack() as opened:
        memory = opened.enter_context(mmap.mmap(-1, sum(sizes)))
        memory[:] = random.Random(2).randbytes(len(memory))
        whole = opened.enter_context(memoryview(memory))
        ends = list(itertools.accumulate(sizes, initial=0))
        buffers = [opened.enter_context(whole[low:high]) for low, high in itertools.pairwise(ends)]
        image = create(posix, "image")
        image.write(0, buffers)
        image.finish()
        return bytes(whole)


def test_whole_pages_go_past_the_page_cache_and_the_rest_through_it(
    posix: PosixStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not takes_direct_writes(tmp_path):
        pytest.skip("the file system of the test refuses O_DIRECT")
    writes = Writes(monkeypatch)
    data = write_mapped(posix, MIB, PAGE, MIB + 5, PAGE)
    assert (tmp_path / "image").read_bytes() == data
    assert (writes.direct, writes.cached) == (2 * MIB + PAGE, 5 + PAGE)


def test_more_buffers_than_one_call_takes_go_past_the_page_cache(
    posix: PosixStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not takes_direct_writes(tmp_path):
        pytest.skip("the file system of the test refuses O_DIRECT")
    writes = Writes(monkeypatch)
    data = write_mapped(posix, *[PAGE] * 1500)
    assert (tmp_path / "image").read_bytes() == data
    assert (writes.direct, writes.cached) == (1500 * PAGE, 0)


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_direct_writes_is_written_through_the_cache(
    posix: PosixStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    writes = Writes(monkeypatch, refusal)
    data = write_mapped(posix, 2 * MIB, PAGE + 5)
    assert (tmp_path / "image").read_bytes() == data
    assert (writes.direct, writes.cached) == (0, 2 * MIB + PAGE + 5)
    assert writes.refused == 1


def test_a_file_system_that_refuses_to_open_for_direct_writes_is_written_through_the_cache(
    posix: PosixStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    writes = Writes(monkeypatch)
    data = write_mapped(posix, 2 * MIB + 5)
    assert (tmp_path / "image").read_bytes() == data
    assert (writes.direct, writes.cached) == (0, 2 * MIB + 5)


def test_a_failed_direct_write_is_an_error(posix: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    Writes(monkeypatch, errno.EIO)
    image = create(posix, "image")
    if image._direct_fd < 0:
        pytest.skip("the file system of the test refuses O_DIRECT")
    with mmap.mmap(-1, 2 * MIB) as memory, memoryview(memory) as whole, pytest.raises(WriteError) as caught:
        image.write(PAGE, [whole])
    image.close()
    assert (caught.value.errno, caught.value.offset) == (errno.EIO, PAGE)


def test_an_error_holds_no_view_of_the_memory(posix: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    image = create(posix, "image")
    pwritev = os.pwritev

    def fail_later(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset > 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with buffers[0][:PAGE] as page:
            return pwritev(fd, [page], offset)

    monkeypatch.setattr(os, "pwritev", fail_later)
    memory = mmap.mmap(-1, 2 * MIB)
    with memoryview(memory) as whole, pytest.raises(WriteError) as caught:
        image.write(0, [whole])
    image.close()
    assert (caught.value.errno, caught.value.offset) == (errno.ENOSPC, PAGE)
    memory.close()


def test_a_file_system_without_direct_writes_is_written_too() -> None:
    # tmpfs takes them from Linux 6.6 on: before that, this goes through the page cache.
    name = f"distckpt-direct-{os.getpid()}"
    storage = PosixStorage("/dev/shm")
    image = create(storage, name)
    try:
        with mmap.mmap(-1, 2 << 20) as memory, memoryview(memory) as whole:
            image.write(0, [whole])
        image.finish()
        assert Path("/dev/shm", name).stat().st_size == 2 << 20
    finally:
        image.close()
        storage.delete(name)


def test_nothing_stays_open_after_a_failure(
    posix: PosixStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    image = create(posix, "image")
    with monkeypatch.context() as failing:
        failing.setattr(os, "fsync", fail)
        with pytest.raises(WriteError) as caught:
            image.finish()
    assert (caught.value.errno, caught.value.path) == (errno.EIO, str(tmp_path / "image"))
    assert not open_files(tmp_path)
    image.close()
    posix.delete("image")
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

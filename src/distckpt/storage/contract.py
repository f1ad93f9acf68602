"""What every storage promises, as tests: subclass `StorageContract` to check one of your own.

    import pytest
    pytest.register_assert_rewrite("distckpt.storage.contract")
    from distckpt import StorageContract

    class TestMyStorage(StorageContract):
        @pytest.fixture
        def storage(self, tmp_path):
            return open_storage(f"mine://{tmp_path}/checkpoint")

Needs pytest, which distckpt itself does not. Torch-free.
"""

# ruff: noqa: D102 - the name of a test says what it checks

from __future__ import annotations

import builtins
import contextlib
import copy
import errno
import itertools
import json
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from crc32c import crc32c

from distckpt.errors import IntegrityError, WriteError
from distckpt.storage import SHARED_NAME, Storage, fill, reopen_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distckpt.storage import ImageFile, Receipt

__all__ = ["StorageContract"]

_MIB = 1 << 20
_SMALL_BYTES = 100_000
_UNIT_BYTES = 4 * _MIB
_JOIN_S = 30.0
_CLOCK_S = 600.0
"""What `last_change` may be off by."""


def _bytes_of(storage: Storage, name: str, offset: int = 0, nbytes: int | None = None) -> bytes | None:
    data = storage.read(name, offset, nbytes)
    assert data is None or isinstance(data, bytearray)
    if nbytes is not None:
        _check_fill(storage, name, offset, nbytes, data)
    return None if data is None else bytes(data)


def _check_fill(storage: Storage, name: str, offset: int, nbytes: int, data: bytearray | None) -> None:
    """Read the same bytes into memory of our own."""
    memory = bytearray(b"?" * (nbytes + 2))
    with memoryview(memory) as view, view[1:-1] as target:
        found = fill(storage, name, offset, target)
    assert found == (None if data is None else len(data))
    assert data is None or memory[1 : 1 + len(data)] == data
    assert (memory[0], memory[-1]) == (ord("?"), ord("?")), "written where nobody asked for it"


def _parts(storage: Storage, data: bytes) -> list[tuple[int, bytes]]:
    """Cut a file into parts: as its storage wants them, or of odd sizes."""
    nbytes = storage.part_bytes(len(data)) or max(1, len(data) // 7)
    return [(offset, data[offset : offset + nbytes]) for offset in range(0, len(data), nbytes)]


def _write_part(image: ImageFile, offset: int, part: bytes, *, has_checksum: bool) -> None:
    # In several buffers, one of them empty; and the memory is overwritten as soon as the call has returned.
    memory = bytearray(part)
    cut = len(memory) // 3
    with memoryview(memory) as view, view[:cut] as head, view[cut:cut] as none, view[cut:] as tail:
        image.write(offset, [head, none, tail], crc32c(part) if has_checksum else None)
    memory[:] = bytes(len(memory))
    # No view of it is left behind.
    memory.clear()


def _write_lane(storage: Storage, name: str, token: str, parts: Sequence[tuple[int, bytes]]) -> list[Receipt]:
    """Write parts as one lane does: by as many threads as the storage allows, in an object of its own."""
    own = reopen_storage(storage.spec)
    has_checksum = own.part_bytes(sum(len(part) for _, part in parts)) > 0
    image = own.open_image(name, token)
    try:
        with ThreadPoolExecutor(own.in_flight) as threads:
            waiting = [
                threads.submit(_write_part, image, offset, part, has_checksum=has_checksum)
                for offset, part in parts
            ]
            for future in waiting:
                future.result()
        receipts = image.finish()
    finally:
        image.close()
    # They cross processes on their way.
    told: list[Receipt] = json.loads(json.dumps(receipts))
    return told


def _write(storage: Storage, name: str, data: bytes, num_lanes: int = 1) -> tuple[str, list[Receipt]]:
    """Write an image by several lanes at once, as far as the storage has them, up to `complete_image`."""
    token = storage.create_image(name, len(data))
    parts = _parts(storage, data)
    num_lanes = 1 if storage.is_stream else num_lanes
    shares = [parts[lane::num_lanes] for lane in range(num_lanes)]
    if not data:
        shares = [[]]
    with ThreadPoolExecutor(num_lanes) as lanes:
        waiting = [lanes.submit(_write_lane, storage, name, token, share) for share in shares]
        receipts = [receipt for future in waiting for receipt in future.result()]
    return token, receipts


def _save(storage: Storage, name: str, data: bytes, num_lanes: int = 1) -> None:
    token, receipts = _write(storage, name, data, num_lanes)
    storage.complete_image(name, token, len(data), receipts)


def _large(storage: Storage) -> bytes:
    """Return a file of several parts, the last of which is short."""
    nbytes = storage.part_bytes(0) or _MIB
    block = os.urandom(1 << 16)
    return b"".join(
        bytes([number % 251]) + block[1:] for number in range(2 * nbytes // len(block))
    ) + os.urandom(12_345)


def _clear(storage: Storage) -> None:
    """Remove whatever saves have left, as a sweep does."""
    for name, handle in storage.unfinished():
        storage.abort(name, handle)
    for name in storage.list():
        storage.delete(name)


class StorageContract:
    """What the rooms above a storage rely on.

    A subclass has a fixture `storage`: a checkpoint that does not exist yet, elsewhere in each test, and that
    `reopen_storage(storage.spec)` opens again.

    Attributes:
        can_revoke: False for a storage whose `revoke` can do nothing.
        refuses_existing: False for a storage that does not look whether there is a file of an image's name.
        keeps_no_rests: False for a storage that cannot find what a lane that was cut off has left, invisibly.
    """

    can_revoke = True
    refuses_existing = True
    keeps_no_rests = True

    @pytest.fixture
    def storage(self) -> Storage:
        """Open a checkpoint that does not exist yet; to be overridden.

        Raises:
            NotImplementedError: It was not.
        """
        raise NotImplementedError("a subclass of StorageContract has a fixture named storage")

    # What it is.

    def test_it_is_a_storage_that_says_how_it_is_written(self, storage: Storage) -> None:
        assert isinstance(storage, Storage)
        assert storage.url
        assert storage.in_flight >= 1
        for file_bytes in (0, 1, _MIB, 10**9, 10**12):
            nbytes = storage.part_bytes(file_bytes)
            assert nbytes >= 0
            assert nbytes % _UNIT_BYTES == 0
            assert not (nbytes and storage.is_stream), "a stream has no parts"
        if storage.is_stream:
            assert storage.in_flight == 1

    def test_it_can_be_opened_anew_from_plain_values(self, storage: Storage) -> None:
        storage.prepare()
        storage.put("file", b"file")
        assert all(isinstance(value, str) for value in storage.spec.values())
        again = reopen_storage(json.loads(json.dumps(storage.spec)))
        assert (again.url, again.spec) == (storage.url, storage.spec)
        assert (again.in_flight, again.is_stream) == (storage.in_flight, storage.is_stream)
        assert _bytes_of(again, "file") == b"file"
        again.put("file", b"another")
        assert _bytes_of(storage, "file") == b"another"

    def test_prepare_may_be_called_by_many_and_again(self, storage: Storage) -> None:
        with ThreadPoolExecutor(8) as threads:
            for future in [threads.submit(reopen_storage(storage.spec).prepare) for _ in range(8)]:
                future.result()
        storage.prepare()
        assert storage.list() == {}

    # Images.

    def test_an_image_holds_what_one_lane_wrote(self, storage: Storage) -> None:
        storage.prepare()
        data = os.urandom(_SMALL_BYTES)
        _save(storage, "image", data)
        assert _bytes_of(reopen_storage(storage.spec), "image") == data
        assert storage.list() == {"image": len(data)}
        assert storage.unfinished() == []

    @pytest.mark.parametrize("num_lanes", [1, 3])
    def test_an_image_of_many_parts_holds_what_lanes_wrote(self, storage: Storage, num_lanes: int) -> None:
        storage.prepare()
        data = _large(storage)
        _save(storage, "image", data, num_lanes)
        assert storage.list() == {"image": len(data)}
        found = _bytes_of(reopen_storage(storage.spec), "image")
        # Not by ==, whose failure would print all of it.
        assert found is not None
        assert len(found) == len(data)
        differences = (n for n in range(0, len(data), 4096) if data[n : n + 4096] != found[n : n + 4096])
        assert next(differences, None) is None
        assert storage.unfinished() == []

    def test_an_image_takes_any_number_of_buffers(self, storage: Storage) -> None:
        storage.prepare()
        buffers = [bytes([number % 251]) * (number % 7) for number in range(3000)]
        data = b"".join(buffers)
        token = storage.create_image("image", len(data))
        image = storage.open_image("image", token)
        image.write(0, [memoryview(buffer) for buffer in buffers], crc32c(data))
        receipts = image.finish()
        storage.complete_image("image", token, len(data), receipts)
        assert _bytes_of(storage, "image") == data

    def test_an_empty_image_is_a_file(self, storage: Storage) -> None:
        storage.prepare()
        _save(storage, "image", b"")
        assert _bytes_of(storage, "image") == b""
        assert storage.list() == {"image": 0}

    def test_images_are_written_side_by_side(self, storage: Storage) -> None:
        storage.prepare()
        names = ["__0_0.distcp", "__0_1.distcp", "__1_0.distcp"]
        data = {name: os.urandom(1000 + number) for number, name in enumerate(names)}
        tokens = {name: storage.create_image(name, len(data[name])) for name in names}
        images = {name: storage.open_image(name, tokens[name]) for name in names}
        for name, image in images.items():
            image.write(0, [memoryview(data[name])], crc32c(data[name]))
        for name, image in reversed(images.items()):
            storage.complete_image(name, tokens[name], len(data[name]), image.finish())
        assert storage.list() == {name: len(data[name]) for name in names}
        assert {name: _bytes_of(storage, name) for name in names} == data

    def test_an_image_may_lie_in_directories(self, storage: Storage) -> None:
        storage.prepare()
        data = os.urandom(_SMALL_BYTES)
        _save(storage, "model/layers 0/c.0.1", data)
        assert _bytes_of(storage, "model/layers 0/c.0.1") == data
        assert storage.list("model/layers 0/") == {"c.0.1": len(data)}
        token, _ = _write(storage, "model/layers 0/c.0.2", data)
        storage.discard_image("model/layers 0/c.0.2", token)
        storage.put(".metadata", b"done")
        assert storage.list("model/layers 0/") == {"c.0.1": len(data)}

    def test_two_may_write_the_same_image_of_a_shared_name(self, storage: Storage) -> None:
        storage.prepare()
        data = os.urandom(_SMALL_BYTES)
        assert SHARED_NAME.fullmatch("model/c.0")
        first, second = (_write(storage, "model/c.0", data) for _ in range(2))
        for token, receipts in (first, second):
            storage.complete_image("model/c.0", token, len(data), receipts)
        assert _bytes_of(storage, "model/c.0") == data
        assert storage.list("model/") == {"c.0": len(data)}

    def test_an_image_never_replaces_a_file(self, storage: Storage) -> None:
        if not self.refuses_existing:
            pytest.skip("this storage does not look")
        storage.prepare()
        storage.put("image", b"old")
        # When it is begun, or when it would become a file.
        with pytest.raises(WriteError) as caught:
            _save(storage, "image", b"new")
        assert caught.value.errno == errno.EEXIST
        assert _bytes_of(storage, "image") == b"old"

    @pytest.mark.parametrize("expected", [0, _SMALL_BYTES - 1, _SMALL_BYTES + 1])
    def test_an_image_of_another_size_is_refused(self, storage: Storage, expected: int) -> None:
        storage.prepare()
        token, receipts = _write(storage, "image", os.urandom(_SMALL_BYTES))
        with pytest.raises(WriteError) as caught:
            storage.complete_image("image", token, expected, receipts)
        assert caught.value.path is not None
        assert "image" in caught.value.path
        storage.discard_image("image", token)
        assert storage.list() == {}
        assert storage.unfinished() == []

    def test_an_image_with_a_part_missing_is_refused(self, storage: Storage) -> None:
        storage.prepare()
        data = _large(storage)
        token = storage.create_image("image", len(data))
        # The last: a stream cannot leave out another.
        receipts = _write_lane(storage, "image", token, _parts(storage, data)[:-1])
        with pytest.raises(WriteError):
            storage.complete_image("image", token, len(data), receipts)
        storage.discard_image("image", token)
        assert storage.list() == {}
        assert storage.unfinished() == []

    def test_an_image_that_is_gone_is_refused(self, storage: Storage) -> None:
        storage.prepare()
        token, receipts = _write(storage, "image", b"abc")
        storage.discard_image("image", token)
        with pytest.raises(WriteError):
            storage.complete_image("image", token, 3, receipts)
        assert storage.list() == {}

    def test_a_stream_takes_the_next_byte_only(self, storage: Storage) -> None:
        if not storage.is_stream:
            pytest.skip("its images take any part")
        storage.prepare()
        image = storage.open_image("image", storage.create_image("image", 10))
        try:
            image.write(0, [memoryview(b"abc")])
            for offset in (0, 2, 4):
                with pytest.raises(WriteError) as caught:
                    image.write(offset, [memoryview(b"d")])
                assert caught.value.offset == offset
        finally:
            image.close()

    # Giving up.

    @pytest.mark.parametrize("state", ["begun", "open", "written", "finished", "completed"])
    def test_nothing_is_left_of_an_image_that_is_discarded(self, storage: Storage, state: str) -> None:
        if state == "written" and not self.keeps_no_rests:
            pytest.skip("this storage leaves rests that nobody sees")
        storage.prepare()
        data = _large(storage)
        token = storage.create_image("image", len(data))
        image = None if state == "begun" else storage.open_image("image", token)
        if image is not None:
            for offset, part in _parts(storage, data) if state != "open" else ():
                image.write(offset, [memoryview(part)], crc32c(part))
            receipts = image.finish() if state in {"finished", "completed"} else []
            if state == "completed":
                storage.complete_image("image", token, len(data), receipts)
            image.close()
        other = reopen_storage(storage.spec)
        other.discard_image("image", token)
        assert other.list() == {}
        assert other.unfinished() == []
        assert other.read("image") is None
        other.discard_image("image", token)

    def test_what_is_not_finished_does_not_become_whole(self, storage: Storage) -> None:
        storage.prepare()
        storage.put("beside", b"beside")
        data = _large(storage)
        token = storage.create_image("image", len(data))
        image = storage.open_image("image", token)
        offset, part = _parts(storage, data)[0]
        image.write(offset, [memoryview(part)], crc32c(part))
        image.cancel()
        for _ in range(3):
            image.close()
        image.cancel()
        with pytest.raises(WriteError):
            storage.complete_image("image", token, len(data), [])
        storage.discard_image("image", token)
        assert storage.list() == {"beside": 6}

    def test_whoever_comes_later_can_clear_up(self, storage: Storage) -> None:
        storage.prepare()
        data = _large(storage)
        for name in ("one", "two"):
            token = storage.create_image(name, len(data))
            image = storage.open_image(name, token)
            offset, part = _parts(storage, data)[0]
            image.write(offset, [memoryview(part)], crc32c(part))
            image.close()
        _save(storage, "three", b"abc")
        other = reopen_storage(storage.spec)
        found = other.unfinished()
        _clear(other)
        assert other.list() == {}
        assert other.unfinished() == []
        for name, handle in found:
            other.abort(name, handle)
        assert other.remove_directory()

    # Small files.

    def test_put_makes_and_replaces(self, storage: Storage) -> None:
        storage.prepare()
        for data in (b"first", b"", b"the second", os.urandom(_SMALL_BYTES)):
            storage.put("file", data)
            assert _bytes_of(reopen_storage(storage.spec), "file") == data
        assert storage.list() == {"file": _SMALL_BYTES}

    def test_put_makes_directories(self, storage: Storage) -> None:
        storage.prepare()
        storage.put("a/b/file", b"deep")
        assert _bytes_of(storage, "a/b/file") == b"deep"
        assert storage.list("a/b/") == storage.list("a/b") == {"file": 4}
        assert storage.list("a") == {"b/": 0}
        assert storage.list() == {"a/": 0}

    def test_put_shows_the_old_or_the_new(self, storage: Storage) -> None:
        storage.prepare()
        storage.put("file", bytes(_SMALL_BYTES))
        stop = threading.Event()
        seen: set[bytes] = set()

        def look() -> None:
            reader = reopen_storage(storage.spec)
            while not stop.is_set():
                data = reader.read("file")
                assert data is not None
                assert len(data) == _SMALL_BYTES
                seen.add(bytes(data[:1]) if data[:1] == data[-1:] else b"mixed")

        with ThreadPoolExecutor(1) as threads:
            looking = threads.submit(look)
            for number in range(1, 20):
                storage.put("file", bytes([number]) * _SMALL_BYTES)
            stop.set()
            looking.result(_JOIN_S)
        assert b"mixed" not in seen
        assert seen

    def test_nothing_is_replaced_if_the_last_check_fails(self, storage: Storage) -> None:
        storage.prepare()
        storage.put("file", b"old")
        checked: builtins.list[bytes | None] = []
        other = reopen_storage(storage.spec)

        def refuse() -> None:
            checked.append(_bytes_of(other, "file"))
            raise RuntimeError("refused")

        for name in ("file", "folder/file"):
            with pytest.raises(RuntimeError, match="refused"):
                storage.put(name, b"new", refuse)
        assert checked == [b"old"] * 2, "called once each time, before"
        assert _bytes_of(other, "file") == b"old"
        assert _bytes_of(other, "folder/file") is None
        assert set(storage.list()) <= {"file", "folder/"}
        assert storage.list("folder") == {}
        storage.put("file", b"new", lambda: checked.append(_bytes_of(other, "file")))
        assert checked == [b"old"] * 3
        assert _bytes_of(other, "file") == b"new"

    def test_the_last_check_may_use_the_storage(self, storage: Storage) -> None:
        storage.prepare()
        storage.put("other", b"other")
        seen: builtins.list[bytes | None] = []
        storage.put("file", b"new", lambda: seen.append(_bytes_of(storage, "other")))
        assert seen == [b"other"]

    @pytest.mark.parametrize("name", ["file", "folder/file"])
    def test_what_is_revoked_after_its_last_check_replaces_nothing(self, storage: Storage, name: str) -> None:
        if not self.can_revoke:
            pytest.skip("this storage cannot")
        storage.prepare()
        storage.put(name, b"old")
        storage.put(f"{name}.json", b"beside")
        other = reopen_storage(storage.spec)
        with pytest.raises(WriteError) as caught:
            storage.put(name, b"new", lambda: other.revoke(name))
        assert caught.value.errno == errno.ENOENT
        assert _bytes_of(other, name) == b"old"

    @pytest.mark.parametrize("name", ["file", "folder/file"])
    def test_to_revoke_what_is_done_changes_nothing(self, storage: Storage, name: str) -> None:
        storage.prepare()
        storage.put(name, b"old")
        storage.put(f"{name}.json", b"beside")
        other = reopen_storage(storage.spec)
        other.revoke(name)
        other.revoke("absent")
        assert _bytes_of(storage, name) == b"old", "what was done is done"
        assert _bytes_of(storage, f"{name}.json") == b"beside"
        storage.put(name, b"new", lambda: other.revoke("another"))
        assert _bytes_of(storage, name) == b"new"
        storage.put(name, b"newer")
        assert _bytes_of(storage, name) == b"newer"
        assert "absent" not in storage.list()

    # Reading, listing, removing.

    def test_read_returns_what_there_is(self, storage: Storage) -> None:
        storage.prepare()
        data = b"0123456789"
        storage.put("file", data)
        for offset, nbytes in itertools.product((0, 1, 9, 10, 12), (None, 0, 1, 9, 10, 15)):
            end = None if nbytes is None else offset + nbytes
            assert _bytes_of(storage, "file", offset, nbytes) == data[offset:end], (offset, nbytes)
        storage.put("file", b"")
        assert _bytes_of(storage, "file", 0, 10) == b""
        assert _bytes_of(storage, "file", 5, 10) == b""

    def test_what_is_absent_reads_as_none_and_lists_as_nothing(self, storage: Storage) -> None:
        assert storage.read("file") is None
        assert storage.list() == {}
        storage.prepare()
        storage.put("file", b"")
        for name in ("absent", "folder/file", "file/below"):
            for offset, nbytes in ((0, None), (0, 0), (0, 5), (3, None), (3, 5)):
                assert _bytes_of(storage, name, offset, nbytes) is None, (name, offset, nbytes)
        assert storage.list("folder/") == {}

    def test_list_names_files_with_sizes_and_directories(self, storage: Storage) -> None:
        storage.prepare()
        for name in (".hidden", "file", "folder/below", "folder/deeper/still"):
            storage.put(name, b"12345")
        assert storage.list() == {".hidden": 5, "file": 5, "folder/": 0}
        assert storage.list("folder") == storage.list("folder/") == {"below": 5, "deeper/": 0}

    def test_what_one_does_another_sees_at_once(self, storage: Storage) -> None:
        storage.prepare()
        other = reopen_storage(storage.spec)
        assert other.list() == {}
        for number in range(3):
            storage.put("file", b"x" * number)
            assert other.list() == {"file": number}
            assert _bytes_of(other, "file") == b"x" * number
        storage.delete("file")
        assert other.list() == {}
        assert other.read("file") is None

    @pytest.mark.parametrize("name", ["größe", "a file", "100%25 #1?&+", "日本/語"])
    def test_names_may_hold_any_character(self, storage: Storage, name: str) -> None:
        storage.prepare()
        storage.put(name, b"data")
        folder, _, base = name.rpartition("/")
        assert storage.list(folder) == {base: 4}
        assert _bytes_of(storage, name, 1, 2) == b"at"
        storage.delete(name)
        assert storage.read(name) is None

    def test_delete_removes_files_and_empty_directories(self, storage: Storage) -> None:
        storage.prepare()
        storage.put("folder/file", b"")
        # It refuses, or finds nothing to do where there are no directories.
        with contextlib.suppress(WriteError):
            storage.delete("folder/")
        assert _bytes_of(storage, "folder/file") == b""
        for name in ("folder/file", "folder/file", "folder/", "folder/", "absent", "absent/file"):
            storage.delete(name)
        # Some object stores go on to show a folder for a while, in which there is nothing.
        assert set(storage.list()) <= {"folder/"}
        assert storage.list("folder/") == {}
        assert storage.remove_directory()

    def test_last_change_is_about_now(self, storage: Storage) -> None:
        assert storage.last_change() is None
        storage.prepare()
        storage.put("folder/file", b"data")
        changed = storage.last_change()
        assert changed is None or abs(changed - time.time()) < _CLOCK_S

    def test_a_directory_is_removed_once_it_is_empty(self, storage: Storage) -> None:
        storage.prepare()
        storage.put("folder/file", b"data")
        assert not storage.remove_directory()
        assert _bytes_of(storage, "folder/file") == b"data"
        storage.delete("folder/file")
        storage.delete("folder/")
        assert storage.remove_directory()
        assert storage.remove_directory(), "it is gone"
        storage.prepare()
        assert set(storage.list()) <= {"folder/"}

    # Refusals.

    @pytest.mark.parametrize("name", ["../file", "/file", "a/../../file", "a//file", "./file", "a\0b"])
    def test_no_name_leads_out_of_the_checkpoint(self, storage: Storage, name: str) -> None:
        storage.prepare()
        calls: builtins.list[Callable[[], object]] = [
            lambda: storage.read(name),
            lambda: fill(storage, name, 0, memoryview(bytearray(1))),
            lambda: storage.put(name, b"data"),
            lambda: storage.delete(name),
            lambda: storage.create_image(name, 1),
            lambda: storage.list(name),
        ]
        for call in calls:
            with pytest.raises(IntegrityError) as caught:
                call()
            assert caught.value.file == name
        assert storage.list() == {}

    def test_errors_say_where_and_can_be_pickled(self, storage: Storage) -> None:
        storage.prepare()
        token, receipts = _write(storage, "the-file", b"data")
        storage.discard_image("the-file", token)
        with pytest.raises(WriteError) as caught:
            storage.complete_image("the-file", token, 4, receipts)
        assert pickle.dumps(caught.value)
        # As unpickling does it.
        error = copy.copy(caught.value)
        assert error.errno is not None
        assert errno.errorcode[error.errno] in str(error)
        assert error.path is not None
        assert "the-file" in error.path
        assert error.path in str(error)

    def test_an_object_serves_one_thread_after_the_other(self, storage: Storage) -> None:
        storage.prepare()
        for number in range(3):
            with ThreadPoolExecutor(1) as threads:
                threads.submit(storage.put, f"file-{number}", b"data").result(_JOIN_S)
        assert storage.list() == {"file-0": 4, "file-1": 4, "file-2": 4}

    def test_what_is_closed_may_be_forgotten(self, storage: Storage) -> None:
        storage.prepare()
        image = storage.open_image("image", token := storage.create_image("image", 3))
        with contextlib.suppress(WriteError):
            image.write(0, [memoryview(b"abc")], crc32c(b"abc"))
        image.close()
        del image
        storage.discard_image("image", token)
        assert storage.list() == {}

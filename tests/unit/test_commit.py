"""Manifests, publication and sweep, without an engine."""

from __future__ import annotations

import builtins
import errno
import hashlib
import json
import logging
import os
import pickle
import struct
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distckpt.commit import (
    Claim,
    claim,
    committed_by,
    exclusive_of,
    leftovers,
    publish,
    reclaim,
    refuse_part,
    sweep,
    writer_may_live,
)
from distckpt.errors import CheckpointError, CommitError, IntegrityError, WriteError
from distckpt.formats import open_format
from distckpt.integrity import Integrity, load_integrity
from distckpt.manifest import (
    METADATA,
    OWNER,
    TRAILER,
    ItemTable,
    Manifest,
    ManifestRef,
    manifest_name,
    plan_digest,
    read_partial,
    seal,
    unseal,
    write_manifest,
)
from distckpt.storage import ImageFile, Receipt, Storage, open_storage
from distckpt.storage.posix import PosixStorage
from distckpt.worker import CHECKSUM_BLOCK_BYTES, block_spans, checksum


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    opened = open_storage(tmp_path)
    opened.prepare()
    return opened


def test_a_failure_is_explained_by_another_save_and_by_nothing_else(storage: Storage) -> None:
    ours = claim(storage, "a" * 32)
    gone, full = (WriteError("no", errno=number) for number in (errno.ENOENT, errno.ENOSPC))
    assert ours.explain(storage, gone) is gone
    claim(storage, "b" * 32)
    assert ours.explain(storage, full) is full
    with pytest.raises(CommitError, match="claimed by another save") as caught:
        raise ours.explain(storage, gone)
    assert getattr(caught.value, "is_overtaken", False)
    # A record that says nothing is no explanation.
    storage.put(OWNER, b"damaged")
    assert ours.explain(storage, gone) is gone


def pack(checksums: Iterable[int]) -> bytes:
    return b"".join(struct.pack("<I", value) for value in checksums)


def write_rank(storage: Storage, save_id: str, rank: int, data: bytes) -> ManifestRef:
    """Write what one rank does: an image of one item, and its manifest."""
    name = f"__{rank}_0.distcp.{save_id}"
    token = storage.create_image(name, len(data))
    image = storage.open_image(name, token)
    image.write(0, [memoryview(data)])
    storage.complete_image(name, token, len(data), image.finish())
    packed = pack(checksum(data[at : at + size]) for at, size in block_spans(0, len(data)))
    items = ItemTable([f"weight{rank}"], [[0]], [0], [0], [len(data)])
    manifest = Manifest(save_id, rank, "torch_dist", "digest", {name: len(data)}, [packed], items)
    return write_manifest(storage, manifest)


def save(storage: Storage, save_id: str, ranks: int = 2) -> bytes:
    """Save `ranks` items of the bytes of `save_id`; returns the metadata."""
    claimed = claim(storage, save_id)
    refs = [write_rank(storage, save_id, rank, f"{save_id} {rank}".encode() * 9) for rank in range(ranks)]
    metadata = pickle.dumps(f"metadata of {save_id}")
    publish(storage, metadata, claimed, refs, {"world": ranks})
    return metadata + TRAILER


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_is_published_can_be_verified(storage: Storage, tmp_path: Path) -> None:
    metadata = save(storage, "0a")
    assert (tmp_path / METADATA).read_bytes() == metadata
    integrity = load_integrity(storage, metadata)
    assert integrity is not None
    for rank in range(2):
        data = storage.read(f"__{rank}_0.distcp.0a")
        assert data is not None
        integrity.check(f"__{rank}_0.distcp.0a", 0, data, "weight")
    record = next((tmp_path / ".distckpt").glob("commit-*.json"))
    assert json.loads(record.read_text())["world"] == 2


def test_metadata_of_another_tool_is_unverifiable(storage: Storage) -> None:
    theirs = pickle.dumps("somebody's metadata")
    assert load_integrity(storage, theirs) is None
    save(storage, "0a")
    assert load_integrity(storage, theirs) is None, "who has replaced ours, be it so"


def test_an_overwrite_leaves_the_new_files_only(storage: Storage, tmp_path: Path) -> None:
    save(storage, "0a", ranks=3)
    metadata = save(storage, "0b")
    assert load_integrity(storage, metadata) is not None
    assert {name for name in names(tmp_path) if "/" not in name} == {
        METADATA,
        "__0_0.distcp.0b",
        "__1_0.distcp.0b",
    }
    assert {name for name in names(tmp_path) if "/rank-" in name} == {
        ".distckpt/0b/rank-00000.json",
        ".distckpt/0b/rank-00001.json",
    }
    assert len(list((tmp_path / ".distckpt").glob("commit-*"))) == 1
    assert not (tmp_path / ".distckpt" / "0a").exists()


def test_a_save_that_was_overtaken_is_refused(storage: Storage, tmp_path: Path) -> None:
    claimed = claim(storage, "0a")
    ref = write_rank(storage, "0a", 0, b"first")
    claim(storage, "0b")
    before = names(tmp_path)
    with pytest.raises(CommitError, match=r"claimed by another save .*0b"):
        publish(storage, b"metadata", claimed, [ref])
    assert names(tmp_path) == before


def test_nobody_publishes_without_a_claim(storage: Storage) -> None:
    with pytest.raises(CommitError, match="nobody"):
        publish(storage, b"metadata", Claim("0a", None, ()), [])


@pytest.mark.parametrize("nbytes", [None, 0, 4, 6])
def test_a_file_that_is_missing_or_has_another_size_is_refused(
    storage: Storage, tmp_path: Path, nbytes: int | None
) -> None:
    claimed = claim(storage, "0a")
    ref = write_rank(storage, "0a", 0, b"first")
    if nbytes is None:
        (tmp_path / "__0_0.distcp.0a").unlink()
    else:
        (tmp_path / "__0_0.distcp.0a").write_bytes(bytes(nbytes))
    with pytest.raises(CommitError, match=r"__0_0\.distcp\.0a should hold 5 bytes"):
        publish(storage, b"metadata", claimed, [ref])
    assert not (tmp_path / METADATA).exists()


def test_a_rank_that_publishes_alone_sweeps_what_is_its_own(storage: Storage, tmp_path: Path) -> None:
    for save_id in ("0a", "0b"):
        for rank in (0, 1, 11):
            claimed = claim(storage, save_id, rank)
            ref = write_rank(storage, save_id, rank, save_id.encode())
            publish(storage, f"{save_id} {rank}".encode(), claimed, [ref])
    kept = {f"__{rank}_0.distcp.0b" for rank in (0, 1, 11)} | {f"__{rank}{METADATA}" for rank in (0, 1, 11)}
    assert {name for name in names(tmp_path) if "/" not in name} == kept
    assert len(list((tmp_path / ".distckpt").glob("commit-*"))) == 3
    assert len(list((tmp_path / ".distckpt" / "0b").iterdir())) == 3
    (tmp_path / METADATA).touch()
    with pytest.raises(CommitError, match="saved with collectives"):
        refuse_part(storage)


def test_a_part_is_not_refused_where_there_is_no_whole(storage: Storage) -> None:
    refuse_part(storage)


class FaultyStorage:
    """Fails the n-th call that changes something, before it does anything."""

    def __init__(self, inner: Storage, fail_at: int) -> None:
        self.inner = inner
        self.url, self.spec = inner.url, inner.spec
        self.in_flight, self.is_stream = inner.in_flight, inner.is_stream
        self.fail_at = fail_at
        self.calls = 0

    def step(self, what: str) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            raise WriteError(f"{what}: no space left [ENOSPC]", errno=28, path=f"{self.url}/{what}")

    def prepare(self) -> None:
        self.step("prepare")
        self.inner.prepare()

    def part_bytes(self, file_bytes: int) -> int:
        return self.inner.part_bytes(file_bytes)

    def create_image(self, name: str, nbytes: int) -> str:
        self.step(f"create_image {name}")
        return self.inner.create_image(name, nbytes)

    def open_image(self, name: str, token: str) -> ImageFile:
        self.step(f"open_image {name}")
        return self.inner.open_image(name, token)

    def complete_image(self, name: str, token: str, nbytes: int, receipts: Sequence[Receipt]) -> None:
        self.step(f"complete_image {name}")
        self.inner.complete_image(name, token, nbytes, receipts)

    def discard_image(self, name: str, token: str) -> None:
        self.step(f"discard_image {name}")
        self.inner.discard_image(name, token)

    def unfinished(self) -> builtins.list[tuple[str, str]]:
        self.step("unfinished")
        return self.inner.unfinished()

    def abort(self, name: str, handle: str) -> None:
        self.step("abort")
        self.inner.abort(name, handle)

    def put(self, name: str, data: bytes, last_check: Callable[[], None] | None = None) -> None:
        self.step(f"put {name}")
        self.inner.put(name, data, last_check)

    def revoke(self, name: str) -> None:
        self.step(f"revoke {name}")
        self.inner.revoke(name)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray | None:
        self.step(f"read {name}")
        return self.inner.read(name, offset, nbytes)

    def list(self, prefix: str = "") -> dict[str, int]:
        self.step(f"list {prefix}")
        return self.inner.list(prefix)

    def delete(self, name: str) -> None:
        self.step(f"delete {name}")
        self.inner.delete(name)

    def last_change(self) -> float | None:
        self.step("last_change")
        return self.inner.last_change()

    def remove_directory(self) -> bool:
        self.step("remove_directory")
        return self.inner.remove_directory()


def test_an_error_of_any_call_leaves_old_or_new(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outcomes = []
    for fail_at in range(1, 200):
        root = tmp_path / str(fail_at)
        plain = open_storage(root)
        plain.prepare()
        old = save(plain, "0a", ranks=3)
        faulty = FaultyStorage(plain, fail_at)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            failed = False
            try:
                save(faulty, "0b")
            except WriteError:
                failed = True
        published = (root / METADATA).read_bytes()
        assert failed == (published == old), "success was reported and the old one stayed, or the reverse"
        integrity = load_integrity(plain, published)
        assert integrity is not None
        for (file, offset), (nbytes, _) in integrity._items.items():
            data = plain.read(file, offset, nbytes)
            assert data is not None
            integrity.check(file, offset, data, "weight")
        outcomes.append(failed)
        if faulty.calls < fail_at:
            assert not failed
            assert not caplog.records
            break
        # Beyond the publication nothing fails the save, but it is said.
        assert failed or "stays" in caplog.text
        save(plain, "0c")
        assert len(list((root / ".distckpt").iterdir())) == 3, "owner, record and manifests"
        assert len(list(root.iterdir())) == 4
    assert outcomes == sorted(outcomes, reverse=True)
    assert outcomes.count(True) > 8
    assert outcomes.count(False) > 8


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda manifest, record: manifest.unlink(), IntegrityError),
        (
            lambda manifest, record: manifest.write_bytes(manifest.read_bytes().replace(b"0a", b"0b")),
            IntegrityError,
        ),
        (lambda manifest, record: record.write_bytes(b"{}"), IntegrityError),
        (lambda manifest, record: record.write_bytes(b"[]"), IntegrityError),
        (lambda manifest, record: record.write_bytes(b'{"version": 3}'), IntegrityError),
        (lambda manifest, record: record.write_bytes(seal({})), IntegrityError),
        (lambda manifest, record: record.write_bytes(seal({"manifests": [1]})), IntegrityError),
        (
            lambda manifest, record: record.write_bytes(
                seal({"name": f".distckpt/{record.name}", "manifests": [1]})
            ),
            IntegrityError,
        ),
        (
            lambda manifest, record: record.write_bytes(
                record.read_bytes().replace(b'"version":3', b'"version":2')
            ),
            IntegrityError,
        ),
        (lambda manifest, record: record.unlink(), IntegrityError),
        (lambda manifest, record: record.write_bytes(record.read_bytes()[:-9]), IntegrityError),
        (lambda manifest, record: record.write_bytes(b"[] []"), IntegrityError),
        (lambda manifest, record: record.write_bytes(b'{"version": 99, "manifests": []}'), CheckpointError),
    ],
)
def test_damaged_records_are_found(
    storage: Storage, tmp_path: Path, damage: Callable[[Path, Path], Any], error: type[CheckpointError]
) -> None:
    metadata = save(storage, "0a")
    damage(
        tmp_path / ".distckpt" / "0a" / "rank-00001.json",
        next((tmp_path / ".distckpt").glob("commit-*.json")),
    )
    with pytest.raises(error):
        load_integrity(storage, metadata)


@pytest.mark.parametrize("name", ["commit-*.json", "0a/rank-00000.json"])
def test_another_version_is_refused_by_name(storage: Storage, tmp_path: Path, name: str) -> None:
    metadata = save(storage, "0a")
    path, record = (next((tmp_path / ".distckpt").glob(pattern)) for pattern in (name, "commit-*.json"))
    before = path.read_bytes()
    after = before.replace(b'"version":3', b'"version":2')
    if path == record:
        # There were no seals.
        after = after.replace(b',"sha256":"' + after[-66:], b"}")
    path.write_bytes(after)
    if path != record:
        fields = unseal(storage, "record", record.read_bytes())
        fields["manifests"][0]["sha256"] = hashlib.sha256(after).hexdigest()
        record.write_bytes(seal(fields))
    with pytest.raises(CheckpointError, match=rf"{path.name} has version 2; .* reads version 3"):
        load_integrity(storage, metadata)


def commit_manifest(storage: Storage, data: bytes) -> bytes:
    """Commit `data` as the manifest of a save that wrote no files; returns the metadata."""
    name = manifest_name("0a", 0)
    storage.put(name, data)
    refs = [ManifestRef(name, hashlib.sha256(data).hexdigest(), {})]
    publish(storage, b"metadata", claim(storage, "0a"), refs)
    return b"metadata" + TRAILER


SIZES = st.one_of(
    st.integers(0, 200),
    st.integers(-2, 2).map(lambda delta: CHECKSUM_BLOCK_BYTES + delta),
    st.integers(0, 4 * CHECKSUM_BLOCK_BYTES),
)
LAYOUTS = st.lists(st.lists(st.tuples(SIZES, SIZES), max_size=6), min_size=1, max_size=4)
"""For each file: gaps of at least one byte, and what follows each, in bytes."""


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=LAYOUTS, has_checksums=st.booleans(), random=st.randoms(use_true_random=False))
def test_checksums_come_back_for_any_layout(
    storage: Storage, layout: list[list[tuple[int, int]]], has_checksums: bool, random: Random
) -> None:
    expected: dict[tuple[str, int], tuple[int, tuple[int, ...]]] = {}
    rows, columns = [], []
    for index, file in enumerate(layout):
        end = 0
        values: list[int] = []
        for gap, size in file:
            offset = end + gap
            end = offset + size + 1
            blocks = tuple(random.getrandbits(32) for _ in block_spans(offset, size))
            expected[f"__0_{index}.distcp", offset] = (size, blocks if has_checksums else ())
            rows.append((index, offset, size))
            values += blocks
        columns.append(pack(values) if has_checksums else b"")
    random.shuffle(rows)
    items = ItemTable(
        [f"weight\udc80{row}" for row in range(len(rows))],
        [None if row % 2 else (row, 0) for row in range(len(rows))],
        *([row[column] for row in rows] for column in range(3)),
    )
    ends = [sum(map(sum, file)) + len(file) for file in layout]
    files = {f"__0_{index}.distcp": end for index, end in enumerate(ends)}
    manifest = Manifest("0a", 0, "torch_dist", "digest", files, columns, items)
    integrity = load_integrity(storage, commit_manifest(storage, manifest.to_json()))
    assert integrity is not None
    assert integrity._items == expected
    read = read_partial(storage, "0a", 0)
    assert read is not None
    assert read.items == items.json
    assert list(read.ref.files) == list(files)


@pytest.mark.parametrize(
    ("checksums", "sizes"),
    [
        ([bytes(4), bytes(8)], [1, 1]),
        ([bytes(4), b""], [1, 1]),
        ([bytes(4), bytes(3)], [1, 1]),
        ([bytes(4), bytes(5)], [1, 1]),
        ([bytes(4), bytes(4)], [1, 0]),
        ([bytes(4), bytes(4)], [1, CHECKSUM_BLOCK_BYTES + 1]),
        ([b"", b""], [1]),
    ],
)
def test_checksums_that_do_not_fit_the_items_are_found(
    storage: Storage, checksums: list[bytes], sizes: list[int]
) -> None:
    items = ItemTable(["a", "b"], [[0], [0]], [0, 1], [0, 0], sizes)
    files = {"a": CHECKSUM_BLOCK_BYTES + 1, "b": CHECKSUM_BLOCK_BYTES + 1}
    manifest = Manifest("0a", 0, "torch_dist", "digest", files, checksums, items)
    metadata = commit_manifest(storage, manifest.to_json())
    with pytest.raises(IntegrityError, match=r"rank-00000\.json contradicts itself") as caught:
        load_integrity(storage, metadata)
    assert caught.value.file == manifest_name("0a", 0)


def test_items_are_encoded_once_for_all_saves() -> None:
    items = ItemTable(["a"], [[0]], [0], [0], [4])
    first = Manifest("0a", 0, "torch_dist", "digest", {"a": 4}, [b"abcd"], items)
    before = json.loads(first.to_json())
    encoded = items.json
    items.fqns.append("not looked at again")
    second = Manifest("0b", 0, "torch_dist", "digest", {"b": 4}, [b"efgh"], items)
    after = json.loads(second.to_json())
    assert items.json is encoded
    assert before.pop("items") == after.pop("items") == json.loads(encoded)
    assert (before.pop("save_id"), after.pop("save_id")) == ("0a", "0b")
    assert (before.pop("files"), after.pop("files")) == ({"a": 4}, {"b": 4})
    assert (before.pop("checksums"), after.pop("checksums")) == (["YWJjZA=="], ["ZWZnaA=="])
    rest = {"version": 3, "rank": 0, "format": "torch_dist", "plan": "digest", "shares": {}}
    assert before == after == rest


def test_a_manifest_is_read_back_by_rank(storage: Storage, tmp_path: Path) -> None:
    assert read_partial(storage, "0a", 3) is None
    ref = write_rank(storage, "0a", 3, b"data")
    read = read_partial(storage, "0a", 3)
    assert read is not None
    assert read.ref == ref
    assert read.head["plan"] == "digest"
    assert json.loads(read.items)["fqns"] == ["weight3"]
    assert read_partial(storage, "0b", 3) is None
    path = tmp_path / manifest_name("0a", 3)
    for damaged in (b"", b"[]", b'{"version":3}', path.read_bytes()[:60]):
        path.write_bytes(damaged)
        with pytest.raises(IntegrityError) as caught:
            read_partial(storage, "0a", 3)
        assert caught.value.file == manifest_name("0a", 3)
    path.write_bytes(b'{"version":2}')
    with pytest.raises(CheckpointError, match="reads version 3"):
        read_partial(storage, "0a", 3)


def test_a_manifest_may_be_for_a_coordinator_without_a_plan() -> None:
    entries = [[[4], [4], "float32", False, ["model", "a"]]]
    items = ItemTable(["a"], [[0]], [0], [0], [4], entries)
    manifest = json.loads(
        Manifest("0a", 0, "torch_dist", "", {}, [], items, shares={"plain": "digest"}).to_json()
    )
    assert manifest["items"]["entries"] == entries
    assert manifest["shares"] == {"plain": "digest"}
    assert "entries" not in json.loads(ItemTable(["a"], [[0]], [0], [0], [4]).json)


def test_who_committed_is_known(storage: Storage, tmp_path: Path) -> None:
    assert committed_by(storage) is None
    save(storage, "0a")
    claim(storage, "0b")
    write_rank(storage, "0b", 0, b"not published")
    assert committed_by(storage) == "0a"
    save(storage, "0c")
    assert committed_by(storage) == "0c"
    record = next((tmp_path / ".distckpt").glob("commit-*.json"))
    record.write_bytes(b'{"version":1,"save_id":"00"}')
    assert committed_by(storage) == "00", "an older checkpoint can be waited over"
    record.write_bytes(b'{"version":1}')
    assert committed_by(storage) is None
    record.write_bytes(b"{")
    assert committed_by(storage) is None
    (tmp_path / METADATA).write_bytes(b"of another tool")
    assert committed_by(storage) is None


class RacingStorage(FaultyStorage):
    """Before each read of a commit record, another save publishes; or the file that was opened is gone."""

    def __init__(self, inner: Storage, race: Callable[[], object]) -> None:
        super().__init__(inner, 0)
        self.race = race

    def step(self, what: str) -> None:
        self.calls += 1
        if what.startswith("read .distckpt/commit-"):
            self.race()


def test_a_checkpoint_that_is_replaced_meanwhile_is_looked_at_again(storage: Storage) -> None:
    save(storage, "0a")
    newer = iter(["0b"])
    racing = RacingStorage(storage, lambda: [save(storage, save_id) for save_id in newer])
    assert committed_by(racing) == "0b"
    newer = iter([f"{number:x}" for number in range(100, 200)])
    racing = RacingStorage(storage, lambda: save(storage, next(newer)))
    assert committed_by(racing) is None, "it is not looked at without end"


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO])
def test_a_file_replaced_on_another_host_is_opened_again(storage: Storage, code: int) -> None:
    save(storage, "0a")
    errors = iter([WriteError("cannot read", errno=code)])

    def fail() -> None:
        for error in errors:
            raise error

    racing = RacingStorage(storage, fail)
    if code == errno.ESTALE:
        assert committed_by(racing) == "0a"
        return
    with pytest.raises(WriteError):
        committed_by(racing)


def integrity_of(data: bytes, offset: int) -> Integrity:
    checksums = [checksum(data[at - offset : at - offset + n]) for at, n in block_spans(offset, len(data))]
    return Integrity("/checkpoint", {("file", offset): (len(data), checksums)})


@given(st.binary(min_size=1, max_size=200), st.integers(0, 1 << 40), st.data())
def test_any_changed_bit_is_found(data: bytes, offset: int, draw: st.DataObject) -> None:
    integrity = integrity_of(data, offset)
    damaged = bytearray(data)
    integrity.check("file", offset, damaged, "weight")
    bit = draw.draw(st.integers(0, len(data) * 8 - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(IntegrityError, match="'weight' is damaged") as caught:
        integrity.check("file", offset, damaged, "weight")
    assert (caught.value.file, caught.value.item) == ("file", "weight")


def test_the_block_that_is_damaged_is_named() -> None:
    offset = CHECKSUM_BLOCK_BYTES - 100
    data = bytes(CHECKSUM_BLOCK_BYTES + 200)
    integrity = integrity_of(data, offset)
    damaged = bytearray(data)
    damaged[150] = 1
    with pytest.raises(
        IntegrityError, match=f"between bytes {CHECKSUM_BLOCK_BYTES} and {2 * CHECKSUM_BLOCK_BYTES}"
    ):
        integrity.check("file", offset, damaged, "weight")


def test_another_size_and_another_place_are_found() -> None:
    integrity = integrity_of(b"data", 64)
    with pytest.raises(IntegrityError, match="3 of 4 bytes"):
        integrity.check("file", 64, bytearray(b"dat"), "weight")
    with pytest.raises(IntegrityError, match="no manifest lists 'weight'"):
        integrity.check("file", 0, bytearray(b"data"), "weight")


def test_a_plan_digest_depends_on_names_kinds_and_order() -> None:
    kinds = [((0,), ((4,), "float32")), ((4,), ((4,), "float32"))]
    digest = plan_digest(["a", "b"], kinds)
    assert digest == plan_digest(["a", "b"], list(kinds))
    assert len({
        digest,
        plan_digest(["b", "a"], kinds),
        plan_digest(["a", "c"], kinds),
        plan_digest(["a", "b"], kinds[::-1]),
        plan_digest(["a", "b"], [kinds[0], ((4,), ((4,), "float16"))]),
        plan_digest(["a", "b"], [kinds[0], kinds[0]]),
        plan_digest(["a"], kinds[:1]),
    }) == 7  # fmt: skip


class PausedStorage(FaultyStorage):
    """Does something else before one of the calls that change something."""

    def __init__(self, inner: Storage, at: int, then: Callable[[], object]) -> None:
        super().__init__(inner, at)
        self.then = then

    def step(self, what: str) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            self.then()

    def put(self, name: str, data: bytes, last_check: Callable[[], None] | None = None) -> None:
        self.step(f"put {name}")

        def check() -> None:
            assert last_check is not None
            last_check()
            # The instant between the last look at the owner and the one step that publishes.
            self.step(f"publish {name}")

        self.inner.put(name, data, check if last_check else None)


def test_a_save_that_was_overtaken_at_any_instant_harms_nobody(tmp_path: Path) -> None:
    outcomes: list[type] = []
    for at in range(1, 200):
        plain = open_storage(tmp_path / str(at))
        plain.prepare()
        save(plain, "0a", ranks=3)
        newer: list[bytes] = []
        paused = PausedStorage(plain, at, lambda: newer.append(save(plain, "beef")))  # noqa: B023 - called here
        try:
            save(paused, "cafe")
        except CheckpointError as error:
            outcomes.append(type(error))
        else:
            outcomes.append(type(None))
        if paused.calls < at:
            break
        published = bytes(plain.read(METADATA) or b"")
        if outcomes[-1] is not type(None):
            assert published == newer[0]
        integrity = load_integrity(plain, published)
        assert integrity is not None
        for (file, offset), (nbytes, _) in integrity._items.items():
            integrity.check(file, offset, plain.read(file, offset, nbytes) or bytearray(), "weight")
        save(plain, "feed")
        assert len(plain.list()) == 4, "two images, metadata and records: nothing was left behind"
        assert len(plain.list(".distckpt/")) == 3
    assert outcomes.count(CommitError) > 8
    assert outcomes.count(type(None)) > 8
    assert outcomes[-1] is type(None)


@pytest.mark.parametrize("position", range(0, 200, 7))
def test_a_seal_finds_any_change(storage: Storage, position: int) -> None:
    fields = {"save_id": "0a", "text": "x" * 100, "time": 1234567.5}
    sealed = seal(fields)
    assert {"version": 3, **fields}.items() <= unseal(storage, "owner", sealed).items()
    for bit in range(8):
        damaged = bytearray(sealed)
        damaged[position % len(sealed)] ^= 1 << bit
        with pytest.raises(CheckpointError):
            unseal(storage, "owner", damaged)
    for end in (position, -1 - position):
        with pytest.raises(CheckpointError):
            unseal(storage, "owner", sealed[:end])


def test_damage_to_our_metadata_is_not_taken_for_another_tool(storage: Storage) -> None:
    claimed = claim(storage, "0a" * 16)
    ref = write_rank(storage, claimed.save_id, 0, b"data")
    publish(storage, pickle.dumps(["some metadata", {"save_id": claimed.save_id}]), claimed, [ref])
    metadata = bytes(storage.read(METADATA) or b"")
    assert load_integrity(storage, metadata) is not None
    for position in range(len(metadata)):
        for bit in (1, 128):
            damaged = bytearray(metadata)
            damaged[position] ^= bit
            with pytest.raises(IntegrityError):
                load_integrity(storage, bytes(damaged))
        with pytest.raises(IntegrityError):
            load_integrity(storage, metadata[:position])


def test_what_was_never_completed_is_reclaimed(storage: Storage, tmp_path: Path) -> None:
    interrupted = claim(storage, "0a")
    ref = write_rank(storage, "0a", 0, b"data")
    assert not reclaim(storage, "0b", idle_s=60), "this process lives"
    assert not reclaim(storage, "0b", failed={"0c"}, idle_s=60)
    assert reclaim(storage, "0b", failed={"0a"}, idle_s=60)
    assert not tmp_path.exists()
    with pytest.raises(CommitError, match="nobody"):
        publish(storage, b"metadata", interrupted, [ref])
    assert not reclaim(storage, "0b", idle_s=0), "there is nothing"


@pytest.mark.parametrize(
    ("changes", "is_over"),
    [
        ({}, False),
        ({"pid": 2**22 + 1}, True),
        ({"pid": 2**22 + 1, "host": "elsewhere"}, False),
        ({"pid": None}, False),
    ],
)
def test_a_directory_is_reclaimed_once_its_owner_is_gone(
    storage: Storage, tmp_path: Path, changes: dict[str, Any], is_over: bool
) -> None:
    claim(storage, "0a")
    write_rank(storage, "0a", 0, b"data")
    owner = tmp_path / ".distckpt/owner"
    owner.write_bytes(seal(unseal(storage, "owner", owner.read_bytes()) | changes))
    assert reclaim(storage, "0b", idle_s=60) == is_over
    assert tmp_path.exists() != is_over


@pytest.mark.parametrize("what", ["nothing", "an image", "a claim", "half a claim", "a damaged claim"])
def test_a_directory_is_reclaimed_once_nothing_changes_there(
    storage: Storage, tmp_path: Path, what: str
) -> None:
    if what == "an image":
        storage.create_image("__0_0.distcp.0a", 0)
    elif what == "a claim":
        claim(storage, "0a")
    elif what == "half a claim":
        storage.put(".distckpt/owner.0123.tmp", b"")
    elif what == "a damaged claim":
        storage.put(".distckpt/owner", b"damaged")
    paths = [tmp_path, *tmp_path.rglob("*")]
    for changed in paths:
        for path in paths:
            os.utime(path, (time.time() - 100,) * 2)
        os.utime(changed, (time.time() - 30,) * 2)
        assert not reclaim(storage, "0b", failed={"0b"}, idle_s=60), changed
    assert reclaim(storage, "0b", idle_s=20)
    assert not tmp_path.exists()


def test_only_what_saves_left_is_reclaimed(storage: Storage, tmp_path: Path) -> None:
    save(storage, "0a")
    before = names(tmp_path)
    assert not reclaim(storage, "0b", failed={"0a"}, idle_s=0)
    assert names(tmp_path) == before
    (tmp_path / METADATA).rename(tmp_path / "notes.txt")
    assert not reclaim(storage, "0b", failed={"0a"}, idle_s=0)
    assert names(tmp_path) == {"notes.txt"}
    was = tmp_path.stat().st_mtime_ns
    assert not reclaim(storage, "0b", idle_s=0)
    assert names(tmp_path) == {"notes.txt"}
    assert tmp_path.stat().st_mtime_ns == was, "not touched"


class InterposedStorage(PausedStorage):
    """Does something else, once, before the first call of a kind."""

    def __init__(self, inner: Storage, doing: str, then: Callable[[], object]) -> None:
        super().__init__(inner, 0, then)
        self.doing = doing
        self.is_over = False

    def step(self, what: str) -> None:
        if what.startswith(self.doing) and not self.is_over:
            self.is_over = True
            self.then()


def test_a_claim_that_is_slow_to_revoke_others_does_not_stop_a_later_one(storage: Storage) -> None:
    save(storage, "0a")
    later = InterposedStorage(storage, "publish", lambda: storage.revoke(METADATA))
    slow = InterposedStorage(storage, "revoke", lambda: save(later, "0b"))
    with pytest.raises(CommitError, match="0b"):
        save(slow, "0c")
    assert later.is_over
    assert committed_by(storage) == "0b"


def test_a_sweep_removes_what_no_checkpoint_names(storage: Storage, tmp_path: Path) -> None:
    save(storage, "0a")
    before = names(tmp_path)
    assert leftovers(storage) == []
    interrupted = claim(storage, "0b")
    ref = write_rank(storage, "0b", 0, b"data")
    (tmp_path / "notes.txt").touch()
    found = ["__0_0.distcp.0b", ".distckpt/0b/rank-00000.json", ".distckpt/0b/"]
    assert leftovers(storage) == found
    assert sweep(storage, "0c") == found
    assert names(tmp_path) == before | {"notes.txt"}
    with pytest.raises(CommitError, match="0c"):
        publish(storage, b"metadata", interrupted, [ref])
    storage.put(METADATA, pickle.dumps("of another tool"))
    assert sweep(storage, "0c") == [], "nobody knows which files are its"
    storage.put(METADATA, b"damaged")
    with pytest.raises(IntegrityError):
        sweep(storage, "0c")
    assert before <= names(tmp_path)


@pytest.mark.parametrize("name", ["../x", "/x", "a/../x", "", "a//b", "./x", "x\0y", ".."])
def test_names_that_lead_out_are_refused(storage: Storage, tmp_path: Path, name: str) -> None:
    items = ItemTable(["a"], [[0]], [0], [0], [1])
    manifest = Manifest("0a", 0, "torch_dist", "digest", {name: 1}, [b""], items)
    metadata = commit_manifest(storage, manifest.to_json())
    with pytest.raises(IntegrityError, match="within it"):
        load_integrity(storage, metadata)
    for call in (storage.read, storage.delete, lambda name: storage.open_image(name, ""), storage.list):
        if name or call != storage.list:
            with pytest.raises(IntegrityError, match="within it"):
                call(name)
    with pytest.raises(IntegrityError):
        storage.put(name, b"data")
    with pytest.raises(IntegrityError):
        storage.create_image(name, 0)
    record = next((tmp_path / ".distckpt").glob("commit-*.json"))
    fields = unseal(storage, "record", record.read_bytes())
    record.write_bytes(seal(fields | {"manifests": [{"name": name, "sha256": "0"}]}))
    with pytest.raises(IntegrityError, match="within it"):
        load_integrity(storage, metadata)


def test_links_are_not_followed_to_write_or_remove(storage: Storage, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "rank-00000.json").write_text("precious")
    (elsewhere / "__0_0.distcp").write_text("precious")
    root = tmp_path / "checkpoint"
    inside = open_storage(root)
    inside.prepare()
    (root / "__0_0.distcp").symlink_to(elsewhere / "__0_0.distcp")
    (root / ".distckpt").symlink_to(elsewhere)
    for call in (lambda: claim(inside, "0a"), lambda: save(inside, "0a")):
        with pytest.raises(WriteError, match="link"):
            call()
    (root / ".distckpt").unlink()
    (root / ".distckpt").mkdir()
    (root / ".distckpt/0c").symlink_to(elsewhere)
    with pytest.raises(WriteError):
        inside.open_image("__0_0.distcp", "")
    with pytest.raises(WriteError):
        inside.create_image("__0_0.distcp", 0)
    save(inside, "0b")
    assert {path.read_text() for path in elsewhere.iterdir()} == {"precious"}


def test_metadata_behind_a_link_are_metadata(storage: Storage, tmp_path: Path) -> None:
    save(storage, "0a")
    (tmp_path / METADATA).rename(tmp_path / "moved")
    (tmp_path / METADATA).symlink_to("moved")
    before = names(tmp_path)
    assert leftovers(storage) == []
    assert sweep(storage, "0b") == []
    assert not reclaim(storage, "0b", failed={"0a"}, idle_s=0)
    assert names(tmp_path) == before


def test_a_sweep_that_is_slow_removes_nothing_of_a_later_save(storage: Storage) -> None:
    save(storage, "0a")
    slow = InterposedStorage(storage, "revoke", lambda: save(storage, "0c"))
    with pytest.raises(CommitError, match="0c"):
        sweep(slow, "0b")
    assert committed_by(storage) == "0c"
    assert leftovers(storage) == []


@pytest.mark.parametrize("doing", ["list", "delete"])
def test_a_slow_removal_of_a_directory_harms_no_later_save(storage: Storage, doing: str) -> None:
    claim(storage, "0a")
    write_rank(storage, "0a", 0, b"data")
    slow = InterposedStorage(storage, "nothing", lambda: save(storage, "0c"))
    calls: list[str] = []

    def step(what: str) -> None:
        # Not before its own claim.
        calls.append(what)
        if what.startswith(doing) and any(call.startswith("revoke") for call in calls) and not slow.is_over:
            slow.is_over = True
            slow.then()

    slow.step = step  # type: ignore[method-assign]
    assert not reclaim(slow, "0b", failed={"0a"}, idle_s=60)
    assert slow.is_over
    assert committed_by(storage) == "0c"
    metadata = storage.read(METADATA)
    assert metadata is not None
    integrity = load_integrity(storage, bytes(metadata))
    assert integrity is not None
    assert {name for name, _ in integrity._items} <= storage.list().keys()


def test_a_crash_in_the_sweep_of_parts_leaves_no_part_without_files(storage: Storage) -> None:
    for rank in (0, 1):
        claimed = claim(storage, "0a", rank)
        publish(storage, b"part", claimed, [write_rank(storage, "0a", rank, b"data")])
    found = claim(storage, "0b").found
    images = [found.index(name) for name in found if ".distcp" in name]
    assert max(found.index(f"__{rank}{METADATA}") for rank in (0, 1)) < min(images)


def test_metadata_under_another_name_are_found(storage: Storage, tmp_path: Path) -> None:
    for rank in (0, 1):
        claimed = claim(storage, "0a", rank)
        publish(storage, f"part {rank}".encode(), claimed, [write_rank(storage, "0a", rank, b"data")])
    part = (tmp_path / "__1.metadata").read_bytes()
    assert load_integrity(storage, part, "__1.metadata") is not None
    for name in ("__0.metadata", METADATA):
        with pytest.raises(IntegrityError, match="as another file"):
            load_integrity(storage, part, name)


class StoreOfUploads(PosixStorage):
    """Has unfinished uploads, and notes those that are given up."""

    def __init__(self, root: str, uploads: Sequence[str], meanwhile: Callable[[], object] = list) -> None:
        super().__init__(root)
        self.uploads, self.meanwhile = uploads, meanwhile
        self.given_up: list[str] = []

    def unfinished(self) -> builtins.list[tuple[str, str]]:
        self.meanwhile()
        return [(name, "1") for name in self.uploads]

    def abort(self, name: str, handle: str) -> None:
        self.given_up.append(name)


def test_uploads_of_others_are_left_alone(tmp_path: Path) -> None:
    ours = ["__0_0.distcp.ab12", ".metadata", ".distckpt/owner"]
    storage = StoreOfUploads(str(tmp_path / "x"), [*ours, "tokenizer.tar", "other/__0_0.distcp.ab12"])
    storage.prepare()
    claimed = claim(storage, "ef56")
    publish(storage, b"metadata", claimed, [])
    assert sorted(storage.given_up) == sorted(ours)


def test_who_was_overtaken_gives_up_no_upload_of_its_successor(tmp_path: Path) -> None:
    root = str(tmp_path / "x")
    exclusive = exclusive_of(open_format("zarr"))
    storage = StoreOfUploads(
        root, ["__0_0.distcp.bb22"], lambda: claim(PosixStorage(root), "bb22", exclusive=exclusive)
    )
    storage.prepare()
    with pytest.raises(CommitError, match="claimed by another save"):
        claim(storage, "aa11", exclusive=exclusive)
    assert storage.given_up == []


def test_what_a_process_writes_that_lives_is_not_idle(storage: Storage) -> None:
    """However long its storage shows no change; and a number that another process has by now is not it."""
    storage.prepare()
    claim(storage, "ab12")
    owner = unseal(storage, OWNER, storage.read(OWNER) or b"")
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        fields = {key: value for key, value in owner.items() if key not in {"version", "sha256"}}
        storage.put(OWNER, seal({**fields, "pid": sleeper.pid, "time": time.time()}))
        assert writer_may_live(storage)
        assert not reclaim(storage, "cd34", idle_s=-1.0)
        storage.put(OWNER, seal({**fields, "pid": sleeper.pid, "time": time.time() - 3600}))
        assert not writer_may_live(storage)
        storage.put(OWNER, seal({**fields, "host": "another"}))
        assert writer_may_live(storage)
        storage.put(OWNER, seal({**fields, "pid": sleeper.pid, "time": time.time() - 3600}))
        assert reclaim(storage, "cd34", idle_s=3600.0)
        claim(storage, "ef56")
        storage.put(OWNER, seal({**fields, "pid": sleeper.pid, "time": time.time()}))
        sleeper.kill()
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
        assert not writer_may_live(storage), "nobody has waited for it yet"
    finally:
        sleeper.kill()
        sleeper.wait()

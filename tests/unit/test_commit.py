"""Manifests, publication and sweep, without an engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distckpt.commit import (
    METADATA,
    Integrity,
    Manifest,
    ManifestRef,
    claim,
    load_integrity,
    plan_digest,
    publish,
    refuse_part,
    write_manifest,
)
from distckpt.errors import CheckpointError, CommitError, IntegrityError, WriteError
from distckpt.storage import ImageFile, Storage, open_storage
from distckpt.worker import CHECKSUM_BLOCK_BYTES, block_spans, checksum


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    opened = open_storage(tmp_path)
    opened.prepare()
    return opened


def write_rank(storage: Storage, save_id: str, rank: int, data: bytes) -> ManifestRef:
    """Write what one rank does: an image of one item, and its manifest."""
    name = f"__{rank}_0.distcp"
    image = storage.create_image([name, f"{name}.{save_id}"])
    image.write(0, [memoryview(data)])
    image.finish(len(data))
    manifest = Manifest(
        save_id, rank, "torch_dist", "digest", {image.name: len(data)}, [f"weight{rank}"], [[0]]
    )
    manifest.item_files, manifest.offsets, manifest.sizes = [0], [0], [len(data)]
    manifest.checksums = [[checksum(data[at : at + size]) for at, size in block_spans(0, len(data))]]
    return write_manifest(storage, manifest)


def save(storage: Storage, save_id: str, ranks: int = 2) -> bytes:
    """Save `ranks` items of the bytes of `save_id`; returns the metadata."""
    metadata = f"metadata of {save_id}".encode()
    claim(storage, save_id)
    refs = [write_rank(storage, save_id, rank, f"{save_id} {rank}".encode() * 9) for rank in range(ranks)]
    publish(storage, metadata, save_id=save_id, manifests=refs, details={"world": ranks})
    return metadata


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_is_published_can_be_verified(storage: Storage, tmp_path: Path) -> None:
    metadata = save(storage, "0a")
    assert (tmp_path / METADATA).read_bytes() == metadata
    integrity = load_integrity(storage, metadata)
    assert integrity is not None
    for rank in range(2):
        data = storage.read(f"__{rank}_0.distcp")
        assert data is not None
        integrity.check(f"__{rank}_0.distcp", 0, data, "weight")
    record = next((tmp_path / ".distckpt").glob("commit-*.json"))
    assert json.loads(record.read_text())["world"] == 2


def test_metadata_of_another_tool_is_unverifiable(storage: Storage) -> None:
    assert load_integrity(storage, b"somebody's metadata") is None


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
    claim(storage, "0a")
    ref = write_rank(storage, "0a", 0, b"first")
    claim(storage, "0b")
    before = names(tmp_path)
    with pytest.raises(CommitError, match=r"claimed by another save .*0b"):
        publish(storage, b"metadata", save_id="0a", manifests=[ref])
    assert names(tmp_path) == before


def test_nobody_publishes_without_a_claim(storage: Storage) -> None:
    with pytest.raises(CommitError, match="nobody"):
        publish(storage, b"metadata", save_id="0a", manifests=[])


@pytest.mark.parametrize("nbytes", [None, 0, 4, 6])
def test_a_file_that_is_missing_or_has_another_size_is_refused(
    storage: Storage, tmp_path: Path, nbytes: int | None
) -> None:
    claim(storage, "0a")
    ref = write_rank(storage, "0a", 0, b"first")
    if nbytes is None:
        (tmp_path / "__0_0.distcp").unlink()
    else:
        (tmp_path / "__0_0.distcp").write_bytes(bytes(nbytes))
    with pytest.raises(CommitError, match=r"__0_0\.distcp should hold 5 bytes"):
        publish(storage, b"metadata", save_id="0a", manifests=[ref])
    assert not (tmp_path / METADATA).exists()


def test_a_rank_that_publishes_alone_sweeps_what_is_its_own(storage: Storage, tmp_path: Path) -> None:
    for save_id in ("0a", "0b"):
        for rank in (0, 1, 11):
            ref = write_rank(storage, save_id, rank, save_id.encode())
            publish(storage, f"{save_id} {rank}".encode(), save_id=save_id, manifests=[ref], rank=rank)
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
        self.fail_at = fail_at
        self.calls = 0

    def step(self, what: str) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            raise WriteError(f"{what}: no space left [ENOSPC]", errno=28, path=f"{self.url}/{what}")

    def prepare(self) -> None:
        self.step("prepare")
        self.inner.prepare()

    def create_image(self, names: Sequence[str]) -> ImageFile:
        self.step("create_image")
        return self.inner.create_image(names)

    def put(self, name: str, data: bytes) -> None:
        self.step(f"put {name}")
        self.inner.put(name, data)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray | None:
        self.step(f"read {name}")
        return self.inner.read(name, offset, nbytes)

    def list(self, prefix: str = "") -> dict[str, int]:
        self.step(f"list {prefix}")
        return self.inner.list(prefix)

    def delete(self, name: str) -> None:
        self.step(f"delete {name}")
        self.inner.delete(name)


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
        (lambda manifest, record: record.write_bytes(b'{"version": 1}'), IntegrityError),
        (lambda manifest, record: record.write_bytes(record.read_bytes()[:-9]), IntegrityError),
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


def test_a_late_sweep_spares_a_newer_checkpoint(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that stalls between its publication and its sweep finds another one committed by then."""
    from distckpt import commit

    sweep = commit._sweep
    newer: list[bytes] = []

    def stalled(swept: Storage, names: Sequence[str]) -> None:
        if not newer:
            newer.append(b"")
            newer[0] = save(storage, "beef")
        sweep(swept, names)

    monkeypatch.setattr(commit, "_sweep", stalled)
    save(storage, "cafe")
    assert bytes(storage.read(METADATA) or b"") == newer[0]
    integrity = load_integrity(storage, newer[0])
    assert integrity is not None
    present = storage.list()
    assert {name for name in present if name.endswith(".beef")} == {"__0_0.distcp.beef", "__1_0.distcp.beef"}

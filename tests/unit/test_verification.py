"""Verification of checkpoints that are made byte by byte, without torch."""

from __future__ import annotations

import errno
import os
import pickle
import struct
import subprocess
import sys
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

from distckpt.commit import claim, leftovers, publish
from distckpt.errors import WriteError
from distckpt.manifest import METADATA, ItemTable, Manifest, record_name, write_manifest
from distckpt.storage import Storage, open_storage
from distckpt.verification import default_jobs, survey, verify
from distckpt.worker import CHECKSUM_BLOCK_BYTES, block_spans, checksum
from faults.memory_storage import MemoryStorage

BLOCK = CHECKSUM_BLOCK_BYTES
IMAGE = "__0_0.distcp"


def commit_file(
    folder: Path,
    items: list[tuple[int, int]],
    nbytes: int,
    *,
    has_checksums: bool = True,
    rank: int | None = None,
    save_id: str = "0a",
) -> Storage:
    """Commit one file with items at (offset, size) and zeros around them; item i is called `item{i}`."""
    storage = open_storage(folder)
    storage.prepare()
    number = rank or 0
    image = f"__{number}_0.distcp"
    data = bytearray(nbytes)
    random = Random(0)
    packed = b""
    for offset, size in items:
        # No byte is zero: a change of any of them shows.
        data[offset : offset + size] = random.randbytes(size).replace(b"\0", b"\1")
        for at, length in block_spans(offset, size):
            packed += struct.pack("<I", checksum(data[at : at + length]))
    claimed = claim(storage, save_id, rank)
    (folder / image).write_bytes(data)
    table = ItemTable(
        [f"item{index}" for index in range(len(items))],
        [[0]] * len(items),
        [0] * len(items),
        [offset for offset, _ in items],
        [size for _, size in items],
    )
    checksums = packed if has_checksums else b""
    manifest = Manifest(save_id, number, "torch_dist", "digest", {image: nbytes}, [checksums], table)
    details = {"world": 1, "format": "torch_dist", "time": 1e9}
    metadata = pickle.dumps(f"metadata of {save_id} {number}")
    publish(storage, metadata, claimed, [write_manifest(storage, manifest)], details)
    return storage


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def found(storage: Storage, jobs: int = 1) -> list[tuple[str, str | None, int, int]]:
    report = verify(storage, jobs=jobs)
    assert report.status == ("damaged" if report.findings else "complete")
    return [(finding.kind, finding.item, finding.start, finding.end) for finding in report.findings]


LARGE = [(4096, 5 * BLOCK), (6 * BLOCK, 10), (6 * BLOCK + 64, 0), (6 * BLOCK + 64, 100)]
LARGE_BYTES = 6 * BLOCK + 1000


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize(
    ("position", "finding"),
    [
        (0, ("damaged", None, 0, 1)),
        (4095, ("damaged", None, 4095, 4096)),
        (4096, ("damaged", "item0", 4096, BLOCK)),
        (BLOCK - 1, ("damaged", "item0", 4096, BLOCK)),
        (BLOCK, ("damaged", "item0", BLOCK, 2 * BLOCK)),
        (2 * BLOCK, ("damaged", "item0", 2 * BLOCK, 3 * BLOCK)),
        (5 * BLOCK + 4095, ("damaged", "item0", 5 * BLOCK, 5 * BLOCK + 4096)),
        (5 * BLOCK + 4096, ("damaged", None, 5 * BLOCK + 4096, 5 * BLOCK + 4097)),
        (6 * BLOCK - 1, ("damaged", None, 6 * BLOCK - 1, 6 * BLOCK)),
        (6 * BLOCK, ("damaged", "item1", 6 * BLOCK, 6 * BLOCK + 10)),
        (6 * BLOCK + 10, ("damaged", None, 6 * BLOCK + 10, 6 * BLOCK + 11)),
        (6 * BLOCK + 163, ("damaged", "item3", 6 * BLOCK + 64, 6 * BLOCK + 164)),
        (6 * BLOCK + 164, ("damaged", None, 6 * BLOCK + 164, 6 * BLOCK + 165)),
        (LARGE_BYTES - 1, ("damaged", None, LARGE_BYTES - 1, LARGE_BYTES)),
    ],
)
def test_a_flip_is_found_in_its_block(
    tmp_path: Path, position: int, finding: tuple[str, str | None, int, int], jobs: int
) -> None:
    storage = commit_file(tmp_path, LARGE, LARGE_BYTES)
    flip(tmp_path / IMAGE, position)
    assert found(storage, jobs) == [finding]


@pytest.mark.slow
def test_all_is_compared_once_whatever_the_threads(tmp_path: Path) -> None:
    storage = commit_file(tmp_path, LARGE, LARGE_BYTES)
    for jobs in (1, 2, 5, None):
        seen: list[tuple[int, int]] = []
        report = verify(storage, jobs=jobs, on_progress=lambda *told, seen=seen: seen.append(told))
        assert (report.status, report.findings) == ("complete", [])
        assert (report.num_files, report.num_items) == (4, 4)
        small = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.suffix == ".json")
        assert report.nbytes == LARGE_BYTES + small + (tmp_path / METADATA).stat().st_size
        assert [done for done, _ in seen] == sorted({done for done, _ in seen})
        assert seen[-1] == (LARGE_BYTES, LARGE_BYTES)
        assert {total for _, total in seen} == {LARGE_BYTES}
    assert default_jobs() >= 1


@pytest.mark.slow
def test_damage_of_blocks_in_a_row_is_one_finding(tmp_path: Path) -> None:
    storage = commit_file(tmp_path, [(0, 4 * BLOCK), (4 * BLOCK, 3 * BLOCK)], 7 * BLOCK)
    for position in (1, BLOCK, 3 * BLOCK, 4 * BLOCK):
        flip(tmp_path / IMAGE, position)
    expected = [
        ("damaged", "item0", 0, 2 * BLOCK),
        ("damaged", "item0", 3 * BLOCK, 4 * BLOCK),
        ("damaged", "item1", 4 * BLOCK, 5 * BLOCK),
    ]
    for jobs in (1, 4):
        assert found(storage, jobs) == expected
    assert verify(storage).findings[0].message.startswith("2 blocks in a row; the first: ")


def test_the_end_of_a_wide_gap_is_compared(tmp_path: Path) -> None:
    storage = commit_file(tmp_path, [(300_000, 10)], 600_000)
    for first, last in ((0, 1), (65_536, 65_540), (299_998, 300_000), (500_000, 500_001), (599_999, 600_000)):
        flip(tmp_path / IMAGE, first)
        flip(tmp_path / IMAGE, last - 1) if last - 1 > first else None
        assert found(storage) == [("damaged", None, first, last)]
        flip(tmp_path / IMAGE, first)
        flip(tmp_path / IMAGE, last - 1) if last - 1 > first else None


@pytest.mark.slow
def test_a_cut_in_a_block_says_what_is_lost(tmp_path: Path) -> None:
    storage = commit_file(tmp_path, LARGE, LARGE_BYTES)
    os.truncate(tmp_path / IMAGE, 5 * BLOCK - 7)
    flip(tmp_path / IMAGE, BLOCK)
    for jobs in (1, 2):
        assert found(storage, jobs) == [
            ("damaged", "item0", BLOCK, 2 * BLOCK),
            ("size", None, 5 * BLOCK - 7, LARGE_BYTES),
            ("size", "item0", 5 * BLOCK - 7, 5 * BLOCK + 4096),
            ("size", "item1", 6 * BLOCK, 6 * BLOCK + 10),
            ("size", "item3", 6 * BLOCK + 64, 6 * BLOCK + 164),
        ]


def test_files_without_items_and_saves_without_files_are_whole(tmp_path: Path) -> None:
    assert found(commit_file(tmp_path / "zeros", [], 5000)) == []
    assert found(commit_file(tmp_path / "empty", [], 0)) == []
    assert found(commit_file(tmp_path / "no bytes", [(0, 0)], 0)) == []
    assert verify(open_storage(tmp_path / "no bytes")).has_checksums


def test_without_checksums_only_sizes_are_compared(tmp_path: Path) -> None:
    storage = commit_file(tmp_path, [(0, 100)], 100, has_checksums=False)
    report = verify(storage)
    assert (report.status, report.has_checksums) == ("complete", False)
    assert report.nbytes < 2000
    flip(tmp_path / IMAGE, 5)
    assert found(storage) == []
    os.truncate(tmp_path / IMAGE, 99)
    assert found(storage) == [("size", None, 99, 100), ("size", "item0", 99, 100)]


class BadDisk:
    """A storage of which some bytes, or names, cannot be read."""

    def __init__(self, inner: Storage, name: str, first: int, end: int) -> None:
        self.inner = inner
        self.url = inner.url
        self.spec: dict[str, str] = {}
        self.name, self.first, self.end = name, first, end

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray | None:
        end = self.end if nbytes is None else offset + nbytes
        if name == self.name and offset < self.end and end > self.first:
            raise WriteError(f"cannot read {self.url}/{name}: Input/output error [EIO]", errno=errno.EIO)
        return self.inner.read(name, offset, nbytes)


@pytest.mark.slow
def test_bytes_that_cannot_be_read_do_not_hide_the_others(tmp_path: Path) -> None:
    storage = commit_file(tmp_path, [(0, 7 * BLOCK), (7 * BLOCK, 10), (7 * BLOCK + 64, 10)], 7 * BLOCK + 74)
    flip(tmp_path / IMAGE, 6 * BLOCK)
    flip(tmp_path / IMAGE, 0)
    bad: Any = BadDisk(storage, IMAGE, 2 * BLOCK + 1, 3 * BLOCK + 5)
    assert found(bad, 3) == [
        ("damaged", "item0", 0, BLOCK),
        ("unreadable", None, 2 * BLOCK, 4 * BLOCK),
        ("unreadable", "item0", 2 * BLOCK, 4 * BLOCK),
        ("damaged", "item0", 6 * BLOCK, 7 * BLOCK),
    ]
    bad = BadDisk(storage, IMAGE, 7 * BLOCK + 70, 7 * BLOCK + 71)
    assert found(bad)[1:] == [
        ("damaged", "item0", 6 * BLOCK, 7 * BLOCK),
        ("unreadable", None, 7 * BLOCK, 7 * BLOCK + 74),
        ("unreadable", "item1", 7 * BLOCK, 7 * BLOCK + 10),
        ("unreadable", "item2", 7 * BLOCK + 64, 7 * BLOCK + 74),
    ]


@pytest.mark.parametrize("which", ["metadata", "record", "manifest", "owner"])
def test_a_record_that_cannot_be_read_is_a_finding(tmp_path: Path, which: str) -> None:
    storage = commit_file(tmp_path, [(0, 10)], 10)
    name = {
        "metadata": METADATA,
        "record": record_name((tmp_path / METADATA).read_bytes()),
        "manifest": ".distckpt/0a/rank-00000.json",
        "owner": ".distckpt/owner",
    }[which]
    bad: Any = BadDisk(storage, name, 0, 1 << 30)
    report = verify(bad)
    assert report.status == "damaged"
    assert [(finding.kind, finding.file) for finding in report.findings] == [("unreadable", name)]
    if which != "owner":
        assert survey(bad).status == "damaged"
        assert "EIO" in str(survey(bad).message)


def test_damaged_metadata_does_not_hide_damaged_files(tmp_path: Path) -> None:
    storage = commit_file(tmp_path, [(0, 10), (64, 10)], 74)
    flip(tmp_path / METADATA, 1)
    flip(tmp_path / IMAGE, 70)
    report = verify(storage)
    assert {(finding.kind, finding.file, finding.item) for finding in report.findings} == {
        ("damaged", METADATA, None),
        ("damaged", IMAGE, "item1"),
    }


def test_of_two_records_the_one_whose_files_are_there_is_taken(tmp_path: Path) -> None:
    storage = commit_file(tmp_path, [(0, 10)], 10)
    record = tmp_path / record_name((tmp_path / METADATA).read_bytes())
    kept = record.read_bytes()
    commit_file(tmp_path, [(0, 20)], 20, save_id="0b")
    # Left by an earlier save, whose files are gone.
    record.with_name(f"commit-{'0' * 64}.json").write_bytes(kept)
    flip(tmp_path / METADATA, 1)
    flip(tmp_path / IMAGE, 15)
    report = verify(storage)
    assert {(finding.kind, finding.file) for finding in report.findings} == {
        ("damaged", METADATA),
        ("damaged", IMAGE),
    }


def test_what_is_there_decides_the_status(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    assert (verify(storage).status, survey(storage).status) == ("absent", "absent")
    (tmp_path / "notes").touch()
    (tmp_path / "sub").mkdir()
    assert (verify(storage).status, survey(storage).status) == ("absent", "absent")
    (tmp_path / IMAGE).write_bytes(b"1234")
    assert (verify(storage).status, survey(storage).status) == ("partial", "partial")
    assert survey(storage).nbytes == 4
    (tmp_path / METADATA).write_bytes(b"\x80\x04N.")
    assert (verify(storage).status, survey(storage).status) == ("unverifiable", "unverifiable")
    assert verify(storage).findings == []
    (tmp_path / METADATA).unlink()
    (tmp_path / IMAGE).unlink()
    claim(storage, "0a")
    assert (verify(storage).status, survey(storage).status) == ("partial", "partial")


def test_survey_says_what_the_record_says(tmp_path: Path) -> None:
    summary = survey(commit_file(tmp_path / "step-00000012", [(0, 10), (64, 10)], 100))
    assert (summary.status, summary.step, summary.message) == ("complete", 12, None)
    assert (summary.nbytes, summary.num_files, summary.num_items) == (100, 1, 2)
    assert (summary.time, summary.world, summary.format, summary.save_id) == (1e9, 1, "torch_dist", "0a")
    flip(tmp_path / "step-00000012" / IMAGE, 5)
    assert survey(open_storage(tmp_path / "step-00000012")).status == "complete", "it reads no files"
    os.truncate(tmp_path / "step-00000012" / IMAGE, 99)
    summary = survey(open_storage(tmp_path / "step-00000012"))
    assert summary.status == "damaged"
    assert "99 bytes, not 100" in str(summary.message)
    (tmp_path / "step-00000012" / IMAGE).unlink()
    assert "is missing" in str(survey(open_storage(tmp_path / "step-00000012")).message)


@pytest.mark.parametrize("when", [None, "now", 10**400, float("nan"), float("inf"), -1e300])
def test_a_time_that_is_none_is_not_shown(tmp_path: Path, when: object) -> None:
    storage = open_storage(tmp_path)
    publish(storage, b"\x80\x04N.", claim(storage, "0a"), [], {"time": when, "world": "two", "format": 5})
    summary = survey(storage)
    assert (summary.time, summary.world, summary.format) == (None, None, "5")


def test_each_rank_that_publishes_alone_is_compared(tmp_path: Path) -> None:
    for rank in range(3):
        commit_file(tmp_path, [(0, 10)], 10, rank=rank)
    storage = open_storage(tmp_path)
    report = verify(storage)
    assert (report.status, report.num_items, report.findings) == ("complete", 3, [])
    assert survey(storage).world == 3
    flip(tmp_path / "__2.metadata", 0)
    flip(tmp_path / "__1_0.distcp", 0)
    assert [finding.file for finding in verify(storage).findings] == ["__1_0.distcp", "__2.metadata"]


def test_leftovers_are_extra(tmp_path: Path) -> None:
    storage = commit_file(tmp_path, [(0, 10)], 10)
    for name in (
        "__3_0.distcp.0b",
        ".metadata.0b.tmp",
        ".distckpt/0b/rank-00000.json",
        ".distckpt/commit-0b.json",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"12345")
    report = verify(storage)
    assert report.status == "complete"
    assert {finding.kind for finding in report.findings} == {"extra"}
    folders = {name for name in leftovers(storage) if name.endswith("/")}
    assert {finding.file for finding in report.findings} == set(leftovers(storage)) - folders
    assert {finding.end for finding in report.findings} == {5}


def test_a_save_that_replaces_the_checkpoint_meanwhile_is_no_damage(tmp_path: Path) -> None:
    storage = commit_file(tmp_path, [(0, 10)], 10)

    class Overtaken(BadDisk):
        reads = 0

        def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray | None:
            data = self.inner.read(name, offset, nbytes)
            if name == METADATA:
                Overtaken.reads += 1
                if Overtaken.reads == 1:
                    (tmp_path / IMAGE).rename(tmp_path / "old")
                    commit_file(tmp_path, [(0, 20)], 20, save_id="0b")
            return data

    overtaken: Any = Overtaken(storage, "", 0, 0)
    report = verify(overtaken, jobs=1)
    assert (report.status, report.findings, report.num_items) == ("complete", [], 1)
    commit_file(tmp_path, [(0, 10)], 10)
    Overtaken.reads = 0
    assert survey(overtaken).status == "complete"


def test_a_storage_without_a_spec_is_read_by_the_callers_thread(tmp_path: Path) -> None:
    commit_file(tmp_path, [(0, 10)], 3 * BLOCK)
    threads = set()

    class Watched(MemoryStorage):
        def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray | None:
            threads.add(threading.current_thread())
            return super().read(name, offset, nbytes)

    report = verify(Watched(MemoryStorage.of(tmp_path).files), jobs=4)
    assert report.status == "complete"
    assert threads == {threading.current_thread()}


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 3])
def test_an_error_of_the_caller_ends_all_threads(tmp_path: Path, jobs: int) -> None:
    storage = commit_file(tmp_path, [(0, 20 * BLOCK)], 20 * BLOCK)

    def refuse(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(storage, jobs=jobs, on_progress=refuse)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("distckpt-verify")]


@pytest.mark.slow
def test_memory_is_bounded(tmp_path: Path) -> None:
    commit_file(tmp_path, [(0, 30 * BLOCK)], 30 * BLOCK)
    code = (
        "import resource, sys\n"
        "sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from distckpt.storage import open_storage\n"
        "from distckpt.verification import verify\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"report = verify(open_storage(Path({str(tmp_path)!r})), jobs=2)\n"
        "assert report.status == 'complete', report\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # KiB; two threads with two blocks each, of the thirty, and what malloc keeps.
    assert int(done.stdout) < 12 * BLOCK // 1024


def test_an_item_in_two_thousand_is_found(tmp_path: Path) -> None:
    items = [(64 * index, 40 + index % 24) for index in range(2000)]
    storage = commit_file(tmp_path, items, 64 * 2000)
    for index in (0, 1, 999, 1998, 1999):
        flip(tmp_path / IMAGE, 64 * index + 20)
        assert found(storage) == [("damaged", f"item{index}", 64 * index, 64 * index + 40 + index % 24)]
        flip(tmp_path / IMAGE, 64 * index + 20)

"""What a commit costs the coordinator of many ranks: simulated participants, real words, manifests and files.

Every participant has some items of its own, one chunk each of tensors that all of them share out, as FSDP2
leaves them. Participants are simulated in what they say and write; what the coordinator does is what it does
in a save: it hears of all of them, reads their manifests, puts the metadata together, and publishes it.

Beside it: building the same `Metadata` out of plain numbers, and pickling it, as torch does.
"""

from __future__ import annotations

import argparse
import copy
import json
import pickle
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import tmpfs_for
from torch import distributed
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from distckpt.assembly import assemble
from distckpt.collector import collector_paused
from distckpt.commit import claim, publish
from distckpt.coordination import StoreCoordinator
from distckpt.manifest import ItemTable, Manifest, read_partials, write_manifest
from distckpt.meeting import Meeting
from distckpt.metadata import pickle_metadata
from distckpt.ownership import Shares
from distckpt.storage import open_storage

_ROWS = 4
_COLUMNS = 1024


def table_of(rank: int, world: int, num_items: int) -> ItemTable:
    """Return what `rank` has: a few rows of each of `num_items` tensors."""
    fqns = [f"model.layers.{number // 10}.block.{number % 10}.weight" for number in range(num_items)]
    entry = [[world * _ROWS, _COLUMNS], [_ROWS, _COLUMNS], "float32", True]
    return ItemTable(
        fqns,
        [[rank * _ROWS, 0]] * num_items,
        [0] * num_items,
        [number * _ROWS * _COLUMNS * 4 for number in range(num_items)],
        [_ROWS * _COLUMNS * 4] * num_items,
        [[*entry, fqn.split("."), False] for fqn in fqns],
    )


def build_with_torch(world: int, num_items: int) -> tuple[float, float]:
    """Return the seconds to build the Metadata of all and to pickle it as torch does."""
    tables = [table_of(rank, world, num_items) for rank in range(world)]
    started = time.perf_counter()
    entries: dict[str, Any] = {}
    storage_data: dict[MetadataIndex, _StorageInfo] = {}
    with collector_paused():
        for rank, table in enumerate(tables):
            assert table.entries is not None
            for fqn, offset, start, nbytes, (size, sizes, *_) in zip(
                table.fqns, table.chunks, table.offsets, table.sizes, table.entries, strict=True
            ):
                entry = entries.get(fqn)
                if entry is None:
                    properties = TensorProperties(dtype=torch.float32, requires_grad=True)
                    entry = entries[fqn] = TensorStorageMetadata(properties, torch.Size(size), [])
                offsets = torch.Size(offset or ())
                index = MetadataIndex(fqn, offsets, len(entry.chunks))
                entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size(sizes)))
                storage_data[index] = _StorageInfo(f"__{rank}_0.distcp", start, nbytes)
        metadata = Metadata(entries, planner_data={}, storage_data=storage_data)
        built = time.perf_counter()
        pickle.dumps(metadata)
    return built - started, time.perf_counter() - built


def commit(root: Path, world: int, num_items: int) -> dict[str, float]:
    """Let `world` participants say and write what they do in a save; return the coordinator's seconds."""
    storage = open_storage(root)
    storage.prepare()
    server = distributed.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    ranks = list(range(world))
    coordinator = StoreCoordinator(server, 0, ranks)
    first = Meeting(coordinator, "1.1", timeout_s=60, where=storage.url)
    claimed = claim(storage, "0a" * 16)
    for rank in ranks:
        name = f"__{rank}_0.distcp.{claimed.save_id}"
        table = table_of(rank, world, num_items)
        nbytes = sum(table.sizes)
        with open(root / name, "wb") as file:
            file.truncate(nbytes)
        write_manifest(
            storage,
            Manifest(
                claimed.save_id, rank, "torch_dist", "", {name: nbytes}, [b""], table, Shares()._asdict()
            ),
        )
        # Through one connection: a process has not so many descriptors.
        own = copy.copy(coordinator)
        own.rank = rank
        meeting = Meeting(own, "1.1", timeout_s=60, where=storage.url) if rank else first
        meeting.say("written" if rank else "writing", save_id=claimed.save_id)
    seconds = {}
    started = last = time.perf_counter()

    def lap(what: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[what], last = now - last, now

    first.await_written()
    lap("hear")
    manifests = read_partials(storage, claimed.save_id, ranks, lambda: claimed.check(storage))
    lap("read")
    with collector_paused():
        metadata = assemble(manifests, storage.url, claimed.save_id)
        lap("assemble")
        data = pickle_metadata(metadata, {})
        assert len(metadata.storage_data or ()) == world * num_items
        # As in a save: nothing of it is there any more when the collector runs.
        del metadata
    lap("pickle")
    publish(storage, data, claimed, [manifest.ref for manifest in manifests])
    first.say("committed")
    lap("publish")
    return {**seconds, "total": last - started, "metadata_mib": len(data) / (1 << 20)}


def main() -> None:
    """Measure, and print a line of JSON for each number of participants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--items", type=int, default=200, help="of each participant")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    # What many ranks make durable one after the other here takes a disk minutes.
    place = tmpfs_for(1 << 30)
    for world in given.worlds:
        rows, ceilings = [], []
        for _ in range(given.repeats):
            ceilings.append(build_with_torch(world, given.items))
            root = Path(tempfile.mkdtemp(prefix="participants-", dir=place))
            try:
                rows.append(commit(root, world, given.items))
            finally:
                shutil.rmtree(root)
        torch_s = statistics.median(map(sum, ceilings))
        found = {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}
        print(
            json.dumps({
                "participants": world,
                "items": given.items,
                "torch_s": round(torch_s, 4),
                "ratio": round(found["total"] / torch_s, 3),
                **found,
            }),
            flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()

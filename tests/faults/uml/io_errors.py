"""Runs in a virtual machine: a disk that refuses every write from some moment on, under a real ext4.

For each moment and way to save, a writer commits one checkpoint and overwrites it by another; the disk fails
from the moment on. A line of the output for each says what the save failed with. The old checkpoint
must load, at once and after the disk was repaired and mounted anew, and the same writer must be able to save
again.
"""

from __future__ import annotations

import torch

from distckpt import StorageWriter, WriteError
from faults.checkpoints import (
    KIB,
    MIB,
    assert_is_clean,
    error_of,
    load,
    on_event,
    same,
    save,
    save_in,
    say,
    state_of,
)
from faults.uml.disk import MOUNT, Disk

PATH = f"{MOUNT}/checkpoint"
# What is small goes through the page cache, where only fsync can fail; what is large goes past it.
MOMENTS = (
    ("before", 8 * MIB),
    ("parts.pushed", 256 * KIB),
    ("parts.pushed", 8 * MIB),
    ("files.written", 8 * MIB),
    ("rank.written", 8 * MIB),
)


def fail_and_repair(disk: Disk, moment: str, workers: int, mode: str, nbytes: int, number: int) -> WriteError:
    old, new, third = (state_of(number + i, nbytes) for i in range(3))
    with StorageWriter(dist_ckpt_workers=workers) as writer:
        save(writer, PATH, old)
        if moment == "before":
            disk.fail_writes()
        with on_event(moment, lambda _: disk.fail_writes()):
            error = error_of(lambda: save_in(mode, writer, PATH, new))
        assert isinstance(error, WriteError), repr(error)
        assert same(load(PATH, old), old), "with the disk failing"
        # Refused as long as anybody, a worker for one, has a file open there.
        disk.unmount(timeout_s=0)
        disk.renew()
        disk.mount()
        assert same(load(PATH, old), old), "with the disk repaired"
        save_in(mode, writer, PATH, third)
        assert same(load(PATH, third), third)
        assert_is_clean(PATH)
    return error


def main() -> None:
    torch.set_num_threads(1)
    disk = Disk()
    disk.mount()
    number = 0
    for workers, mode in ((1, "sync"), (2, "async")):
        for moment, nbytes in MOMENTS:
            number += 3
            error = fail_and_repair(disk, moment, workers, mode, nbytes, number)
            say(moment, error.errno, error.rank, error.lane, error.path)
    disk.unmount()


if __name__ == "__main__":
    main()

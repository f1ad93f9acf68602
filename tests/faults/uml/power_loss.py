"""Runs in a virtual machine: overwrites a checkpoint on a real ext4, and loses the power at each point of it.

usage: power_loss.py WORKERS MODE FIRST STEP

For every STEP-th point from FIRST, a child commits one checkpoint, overwrites it by another, and is cut off
there: what is on the disk then stays, what the kernel still held in memory is gone. The file system is
mounted anew and loaded from. The next child saves over what the last one left.

A line of the output for each point says what was found (old, new, mixed or damaged), and when it was:

    before    before the metadata were renamed
    during    they were renamed, and are not yet known to be durable
    after     they are durable
    returned  the save had returned

and before which call. The first line is of a save in which fsync does nothing: what it is for must be seen to
be lost then, or the rest would prove nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from distckpt import StorageWriter
from faults.checkpoints import MIB, assert_is_clean, load, on_event, pids_of, same, save_in, say, state_of
from faults.uml.disk import MOUNT, Disk

PATH = f"{MOUNT}/checkpoint"
NBYTES = 8 * MIB
CALLS = ("fsync", "pwritev", "write")
AUDITED = {"os.mkdir", "os.remove", "os.rename", "os.rmdir"}
# Of the time in which workers write, whose calls nobody counts.
FRACTIONS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9)


@dataclass
class Round:
    """One overwrite: two states by their numbers, and when it is cut off."""

    number: int
    workers: int
    mode: str
    call: int = -1
    """Before which call; -1: before none."""
    delay_s: float = -1
    """How long after the workers began to write; -1: never."""
    has_fsync: bool = True


def overwrite(disk: Disk, this: Round, tell: int) -> None:
    """Save the states `number` and `number + 1`, and lose the power during the second save or after it."""
    seen = 0
    lock = threading.Lock()
    written: list[float] = []
    phase = "before"

    def cut_off(why: str) -> None:
        with lock:
            # At once, for the disk takes a while.
            for pid in pids_of(writer) if this.workers > 1 else []:
                os.kill(pid, signal.SIGSTOP)
            if why:
                os.write(tell, why.replace(PATH, "").encode())
            disk.lose_writes()
            if not why:
                # What the other threads have come to meanwhile.
                when = "before" if phase == "before" else "during"
                os.write(tell, f"{when} {this.delay_s:.4f} s".encode())
            for pid in pids_of(writer) if this.workers > 1 else []:
                os.kill(pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    def happens(what: str) -> None:
        nonlocal seen
        with lock:
            seen += 1
            is_here = seen == this.call
        if is_here:
            cut_off(f"{phase} {what}")

    def audit(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal phase
        is_new = name == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        if (name in AUDITED or is_new) and str(arguments[0]).startswith(PATH):
            happens(f"{name} {arguments[0]}")
        if name == "os.rename" and arguments[1] == f"{PATH}/.metadata":
            phase = "during"

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(fd: int, *arguments: Any) -> Any:
            nonlocal phase
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith(PATH):
                happens(f"{name} {target}")
            result = call(fd, *arguments)
            if (name, target, phase) == ("fsync", PATH, "during"):
                phase = "after"
            return result

        return wrapper

    def note(_: object) -> None:
        written.append(time.monotonic())
        if this.delay_s >= 0 and len(written) == 1:
            threading.Timer(this.delay_s, cut_off, [""]).start()

    with StorageWriter(dist_ckpt_workers=this.workers) as writer:
        save_in(this.mode, writer, PATH, state_of(this.number, NBYTES))
        assert_is_clean(PATH)
        if not this.has_fsync:
            os.fsync = lambda fd: None
        for name in CALLS:
            setattr(os, name, counted(name, getattr(os, name)))
        sys.addaudithook(audit)
        with on_event("parts.pushed", note), on_event("files.written", note):
            save_in(this.mode, writer, PATH, state_of(this.number + 1, NBYTES))
        cut_off(f"returned {written[-1] - written[0]}")


def in_child(work: Callable[[int], None]) -> tuple[int, str]:
    """Run `work` in a process of its own; returns how it ended and what it told."""
    ear, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ear)
            work(tell)
        except BaseException:  # noqa: BLE001 - the top frame of a process
            traceback.print_exc()
        os._exit(1)
    os.close(tell)
    with os.fdopen(ear, "rb") as file:
        told = file.read().decode()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), told


def found_in(number: int) -> str:
    """Say what the checkpoint is."""
    old, new = state_of(number, NBYTES), state_of(number + 1, NBYTES)
    try:
        found = load(PATH, old)
    except Exception:  # noqa: BLE001 - whatever it fails with is told
        traceback.print_exc()
        return "damaged"
    return "old" if same(found, old) else "new" if same(found, new) else "mixed"


def main(workers: int, mode: str, first: int, step: int) -> None:
    torch.set_num_threads(1)
    disk = Disk()
    disk.mount()
    number = -1

    def play(**when: Any) -> str:
        nonlocal number
        number += 2
        this = Round(number, when.pop("workers", workers), when.pop("mode", mode), **when)
        status, told = in_child(lambda tell: overwrite(disk, this, tell))
        assert (status, bool(told)) == (-signal.SIGKILL, True), (status, told, this)
        disk.unmount()
        disk.renew()
        disk.mount()
        say(found_in(number), told)
        return told

    play(workers=1, mode="sync", has_fsync=False)
    window_s = float(play().split()[1])
    if workers > 1:
        for fraction in FRACTIONS:
            play(delay_s=fraction * window_s)
    call = first
    while not play(call=call).startswith("returned"):
        call += step
    disk.unmount()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

"""A disk of the virtual machine that can lose its power, or fail,: dm-flakey over /dev/ubda."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

DEVICE = "/dev/ubda"
MOUNT = "/run/disk"
_NAME = "flaky"
_ALWAYS = "0 100000 1"
"""Up for no second, down for as long as any test takes; one feature follows."""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


class Disk:
    """The device and the ext4 on it."""

    def __init__(self) -> None:
        self._sectors = int(Path("/sys/class/block/ubda/size").read_text())
        self._create()
        _run("mkfs.ext4", "-q", "-F", f"/dev/mapper/{_NAME}")

    def _create(self) -> None:
        _run("dmsetup", "create", _NAME, "--noudevsync", "--table", self._table("linear"))
        _run("dmsetup", "mknodes")

    def _table(self, target: str, rest: str = "") -> str:
        return f"0 {self._sectors} {target} {DEVICE} 0 {rest}".strip()

    def mount(self) -> None:
        """Mount it; ext4 replays its journal."""
        _run("mount", "-t", "ext4", f"/dev/mapper/{_NAME}", MOUNT)

    def unmount(self, timeout_s: float = 10) -> None:
        """Unmount it, once nobody has a file open there."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                _run("umount", MOUNT)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
            else:
                return

    def renew(self) -> None:
        """Let it work again, with nothing of it in memory; call between `unmount` and `mount`."""
        _run("dmsetup", "remove", _NAME)
        self._create()

    def lose_writes(self) -> None:
        """From now on acknowledge every write and keep none: the disk holds what a power loss leaves."""
        self._switch(self._table("flakey", f"{_ALWAYS} drop_writes"))

    def fail_writes(self) -> None:
        """From now on refuse every write with EIO."""
        self._switch(self._table("flakey", f"{_ALWAYS} error_writes"))

    def work(self) -> None:
        """Refuse nothing any more."""
        self._switch(self._table("linear"))

    def _switch(self, table: str) -> None:
        # Without --noflush the file system would be frozen, that is, written out, before.
        switch = 'dmsetup suspend --noflush "$1" && dmsetup reload "$1" --table "$2" && dmsetup resume "$1"'
        _run("sh", "-c", switch, "sh", _NAME, table)

"""Mounts that one program alone sees, and that go when it ends (see programs.py)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from faults.checkpoints import NO_MOUNT, say

_MS_RDONLY, _MS_REMOUNT, _MS_BIND = 1, 32, 4096


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str = "") -> None:
    """Call mount(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = [None if text is None else text.encode() for text in (source, target, kind)]
    if libc.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


@contextlib.contextmanager
def read_only(folder: str) -> Iterator[None]:
    """Make a folder read-only, for root too; the program must have mounts of its own (`mount_tmpfs`)."""
    mount(folder, folder, flags=_MS_BIND)
    mount(folder, folder, flags=_MS_REMOUNT | _MS_BIND | _MS_RDONLY)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def resize_tmpfs(folder: str, nbytes: int) -> None:
    """Give a tmpfs another size."""
    mount("tmpfs", folder, "tmpfs", _MS_REMOUNT, f"size={nbytes}")


def mount_image(image: Path, folder: Path) -> None:
    """Mount an ext4 image; exits with `NO_MOUNT` where that is not possible."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "ext4", "-o", "loop", str(image), str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"cannot mount an image: {getattr(error, 'stderr', '') or error}")
        sys.exit(NO_MOUNT)


def make_image(image: Path, nbytes: int) -> None:
    """Make a sparse image of an empty ext4; exits with `NO_MOUNT` where that is not possible."""
    with image.open("wb") as file:
        file.truncate(nbytes)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, capture_output=True)
    except OSError as error:
        say(f"cannot make an image: {error}")
        sys.exit(NO_MOUNT)


def unmount(folder: Path) -> None:
    """Unmount what nobody uses any more."""
    subprocess.run(["umount", str(folder)], check=True, capture_output=True)

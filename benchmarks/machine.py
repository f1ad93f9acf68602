"""What a figure was measured on: versions, processor, cards, storage, commit; and how much was consumed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

import distckpt

ROOT = Path(__file__).parents[1]
TMPFS = Path("/dev/shm")
GIB = 1 << 30


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in ("torch", "numpy", "crc32c"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return {**found, "distckpt": distckpt.__version__}


def commit() -> str:
    """Return the commit of the working tree, with a mark if there is more than it."""
    try:
        head = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"],
            capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head.stdout.strip()


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def hardware() -> dict[str, Any]:
    cards = []
    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "gpus": cards,
    }


def slug() -> str:
    """Return a short name of the hardware, for names of files."""
    found = hardware()
    card = f"-{len(found['gpus'])}x-{found['gpus'][0]}" if found["gpus"] else ""
    return re.sub(r"[^a-z0-9]+", "-", f"{found['cpu']}-{found['cores']}c{card}".lower()).strip("-")


def storage_type(folder: Path) -> str:
    """Return file system and device of `folder`."""
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, mount, kind = line.split()[:3]
        if folder.resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, f"{kind} on {device}")
    return best[1]


def default_disk() -> Path:
    """Return a directory for scratch files on the file system of the working directory."""
    scratch = Path(tempfile.gettempdir())
    return scratch if scratch.stat().st_dev == Path.cwd().stat().st_dev else Path.cwd()


def tmpfs_for(nbytes: int) -> Path | None:
    """Return a directory in memory that has `nbytes` to spare, or None."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for folder in [TMPFS, *(Path(mount) for mount, kind in mounts if kind == "tmpfs")]:
        if os.access(folder, os.W_OK) and psutil.disk_usage(str(folder)).free >= nbytes:
            return folder
    return None


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """Give a new directory under `parent`, and remove it."""
    with tempfile.TemporaryDirectory(prefix=".benchmark-", dir=parent) as folder:
        yield Path(folder)


def cpu_seconds() -> float:
    """Return the processor time that this process and its children, ended or running, have used so far."""
    used = os.times()
    total = used.user + used.system + used.children_user + used.children_system
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def describe(config: dict[str, Any]) -> dict[str, Any]:
    """Return everything about a run but its figures."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(),
        "load_before": round(os.getloadavg()[0], 2),
        "config": config,
    }

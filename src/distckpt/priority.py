"""Where worker processes run and how far they stand back for the training; which cores are near a device.

Threads: Linux keeps all three settings that `lower` makes for each thread, and threads inherit them. So
`lower` is called on the main thread before others start.

Torch-free.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path

import psutil

__all__ = ["lower", "node_cpus", "parse_cores"]

_NICER = 10
_NICEST = 19
_LOWEST_BEST_EFFORT = 7
# Five digits hold every core that Linux can have (8192), and bound what a long range takes to expand.
_CORES = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


def lower(cores: Sequence[int] = ()) -> None:
    """Make the calling process stand back for others: in CPU time, in storage requests, and by its cores.

    The niceness rises by 10, at most to 19, and storage requests become best effort of level 7, the last;
    a process whose requests are idle ones already keeps that. What the operating system refuses of these two
    stays as it was.

    Args:
        cores: Cores that the process runs on from now on; none: those that it inherited.

    Raises:
        OSError: If the process may not run on all of `cores`.

    Source: sched(7), ioprio_set(2), sched_setaffinity(2).
    """
    if cores:
        os.sched_setaffinity(0, cores)
        # The kernel leaves out, without an error, what is offline or beyond the control group's cpuset.
        missing = sorted(set(cores) - os.sched_getaffinity(0))
        if missing:
            raise OSError(errno.EINVAL, f"this process may not run on cores {missing}")
    process = psutil.Process()
    with contextlib.suppress(psutil.AccessDenied, OSError):
        process.nice(min(process.nice() + _NICER, _NICEST))
    if hasattr(process, "ionice"):
        with contextlib.suppress(psutil.AccessDenied, OSError):
            if process.ionice().ioclass != psutil.IOPRIO_CLASS_IDLE:
                process.ionice(psutil.IOPRIO_CLASS_BE, _LOWEST_BEST_EFFORT)


def node_cpus(pci_address: str, sysfs: Path = Path("/sys")) -> set[int] | None:
    """Return the cores of the NUMA node that a PCI device belongs to.

    Args:
        pci_address: Domain, bus, device and function, for example "0000:17:00.0".
        sysfs: Where sysfs is mounted.

    Returns:
        At least one core; None where nearness makes no difference or is not known: fewer than two nodes have
        memory, the device names no node, the node has no cores, or sysfs cannot be read.

    Source: Documentation/ABI/testing/sysfs-bus-pci (numa_node) and
    Documentation/ABI/stable/sysfs-devices-node (has_memory, nodeX/cpulist) of Linux.
    """
    nodes = sysfs / "devices" / "system" / "node"
    try:
        # Lists of nodes are written as those of cores.
        if len(parse_cores((nodes / "has_memory").read_text())) < 2:
            return None
        # A device without a node says -1, and there is no such directory.
        node = int((sysfs / "bus" / "pci" / "devices" / pci_address.lower() / "numa_node").read_text())
        return set(parse_cores((nodes / f"node{node}" / "cpulist").read_text())) or None
    except (OSError, ValueError):
        return None


def parse_cores(text: str) -> tuple[int, ...]:
    """Read a list of cores as taskset and the kernel write it, for example "8-15,24".

    Args:
        text: Numbers and ranges, both ends included, separated by commas; white space around it is ignored.

    Returns:
        The cores, each once, ascending; none for an empty text.

    Raises:
        ValueError: If `text` is something else; a range whose end is below its start included.
    """
    cores: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        match = _CORES.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"not a list of cores: {text!r}")
        cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(cores))

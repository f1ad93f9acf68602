"""A virtual machine of one process tree: User-Mode Linux, whose kernel has dm-flakey, on the host's files."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from faults.programs import Done

_HERE = Path(__file__).parent
_MODULES = Path("/usr/lib/uml/modules")
_TOOLS = ("linux.uml", "dmsetup", "modprobe", "mkfs.ext4", "cc")
NFS_TOOLS = ("mount.nfs", "rpc.nfsd", "rpc.mountd", "rpcbind", "exportfs", "tc")
"""What nfs.py needs beside: nfs-kernel-server, rpcbind and iproute2."""


def why_not(*tools: str) -> str | None:
    """Say what is missing to start one in which there are `tools`, or None."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [tool for tool in (*_TOOLS, *tools) if shutil.which(tool, path=path) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return None if any(_MODULES.glob("*/kernel")) else f"no kernel modules in {_MODULES}"


def run(
    program: Path,
    *arguments: object,
    folder: Path,
    timeout_s: float,
    disk_bytes: int = 96 << 20,
    memory_mib: int = 1500,
) -> Done:
    """Run a Python program as root of a virtual machine with one empty disk, /dev/ubda.

    Args:
        program: Its file.
        *arguments: Its arguments.
        folder: Empty; holds the disk, and is /run/job in there.
        timeout_s: Seconds until the machine is switched off.
        disk_bytes: Size of the disk.
        memory_mib: Size of its memory, which the host gives page by page.
    """
    shim, disk = folder / "xstate.so", folder / "disk"
    subprocess.run(
        ["cc", "-O2", "-shared", "-fPIC", "-o", shim, _HERE / "xstate.c", "-ldl"], check=True, timeout=60
    )
    modules = folder / "modules" / "lib" / "modules"
    modules.mkdir(parents=True)
    for version in _MODULES.iterdir():
        (modules / version.name).symlink_to(version)
    with disk.open("wb") as file:
        file.truncate(disk_bytes)
    environment = {
        "PYTHONPATH": f"{_HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    words = [sys.executable, "-W", "ignore", program, *arguments]
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    (folder / "job.sh").write_text(f"{exports}exec {shlex.join(map(str, words))}\n")
    command = [
        "linux.uml", f"mem={memory_mib}M", f"ubd0={disk}", "root=/dev/root", "rootfstype=hostfs",
        "rootflags=/", "ro", f"init={_HERE / 'init.sh'}", "con=null", "con0=null,fd:1", "con1=null", "quiet",
        "loglevel=4", f"umid=faults{os.getpid()}", f"uml_dir={folder}/", f"faultjob={folder}",
    ]  # fmt: skip
    console = folder / "console"
    with console.open("wb") as out:
        machine = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"LD_PRELOAD": str(shim), "TMPDIR": "/dev/shm"},
            start_new_session=True,
        )
        try:
            machine.wait(timeout_s)
            has_ended = True
        except subprocess.TimeoutExpired:
            has_ended = False
        finally:
            # Its kernel's threads and its processes are processes of the host, in the same session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(machine.pid, signal.SIGKILL)
            machine.wait()
    disk.unlink()
    status = folder / "status"
    text = "".join(path.read_text(errors="replace") for path in (folder / "err", console) if path.exists())
    out_text = (folder / "out").read_text() if (folder / "out").exists() else ""
    if not has_ended or not status.exists():
        return Done(-1, out_text, f"the machine did not end by itself within {timeout_s} s\n{text}")
    return Done(int(status.read_text()), out_text, text)

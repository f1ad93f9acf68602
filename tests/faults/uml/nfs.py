"""An NFS server of the virtual machine's kernel that can go away, run full and come back, and its mounts."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

EXPORT = "/run/export"
MOUNT = "/run/nfs"
OTHER_MOUNT = "/run/nfs-of-other-host"
_CLONE_NEWNS = 0x20000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 1 << 18
_STATE = "/var/lib/nfs"
_PROC = Path("/proc/fs/nfsd")
_THREADS = 4
_SERVER, _CLIENT = "10.77.0.1", "10.77.0.2"
_OTHER = "other-host"
_OPTIONS = "rw,no_root_squash,insecure,no_subtree_check,fsid=0"


def _run(*command: str, timeout_s: float = 60) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def see_as_other_host() -> None:
    """Have this process and its children see at `MOUNT` what the other host sees there."""
    libc = ctypes.CDLL(None, use_errno=True)
    for function, arguments in (
        (libc.unshare, (_CLONE_NEWNS,)),
        (libc.mount, (b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)),
        (libc.mount, (OTHER_MOUNT.encode(), MOUNT.encode(), None, ctypes.c_ulong(_MS_BIND), None)),
    ):
        if function(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "cannot mount")


class Server:
    """Exports one file system over loopback, as NFS 3 and 4.2.

    Args:
        nbytes: Size of the file system, in memory; 0: the machine's disk, with an ext4.
    """

    def __init__(self, nbytes: int = 0) -> None:
        Path(EXPORT).mkdir()
        _run("mount", "-t", "tmpfs", "tmpfs", _STATE)
        for name in ("v4recovery", "rpc_pipefs", "sm", "sm.bak"):
            Path(_STATE, name).mkdir()
        for name in ("etab", "rmtab", "state"):
            Path(_STATE, name).touch()
        for module in ("nfsd", "nfsv4", "nfsv3", "sch_netem", "veth"):
            _run("modprobe", "-d", "/run/job/modules", module)
        if nbytes:
            _run("mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", EXPORT)
        else:
            _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1,lazy_journal_init=1", "/dev/ubda")
            _run("mount", "-t", "ext4", "/dev/ubda", EXPORT)
        _run("mount", "-t", "nfsd", "nfsd", str(_PROC))
        # As much as other servers take in one request; the kernel's own choice follows from its memory.
        (_PROC / "max_block_size").write_text(str(1 << 20))
        _run("rpcbind", "-w")
        _run("exportfs", "-o", f"{_OPTIONS},sync", f"*:{EXPORT}")
        _run("rpc.nfsd", "--grace-time", "10", "--lease-time", "10", str(_THREADS))
        _run("rpc.mountd")
        self._end_grace()
        # A process that is started while files of the mount are open writes them out first, and so waits for
        # the server, and its parent with it.
        self._shell = subprocess.Popen(
            ["sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def add_host(self) -> None:
        """Add another host, as far as NFS can tell: with a name, an address and caches of its own."""
        inside = ("nsenter", f"--net=/run/netns/{_OTHER}")
        _run("ip", "netns", "add", _OTHER)
        _run("ip", "link", "add", "here", "type", "veth", "peer", "name", "there", "netns", _OTHER)
        _run("ip", "address", "add", f"{_SERVER}/24", "dev", "here")
        _run("ip", "link", "set", "here", "up")
        _run(*inside, "ip", "address", "add", f"{_CLIENT}/24", "dev", "there")
        _run(*inside, "ip", "link", "set", "there", "up")

    def mount_on_other_host(self, options: str, where: str = OTHER_MOUNT) -> None:
        """Mount it there; what that host sees is at `where`."""
        Path(where).mkdir(exist_ok=True)
        source = EXPORT if "vers=3" in options else "/"
        if "vers=3" in options:
            options += ",nolock"
        mount = f"hostname {_OTHER} && mount -t nfs -o {options} {_SERVER}:{source} {where}"
        _run("nsenter", f"--net=/run/netns/{_OTHER}", "unshare", "--uts", "sh", "-c", mount)

    def mount(self, options: str, where: str = MOUNT) -> None:
        """Mount it, with the mount options `options` (`vers` among them)."""
        Path(where).mkdir(exist_ok=True)
        source = EXPORT if "vers=3" in options else "/"
        if "vers=3" in options:
            options += ",nolock"
        _run("mount", "-t", "nfs", "-o", options, f"127.0.0.1:{source}", where)

    def unmount(self, where: str = MOUNT) -> None:
        """Take a mount away, once nobody has a file open there."""
        _run("umount", where)

    def stop(self) -> None:
        """Refuse connections from now on, and cut those that are open."""
        (_PROC / "threads").write_text("0")

    def start(self) -> None:
        """Serve again."""
        (_PROC / "threads").write_text(str(_THREADS))
        self._end_grace()

    def lose_packets(self) -> None:
        """From now on nothing that is sent over loopback arrives."""
        self._tell("tc qdisc add dev lo root netem loss 100%")

    def delay_packets(self, delay_ms: float) -> None:
        """From now on everything that is sent over loopback arrives `delay_ms` milliseconds late."""
        self._tell(f"tc qdisc add dev lo root netem limit 100000 delay {delay_ms}ms")

    def deliver(self) -> None:
        """Lose and delay nothing any more."""
        self._tell("tc qdisc del dev lo root")

    def resize(self, nbytes: int) -> None:
        """Change the size of a file system in memory."""
        _run("mount", "-o", f"remount,size={nbytes}", EXPORT)

    def used_bytes(self) -> int:
        """Return what is used of the file system."""
        found = os.statvfs(EXPORT)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def _tell(self, command: str) -> None:
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f"{command}; echo $?\n")
        self._shell.stdin.flush()
        status = self._shell.stdout.readline()
        assert status == "0\n", f"{command}: {status}"

    def _end_grace(self) -> None:
        # No client waits for the time in which others might reclaim what they had.
        (_PROC / "v4_end_grace").write_text("Y")

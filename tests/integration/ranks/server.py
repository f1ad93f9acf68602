"""A process that imports torch once and forks worlds of gloo ranks on request.

Requests and replies are one JSON object a line, on standard input and output. A rank runs one function, given
by file and name, and its result must be JSON. All processes of a world are one process group, which is killed
when the world has not ended in time; ranks die with this process, and it ends with its input.

It never imports distckpt, so that a rank may run as if that were not installed.
"""

from __future__ import annotations

import atexit
import ctypes
import datetime
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

_TESTS = Path(__file__).parents[2]
_MODULES = (
    "crc32c", "fsspec.implementations.local", "psutil", "pytest", "torch._dynamo", "torch._inductor",
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
)  # fmt: skip
_DIAGNOSIS_S = 2.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def main() -> None:
    """Serve worlds until the input ends."""
    for name in _MODULES:
        importlib.import_module(name)
    # A thread would not survive the fork, but the locks that it holds would.
    assert os.listdir("/proc/self/task") == [str(os.getpid())]
    # Collections in the ranks would otherwise copy every page that is shared with this process.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        reply = _run_world(json.loads(line))
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def _run_world(request: dict[str, Any]) -> list[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    world, deadline = request["world"], time.monotonic() + request["timeout_s"]
    pids: list[int] = []
    pidfds: list[int] = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _rank_main(request, rank, folder, pids[0] if pids else 0)
        pids.append(pid)
        os.setpgid(pid, pids[0])
        pidfds.append(os.pidfd_open(pid))
    poller = select.poll()
    for pidfd in pidfds:
        poller.register(pidfd, select.POLLIN)
    running = set(pidfds)
    while running and time.monotonic() < deadline:
        for pidfd, _ in poller.poll((deadline - time.monotonic()) * 1000):
            poller.unregister(pidfd)
            running.discard(pidfd)
    # Nothing is reaped before this, so the id of the group is still the group's.
    os.killpg(pids[0], signal.SIGKILL)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    replies = []
    for rank, (status, pidfd) in enumerate(zip(statuses, pidfds, strict=True)):
        os.close(pidfd)
        result, log = folder / f"{rank}.json", folder / f"{rank}.log"
        outcome = json.loads(result.read_text()) if result.exists() else {}
        replies.append(
            {
                "late": pidfd in running,
                "status": status,
                "log": log.read_text(errors="replace") if log.exists() else "",
                **outcome,
            }
        )
    shutil.rmtree(folder, ignore_errors=True)
    return replies


def _rank_main(request: dict[str, Any], rank: int, folder: Path, group: int) -> None:
    """Become rank `rank`; does not return."""
    status = 1
    try:
        os.setpgid(0, group)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with open(folder / f"{rank}.log", "wb") as log, open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for the life of the process
        faulthandler.dump_traceback_later(max(1.0, request["timeout_s"] - _DIAGNOSIS_S), file=sys.stderr)
        outcome = _call(request, rank, folder)
        partial = folder / f"{rank}.json.tmp"
        partial.write_text(json.dumps(outcome))
        partial.rename(folder / f"{rank}.json")
        # The end of the interpreter, without tearing down the modules: that takes a second.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        status = 0
    except BaseException:  # noqa: BLE001 - top frame of the process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _call(request: dict[str, Any], rank: int, folder: Path) -> dict[str, Any]:
    from torch import distributed

    world = request["world"]
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    if request["without_distckpt"]:
        sys.modules["distckpt"] = None  # type: ignore[assignment]
    sys.path.insert(0, str(_TESTS))
    function = _load(request["file"]).__dict__[request["function"]]
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=request["timeout_s"]),
    )
    try:
        outcome = {"result": function(**request["arguments"])}
    except BaseException:  # noqa: BLE001 - forwarded to the test
        outcome = {"error": traceback.format_exc()}
    # A barrier here would make a rank that failed hang the others.
    distributed.destroy_process_group()
    return outcome


def _load(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("rank_functions", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()

"""A process that has imported torch once and forks one child for each request: seconds saved on each test.

A child runs one function of a test file as its whole program: it has its own pid, no worker and no thread of
its parent, and leaves through the interpreter's normal exit.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])


def serve() -> dict[str, Any] | None:
    """Answer requests until they end; in a forked child, return what it shall do."""
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                return request
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
    return None


def become(request: dict[str, Any]) -> None:
    """Run the function that `request` names."""
    os.setsid()
    for fd, path in enumerate(("/dev/null", request["out"], request["err"])):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, fd)
        os.close(opened)
    os.chdir(request["cwd"])
    name = f"child_{Path(request['file']).stem}"
    spec = importlib.util.spec_from_file_location(name, request["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    getattr(module, request["function"])(*request["args"])


if __name__ == "__main__":
    import torch

    for imported in ("pytest", "distckpt.reader", "distckpt.writer", "faults.checkpoints"):
        importlib.import_module(imported)
    # Collections in the children would otherwise copy every page that is shared with this process.
    gc.collect()
    gc.freeze()
    todo = serve()
    if todo is not None:
        torch.set_num_threads(1)
        become(todo)

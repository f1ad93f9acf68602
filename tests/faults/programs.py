"""Programs that tests start, crash and look at."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Done:
    """How a program ended: its exit code or the negated signal, and what it printed."""

    status: int
    out: str
    err: str


class Zygote:
    """The parent's side of zygote.py."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name("zygote.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: dict[str, object]) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        # Not the end of its input alone, which a forked child of this process may hold open.
        self.process.terminate()
        self.process.wait(timeout=10)
        self.process.stdin.close()
        self.process.stdout.close()


@dataclass
class Child:
    """A program that runs."""

    zygote: Zygote
    pid: int
    out: Path
    err: Path
    done: Done | None = field(default=None)

    def wait(self, timeout_s: float = 45) -> Done:
        """Wait for its end."""
        if self.done is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                ended, _, _ = select.select([pidfd], [], [], timeout_s)
            finally:
                os.close(pidfd)
            if not ended:
                self.kill()
                raise AssertionError(f"not ended within {timeout_s} s: {self.err.read_text()}")
            self._reap()
        assert self.done is not None
        return self.done

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to it alone."""
        os.kill(self.pid, number)

    def end(self) -> None:
        """End it and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.done is None:
            # Just forked, it has no group yet.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._reap()

    def _reap(self) -> None:
        status = self.zygote.ask({"reap": self.pid})
        self.done = Done(status, self.out.read_text(), self.err.read_text())


class Programs:
    """Runs functions of test files as programs of their own."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self.children: list[Child] = []
        self._zygote = zygote
        self._folder = folder

    def start(self, function: Callable[..., object], *args: object) -> Child:
        """Start `function(*args)`; `args` must be plain JSON values."""
        number = len(self.children)
        out, err = self._folder / f"out{number}", self._folder / f"err{number}"
        out.touch()
        err.touch()
        pid = self._zygote.ask(
            {
                "file": function.__code__.co_filename,
                "function": function.__name__,
                "args": args,
                "out": str(out),
                "err": str(err),
                "cwd": str(self._folder),
            }
        )
        self.children.append(Child(self._zygote, pid, out, err))
        return self.children[-1]

    def run(self, function: Callable[..., object], *args: object, timeout_s: float = 45) -> Done:
        """Run `function(*args)` to its end."""
        return self.start(function, *args).wait(timeout_s)

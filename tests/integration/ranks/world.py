"""The test's side of the server that runs ranks."""

from __future__ import annotations

import inspect
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

_SERVER = Path(__file__).with_name("server.py")
_START_S = 50.0
_GRACE_S = 10.0
# One thread each: several ranks share few cores, and libraries that start threads at import cannot be forked.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


class RankFailure(AssertionError):
    """A rank raised, died or did not end in time; the text has what it printed."""


class Ranks:
    """Runs functions on worlds of real gloo ranks, each a process of its own."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(
        self,
        world: int,
        function: Callable[..., object],
        *,
        timeout_s: float = 40.0,
        may_die: Collection[int] = (),
        without_distckpt: bool = False,
        **arguments: Any,
    ) -> list[Any]:
        """Run `function` on every rank of a new world.

        Args:
            world: Number of ranks.
            function: Function at the top level of its module, which every rank imports anew.
            timeout_s: Seconds after which all of them are killed.
            may_die: Ranks whose end by a signal is expected; their result is None.
            without_distckpt: Whether importing distckpt shall fail on the ranks.
            **arguments: Passed to `function`; JSON.

        Returns:
            What each rank returned, as JSON has it.

        Raises:
            RankFailure: A rank raised, died or did not end in time.
        """
        file = inspect.getsourcefile(function)
        assert file is not None
        replies = self._ask(
            {
                "world": world,
                "file": file,
                "function": function.__name__,
                "timeout_s": timeout_s,
                "without_distckpt": without_distckpt,
                "arguments": arguments,
            },
            timeout_s + _GRACE_S,
        )
        failures = []
        for rank, reply in enumerate(replies):
            died = reply["status"] < 0 and not reply["late"]
            if "result" in reply and reply["status"] == 0 and not reply["late"]:
                continue
            if died and rank in may_die:
                continue
            how = (
                f"did not end within {timeout_s} s"
                if reply["late"]
                else f"ended with status {reply['status']}"
            )
            failures.append(f"rank {rank} of {world} {how}\n{reply.get('error', '')}\n{reply['log']}")
        if failures:
            raise RankFailure("\n".join(failures))
        return [reply.get("result") for reply in replies]

    def close(self) -> None:
        """End the server, and with it whatever still runs."""
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
            self._server = None

    def _ask(self, request: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, str(_SERVER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,
            )
            timeout_s += _START_S
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        readable, _, _ = select.select([self._server.stdout], [], [], timeout_s)
        line = self._server.stdout.readline() if readable else ""
        if not line:
            self.close()
            raise RankFailure("the server of the ranks has ended or does not answer")
        replies: list[dict[str, Any]] = json.loads(line)
        return replies

"""Signals that say that the process will end soon, and after which step all ranks save once more.

    a rank gets the signal          -> tells the others the step that it is at
    the first rank hears of it      -> tells all after which step they save: two after the latest it knows of
    every rank, at each step        asks whether that is known, and whether it is there

No rank waits for another here: in the midst of a step they wait for each other in the training's collectives.

Invariants:
    * A handler that was there before is called as it would have been.
    * The second signal is handled as if this did not exist: what waits for the end of a process gets it.

Torch-free.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
from typing import TYPE_CHECKING, Any

from distckpt.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from distckpt.coordination import Coordinator

__all__ = ["Preemption"]

_LOG = logging.getLogger(__name__)
_MARGIN_STEPS = 2
"""Ranks are at most so many steps apart, and ask at every step: none passes the one that is agreed on."""


class Preemption:
    """Watches for signals; to be made on the main thread.

    Args:
        coordinator: Where the ranks leave word.
        name: Of this watch; the same on all of them, and no other has it.
        signals: What to watch for.

    Raises:
        ConfigError: This is not the main thread, or a signal cannot be handled.
    """

    def __init__(self, coordinator: Coordinator, name: str, signals: Sequence[signal.Signals]) -> None:
        self._coordinator = coordinator
        self._name = name
        self._is_alone = len(coordinator.ranks) == 1
        self._got: signal.Signals | None = None
        self._has_told = self._has_warned = False
        self._last_step: int | None = None
        self._proposed: int | None = None
        """Last step, as the first rank wants it; the others may not have heard."""
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("watch_preemption: Python takes signals on the main thread alone")
        for number in signals:
            try:
                self._before[number] = signal.signal(number, self._handle)
            except (OSError, ValueError) as error:
                self.close()
                raise ConfigError(f"watch_preemption: {number!r} cannot be handled: {error}") from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        before = self._before.get(received)
        is_second = self._got is not None
        self._got = received
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
        elif is_second and before is signal.default_int_handler:
            raise KeyboardInterrupt
        elif is_second and before is signal.SIG_DFL:
            signal.signal(received, signal.SIG_DFL)
            signal.raise_signal(received)

    def is_due(self, step: int) -> bool:
        """Say whether to save now and end; never waits.

        Args:
            step: The step that is complete; every rank asks at every step.
        """
        if self._is_alone:
            return self._got is not None
        if self._last_step is None:
            try:
                self._agree(step)
            except CheckpointError as error:
                # Once: this is asked at every step.
                level = logging.DEBUG if self._has_warned else logging.WARNING
                _LOG.log(level, "of the end of the job nothing can be told or heard: %s", error)
                self._has_warned = True
        return self._last_step is not None and step >= self._last_step

    def _agree(self, step: int) -> None:
        """Tell and hear what there is to."""
        # One key for whoever gets it: what is asked at every step is the same for any number of ranks.
        signalled, final = f"{self._name}.signalled", f"{self._name}.last"
        if self._coordinator.rank == 0:
            told = [int(json.loads(data)) for data in self._coordinator.hear([signalled]).values()]
            if told or self._got is not None:
                if self._proposed is None or self._proposed < step:
                    self._proposed = max([step, *told]) + _MARGIN_STEPS
                # Where it fails nobody may have heard, and this rank does not end by itself; or all have.
                self._coordinator.tell(final, json.dumps(self._proposed).encode())
                self._last_step = self._proposed
            return
        if self._got is not None and not self._has_told:
            self._coordinator.tell(signalled, json.dumps(step).encode())
            self._has_told = True
        for data in self._coordinator.hear([final]).values():
            self._last_step = int(json.loads(data))

    def close(self) -> None:
        """Put the handlers back that were there before, where nobody has put another; idempotent."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}

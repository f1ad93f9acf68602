"""Who takes part in a save, and how long it may wait.

With `dcp.save` the gathers are torch's; what is here is the place of this process among the participants, and
the deadline that every wait of the engine has. No collectives.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Participant:
    """This process's place in one save, as DCP states it.

    Attributes:
        rank: Position among the participants; not the rank in the default group.
        is_coordinator: Whether this rank publishes.
        use_collectives: False if every rank publishes its own part and nobody publishes the whole.
    """

    rank: int = 0
    is_coordinator: bool = True
    use_collectives: bool = True

    @property
    def publishes(self) -> bool:
        """Whether this rank calls `finish`."""
        return self.is_coordinator or not self.use_collectives


class ProgressDeadline:
    """A deadline that moves on whenever something was done.

    Args:
        timeout_s: Seconds without progress after which a wait has failed.
        clock: Monotonic seconds.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._last = clock()

    def progress(self) -> None:
        """Note that something was done."""
        self._last = self._clock()

    @property
    def passed(self) -> bool:
        """Whether nothing was done for too long."""
        return self._clock() - self._last > self.timeout_s

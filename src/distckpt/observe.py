"""Events that tell what a save is doing, for metrics, progress displays, traces and fault tests.

An event with the fields `start_s` and `end_s`, both by `time.monotonic()`, is a span: it tells of something
that has ended, and since when it went on. What fails is no span.

Invariants:
    * `emit` never raises because of a subscriber, and costs one comparison while nobody listens.
    * Subscribers are called in the order of their subscription, on the thread that emits.

Threads: any thread may emit, subscribe and unsubscribe.

Torch-free.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["Event", "emit", "has_subscribers", "span", "subscribe"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        name: What happened.
        time_s: When, by `time.monotonic()`.
        fields: Particulars; read-only.
    """

    name: str
    time_s: float
    fields: Mapping[str, object]


class _Subscription:
    """One call of `subscribe`; the same callback may be subscribed more than once."""

    __slots__ = ("callback", "failed")

    def __init__(self, callback: Callable[[Event], object]) -> None:
        self.callback = callback
        self.failed = False


# Replaced as a whole, never changed in place, so that `emit` can read it without the lock.
_subscriptions: tuple[_Subscription, ...] = ()
_lock = threading.Lock()


def emit(name: str, /, **fields: object) -> None:
    """Tell every subscriber that something happened.

    Args:
        name: What happened.
        **fields: Particulars.
    """
    subscriptions = _subscriptions
    if not subscriptions:
        return
    event = Event(name=name, time_s=time.monotonic(), fields=MappingProxyType(fields))
    for subscription in subscriptions:
        try:
            subscription.callback(event)
        except Exception:
            # An observer's fault must not fail the save that it observes.
            if not subscription.failed:
                subscription.failed = True
                _logger.warning(
                    "subscriber %r failed on event %r; its further failures are not logged",
                    subscription.callback,
                    name,
                    exc_info=True,
                )


@contextlib.contextmanager
def span(name: str, /, **fields: object) -> Iterator[None]:
    """Tell every subscriber how long the block took, unless it fails.

    Args:
        name: What has happened at its end.
        **fields: Particulars, beside `start_s` and `end_s`.
    """
    start_s = time.monotonic()
    yield
    emit(name, start_s=start_s, end_s=time.monotonic(), **fields)


def has_subscribers() -> bool:
    """Say whether anybody would be told of an event."""
    return bool(_subscriptions)


def subscribe(callback: Callable[[Event], object]) -> Callable[[], None]:
    """Call `callback` with every event from now on.

    Args:
        callback: Called on the thread that emits, so it should return at once. What it raises is logged the
            first time and otherwise dropped.

    Returns:
        A function that ends the subscription; calling it again does nothing.
    """
    global _subscriptions
    subscription = _Subscription(callback)
    with _lock:
        _subscriptions = (*_subscriptions, subscription)

    def unsubscribe() -> None:
        global _subscriptions
        with _lock:
            _subscriptions = tuple(one for one in _subscriptions if one is not subscription)

    return unsubscribe

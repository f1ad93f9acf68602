"""Events reach every subscriber, and no subscriber can harm the one who emits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from distckpt import observe
from distckpt.observe import Event, emit, has_subscribers, span, subscribe


@pytest.fixture(autouse=True)
def no_subscriptions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(observe, "_subscriptions", ())
    yield
    assert observe._subscriptions == ()


def test_event_reaches_subscriber_with_time_and_fields() -> None:
    seen: list[Event] = []
    unsubscribe = subscribe(seen.append)
    before = time.monotonic()
    emit("staged", nbytes=3, name="x")
    unsubscribe()
    emit("after")
    [event] = seen
    assert event.name == "staged"
    assert event.fields == {"nbytes": 3, "name": "x"}
    assert before <= event.time_s <= time.monotonic()


def test_event_cannot_be_changed() -> None:
    seen: list[Event] = []
    unsubscribe = subscribe(seen.append)
    emit("staged", nbytes=3)
    unsubscribe()
    with pytest.raises(AttributeError):
        seen[0].name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        seen[0].fields["nbytes"] = 4  # type: ignore[index]


def test_without_subscribers_no_event_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> Event:
        raise AssertionError("an event was built")

    monkeypatch.setattr(observe, "Event", fail)
    emit("staged", nbytes=3)


def test_a_span_tells_since_when_unless_it_fails() -> None:
    seen: list[Event] = []
    assert not has_subscribers()
    end = subscribe(seen.append)
    assert has_subscribers()
    before = time.monotonic()
    with span("planned", rank=1):
        inside = time.monotonic()
    with pytest.raises(KeyError), span("failed"):
        raise KeyError
    end()
    [event] = seen
    assert event.name == "planned"
    start_s, end_s = event.fields["start_s"], event.fields["end_s"]
    assert isinstance(start_s, float)
    assert isinstance(end_s, float)
    assert before <= start_s <= inside <= end_s <= event.time_s
    assert event.fields["rank"] == 1


def test_failing_subscriber_is_logged_once_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: Event) -> None:
        raise RuntimeError(f"cannot take {event.name}")

    seen: list[Event] = []
    ends = [subscribe(fail), subscribe(seen.append)]
    with caplog.at_level(logging.DEBUG, "distckpt"):
        emit("one")
        emit("two")
    for end in ends:
        end()
    assert [event.name for event in seen] == ["one", "two"]
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.exc_info


def test_same_callback_twice_is_two_subscriptions() -> None:
    seen: list[Event] = []
    first, second = subscribe(seen.append), subscribe(seen.append)
    emit("one")
    assert len(seen) == 2
    first()
    first()
    emit("two")
    assert len(seen) == 3
    second()


def test_subscriber_may_unsubscribe_itself() -> None:
    seen: list[str] = []

    def once(event: Event) -> None:
        seen.append(event.name)
        unsubscribe()

    unsubscribe = subscribe(once)
    emit("one")
    emit("two")
    assert seen == ["one"]


def test_subscribing_from_many_threads_loses_none() -> None:
    ends = []
    threads = [
        threading.Thread(target=lambda: ends.extend([subscribe(lambda _: None) for _ in range(50)]))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(observe._subscriptions) == 400
    for end in ends:
        end()

"""A trace holds spans alone, and what it writes is what viewers take."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distckpt.observe import emit, has_subscribers, span
from distckpt.trace import Trace, write_trace


def read(path: Path) -> list[dict[str, Any]]:
    """Return the events of a file, checked against the Trace Event Format."""
    content = json.loads(path.read_text())
    assert content["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = content["traceEvents"]
    slices = defaultdict(list)
    named = set()
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            if event["name"] in ("process_name", "thread_name"):
                assert isinstance(event["args"]["name"], str)
                named.add((event["name"], event["pid"], event["tid"]))
            else:
                assert event["name"] in ("process_sort_index", "thread_sort_index")
                assert isinstance(event["args"]["sort_index"], int)
            continue
        assert event["ph"] == "X"
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        slices[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
    for (pid, tid), row in slices.items():
        assert ("process_name", pid, 0) in named
        assert ("thread_name", pid, tid) in named
        open_ends: list[int] = []
        for start, duration in sorted(row, key=lambda each: (each[0], -each[1])):
            begin_ns = round(1000 * start)
            end_ns = begin_ns + round(1000 * duration)
            while open_ends and open_ends[-1] <= begin_ns:
                open_ends.pop()
            assert not open_ends or end_ns <= open_ends[-1], "slices of one row overlap"
            open_ends.append(end_ns)
    return events


def row_names(events: list[dict[str, Any]], pid: int) -> list[str]:
    return [
        event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == pid
    ]


def slices_of(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def part(lane: int, asked_s: float, ready_s: float, start_s: float, end_s: float) -> dict[str, Any]:
    return {
        "name": "part.written",
        "lane": lane,
        "asked_s": asked_s,
        "ready_s": ready_s,
        "start_s": start_s,
        "end_s": end_s,
    }


def test_spans_are_what_events_tell_while_it_is_entered() -> None:
    trace = Trace()
    emit("before", start_s=1.0, end_s=2.0)
    with trace:
        assert has_subscribers()
        emit("part.written", start_s=1.0, end_s=2.0, lane=1, names=("a", "b"), where=Path("/x"))
        emit("committed", path="/x")
        with span("state.planned", rank=3):
            pass
        with pytest.raises(KeyError), span("files.written"):
            raise KeyError
    emit("after", start_s=1.0, end_s=2.0)
    assert not has_subscribers()
    first, second = trace.spans
    assert first == {
        "name": "part.written", "lane": 1, "start_s": 1.0, "end_s": 2.0, "names": ["a", "b"], "where": "/x",
    }  # fmt: skip
    assert second.pop("start_s") <= second.pop("end_s")
    thread = threading.current_thread().name
    assert second == {"name": "state.planned", "lane": None, "thread": thread, "rank": 3}
    with trace:
        emit("again", start_s=1.0, end_s=2.0)
    assert len(trace.spans) == 3, "entered again, it goes on"


def test_a_trace_without_a_span_is_valid(tmp_path: Path) -> None:
    Trace().write(tmp_path / "trace.json")
    assert not [event for event in read(tmp_path / "trace.json") if event["ph"] == "X"]


def test_rows_are_threads_and_lanes(tmp_path: Path) -> None:
    with Trace(rank=2) as trace:
        emit("state.staged", start_s=10.0, end_s=11.0)
        emit("state.copied", start_s=10.5, end_s=12.0)
        for lane in (1, 0):
            emit("part.written", lane=lane, asked_s=11.0, ready_s=12.0, start_s=12.0, end_s=13.5, nbytes=7)
            emit("lane.synced", lane=lane, start_s=13.5, end_s=14.0)
    trace.write(tmp_path / "trace.json")
    events = read(tmp_path / "trace.json")
    thread = threading.current_thread().name
    waits = ["lane 0", "lane 0 waits", "lane 1", "lane 1 waits"]
    assert row_names(events, 2) == [thread, "copies off devices", *waits]
    [staged] = slices_of(events, "state.staged")
    assert (staged["ts"], staged["dur"]) == (0.0, 1e6), "microseconds from the first span on"
    first, _ = slices_of(events, "part.written")
    assert (first["ts"], first["dur"], first["args"]["nbytes"]) == (2e6, 1.5e6, 7)
    first, _ = slices_of(events, "part.awaited")
    assert (first["ts"], first["dur"]) == (1e6, 1e6)


def test_a_part_that_was_ready_was_not_awaited(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", {0: [part(0, 1.0, 1.0, 1.5, 2.0)]})
    events = read(tmp_path / "trace.json")
    assert row_names(events, 0) == ["lane 0"]
    assert not slices_of(events, "part.awaited")


def test_parts_in_flight_together_have_rows_of_their_own(tmp_path: Path) -> None:
    spans = [part(0, 1.0, 1.0, 1.0, 3.0), part(0, 2.0, 2.0, 2.0, 4.0), part(0, 3.0, 3.0, 3.0, 5.0)]
    write_trace(tmp_path / "trace.json", {0: spans})
    events = read(tmp_path / "trace.json")
    assert [event["tid"] for event in slices_of(events, "part.written")] == [0, 0, 1]


def test_ranks_of_several_hosts_are_put_side_by_side(tmp_path: Path) -> None:
    spans = {rank: [part(0, start, start, start, start + 1)] for rank, start in ((1, 500.25), (0, 3.0))}
    write_trace(tmp_path / "one.json", {0: spans[0], 1: spans[0]})
    assert [event["ts"] for event in slices_of(read(tmp_path / "one.json"), "part.written")] == [0, 0]
    write_trace(tmp_path / "two.json", spans, {0: 1000.0, 1: 502.0})
    found = {event["pid"]: event["ts"] for event in slices_of(read(tmp_path / "two.json"), "part.written")}
    assert found == {0: 750_000, 1: 0}


times = st.integers(0, 30).map(lambda number: 1e6 / 7 + number / 10)


@given(
    st.lists(st.tuples(st.integers(0, 1), st.lists(times, min_size=4, max_size=4).map(sorted)), max_size=12)
)
def test_slices_of_a_row_nest_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[int, list[float]]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "nested.json"
    write_trace(path, {0: [part(lane, *four) for lane, four in parts]}, {0: 1.7e9})
    events = read(path)
    assert len(slices_of(events, "part.written")) == len(parts)

"""A trace of a save shows every byte once, on its lane; without one, lanes note nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distckpt import Checkpointer, CheckpointError, StorageWriter, WorkerDied, observe
from distckpt.lanes import WorkerLanes
from distckpt.trace import Trace, write_trace
from distckpt.worker import Channel
from integration.checkpoints import WAIT_S, save
from integration.ranks.world import Ranks

pytestmark = pytest.mark.slow

MIB = 1 << 20
Span = dict[str, Any]
Save = Callable[[Path, int], tuple[Path, Trace]]


def make_state() -> dict[str, Any]:
    tensors = {f"t{number}": torch.rand(5 * MIB // 4 + number) for number in range(8)}
    return {**tensors, "object": "x", "empty": torch.empty(0)}


def save_with_checkpointer(root: Path, workers: int, **settings: Any) -> tuple[Path, Trace]:
    trace = Trace()
    with Checkpointer(root, dist_ckpt_workers=workers, **settings) as checkpointer:
        # The second one is of a plan that lanes know, into memory that is used again.
        for step in range(2):
            trace = Trace()
            with trace:
                checkpointer.save(step, make_state()).result(WAIT_S)
    return root / "step-00000001", trace


def save_with_writer(root: Path, workers: int, *, is_async: bool, **settings: Any) -> tuple[Path, Trace]:
    with StorageWriter(dist_ckpt_workers=workers, **settings) as writer, Trace() as trace:
        save(make_state(), root, writer, is_async=is_async)
    return root, trace


WAYS: dict[str, tuple[Save, set[str]]] = {
    "Checkpointer": (
        lambda root, workers: save_with_checkpointer(root, workers, async_save=True),
        {"state.planned", "memory.awaited", "items.staged", "state.staged"},
    ),
    "Checkpointer, in waves": (
        lambda root, workers: save_with_checkpointer(root, workers, ckpt_host_memory="24MiB"),
        {"state.planned", "image.laid_out", "memory.awaited", "state.staged"},
    ),
    "StorageWriter": (
        lambda root, workers: save_with_writer(root, workers, is_async=False),
        {"items.resolved", "image.laid_out", "memory.awaited", "rank.written", "ranks.awaited"},
    ),
    "StorageWriter, async": (
        lambda root, workers: save_with_writer(root, workers, is_async=True),
        {
            "state.staged",
            "items.resolved",
            "image.laid_out",
            "memory.awaited",
            "rank.written",
            "ranks.awaited",
        },
    ),
}
ALWAYS = {
    "directory.claimed",
    "lanes.awaited",
    "files.created",
    "parts.pushed",
    "part.written",
    "lane.synced",
    "files.completed",
    "files.written",
    "manifest.written",
    "metadata.made",
    "checkpoint.published",
}


def assert_covered_once(folder: Path, spans: list[Span]) -> None:
    """Assert that the parts cover every byte of the files of a checkpoint once."""
    ranges: dict[str, list[tuple[int, int]]] = {path.name: [] for path in folder.glob("*.distcp*")}
    assert ranges
    for span in spans:
        if span["name"] == "part.written":
            ranges[span["file"]].append((span["offset"], span["nbytes"]))
    for name, parts in ranges.items():
        position = 0
        for offset, nbytes in sorted(parts):
            assert offset == position, name
            position += nbytes
        assert position == (folder / name).stat().st_size, name


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_every_byte_is_shown_once(tmp_path: Path, way: str, workers: int) -> None:
    how, names = WAYS[way]
    began = time.monotonic()
    folder, trace = how(tmp_path / "checkpoint", workers)
    ended = time.monotonic()
    spans = trace.spans
    assert names | ALWAYS == {span["name"] for span in spans}
    assert_covered_once(folder, spans)
    assert all(began <= span["start_s"] <= span["end_s"] <= ended for span in spans)
    [files] = [span for span in spans if span["name"] == "files.written"]
    on_lanes = [span for span in spans if span["lane"] is not None]
    assert {span["lane"] for span in on_lanes} <= set(range(workers))
    for span in on_lanes:
        assert files["start_s"] <= span.get("asked_s", span["start_s"])
        assert span.get("asked_s", 0) <= span.get("ready_s", 0) <= span["start_s"]
        assert span["end_s"] <= files["end_s"]
    for lane in {span["lane"] for span in on_lanes}:
        wrote = {span["file"] for span in on_lanes if (span["lane"], span["name"]) == (lane, "part.written")}
        synced = {span["file"] for span in on_lanes if (span["lane"], span["name"]) == (lane, "lane.synced")}
        assert wrote == synced
    trace.write(tmp_path / "trace.json")
    slices = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
              if event["ph"] == "X" and event["name"] != "part.awaited"]  # fmt: skip
    assert len(slices) == len(spans)


@pytest.mark.gpu
@pytest.mark.parametrize("budget", ["1GiB", "96MiB"])
def test_copies_off_the_device_are_shown(tmp_path: Path, budget: str) -> None:
    state = {f"t{number}": torch.rand(8 * MIB, device="cuda") for number in range(4)}
    with Checkpointer(
        tmp_path, dist_ckpt_workers=2, async_save=True, ckpt_host_memory=budget
    ) as checkpointer:
        # By one call each, and then, where all of the state has its place, by a graph.
        for step in range(4):
            began = time.monotonic()
            with Trace() as trace:
                checkpointer.save(step, state).result(WAIT_S)
            [copied] = [span for span in trace.spans if span["name"] == "state.copied"]
            ready_s = [span["ready_s"] for span in trace.spans if span["name"] == "part.written"]
            assert began <= copied["start_s"] < copied["end_s"] <= max(ready_s)
            assert copied["start_s"] < min(ready_s)


def test_nothing_is_noted_if_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    receive = Channel.receive

    def spy(channel: Channel) -> tuple[list[dict[str, Any]], bool]:
        messages, closed = receive(channel)
        told.extend(message["body"] for message in messages if message["kind"] == "done")
        return messages, closed

    monkeypatch.setattr(Channel, "receive", spy)
    with StorageWriter(dist_ckpt_workers=2) as writer:
        save(make_state(), tmp_path / "a", writer, is_async=False)
        assert [body["record"] for body in told] == [None, None]
        with Trace():
            save(make_state(), tmp_path / "b", writer, is_async=False)
        assert all(body["record"] for body in told[2:])
        told.clear()
        save(make_state(), tmp_path / "c", writer, is_async=False)
        assert [body["record"] for body in told] == [None, None]


def test_a_save_that_fails_does_no_harm(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root", dist_ckpt_workers=2) as checkpointer:
        checkpointer.save(0, make_state())
        lanes = checkpointer._engine.lanes
        assert isinstance(lanes, WorkerLanes)
        for pid in lanes.pids:
            os.kill(pid, signal.SIGSTOP)

        def kill(event: observe.Event) -> None:
            if event.name == "parts.pushed":
                end()
                os.kill(lanes.pids[0], signal.SIGKILL)

        end = observe.subscribe(kill)
        with Trace() as trace:
            with pytest.raises(CheckpointError) as failure:
                checkpointer.save(1, make_state())
            assert isinstance(failure.value, WorkerDied)
            assert "files.written" not in {span["name"] for span in trace.spans}
            checkpointer.save(2, make_state())
    assert_covered_once(tmp_path / "root" / "step-00000002", trace.spans)
    trace.write(tmp_path / "trace.json")


def save_and_trace(root: str) -> list[Span]:
    """Rank function: save once; returns the spans."""
    rank = torch.distributed.get_rank()
    with Checkpointer(root, async_save=True) as checkpointer, Trace(rank) as trace:
        checkpointer.save(0, {f"own {rank}": torch.rand(MIB), "common": torch.ones(1000)}).result(WAIT_S)
    return trace.spans


def test_traces_of_several_ranks_make_one(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(2, save_and_trace, root=str(tmp_path / "root"))
    for rank, spans in enumerate(found):
        assert {span["rank"] for span in spans} == {rank}
        assert [span["name"] for span in spans].count("ranks.awaited") == 1
    assert_covered_once(tmp_path / "root" / "step-00000000", [*found[0], *found[1]])
    write_trace(tmp_path / "trace.json", dict(enumerate(found)))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        "rank 0",
        "rank 1",
    ]

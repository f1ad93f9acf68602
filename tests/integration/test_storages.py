"""The main job on every storage: save, load, overwrite, sweep, ranks, a crash; by torch's reader and ours.

A real NFS mount has the same in test_nfs.py.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.api import CheckpointException

from distckpt import Checkpointer, CheckpointError, StorageReader, StorageWriter, WriteError
from distckpt.cli import main
from distckpt.commit import leftovers
from distckpt.storage import Storage, open_storage
from distckpt.verification import verify
from integration.checkpoints import assert_same, failure_of, read, save
from integration.ranks import states
from integration.ranks.world import Ranks
from servers import S3Server

pytestmark = pytest.mark.slow

MIB = 1 << 20
KINDS = ["local", "memory", "s3", "s3-of-other-code", "s3fs", "obstore"]
THOROUGH = {("s3-of-other-code", 1), ("s3-of-other-code", 2), ("s3fs", 2), ("obstore", 1)}
"""Kinds and numbers of workers that are left out where time matters."""


@dataclass
class Place:
    """Where checkpoints of a test go.

    Attributes:
        kind: One of `KINDS`.
        root: A URL below which there is nothing yet.
        options: Storage options.
        server: Behind it, if there is one.
    """

    kind: str
    root: str
    options: dict[str, Any] = field(default_factory=dict)
    server: S3Server | None = None

    def writer(self, **settings: Any) -> StorageWriter:
        return StorageWriter(storage_options=self.options, **settings)

    def open(self, name: str) -> Storage:
        return open_storage(f"{self.root}/{name}", self.options)

    def read(self, name: str) -> dict[str, Any]:
        url = f"{self.root}/{name}"
        return read(StorageReader(url, storage_options=self.options, ckpt_weights_only=False))

    def read_with_torch(self, name: str) -> dict[str, Any]:
        options = {key: value for key, value in self.options.items() if key != "s3_client"}
        # It knows paths and URLs as fsspec does, but needs a scheme.
        url = f"file://{self.root}" if self.kind == "local" else self.root
        return read(FsspecReader(f"{url}/{name}", **options))

    def assert_is_clean(self, name: str) -> None:
        """Nothing is there but one checkpoint, which is whole."""
        storage = self.open(name)
        report = verify(storage)
        assert (report.status, report.findings) == ("complete", [])
        assert leftovers(storage) == []
        assert storage.unfinished() == []
        if self.server is not None:
            assert self.server.unfinished_uploads(f"{self.root}/{name}") == []


@pytest.fixture(
    params=[
        pytest.param((kind, workers), id=f"{kind}-{workers}", marks=[pytest.mark.thorough] * is_thorough)
        for kind in KINDS
        for workers in ((1,) if kind == "memory" else (1, 2))
        for is_thorough in [(kind, workers) in THOROUGH]
    ]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    kind, _ = request.param
    if kind == "local":
        yield Place(kind, str(tmp_path / "root"))
    elif kind == "memory":
        yield Place(kind, f"memory://{uuid.uuid4().hex}")
    else:
        server = request.getfixturevalue("minio_like_server" if kind == "s3-of-other-code" else "s3_server")
        options = dict(server.options)
        if kind in {"s3fs", "obstore"}:
            options["s3_client"] = kind
        yield Place(kind, server.new_prefix(), options, server)


@pytest.fixture
def workers(request: pytest.FixtureRequest, place: Place) -> int:
    return int(request.node.callspec.params["place"][1])


def some_state(seed: int, large_bytes: int = 36 * MIB) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    large = torch.randint(0, 256, (large_bytes,), dtype=torch.uint8, generator=generator)
    return {
        "large": large.view(torch.int32),
        "views": [large[7:1000:3], large[: 3 * MIB].view(3, -1).t()],
        "small": {f"ü {number}": torch.full((number,), seed, dtype=torch.bfloat16) for number in range(12)},
        "scalar": torch.tensor(seed),
        "empty": torch.empty(0, 3),
        "step": seed,
        "objects": {"schedule": [seed, "ü"], "nothing": None},
    }


@pytest.mark.parametrize("is_async", [False, True], ids=["save", "async_save"])
def test_a_round_trip_and_an_overwrite(place: Place, workers: int, is_async: bool) -> None:
    name, state = "a checkpoint ü/of mine", some_state(0, 3 * MIB)
    with place.writer(dist_ckpt_workers=workers) as writer:
        for seed, large_bytes in ((1, 36 * MIB), (2, 9 * MIB), (3, 100)):
            state = some_state(seed, max(large_bytes, 3 * MIB))
            save(state, f"{place.root}/{name}", writer, is_async=is_async)
            assert_same(place.read(name), state)
            place.assert_is_clean(name)
    assert_same(place.read_with_torch(name), state)


@pytest.mark.parametrize("file_format", ["safetensors", "zarr"])
def test_other_formats(place: Place, workers: int, file_format: str) -> None:
    name, state, is_async = "a checkpoint ü/of mine", some_state(5, 20 * MIB), workers == 1
    objects = "sidecar" if file_format == "safetensors" else "auto"
    settings = {"ckpt_format": file_format, "ckpt_objects": objects, "dist_ckpt_workers": workers}
    with place.writer(**settings) as writer:
        save(state, f"{place.root}/{name}", writer, is_async=is_async)
        place.assert_is_clean(name)
        with pytest.raises(CheckpointException) as caught:
            save(state, f"{place.root}/{name}", writer, is_async=is_async)
        assert "holds a committed checkpoint" in str(failure_of(caught.value))
    # torch's error refers to frames that refer to it, and they to what was staged.
    del caught
    gc.collect()
    # Nothing has happened to it.
    assert_same(place.read(name), state)
    place.assert_is_clean(name)
    # A save of torch_dist takes its place, and leaves nothing of it.
    with place.writer(dist_ckpt_workers=workers) as writer:
        save(some_state(6, 3 * MIB), f"{place.root}/{name}", writer, is_async=is_async)
    assert_same(place.read(name), some_state(6, 3 * MIB))
    place.assert_is_clean(name)
    storage = place.open(name)
    files = [entry for entry in storage.list() if not entry.startswith((".", "__"))]
    assert files == []


def test_the_budget_is_smaller_than_the_state(place: Place, workers: int) -> None:
    state = some_state(4, 96 * MIB)
    # The smallest that a part of an object leaves room for.
    with place.writer(dist_ckpt_workers=workers, ckpt_host_memory="72MiB") as writer:
        save(state, f"{place.root}/a", writer, is_async=False)
    assert_same(place.read("a"), state)
    place.assert_is_clean("a")


def test_a_training_loop(place: Place, workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    state = some_state(0, 3 * MIB)
    with Checkpointer(
        f"{place.root}/run", storage_options=place.options, dist_ckpt_workers=workers, async_save=True
    ) as checkpointer:
        for step in range(4):
            state["large"].fill_(step)
            state["step"] = step
            checkpointer.save(step, state)
        checkpointer.wait()
        assert checkpointer.steps() == [0, 1, 2, 3]
        state["large"].fill_(77)
        assert checkpointer.restore(state, 2) == 2
        assert state["step"] == 2
        assert state["large"].eq(2).all()
        assert checkpointer.restore(state) == 3
        with pytest.raises(CheckpointError, match="step-00000009"):
            checkpointer.restore(state, 9)
    for step in range(4):
        place.assert_is_clean(f"run/step-{step:08}")
    if place.kind == "local":
        assert main(["verify", f"{place.root}/run"]) == 0
        assert "complete" in capsys.readouterr().out


def save_and_load(root: str, options: dict[str, Any], workers: int) -> list[str]:
    """Rank function: both ways to save, and a load."""
    found = []
    with StorageWriter(storage_options=options, dist_ckpt_workers=workers) as writer:
        for mode in ("save", "async_save"):
            state = states.make(7, 1 << 20)
            if mode == "save":
                state_dict_saver.save(state, checkpoint_id=f"{root}/{mode}", storage_writer=writer)
            else:
                response: Any = state_dict_saver.async_save(
                    state, checkpoint_id=f"{root}/{mode}", storage_writer=writer
                )
                response.upload_completion.result()
            again = states.make(None, 1 << 20)
            reader = StorageReader(f"{root}/{mode}", storage_options=options)
            state_dict_loader.load(again, storage_reader=reader)
            found += states.differences(again, states.make(7, 1 << 20))
    with Checkpointer(f"{root}/run", storage_options=options, dist_ckpt_workers=workers) as checkpointer:
        for step in range(2):
            checkpointer.save(step, states.make(step))
        again = states.make(None)
        assert checkpointer.restore(again) == 1
        found += states.differences(again, states.make(1))
    return found


def test_ranks(ranks: Ranks, place: Place, workers: int) -> None:
    if place.kind == "memory":
        pytest.skip("what lies in memory lies in one process")
    found = ranks.run(2, save_and_load, root=place.root, options=place.options, workers=workers)
    assert found == [[], []]
    for name in ("save", "async_save", "run/step-00000001"):
        place.assert_is_clean(name)


def test_a_crash_in_the_middle_of_a_save(place: Place, workers: int) -> None:
    if place.kind == "memory":
        pytest.skip("what lies in memory ends with its process")
    old = some_state(1, 3 * MIB)
    with place.writer(dist_ckpt_workers=workers) as writer:
        save(old, f"{place.root}/a", writer, is_async=False)
        program = textwrap.dedent(f"""
            import torch
            from torch.distributed.checkpoint import state_dict_saver
            from distckpt import StorageWriter, observe
            def tell(event):
                if event.name == "parts.pushed":
                    print("writes", flush=True)
            observe.subscribe(tell)
            state = {{f"t{{n}}": torch.ones(64 << 20, dtype=torch.uint8) for n in range(4)}}
            with StorageWriter({f"{place.root}/a"!r}, storage_options={place.options!r},
                               dist_ckpt_workers={workers}, ckpt_host_memory="160MiB") as writer:
                state_dict_saver.save(state, storage_writer=writer)
        """)
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        with child, child.stdout:
            assert child.stdout.readline() == "writes\n"
            lanes = psutil.Process(child.pid).children()
            os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        assert len(lanes) == (0 if workers == 1 else workers)
        assert psutil.wait_procs(lanes, 20)[1] == []
        if place.server is not None:
            # It may still be at parts that it was sent: one that comes after an abort, this server keeps.
            time.sleep(1)
        assert_same(place.read("a"), old)
        new = some_state(2, 3 * MIB)
        save(new, f"{place.root}/a", writer, is_async=False)
        assert_same(place.read("a"), new)
        if place.kind == "obstore":
            # This client cannot list uploads: one that the killed process has begun stays.
            place.server = None
        place.assert_is_clean("a")


def test_memory_has_one_process() -> None:
    with StorageWriter(dist_ckpt_workers=2) as writer:
        with pytest.raises(CheckpointException) as caught:
            save({"t": torch.ones(3)}, f"memory://{uuid.uuid4().hex}", writer, is_async=False)
        error = failure_of(caught.value)
        assert isinstance(error, WriteError)
        assert "--dist-ckpt-workers 1" in str(error)


def test_steps_lie_where_they_were_told_to_whatever_the_path_looks_like(tmp_path: Path) -> None:
    root = tmp_path / "run::7"
    state = {"weight": torch.arange(4.0)}
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state).result()
    assert sorted(entry.name for entry in root.iterdir()) == ["latest", "step-00000001"]
    for path in (root, str(root)):
        loaded = {"weight": torch.zeros(4)}
        with Checkpointer(path) as checkpointer:
            assert checkpointer.latest() == 1
            checkpointer.restore(loaded)
        assert torch.equal(loaded["weight"], state["weight"])


def test_a_link_to_a_step_is_read_and_what_it_leads_to_is_never_removed(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "larger-disk"
    other.mkdir()
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"weight": torch.full((2,), float(step))}).result()
    (root / "step-00000002").rename(other / "2")
    (root / "step-00000002").symlink_to(other / "2")
    loaded = {"weight": torch.zeros(2)}
    with Checkpointer(root, keep_last=1) as checkpointer:
        assert checkpointer.steps() == [1, 2]
        assert checkpointer.restore(loaded) == 2
        assert loaded["weight"].tolist() == [2.0, 2.0]
        checkpointer.save(3, loaded).result()
        checkpointer.save(4, loaded).result()
    assert sorted(path.name for path in root.glob("step-*")) == ["step-00000002", "step-00000004"]
    assert verify(open_storage(other / "2")).status == "complete"

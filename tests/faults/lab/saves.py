"""The saves that the crash lab records and kills: worlds of real processes, files of several ranges each.

Files are small: a range is a page here, and so is a block that has a checksum of its own, wherever a
checkpoint is written or read within `small_parts`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import signal
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from distckpt import Checkpointer, StorageReader, StorageWriter, engine, integrity, plan, worker
from distckpt.engine import Engine
from distckpt.image import Image, lay_out_image
from faults.lab.disk import Disk, Tree
from faults.lab.shim.sitecustomize import Config, Entry, environment, install, read_log
from faults.programs import Child, Programs

NUM_FILES = 3
PART_BYTES = 4096
OLD, NEW, NEXT = 1, 2, 3
"""Seeds of the states."""
_ITEMS = 2 * NUM_FILES
_ITEM_BYTES = 8192
_TIMEOUT_S = 40.0
_PARTIAL_STEP = 1


@dataclass(frozen=True)
class Setting:
    """One of the saves that the lab knows.

    Attributes:
        api: "dcp" for dcp.save with a StorageWriter, "checkpointer" for Checkpointer.save.
        world: Number of ranks, each a process.
        workers: Lanes of each; more than one are processes.
        start: "fresh": nothing is there, not even the directory; "overwrite": a checkpoint is; "beside": an
            earlier step is, and what a crash has left of another one, which is cleared away after the save.
    """

    api: str
    world: int
    workers: int
    start: str

    def __str__(self) -> str:
        """Return what names it in reports."""
        return f"{self.api}-{self.world}x{self.workers}-{self.start}"

    @property
    def checkpoint(self) -> str:
        """Path of the checkpoint, relative to the lab's root."""
        return "checkpoint" if self.api == "dcp" else step_path(self.step)

    @property
    def step(self) -> int:
        """Which step is saved."""
        return _PARTIAL_STEP + 1 if self.start == "beside" else 0

    @property
    def roles(self) -> list[str]:
        """Return the roles of all processes."""
        ranks = [f"rank{rank}" for rank in range(self.world)]
        workers = range(self.workers if self.workers > 1 else 0)
        return ranks + [f"{rank}.worker{number}" for rank in ranks for number in workers]


SETTINGS = [
    Setting(api, world, workers, start)
    for api, world in (("dcp", 1), ("dcp", 2), ("checkpointer", 2))
    for workers in (1, 2)
    for start in ("fresh", "overwrite")
] + [Setting("checkpointer", 2, 1, "beside")]


def step_path(step: int) -> str:
    """Return the path of a step of a Checkpointer, relative to the lab's root."""
    return f"run/step-{step:08}"


@contextlib.contextmanager
def small_parts() -> Iterator[None]:
    """Have ranges, and blocks with a checksum, be small, and images be of several files."""
    real_open = Engine.open

    def open_engine(config: Any) -> Engine:
        opened = real_open(config)
        opened.part_bytes = PART_BYTES
        return opened

    def lay_out(sizes: Any, num_files: int, part_bytes: int, **options: Any) -> Image:
        del num_files
        return lay_out_image(sizes, NUM_FILES, part_bytes, **options)

    with (
        patch.object(plan, "_RUN_BYTES", PART_BYTES),
        patch.object(worker, "CHECKSUM_BLOCK_BYTES", PART_BYTES),
        patch.object(integrity, "CHECKSUM_BLOCK_BYTES", PART_BYTES),
        patch.object(Engine, "open", open_engine),
        patch.object(engine, "lay_out_image", lay_out),
    ):
        yield


def state_of(seed: int, ranks: range) -> dict[str, Any]:
    """Return what these ranks have: tensors of each one's own, and a number and a text that all have."""
    state: dict[str, Any] = {"step": torch.tensor(seed), "note": f"state {seed}"}
    for rank in ranks:
        generator = torch.Generator().manual_seed(100 * seed + rank)
        state[f"rank{rank}"] = {
            f"weight{number}": torch.randint(
                -(2**62), 2**62, (_ITEM_BYTES // 8,), generator=generator, dtype=torch.int64
            )
            for number in range(_ITEMS)
        }
    return state


def same(left: Any, right: Any) -> bool:
    """Say whether two states are equal bit for bit."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(value, right[name]) for name, value in left.items())
    return bool(torch.equal(left, right)) if isinstance(left, torch.Tensor) else bool(left == right)


def load(path: Path, world: int) -> dict[str, Any]:
    """Return the state of all ranks, with every checksum compared."""
    state = state_of(0, range(world))
    state_dict_loader.load(state, storage_reader=StorageReader(path), no_dist=True)
    return state


def save_next(writer: StorageWriter, path: Path, world: int) -> None:
    """Save the state that comes after all, of all ranks, from this process."""
    state = state_of(NEXT, range(world))
    state_dict_saver.save(state, storage_writer=writer, checkpoint_id=str(path), no_dist=True)


def run_rank(job: dict[str, Any]) -> None:
    """Save as one rank of a world, as a whole program."""
    status = 3
    try:
        if job["shim"] is not None:
            os.environ.update(environment(job["shim"]))
        with small_parts():
            _save(job)
        status = 0
    except BaseException:  # noqa: BLE001 - the top frame of a process
        traceback.print_exc()
    finally:
        # Without tearing down the interpreter, which takes longer than the save.
        os._exit(status)


def _save(job: dict[str, Any]) -> None:
    rank, world = job["rank"], job["world"]
    state = state_of(job["seed"], range(rank, rank + 1))
    settings = {"dist_ckpt_workers": job["workers"], "distributed_timeout_minutes": job["timeout_s"] / 60}
    if world > 1:
        os.environ.update(GLOO_SOCKET_IFNAME="lo")
        store = f"file://{job['store']}"
        timeout = datetime.timedelta(seconds=_TIMEOUT_S)
        distributed.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=world, timeout=timeout
        )
    path = f"{job['root']}/{job['path']}"
    if job["api"] == "dcp":
        with StorageWriter(**settings) as writer:
            _begin(job)
            state_dict_saver.save(state, storage_writer=writer, checkpoint_id=path, no_dist=world == 1)
    else:
        with Checkpointer(os.path.dirname(path), **settings) as checkpointer:
            _begin(job)
            handle = checkpointer.save(job["step"], state)
            assert handle.result() == path, handle.path


def _begin(job: dict[str, Any]) -> None:
    if job["shim"] is not None:
        install(job["shim"])


@dataclass(frozen=True)
class Place:
    """Where saves run: the lab's root, and beside it what the shim and the ranks need."""

    folder: Path

    @property
    def root(self) -> Path:
        """What the shim watches."""
        return self.folder / "root"

    @property
    def shim(self) -> Path:
        """The shim's folder."""
        return self.folder / "shim"


def start(
    programs: Programs,
    setting: Setting,
    place: Place,
    *,
    seed: int,
    rules: list[dict[str, Any]] | None,
    timeout_s: float = _TIMEOUT_S,
) -> list[Child]:
    """Start the ranks of one save.

    Args:
        programs: Starts them.
        setting: Which save.
        place: Where; the root is there.
        seed: Of the state.
        rules: What the shim shall do; None: without a shim.
        timeout_s: Seconds that any wait of the save may take.
    """
    store = place.folder / "store"
    store.unlink(missing_ok=True)
    shutil.rmtree(place.shim, ignore_errors=True)
    place.shim.mkdir()
    children = []
    for rank in range(setting.world):
        shim: Config | None = None
        if rules is not None:
            shim = {"root": str(place.root), "folder": str(place.shim), "role": f"rank{rank}", "rules": rules}
        job = {
            "rank": rank,
            "world": setting.world,
            "workers": setting.workers,
            "api": setting.api,
            "seed": seed,
            "timeout_s": timeout_s,
            "store": str(store),
            "root": str(place.root),
            "path": setting.checkpoint,
            "step": setting.step,
            "shim": shim,
        }
        children.append(programs.start(run_rank, job))
    return children


def run(programs: Programs, setting: Setting, place: Place, *, seed: int, with_shim: bool) -> None:
    """Run one save to its end."""
    children = start(programs, setting, place, seed=seed, rules=[] if with_shim else None)
    try:
        for child in children:
            done = child.wait()
            assert done.status == 0, f"{setting}: {done.out}{done.err}"
    finally:
        forget(programs, children)


def forget(programs: Programs, children: list[Child]) -> None:
    """End programs, and forget them: their process ids may soon be others'."""
    for child in children:
        child.end()
        programs.children.remove(child)
        child.out.unlink()
        child.err.unlink()


def make_place(programs: Programs, setting: Setting, folder: Path) -> Place:
    """Make a place in `folder` that is as it is before the save of `setting`."""
    place = Place(folder)
    place.root.mkdir(parents=True)
    if setting.start != "fresh":
        run(programs, replace(setting, start="overwrite"), place, seed=OLD, with_shim=False)
    if setting.start == "beside":
        rule = {"do": "kill", "target": "all", "op": "rename", "path": r".*/\.metadata"}
        children = start(programs, setting, place, seed=OLD, rules=[rule])
        statuses = [child.wait().status for child in children]
        forget(programs, children)
        assert statuses == [-signal.SIGKILL] * setting.world
        (place.root / setting.checkpoint).rename(place.root / step_path(_PARTIAL_STEP))
    return place


def read_tree(root: Path) -> Tree:
    """Return everything below a directory."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in root.rglob("*")
    }


def write_tree(tree: Tree, root: Path) -> None:
    """Make everything of `tree` below a directory that is made."""
    root.mkdir(parents=True)
    for path in sorted(tree):
        data = tree[path]
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)


@dataclass(frozen=True)
class Recording:
    """What a save did.

    Attributes:
        setting: Which save.
        before: What was there, and durable.
        entries: What it did, in order.
        after: What is there now.
        history: What another save did before, which crashed then.
    """

    setting: Setting
    before: Tree
    entries: list[Entry]
    after: Tree
    history: list[Entry] = field(default_factory=list)

    def disk(self) -> Disk:
        """Return the disk as it was when the save began."""
        disk = Disk(self.before)
        for entry in self.history:
            disk.apply(entry)
        return disk

    @property
    def published(self) -> int:
        """How many entries there are when the new `.metadata` has its name."""
        metadata = f"{self.setting.checkpoint}/.metadata"
        (at,) = [
            at
            for at, entry in enumerate(self.entries, 1)
            if entry["op"] == "rename" and entry["to"] == metadata and "errno" not in entry
        ]
        return at

    @property
    def durable(self) -> int:
        """How many there are when that is durable, and the publication returns."""
        for at, entry in enumerate(self.entries[self.published :], self.published + 1):
            is_sync = entry["op"] in {"fsync", "omitted"} and entry["role"] == "rank0"
            if is_sync and entry["path"] == self.setting.checkpoint:
                return at
        raise AssertionError("the directory was not made durable after the publication")


def record(programs: Programs, setting: Setting, folder: Path) -> Recording:
    """Run the save of `setting` and return what it did."""
    place = make_place(programs, setting, folder)
    before = read_tree(place.root)
    run(programs, setting, place, seed=NEW, with_shim=True)
    return Recording(setting, before, read_log(place.shim), read_tree(place.root))


def record_after_crash(programs: Programs, crashed: Recording, count: int, folder: Path) -> Recording:
    """Run the save again where it was killed after `count` operations, and return what it did."""
    history = crashed.entries[:count]
    disk = Disk(crashed.before)
    for entry in history:
        disk.apply(entry)
    place = Place(folder)
    write_tree(disk.tree(), place.root)
    run(programs, crashed.setting, place, seed=NEW, with_shim=True)
    entries, after = read_log(place.shim), read_tree(place.root)
    return Recording(crashed.setting, crashed.before, entries, after, history)


def dump(recording: Recording) -> str:
    """Return the operations as text, for messages."""
    return "\n".join(
        json.dumps({name: value for name, value in entry.items() if name != "data"})
        for entry in recording.entries
    )

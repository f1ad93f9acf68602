"""Training loops of several ranks: they resume bit for bit, and save, skip and load the same steps."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distckpt import Checkpointer, CheckpointError, PerRank, observe, register_storage
from distckpt import checkpointer as checkpointing
from distckpt.lanes import WorkerLanes
from distckpt.storage import Storage
from distckpt.storage.posix import PosixStorage
from integration.checkpoints import read_with_torch
from integration.ranks import states
from integration.ranks.world import Ranks

pytestmark = pytest.mark.slow

WAIT_S = 20.0
WIDTH = 16
SAMPLES = 22
"""Of each rank, in batches of 4: an epoch is 6 steps, and no multiple of the steps between saves."""


SAVES = 16


def step_path(root: str | Path, step: int) -> Path:
    return Path(root) / f"step-{step:08}"


class Shuffled:
    """A loader that shuffles with the generators of the process, and knows where it is."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(1000 + rank)
        self._samples = torch.randn(SAMPLES, WIDTH, generator=generator)
        self._order: list[int] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self._order:
            self._order = torch.randperm(SAMPLES).tolist()
        while self._order:
            # Before it is handed out: what is saved after the step is what comes next.
            batch, self._order = self._order[:4], self._order[4:]
            yield self._samples[batch] * random.uniform(0.9, 1.1)

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self._order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order = list(state["order"])


def make_loader(kind: str, rank: int) -> tuple[Any, Any]:
    """Return a loader, and what stands for it in a state."""
    if kind == "own":
        loader = Shuffled(rank)
        return loader, PerRank(loader)
    import warnings

    from torchdata.stateful_dataloader import StatefulDataLoader

    # It calls what torch deprecates.
    warnings.simplefilter("ignore")
    samples = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1000 + rank))
    theirs: Any = StatefulDataLoader(list(samples), batch_size=4, shuffle=True)
    return theirs, theirs


def train(root: str, loader_kind: str, steps: int, kill_after_s: list[float | None]) -> dict[str, Any]:
    """Rank function: train with FSDP2 until `steps` are done, from the last checkpoint on.

    Every step's loss goes to a file; what it returns describes the end.
    """
    torch.set_num_threads(1)
    rank = distributed.get_rank()
    after_s = kill_after_s[rank]
    if after_s is not None:
        timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    try:
        return _train(root, loader_kind, steps)
    except Exception:
        if after_s is None:
            raise
        # The other rank was killed before this one.
        threading.Event().wait(WAIT_S)
        raise


def _train(root: str, loader_kind: str, steps: int) -> dict[str, Any]:
    rank, started = distributed.get_rank(), time.monotonic()
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(WIDTH, 24), nn.Dropout(0.2), nn.ReLU(), nn.Linear(24, WIDTH), nn.Dropout(0.1)
    )
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    loader, its_entry = make_loader(loader_kind, rank)
    # Each rank drops out and shuffles something else.
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": its_entry,
        "step": 0,
    }
    os.makedirs(root, exist_ok=True)
    log = os.open(Path(root).parent / f"losses-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with Checkpointer(root, async_save=True, load_rng=True, keep_last=2, log_level="warning") as checkpointer:
        restored = checkpointer.restore(state)
        assert (restored or 0) == state["step"]
        while state["step"] < steps:
            for batch in loader:
                loss = model(batch).square().mean()
                loss.backward()
                with checkpointer.guard(optimizer):
                    optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                state["step"] += 1
                os.write(log, f"{state['step']} {loss.item().hex()}\n".encode())
                if state["step"] % 4 == 0:
                    checkpointer.save(state["step"], state)
                if state["step"] == steps:
                    break
        checkpointer.wait()
    os.close(log)
    return {
        "restored": restored,
        "took_s": time.monotonic() - started,
        "weights": {name: states.digest(value) for name, value in model.state_dict().items()},
        "moments": [
            states.digest(value)
            for each in optimizer.state_dict()["state"].values()
            for value in each.values()
            if isinstance(value, torch.Tensor)
        ],
        "lr": scheduler.get_last_lr(),
        "next": [torch.rand(1).item(), random.random()],
    }


def losses_of(folder: Path, world: int) -> list[dict[int, set[str]]]:
    """Return, of each rank, all that was logged of each step."""
    found: list[dict[int, set[str]]] = []
    for rank in range(world):
        steps: dict[int, set[str]] = defaultdict(set)
        for line in (folder / f"losses-{rank}").read_text().splitlines():
            step, loss = line.split()
            steps[int(step)].add(loss)
        found.append(dict(steps))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("loader", "kills"),
    [
        pytest.param("own", 3, marks=pytest.mark.thorough),
        ("torchdata", 3),
        pytest.param("own", 20, marks=pytest.mark.thorough),
        pytest.param("torchdata", 20, marks=pytest.mark.thorough),
    ],
)
def test_training_that_is_killed_resumes_bit_for_bit(
    ranks: Ranks, tmp_path: Path, rng: random.Random, loader: str, kills: int
) -> None:
    if loader == "torchdata":
        pytest.importorskip("torchdata")
    steps = 60 if kills == 3 else 400
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    unhurt: list[float | None] = [None, None]
    expected = ranks.run(
        2, train, root=str(whole / "root"), loader_kind=loader, steps=steps, kill_after_s=unhurt
    )
    took_s = min(one.pop("took_s") for one in expected)
    losses = losses_of(whole, 2)
    assert [len(each) for each in losses] == [steps, steps]
    done = starts = 0
    while done < kills:
        starts += 1
        assert starts < 3 * kills + 3, "it ends before it is killed"
        # Both at once, as a machine that goes down; or one, and the other when the launcher sees it.
        first_s = rng.uniform(took_s / 8, took_s * (0.9 if kills == 3 else 0.4))
        delays: list[float | None] = [first_s, first_s + rng.choice([0.0, 0.3])]
        if rng.random() < 0.5:
            delays.reverse()
        found = ranks.run(
            2,
            train,
            may_die=[0, 1],
            root=str(killed / "root"),
            loader_kind=loader,
            steps=steps,
            kill_after_s=delays,
        )
        if None in found:
            done += 1
        if (killed / "root" / f"step-{steps:08}" / ".metadata").exists():
            # There was less to do than time: once more from the beginning.
            (killed / "root").rename(killed / f"done {starts}")
    found = ranks.run(
        2, train, root=str(killed / "root"), loader_kind=loader, steps=steps, kill_after_s=unhurt
    )
    for one in (*found, *expected):
        for name in ("took_s", "restored"):
            one.pop(name, None)
    assert found == expected
    # Also what was done twice was the same both times.
    again = losses_of(killed, 2)
    for rank in range(2):
        assert {step: values for step, values in again[rank].items() if values != losses[rank][step]} == {}
        assert again[rank].keys() == losses[rank].keys()
    # A kill between the last file of a checkpoint that is removed and its directory leaves that for a while.
    kept = {
        path.relative_to(killed / "root").parts[0] for path in (killed / "root").rglob("*") if path.is_file()
    }
    assert kept == {"latest", f"step-{steps - 4:08}", f"step-{steps:08}"}


def slow_down(seconds: float) -> Callable[[], object]:
    """Have whatever this rank writes take longer; returns what ends that."""

    def pause(event: observe.Event) -> None:
        if event.name == "files.written":
            threading.Event().wait(seconds)

    return observe.subscribe(pause)


def save_while_storage_is_slow(root: str, slow: int, policy: str, most: int) -> dict[str, Any]:
    """Rank function: a save at every step, while what one rank writes takes longer than some of them."""
    rank = distributed.get_rank()
    end = slow_down(0.15 if policy == "wait" else 0.4) if rank == slow else None
    skipped, failed, texts, in_flight = [], [], set(), 0
    state = {"own": torch.zeros(3), "all": torch.zeros(5)}
    with Checkpointer(
        root, async_save=True, ckpt_when_busy=policy, ckpt_max_in_flight=most, log_level="error"
    ) as checkpointer:
        handles = []
        for step in range(SAVES):
            state["all"].fill_(step)
            state["own"].fill_(step + rank)
            if step == SAVES // 2:
                # Once more from where nothing is under way: some are saved, however slow this machine is.
                checkpointer.wait()
            # Ranks come apart, and the first is not always the last.
            threading.Event().wait(0.02 + 0.02 * ((step + rank) % 3))
            try:
                handle = checkpointer.save(step, {"all": state["all"], f"of {rank}": state["own"]})
            except CheckpointError as error:
                failed.append(step)
                texts.add(str(error).partition(" (--")[2])
                continue
            if handle.is_skipped:
                skipped.append(step)
                try:
                    handle.result(0)
                except CheckpointError as error:
                    texts.add(str(error).partition(" (--")[2])
                assert not handle.committed
            else:
                handles.append(handle)
            in_flight = max(in_flight, sum(not each._future.done() for each in handles))
        checkpointer.wait()
        for handle in handles:
            handle.result(0)
        if end is not None:
            end()
        return {
            "skipped": skipped,
            "failed": failed,
            "texts": sorted(texts),
            "steps": checkpointer.steps(),
            "in_flight": in_flight,
        }


@pytest.mark.parametrize(
    ("policy", "slow", "most"), [("skip", 2, 1), ("skip", 0, 2), ("fail", 1, 1), ("wait", 2, 2)]
)
def test_storage_that_is_slower_than_the_training(
    ranks: Ranks, tmp_path: Path, policy: str, slow: int, most: int
) -> None:
    found = ranks.run(3, save_while_storage_is_slow, root=str(tmp_path), slow=slow, policy=policy, most=most)
    assert [one["in_flight"] <= most for one in found] == [True] * 3
    for one in found:
        del one["in_flight"]
    assert found == [found[0]] * 3, "all ranks leave out the same"
    left_out = {"skip": found[0]["skipped"], "fail": found[0]["failed"], "wait": []}[policy]
    assert found[0]["steps"] == sorted(set(range(SAVES)) - set(left_out))
    assert bool(left_out) == (policy != "wait")
    assert found[0]["skipped" if policy == "fail" else "failed"] == []
    if policy != "wait":
        assert len(found[0]["steps"]) >= 2
        [text] = found[0]["texts"]
        assert text.startswith("ckpt-max-in-flight)")
    for step in found[0]["steps"][-2:]:
        values = read_with_torch(step_path(tmp_path, step))
        assert values["all"].tolist() == [float(step)] * 5
        assert [values[f"of {rank}"].tolist() for rank in range(3)] == [
            [float(step + rank)] * 3 for rank in range(3)
        ]


class Flaky(PosixStorage):
    """Refuses to make files, as often as it was told to."""

    faults: ClassVar[dict[str, int]] = {}
    seen = 0

    def create_image(self, name: str, nbytes: int) -> str:
        cls = type(self)
        for place, count in cls.faults.items():
            if place in self.url and count > 0:
                cls.faults[place] = count - 1
                cls.seen += 1
                from distckpt.errors import WriteError

                raise WriteError("no space is left for the moment", path=f"{self.url}/{name}", errno=28)
        return super().create_image(name, nbytes)


def flaky(url: str, options: dict[str, Any]) -> Storage:
    """The factory of the storage above."""
    storage = Flaky(url.removeprefix("flaky://"))
    storage.url = url
    return storage


@contextmanager
def faults(counts: dict[str, int]) -> Iterator[type[Flaky]]:
    """Have this rank's storage fail, so many times for each step."""
    import sys

    module = sys.modules[__name__]
    register_storage("flaky", f"{__name__}:flaky")
    assert module.__dict__["Flaky"] is Flaky
    Flaky.faults = dict(counts)
    yield Flaky


def save_with_flaky_storage(
    root: str, failing: int, counts: dict[str, int], guarded: bool, settings: dict[str, Any]
) -> dict[str, Any]:
    """Rank function: three saves, of which some attempts fail at one rank."""
    checkpointing._FIRST_PAUSE_S = 0.1
    rank = distributed.get_rank()
    mesh = states.line_mesh()
    rows = nn.Parameter(states.shard(torch.zeros(7, 2), mesh, [states.ROWS]))
    optimizer = torch.optim.SGD([rows], lr=1.0)
    outcomes: list[Any] = []
    with (
        faults(counts if rank == failing else {}) as storage,
        Checkpointer(f"flaky://{root}", async_save=True, log_level="error", **settings) as checkpointer,
    ):
        handles = []
        for step in range(3):
            rows.grad = torch.full_like(rows, -1.0)
            if guarded:
                with checkpointer.guard(optimizer):
                    optimizer.step()
            else:
                optimizer.step()
            handles.append(checkpointer.save(step, {"rows": rows, "step": step, f"of {rank}": torch.ones(2)}))
        for handle in handles:
            try:
                handle.result(WAIT_S)
                outcomes.append("")
            except CheckpointError as error:
                outcomes.append(type(error).__name__)
        raised = False
        try:
            checkpointer.wait()
        except CheckpointError:
            raised = True
        target: dict[str, Any] = {"rows": states.shard(torch.zeros(7, 2), mesh, [states.ROWS]), "step": None}
        latest = checkpointer.restore(target)
    return {
        "outcomes": outcomes,
        "raised": raised,
        "latest": latest,
        "step": target["step"],
        "rows": states.digest(target["rows"]) if latest is not None else "",
        "seen": storage.seen,
    }


@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
@pytest.mark.parametrize("failing", [0, 2])
def test_a_save_is_tried_again_on_all_ranks(
    ranks: Ranks, tmp_path: Path, failing: int, guarded: bool
) -> None:
    found = ranks.run(
        3,
        save_with_flaky_storage,
        root=str(tmp_path),
        failing=failing,
        counts={"step-00000001": 1, "step-00000002": 2},
        guarded=guarded,
        settings={"ckpt_on_failure": "retry", "ckpt_max_failures": 3},
    )
    assert [one.pop("seen") for one in found] == [3 if rank == failing else 0 for rank in range(3)]
    for one in found:
        del one["rows"]
    expected = {"outcomes": ["", "", ""], "raised": False, "latest": 2, "step": 2}
    assert found == [expected] * 3
    for step in range(3):
        values = read_with_torch(step_path(tmp_path, step))
        assert values["rows"].tolist() == [[step + 1.0] * 2] * 7, "as it was when it was saved"
        assert values["step"] == step
        assert values.keys() == {"rows", "step", "of 0", "of 1", "of 2"}
        # Nothing is left of the attempts that failed.
        manifests = {path.parent.name for path in (step_path(tmp_path, step) / ".distckpt").rglob("rank-*")}
        assert len(manifests) == 1


def save_while_a_worker_dies(root: str, failing: int) -> list[Any]:
    """Rank function: the workers of one rank die in the first attempt; what comes of it, and how soon."""
    checkpointing._FIRST_PAUSE_S = 0.1
    found: list[Any] = []
    with Checkpointer(
        root, async_save=True, dist_ckpt_workers=2, ckpt_on_failure="retry", log_level="error",
        distributed_timeout_minutes=0.25,
    ) as checkpointer:  # fmt: skip
        for step in range(3):
            state = {f"of {distributed.get_rank()}": torch.full((9 << 18,), float(step))}
            lanes = checkpointer._engine.lanes
            assert isinstance(lanes, WorkerLanes)
            pids = list(lanes.pids) if step == 1 and distributed.get_rank() == failing else []
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            started = time.monotonic()
            handle = checkpointer.save(step, state)
            threading.Event().wait(0.2)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            try:
                handle.result(35)
                found.append("")
            except CheckpointError:
                found.append("failed")
            found.append(time.monotonic() - started < 12)
    return found


@pytest.mark.parametrize("failing", [0, 1])
def test_a_worker_dies_in_a_save_that_is_tried_again(ranks: Ranks, tmp_path: Path, failing: int) -> None:
    """Where nothing is left to write once more, no rank waits for another to do it."""
    found = ranks.run(2, save_while_a_worker_dies, root=str(tmp_path), failing=failing, timeout_s=55)
    assert found[0] == found[1]
    assert found[0][1::2] == [True] * 3
    assert found[0][0] == found[0][4] == ""
    if not found[0][2]:
        assert read_with_torch(step_path(tmp_path, 1))["of 1"][::99].eq(1.0).all()


@pytest.mark.parametrize("failing", [0, 1])
def test_attempts_have_an_end(ranks: Ranks, tmp_path: Path, failing: int) -> None:
    found = ranks.run(
        3,
        save_with_flaky_storage,
        root=str(tmp_path),
        failing=failing,
        counts={"step-00000001": 9},
        guarded=False,
        settings={"ckpt_on_failure": "retry", "ckpt_max_failures": 2},
    )
    assert [one.pop("seen") for one in found] == [2 if rank == failing else 0 for rank in range(3)]
    for rank, one in enumerate(found):
        assert one["outcomes"] == ["", "WriteError" if rank == failing else "CommitError", ""]
        assert one["raised"]
        assert (one["latest"], one["step"]) == (2, 2)


def save_while_failures_are_borne(root: str, failing: int) -> list[list[Any]]:
    """Rank function: two saves fail, one does not, then three fail: the last of them is one too many."""
    rank = distributed.get_rank()
    bad = (1, 2, 4, 5, 6)
    found: list[list[Any]] = []
    counts = {f"step-{step:08}": 9 for step in bad} if rank == failing else {}
    for is_async in (False, True):
        folder = f"flaky://{root}/{is_async:d}"
        outcomes: list[Any] = []
        with (
            faults(counts),
            Checkpointer(
                folder,
                async_save=is_async,
                ckpt_on_failure="warn",
                ckpt_max_failures=3,
                log_level="error",
            ) as checkpointer,
        ):
            for step in range(7):
                try:
                    handle = checkpointer.save(step, {f"of {rank}": torch.full((3,), float(step))})
                    checkpointer.wait()
                    outcomes.append(bool(handle.committed))
                except CheckpointError as error:
                    outcomes.append(type(error).__name__)
            outcomes.append(checkpointer.steps())
        found.append(outcomes)
    return found


@pytest.mark.parametrize("failing", [0, 2])
def test_failures_are_borne_until_there_are_too_many(ranks: Ranks, tmp_path: Path, failing: int) -> None:
    for rank, found in enumerate(
        ranks.run(3, save_while_failures_are_borne, root=str(tmp_path), failing=failing)
    ):
        error = "WriteError" if rank == failing else "CommitError"
        expected = [True, False, False, True, False, False, error, [0, 3]]
        assert found == [expected] * 2, rank


def _apart(step: int | None) -> dict[str, Any]:
    """Return entries that are one rank's alone, and one that is sharded."""
    full = torch.zeros(6, 5) if step is None else states.values("t", (6, 5), torch.float32, step)
    return {
        "sharded": states.shard(full, states.line_mesh(), [states.ROWS]),
        f"of {distributed.get_rank()}": torch.full((40,), -1.0 if step is None else float(step)),
        "step": step,
    }


def _restored(checkpointer: Checkpointer, step: int | str) -> list[Any]:
    """Return the step and what is wrong, or the error."""
    state = _apart(None)
    try:
        found = checkpointer.restore(state, step)
    except Exception as error:  # noqa: BLE001 - told to the test
        return [type(error).__name__, str(error)]
    return [found, states.differences(state, _apart(found))]


def damage(path: Path, fqn: str, how: str) -> None:
    """Damage what one rank alone reads."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if how == "metadata cut":
        data = (path / ".metadata").read_bytes()
        (path / ".metadata").write_bytes(data[: len(data) // 2])
        return
    storage_data = FileSystemReader(path).read_metadata().storage_data
    info = next(info for index, info in storage_data.items() if index.fqn == fqn)
    file = path / info.relative_path
    data_of = bytearray(file.read_bytes())
    if how == "bit":
        data_of[info.offset + info.length - 3] ^= 1
    elif how == "cut":
        del data_of[info.offset + info.length // 2 :]
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(data_of)


def restore_what_is_damaged(root: str, rank: int, how: str) -> list[Any]:
    """Rank function: the two newest of four checkpoints are damaged, each for one rank; then all are."""
    found = []
    with Checkpointer(root, distributed_timeout_minutes=0.2, log_level="error") as checkpointer:
        for step in range(4):
            checkpointer.save(step, _apart(step))
        for steps, asked in (((3, 2), ("latest", 3, 0)), ((0, 1), ("latest",))):
            if distributed.get_rank() == 0:
                for step in steps:
                    damage(step_path(root, step), f"of {rank if step != 2 else 1}", how)
            distributed.barrier()
            found += [_restored(checkpointer, step) for step in asked]
            distributed.barrier()
    return found


@pytest.mark.parametrize(
    ("rank", "how"),
    [
        (2, "bit"),
        (0, "cut"),
        (2, "gone"),
        (0, "metadata cut"),
        pytest.param(0, "bit", marks=pytest.mark.thorough),
        pytest.param(2, "cut", marks=pytest.mark.thorough),
        pytest.param(0, "gone", marks=pytest.mark.thorough),
    ],
)
def test_what_one_rank_finds_damaged_all_pass_over(ranks: Ranks, tmp_path: Path, rank: int, how: str) -> None:
    replies = ranks.run(3, restore_what_is_damaged, root=str(tmp_path), rank=rank, how=how)
    for place, (latest, by_number, oldest, last) in enumerate(replies):
        assert latest == [1, []], "of the older one, and nothing of the newer ones is left"
        # Asked for by its number, none is taken in its place.
        assert by_number[0] != 1
        assert (by_number[0] == "IntegrityError") >= (place == rank or how == "metadata cut"), by_number
        assert oldest == [0, []]
        assert last[0] == "IntegrityError", "never as if there were none"
        assert "step-00000003" in last[1], "the first that was found"
    left = len(list(tmp_path.glob("step-*/.metadata")))
    assert left == 4, "what is damaged is left for people to look at"


class Refusing:
    """Does not take its state on one rank."""

    def state_dict(self) -> dict[str, Any]:
        return {"x": torch.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if distributed.get_rank() == 1:
            raise LookupError("this rank does not take it")


def restore_into_what_refuses(root: str) -> list[Any]:
    """Rank function: what an object of one rank raises ends the restore of all, and soon."""
    with Checkpointer(root, distributed_timeout_minutes=0.2) as checkpointer:
        checkpointer.save(0, {"object": Refusing()})
        started = time.monotonic()
        try:
            checkpointer.restore({"object": Refusing()})
        except Exception as error:  # noqa: BLE001 - told to the test
            return [type(error).__name__, time.monotonic() - started]
    return ["", 0.0]


def test_what_an_object_of_one_rank_raises_reaches_the_others_at_once(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(3, restore_into_what_refuses, root=str(tmp_path))
    assert [name for name, _ in found] == ["CheckpointError", "LookupError", "CheckpointError"]
    assert max(seconds for _, seconds in found) < 10


def train_until_preempted(
    root: str, hit: int, at_step: int, handler: bool, lead_s: float = 0.0
) -> dict[str, Any]:
    """Rank function: train in step with the others until one of them, which got SIGTERM, has all save."""
    rank = distributed.get_rank()
    called: list[int] = []
    if handler:
        signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    with Checkpointer(root, async_save=True, log_level="warning") as checkpointer:
        state: dict[str, Any] = {f"of {rank}": torch.zeros(3), "step": 0}
        restored = checkpointer.restore(state)
        checkpointer.watch_preemption()
        first, last = 1 + (restored or 0), None
        for step in range(first, first + 400):
            total = torch.ones(1)
            if distributed.get_world_size() > 1:
                distributed.all_reduce(total)
            state[f"of {rank}"] += total
            state["step"] = step
            if rank == hit and step == at_step:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpointer.preempted(step):
                checkpointer.save(step, state).result(WAIT_S)
                last = step
                break
            if step == at_step + 50:
                break
        still = signal.getsignal(signal.SIGTERM)
    after = signal.getsignal(signal.SIGTERM)
    return {
        "restored": restored,
        "last": last,
        "called": called,
        "put back": still is not after and (callable(after) if handler else after == signal.SIG_DFL),
        "value": state[f"of {rank}"].tolist(),
    }


@pytest.mark.parametrize(
    ("world", "hit", "handler"), [(1, 0, True), (3, 0, False), (3, 1, True), (3, 2, False)]
)
def test_after_a_signal_to_one_rank_all_save_one_step_and_end(
    ranks: Ranks, tmp_path: Path, world: int, hit: int, handler: bool
) -> None:
    found = ranks.run(world, train_until_preempted, root=str(tmp_path), hit=hit, at_step=7, handler=handler)
    lasts = {one["last"] for one in found}
    assert len(lasts) == 1
    [last] = lasts
    assert last is not None
    assert 7 <= last <= (7 if world == 1 else 13)
    for rank, one in enumerate(found):
        assert one["called"] == ([signal.SIGTERM] if handler and rank == hit else [])
        assert one["put back"]
    # It goes on from there, and is told of nothing that was before.
    again = ranks.run(
        world, train_until_preempted, root=str(tmp_path), hit=hit, at_step=last + 30, handler=handler
    )
    for one in again:
        assert one["restored"] == last
        assert one["last"] >= last + 30
        assert one["value"] == [float(world * one["last"])] * 3
    assert {one["last"] for one in again} == {again[0]["last"]}


def be_signalled_twice(root: str, handler: bool) -> str:
    """Rank function: rank 0 gets the signal twice; what was there before decides."""
    called: list[int] = []
    if handler:
        signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    with Checkpointer(root) as checkpointer:
        checkpointer.watch_preemption()
        if distributed.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
    return f"called {len(called)} times"


def test_a_second_signal_is_handled_as_before_the_watch(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, be_signalled_twice, root=str(tmp_path), handler=True) == [
        "called 2 times",
        "called 0 times",
    ]
    killed, unhurt = ranks.run(2, be_signalled_twice, may_die=[0], root=str(tmp_path), handler=False)
    assert killed is None
    assert unhurt == "called 0 times"


def save_a_warm_up(root: str) -> list[Any]:
    """Rank function: entries that come when the plan of the state is used already, on all ranks or on one."""
    rank = distributed.get_rank()
    torch.manual_seed(3)
    model = nn.Linear(WIDTH, WIDTH)
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    late = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([*model.parameters(), late], lr=0.1)
    found = []
    with Checkpointer(root, async_save=True) as checkpointer:
        for step in range(9):
            if step >= 3:
                model(torch.ones(2, WIDTH)).sum().backward()
            if step >= 6:
                # This one had no gradient until now.
                late.grad = torch.full_like(late, rank + 1.0)
            with checkpointer.guard(optimizer):
                optimizer.step()
            optimizer.zero_grad()
            state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": step}
            if rank == 1 and step >= 5:
                state["counts"] = {"of rank 1": torch.full((2,), float(step))}
            try:
                checkpointer.save(step, state).result(WAIT_S)
                found.append("")
            except CheckpointError as error:
                found.append(type(error).__name__)
    return found


def test_entries_that_come_late_are_saved_from_then_on(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks.run(2, save_a_warm_up, root=str(tmp_path))
    failed = [step for step, outcome in enumerate(outcomes[0]) if outcome]
    assert failed == [step for step, outcome in enumerate(outcomes[1]) if outcome]
    # What one rank alone changes may cost one save, which says so.
    assert set(failed) <= {5}, outcomes
    for step in set(range(9)) - set(failed):
        values = read_with_torch(step_path(tmp_path, step))
        state = values["optimizer"].get("state", {})
        assert set(state) == (set() if step < 3 else {"0", "1"} if step < 6 else {"0", "1", "2"}), step
        for each in state.values():
            assert set(each) == {"step", "exp_avg", "exp_avg_sq"}
        assert ("counts" in values) == (step >= 5), step
        if step >= 5:
            assert values["counts"]["of rank 1"].tolist() == [float(step)] * 2


def save_loaders(root: str) -> None:
    """Rank function: a loader of each rank."""
    loader = Shuffled(distributed.get_rank())
    loader._order = [distributed.get_rank()] * 3
    with Checkpointer(root, load_rng=True) as checkpointer:
        torch.manual_seed(distributed.get_rank())
        checkpointer.save(0, {"loader": PerRank(loader)})


def restore_loaders(root: str) -> list[Any]:
    """Rank function: into as many ranks, or others."""
    loader = Shuffled(0)
    loader._order = [99]
    torch.manual_seed(50)
    with Checkpointer(root, load_rng=True, log_level="error") as checkpointer:
        assert checkpointer.restore({"loader": PerRank(loader)}) == 0
    return [loader._order, torch.rand(1).item()]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_is_a_ranks_own_when_there_are_more_or_fewer(ranks: Ranks, tmp_path: Path, world: int) -> None:
    ranks.run(2, save_loaders, root=str(tmp_path))
    found = ranks.run(world, restore_loaders, root=str(tmp_path))
    drawn = [torch.rand(1, generator=torch.Generator().manual_seed(seed)).item() for seed in (0, 1, 50)]
    assert found == [[[0] * 3, drawn[0]], [[1] * 3, drawn[1]], [[99], drawn[2]]][:world]


def fail_while_the_save_before_is_published(root: str) -> list[str]:
    """Rank function: the first rank cannot stage a save, while it publishes the one before."""
    rank = distributed.get_rank()
    publish = checkpointing.publish  # type: ignore[attr-defined]
    failed = threading.Event()

    def late(*arguments: Any, **settings: Any) -> None:
        failed.wait(10)
        publish(*arguments, **settings)

    state: dict[str, Any] = {"t": torch.full((1000,), float(rank))}
    with Checkpointer(root, async_save=True, distributed_timeout_minutes=0.5, log_level="error") as one:
        one.save(0, state).result(WAIT_S)
        checkpointing.publish = late if rank == 0 else publish  # type: ignore[attr-defined]
        try:
            before = one.save(1, state)
            try:
                one.save(2, {**state, "f": lambda: 1} if rank == 0 else state).result(WAIT_S)
                found = "saved"
            except Exception as error:  # noqa: BLE001 - told to the test
                found = type(error).__name__
            failed.set()
            before.result(WAIT_S)
        finally:
            checkpointing.publish = publish  # type: ignore[attr-defined]
    return [found]


def test_word_of_a_failure_is_not_forgotten_before_it_was_heard(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(2, fail_while_the_save_before_is_published, root=str(tmp_path))
    assert found[1] == ["CommitError"], "not that it has waited for the deadline"


def save_again_while_it_is_tried_again(root: str) -> list[Any]:
    """Rank function: a step fails on all ranks, and is saved again before either tries it again."""
    rank = distributed.get_rank()
    outcomes: list[Any] = []
    blocker = step_path(Path(root), 5)
    if rank == 0:
        # In the place of the directory, for the first attempt.
        blocker.touch()
    distributed.barrier()
    with Checkpointer(
        root, async_save=True, ckpt_on_failure="retry", ckpt_max_failures=4, log_level="error",
        distributed_timeout_minutes=0.15,
    ) as checkpointer:  # fmt: skip
        handles = [checkpointer.save(5, {f"of {rank}": torch.full((1000,), 1.0)})]
        threading.Event().wait(0.4)
        if rank == 0:
            blocker.unlink()
        handles.append(checkpointer.save(5, {f"of {rank}": torch.full((1000,), 2.0)}))
        for handle in handles:
            try:
                handle.result(WAIT_S)
                outcomes.append("")
            except CheckpointError as error:
                outcomes.append(type(error).__name__)
    return outcomes


def test_a_step_that_is_saved_again_while_it_is_tried_again_is_not_mixed(
    ranks: Ranks, tmp_path: Path
) -> None:
    found = ranks.run(3, save_again_while_it_is_tried_again, timeout_s=120, root=str(tmp_path))
    assert found[0] == found[1] == found[2]
    values = read_with_torch(step_path(tmp_path, 5))
    assert values["of 0"].tolist() == values["of 1"].tolist() == values["of 2"].tolist()


def save_beside_a_refusal(root: str, when_busy: str) -> list[Any]:
    """Rank function: the metric of one rank is refused in the first save; what comes of all of them."""
    rank = distributed.get_rank()
    outcomes: list[Any] = []
    with Checkpointer(
        root, async_save=True, ckpt_when_busy=when_busy, keep_best=1, log_level="error",
        distributed_timeout_minutes=0.05,
    ) as checkpointer:  # fmt: skip
        for step in range(1, 4):
            metric: Any = "n/a" if (rank, step) == (1, 1) else 0.5
            try:
                checkpointer.save(step, {f"of {rank}": torch.ones(3)}, metric=metric).result(WAIT_S)
                outcomes.append("")
            except CheckpointError as error:
                outcomes.append(type(error).__name__)
            distributed.barrier()
    return outcomes


@pytest.mark.parametrize("when_busy", ["wait", "skip", "fail"])
def test_a_save_that_one_rank_refuses_costs_no_other(ranks: Ranks, tmp_path: Path, when_busy: str) -> None:
    found = ranks.run(3, save_beside_a_refusal, timeout_s=120, root=str(tmp_path), when_busy=when_busy)
    assert [outcomes[1:] for outcomes in found] == [["", ""]] * 3
    assert found[1][0] == "ConfigError"


class StepsNotByItself(torch.optim.AdamW):
    """Wants to evaluate the loss itself."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        super().step()
        return loss


def restore_what_was_trained_in_part(root: str, kind: str, stepped: list[int]) -> list[Any]:
    """Rank function: under FSDP2, where some parameters had no gradient; returns what is not as saved."""

    def make() -> tuple[nn.ModuleList, torch.optim.Optimizer]:
        torch.manual_seed(3)
        # Neither can be divided evenly.
        parts = nn.ModuleList([nn.Linear(WIDTH, 5) for _ in range(3)])
        for part in parts:
            fully_shard(part, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
        made: dict[str, Any] = {
            "adamw": lambda: torch.optim.AdamW(parts.parameters()),
            "momentum": lambda: torch.optim.SGD(parts.parameters(), 0.1, momentum=0.9),
            "closure": lambda: StepsNotByItself(parts.parameters()),
        }
        return parts, made[kind]()

    def step(parts: nn.ModuleList, optimizer: torch.optim.Optimizer, numbers: list[int]) -> None:
        def loss() -> Any:
            total = sum(parts[number](torch.ones(1, WIDTH)).square().sum() for number in numbers)
            total.backward()
            return total

        optimizer.step(loss)
        optimizer.zero_grad()

    (parts, optimizer), (others, other) = make(), make()
    for _ in range(2):
        step(parts, optimizer, [0, 1])
    if stepped:
        step(others, other, stepped)
    with Checkpointer(root, log_level="error") as checkpointer:
        checkpointer.save(0, {"model": parts, "optimizer": optimizer})
        checkpointer.restore({"model": others, "optimizer": other})
    wrong: list[Any] = []
    for numbers in ([0, 1, 2], []):
        mine, theirs = optimizer.state_dict()["state"], other.state_dict()["state"]
        if mine.keys() != theirs.keys():
            wrong.append([list(mine), list(theirs)])
        for (number, one), another in zip(mine.items(), theirs.values(), strict=True):
            for key, value in one.items():
                found = another[key]
                kinds = [(type(each), getattr(each, "placements", None)) for each in (value, found)]
                if kinds[0] != kinds[1] or states.digest(value) != states.digest(found):
                    wrong.append([number, key, str(kinds)])
        for one in parts.parameters(), others.parameters():
            wrong.append([states.digest(value) for value in one])
        if wrong[-1] == wrong[-2]:
            del wrong[-2:]
        if numbers:
            for one in ((parts, optimizer), (others, other)):
                step(*one, numbers)
    return wrong


@pytest.mark.parametrize("stepped", [[], [0], [1, 2]], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "momentum", "closure"])
def test_states_of_parameters_are_divided_as_these(
    ranks: Ranks, tmp_path: Path, kind: str, stepped: list[int]
) -> None:
    found = ranks.run(2, restore_what_was_trained_in_part, root=str(tmp_path), kind=kind, stepped=stepped)
    assert found == [[], []]


class Stage:
    """Has other entries on each rank, as a stage of a pipeline has."""

    def __init__(self, **entries: Any) -> None:
        self.entries = entries

    def state_dict(self) -> dict[str, Any]:
        return self.entries

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.entries = state


def restore_into_stages(root: str, step: int | str) -> list[str]:
    """Rank function: returns what was warned of."""
    rank = distributed.get_rank()
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    with Checkpointer(root, log_level="warning") as checkpointer:
        stage = {f"layer{rank}": torch.full((2,), float(rank))}
        checkpointer.save(0, {"model": Stage(**stage), "history": Stage(a=1, b=2)})
        logging.getLogger("distckpt").addHandler(handler)
        target = Stage(**{f"layer{rank}": torch.zeros(2)})
        assert checkpointer.restore({"model": target, "history": Stage(a=0)}, step) == 0
        assert target.entries[f"layer{rank}"].tolist() == [rank] * 2
    logging.getLogger("distckpt").removeHandler(handler)
    return [text.partition(" has ")[2] for text in told]


def test_what_no_rank_has_a_place_for_is_said_by_the_first(ranks: Ranks, tmp_path: Path) -> None:
    history = (
        "1 entries of 'history' for which the state has no place, and that are not restored: history.b "
        "(objects are given theirs: pass modules and optimizers, not their state_dict())"
    )
    for step in ("latest", 0):
        assert ranks.run(2, restore_into_stages, root=str(tmp_path), step=step) == [[history], []]

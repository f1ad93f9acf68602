"""Incremental saves: only what has changed is written, and every checkpoint is whole by itself."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from distckpt import Checkpointer, CheckpointError, ConfigError, IntegrityError
from distckpt.coordination import StoreCoordinator
from distckpt.errors import WriteError
from distckpt.storage import open_storage
from distckpt.verification import verify
from faults.checkpoints import wait_until
from integration.checkpoints import assert_same, read_with_torch
from integration.ranks import states
from integration.ranks.world import Ranks
from integration.test_checkpointer_ranks import Outcome, outcome_of, restore_steps, step_path
from servers import S3Server

pytestmark = pytest.mark.slow

KIB = 1 << 10
NUM_FROZEN = 19


def lora(step: int) -> dict[str, Any]:
    """Return a state of which 95 % is frozen."""
    generator = torch.Generator().manual_seed(7)
    state: dict[str, Any] = {
        f"base.{number}": torch.randn(256 * KIB, generator=generator) for number in range(NUM_FROZEN)
    }
    state["adapter"] = torch.full((256 * KIB,), float(step))
    state["step"] = step
    return state


def empty() -> dict[str, Any]:
    return {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for name, value in lora(0).items()
    }


def images_of(path: Path) -> dict[str, tuple[int, int]]:
    """Return inode and size of the data files of a checkpoint."""
    return {one.name: (one.stat().st_ino, one.stat().st_size) for one in path.glob("*.distcp*")}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("is_async", [False, True])
def test_only_what_changed_is_written(tmp_path: Path, workers: int, is_async: bool) -> None:
    settings: dict[str, Any] = {
        "dist_ckpt_workers": workers, "async_save": is_async, "ckpt_incremental": True, "keep_last": 2,
    }  # fmt: skip
    written = []
    with Checkpointer(tmp_path, **settings) as checkpointer:
        for step in range(5):
            handle = checkpointer.save(step, lora(step))
            handle.result()
            written.append(handle.written_bytes)
    assert written[0] is not None
    assert written[0] > 20 << 20
    for nbytes in written[1:]:
        assert nbytes is not None
        assert 1 << 20 < nbytes < 0.06 * written[0]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]
    old, new = images_of(step_path(tmp_path, 3)), images_of(step_path(tmp_path, 4))
    shared = set(old.values()) & set(new.values())
    assert sum(size for _, size in shared) > 19 << 20
    for step in (3, 4):
        assert_same(read_with_torch(step_path(tmp_path, step)), lora(step))
        report = verify(open_storage(step_path(tmp_path, step)))
        assert (report.status, report.findings) == ("complete", [])
    # The last alone is whole.
    shutil.rmtree(step_path(tmp_path, 3))
    state = empty()
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state) == 4
    assert_same(state, lora(4))


def test_what_changes_without_being_counted_is_written(tmp_path: Path) -> None:
    state = lora(0)
    with Checkpointer(tmp_path, ckpt_incremental=True) as checkpointer:
        checkpointer.save(0, state)
        version = state["base.3"]._version
        # As fused optimizers and many a kernel do; one bit of one value.
        state["base.3"].numpy().view("uint32")[77_777] ^= 1
        assert state["base.3"]._version == version
        checkpointer.save(1, state)
    assert_same(read_with_torch(step_path(tmp_path, 1)), state)


def test_a_file_of_little_use_is_written_again(tmp_path: Path) -> None:
    state = lora(0)
    with Checkpointer(tmp_path, ckpt_incremental=True) as checkpointer:
        checkpointer.save(0, state)
        for number in range(11):
            state[f"base.{number}"] += 1
        assert checkpointer.save(1, state).written_bytes == pytest.approx(20 << 20, rel=0.05)
        assert not set(images_of(step_path(tmp_path, 0)).values()) & set(
            images_of(step_path(tmp_path, 1)).values()
        )
        assert checkpointer.save(2, state).written_bytes == 0
    assert_same(read_with_torch(step_path(tmp_path, 2)), state)


def test_random_changes(tmp_path: Path, rng: random.Random) -> None:
    names = [f"t{number}" for number in range(12)]
    state: dict[str, Any] = {name: torch.zeros(rng.choice([1, 3000, 90_000])) for name in names}
    with Checkpointer(tmp_path, ckpt_incremental=True, keep_last=3, dist_ckpt_workers=2) as checkpointer:
        for step in range(12):
            for name in rng.sample(names, rng.choice([0, 1, 2, 6, 12])):
                if name in state and rng.random() < 0.2:
                    del state[name]
                elif rng.random() < 0.2:
                    state[name] = torch.rand(rng.choice([1, 3000, 90_000]))
                elif name in state:
                    state[name].add_(1)
            state["step"] = step
            checkpointer.save(step, state)
            assert_same(read_with_torch(step_path(tmp_path, step)), state)
            assert verify(open_storage(step_path(tmp_path, step))).status == "complete"


@pytest.mark.parametrize("how", ["removed", "committed anew"])
def test_the_checkpoint_before_is_gone(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path, ckpt_incremental=True) as checkpointer:
        checkpointer.save(0, lora(0))
        if how == "removed":
            shutil.rmtree(step_path(tmp_path, 0))
        else:
            with Checkpointer(tmp_path) as other:
                other.save(0, {"other": torch.ones(3)})
        with caplog.at_level(logging.WARNING):
            handle = checkpointer.save(1, lora(1))
    assert handle.written_bytes is not None
    assert handle.written_bytes > 20 << 20
    assert "shares nothing with" in caplog.text
    assert_same(read_with_torch(step_path(tmp_path, 1)), lora(1))


def test_the_same_step_again_and_a_failure_between(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, ckpt_incremental=True) as checkpointer:
        for value in range(3):
            checkpointer.save(0, lora(value))
            assert_same(read_with_torch(step_path(tmp_path, 0)), lora(value))
        step_path(tmp_path, 1).touch()
        with pytest.raises(Exception, match="step-00000001"):
            checkpointer.save(1, lora(8))
        assert_same(read_with_torch(step_path(tmp_path, 0)), lora(2))
        handle = checkpointer.save(2, lora(9))
        assert handle.written_bytes is not None
        assert handle.written_bytes < 2 << 20
    assert_same(read_with_torch(step_path(tmp_path, 2)), lora(9))


def test_the_directory_of_the_last_checkpoint_is_gone_when_it_is_saved_again(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, ckpt_incremental=True) as checkpointer:
        checkpointer.save(0, lora(0))
        shutil.rmtree(step_path(tmp_path, 0))
        checkpointer.save(0, lora(1))
    assert_same(read_with_torch(step_path(tmp_path, 0)), lora(1))


def damage(path: Path, file: Path | None = None) -> None:
    """Change bytes in the middle of a file of a checkpoint, or its largest, for all that share it."""
    file = file or max(path.glob("*.distcp*"), key=lambda one: one.stat().st_size)
    descriptor = os.open(file, os.O_RDWR)
    os.pwrite(descriptor, b"\x55" * 64, file.stat().st_size // 2 + 300_000)
    os.close(descriptor)


def test_damage_is_found_in_what_is_shared(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, ckpt_incremental=True) as checkpointer:
        for step in range(2):
            checkpointer.save(step, lora(step))
    damage(step_path(tmp_path, 0))
    assert verify(open_storage(step_path(tmp_path, 1))).status == "damaged"
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(IntegrityError):
        checkpointer.restore(empty())


class Heard(logging.Handler):
    """Whether an upload was said to have failed."""

    has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        self.has_failed |= "upload" in record.msg and record.levelno == logging.ERROR


def save_past_damage(root: str, local: str, *, is_first: bool = True) -> list[int | None]:
    """Save again and again, with damage to the third and so to the fourth; returns what was written."""
    found, heard = [], Heard()
    settings: dict[str, Any] = {"ckpt_local_dir": local, "ckpt_local_keep": 6, "ckpt_incremental": True}
    logger = logging.getLogger("distckpt.archive")
    logger.addHandler(heard)
    try:
        with Checkpointer(root, **settings) as checkpointer:
            for step in range(6):
                handle = checkpointer.save(step, lora(step))
                found.append(handle.written_bytes)
                uploaded = step_path(Path(root), step) / ".metadata"
                if not is_first:
                    continue
                if step == 3:
                    wait_until(lambda: heard.has_failed, 20, "the damage is found")
                else:
                    wait_until(uploaded.exists, 20, f"step {step} is uploaded")
                if step == 2:
                    [path] = Path(local).glob("*/step-00000002")
                    damage(path)
    finally:
        logger.removeHandler(heard)
    return found


def save_past_damage_in_ranks(root: str, local: str) -> list[int | None]:
    """Rank function."""
    return save_past_damage(root, local, is_first=distributed.get_rank() == 0)


def assert_is_past_damage(root: Path, written: list[int]) -> None:
    assert [nbytes > 19 << 20 for nbytes in written[2:]] == [False, False, True, False]
    for step in (0, 1, 2, 4, 5):
        assert verify(open_storage(step_path(root, step))).status == "complete"
    assert_same(read_with_torch(step_path(root, 5)), lora(5))
    assert not (step_path(root, 3) / ".metadata").exists()


def test_damage_that_an_upload_finds_is_shared_no_further(tmp_path: Path) -> None:
    root, local = tmp_path / "root", tmp_path / "local"
    written = save_past_damage(str(root), str(local))
    assert_is_past_damage(root, [nbytes or 0 for nbytes in written])


def test_damage_that_an_upload_finds_is_shared_by_no_rank(ranks: Ranks, tmp_path: Path) -> None:
    root, local = tmp_path / "root", tmp_path / "local"
    found = ranks.run(2, save_past_damage_in_ranks, root=str(root), local=str(local))
    assert_is_past_damage(root, [sum(own[step] for own in found) for step in range(6)])


def test_what_is_damaged_is_not_shared_after_a_restore(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, ckpt_incremental=True) as checkpointer:
        for step in range(2):
            checkpointer.save(step, lora(step))
        damage(step_path(tmp_path, 1))
        with pytest.raises(IntegrityError):
            checkpointer.restore(empty())
        # The next one fails before it has written anything.
        step_path(tmp_path, 2).touch()
        with pytest.raises(CheckpointError, match="step-00000002"):
            checkpointer.save(2, lora(2))
        written = [checkpointer.save(step, lora(step)).written_bytes or 0 for step in (3, 4)]
    assert [nbytes > 19 << 20 for nbytes in written] == [True, False]
    for step in (3, 4):
        assert verify(open_storage(step_path(tmp_path, step))).status == "complete"


def test_a_rank_that_did_not_hear_of_damage_hears_of_it_in_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 claims, says that all is to be written, and fails before the other has heard it."""
    store = distributed.HashStore()  # type: ignore[attr-defined]
    checkpointers = [
        Checkpointer(
            tmp_path,
            participants=StoreCoordinator(store, rank, [0, 1]),
            ckpt_incremental=True,
            distributed_timeout_minutes=0.3,
        )
        for rank in range(2)
    ]

    def save(step: int) -> list[int | None]:
        with ThreadPoolExecutor(2) as pool:
            handles = [pool.submit(one.save, step, lora(step)) for one in checkpointers]
        return [handle.result().written_bytes for handle in handles]

    for step in range(2):
        save(step)
    file = max(step_path(tmp_path, 1).glob("__1_*"), key=lambda one: one.stat().st_size)
    damage(file.parent, file)
    increments = checkpointers[0]._increments
    assert increments is not None
    increments.doubt()

    def fail(*_: Any, **__: Any) -> None:
        raise WriteError("no space [ENOSPC]", errno=errno.ENOSPC)

    with monkeypatch.context() as patch:
        patch.setattr(increments, "write", fail)
        for one in checkpointers:
            with pytest.raises(CheckpointError, match="ENOSPC"):
                one.save(2, lora(2))
    assert all(nbytes and nbytes > 9 << 20 for nbytes in save(3))
    save(4)
    for one in checkpointers:
        one.close()
    for step in (3, 4):
        assert verify(open_storage(step_path(tmp_path, step))).status == "complete"


def test_within_the_budget(tmp_path: Path) -> None:
    """A state that fills the budget, and what has changed of it, which passes through slots of its own."""
    with Checkpointer(
        tmp_path, ckpt_incremental=True, ckpt_host_memory="64MiB", async_save=True
    ) as checkpointer:
        for step in range(6):
            checkpointer.save(step, lora(step))
        checkpointer.wait()
        for step in range(6):
            assert_same(read_with_torch(step_path(tmp_path, step)), lora(step))


def save_layouts(root: str, steps: int) -> list[Outcome]:
    """Rank function: save a state of all layouts, of which half stays as it is."""
    with Checkpointer(root, ckpt_incremental=True, async_save=True) as checkpointer:
        return [outcome_of(checkpointer, step, states.make(step)) for step in range(steps)]


def save_frozen(root: str) -> list[Any]:
    """Rank function: save what all ranks have alike, and shares of it, again and again."""
    found = []
    with Checkpointer(root, ckpt_incremental=True) as checkpointer:
        for step in range(4):
            handle = checkpointer.save(step, lora(step))
            found.append(handle.written_bytes)
    return found


def test_ranks(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(3, save_layouts, root=str(tmp_path / "a"), steps=3) == [[["", ""]] * 3] * 3
    assert ranks.run(2, restore_steps, root=str(tmp_path / "a"), steps=3) == [[]] * 2
    found = ranks.run(3, save_frozen, root=str(tmp_path / "b"))
    for step in range(4):
        assert_same(read_with_torch(step_path(tmp_path / "b", step)), lora(step))
        assert verify(open_storage(step_path(tmp_path / "b", step))).status == "complete"
    # In the second, each rank writes another part than in the first: it has learnt what others have, too.
    assert sum(own[3] for own in found) < 0.06 * sum(own[1] for own in found)


@pytest.mark.s3
def test_s3(s3_url: str, s3_server: S3Server) -> None:
    options = s3_server.options
    with Checkpointer(
        s3_url, ckpt_incremental=True, keep_last=1, async_save=True, storage_options=options
    ) as checkpointer:
        handles = []
        for step in range(3):
            handles.append(checkpointer.save(step, lora(step)))
            handles[-1].result()
    assert [handle.written_bytes is not None and handle.written_bytes < 2 << 20 for handle in handles] == [
        False,
        True,
        True,
    ]
    state = empty()
    with Checkpointer(s3_url, storage_options=options) as checkpointer:
        assert checkpointer.steps() == [2]
        assert checkpointer.restore(state) == 2
    assert_same(state, lora(2))


def test_what_cannot_share_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ckpt_incremental: files cannot be shared"):
        Checkpointer("memory://incremental", ckpt_incremental=True)
    with pytest.raises(ConfigError, match="ckpt_incremental: only files of torch_dist"):
        Checkpointer(tmp_path, ckpt_incremental=True, ckpt_format="zarr")

"""Two tiers: checkpoints are committed in a local directory, and uploaded in the background."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from distckpt import CheckpointConfig, Checkpointer, CheckpointError, ConfigError, IntegrityError, mirror
from distckpt.archive import Archive
from distckpt.retention import Saved
from distckpt.storage import open_storage, posix
from distckpt.verification import verify
from faults.checkpoints import wait_until
from integration.checkpoints import assert_same, read_with_torch
from integration.ranks.world import Ranks
from integration.test_checkpointer_ranks import Outcome, outcome_of, step_path
from servers import S3Server

pytestmark = pytest.mark.slow


def state_of(step: int) -> dict[str, Any]:
    return {"t": torch.full((300_000,), float(step)), "step": step}


def local_steps(local: Path) -> list[str]:
    return sorted(path.name for path in local.glob("*/step-*"))


def test_a_commit_is_local_and_the_root_follows(tmp_path: Path) -> None:
    local, root = tmp_path / "local", tmp_path / "root"
    with Checkpointer(
        root, ckpt_local_dir=str(local), keep_last=2, ckpt_local_keep=1, async_save=True
    ) as checkpointer:
        for step in range(4):
            handle = checkpointer.save(step, state_of(step))
            assert handle.result().startswith(str(local))
            assert checkpointer.latest() == step
    assert len(local_steps(local)) == 1
    assert step_path(root, 3).is_dir()
    assert (root / "latest").read_text() == "step-00000003\n"
    steps = sorted(path.name for path in root.glob("step-*"))
    assert 1 <= len(steps) <= 2
    for name in steps:
        assert verify(open_storage(root / name)).status == "complete"
        assert_same(read_with_torch(root / name), state_of(int(name[-1])))


def test_restore_takes_the_nearest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    local, root = tmp_path / "local", tmp_path / "root"
    with Checkpointer(root, ckpt_local_dir=str(local)) as checkpointer:
        for step in range(2):
            checkpointer.save(step, state_of(step))
    [here] = local.glob("*")
    found = state_of(9)
    with Checkpointer(root, ckpt_local_dir=str(local)) as checkpointer:
        # What lies there cannot be read: it comes from here.
        [image] = step_path(root, 1).glob("*.distcp*")
        whole = image.read_bytes()
        image.write_bytes(b"")
        assert checkpointer.restore(found) == 1
        assert_same(found, state_of(1))
        image.write_bytes(whole)
        [image] = step_path(here, 1).glob("*.distcp*")
        image.write_bytes(b"")
        found = state_of(9)
        with caplog.at_level(logging.WARNING):
            assert checkpointer.restore(found) == 1
        assert "is damaged, and the next older" in caplog.text
        assert_same(found, state_of(1))
        found = state_of(9)
        assert checkpointer.restore(found, 1) == 1
        assert_same(found, state_of(1))
        shutil.rmtree(local)
        assert checkpointer.steps() == [0, 1]
        assert checkpointer.restore(found, 0) == 0
        assert_same(found, state_of(0))


def test_what_a_process_could_not_upload_the_next_does(tmp_path: Path) -> None:
    local, root = tmp_path / "local", tmp_path / "root"
    root.mkdir()
    step_path(root, 5).touch()
    checkpointer = Checkpointer(root, ckpt_local_dir=str(local))
    checkpointer.save(5, state_of(5))
    with pytest.raises(CheckpointError, match="step-00000005"):
        checkpointer.close()
    step_path(root, 5).unlink()
    with Checkpointer(root, ckpt_local_dir=str(local)):
        pass
    assert_same(read_with_torch(step_path(root, 5)), state_of(5))


_DIE = """
import os, signal, sys, uuid
from distckpt.commit import claim
from distckpt.storage import open_storage
storage = open_storage(sys.argv[1])
storage.prepare()
claim(storage, uuid.uuid4().hex)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_another_machine_has_begun_at_the_root_goes(tmp_path: Path) -> None:
    """Its local directory went with it, so that nobody goes on."""
    local, root = tmp_path / "local", tmp_path / "root"
    for step in (2, 3, 7):
        died = subprocess.run([sys.executable, "-c", _DIE, str(step_path(root, step))], check=False)
        assert died.returncode == -signal.SIGKILL
    with Checkpointer(root, ckpt_local_dir=str(local)) as checkpointer:
        for step in (3, 5):
            checkpointer.save(step, state_of(step))
    # Nothing newer than what was committed is touched.
    assert sorted(path.name for path in root.glob("step-*")) == [
        "step-00000003", "step-00000005", "step-00000007",
    ]  # fmt: skip
    assert_same(read_with_torch(step_path(root, 3)), state_of(3))


@pytest.mark.s3
def test_s3(s3_url: str, s3_server: S3Server, tmp_path: Path) -> None:
    local = tmp_path / "local"
    settings: dict[str, Any] = {
        "ckpt_local_dir": str(local), "keep_last": 2, "async_save": True,
        "storage_options": s3_server.options,
    }  # fmt: skip
    with Checkpointer(s3_url, **settings) as checkpointer:
        for step in range(6):
            checkpointer.save(step, state_of(step)).result()
        assert checkpointer.steps()[-1] == 5
    shutil.rmtree(local)
    found = state_of(9)
    with Checkpointer(s3_url, **settings) as checkpointer:
        assert checkpointer.restore(found) == 5
    assert_same(found, state_of(5))
    assert s3_server.unfinished_uploads(s3_url) == []
    assert len([key for key in s3_server.keys(s3_url) if key.endswith("/.metadata")]) <= 2


def save_in_tiers(root: str, local: str) -> list[Outcome]:
    """Rank function."""
    with Checkpointer(root, ckpt_local_dir=local, async_save=True) as checkpointer:
        return [outcome_of(checkpointer, step, state_of(step)) for step in range(3)]


def test_ranks(ranks: Ranks, tmp_path: Path) -> None:
    local, root = tmp_path / "local", tmp_path / "root"
    found = ranks.run(3, save_in_tiers, root=str(root), local=str(local))
    assert found == [[["", ""]] * 3] * 3
    assert_same(read_with_torch(step_path(root, 2)), state_of(2))


def test_settings_that_do_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ckpt_local_keep: has no effect without ckpt_local_dir"):
        Checkpointer(tmp_path, ckpt_local_keep=5)
    with pytest.raises(ConfigError, match="ckpt_local_dir: expected a directory of this machine"):
        Checkpointer(tmp_path, ckpt_local_dir="s3://bucket/x")


def test_a_step_that_is_saved_anew_is_uploaded_anew(tmp_path: Path) -> None:
    """The run went back: what lies at the root of later steps is of the run that was given up."""
    local, root = tmp_path / "local", tmp_path / "root"
    with Checkpointer(root, ckpt_local_dir=str(local), ckpt_local_keep=4) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state_of(step))
    found = state_of(9)
    with Checkpointer(root, ckpt_local_dir=str(local), ckpt_local_keep=4) as checkpointer:
        assert checkpointer.restore(found, 1) == 1
        for step in (2, 3):
            checkpointer.save(step, state_of(100 + step))
    shutil.move(local, tmp_path / "older")
    with Checkpointer(root) as checkpointer:
        assert checkpointer.restore(found) == 3
        assert_same(found, state_of(103))
        checkpointer.save(3, state_of(203))
    # A machine that comes back with what is older by now.
    with Checkpointer(root, ckpt_local_dir=str(tmp_path / "older")) as checkpointer:
        assert checkpointer.restore(found) == 3
        assert_same(found, state_of(203))


def save_without_root(root: Path, settings: dict[str, Any], steps: int = 3) -> None:
    """Leave some local checkpoints that are to be uploaded."""
    root.touch()
    checkpointer = Checkpointer(root, **settings)
    for step in range(steps):
        checkpointer.save(step, state_of(step))
    with pytest.raises(CheckpointError, match="root"):
        checkpointer.close()
    root.unlink()


def flip(file: Path, at: int) -> None:
    """Change one bit."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def make_unreadable(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have reads of a file fail as those of a bad sector do: no file system here has one."""
    preadv = os.preadv

    def read(descriptor: int, *args: Any) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(file):
            raise OSError(errno.EIO, "Input/output error")
        return preadv(descriptor, *args)

    monkeypatch.setattr(os, "preadv", read)


@pytest.mark.parametrize(
    "how", ["changed", "unreadable", "record changed", "record unreadable", "metadata gone"]
)
@pytest.mark.parametrize("keep_last", [None, 1])
def test_damage_keeps_no_other_checkpoint_from_the_root(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    keep_last: int | None,
) -> None:
    root = tmp_path / "root"
    settings: dict[str, Any] = {
        "ckpt_local_dir": str(tmp_path / "local"), "ckpt_local_keep": 4, "keep_last": keep_last,
    }  # fmt: skip
    save_without_root(root, settings)
    [newest] = tmp_path.glob("local/*/step-00000002")
    if "record" in how:
        [file] = newest.glob(".distckpt/commit-*")
    else:
        file = max(newest.glob("*.distcp*"), key=lambda one: one.stat().st_size)
    if "changed" in how:
        flip(file, 0 if "record" in how else file.stat().st_size // 2)
    elif "unreadable" in how:
        make_unreadable(file, monkeypatch)
    else:
        (newest / ".metadata").unlink()
    caplog.clear()
    checkpointer = Checkpointer(root, **settings)
    if how == "metadata gone":
        # A removal that was cut short looks so.
        checkpointer.close()
    else:
        with pytest.raises(IntegrityError, match="step-00000002"):
            checkpointer.close()
        assert caplog.text.count("not uploaded to") == 1
    uploaded = [(step_path(root, step) / ".metadata").exists() for step in range(3)]
    assert uploaded == [keep_last is None, True, False]
    with Checkpointer(root, **settings) as checkpointer:
        checkpointer.save(3, state_of(3))
    assert_same(read_with_torch(step_path(root, 3)), state_of(3))


def test_the_local_directory_is_bounded_beside_what_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, local = tmp_path / "root", tmp_path / "local"
    settings: dict[str, Any] = {"ckpt_local_dir": str(local), "ckpt_local_keep": 2}
    with Checkpointer(root, **settings) as checkpointer:
        for step in range(2):
            checkpointer.save(step, state_of(step))
    [record] = local.glob("*/step-00000000/.distckpt/commit-*")
    make_unreadable(record, monkeypatch)
    with Checkpointer(root, **settings) as checkpointer:
        for step in range(2, 8):
            checkpointer.save(step, state_of(step))
        state = state_of(9)
        assert checkpointer.restore(state, 0) == 0
        assert_same(state, state_of(0))
    assert local_steps(local)[-2:] == ["step-00000006", "step-00000007"]
    assert len(local_steps(local)) <= 4
    assert_same(read_with_torch(step_path(root, 7)), state_of(7))


@pytest.mark.parametrize("damaged", [0, 100])
def test_a_damaged_record_of_what_was_uploaded_keeps_nothing_from_the_root(
    tmp_path: Path, damaged: int
) -> None:
    """Also that of the highest step, which is not removed here, where a run went back."""
    root, local = tmp_path / "root", tmp_path / "local"
    settings: dict[str, Any] = {"ckpt_local_dir": str(local), "ckpt_local_keep": 1}
    with Checkpointer(root, **settings) as checkpointer:
        checkpointer.save(damaged, state_of(damaged))
    [record] = local.glob(f"*/step-{damaged:08}/.distckpt/commit-*")
    flip(record, 0)
    with Checkpointer(root, **settings) as checkpointer:
        checkpointer.save(1, state_of(1))
    assert_same(read_with_torch(step_path(root, 1)), state_of(1))


def test_damage_to_a_step_that_was_saved_again_is_raised(tmp_path: Path) -> None:
    """The root has what was saved before."""
    root, local = tmp_path / "root", tmp_path / "local"
    settings: dict[str, Any] = {"ckpt_local_dir": str(local), "ckpt_local_keep": 3}
    with Checkpointer(root, **settings) as checkpointer:
        checkpointer.save(0, state_of(0))
    root.rename(tmp_path / "away")
    save_without_root(root, settings, 1)
    (tmp_path / "away").rename(root)
    file = max(local.glob("*/step-00000000/*.distcp*"), key=lambda one: one.stat().st_size)
    flip(file, file.stat().st_size // 2)
    checkpointer = Checkpointer(root, **settings)
    with pytest.raises(IntegrityError, match="damaged"):
        checkpointer.close()


def test_a_damaged_record_at_the_root_is_no_damage_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who owns the copy cannot be told while it is made; the next upload claims it anew."""
    root = tmp_path / "root"
    clear = mirror._Copy._clear

    def damaging(copy: mirror._Copy, *args: Any) -> None:
        monkeypatch.setattr(mirror._Copy, "_clear", clear)
        flip(step_path(root, 0) / ".distckpt" / "owner", 0)
        clear(copy, *args)

    monkeypatch.setattr(mirror._Copy, "_clear", damaging)
    with Checkpointer(root, ckpt_local_dir=str(tmp_path / "local"), ckpt_local_keep=4) as checkpointer:
        checkpointer.save(0, state_of(0))
        wait_until(lambda: "upload to" in caplog.text, 20, "the upload fails")
        assert "not copied" in caplog.text
        checkpointer.save(1, state_of(1))
    for step in range(2):
        assert_same(read_with_torch(step_path(root, step)), state_of(step))


@pytest.mark.parametrize("name", [".metadata", ".distckpt/owner"])
def test_what_cannot_be_opened_here_is_taken_from_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    root, local = tmp_path / "root", tmp_path / "local"
    settings: dict[str, Any] = {"ckpt_local_dir": str(local), "ckpt_local_keep": 4}
    with Checkpointer(root, **settings) as checkpointer:
        checkpointer.save(0, state_of(0))
    root.rename(tmp_path / "away")
    save_without_root(root, settings, 2)
    root.mkdir()
    for path in (tmp_path / "away").iterdir():
        path.rename(root / path.name)
    [bad] = local.glob(f"*/step-{'00000000' if name == '.metadata' else '00000001'}/{name}")
    open_to_read = posix._open_to_read

    def refuse(path: str, flags: int) -> int:
        if path == str(bad):
            raise OSError(errno.EIO, "Input/output error")
        return open_to_read(path, flags)

    monkeypatch.setattr(posix, "_open_to_read", refuse)
    state = state_of(9)
    with Checkpointer(root, **settings) as checkpointer:
        assert checkpointer.restore(state, 0) == 0
        assert checkpointer.latest() == 1
    assert_same(state, state_of(0))
    assert_same(read_with_torch(step_path(root, 1)), state_of(1))


def test_what_retention_removes_at_the_root_is_not_uploaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that went back saves a step again, with another metric than the root has of it."""
    root = tmp_path / "root"
    settings: dict[str, Any] = {
        "ckpt_local_dir": str(tmp_path / "local"), "ckpt_local_keep": 3,
        "keep_last": 1, "keep_best": 1, "keep_best_mode": "max", "log_level": "error",
    }  # fmt: skip
    with Checkpointer(root, **settings) as checkpointer:
        checkpointer.save(50, state_of(1), metric=9.0)
    root.rename(tmp_path / "away")
    root.touch()
    checkpointer = Checkpointer(root, **settings)
    for step, metric in ((50, 1.0), (51, 5.0), (52, 4.0)):
        checkpointer.save(step, state_of(step), metric=metric)
    with pytest.raises(CheckpointError):
        checkpointer.close()
    root.unlink()
    (tmp_path / "away").rename(root)
    uploads: list[int] = []
    upload = Archive._upload

    def counted(archive: Archive, saved: Saved) -> None:
        uploads.append(saved.step)
        if len(uploads) > 9:
            archive.stop()
        upload(archive, saved)

    monkeypatch.setattr(Archive, "_upload", counted)
    Checkpointer(root, **settings).close()
    assert len(uploads) == len(set(uploads))
    assert uploads[0] == 52


def test_a_step_that_was_removed_meanwhile_is_not_uploaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root is listed so slowly that a later save has removed what was to be uploaded."""
    root, local = tmp_path / "root", tmp_path / "local"
    listing, goes_on = threading.Event(), threading.Event()
    saved = Archive._saved

    def slowly(archive: Archive, tier: int) -> Any:
        if tier == 1 and not listing.is_set() and "upload" in threading.current_thread().name:
            listing.set()
            assert goes_on.wait(20)
        return saved(archive, tier)

    with Checkpointer(root, ckpt_local_dir=str(local), ckpt_local_keep=1) as checkpointer:
        uploader = checkpointer._archive._uploader
        assert uploader is not None
        # What a process before this one has left is looked for by now.
        uploader.submit(int).result(20)
        monkeypatch.setattr(Archive, "_saved", slowly)
        checkpointer.save(1, state_of(1))
        assert listing.wait(20)
        checkpointer.save(2, state_of(2))
        wait_until(lambda: not list(local.glob("*/step-00000001")), 20, "step 1 is removed")
        goes_on.set()
    assert "upload to" not in caplog.text
    assert_same(read_with_torch(step_path(root, 2)), state_of(2))


def test_the_local_directory_is_bounded_while_the_root_is_away(tmp_path: Path) -> None:
    local, root = tmp_path / "local", tmp_path / "root"
    root.touch()
    checkpointer = Checkpointer(root, ckpt_local_dir=str(local), ckpt_local_keep=2, log_level="error")
    for step in range(8):
        checkpointer.save(step, state_of(step))
        assert len(local_steps(local)) <= 5
    with pytest.raises(CheckpointError, match="root"):
        checkpointer.close()
    assert local_steps(local) == ["step-00000006", "step-00000007"]


def test_what_was_not_uploaded_is_found_however_the_root_is_spelt(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    root, settings = tmp_path / "root", CheckpointConfig(ckpt_local_dir=str(tmp_path / "local"))
    save_without_root(root, {"config": settings})
    for spelt in (f"{tmp_path}//root", f"{tmp_path}/./root/", f"{tmp_path}/elsewhere/root", root):
        with Checkpointer(spelt, settings) as checkpointer:
            assert checkpointer.latest() == 2, spelt


def test_a_clock_that_is_behind_keeps_no_copy_from_the_root_and_restores_no_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = CheckpointConfig(ckpt_local_dir=str(tmp_path / "local"))
    with Checkpointer(tmp_path / "root", settings) as checkpointer:
        checkpointer.save(2, {"x": torch.full((2,), 1.0)})
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    with Checkpointer(tmp_path / "root", settings) as checkpointer:
        checkpointer.save(2, {"x": torch.full((2,), 2.0)})
        loaded = {"x": torch.zeros(2)}
        assert checkpointer.restore(loaded) == 2
        assert loaded["x"].tolist() == [2.0, 2.0]
    assert read_with_torch(step_path(tmp_path / "root", 2))["x"].tolist() == [2.0, 2.0]


def test_who_looks_on_in_the_same_process_uploads_nothing(tmp_path: Path) -> None:
    settings = CheckpointConfig(ckpt_local_dir=str(tmp_path / "local"))
    with Checkpointer(tmp_path / "root", settings) as trainer:
        for step in range(2):
            trainer.save(step, state_of(step))
            with Checkpointer(tmp_path / "root", settings) as other:
                assert other.latest() == step
                assert other._archive._uploader is None
    with Checkpointer(tmp_path / "root", settings) as other:
        # Nobody does any more.
        assert other._archive._uploader is not None
    assert verify(open_storage(step_path(tmp_path / "root", 1))).status == "complete"

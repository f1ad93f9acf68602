"""Copies to another storage that fail, die, are stopped or overtaken, at each of their operations."""

from __future__ import annotations

import builtins
import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from distckpt import (
    CheckpointConfig,
    Checkpointer,
    CheckpointError,
    CommitError,
    IntegrityError,
    WriteError,
    plan,
)
from distckpt.manifest import FOLDER, METADATA, OWNER
from distckpt.mirror import PROGRESS, is_complete_copy, mirror
from distckpt.storage import ImageFile, Receipt, Storage, StorageSpec, open_storage
from distckpt.verification import verify
from faults.checkpoints import state_of, wait_until

pytestmark = pytest.mark.slow

FORMATS = ("torch_dist", "safetensors", "zarr")
KIB = 1 << 10
STEPS = {"OLD": 0, "NEW": 1}
STRIDE = {"torch_dist": 2, "safetensors": 4, "zarr": 10}
"""Of operations at which something happens; 1 with --every-point."""
Tree = dict[str, bytes]


class Killed(BaseException):
    """The process is no more: nothing that it does from now on happens."""


class Hooked:
    """A storage that calls `hook` before and after each operation that it passes on.

    Args:
        storage: The other one.
        hook: Called with the number of the operation, from 1, what it is, and whether it is done.
    """

    def __init__(self, storage: Storage, hook: Callable[[int, str, bool], None]) -> None:
        self.url = storage.url
        # Nothing opens it again: there is one stream, and one order.
        self.spec: StorageSpec = {}
        self.in_flight = 1
        self.is_stream = storage.is_stream
        self.storage = storage
        self.ops: list[str] = []
        self._hook = hook

    @contextlib.contextmanager
    def op(self, what: str) -> Iterator[None]:
        self.ops.append(what)
        number = len(self.ops)
        self._hook(number, what, False)
        yield
        self._hook(number, what, True)

    def part_bytes(self, file_bytes: int) -> int:
        return self.storage.part_bytes(file_bytes)

    def prepare(self) -> None:
        with self.op("prepare"):
            self.storage.prepare()

    def create_image(self, name: str, nbytes: int) -> str:
        with self.op(f"create {name}"):
            return self.storage.create_image(name, nbytes)

    def open_image(self, name: str, token: str) -> ImageFile:
        with self.op(f"open {name}"):
            image = self.storage.open_image(name, token)
        return HookedImage(image, name, self)

    def complete_image(self, name: str, token: str, nbytes: int, receipts: Sequence[Receipt]) -> None:
        with self.op(f"complete {name}"):
            self.storage.complete_image(name, token, nbytes, receipts)

    def discard_image(self, name: str, token: str) -> None:
        with self.op(f"discard {name}"):
            self.storage.discard_image(name, token)

    def unfinished(self) -> builtins.list[tuple[str, str]]:
        with self.op("unfinished"):
            return self.storage.unfinished()

    def abort(self, name: str, handle: str) -> None:
        with self.op(f"abort {name}"):
            self.storage.abort(name, handle)

    def put(self, name: str, data: bytes, last_check: Callable[[], None] | None = None) -> None:
        with self.op(f"put {name}"):
            self.storage.put(name, data, last_check)

    def revoke(self, name: str) -> None:
        with self.op(f"revoke {name}"):
            self.storage.revoke(name)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray | None:
        with self.op(f"read {name}"):
            return self.storage.read(name, offset, nbytes)

    def list(self, prefix: str = "") -> dict[str, int]:
        with self.op(f"list {prefix}"):
            return self.storage.list(prefix)

    def delete(self, name: str) -> None:
        with self.op(f"delete {name}"):
            self.storage.delete(name)

    def last_change(self) -> float | None:
        return self.storage.last_change()

    def remove_directory(self) -> bool:
        return self.storage.remove_directory()


class HookedImage:
    """A file of a `Hooked`."""

    def __init__(self, image: ImageFile, name: str, storage: Hooked) -> None:
        self._image = image
        self._name = name
        self._storage = storage

    def write(self, offset: int, buffers: Sequence[memoryview], crc32c: int | None = None) -> None:
        with self._storage.op(f"write {self._name}"):
            self._image.write(offset, buffers, crc32c)

    def finish(self) -> builtins.list[Receipt]:
        with self._storage.op(f"finish {self._name}"):
            return self._image.finish()

    def cancel(self) -> None:
        self._image.cancel()

    def close(self) -> None:
        self._image.close()


class Death:
    """Kills before or after operation `n`, and whatever is done then."""

    def __init__(self, n: int, *, is_after: bool = False) -> None:
        self._n = n
        self._is_after = is_after
        self.is_dead = False

    def __call__(self, number: int, what: str, is_done: bool) -> None:
        self.is_dead = self.is_dead or (number == self._n and is_done == self._is_after)
        if self.is_dead:
            raise Killed(f"{what}, {number}")


class Failure:
    """Fails operation `n`, once."""

    def __init__(self, n: int) -> None:
        self._n = n
        self.what = ""

    def __call__(self, number: int, what: str, is_done: bool) -> None:
        if number == self._n and not is_done:
            self.what = what
            raise WriteError(f"{what} [EIO]", errno=errno.EIO, path=what)


class Interruption:
    """Calls `call` before operation `n`."""

    def __init__(self, n: int, call: Callable[[], object]) -> None:
        self._n = n
        self._call = call

    def __call__(self, number: int, what: str, is_done: bool) -> None:
        if number == self._n and not is_done:
            self._call()


def copy(source: Path, target: Storage) -> int:
    return mirror(open_storage(source), target, stop=threading.Event())


def tree(folder: Path) -> Tree:
    """All files of a checkpoint, but for who has claimed it last."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found.pop(OWNER, None)
    return found


def folders(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_dir()}


def files_of(checkpoint: Tree) -> Tree:
    """What readers of the format find."""
    return {name: data for name, data in checkpoint.items() if not name.startswith((FOLDER, METADATA, "__"))}


def assert_is_copy(target: Path, source: Path) -> None:
    """Assert that `target` is the checkpoint in `source`, and holds nothing else."""
    found, expected = tree(target), tree(source)
    assert found.keys() == expected.keys()
    assert found == expected
    assert folders(target) == folders(source)
    assert json.loads((target / OWNER).read_bytes())["save_id"] in str(sorted(expected))


def assert_is_one_of(target: Path, sources: Sequence[Path], file_format: str) -> None:
    """Assert that nothing is visible, or all of one checkpoint."""
    found = tree(target)
    wholes = [tree(source) for source in sources]
    if METADATA in found:
        [whole] = [whole for whole in wholes if whole[METADATA] == found[METADATA]]
        assert whole.items() <= found.items()
    # Those who go by names, and never look at the metadata.
    if file_format == "safetensors":
        seen = {name for name in found if name.endswith(".safetensors")}
        if seen and not any(name.startswith("unfinished-") for name in seen):
            named = [{name for name in whole if name.endswith(".safetensors")} for whole in wholes]
            assert seen in named
            assert any(files_of(whole).items() <= found.items() for whole in wholes)
    if file_format == "zarr" and "zarr.json" in found:
        assert any(files_of(whole).items() <= found.items() for whole in wholes)
    if file_format == "zarr":
        for name in found:
            if name.endswith("/zarr.json") and json.loads(found[name])["node_type"] == "array":
                chunks = name.removesuffix("zarr.json") + "c"
                sets = [{each for each in whole if each.startswith(chunks)} for whole in wholes]
                seen = {each for each in found if each.startswith(chunks) and not each.endswith(".tmp")}
                assert seen in sets


@pytest.fixture
def stride(request: pytest.FixtureRequest) -> Callable[[str], int]:
    every = bool(request.config.getoption("--every-point"))
    return lambda file_format: 1 if every else STRIDE[file_format]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody cuts the power here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Two checkpoints of each format, with the same names and sizes of what is not named by a save."""
    found = {}
    for file_format in FORMATS:
        root = tmp_path_factory.mktemp(file_format)
        objects = "sidecar" if file_format == "safetensors" else "auto"
        config = CheckpointConfig(ckpt_format=file_format, ckpt_objects=objects, dist_ckpt_workers=2)
        # So that it has several files.
        with patch.object(plan, "_RUN_BYTES", 4 * KIB), Checkpointer(root, config) as checkpointer:
            for name, step in STEPS.items():
                path = checkpointer.save(step, state_of(step, 64 * KIB, 2)).result()
                found[file_format, name] = Path(path)
    return found


def count_ops(source: Path, target: Path) -> list[str]:
    storage = Hooked(open_storage(target), lambda number, what, is_done: None)
    copy(source, storage)
    assert_is_copy(target, source)
    return storage.ops


def each_target(tmp_path: Path, before: Path | None) -> Iterator[Path]:
    """Yield directories that hold `before`, and go again."""
    number = 0
    while True:
        number += 1
        target = tmp_path / f"target-{number}"
        if before is not None:
            shutil.copytree(before, target)
        yield target
        shutil.rmtree(target, ignore_errors=True)


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("before", [None, "OLD"])
@pytest.mark.parametrize("file_format", FORMATS)
def test_killed_at_any_operation_and_resumed(
    saved: dict[tuple[str, str], Path],
    file_format: str,
    before: str | None,
    is_after: bool,
    stride: Callable[[str], int],
    tmp_path: Path,
) -> None:
    source = saved[file_format, "NEW"]
    old = saved[file_format, before] if before else None
    targets = each_target(tmp_path, old)
    ops = count_ops(source, next(targets))
    changes = ("create", "open", "write", "finish", "complete", "put", "delete", "revoke")
    for n in range(1, len(ops) + 1):
        if (n + bool(before) + 2 * is_after) % stride(file_format):
            continue
        # What only looks changes nothing, whenever it is that the process dies.
        if not ops[n - 1].startswith(changes) or (is_after and not ops[n - 1].startswith(("put", "delete"))):
            continue
        target = next(targets)
        death = Death(n, is_after=is_after)
        with pytest.raises(Killed):
            copy(source, Hooked(open_storage(target), death))
        assert death.is_dead
        assert_is_one_of(target, [path for path in (source, old) if path], file_format)
        if file_format == "torch_dist" and old is not None:
            assert (target / METADATA).exists(), ops[n - 1]
        copy(source, open_storage(target))
        assert_is_copy(target, source)
    # The last one.
    next(targets)


@pytest.mark.parametrize("file_format", FORMATS)
def test_every_error_is_told_or_does_no_harm(
    saved: dict[tuple[str, str], Path], file_format: str, stride: Callable[[str], int], tmp_path: Path
) -> None:
    source, old = saved[file_format, "NEW"], saved[file_format, "OLD"]
    targets = each_target(tmp_path, old)
    ops = count_ops(source, next(targets))
    for n in range(1, len(ops) + 1, stride(file_format)):
        target = next(targets)
        failure = Failure(n)
        error: CheckpointError | None = None
        try:
            copy(source, Hooked(open_storage(target), failure))
        except CheckpointError as caught:
            error = caught
        assert_is_one_of(target, [source, old], file_format)
        if error is None:
            # It was tried again, or concerned what was there before.
            assert is_complete_copy(open_storage(source), open_storage(target)), failure.what
        elif isinstance(error, WriteError):
            assert error.path == failure.what
        else:
            # Which names are those of an earlier save, could not be read.
            assert "/names-" in failure.what
        copy(source, open_storage(target))
        if error is not None:
            assert_is_copy(target, source)
        assert verify(open_storage(target), jobs=1).status == "complete"
    next(targets)


def test_what_is_noted_is_not_sent_again(saved: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    for file_format in FORMATS:
        source, target = saved[file_format, "NEW"], tmp_path / file_format
        ops = count_ops(source, tmp_path / f"{file_format}-whole")
        total = sum(
            len(data) for name, data in tree(source).items() if not name.startswith((FOLDER, METADATA))
        )
        sent = [n for n, op in enumerate(ops, 1) if op.startswith("write")]
        # After one file was completed, and before another one is: what failed is said, what is done is noted.
        with pytest.raises(WriteError):
            copy(source, Hooked(open_storage(target), Failure(sent[-1])))
        assert (target / PROGRESS).exists()
        again = copy(source, open_storage(target))
        assert 0 < again < total
        assert_is_copy(target, source)


def test_progress_of_another_save_or_after_another_claim_is_not_believed(
    saved: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    new, old = saved["zarr", "NEW"], saved["zarr", "OLD"]
    ops = count_ops(new, tmp_path / "whole")
    last = max(n for n, op in enumerate(ops, 1) if op.startswith("write"))
    for first, second in ((old, new), (new, old)):
        target = tmp_path / "target"
        with pytest.raises(WriteError):
            copy(first, Hooked(open_storage(target), Failure(last)))
        noted = (target / PROGRESS).read_bytes()
        with pytest.raises(WriteError):
            copy(second, Hooked(open_storage(target), Failure(last)))
        # As if the second one had not removed it: names and sizes are the same, bytes are not.
        (target / PROGRESS).write_bytes(noted)
        copy(first, open_storage(target))
        assert_is_copy(target, first)
        shutil.rmtree(target)


@pytest.mark.parametrize("file_format", ["torch_dist", "zarr"])
def test_two_saves_to_one_target_are_not_mixed(
    saved: dict[tuple[str, str], Path], file_format: str, stride: Callable[[str], int], tmp_path: Path
) -> None:
    slow, fast = saved[file_format, "OLD"], saved[file_format, "NEW"]
    targets = each_target(tmp_path, None)
    ops = count_ops(slow, next(targets))
    for n in range(1, len(ops) + 1, stride(file_format)):
        target = next(targets)
        overtaking = Interruption(n, lambda: copy(fast, open_storage(target)))  # noqa: B023 - called here
        try:
            copy(slow, Hooked(open_storage(target), overtaking))
        except (CommitError, WriteError):
            winner = fast
        else:
            # It had not claimed the target by then, or has published before.
            winner = slow if (target / METADATA).read_bytes() == (slow / METADATA).read_bytes() else fast
        assert verify(open_storage(target), jobs=1).status == "complete", ops[n - 1]
        assert tree(winner).items() <= tree(target).items(), ops[n - 1]
        copy(slow, open_storage(target))
        assert_is_copy(target, slow)
    next(targets)


@pytest.mark.parametrize("file_format", ["torch_dist", "zarr"])
def test_two_copies_of_one_save_do_each_other_no_harm(
    saved: dict[tuple[str, str], Path], file_format: str, stride: Callable[[str], int], tmp_path: Path
) -> None:
    source, other = saved[file_format, "NEW"], saved[file_format, "OLD"]
    targets = each_target(tmp_path, other)
    ops = count_ops(source, next(targets))
    last = max(n for n, op in enumerate(ops, 1) if op.startswith("write"))
    for n in range(1, len(ops) + 1, stride(file_format)):
        if file_format == "zarr" and ops[n - 1].startswith("delete"):
            # No storage looks at a claim and removes a file in one step.
            continue
        target = next(targets)

        def begin_again() -> None:
            # It breaks off as well, after it has taken over.
            with contextlib.suppress(WriteError):
                copy(source, Hooked(open_storage(target), Failure(last)))  # noqa: B023 - called here

        with contextlib.suppress(CommitError, WriteError):
            copy(source, Hooked(open_storage(target), Interruption(n, begin_again)))
        assert_is_one_of(target, [source, other], file_format)
        copy(source, open_storage(target))
        assert_is_copy(target, source)
    next(targets)


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_file_that_rotted_is_refused_and_nothing_becomes_visible(
    saved: dict[tuple[str, str], Path], file_format: str, tmp_path: Path
) -> None:
    whole = saved[file_format, "NEW"]
    for name in sorted(tree(whole)):
        if "names-" in name:
            # Nobody goes by them but sweeps.
            continue
        source, target = tmp_path / "source", tmp_path / "target"
        shutil.copytree(whole, source)
        data = bytearray((source / name).read_bytes())
        data[len(data) // 2] ^= 1
        (source / name).write_bytes(data)
        with pytest.raises(IntegrityError) as caught:
            copy(source, open_storage(target))
        if name != METADATA:
            assert caught.value.file == name
        assert not (target / METADATA).exists()
        assert_is_one_of(target, [whole], file_format)
        # The same, repaired.
        (source / name).write_bytes(tree(whole)[name])
        copy(source, open_storage(target))
        assert_is_copy(target, whole)
        for path in (source, target):
            shutil.rmtree(path)


@pytest.mark.parametrize("damage", ["missing", "short", "long"])
def test_a_file_of_another_size_is_refused_before_anything_is_sent(
    saved: dict[tuple[str, str], Path], damage: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(saved["torch_dist", "NEW"], source)
    path = next(source.glob("*.distcp.*"))
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(data[:-1] if damage == "short" else data + b"x")
    with pytest.raises(IntegrityError) as caught:
        copy(source, open_storage(tmp_path / "target"))
    assert caught.value.file == path.name
    assert not (tmp_path / "target").exists()


_PROGRAM = """
import sys, threading
from distckpt.mirror import mirror
from distckpt.storage import open_storage

source, target = sys.argv[1:]
storages = open_storage(source), open_storage(target)
mirror(*storages, stop=threading.Event(), tell=lambda nbytes: print(nbytes, flush=True))
assert "torch" not in sys.modules
"""


def test_a_process_that_is_killed(saved: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    source, target = saved["torch_dist", "NEW"], tmp_path / "target"
    command = [sys.executable, "-c", _PROGRAM, str(source), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        os.kill(child.pid, signal.SIGKILL)
    assert_is_one_of(target, [source], "torch_dist")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert_is_copy(target, source)
    assert subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout == b""


def test_a_storage_that_hangs_is_given_up(saved: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    released = threading.Event()

    def hang(number: int, what: str, is_done: bool) -> None:
        if what.startswith("write") and not is_done:
            released.wait(20)

    target = Hooked(open_storage(tmp_path / "target"), hang)
    seen: list[WriteError] = []

    def run() -> None:
        with pytest.raises(WriteError) as caught:
            mirror(open_storage(saved["torch_dist", "NEW"]), target, stop=threading.Event(), timeout_s=0.2)
        seen.append(caught.value)

    from distckpt import mirror as room

    before = room._END_S
    room._END_S = 0.1
    try:
        run()
    finally:
        room._END_S = before
        released.set()
    assert seen[0].errno == errno.ETIMEDOUT
    wait_until(
        lambda: not any(thread.name.startswith("distckpt-mirror") for thread in threading.enumerate()),
        10,
        "the stream ends",
    )
    copy(saved["torch_dist", "NEW"], open_storage(tmp_path / "target"))
    assert_is_copy(tmp_path / "target", saved["torch_dist", "NEW"])

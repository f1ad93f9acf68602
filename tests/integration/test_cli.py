"""The command line, run as users run it: in a pipe, in a terminal, without torch."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import pty
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from distckpt import Checkpointer, StorageWriter, __version__
from distckpt.cli import main
from distckpt.commit import claim, publish
from distckpt.coordination import StorageCoordinator
from distckpt.manifest import METADATA, record_name, seal, unseal
from distckpt.storage import open_storage
from distckpt.verification import verify
from faults.checkpoints import state_of, wait_until
from faults.in_process_ranks import parts_of, save_as_ranks
from servers import S3Server

EVIL = "layer\x1b[31m\tred\n\u202egnp.\udc80"
STATE: dict[str, Any] = {
    "model": {
        "encoder": {
            "weight": torch.arange(3000, dtype=torch.float32).reshape(50, 60),
            "bias": torch.ones(60),
        },
        "head": {"weight": torch.zeros(700, dtype=torch.bfloat16)},
    },
    "epoch": torch.tensor(3),
    "note": "an object",
}
STEP = "step-0000000"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two checkpoints."""
    root = tmp_path_factory.mktemp("cli") / "root"
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, STATE).result(timeout=30)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    target = tmp_path / "root"
    shutil.copytree(made, target)
    return target


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process; returns status, stdout and stderr."""

    def run_one(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_one


def rows(text: str) -> list[list[str]]:
    return [line.split("\t") for line in text.splitlines()]


def image_of(checkpoint: Path) -> Path:
    (image,) = checkpoint.glob("__*.distcp*")
    return image


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


CLAIM = (
    "import sys; from pathlib import Path; from distckpt.commit import claim\n"
    "from distckpt.storage import open_storage; claim(open_storage(Path(sys.argv[1])), '0a')"
)


def leave_partial(root: Path) -> Path:
    """Leave what a process that ended in the middle of a save does; returns its directory."""
    partial = root / f"{STEP}3"
    partial.mkdir()
    subprocess.run([sys.executable, "-c", CLAIM, partial], check=True)
    (partial / ".distckpt" / "0a").mkdir(parents=True)
    (partial / "__0_0.distcp.0a").write_bytes(b"half of it")
    return partial


def save_with_torch(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_saver.save(STATE, storage_writer=FileSystemWriter(path), checkpoint_id=str(path))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# verify


def test_verify_of_a_whole_checkpoint(root: Path, run: Run) -> None:
    status, out, err = run("verify", root / f"{STEP}1")
    assert (status, err) == (0, "")
    nbytes = str(verify(open_storage(root / f"{STEP}1")).nbytes)
    assert rows(out) == [["complete", str(root / f"{STEP}1"), "4", "5", nbytes, "checksums"]]


def test_verify_of_a_root_looks_at_all(root: Path, run: Run) -> None:
    flip(image_of(root / f"{STEP}2"), 1000)
    before = contents(root)
    status, out, err = run("verify", root, "--jobs", "2")
    assert (status, err) == (1, "")
    first, finding, second = rows(out)
    assert first[0] == "complete"
    assert finding[:4] == [
        "damaged",
        str(root / f"{STEP}2"),
        image_of(root / f"{STEP}2").name,
        "model.encoder.weight",
    ]
    assert int(finding[4]) <= 1000 < int(finding[5])
    assert "CRC32C" in finding[6]
    assert second[0] == "damaged"
    assert contents(root) == before


def test_verify_as_json(root: Path, run: Run) -> None:
    image = image_of(root / f"{STEP}2")
    flip(image, 1000)
    status, out, err = run("verify", root, "--json")
    assert (status, err) == (1, "")
    found = json.loads(out)
    assert out.count("\n") == 1
    assert {name: found[name] for name in ("command", "path", "exit_status")} == {
        "command": "verify",
        "path": str(root),
        "exit_status": 1,
    }
    whole, damaged = found["checkpoints"]
    assert whole.pop("seconds") >= 0
    assert whole == {
        "url": str(root / f"{STEP}1"),
        "status": "complete",
        "findings": [],
        "num_files": 4,
        "num_items": 5,
        "nbytes": verify(open_storage(root / f"{STEP}1")).nbytes,
        "has_checksums": True,
        "step": 1,
    }
    assert damaged["status"] == "damaged"
    (finding,) = damaged["findings"]
    assert set(finding) == {"kind", "file", "item", "start", "end", "message"}
    assert (finding["kind"], finding["file"], finding["item"]) == (
        "damaged",
        image.name,
        "model.encoder.weight",
    )


def unverifiable(root: Path) -> Path:
    save_with_torch(root / f"{STEP}1")
    return root / f"{STEP}1"


def empty(root: Path) -> Path:
    (root / "empty").mkdir()
    return root / "empty"


def with_extra(root: Path) -> Path:
    (root / f"{STEP}1" / "__9_0.distcp").write_bytes(b"left")
    return root / f"{STEP}1"


def root_with_partial(root: Path) -> Path:
    leave_partial(root)
    return root


def cut(root: Path) -> Path:
    os.truncate(image_of(root / f"{STEP}1"), 10)
    return root


def missing(root: Path) -> Path:
    return root / "nowhere"


def a_file(root: Path) -> Path:
    return root / f"{STEP}1" / METADATA


@pytest.mark.parametrize(
    ("make", "status", "ls_status"),
    [
        (cut, 1, 1),
        (missing, 2, 2),
        (a_file, 2, 2),
        (with_extra, 3, 0),
        (root_with_partial, 3, 0),
        (leave_partial, 4, 4),
        (unverifiable, 4, 4),
        (empty, 4, 4),
    ],
)
def test_exit_status(root: Path, run: Run, make: Callable[[Path], Path], status: int, ls_status: int) -> None:
    path = make(root)
    found, out, err = run("verify", path)
    assert found == status
    assert len(err.splitlines()) == (status == 2)
    assert bool(out) == (status != 2)
    assert run("ls", path)[0] == ls_status
    if status != 2:
        assert json.loads(run("verify", path, "--json")[1])["exit_status"] == status


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["verify"],
        ["mend", "x"],
        ["verify", "x", "--jobs", "0"],
        ["verify", "x", "--jobs", "two"],
        ["ls", "x", "-q"],
    ],
)
def test_wrong_usage(run: Run, arguments: list[str]) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert "usage: distckpt" in err


@pytest.mark.parametrize("url", ["nosuchscheme://bucket/x", "s3:///x"])
def test_a_url_that_leads_nowhere_is_one_line(run: Run, url: str) -> None:
    status, out, err = run("verify", url)
    assert (status, out, len(err.splitlines())) == (2, "", 1)


def test_a_file_url_is_followed(root: Path, run: Run) -> None:
    status, out, _ = run("verify", f"file://{root}")
    assert (status, len(rows(out))) == (0, 2)


def test_checkpoints_on_s3_with_options(s3_server: S3Server, s3_url: str, run: Run) -> None:
    options = ["--storage-options", json.dumps(s3_server.options)]
    with Checkpointer(s3_url, storage_options=s3_server.options) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"weight": torch.full((5,), float(step))})
    open_storage(f"{s3_url}/step-00000002", s3_server.options).put(f"__0_0.distcp.{32 * '0'}", b"left")
    status, out, _ = run("ls", s3_url, *options)
    assert (status, [row[:2] for row in rows(out)]) == (0, [["complete", "1"], ["complete", "2"]])
    assert run("verify", s3_url, *options)[0] == 3
    assert run("inspect", f"{s3_url}/step-00000001", *options)[0] == 0
    status, out, _ = run("sweep", s3_url, *options)
    assert (status, len(rows(out))) == (0, 1)
    assert run("verify", s3_url, *options)[0] == 0
    for text, said in (("{", "no JSON"), ("[]", "no JSON object"), ('{"nosuch": 1}', "nosuch")):
        status, out, err = run("ls", s3_url, "--storage-options", text)
        assert (status, out) == (2, "")
        assert said in err


# ls


def test_ls_in_a_pipe(root: Path, run: Run) -> None:
    leave_partial(root)
    (root / "notes").mkdir()
    os.truncate(image_of(root / f"{STEP}2"), 10)
    status, out, err = run("ls", root)
    assert (status, err) == (1, "")
    whole, damaged, partial = rows(out)
    nbytes = str(image_of(root / f"{STEP}1").stat().st_size)
    assert whole[:5] == ["complete", "1", nbytes, "1", "5"]
    assert whole[5].endswith("Z")
    assert whole[6:] == ["torch_dist", "1", str(root / f"{STEP}1"), "-"]
    assert damaged[:2] == ["damaged", "2"]
    assert "holds 10 bytes" in damaged[9]
    assert partial == ["partial", "3", "10", "1", "-", "-", "-", "-", str(root / f"{STEP}3"), "-"]


def test_ls_of_nothing_says_so(root: Path, run: Run) -> None:
    path = empty(root)
    for command in ("ls", "sweep"):
        status, out, err = run(command, path)
        assert (status, out, err) == (4, "", f"distckpt: {str(path)!r} holds no checkpoint\n")
        status, out, err = run(command, path, "--json")
        assert (status, json.loads(out)["checkpoints"], err) == (4, [], "")


def test_what_another_tool_has_written_is_not_compared(root: Path, run: Run) -> None:
    url = str(unverifiable(root))
    assert rows(run("verify", url)[1]) == [["unverifiable", url, "-", "-", "-", "-"]]
    [found] = rows(run("ls", url)[1])
    assert (found[0], found[-1]) == ("unverifiable", "written by another tool")
    assert rows(run("sweep", url)[1])[0][2].startswith("written by another tool: nobody knows")
    screen, _ = in_terminal("verify", url)
    assert "nothing was compared" in screen.replace("\r\n", "")
    partial = str(leave_partial(root))
    assert rows(run("verify", partial)[1])[-1] == ["partial", partial, "-", "-", "-", "-"]


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"distckpt {__version__}\n", "")


def test_ls_as_json(root: Path, run: Run) -> None:
    leave_partial(root)
    status, out, err = run("ls", root, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)["checkpoints"]
    assert [(each["status"], each["step"]) for each in found] == [
        ("complete", 1),
        ("complete", 2),
        ("partial", 3),
    ]
    fields = "url status step nbytes num_files num_items time format world save_id message"
    assert {name for each in found for name in each} == set(fields.split())


# inspect


def test_inspect_in_a_pipe(root: Path, run: Run) -> None:
    status, out, err = run("inspect", root)
    assert (status, err) == (0, "")
    image = image_of(root / f"{STEP}2").name
    object_bytes = next(row[1] for row in rows(out) if row[7:] == ["note"])
    assert rows(out) == [
        ["entry", "12000", "float32", "[50,60]", "1", "[0]", image, "model.encoder.weight"],
        ["entry", "1400", "bfloat16", "[700]", "1", "[0]", image, "model.head.weight"],
        ["entry", object_bytes, "bytes", "-", "1", "[0]", image, "note"],
        ["entry", "240", "float32", "[60]", "1", "[0]", image, "model.encoder.bias"],
        ["entry", "8", "int64", "[]", "1", "[0]", image, "epoch"],
        ["total", "12240", "float32", "2"],
        ["total", "1400", "bfloat16", "1"],
        ["total", object_bytes, "bytes", "1"],
        ["total", "8", "int64", "1"],
    ]
    status, out, err = run("inspect", root / f"{STEP}2", "--all")
    assert (status, err) == (0, "")
    chunks = [row for row in rows(out) if row[0] == "chunk"]
    assert len(chunks) == 5
    assert chunks[0][2:4] == ["[0,0]", "[50,60]"]
    assert chunks[0][5:] == ["0", image, "model.encoder.weight"]


def test_inspect_as_json(root: Path, run: Run) -> None:
    status, out, err = run("inspect", root / f"{STEP}1", "--json")
    assert (status, err) == (0, "")
    (found,) = json.loads(out)["checkpoints"]
    assert found["status"] == "complete"
    assert [entry["fqn"] for entry in found["entries"]][:2] == ["model.encoder.weight", "model.head.weight"]
    entry = found["entries"][0]
    assert (entry["dtype"], entry["shape"], entry["nbytes"], entry["ranks"]) == (
        "float32",
        [50, 60],
        12000,
        [0],
    )
    (chunk,) = entry["chunks"]
    assert (chunk["offsets"], chunk["sizes"], chunk["rank"]) == ([0, 0], [50, 60], 0)
    assert chunk["file"] == image_of(root / f"{STEP}1").name
    assert found["totals"]["float32"] == {"entries": 2, "nbytes": 12240}


def test_inspect_says_which_rank_wrote_what(run: Run, tmp_path: Path) -> None:
    state = state_of(1, 4096, tensors=4)
    for folder, use_collectives in ((tmp_path / "whole", True), (tmp_path / "parts", False)):
        save_as_ranks(folder, parts_of(state), use_collectives=use_collectives)
        status, out, err = run("inspect", folder)
        assert (status, err) == (0, "")
        found = {row[7]: row[5] for row in rows(out) if row[0] == "entry"}
        ranks = {"model.weight0": 0, "model.weight1": 1, "model.weight2": 0, "model.weight3": 1}
        ranks |= {"step": 0, "note": 0}
        assert found == {
            name if use_collectives else f"rank {rank}: {name}": f"[{rank}]" for name, rank in ranks.items()
        }
        assert run("verify", folder)[0] == 0


def test_inspect_of_a_checkpoint_of_torch(root: Path, run: Run, tmp_path: Path) -> None:
    save_with_torch(tmp_path / "stock")
    ours, theirs = (run("inspect", path) for path in (root / f"{STEP}1", tmp_path / "stock"))
    assert theirs[0] == 0
    # All but the names of the files.
    assert [row[:6] + row[7:] for row in rows(theirs[1])] == [row[:6] + row[7:] for row in rows(ours[1])]
    assert run("inspect", tmp_path / "stock", "--json")[0] == 0


def test_inspect_unpickles_nothing_that_was_not_committed(root: Path, run: Run) -> None:
    flip(root / f"{STEP}1" / METADATA, 50)
    status, out, err = run("inspect", root / f"{STEP}1")
    assert (status, out, len(err.splitlines())) == (1, "", 1)
    assert "is not what was committed" in err


class Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_inspect_runs_nothing(run: Run, tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "checkpoint")
    storage.prepare()
    publish(storage, pickle.dumps(Harm(tmp_path / "harm")), claim(storage, "0a"), [])
    for command in ("inspect", "verify", "ls", "sweep"):
        status, _, err = run(command, tmp_path / "checkpoint")
        assert status == (2 if command == "inspect" else 0)
        assert len(err.splitlines()) == (command == "inspect")
    assert not (tmp_path / "harm").exists()


def test_inspect_of_nothing(run: Run, root: Path) -> None:
    status, out, err = run("inspect", empty(root))
    assert (status, out, len(err.splitlines())) == (4, "", 1)


@pytest.mark.slow
def test_names_reach_no_terminal_unescaped(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "evil\x1b[2J"
    with StorageWriter() as writer:
        state_dict_saver.save({EVIL: torch.ones(3)}, storage_writer=writer, checkpoint_id=str(path))
    flip(image_of(path), 300)
    shown = r"layer\x1b[31m\tred\n\u202egnp.\udc80"
    for command in ("inspect", "verify", "ls"):
        _, out, _ = run(command, path)
        assert "\x1b" not in out
        assert "\u202e" not in out
        assert r"evil\x1b[2J" in out or command == "inspect"
        assert (shown in out) == (command != "ls")
    screen, _ = in_terminal("inspect", path)
    assert "\x1b[31m\tred" not in screen
    assert "\x1b[2J" not in screen
    found = json.loads(run("inspect", path, "--json")[1])
    assert found["checkpoints"][0]["entries"][0]["fqn"] == EVIL


@pytest.mark.slow
def test_a_long_name_is_not_cut(run: Run, tmp_path: Path) -> None:
    name = ".".join(["deep"] * 200)
    with StorageWriter() as writer:
        state_dict_saver.save({name: torch.ones(3)}, storage_writer=writer, checkpoint_id=str(tmp_path))
    assert rows(run("inspect", tmp_path)[1])[0][-1] == name
    screen, status = in_terminal("inspect", tmp_path)
    assert status == 0
    assert name in screen.replace("\r\n", "")


# sweep


def test_sweep_removes_what_is_left(root: Path, run: Run) -> None:
    before = contents(root)
    partial = leave_partial(root)
    path = with_extra(root)
    after = contents(root)
    status, out, err = run("sweep", root, "--dry-run")
    assert (status, err) == (0, "")
    assert rows(out)[0] == ["would remove", str(path), "__9_0.distcp"]
    assert rows(out)[1][:2] == ["kept", str(partial)]
    assert contents(root) == after
    assert run("sweep", root)[1].startswith("removed\t")
    assert (partial / "__0_0.distcp.0a").exists()
    left = {name: data for name, data in contents(root).items() if not name.startswith(partial.name)}
    owner = f"{STEP}1/.distckpt/owner"
    assert left.pop(owner) != before[owner], "a save that was under way there will be refused"
    assert left == {name: data for name, data in before.items() if name != owner}
    assert rows(run("sweep", root, "--partial", "--dry-run")[1]) == [
        ["would remove", str(partial), str(partial)]
    ]
    status, out, _ = run("sweep", root, "--partial", "--json")
    assert status == 0
    assert json.loads(out)["checkpoints"][2] == {
        "url": str(partial),
        "status": "partial",
        "removed": [str(partial)],
        "message": None,
    }
    assert not partial.exists()
    assert run("verify", root)[0] == 0


def test_sweep_of_what_is_whole_changes_nothing(root: Path, run: Run) -> None:
    before = contents(root)
    assert run("sweep", root, "--partial") == (0, "", "")
    assert contents(root) == before


def test_sweep_leaves_alone_what_it_does_not_know(root: Path, run: Run) -> None:
    flip(root / f"{STEP}1" / METADATA, 60)
    save_with_torch(root / f"{STEP}2")
    for number in (1, 2):
        (root / f"{STEP}{number}" / "__9_0.distcp").write_bytes(b"left")
    before = contents(root)
    status, out, _ = run("sweep", root, "--partial")
    assert status == 1
    assert [row[0] for row in rows(out)] == ["kept", "kept"]
    assert contents(root) == before


def test_sweep_keeps_other_files_of_a_partial_directory(root: Path, run: Run) -> None:
    partial = leave_partial(root)
    (partial / "notes.txt").write_text("mine")
    status, out, _ = run("sweep", partial, "--partial")
    assert (status, rows(out)[0][0]) == (0, "kept")
    assert contents(partial) == {"notes.txt": b"mine"}


@pytest.mark.parametrize("idle_s", [0, 100_000])
def test_words_of_participants_are_no_partial_checkpoint(root: Path, run: Run, idle_s: int) -> None:
    for rank in (0, 1):
        StorageCoordinator(root, rank, [0, 1], job="7").tell(f"1.1.{rank}", b"word")
    for path in [*(root / ".distckpt").rglob("*"), root / ".distckpt"]:
        os.utime(path, (time.time() - idle_s,) * 2)
    before = contents(root)
    status, out, err = run("ls", root)
    assert (status, [row[:2] for row in rows(out)], err) == (0, [["complete", "1"], ["complete", "2"]], "")
    assert [row[0] for row in rows(run("verify", root)[1])] == ["complete", "complete"]
    assert run("inspect", root)[0] == 0
    for arguments in (["--dry-run"], ["--dry-run", "--partial"], ["--partial"]):
        assert run("sweep", root, *arguments) == (0, "", "")
    assert contents(root) == before
    for number in (1, 2):
        shutil.rmtree(root / f"{STEP}{number}")
    assert run("sweep", root, "--partial")[1] == ""
    assert (run("ls", root)[0], run("verify", root)[0]) == (4, 4)
    assert (root / ".distckpt" / "job-7" / "1.1.0").read_bytes() == b"word"


def test_sweep_keeps_what_may_be_under_way(root: Path, run: Run) -> None:
    partial = leave_partial(root)
    claim(open_storage(partial), "0b")
    before = contents(partial)
    status, out, _ = run("sweep", partial, "--partial")
    assert (status, rows(out)[0][0]) == (0, "kept")
    assert contents(partial) == before


# As a process.


def in_process(*arguments: object, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = ["-m", "distckpt"] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *command, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


WITHOUT_TORCH = (
    "import sys\n"
    "sys.modules['torch'] = None\n"
    "from distckpt.cli import main\n"
    "status = main(sys.argv[1:])\n"
    "assert not {'numpy', 'rich', 'fsspec'} & set(sys.modules)\n"
    "sys.exit(status)\n"
)


@pytest.mark.slow
def test_torch_is_needed_by_inspect_alone(root: Path, run: Run) -> None:
    path = with_extra(root)
    for arguments in (
        ["verify", root],
        ["verify", root, "--json"],
        ["ls", root],
        ["sweep", root, "--dry-run"],
    ):
        done = in_process(*arguments, code=WITHOUT_TORCH)
        status, out, _ = run(*arguments)
        assert (done.returncode, done.stderr) == (status, "")
        if "--json" not in arguments:
            assert done.stdout == out
    assert in_process("sweep", root, code=WITHOUT_TORCH).stdout == f"removed\t{path}\t__9_0.distcp\n"
    done = in_process("inspect", root, code=WITHOUT_TORCH)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("distckpt: inspect needs torch")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_it_runs_as_a_module_and_as_a_script(root: Path) -> None:
    done = in_process("ls", root)
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 2)
    code = "import sys; from importlib.metadata import EntryPoint; sys.exit(EntryPoint('', %r, '').load()())"
    (script,) = (line for line in _scripts() if line.startswith("distckpt = "))
    done = in_process("verify", root, code=code % script.split('"')[1])
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2)


def _scripts() -> list[str]:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    return text.partition("[project.scripts]\n")[2].partition("\n\n")[0].splitlines()


def in_terminal(*arguments: object) -> tuple[str, int]:
    """Run a command in a terminal of 80 columns; returns what it showed, and the exit status."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "distckpt", *map(str, arguments)],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:
            # So ends a terminal whose other side is closed.
            break
        if not part:
            break
        shown += part
    os.close(ours)
    return shown.decode(), process.wait(30)


@pytest.mark.slow
def test_a_terminal_gets_tables_colours_and_progress(root: Path) -> None:
    leave_partial(root)
    flip(image_of(root / f"{STEP}2"), 1000)
    screen, status = in_terminal("verify", root)
    assert status == 1
    assert "\x1b[" in screen
    assert "━" in screen
    assert "model.encoder.weight" in screen
    assert "complete" in screen
    screen, status = in_terminal("ls", root)
    assert (status, "\x1b[" in screen) == (0, True)
    assert f"{STEP}3" in screen
    assert "age" in screen
    screen, status = in_terminal("inspect", root / f"{STEP}1", "--all")
    assert status == 0
    assert "├── " in screen
    assert "encoder" in screen
    assert "[50,60]" in screen


@pytest.mark.slow
def test_many_entries_are_folded_in_a_terminal(tmp_path: Path) -> None:
    state = {f"layer{index}": torch.ones(10 + index) for index in range(60)}
    with StorageWriter() as writer:
        state_dict_saver.save(state, storage_writer=writer, checkpoint_id=str(tmp_path))
    screen, _ = in_terminal("inspect", tmp_path)
    assert "layer59" in screen
    assert "layer3\x1b" not in screen
    assert "and 40 more" in screen
    screen, _ = in_terminal("inspect", tmp_path, "--all")
    assert "layer3\x1b" in screen
    assert "more" not in screen


@pytest.mark.slow
def test_an_interrupt_is_quiet(tmp_path: Path) -> None:
    # Reads of a terabyte of nothing take their time.
    storage = open_storage(tmp_path)
    with StorageWriter() as writer:
        state_dict_saver.save({"a": torch.ones(3)}, storage_writer=writer, checkpoint_id=str(tmp_path))
    enlarge(tmp_path, 1 << 40)
    for jobs in (1, 3):
        process = subprocess.Popen(
            [sys.executable, "-m", "distckpt", "verify", str(tmp_path), "--jobs", str(jobs)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            # A shell lets what it runs in the background ignore it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        found = psutil.Process(process.pid)
        wait_until(lambda found=found: found.io_counters().read_chars > 1 << 28, 20, "it reads")  # type: ignore[misc]
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("", "")
        assert process.returncode == 130
    assert storage.read(METADATA) is not None


def enlarge(checkpoint: Path, nbytes: int) -> None:
    """Let the image of a checkpoint of one rank have `nbytes` bytes, the rest of them zeros."""
    image = image_of(checkpoint)
    os.truncate(image, nbytes)
    (path,) = (checkpoint / ".distckpt").glob("*/rank-*.json")
    manifest = json.loads(path.read_bytes())
    manifest["files"] = {image.name: nbytes}
    path.write_text(json.dumps(manifest, separators=(",", ":")))
    record = checkpoint / record_name((checkpoint / METADATA).read_bytes())
    fields = unseal(open_storage(checkpoint), record.name, record.read_bytes())
    fields["manifests"][0]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    record.write_bytes(seal({name: fields[name] for name in fields if name not in {"version", "sha256"}}))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["ls"], ["verify"], ["verify", "--json"], ["inspect"]])
def test_a_closed_pipe_is_quiet(root: Path, arguments: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "distckpt", arguments[0], str(root), *arguments[1:]],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(30) == 141

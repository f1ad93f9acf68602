"""The architecture, checked: layers, doors, the torch-free zone, and calls that have no place here."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import distckpt

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "distckpt"

# A module imports from lower layers only. Modules that are listed and do not exist yet are planned.
LAYERS = [
    ["errors"],
    ["priority", "threads"],
    ["collector", "config", "exitstatus", "observe", "watchdog"],
    ["arena", "storage", "trace"],
    ["worker"],
    ["formats", "geometry"],
    ["plan", "device", "manifest", "sharded", "stateful", "rng"],
    ["image", "coordination"],
    ["integrity", "meeting", "preemption"],
    ["commit", "verification", "staging", "lanes", "retention"],
    ["residence", "waves"],
    ["engine", "mirror"],
    ["metadata", "signature", "planner", "archive", "incremental"],
    ["ownership"],
    ["assembly", "items"],
    ["writer", "reader", "parallel_load", "participants", "planned", "sources"],
    ["handle", "restoring"],
    ["checkpointer", "convert"],
    ["tune"],
    ["cli", "integrations"],
    ["__main__"],
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
TORCH_FREE = [
    "errors",
    "collector",
    "priority",
    "threads",
    "config",
    "exitstatus",
    "observe",
    "trace",
    "arena",
    "storage",
    "worker",
    "manifest",
    "coordination",
    "meeting",
    "watchdog",
    "integrity",
    "commit",
    "verification",
    "lanes",
    "retention",
    "preemption",
    "mirror",
    "archive",
]
# Their client libraries and the like are imported when they are used; a worker must not pay for them.
LAZY = [
    "boto3",
    "fsspec",
    "multiprocessing",
    "numpy",
    "obstore",
    "rich",
    "s3fs",
    "tensorstore",
    "torch",
    "zarr",
]
# `integrations` has no door: it is one file for each framework.
DOORS = ["storage", "formats"]
VAGUE_NAMES = {"base", "common", "handler", "helpers", "manager", "misc", "util", "utils"}

# Banned names by pattern, the rooms that may use them all the same, and the reason.
BANNED: list[tuple[str, frozenset[str], str]] = [
    (r"os\.(fork|forkpty)", frozenset(), "never fork"),
    (r"os\.sync", frozenset(), "syncs the whole node"),
    (r"torch\.cuda\.synchronize", frozenset(), "stalls the whole device"),
    (r"time\.sleep", frozenset(), "wait for something, with a deadline"),
    (r"(torch\.)?multiprocessing(\..*)?", frozenset(), "imports the main script; start workers by exec"),
    (r"concurrent\.futures\.ProcessPoolExecutor", frozenset(), "is multiprocessing"),
    (r"logging\.(basicConfig|root)", frozenset(), "the root logger belongs to the program"),
    (r"print", frozenset({"cli", "worker"}), "log instead"),
    (
        r"pickle\.(load|loads|Unpickler)",
        frozenset({"metadata", "sources", "writer"}),
        "unpickling runs what it reads",
    ),
    (
        (
            r"(.*\.)?(all_gather|all_reduce|all_to_all|reduce_scatter)\w*"
            r"|(.*\.)?(gather_object|scatter_object_list|barrier|monitored_barrier)"
            r"|torch\.distributed\.(broadcast|gather|reduce|scatter|send|recv|isend|irecv)"
        ),
        frozenset({"parallel_load"}),
        "no collectives",
    ),
    (
        r"(.*\.)?broadcast_object_list",
        frozenset({"checkpointer"}),
        "only on the caller's thread, outside saves",
    ),
]


def modules(source: Path) -> Iterator[tuple[str, Path]]:
    """Yield the dotted name within the package and the path of every module; the package itself is ''."""
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def type_checking_nodes(tree: ast.Module) -> set[ast.AST]:
    """Return every node that only type checkers see."""
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
        for statement in node.body
        for inner in ast.walk(statement)
    }


def function_nodes(tree: ast.Module) -> set[ast.AST]:
    """Return every node inside a function: what it does happens on use, not on import."""
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for inner in ast.walk(node)
    }


def imports(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield every import with the dotted name that it reaches for, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node, f"{'.' * node.level}{node.module or ''}.{alias.name}"


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and full dotted name of everything that is imported or used; aliases are resolved."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node, name in imports(tree):
        yield getattr(node, "lineno", 0), name
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            first, dot, rest = ast.unparse(node).partition(".")
            yield node.lineno, aliases.get(first, first) + dot + rest


def violations(source: Path) -> Iterator[str]:
    """Yield what is wrong in a source tree, one line each."""
    for module, path in modules(source):
        tree = ast.parse(path.read_text())
        room = module.partition(".")[0]
        if not module:
            continue
        if room not in LEVEL:
            yield f"{module}: has no layer; give it one in tests/unit/test_tidy.py and pyproject.toml"
            continue
        if set(module.split(".")) & VAGUE_NAMES:
            yield f"{module}: the name does not say what is in it"
        yield from import_violations(module, tree)
        for line, name in set(names(tree)):
            for pattern, allowed, reason in BANNED:
                if room not in allowed and re.fullmatch(pattern, name):
                    yield f"{module}:{line}: {name} is banned: {reason}"
        for node in ast.walk(tree):
            bare_call = isinstance(node, ast.Call) and not node.args and not node.keywords
            if bare_call and ast.unparse(node) in {"getLogger()", "logging.getLogger()"}:
                yield f"{module}: the root logger belongs to the program"


def import_violations(module: str, tree: ast.Module) -> Iterator[str]:
    room = module.partition(".")[0]
    unseen, deferred = type_checking_nodes(tree), function_nodes(tree)
    for node, name in imports(tree):
        where = f"{module}:{getattr(node, 'lineno', 0)}"
        if name.startswith("."):
            yield f"{where}: relative import"
        if room in TORCH_FREE and name.partition(".")[0] == "torch" and node not in unseen:
            yield f"{where}: imports torch in the torch-free zone"
        if not name.startswith("distckpt."):
            continue
        target, _, inside = name.removeprefix("distckpt.").partition(".")
        private = target in DOORS and inside and (SOURCE / target / f"{inside.split('.')[0]}.py").exists()
        if target == room:
            if private and module == room and node not in deferred:
                yield f"{where}: a door imports {name} only when it opens"
        elif target in LEVEL:
            if LEVEL[target] >= LEVEL[room]:
                yield f"{where}: {room} must not import {target}: not a lower layer"
            if private:
                yield f"{where}: {name} is private; go through distckpt.{target}"


def test_source_is_tidy() -> None:
    assert list(violations(SOURCE)) == []


@pytest.mark.parametrize(
    ("file", "code", "complaint"),
    [
        ("arena.py", "from distckpt.engine import Engine", "not a lower layer"),
        ("arena.py", "def f():\n    import distckpt.engine", "not a lower layer"),
        ("arena.py", "from distckpt import engine", "not a lower layer"),
        ("lanes.py", "from distckpt import commit", "not a lower layer"),
        ("observe.py", "from distckpt.config import CheckpointConfig", "not a lower layer"),
        ("arena.py", "from .errors import CheckpointError", "relative import"),
        ("commit.py", "def f():\n    import torch.distributed", "torch-free zone"),
        ("storage/posix.py", "from torch import Tensor", "torch-free zone"),
        ("utils.py", "", "has no layer"),
        ("storage/helpers.py", "", "does not say"),
        ("engine.py", "import os\nos.fork()", "never fork"),
        ("engine.py", "from os import fork as spoon\nspoon()", "never fork"),
        ("engine.py", "import os as o\nstart = o.forkpty", "never fork"),
        ("engine.py", "import os\nos.sync()", "whole node"),
        ("engine.py", "from torch import cuda\ncuda.synchronize()", "whole device"),
        ("engine.py", "from time import sleep", "deadline"),
        ("engine.py", "import multiprocessing.shared_memory", "by exec"),
        ("engine.py", "from torch import multiprocessing as mp", "by exec"),
        ("engine.py", "from concurrent.futures import ProcessPoolExecutor", "is multiprocessing"),
        ("engine.py", "import logging\nlogging.basicConfig()", "root logger"),
        ("engine.py", "import logging\nlogging.getLogger().info('x')", "root logger"),
        ("engine.py", "print('x')", "log instead"),
        ("commit.py", "import pickle\npickle.loads(b'')", "unpickling"),
        ("engine.py", "import torch.distributed as dist\ndist.barrier()", "no collectives"),
        ("engine.py", "import torch.distributed as dist\ndist.all_gather_object([], 1)", "no collectives"),
        ("engine.py", "import torch.distributed as dist\ndist.broadcast(x, 0)", "no collectives"),
    ],
)
def test_planted_violation_is_caught(file: str, code: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(code)
    assert any(complaint in line for line in violations(tmp_path)), list(violations(tmp_path))


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("worker.py", "print('x')"),
        ("writer.py", "import pickle\npickle.loads(b'')"),
        ("engine.py", "import logging, threading\nlogging.getLogger(__name__)\nthreading.Barrier(2)"),
        ("engine.py", "from distckpt import commit, errors\nfrom distckpt.storage import Storage"),
        ("commit.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("storage/__init__.py", "def open_storage():\n    from distckpt.storage.posix import Posix"),
        ("storage/posix.py", "from distckpt.storage import Storage"),
    ],
)
def test_what_is_allowed_is_not_caught(file: str, code: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(code)
    assert list(violations(tmp_path)) == []


def test_doors_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "posix.py").touch()
    (tmp_path / "storage" / "__init__.py").write_text("from distckpt.storage.posix import Posix")
    (tmp_path / "engine.py").write_text("def f():\n    from distckpt.storage import posix")
    found = list(violations(tmp_path))
    assert len(found) == 2
    assert any("distckpt.storage.posix is private" in line for line in found)
    assert any("only when it opens" in line for line in found)


@pytest.mark.parametrize("room", ["", *TORCH_FREE])
def test_torch_free_module_imports_without_torch(room: str) -> None:
    present = [module for module, _ in modules(SOURCE) if module.partition(".")[0] == room]
    if not present:
        pytest.skip(f"{room} does not exist yet")
    targets = [f"distckpt.{module}".rstrip(".") for module in present]
    code = (
        "import importlib, sys\n"
        "sys.modules['torch'] = None\n"
        f"for name in {targets!r}: importlib.import_module(name)\n"
        "sys.modules.pop('torch')\n"
        f"sys.exit(', '.join(sorted(set({LAZY!r}) & set(sys.modules))) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_import_linter_agrees(tmp_path: Path) -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_layers_are_those_of_import_linter() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^layers = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block
    listed = [set(re.findall(r"\w+", line)) for line in block[1].splitlines()]
    assert listed == [set(rooms) for rooms in reversed(LAYERS)]


def test_changelog_is_of_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1] == distckpt.__version__

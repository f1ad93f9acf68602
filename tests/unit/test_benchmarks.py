"""The benchmarks run: every script at a small size, and what it records."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
THEMES = ["small", "large", "async"]
GPU_PARTS = [
    ["staging", "many", "guarded", "training"],
    ["tmpfs", "disk", "budget", "fifty"],
    ["stock", "peers"],
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def run(script: str, *arguments: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        cwd=folder, capture_output=True, text=True, check=False, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_themes(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    printed = run("run.py", "--smoke", "--out", str(out), "--disk", str(tmp_path), folder=tmp_path)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["theme"] for record in records] == THEMES
    for record in records:
        assert record["title"] in printed
        assert record["versions"].keys() >= {"python", "torch", "distckpt"}
        assert record["hardware"].keys() >= {"cpu", "cores", "gpus"}
        assert record["config"]["smoke"] is True
        assert record["config"]["storage"].keys() == {"tmpfs", "disk"}
        assert record["commit"]
        assert record["date"]
        assert record["rows"]
        assert record["samples"].keys() == record["first"].keys()
    assert sorted(tmp_path.iterdir()) == [out]


def test_one_theme_and_nothing_recorded(tmp_path: Path) -> None:
    printed = run("run.py", "--smoke", "--only", "small", "--disk", str(tmp_path), folder=tmp_path)
    assert "small:" in printed
    assert "large:" not in printed
    assert not list(tmp_path.iterdir())


def check_parts(out: Path, names: list[str], printed: str) -> None:
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == names
    for name, found in parts.items():
        assert found["status"] == 0, found
        assert f"- ok {name}" in printed
        for key, value in found.items():
            if key.endswith("equal"):
                assert value if isinstance(value, bool) else all(value), key


@pytest.mark.parametrize("names", GPU_PARTS, ids=",".join)
def test_gpu_check_without_a_gpu(names: list[str], tmp_path: Path) -> None:
    out = tmp_path / "gpu_check.json"
    arguments = ["--device", "cpu", "--only", ",".join(names), "--out", str(out)]
    printed = run("gpu_check.py", "--smoke", *arguments, folder=tmp_path)
    check_parts(out, names, printed)
    assert list(tmp_path.iterdir()) == [out]
    again = run("gpu_check.py", "--show", str(out), "--markdown", folder=tmp_path).splitlines()
    header = again.index("| bar | part | what | measured | compared with | asked for | met |")
    rows = again[header + 2 : again.index("", header)]
    assert {row.split(" | ")[1] for row in rows} >= {*names} - {"peers"}
    assert all(row.count(" | ") == 6 for row in rows)


def test_gpu_check_with_ranks(tmp_path: Path) -> None:
    out = tmp_path / "gpu_check.json"
    printed = run(
        "gpu_check.py", "--smoke", "--device", "cpu", "--ranks", "2", "--out", str(out), folder=tmp_path
    )
    check_parts(out, ["ranks"], printed)
    assert len(json.loads(out.read_text())["parts"]["ranks"]["ranks"]) == 2


def test_gpu_check_refuses_unknown_names(tmp_path: Path) -> None:
    for arguments, name in ((["--only", "staging,nothing"], "nothing"), (["--set", "size=1"], "'size'")):
        done = subprocess.run(
            [sys.executable, str(BENCHMARKS / "gpu_check.py"), *arguments],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 2
        assert name in done.stderr


def test_host_memory_counts_shared_memory_once() -> None:
    code = (
        "import mmap, os, subprocess, sys\n"
        "from memory_sampler import sampling\n"
        "size = 64 << 20\n"
        "child = 'import mmap, sys; held = mmap.mmap(int(sys.argv[1]), 64 << 20); held[::4096]; input()'\n"
        "with sampling(0.01) as sampler:\n"
        "    before = sampler.now()\n"
        "    fd = os.memfd_create('test')\n"
        "    os.ftruncate(fd, size)\n"
        "    held = mmap.mmap(fd, size)\n"
        "    held[:] = bytes(size)\n"
        "    command = [sys.executable, '-c', child, str(fd)]\n"
        "    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[fd]) as process:\n"
        "        import time; time.sleep(0.5)\n"
        "        peak, number = sampler.peak()\n"
        "        process.communicate(b'\\n')\n"
        "print(number, *(peak[name] - before[name] for name in ('pss_bytes', 'memfd_bytes', 'processes')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=BENCHMARKS, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    number, pss_bytes, memfd_bytes, processes = map(int, done.stdout.split())
    assert number > 5
    # `bytes(size)` is there for a moment, too.
    assert 64 << 20 <= pss_bytes < 150 << 20
    assert memfd_bytes == 64 << 20
    assert processes == 1


def test_readme_says_how_to_repeat_each_figure() -> None:
    text = (BENCHMARKS / "README.md").read_text()
    for theme in THEMES:
        assert f"benchmarks/run.py --only {theme}" in text
    assert "benchmarks/gpu_check.py" in text
    for name in [*(name for names in GPU_PARTS for name in names), "expandable", "ranks"]:
        assert name in text

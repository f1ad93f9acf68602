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
PARTS = ["staging", "staging, expandable segments", "saves", "many small tensors"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def run(script: str, *arguments: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--smoke", *arguments],
        cwd=folder, capture_output=True, text=True, check=False, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_themes(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    printed = run("run.py", "--out", str(out), "--disk", str(tmp_path), folder=tmp_path)
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
    printed = run("run.py", "--only", "small", "--disk", str(tmp_path), folder=tmp_path)
    assert "small:" in printed
    assert "large:" not in printed
    assert not list(tmp_path.iterdir())


def test_gpu_check_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu_check.json"
    printed = run("gpu_check.py", "--device", "cpu", "--out", str(out), folder=tmp_path)
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == PARTS
    for name, found in parts.items():
        assert found["status"] == 0, found
        assert f"ok {name}" in printed
        assert all(value for key, value in found.items() if key.endswith("equal"))


def test_readme_says_how_to_repeat_each_figure() -> None:
    text = (BENCHMARKS / "README.md").read_text()
    for theme in THEMES:
        assert f"benchmarks/run.py --only {theme}" in text
    assert "benchmarks/gpu_check.py" in text

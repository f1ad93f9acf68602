"""The documentation: links lead somewhere, and every Python block runs."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from distckpt.config import CheckpointConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# A block is opted out by a comment with the reason on the line before it.
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>.+?) -->\n)?^```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL
)
BLOCKS = [
    pytest.param(
        match["code"], id=f"{page.relative_to(ROOT)}:{page.read_text()[: match.start()].count(chr(10)) + 1}"
    )
    for page in PAGES
    for match in BLOCK.finditer(page.read_text())
    if not match["reason"]
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), target


@pytest.mark.slow
@pytest.mark.parametrize("code", BLOCKS)
def test_python_block_runs(code: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 0, done.stderr


def test_configuration_states_every_setting() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    for setting in fields(CheckpointConfig):
        flag = "--" + setting.name.replace("_", "-")
        metavar = setting.metadata["metavar"]
        default = "off" if setting.default is False else setting.default
        flag_text = f"{flag} {metavar}" if metavar else flag
        row = f"| `{flag_text}` | `{setting.name}` | {default} | {setting.metadata['help']} |"
        assert row in page, row


def test_every_fault_has_its_tests() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    rows = re.findall(r"^\| [a-z].+ \| .+ \| (tests/.+) \|$", page, re.MULTILINE)
    assert len(rows) == page.count("\n| ") - 2
    for guards in rows:
        for guard in guards.split(", "):
            assert (ROOT / guard).is_file(), guard


def test_every_invariant_has_its_tests() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| .+ \| (tests/.+) \|$", page, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 11))
    for _, guards in rows:
        for guard in guards.split(", "):
            assert (ROOT / guard).is_file(), guard

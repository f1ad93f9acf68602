"""The documentation: links lead somewhere, and every Python block runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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

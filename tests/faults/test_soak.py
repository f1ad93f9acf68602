"""The soak, for a few kills; and that it sees what it looks for."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distckpt import StorageWriter
from faults.checkpoints import save
from faults.programs import Zygote
from faults.soak import Fault, Soak, state_of, step_path

pytestmark = pytest.mark.slow


def test_a_few_kills(rng: random.Random) -> None:
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("soak.py")), "--kills", "6"]
    done = subprocess.run(
        [*command, "--seed", str(rng.randrange(1 << 30))], capture_output=True, text=True, timeout=55
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"0 torn, 0 lost, 0 left behind: .*6\s+kills", done.stdout, re.DOTALL), done.stdout


def test_what_is_torn_or_lost_is_seen(zygote: Zygote, tmp_path: Path, rng: random.Random) -> None:
    soak = Soak(1, rng.randrange(1 << 30), tmp_path, zygote)
    soak.run()
    step = max(int(path.name[-8:]) for path in soak.root.glob("step-*"))
    path, copy = step_path(soak.root, step), tmp_path / "copy"
    shutil.copytree(path, copy)

    image = max(path.glob("*.distcp*"), key=lambda image: image.stat().st_size)
    data = bytearray(image.read_bytes())
    data[len(data) // 2] ^= 1
    image.write_bytes(data)
    with pytest.raises(Fault, match="cannot be loaded"):
        soak.verify()

    shutil.rmtree(path)
    with pytest.raises(Fault, match="are gone"):
        soak.verify()

    with StorageWriter() as writer:
        # Older than what was committed last; then of no one save.
        save(writer, path, state_of(step, 0))
        with pytest.raises(Fault, match="holds version 0"):
            soak.verify()
        save(writer, path, {**state_of(step, 1 << 40), "common": state_of(step, 0)["common"]})
        with pytest.raises(Fault, match="common"):
            soak.verify()

    shutil.rmtree(path)
    copy.rename(path)
    soak.verify()

"""The benchmarks run: every script at a small size, and what it records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
THEMES = ["small", "large", "async", "planning", "checksum"]
PARTS = [
    "staging", "many", "guarded", "training", "tmpfs", "disk", "budget", "fifty", "expandable", "stock",
    "peers", "ranks",
]  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def run(script: str, *calls: list[str], folder: Path) -> list[tuple[int, str, str]]:
    """Call a script's `main` with arguments, again and again in one process, for torch takes long to import.

    Returns:
        Exit status, standard output and standard error of each call.
    """
    code = (
        "import contextlib, importlib, json, sys, tempfile\n"
        "calls, done = json.loads(sys.argv[1]), []\n"
        f"script = importlib.import_module({script!r})\n"
        "for arguments in calls:\n"
        "    sys.argv = [script.__file__, *arguments]\n"
        "    out, err = tempfile.TemporaryFile('w+'), tempfile.TemporaryFile('w+')\n"
        "    try:\n"
        "        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):\n"
        "            status = script.main() or 0\n"
        "    except SystemExit as end:\n"
        "        status = end.code\n"
        "    texts = [file.seek(0) or file.read() for file in (out, err)]\n"
        "    done.append((status, *texts))\n"
        "print(json.dumps(done))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(calls)],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
        capture_output=True, text=True, check=False, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [(status, out, err) for status, out, err in json.loads(done.stdout.splitlines()[-1])]


def test_run(tmp_path: Path) -> None:
    target, out = tmp_path / "target", tmp_path / "results" / "run.jsonl"
    target.mkdir()
    command = [
        sys.executable, str(BENCHMARKS / "run.py"), "--quick", "--minutes", "2.5", "--device", "cpu",
        "--ranks", "2", "--gib-per-rank", "0.0625", "--target", str(target), "--out", str(out),
        "--only", "ceilings;candidates", "--candidates", "distckpt;torch.save;s3torchconnector",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [records[0]["kind"], records[-1]["kind"]] == ["run", "end"]
    found = {record["candidate"]: record for record in records if record["kind"] == "measurement"}
    assert found.keys() == {"distckpt", "torch.save"}, records
    for record in found.values():
        assert record["equal"]
        assert record["ranks"] == 2
        assert record["figures"]["durable_s"][0] >= record["figures"]["stall_s"][0] > 0
        assert record["figures"]["bytes_ratio"][0] >= 1
    for record in found.values():
        assert record["of_ceiling"].keys() == {"stall_s", "durable_s", "load_s", "first_load_s"}
    ceilings = {record["name"] for record in records if record["kind"] == "ceiling"}
    assert ceilings >= {"memcpy", "checksum", "write_buffered", "read"}
    [skipped] = [record for record in records if record["kind"] == "skipped"]
    assert skipped["name"] == "s3torchconnector"
    assert skipped["reason"]
    assert out.with_suffix(".html").read_text().startswith("<!doctype html>")
    assert json.loads(out.with_suffix(".trace.json").read_text())["traceEvents"]
    assert not list(target.iterdir())


def test_run_refuses(tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    refused = {
        "nobody": ["--candidates", "dcp.save;nobody"],
        "nowhere: no such directory": ["--target", "nowhere"],
        "greater than 0": ["--gib-per-rank", "0"],
        "have room for": ["--gib-per-rank", "1000000"],
    }
    calls = [[*arguments, "--device", "cpu", "--out", str(out)] for arguments in refused.values()]
    for said, (status, _, errors) in zip(refused, run("run", *calls, folder=tmp_path), strict=True):
        assert status, errors
        assert said in f"{status} {errors}"
    assert not out.exists()


def test_themes(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    arguments = ["--smoke", "--disk", str(tmp_path)]
    [(one_status, one, _), (status, printed, errors)] = run(
        "themes", [*arguments, "--only", "small"], [*arguments, "--out", str(out)], folder=tmp_path
    )
    assert (one_status, status) == (0, 0), errors
    # Of one theme nothing was recorded.
    assert "small:" in one
    assert "large:" not in one
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["theme"] for record in records] == THEMES
    for record in records:
        assert record["title"] in printed
        assert record["versions"].keys() >= {"python", "torch", "distckpt"}
        assert record["hardware"].keys() >= {"cpu", "cores", "gpus"}
        assert record["config"]["smoke"] is True
        assert record["commit"]
        assert record["date"]
        assert record["rows"]
        assert record["samples"].keys() == record["first"].keys()
    assert all(record["config"]["storage"].keys() == {"tmpfs", "disk"} for record in records[:3])
    assert sorted(tmp_path.iterdir()) == [out]


@pytest.mark.thorough
def test_gpu_check_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu_check.json"
    smoke = ["--smoke", "--device", "cpu", "--only", ",".join(PARTS), "--out", str(out)]
    show = ["--show", str(out), "--markdown"]
    [(status, printed, errors), (_, again, _), *refused] = run(
        "gpu_check", smoke, show, ["--only", "staging,nothing"], ["--set", "size=1"], folder=tmp_path
    )
    assert status == 0, printed + errors
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == PARTS
    for name, found in parts.items():
        assert found["status"] == 0, found
        assert f"- ok {name}" in printed
        for key, value in found.items():
            if key.endswith("equal"):
                assert value if isinstance(value, bool) else all(value), key
    assert len(parts["ranks"]["ranks"]) == 2
    assert list(tmp_path.iterdir()) == [out]
    lines = again.splitlines()
    header = lines.index("| bar | part | what | measured | compared with | asked for | met |")
    rows = lines[header + 2 : lines.index("", header)]
    # Peers need not be installed.
    assert {row.split(" | ")[1] for row in rows} >= {*PARTS} - {"peers"}
    assert all(row.count(" | ") == 6 for row in rows)
    for (status, _, errors), name in zip(refused, ("nothing", "'size'"), strict=True):
        assert status == 2
        assert name in errors


def test_interrupts_of_devices_are_counted_for_each_core() -> None:
    text = (
        "           CPU0       CPU2\n"
        " 31:          3       4367 PCI-MSIX-0000:00:01.0   1-edge      virtio0-req.0\n"
        " 42:          7          1 PCI-MSIX-0000:00:06.0   0-edge      nvidia\n"
        "LOC:       1060       1125   Local timer interrupts\n"
        "ERR:          0\n"
    )
    code = f"from cores import interrupts_of; print(interrupts_of({text!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert done.stdout == "{0: 10, 2: 4368}\n"


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
        assert f"benchmarks/themes.py --only {theme}" in text
    assert "benchmarks/gpu_check.py" in text
    for name in PARTS:
        assert name in text


def test_a_run_without_time_measures_distckpt_all_the_same(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    command = [
        sys.executable, str(BENCHMARKS / "run.py"), "--minutes", "0.01", "--device", "cpu",
        "--target", str(tmp_path), "--gib-per-rank", "0.0625", "--candidates", "distckpt;dcp.save",
        "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["candidate"] for record in records if record["kind"] == "measurement"] == ["distckpt"]
    assert "dcp.save" in {record["name"] for record in records if record["kind"] == "skipped"}

"""What has to be seen on a machine with a GPU: all bars of staging, training, storage and memory; the peers.

Every part runs in a process of its own under a time limit (with `--smoke` most in one), and what it has
measured is kept if it fails. The figures go to a JSON file, from which the table can be printed again
(`--show`).
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import mmap
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bars_guarded
import bars_peers
import bars_ranks
import bars_staging
import bars_storage
import bars_training
import psutil
import torch
from bars import FAILURES, Found, Line, Report, Sizes, memory_place
from machine import GIB, describe, scratch

from distckpt.errors import DistckptWarning

_EXPANDABLE = "expandable_segments:True"
_TOTAL_S = 660.0
_LIMIT_S = 100.0


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        measure: What it does, with a report, a device and sizes.
        lines: What its figures say of the bars.
        table: A further table, header first.
        allocator: A value of PYTORCH_CUDA_ALLOC_CONF.
        limit_s: For one that takes longer than others.
    """

    measure: Callable[[Report, str, Sizes], None]
    lines: Callable[[Found], list[Line]]
    table: Callable[[Found], list[list[str]]] = lambda found: []
    allocator: str | None = None
    limit_s: float = _LIMIT_S


PARTS = {
    "staging": Part(bars_staging.measure_staging, bars_staging.lines_of_staging),
    "many": Part(bars_staging.measure_many, bars_staging.lines_of_many),
    "guarded": Part(bars_guarded.measure_guarded, bars_guarded.lines_of_guarded),
    "training": Part(bars_training.measure_training, bars_training.lines_of_training, limit_s=300.0),
    "tmpfs": Part(bars_storage.measure_tmpfs, bars_storage.lines_of_tmpfs),
    "disk": Part(bars_storage.measure_disk, bars_storage.lines_of_disk),
    "budget": Part(bars_storage.measure_budget, bars_storage.lines_of_budget),
    "fifty": Part(bars_storage.measure_fifty, bars_storage.lines_of_fifty),
    "expandable": Part(bars_staging.measure_staging, bars_staging.lines_of_staging, allocator=_EXPANDABLE),
    "stock": Part(bars_peers.measure_stock, bars_peers.lines_of_peers, bars_peers.table_of_peers),
    "peers": Part(bars_peers.measure_peers, bars_peers.lines_of_peers, bars_peers.table_of_peers),
    "ranks": Part(bars_ranks.measure_ranks, bars_ranks.lines_of_ranks),
}
_SINGLE = [name for name in PARTS if name != "ranks"]
_CHECKS = ("equal", "pinned", "expandable", "before_commit")


def measure_here(path: Path, device: str, limit_s: float, measure: Callable[[Report], None]) -> int:
    """Measure in this process; returns the exit status."""
    # Should the process hang, this says where before the parent ends it.
    faulthandler.dump_traceback_later(max(1.0, limit_s - 5))
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    warnings.simplefilter("ignore", DistckptWarning)
    report = Report(path)
    started = time.perf_counter()
    try:
        report.add("device", torch.cuda.get_device_name() if device == "cuda" else "cpu")
        measure(report)
    except FAILURES:
        report.add("error", traceback.format_exc())
    finally:
        faulthandler.cancel_dump_traceback_later()
        report.add("seconds", time.perf_counter() - started)
    return 1 if report.figures.keys() & {"error", "errors"} else 0


def start_part(name: str, device: str, sizes: Sizes, folder: Path, limit_s: float) -> Found:
    """Measure in a process of its own, for `limit_s` seconds at most; returns its figures."""
    path = folder / f"{name}.json"
    command = [
        sys.executable, __file__, "--part", name, "--device", device, "--sizes", json.dumps(vars(sizes)),
        "--out", str(path), "--limit", str(limit_s),
    ]  # fmt: skip
    environment = dict(os.environ)
    allocator = PARTS[name].allocator
    if allocator is not None:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = allocator
    started = time.monotonic()
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        try:
            status: int | str = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = "over its time limit"
        finally:
            # What it left running would spoil the next part.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    figures: Found = json.loads(path.read_text()) if path.exists() else {}
    figures["status"] = status
    figures["with_start_s"] = time.monotonic() - started
    return figures


def run_part(name: str, device: str, sizes: Sizes, folder: Path, limit_s: float) -> Found:
    """Measure in this process, where all that matters is that it runs: another one takes longer to start."""
    path = folder / f"{name}.json"
    started = time.monotonic()
    status = measure_here(path, device, limit_s, lambda report: PARTS[name].measure(report, device, sizes))
    figures: Found = json.loads(path.read_text())
    return {**figures, "status": status, "with_start_s": time.monotonic() - started}


def grow_memory(gib: float) -> None:
    """Touch memory once, on a virtual machine that is given its memory only as it asks for it."""
    code = (
        "import mmap, sys\n"
        "held = []\n"
        "for _ in range(int(sys.argv[1])):\n"
        "    held.append(mmap.mmap(-1, 1 << 30))\n"
        f"    for at in range(0, 1 << 30, {mmap.PAGESIZE}):\n"
        "        held[-1][at] = 1\n"
    )
    before = psutil.virtual_memory().total
    try:
        subprocess.run([sys.executable, "-c", code, str(int(gib))], check=False, timeout=90)
    except subprocess.TimeoutExpired:
        print("growing memory took too long; going on with what there is")
    print(f"memory: {before / GIB:.1f} GiB before, {psutil.virtual_memory().total / GIB:.1f} GiB now")


def text_table(rows: list[list[str]], *, markdown: bool) -> str:
    """Return rows, the header first, in columns."""
    if markdown:
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def show(parts: dict[str, Found], *, markdown: bool) -> None:
    """Print what was found, as far as it goes."""
    verdicts = {True: "yes", False: "NO", None: ""}
    rows = [["bar", "part", "what", "measured", "compared with", "asked for", "met"]]
    tables = []
    for name, found in parts.items():
        part = PARTS[name]
        rows += [
            [line.number, name, line.what, line.measured, line.reference, line.bar, verdicts[line.is_met]]
            for line in part.lines(found)
        ]
        table = part.table(found)
        if table:
            tables.append(table)
    print(text_table(rows, markdown=markdown))
    for table in tables:
        print(f"\n{text_table(table, markdown=markdown)}")
    print()
    for name, found in parts.items():
        failed = found["status"] != 0 or found.keys() & {"error", "errors"}
        checks = {
            key: value
            for key, value in found.items()
            if key.endswith(_CHECKS) and isinstance(value, (bool, list))
        }
        verdict = f"FAILED ({found['status']})" if failed else "ok"
        texts = [f"{name}: {found.get('with_start_s', 0):.0f} s on {found.get('device')}"]
        texts += [f"{key}: {value}" for key, value in checks.items()]
        print(f"- {verdict} {', '.join(texts)}")


def print_errors(parts: dict[str, Found]) -> None:
    for name, found in parts.items():
        for where, text in {"": found.get("error"), **found.get("errors", {})}.items():
            if text:
                print(f"{name} {where}:\n{text}")
        for candidate, figures in found.items():
            if isinstance(figures, dict) and "error" in figures:
                print(f"{name}, {candidate}:\n{figures['error']}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small sizes, one repetition: does it run?")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    parser.add_argument("--only", action="append", metavar="PART[,PART]", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--ranks", type=int, metavar="N", help="N GPUs of this machine at once, nothing else")
    parser.add_argument("--set", action="append", default=[], metavar="SIZE=N", help="see Sizes in bars.py")
    parser.add_argument("--grow-memory", type=float, default=0, metavar="GIB", help="touch that much first")
    parser.add_argument("--total", type=float, default=_TOTAL_S, metavar="S", help="seconds for all parts")
    parser.add_argument(
        "--limit", type=float, metavar="S", help=f"seconds for each part; default: {_LIMIT_S:g}, of some more"
    )
    parser.add_argument("--markdown", action="store_true", help="print the tables for a Markdown page")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="print what these files hold")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: gpu_check.json in $OUT or here")
    for flag in ("--part", "--candidate"):
        parser.add_argument(flag, help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folders", type=Path, nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    chosen = [name for names in arguments.only or [] for name in names.split(",")]
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if arguments.ranks:
        chosen = ["ranks"]
        arguments.set.append(f"ranks={arguments.ranks}")
    arguments.only = chosen or _SINGLE
    if arguments.sizes is None:
        try:
            arguments.sizes = (Sizes.smoke() if arguments.smoke else Sizes()).changed(arguments.set)
        except ValueError as error:
            parser.error(str(error))
    else:
        arguments.sizes = Sizes(**arguments.sizes)
    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return arguments


def run_child(arguments: argparse.Namespace) -> int:
    """Be the process of a part, of a candidate or of a rank."""
    device, sizes, folders = arguments.device, arguments.sizes, arguments.folders

    def measure(report: Report) -> None:
        if arguments.part is not None:
            PARTS[arguments.part].measure(report, device, sizes)
        elif arguments.candidate is not None:
            bars_peers.run_candidate(report, arguments.candidate, device, sizes, folders)
        else:
            bars_ranks.run_rank(report, device, sizes, folders[0])

    return measure_here(arguments.out, device, arguments.limit or _LIMIT_S, measure)


def main() -> int:
    arguments = parse()
    if arguments.part is not None or arguments.candidate is not None or arguments.rank:
        return run_child(arguments)
    parts: dict[str, Found] = {}
    if arguments.show:
        for path in arguments.show:
            record: dict[str, Any] = json.loads(path.read_text())
            parts |= record["parts"]
            print(f"{path}: {record['commit']} on {record['hardware']}, {record['versions']}")
        show(parts, markdown=arguments.markdown)
        return 0
    if arguments.smoke:
        # Looking through all that torch has imported before each sample takes most of the time.
        gc.freeze()
    deadline = time.monotonic() + arguments.total
    out = arguments.out or Path(os.environ.get("OUT", ".")) / "gpu_check.json"
    if arguments.grow_memory:
        grow_memory(arguments.grow_memory)
    record = {"theme": "gpu_check", **describe({"smoke": arguments.smoke, **vars(arguments.sizes)})}
    with scratch(memory_place(1 << 20)) as folder:
        for name in arguments.only:
            left_s = deadline - time.monotonic()
            if left_s < 10:
                parts[name] = {"status": "no time left"}
            else:
                print(f"{name} ...", flush=True)
                measure = run_part if arguments.smoke and PARTS[name].allocator is None else start_part
                parts[name] = measure(
                    name,
                    arguments.device,
                    arguments.sizes,
                    folder,
                    min(left_s, arguments.limit or PARTS[name].limit_s),
                )
            out.write_text(json.dumps({**record, "parts": parts}, indent=1) + "\n")
    print_errors(parts)
    print(f"gpu_check: {record['commit']} on {record['hardware']}\n")
    show(parts, markdown=arguments.markdown)
    return 0 if all(found["status"] == 0 for found in parts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

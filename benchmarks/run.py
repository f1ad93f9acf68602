"""Measures this machine and what saves on it: ceilings, checkpointers, states, training, settings.

Every part is a process of its own for each rank (`cell.py`). What was found goes to a file of JSON lines
(`results.py`), a table, a page (`report.py`) and a trace for ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from candidates import CANDIDATES, Context, missing, remove_tree
from ceilings import write_seconds
from cell import ROUNDS, Spec
from machine import ROOT, default_disk, describe, slug, storage_type
from results import BARE, GIB, SCHEMA, Record, Results, read_records, write_record
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tables import console, print_tables
from workloads import WORKLOADS

if TYPE_CHECKING:
    from rich.console import Console

_COMPARED = "llama-8b"
_OURS = "distckpt"
_TRAINED = ("distckpt", "dcp.async_save, pinned", BARE)
_PROBE_BYTES = 256 << 20
_START_S = 10.0
"""What a process takes until it measures, about: torch is imported, the device is set up."""
_SPARE_CORES = 8
_PEER_SAVES = 2
_LOADS, _STATE_LOADS, _PEER_LOADS = 5, 3, 1
"""After the first of a process."""
_LAST = 4
"""Of `_order`: other states, and what was asked for."""
_LEAST_BYTES = 64 << 20
_STEP = 4
"""From one size of a state to the next: the next run on a disk of about this speed takes the same."""
_SECTIONS = ("ceilings", "candidates", "workloads", "training", "sweep", "s3", "mlperf")
_DEFAULT_SECTIONS = _SECTIONS[:-1]
_QUICK_SECTIONS = ("ceilings", "candidates", "sweep")


def sections(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return what is measured."""
    found: tuple[str, ...] = arguments.only or (_QUICK_SECTIONS if arguments.quick else _DEFAULT_SECTIONS)
    return found


def command_line(arguments: argparse.Namespace) -> str:
    """Return what repeats this run, wherever its results are to go."""
    given = {name: each for name, each in vars(arguments).items() if each and name not in ("out", "target")}
    words = ["python", "benchmarks/run.py"]
    for name, each in given.items():
        words.append(f"--{name.replace('_', '-')}")
        if each is not True:
            words.append(
                ";".join(each)
                if isinstance(each, tuple)
                else f"{each:g}"
                if isinstance(each, float)
                else str(each)
            )
    return shlex.join(words)


@dataclass(frozen=True)
class Size:
    """How large a run is.

    Attributes:
        minutes: It takes no longer.
        save_s: How long plain writes of all ranks' states may take, about; sizes are in steps of four.
        repeats: Of later saves, at most.
        seconds: For the repetitions of one part.
        many: Times both, for the state with which distckpt is compared.
        training_s: For the phases of one training.
        sweep_s: For the settings.
        workloads: Which states are saved.
    """

    minutes: float
    save_s: float
    repeats: int
    seconds: float
    many: float
    training_s: float
    sweep_s: float
    workloads: tuple[str, ...]


FULL = Size(8.8, 1.0, 5, 10.0, 3.5, 12.0, 30.0, tuple(WORKLOADS))
QUICK = Size(1.0, 0.6, 3, 3.0, 1.0, 6.0, 8.0, (_COMPARED,))


class Run:
    """One run: what is measured, where, and until when."""

    def __init__(self, arguments: argparse.Namespace, size: Size) -> None:
        self.size, self.arguments = size, arguments
        self.device: str = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.ranks: int = arguments.ranks or (torch.cuda.device_count() if self.device == "cuda" else 1)
        self.target: Path = arguments.target or default_disk()
        self.out: Path = arguments.out
        self.started = time.monotonic()
        self.seconds: dict[str, float] = {}
        cores = len(os.sched_getaffinity(0))
        self.waiting: Processes | None = None
        # Where there are cores to spare, the processes of the next part start beside this one.
        self.starts_ahead = cores >= _SPARE_CORES * self.ranks
        self.start_s = _START_S / 2 if self.starts_ahead else _START_S
        # Not what the sweep finds: two numbers that do as well are a matter of chance, and other figures.
        self.workers: int = arguments.workers or max(2, min(8, cores // (2 * self.ranks)))
        self.plain_s = size.save_s
        """How long plain writes of all ranks' states take, about."""
        # Of a peer: threads, which cost it less than processes would.
        self.threads = max(2, min(8, cores // self.ranks))

    @property
    def left_s(self) -> float:
        return 60 * self.size.minutes - (time.monotonic() - self.started)

    def record(self, record: Record) -> None:
        write_record(self.out, record)

    def skip(self, section: str, name: str, reason: str) -> None:
        self.record({"kind": "skipped", "section": section, "name": name, "reason": reason})

    def choose(self, folder: Path) -> Spec:
        """Probe the target, and choose how large the state of a rank is."""
        plain_s = min(write_seconds(folder, _PROBE_BYTES, threads=4) for _ in range(2))
        nbytes = int(_PROBE_BYTES / plain_s * self.size.save_s) // self.ranks
        available = psutil.virtual_memory().available
        # A candidate may keep two copies on the host; files that were written may stay in memory as well.
        # Rounds keep what they have saved.
        states = ROUNDS + 2 if "mlperf" in sections(self.arguments) else 6
        limits = [
            nbytes, 4 * GIB, available // (6 * self.ranks),
            psutil.disk_usage(str(folder)).free // (states * self.ranks),
        ]  # fmt: skip
        if self.device == "cuda":
            limits += [torch.cuda.get_device_properties(0).total_memory // 6]
        else:
            # The state is in host memory, and once more when it is loaded.
            limits[2] //= 2
        given = self.arguments.gib_per_rank
        nbytes = int(given * GIB) if given else _coarse(min(limits))
        self.plain_s = plain_s * nbytes * self.ranks / _PROBE_BYTES
        if given and nbytes > min(limits[2:]):
            room = f"{min(limits[2:]) / GIB:.1f} GiB each"
            raise SystemExit(f"--gib-per-rank {given}: {self.ranks} ranks have room for {room}")
        return Spec(
            device=self.device,
            folder=str(folder),
            nbytes=nbytes,
            workers=self.workers,
            seconds=self.size.seconds,
            repeats=self.size.repeats,
            # More than is taken: what a lane takes at once is to fit, too, however much that is.
            host_memory=nbytes + nbytes // 2 + GIB,
            workload=_COMPARED,
        )

    def start(self, spec: Spec) -> None:
        """Begin the file of results."""
        self.out.unlink(missing_ok=True)
        self.record({
            "kind": "run", "schema": SCHEMA, **describe({}), "command": command_line(self.arguments),
            "config": {
                "device": self.device, "ranks": self.ranks, "gib_per_rank": round(spec.nbytes / GIB, 3),
                "workers": self.workers, "target": storage_type(Path(spec.folder)), "compared": _COMPARED,
                "minutes": self.size.minutes, "quick": self.size is QUICK,
            },
        })  # fmt: skip

    def cell(self, section: str, kind: str, name: str, spec: Spec, estimate_s: float) -> bool:
        """Measure one part in processes of its own, if there is time, and distckpt in any case; was it?"""
        if estimate_s > self.left_s and (section, name) != ("candidates", _OURS):
            self.skip(section, name, f"no time for it within {self.size.minutes:g} minutes")
            return False
        started = time.monotonic()
        out = Path(spec.folder).parent / "found.jsonl"
        out.unlink(missing_ok=True)
        folder = Path(spec.folder)
        limit_s = min(4 * estimate_s + 30, max(estimate_s, self.left_s) + 20)
        processes, self.waiting = self.waiting or Processes(self.ranks), None
        try:
            processes.begin(kind, spec, out, limit_s)
            if self.starts_ahead:
                self.waiting = Processes(self.ranks)
            failure = processes.wait(limit_s)
        finally:
            processes.end()
        _clear(folder)
        # What was found before a failure counts.
        found = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        for record in found:
            self.record(record)
        if failure:
            self.skip(section, name, failure)
        self.seconds[section] = self.seconds.get(section, 0.0) + time.monotonic() - started
        return not failure


def _coarse(nbytes: int) -> int:
    """Return the largest of 64 MiB, 256 MiB, 1 GiB, ... that is not above `nbytes`; at least the first."""
    size = _LEAST_BYTES
    while size * _STEP <= nbytes:
        size *= _STEP
    return size


class Processes:
    """One process for each rank, which import all that they need and wait to be told what to do."""

    def __init__(self, ranks: int) -> None:
        self._running: list[subprocess.Popen[str]] = []
        self._files = ExitStack()
        self._errors = [self._files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]  # noqa: SIM115
        for rank in range(ranks):
            environment = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            }  # fmt: skip
            command = [sys.executable, str(Path(__file__).with_name("cell.py"))]
            self._running.append(
                subprocess.Popen(
                    command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                    stderr=self._errors[rank], start_new_session=True,
                )
            )  # fmt: skip

    def begin(self, section: str, spec: Spec, out: Path, limit_s: float) -> None:
        """Have all of them measure a part."""
        # Not before: another process might have taken it meanwhile.
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for process in self._running:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps([section, asdict(spec), str(out), limit_s, port]) + "\n")
                process.stdin.flush()

    def wait(self, limit_s: float) -> str:
        """Wait until all have ended; returns why one failed, or nothing."""
        deadline = time.monotonic() + limit_s
        while any(process.poll() is None for process in self._running):
            if any(process.poll() for process in self._running):
                # The others would wait for it.
                time.sleep(1.0)
                break
            if time.monotonic() > deadline:
                return f"did not end within {limit_s:.0f} s"
            time.sleep(0.02)
        for rank, process in enumerate(self._running):
            if process.poll():
                self._errors[rank].seek(0)
                said = why_it_ended(self._errors[rank].read(), limit_s)
                return f"rank {rank} ended with status {process.returncode}: {said}"
        return ""

    def end(self) -> None:
        """End them, and all that they have started."""
        for process in self._running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        self._files.close()


def why_it_ended(text: str, limit_s: float) -> str:
    """Return what the standard error of a part that failed says of the reason."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # As `faulthandler` begins, which goes on with stacks.
    if any(line.startswith("Timeout (") for line in lines):
        return f"it had not ended within {limit_s:.0f} s"
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "")[:300]


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        remove_tree(entry)


def measure(run: Run, spec: Spec, progress: Callable[[str, float], None]) -> None:
    """Measure the sections that were asked for, the most telling first, as long as there is time."""
    only = sections(run.arguments)
    plain_s = run.plain_s
    # A first save, one watched, repetitions, and loads; those of distckpt each beside its ceiling.
    peer_s = run.start_s + 20 * plain_s
    saves = run.size.many * run.size.repeats
    # After each save there are plain writes, in two ways.
    saving_s = min(run.size.many * run.size.seconds, 3 * saves * plain_s)
    ours_s = run.start_s + saving_s + 15 * plain_s
    state_s = run.start_s + 20 * plain_s
    context = Context(run.device, 0, run.ranks, spec.workers, spec.host_memory)
    parts: list[tuple[str, str, str, Spec, float]] = []
    if "candidates" in only:
        for name in run.arguments.candidates or list(CANDIDATES):
            reason = missing(name, context)
            if reason:
                run.skip("candidates", name, reason)
                continue
            is_ours = name == _OURS
            part = replace(spec, candidate=name, guarded=is_ours)
            if is_ours:
                # Whose shares are to be the same in the next run.
                seconds = run.size.many * spec.seconds
                part = replace(part, repeats=round(saves), seconds=seconds, loads=_LOADS)
            else:
                part = replace(part, repeats=_PEER_SAVES, loads=_PEER_LOADS)
            if not name.startswith(_OURS):
                part = replace(part, workers=run.threads)
            parts.append(("candidates", "measure", name, part, ours_s if is_ours else peer_s))
    if "workloads" in only:
        for name in run.arguments.workloads or run.size.workloads:
            if name != _COMPARED or "candidates" not in only:
                part = replace(spec, workload=name, nbytes=spec.nbytes // 2, loads=_STATE_LOADS)
                parts.append(("workloads", "measure", name, part, state_s))
    if "training" in only:
        for name in _TRAINED:
            part = replace(
                spec, candidate=name, seconds=run.size.training_s,
                nbytes=min(spec.nbytes, 4 * GIB if run.device == "cuda" else GIB // 8),
                workers=run.workers if name == _OURS else run.threads,
            )  # fmt: skip
            parts.append(("training", "training", name, part, run.start_s + 1.5 * run.size.training_s))
    if "mlperf" in only:
        parts.append(("mlperf", "rounds", _OURS, spec, run.start_s + 25 * plain_s))
    parts.sort(key=lambda part: _order(part[0], part[2]))
    total_s = sum(part[-1] for part in parts)

    def go_through(chosen: list[tuple[str, str, str, Spec, float]]) -> None:
        for section, kind, name, part, estimate_s in chosen:
            progress(f"{section}: {name}", estimate_s / total_s)
            run.cell(section, kind, name, part, estimate_s)

    first = [part for part in parts if _order(part[0], part[2]) < 2]
    last = [part for part in parts if _order(part[0], part[2]) == _LAST]
    go_through(first)
    if "sweep" in only:
        progress("sweep", 0.0)
        _sweep(run, spec)
    go_through([part for part in parts if part not in (*first, *last)])
    if "s3" in only:
        progress("s3", 0.0)
        _measure_s3(run)
    go_through(last)


def _order(section: str, name: str) -> int:
    """What is measured first, should time run out."""
    if name == _OURS:
        return 0
    if section == "training":
        return 1
    if section == "candidates":
        return 2 if name.startswith("dcp") else 3
    return _LAST


def _sweep(run: Run, spec: Spec) -> None:
    """Find the settings for this target, as `distckpt tune` does."""
    if run.size.sweep_s > run.left_s:
        run.skip("sweep", "distckpt tune", f"no time for it within {run.size.minutes:g} minutes")
        return
    started = time.monotonic()
    command = [
        sys.executable, "-m", "distckpt", "tune", spec.folder, "--json",
        "--seconds", f"{run.size.sweep_s:g}",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=4 * run.size.sweep_s + 30
        )
    except subprocess.TimeoutExpired as error:
        run.skip("sweep", "distckpt tune", f"did not end within {error.timeout:.0f} s")
    except subprocess.CalledProcessError as error:
        run.skip(
            "sweep",
            "distckpt tune",
            (error.stderr.strip() or f"ended with status {error.returncode}").splitlines()[-1][:300],
        )
    else:
        found = json.loads(done.stdout)
        kept = ("nbytes", "seconds", "trials", "ceilings", "flags", "reasons")
        run.record({"kind": "sweep", **{name: found[name] for name in kept}})
    run.seconds["sweep"] = time.monotonic() - started


def _measure_s3(run: Run) -> None:
    """Save to an S3 server on this machine, beside the fastest plain upload to it, if there is one."""
    estimate_s = 45.0
    if estimate_s > run.left_s:
        run.skip("s3", "SeaweedFS", f"no time for it within {run.size.minutes:g} minutes")
        return
    started = time.monotonic()
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as file:
        command = [
            sys.executable, str(Path(__file__).with_name("themes.py")), "--only", "s3-brief",
            "--disk", str(run.target), "--out", file.name,
        ]  # fmt: skip
        try:
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=4 * estimate_s)
        except subprocess.TimeoutExpired as error:
            run.skip("s3", "SeaweedFS", f"did not end within {error.timeout:.0f} s")
        except subprocess.CalledProcessError as error:
            run.skip("s3", "SeaweedFS", (error.stderr.strip() or "failed").splitlines()[-1][:300])
        else:
            _record_s3(run, json.loads(file.read()))
    run.seconds["s3"] = time.monotonic() - started


def _record_s3(run: Run, found: Record) -> None:
    nbytes = found["config"]["nbytes"]
    rows = {name.removeprefix("SeaweedFS "): samples for name, samples in found["samples"].items()}
    plain = {name: each for name, each in rows.items() if name.startswith(("save obstore", "save botocore"))}
    best = min(plain, key=lambda name: min(plain[name]["seconds"]))
    run.record({
        "kind": "ceiling", "name": "s3_multipart", "unit": "GiB/s",
        "what": f"multipart upload to SeaweedFS on this machine, {best.removeprefix('save ')} at once",
        "samples": [nbytes / GIB / seconds for seconds in plain[best]["seconds"]],
    })  # fmt: skip
    run.record({"kind": "s3", "server": "SeaweedFS", "nbytes": nbytes, "rows": rows})
    for name, reason in found["config"].get("skipped", {}).items():
        run.skip("s3", name, reason)


@contextmanager
def _progress(output: Console) -> Iterator[Callable[[str, float], None]]:
    """Give what is told which part begins, and which share of all the time it will take."""
    columns = (TextColumn("{task.description:<44}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=output, transient=True, disable=not output.is_terminal) as progress:
        task = progress.add_task("", total=1.0)
        share = 0.0

        def tell(name: str, next_share: float) -> None:
            nonlocal share
            progress.update(task, advance=share, description=name)
            share = next_share
            if not output.is_terminal:
                output.print(name)

        yield tell


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def words(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
        def convert(text: str) -> tuple[str, ...]:
            given = tuple(filter(None, text.split(";")))
            for one in given:
                if one not in known:
                    raise argparse.ArgumentTypeError(f"unknown: {one!r}; known: {'; '.join(known)}")
            return given

        return convert

    def number_over_zero(text: str) -> float:
        if not 0 < float(text) < float("inf"):
            raise argparse.ArgumentTypeError(f"a number greater than 0, got {text!r}")
        return float(text)

    parser.add_argument(
        "--target", type=Path, metavar="DIR", help="what is written to; default: the disk here"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: GPUs, if there are any")
    parser.add_argument("--ranks", type=int, metavar="N", help="default: one for each GPU; without one, 1")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="of each rank; default: by the cores, 8 at most"
    )
    parser.add_argument(
        "--gib-per-rank", type=number_over_zero, metavar="X", help="default: by memory and disk"
    )
    parser.add_argument("--minutes", type=number_over_zero, metavar="M", help=f"default: {FULL.minutes:g}")
    parser.add_argument("--quick", action="store_true", help="a minute, for a first impression")
    parser.add_argument(
        "--only",
        type=words(_SECTIONS),
        metavar="A;B",
        help=f"of {'; '.join(_SECTIONS)}; default: all but mlperf",
    )
    parser.add_argument(
        "--candidates", type=words(tuple(CANDIDATES)), metavar="A;B", help="; ".join(CANDIDATES)
    )
    parser.add_argument("--workloads", type=words(tuple(WORKLOADS)), metavar="A;B", help="; ".join(WORKLOADS))
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: build/bench/MACHINE-TIME.jsonl")
    return parser.parse_args(arguments)


def main() -> None:
    # So that a run that is ended leaves nothing on the target.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    arguments = parse()
    output = console()
    size = QUICK if arguments.quick else FULL
    if arguments.minutes:
        size = replace(size, minutes=arguments.minutes)
    if arguments.out is None:
        arguments.out = ROOT / "build" / "bench" / f"{slug()}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    run = Run(arguments, size)
    if not run.target.is_dir():
        raise SystemExit(f"--target {run.target}: no such directory")
    if run.device == "cuda" and run.ranks > torch.cuda.device_count():
        raise SystemExit(f"--ranks {run.ranks}: there are {torch.cuda.device_count()} GPUs")
    only = sections(arguments)
    with tempfile.TemporaryDirectory(prefix=".benchmark-", dir=run.target) as scratch:
        folder = Path(scratch) / "target"
        folder.mkdir()
        with _progress(output) as progress:
            progress("how fast the target is", 0.0)
            spec = run.choose(folder)
            run.start(spec)
            if "ceilings" in only:
                progress("ceilings", 0.0)
                if run.cell("ceilings", "ceilings", "all", spec, run.start_s + 20 * run.plain_s):
                    found = Results(read_records(run.out))
                    spec = replace(spec, write=_fastest_ways(found) or spec.write)
                    if rate := found.bound("write"):
                        # As the disk is when it is written to for longer than the first look at it took.
                        run.plain_s = spec.nbytes * run.ranks / rate
            try:
                measure(run, spec, progress)
            finally:
                if run.waiting is not None:
                    run.waiting.end()
    run.record({"kind": "end", "seconds": time.monotonic() - run.started, "sections": run.seconds})
    results = finish(run.out, output)
    is_wanted = "candidates" in only and _OURS in (arguments.candidates or CANDIDATES)
    if is_wanted and not results.measurements(workload=_COMPARED, candidate=_OURS):
        raise SystemExit("distckpt was not measured: see what was skipped, and why")


def _fastest_ways(results: Results) -> tuple[tuple[int, bool], ...]:
    """Return how plain writes are fastest past the page cache, if at all, and through it: threads, direct."""
    threads = {record["name"]: record["threads"] for record in results.of("ceiling") if "threads" in record}
    names = {"write_direct": True, "write_buffered": False}
    return tuple((threads[name], direct) for name, direct in names.items() if name in threads)


def finish(out: Path, output: Console) -> Results:
    """Show what was found, and write the page and the trace beside it."""
    results = Results(read_records(out))
    print_tables(results, output)
    written = [out]
    if importlib.util.find_spec("plotly") is None:
        output.print("No page: plotly is not installed; benchmarks/report.py makes it of the file anywhere.")
    else:
        from report import write_page

        written.append(out.with_suffix(".html"))
        write_page(results.records, written[-1])
    for record in results.of("timeline"):
        from distckpt.trace import write_trace

        trace = out.with_suffix(".trace.json")
        write_trace(trace, {int(rank): spans for rank, spans in record["spans"].items()})
        written.append(trace)
    output.print("Written: " + ", ".join(str(path) for path in written))
    return results


if __name__ == "__main__":
    main()

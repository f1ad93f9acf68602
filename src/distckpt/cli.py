"""The command line: verify, ls, inspect, convert and sweep checkpoints, and tune the settings of a target.

Invariants:
    * In a pipe: lines of columns with tabs between them, neither coloured nor cut. A terminal gets tables.
    * What stands in a checkpoint reaches neither terminal nor pipe unescaped.
    * The exit status says what was found; an error is one line on stderr, never a traceback.

torch and rich are imported by the functions that need them: verify, ls and sweep run without torch.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import re
import signal
import statistics
import sys
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from distckpt import __version__, commit
from distckpt.errors import CheckpointError, ConfigError, IntegrityError, WriteError
from distckpt.integrity import find_record, read_manifest
from distckpt.manifest import METADATA
from distckpt.storage import Storage, is_url, open_storage
from distckpt.verification import Finding, Report, Summary, default_jobs, step_of, survey, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.console import Console
    from rich.tree import Tree
    from torch.distributed.checkpoint.metadata import Metadata

    from distckpt.tune import Tuning

__all__ = ["main"]

WELL, DAMAGE, REFUSED, EXTRA, NOTHING, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 3, 4, 130, 141
"""Exit status; the last two as a shell says of SIGINT and SIGPIPE."""
_STATUS_OF = {
    "complete": WELL,
    "damaged": DAMAGE,
    "partial": NOTHING,
    "unverifiable": NOTHING,
    "absent": NOTHING,
}
_NOT_COMPARED = {"partial", "unverifiable"}
_COLOURS = {
    "complete": "green", "damaged": "bold red", "partial": "yellow", "unverifiable": "yellow",
    "missing": "red", "size": "red", "extra": "yellow", "unreadable": "red",
}  # fmt: skip
_WORST_FIRST = (REFUSED, DAMAGE, NOTHING, EXTRA, WELL)
_MOST_ROWS = 200
_MOST_SIBLINGS = 20
_WIDEST = 1 << 16
_RANK = re.compile(r"__(\d+)_")
_PART = re.compile(r"__\d+\.metadata")
_KIB = 1024.0
_IDLE_S = 1200.0
"""Twice the deadline that waits have unless another is set."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Those of the command line; default: the process's own.

    Returns:
        The exit status.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character gets its escape, not an error.
            stream.reconfigure(errors="backslashreplace")
    try:
        options = _parser().parse_args(arguments)
        try:
            status = int(options.run(options))
        finally:
            # Here, where a pipe that was closed can still be caught.
            sys.stdout.flush()
    except CheckpointError as error:
        _complain(str(error))
        if isinstance(error, _Nothing):
            return NOTHING
        return DAMAGE if isinstance(error, IntegrityError) else REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read has seen enough; what the interpreter flushes at its end goes nowhere.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distckpt",
        description="Verify, list, inspect, convert and sweep checkpoints; find settings that suit a target.",
        epilog=(
            "exit status: 0 all well; 1 damage; 2 wrong usage, or the storage refused; 3 nothing wrong but "
            "extra files; 4 nothing to verify: no complete checkpoint, or another tool's"
        ),
    )
    parser.add_argument("--version", action="version", version=f"distckpt {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(
        name: str,
        run: Callable[[argparse.Namespace], int],
        text: str,
        path: str = "a checkpoint, or a directory of checkpoints",
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.add_argument("path", metavar="PATH", help=path)
        command.add_argument(
            "--storage-options",
            type=_json_object,
            metavar="JSON",
            help='for the storage that a URL names, such as {"endpoint_url": "https://s3.example"}',
        )
        command.add_argument("--json", action="store_true", help="print one JSON object")
        command.set_defaults(run=run, command=name)
        return command

    command = add("verify", _verify, "compare every byte with what was committed")
    command.add_argument(
        "--jobs", type=_positive, metavar="N", help="threads (default: one for each core, at most 8)"
    )
    add("ls", _ls, "list checkpoints, without reading their files")
    command = add("inspect", _inspect, "show the tree of a checkpoint's entries, largest first")
    command.add_argument("--all", action="store_true", help="show every entry and every chunk")
    _add_convert(commands)
    command = add("sweep", _sweep, "remove what saves have left and no committed checkpoint names")
    command.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    command.add_argument(
        "--partial", action="store_true", help="remove directories, too, in which no save was ever completed"
    )
    command = add(
        "tune",
        _tune,
        "measure workers, bucket sizes and O_DIRECT or parts at once on a target, and say which flags to use",
        "where checkpoints will be saved: a directory that exists, or a URL",
    )
    command.add_argument(
        "--gib",
        type=_positive_number,
        metavar="N",
        help="GiB of each save (default: by free memory, free space, and how fast the target is)",
    )
    command.add_argument(
        "--seconds",
        type=_positive_number,
        metavar="N",
        default=60.0,
        help="about how long it may take (default: 60)",
    )
    command.add_argument(
        "--workers",
        type=_positive_list,
        metavar="N,N",
        help="numbers of workers to try (default: 1,2,4,8, as far as there are cores)",
    )
    return parser


def _add_convert(commands: Any) -> None:
    text = "write a checkpoint as another one, in another format or dtype, or a part of it"
    command = commands.add_parser(
        "convert", help=text, description=f"{text[0].upper()}{text[1:]}, in bounded memory; verify it."
    )
    command.add_argument(
        "path",
        metavar="SRC",
        help="a checkpoint of torch_dist, safetensors or zarr, a .safetensors file, or one of torch.save",
    )
    command.add_argument(
        "target", metavar="DST", help="a directory without a checkpoint; with --to torch, a new file"
    )
    command.add_argument(
        "--to", required=True, choices=("torch_dist", "safetensors", "zarr", "torch"), help="its format"
    )
    command.add_argument(
        "--dtype", metavar="NAME", help="what floating-point tensors become, such as bfloat16"
    )
    for name, what in (("include", "take only"), ("exclude", "leave out")):
        command.add_argument(
            f"--{name}",
            action="append",
            default=[],
            metavar="PATTERN",
            help=f"{what} entries whose name fits, such as 'model.*'; may be given more than once",
        )
    command.add_argument(
        "--strip-prefix",
        default="",
        metavar="PREFIX",
        help="take it from names that begin with it, such as model.; patterns are of names before that",
    )
    command.add_argument(
        "--objects",
        choices=("auto", "refuse", "sidecar"),
        default="auto",
        help="what becomes of Python objects that the format does not hold; see --ckpt-objects",
    )
    command.add_argument(
        "--workers", type=_positive, default=1, metavar="N", help="processes that write (default: 1)"
    )
    command.add_argument(
        "--memory",
        default="256MiB",
        metavar="SIZE",
        help="for what is on its way from one to the other (default: 256MiB)",
    )
    for name, what in (("storage", "SRC"), ("target-storage", "DST")):
        command.add_argument(
            f"--{name}-options",
            type=_json_object,
            metavar="JSON",
            help=f'for the storage of {what}, such as {{"endpoint_url": "https://s3.example"}}',
        )
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=_convert, command="convert")


def _convert(options: argparse.Namespace) -> int:
    try:
        import torch

        from distckpt.convert import convert
    except ImportError as error:
        raise CheckpointError(f"convert needs torch, which cannot be imported: {error}") from error

    dtype = None
    if options.dtype is not None:
        dtype = getattr(torch, options.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigError(f"--dtype: {options.dtype!r} is no floating-point dtype of torch")
    with _ending_in_order(), _progress(quiet=options.json) as on_progress:
        done = convert(
            options.path,
            options.target,
            to=options.to,
            dtype=dtype,
            include=options.include,
            exclude=options.exclude,
            strip_prefix=options.strip_prefix,
            objects=options.objects,
            workers=options.workers,
            host_memory=options.memory,
            source_options=options.storage_options,
            target_options=options.target_storage_options,
            on_progress=lambda _, now, total: on_progress(now, total),
        )
    if options.json:
        print(json.dumps({"command": "convert", "exit_status": WELL, "source": options.path, **asdict(done)}))
    else:
        _print_row(
            done.format, done.path, done.num_tensors, done.num_objects, done.nbytes, f"{done.seconds:.1f}"
        )
    return WELL


def _positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _positive_list(text: str) -> list[int]:
    try:
        return [_positive(each) for each in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list such as 1,2,4: {error}") from None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"distckpt: {_shown(text)}", file=sys.stderr)


# Where checkpoints are.


def _open(path: str, storage_options: dict[str, Any] | None) -> Storage:
    """Open what a user named: a path as it is, or a URL.

    Raises:
        CheckpointError: There is no such directory, or the URL leads nowhere.
    """
    if is_url(path):
        return open_storage(path, storage_options)
    if not os.path.isdir(path):
        raise CheckpointError(
            f"{path!r} is no directory" if os.path.exists(path) else f"there is no {path!r}"
        )
    return open_storage(Path(path), storage_options)


def _inner(storage: Storage, storage_options: dict[str, Any] | None) -> list[Storage]:
    """Return what may be the checkpoints of a directory, in the order of their steps."""
    names = [name.rstrip("/") for name in storage.list() if name.endswith("/")]
    names.sort(key=lambda name: (step_of(name) is None, step_of(name) or 0, name))
    urls = [f"{storage.url.rstrip('/')}/{name}" for name in names]
    return [open_storage(url, storage_options) for url in urls]


def _checkpoints(options: argparse.Namespace) -> list[tuple[Storage, Summary]]:
    """Return the checkpoint at the path, or those below it by step and name; none if there are none."""
    storage = _open(options.path, options.storage_options)
    found = [(storage, survey(storage))]
    if found[0][1].status == "absent":
        found = [(inner, _survey(inner)) for inner in _inner(storage, options.storage_options)]
    return [each for each in found if each[1].status != "absent"]


def _survey(storage: Storage) -> Summary:
    """See `survey`; a directory that cannot be listed does not keep the others from being shown."""
    try:
        return survey(storage)
    except WriteError as error:
        step = step_of(storage.url)
        return Summary(storage.url, "absent" if step is None else "damaged", step, message=str(error))


def _worst(statuses: Iterable[int]) -> int:
    present = set(statuses)
    return next((status for status in _WORST_FIRST if status in present), NOTHING)


# verify


def _verify(options: argparse.Namespace) -> int:
    storage = _open(options.path, options.storage_options)
    with _progress(quiet=options.json) as on_progress:
        jobs = options.jobs or default_jobs()
        reports = [verify(storage, jobs=jobs, on_progress=on_progress)]
        if reports[0].status == "absent":
            reports = [
                _report(inner, jobs, on_progress) for inner in _inner(storage, options.storage_options)
            ]
    reports = [report for report in reports if report.status != "absent"]
    # A root of which some step was never completed is well all the same, as long as others are.
    statuses = [_status_of(report) for report in reports]
    some_well = any(report.status == "complete" for report in reports)
    status = _worst(
        EXTRA if report.status == "partial" and some_well else status
        for report, status in zip(reports, statuses, strict=True)
    )
    if options.json:
        _print_json("verify", options.path, status, [asdict(report) for report in reports])
    elif not reports:
        print(f"absent\t{_shown(options.path)}")
    elif console := _console():
        _draw_reports(console, reports)
    else:
        for report in reports:
            _print_report(report)
    return status


def _report(storage: Storage, jobs: int, on_progress: Callable[[int, int], None]) -> Report:
    """See `verify`; a directory that cannot be listed does not keep the others from being looked at."""
    try:
        return verify(storage, jobs=jobs, on_progress=on_progress)
    except WriteError as error:
        step = step_of(storage.url)
        finding = Finding("unreadable", "", None, 0, 0, str(error))
        return Report(storage.url, "absent" if step is None else "damaged", [finding], step=step)


def _status_of(report: Report) -> int:
    status = _STATUS_OF[report.status]
    return EXTRA if status == WELL and report.findings else status


def _print_report(report: Report) -> None:
    for finding in report.findings:
        _print_row(
            finding.kind, report.url, finding.file, finding.item, finding.start, finding.end, finding.message
        )
    compared: tuple[object, ...] = (None,) * 4
    if report.status not in _NOT_COMPARED:
        how = "checksums" if report.has_checksums else "sizes only"
        compared = (report.num_files, report.num_items, report.nbytes, how)
    _print_row(report.status, report.url, *compared)


def _draw_reports(console: Console, reports: list[Report]) -> None:
    from rich.table import Table
    from rich.text import Text

    for report in reports:
        if report.findings:
            table = Table("kind", "file", "item", "bytes", box=None, header_style="bold")
            for finding in report.findings[:_MOST_ROWS]:
                where = f"{finding.start} to {finding.end}" if finding.end > finding.start else ""
                table.add_row(
                    Text(finding.kind, _COLOURS.get(finding.kind, "red")),
                    Text(_shown(finding.file)),
                    Text(_shown(finding.item or "")),
                    where,
                )
            console.print(table)
            if len(report.findings) > _MOST_ROWS:
                console.print(f"and {len(report.findings) - _MOST_ROWS} more: --json, or a pipe, has all")
            first = next((each for each in report.findings if each.kind != "extra"), None)
            if first is not None:
                console.print(Text(_shown(first.message)))
        rate = report.nbytes / max(report.seconds, 1e-9)
        compared = "" if report.has_checksums else "; saved without checksums: only sizes were compared"
        what = (
            f"{report.num_files} files, {report.num_items} items, "
            f"{_size(report.nbytes)} in {report.seconds:.1f} s ({_size(rate)}/s){compared}"
        )
        if report.status in _NOT_COMPARED:
            what = "nothing was compared"
        line = Text(report.status, _COLOURS.get(report.status, ""))
        line.append(f"  {_shown(report.url)}  {what}", "default")
        console.print(line, soft_wrap=True)


# ls


def _ls(options: argparse.Namespace) -> int:
    summaries = [summary for _, summary in _checkpoints(options)]
    # A root of which some step was never completed is well all the same, as long as others are.
    some_well = any(each.status == "complete" for each in summaries)
    status = _worst(
        WELL if each.status == "partial" and some_well else _STATUS_OF[each.status] for each in summaries
    )
    if options.json:
        _print_json("ls", options.path, status, [asdict(summary) for summary in summaries])
    elif not summaries:
        _complain(f"{options.path!r} holds no checkpoint")
    elif console := _console():
        _draw_summaries(console, summaries)
    else:
        for each in summaries:
            when = None if each.time is None else _utc(each.time)
            _print_row(
                each.status, each.step, each.nbytes, each.num_files, each.num_items, when, each.format,
                each.world, each.url, each.message,
            )  # fmt: skip
    return status


def _draw_summaries(console: Console, summaries: list[Summary]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("status", box=None, header_style="bold")
    for heading in ("step", "size", "files", "items", "age", "ranks"):
        table.add_column(heading, justify="right")
    table.add_column("checkpoint", overflow="fold")
    for each in summaries:
        name = Text(_shown(each.url.rstrip("/").rpartition("/")[2]))
        if each.message is not None:
            name.append(f"\n{_shown(each.message)}", "dim")
        table.add_row(
            Text(each.status, _COLOURS.get(each.status, "")),
            _or_dash(each.step),
            _size(each.nbytes),
            str(each.num_files),
            _or_dash(each.num_items),
            "-" if each.time is None else _age(time.time() - each.time),
            _or_dash(each.world),
            name,
        )
    console.print(table)


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _utc(when: float) -> str | None:
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(when))
    except (ValueError, OverflowError, OSError):
        return None


def _age(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


# sweep


class _Swept(TypedDict):
    url: str
    status: str
    removed: list[str]
    message: str | None


def _sweep(options: argparse.Namespace) -> int:
    done: list[_Swept] = []
    statuses = []
    for storage, summary in _checkpoints(options):
        removed, message, status = _sweep_one(storage, summary, options)
        statuses.append(status)
        done.append({"url": storage.url, "status": summary.status, "removed": removed, "message": message})
    status = _worst(statuses)
    if options.json:
        _print_json("sweep", options.path, status, done, {"dry_run": options.dry_run})
        return status
    if not done:
        _complain(f"{options.path!r} holds no checkpoint")
    verb = "would remove" if options.dry_run else "removed"
    for each in done:
        for name in each["removed"]:
            _print_row(verb, each["url"], name)
        if each["message"] is not None:
            _print_row("kept", each["url"], each["message"])
    return status


def _sweep_one(
    storage: Storage, summary: Summary, options: argparse.Namespace
) -> tuple[list[str], str | None, int]:
    """Return what was removed, or would be, why something is kept, and the exit status."""
    save_id = f"sweep-{uuid.uuid4().hex}"
    if summary.status == "unverifiable":
        return [], f"{summary.message}: nobody knows which files are its", NOTHING
    try:
        if summary.status == "partial":
            if not options.partial:
                return [], "never completed, and perhaps under way: --partial removes it", WELL
            if options.dry_run:
                return [storage.url], None, WELL
            if commit.reclaim(storage, save_id, idle_s=_IDLE_S):
                return [storage.url], None, WELL
            return [], "not removed: a save is or may be under way, or other files lie there", WELL
        # A sweep revokes the claim of a save that is under way: not for nothing.
        names = commit.leftovers(storage)
        if names and not options.dry_run:
            removed = commit.sweep(storage, save_id)
            if len(removed) < len(names):
                return removed, f"{len(names) - len(removed)} files could not be removed", REFUSED
    except IntegrityError as error:
        return [], str(error), DAMAGE
    except CheckpointError as error:
        return [], str(error), REFUSED
    return names, None, WELL


# inspect


@dataclass
class _Entry:
    """An entry of the state, as the metadata says."""

    fqn: str
    dtype: str | None
    shape: list[int] | None
    nbytes: int
    part: int | None
    chunks: list[dict[str, Any]] = field(default_factory=list)

    def fields(self, *, with_chunks: bool) -> dict[str, Any]:
        found = asdict(self)
        if not with_chunks:
            del found["chunks"]
        found["num_chunks"] = len(self.chunks)
        found["ranks"] = self.ranks()
        found["files"] = self.files()
        return found

    def ranks(self) -> list[int]:
        return sorted({chunk["rank"] for chunk in self.chunks if chunk["rank"] is not None})

    def files(self) -> list[str]:
        return sorted({chunk["file"] for chunk in self.chunks if chunk["file"] is not None})


def _inspect(options: argparse.Namespace) -> int:
    checkpoints = _checkpoints(options)
    chosen = [each for each in checkpoints if each[1].status in {"complete", "unverifiable", "damaged"}]
    if not chosen:
        raise _Nothing(options.path)
    storage, summary = next((each for each in reversed(chosen) if each[1].status != "damaged"), chosen[-1])
    entries = sorted(_entries(storage), key=lambda entry: (-entry.nbytes, entry.fqn, entry.part or 0))
    totals: dict[str, dict[str, int]] = {}
    for entry in entries:
        total = totals.setdefault(entry.dtype or "bytes", {"entries": 0, "nbytes": 0})
        total["entries"] += 1
        total["nbytes"] += entry.nbytes
    totals = dict(sorted(totals.items(), key=lambda each: (-each[1]["nbytes"], each[0])))
    if options.json:
        body = {
            **asdict(summary),
            "entries": [entry.fields(with_chunks=True) for entry in entries],
            "totals": totals,
        }
        _print_json("inspect", options.path, WELL, [body])
    elif console := _console():
        _draw_entries(console, summary, entries, totals, show_all=options.all)
    else:
        _print_entries(entries, totals, show_all=options.all)
    return WELL


class _Nothing(CheckpointError):
    """There is no checkpoint to look at."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path!r} holds no complete checkpoint")


def _entries(storage: Storage) -> Iterator[_Entry]:
    """Yield the entries of a checkpoint's metadata.

    Raises:
        CheckpointError: torch is missing, or there is no metadata.
        IntegrityError: The metadata is damaged.
    """
    try:
        from distckpt.metadata import unpickle_metadata
    except ImportError as error:
        raise CheckpointError(f"inspect needs torch, which cannot be imported: {error}") from error

    names = sorted(name for name in storage.list() if _PART.fullmatch(name))
    for name in [METADATA] if storage.read(METADATA, nbytes=0) is not None else names:
        data = storage.read(name)
        if data is None:
            raise CheckpointError(f"{storage.url}/{name} is missing")
        raw, where = bytes(data), f"{storage.url}/{name}"
        # Before anything is unpickled.
        record = find_record(storage, raw, name)
        try:
            ranks: dict[str, int] = {}
            for manifest_name, sha256 in () if record is None else record.manifests:
                manifest = read_manifest(storage, manifest_name, sha256)
                ranks |= dict.fromkeys(manifest["files"], int(manifest["rank"]))
            part = None if name == METADATA else int(name[2 : -len(METADATA)])
            yield from _entries_of(unpickle_metadata(raw, where), ranks, part)
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise IntegrityError(f"{where} contradicts itself: {error!r}", file=name) from error


def _entries_of(metadata: Metadata, ranks: dict[str, int], part: int | None) -> Iterator[_Entry]:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    places = {
        (index.fqn, None if index.offset is None else tuple(index.offset)): info
        for index, info in (metadata.storage_data or {}).items()
    }

    def place(fqn: str, offsets: tuple[int, ...] | None) -> dict[str, Any]:
        info = places.get((fqn, offsets))
        file = None if info is None else str(info.relative_path)
        match = None if file is None else _RANK.match(file)
        return {
            "file": file,
            "rank": ranks.get(file or "", int(match[1]) if match else None),
            "offset": None if info is None else int(info.offset),
            "nbytes": None if info is None else int(info.length),
        }

    for fqn, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            where = place(fqn, None)
            yield _Entry(str(fqn), None, None, where["nbytes"] or 0, part, [where])
            continue
        dtype = entry.properties.dtype
        chunks = [
            {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes)} | place(fqn, tuple(chunk.offsets))
            for chunk in entry.chunks
        ]
        nbytes = math.prod(entry.size) * dtype.itemsize
        yield _Entry(str(fqn), str(dtype).removeprefix("torch."), list(entry.size), nbytes, part, chunks)


def _print_entries(entries: list[_Entry], totals: dict[str, dict[str, int]], *, show_all: bool) -> None:
    for entry in entries:
        _print_row(
            "entry", entry.nbytes, entry.dtype or "bytes", _list(entry.shape), len(entry.chunks),
            _list(entry.ranks()), ",".join(entry.files()), _name(entry),
        )  # fmt: skip
        for chunk in entry.chunks if show_all else ():
            _print_row(
                "chunk", chunk["nbytes"], _list(chunk.get("offsets")), _list(chunk.get("sizes")),
                chunk["offset"], chunk["rank"], chunk["file"], _name(entry),
            )  # fmt: skip
    for dtype, total in totals.items():
        _print_row("total", total["nbytes"], dtype, total["entries"])


def _list(values: list[int] | None) -> str | None:
    return None if values is None else "[" + ",".join(map(str, values)) + "]"


def _name(entry: _Entry) -> str:
    return entry.fqn if entry.part is None else f"rank {entry.part}: {entry.fqn}"


@dataclass
class _Node:
    """What the keys have in common up to a dot."""

    nbytes: int = 0
    entries: list[_Entry] = field(default_factory=list)
    inner: dict[str, _Node] = field(default_factory=dict)


def _draw_entries(
    console: Console,
    summary: Summary,
    entries: list[_Entry],
    totals: dict[str, dict[str, int]],
    *,
    show_all: bool,
) -> None:
    from rich.table import Table
    from rich.text import Text
    from rich.tree import Tree

    root = _Node()
    for entry in entries:
        node = root
        node.nbytes += entry.nbytes
        for key in ([] if entry.part is None else [f"rank {entry.part}"]) + entry.fqn.split("."):
            node = node.inner.setdefault(key, _Node())
            node.nbytes += entry.nbytes
        node.entries.append(entry)
    tree = Tree(Text(f"{_shown(summary.url)}  {_size(root.nbytes)}, {summary.status}", "bold"))
    _draw_node(tree, root, show_all=show_all)
    # Lines are left to the terminal to wrap: cut, a key could not be told from another.
    width, console.width = console.width, _WIDEST
    console.print(tree, soft_wrap=True)
    console.width = width
    table = Table("dtype", box=None, header_style="bold")
    table.add_column("entries", justify="right")
    table.add_column("size", justify="right")
    for dtype, total in totals.items():
        table.add_row(dtype, str(total["entries"]), _size(total["nbytes"]))
    console.print(table)


def _draw_node(tree: Tree, node: _Node, *, show_all: bool) -> None:
    """Draw what is below `node`; with an explicit stack, for keys may be nested as deep as they please."""
    from rich.text import Text

    # rich itself draws without recursion.
    waiting = [(tree, node)]
    while waiting:
        branch, current = waiting.pop()
        inner = sorted(current.inner.items(), key=lambda each: (-each[1].nbytes, each[0]))
        shown = inner if show_all else inner[:_MOST_SIBLINGS]
        for key, below in shown:
            # A chain of single keys is one line.
            while len(below.inner) == 1 and not below.entries:
                rest, below = next(iter(below.inner.items()))
                key = f"{key}.{rest}"
            label = Text(_shown(key))
            label.append(f"  {_size(below.nbytes)}", "cyan")
            for entry in below.entries:
                shape = "object" if entry.shape is None else f"{entry.dtype} {_list(entry.shape)}"
                by = f"rank {', '.join(map(str, entry.ranks()[:8]))}" if entry.ranks() else ""
                label.append(f"  {shape}", "green")
                files = entry.files()
                label.append(_shown(f"  {by}  {files[0] if files else ''}"), "dim")
                if len(files) > 1:
                    label.append(f" and {len(files) - 1} more", "dim")
            grown = branch.add(label)
            if show_all:
                for entry in below.entries:
                    for chunk in entry.chunks if len(entry.chunks) > 1 else ():
                        where = f"{_list(chunk.get('offsets'))} + {_list(chunk.get('sizes'))}"
                        line = f"{where}  rank {chunk['rank']}  {chunk['file']} at byte {chunk['offset']}"
                        grown.add(Text(_shown(line), "dim"))
            waiting.append((grown, below))
        if len(shown) < len(inner):
            rest_bytes = sum(each.nbytes for _, each in inner[len(shown) :])
            branch.add(Text(f"and {len(inner) - len(shown)} more, {_size(rest_bytes)} (--all)", "dim"))


# tune


def _tune(options: argparse.Namespace) -> int:
    try:
        from distckpt.tune import sweep
    except ImportError as error:
        raise CheckpointError(f"tune needs torch, which cannot be imported: {error}") from error

    with _ending_in_order(), _status_line(quiet=options.json) as tell:
        tuning = sweep(
            options.path if is_url(options.path) else Path(options.path),
            nbytes=None if options.gib is None else int(options.gib * _KIB**3),
            seconds=options.seconds,
            workers=options.workers,
            storage_options=options.storage_options,
            progress=tell,
        )
    if options.json:
        body = {"command": "tune", "exit_status": WELL, **tuning.as_dict(), "path": options.path}
        print(json.dumps(body))
    elif console := _console():
        _draw_tuning(console, tuning)
    else:
        _print_tuning(tuning)
    return WELL


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """Have what asks the process to end do what Ctrl-C does, so that what was written is removed."""

    def interrupt(*_: object) -> None:
        # A second one would end what the first one has begun: the removal.
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    # What is ignored stays so: nohup has its reasons.
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in asked if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def _status_line(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield what shows a line on a terminal's stderr, in the place of the one before; none is left."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return

    def show(text: str) -> None:
        print(f"\r\x1b[K{_shown(text)}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        show("")


def _print_tuning(tuning: Tuning) -> None:
    for trial in tuning.trials:
        _print_row(
            "trial", trial.stage, trial.workers, trial.bucket_bytes or "auto", _on_or_off(trial.direct_io),
            f"{trial.gib_per_s:.3f}", _seconds(trial.seconds), _seconds(trial.write_seconds),
            len(trial.seconds), trial.parts_at_once,
        )  # fmt: skip
    for name, samples in tuning.ceilings.items():
        _print_row("ceiling", name, f"{statistics.median(samples):.3f}", len(samples))
    for flag, reason in zip(tuning.flags, tuning.reasons, strict=True):
        _print_row("flag", flag, reason)
    for (name, value), reason in zip(tuning.options.items(), tuning.option_reasons, strict=True):
        _print_row("option", name, value, reason)


def _draw_tuning(console: Console, tuning: Tuning) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("compared", box=None, header_style="bold")
    # Of parts at once there is something to say on S3 alone.
    parts = ["parts"] if tuning.options else []
    for heading in ("workers", "bucket", "O_DIRECT", *parts, "GiB/s", "seconds", "writing", "saves"):
        table.add_column(heading, justify="right")
    for trial in tuning.trials:
        bucket = "auto" if trial.bucket_bytes is None else _size(trial.bucket_bytes)
        table.add_row(
            trial.stage,
            str(trial.workers),
            bucket,
            _on_or_off(trial.direct_io) or "-",
            *([str(trial.parts_at_once)] if parts else []),
            f"{trial.gib_per_s:.2f}",
            _seconds(trial.seconds),
            _seconds(trial.write_seconds) or "-",
            str(len(trial.seconds)),
        )
    for name, samples in tuning.ceilings.items():
        rate = statistics.median(samples)
        table.add_row(
            Text(f"plain writes: {name}", "dim"),
            "",
            "",
            "",
            *([""] if parts else []),
            f"{rate:.2f}",
            "",
            "",
            str(len(samples)),
        )
    console.print(table)
    console.print(
        f"{len(tuning.trials)} settings, saves of {_size(tuning.nbytes)}, {tuning.seconds:.0f} s in all"
    )
    for flag, reason in zip(tuning.flags, tuning.reasons, strict=True):
        _draw_answer(console, flag, reason)
    for (name, value), reason in zip(tuning.options.items(), tuning.option_reasons, strict=True):
        _draw_answer(console, f'storage_options {{"{name}": {value}}}', reason)


def _draw_answer(console: Console, answer: str, reason: str) -> None:
    from rich.text import Text

    line = Text(answer, "bold green")
    line.append(f"  {_shown(reason)}", "default")
    console.print(line, soft_wrap=True)


def _on_or_off(value: bool | None) -> str | None:
    return None if value is None else "on" if value else "off"


def _seconds(samples: Sequence[float]) -> str | None:
    return f"{statistics.median(samples):.3f}" if samples else None


# What reaches the user.


def _shown(text: str) -> str:
    """Return `text` with every character escaped that could do something to a terminal or to columns."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode("ascii")
        for each in text
    )


def _print_row(*values: object) -> None:
    print("\t".join(_shown(_or_dash(value)) for value in values))


def _print_json(
    command: str, path: str, status: int, checkpoints: Sequence[Any], more: dict[str, Any] | None = None
) -> None:
    body = {
        "command": command,
        "path": path,
        "exit_status": status,
        **(more or {}),
        "checkpoints": checkpoints,
    }
    print(json.dumps(body))


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < _KIB:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= _KIB
    return f"{nbytes:.1f} TiB"


def _console() -> Console | None:
    """Return a console if somebody looks at one, and rich is there to draw on it."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(highlight=False, markup=False, emoji=False)


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show how much is done, in a terminal only; yields what is told the bytes done and those in all."""
    console = None if quiet else _console()
    if console is None:
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("verify", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)

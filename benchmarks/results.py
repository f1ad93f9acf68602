"""The file of a run: JSON lines, what is in them, and what is worked out from them.

One line is one record, its `kind` says which:

    run          what was measured, and on what: date, commit, command, versions, hardware, config
    ceiling      name, what, unit, samples: what the hardware gives all ranks at once, unless `what` says
                 otherwise
    measurement  candidate, workload, ranks, nbytes (state of all ranks), note, figures: name -> samples,
                 of_ceiling: name -> samples of the share of its ceiling, measured beside it; equal: whether
                 what was read back was what had been saved
    guarded      candidate, workload, figures: of saves with a guarded optimizer
    training     candidate, figures, step_s of phases without and with saves, in turn
    sweep        trials, ceilings, flags, reasons: what `distckpt tune` found
    timeline     candidate, workload, spans: rank -> spans of one save, nbytes
    skipped      section, name, reason
    end          seconds, sections: name -> seconds

Times are in seconds, sizes in bytes; with several ranks a time is that of the slowest, all else their sum.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from reasons import reason

BARE = "plain copy and writes"
"""Of trainings: what stands for no checkpointer at all."""
GIB = 1 << 30
SCHEMA = 1
Record = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """What a figure is called, and how it is read; less of it is better.

    Attributes:
        title: As the head of a column.
        unit: "s", "GiB", "x" or "".
        ceiling: The record that bounds it, if one does.
        meaning: In one sentence.
    """

    title: str
    unit: str
    ceiling: str
    meaning: str


FIGURES = {
    "returned_s": Figure("save() returns", "s", "", "Until the call returned, later saves."),
    "guarded_s": Figure(
        "returns, guarded",
        "s",
        "",
        "Until the call returned, for a state whose optimizer is guarded: the copy runs under the next step.",
    ),
    "first_stall_s": Figure(
        "first stall", "s", "", "Until the state may be changed, the first save, with nothing prepared."
    ),
    "stall_s": Figure("later stall", "s", "copy", "Until the state may be changed, later saves."),
    "durable_s": Figure(
        "durable", "s", "write", "Until every byte is on the target to stay: files and directories synced."
    ),
    "load_s": Figure("load, cold", "s", "read", "To load what was saved, none of it in the page cache."),
    "first_load_s": Figure("first load", "s", "read", "The same, for the first time in a process."),
    "slowdown": Figure(
        "slower training", "%", "", "How much longer the mean step takes while saves go on back to back."
    ),
    "host_bytes": Figure(
        "host memory", "GiB", "", "The most of all processes in a save (PSS), beside what was there before."
    ),
    "cpu_s": Figure("CPU s per GiB", "", "", "Processor seconds of all processes in a save, for each GiB."),
    "bytes_ratio": Figure("bytes", "x", "", "Bytes of all files, for each byte of the state."),
    "files": Figure("files", "", "", "Number of files of a checkpoint."),
}
"""In the order of the columns."""


def write_record(path: Path, record: Record) -> None:
    """Append a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read_records(path: Path) -> list[Record]:
    """Return the records of a file.

    Raises:
        ValueError: It is not a file of results, or of another version.
    """
    try:
        records: list[Record] = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no file of results: {error}") from error
    if not records or not isinstance(records[0], dict) or records[0].get("kind") != "run":
        raise ValueError(f"{path}: no file of results: its first line is no record of a run")
    if records[0]["schema"] != SCHEMA:
        raise ValueError(f"{path}: written in version {records[0]['schema']}, this program reads {SCHEMA}")
    return records


class Results:
    """The records of one run."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = list(records)
        self.run = self.records[0]

    def of(self, kind: str) -> Iterator[Record]:
        return (record for record in self.records if record["kind"] == kind)

    def rate(self, name: str) -> float | None:
        """Return the median of a ceiling in bytes per second, if it was measured."""
        for record in self.of("ceiling"):
            if record["name"] == name and record["samples"]:
                return median(record["samples"]) * GIB
        return None

    @property
    def device(self) -> str:
        return str(self.run["config"]["device"])

    def bound(self, name: str) -> float | None:
        """Return the rate that bounds figures whose `Figure.ceiling` is `name`, of all ranks together."""
        names: tuple[str, ...] = {
            "copy": ("d2h",) if self.device == "cuda" else ("memcpy",),
            "write": ("write_direct", "write_buffered"),
            "read": ("read",),
            "": (),
        }[name]
        rates = [rate for one in names if (rate := self.rate(one)) is not None]
        return max(rates, default=None)

    def measurements(self, workload: str | None = None, candidate: str | None = None) -> list[Record]:
        return [
            record
            for record in self.of("measurement")
            if workload in (None, record["workload"]) and candidate in (None, record["candidate"])
        ]

    @property
    def compared(self) -> str:
        """The workload that all candidates save."""
        return str(self.run["config"]["compared"])

    def share(self, record: Record, figure: str) -> float | None:
        """Return which share of its ceiling, taken beside each sample, a figure reaches: 1 is the limit.

        Not of the ceiling of the whole run, which may have been measured minutes before, or after.
        """
        beside = record.get("of_ceiling", {}).get(figure)
        return midmean(beside) if beside else None


def midmean(samples: Sequence[float]) -> float:
    """Return the mean of the middle half of the samples.

    As steady as a mean where a ceiling takes turns between two values, as disks' do, and as hard to move by a
    single sample as a median.
    """
    spare = (len(samples) + 1) // 4
    return mean(sorted(samples)[spare : len(samples) - spare])


def value_of(record: Record, figure: str) -> float | None:
    """Return the median of a figure, None if there is none."""
    samples = record["figures"].get(figure)
    return float(median(samples)) if samples else None


def shown(figure: str, value: float | None) -> str:
    """Return a value as it stands in a table."""
    if value is None:
        return "-"
    unit = FIGURES[figure].unit
    if unit == "s":
        return f"{1000 * value:.1f} ms" if value < 0.1 else f"{value:.2f} s"
    if unit == "GiB":
        return f"{value / GIB:.2f} GiB"
    if unit == "%":
        return f"{100 * value:+.0f} %"
    if unit == "x":
        return f"{value:.3f} x"
    return f"{value:.0f}" if figure == "files" else f"{value:.2f}"


def value(results: Results, record: Record, figure: str) -> float | None:
    """Return the median of a figure of a candidate, None if there is none."""
    samples = samples_of(results, record, figure)
    return float(median(samples)) if samples else None


def shown_samples(figure: str, samples: Sequence[float]) -> str:
    """Return the median of samples as it stands in a table; of shares, which vary, how far they go."""
    text = shown(figure, float(median(samples)) if samples else None)
    if FIGURES[figure].unit != "%" or len(samples) < 2:
        return text
    return f"{text} ({100 * min(samples):+.0f} to {100 * max(samples):+.0f})"


def lost(training: Record) -> str:
    """Return what a training loses for each save: its longer steps, all together."""
    samples = training["figures"].get("lost_s")
    return "-" if not samples else f"{1000 * median(samples):.0f} ms"


_ELSEWHERE = {"slowdown": "training", "guarded_s": "guarded"}
"""Figures of the compared state that are in records of their own."""


def samples_of(results: Results, record: Record, figure: str) -> list[float]:
    """Return the samples of a figure of a candidate, wherever they are."""
    found: list[float] = record["figures"].get(figure, [])
    if not found and figure in _ELSEWHERE and record["workload"] == results.compared:
        for other in results.of(_ELSEWHERE[figure]):
            if other["candidate"] == record["candidate"]:
                found = other["figures"][figure]
    return found


_AHEAD = 0.01
"""What is nearer than that is level."""


def notes(results: Results) -> list[tuple[str, str, str]]:
    """Return why a peer is ahead of distckpt, wherever one is: candidate, figure, reason."""
    found = []
    [*ours] = results.measurements(workload=results.compared, candidate="distckpt")
    if not ours:
        return []
    for record in results.measurements(workload=results.compared):
        name = record["candidate"]
        if name.startswith("distckpt"):
            continue
        for figure in FIGURES:
            mine, theirs = value(results, ours[0], figure), value(results, record, figure)
            if mine is None or theirs is None or theirs >= mine * (1 - _AHEAD):
                continue
            found.append((name, figure, f"{FIGURES[figure].title}: it {reason(name, figure)}."))
    return found

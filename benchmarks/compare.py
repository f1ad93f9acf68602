"""Compares two files of results: ratios of their figures, and whether one is worse beyond noise.

Figures that have a ceiling are compared by the share of it that they reach, for that takes out how busy the
machine was; others by their medians, unless the two states have other sizes. Noise is three times what
samples differ by among themselves, a tenth at least; times of fewer than five samples must differ by a factor
of two. Where only the ceiling has changed, nothing is worse.
Exit status 1: the second run is worse in some figure of distckpt, or has not measured what the first has, or
what was read back in it was not what had been saved.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from results import FIGURES, Results, midmean, read_records, samples_of, shown, value
from rich.console import Console
from rich.table import Table

_LEAST = 0.10
"""Differences up to this are noise, however alike the samples are."""
_SPREADS = 3.0
"""How many times the samples' own spread a difference must be."""
_FEW, _UNKNOWN_NOISE = 5, 1.0
"""Fewer samples do not tell how noisy they are: then it must be a factor of two."""
_COUNTED = frozenset({"host_bytes", "bytes_ratio", "files"})
"""What is no matter of speed: one sample tells it."""
_ABSOLUTE = {"returned_s": 0.002, "guarded_s": 0.001, "first_stall_s": 0.01, "stall_s": 0.002}
"""Seconds that nobody notices."""


@dataclass(frozen=True)
class Comparison:
    """A figure of two runs.

    Attributes:
        candidate: Whose.
        workload: Of which state.
        figure: Which.
        before: Median of the first run.
        after: Median of the second.
        ratio: How many times better the second one is: below 1 it is worse.
        noise: What the ratio may differ from 1 by.
        is_worse: Whether it is, beyond noise.
    """

    candidate: str
    workload: str
    figure: str
    before: float
    after: float
    ratio: float
    noise: float
    is_worse: bool


def spread(samples: list[float]) -> float:
    """Return the median distance of samples from their median, as a share of it; 0 of a single one."""
    middle = median(samples)
    return median(abs(one - middle) for one in samples) / abs(middle) if middle else 0.0


def compare(before: Results, after: Results) -> Iterator[Comparison]:
    """Compare what both have measured.

    Raises:
        ValueError: They have nothing in common, or are of different devices.
    """
    if before.device != after.device:
        raise ValueError(f"one is of {before.device}, the other of {after.device}")
    known = {(record["candidate"], record["workload"]): record for record in before.measurements()}
    shared = [
        (known[key], record)
        for record in after.measurements()
        if (key := (record["candidate"], record["workload"])) in known
    ]
    if not shared:
        raise ValueError("they have no measurement in common")
    for first, second in shared:
        for figure in FIGURES:
            mine, theirs = value(before, first, figure), value(after, second, figure)
            if not mine or not theirs:
                continue
            if figure == "slowdown":
                # How many times as long a step takes: a share of nearly nothing says nothing.
                mine, theirs = 1 + mine, 1 + theirs
            samples = [record.get("of_ceiling", {}).get(figure) for record in (first, second)]
            if not all(samples) and first["nbytes"] != second["nbytes"]:
                continue
            if all(samples):
                ratio = midmean(samples[1]) / midmean(samples[0])
            else:
                samples = [
                    samples_of(run, record, figure) for run, record in ((before, first), (after, second))
                ]
                if figure == "slowdown":
                    samples = [[1 + one for one in each] for each in samples]
                ratio = mine / theirs
            noise = max(_LEAST, _SPREADS * max(map(spread, samples)))
            if min(map(len, samples)) < _FEW and figure not in _COUNTED:
                noise = max(noise, _UNKNOWN_NOISE)
            is_slower = theirs - mine > _ABSOLUTE.get(figure, 0.0) and theirs / mine - 1 > _LEAST
            yield Comparison(
                second["candidate"], second["workload"], figure, mine, theirs, ratio, noise,
                1 / ratio - 1 > noise and (is_slower or first["nbytes"] != second["nbytes"]),
            )  # fmt: skip


def missing(before: Results, after: Results) -> Iterator[str]:
    """Say what of distckpt the first run has and the second has not, or not as it should be."""
    found = {(record["candidate"], record["workload"]): record for record in after.measurements()}
    for record in before.measurements():
        name, workload = record["candidate"], record["workload"]
        if name.startswith("distckpt"):
            other = found.get((name, workload))
            if other is None:
                yield f"{name}, {workload}: not measured in B"
            elif record["equal"] and not other["equal"]:
                yield f"{name}, {workload}: what was read back in B is not what had been saved"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, metavar="A")
    parser.add_argument("after", type=Path, metavar="B")
    parser.add_argument("--all", action="store_true", help="peers as well")
    arguments = parser.parse_args()
    try:
        runs = [Results(read_records(path)) for path in (arguments.before, arguments.after)]
        found = [one for one in compare(*runs) if arguments.all or one.candidate.startswith("distckpt")]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    console = Console()
    table = Table(title="More than 1 is better in B", title_justify="left")
    for name in ("", "state", "figure", "A", "B", "ratio", "noise", ""):
        table.add_column(name, justify="right" if name in ("A", "B", "ratio", "noise") else "left")
    for one in found:
        table.add_row(
            one.candidate, one.workload, FIGURES[one.figure].title, shown(one.figure, one.before),
            shown(one.figure, one.after), f"{one.ratio:.2f} x", f"+-{100 * one.noise:.0f} %",
            "[red]worse[/]" if one.is_worse else "",
        )  # fmt: skip
    console.print(table)
    first, second = (run.run["hardware"] for run in runs)
    if (first["cpu"], first["cores"], first["gpus"]) != (second["cpu"], second["cores"], second["gpus"]):
        console.print("They are of different machines.")
    before, after = (
        {(record["candidate"], record["workload"]): record["nbytes"] for record in run.measurements()}
        for run in runs
    )
    if any(before[key] != after[key] for key in before.keys() & after.keys()):
        console.print("Of states of other sizes only shares of ceilings are compared.")
    worse = [one for one in found if one.is_worse and one.candidate.startswith("distckpt")]
    console.print(f"{len(worse)} of {len(found)} figures are worse beyond noise.")
    gone = list(missing(*runs))
    for text in gone:
        console.print(text, markup=False)
    return 1 if worse or gone else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The tables of a run: in the terminal, and in Markdown for the README."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from results import (
    FIGURES,
    GIB,
    Record,
    Results,
    lost,
    notes,
    read_records,
    samples_of,
    shown_samples,
    value,
)  # fmt: skip
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
_README = ROOT / "README.md"
_RESULTS = ROOT / "benchmarks" / "results"
_BEGIN, _END = "<!-- bench: begin -->", "<!-- bench: end -->"
_TIMES = ("returned_s", "guarded_s", "first_stall_s", "stall_s", "durable_s", "load_s", "slowdown")
_COSTS = ("first_load_s", "host_bytes", "cpu_s", "bytes_ratio", "files")
_STATES = ("first_stall_s", "stall_s", "durable_s", "load_s", "first_load_s", "host_bytes", "cpu_s", "files")
_README_FIGURES = (*_TIMES, "host_bytes")
_WIDTH = 160


def cell(results: Results, record: Record, figure: str) -> str:
    """Return a figure as it stands in a table: with its share of its ceiling, if it has one."""
    text = shown_samples(figure, samples_of(results, record, figure))
    share = results.share(record, figure)
    return text if share is None else f"{text} ({100 * share:.0f} %)"


def comparison(
    results: Results, figures: Sequence[str] = tuple(FIGURES), noted: Sequence[str] = tuple(FIGURES)
) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the comparison of all candidates.

    Args:
        results: The run.
        figures: The columns, of which those are left out that nobody has.
        noted: The figures whose notes are numbered together, as `numbered` does; numbers are in brackets.
    """
    records = results.measurements(workload=results.compared)
    numbers = numbered(results, noted)
    marks = {(candidate, figure): numbers.get(text) for candidate, figure, text in notes(results)}
    measured = [
        figure for figure in figures if any(value(results, record, figure) is not None for record in records)
    ]
    rows = []
    for record in records:
        row = [record["candidate"] + ("" if record["equal"] else " (READ BACK DIFFERENT)")]
        for figure in measured:
            mark = marks.get((record["candidate"], figure))
            row.append(cell(results, record, figure) + (f" [{mark}]" if mark else ""))
        rows.append(row)
    return ["", *(FIGURES[figure].title for figure in measured)], rows


def numbered(results: Results, figures: Sequence[str] = tuple(FIGURES)) -> dict[str, int]:
    """Return the number of each note on one of these figures."""
    texts = dict.fromkeys(text for _, figure, text in notes(results) if figure in figures)
    return {text: number for number, text in enumerate(texts, 1)}


def console() -> Console:
    """Return the terminal; what is not one is wide enough."""
    found = Console()
    return found if found.is_terminal else Console(width=_WIDTH)


def print_tables(results: Results, output: Console) -> None:
    """Show everything that was found."""
    config, hardware = results.run["config"], results.run["hardware"]
    machine = ", ".join(hardware["gpus"] or [f"{hardware['cpu']}, {hardware['cores']} cores"])
    ranks = f"{config['ranks']} rank{'s' if config['ranks'] > 1 else ''}"
    output.print(
        f"\n[bold]{machine}[/], {ranks} with {config['gib_per_rank']:g} GiB each, to {config['target']}"
    )
    rows = [
        [record["what"], *(f"{one(record['samples']):.2f} {record['unit']}" for one in (median, min, max))]
        for record in results.of("ceiling")
        if record["samples"]
    ]
    _print_table(output, "What this machine does at best", ["", "median", "least", "most"], rows)
    compared = results.measurements(workload=results.compared)
    for figures in (_TIMES, _COSTS) if compared else ():
        title = f"{compared[0]['title']}: {compared[0]['nbytes'] / GIB:.2f} GiB (share of its ceiling)"
        _print_table(output, title, *comparison(results, figures))
    for text, number in numbered(results).items():
        output.print(f"[{number}] {text}", markup=False)
    states = [
        [record["title"], f"{record['nbytes'] / GIB:.2f}", *(cell(results, record, name) for name in _STATES)]
        for record in results.measurements(candidate="distckpt")
    ]
    if len(states) > 1:
        head = ["", "GiB", *(FIGURES[name].title for name in _STATES)]
        _print_table(output, "distckpt, other states (share of its ceiling)", head, states)
    _print_trainings(results, output)
    _print_s3(results, output)
    for record in results.of("rounds"):
        figures = {name: median(samples) for name, samples in record["figures"].items()}
        output.print(
            f"Ten rounds of {record['nbytes'] / GIB:.2f} GiB, {record['candidate']}, slowest rank: "
            f"saves {figures['save_s']:.2f} s, {figures['save_gib_s']:.2f} GiB/s; "
            f"loads {figures['load_s']:.2f} s, {figures['load_gib_s']:.2f} GiB/s"
        )
    for record in results.of("sweep"):
        output.print("[bold]Flags for this target:[/] " + " ".join(record["flags"]))
        for reason in record["reasons"]:
            output.print(f"  {reason}", markup=False)
    for record in results.of("skipped"):
        output.print(f"Skipped: {record['name']} ({record['section']}): {record['reason']}", markup=False)


def _print_table(output: Console, title: str, head: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for name in head:
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        # Square brackets are markup there.
        table.add_row(*(text.replace("[", r"\[") for text in row))
    output.print(table)


def _print_trainings(results: Results, output: Console) -> None:
    rows = []
    for record in results.of("training"):
        figures = record["figures"]
        steps = [
            " -> ".join(f"{1000 * seconds:.1f}" for seconds in figures[name]) + " ms"
            for name in ("p50_s", "p99_s")
        ]
        slowdown = shown_samples("slowdown", figures["slowdown"])
        saves = str(figures["saves"][0])
        rows.append([record["candidate"], slowdown, lost(record), *steps, saves, record["model"]])
    if rows:
        head = ["", "mean step", "lost for each save", "p50", "p99", "saves", "model"]
        _print_table(output, "Training while it saves back to back", head, rows)


def _print_s3(results: Results, output: Console) -> None:
    for record in results.of("s3"):
        best = results.rate("s3_multipart")
        rows = []
        for name, samples in sorted(record["rows"].items(), reverse=True):
            rate = record["nbytes"] / median(samples["seconds"])
            share = f"{100 * rate / best:.0f} %" if name.startswith("save ") and best else ""
            rows.append([name, f"{rate / GIB:.2f} GiB/s", share])
        _print_table(output, f"{record['server']} on this machine", ["", "rate", "of plain uploads"], rows)


def markdown(files: list[Path]) -> str:
    """Return the README's tables: one for each file of results."""
    parts = []
    for file in files:
        results = Results(read_records(file))
        hardware, config = results.run["hardware"], results.run["config"]
        machine = f"{len(hardware['gpus'])} x {hardware['gpus'][0]}" if hardware["gpus"] else hardware["cpu"]
        record = results.measurements(workload=results.compared)[0]
        head, body = comparison(results, _README_FIGURES, _README_FIGURES)
        rows = [head, ["---"] * len(head), *body]
        size = f"{record['nbytes'] / GIB / record['ranks']:.2f} GiB"
        if record["ranks"] > 1:
            size += f" for each of {record['ranks']} ranks"
        parts.append(
            f"**{machine}**, {hardware['cores']} cores, {config['target'].partition(' ')[0]}, torch "
            f"{results.run['versions']['torch']}: {record['title']}, {size}\n"
        )
        parts.append("\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n")
        parts.append(f"{_counts(results)} {_trainings(results)} {_left_out(results)}".strip() + "\n")
        texts = [f"[{number}] {text}" for text, number in numbered(results, _README_FIGURES).items()]
        if texts:
            parts.append("  \n".join(texts) + "\n")
    return "\n".join(parts)


def _counts(results: Results) -> str:
    """Return of how many samples the medians are."""
    numbers: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for record in results.measurements(workload=results.compared):
        figures = record["figures"]
        counted = len(figures.get("stall_s", [])), len(figures.get("load_s", []))
        numbers[record["candidate"] == "distckpt"].append(counted)
    texts = []
    for is_ours, who in ((True, "distckpt"), (False, "each peer")):
        if numbers[is_ours]:
            saves, loads = map(min, zip(*numbers[is_ours], strict=True))
            plurals = ["" if number == 1 else "s" for number in (saves, loads)]
            texts.append(f"{saves} later save{plurals[0]} and {loads} load{plurals[1]} of {who}")
    return f"Medians of {', and of '.join(texts)}."


def _trainings(results: Results) -> str:
    """Return what saves take from a training, and how many of them."""
    texts = [
        f"{record['candidate']} {lost(record)}"
        for record in results.of("training")
        if "lost_s" in record["figures"]
    ]
    return f"Lost by training for each save: {', '.join(texts)}." if texts else ""


def _left_out(results: Results) -> str:
    """Return who was not measured for want of time: the others are not installed, or do not fit."""
    names = [
        record["name"]
        for record in results.of("skipped")
        if record["section"] == "candidates" and record["reason"].startswith("no time")
    ]
    return f"No time was left for {', '.join(names)}." if names else ""


def readme(text: str, tables: str) -> str:
    """Return the README with the tables put in."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{tables}{_END}{after}"


def committed() -> list[Path]:
    """Return the files of results that the README shows, those of GPUs first."""
    files = sorted(_RESULTS.glob("bench_*.jsonl"))
    return sorted(files, key=lambda file: Results(read_records(file)).device != "cuda")


def main() -> None:
    """Put the tables of the committed results into the README, or show those of a file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("file", type=Path, nargs="?", help="show this one; default: write the README")
    arguments = parser.parse_args()
    if arguments.file:
        print_tables(Results(read_records(arguments.file)), console())
        return
    _README.write_text(readme(_README.read_text(), markdown(committed())))


if __name__ == "__main__":
    main()

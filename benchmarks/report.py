"""The page of a run: one HTML file that needs no network, made of a file of results.

Every text of a record is escaped where it becomes HTML: by `_text`, or in `charts.py`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import mean, median
from typing import Any

import charts
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
from results import (
    FIGURES,
    GIB,
    Record,
    Results,
    lost,
    notes,
    read_records,
    shown,
    shown_samples,
    value,
    value_of,
)
from tables import numbered

_OURS = "distckpt"
_MIB = 1 << 20
_BARS = ("first_stall_s", "stall_s", "durable_s")
_STATES = ("first_stall_s", "stall_s", "durable_s", "load_s", "guarded_s", "host_bytes", "cpu_s", "files")
_STAGES = {"workers": "Workers of a rank", "buckets": "Bucket size", "direct": "O_DIRECT or page cache"}
_BOUNDS = {
    "copy": "Its ceiling is the time in which plain copies move the same bytes: into pinned memory, off all "
    "GPUs at once; without a GPU, within host memory.",
    "write": "Its ceiling is the time in which plain writes bring the same bytes to the same target, synced, "
    "by as many threads as do it fastest.",
    "read": "Its ceiling is the time in which plain reads get the same bytes from the target.",
    "": "It has no ceiling.",
}
_MORE = {
    "returned_s": "Who copies before returning stalls as long; who copies later lets training compute, but "
    "not yet change the state.",
    "guarded_s": "The next change of parameters waits for the copy, if that is not over by then.",
    "first_stall_s": "In it is what later saves have no more to do, unless it was done ahead: planning, "
    "reserving and pinning memory, starting workers.",
    "stall_s": "It is what a save costs a training that cannot hide the copy.",
    "durable_s": "After it a power failure takes nothing away.",
    "load_s": "What was read is compared with what had been saved.",
    "slowdown": "Stalls are in it, and what writing beside the training takes from it.",
    "host_bytes": "A copy of the state on the host is the least that lets training go on.",
    "cpu_s": "They are taken from data loaders and from the threads that launch kernels.",
    "bytes_ratio": "Above 1 is what describes the state, and what was written twice.",
    "files": "Many files burden the metadata servers of shared file systems; few limit who writes at once.",
}
_HERE = Path(__file__).parent


class Page:
    """What is put together: sections, and the charts that are drawn into them."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.sections: list[tuple[str, str, str]] = []
        self._charts: dict[str, charts.Chart] = {}

    def add(self, name: str, title: str, body: str) -> None:
        """Add a section; one without a body says that it was not measured."""
        missing = '<p class="muted">Not measured in this run.</p>'
        self.sections.append((name, title, body or missing))

    def chart(self, caption: str, chart: charts.Chart, note: str = "") -> str:
        """Return the HTML of a chart."""
        name = f"chart-{len(self._charts)}"
        self._charts[name] = chart
        small = f" <small>{_text(note)}</small>" if note else ""
        return (
            f"<figure><figcaption>{_text(caption)}{small}</figcaption>"
            f'<div class="chart" id="{name}" role="img" aria-label="{_text(caption)}" '
            f'style="height:{chart["layout"]["height"]:.0f}px"></div></figure>'
        )

    def html(self) -> str:
        title = f"distckpt on {_machine(self.results.run)}"
        links = "".join(f'<a href="#{name}">{_text(title)}</a>' for name, title, _ in self.sections)
        sections = "".join(
            f'<section id="{name}"><h2>{_text(title)}</h2>{body}</section>'
            for name, title, body in self.sections
        )
        # "<" would end the script, were it that of "</script>".
        drawn = json.dumps(self._charts, separators=(",", ":")).replace("<", "\\u003c")
        return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{_text(title)}</title>
<style>
{_read("page.css")}</style>
</head>
<body>
<main>
<header>{_head(self.results)}<nav>{links}</nav></header>
{sections}
</main>
<div id="tip" hidden></div>
<script type="application/json" id="charts">{drawn}</script>
<script>{get_plotlyjs()}</script>
<script>
{_read("page.js")}</script>
</body>
</html>
"""


def write_page(records: Iterable[Record], path: Path) -> None:
    """Write the page of a run: one file that needs no network.

    Args:
        records: Of one run, that of the run first.
        path: The file, which is replaced.
    """
    page = Page(Results(records))
    for name, title, body in (
        ("stall", "Stall and durable", _stall),
        ("candidates", "All candidates", _candidates),
        ("workloads", "distckpt on other states", _workloads),
        ("timeline", "Timeline of one save", _timeline),
        ("sweep", "Settings for this target", _sweep),
        ("training", "Training while it saves", _training),
    ):
        page.add(name, title, body(page))
    # On request, or where a server is installed: most runs have neither.
    for name, title, body in (("s3", "Object storage", _s3), ("rounds", "Ten saves and ten loads", _rounds)):
        if any(page.results.of(name)):
            page.add(name, title, body(page))
    page.add("ceilings", "Ceilings of this machine", _ceilings(page))
    page.add("run", "The run itself", _end(page))
    page.add("reading", "How to read this", _reading(page))
    path.write_text(page.html(), encoding="utf-8")


def timeline_of(results: Results) -> Record | None:
    """Return the timeline that is shown: that of the compared state, if there is one."""
    found = list(results.of("timeline"))
    return min(found, key=lambda record: record["workload"] != results.compared, default=None)


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _text(text: object) -> str:
    return escape(str(text))


def _machine(run: Record) -> str:
    hardware = run["hardware"]
    cards = Counter(hardware.get("gpus") or [])
    return ", ".join(f"{count} x {name}" for name, count in cards.items()) or str(hardware["cpu"])


def _table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, texts: Sequence[int] = (), ours: int = -1
) -> str:
    """Return a table of cells that are HTML already; the first of a row is its head.

    Args:
        head: Of the columns.
        rows: Cells.
        texts: Columns of words, not of figures.
        ours: The row that is highlighted.
    """
    kinds = [' class="text"' if column in texts else "" for column in range(len(head))]
    parts = [
        '<div class="scroll"><table><thead><tr>',
        *(f"<th{kind}>{name}</th>" for name, kind in zip(head, kinds, strict=True)),
        "</tr></thead><tbody>",
    ]
    for number, (first, *rest) in enumerate(rows):
        parts.append('<tr class="ours">' if number == ours else "<tr>")
        parts.append(f"<th>{first}</th>")
        parts += [f"<td{kind}>{cell}</td>" for cell, kind in zip(rest, kinds[1:], strict=True)]
        parts.append("</tr>")
    return "".join([*parts, "</tbody></table></div>"])


def _shown(figure: str, found: float) -> str:
    """Return a value for running text: its unit stays with it."""
    return shown(figure, found).replace(" ", "\u00a0")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# The head


def _head(results: Results) -> str:
    run = results.run
    hardware, config = run["hardware"], run["config"]
    ranks = config["ranks"]
    host = [hardware["cpu"], f"{hardware['cores']} cores"]
    if "memory_gib" in hardware:
        host.append(f"{hardware['memory_gib']:g} GiB of memory")
    facts = {
        "machine": ", ".join(host),
        "GPUs": _machine(run) if hardware.get("gpus") else "none",
        "target": config["target"],
        "ranks": f"{ranks}, {config['gib_per_rank']:g} GiB each" if "gib_per_rank" in config else ranks,
        "versions": ", ".join(f"{name} {version}" for name, version in run["versions"].items()),
        "measured": f"{run['date'].replace('T', ' ').replace('Z', ' UTC')}, commit {run['commit']}",
    }
    items = [f"<div><dt>{name}</dt><dd>{_text(fact)}</dd></div>" for name, fact in facts.items()]
    if "command" in run:
        items.append(f'<div class="wide"><dt>command</dt><dd><code>{_text(run["command"])}</code></dd></div>')
    return (
        f"<h1>distckpt on {_text(_machine(run))}</h1>"
        '<p class="muted">How near saving checkpoints comes to the limit of this machine, and how far ahead '
        "of others. 100 % is what the hardware gives.</p>"
        f"{_alarm(results)}{_cards(results)}{_flags(results)}"
        f'<dl class="facts">{"".join(items)}</dl>'
    )


def _alarm(results: Results) -> str:
    different = [record["candidate"] for record in results.records if record.get("equal") is False]
    if not different:
        return ""
    return f'<p class="alarm">Read back different from what was saved: {_text(", ".join(different))}</p>'


def _cards(results: Results) -> str:
    ours = results.measurements(workload=results.compared, candidate=_OURS)
    if not ours:
        return ""
    found = [
        _share_card(results, ours[0], "stall_s", "of the copy ceiling", "training stands still for {}"),
        _share_card(
            results, ours[0], "durable_s", "of the raw write", "every byte is on the target after {}"
        ),
        _ahead_card(results, ours[0]),
        _returns_card(results, ours[0]),
        _training_card(results),
    ]
    return f'<div class="cards">{"".join(found)}</div>'


def _card(number: str, title: str, detail: str, *, is_behind: bool = False) -> str:
    kind = "card behind" if is_behind else "card"
    big, bold, small = _text(number), _text(title), _text(detail)
    return f'<div class="{kind}"><b>{big}</b><span>{bold}</span><small>{small}</small></div>'


def _share_card(results: Results, record: Record, figure: str, title: str, detail: str) -> str:
    seconds, share = value_of(record, figure), results.share(record, figure)
    if seconds is None:
        return ""
    name, text = FIGURES[figure].title, detail.format(_shown(figure, seconds))
    if share is None:
        return _card(shown(figure, seconds), name, f"{text}; its ceiling was not measured")
    return _card(_percent(share), title, f"{name}: {text}")


def _ahead(results: Results, ours: Record, figure: str) -> tuple[float, str] | None:
    """Return how many times faster than the best peer, and which it is."""
    mine = value_of(ours, figure)
    peers = [
        (theirs, record["candidate"])
        for record in results.measurements(workload=results.compared)
        if not charts.is_ours(record["candidate"]) and (theirs := value_of(record, figure)) is not None
    ]
    if not mine or not peers:
        return None
    theirs, name = min(peers)
    return theirs / mine, name


def _ahead_card(results: Results, ours: Record) -> str:
    first, first_s = _ahead(results, ours, "first_stall_s"), value_of(ours, "first_stall_s")
    if first is None or first_s is None:
        return ""
    times, name = first
    mine, theirs = (_shown("first_stall_s", seconds) for seconds in (first_s, times * first_s))
    details = [f"{mine}, {name} {theirs}"]
    details += [
        f"{FIGURES[figure].title} {_compared(ahead[0])} than {ahead[1]}"
        for figure in ("stall_s", "durable_s")
        if (ahead := _ahead(results, ours, figure))
    ]
    number, _, word = _compared(times).rpartition(" ")
    peer = "next" if times >= 1 else "fastest"
    return _card(number, f"{word} first save than the {peer} peer", "; ".join(details), is_behind=times < 1)


def _compared(times: float) -> str:
    return f"{times:.1f}\u00a0x faster" if times >= 1 else f"{1 / times:.1f}\u00a0x slower"


def _returns_card(results: Results, ours: Record) -> str:
    for figure, how in (
        ("guarded_s", "with a guarded optimizer: the copy runs under the next step"),
        ("returned_s", ""),
    ):
        seconds = value(results, ours, figure)
        if seconds is not None:
            plain = value_of(ours, "returned_s")
            detail = f"{how}; without, {_shown('returned_s', plain)}" if how and plain is not None else how
            return _card(shown(figure, seconds), "until save() returns", detail)
    return ""


def _training_card(results: Results) -> str:
    slower = {record["candidate"]: median(record["figures"]["slowdown"]) for record in results.of("training")}
    if _OURS not in slower:
        return ""
    mine = slower.pop(_OURS)
    others = ", ".join(f"{name} {_shown('slowdown', each)}" for name, each in slower.items())
    detail = "saves go on back to back" + (f"; {others}" if others else "")
    return _card(shown("slowdown", mine), "mean step while it saves", detail)


def _flags(results: Results) -> str:
    return "".join(
        f'<p class="flags">Flags to use here: {_codes(record)}</p>' for record in results.of("sweep")
    )


def _codes(record: Record) -> str:
    return " ".join(f"<code>{_text(flag)}</code>" for flag in record["flags"]) or "the defaults"


# The sections


def _stall(page: Page) -> str:
    results = page.results
    panels = [
        page.chart(FIGURES[figure].title, chart, FIGURES[figure].meaning)
        for figure in _BARS
        if (chart := charts.bars_of(results, figure))
    ]
    if not panels:
        return ""
    return f'{_about(results)}<div class="panels">{"".join(panels)}</div>'


def _about(results: Results) -> str:
    record = results.measurements(workload=results.compared)[0]
    several = record["ranks"] > 1
    ranks = f"{record['ranks']} rank{'s' if several else ''}"
    tensors = f", {record['tensors']:,} tensors{' each' if several else ''}" if "tensors" in record else ""
    return (
        f"<p>{_text(record['title'])}: {record['nbytes'] / GIB:.2f} GiB of {ranks}{tensors}. Less is better; "
        "the dotted line is what the hardware gives, percentages are shares of it.</p>"
    )


def _candidates(page: Page) -> str:
    results = page.results
    records = results.measurements(workload=results.compared)
    skipped = _skipped(results, lambda record: record["section"] == "candidates")
    if not records:
        return skipped
    figures = [
        name for name in FIGURES if any(value(results, record, name) is not None for record in records)
    ]
    marks = _marks(results)
    best = {name: _best(results, records, name) for name in figures}
    rows = []
    for record in records:
        warning = "" if record["equal"] else ' <b class="alarm">read back different</b>'
        row = [f"{_text(record['candidate'])}{warning}"]
        for name in figures:
            found, share = value(results, record, name), results.share(record, name)
            text = _text(shown(name, found))
            is_best = found is not None and shown(name, found) == best[name]
            row.append(
                (f"<b>{text}</b>" if is_best else text)
                + marks.get((record["candidate"], name), "")
                + ("" if share is None else f"<small>{_percent(share)}</small>")
            )
        rows.append(row)
    head = [
        "",
        *(
            f'<abbr title="{_text(FIGURES[name].meaning)}">{_text(FIGURES[name].title)}</abbr>'
            for name in figures
        ),
    ]
    names = [record["candidate"] for record in records]
    table = _table(head, rows, ours=names.index(_OURS) if _OURS in names else -1)
    return (
        "<p>Medians; the best of each column is bold. Small figures are shares of the ceiling.</p>"
        f"{table}{_footnotes(results)}{skipped}{_settings(records)}"
    )


def _best(results: Results, records: Sequence[Record], figure: str) -> str:
    """Return the best of a column as it is shown: what looks the same is as good. "" if most are level."""
    found = [each for record in records if (each := value(results, record, figure)) is not None]
    best = shown(figure, min(found))
    num_level = sum(shown(figure, each) == best for each in found)
    return best if 2 * num_level <= len(found) or len(found) == 1 else ""


def _marks(results: Results) -> dict[tuple[str, str], str]:
    numbers = numbered(results)
    return {
        (candidate, figure): f'<sup><a href="#note-{numbers[text]}">{numbers[text]}</a></sup>'
        for candidate, figure, text in notes(results)
    }


def _footnotes(results: Results) -> str:
    items = [f'<li id="note-{number}">{_text(text)}</li>' for text, number in numbered(results).items()]
    return f"<h3>Where a peer is ahead</h3><ol>{''.join(items)}</ol>" if items else ""


def _settings(records: Sequence[Record]) -> str:
    items = [
        f"<li>{_text(record['candidate'])}: {_text(record['note'])}</li>"
        for record in records
        if record.get("note")
    ]
    return (
        f"<details><summary>How each of them is set up</summary><ul>{''.join(items)}</ul></details>"
        if items
        else ""
    )


def _skipped(results: Results, wanted: Callable[[Record], bool]) -> str:
    items = [
        f"<li>{_text(record['name'])}{_of(record)}: {_text(record['reason'])}</li>"
        for record in results.of("skipped")
        if wanted(record)
    ]
    return f"<h3>Skipped</h3><ul>{''.join(items)}</ul>" if items else ""


def _of(record: Record) -> str:
    return "" if record["section"] == "candidates" else f" ({_text(record['section'])})"


def _legend(colours: Iterable[tuple[str, str]]) -> str:
    items = [f'<li><i style="background:{colour}"></i>{_text(name)}</li>' for name, colour in colours]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _workloads(page: Page) -> str:
    results = page.results
    records = results.measurements(candidate=_OURS)
    if not records:
        return ""
    figures = [name for name in _STATES if any(value_of(record, name) is not None for record in records)]
    rows = []
    for record in records:
        name = f"{_text(record['workload'])}<small>{_text(record['title'])}</small>"
        row = [name, f"{record['nbytes'] / GIB:.2f} GiB", f"{record.get('tensors', 0):,}"]
        for name in figures:
            share = results.share(record, name)
            small = "" if share is None else f"<small>{_percent(share)}</small>"
            row.append(f"{_text(shown(name, value_of(record, name)))}{small}")
        rows.append(row)
    table = _table(["", "size", "tensors of a rank", *(_text(FIGURES[name].title) for name in figures)], rows)
    chart = charts.shares(results, records)
    if chart is None:
        return table
    legend = _legend((FIGURES[name].title, colour) for name, colour in charts.SHARES.items())
    return legend + page.chart("Share of the ceiling", chart, "further right is better") + table


def _timeline(page: Page) -> str:
    record = timeline_of(page.results)
    if record is None or not any(record["spans"].values()):
        return ""
    kinds = charts.kinds_of(record)
    chart = page.chart(
        f"{record['candidate']}, {record['workload']}: {record['nbytes'] / GIB:.2f} GiB",
        charts.timeline(record),
        "drag across it to zoom, double click to see all",
    )
    rows = [
        [
            f'<i class="swatch" style="background:{kind.colour}"></i>{_text(kind.name)}',
            f"{kind.count:,}",
            f"{1000 * kind.seconds:.1f} ms",
            f"{kind.nbytes / GIB:.2f} GiB" if kind.nbytes else "",
            f"{kind.nbytes / GIB / kind.seconds:.2f} GiB/s" if kind.nbytes and kind.seconds else "",
        ]
        for kind in kinds
    ]
    table = _table(["", "spans", "time of all", "bytes", "rate of one"], rows)
    return (
        "<p>A row for each rank's own threads, more where spans overlap, and one for each lane that writes. "
        "Parts without gaps say that the target is the limit.</p>"
        f"{_legend((kind.name, kind.colour) for kind in kinds)}{chart}"
        f"<details><summary>What took how long</summary>{table}</details>"
    )


def _sweep(page: Page) -> str:
    return "".join(_tuning(page, record) for record in page.results.of("sweep"))


def _tuning(page: Page, record: Record) -> str:
    ceiling = max((median(samples) for samples in record["ceilings"].values() if samples), default=None)
    panels = []
    for stage, title in _STAGES.items():
        trials = [
            (_setting_name(stage, trial), trial) for trial in record["trials"] if trial["stage"] == stage
        ]
        if len(trials) > 1:
            panels.append(page.chart(title, charts.setting(trials, ceiling, is_number=stage == "workers")))
    reasons = "".join(f"<li>{_text(reason)}</li>" for reason in record["reasons"])
    return (
        f'<p class="flags">Flags: {_codes(record)}</p>'
        f'<ul class="reasons">{reasons}</ul><div class="panels">{"".join(panels)}</div>'
        "<p><small>Rates from the call until the save was committed. Dots are saves, diamonds their medians; "
        "the dotted line is the fastest plain write.</small></p>"
    )


def _setting_name(stage: str, trial: Record) -> str:
    if stage == "workers":
        return str(trial["workers"])
    if stage == "buckets":
        return "auto" if trial["bucket_bytes"] is None else f"{trial['bucket_bytes'] // _MIB} MiB"
    return "O_DIRECT" if trial["direct_io"] else "page cache"


def _training(page: Page) -> str:
    records = list(page.results.of("training"))
    if not records:
        return ""
    until_s, most_s = charts.step_axes(records)
    panels, rows = [], []
    for record in records:
        beyond = charts.beyond(record, most_s)
        steps = f"{len(beyond)} step{'s' if len(beyond) > 1 else ''} above the axis, up to"
        note = f"{steps} {1000 * max(beyond):.0f} ms" if beyond else ""
        panels.append(page.chart(record["candidate"], charts.training(record, until_s, most_s), note))
        rows.append(_training_row(record))
    models = "; ".join(dict.fromkeys(_text(record["model"]) for record in records))
    head = ["", "mean step", "slower", "lost for each save", "p50", "p99", "saves"]
    legend = _legend([("no saves", charts.PEER), ("saves back to back, shaded", charts.OURS)])
    return (
        f"<p>{models}. Every step, all axes alike.</p>"
        f'{legend}<div class="panels wide">{"".join(panels)}</div>{_table(head, rows)}'
    )


def _training_row(record: Record) -> list[str]:
    figures = record["figures"]
    means = [
        mean(
            [step for phase in record["phases"] if phase["saving"] is saving for step in phase["step_s"]]
            or [0.0]
        )
        for saving in (False, True)
    ]
    steps = [
        " → ".join(f"{1000 * seconds:.1f}" for seconds in pair) + " ms"
        for pair in (means, figures["p50_s"], figures["p99_s"])
    ]
    slower = shown_samples("slowdown", figures["slowdown"])
    return [_text(record["candidate"]), steps[0], slower, lost(record), *steps[1:], str(figures["saves"][0])]


def _s3(page: Page) -> str:
    parts = []
    best = page.results.rate("s3_multipart")
    for record in page.results.of("s3"):
        rows = []
        for name, samples in sorted(record["rows"].items(), reverse=True):
            rate = record["nbytes"] / median(samples["seconds"])
            share = _percent(rate / best) if best and name.startswith("save ") else ""
            rows.append([_text(name), f"{rate / GIB:.2f} GiB/s", share])
        parts.append(f"<p>{_text(record['server'])} on this machine, {record['nbytes'] / GIB:.2f} GiB.</p>")
        parts.append(_table(["", "rate", "of the fastest plain upload"], rows))
    return "".join(parts)


def _rounds(page: Page) -> str:
    rows = []
    for record in page.results.of("rounds"):
        found = {name: median(samples) for name, samples in record["figures"].items()}
        rows.append([
            _text(record["candidate"]),
            f"{record['nbytes'] / GIB:.2f} GiB",
            *(
                text
                for kind in ("save", "load")
                for text in (f"{found[f'{kind}_s']:.2f} s", f"{found[f'{kind}_gib_s']:.2f} GiB/s")
            ),
        ])  # fmt: skip
    head = ["", "size", "save", "rate of a rank", "load, cold", "rate of a rank"]
    return f"<p>Medians of the slowest rank.</p>{_table(head, rows)}"


def _ceilings(page: Page) -> str:
    rows = []
    for record in page.results.of("ceiling"):
        samples, unit = record["samples"], _text(record["unit"])
        rows.append([
            f"<code>{_text(record['name'])}</code>",
            _text(record["what"]),
            f"{median(samples):.2f} {unit}" if samples else "-",
            f"{min(samples):.2f} to {max(samples):.2f}" if samples else "-",
            str(len(samples)),
        ])  # fmt: skip
    return _table(["", "what", "median", "least to most", "samples"], rows, texts=[1]) if rows else ""


def _end(page: Page) -> str:
    parts = []
    for record in page.results.of("end"):
        rows = [[_text(name), f"{seconds:.0f} s"] for name, seconds in record["sections"].items()]
        parts.append(
            f"<p>It took {record['seconds']:.0f} s.</p>" + (_table(["section", "time"], rows) if rows else "")
        )
    parts.append(_skipped(page.results, lambda record: record["section"] != "candidates"))
    return "".join(parts) or "<p>It did not come to its end.</p>"


def _reading(page: Page) -> str:
    items = [
        f"<dt>{_text(figure.title)}</dt>"
        f"<dd>{_text(figure.meaning)} {_MORE.get(name, '')} {_BOUNDS[figure.ceiling]}</dd>"
        for name, figure in FIGURES.items()
        if any(value(page.results, record, name) is not None for record in page.results.measurements())
    ]
    return (
        "<p>Of all figures, less is better. Times count from the call, and are those of the slowest rank; "
        "other figures are sums over all ranks and processes. They are medians of several saves, shares the "
        "mean of the middle half, each "
        "candidate in processes of its own, with the settings that its documentation recommends.</p>"
        "<p>100 % is the limit of the hardware. For distckpt the ceiling is measured again beside each "
        "sample, so that a busy machine is busy for both. Such a share may differ a little from what the bar "
        "shows beside the dotted line, which is the ceiling of the whole run; and by as much as samples "
        f'differ it may pass 100 %.</p><dl class="reading">{"".join(items)}</dl>'
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the page of a file of results."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("file", type=Path, help="JSON lines, as benchmarks/run.py writes them")
    parser.add_argument("-o", "--out", type=Path, metavar="PAGE", help="default: beside the file")
    parser.add_argument(
        "--trace", type=Path, metavar="JSON", help="write the timeline too, for ui.perfetto.dev"
    )
    given = parser.parse_args(arguments)
    try:
        results = Results(read_records(given.file))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    out = given.out or given.file.with_suffix(".html")
    write_page(results.records, out)
    print(out)
    if given.trace:
        _write_trace(results, given.trace)


def _write_trace(results: Results, path: Path) -> None:
    from distckpt.trace import write_trace

    record = timeline_of(results)
    if record is None:
        print("no trace: the file has no timeline")
        return
    spans: dict[int, Any] = {int(rank): each for rank, each in record["spans"].items()}
    write_trace(path, spans)
    print(path)


if __name__ == "__main__":
    main()

"""The charts of a page, for plotly.js: what is drawn, and where.

Colours of text and grid are those of the page (`page.css`), which has them by day and by night.
Texts of records are escaped, for plotly.js reads some HTML in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

from results import FIGURES, GIB, Record, Results, shown, value_of

Chart = dict[str, Any]
"""`data` and `layout` for `Plotly.newPlot`, or `timeline` and `layout` for `page.js`."""

OURS, OURS_TOO, PEER = "#3b82f6", "#8fb8f5", "#98a4b3"
CEILING = "#e0632a"
SHARES = {"stall_s": "#3b82f6", "durable_s": "#0f8f7a", "load_s": "#b9770e"}
"""The figures that are shown as shares of their ceilings."""
_BARS_MARGIN = {"l": 8, "r": 4, "t": 20, "b": 40}
_SHADE = "rgba(59,130,246,0.13)"
_BAR_PX, _ROW_PX, _PANEL_PX = 34, 15, 260
_MOST_SHARE = 110.0
_LOG_FROM = 30.0
"""What spans more is shown on a logarithmic axis."""
_KINDS = {
    "state.staged": "#b9a7f2",
    "state.planned": "#6d4bd1",
    "items.resolved": "#5936b8",
    "items.staged": "#8b5cf6",
    "state.copied": "#14a38b",
    "files.written": "#a9b6c6",
    "files.created": "#6f8096",
    "files.completed": "#56657a",
    "parts.pushed": "#7c93b0",
    "part.written": "#3b82f6",
    "lane.synced": "#e0a11b",
    "directory.claimed": "#7fae4a",
    "manifest.written": "#4d9e58",
    "metadata.made": "#2f7d4f",
    "checkpoint.published": "#1f9d3a",
}
_WAITS, _OTHERS = "#e0718a", ("#b08968", "#8a6d9e", "#5f9ea0", "#a0785f")


def is_ours(candidate: str) -> bool:
    return candidate.startswith("distckpt")


def _layout(height: float, **more: Any) -> dict[str, Any]:
    clear = "rgba(0,0,0,0)"
    return {
        "height": height, "autosize": True, "paper_bgcolor": clear, "plot_bgcolor": clear,
        "font": {"family": "system-ui, sans-serif", "size": 12}, "showlegend": False,
        "hovermode": "closest", "dragmode": False, **more,
    }  # fmt: skip


def _label(text: str, **place: Any) -> dict[str, Any]:
    # With a background, so that lines do not run through it.
    return {"text": text, "showarrow": False, "bgcolor": "#fff", "borderpad": 1, **place}


def _axis(**more: Any) -> dict[str, Any]:
    return {"fixedrange": True, "zeroline": False, **more}


def _title(text: str) -> dict[str, Any]:
    return {"text": text, "standoff": 5}


def _row_labels(number: float, left: str, right: str) -> list[dict[str, Any]]:
    """Write above a bar, so that names and figures fit a narrow screen."""
    place = {"yref": "y", "y": number - 0.22, "xref": "paper", "yanchor": "middle"}
    return [_label(left, x=0, xanchor="left", **place), _label(right, x=1, xanchor="right", **place)]


def _ceiling_line(at: float, top: float, bottom: float) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "lines", "x": [at, at], "y": [top, bottom], "hoverinfo": "skip",
        "line": {"color": CEILING, "width": 2, "dash": "dot"},
    }  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """One row of `bars`.

    Attributes:
        name: Whose.
        seconds: How long it is.
        share: Of its ceiling.
    """

    name: str
    seconds: float
    share: float | None


def bars(found: Sequence[Bar], figure: str, ceiling_s: float | None) -> Chart:
    """Compare candidates, the best first."""
    rows = sorted(found, key=lambda bar: bar.seconds)
    values = [bar.seconds for bar in rows] + ([ceiling_s] if ceiling_s else [])
    least, most = min(values), max(values)
    is_log = most / least > _LOG_FROM
    place: Callable[[float], float] = math.log10 if is_log else float
    # On a logarithmic axis a bar begins anywhere.
    begin, end = place(least / 2) if is_log else 0.0, place(1.03 * most)
    labels = []
    for number, bar in enumerate(rows):
        share = "" if bar.share is None else f" · {100 * bar.share:.0f} %"
        texts = [escape(bar.name), shown(figure, bar.seconds) + share]
        labels += _row_labels(number, *(f"<b>{text}</b>" if is_ours(bar.name) else text for text in texts))
    data: list[dict[str, Any]] = [{
        "type": "bar", "orientation": "h", "x": [bar.seconds for bar in rows], "width": 0.36,
        "y": [number + 0.25 for number in range(len(rows))],
        "marker": {"color": [_colour_of(bar.name) for bar in rows]}, "hoverinfo": "text",
        "hovertext": [f"{escape(bar.name)}: {shown(figure, bar.seconds)}" for bar in rows],
    }]  # fmt: skip
    if ceiling_s:
        data.append(_ceiling_line(ceiling_s, -0.6, len(rows) - 0.5))
        at = place(ceiling_s)
        is_left = at - begin < 0.6 * (end - begin)
        labels.append(_label(
            f"ceiling {shown(figure, ceiling_s)}", x=at, xref="x", y=1, yref="paper", yanchor="bottom",
            xanchor="left" if is_left else "right",
        ))  # fmt: skip
    axis = _axis(
        type="log" if is_log else "linear",
        range=[begin, end],
        title=_title("seconds, logarithmic" if is_log else "seconds"),
        nticks=5,
        **({"dtick": 1} if is_log else {}),
    )
    return {
        "data": data,
        "layout": _layout(
            _BAR_PX * len(rows) + 64, xaxis=axis, annotations=labels, margin=_BARS_MARGIN,
            yaxis=_axis(visible=False, range=[len(rows) - 0.5, -0.6]),
        ),
    }  # fmt: skip


def _colour_of(candidate: str) -> str:
    if candidate == "distckpt":
        return OURS
    return OURS_TOO if is_ours(candidate) else PEER


def shares(results: Results, records: Sequence[Record]) -> Chart | None:
    """Show how near each state comes to the limit of the hardware."""
    found = [
        (number, figure, share)
        for number, record in enumerate(records)
        for figure in SHARES
        if (share := results.share(record, figure)) is not None
    ]
    if not found:
        return None
    offsets = dict(zip(SHARES, (0.05, 0.23, 0.41), strict=True))
    data: list[dict[str, Any]] = []
    for figure, colour in SHARES.items():
        mine = [(number, 100 * share) for number, name, share in found if name == figure]
        data.append({
            "type": "bar", "orientation": "h", "x": [share for _, share in mine], "width": 0.15,
            "y": [number + offsets[figure] for number, _ in mine], "marker": {"color": colour},
            "hoverinfo": "text",
            "hovertext": [f"{FIGURES[figure].title}: {share:.1f} %" for _, share in mine],
        })  # fmt: skip
    data.append(_ceiling_line(100.0, -0.6, len(records) - 0.4))
    labels = []
    for number, record in enumerate(records):
        figures = [
            f'<span style="color:{SHARES[figure]}">{100 * share:.0f} %</span>'
            for at, figure, share in found
            if at == number
        ]
        name = escape(f"{record['workload']} · {record['nbytes'] / GIB:.2f} GiB")
        left, right = _row_labels(number, name, " · ".join(figures))
        # Beside the line, not on it.
        labels += [left, {**right, "xref": "x", "x": 99.5}]
    labels.append(_label("ceiling", x=100, xref="x", y=1, yref="paper", yanchor="bottom", xanchor="right"))
    # A share far beyond its ceiling is noise of a tiny state: it must not squeeze all others.
    most = min(_MOST_SHARE, max(100.0, *(100 * share for _, _, share in found)))
    return {
        "data": data,
        "layout": _layout(
            58 * len(records) + 64, annotations=labels, margin={**_BARS_MARGIN, "l": 14, "r": 18},
            xaxis=_axis(range=[0, most * 1.02], ticksuffix=" %", dtick=25),
            yaxis=_axis(visible=False, range=[len(records) - 0.4, -0.6]),
        ),
    }  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """Spans of one name: how many, how long in all, and their bytes."""

    name: str
    colour: str
    count: int
    seconds: float
    nbytes: int


def kinds_of(record: Record) -> list[Kind]:
    """Return what is in a timeline, in the order of the first spans."""
    spans = sorted(_all_spans(record), key=lambda span: float(span["start_s"]))
    others = iter(_OTHERS * len(spans))
    found = []
    for name in dict.fromkeys(span["name"] for span in spans):
        mine = [span for span in spans if span["name"] == name]
        colour = _KINDS.get(name) or (_WAITS if name.endswith(".awaited") else next(others))
        seconds = sum(span["end_s"] - span["start_s"] for span in mine)
        found.append(Kind(name, colour, len(mine), seconds, sum(_nbytes(span) for span in mine)))
    return found


def _all_spans(record: Record) -> Iterator[Record]:
    for spans in record["spans"].values():
        yield from spans


def _nbytes(span: Record) -> int:
    return int(span.get("nbytes") or 0)


def timeline(record: Record) -> Chart:
    """Draw one save: for each rank its own rows, then its lanes."""
    kinds = {kind.name: number for number, kind in enumerate(kinds_of(record))}
    origin_s = min((float(span["start_s"]) for span in _all_spans(record)), default=0.0)
    drawn, rows, names, ticks, bottom = [], [], [], [], 0.0
    for rank, spans in sorted(record["spans"].items(), key=lambda item: int(item[0])):
        lanes = sorted({span["lane"] for span in spans if span["lane"] is not None})
        for lane in (None, *lanes):
            of_lane = _rows([span for span in spans if span["lane"] == lane])
            for number, row in enumerate(of_lane):
                name = f"rank {rank}" if lane is None else f"lane {lane}"
                names.append(name if lane is None else f"rank {rank}, {name}")
                ticks.append("" if number else escape(name))
                rows.append(round(bottom, 1))
                for span in row:
                    start, end = (round(1000 * (span[key] - origin_s), 3) for key in ("start_s", "end_s"))
                    drawn.append([rows[-1], start, end, kinds[span["name"]], _nbytes(span)])
                bottom += 1
        bottom += 0.6
    axis = _axis(
        title=_title("milliseconds since the save began"), fixedrange=False,
        range=[0, max((span[2] for span in drawn), default=1.0)],
    )  # fmt: skip
    places = _axis(
        tickvals=rows, ticktext=ticks, tickfont={"size": 10}, ticklabelstandoff=4, showgrid=False,
        range=[bottom - 0.6, -0.7],
    )  # fmt: skip
    return {
        "timeline": {
            "kinds": [{"name": kind.name, "colour": kind.colour} for kind in kinds_of(record)],
            "spans": drawn, "rows": rows, "labels": names,
        },
        "layout": _layout(
            _ROW_PX * bottom + 64, xaxis=axis, yaxis=places, margin={"l": 54, "r": 10, "t": 4, "b": 44},
            dragmode="zoom",
        ),
    }  # fmt: skip


def _rows(spans: Iterable[Record]) -> list[list[Record]]:
    """Spread spans over as few rows as need be for none to overlap; what is around others comes first."""
    rows: list[list[Record]] = []
    for span in sorted(spans, key=lambda span: (span["start_s"], -span["end_s"])):
        for row in rows:
            if row[-1]["end_s"] <= span["start_s"]:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows


def setting(trials: Sequence[tuple[str, Record]], ceiling: float | None, *, is_number: bool) -> Chart:
    """Show rates by one setting: the median of each, the samples around it, the best plain write.

    Args:
        trials: With what each is called.
        ceiling: GiB/s.
        is_number: Whether a line from one to the next means something.
    """
    names = [escape(name) for name, _ in trials]
    rates = [[trial["nbytes"] / GIB / seconds for seconds in trial["seconds"]] for _, trial in trials]
    most = max([rate for each in rates for rate in each] + [ceiling or 0.0])
    data: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "markers", "marker": {"color": OURS_TOO, "size": 6}, "hoverinfo": "y",
            "x": [name for name, each in zip(names, rates, strict=True) for _ in each],
            "y": [rate for each in rates for rate in each],
        },
        {
            "type": "scatter", "mode": "lines+markers" if is_number else "markers", "hoverinfo": "y",
            "x": names, "y": [median(each) for each in rates], "line": {"color": OURS, "width": 2},
            "marker": {"color": OURS, "size": 9, "symbol": "diamond"},
        },
    ]  # fmt: skip
    layout = _layout(
        _PANEL_PX, margin={"l": 44, "r": 8, "t": 8, "b": 28},
        xaxis=_axis(type="category", range=[-0.5, len(names) - 0.5], ticklabelstandoff=4),
        yaxis=_axis(range=[0, 1.12 * most], title=_title("GiB/s"), nticks=6, hoverformat=".2f"),
    )  # fmt: skip
    if ceiling:
        layout["shapes"] = [{
            "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": ceiling, "y1": ceiling,
            "line": {"color": CEILING, "width": 2, "dash": "dot"},
        }]  # fmt: skip
        layout["annotations"] = [_label(
            f"ceiling {ceiling:.2f} GiB/s", xref="paper", x=0, xanchor="left", y=ceiling, yanchor="bottom",
        )]  # fmt: skip
    return {"data": data, "layout": layout}


def step_axes(records: Sequence[Record]) -> tuple[float, float]:
    """Return seconds and seconds of a step that the axes of all trainings go to.

    One step in a thousand may be beyond: it would flatten all others.
    """
    steps = [sorted(_steps(record)) for record in records]
    return (
        max((sum(each) for each in steps), default=1.0),
        1.15 * max((each[int(0.999 * (len(each) - 1))] for each in steps if each), default=1.0),
    )


def _steps(record: Record) -> list[float]:
    return [float(step) for phase in record["phases"] for step in phase["step_s"]]


def beyond(record: Record, most_s: float) -> list[float]:
    """Return the steps that are above the axis."""
    return [step for step in _steps(record) if step > most_s]


def training(record: Record, until_s: float, most_s: float) -> Chart:
    """Show every step: how long it took, over the time of the training; phases with saves are shaded."""
    data: list[dict[str, Any]] = []
    shapes: list[dict[str, Any]] = []
    at_s = 0.0
    for phase in record["phases"]:
        ends, begin_s = [at_s], at_s
        for step in phase["step_s"]:
            at_s += step
            ends.append(at_s)
        data.append({
            "type": "scatter", "mode": "lines", "hoverinfo": "y", "x": [round(end, 4) for end in ends],
            "y": [round(1000 * step, 3) for step in (*phase["step_s"][:1], *phase["step_s"])],
            # A step is a level line from its begin to its end: one alone is seen as well.
            "line": {"color": OURS if phase["saving"] else PEER, "width": 1, "shape": "vh"},
        })  # fmt: skip
        if phase["saving"]:
            shapes.append({
                "type": "rect", "x0": begin_s, "x1": at_s, "yref": "paper", "y0": 0, "y1": 1,
                "layer": "below", "fillcolor": _SHADE, "line": {"width": 0},
            })  # fmt: skip
    return {
        "data": data,
        "layout": _layout(
            _PANEL_PX, shapes=shapes, margin={"l": 50, "r": 8, "t": 8, "b": 46},
            xaxis=_axis(
                range=[0, until_s], title=_title("seconds of training"), nticks=6, ticklabelstandoff=4
            ),
            yaxis=_axis(range=[0, 1000 * most_s], title=_title("step, ms"), nticks=6, hoverformat=".1f"),
        ),
    }  # fmt: skip


def bars_of(results: Results, figure: str) -> Chart | None:
    """Compare all candidates in one figure."""
    records = results.measurements(workload=results.compared)
    found = [
        Bar(record["candidate"], seconds, results.share(record, figure))
        for record in records
        if (seconds := value_of(record, figure))
    ]
    rate = results.bound(FIGURES[figure].ceiling)
    return bars(found, figure, records[0]["nbytes"] / rate if rate else None) if found else None

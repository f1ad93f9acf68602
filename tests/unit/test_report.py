"""The page of a run: complete, one file, whatever a file of results holds or lacks."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="needs plotly")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GIB = 1 << 30
RANKS, LANES = 4, 8
PEERS = [
    "distckpt, dcp.async_save", "dcp.save", "dcp.async_save", "dcp.async_save, pinned",
    "dcp.async_save, process",
    "torch_checkpointing", "nvidia-resiliency-ext, CUDA IPC", "nvidia-resiliency-ext, shm", "torch.save",
    "safetensors", "TorchSnapshot",
]  # fmt: skip
WORKLOADS = {
    "llama-8b": "Llama 3 8B, FSDP2",
    "llama-70b": "Llama 3 70B, tensor parallel 8, pipeline parallel 4",
    "llama-405b": "Llama 3 405B, tensor parallel 8, pipeline parallel 16",
    "moe": "Qwen3 30B-A3B: 128 experts in 48 layers, expert parallel",
    "diffusion": "FLUX.1, FSDP2, with a moving average",
    "lora": "LoRA of rank 16 on Llama 3 8B, the adapters",
    "small": "30,000 tensors of 16 KiB",
    "giant": "one tensor",
}
Record = dict[str, Any]


def load(name: str) -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


def sample_records() -> list[Record]:
    """A made-up run of 4 GPUs, with every kind of record."""
    rng = random.Random(7)
    nbytes = 16 * GIB
    copy_s, write_s, read_s = nbytes / (198 * GIB), nbytes / (9.6 * GIB), nbytes / (13.1 * GIB)

    def near(value: float, samples: int = 5, spread: float = 0.03) -> list[float]:
        return [value * (1 + rng.uniform(-spread, spread)) for _ in range(samples)]

    def ours(workload: str, scale: float = 1.0, loss: float = 0.0) -> Record:
        return {
            "kind": "measurement", "candidate": "distckpt", "workload": workload,
            "title": WORKLOADS[workload],
            "ranks": RANKS, "nbytes": int(nbytes * scale), "tensors": 1165, "workers": 4, "equal": True,
            "note": "Checkpointer, async_save; no guard: the whole state is copied before save() returns",
            "figures": {
                "returned_s": near(scale * copy_s / (0.99 - loss)), "guarded_s": near(0.0015),
                "first_stall_s": near(scale * copy_s / 0.96, 1),
                "stall_s": near(scale * copy_s / (0.99 - loss)),
                "durable_s": near(scale * write_s / (0.97 - loss)),
                "load_s": near(scale * read_s / (0.9 - loss), 3),
                "first_load_s": [scale * read_s / (0.8 - loss)],
                "host_bytes": [18.2 * GIB * scale], "cpu_s": near(0.42), "bytes_ratio": [1.001],
                "files": [32],
            },
            "of_ceiling": {
                "first_stall_s": [0.96], "stall_s": near(0.985 - loss, spread=0.01),
                "durable_s": near(0.97 - loss, spread=0.01), "load_s": near(0.9 - loss, 3),
                "first_load_s": [0.8 - loss],
            },
        }  # fmt: skip

    def peer(candidate: str) -> Record:
        slower = rng.uniform(1.2, 9)
        figures = {
            "returned_s": near(copy_s * slower), "first_stall_s": near(1.4 * slower, 1),
            "stall_s": near(copy_s * slower), "durable_s": near(write_s * rng.uniform(1.01, 3)),
            "load_s": near(read_s * rng.uniform(0.95, 4), 1),
            "first_load_s": [4 * read_s], "host_bytes": [rng.uniform(8, 40) * GIB],
            "cpu_s": near(rng.uniform(0.3, 3)), "bytes_ratio": [1.0],
            "files": [rng.choice([4, 16, 33, 1201])],
        }  # fmt: skip
        if candidate == "safetensors":
            del figures["load_s"], figures["first_load_s"]
        return {
            **ours("llama-8b"), "candidate": candidate, "figures": figures, "of_ceiling": {},
            "note": f"{candidate}, a thread for each worker, cached plans",
        }  # fmt: skip

    def ceiling(name: str, what: str, rate: float) -> Record:
        return {"kind": "ceiling", "name": name, "what": what, "unit": "GiB/s", "samples": near(rate)}

    return [
        {
            "kind": "run", "schema": 1, "date": "2026-11-29T02:00:00Z", "commit": "f536a15",
            "load_before": 0.1,
            "command": "python benchmarks/run.py --target /mnt/nvme --ranks 4 --minutes 8.5",
            "versions": {"python": "3.11.7", "kernel": "6.8.0", "torch": "2.13.0", "distckpt": "0.1.0"},
            "hardware": {
                "cpu": "INTEL(R) XEON(R) PLATINUM 8580", "cores": 64, "memory_gib": 512.0,
                "gpus": ["NVIDIA H200"] * RANKS,
            },
            "config": {
                "device": "cuda", "ranks": RANKS, "gib_per_rank": 4.0, "workers": 4,
                "target": "ext4 on /dev/nvme0n1",
                "compared": "llama-8b", "minutes": 8.5, "quick": False,
            },
        },
        ceiling("d2h", "pinned copies off all GPUs at once", 198),
        ceiling("d2h_one", "pinned copy off one GPU alone", 52),
        ceiling("memcpy", "copies in host memory", 71),
        ceiling("checksum", "CRC32C, one core of one rank", 21),
        ceiling("write_direct", "plain writes to the target, O_DIRECT, 4 threads for each rank, fsync", 9.6),
        ceiling("write_buffered", "plain writes to the target, buffered, 8 threads, fsync", 6.1),
        ceiling("read", "plain reads from the target, not cached, 8 threads for each rank", 13.1),
        ours("llama-8b"),
        *map(peer, PEERS),
        *(ours(name, rng.uniform(0.01, 1), rng.uniform(0, 0.3)) for name in list(WORKLOADS)[1:]),
        training(rng, "distckpt", 0.008),
        training(rng, "dcp.async_save, pinned", 0.23),
        sweep(near),
        {
            "kind": "timeline", "candidate": "distckpt", "workload": "llama-8b", "nbytes": nbytes,
            "spans": spans(rng),
        },
        {
            "kind": "s3", "server": "SeaweedFS", "nbytes": 2 * GIB,
            "rows": {
                name: {"seconds": near(seconds)}
                for name, seconds in {
                    "save obstore 8": 1.9, "save distckpt 2": 2.0, "save FsspecWriter": 5.5,
                    "load distckpt": 1.2,
                }.items()
            },
        },
        ceiling("s3_multipart", "multipart upload to SeaweedFS on this machine, obstore 8 at once", 1.05),
        {
            "kind": "rounds", "candidate": "distckpt", "workload": "llama-8b", "ranks": RANKS,
            "nbytes": nbytes,
            "figures": {
                "save_s": near(1.8), "save_gib_s": near(2.2), "load_s": near(1.4), "load_gib_s": near(2.9),
            },
            "equal": True,
        },
        *(
            {"kind": "skipped", "section": section, "name": name, "reason": reason}
            for section, name, reason in (
                ("candidates", "DeepSpeed", "its extension for libaio is not compiled"),
                ("candidates", "Orbax", "saves no torch tensors of GPUs or ranks"),
                ("mlperf", "distckpt", "no time for it within 8.5 minutes"),
            )
        ),
        {
            "kind": "end", "seconds": 498.2,
            "sections": {"ceilings": 24.1, "sweep": 43.0, "candidates": 251.3, "workloads": 110.9},
        },
    ]  # fmt: skip


def training(rng: random.Random, candidate: str, slowdown: float) -> Record:
    phases: list[Record] = []
    for turn in range(5):
        saving = turn % 2 == 1
        mean_s = 0.021 * (1 + slowdown * saving)
        steps = [abs(rng.gauss(mean_s, 0.0004)) for _ in range(int(5 / mean_s))]
        if saving:
            # Where a save begins.
            steps[::40] = [step + 20 * slowdown * 0.021 for step in steps[::40]]
        phases.append({"saving": saving, "step_s": steps})
    phases[2]["step_s"][10] = 0.4
    return {
        "kind": "training", "candidate": candidate, "ranks": RANKS, "nbytes": 4 * GIB, "phases": phases,
        "model": "transformer of 1100 M parameters, 20 layers, FSDP2 over 4",
        "figures": {
            "slowdown": [slowdown, 1.1 * slowdown], "p50_s": [0.021, 0.0211], "p99_s": [0.0225, 0.03],
            "saves": [14],
        },
    }  # fmt: skip


def sweep(near: Any) -> Record:
    def trial(stage: str, workers: int, bucket: int | None, direct: bool, rate: float) -> Record:
        return {
            "stage": stage, "workers": workers, "bucket_bytes": bucket, "direct_io": direct,
            "nbytes": 4 * GIB,
            "seconds": near(4 / rate, 4), "write_seconds": near(3.9 / rate, 4), "gib_per_s": rate,
        }  # fmt: skip

    return {
        "kind": "sweep", "path": "/mnt/nvme", "nbytes": 4 * GIB, "seconds": 39.0,
        "trials": [
            trial("workers", 1, None, True, 3.1), trial("workers", 2, None, True, 5.9),
            trial("workers", 4, None, True, 9.1), trial("workers", 8, None, True, 9.2),
            *(
                trial("buckets", 4, None if mib is None else mib << 20, True, rate)
                for mib, rate in ((None, 9.1), (8, 8.2), (32, 9.1), (128, 9.3))
            ),
            trial("direct", 4, None, True, 9.1),
            trial("direct", 4, None, False, 6.2),
        ],
        "ceilings": {"O_DIRECT, 4 files": near(9.5), "page cache, 4 files": near(6.4)},
        "flags": ["--dist-ckpt-workers 4", "--ckpt-direct-io"],
        "reasons": [
            "4 workers: 9.10 GiB/s, nearly as fast as 8 workers: fewer leave memory to the trainer",
            "auto: 9.10 GiB/s, nearly as fast as 128MiB: it is the default",
            "O_DIRECT: 9.10 GiB/s, the fastest (page cache 6.20; noise ±2%)",
        ],
    }  # fmt: skip


def spans(rng: random.Random) -> dict[str, list[Record]]:
    """About 3,000 of them."""
    found: dict[str, list[Record]] = {}
    for rank in range(RANKS):
        begin = 93645.0 + rng.uniform(0, 0.001)
        rows: list[Record] = []

        def add(name: str, start: float, end: float, lane: int | None = None, **more: Any) -> float:
            thread = {} if lane is not None else {"thread": "MainThread"}
            rows.append({"name": name, "lane": lane, "start_s": start, "end_s": end, **thread, **more})  # noqa: B023
            return end

        at = add("state.planned", begin + 0.0001, begin + 0.0011)
        at = add("items.staged", at, at + 0.006)
        add("state.staged", begin, at + 0.0005)
        copied = add("state.copied", at - 0.004, at + 0.08)
        at = add("directory.claimed", at + 0.001, at + 0.004)
        created = at = add("files.created", at, at + 0.003)
        ends = []
        for lane in range(LANES):
            start = at + rng.uniform(0, 0.004)
            for number in range(92):
                size = 32 << 20 if number % 9 else 3 << 20
                start = add(
                    "part.written", start, start + size / GIB / rng.uniform(1.4, 2.2) / 1.2, lane,
                    nbytes=size,
                    file=f"__{rank}_{lane}.distcp", offset=number * size, asked_s=start,
                    ready_s=min(start, copied),
                ) + rng.uniform(0, 0.0004)  # fmt: skip
            ends.append(add("lane.synced", start, start + rng.uniform(0.01, 0.09), lane))
        add("files.written", created - 0.003, max(ends) + 0.001)
        at = add("manifest.written", max(ends) + 0.001, max(ends) + 0.004)
        at = add("ranks.awaited", at, at + 0.02) if rank == 0 else at
        add("checkpoint.published", at, at + 0.005)
        found[str(rank)] = rows
    return found


def spoiled_records() -> list[Record]:
    """The same run, with HTML in every text but those by which records are found."""
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
    names = {record["name"] for record in sample_records() if record["kind"] == "ceiling"} | {"distckpt"}
    kinds = ("kind", "section", "stage", "device", "workload", "compared")

    def spoil(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            end = f" {evil}" if key in ("versions", "sections", "ceilings", "rows") else ""
            return {one + end: spoil(each, one) for one, each in value.items()}
        if isinstance(value, list):
            return [spoil(each, key) for each in value]
        is_text = isinstance(value, str) and key not in kinds and value not in names
        return f"{value} {evil}" if is_text else value

    return [spoil(record) for record in sample_records()]


class Elements(HTMLParser):
    """Every element and all text outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def of(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attributes for name, attributes in self.tags if name == tag)


def page_of(records: list[Record], folder: Path) -> tuple[str, Elements]:
    path = folder / "page.html"
    load("report").write_page(records, path)
    text = path.read_text(encoding="utf-8")
    return text, Elements(text)


def drawn(text: str) -> dict[str, Any]:
    """Return what the charts are drawn from."""
    begin = text.index('id="charts">') + len('id="charts">')
    found: dict[str, Any] = json.loads(text[begin : text.index("</script>", begin)])
    return found


def test_page_tells_everything_and_needs_nothing(tmp_path: Path) -> None:
    text, elements = page_of(sample_records(), tmp_path)
    for said in (
        "98 %", "of the copy ceiling", "of the raw write", "1.5 ms", "until save() returns",
        "4 x NVIDIA H200",
        "--dist-ckpt-workers 4 --ckpt-direct-io", "ext4 on /dev/nvme0n1", "torch 2.13.0", "commit f536a15",
        "DeepSpeed: its extension", "Where a peer is ahead", "1 step above the axis",
        "SeaweedFS on this machine",
        "Ten saves and ten loads", "plain reads from the target", "It took 498 s.", "no time for it within",
        *PEERS, *WORKLOADS.values(), *(figure.title for figure in load("results").FIGURES.values()),
    ):  # fmt: skip
        assert said in elements.text, said
    assert "Not measured" not in elements.text
    # Nothing is fetched: what has an address is a place in the page itself, but for the icon, which is empty.
    addresses = [
        value
        for _, attributes in elements.tags
        for name in ("src", "href")
        if (value := attributes.get(name))
    ]
    assert all(address.startswith(("#", "data:,")) for address in addresses)
    known = [attributes["id"] for _, attributes in elements.tags if attributes.get("id")]
    assert len(known) == len(set(known))
    assert {address[1:] for address in addresses if address.startswith("#")} <= set(known)
    assert text.count("plotly.js v") == 1
    assert len(text) < 7_000_000


def test_charts_hold_what_was_measured(tmp_path: Path) -> None:
    records = sample_records()
    charts = drawn(page_of(records, tmp_path)[0])
    first, stall, durable, states, timeline, *settings, ours, theirs = charts.values()
    for chart in (first, stall, durable):
        bars, *ceilings = chart["data"]
        assert len(bars["x"]) == 1 + len(PEERS)
        assert bars["x"] == sorted(bars["x"])
        # Nothing bounds a first save but what is done in it.
        assert len(ceilings) == (chart is not first)
        assert all(len(set(ceiling["x"])) == 1 for ceiling in ceilings)
    assert durable["data"][1]["x"][0] == pytest.approx(16 / 9.6, rel=0.03)
    assert [len(bars["x"]) for bars in states["data"][:3]] == [len(WORKLOADS)] * 3
    total = sum(
        len(each) for record in records if record["kind"] == "timeline" for each in record["spans"].values()
    )
    assert len(timeline["timeline"]["spans"]) == total > 2950
    assert [len(chart["data"][1]["x"]) for chart in settings] == [4, 4, 2]
    for axis in ("xaxis", "yaxis"):
        assert ours["layout"][axis]["range"] == theirs["layout"][axis]["range"]


def test_spans_of_a_row_do_not_overlap(tmp_path: Path) -> None:
    found = drawn(page_of(sample_records(), tmp_path)[0])
    timeline = next(chart["timeline"] for chart in found.values() if "timeline" in chart)
    ends: dict[float, float] = {}
    for row, start, end, kind, _ in sorted(timeline["spans"]):
        assert start >= ends.get(row, 0.0)
        ends[row] = end
        assert 0 <= kind < len(timeline["kinds"])
    assert timeline["labels"][:2] == ["rank 0", "rank 0"]
    assert "rank 3, lane 7" in timeline["labels"]


def test_axis_is_logarithmic_where_values_are_far_apart(tmp_path: Path) -> None:
    charts = load("charts")
    near = charts.bars([charts.Bar("a", 1.0, None), charts.Bar("b", 29.0, 0.5)], "stall_s", None)
    far = charts.bars([charts.Bar("a", 1.0, None), charts.Bar("b", 31.0, 0.5)], "stall_s", None)
    assert near["layout"]["xaxis"]["type"] == "linear"
    assert far["layout"]["xaxis"]["type"] == "log"
    assert "logarithmic" in far["layout"]["xaxis"]["title"]["text"]


@pytest.mark.parametrize("kind", sorted({record["kind"] for record in sample_records()} - {"run"}))
def test_page_without_a_kind_of_record(kind: str, tmp_path: Path) -> None:
    _, elements = page_of([record for record in sample_records() if record["kind"] != kind], tmp_path)
    sections = {"measurement": 2, "timeline": 1, "sweep": 1, "training": 1, "ceiling": 1}
    assert elements.text.count("Not measured in this run.") == sections.get(kind, 0)


@pytest.mark.parametrize("kind", sorted({record["kind"] for record in sample_records()} - {"run"}))
def test_page_with_one_kind_of_record(kind: str, tmp_path: Path) -> None:
    page_of([record for record in sample_records() if record["kind"] in ("run", kind)], tmp_path)


def test_page_of_a_run_that_measured_nothing(tmp_path: Path) -> None:
    text, elements = page_of(sample_records()[:1], tmp_path)
    assert elements.text.count("Not measured in this run.") == 7
    assert drawn(text) == {}


def test_page_of_one_process_without_gpus(tmp_path: Path) -> None:
    records = sample_records()
    run = records[0]
    del run["command"], run["hardware"]["memory_gib"], run["config"]["gib_per_rank"]
    run["hardware"]["gpus"] = []
    run["config"] |= {"device": "cpu", "ranks": 1}
    for record in records:
        if record["kind"] == "measurement":
            record |= {"ranks": 1, "of_ceiling": {}}
            record.pop("tensors")
    _, elements = page_of(records, tmp_path)
    assert "distckpt on INTEL(R) XEON(R) PLATINUM 8580" in elements.text
    assert "GiB of 1 rank." in elements.text


def test_a_peer_that_is_ahead_is_not_hidden(tmp_path: Path) -> None:
    records = sample_records()
    [ahead] = [record for record in records if record.get("candidate") == "torch.save"]
    [ours, *_] = [record for record in records if record.get("candidate") == "distckpt"]
    ahead["figures"]["first_stall_s"] = [ours["figures"]["first_stall_s"][0] / 2]
    text, elements = page_of(records, tmp_path)
    assert "2.0 x slower first save than the fastest peer" in elements.text
    assert 'class="card behind"' in text


def test_what_was_read_back_different_stands_at_the_top(tmp_path: Path) -> None:
    records = sample_records()
    for record in records:
        if record.get("candidate") == "TorchSnapshot":
            record["equal"] = False
    _, elements = page_of(records, tmp_path)
    assert "Read back different from what was saved: TorchSnapshot" in elements.text


def test_no_text_of_a_record_becomes_html(tmp_path: Path) -> None:
    plain, clean = page_of(sample_records(), tmp_path)
    text, elements = page_of(spoiled_records(), tmp_path)
    assert [tag for tag, _ in elements.tags] == [tag for tag, _ in clean.tags]
    assert text.count("</script>") == plain.count("</script>")
    assert elements.text.count("<script>alert(1)</script>") > 50
    # plotly.js makes HTML of what it is given.
    layouts = json.dumps([chart.get("layout") for chart in drawn(text).values()])
    assert "&lt;script&gt;" in layouts
    assert "<script>" not in layouts
    assert "<img" not in layouts


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = load("report")
    file = tmp_path / "run.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in sample_records()))
    report.main([str(file), "--trace", str(tmp_path / "trace.json")])
    assert capsys.readouterr().out.split() == [str(tmp_path / "run.html"), str(tmp_path / "trace.json")]
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > 2950
    report.main([str(file), "-o", str(tmp_path / "other.html")])
    assert (tmp_path / "other.html").read_text() == (tmp_path / "run.html").read_text()
    (tmp_path / "text").write_text("no results")
    with pytest.raises(SystemExit):
        report.main([str(tmp_path / "text")])
    assert "no file of results" in capsys.readouterr().err

"""What benchmarks work out from samples: shares of ceilings, comparisons of runs, notes, states of models."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
GIB = 1 << 30


@pytest.fixture(autouse=True, scope="module")
def path() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def load(name: str) -> Any:
    return importlib.import_module(name)


def run_record(**config: Any) -> dict[str, Any]:
    return {
        "kind": "run", "schema": 1, "date": "2026-01-01T00:00:00Z", "commit": "abc",
        "versions": {"torch": "2.13.0"}, "hardware": {"cpu": "x", "cores": 2, "gpus": []},
        "config": {"device": "cpu", "compared": "llama-8b", "ranks": 1, "target": "ext4", **config},
    }  # fmt: skip


def measurement(candidate: str, **figures: Any) -> dict[str, Any]:
    workload = "llama-8b"
    shares = figures.pop("of_ceiling", {})
    return {
        "kind": "measurement", "candidate": candidate, "workload": workload, "title": workload, "ranks": 1,
        "nbytes": GIB, "tensors": 3, "note": "", "equal": True, "figures": figures, "of_ceiling": shares,
    }  # fmt: skip


def ceiling(name: str, *samples: float) -> dict[str, Any]:
    return {"kind": "ceiling", "name": name, "what": name, "unit": "GiB/s", "samples": [*samples]}


def test_a_figure_is_a_share_of_what_was_measured_beside_it() -> None:
    results = load("results").Results([
        run_record(), ceiling("memcpy", 8.0), ceiling("write_direct", 1.0), ceiling("write_buffered", 2.0),
        measurement("a", stall_s=[0.25], durable_s=[1.0, 0.5, 3.0], files=[3]),
        measurement("b", durable_s=[1.0], of_ceiling={"durable_s": [0.9, 0.7, 0.8]}),
    ])  # fmt: skip
    a, b = results.measurements()
    assert results.share(b, "durable_s") == pytest.approx(0.8)
    # What the run found at another time says nothing of these samples.
    assert results.share(a, "durable_s") is None
    assert results.bound("write") == 2 * GIB


def test_a_sample_stands_between_two_of_its_ceiling() -> None:
    assert load("cell").shares_of([2.0, 4.0], [1.0, 3.0, 5.0]) == [1.0, 1.0]


def test_a_training_loses_what_its_steps_take_longer_beside_saves() -> None:
    phases = [
        {"saving": number % 2 == 1, "saves": 2 * (number % 2), "step_s": [1.5 if number % 2 else 1.0] * 8}
        for number in range(5)
    ]
    found = load("training").figures_of(phases)
    assert found["slowdown"] == [0.5, 0.5]
    assert found["lost_s"] == [2.0, 2.0]
    assert found["saves"] == [4]


def test_a_share_is_steady_where_a_ceiling_takes_turns_and_one_sample_moves_little() -> None:
    midmean = load("results").midmean
    assert midmean([1.0, 0.7] * 4) == midmean([0.7, 1.0] * 4) == pytest.approx(0.85)
    assert midmean([0.7, 1.0, 0.7, 1.0, 0.7, 1.0, 0.7]) == pytest.approx(0.8)
    assert midmean([0.9, 0.9, 0.9, 0.9, 99.0]) == pytest.approx(0.9)
    assert [midmean([0.5]), midmean([0.5, 0.7]), midmean([0.5, 0.7, 9.0])] == pytest.approx([0.5, 0.6, 0.7])


def test_states_of_disks_that_are_about_as_fast_have_one_size() -> None:
    coarse = load("run")._coarse
    mib = 1 << 20
    assert [coarse(nbytes * mib) for nbytes in (1, 64, 255, 256)] == [64 * mib, 64 * mib, 64 * mib, 256 * mib]
    assert coarse(int(1.2 * GIB)) == coarse(int(3.9 * GIB)) == GIB


def test_a_part_that_is_ended_for_its_time_says_so(tmp_path: Path) -> None:
    script = tmp_path / "part.py"
    script.write_text(
        "import faulthandler, time\nfaulthandler.dump_traceback_later(0.1, exit=True)\ntime.sleep(60)\n"
    )
    slow = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    script.write_text("raise OSError('the disk is gone')\n")
    broken = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    why = load("run").why_it_ended
    assert why(slow.stderr, 7.0) == "it had not ended within 7 s"
    assert why(broken.stderr, 7.0) == "OSError: the disk is gone"
    assert why("", 7.0) == ""


def test_where_a_peer_is_ahead_a_note_says_why() -> None:
    module = load("results")
    results = module.Results([
        run_record(),
        measurement("distckpt", durable_s=[1.0], files=[4], cpu_s=[1.0]),
        measurement("torch.save", durable_s=[0.5], files=[1], cpu_s=[0.995]),
    ])  # fmt: skip
    notes = module.notes(results)
    assert [note[:2] for note in notes] == [("torch.save", "durable_s"), ("torch.save", "files")]
    assert all(note[2] for note in notes)
    tables = load("tables")
    head, [_, row] = tables.comparison(results)
    assert head == ["", "durable", "CPU s per GiB", "files"]
    assert [text.rpartition(" ")[2] for text in row] == ["torch.save", "[1]", "0.99", "[2]"]
    assert list(tables.numbered(results).values()) == [1, 2]


@given(
    st.lists(st.floats(0.5, 2.0), min_size=3, max_size=9),
    st.floats(1.0, 4.0),
    st.sampled_from(["durable_s", "load_s", "host_bytes"]),
)
def test_a_run_is_worse_only_beyond_what_samples_differ_by(
    samples: list[float], factor: float, figure: str
) -> None:
    module, results = load("compare"), load("results")
    runs = [
        results.Results([run_record(), measurement("distckpt", **{figure: [scale * one for one in samples]})])
        for scale in (1.0, factor)
    ]
    [one] = module.compare(*runs)
    assert one.ratio == pytest.approx(1 / factor)
    limit = max(0.1 if len(samples) >= 5 or figure == "host_bytes" else 1.0, 3 * module.spread(samples))
    # At the limit itself, rounding decides.
    assume(abs(factor - 1 - limit) > 1e-9)
    assert one.is_worse == (factor - 1 > limit)
    [back] = module.compare(*reversed(runs))
    assert not back.is_worse


def test_a_ceiling_that_has_changed_makes_nothing_worse() -> None:
    module, results = load("compare"), load("results")
    runs = []
    for seconds, share in ((1.0, 0.9), (1.05, 0.6), (1.5, 0.6)):
        record = measurement("distckpt", durable_s=[seconds] * 5) | {"of_ceiling": {"durable_s": [share] * 5}}
        runs.append(results.Results([run_record(), record]))
    before, same, slower = runs
    assert [one.is_worse for after in (same, slower) for one in module.compare(before, after)] == [
        False,
        True,
    ]


def test_of_states_of_other_sizes_only_shares_of_ceilings_are_compared() -> None:
    module, results = load("compare"), load("results")
    figures = measurement("distckpt", stall_s=[1.0] * 4, load_s=[2.0] * 4, host_bytes=[4])
    figures["of_ceiling"] = {"stall_s": [0.5] * 4}
    larger = figures | {"nbytes": 4 * figures["nbytes"]}
    runs = [results.Results([run_record(), record]) for record in (figures, larger)]
    assert {one.figure for one in module.compare(runs[0], runs[0])} == {"stall_s", "host_bytes", "load_s"}
    assert {one.figure for one in module.compare(*runs)} == {"stall_s"}


def test_what_is_missing_or_was_read_back_different_is_worse(tmp_path: Path) -> None:
    ours = measurement("distckpt", durable_s=[1.0] * 5)
    peer = measurement("torch.save", durable_s=[1.0] * 5)
    slower = {"kind": "training", "candidate": "distckpt", "figures": {"slowdown": [3.0] * 5}}
    as_fast = {"kind": "training", "candidate": "distckpt", "figures": {"slowdown": [0.02] * 5}}
    files = {
        "good": [ours, peer, as_fast],
        "without": [peer, as_fast],
        "different": [{**ours, "equal": False}, peer, as_fast],
        "slower": [ours, peer, slower],
    }
    for name, records in files.items():
        text = "".join(json.dumps(record) + "\n" for record in (run_record(), *records))
        (tmp_path / f"{name}.jsonl").write_text(text)
    for name in files:
        done = subprocess.run(
            [sys.executable, BENCHMARKS / "compare.py", tmp_path / "good.jsonl", tmp_path / f"{name}.jsonl"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == (name != "good"), (name, done.stdout, done.stderr)


def test_compare_command(tmp_path: Path) -> None:
    good, bad, other = (tmp_path / name for name in ("good.jsonl", "bad.jsonl", "other.jsonl"))
    for file, seconds, device in ((good, 1.0, "cpu"), (bad, 1.5, "cpu"), (other, 1.0, "cuda")):
        records = [run_record(device=device), measurement("distckpt", durable_s=[seconds] * 5)]
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "text").write_text("no results")

    def compare(*files: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(BENCHMARKS / "compare.py"), *map(str, files)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert compare(good, good).returncode == 0
    assert compare(bad, good).returncode == 0
    worse = compare(good, bad)
    assert worse.returncode == 1
    assert "worse" in worse.stdout
    for files, said in (((good, other), "cuda"), ((good, tmp_path / "text"), "no file of results")):
        refused = compare(*files)
        assert refused.returncode == 2
        assert said in refused.stderr


@pytest.mark.parametrize("name", ["llama-8b", "llama-70b", "llama-405b", "moe", "diffusion", "giant"])
@settings(max_examples=10, deadline=None)
@given(nbytes=st.integers(64 << 20, 16 << 30))
def test_a_state_is_as_large_as_it_may_be(name: str, nbytes: int) -> None:
    workload = load("workloads").WORKLOADS[name]
    shards = workload.shards_for(nbytes)
    assert workload.bytes_with(shards) <= nbytes
    assert shards == 1 or workload.bytes_with(shards - 1) > nbytes


def test_states_hold_what_trainings_keep() -> None:
    workloads = load("workloads")
    # Source: the number of parameters that the models' own papers and cards give, in billions.
    for name, billions in (("llama-8b", 8.03), ("diffusion", 11.9)):
        pieces = workloads.WORKLOADS[name].pieces(1)
        assert sum(math.prod(piece.shape) for piece in pieces) / 1e9 == pytest.approx(billions, rel=0.02)
    state = workloads.make(workloads.WORKLOADS["llama-8b"], 64 << 20, "cpu", None)
    kinds = {
        name.rpartition(".layers.0.attention.wq")[0] for name in state if "layers.0.attention.wq" in name
    }
    assert kinds == {
        "model", "optimizer.master", "optimizer.exp_avg", "optimizer.exp_avg_sq", "optimizer.step"
    }  # fmt: skip
    assert workloads.size_of(state) <= (64 << 20) + 4 * len(state)
    zeros = workloads.zeros_like(state)
    assert not workloads.equal(state, zeros)
    for fqn, tensor in zeros.items():
        tensor.copy_(state[fqn])
    assert workloads.equal(state, zeros)
    assert isinstance(state["optimizer.step.norm.weight"], torch.Tensor)


def test_the_readme_shows_the_committed_results() -> None:
    tables = load("tables")
    files = tables.committed()
    assert files
    text = (ROOT / "README.md").read_text()
    assert tables.readme(text, tables.markdown(files)) == text
    results = load("results")
    for file in files:
        found = results.Results(results.read_records(file))
        assert all(record["equal"] for record in found.measurements())
        # Every peer that is ahead somewhere has a note.
        unknown = load("reasons").UNKNOWN
        assert all(unknown not in text for _, _, text in results.notes(found))

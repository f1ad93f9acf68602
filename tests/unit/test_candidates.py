"""Every checkpointer that `make bench` compares saves and loads a small state, on one rank and on two.

The ranks are this file, run as a program: each tries all candidates that are installed, one after the other.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OURS = ["distckpt", "distckpt, dcp.async_save"]
STOCK = [
    "dcp.save", "dcp.async_save", "dcp.async_save, pinned", "dcp.async_save, process", "torch.save",
]  # fmt: skip
PEERS = [
    "torch_checkpointing", "nvidia-resiliency-ext, CUDA IPC", "nvidia-resiliency-ext, shm", "Megatron-Core",
    "safetensors", "TorchSnapshot", "DeepSpeed", "s3torchconnector", "Orbax",
]  # fmt: skip
NAMES = [*OURS, *STOCK, *PEERS]
LIMIT_S = 150

Results = dict[str, dict[str, Any]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def results() -> dict[int, list[Results]]:
    """What each rank of a world of one and of a world of two has found; the worlds run at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        running = {
            world: [_start(Path(folder) / str(world), world, rank, port) for rank in range(world)]
            for world in (1, 2)
            for port in [_free_port()]
        }
        deadline = time.monotonic() + LIMIT_S
        found = {}
        try:
            for world, processes in running.items():
                place = Path(folder) / str(world)
                for rank, process in enumerate(processes):
                    status = process.wait(max(0.0, deadline - time.monotonic()))
                    assert status == 0, (place / f"{rank}.err").read_text()
                found[world] = [json.loads((place / f"{rank}.json").read_text()) for rank in range(world)]
        finally:
            for process in (each for processes in running.values() for each in processes):
                process.kill()
                process.wait()
    return found


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
    return port


def _start(folder: Path, world: int, rank: int, port: int) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    of_torchrun = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "PYTHONPATH": BENCHMARKS,
    }  # fmt: skip
    environment = {**os.environ, **{name: str(value) for name, value in of_torchrun.items()}}
    command = [sys.executable, "-W", "ignore", __file__, str(folder)]
    with (folder / f"{rank}.err").open("wb") as errors:
        return subprocess.Popen(command, env=environment, stderr=errors)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_is_loaded(results: dict[int, list[Results]], name: str, world: int) -> None:
    for found in (ranks[name] for ranks in results[world]):
        if "missing" in found:
            assert name in PEERS
            pytest.skip(found["missing"])
        assert "error" not in found, found["error"]
        assert found["differing"] == []
        assert found["left"] == []
        assert found["note"]
        for figures in found["figures"]:
            assert list(figures) == ["returned_s", "staged_s", "total_s"]
            assert 0 < figures["returned_s"] <= figures["staged_s"] <= figures["total_s"]


def test_every_candidate_is_tried(results: dict[int, list[Results]]) -> None:
    for ranks in results.values():
        for found in ranks:
            assert sorted(found) == sorted(NAMES)


def test_what_cannot_run_here_says_why(results: dict[int, list[Results]]) -> None:
    [found] = results[1]
    assert found["s3torchconnector"]["missing"]
    assert found["nvidia-resiliency-ext, shm"]["missing"]
    assert results[2][0]["Orbax"]["missing"]


def _make(world: int, rank: int, *, fill: bool) -> dict[str, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    generator = torch.Generator().manual_seed(rank)
    mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
    state: dict[str, Any] = {"optimizer.step.a.weight": torch.tensor(7.0 if fill else 0.0)}
    for name, shape, dtype, placement in (
        ("model.a.weight", (64, 96), torch.bfloat16, Shard(0)),
        ("optimizer.exp_avg.a.weight", (64, 96), torch.float32, Shard(1)),
        ("model.a.norm", (33,), torch.bfloat16, Replicate()),
    ):
        tensor = torch.zeros(shape, dtype=dtype)
        if fill and isinstance(placement, Replicate):
            tensor.fill_(3.0)
        elif fill:
            tensor.uniform_(-1, 1, generator=generator)
        state[name] = DTensor.from_local(tensor, mesh, [placement], run_check=False) if mesh else tensor
    return state


def _try(name: str, folder: Path, world: int, rank: int) -> dict[str, Any]:
    """Save two times with values that differ, and load both."""
    import torch
    from torch import distributed

    module = import_module("candidates")
    context = module.Context("cpu", rank, world, 2, 1 << 28)
    if reason := module.missing(name, context):
        return {"missing": reason}
    folder.mkdir(exist_ok=True)
    state, loaded = _make(world, rank, fill=True), _make(world, rank, fill=False)
    candidate = module.CANDIDATES[name](context)
    figures, kept = [], []
    paths = [folder / "step-0", folder / "step-1"]
    for path in paths:
        for tensor in module.local_state(state).values():
            tensor += 1
        kept.append({name: tensor.clone() for name, tensor in module.local_state(state).items()})
        figures.append(candidate.save(state, path))
        distributed.barrier()
    differing = []
    for path, expected in zip(paths, kept, strict=True):
        candidate.load(loaded, path)
        found = module.local_state(loaded)
        differing += [each for each, tensor in expected.items() if not torch.equal(tensor, found[each])]
    candidate.close()
    distributed.barrier()
    if rank == 0:
        for path in paths:
            module.remove_tree(path)
    distributed.barrier()
    # But for the file that names the latest.
    left = [str(each) for each in folder.iterdir() if each.name != "latest"]
    return {"figures": figures, "differing": differing, "left": left, "note": candidate.note}


def main() -> None:
    """Try all candidates on this rank."""
    from torch import distributed

    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    folder = Path(sys.argv[1])
    results: Results = {}
    for index, name in enumerate(import_module("candidates").CANDIDATES):
        try:
            results[name] = _try(name, folder / f"candidate-{index}", world, rank)
        except Exception:  # noqa: BLE001 - the test that asks for it shows it
            results[name] = {"error": traceback.format_exc()}
            if world > 1:
                # The others would wait for this one.
                traceback.print_exc()
                os._exit(1)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

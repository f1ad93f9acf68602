"""The training loop on a GPU: generators of the device, incremental saves, and what adapters copy late."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distckpt import Checkpointer
from integration.checkpoints import WAIT_S, assert_same, read_with_torch
from integration.test_checkpointer_cuda import on_host
from integration.test_checkpointer_ranks import step_path

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

MIB = 1 << 20


class Job:
    """A model with dropout and a fused optimizer, all of it on the device."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(512, 512), nn.Dropout(0.3), nn.Linear(512, 8)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "step": 0}

    def train(self, checkpointer: Checkpointer, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = self.model(torch.randn(64, 512, device="cuda")).square().mean()
            loss.backward()
            with checkpointer.guard(self.optimizer):
                self.optimizer.step()
            self.optimizer.zero_grad()
            self.state["step"] += 1
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("ckpt_format", ["torch_dist", "safetensors", "zarr"])
def test_a_loop_goes_on_as_if_nothing_had_been(tmp_path: Path, ckpt_format: str) -> None:
    """Dropout and data are drawn on the device: without its generator they are others."""
    objects = "auto" if ckpt_format == "torch_dist" else "sidecar"
    with Checkpointer(
        tmp_path, async_save=True, load_rng=True, ckpt_format=ckpt_format, ckpt_objects=objects
    ) as checkpointer:
        job = Job(1)
        job.train(checkpointer, 4)
        checkpointer.save(4, job.state)
        expected = job.train(checkpointer, 6)
        checkpointer.wait()
        other = Job(2)
        assert checkpointer.restore(other.state) == 4
        assert other.state["step"] == 4
        assert other.train(checkpointer, 6) == expected
    assert_same(on_host(dict(other.model.state_dict())), on_host(dict(job.model.state_dict())))


def test_another_process_goes_on(tmp_path: Path) -> None:
    """One that has killed itself is gone on with; the device is not initialized there when it restores."""
    runs = [
        subprocess.run(
            [sys.executable, __file__, str(tmp_path), str(die_at)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE, text=True, timeout=100.0, check=False,
        )
        for die_at in (0, 7, 11, 0)
    ]  # fmt: skip
    assert [run.returncode for run in runs] == [0, -9, -9, 0]
    whole = json.loads(runs[0].stdout)
    assert json.loads(runs[3].stdout) == whole[-len(json.loads(runs[3].stdout)) :]
    assert 0 < len(json.loads(runs[3].stdout)) < len(whole)


def train_and_die(root: Path, die_at: int) -> None:
    """Train 16 steps from the newest checkpoint, and die on the way if told to; print the losses."""
    folder = root / ("killed" if any(root.iterdir()) else "whole")
    with Checkpointer(folder, load_rng=True) as checkpointer:
        job = Job(1)
        checkpointer.restore(job.state)
        losses = []
        while job.state["step"] < 16:
            if die_at and job.state["step"] == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            losses += job.train(checkpointer, 1)
            if job.state["step"] % 3 == 0:
                checkpointer.save(job.state["step"], job.state)
    sys.stdout.write(json.dumps(losses))


def test_several_devices_have_a_generator_each(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, load_rng=True) as checkpointer:
        for device in range(torch.cuda.device_count()):
            torch.cuda.set_device(device)
            torch.cuda.manual_seed(100 + device)
        checkpointer.save(0, {"x": torch.ones(1, device="cuda")})
        expected = [torch.rand(4, device=device).tolist() for device in range(torch.cuda.device_count())]
        torch.cuda.manual_seed_all(7)
        checkpointer.restore({"x": torch.ones(1, device="cuda")})
        found = [torch.rand(4, device=device).tolist() for device in range(torch.cuda.device_count())]
    torch.cuda.set_device(0)
    assert found == expected


@pytest.mark.parametrize("is_guarded", [True, False])
def test_frozen_weights_are_written_once(tmp_path: Path, is_guarded: bool) -> None:
    """Also where what changes is copied late, while its checksum is to be taken of what was copied."""
    base = {f"base.{number}": torch.randn(4 * MIB, device="cuda") for number in range(19)}
    adapter = nn.Parameter(torch.zeros(4 * MIB, device="cuda"))
    optimizer = torch.optim.SGD([adapter], lr=1.0)
    state: dict[str, Any] = {**base, "adapter": adapter, "step": 0}
    handles, expected = [], []
    with Checkpointer(
        tmp_path, async_save=True, ckpt_incremental=True, dist_ckpt_workers=2, ckpt_max_in_flight=1
    ) as checkpointer:
        for step in range(6):
            state["step"] = step
            handles.append(checkpointer.save(step, state))
            expected.append({"adapter": float(adapter.detach()[0]), "step": step})
            adapter.grad = torch.ones_like(adapter)
            if is_guarded:
                with checkpointer.guard(optimizer):
                    optimizer.step()
            else:
                handles[-1].staged.result(WAIT_S)
                torch.cuda.synchronize()
                optimizer.step()
        for handle in handles:
            handle.result(WAIT_S)
    whole = handles[0].written_bytes
    assert whole is not None
    assert whole > 20 * 16 * MIB
    for handle in handles[1:]:
        assert handle.written_bytes is not None
        assert 16 * MIB < handle.written_bytes < 0.06 * whole
    frozen = on_host(base)
    for step, told in enumerate(expected):
        found = read_with_torch(step_path(tmp_path, step))
        assert found["step"] == step
        assert set(found["adapter"].tolist()) == {told["adapter"]}
        assert_same({name: found[name] for name in frozen}, frozen)


def test_one_bit_of_a_frozen_weight_is_seen(tmp_path: Path) -> None:
    state = {f"base.{number}": torch.randn(MIB, device="cuda") for number in range(8)}
    with Checkpointer(tmp_path, ckpt_incremental=True) as checkpointer:
        checkpointer.save(0, state)
        version = state["base.3"]._version
        state["base.3"].data.view(torch.int32)[77_777] ^= 1
        assert state["base.3"]._version == version
        handle = checkpointer.save(1, state)
    assert handle.written_bytes is not None
    assert 4 * MIB < handle.written_bytes < 6 * MIB
    assert_same(read_with_torch(step_path(tmp_path, 1)), on_host(state))


@pytest.mark.parametrize("ckpt_format", ["safetensors", "zarr"])
def test_formats_take_tensors_of_a_device(tmp_path: Path, ckpt_format: str) -> None:
    state = {
        "weight": torch.randn(3001, 517, device="cuda"),
        "turned": torch.randn(300, 200, device="cuda").t(),
        "half": torch.randn(1 << 20, device="cuda").to(torch.bfloat16),
        "byte": torch.arange(255, dtype=torch.uint8, device="cuda"),
        "scalar": torch.tensor(3, device="cuda"),
        "host": torch.randn(1000),
    }
    with Checkpointer(
        tmp_path, async_save=True, ckpt_format=ckpt_format, dist_ckpt_workers=2
    ) as checkpointer:
        for step in range(4):
            expected = on_host(state)
            checkpointer.save(step, state).staged.result(WAIT_S)
            torch.cuda.synchronize()
            found = copy.deepcopy({name: torch.zeros_like(value) for name, value in state.items()})
            checkpointer.wait()
            assert checkpointer.restore(found, step) == step
            assert_same(on_host(found), expected)
            for value in state.values():
                value.add_(1)


def test_a_local_tier(tmp_path: Path) -> None:
    job = Job(3)
    with Checkpointer(
        tmp_path / "remote", ckpt_local_dir=str(tmp_path / "local"), async_save=True, load_rng=True
    ) as checkpointer:
        for step in range(1, 5):
            job.train(checkpointer, 2)
            checkpointer.save(step, job.state)
        expected = job.train(checkpointer, 2)
        checkpointer.wait()
    other = Job(4)
    with Checkpointer(tmp_path / "remote", load_rng=True) as checkpointer:
        assert checkpointer.restore(other.state) == 4
        assert other.train(checkpointer, 2) == expected


if __name__ == "__main__":
    train_and_die(Path(sys.argv[1]), int(sys.argv[2]))

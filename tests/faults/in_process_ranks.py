"""Checkpoints of several ranks, without processes for them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from distckpt import StorageWriter


def save_as_ranks(path: Path, parts: list[dict[str, Any]], *, use_collectives: bool = True) -> None:
    """Save what torch's driver would on as many ranks, in one process."""
    with contextlib.ExitStack() as closing:
        writers = [closing.enter_context(StorageWriter(path)) for _ in parts]
        planners = [DefaultSavePlanner() for _ in parts]
        plans = []
        for rank, (writer, planner, part) in enumerate(zip(writers, planners, parts, strict=True)):
            writer.reset(path)
            planner.set_up_planner(part, writer.storage_meta(), is_coordinator=rank == 0)
            writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=use_collectives)
            plans.append(writer.prepare_local_plan(planner.create_local_plan()))
        groups = (
            [range(len(parts))] if use_collectives else [range(rank, rank + 1) for rank in range(len(parts))]
        )
        for group in groups:
            first = group[0]
            final, metadata = planners[first].create_global_plan([plans[rank] for rank in group])
            final = writers[first].prepare_global_plan(final)
            results = [
                writers[rank].write_data(planners[rank].finish_plan(plan), planners[rank]).wait()
                for rank, plan in zip(group, final, strict=True)
            ]
            writers[first].finish(metadata, results)


def parts_of(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the state in two parts, the second with every other tensor."""
    mine = dict(list(state["model"].items())[::2])
    others = {name: value for name, value in state["model"].items() if name not in mine}
    return [{"model": mine, "step": state["step"], "note": state["note"]}, {"model": others}]

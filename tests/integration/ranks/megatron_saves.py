"""What ranks do with Megatron-Core and the adapter; each function runs on every rank of a world."""

from __future__ import annotations

import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue as MegatronQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import distributed

from distckpt.errors import CheckpointError
from distckpt.integrations import megatron
from distckpt.integrations.megatron import AsyncCallsQueue, LoadShardedStrategy, SaveShardedStrategy
from integration.ranks import collectives
from integration.ranks import megatron_states as states

SAVERS = [1, 3]


def folder(root: str, name: str) -> str:
    """Make a directory for a checkpoint, as Megatron does before it saves."""
    path = Path(root, name)
    path.mkdir(exist_ok=True)
    return str(path)


def loaded_bits(path: str, loader: Any, tensor_parallel: int = 1, device: str = "cpu") -> list[Any]:
    """Load into a GPT that was made otherwise; return its bits, and the rest."""
    gpt = states.Gpt(2, tensor_parallel, device)
    state = dist_checkpointing.load(gpt.state(is_loading=True), path, loader)
    return [gpt.bits(), state["iteration"], state["args"], state["rng"].tolist()[:4]]


def never_fork() -> None:
    """Make a fork raise, as multiprocessing does it."""

    def refuse() -> int:
        raise AssertionError("forked")

    os.fork = refuse


def finish(queue: Any) -> int:
    """Finalize what is scheduled, as a training loop does; return how often it was asked in vain."""
    until, polls, pause = time.monotonic() + 20, 0, threading.Event()
    while queue.get_num_unfinalized_calls() and time.monotonic() < until:
        if not queue.maybe_finalize_async_calls():
            polls += 1
            pause.wait(0.005)
    assert queue.get_num_unfinalized_calls() == 0
    return polls


def gpt_in_every_way(root: str) -> dict[str, Any]:
    """Save a GPT of two tensor-parallel ranks and their replicas, and load it; name what was not the same."""
    states.use_cpu()
    never_fork()
    gpt = states.Gpt(1, 2)
    found: dict[str, Any] = {}
    for workers in (1, 4):
        strategy = SaveShardedStrategy(dist_ckpt_workers=workers)
        queues = {"ours": AsyncCallsQueue(), "theirs": MegatronQueue()}
        for way in ("sync", "execute", *queues):
            path = folder(root, f"{way}-{workers}")
            gpt = states.Gpt(1, 2)
            expected = [gpt.bits(), 7, {"name": "gpt"}, torch.get_rng_state().tolist()[:4]]
            request = dist_checkpointing.save(
                gpt.state(7), path, sharded_strategy=strategy, async_sharded_save=way != "sync"
            )
            gpt.scramble()
            if way == "execute":
                request.execute_sync()
            elif way in queues:
                assert request.async_fn is None
                queues[way].schedule_async_request(request)
                finish(queues[way])
            for name, loader in (("stock", None), ("ours", LoadShardedStrategy())):
                found[f"{way} {workers} {name}"] = loaded_bits(path, loader, 2) == expected
        strategy.close()
    return found


def on_a_gpu(root: str) -> dict[str, bool]:
    """Save a GPT that lies on the device, change it at once, and load what was saved; again and again."""
    gpt = states.Gpt(1, device="cuda")
    found = {}
    queue, strategy = AsyncCallsQueue(), SaveShardedStrategy(dist_ckpt_workers=2)
    for step in range(4):
        path = folder(root, f"step-{step}")
        expected = [gpt.bits(), step, {"name": "gpt"}, torch.get_rng_state().tolist()[:4]]
        queue.schedule_async_request(
            dist_checkpointing.save(gpt.state(step), path, sharded_strategy=strategy, async_sharded_save=True)
        )
        with torch.no_grad():
            for tensor in gpt.tensors().values():
                tensor.add_(1.0)
        finish(queue)
        for name, loader in (("stock", None), ("ours", LoadShardedStrategy())):
            found[f"{step} {name}"] = loaded_bits(path, loader, device="cuda") == expected
    strategy.close()
    return found


def theirs_and_ours(root: str) -> dict[str, bool]:
    """Save with Megatron's own strategy, and load that; into another number of ranks, too."""
    states.use_cpu()
    gpt = states.Gpt(1)
    expected = [gpt.bits(), 7, {"name": "gpt"}, torch.get_rng_state().tolist()[:4]]
    path = folder(root, "stock")
    stock = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
    dist_checkpointing.save(gpt.state(7), path, sharded_strategy=stock)
    return {"theirs": loaded_bits(path, LoadShardedStrategy()) == expected}


def hand_made(root: str) -> dict[str, Any]:
    """Save what was made by hand: replicas, a key that comes late, errors."""
    states.use_cpu()
    rank, world = distributed.get_rank(), distributed.get_world_size()
    found: dict[str, Any] = {}

    def load(path: str) -> dict[str, Any]:
        target = states.hand_made(0, rank, world, late="late" in Path(path).name)
        target["own"].data = None
        return states.values(
            dist_checkpointing.load(target, path, LoadShardedStrategy(), validate_access_integrity=False)
        )

    for is_parallel in (True, False):
        strategy = SaveShardedStrategy(
            ckpt_fully_parallel_save=is_parallel, distributed_timeout_minutes=0.3, dist_ckpt_workers=2
        )
        # The structure is cached from the first on; a key comes late, on all ranks and on one alone.
        for step, name in enumerate(("first", "second", "late all", "late again", "less", "one late")):
            path = folder(root, f"{name} {is_parallel}")
            late = "late" in name and (name != "one late" or rank == 2)
            state = states.hand_made(step, rank, world, late=late)
            if name == "one late" and late:
                state["late"].replica_id = 0
            megatron.save(state, path, strategy)
            expected = {**states.values(_plain(states.hand_made(step, rank, world, late="late" in name)))}
            found[f"{name} {is_parallel}"] = load(path) == expected
        for name, change in (("two mains", 0), ("no main", 1)):
            state = states.hand_made(9, rank, world)
            state["copy"].replica_id = change
            try:
                megatron.save(state, folder(root, f"{name} {is_parallel}"), strategy)
                found[f"{name} {is_parallel}"] = "saved"
            except CheckpointError as error:
                found[f"{name} {is_parallel}"] = str(error)
        state, started = states.hand_made(9, rank, world), time.monotonic()
        if rank == 2:
            state["copy"].replica_id, state["copy"].data = 0, None
        for wait in (True, False):
            try:
                request = megatron.save(
                    state, folder(root, f"fails {is_parallel}"), strategy, validate_access_integrity=False,
                    async_sharded_save=not wait,
                )  # fmt: skip
                assert request is not None
                request.execute_sync()
                found[f"fails {is_parallel}"] = "saved"
            except CheckpointError as error:
                text = str(error)
                found[f"fails {is_parallel} {wait}"] = "'copy' has no data" in text or text
        found[f"fails {is_parallel} in time"] = time.monotonic() - started < 20
        path = folder(root, f"after {is_parallel}")
        megatron.save(states.hand_made(9, rank, world), path, strategy)
        found[f"after {is_parallel}"] = load(path) == states.values(_plain(states.hand_made(9, rank, world)))
        strategy.close()
    return found


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    found = {key: getattr(value, "data", value) for key, value in state.items()}
    return {"common": found.pop("common"), **found}


def wrapped(root: str) -> dict[str, Any]:
    """Save within Megatron's wrapper, in both modes, and with what later versions pass."""
    states.use_cpu()
    never_fork()
    rank, world = distributed.get_rank(), distributed.get_world_size()
    found: dict[str, Any] = {}
    strategy = SaveShardedStrategy()
    around = FullyParallelSaveStrategyWrapper(strategy, None, do_cache_distribution=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            dist_checkpointing.save(
                states.hand_made(step, rank, world), folder(root, f"wrapped-{step}"), around
            )
    found["warnings"] = [str(one.message) for one in caught if "FullyParallelSave" in str(one.message)]
    queue = AsyncCallsQueue()
    queue.schedule_async_request(
        dist_checkpointing.save(
            states.hand_made(5, rank, world), folder(root, "wrapped-async"), around, async_sharded_save=True
        )
    )
    finish(queue)
    # Two at once, of different structure.
    for step, late in ((6, False), (7, True)):
        state = states.hand_made(step, rank, world, late=late)
        request = dist_checkpointing.save(
            state, folder(root, f"wrapped-flight-{step}"), strategy, async_sharded_save=True
        )
        queue.schedule_async_request(request)
        state["copy"].data.zero_()
    finish(queue)
    for step, late in ((6, False), (7, True)):
        target = states.hand_made(0, rank, world, late=late)
        target["own"].data = None
        loaded = dist_checkpointing.load(target, f"{root}/wrapped-flight-{step}", LoadShardedStrategy())
        expected = states.values(_plain(states.hand_made(step, rank, world, late=late)))
        found[f"flight {step}"] = states.values(loaded) == expected
    strategy.close()
    return found


def some_save(root: str) -> Any:
    """Two of four ranks save and load; the others never hear of it, and no collective works any more."""
    rank = distributed.get_rank()
    collectives.forbid()
    if rank not in SAVERS:
        return None
    index = SAVERS.index(rank)
    found: dict[str, Any] = {}
    for is_parallel in (True, False):
        strategy = SaveShardedStrategy(
            participants=SAVERS, ckpt_fully_parallel_save=is_parallel, distributed_timeout_minutes=0.2
        )
        for step in range(4):
            path = folder(root, f"some-{is_parallel}-{step}")
            state = states.hand_made(step, index, 2)
            request = megatron.save(state, path, strategy, async_sharded_save=step % 2 == 1)
            if request is not None:
                for entry in state.values():
                    if isinstance(getattr(entry, "data", None), torch.Tensor):
                        entry.data.zero_()
                request.execute_sync()
            target = states.hand_made(7, index, 2)
            target["own"].data = None
            found[f"{is_parallel} {step}"] = states.values(
                dist_checkpointing.load(target, path, LoadShardedStrategy(), validate_access_integrity=False)
            ) == states.values(_plain(states.hand_made(step, index, 2)))
        strategy.close()
    # A rank that does not come is named, in time.
    strategy = SaveShardedStrategy(participants=SAVERS, distributed_timeout_minutes=0.02)
    if index == 0:
        started = time.monotonic()
        try:
            megatron.save(states.hand_made(0, index, 2), folder(root, "alone"), strategy)
        except CheckpointError as error:
            found["alone"] = [type(error).__name__, "rank 3" in str(error), time.monotonic() - started < 20]
        strategy.close()
    return found


def writer_swapped_in(root: str) -> dict[str, Any]:
    """Save with Megatron's own strategy and queue over our writer, and with nvidia-resiliency-ext's."""
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategies

    states.use_cpu()
    never_fork()
    torch_strategies.FileSystemWriterAsync = megatron.FileSystemWriterAsync
    rank, world = distributed.get_rank(), distributed.get_world_size()
    found: dict[str, Any] = {}
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=2, cached_metadata=True)
    queue = MegatronQueue()
    for step in range(5):
        path = folder(root, f"step-{step}")
        # From the third on, the structure is taken from the cache; then a key comes late.
        state = states.hand_made(step, rank, world, late=step == 4)
        try:
            request = dist_checkpointing.save(state, path, strategy, async_sharded_save=True)
            for entry in state.values():
                if isinstance(getattr(entry, "data", None), torch.Tensor):
                    entry.data.zero_()
            queue.schedule_async_request(request)
            finish(queue)
        except BaseException as error:  # noqa: BLE001 - torch's is none
            found[f"error {step}"] = f"{type(error).__name__}: {error}"
            continue
        for name, loader in (("stock", None), ("ours", LoadShardedStrategy())):
            target = states.hand_made(0, rank, world)
            target["own"].data = None
            loaded = states.values(dist_checkpointing.load(target, path, loader))
            found[f"{step} {name}"] = loaded == states.values(_plain(states.hand_made(step, rank, world)))
    found["validated"] = strategy.validated_cache_reuse
    # Without a cache, sync.
    path = folder(root, "late")
    plain = TorchDistSaveShardedStrategy("torch_dist", 1)
    dist_checkpointing.save(states.hand_made(4, rank, world, late=True), path, plain)
    target = states.hand_made(0, rank, world, late=True)
    target["own"].data = None
    loaded = states.values(dist_checkpointing.load(target, path))
    found["late"] = loaded == states.values(_plain(states.hand_made(4, rank, world, late=True)))
    megatron.close_writers()
    return found


def resiliency(root: str) -> dict[str, Any]:
    """Save with the queues of nvidia-resiliency-ext: as later versions of Megatron-Core do, and by itself."""
    from nvidia_resiliency_ext.checkpointing.async_ckpt import core, state_dict_saver
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    states.use_cpu()
    never_fork()
    rank, world = distributed.get_rank(), distributed.get_world_size()
    found: dict[str, Any] = {}
    queue: Any = None
    strategy = SaveShardedStrategy()
    # megatron-core 0.17 to 0.19 call it so, and have a queue of nvidia-resiliency-ext take it.
    sharded, _ = dist_checkpointing.state_dict_utils.save_preprocess(states.hand_made(6, rank, world), False)
    later = strategy.async_save(sharded, folder(root, "later"), "nvrx")
    for persistent in (False, True):
        queue = core.AsyncCallsQueue(persistent=persistent)
        queue.schedule_async_request(later)
        finish(queue)
        later = strategy.async_save(sharded, folder(root, "later-2"), async_strategy="nvrx")
    later.execute_sync()
    strategy.close()
    for number, persistent in enumerate((False, True)):
        queue = core.AsyncCallsQueue(persistent=persistent)
        path = folder(root, f"resiliency-{number}")
        state: dict[str, Any] = {"x": torch.arange(1000.0) + number, "step": number}
        writer = megatron.FileSystemWriterAsync(path, thread_count=2)
        planned = state_dict_saver.save_state_dict_async_plan(state, writer, None, 0)
        function, preload, arguments = writer.get_save_function_and_args()
        finalize = [lambda planned=planned: state_dict_saver.save_state_dict_async_finalize(*planned)]
        queue.schedule_async_request(core.AsyncRequest(function, arguments, finalize, preload_fn=preload))
        state["x"].zero_()
        finish(queue)
        queue.close()
        distributed.barrier()
        target: dict[str, Any] = {"x": torch.zeros(1000), "step": None}
        _load_state_dict(target, FileSystemReader(path), no_dist=True)
        found[f"resiliency {persistent}"] = bool((target["x"] == torch.arange(1000.0) + number).all())
    megatron.close_writers()
    return found

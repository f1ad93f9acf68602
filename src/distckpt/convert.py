"""From one format to another, whatever the size, in bounded memory.

    source, read range by range  ->  items of a plan  ->  the engine's waves  ->  committed, verified

What is read next is read by several threads into the slots of the arena, at its place in a file of the
target; there is no other copy of it.

Invariants:
    * A target that holds a checkpoint, or anything else, is refused before anything is read.
    * What is published was read whole, and is compared with its checksums afterwards.
"""

from __future__ import annotations

import itertools
import math
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distckpt.assembly import assemble
from distckpt.commit import claim, exclusive_of, publish
from distckpt.config import CheckpointConfig
from distckpt.engine import Engine
from distckpt.errors import CheckpointError, CommitError, ConfigError, IntegrityError
from distckpt.formats import Entry, Frame, contiguous_strides
from distckpt.manifest import METADATA, ItemTable, Manifest, plan_digest, read_partials, write_manifest
from distckpt.metadata import pickle_metadata, write_documents
from distckpt.ownership import Shares
from distckpt.planned import places_of
from distckpt.sources import (
    EmptySource,
    ObjectSource,
    TensorSource,
    cast,
    open_source,
    select,
    strip,
    write_torch_file,
)
from distckpt.staging import Item
from distckpt.storage import open_storage
from distckpt.verification import verify

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from distckpt.formats import Format
    from distckpt.storage import Storage

TARGETS = ("torch_dist", "safetensors", "zarr", "torch")
_FILE_BYTES = 5_000_000_000
"""About what a file of safetensors holds, as huggingface_hub has it: not too much for any file system or
upload."""


@dataclass(frozen=True)
class Converted:
    """What was written.

    Attributes:
        path: Where it is.
        format: Its format.
        num_tensors: Tensors in it.
        num_objects: Python objects in it.
        nbytes: Bytes of the tensors.
        seconds: How long it took, verification included.
    """

    path: str
    format: str
    num_tensors: int
    num_objects: int
    nbytes: int
    seconds: float


class _Box:
    """A box of a tensor, as a source of its own.

    Args:
        whole: The tensor.
        offsets: Where the box begins, in elements.
        sizes: Of the box.
    """

    def __init__(self, whole: TensorSource, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        self._whole = whole
        self._itemsize = whole.dtype.itemsize
        strides = contiguous_strides(whole.shape)
        # The dimensions from here on lie in one stretch of the tensor.
        inner = len(sizes)
        while inner > 0 and (inner == len(sizes) or sizes[inner] == whole.shape[inner]):
            inner -= 1
        self._run_bytes = math.prod(sizes[inner:]) * self._itemsize
        base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        outer = [range(0, size * stride, stride) for size, stride in zip(sizes, strides, strict=True)][:inner]
        self._starts = [(base + sum(steps)) * self._itemsize for steps in itertools.product(*outer)]

    def read_into(self, low: int, high: int, target: memoryview) -> None:
        """See `staging.Source`."""
        position = low
        while position < high:
            run, within = divmod(position, self._run_bytes)
            end = min(high, (run + 1) * self._run_bytes)
            start = self._starts[run] + within
            with target[position - low : end - low] as part:
                self._whole.read_into(start, start + end - position, part)
            position = end


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str,
    dtype: torch.dtype | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    strip_prefix: str = "",
    objects: str = "auto",
    workers: int = 1,
    host_memory: str | int = "256MiB",
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    weights_only: bool = True,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Converted:
    """Write what one checkpoint holds as another one, in another format or another dtype, or a part of it.

    Args:
        source: A checkpoint of torch_dist, safetensors or zarr, a file of safetensors, or one of torch.save.
        target: Where to; a directory that does not hold a checkpoint, or a file that does not exist for
            "torch".
        to: "torch_dist", "safetensors", "zarr", or "torch": one file of torch.save.
        dtype: What floating-point tensors become; default: they stay what they are.
        include: Patterns of fqns, as of `fnmatch`; default: all.
        exclude: Patterns of what is left out of these.
        strip_prefix: What is taken from the names, and keys, of those of them that begin with it.
        objects: As `ckpt_objects`: what becomes of Python objects that the target does not hold.
        workers: Processes that write; 1: this one.
        host_memory: Bytes for what is on its way, as `ckpt_host_memory`; beside that, a process needs what
            torch does, and not more for a larger checkpoint.
        source_options: Passed to fsspec.
        target_options: Passed to fsspec.
        weights_only: Whether to read Python objects of the source only if they cannot run code.
        on_progress: Told now and then, on another thread, what is done ("write", "verify"), bytes done and in
            all.

    Returns:
        What was written.

    Raises:
        CheckpointError: There is no complete checkpoint at `source`, or an entry of it cannot be converted;
            the target is not written then.
        CommitError: There is something at `target`.
        ConfigError: A setting, a pattern, a prefix or a URL makes no sense.
        IntegrityError: The source is damaged, or what was written is not what was read.
        StagingError: The target's format does not hold one of the entries.
        WriteError: A storage refuses.
    """
    started = time.monotonic()
    if to not in TARGETS:
        raise ConfigError(f"to: expected one of {', '.join(TARGETS)}, got {to!r}")
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise ConfigError(f"dtype: expected a floating-point dtype of torch, got {dtype!r}")
    tell = on_progress or (lambda what, done, total: None)
    timeout_s = CheckpointConfig().distributed_timeout_minutes * 60
    opened = open_source(source, source_options, timeout_s=timeout_s, weights_only=weights_only)
    found = [entry for entry in opened.entries if to == "torch" or not isinstance(entry, EmptySource)]
    entries = select(found, list(include), list(exclude))
    if dtype is not None:
        entries = [cast(entry, dtype) if isinstance(entry, TensorSource) else entry for entry in entries]
    tree = opened.tree
    if strip_prefix:
        entries, tree = strip(entries, strip_prefix, tree)
    tensors = [entry for entry in entries if isinstance(entry, TensorSource)]
    if to == "torch":
        path = write_torch_file(
            target,
            entries,
            tree=tree,
            tell=lambda done, total: tell("write", done, total),
            weights_only=weights_only,
        )
    else:
        config = CheckpointConfig(
            ckpt_format=to, ckpt_objects=objects, dist_ckpt_workers=workers, ckpt_host_memory=host_memory
        )
        engine = Engine.open(config, is_whole=True)
        try:
            storage = open_storage(target, target_options, timeout_s=engine.timeout_s)
            _write(storage, engine, entries, lambda done, total: tell("write", done, total))
        finally:
            engine.close()
        path = storage.url
        report = verify(storage, on_progress=lambda done, total: tell("verify", done, total))
        if report.status != "complete":
            raise IntegrityError(f"{path} is {report.status} after it was written: {report.findings[:1]}")
    nbytes = sum(entry.nbytes for entry in tensors)
    num_objects = len(entries) - len(tensors)
    return Converted(path, to, len(tensors), num_objects, nbytes, time.monotonic() - started)


def _write(
    storage: Storage,
    engine: Engine,
    entries: Sequence[TensorSource | ObjectSource],
    tell: Callable[[int, int], None],
) -> None:
    items, columns, arrays = _plan(engine, entries)
    if storage.read(METADATA, nbytes=0) is not None:
        raise CommitError(f"not written: {storage.url} holds a checkpoint; convert to another directory")
    storage.prepare()
    save_id = uuid.uuid4().hex
    claimed = claim(storage, save_id, exclusive=exclusive_of(engine.format))
    num_files = max(engine.lanes.count, -(-sum(item.size for item in items) // _FILE_BYTES))
    written = engine.write(
        storage, save_id, 0, items, tell, lambda: claimed.check(storage), num_files=num_files
    )
    if written is None:
        raise CheckpointError(f"nothing to write to {storage.url}: the source has no such entries")
    fqns, chunks, rows = columns
    files, offsets = written.image.places()
    manifest = Manifest(
        save_id=save_id,
        rank=0,
        format=engine.format.name,
        plan=plan_digest(fqns, map(repr, chunks)),
        files=written.files,
        checksums=written.checksums,
        items=ItemTable(fqns, chunks, files, offsets, written.image.sizes, rows),
        shares=Shares()._asdict(),
        headers=written.headers,
        arrays=arrays,
    )
    refs = [write_manifest(storage, manifest)]
    partials = read_partials(storage, save_id, [0], lambda: claimed.check(storage))
    metadata = pickle_metadata(assemble(partials, storage.url, save_id), {})
    table = manifest.items
    places = places_of([(written.names, fqns, chunks, files, table.sizes)])
    documents = engine.format.documents(places, arrays, written.names)
    refs += write_documents(engine, storage, save_id, 0, documents, lambda: claimed.check(storage))
    details = {"world": 1, "format": engine.format.name, "time": time.time()}
    publish(storage, metadata, claimed, refs, details)


def _plan(
    engine: Engine, entries: Sequence[TensorSource | ObjectSource]
) -> tuple[list[Item], tuple[list[str], list[Any], list[Any]], dict[str, list[Any]]]:
    """Return items, what the manifest says of them (fqns, offsets of chunks, entries), and arrays."""
    file_format = engine.format
    items: list[Item] = []
    fqns: list[str] = []
    chunks: list[Any] = []
    rows: list[Any] = []
    arrays: dict[str, list[Any]] = {}
    for entry in entries:
        if isinstance(entry, ObjectSource):
            # First, for it may be refused whatever the format.
            data = entry.read()
            engine.check_aside(entry.origin, "a Python object")
            items.append(Item(Frame(data, b"")))
            fqns.append(entry.fqn)
            chunks.append(None)
            rows.append([None, None, None, None, list(entry.path), None])
            continue
        name = str(entry.dtype).removeprefix("torch.")
        grid, boxes = _boxes(file_format, entry)
        if grid is not None:
            arrays[entry.fqn] = [list(entry.path), list(entry.shape), name, list(grid)]
        for offsets, sizes in boxes:
            items.append(_item(engine, entry, grid, offsets, sizes))
            fqns.append(entry.fqn)
            chunks.append(list(offsets))
            rows.append([list(entry.shape), list(sizes), name, entry.requires_grad, list(entry.path), None])
    return items, (fqns, chunks, rows), arrays


def _boxes(
    file_format: Format, entry: TensorSource
) -> tuple[tuple[int, ...] | None, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Return the grid of a tensor, if there is one, and offsets and sizes of what it is cut into."""
    whole = ((0,) * len(entry.shape), entry.shape)
    if not file_format.has_grid or not file_format.holds(entry.dtype):
        return None, [whole]
    grid = file_format.grid(entry.shape, [whole], entry.dtype.itemsize)
    if 0 in entry.shape:
        return grid, [whole]
    corners = itertools.product(*(range(0, n, step) for n, step in zip(entry.shape, grid, strict=True)))
    return grid, [
        (
            corner,
            tuple(min(step, n - at) for at, n, step in zip(corner, entry.shape, grid, strict=True)),
        )
        for corner in corners
    ]


def _item(
    engine: Engine,
    entry: TensorSource,
    grid: tuple[int, ...] | None,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
) -> Item:
    file_format = engine.format
    nbytes = math.prod(sizes) * entry.dtype.itemsize
    if not file_format.holds(entry.dtype) or (file_format.has_grid and nbytes == 0):
        if nbytes:
            engine.check_aside(entry.origin, f"a tensor of {entry.dtype}")
        strides = contiguous_strides(sizes)
        frame = engine.aside.frame(entry.dtype, sizes, strides)
        return Item(frame, nbytes=nbytes, source=entry if nbytes else None)
    file_format.check_name(entry.fqn)
    own = Entry(entry.fqn, entry.dtype, sizes, offsets, tuple(entry.path), entry.shape, grid)
    if grid is None:
        frame = file_format.frame(entry.dtype, sizes, contiguous_strides(sizes))
    else:
        frame = file_format.frame_chunk(own)
    is_whole = tuple(sizes) == tuple(entry.shape)
    item = Item(frame, nbytes=nbytes, source=entry if is_whole else _Box(entry, offsets, sizes))
    item.entry = own
    return item

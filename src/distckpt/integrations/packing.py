"""Any nested value as a flat state that a storage writer takes, and back without a state to fill.

    {"a": [tensor, 1]}  ->  {"a.0": tensor, "structure": {"a": [("distckpt tensor", "a.0"), 1]}}

Tensors keep names that say where they were. Dictionaries, lists and tuples are walked; whatever else there is
stays in the structure as it is, and is pickled with it, tensors within included.

Threads: no state.
"""

from __future__ import annotations

import contextlib
import io
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from distckpt.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distckpt.reader import StorageReader
    from distckpt.storage import Storage

_METADATA = ".metadata"
_MARK = "distckpt tensor"
_STRUCTURE = "structure"
_WALKED = (dict, OrderedDict, list, tuple)


def pack(value: Any, least_bytes: int = 0) -> dict[str, Any]:
    """Return `value` as tensors by name, and the bytes of its structure.

    Args:
        value: Nested containers of tensors and Python objects.
        least_bytes: A tensor with fewer bytes stays in the structure.
    """
    packed: dict[str, Any] = {}

    def walk(part: Any, path: str) -> Any:
        if (
            type(part) in (torch.Tensor, torch.nn.Parameter)
            and part.layout is torch.strided
            and part.nbytes >= least_bytes
        ):
            name, number = path, 1
            while name in packed or name == _STRUCTURE:
                name, number = f"{path}~{number}", number + 1
            packed[name] = part.detach()
            return (_MARK, name)
        if type(part) not in _WALKED:
            return part
        if isinstance(part, dict):
            return type(part)((key, walk(entry, _join(path, key))) for key, entry in part.items())
        return type(part)(walk(entry, _join(path, number)) for number, entry in enumerate(part))

    structure = walk(value, "")
    buffer = io.BytesIO()
    torch.save(structure, buffer)
    packed[_STRUCTURE] = buffer.getvalue()
    return packed


def unpack(packed: dict[str, Any], *, weights_only: bool) -> Any:
    """Return what `pack` was given.

    Args:
        packed: What it returned.
        weights_only: As for `torch.load`.

    Raises:
        CheckpointError: The structure cannot be read, or only with code of its author; or it names a tensor
            that `packed` does not have.
    """
    try:
        structure = torch.load(io.BytesIO(packed[_STRUCTURE]), map_location="cpu", weights_only=weights_only)
    except Exception as error:
        raise CheckpointError(
            f"what is saved beside the tensors cannot be read with weights_only={weights_only}: {error}"
        ) from error

    def walk(part: Any) -> Any:
        if type(part) not in _WALKED:
            return part
        if isinstance(part, dict):
            return type(part)((key, walk(entry)) for key, entry in part.items())
        if isinstance(part, tuple) and len(part) == 2 and part[0] == _MARK:
            if part[1] not in packed:
                raise CheckpointError(f"the checkpoint has a tensor {part[1]!r}, for which there is no room")
            return packed[part[1]]
        return type(part)(walk(entry) for entry in part)

    return walk(structure)


def room_for(reader: StorageReader, prefix: str = "") -> dict[str, Any]:
    """Return a state for `reader` to fill: all that the checkpoint has, with names below `prefix`.

    Args:
        reader: Of the checkpoint.
        prefix: What the names begin with, which is left out of the keys.
    """
    return {
        name.removeprefix(prefix): torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name.startswith(prefix)
    }


def load_alone(packed: dict[str, Any], reader: StorageReader, prefix: str = "") -> None:
    """Fill what `room_for` returned, by this process alone.

    Args:
        packed: What it returned.
        reader: Of the checkpoint.
        prefix: As there.
    """
    state = {f"{prefix}{name}": value for name, value in packed.items()}
    with plain_errors(f"loading {reader.checkpoint_id}"):
        state_dict_loader.load(state, storage_reader=reader, no_dist=True)
    packed.update((name.removeprefix(prefix), value) for name, value in state.items())


def load_packed(
    reader: StorageReader, *, weights_only: bool, device: torch.device | str | None = None
) -> Any:
    """Return what was packed and saved, read by this process alone.

    Args:
        reader: Of the checkpoint.
        weights_only: As for `torch.load`.
        device: Where the tensors go; default: the CPU.

    Raises:
        CheckpointError: There is no such checkpoint, or it holds something else.
    """
    packed = room_for(reader)
    if _STRUCTURE not in packed:
        raise CheckpointError(f"{reader.checkpoint_id} was not saved by this integration")
    load_alone(packed, reader)
    if device is not None:
        for name, value in packed.items():
            if isinstance(value, torch.Tensor):
                packed[name] = value.to(device)
    return unpack(packed, weights_only=weights_only)


@contextlib.contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """Raise our own error among those that torch has gathered: its own is no `Exception`.

    Args:
        what: What is done, for an error that is not ours.

    Raises:
        CheckpointError: What torch was told.
    """
    try:
        yield
    except CheckpointException as error:
        [cause, *_] = (failure for failure, _ in error.failures.values())
        if isinstance(cause, CheckpointError):
            raise cause from error
        raise CheckpointError(f"{what} failed: {cause}") from error


def remove_checkpoint(storage: Storage) -> None:
    """Remove a checkpoint and its directory: at any instant it is whole, or none.

    Args:
        storage: Opened on it.

    Raises:
        WriteError: The storage refuses.
    """
    storage.delete(_METADATA)
    _remove_below(storage, "")
    storage.remove_directory()


def _remove_below(storage: Storage, folder: str) -> None:
    for name in storage.list(folder):
        path = f"{folder}{name}"
        if name.endswith("/"):
            _remove_below(storage, path)
        storage.delete(path)


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)

"""Read a checkpoint in one process and write a digest of every value in it.

    python docs/examples/read_back.py --reader torch CHECKPOINT DIGESTS.json

With `--reader torch` this is torch's own `FileSystemReader`, in a process where `import distckpt` fails; with
`--reader distckpt` it is `distckpt.StorageReader`. Equal digests mean equal values, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader


def hide_distckpt() -> None:
    """Make `import distckpt` fail in this process, as if the package were not installed.

    Raises:
        RuntimeError: If it could be imported all the same.
    """
    # A name that maps to None counts as a module that does not exist, and so do its submodules.
    sys.modules["distckpt"] = None  # type: ignore[assignment]
    try:
        import distckpt  # noqa: F401
    except ModuleNotFoundError:
        return
    raise RuntimeError("distckpt can still be imported")


def open_reader(name: str, checkpoint: Path) -> StorageReader:
    """Return the reader called `name`, over `checkpoint`."""
    if name == "torch":
        hide_distckpt()
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        return FileSystemReader(checkpoint)
    from distckpt import StorageReader

    return StorageReader(checkpoint)


def read_all(reader: StorageReader) -> dict[str, Any]:
    """Return every entry of the checkpoint by its fqn, tensors whole and on the CPU."""
    entries = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = dict.fromkeys(entries)
    for fqn, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            state[fqn] = torch.empty(entry.size, dtype=entry.properties.dtype)
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def digest(value: Any) -> str:
    """Return dtype, shape and the hash of the bytes of a tensor, or any other value in words."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    content = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{value.dtype} {list(value.shape)} sha256:{hashlib.sha256(content).hexdigest()}"


def main() -> None:
    """Read the checkpoint that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--reader", choices=("torch", "distckpt"), required=True)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("digests", type=Path)
    args = parser.parse_args()
    state = read_all(open_reader(args.reader, args.checkpoint))
    digests = {fqn: digest(value) for fqn, value in sorted(state.items())}
    args.digests.write_text(json.dumps(digests, indent=1))


if __name__ == "__main__":
    main()

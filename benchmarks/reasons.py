"""What is known of why a peer is ahead of distckpt in some figure, and what is not."""

from __future__ import annotations

UNKNOWN = "is ahead of distckpt here, and nobody has looked into why"

_WAITS = ("dcp.save", "torch.save", "safetensors")
"""They write while the trainer waits."""

_KEEPS_NOTHING = (
    "takes its memory anew in each save; distckpt takes in its first save what it keeps for all later ones, "
    "and starts its workers (after `prewarm` the first call took 0.1 s in place of 0.4)"
)
_PREPARES_LESS = (
    "takes less in its first save: distckpt also starts its workers and reserves memory in one piece (after "
    "`prewarm` the first call took 0.1 s in place of 0.4)"
)
_FEWER_FILES = (
    "has fewer files: distckpt has, beside its data, a manifest for each rank, the record of the commit and "
    "the owner of the directory, on which verification and safe crashes rest"
)
_NO_WORKERS = (
    "has no worker processes, of 18 MiB each; where that is not all of the difference, the rest was not "
    "looked into"
)
_NO_COPY = "keeps no copy of the state between saves: the trainer waits until all of it is written"
_BARE = (
    "stores tensors bare; distckpt puts around each what torch.save does, so that stock PyTorch reads it, "
    "and records checksums"
)
_NO_CHECKSUM = (
    "compares no checksums, but without them distckpt loads only a tenth faster: most of the difference was "
    "not looked into"
)
_HANDS_OVER = (
    "returns before it has looked at the state, which may not change until it has copied it: that is its "
    "later stall"
)
_STAGES_LATER = (
    "returns while a thread copies the state, which may not change until that has ended: that is its later "
    "stall"
)
_ONE_STREAM = (
    "writes one stream without checksums, plans or manifests; how much each of these makes was not measured"
)

_REASONS: dict[str, dict[str, str]] = {
    "files": {"": _FEWER_FILES},
    "bytes_ratio": {"": _BARE},
    "host_bytes": {**dict.fromkeys(_WAITS, _NO_COPY), "": _NO_WORKERS},
    "first_stall_s": {
        "dcp.async_save": _KEEPS_NOTHING,
        "dcp.async_save, pinned": _PREPARES_LESS,
        "dcp.async_save, process": _PREPARES_LESS,
        "Orbax": _KEEPS_NOTHING,
        "TorchSnapshot": _KEEPS_NOTHING,
    },
    "returned_s": {
        "torch_checkpointing": _HANDS_OVER,
        "dcp.async_save, pinned": _STAGES_LATER,
        "dcp.async_save, process": _STAGES_LATER,
    },
    "load_s": dict.fromkeys(
        ("torch.save", "safetensors", "torch_checkpointing", "dcp.async_save", "dcp.save"), _NO_CHECKSUM
    ),
    "first_load_s": dict.fromkeys(
        ("torch.save", "safetensors", "torch_checkpointing", "dcp.async_save", "dcp.save"), _NO_CHECKSUM
    ),
    "cpu_s": dict.fromkeys(("torch.save", "safetensors"), _ONE_STREAM),
    "durable_s": dict.fromkeys(("torch.save", "safetensors"), _ONE_STREAM),
}
"""By figure, then by candidate, which may go on after a comma; "" stands for all."""


def reason(candidate: str, figure: str) -> str:
    """Return why a candidate is ahead in a figure, as what follows after "it"; or `UNKNOWN`."""
    known = _REASONS.get(figure, {})
    for name in (candidate, candidate.partition(",")[0], ""):
        if name in known:
            return known[name]
    return UNKNOWN

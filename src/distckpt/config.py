"""The settings of a checkpoint: one frozen dataclass, and the command line flags that follow from it.

Invariants:
    * A `CheckpointConfig` that exists is valid.
    * Every setting that is given has its effect or is refused with the reason; none is ignored.

Torch-free.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import logging
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any

from distckpt.errors import ConfigError, DistckptWarning
from distckpt.priority import parse_cores

__all__ = ["CheckpointConfig", "add_arguments", "local_ranks", "warn_async_workers"]

_logger = logging.getLogger(__name__)

_UNIT_BYTES = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_MIB = 1 << 20
# From the block of a checksum to an extent of the arena, which each of them divides (arena.py, worker.py).
_BUCKET_BYTES = tuple(4 * _MIB << doublings for doublings in range(6))
_BUCKETS = ", ".join(f"{nbytes // _MIB}MiB" for nbytes in _BUCKET_BYTES)
_ONLINE_CORES = Path("/sys/devices/system/cpu/online")
# Source: docs/adr/0001 (a worker started by exec, without torch).
_WORKER_RSS_MIB = 18

_warned_workers: set[int] = set()


def _refuse(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{name}: expected {expected}, got {value!r}")


def _check_count(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refuse(name, value, "an integer of at least 1")
    return value


def _check_optional_count(name: str, value: object) -> int | None:
    return None if value is None else _check_count(name, value)


def _check_directory(name: str, value: object) -> str:
    if isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
        if isinstance(text, str) and "://" not in text:
            return text
    raise _refuse(name, value, "a directory of this machine")


def _check_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, value, "True or False")
    return value


def _check_minutes(name: str, value: object) -> float:
    # Not infinite either, for no wait is without an end; the limit is what the waits of `threading` take.
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= TIMEOUT_MAX / 60:
        return float(value)
    raise _refuse(name, value, "a finite number of minutes greater than 0")


def _one_of(available: Sequence[str]) -> Callable[[str, object], str]:
    """Make the check of a setting that takes one of a few words."""
    expected = " or ".join(filter(None, (", ".join(available[:-1]), available[-1])))

    def check(name: str, value: object) -> str:
        if isinstance(value, str) and value in available:
            return value
        raise _refuse(name, value, expected)

    return check


def _parse_memory(name: str, value: object) -> tuple[int, float]:
    """Return the bytes and the fraction of available memory that `value` asks for; one of them is 0.

    Raises:
        ConfigError: If it asks for neither.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value, 0.0
    if value == "auto":
        return 0, 0.5
    if isinstance(value, str):
        match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-z]*|%)", value.strip().lower())
        if match is not None:
            number, unit = float(match[1]), match[2]
            if unit == "%" and 0 < number <= 100:
                return 0, number / 100
            if unit in _UNIT_BYTES and number * _UNIT_BYTES[unit] >= 1:
                # A whole number is not taken through a float, which would round it above 2**53.
                whole = match[1].isdigit()
                return int(match[1]) * _UNIT_BYTES[unit] if whole else int(number * _UNIT_BYTES[unit]), 0.0
    expected = "'auto', a number of bytes, a size such as '12GiB' or '512MiB', or a percentage such as '50%'"
    raise ConfigError(f"{name}: expected {expected}, got {value!r}")


def _check_memory(name: str, value: object) -> object:
    _parse_memory(name, value)
    return value


def _parse_bucket(name: str, value: object) -> int:
    """Return the bytes that `value` asks for; 0 leaves them to the engine.

    Raises:
        ConfigError: It is no size of a bucket.
    """
    if value == "auto":
        return 0
    nbytes = 0
    with contextlib.suppress(ConfigError):
        nbytes, _ = _parse_memory(name, value)
    if nbytes not in _BUCKET_BYTES:
        raise ConfigError(f"{name}: expected 'auto' or one of {_BUCKETS}, got {value!r}")
    return nbytes


def _check_bucket(name: str, value: object) -> object:
    _parse_bucket(name, value)
    return value


def _check_cores(name: str, value: object) -> str:
    expected = "a list of cores such as '8-15,24'"
    if not isinstance(value, str):
        raise _refuse(name, value, expected)
    try:
        cores = parse_cores(value)
    except ValueError:
        raise _refuse(name, value, expected) from None
    if cores and not hasattr(os, "sched_setaffinity"):
        raise ConfigError(f"{name}: this operating system does not pin processes to cores, got {value!r}")
    missing = sorted(set(cores) - _online_cores())
    if missing:
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise ConfigError(f"{name}: this machine has no core {listed} online, got {value!r}")
    return value.strip()


def _describe(
    text: str,
    check: Callable[[str, object], object],
    parse: Callable[[str], object] = str,
    metavar: str | None = None,
) -> dict[str, Any]:
    """Metadata of a field: its description, its check, and how its flag is read."""
    return {"help": text, "check": check, "parse": parse, "metavar": metavar}


_LOOP = {"loop": True}
"""Metadata of a field that has an effect on `Checkpointer` alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Settings of a checkpoint writer or reader.

    The `help` metadata of each field describes it.

    Raises:
        ConfigError: If a setting is unknown, not available yet, or has a value that cannot be honoured.
    """

    dist_ckpt_workers: int = field(
        default=1,
        metadata=_describe(
            "1: write in the calling process, one file after the other. N > 1: N worker processes per rank",
            _check_count,
            int,
            "N",
        ),
    )
    ckpt_worker_cores: str = field(
        default="",
        metadata=_describe(
            "cores that the worker processes of all ranks of the machine run on, as 8-15,24; empty: wherever "
            "the trainer may run",
            _check_cores,
            metavar="LIST",
        ),
    )
    async_save: bool = field(
        default=False,
        metadata=_describe(
            "return once the state is staged in host memory, and write in the background", _check_bool
        ),
    )
    distributed_timeout_minutes: float = field(
        default=10.0,
        metadata=_describe(
            "longest time, in minutes, that any wait of a save may go without progress before it fails and "
            "names who is missing",
            _check_minutes,
            float,
            "M",
        ),
    )
    ckpt_format: str = field(
        default="torch_dist",
        metadata=_describe(
            "layout of the files: torch_dist, which stock PyTorch reads, safetensors, or zarr (version 3)",
            _one_of(("torch_dist", "safetensors", "zarr")),
            metavar="FORMAT",
        ),
    )
    ckpt_objects: str = field(
        default="auto",
        metadata=_describe(
            "what becomes of Python objects, and of tensors that the format does not hold: refuse, or "
            "sidecar, which puts them into files of torch_dist beside the others. auto: torch_dist holds "
            "all, safetensors refuses, zarr puts aside",
            _one_of(("auto", "refuse", "sidecar")),
            metavar="WHAT",
        ),
    )
    ckpt_host_memory: str | int = field(
        default="auto",
        metadata=_describe(
            "host memory that each rank may use for staging: bytes (a number, or 12GiB, 12G, 512MiB; GB is "
            "10^9), or a percentage of the available memory, shared by the ranks of the machine; auto is 50%",
            _check_memory,
            metavar="SIZE",
        ),
    )
    ckpt_bucket_bytes: str | int = field(
        default="auto",
        metadata=_describe(
            "bytes that a writer takes from host memory at once: 4MiB, 8MiB and so on to 128MiB; on S3 the "
            "bytes of a part. auto: a sixteenth of the host memory, at most 32MiB; on S3 16MiB",
            _check_bucket,
            metavar="SIZE",
        ),
    )
    ckpt_direct_io: bool = field(
        default=True,
        metadata=_describe(
            "write past the page cache (O_DIRECT) on local file systems that have it; "
            "without it, through the page cache",
            _check_bool,
        ),
    )
    ckpt_checksum: str = field(
        default="crc32c",
        metadata=_describe(
            "checksum recorded for what is written: crc32c or none",
            _one_of(("crc32c", "none")),
            metavar="NAME",
        ),
    )
    ckpt_weights_only: bool = field(
        default=True,
        metadata=_describe(
            "load Python objects only if torch.load(weights_only=True) takes them; without it, loading a "
            "checkpoint can run whatever code its author wants",
            _check_bool,
        ),
    )
    ckpt_fully_parallel_save: bool = field(
        default=True,
        metadata=_describe(
            "replicas share the writing, each about an equal part of the bytes; without it the first of them "
            "writes all",
            _check_bool,
        ),
    )
    ckpt_fully_parallel_load: bool = field(
        default=True,
        metadata=_describe(
            "replicas read disjoint parts and exchange them; without it each reads all that it needs",
            _check_bool,
        ),
    )
    ckpt_on_failure: str = field(
        default="raise",
        metadata=_describe(
            "what a failed save does: raise the error to the caller; warn, which logs it, and training goes "
            "on; retry, which writes once more what was staged",
            _one_of(("raise", "warn", "retry")),
            metavar="ACTION",
        )
        | _LOOP,
    )
    ckpt_max_failures: int = field(
        default=3,
        metadata=_describe(
            "how many failures in a row raise all the same: of saves, with --ckpt-on-failure warn; of "
            "attempts at one save, with retry",
            _check_count,
            int,
            "N",
        )
        | _LOOP,
    )
    ckpt_max_in_flight: int = field(
        default=2,
        metadata=_describe(
            "saves that may be under way at once; each holds the state in host memory until it is written",
            _check_count,
            int,
            "N",
        )
        | _LOOP,
    )
    ckpt_when_busy: str = field(
        default="wait",
        metadata=_describe(
            "what a save does when so many are under way, for storage is slower than the training: wait for "
            "one, skip this save, or fail",
            _one_of(("wait", "skip", "fail")),
            metavar="ACTION",
        )
        | _LOOP,
    )
    load_rng: bool = field(
        default=False,
        metadata=_describe(
            "save the state of each rank's random number generators, and restore it, for bit-exact resume",
            _check_bool,
        )
        | _LOOP,
    )
    keep_last: int | None = field(
        default=None,
        metadata=_describe(
            "keep the last N checkpoints; of the others, those that another --keep option asks for. Without "
            "any of these options all are kept",
            _check_optional_count,
            int,
            "N",
        )
        | _LOOP,
    )
    keep_every: int | None = field(
        default=None,
        metadata=_describe("keep checkpoints whose step is a multiple of K", _check_optional_count, int, "K")
        | _LOOP,
    )
    keep_best: int | None = field(
        default=None,
        metadata=_describe(
            "keep the N checkpoints with the best metric, as it was given to save()",
            _check_optional_count,
            int,
            "N",
        )
        | _LOOP,
    )
    keep_best_mode: str = field(
        default="min",
        metadata=_describe(
            "which metric is the best: the least (min) or the greatest (max)",
            _one_of(("min", "max")),
            metavar="MODE",
        )
        | _LOOP,
    )
    keep_hourly: int | None = field(
        default=None,
        metadata=_describe(
            "keep the newest checkpoint of each of the last N hours in which there is one",
            _check_optional_count,
            int,
            "N",
        )
        | _LOOP,
    )
    ckpt_incremental: bool = field(
        default=False,
        metadata=_describe(
            "do not write tensors again whose bytes are those of the last committed checkpoint: its files "
            "are linked, or copied by the store, into the new one",
            _check_bool,
        )
        | _LOOP,
    )
    ckpt_local_dir: str = field(
        default="",
        metadata=_describe(
            "directory on fast storage of this machine that all ranks see, such as NVMe or /dev/shm: "
            "checkpoints are committed there, and uploaded in the background; empty: none",
            _check_directory,
            metavar="DIR",
        )
        | _LOOP,
    )
    ckpt_local_keep: int = field(
        default=2,
        metadata=_describe(
            "how many checkpoints stay in --ckpt-local-dir beside the one that is uploaded; older ones go, "
            "uploaded or not, when saves come faster than uploads",
            _check_count,
            int,
            "N",
        )
        | _LOOP,
    )
    log_level: str = field(
        default="info",
        metadata=_describe(
            "least severe messages that are logged: debug, info, warning or error",
            _one_of(("debug", "info", "warning", "error")),
            metavar="LEVEL",
        ),
    )

    # typing.Self needs Python 3.11.
    def __new__(cls, *args: object, **settings: object) -> CheckpointConfig:  # noqa: PYI034
        """Refuse what `__init__` would answer with a bare TypeError.

        Raises:
            ConfigError: If a setting is given without its name, or is unknown.
        """
        if args:
            raise ConfigError(f"settings are given by name, got {args[0]!r} without one")
        _refuse_unknown(settings)
        # Not super(): with slots=True the decorated class is a copy, which the super() cell does not know.
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for one in fields(self):
            object.__setattr__(self, one.name, one.metadata["check"](one.name, getattr(self, one.name)))
        if self.ckpt_worker_cores and self.dist_ckpt_workers == 1:
            raise ConfigError(
                f"ckpt_worker_cores: only worker processes can be pinned, got {self.ckpt_worker_cores!r}: "
                "dist_ckpt_workers=1 writes in the calling process"
            )
        if self.ckpt_objects != "auto" and self.ckpt_format == "torch_dist":
            raise ConfigError(
                f"ckpt_objects: torch_dist holds objects as they are, got {self.ckpt_objects!r}: leave it out"
            )
        if self.keep_best_mode != "min" and self.keep_best is None:
            raise ConfigError(
                f"keep_best_mode: {self.keep_best_mode!r} has no effect without keep_best: set both"
            )
        if self.ckpt_max_failures != 3 and self.ckpt_on_failure == "raise":
            raise ConfigError(
                f"ckpt_max_failures: {self.ckpt_max_failures} has no effect with ckpt_on_failure='raise', "
                "which raises the first: set that to 'warn' or 'retry'"
            )
        if self.ckpt_local_keep != 2 and not self.ckpt_local_dir:
            raise ConfigError("ckpt_local_keep: has no effect without ckpt_local_dir: set both or neither")
        if self.ckpt_incremental and self.ckpt_format != "torch_dist":
            raise ConfigError(
                f"ckpt_incremental: only files of torch_dist can be shared by checkpoints, got "
                f"ckpt_format={self.ckpt_format!r}"
            )
        budget_bytes, _ = _parse_memory("ckpt_host_memory", self.ckpt_host_memory)
        if budget_bytes:
            self.bucket_bytes(budget_bytes)
        if self.async_save and self.dist_ckpt_workers > 1:
            # From here through __post_init__ and __init__ to the caller.
            warn_async_workers(self.dist_ckpt_workers, stacklevel=4)

    @classmethod
    def build(cls, config: CheckpointConfig | None, settings: Mapping[str, object]) -> CheckpointConfig:
        """Combine a config with settings that override it.

        Args:
            config: Where settings that are not given come from; None means the defaults.
            settings: Values by field name.

        Returns:
            `config` itself if there is nothing to override, else a new config.

        Raises:
            ConfigError: If `config` is something else, or a setting is unknown or invalid.
        """
        if config is None:
            return cls.from_mapping(settings)
        if not isinstance(config, cls):
            raise ConfigError(
                f"config: expected a CheckpointConfig, got {type(config).__name__}; "
                "CheckpointConfig.from_mapping makes one from a mapping"
            )
        if not settings:
            return config
        return cls.from_mapping(asdict(config) | dict(settings))

    @classmethod
    def from_args(cls, namespace: argparse.Namespace) -> CheckpointConfig:
        """Read the settings from parsed arguments, whoever defined the flags.

        Args:
            namespace: Attributes that are not settings are left to the host program. A setting that is absent
                or None keeps its default.

        Returns:
            The config that the arguments describe.

        Raises:
            ConfigError: If an argument has a value that cannot be honoured.
        """
        given = {one.name: getattr(namespace, one.name, None) for one in fields(cls)}
        # Megatron's, which saves the generators unless it is told not to.
        if given["load_rng"] is None and hasattr(namespace, "no_load_rng"):
            given["load_rng"] = not namespace.no_load_rng
        return cls.from_mapping({name: value for name, value in given.items() if value is not None})

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object], *, strict: bool = True) -> CheckpointConfig:
        """Make a config from values by field name, for example from a configuration file.

        Args:
            mapping: Settings that are absent keep their default.
            strict: False: `mapping` is a section of another program, such as `megatron_cfg`. What is no
                setting is left alone, and named in one line of the log; so is what has the name of a setting
                and a value that only that program knows. `logging_level`, a number of `logging`, sets
                `log_level`; what is None keeps its default.

        Returns:
            The config that the mapping describes.

        Raises:
            ConfigError: If a setting is unknown or invalid; if not `strict`, only if it is invalid.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"settings: expected a mapping, got {type(mapping).__name__}")
        if strict:
            _refuse_unknown(mapping)
            settings: dict[str, Any] = dict(mapping)
        else:
            settings = {name: value for name, value in _known_of(mapping).items() if value is not None}
        return cls(**settings)

    def warn_of_loop_settings(self, what: str, *, stacklevel: int) -> None:
        """Warn of settings that are given and that `what`, which is no `Checkpointer`, does nothing with.

        Args:
            what: Name of a class.
            stacklevel: As for `warnings.warn`.
        """
        given = [
            one.name
            for one in fields(self)
            if one.metadata.get("loop") and getattr(self, one.name) != one.default
        ]
        if given:
            message = f"{', '.join(given)}: no effect on a {what}; a Checkpointer honours them"
            _logger.warning("%s", message)
            warnings.warn(message, DistckptWarning, stacklevel=stacklevel)

    @property
    def has_retention(self) -> bool:
        """Whether any checkpoint is ever removed."""
        return any((self.keep_last, self.keep_every, self.keep_best, self.keep_hourly))

    def host_memory_bytes(self, available_bytes: int, local_world_size: int) -> int:
        """Resolve `ckpt_host_memory` to the budget of one rank.

        Args:
            available_bytes: Memory of this machine that is available to all its ranks together.
            local_world_size: Number of ranks on this machine, at least 1.

        Returns:
            Bytes that one rank may use; an absolute setting is returned as it is.
        """
        nbytes, fraction = _parse_memory("ckpt_host_memory", self.ckpt_host_memory)
        return nbytes or int(available_bytes * fraction) // local_world_size

    def bucket_bytes(self, budget_bytes: int | None = None) -> int:
        """Resolve `ckpt_bucket_bytes`.

        Args:
            budget_bytes: What `host_memory_bytes` returned; None: not compared with it.

        Returns:
            The bytes of a bucket; 0 leaves them to the engine.

        Raises:
            ConfigError: The budget does not hold so large ones: two for each lane, and two more.
        """
        nbytes = _parse_bucket("ckpt_bucket_bytes", self.ckpt_bucket_bytes)
        if nbytes == 0 or budget_bytes is None:
            return nbytes
        # The smallest are never refused: a budget that does not hold those either is the engine's business.
        most_bytes = max(_BUCKET_BYTES[0], budget_bytes // (2 * self.dist_ckpt_workers + 2))
        if nbytes > most_bytes:
            fits = max(each for each in _BUCKET_BYTES if each <= most_bytes)
            raise ConfigError(
                f"ckpt_bucket_bytes: a host memory budget of {budget_bytes} bytes (--ckpt-host-memory) with "
                f"dist_ckpt_workers={self.dist_ckpt_workers} holds buckets of at most {fits // _MIB}MiB, "
                f"got {self.ckpt_bucket_bytes!r}"
            )
        return nbytes

    @property
    def puts_objects_aside(self) -> bool:
        """Whether what the format does not hold is written beside its files."""
        if self.ckpt_objects == "auto":
            return self.ckpt_format != "safetensors"
        return self.ckpt_objects == "sidecar"

    def worker_cores(self) -> tuple[int, ...]:
        """Resolve `ckpt_worker_cores`.

        Returns:
            The cores, ascending, that every worker process is to run on; none: those that it inherits.
        """
        return parse_cores(self.ckpt_worker_cores)


def _refuse_unknown(settings: Mapping[str, object]) -> None:
    known = [one.name for one in fields(CheckpointConfig)]
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            if name in _STOCK_NAMES:
                hint = f"of torch's FileSystemWriter; here {_STOCK_NAMES[name]} (docs/migrating.md)"
            elif close:
                hint = f"did you mean {close[0]!r}?"
            else:
                hint = f"available settings: {', '.join(known)}"
            raise ConfigError(f"{name}: unknown setting; {hint}")


# Source: FileSystemWriter and FsspecWriter of torch 2.9 to 2.13.
_STOCK_NAMES = {
    "thread_count": "dist_ckpt_workers says how many processes write",
    "single_file_per_rank": "a rank writes at most one file for each of dist_ckpt_workers: leave it out",
    "sync_files": "files are always synced: leave it out",
    "overwrite": "a save always replaces what is there, in one atomic step: leave it out",
    "cache_staged_state_dict": "the writer stages the state itself, in memory that it keeps: leave it out",
    "per_thread_copy_ahead": "ckpt_host_memory bounds what is copied ahead: leave it out",
    "serialization_format": "ckpt_format='safetensors' chooses the layout",
    "_extensions": "files are written as they are: leave it out",
}
"""What to do about arguments of torch's own writer."""


# Source: the checkpoint options of Megatron-LM and Megatron-Bridge.
_FOREIGN_NAMES = {
    "fully_parallel_save": "ckpt_fully_parallel_save",
    "fully_parallel_load": "ckpt_fully_parallel_load",
    "logging_level": "log_level",
}
"""Names that settings have in sections of other programs."""


def _known_of(section: Mapping[str, object]) -> dict[str, object]:
    """Return the settings in a section of another program, and say in the log what else there is."""
    known = {one.name: one for one in fields(CheckpointConfig)}
    settings: dict[str, object] = {}
    left: list[str] = []
    for foreign, given in section.items():
        name = _FOREIGN_NAMES.get(foreign, foreign)
        # One that has our name beside its own is ours.
        if name not in known or (name != foreign and name in section):
            left.append(str(foreign))
            continue
        value = given
        if foreign == "logging_level" and type(given) is int and given >= 0:
            level = next(level for level in (40, 30, 20, 0) if given >= level)
            value = {40: "error", 30: "warning", 20: "info", 0: "debug"}[level]
        elif name == "ckpt_format" and given in _FOREIGN_FORMATS:
            left.append(f"{foreign}={given}")
            continue
        settings[name] = value
    if left:
        _logger.info("settings of another program, left alone: %s", ", ".join(left))
    return settings


_FOREIGN_FORMATS = ("torch", "torch_dcp", "fsdp_dtensor")
"""Values of Megatron's own `ckpt_format` that are none of ours."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each setting, `--dist-ckpt-workers` for `dist_ckpt_workers` and so on.

    Flags that the parser already has are left as they are; `CheckpointConfig.from_args` reads them too.

    Args:
        parser: Parser of the host program, after its own flags were added.
    """
    # The only way to ask: adding a flag and catching the error would take flags over from a parser that was
    # made with conflict_handler="resolve".
    taken = parser._option_string_actions  # noqa: SLF001
    group = parser.add_argument_group("distckpt")
    for one in fields(CheckpointConfig):
        flag = "--" + one.name.replace("_", "-")
        # A program may have only what switches a setting off.
        if flag in taken or (one.type == "bool" and f"--no-{flag[2:]}" in taken):
            continue
        text = one.metadata["help"].replace("%", "%%")
        if one.default is True:
            group.add_argument(
                flag, dest=one.name, action=argparse.BooleanOptionalAction, default=True, help=text
            )
        elif one.default is False:
            group.add_argument(flag, dest=one.name, action="store_true", default=one.default, help=text)
        else:
            group.add_argument(
                flag,
                dest=one.name,
                type=_flag_type(one),
                default=one.default,
                metavar=one.metadata["metavar"],
                help=text if one.default in ("", None) else f"{text} (default: %(default)s)",
            )


def _flag_type(one: Field[Any]) -> Callable[[str], object]:
    """Make the argparse type of a flag, so that a wrong value is a usage error and not a traceback."""

    def convert(text: str) -> object:
        try:
            value = one.metadata["parse"](text)
        except ValueError:
            value = text
        try:
            return one.metadata["check"](one.name, value)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def warn_async_workers(workers: int, *, stacklevel: int) -> None:
    """Warn what the workers of asynchronous saves cost here; once per process for each number of workers.

    Args:
        workers: Workers of each rank; with one there is nothing to warn about.
        stacklevel: As for `warnings.warn`.
    """
    if workers == 1 or workers in _warned_workers:
        return
    _warned_workers.add(workers)
    ranks, cores = local_ranks(), _cores()
    total = workers * ranks
    message = (
        f"async_save with dist_ckpt_workers={workers} keeps {workers} processes per rank beside the "
        f"training: {workers} x {ranks} local ranks = {total} processes on {cores} cores, about "
        f"{_WORKER_RSS_MIB} MiB of memory each (docs/adr/0001), {total * _WORKER_RSS_MIB} MiB in all; "
        "dist_ckpt_workers=1 needs none"
    )
    _logger.warning("%s", message)
    warnings.warn(message, DistckptWarning, stacklevel=stacklevel)


def local_ranks() -> int:
    """Return the number of ranks that torchrun, mpirun or srun started on this machine; else 1."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value) > 0:
            return int(value)
    return 1


def _online_cores() -> set[int]:
    # Not those of this process: its affinity may be what keeps the trainer off the cores of its workers.
    with contextlib.suppress(OSError, ValueError):
        return set(parse_cores(_ONLINE_CORES.read_text()))
    return set(range(os.cpu_count() or 1))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

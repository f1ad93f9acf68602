"""Measures the themes; each compares with a ceiling or a peer that is measured in the same run."""

from __future__ import annotations

import argparse
import gc
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checksum
import formats
import large
import object_store
import planning
import small
import stall
from machine import ROOT, default_disk, describe, slug
from measurement import Outcome, table

RESULTS = ROOT / "benchmarks" / "results"
THEMES: dict[str, Callable[..., Outcome]] = {
    "small": small.run,
    "large": large.run,
    "async": stall.run,
    "planning": planning.run,
    "checksum": checksum.run,
    "formats": formats.run,
    "convert": formats.run_convert,
    "s3": object_store.run,
    "s3-saves": object_store.run_saves,
    "s3-brief": object_store.run_briefly,
}
ON_DEMAND = {"s3", "s3-saves", "s3-brief", "formats", "convert"}
"""Need servers or other packages, and take up to 20 minutes: measured if they are asked for."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small sizes, one repetition: does it run?")
    parser.add_argument("--only", choices=THEMES, action="append", help="measure this theme only")
    parser.add_argument("--disk", type=Path, metavar="DIR", help="disk to measure; default: the one here")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append one JSON line for each theme")
    parser.add_argument("--record", action="store_true", help=f"append to files in {RESULTS.name}/")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    if arguments.smoke:
        # Looking through all that torch has imported before each sample takes most of the time.
        gc.freeze()
    disk = arguments.disk or default_disk()
    for theme in arguments.only or [theme for theme in THEMES if theme not in ON_DEMAND]:
        record = {"theme": theme, **describe({"smoke": arguments.smoke})}
        outcome = THEMES[theme](disk, smoke=arguments.smoke)
        record["config"] |= outcome.config
        record |= {key: value for key, value in outcome.as_record().items() if key != "config"}
        print(table(outcome), end="\n\n", flush=True)
        if arguments.out is not None:
            append(arguments.out, record)
        if arguments.record:
            append(RESULTS / f"{theme}_{slug()}_{time.strftime('%Y%m')}.jsonl", record)


def append(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()

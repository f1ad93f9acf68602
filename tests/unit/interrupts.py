"""An interrupt at an exact place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def is_interrupted(call: Callable[[], object], at: int, *functions: Callable[..., Any]) -> bool:
    """Run `call`, with an interrupt before the line number `at`, from 0, that it comes to in `functions`.

    Returns:
        Whether it came as far as that.
    """
    codes = [function.__code__ for function in functions]
    num_left = at

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal num_left
        if frame.f_code not in codes:
            return None
        if event == "line":
            num_left -= 1
            if num_left < 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False

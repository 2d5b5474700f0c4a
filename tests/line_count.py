"""Counts the lines of Python that a call runs in one module: a measure of work that no load on the machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(call: Callable[[], object], *modules: str) -> int:
    """Run `call`; returns how many lines it ran in the modules, a line of a loop or a comprehension as often as it ran."""
    count = 0

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_globals.get("__name__") not in modules:
            return None
        frame.f_trace_opcodes = False
        return on_line(frame, "line", argument)

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        call()
    finally:
        sys.settrace(before)
    return count

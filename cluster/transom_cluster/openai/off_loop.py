"""Runs long work on bodies on one thread, away from the event loop that carries every client's stream.

There is one such thread in a process, since Python code on threads takes turns with the event loop: with N threads at work the loop
waits for N turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

THREAD_NAME = "transom-bodies"
_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=THREAD_NAME)


async def run_off_loop(function: Callable[[], Result], *, if_long: bool = True) -> Result:
    """Call `function` on the thread for bodies, or at once unless `if_long`."""
    if not if_long:
        return function()
    return await asyncio.get_running_loop().run_in_executor(_thread, function)

"""Traffic that shows everything a cache can do: conversations that come back, and more of them than the pool can hold."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import httpx

NUM_CLIENTS = 20
NUM_CONVERSATIONS = 12
NUM_TURNS = 120  # after which all conversations are new
PAUSE_S = 0.2  # of a client after each answer: there is pressure enough, and others need the cores as well
PERIOD_S = 1.0


def body(conversation: int, turn: int) -> dict[str, Any]:
    """A conversation's prompt grows from turn to turn, until a new one takes its place; every third request streams, every
    fourth draws lots."""
    name = f"{conversation} of round {turn // NUM_TURNS}"
    told = " ".join(f"Turn {i} of conversation {name} says so." for i in range(turn % 4 + 1))
    return {
        "prompt": f"All of them begin alike. {told}",
        "max_tokens": 24 + 8 * (turn % 3),
        "ignore_eos": True,
        "temperature": float(turn % 4 == 3),
        "seed": turn,
        "stream": turn % 3 == 0,
    }


async def press(url: str, until: Callable[[], bool], *, give_up_s: float = 240.0) -> int:
    """Clients that ask again and again until `until()` holds or time is up; how many answers came, all of them whole.

    `until` is called off the event loop, one call at a time.
    """
    turns = itertools.count()
    done = asyncio.Event()
    async with httpx.AsyncClient(base_url=url, timeout=give_up_s) as client:

        async def ask() -> int:
            answered = 0
            while not done.is_set():
                turn = next(turns)
                reply = await client.post("/v1/completions", json=body(turn * 7 % NUM_CONVERSATIONS, turn))
                assert reply.status_code == 200, reply.text
                answered += 1
                await asyncio.sleep(PAUSE_S)
            return answered

        async def watch() -> None:
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(give_up_s):
                        while not await asyncio.to_thread(until):
                            await asyncio.sleep(PERIOD_S)
            finally:
                done.set()

        watching = asyncio.create_task(watch())
        counts = await asyncio.gather(*(ask() for _ in range(NUM_CLIENTS)))
        await watching
    return sum(counts)

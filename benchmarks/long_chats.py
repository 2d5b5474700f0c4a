"""How long a router's other streams stand still while it renders and tokenises a long chat.

    python benchmarks/long_chats.py [--model smollm2] [--tokens 128000] [--turns 40] [--rounds 7] [--chats 1]

An event loop looks at the clock every millisecond, as if it passed tokens on. Meanwhile the chat becomes a prompt on other threads,
in three ways:

- now: the router's own code, `openai.prompts.chat_prompt`;
- encode: the library's `encode`, which holds Python's global lock, with ids and offsets converted at each turn, as it was before;
- idle: no chat, only as much time. What the machine's other work adds to the figures.

A round measures all three. Printed are, as median and range over the rounds, the longest time in which the loop did not run;
the longest in which it did not run while this process used as much CPU time (the own part: without what the machine's other
work adds); the time until the prompt is there; and the CPU time that it takes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from transom_cluster.openai.prompt.prompts import chat_prompt
from transom_cluster.openai.request.message_fields import ChatMessage
from transom_core.model_files.resolve import resolve_model
from transom_core.text.template_renderer import shared_renderer
from transom_core.text.tokenizer import Tokenizer

TICK_S = 0.001
IDLE_S = 0.3
DOCS = Path(__file__).resolve().parent.parent / "docs"


class Round(NamedTuple):
    """One measurement, in seconds."""

    stall_s: float
    own_stall_s: float
    total_s: float
    cpu_s: float


async def measure(make: Callable[[], Awaitable[Any]], num_chats: int) -> Round:
    """Run `make` as often as there are chats, at once, beside a loop that looks at the clock."""
    stall_s, own_stall_s, done = 0.0, 0.0, False

    async def tick() -> None:
        nonlocal stall_s, own_stall_s
        before_s, cpu_before_s = time.perf_counter(), time.process_time()
        while not done:
            await asyncio.sleep(TICK_S)
            now_s, cpu_now_s = time.perf_counter(), time.process_time()
            late_s = now_s - before_s - TICK_S
            stall_s = max(stall_s, late_s)
            own_stall_s = max(own_stall_s, min(late_s, cpu_now_s - cpu_before_s))
            before_s, cpu_before_s = now_s, cpu_now_s

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(10 * TICK_S)
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*(make() for _ in range(num_chats)))
    total_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
    done = True
    await ticking
    return Round(stall_s, own_stall_s, total_s, cpu_s)


def long_chat(tokenizer: Tokenizer, *, num_tokens: int, num_turns: int) -> list[ChatMessage]:
    """A chat of about so many tokens: words of this project's documents in random order."""
    words = [word for path in sorted(DOCS.glob("*.md")) for word in path.read_text().split()]
    rng = random.Random(1)
    sample = " ".join(rng.choices(words, k=10_000))
    num_words = int(num_tokens * 10_000 / len(tokenizer.encode(sample)) / num_turns)
    roles = ("user", "assistant")
    return [
        ChatMessage(role=roles[turn % 2], content=" ".join(rng.choices(words, k=num_words)))
        for turn in range(num_turns)
    ]


def with_encode(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Ids and turn boundaries by `encode` and the offsets of all tokens, at each turn."""
    template = tokenizer._choose_template(None)
    chat = shared_renderer().render(template, messages, add_generation_prompt=True)
    encoding = tokenizer._rust.encode(chat.text, add_special_tokens=False)
    boundaries = []
    for end in chat.turn_ends:
        ids, offsets = encoding.ids, encoding.offsets
        boundaries.append(bisect_left(offsets, end, key=lambda span: span[0]))
        assert len(ids) >= boundaries[-1]
    return encoding.ids, boundaries


async def run(options: argparse.Namespace) -> None:
    """Measure in turns, and print."""
    tokenizer = Tokenizer.load(resolve_model(options.model))
    messages = long_chat(tokenizer, num_tokens=options.tokens, num_turns=options.turns)
    plain = [{"role": message.role, "content": message.content} for message in messages]
    prompt = await chat_prompt(tokenizer, messages)
    ids, boundaries = with_encode(tokenizer, plain)
    assert (list(prompt.token_ids), list(prompt.turn_boundaries)) == (ids, boundaries)
    ways: dict[str, Callable[[], Awaitable[Any]]] = {
        "now": lambda: chat_prompt(tokenizer, messages),
        "encode": lambda: asyncio.to_thread(with_encode, tokenizer, plain),
        "idle": lambda: asyncio.sleep(IDLE_S),
    }
    rounds: dict[str, list[Round]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, make in ways.items():
            rounds[name].append(await measure(make, options.chats))
    print(f"{len(ids)} tokens, {options.turns} turns, {options.chats} at once, {options.rounds} rounds; milliseconds")
    print(f"{'':8}{'loop stood still':>26}{'own part':>26}{'until the prompt':>20}{'CPU':>10}")
    for name, found in rounds.items():
        stall, own_stall, total, cpu = ([1e3 * value for value in column] for column in zip(*found, strict=True))
        medians = f"{statistics.median(total):>20.0f}{statistics.median(cpu):>10.0f}"
        print(f"{name:8}{spread(stall):>26}{spread(own_stall):>26}{medians}")


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=128_000)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chats", type=int, default=1)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()

"""Attention of prompts with a window on CPUs, beside full attention's: one layer of a prompt in chunks, in turns in one process.

    python benchmarks/cpu_policy_prompts.py --tokens 2000 --window 512

Prints milliseconds of one layer (the least of the processor's time over the turns, one thread) and the window's time divided by
full attention's. The shape is SmolLM2-135M's, in bfloat16.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from tests.kernels.paged_case import Sequence, Shape, make_case
from tests.kernels.policy_case import PolicySequence, make_policy_case

from transom_kernels.cpu.threads import set_num_threads
from transom_kernels.paged_attention import paged_attention
from transom_kernels.policy_attention import policy_attention

SHAPE = Shape(heads=9, kv_heads=3, size=64, block_size=16, dtype=torch.bfloat16)
SCALE = 64**-0.5


def full_chunk(start: int, count: int) -> Callable[[], object]:
    """A chunk of a prompt without a policy."""
    case = make_case([Sequence(start=start, count=count)], SHAPE)
    return lambda: paged_attention(case.q, case.k_cache, case.v_cache, case.batch, scale=SCALE)


def window_chunk(start: int, count: int, window: int, sinks: int, *, passes_trained_len: bool) -> Callable[[], object]:
    """A chunk of a prompt with a window; blocks that it has passed have left the table."""
    size = SHAPE.block_size
    dropped = tuple(range(-(-sinks // size), max(0, start - window + 1) // size))
    sequence = PolicySequence(start=start, count=count, window=window, sinks=sinks, dropped=dropped)
    case = make_policy_case([sequence], SHAPE)
    sink_q = case.sink_q if passes_trained_len else None
    return lambda: policy_attention(case.q, case.k_cache, case.v_cache, case.batch, scale=SCALE, sink_q=sink_q)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of the prompt")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a step")
    parser.add_argument("--window", type=int, default=512, help="tokens of the window")
    parser.add_argument("--sinks", type=int, default=4, help="sink tokens")
    parser.add_argument("--turns", type=int, default=15, help="how often each is measured")
    given = parser.parse_args()
    set_num_threads(1)
    chunks = [(start, min(given.chunk, given.tokens - start)) for start in range(0, given.tokens, given.chunk)]
    calls = {"full": [full_chunk(*chunk) for chunk in chunks]}
    for name, passes in (("window", False), ("window, second query", True)):
        calls[name] = [
            window_chunk(*chunk, window=given.window, sinks=given.sinks, passes_trained_len=passes) for chunk in chunks
        ]
    least = dict.fromkeys(calls, float("inf"))
    for turn in range(given.turns + 1):
        for name, of_prompt in calls.items():
            begin = time.process_time()
            for call in of_prompt:
                call()
            if turn:  # the first turn loads kernels
                least[name] = min(least[name], time.process_time() - begin)
    for name, seconds in least.items():
        print(f"{name:22} {1000 * seconds:8.2f} ms a layer  {seconds / least['full']:6.2f} of full attention's time")


if __name__ == "__main__":
    main()

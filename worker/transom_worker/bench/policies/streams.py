"""Measures text of several times the model's trained length: memory, time per token and perplexity, with sinks and without."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from transom_core.contract import WindowPolicy
from transom_worker.bench.policies.policy_runs import make_request, run_together
from transom_worker.bench.policies.texts import long_text
from transom_worker.engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPart:
    """A part of a stream: the perplexity of its tokens, and the CPU time of a decode step after it."""

    policy: str
    begin: int
    end: int
    perplexity: float
    decode_cpu_ms: float
    peak_kv_bytes: int


def stream(engine: Engine, *, trained_len: int, times: int, window: int, num_parts: int) -> list[StreamPart]:
    """Read `times * trained_len` tokens of text with a window, with sinks and without, and decode a few tokens after each part."""
    length = times * trained_len - 32
    text = long_text(engine.tokenizer, length)
    ends = [length * (number + 1) // num_parts for number in range(num_parts)]
    rows = []
    for sinks in (4, 0):
        policy = WindowPolicy(sinks=sinks, window=window)
        name = f"window {window}, {sinks} sinks" if sinks else f"window {window} without sinks"
        whole = run_together(engine, [make_request(text, policy, max_tokens=1, prompt_logprobs=0)])
        table = whole.prompt_logprobs[0]
        assert table is not None
        for begin, end in pairwise([0, *ends]):
            losses = [-table[position].chosen.logprob for position in range(begin, min(end, len(table)))]
            part = run_together(engine, [make_request(text[:end], policy, max_tokens=24)])
            rows.append(
                StreamPart(
                    policy=name,
                    begin=begin,
                    end=end,
                    perplexity=math.exp(sum(losses) / len(losses)),
                    decode_cpu_ms=1e3 * median(part.step_cpu_s[-16:]),
                    peak_kv_bytes=part.peak_kv_bytes,
                )
            )
    return rows

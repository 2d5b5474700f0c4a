"""`paged_attention`: decoding over the grid of batch and context, windows, other heads, quantised caches, and prompts.

Legend: B sequences, H query heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernel_cases.case import Case, Check, Prepared, Scale, Target, Tensors
from kernel_cases.paged import (
    BLOCK,
    Heads,
    Paged,
    expected_rows,
    make_paged,
    one_sequence,
    poison_tails,
    quantise,
    some_rows,
)
from kernel_cases.rivals import Rivals, decode_rivals, prefill_rivals
from transom_kernels.paged_attention.inputs import PagedInputs
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.paged_attention.triton.launcher import paged_attention_triton
from transom_kernels.quantised_kv import FORMATS, KvFormat

LLAMA, GPT_OSS, GEMMA = (
    Heads(query=32, kv=8, size=128),
    Heads(query=64, kv=8, size=64),
    Heads(query=8, kv=4, size=256),
)
TINY = Heads(query=4, kv=2, size=16)
DECODE_TARGET = Target(least=0.85, of="bandwidth")
PROMPT_TARGET = Target(least=0.45, of="matrix rate", goal=0.60)
LEAST_TOKENS = 64 * 1024  # batch times context from which decoding is held against the bandwidth
NO_SLOWER = 0.97  # less is more than noise
ERROR_LIMIT = 1e-2  # bf16 operands
DECODE_FORMULA = "visible keys and values of every sequence, queries and results"
PROMPT_FORMULA = "4 H D for every visible pair of query and key"


def cases(scale: Scale) -> Iterator[Case]:
    """All of them."""
    yield from _decoding(scale)
    yield from _windows(scale)
    yield from _other_heads(scale)
    yield from _quantised(scale)
    yield from _prompts(scale)
    yield _mixed_case(scale)


def _decoding(scale: Scale) -> Iterator[Case]:
    batches = scale.some((1, 4, 16, 64, 256), (1, 16, 256), (1, 3))
    contexts = scale.some((1024, 8192, 32768, 131072), (8192, 131072), (40,))
    for context in contexts:
        for batch in batches:
            rivals = not scale.is_tiny and (batch, context) in ((1, 131072), (16, 8192), (64, 8192), (256, 1024))
            yield _decode_case("decode full", LLAMA, batch, context, scale, rivals=rivals)


def _windows(scale: Scale) -> Iterator[Case]:
    contexts = scale.some((8192, 131072), (8192, 131072), (40, 90))
    for window in scale.some((128, 1024), (1024,), (20,)):
        for batch in scale.some((1, 16, 64, 256), (16, 256), (2,)):
            for context in contexts:
                yield _decode_case(
                    "decode window", LLAMA, batch, context, scale, window=window,
                    flat_with=None if context == contexts[0] else _decode_name("decode window", batch, contexts[0], window),
                )  # fmt: skip


def _other_heads(scale: Scale) -> Iterator[Case]:
    if scale.is_tiny:
        return
    for batch in (16, 64):
        yield _decode_case("decode gpt-oss full", GPT_OSS, batch, 8192, scale, sinks=True)
        yield _decode_case("decode gpt-oss window", GPT_OSS, batch, 8192, scale, sinks=True, window=128)
        yield _decode_case("decode gemma full", GEMMA, batch, 8192, scale)


def _quantised(scale: Scale) -> Iterator[Case]:
    """Decoding and a prompt over caches of 8 and of 4 bits."""
    for kv_format in FORMATS.values():
        for batch in scale.some((16, 64), (16,), (2,)):
            yield _decode_case(
                f"decode {kv_format.name}", LLAMA, batch, scale.pick(8192, 40), scale, kv_format=kv_format
            )
        yield _prompt_case(TINY if scale.is_tiny else LLAMA, scale.pick(8192, 40), None, scale, kv_format=kv_format)


def _prompts(scale: Scale) -> Iterator[Case]:
    if scale.is_tiny:
        yield _prompt_case(TINY, 40, None, scale)
        return
    for size in scale.some((64, 128, 256), (128,), ()):
        heads = Heads(query=32, kv=8, size=size)
        for length in scale.some((2048, 8192, 32768), (2048, 8192), ()):
            yield _prompt_case(heads, length, None, scale)
    yield _prompt_case(LLAMA, 8192, 1024, scale)


def _mixed_case(scale: Scale) -> Case:
    """Prompts, chunks, a few tokens at once, and decoding: for correctness, and that no sequence notices the others."""
    heads = TINY if scale.is_tiny else LLAMA
    starts = [0, 7, 30] if scale.is_tiny else [0, 0, 3000, 40_000, *[500 * i for i in range(1, 29)]]
    counts = [9, 3, 1] if scale.is_tiny else [1000, 37, 512, 16, *[1] * 12, 3, *[1] * 15]
    return Case(
        name="mixed prompts and decoding",
        prepare=partial(_prepare, heads, starts, counts, None, True),
        formula=PROMPT_FORMULA,
    )


def _decode_name(kind: str, batch: int, context: int, window: int | None) -> str:
    return f"{kind}{'' if window is None else f' {window}'} batch {batch} context {context}"


def _decode_case(
    kind: str,
    heads: Heads,
    batch: int,
    context: int,
    scale: Scale,
    *,
    window: int | None = None,
    sinks: bool = False,
    rivals: bool = False,
    flat_with: str | None = None,
    kv_format: KvFormat | None = None,
) -> Case:
    heads = TINY if scale.is_tiny else heads
    seen = context if window is None else min(window, context)
    # lengths within a block of each other, so that blocks have ends that must not be read; rivals need them equal
    starts = [context - 1 if rivals else context - 4 - 7 * b % BLOCK for b in range(batch)]
    return Case(
        name=_decode_name(kind, batch, context, window),
        prepare=partial(
            _prepare,
            heads,
            starts,
            [1] * batch,
            window,
            sinks,
            rivals=decode_rivals if rivals else None,
            kv_format=kv_format,
        ),
        formula=DECODE_FORMULA,
        target=DECODE_TARGET if batch * seen >= LEAST_TOKENS else None,
        rival_limits={"flex": NO_SLOWER, "flashinfer": NO_SLOWER},
        flat_with=flat_with,
    )


def _prompt_case(
    heads: Heads, length: int, window: int | None, scale: Scale, *, kv_format: KvFormat | None = None
) -> Case:
    is_plain = window is None and kv_format is None
    is_goal = length == 8192 and heads.size == 128 and is_plain
    rivals = None if scale.is_tiny or not is_plain else partial(prefill_rivals, with_flex=heads.size == 128)
    return Case(
        name=f"prompt {_kind(window, kv_format)} head {heads.size} tokens {length}",
        prepare=partial(_prepare, heads, [0], [length], window, False, rivals=rivals, kv_format=kv_format),
        formula=PROMPT_FORMULA,
        target=PROMPT_TARGET if is_goal else None,
        rival_limits={"flash": 1 / 1.15} if is_goal else {},
    )


def _prepare(
    heads: Heads,
    starts: list[int],
    counts: list[int],
    window: int | None,
    has_sinks: bool,
    device: torch.device,
    *,
    rivals: Callable[[Paged], Rivals] | None = None,
    kv_format: KvFormat | None = None,
) -> Prepared:
    paged = make_paged(heads, starts, counts, device, window=window)
    if kv_format is not None:
        paged = quantise(paged, kv_format)
    sinks = torch.randn(heads.query, device=device) if has_sinks else None
    pairs = sum(_visible_pairs(start, count, window) for start, count in zip(starts, counts, strict=True))
    kept = sum(_visible_keys(start, count, window) for start, count in zip(starts, counts, strict=True))
    rows = some_rows(paged)

    def check(out: Tensors) -> list[Check]:
        wanted = expected_rows(paged, rows, window=window, sink_logits=sinks)
        return [Check(got=out[0][rows], wanted=wanted, limit=ERROR_LIMIT)]

    def alone() -> list[tuple[torch.Tensor, torch.Tensor]]:
        whole, begins = _attend(paged, window, sinks), [sum(counts[:b]) for b in range(len(counts))]
        chosen = sorted({0, len(counts) // 2, len(counts) - 1})
        return [
            (whole[begins[b] : begins[b] + counts[b]], _attend(one_sequence(paged, b), window, sinks)) for b in chosen
        ]

    return Prepared(
        run=lambda: (_attend(paged, window, sinks),),
        check=check,
        num_bytes=kept * _bytes_per_token(heads, kv_format) + 2 * paged.q.nbytes,
        flops=4 * heads.query * heads.size * pairs,
        alone=alone,
        rivals=rivals(paged) if rivals else {},
        traps=lambda: poison_tails(paged),
    )


def _attend(paged: Paged, window: int | None, sinks: torch.Tensor | None) -> torch.Tensor:
    k_scale, v_scale = paged.scales or (None, None)
    return paged_attention_triton(
        PagedInputs(
            q=paged.q, k_cache=paged.k_cache, v_cache=paged.v_cache, batch=paged.batch,
            scale=paged.q.shape[2] ** -0.5, rule=MaskRule(window=window), sink_logits=sinks,
            k_scale=k_scale, v_scale=v_scale,
        )
    )  # fmt: skip


def _kind(window: int | None, kv_format: KvFormat | None) -> str:
    return kv_format.name if kv_format is not None else "causal" if window is None else f"window {window}"


def _bytes_per_token(heads: Heads, kv_format: KvFormat | None) -> int:
    """Of keys and values, with their scales."""
    if kv_format is None:
        return heads.bytes_per_token()
    return 2 * heads.kv * (heads.size // kv_format.numbers_per_element + 4)


def _visible_keys(start: int, count: int, window: int | None) -> int:
    return start + count if window is None else min(start + count, count + window - 1)


def _visible_pairs(start: int, count: int, window: int | None) -> int:
    """Of queries and keys, over the queries at [start, start + count)."""
    if window is None:
        return count * start + count * (count + 1) // 2
    return sum(min(position + 1, window) for position in range(start, start + count))

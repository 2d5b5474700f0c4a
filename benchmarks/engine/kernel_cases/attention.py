"""`paged_attention`: decoding over the grid of batch and context, windows, other heads, quantised caches, and prompts.

Legend: B sequences, H query heads, D head width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.engine.kernel_cases import rivals
from benchmarks.engine.kernel_cases.case import Case, Check, Prepared, Promise, Scale
from benchmarks.engine.kernel_cases.paged import (
    BLOCK,
    Heads,
    expected_rows,
    make_paged,
    one_sequence,
    poison_tails,
    some_rows,
)
from transom_kernels.paged_attention.triton.launcher import paged_attention_triton
from transom_kernels.quantised_kv import FORMATS, KvFormat

LLAMA, GPT_OSS = Heads(query=32, kv=8, size=128), Heads(query=64, kv=8, size=64)
GEMMA = Heads(query=8, kv=4, size=256)
TINY = Heads(query=4, kv=2, size=16)
DECODE = Promise(name="decode attention, from 64k visible tokens on", of="bandwidth", least=0.85)
# A rival's time over ours: less than 0.97 is more than noise.
BESIDE_FLEX = Promise(name="decode attention beside FlexAttention", of="flex", least=0.97)
FLAT = Promise(name="a window's time at a short context over that at a long one", of="short context", least=1 / 1.10)
PROMPT = Promise(name="prompt attention, 8k tokens, heads of 128 (goal 0.60)", of="matrix rate", least=0.45)
BESIDE_FLASH = Promise(name="prompt attention beside torch's flash backend", of="flash", least=1 / 1.15)
LEAST_TOKENS = 64 * 1024  # batch times context from which decoding is held against the bandwidth
WITH_RIVALS = ((1, 131072), (16, 8192), (64, 8192), (256, 1024))  # batch and context
WITH_TUNINGS = ((16, 8192), (64, 8192))
ERROR_LIMIT = 1e-2  # bf16 operands


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The inputs of a case."""

    heads: Heads
    starts: list[int]
    counts: list[int]
    window: int | None = None
    has_sinks: bool = False
    kv_format: KvFormat | None = None
    rivals: tuple[str, ...] = ()

    @property
    def num_keys(self) -> int:
        """Keys that some query of a sequence sees, of all sequences."""
        window = self.window
        pairs = zip(self.starts, self.counts, strict=True)
        return sum(
            start + count if window is None else min(start + count, count + window - 1) for start, count in pairs
        )

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        positions = (
            p for start, count in zip(self.starts, self.counts, strict=True) for p in range(start, start + count)
        )
        return sum(p + 1 if self.window is None else min(p + 1, self.window) for p in positions)


def cases(scale: Scale) -> Iterator[Case]:
    """All of them."""
    yield from _decoding(scale)
    yield from _prompts(scale)
    # Prompts, chunks, a few tokens at once, and decoding: for correctness, and that no sequence notices the others.
    starts = [0, 7, 30] if scale.is_tiny else [0, 0, 3000, 40_000, *[500 * i for i in range(1, 29)]]
    counts = [9, 3, 1] if scale.is_tiny else [1000, 37, 512, 16, *[1] * 12, 3, *[1] * 15]
    heads = TINY if scale.is_tiny else LLAMA
    yield _case("mixed prompts and decoding", Attention(heads=heads, starts=starts, counts=counts, has_sinks=True))


def _decoding(scale: Scale) -> Iterator[Case]:
    for context in scale.some((1024, 8192, 32768, 131072), (8192, 131072), (40,)):
        for batch in scale.some((1, 4, 16, 64, 256), (1, 16, 256), (1, 3)):
            with_rivals = not scale.is_tiny and (batch, context) in WITH_RIVALS
            yield _decode_case("decode full", LLAMA, batch, context, scale, with_rivals=with_rivals)
    contexts = scale.some((8192, 131072), (8192, 131072), (40, 90))
    for window in scale.some((128, 1024), (1024,), (20,)):
        for batch in scale.some((1, 16, 64, 256), (16, 256), (2,)):
            short = _decode_case("decode window", LLAMA, batch, contexts[0], scale, window=window)
            yield short
            yield _decode_case("decode window", LLAMA, batch, contexts[1], scale, window=window, flat_with=short.name)
    for batch in scale.some((16, 64), (16, 64), ()):
        yield _decode_case("decode gpt-oss full", GPT_OSS, batch, 8192, scale, has_sinks=True)
        yield _decode_case("decode gpt-oss window", GPT_OSS, batch, 8192, scale, has_sinks=True, window=128)
        yield _decode_case("decode gemma full", GEMMA, batch, 8192, scale)
    for kv_format in FORMATS.values():
        for batch in scale.some((16, 64), (16,), (2,)):
            context = scale.pick(8192, 40)
            yield _decode_case(f"decode {kv_format.name}", LLAMA, batch, context, scale, kv_format=kv_format)


def _decode_case(
    kind: str,
    heads: Heads,
    batch: int,
    context: int,
    scale: Scale,
    *,
    window: int | None = None,
    with_rivals: bool = False,
    flat_with: str | None = None,
    **inputs: object,
) -> Case:
    # Lengths within a block of each other, so that blocks have ends that must not be read; rivals need them equal.
    starts = [context - 1 if with_rivals else context - 4 - 7 * b % BLOCK for b in range(batch)]
    beside = rivals.DECODE_RIVALS if with_rivals else ()
    beside += rivals.DECODE_TUNINGS if with_rivals and (batch, context) in WITH_TUNINGS else ()
    promises = [DECODE] if batch * min(window or context, context) >= LEAST_TOKENS else []
    promises += [BESIDE_FLEX] if with_rivals else []
    promises += [FLAT] if flat_with else []
    return _case(
        f"{kind}{'' if window is None else f' {window}'} batch {batch} context {context}",
        Attention(
            heads=TINY if scale.is_tiny else heads, starts=starts, counts=[1] * batch, window=window,
            rivals=beside, **inputs,  # type: ignore[arg-type]
        ),
        *promises,
        flat_with=flat_with,
    )  # fmt: skip


def _prompts(scale: Scale) -> Iterator[Case]:
    for kv_format in FORMATS.values():
        heads, length = TINY if scale.is_tiny else LLAMA, scale.pick(8192, 40)
        yield _prompt_case(kv_format.name, Attention(heads=heads, starts=[0], counts=[length], kv_format=kv_format))
    if scale.is_tiny:
        yield _prompt_case("causal", Attention(heads=TINY, starts=[0], counts=[40]))
        return
    for size in scale.some((64, 128, 256), (128,), ()):
        heads = Heads(query=32, kv=8, size=size)
        for length in scale.some((2048, 8192, 32768), (2048, 8192), ()):
            promises = (PROMPT, BESIDE_FLASH) if (length, size) == (8192, 128) else ()
            beside = rivals.PROMPT_RIVALS if size == 128 else ("flash",)  # FlexAttention compiles for seconds
            beside += rivals.PROMPT_TUNINGS if promises else ()
            yield _prompt_case("causal", Attention(heads=heads, starts=[0], counts=[length], rivals=beside), *promises)
    yield _prompt_case("window 1024", Attention(heads=LLAMA, starts=[0], counts=[8192], window=1024))


def _prompt_case(kind: str, inputs: Attention, *promises: Promise) -> Case:
    return _case(f"prompt {kind} head {inputs.heads.size} tokens {inputs.counts[0]}", inputs, *promises)


def _case(name: str, inputs: Attention, *promises: Promise, flat_with: str | None = None) -> Case:
    return Case(
        name=name,
        prepare=partial(_prepare, inputs),
        formula="visible keys and values of every sequence, queries and results; 4 H D for every visible pair",
        promises=promises,
        rivals=inputs.rivals,
        flat_with=flat_with,
    )


def _prepare(inputs: Attention, device: torch.device) -> Prepared:
    heads, counts = inputs.heads, inputs.counts
    paged = make_paged(
        heads, inputs.starts, counts, device,
        window=inputs.window, has_sinks=inputs.has_sinks, kv_format=inputs.kv_format,
    )  # fmt: skip
    rows = some_rows(paged)

    def alone() -> list[tuple[torch.Tensor, torch.Tensor]]:
        whole = paged_attention_triton(paged).split(counts)
        chosen = sorted({0, len(counts) // 2, len(counts) - 1})
        return [(whole[b], paged_attention_triton(one_sequence(paged, b))) for b in chosen]

    return Prepared(
        run=lambda: (paged_attention_triton(paged),),
        check=lambda out: [Check(got=out[0][rows], wanted=expected_rows(paged, rows), limit=ERROR_LIMIT)],
        num_bytes=inputs.num_keys * 2 * heads.row_bytes(inputs.kv_format) + 2 * paged.q.nbytes,
        flops=4 * heads.query * heads.size * inputs.num_pairs,
        alone=alone,
        rivals=rivals.rivals_of(paged, inputs.rivals),
        traps=lambda: poison_tails(paged),
    )

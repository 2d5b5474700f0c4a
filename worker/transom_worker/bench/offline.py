"""Measures the prefill and decode speed of one worker without HTTP, for `transom bench offline`.

The prompts are random token ids, so that none hits the prefix cache. Prefill is measured from the admission of one prompt of
`prompt_tokens` tokens to its first output token. Decode at batch size B is measured with B such prompts in one batch, after all of
them have their first output token.
"""

import random
import time
from dataclasses import dataclass

from transom_core.contract import Request, SamplingParams
from transom_core.errors import RequestError
from transom_worker.engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFigure:
    """The decode speed at one batch size: tokens per second of the whole batch, milliseconds per step, and the part of these that
    the step spends outside the model's forward pass."""

    batch: int
    context_tokens: int
    tokens_per_s: float
    step_ms: float
    outside_forward_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineFigures:
    """All figures of one measurement, each the best of its repeats."""

    prompt_tokens: int
    output_tokens: int
    prefill_tokens_per_s: float
    decode: tuple[DecodeFigure, ...]


def run_offline(
    engine: Engine, *, batches: tuple[int, ...], prompt_tokens: int, output_tokens: int, repeats: int
) -> OfflineFigures:
    """Measure an idle engine. Raises RequestError if a prompt and its output do not fit the engine's length."""
    longest = engine.info.max_model_len
    if prompt_tokens + output_tokens >= longest:
        raise RequestError(
            f"{prompt_tokens} prompt and {output_tokens} output tokens do not fit the engine, whose length is {longest}; "
            "measure fewer."
        )
    bench = OfflineBench(engine, prompt_tokens=prompt_tokens)
    bench.decode(1, 4)  # warm up
    prefill_s = min(bench.prefill() for _ in range(repeats))
    decode = tuple(
        min((bench.decode(batch, output_tokens) for _ in range(repeats)), key=lambda figure: figure.step_ms)
        for batch in batches
    )
    return OfflineFigures(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prefill_tokens_per_s=prompt_tokens / prefill_s,
        decode=decode,
    )


class OfflineBench:
    """Measures one idle engine."""

    def __init__(self, engine: Engine, *, prompt_tokens: int) -> None:
        self._engine = engine
        self._prompt_tokens = prompt_tokens
        self._random = random.Random(0)
        self._num_requests = 0

    def prefill(self) -> float:
        """Return the seconds from the admission of one prompt to its first token."""
        begin_s = time.perf_counter()
        self._add(1)
        while self._engine.has_work:
            self._engine.step()
        return time.perf_counter() - begin_s

    def decode(self, batch: int, output_tokens: int) -> DecodeFigure:
        """Run `batch` prompts in one batch, and measure the steps after the last prompt's first token."""
        for _ in range(batch):
            self._add(None)  # no limit: the first requests must not end while the last ones are in prefill
        started: set[str] = set()
        while len(started) < batch:
            started.update(event.request_id for event in self._engine.step())
        forward_begin_s = self._engine.forward_s
        begin_s = time.perf_counter()
        num_steps = num_tokens = 0
        while self._engine.has_work and num_steps < output_tokens:
            num_tokens += len(self._engine.step())
            num_steps += 1
        spent_s = time.perf_counter() - begin_s
        forward_s = self._engine.forward_s - forward_begin_s
        self._drop(started)
        return DecodeFigure(
            batch=batch,
            context_tokens=self._prompt_tokens,
            tokens_per_s=num_tokens / spent_s,
            step_ms=1e3 * spent_s / num_steps,
            outside_forward_ms=1e3 * (spent_s - forward_s) / num_steps,
        )

    def _add(self, max_tokens: int | None) -> None:
        vocab_size = self._engine.info.vocab_size
        self._num_requests += 1
        self._engine.add(
            Request(
                request_id=f"bench-{self._num_requests}",
                prompt_token_ids=tuple(self._random.randrange(vocab_size) for _ in range(self._prompt_tokens)),
                params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
                seed=0,
            )
        )

    def _drop(self, request_ids: set[str]) -> None:
        for request_id in request_ids:
            self._engine.abort(request_id)
        while self._engine.has_work:
            self._engine.step()

"""What a decode step costs outside of the forward pass, by part, for kinds of sampling and batch sizes.

    python benchmarks/step_overhead.py
    python benchmarks/step_overhead.py --batches 32 --kinds greedy,penalties --profile
    python benchmarks/step_overhead.py --forward model

The forward pass is replaced by random logits of SmolLM2's vocabulary (`--forward model` computes it), so that only what surrounds
XX

    schedule  the engine asks the scheduler for a plan
    prepare   the runner updates its sequences and builds the batch
    sample    from the logits to token ids and log-probabilities
    output    the scheduler takes the result, and the engine makes output events
    other     what remains of `Engine.step`: its own loop, and what lies between these parts
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import random
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from transom_core.contract import Request, SamplingParams
from transom_core.settings.settings import Settings
from transom_worker.engine.engine import Engine
from transom_worker.engine.startup import build_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
RANDOM = replace(GREEDY, temperature=0.8)
KINDS = {
    "greedy": GREEDY,
    "temperature": RANDOM,
    "top-p": replace(RANDOM, top_p=0.9),
    "top-k": replace(RANDOM, top_k=40, top_p=0.95),
    "min-p": replace(RANDOM, min_p=0.05),
    "penalties": replace(GREEDY, repetition_penalty=1.1, frequency_penalty=0.2),
    "logprobs": replace(GREEDY, logprobs=5),
    "all": replace(RANDOM, top_k=40, top_p=0.95, repetition_penalty=1.1, logprobs=5, logit_bias={17: 2.0}),
}
PARTS = ("schedule", "prepare", "sample", "output", "other")
WARM_UP_STEPS = 4


class StubModel:
    """The engine's model with random logits in place of its forward pass."""

    def __init__(self, model: Any, vocab_size: int, spread: float) -> None:
        self._model = model
        self._logits = spread * torch.randn(256, vocab_size, generator=torch.Generator().manual_seed(0))
        self._steps = itertools.count()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def hidden(self, batch: Any) -> torch.Tensor:
        """The logits, in place of hidden states."""
        return self.forward(batch)

    def logits(self, hidden_RN: torch.Tensor) -> torch.Tensor:
        """The same logits."""
        return hidden_RN

    def forward(self, batch: Any) -> torch.Tensor:
        """Other rows of random logits in each step."""
        num_rows = len(batch.logit_rows)
        first = next(self._steps) * num_rows % (len(self._logits) - num_rows + 1)
        return self._logits[first : first + num_rows]


class Measurement:
    """The seconds of each part of each step."""

    def __init__(self, engine: Engine) -> None:
        self.parts: dict[str, list[float]] = {part: [] for part in PARTS}
        self._engine = engine
        self._stepped = engine.events.stepped
        self._last: tuple[Any, Any] | None = None
        engine.events.stepped = self._note  # type: ignore[method-assign]

    def step(self) -> None:
        """Take one step and note its parts."""
        begin_s = time.perf_counter()
        self._engine.step()
        seconds = time.perf_counter() - begin_s
        assert self._last is not None
        rank, engine = self._last
        taken = {
            "schedule": engine.schedule_s,
            "prepare": rank.prepare_s + rank.copy_s,
            "sample": rank.sample_s,
            "output": engine.output_s,
        }
        for part, part_s in taken.items():
            self.parts[part].append(part_s)
        self.parts["other"].append(seconds - rank.forward_s - sum(taken.values()))

    def _note(self, rank: Any, engine: Any) -> None:
        self._last = rank, engine
        self._stepped(rank, engine)


def start(engine: Engine, params: SamplingParams, batch: int, context: int, round_number: int) -> list[str]:
    """Start `batch` sequences and run until all decode."""
    generator = random.Random(0)
    request_ids = [f"{round_number}-{index}" for index in range(batch)]
    for index, request_id in enumerate(request_ids):
        prompt = tuple(generator.randrange(1000, 40_000) for _ in range(context))
        engine.add(Request(request_id=request_id, prompt_token_ids=prompt, params=params, seed=index))
    started: set[str] = set()
    while len(started) < batch:
        started.update(event.request_id for event in engine.step())
    return request_ids


def main() -> None:
    """Measure and print a line for each kind and batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--spread", type=float, default=3.0, help="standard deviation of the random logits")
    parser.add_argument("--forward", choices=("random", "model"), default="random")
    parser.add_argument("--threads", type=int, help="CPU threads of the engine; all cores if unset")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    settings = Settings.parse(
        model=options.model, device="cpu", kv_cache_memory_bytes="1GiB", max_num_seqs=64, steps_in_flight=1,
        num_threads=options.threads, enforce_eager=options.forward == "random",
    )  # fmt: skip
    engine = build_engine(settings.engine_config())
    if options.forward == "random":
        forward = engine.executor._runner._forward  # type: ignore[attr-defined]
        forward._model = StubModel(forward._model, engine.info.vocab_size, options.spread)
    print(f"{'':<24}" + "".join(f"{part:>10}" for part in (*PARTS, "total")))
    rounds = itertools.count()
    for kind in options.kinds.split(","):
        for batch in map(int, options.batches.split(",")):
            request_ids = start(engine, KINDS[kind], batch, options.context, next(rounds))
            for _ in range(WARM_UP_STEPS):
                engine.step()
            measurement = Measurement(engine)
            profile = cProfile.Profile(time.thread_time)  # leaves out what other processes take
            for _ in range(options.steps):
                profile.runcall(measurement.step) if options.profile else measurement.step()
            engine.events.stepped = measurement._stepped  # type: ignore[method-assign]
            quartiles = [1e3 * statistics.quantiles(measurement.parts[part])[0] for part in PARTS]
            figures = "".join(f"{figure:10.3f}" for figure in (*quartiles, sum(quartiles)))
            print(f"{kind:<16}batch {batch:<2}" + figures, flush=True)
            if options.profile:
                pstats.Stats(profile).sort_stats("tottime").print_stats(40)
            for request_id in request_ids:
                engine.abort(request_id)
            while engine.has_work:
                engine.step()


if __name__ == "__main__":
    main()

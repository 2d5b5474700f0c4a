"""What transformers answers to many prompts: an engine guesses, so that transformers takes one pass where it agrees."""

from __future__ import annotations

from pathlib import Path

from tests.engine_driver import make_engine, make_request, run
from tests.tiny_checkpoints import FULL, HybridCase, reference_greedy


def oracle_answers(folder: Path, prompts: list[list[int]], num_tokens: int, case: HybridCase = FULL) -> list[list[int]]:
    """transformers' greedy continuation of every prompt, whatever the engine guesses."""
    length = max(map(len, prompts)) + num_tokens
    engine = make_engine(str(folder), **case.settings(), max_model_len=length, enable_prefix_caching=False)
    requests = [make_request(f"{i}", prompt, max_tokens=num_tokens) for i, prompt in enumerate(prompts)]
    guesses = [whole.token_ids for whole in run(engine, requests)]
    engine.shutdown()
    return [
        reference_greedy(folder, prompt, num_tokens, case, guess=guess)
        for prompt, guess in zip(prompts, guesses, strict=True)
    ]

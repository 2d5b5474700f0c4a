"""What transformers answers to many prompts: an engine guesses, so that transformers takes one pass where it agrees."""

from collections.abc import Mapping
from pathlib import Path

import torch

from tests.core.grammar.vocabularies import allowed, tiny_vocabulary
from tests.engine_driver import make_engine, make_request, run
from tests.tiny_checkpoints import FULL, VOCAB_SIZE, HybridCase, reference_greedy, reference_logits
from transom_core.grammar import GrammarMasks, compile_grammar


def oracle_answers(
    folder: Path,
    prompts: list[list[int]],
    num_tokens: int,
    case: HybridCase = FULL,
    grammars: Mapping[int, str] | None = None,
) -> list[list[int]]:
    """transformers' greedy continuation of every prompt, even if a guess is wrong. `grammars`: index of a prompt -> grammar."""
    grammars = grammars or {}
    length = max(map(len, prompts)) + num_tokens
    engine = make_engine(str(folder), **case.settings(), max_model_len=length, enable_prefix_caching=False)
    requests = [
        make_request(f"{i}", prompt, max_tokens=num_tokens, grammar=grammars.get(i)) for i, prompt in enumerate(prompts)
    ]
    guesses = [whole.token_ids for whole in run(engine, requests)]
    engine.shutdown()
    return [
        held_greedy(folder, prompt, num_tokens, case, grammars[i], guess)
        if i in grammars
        else reference_greedy(folder, prompt, num_tokens, case, guess=guess)
        for i, (prompt, guess) in enumerate(zip(prompts, guesses, strict=True))
    ]


def held_greedy(
    folder: Path, prompt: list[int], num_tokens: int, case: HybridCase, grammar: str, guess: list[int]
) -> list[int]:
    """transformers' greedy continuation under a grammar: at each step the likeliest token that the grammar allows."""
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens = _as_far_as_right(reference_logits(folder, [*prompt, *guess], case), prompt, grammar, guess)
        guess = tokens
    return tokens[:num_tokens]


def _as_far_as_right(logits_TV: torch.Tensor, prompt: list[int], grammar: str, guess: list[int]) -> list[int]:
    """The guess up to its first wrong token, and the right one there, or the one after it."""
    masks, matcher = GrammarMasks(VOCAB_SIZE), compile_grammar(grammar, tiny_vocabulary())
    tokens: list[int] = []
    for step in range(len(guess) + 1):
        masks.compute([matcher])
        ids = [i for i in allowed(masks, matcher) if i not in matcher.vocabulary.eos_token_ids]
        tokens.append(ids[int(logits_TV[len(prompt) - 1 + step, ids].argmax())])
        if step == len(guess) or tokens[-1] != guess[step]:
            return tokens
        matcher.consume(tokens[-1])
    return tokens

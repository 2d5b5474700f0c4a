"""What the cache learns of clients that return to a checkpoint."""

from __future__ import annotations

import pytest

from tests.worker.kvcache.cache_model import BLOCK
from tests.worker.kvcache.test_manager import ROOT, cache_of, run
from transom_core.kv_cache.hashing import extend_chain
from transom_worker.kvcache.eviction.eviction_policy import Watched
from transom_worker.kvcache.manager import KvCache
from transom_worker.kvcache.prefix.tree import Node

TURN = 24  # tokens


def owner(cache: KvCache, token_ids: list[int], num_tokens: int) -> Node:
    """The node whose segment has the last whole hash block of these tokens."""
    chain: list[bytes] = []
    extend_chain(chain, ROOT, token_ids[:num_tokens], BLOCK)
    return cache.checkpoints.tree.owner[chain[-1]]


def turn(cache: KvCache, history: list[int], number: int, *, rendered_anew: int) -> list[int]:
    """Run a turn's prompt: the last one's without the tokens that its template renders anew, then new ones."""
    begin = len(history) - rendered_anew if history else 0
    token_ids = history[:begin] + [1_000 * number + at for at in range(rendered_anew + TURN)]
    run(cache, token_ids)
    return token_ids


@pytest.mark.parametrize("mix", [("full",), ("full", "window")], ids="+".join)
@pytest.mark.parametrize("rendered_anew", [0, BLOCK, 2 * BLOCK + 1])
def test_a_turn_is_a_return_though_the_end_of_the_last_prompt_was_rendered_anew(
    mix: tuple[str, ...], rendered_anew: int
) -> None:
    cache = cache_of(*mix)
    history: list[int] = []
    for number in range(1, 4):
        history = turn(cache, history, number, rendered_anew=rendered_anew)
        assert owner(cache, history, len(history)).num_returns == number - 1


@pytest.mark.parametrize("mix", [("full",), ("full", "window")], ids="+".join)
def test_what_was_rendered_anew_is_evicted_first(mix: tuple[str, ...]) -> None:
    cache = cache_of(*mix)
    first = turn(cache, [], 1, rendered_anew=0)
    history = turn(cache, first, 2, rendered_anew=2 * BLOCK)
    other = [5_000 + at for at in range(TURN)]
    run(cache, other)
    stub, shared = owner(cache, first, len(first)), owner(cache, first, len(first) - 2 * BLOCK)
    assert shared is stub.parent
    assert isinstance(shared.policy_state, Watched)
    assert shared.policy_state.own.watched_from > 0
    assert cache.eviction.evict_one()
    assert stub.parent is None
    for kept in (history, other):
        assert owner(cache, kept, len(kept)).parent is not None

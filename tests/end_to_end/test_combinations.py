"""Everything on at once, and exact: every feature in every combination gives the tokens of a plain reference.

Each feature that lands adds its switch here: prefix cache, window repair, chunk size, pool size (preemption), steps in flight,
the hybrid cache on or off, resumed requests; over models with full, window, sink + window and chunked layers. Chunk
sizes take turns, the rest meets in every combination.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from engine_driver import make_engine, make_request, run
from lost_windows import lose_windows
from tiny_checkpoints import HybridCase, reference_greedy

NUM_TOKENS = 24
LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 40, 47, 48, 49, 63, 65, 100, 200)
# Model, and a pool in KiB so tight that the longest request just fits and eight at once must be preempted.
MODELS = {
    "full": (HybridCase(), 300),
    "SF": (HybridCase(window=24, pattern="SF"), 190),
    "SSF with sinks": (HybridCase(window=17, sinks=5, pattern="SSF"), 190),
    "windows only": (HybridCase(window=16, pattern="S"), 120),
    "CF": (HybridCase(chunk=32, pattern="CF"), 190),
    "SCF": (HybridCase(window=12, chunk=20, pattern="SCF"), 190),
}
SWITCHES = list(itertools.product(["repair", "on", "off"], ["tight", "roomy"], [1, 2]))
CHUNKS = (16, 64, 1024)


def prompts() -> list[list[int]]:
    """Prompts around every block and window edge; every third shares a long prefix with the one before."""
    made: list[list[int]] = []
    for i, n in enumerate(LENGTHS):
        fresh = [(131 * i + 17 * j) % 1900 + 40 for j in range(n)]
        made.append(made[-1][: n // 2 * 2] + fresh[len(made[-1][: n // 2 * 2]) :] if i % 3 == 2 else fresh)
    return made


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[str, list[list[int]]]:
    return {
        name: [reference_greedy(tiny_model, p, NUM_TOKENS, case) for p in prompts()]
        for name, (case, _) in MODELS.items()
    }


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "dense"])
@pytest.mark.parametrize("name", MODELS)
def test_every_combination_is_exact(
    tiny_model: Path, expected: dict[str, list[list[int]]], name: str, hybrid: bool
) -> None:
    case, tight_kib = MODELS[name]
    want = expected[name]
    preemptions = hits = repaired = 0
    for at, (caching, pool, in_flight) in enumerate(SWITCHES if hybrid else SWITCHES[::3]):
        chunk = CHUNKS[(at + list(MODELS).index(name)) % len(CHUNKS)]
        engine = make_engine(
            str(tiny_model),
            **case.settings(),
            hybrid_kv_cache=hybrid,
            enable_prefix_caching=caching != "off",
            window_repair=caching == "repair",
            max_num_batched_tokens=chunk,
            steps_in_flight=in_flight,
            block_size=8,
            max_model_len=256,
            max_num_seqs=8,
            kv_cache_memory_bytes=8 << 20 if pool == "roomy" else (tight_kib if hybrid else 300) << 10,
        )
        fresh = [make_request(f"r{i}", p, max_tokens=NUM_TOKENS) for i, p in enumerate(prompts())]
        resumed = [
            make_request(f"s{i}", p, max_tokens=NUM_TOKENS, resumed=want[i][: i % NUM_TOKENS])
            for i, p in enumerate(prompts())
        ]
        where = (name, caching, chunk, in_flight, pool)
        got = run(engine, fresh)
        assert [whole.token_ids for whole in got] == want, where
        if caching == "repair":
            lose_windows(engine._scheduler.cache)
        rest = run(engine, resumed)
        assert [whole.token_ids for whole in rest] == [w[i % NUM_TOKENS :] for i, w in enumerate(want)], where
        preemptions += engine.num_preemptions
        hits += sum(whole.num_cached_tokens for whole in got + rest)
        repaired += engine.stats().outcome_tokens.get("repaired", 0)
        engine.shutdown()
    assert preemptions > 0
    assert hits > 0
    assert (repaired > 0) == (hybrid and name not in ("full", "windows only"))

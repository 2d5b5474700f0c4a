"""Everything on at once, and exact: every feature in every combination gives the tokens of a plain reference.

Each feature that lands adds its switch here: prefix cache, window repair, chunk size, pool size (preemption), steps in flight,
the hybrid cache on or off, resumed requests; over models with full, window, sink + window and chunked layers. Chunk
sizes take turns, the rest meets in every combination. Several ranks, which share nothing but plans, meet some of them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine_driver import make_engine, make_request, run
from lost_windows import lose_windows
from oracle_answers import oracle_answers
from tiny_checkpoints import HybridCase
from transom_worker.engine.engine import Engine
from transom_worker.scheduling import in_flight_prefixes
from transom_worker.scheduling.sequence import Sequence

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
SETTINGS = {"block_size": 8, "max_model_len": 256, "max_num_seqs": 8}


def prompts() -> list[list[int]]:
    """Prompts around every block and window edge; every third shares a long prefix with the one before."""
    made: list[list[int]] = []
    for i, n in enumerate(LENGTHS):
        fresh = [(131 * i + 17 * j) % 1900 + 40 for j in range(n)]
        made.append(made[-1][: n // 2 * 2] + fresh[len(made[-1][: n // 2 * 2]) :] if i % 3 == 2 else fresh)
    return made


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[str, list[list[int]]]:
    return {name: oracle_answers(tiny_model, prompts(), NUM_TOKENS, case) for name, (case, _) in MODELS.items()}


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Units that requests waited for since another computed them; here a few tokens are worth it."""
    waited: list[int] = []
    follow = in_flight_prefixes.Upcoming.follow

    def noted(self: in_flight_prefixes.Upcoming, sequence: Sequence, leader: Sequence, units: int) -> None:
        waited.append(units)
        follow(self, sequence, leader, units)

    monkeypatch.setattr(in_flight_prefixes, "LEAST_SHARED_TOKENS", 8)
    monkeypatch.setattr(in_flight_prefixes.Upcoming, "follow", noted)
    return waited


@dataclass(kw_only=True)
class Seen:
    """What happened on the way, so that nothing is exact because it did not happen."""

    preemptions: int = 0
    hits: int = 0
    repaired: int = 0


def check(engine: Engine, want: list[list[int]], where: object, seen: Seen, *, lose: bool) -> None:
    """All prompts twice: from nothing, and resumed over what is cached then, without its windows if `lose`."""
    fresh = [make_request(f"r{i}", p, max_tokens=NUM_TOKENS) for i, p in enumerate(prompts())]
    resumed = [
        make_request(f"s{i}", p, max_tokens=NUM_TOKENS, resumed=want[i][: i % NUM_TOKENS])
        for i, p in enumerate(prompts())
    ]
    got = run(engine, fresh)
    assert [whole.token_ids for whole in got] == want, where
    if lose:
        lose_windows(engine._scheduler.cache)
    rest = run(engine, resumed)
    assert [whole.token_ids for whole in rest] == [w[i % NUM_TOKENS :] for i, w in enumerate(want)], where
    seen.preemptions += engine.num_preemptions
    seen.hits += sum(whole.num_cached_tokens for whole in got + rest)
    seen.repaired += engine.stats().outcome_tokens.get("repaired", 0)
    engine.shutdown()


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "dense"])
@pytest.mark.parametrize("name", MODELS)
def test_every_combination_is_exact(
    tiny_model: Path, expected: dict[str, list[list[int]]], waits: list[int], name: str, hybrid: bool
) -> None:
    case, tight_kib = MODELS[name]
    want = expected[name]
    seen = Seen()
    for at, (caching, pool, in_flight) in enumerate(SWITCHES if hybrid else SWITCHES[::3]):
        chunk = CHUNKS[(at + list(MODELS).index(name)) % len(CHUNKS)]
        engine = make_engine(
            str(tiny_model),
            **case.settings(),
            **SETTINGS,
            hybrid_kv_cache=hybrid,
            enable_prefix_caching=caching != "off",
            window_repair=caching == "repair",
            max_num_batched_tokens=chunk,
            steps_in_flight=in_flight,
            kv_cache_memory_bytes=8 << 20 if pool == "roomy" else (tight_kib if hybrid else 300) << 10,
        )
        check(engine, want, (name, caching, chunk, in_flight, pool), seen, lose=caching == "repair")
    assert seen.preemptions > 0
    assert seen.hits > 0
    assert waits
    assert (seen.repaired > 0) == (hybrid and name not in ("full", "windows only"))


@pytest.mark.parametrize(("name", "ranks", "pool"), [("SSF with sinks", 2, "tight"), ("SCF", 3, "roomy")])
def test_several_ranks_are_exact(
    tiny_model: Path, expected: dict[str, list[list[int]]], waits: list[int], name: str, ranks: int, pool: str
) -> None:
    """With everything on; each rank has one of the two KV heads, so half the bytes hold as many blocks."""
    case, tight_kib = MODELS[name]
    seen = Seen()
    engine = make_engine(
        str(tiny_model),
        **case.settings(),
        **SETTINGS,
        device="cpu",
        tensor_parallel_size=ranks,
        max_num_batched_tokens=64,
        steps_in_flight=2,
        kv_cache_memory_bytes=4 << 20 if pool == "roomy" else tight_kib << 9,
    )
    check(engine, expected[name], (name, ranks), seen, lose=True)
    assert seen.hits > 0
    assert waits
    assert (seen.preemptions if pool == "tight" else seen.repaired) > 0

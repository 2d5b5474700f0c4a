"""Everything on at once, and exact: every feature in every combination gives the tokens of a plain reference.

Each feature that lands adds its switch here: prefix cache, window repair, chunk size, pool size (preemption), steps in flight,
the hybrid cache on or off, resumed requests, answers held to a grammar beside free ones; over models with full, window,
sink + window and chunked layers. Chunk sizes take turns, the rest meets in every combination. Several ranks, which share
nothing but plans, meet some of them.

Every day each pair of values meets at least once, in a model's `Mix`es; `make test-all` runs the full cross.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.core.grammar.vocabularies import json_grammar
from tests.engine_driver import make_engine, make_request, run
from tests.lost_windows import lose_windows
from tests.memory_faults import PLACES, OutOfMemoryExecutor, Place
from tests.oracle_answers import oracle_answers
from tests.tiny_checkpoints import HybridCase
from transom_core.contract import Request
from transom_worker.engine.engine import Engine
from transom_worker.planner import CachePlan
from transom_worker.scheduling import in_flight_prefixes
from transom_worker.scheduling.sequence import Sequence
from transom_worker.scheduling.step import StepPlan

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
CHUNKS = (16, 64, 1024)
# By index of the prompt: a list that is longer than any answer.
LIST = json_grammar({"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 100})
GRAMMARS = {i: LIST for i in range(3, len(LENGTHS), 5)}
CACHING, POOLS, IN_FLIGHT = ("repair", "on", "off"), ("tight", "roomy"), (1, 2)
SETTINGS: dict[str, Any] = {"block_size": 8, "max_model_len": 256, "max_num_seqs": 8}


@dataclass(frozen=True, slots=True)
class Mix:
    """One combination of the features that an engine can switch."""

    caching: str
    pool: str
    in_flight: int
    chunk: int
    hybrid: bool


def full_cross(name: str, *, hybrid: bool) -> list[Mix]:
    """Every combination, with chunk sizes in turn; of the dense cache, which is a model's plain form, every third one."""
    found = list(itertools.product(CACHING, POOLS, IN_FLIGHT))[:: 1 if hybrid else 3]
    first = list(MODELS).index(name)
    return [Mix(*switches, CHUNKS[(at + first) % len(CHUNKS)], hybrid) for at, switches in enumerate(found)]


def pairwise(name: str) -> list[Mix]:
    """Four combinations of a model; those of all models together have every two values of any two features."""
    m = list(MODELS).index(name)
    repaired_in = 1 if m % 3 else 0  # a tight pool seldom leaves a window to repair: where there are any, it is roomy
    mixes = []
    for at in range(4):
        caching = at if at < 3 else m % 3
        mixes.append(
            Mix(
                CACHING[caching],
                POOLS[(caching + repaired_in) % 2],
                IN_FLIGHT[(at + m // 3) % 2],
                CHUNKS[(at + m + at // 3 + m // 5) % 3],  # "SCF" is not preempted where its chunks are the smallest
                hybrid=at < 3,
            )
        )
    return mixes


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
        name: oracle_answers(tiny_model, prompts(), NUM_TOKENS, case, GRAMMARS) for name, (case, _) in MODELS.items()
    }


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Hash blocks for which requests waited because another one computed them; here a few tokens are worth a wait."""
    waited: list[int] = []
    wait_for = in_flight_prefixes.InFlightPrefixes.wait_for

    def noted(
        self: in_flight_prefixes.InFlightPrefixes, sequence: Sequence, producer: Sequence, num_hash_blocks: int
    ) -> None:
        waited.append(num_hash_blocks)
        wait_for(self, sequence, producer, num_hash_blocks)

    monkeypatch.setattr(in_flight_prefixes, "MIN_SHARED_TOKENS", 8)
    monkeypatch.setattr(in_flight_prefixes.InFlightPrefixes, "wait_for", noted)
    return waited


@dataclass(kw_only=True)
class Seen:
    """What happened on the way, so that nothing is exact because it did not happen."""

    preemptions: int = 0
    swaps: int = 0
    loaded_blocks: int = 0
    hits: int = 0
    repaired: int = 0
    read_blocks: int = 0  # from the disk
    broken_blocks: int = 0


Margins = list[list[dict[int, float]]]  # by answer and step: log-probabilities of the likeliest tokens


def ask(request_id: str, index: int, prompt: list[int], **more: Any) -> Request:
    """The request of one of `prompts`."""
    return make_request(request_id, prompt, max_tokens=NUM_TOKENS, grammar=GRAMMARS.get(index), **more)


def check(
    engine: Engine, want: list[list[int]], where: object, seen: Seen, *, lose: bool, margins: Margins | None = None
) -> None:
    """All prompts twice: from nothing, and resumed over what is cached then, without its windows if `lose`."""
    fresh = [ask(f"r{i}", i, p) for i, p in enumerate(prompts())]
    resumed = [ask(f"s{i}", i, p, resumed=want[i][: i % NUM_TOKENS]) for i, p in enumerate(prompts())]
    got = run(engine, fresh)
    compare([whole.token_ids for whole in got], want, where, margins)
    if lose:
        lose_windows(engine.scheduler.cache)
    rest = run(engine, resumed)
    tails = [w[i % NUM_TOKENS :] for i, w in enumerate(want)]
    later = margins and [answer[i % NUM_TOKENS :] for i, answer in enumerate(margins)]
    compare([whole.token_ids for whole in rest], tails, where, later)
    seen.preemptions += engine.scheduler.work.num_preemptions
    seen.swaps += engine.scheduler.work.num_swaps
    loads = engine.scheduler.cache.tiers.loads
    seen.loaded_blocks += sum(loads.num_loaded)
    seen.hits += sum(whole.num_cached_tokens for whole in got + rest)
    seen.repaired += engine.scheduler.stats().outcome_tokens.get("repaired", 0)
    for report in engine.executor.rank_reports():
        if report.usage.disk is not None:
            seen.read_blocks += report.usage.disk.num_read
            seen.broken_blocks += report.usage.disk.num_broken
    engine.shutdown()


def compare(got: list[list[int]], want: list[list[int]], where: object, margins: Margins | None) -> None:
    """The tokens are equal. With `margins`, one answer in ten may go its own way at a step where its token was nearly as likely."""
    different = [i for i, tokens in enumerate(got) if tokens != want[i]]
    if margins is None:
        assert not different, where
        return
    assert len(different) <= len(want) // 10, where
    for i in different:
        step = next(step for step, token in enumerate(want[i]) if got[i][step] != token)
        likely = margins[i][step]
        assert likely[want[i][step]] - likely.get(got[i][step], -math.inf) < CLOSE_CALL, (where, i, step)


def check_mixes(
    model: Path,
    name: str,
    mixes: list[Mix],
    want: list[list[int]],
    tight_kib: int = 0,
    margins: Margins | None = None,
    **settings: Any,
) -> Seen:
    """An engine for each combination gives the reference's tokens; what happened in all of them."""
    case, tight_kib = MODELS[name][0], tight_kib or MODELS[name][1]
    seen = Seen()
    for mix in mixes:
        engine = make_engine(
            str(model),
            **case.settings(),
            **SETTINGS,
            hybrid_kv_cache=mix.hybrid,
            enable_prefix_caching=mix.caching != "off",
            window_repair=mix.caching == "repair",
            max_num_batched_tokens=mix.chunk,
            steps_in_flight=mix.in_flight,
            kv_cache_memory_bytes=8 << 20 if mix.pool == "roomy" else (tight_kib if mix.hybrid else 300) << 10,
            **settings,
        )
        check(engine, want, (name, mix), seen, lose=mix.caching == "repair", margins=margins)
    return seen


def test_every_two_values_meet() -> None:
    """What `pairwise` promises, and that each of its hybrids has every kind of caching."""

    def pairs(mixes: list[tuple[str, Mix]]) -> set[tuple[tuple[int, object], tuple[int, object]]]:
        rows = [(name, mix.caching, mix.pool, mix.in_flight, mix.chunk, mix.hybrid) for name, mix in mixes]
        return {two for row in rows for two in itertools.combinations(enumerate(row), 2)}

    values = itertools.product(MODELS, CACHING, POOLS, IN_FLIGHT, CHUNKS, (True, False))
    possible = [
        (name, Mix(caching, pool, steps, chunk, hybrid)) for name, caching, pool, steps, chunk, hybrid in values
    ]
    assert pairs([(name, mix) for name in MODELS for mix in pairwise(name)]) == pairs(possible)
    for name in MODELS:
        assert {mix.caching for mix in pairwise(name) if mix.hybrid} == set(CACHING)


@pytest.mark.parametrize("name", MODELS)
def test_pairs_are_exact(tiny_model: Path, expected: dict[str, list[list[int]]], waits: list[int], name: str) -> None:
    seen = check_mixes(tiny_model, name, pairwise(name), expected[name])
    assert seen.preemptions > 0
    assert seen.hits > 0
    assert waits
    assert (seen.repaired > 0) == (name not in ("full", "windows only"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "dense"])
@pytest.mark.parametrize("name", MODELS)
def test_every_combination_is_exact(
    tiny_model: Path, expected: dict[str, list[list[int]]], waits: list[int], name: str, hybrid: bool
) -> None:
    seen = check_mixes(tiny_model, name, full_cross(name, hybrid=hybrid), expected[name])
    assert seen.preemptions > 0
    assert seen.hits > 0
    assert waits
    assert (seen.repaired > 0) == (hybrid and name not in ("full", "windows only"))


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("SSF with sinks", "SCF") else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in MODELS
    ],
)
def test_steps_that_run_out_of_memory_are_exact(
    tiny_model: Path, expected: dict[str, list[list[int]]], name: str
) -> None:
    """With everything on, every fifth step fails, each time at another depth. A request that ends is sent again with its tokens."""
    case, tight_kib = MODELS[name]
    m = list(MODELS).index(name)
    engine = make_engine(
        str(tiny_model),
        executor=OutOfMemoryExecutor,
        **case.settings(),
        **SETTINGS,
        max_num_batched_tokens=CHUNKS[m % 3],
        steps_in_flight=IN_FLIGHT[m % 2],
        kv_cache_memory_bytes=tight_kib << 10,
    )
    executor = engine.executor
    assert isinstance(executor, OutOfMemoryExecutor)

    def fault(plan: StepPlan) -> Place | None:
        return PLACES[executor.num_faults % len(PLACES)] if plan.step_id % 5 == 3 and executor.num_faults < 24 else None

    executor.fault = fault
    got: dict[str, list[int]] = {f"r{i}": [] for i in range(len(prompts()))}
    for i, tokens in enumerate(prompts()):
        engine.add(ask(f"r{i}", i, tokens))
    num_ended = 0
    while engine.has_work:
        for event in engine.step():
            request_id, so_far = event.request_id, got[event.request_id]
            so_far += event.token_ids
            if event.error is not None:
                assert event.error.kind == "OutOfMemory"
                num_ended += 1
                i = int(request_id[1:])
                engine.add(ask(request_id, i, prompts()[i], resumed=so_far))
    assert executor.num_faults == 24
    assert num_ended > 12
    assert list(got.values()) == expected[name]
    check(engine, expected[name], name, Seen(), lose=True)  # what failed steps have left in the cache is right


def float_plan(model: Path, case: HybridCase) -> CachePlan:
    """The plan of an engine whose cache is not quantised."""
    engine = make_engine(str(model), **case.settings(), **SETTINGS)
    engine.shutdown()
    return engine.info.plan


CLOSE_CALL = 0.2  # nats
QUANTISED = {"SSF with sinks": "int8", "SCF": "int4", "full": "fp8", "CF": "full=int8"}


@pytest.mark.parametrize(
    "name",
    [name if name == "SSF with sinks" else pytest.param(name, marks=pytest.mark.exhaustive) for name in QUANTISED],
)
def test_quantised_caches_are_exact(tiny_model: Path, name: str) -> None:
    """Whatever is on, the tokens are those of an engine with the same number formats and nothing on, but for close calls.

    The order of a sum depends on how many rows a step has. That moves a key by a few of float32's last bits, and over the edge
    between two stored numbers once in some ten thousand times.
    """
    answers = quantised_answers(tiny_model, name, QUANTISED[name])
    tight_kib = int(MODELS[name][1] * answers.shrunk)
    mixes = [mix for mix in pairwise(name) if mix.hybrid]
    seen = check_mixes(
        tiny_model, name, mixes, answers.want, tight_kib, answers.margins, kv_cache_dtype=QUANTISED[name]
    )
    assert seen.preemptions > 0
    assert seen.hits > 0


@dataclass(frozen=True, slots=True)
class QuantisedAnswers:
    """What an engine with the same number formats, and nothing on, answers, and how likely other tokens were.

    `shrunk` is the size of the cache relative to one that is not quantised.
    """

    want: list[list[int]]
    margins: Margins
    shrunk: float


def quantised_answers(model: Path, name: str, asked: str) -> QuantisedAnswers:
    """The answers of one model under the formats that `asked` names."""
    case = MODELS[name][0]
    plain = make_engine(
        str(model),
        **case.settings(),
        **SETTINGS,
        kv_cache_dtype=asked,
        enable_prefix_caching=False,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=8 << 20,
    )
    fresh = [ask(f"r{i}", i, p, logprobs=8) for i, p in enumerate(prompts())]
    answers = run(plain, fresh)
    margins = [
        [{one.token_id: one.logprob for one in (step.chosen, *step.top)} for step in answer.logprobs]
        for answer in answers
    ]
    plain.shutdown()
    shrunk = plain.info.plan.request_bytes / float_plan(model, case).request_bytes
    return QuantisedAnswers([answer.token_ids for answer in answers], margins, shrunk)


TIERED = {"SSF with sinks": "sinks_window=fp8,full=int8", "SCF": "int4", "full": "int8", "CF": "full=int4", "SF": "fp8"}


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("SSF with sinks", "SCF") else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in TIERED
    ],
)
def test_quantised_caches_are_exact_in_all_tiers(tiny_model: Path, tmp_path: Path, fast_reads: None, name: str) -> None:
    """Quantised blocks and their scales go to the host and to files, and come back, also into a second engine."""
    case, tight_kib = MODELS[name]
    answers = quantised_answers(tiny_model, name, TIERED[name])
    tight_kib = int(0.7 * tight_kib * answers.shrunk)  # fewer run at once, while others wait for the disk
    seen = Seen()
    for turn in range(2):
        engine = make_engine(
            str(tiny_model),
            **case.settings(),
            **SETTINGS,
            kv_cache_dtype=TIERED[name],
            device="cpu",
            max_num_batched_tokens=CHUNKS[turn],
            steps_in_flight=2,
            kv_cache_memory_bytes=tight_kib << 10,
            swap_space=f"{tight_kib}KiB",
            preemption_mode="swap",
            disk_cache=str(tmp_path),
            disk_space="64MiB",
        )
        check(engine, answers.want, (name, turn), seen, lose=True, margins=answers.margins)
    assert seen.swaps > 0
    assert seen.loaded_blocks > 0
    assert seen.hits > 0
    assert seen.read_blocks > 0
    assert seen.broken_blocks == 0


@pytest.mark.parametrize("mode", ["swap", "auto"])
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("SSF with sinks", "SCF") else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in MODELS
    ],
)
def test_the_host_tier_is_exact(
    tiny_model: Path, expected: dict[str, list[list[int]]], waits: list[int], name: str, mode: str
) -> None:
    """With everything on, in a tight pool: blocks go to the host and come back, and preempted requests are swapped."""
    case, tight_kib = MODELS[name]
    m = list(MODELS).index(name) + (mode == "swap")
    seen = Seen()
    engine = make_engine(
        str(tiny_model),
        **case.settings(),
        **SETTINGS,
        # With the smallest chunks few requests run side by side, and whether one is preempted depends on grammars' compile time.
        max_num_batched_tokens=CHUNKS[1 + m % 2],
        steps_in_flight=IN_FLIGHT[m % 2],
        kv_cache_memory_bytes=tight_kib << 10,
        swap_space="2MiB",
        preemption_mode=mode,
    )
    check(engine, expected[name], (name, mode), seen, lose=True)
    assert seen.loaded_blocks > 0
    assert seen.swaps > 0
    assert seen.hits > 0
    assert waits


@pytest.mark.parametrize(
    ("name", "ranks", "pool"),
    [("SSF with sinks", 2, "tight"), pytest.param("SCF", 3, "roomy", marks=pytest.mark.exhaustive)],
)
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
        swap_space="1MiB",
        preemption_mode="swap",
    )
    check(engine, expected[name], (name, ranks), seen, lose=True)
    assert seen.hits > 0
    assert waits
    assert (seen.swaps if pool == "tight" else seen.repaired) > 0
    assert pool == "roomy" or seen.loaded_blocks > 0

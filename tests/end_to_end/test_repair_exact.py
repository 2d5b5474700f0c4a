"""Lost windows, exact answers: a hit that replays a tail gives the tokens of a cold run, whatever the layers and the chunks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine_driver import make_engine, make_request, run
from tests.lost_windows import lose_windows
from tests.oracle_answers import oracle_answers
from tests.tiny_checkpoints import HybridCase, reference_greedy
from transom_core.contract import Request
from transom_core.kv_cache.window_repair import repair_start
from transom_worker.engine.engine import Engine

BLOCK = 8
NUM_TOKENS = 12
CASES = {
    "windows": HybridCase(window=16, pattern="SF"),
    "two windows over one another": HybridCase(window=11, pattern="SSF"),
    "windows with sinks": HybridCase(window=17, sinks=5, pattern="SFF"),
    "chunks": HybridCase(chunk=32, pattern="CF"),
    "ragged chunks": HybridCase(chunk=20, pattern="CCF"),
    "windows over chunks": HybridCase(window=9, chunk=24, pattern="CSF"),
}
LENGTHS = (33, 40, 41, 47, 48, 49, 57, 63, 64, 65, 72, 73, 97, 130, 200)
# Prompts of 49, 57 and 65 tokens hit six, seven and eight units; with windows of 17 two layers reach 32 tokens back.


def prompt(length: int) -> list[int]:
    return [(131 * length + 17 * j) % 1900 + 40 for j in range(length)]


def requests(name: str) -> list[Request]:
    return [make_request(f"{name}{n}", prompt(n), max_tokens=NUM_TOKENS) for n in LENGTHS]


def after_loss(engine: Engine, length: int) -> tuple[int, int]:
    """Where computing starts once a prompt's blocks are there but for the windows, and how many tokens are repaired."""
    specs = [retention.spec for retention in engine.scheduler.cache.retentions]
    whole = (length - 1) // BLOCK * BLOCK
    start = repair_start(specs, whole) // BLOCK * BLOCK
    within_sinks = max(spec.num_sink_blocks for spec in specs) * BLOCK  # nothing else is live there
    return (start, whole - start) if start >= max(within_sinks, BLOCK) else (within_sinks, 0)


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[str, list[list[int]]]:
    prompts = [prompt(n) for n in LENGTHS]
    return {name: oracle_answers(tiny_model, prompts, NUM_TOKENS, case) for name, case in CASES.items()}


@pytest.mark.parametrize(("batched_tokens", "steps_in_flight"), [(1024, 1), (13, 2)])
@pytest.mark.parametrize("name", CASES)
def test_every_way_to_start_gives_the_same_tokens(
    tiny_model: Path, expected: dict[str, list[list[int]]], name: str, batched_tokens: int, steps_in_flight: int
) -> None:
    engine = make_engine(
        str(tiny_model),
        **CASES[name].settings(),
        block_size=BLOCK,
        max_model_len=256,
        max_num_batched_tokens=batched_tokens,
        steps_in_flight=steps_in_flight,
    )
    whole_units = [(n - 1) // BLOCK * BLOCK for n in LENGTHS]
    repairs = [after_loss(engine, n) for n in LENGTHS]
    for way, starts in (
        ("miss", [0] * len(LENGTHS)),
        ("hit", whole_units),
        ("repair", [start for start, _ in repairs]),
        ("again", whole_units),
    ):
        if way == "repair":
            lose_windows(engine.scheduler.cache)
        answers = run(engine, requests(way))
        assert [answer.token_ids for answer in answers] == expected[name], way
        assert [answer.num_cached_tokens for answer in answers] == starts, way
    engine.scheduler.cache.evict_all()
    answers = run(engine, requests("evicted"))
    assert [answer.token_ids for answer in answers] == expected[name]
    assert not any(answer.num_cached_tokens for answer in answers)
    outcomes = engine.scheduler.stats().outcome_tokens
    assert outcomes["repaired"] == sum(tokens for _, tokens in repairs) > 0
    assert sum(outcomes.values()) == 5 * sum(LENGTHS)
    engine.shutdown()


def test_without_repair_lost_windows_are_computed_from_the_last_good_boundary(
    tiny_model: Path, expected: dict[str, list[list[int]]]
) -> None:
    engine = make_engine(
        str(tiny_model), **CASES["windows"].settings(), block_size=BLOCK, max_model_len=256, window_repair=False
    )
    run(engine, requests("miss"))
    lose_windows(engine.scheduler.cache)
    answers = run(engine, requests("lost"))
    assert [answer.token_ids for answer in answers] == expected["windows"]
    assert not any(answer.num_cached_tokens for answer in answers)
    assert "repaired" not in engine.scheduler.stats().outcome_tokens
    engine.shutdown()


def test_an_answer_goes_on_behind_a_repair(tiny_model: Path) -> None:
    """What was published behind a repair serves the next turn: its tokens, too, are those of a cold run."""
    case = CASES["two windows over one another"]
    engine = make_engine(str(tiny_model), **case.settings(), block_size=BLOCK, max_model_len=256)
    first = prompt(70)
    for turn in range(3):
        (answer,) = run(engine, [make_request(f"turn{turn}", first, max_tokens=30)])
        assert answer.token_ids == reference_greedy(tiny_model, first, 30, case, guess=answer.token_ids)
        first = [*first, *answer.token_ids, 77 + turn]
        if turn == 0:
            lose_windows(engine.scheduler.cache)
        assert answer.num_cached_tokens == (0, after_loss(engine, 101)[0], 128)[turn]
    engine.shutdown()

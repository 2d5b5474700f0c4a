"""What a worker tells of its requests: hits, repairs, chunks, preemptions; bounded, and without a word of what was asked."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from engine_driver import make_engine, make_request, run
from lost_windows import lose_windows
from transom_worker.engine.engine import Engine
from transom_worker.errors import RankLost, WorkerLost
from transom_worker.telemetry.request_timelines import (
    MAX_FINISHED_STEPS,
    MAX_LIVES,
    MAX_STEPS,
    Life,
    Lives,
    answer_id_of,
    place_of,
)


def steps_of(engine: Engine, request_id: str, what: str | None = None) -> list[dict[str, Any]]:
    steps = engine.observer.lives.life_of(request_id)
    json.dumps(steps)
    return [step for step in steps if what in (None, step["what"])]


def kinds_of(engine: Engine, request_id: str) -> list[str]:
    return [step["what"] for step in sorted(steps_of(engine, request_id), key=lambda step: step["at_s"])]


def test_a_life_from_the_queue_to_the_end(tiny_model: Path) -> None:
    engine = make_engine(str(tiny_model))
    run(engine, [make_request("chatcmpl-a-0-0", list(range(1, 30)), max_tokens=9)])
    assert kinds_of(engine, "chatcmpl-a") == ["queued", "admitted", "prefill", "first_token", "decode", "finished"]
    assert (
        steps_of(engine, "chatcmpl-a", "queued")[0].items() >= {"ahead": 0, "prompt_tokens": 29, "worker": "0"}.items()
    )
    [prefill] = steps_of(engine, "chatcmpl-a", "prefill")
    assert (prefill["tokens"], prefill["steps"], prefill["sequences"]) == (29, 1, 1)
    [decode] = steps_of(engine, "chatcmpl-a", "decode")
    assert (decode["tokens"], decode["tokens_so_far"], decode["steps"], decode["sequences"]) == (8, 9, 8, 1)
    [finished] = steps_of(engine, "chatcmpl-a", "finished")
    assert (finished["reason"], finished["output_tokens"]) == ("length", 9)
    assert steps_of(engine, "chatcmpl-b") == []
    assert steps_of(engine, "chatcmpl") == []


def test_hits_misses_and_their_reasons(tiny_model: Path) -> None:
    engine = make_engine(str(tiny_model), block_size=8)
    prompt = list(range(1, 30))
    run(engine, [make_request("a", prompt)])
    run(engine, [make_request("b", prompt)])
    run(engine, [make_request("c", prompt, prompt_logprobs=1)])
    first, second, third = (steps_of(engine, name, "admitted")[0] for name in "abc")
    assert (first["missed_never_seen"], first["missed_below_alignment"], first["to_compute"]) == (24, 5, 29)
    assert (second["hit"], second["missed_below_alignment"], second["to_compute"]) == (24, 5, 5)
    assert third["missed_policy"] == 29


def test_a_repair_is_told(tiny_model: Path) -> None:
    engine = make_engine(str(tiny_model), block_size=4, window=8, window_pattern="SF")
    prompt = list(range(1, 62))
    run(engine, [make_request("a", prompt)])
    lose_windows(engine._scheduler.cache)
    run(engine, [make_request("b", prompt)])
    [admitted] = steps_of(engine, "b", "admitted")
    assert admitted["hit"] > 0
    assert admitted["repaired"] > 0
    assert admitted["to_compute"] == 61 - admitted["hit"]


def test_chunks_of_a_prefill_are_one_run(tiny_model: Path) -> None:
    engine = make_engine(str(tiny_model), max_num_batched_tokens=16)
    run(engine, [make_request("a", list(range(1, 60)), max_tokens=2)])
    [prefill] = steps_of(engine, "a", "prefill")
    assert (prefill["tokens"], prefill["steps"]) == (59, 4)


def test_a_step_planned_ahead_is_the_decodes(tiny_model: Path) -> None:
    engine = make_engine(str(tiny_model), steps_in_flight=2)
    run(engine, [make_request("a", list(range(1, 30)), max_tokens=9)])
    [prefill], [decode] = (steps_of(engine, "a", what) for what in ("prefill", "decode"))
    assert (prefill["tokens"], prefill["steps"]) == (29, 1)
    assert (decode["tokens"], decode["steps"], decode["sequences"]) == (8, 8, 1)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("chunk", [8, 1024])
def test_preemptions_and_what_is_computed_again(tiny_model: Path, chunk: int, steps_in_flight: int) -> None:
    engine = make_engine(
        str(tiny_model),
        kv_cache_memory_bytes=24 * 4096,
        block_size=4,
        enable_prefix_caching=False,
        max_model_len=64,
        max_num_batched_tokens=chunk,
        steps_in_flight=steps_in_flight,
    )
    run(engine, [make_request(f"cmpl-{i}-0-0", list(range(i + 1, i + 20)), max_tokens=40) for i in range(4)])
    assert engine.num_preemptions > 0
    steps = [step for i in range(4) for step in steps_of(engine, f"cmpl-{i}")]
    preempted = [step for step in steps if step["what"] == "preempted"]
    assert len(preempted) == engine.num_preemptions
    assert all(step["tokens_lost"] > 0 and step["mode"] == "recompute" for step in preempted)
    assert sum(step["what"] == "admitted_again" for step in steps) == len(preempted)
    again = [step for step in steps if step["what"] == "recompute"]
    assert {step["request_id"] for step in again} == {step["request_id"] for step in preempted}
    for i in range(4):
        own = steps_of(engine, f"cmpl-{i}")
        assert sum(step["what"] == "finished" for step in own) == 1
        decoded = sum(step["tokens"] for step in own if step["what"] == "decode")
        num_prefills = sum(step["what"] in ("prefill", "recompute") for step in own)
        assert 40 - num_prefills <= decoded < 40, own  # a prefill brings a token, unless it is preempted as well
        assert next(step for step in own if step["what"] == "finished")["output_tokens"] == 40
    assert not engine.observer.lives._prefilling
    assert not engine.observer.lives._num_known


def test_those_that_run_are_told_as_they_stand(tiny_model: Path) -> None:
    engine = make_engine(str(tiny_model), max_num_seqs=1)
    engine.add(make_request("a", list(range(1, 20)), max_tokens=20))
    engine.add(make_request("b", list(range(1, 20)), max_tokens=20))
    for _ in range(5):
        engine.step()
    [decode] = steps_of(engine, "a", "decode")
    assert decode["tokens_so_far"] == 5
    assert kinds_of(engine, "b") == ["queued"]
    assert steps_of(engine, "b")[0]["ahead"] == 1
    engine.abort("a")
    assert steps_of(engine, "a", "finished")[0]["reason"] == "abort"
    engine.fail(WorkerLost("gone"))
    assert steps_of(engine, "b", "finished")[0]["reason"] == "error"


def test_a_lost_rank_is_told_to_all_that_run(tiny_model: Path) -> None:
    engine = make_engine(str(tiny_model), max_num_seqs=1)
    for name in "ab":
        engine.add(make_request(name, [1, 2, 3]))
    engine.step()
    engine._lose_ranks(RankLost("rank 1 has ended"))
    assert kinds_of(engine, "a")[-2:] == kinds_of(engine, "b")[-2:] == ["rank_lost", "finished"]
    assert steps_of(engine, "a", "finished")[0]["reason"] == "error"


def test_a_long_decode_is_a_few_runs(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(str(tiny_model))
    monkeypatch.setattr("transom_worker.telemetry.engine_timelines.LEAST_RUN_S", 0.0)
    monkeypatch.setattr("transom_worker.telemetry.engine_timelines.RUN_SHARE", 0.0)
    engine.add(make_request("a", [1, 2, 3], max_tokens=40))
    while engine.has_work:
        engine.step()
        engine._publish_stats()
    runs = steps_of(engine, "a", "decode")
    assert len(runs) > 1
    assert sum(step["tokens"] for step in runs) == 39
    assert runs[-1]["tokens_so_far"] == 40


def test_no_text_and_no_ids_of_tokens(tiny_model: Path) -> None:
    engine = make_engine(str(tiny_model))
    request = make_request("a", list(range(200, 240)), stop=("zebra",), max_tokens=4)
    [whole] = run(engine, [request])
    told = json.dumps(steps_of(engine, "a"))
    assert whole.text not in told
    assert "zebra" not in told
    assert not any(isinstance(value, (list, tuple, dict)) for step in steps_of(engine, "a") for value in step.values())


def test_ids_that_clients_see() -> None:
    for request_id in ("chatcmpl-0f-0-0", "chatcmpl-0f-12-3", "chatcmpl-0f-0-0+2", "chatcmpl-0f"):
        assert answer_id_of(request_id) == "chatcmpl-0f"
    assert [place_of(f"chatcmpl-0f{end}") for end in ("-0-0", "-12-3", "-1-2+2", "")] == [(0, 0), (12, 3), (1, 2), None]


def test_a_long_life_keeps_its_beginning_and_its_end() -> None:
    life = Life("a", 0.0)
    for i in range(10_000):
        life.add("preempted", float(i), tokens=1)
    assert len(life.steps) <= MAX_STEPS
    assert life.steps[0].at_s == 0.0
    assert life.steps[-1].at_s == 9999.0
    [summed] = [step for step in life.steps if step.what == "summed_up"]
    assert summed.facts["steps"] + len(life.steps) - 1 == 10_000
    assert summed.facts["tokens"] == summed.facts["steps"]
    assert [step.at_s for step in life.steps] == sorted(step.at_s for step in life.steps)


def test_the_book_holds_the_last_ones_in_little_memory() -> None:
    num_lives = MAX_LIVES + 200  # these have more than twice the steps that are kept
    tracemalloc.start()
    try:
        lives = Lives()
        stays = Life("stays", 0.0)
        lives.begin(stays)
        for i in range(num_lives):
            life = Life(f"chatcmpl-{i:024x}-0-0", 0.0)
            lives.begin(life)
            for k in range(MAX_STEPS + 40 if i % 10 == 0 else 20):
                life.add("preempted", 1e9 + i + k / 7, mode="recompute", tokens=i, seconds=k / 3, steps=i + k)
            lives.end(life)
        num_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert num_bytes < 20e6
    assert len(lives) <= MAX_LIVES
    assert sum(len(life.steps) for life in lives.newest()) <= MAX_FINISHED_STEPS
    assert lives.running() == [stays]
    assert lives.of_answer(f"chatcmpl-{num_lives - 1:024x}")
    assert not lives.of_answer(f"chatcmpl-{0:024x}")


def test_those_that_run_are_bounded_as_well() -> None:
    lives = Lives(max_lives=10)
    for i in range(30):
        lives.begin(Life(str(i), 0.0))
    assert [life.request_id for life in lives.running()] == [str(i) for i in range(20, 30)]
    lives.end(Life("5", 0.0))
    assert len(lives) == 10

"""Two workers with real engines: one dies in mid-stream, and the text is that of an undisturbed run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import num_in_flight, sample, until
from tests.cluster.router.engine_workers import Mortal, routed
from tests.hooked_executor import HookedExecutor
from transom_cluster.router.router import Router
from transom_core.contract import (
    FinishReason,
    HeavyPolicy,
    Request,
    SamplingParams,
    TokenLogprobs,
    Usage,
    WindowPolicy,
)
from transom_core.settings.settings import Settings
from transom_worker.engine.startup import build_engine
from transom_worker.replica import WorkerReplica

NUM_TOKENS = 40

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "logprobs": 0},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "prompt log-probabilities": {"temperature": 0.0, "prompt_logprobs": 1},
    "window policy": {"temperature": 0.0, "kv_policy": WindowPolicy(sinks=2, window=8)},
    "heavy policy": {"temperature": 0.9, "kv_policy": HeavyPolicy(sinks=0, budget=48)},
}


@dataclass
class Whole:
    """One answer, put together from its events."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    ends: list[tuple[FinishReason | None, object]] = field(default_factory=list)
    usage: Usage | None = None


@pytest.fixture(scope="module")
def replicas(tiny_model: Path) -> Iterator[list[WorkerReplica]]:
    values = {"model": str(tiny_model), "kv_cache_memory_bytes": "4MiB", "max_num_seqs": 8, "dtype": "float32"}
    made = [WorkerReplica(Settings.parse(**values).engine_config(), "tiny", f"w{i}") for i in range(2)]
    yield made
    for replica in made:
        replica.shutdown()


async def answers_of(router: Router, requests: list[Request]) -> list[Whole]:
    wholes = [Whole() for _ in requests]
    async with router.generate(requests) as output:
        while output.num_unfinished:
            for index, event in await output.next():
                whole = wholes[index]
                assert event.error is None
                assert event.position == len(whole.token_ids)
                assert event.text_offset == len(whole.text)
                whole.text += event.text
                whole.token_ids += event.token_ids
                whole.logprobs += event.logprobs or ()
                whole.prompt_logprobs += event.prompt_logprobs or ()
                whole.usage = event.usage or whole.usage
                if event.finish_reason is not None:
                    whole.ends.append((event.finish_reason, event.stop_reason))
    return wholes


def requests_of(cases: Mapping[str, Mapping[str, Any]]) -> list[Request]:
    return [
        Request(
            request_id=f"case-{i}",
            prompt_token_ids=tuple(range(5 + i, 25 + 2 * i)),
            params=SamplingParams(
                **{"max_tokens": NUM_TOKENS, "ignore_eos": True}
                | {name: value for name, value in params.items() if name != "kv_policy"}
            ),
            kv_policy=params.get("kv_policy"),
            seed=1234 + i,
            choice_index=i % 2,
        )
        for i, params in enumerate(cases.values())
    ]


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path, replicas: list[WorkerReplica]) -> tuple[list[Request], list[Whole]]:
    """The requests, one of them with a stop string that its own text has, and their answers by one worker."""

    async def run(cases: Mapping[str, Mapping[str, Any]]) -> tuple[list[Request], list[Whole]]:
        requests = requests_of(cases)
        async with routed(tiny_model, Mortal(replicas[0])) as router:
            return requests, await answers_of(router, requests)

    _, (greedy, *_) = asyncio.run(run(CASES))
    at = len(greedy.text) * 2 // 3
    stops = {"temperature": 0.0, "stop": [greedy.text[at : at + 6]]}
    return asyncio.run(run({"stop string": stops, **CASES}))


@pytest.mark.parametrize("num_events", [0, 1, 25, 70])
async def test_texts_are_those_of_an_undisturbed_run(
    tiny_model: Path, replicas: list[WorkerReplica], undisturbed: tuple[list[Request], list[Whole]], num_events: int
) -> None:
    requests, expected = undisturbed
    dying, other = (Mortal(replica) for replica in replicas)
    dying.num_events = num_events
    async with routed(tiny_model, dying, other) as router:
        got = await answers_of(router, requests)
        assert dying.is_dead
        assert num_in_flight(router) == len(router.queue) == 0
        assert (sample(router, "failovers_total", outcome="resumed") or 0) >= 1
    for one, whole in zip(got, expected, strict=True):
        assert one.text == whole.text
        assert one.token_ids == whole.token_ids
        assert one.ends == whole.ends
        assert len(one.ends) == 1
        assert one.prompt_logprobs == whole.prompt_logprobs
        assert [p.chosen.token_id for p in one.logprobs] == [p.chosen.token_id for p in whole.logprobs]
        assert one.usage is not None
        assert whole.usage is not None
        assert one.usage.num_output_tokens == whole.usage.num_output_tokens
    assert expected[0].ends[0][0] == "stop"
    for replica in replicas:
        await until(lambda replica=replica: not replica.engine.requests)  # type: ignore[misc]
        assert sum(group.active_blocks for group in replica.engine.scheduler.stats().groups) == 0


async def test_the_requests_of_a_failing_step_migrate(
    tiny_model: Path, undisturbed: tuple[list[Request], list[Whole]]
) -> None:
    """The engine ends; its worker says that its requests can continue at others."""
    requests, expected = undisturbed
    values = {"model": str(tiny_model), "kv_cache_memory_bytes": "4MiB", "max_num_seqs": 8, "dtype": "float32"}
    config = Settings.parse(**values).engine_config()
    executor = HookedExecutor(config)
    failing = WorkerReplica(config, "tiny", "f0", engine=build_engine(config, worker="f0", executor=executor))
    sound = WorkerReplica(config, "tiny", "f1")
    num_steps = 0

    def fail() -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 10:
            raise RuntimeError("the device fell over")

    executor.before_step = fail
    async with routed(tiny_model, Mortal(failing), Mortal(sound)) as router:
        got = await answers_of(router, requests)
    assert num_steps > 10
    assert [one.text for one in got] == [whole.text for whole in expected]
    for replica in (failing, sound):
        replica.shutdown()

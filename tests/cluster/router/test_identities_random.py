"""Workers of three models come, drain, break and die at random: every answer is of the one model that it names."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

from tests.cluster.conftest import Api, num_in_flight, running_api, timings, until
from tests.cluster.stub_worker import StubWorker
from tests.how_many import num_examples
from transom_cluster.openai.answer.writers import system_fingerprint
from transom_core.config import FailoverConfig
from transom_core.contract import OutputEvent, Request

UNBOUNDED = FailoverConfig(max_resumes=10**6, max_lost_workers=10**6, wait_s=600.0)
NO_PAUSES = timings(first_reconnect_pause_s=0.0, longest_reconnect_pause_s=0.001, retry_s=0.001, drain_s=0.001)
FIRST = {"1" * 32: "a", "2" * 32: "A", "3" * 32: "0"}  # what a model says first
NUM_TOKENS = 10
AT_ONCE = 20


class Speaker(StubWorker):
    """Counts on from the letter of its model."""

    def event_of(self, request: Request, position: int, *, is_last: bool) -> OutputEvent:
        token_id = ord(FIRST[self.identity]) + position
        event = super().event_of(request, position, is_last=is_last)
        return replace(event, token_ids=(token_id,), text=chr(token_id))


def whole(identity: str) -> str:
    return "".join(chr(ord(FIRST[identity]) + i) for i in range(NUM_TOKENS))


class Chaos:
    """Changes which workers there are."""

    def __init__(self, api: Api, rng: random.Random) -> None:
        self._api, self._rng, self._numbers = api, rng, itertools.count(10)

    def step(self) -> None:
        present = list(self._api.directory.workers.values())
        action = self._rng.choice(["add", "kill", "break", "drain", "wait", "wait"])
        if len(present) < 2 or (action == "add" and len(present) < 5):
            number = next(self._numbers)
            identity = self._rng.choice([*FIRST, list(FIRST)[number // 10 % 3]])
            worker = Speaker(
                worker=f"w{number}", identity=identity, loaded_at_s=float(number), num_turns=number % 4 + 1
            )
            self._api.directory.add(worker)
        elif action == "kill":
            victim = self._rng.choice(present)
            victim.kill()
            self._api.directory.remove(victim)
        elif action == "break" and (open_ones := [one for one in present if one.num_streams]):
            self._rng.choice(open_ones).die()
        elif action == "drain":
            self._api.directory.remove(self._rng.choice(present))


async def ask(api: Api, number: int) -> str:
    """Send one request of one or two prompts; the model of its answer, or "" where that is gone."""
    body: dict[str, Any] = {"max_tokens": NUM_TOKENS, "prompt": ["a", "b"] if number % 3 == 0 else "a"}
    response = await api.complete(**body)
    if response.status_code == 503:
        assert "The model was replaced by another" in response.text
        return ""
    answer = response.json()
    (identity,) = [one for one in FIRST if system_fingerprint(one) == answer["system_fingerprint"]]
    assert {choice["text"] for choice in answer["choices"]} == {whole(identity)}
    return identity


async def test_an_answer_is_of_one_model_whatever_happens_to_workers() -> None:
    rng = random.Random(1)
    first = Speaker(worker="w0", identity="1" * 32, loaded_at_s=1.0)
    found: Counter[str] = Counter()
    async with running_api(first, failover=UNBOUNDED, timings=NO_PAUSES) as api:
        chaos = Chaos(api, rng)
        for _ in range(num_examples(20, 10_000 // AT_ONCE)):
            answers = [asyncio.create_task(ask(api, number)) for number in range(AT_ONCE)]
            while not all(answer.done() for answer in answers):
                chaos.step()
                for _ in range(rng.randrange(40)):
                    await asyncio.sleep(0)
            found.update([await answer for answer in answers])
        await until(lambda: num_in_flight(api.router) == len(api.router.queue) == 0)
    assert set(FIRST) <= set(found)
    assert found[""] < found.total() / 2

"""A worker dies in the middle of reasoning, of a tool call, of JSON: over HTTP, the client gets the response of a calm run.

Ids are random in each run; the n-th id of a response has to stand at the same places. The answers are scripts, so that no model is
needed; tests/end_to_end has real engines and processes.
"""

import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.cluster.conftest import PATIENT, Api, running_api, until
from tests.cluster.speaking_worker import Fate, SpeakingWorker
from tests.cluster.stub_worker import ByteTokenizer
from tests.how_many import ALL_TESTS

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🦜", "note": "say \\"</tool_call>\\""}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
MIXED = f"<think>\nRain? 日本\n</think>\n\nLet me look.\n{WEATHER}\n{TIME}"
ANSWERS = {
    "reasoning, message and calls": MIXED,
    "a JSON document": '{"name": "Zoë", "tags": ["a", "🦜"], "size": {"w": 1.5, "h": null}}',
    "malformed markup": '<think>Hm</think><tool_call>\n{"nome": 1}\n</tool_call> and on',
    "an end inside a call": WEATHER[:-30],
}
TOOLS = [{"name": name, "parameters": {"type": "object"}} for name in ("weather", "time")]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [{"role": "user", "content": "Is it raining?"}],
        "tools": [{"type": "function", "function": tool} for tool in TOOLS],
        "logprobs": True,
    },
    RESPONSES: {"input": "Is it raining?", "tools": [{"type": "function", **tool} for tool in TOOLS], "store": False},
    MESSAGES: {
        "messages": [{"role": "user", "content": "Is it raining?"}],
        "tools": [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in TOOLS],
        "max_tokens": 2000,
    },
}


@dataclass
class Server:
    """One router, which gets new workers for each request."""

    api: Api
    num_workers: int = 0
    calm: dict[str, str] = field(default_factory=dict)  # responses of runs in which no worker dies

    async def response_to(
        self, texts: Sequence[str], *deaths: int, path: str = CHAT, per_event: int = 1, **fields: Any
    ) -> str:
        """Return the response if the workers say `texts`, a text for each choice, and die after these numbers of tokens."""
        fate = Fate(list(deaths))
        workers = [
            SpeakingWorker(
                tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
                texts=texts,
                per_event=per_event,
                worker=f"w{self.num_workers + i}",
                fate=fate,
            )
            for i in range(len(deaths) + 1)
        ]
        self.num_workers += len(workers)
        for worker in workers:
            self.api.directory.add(worker)
        names, connections = {worker.worker for worker in workers}, self.api.router.connections
        await until(lambda: {name for name, connection in connections.items() if connection.is_open} == names)
        body = {**BODIES[path], **({"n": len(texts)} if len(texts) > 1 else {}), **fields}
        response = await self.api.client.post(path, json=body)
        for worker in workers:
            self.api.directory.remove(worker)
        await until(lambda: not connections)
        assert response.status_code == 200, response.text
        assert fate.num_deaths == len(deaths) or "stop" in fields  # a stop string may end the answer before
        return without_chance(response.text)

    async def check(self, texts: Sequence[str], *deaths: int, per_event: int = 1, **fields: Any) -> None:
        """Compare a response with that of a calm run."""
        name = repr((texts, fields))
        if name not in self.calm:
            self.calm[name] = await self.response_to(texts, **fields)
        assert await self.response_to(texts, *deaths, per_event=per_event, **fields) == self.calm[name]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with running_api(tool_call_parser="hermes", reasoning_parser="qwen3", **PATIENT) as api:
        api.directory.remove(api.worker)
        await until(lambda: not api.router.connections)
        yield Server(api)


def without_chance(body: str) -> str:
    """Return the body with numbered ids and without times; of a stream, the chunks of each choice together."""
    numbers: dict[str, int] = {}

    def numbered(match: re.Match[str]) -> str:
        return f"{match[1]}{numbers.setdefault(match[0], len(numbers))}"

    body = re.sub(r"\b([a-z]+[-_])[0-9a-f]{16,}", numbered, body)
    body = re.sub(r'"(created|created_at|completed_at)": ?[\d.]+', r'"\1":0', body)
    return "\n".join(sorted(body.splitlines(), key=lambda line: re.findall(r'"choices":\[\{"index":(\d+)', line)))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("path", "answer"),
    [*((CHAT, answer) for answer in ANSWERS), *((path, next(iter(ANSWERS))) for path in (RESPONSES, MESSAGES))],
)
async def test_a_death_at_every_token(server: Server, path: str, answer: str, stream: bool) -> None:
    """Several tokens in an event make other chunks of a stream, so only whole responses have them."""
    text = ANSWERS[answer]
    daily = 4 if stream and path == CHAT and text == MIXED else 13
    for cut in range(0, len(text.encode()) + 1, 1 if ALL_TESTS else daily):
        for per_event in (1,) if stream else (1, 2, 3, 7) if ALL_TESTS else (1 + cut % 3,):
            await server.check([text], cut, path=path, per_event=per_event, stream=stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_four_choices_go_on_each_where_it_was(server: Server, stream: bool) -> None:
    texts = list(ANSWERS.values())
    for cut in range(0, len("".join(texts).encode()), 1 if ALL_TESTS else 41):
        await server.check(texts, cut, per_event=1 if stream else 1 + cut % 2, stream=stream)


@pytest.mark.parametrize("stop", [" look", "</tool_call>\n<", "Zürich", "e>\n\nLet"])
async def test_stop_strings_that_cut_a_call_or_a_marker(server: Server, stop: str) -> None:
    for cut in range(0, len(MIXED.encode()), 1 if ALL_TESTS else 23):
        await server.check([MIXED], cut, stop=stop, stream=bool(cut % 2))


async def test_a_length_that_ends_in_a_call(server: Server) -> None:
    for cut in range(0, 100, 1 if ALL_TESTS else 17):
        await server.check([MIXED], cut, max_tokens=100)
    (choice,) = json.loads(await server.response_to([MIXED], max_tokens=100))["choices"]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("path", BODIES)
async def test_three_deaths_of_one_answer(server: Server, path: str) -> None:
    for deaths in ((5, 5, 5), (0, 1, 0), (70, 12, 3)):
        for stream in (False, True):
            await server.check([MIXED], *deaths, path=path, stream=stream)

"""A server whose worker speaks what the test gives it (answers with reasoning and calls), and OpenAI's client of it."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.cluster.conftest import HttpServer, http_server
from tests.cluster.speaking_worker import SpeakingWorker
from tests.cluster.stub_worker import ByteTokenizer
from transom_core.contract import Request

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "time", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWER = f"<think>\nRain?\n</think>\n\nLet me look.\n{CALL}\n{OTHER_CALL}"


CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


class Weather(BaseModel):
    """What the model has to say."""

    city: str
    rain_mm: float


class AskWeather(BaseModel):
    """Arguments of a tool."""

    city: str


def says(server: HttpServer, *texts: str) -> None:
    """Have the model answer this, choice by choice."""
    assert isinstance(server.worker, SpeakingWorker)
    server.worker.texts = texts


def last_request(server: HttpServer) -> Request:
    return server.worker.submitted[-1]


@pytest.fixture(scope="module")
def speaking_server() -> Iterator[HttpServer]:
    """It reads calls and reasoning of what `says` has its worker say."""
    worker = SpeakingWorker(tokenizer=ByteTokenizer(), per_event=3)  # type: ignore[arg-type]
    with http_server(worker, tool_call_parser="hermes", reasoning_parser="qwen3") as running:
        yield running


def official_client(server: HttpServer) -> openai.OpenAI:
    """OpenAI's own client, unchanged."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    with official_client(server) as made:
        yield made


@pytest.fixture(scope="module")
def speaking_client(speaking_server: HttpServer) -> Iterator[openai.OpenAI]:
    with official_client(speaking_server) as made:
        yield made

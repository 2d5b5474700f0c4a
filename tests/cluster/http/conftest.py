"""A server whose worker speaks what the test gives it, and OpenAI's client of it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.cluster.conftest import HttpServer, http_server
from tests.cluster.speaking_worker import SpeakingWorker
from tests.cluster.stub_worker import ByteTokenizer


@pytest.fixture(scope="module")
def speaking_server() -> Iterator[HttpServer]:
    """It reads calls and reasoning of what `says` has its worker say."""
    worker = SpeakingWorker(tokenizer=ByteTokenizer(), per_event=3)  # type: ignore[arg-type]
    with http_server(worker, tool_call_parser="hermes", reasoning_parser="qwen3") as running:
        yield running


@pytest.fixture(scope="module")
def speaking_client(speaking_server: HttpServer) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, unchanged."""
    with openai.OpenAI(base_url=f"{speaking_server.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client

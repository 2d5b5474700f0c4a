"""What tests have the worker of `speaking_server` say: answers with reasoning and calls, and the types of what they hold."""

from __future__ import annotations

from pydantic import BaseModel

from tests.cluster.conftest import HttpServer
from tests.cluster.speaking_worker import SpeakingWorker
from transom_core.contract import Request

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "time", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWER = f"<think>\nRain?\n</think>\n\nLet me look.\n{CALL}\n{OTHER_CALL}"


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

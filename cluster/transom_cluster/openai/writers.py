"""From output events to OpenAI's bodies: what both endpoints share, and the interface that the ingress drives.

A writer belongs to one HTTP request. `chunk` turns one event of one choice into server-sent events; `body` turns all events
of all choices into one object. A stream's constant JSON is built once; per token only the text is serialised.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transom_cluster import __version__
from transom_cluster.openai.usage import UsageTotals
from transom_worker.contract import OutputEvent, Request

DONE = "data: [DONE]\n\n"
FINGERPRINT = f"transom-{__version__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseMetadata:
    """The fields that every object of one answer repeats."""

    id: str
    model: str
    created_s: int = field(default_factory=lambda: int(time.time()))

    def fields(self, kind: str) -> dict[str, Any]:
        """In OpenAI's names; `kind` is the object's type."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }


def data_line(payload: dict[str, Any]) -> str:
    """One server-sent event. ASCII, since some clients split lines at Unicode's line separators."""
    return f"data: {json.dumps(payload, separators=(',', ':'))}\n\n"


class Writer(ABC):
    """One answer's writer; see the module's docstring."""

    chunk_kind: str

    def __init__(self, header: ResponseMetadata, requests: Sequence[Request], *, include_usage: bool) -> None:
        self.header = header
        self.usage = UsageTotals(requests)
        self._include_usage = include_usage
        opening = json.dumps(header.fields(self.chunk_kind), separators=(",", ":"))[:-1]
        self._opening = f'data: {opening},"choices":[{{"index":'
        self._closing = "}]" + (',"usage":null' if include_usage else "") + "}\n\n"

    def shown(self, event: OutputEvent) -> OutputEvent:
        """The event as this answer shows it."""
        return event

    @abstractmethod
    def chunk(self, index: int, event: OutputEvent) -> str:
        """Server-sent events for one event of choice `index`; may be empty."""

    @abstractmethod
    def body(self, events: Sequence[Sequence[OutputEvent]]) -> dict[str, Any]:
        """The whole answer, from the events of each choice."""

    def stream_end(self) -> str:
        """What closes a stream in which every choice has ended."""
        if not self._include_usage:
            return DONE
        return data_line({**self.header.fields(self.chunk_kind), "choices": [], "usage": self.usage.body}) + DONE


def last_finish_reason(events: Sequence[OutputEvent]) -> str | None:
    """Why a choice ended."""
    return events[-1].finish_reason if events else None

"""Asks the two generating endpoints as a well-behaved client does, slowly if told, or leaving in the middle; reads answers, whole
or streamed, into one form, and compares two of them."""

import asyncio
import json
import math
import socket
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.serving.soak.cases import Case

LOGPROB_TOLERANCE = 2e-3
PATIENCE_S = 300.0  # longer than a request may wait for a worker: a request that takes longer hangs
SMALL_BUFFER = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]


@dataclass(slots=True)
class Choice:
    """One choice of an answer: its text, why it ended, and its tokens' log-probabilities where they were asked for."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """What came of one request. `is_whole`: the last byte that was due came. `error`: OpenAI's error object.

    `fingerprints` are the `system_fingerprint`s of its parts; an answer of two models has two. `longest_gap_s` is the longest wait
    for a chunk of a stream, the first one included.
    """

    status: int = 0
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    fingerprints: set[str] = field(default_factory=set)
    error: dict[str, Any] | None = None
    retry_after: str | None = None
    is_whole: bool = False
    num_chunks: int = 0
    sent_s: float = field(default_factory=time.monotonic)
    longest_gap_s: float = 0.0
    unreadable: str = ""  # a body that is no JSON, or has another form

    @property
    def is_good(self) -> bool:
        """Whether this is an answer with tokens, to its end."""
        return self.status == 200 and self.is_whole and self.error is None and not self.unreadable

    @property
    def model(self) -> str:
        """The model that the answer names; of several, which is wrong, all."""
        return " and ".join(sorted(self.fingerprints))

    @property
    def kind(self) -> str:
        """How the request ended, in a few words."""
        if self.is_good:
            return "tokens"
        if self.error is not None:
            return f"{self.status} {self.error.get('code') or self.error.get('type')}"
        return f"{self.status} {'unreadable' if self.unreadable else 'broken off'}"

    def read_body(self, content: bytes) -> None:
        """Take a whole body."""
        self.is_whole = self._read(content)

    def read_line(self, line: str) -> None:
        """Take one line of a stream."""
        if line == "data: [DONE]":
            self.is_whole = True
        elif line.startswith("data: ") and self._read(line[6:]) and self.error is None:
            self.num_chunks += 1

    def _read(self, text: bytes | str) -> bool:
        """Take a body or a chunk of one; whether it has the form that it must have."""
        try:
            body = json.loads(text)
            if "error" in body:
                self.error = error_of(body)
            else:
                self._take(body)
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            self.unreadable = f"{problem!r} in {text[:300]!r}"
            return False
        return True

    def _take(self, body: dict[str, Any]) -> None:
        self.usage = body.get("usage") or self.usage
        self.fingerprints |= {body["system_fingerprint"]} if "system_fingerprint" in body else set()
        for part in body["choices"]:
            choice = self.choices.setdefault(part["index"], Choice())
            content = part.get("delta") or part.get("message") or {}
            choice.text += part.get("text") or content.get("content") or ""
            choice.finish_reason = part.get("finish_reason") or choice.finish_reason
            if found := part.get("logprobs"):
                is_chat = "content" in found
                choice.tokens += [one["token"] for one in found["content"]] if is_chat else found["tokens"]
                choice.logprobs += [one["logprob"] for one in found["content"]] if is_chat else found["token_logprobs"]


def error_of(body: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's error object. Raises KeyError or TypeError where the body has another form."""
    error = body["error"]
    if not isinstance(error["message"], str) or not isinstance(error["type"], str):
        raise TypeError("error fields")
    return {name: error[name] for name in ("message", "type", "param", "code")}


def difference(answer: Answer, expected: Answer) -> str | None:
    """Where an answer differs from the calm run's; None if it is the same."""
    if answer.choices.keys() != expected.choices.keys():
        return f"choices {sorted(answer.choices)}, not {sorted(expected.choices)}"
    for index, want in expected.choices.items():
        got = answer.choices[index]
        if (got.text, got.finish_reason) != (want.text, want.finish_reason):
            return f"choice {index}: {got.text!r} ({got.finish_reason}), not {want.text!r} ({want.finish_reason})"
        if got.tokens != want.tokens:
            return f"choice {index}: tokens {got.tokens}, not {want.tokens}"
        if any(not _close(*pair) for pair in zip(got.logprobs, want.logprobs, strict=True)):
            return f"choice {index}: log-probabilities {got.logprobs}, not {want.logprobs}"
    for count in ("prompt_tokens", "completion_tokens"):
        if answer.usage.get(count) != expected.usage.get(count):
            return f"{count} {answer.usage.get(count)}, not {expected.usage.get(count)}"
    return None


def _close(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a == b
    return math.isclose(a, b, rel_tol=LOGPROB_TOLERANCE, abs_tol=LOGPROB_TOLERANCE)


def is_beginning(answer: Answer, expected: Answer) -> bool:
    """Whether what came so far is the beginning of the calm run's answer."""
    return all(
        expected.choices[index].text.startswith(choice.text) if index in expected.choices else False
        for index, choice in answer.choices.items()
    )


class Hung(Exception):
    """No end of an answer within `PATIENCE_S`."""


def http_client(url: str, *, slow: bool = False, address: str | None = None) -> httpx.AsyncClient:
    """A client whose every request has a connection of its own, so that none meets a connection that the server is closing.

    `address` is the client's own one.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    options = SMALL_BUFFER if slow else None
    transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=options, local_address=address)
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, transport=transport, trust_env=False)


async def ask(
    client: httpx.AsyncClient, case: Case, *, stream: bool, pause_s: float = 0.0, leave_after: float = math.inf
) -> Answer:
    """Send a request and read its answer: a stream with a pause after every chunk, and up to `leave_after` chunks.

    Raises:
        httpx.TransportError: the connection broke.
        Hung: the answer did not end.
    """
    answer = Answer()
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    try:
        async with asyncio.timeout(PATIENCE_S), client.stream("POST", case.path, json=case.body | options) as reply:
            answer.status, answer.retry_after = reply.status_code, reply.headers.get("retry-after")
            if stream and reply.status_code == 200:
                await _read_stream(reply, answer, pause_s, leave_after)
            else:
                answer.read_body(await reply.aread())
    except (TimeoutError, httpx.TimeoutException):
        raise Hung(f"{case.name}: {answer.num_chunks} chunks within {PATIENCE_S:.0f} s") from None
    return answer


async def _read_stream(reply: httpx.Response, answer: Answer, pause_s: float, leave_after: float) -> None:
    last_s = answer.sent_s
    async for line in reply.aiter_lines():
        answer.read_line(line)
        now_s = time.monotonic()
        answer.longest_gap_s, last_s = max(answer.longest_gap_s, now_s - last_s), now_s
        if answer.num_chunks >= leave_after:
            return
        if pause_s and line:
            await asyncio.sleep(pause_s)
            last_s = time.monotonic()

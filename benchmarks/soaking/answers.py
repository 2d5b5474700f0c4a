"""Reads answers of the two generating endpoints, whole or streamed, into one form, and compares two of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

LOGPROB_TOLERANCE = 2e-3


@dataclass(slots=True)
class Choice:
    """One choice of an answer: its text, why it ended, and its tokens' log-probabilities where they were asked for."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """What came of one request. `is_whole`: the last byte that was due came. `error`: OpenAI's error object."""

    status: int = 0
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    retry_after: str | None = None
    is_whole: bool = False
    num_chunks: int = 0
    unreadable: str = ""  # a body that is no JSON, or has another form

    @property
    def is_good(self) -> bool:
        """Whether this is an answer with tokens, to its end."""
        return self.status == 200 and self.is_whole and self.error is None and not self.unreadable

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
        try:
            body = json.loads(content)
            if "error" in body:
                self.error = error_of(body)
            else:
                self._take(body)
            self.is_whole = True
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            self.unreadable = f"{problem!r} in {content[:300]!r}"

    def read_line(self, line: str) -> None:
        """Take one line of a stream."""
        if line == "data: [DONE]":
            self.is_whole = True
        elif line.startswith("data: "):
            try:
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    self.error = error_of(chunk)
                else:
                    self._take(chunk)
                    self.num_chunks += 1
            except (ValueError, KeyError, TypeError, AttributeError) as problem:
                self.unreadable = f"{problem!r} in {line[:300]!r}"

    def _take(self, body: dict[str, Any]) -> None:
        self.usage = body.get("usage") or self.usage
        for part in body["choices"]:
            choice = self.choices.setdefault(part["index"], Choice())
            content = part.get("delta") or part.get("message") or {}
            choice.text += part.get("text") or content.get("content") or ""
            choice.finish_reason = part.get("finish_reason") or choice.finish_reason
            if found := part.get("logprobs"):
                entries = found.get("content")
                choice.tokens += [one["token"] for one in entries] if entries is not None else found["tokens"]
                choice.logprobs += (
                    [one["logprob"] for one in entries] if entries is not None else found["token_logprobs"]
                )


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
    return a == b if a is None or b is None else abs(a - b) <= LOGPROB_TOLERANCE * max(1.0, abs(b))


def is_beginning(answer: Answer, expected: Answer) -> bool:
    """Whether what came so far is the beginning of the calm run's answer."""
    return all(
        expected.choices[index].text.startswith(choice.text) if index in expected.choices else False
        for index, choice in answer.choices.items()
    )

"""From the bytes of streamed answers to figures: first token, gaps between tokens, throughput, percentiles."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from load_client import RawAnswer
from load_connection import decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One complete answer. Gaps are between events that carry text; an event may carry more than one token."""

    first_token_s: float
    end_to_end_s: float
    gaps_s: tuple[float, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Percentiles:
        """From seconds; zeros when there are none."""
        values = sorted(1e3 * value for value in seconds) or [0.0]
        mean = sum(values) / len(values)
        return cls(mean=mean, p50=_quantile(values, 0.5), p90=_quantile(values, 0.9), p99=_quantile(values, 0.99))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One load level's figures. `wall_s` is from the first request sent to the last answer's end."""

    load: str
    num_answers: int
    errors: dict[str, int]
    wall_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    first_token_ms: Percentiles
    inter_token_ms: Percentiles
    end_to_end_ms: Percentiles
    client_cpu_share: float

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class BrokenAnswer(Exception):
    """A stream that ended early, carried an error or no token."""


def summarise(load: str, raws: Sequence[RawAnswer], *, client_cpu_s: float) -> Summary:
    """Figures of one run; failed answers count as errors and are in no percentile."""
    answers: list[Answer] = []
    errors: Counter[str] = Counter()
    for raw in raws:
        try:
            answers.append(read_answer(raw))
        except BrokenAnswer as error:
            errors[str(error)] += 1
    wall_s = max(raw.done_s for raw in raws) - min(raw.sent_s for raw in raws)
    num_output_tokens = sum(answer.num_output_tokens for answer in answers)
    return Summary(
        load=load,
        num_answers=len(answers),
        errors=dict(errors),
        wall_s=wall_s,
        num_prompt_tokens=sum(answer.num_prompt_tokens for answer in answers),
        num_cached_tokens=sum(answer.num_cached_tokens for answer in answers),
        num_output_tokens=num_output_tokens,
        output_tokens_per_s=num_output_tokens / wall_s,
        requests_per_s=len(answers) / wall_s,
        first_token_ms=Percentiles.of(answer.first_token_s for answer in answers),
        inter_token_ms=Percentiles.of(gap_s for answer in answers for gap_s in answer.gaps_s),
        end_to_end_ms=Percentiles.of(answer.end_to_end_s for answer in answers),
        client_cpu_share=client_cpu_s / wall_s,
    )


def read_answer(raw: RawAnswer) -> Answer:
    """Read one answer's events.

    Raises:
        BrokenAnswer: it failed, ended before `[DONE]`, or had no token; the message says which.
    """
    if raw.error:
        raise BrokenAnswer(raw.error)
    times_s: list[float] = []
    usage: dict[str, Any] = {}
    done = False
    for time_s, data in events(read_body(raw)):
        if data == b"[DONE]":
            done = True
            break
        event = json.loads(data)
        if "error" in event:
            raise BrokenAnswer(f"error event: {event['error']}")
        usage = event.get("usage") or usage
        if has_token(event):
            times_s.append(time_s)
    if not done:
        raise BrokenAnswer("the stream ended before [DONE]")
    if not times_s:
        raise BrokenAnswer("the stream had no token")
    return Answer(
        first_token_s=times_s[0] - raw.sent_s,
        end_to_end_s=raw.done_s - raw.sent_s,
        gaps_s=tuple(after - before for before, after in pairwise(times_s)),
        num_prompt_tokens=usage.get("prompt_tokens", 0),
        num_output_tokens=usage.get("completion_tokens", len(times_s)),
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )


def read_body(raw: RawAnswer) -> list[tuple[float, bytes]]:
    """The body's pieces with their times. Raises BrokenAnswer for any status but 200, and for an answer that broke off."""
    try:
        status, body = decode(raw.packets)
    except ConnectionError as error:
        raise BrokenAnswer(str(error)) from None
    if status != 200:
        text = b"".join(data for _, data in body).decode(errors="replace")
        raise BrokenAnswer(f"HTTP {status}: {text[:300]}")
    return body


def events(chunks: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data lines of server-sent events, each with the time when its last byte came."""
    rest = b""
    for time_s, chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield time_s, line[5:].strip()


def has_token(event: dict[str, Any]) -> bool:
    """Whether the event carries text. A completion's event counts even when its text is still an unfinished character."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta")
        if delta is not None:
            return bool(delta.get("content") or delta.get("reasoning_content"))
        return bool(choice.get("text")) or choice.get("finish_reason") is None
    return False


def _quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest of the sorted values."""
    position = share * (len(values) - 1)
    low = int(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)

"""From the bytes of streamed answers to figures: first token, gaps between tokens, throughput, percentiles."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import h11
import numpy as np

from benchmarks.serving.load_client import Packet, RawAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One complete answer. Gaps are between events that carry text; an event may carry more than one token."""

    first_token_s: float
    end_to_end_s: float
    gaps_s: tuple[float, ...]
    num_output_tokens: int


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
        values = 1e3 * np.array(list(seconds) or [0.0])
        p50, p90, p99 = (float(one) for one in np.quantile(values, (0.5, 0.9, 0.99)))
        return cls(mean=float(values.mean()), p50=p50, p90=p90, p99=p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One load level's figures, of the time from the first request sent to the last answer's end."""

    load: str
    num_answers: int
    errors: dict[str, int]
    num_output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    first_token_ms: Percentiles
    inter_token_ms: Percentiles
    end_to_end_ms: Percentiles
    client_cpu_share: float


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
    wall_s = max(1e-9, max(raw.done_s for raw in raws) - min(raw.sent_s for raw in raws))
    num_output_tokens = sum(answer.num_output_tokens for answer in answers)
    return Summary(
        load=load,
        num_answers=len(answers),
        errors=dict(errors),
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
    times_s: list[float] = []
    usage: dict[str, Any] = {}
    for time_s, event in read_events(raw):
        usage = event.get("usage") or usage
        if has_token(event):
            times_s.append(time_s)
    if not times_s:
        raise BrokenAnswer("the stream had no token")
    return Answer(
        first_token_s=times_s[0] - raw.sent_s,
        end_to_end_s=raw.done_s - raw.sent_s,
        gaps_s=tuple(after - before for before, after in pairwise(times_s)),
        num_output_tokens=usage.get("completion_tokens", len(times_s)),
    )


def read_events(raw: RawAnswer) -> Iterator[tuple[float, dict[str, Any]]]:
    """The server-sent events up to `[DONE]`, each with the time when its last byte came. Raises BrokenAnswer."""
    if raw.error:
        raise BrokenAnswer(raw.error)
    status, body = decode(raw.packets)
    if status != 200:
        raise BrokenAnswer(f"HTTP {status}: {b''.join(data for _, data in body).decode(errors='replace')[:300]}")
    rest = b""
    for time_s, data in body:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            text = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:"):
                continue
            if text == b"[DONE]":
                return
            event = json.loads(text)
            if "error" in event:
                raise BrokenAnswer(f"error event: {event['error']}")
            yield time_s, event
    raise BrokenAnswer("the stream ended before [DONE]")


def decode(packets: Sequence[Packet]) -> tuple[int, list[Packet]]:
    """Status and body of an answer, each piece of the body with the time when it came.

    Raises:
        BrokenAnswer: the answer broke off or is not HTTP.
    """
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="GET", target="/", headers=[("host", "x"), ("connection", "close")]))
    parser.send(h11.EndOfMessage())
    status, body = 0, []
    try:
        for time_s, data in [*packets, (0.0, b"")]:
            parser.receive_data(data)
            while (event := parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                match event:
                    case h11.Response():
                        status = event.status_code
                    case h11.Data():
                        body.append((time_s, bytes(event.data)))
                    case h11.EndOfMessage():
                        return status, body
                    case h11.ConnectionClosed():
                        raise BrokenAnswer("the answer broke off")
    except h11.RemoteProtocolError as error:
        raise BrokenAnswer(f"the answer broke off: {error}") from None
    raise BrokenAnswer("the answer broke off")


def has_token(event: dict[str, Any]) -> bool:
    """Whether the event carries a token, which counts even when its text is still an unfinished character."""
    for choice in event.get("choices") or ():
        return bool(choice.get("text")) or choice.get("finish_reason") is None
    return False

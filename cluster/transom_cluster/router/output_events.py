"""Cuts and joins output events: a migrated request may repeat output, and a slow client gets many events at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transom_core.contract import LogprobTable, OutputEvent


def without_first(event: OutputEvent, num_tokens: int, num_chars: int) -> OutputEvent:
    """Return the event without its first `num_tokens` tokens and without the first `num_chars` characters of its text."""
    num_tokens = min(num_tokens, len(event.token_ids))
    num_chars = max(0, num_chars)
    return replace(
        event,
        position=event.position + num_tokens,
        token_ids=event.token_ids[num_tokens:],
        text=event.text[num_chars:],
        text_offset=event.text_offset + min(num_chars, len(event.text)),
        logprobs=None if event.logprobs is None else event.logprobs[num_tokens:],
        prompt_logprobs=None if num_tokens else event.prompt_logprobs,
    )


def joined(events: Sequence[OutputEvent]) -> OutputEvent:
    """Join consecutive events of one choice, none of which has an error, into one event."""
    first, last = events[0], events[-1]
    usages = [event.usage for event in events if event.usage is not None]
    logprobs = LogprobTable.of(one for event in events for one in event.logprobs or ())
    return replace(
        first,
        token_ids=tuple(token_id for event in events for token_id in event.token_ids),
        text="".join(event.text for event in events),
        logprobs=logprobs if len(logprobs) else first.logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=usages[-1] if usages else None,
    )

"""Formats log-probabilities in OpenAI's two styles: one object per token (chat), and parallel lists (completions)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from transom_cluster.openai.response_types import ChosenToken, TextLogprobs, TokenEntry
from transom_worker.contract import Logprob, TokenLogprobs

MIN_LOGPROB = -9999.0  # OpenAI sends this for tokens with probability 0, since JSON has no infinity


class TokenBytes(Protocol):
    """The method of a tokenizer that this module needs."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text."""


def chat_logprobs(positions: Sequence[TokenLogprobs], num_top: int, tokenizer: TokenBytes) -> list[ChosenToken]:
    """Build the entries of `logprobs.content` in a chat completion."""
    return [
        {
            **_entry(position.chosen, tokenizer),
            "top_logprobs": [_entry(top, tokenizer) for top in position.top[:num_top]],
        }
        for position in positions
    ]


class CompletionLogprobs:
    """Builds the parallel lists of one choice, piece by piece; `text_offset` counts characters from the start of the choice's
    text."""

    def __init__(self, num_top: int, tokenizer: TokenBytes) -> None:
        self._num_top = num_top
        self._tokenizer = tokenizer
        self._offset = 0

    def next_tokens(self, positions: Sequence[tuple[int, TokenLogprobs | None]]) -> TextLogprobs:
        """The lists for the choice's next tokens, each given as its id and its log-probabilities; the first prompt token has
        None."""
        tokens, offsets, logprobs, tops = [], [], [], []
        for token_id, position in positions:
            token = _completion_token(token_id, self._tokenizer)
            tokens.append(token)
            offsets.append(self._offset)
            logprobs.append(None if position is None else _finite(position.chosen.logprob))
            tops.append(None if position is None else self._top(position))
            self._offset += len(token)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, position: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for entry in (*position.top[: self._num_top], position.chosen):
            top.setdefault(_completion_token(entry.token_id, self._tokenizer), _finite(entry.logprob))
        return top


def _entry(entry: Logprob, tokenizer: TokenBytes) -> TokenEntry:
    raw = tokenizer.token_bytes(entry.token_id)
    token = raw.decode("utf-8", errors="backslashreplace")
    return {"token": token, "logprob": _finite(entry.logprob), "bytes": list(raw)}


def _completion_token(token_id: int, tokenizer: TokenBytes) -> str:
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)  # OpenAI's form for a part of a character


def _finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB

"""Log-probabilities in OpenAI's two styles: an object per token (chat), parallel lists (completions)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from transom_cluster.openai.response_types import ChosenToken, TextLogprobs, TokenEntry
from transom_worker.contract import Logprob, TokenLogprobs

MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI sends this for tokens that were ruled out


class TokenNames(Protocol):
    """What a tokenizer has to tell here."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text."""


def chat_logprobs(positions: Sequence[TokenLogprobs], num_top: int, names: TokenNames) -> list[ChosenToken]:
    """The entries of `logprobs.content`."""
    return [
        {
            **_entry(position.chosen, names),
            "top_logprobs": [_entry(top, names) for top in position.top[:num_top]],
        }
        for position in positions
    ]


class CompletionLogprobs:
    """Collects the parallel lists of one choice; `text_offset` counts characters from the start of its text."""

    def __init__(self, num_top: int, names: TokenNames) -> None:
        self._num_top = num_top
        self._names = names
        self._offset = 0

    def next_tokens(self, positions: Sequence[tuple[int, TokenLogprobs | None]]) -> TextLogprobs:
        """The object for the next tokens of this choice: (token id, log-probabilities or None)."""
        tokens, offsets, logprobs, tops = [], [], [], []
        for token_id, position in positions:
            token = _completion_token(token_id, self._names)
            tokens.append(token)
            offsets.append(self._offset)
            logprobs.append(None if position is None else _finite(position.chosen.logprob))
            tops.append(None if position is None else self._top(position))
            self._offset += len(token)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, position: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for entry in (*position.top[: self._num_top], position.chosen):
            top.setdefault(_completion_token(entry.token_id, self._names), _finite(entry.logprob))
        return top


def _entry(entry: Logprob, names: TokenNames) -> TokenEntry:
    raw = names.token_bytes(entry.token_id)
    token = raw.decode("utf-8", errors="backslashreplace")
    return {"token": token, "logprob": _finite(entry.logprob), "bytes": list(raw)}


def _completion_token(token_id: int, names: TokenNames) -> str:
    raw = names.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)  # as OpenAI writes parts of a character


def _finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB

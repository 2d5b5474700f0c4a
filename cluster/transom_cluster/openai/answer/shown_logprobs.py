"""Formats log-probabilities in OpenAI's two styles: one object per token (chat), and parallel lists (completions)."""

from collections.abc import Callable, Iterable, Iterator

from transom_cluster.openai.answer.json_pieces import LazyList
from transom_cluster.openai.answer.response_types import ChosenToken, PromptTokenLogprob, TextLogprobs, TokenEntry
from transom_core.contract import Logprob, TokenLogprobs
from transom_core.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # OpenAI sends this for tokens with probability 0, since JSON has no infinity

Position = tuple[int, TokenLogprobs | None]
"""A token id and its log-probabilities; None for the first token of a prompt."""


def chat_logprobs(positions: Iterable[TokenLogprobs], num_top: int, tokenizer: Tokenizer) -> Iterator[ChosenToken]:
    """Make the entries of `logprobs.content` in a chat completion."""
    for position in positions:
        yield {
            **_entry(position.chosen, tokenizer),
            "top_logprobs": [_entry(top, tokenizer) for top in position.top[:num_top]],
        }


def prompt_logprobs(
    positions: Iterable[TokenLogprobs], num_top: int, tokenizer: Tokenizer
) -> Iterator[dict[str, PromptTokenLogprob] | None]:
    """Make the entries of vLLM's `prompt_logprobs`: at each position the prompt's own token and the most likely ones."""
    yield None
    for position in positions:
        yield {
            str(entry.token_id): {
                "logprob": _finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": tokenizer.token_bytes(entry.token_id).decode("utf-8", errors="replace"),
            }
            for entry in (position.chosen, *position.top[:num_top])
        }


def output_positions(logprobs: Iterable[TokenLogprobs]) -> Iterator[Position]:
    """Yield the positions of output tokens."""
    for position in logprobs:
        yield position.chosen.token_id, position


class CompletionLogprobs:
    """Builds the parallel lists of one choice, piece by piece. `text_offset` counts characters from the start of the choice's
    text."""

    def __init__(self, num_top: int, tokenizer: Tokenizer) -> None:
        self._num_top = num_top
        self._tokenizer = tokenizer
        self._offset = 0

    def next_tokens(self, positions: Iterable[Position]) -> TextLogprobs:
        """Return the lists for the choice's next tokens."""
        tokens, offsets, logprobs, tops = [], [], [], []
        for token_id, position in positions:
            token = _completion_token(token_id, self._tokenizer)
            tokens.append(token)
            offsets.append(self._offset)
            logprobs.append(None if position is None else _finite(position.chosen.logprob))
            tops.append(None if position is None else self._top(position))
            self._offset += len(token)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def all_tokens(self, positions: Callable[[], Iterable[Position]]) -> TextLogprobs:
        """Return the lists for all tokens of the choice, whose values are made while they are written. Each call of `positions`
        returns the tokens from the start."""

        def tokens() -> Iterator[str]:
            return (_completion_token(token_id, self._tokenizer) for token_id, _ in positions())

        def offsets() -> Iterator[int]:
            offset = 0
            for token in tokens():
                yield offset
                offset += len(token)

        return {
            "tokens": LazyList(tokens),
            "token_logprobs": LazyList(
                lambda: (None if one is None else _finite(one.chosen.logprob) for _, one in positions())
            ),
            "top_logprobs": LazyList(lambda: (None if one is None else self._top(one) for _, one in positions())),
            "text_offset": LazyList(offsets),
        }

    def _top(self, position: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for entry in (*position.top[: self._num_top], position.chosen):
            top.setdefault(_completion_token(entry.token_id, self._tokenizer), _finite(entry.logprob))
        return top


def _entry(entry: Logprob, tokenizer: Tokenizer) -> TokenEntry:
    raw = tokenizer.token_bytes(entry.token_id)
    token = raw.decode("utf-8", errors="backslashreplace")
    return {"token": token, "logprob": _finite(entry.logprob), "bytes": list(raw)}


def _completion_token(token_id: int, tokenizer: Tokenizer) -> str:
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)  # OpenAI's form for a part of a character


def _finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB

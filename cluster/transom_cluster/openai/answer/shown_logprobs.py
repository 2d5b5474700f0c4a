"""Formats log-probabilities in OpenAI's two styles: one object per token (chat), and parallel lists (completions)."""

from collections.abc import Callable, Iterable, Iterator

from transom_cluster.openai.answer.json_pieces import LazyList
from transom_cluster.openai.answer.response_types import ChosenToken, PromptTokenLogprob, TextLogprobs, TokenEntry
from transom_core.contract import Logprob, TokenLogprobs
from transom_core.text.detokenizer import Detokenizer
from transom_core.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # OpenAI sends this for tokens with probability 0, since JSON has no infinity

Position = tuple[int, TokenLogprobs | None]
"""A token id and the log-probabilities at its position; None for the first token of an echoed prompt."""


def chat_logprobs(tokens: Iterable[TokenLogprobs], num_top: int, tokenizer: Tokenizer) -> Iterator[ChosenToken]:
    """Make the entries of `logprobs.content` in a chat completion: each output token with the `num_top` likeliest ones."""
    for token in tokens:
        yield {
            **_entry(token.chosen, tokenizer),
            "top_logprobs": [_entry(top, tokenizer) for top in token.top[:num_top]],
        }


def prompt_logprobs(
    tokens: Iterable[TokenLogprobs], num_top: int, tokenizer: Tokenizer
) -> Iterator[dict[str, PromptTokenLogprob] | None]:
    """Make the entries of vLLM's `prompt_logprobs`: each prompt token with the `num_top` likeliest ones, by token id."""
    yield None  # the prompt's first token, which nothing predicts; `tokens` are the others
    for token in tokens:
        yield {
            str(entry.token_id): {
                "logprob": _finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": tokenizer.token_bytes(entry.token_id).decode("utf-8", errors="replace"),
            }
            for entry in (token.chosen, *token.top[:num_top])
        }


def positions_of(tokens: Iterable[TokenLogprobs]) -> Iterator[Position]:
    """Yield each token's id beside its log-probabilities."""
    for token in tokens:
        yield token.chosen.token_id, token


class CompletionLogprobs:
    """Builds the parallel lists of one choice: by `next_tokens` for each chunk of a stream, or by `all_tokens` for a response in
    one piece. `text_offset` counts characters of the choice's text before a token: a token within a character adds none, nor does
    a special token, which the text leaves out."""

    def __init__(self, num_top: int, tokenizer: Tokenizer) -> None:
        self._num_top = num_top
        self._tokenizer = tokenizer
        self._offset = 0
        self._detokenizer = Detokenizer(tokenizer)

    def next_tokens(self, positions: Iterable[Position]) -> TextLogprobs:
        """Return the lists for the choice's next tokens."""
        tokens, offsets, chosen, tops = [], [], [], []
        for token_id, logprobs in positions:
            tokens.append(_completion_token(token_id, self._tokenizer))
            offsets.append(self._offset)
            chosen.append(None if logprobs is None else _finite(logprobs.chosen.logprob))
            tops.append(None if logprobs is None else self._top(logprobs))
            self._offset += len(self._detokenizer.push(token_id))
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}

    def all_tokens(self, positions: Callable[[], Iterable[Position]]) -> TextLogprobs:
        """Return the lists for all tokens of the choice. To save memory, their values are made while the JSON is written. Each list
        calls `positions`, which returns the tokens from the start."""

        def tokens() -> Iterator[str]:
            return (_completion_token(token_id, self._tokenizer) for token_id, _ in positions())

        def offsets() -> Iterator[int]:
            offset, detokenizer = 0, Detokenizer(self._tokenizer)
            for token_id, _ in positions():
                yield offset
                offset += len(detokenizer.push(token_id))

        return {
            "tokens": LazyList(tokens),
            "token_logprobs": LazyList(
                lambda: (None if one is None else _finite(one.chosen.logprob) for _, one in positions())
            ),
            "top_logprobs": LazyList(lambda: (None if one is None else self._top(one) for _, one in positions())),
            "text_offset": LazyList(offsets),
        }

    def _top(self, token: TokenLogprobs) -> dict[str, float]:
        """Return text -> log-probability of the likeliest tokens and the chosen one. Of equal texts, the likeliest counts."""
        top: dict[str, float] = {}
        for entry in (*token.top[: self._num_top], token.chosen):
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

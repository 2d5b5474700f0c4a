"""Turns prompts of request bodies into token ids: chat template, tokenizer, and the checks that need the vocabulary.

Long texts are tokenised on threads, so that they do not stall the streams: the tokenizer releases Python's global lock. There are
two for all prompts of a process: one may wait for a slow template. The event loop would wait for the lock behind each further one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from transom_cluster.openai.chat_types import ChatMessage, template_messages
from transom_worker.errors import RequestError
from transom_worker.text.tokenizer import Tokenizer

MAX_INLINE_CHARS = 2_000  # about 0.5 ms of tokenising

Result = TypeVar("Result")

_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="transom-prompts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt as token ids. `turn_boundaries` are the positions (in tokens) where chat turns end."""

    token_ids: tuple[int, ...]
    turn_boundaries: tuple[int, ...] = ()


async def chat_prompt(
    tokenizer: Tokenizer,
    messages: list[ChatMessage],
    *,
    add_generation_prompt: bool = True,
    template_kwargs: dict[str, Any] | None = None,
) -> Prompt:
    """Render messages with the chat template and tokenise the result.

    Raises:
        RequestError: the model has no template, or a message is not text.
    """
    if not tokenizer.has_chat_template:
        raise RequestError("This model has no chat template; use /v1/completions instead.", param="messages")
    plain = template_messages(messages)
    chat = await _run_off_loop_if_long(
        lambda: tokenizer.apply_chat_template(
            plain, add_generation_prompt=add_generation_prompt, extra=template_kwargs
        ),
        num_chars=sum(len(message["content"]) for message in plain),
    )
    return Prompt(token_ids=tuple(chat.token_ids), turn_boundaries=tuple(chat.turn_boundaries))


async def completion_prompts(
    tokenizer: Tokenizer, prompts: Sequence[str] | Sequence[list[int]], *, add_special_tokens: bool = True
) -> list[Prompt]:
    """Tokenise texts, or take token ids as they are.

    Raises:
        RequestError: a prompt has no token.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]

    def encode() -> list[Sequence[int]]:
        return [
            tokenizer.encode(prompt, add_special_tokens=add_special_tokens) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

    token_ids = await _run_off_loop_if_long(encode, num_chars=sum(len(text) for text in texts))
    for index, ids in enumerate(token_ids):
        if not ids:
            raise RequestError(f"prompt {index} has no tokens; send at least one.", param="prompt")
    return [Prompt(token_ids=tuple(ids)) for ids in token_ids]


def check_vocabulary(token_ids: Sequence[int], vocab_size: int, *, param: str) -> None:
    """Raise RequestError for a token id outside the vocabulary; `param` names the field."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise RequestError(f"{param} has token id {wrong}; ids are from 0 to {vocab_size - 1}.", param=param)


async def _run_off_loop_if_long(function: Callable[[], Result], *, num_chars: int) -> Result:
    if num_chars <= MAX_INLINE_CHARS:
        return function()
    return await asyncio.get_running_loop().run_in_executor(_threads, function)

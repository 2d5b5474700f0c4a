"""Turns prompts of request bodies into token ids, with the chat template and the tokenizer, and checks their lengths.

Long texts are tokenised on threads, so that they do not stall other clients' streams: the tokenizer releases the GIL. Chats are
rendered on threads even if they are short, because rendering waits for the process that runs the template.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from transom_cluster.openai.prompt.call_id_forms import with_learnt_call_ids
from transom_cluster.openai.request.message_fields import ChatMessage, template_messages
from transom_cluster.openai.request.request_limits import ModelLimits, check_length, check_total
from transom_core.errors import RequestError
from transom_core.text.chat_template import Prompt
from transom_core.text.tokenizer import CheckLength, Tokenizer

MAX_INLINE_CHARS = 2_000  # about 0.5 ms of tokenising


def render_chat(
    tokenizer: Tokenizer,
    messages: list[ChatMessage],
    *,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
    tool_parser: str | None = None,
    check_length: CheckLength,
) -> Prompt:
    """Render messages with the chat template and tokenise the result. The call blocks until another process has run the template.

    `variables` are the template's variables, including `tools`. `tool_parser` names the markup of the model's tool calls.

    Raises:
        RequestError: the model has no template, a message is not text, or the template refuses the messages.
        PromptTooLong: `check_length` refuses the number of tokens.
    """
    if not tokenizer.has_chat_template:
        raise RequestError("This model has no chat template; use /v1/completions instead.", param="messages")
    return tokenizer.apply_chat_template(
        with_learnt_call_ids(template_messages(messages), tool_parser),
        add_generation_prompt=add_generation_prompt,
        extra=variables or None,
        check_length=check_length,
    )


def encode_prompts(
    tokenizer: Tokenizer,
    prompts: Sequence[str] | Sequence[list[int]] | Sequence[tuple[str, str]],
    *,
    limits: ModelLimits,
    add_special_tokens: bool = True,
) -> list[Prompt]:
    """Tokenise texts, or pairs of texts, or take token ids as they are.

    Raises:
        RequestError: a prompt has no tokens, or all prompts together have too many.
        PromptTooLong: a text exceeds the limits.
    """
    check = functools.partial(check_length, max_tokens=None, limits=limits, param="prompt")
    found: list[Prompt] = []
    num_tokens = 0
    for prompt in prompts:
        if isinstance(prompt, list):
            ids = prompt
        else:
            texts = (prompt,) if isinstance(prompt, str) else prompt
            ids = tokenizer.encode(*texts, add_special_tokens=add_special_tokens, check_length=check)
        num_tokens += len(ids)
        check_total(num_tokens, 1, limits, param="prompt")  # before the next prompt is encoded
        found.append(Prompt(token_ids=tuple(ids)))
    for index, one in enumerate(found):
        if not one.token_ids:
            raise RequestError(f"prompt {index} has no tokens; send at least one.", param="prompt")
    return found

"""Bodies of answers as the API's own description shows them. Writers build them as plain dicts; tests hold the two together."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length"]


class ResponseModel(BaseModel):
    """Base of answers: nothing besides what is named."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorObject(ResponseModel):
    """What went wrong; `param` names the field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(ResponseModel):
    """Every error's body, and the event that ends a stream which fails."""

    error: ErrorObject


class CachedTokens(ResponseModel):
    """Prompt tokens that came from the cache."""

    cached_tokens: int


class UsageObject(ResponseModel):
    """Token counts of the whole request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TokenEntry(ResponseModel):
    """A token with its natural log-probability; one that was ruled out has -9999."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(TokenEntry):
    """The token of one position, and the most likely ones there."""

    top_logprobs: list[TokenEntry]


class ChatLogprobs(ResponseModel):
    """A log-probability for every token of the message."""

    content: list[ChosenToken]
    refusal: None


class AssistantMessage(ResponseModel):
    """The answer's text."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(ResponseModel):
    """One of `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(ResponseModel):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageObject


class TextLogprobs(ResponseModel):
    """Parallel lists, an entry a token; null where nothing comes before the token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(ResponseModel):
    """One of `n` continuations of one of the prompts, prompt by prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason


class Completion(ResponseModel):
    """The continuations of all prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: UsageObject


class Tokens(ResponseModel):
    """Token ids of a text or a chat."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(ResponseModel):
    """The text of token ids."""

    prompt: str


class ModelCard(ResponseModel):
    """A served model; its length is null until a worker was there."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None


class ModelList(ResponseModel):
    """The served models."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(ResponseModel):
    """Whether requests can be served."""

    status: str

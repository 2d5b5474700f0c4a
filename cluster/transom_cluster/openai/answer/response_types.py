"""The JSON bodies of responses, as typed dicts.

The writers and routes build these dicts, so mypy checks each field that they send. The OpenAPI document shows the same types:
`openai.openapi_document` makes its schemas from them. A response has no field besides the ones that its type names.
"""

from __future__ import annotations

from typing import (
    Literal,
    NotRequired,  # pydantic reads typing's own from Python 3.12 on only
)

from typing_extensions import TypedDict

FinishReason = Literal["stop", "length", "tool_calls"]
"""Why a choice ended without an error: a stop condition, the maximum length, or tools to call before the chat goes on."""


class ErrorObject(TypedDict):
    """What went wrong; `param` names the field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """Every error's body, and the event that ends a stream which fails."""

    error: ErrorObject


class CachedTokens(TypedDict):
    """Prompt tokens that came from the cache."""

    cached_tokens: int


class OutputTokensDetails(TypedDict):
    """Output tokens that were thinking."""

    reasoning_tokens: int


class KvQualityObject(TypedDict):
    """A KV policy beside full attention, over a sample of the output tokens; null where none was compared."""

    compared_tokens: int
    mean_kl: float | None
    max_kl: float | None
    top_token_agreement: float | None
    dropped_attention: float | None


class UsageObject(TypedDict):
    """Token counts of the whole request; `completion_tokens_details` where reasoning or tool calls are looked for in the answer,
    `kv_quality` if the request has asked for it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[OutputTokensDetails]
    kv_quality: NotRequired[KvQualityObject]


class TokenEntry(TypedDict):
    """A token with its natural log-probability; one that was ruled out has -9999."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(TokenEntry):
    """The token of one position, and the most likely ones there."""

    top_logprobs: list[TokenEntry]


class ChatLogprobs(TypedDict):
    """A log-probability for every output token, those of reasoning and of calls included."""

    content: list[ChosenToken]
    refusal: None


class FunctionCall(TypedDict):
    """The tool that the model wants called; its arguments are JSON text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """One call."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(TypedDict):
    """The answer; `content` is null where it has tool calls and no text. Both names of the reasoning have the same text."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One of `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class PromptTokenLogprob(TypedDict):
    """A token that could stand at a place of the prompt; rank 1 is the most likely one."""

    logprob: float
    rank: int
    decoded_token: str


class ChatCompletion(TypedDict):
    """The answer to a chat. `prompt_logprobs`, if the request has asked for them, have the tokens by their ids at each place of the
    prompt, and null at the first."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_logprobs: NotRequired[list[dict[str, PromptTokenLogprob] | None]]


class TextLogprobs(TypedDict):
    """Parallel lists, an entry a token; null where nothing comes before the token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(TypedDict):
    """One of `n` continuations of one of the prompts, prompt by prompt. `prompt_logprobs` are as in a chat completion."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    prompt_logprobs: NotRequired[list[dict[str, PromptTokenLogprob] | None]]


class Completion(TypedDict):
    """The continuations of all prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: UsageObject


class Tokens(TypedDict):
    """Token ids of a text or a chat."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(TypedDict):
    """The text of token ids."""

    prompt: str


class KvGroupCard(TypedDict):
    """A KV cache group of a worker: its number format, and bytes per token with its scales on the first rank."""

    group: str
    dtype: str
    bytes_per_token: float


class ModelVersion(TypedDict):
    """Workers that take requests and have one identity; new requests go to the first version of a list, unless it is full."""

    system_fingerprint: str
    identity: str
    workers: int


class ModelCard(TypedDict):
    """A served model; its length is null until a worker was there, and its KV cache is that of one of the workers there are. It has
    several versions while one replaces another."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None
    kv_cache: list[KvGroupCard]
    versions: list[ModelVersion]


class ModelList(TypedDict):
    """The served models."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(TypedDict):
    """Whether requests can be served."""

    status: str

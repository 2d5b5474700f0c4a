"""The JSON bodies of responses, as typed dicts.

The writers and routes build these dicts, so mypy checks each field that they send. The OpenAPI document shows the same types:
`openai.openapi_document` makes its schemas from them. A response has only the fields that its type names.
"""

from typing import (
    Literal,
    NotRequired,  # pydantic reads typing's own from Python 3.12 on only
)

from typing_extensions import TypedDict

FinishReason = Literal["stop", "length", "tool_calls"]
"""Why a choice ended without an error: a stop condition, the maximum length, or tool calls that the client has to run."""


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
    """Output tokens that were reasoning."""

    reasoning_tokens: int


class KvQualityObject(TypedDict):
    """How close a KV policy comes to full attention, over a sample of the output tokens; null if no token was compared."""

    compared_tokens: int
    mean_kl: float | None
    max_kl: float | None
    top_token_agreement: float | None
    dropped_attention: float | None


class UsageExtensions(TypedDict):
    """What usage has beyond an API's own fields: `kv_quality` if the request asked for it, and `weight_updates` if the model's
    weights were replaced meanwhile."""

    kv_quality: NotRequired[KvQualityObject]
    weight_updates: NotRequired[int]


class UsageObject(UsageExtensions):
    """Token counts of the whole request. It has `completion_tokens_details` if the server parsed the answer for reasoning or tool
    calls."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[OutputTokensDetails]


class TokenEntry(TypedDict):
    """A token with its natural log-probability, which is -9999 for a token of probability 0."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(TokenEntry):
    """The token chosen at one position, and the most likely tokens there."""

    top_logprobs: list[TokenEntry]


class ChatLogprobs(TypedDict):
    """An entry for every output token that the client gets, including those of reasoning and tool calls."""

    content: list[ChosenToken]
    refusal: None


class FunctionCall(TypedDict):
    """The function that the model calls; its arguments are JSON text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """One tool call of the model."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(TypedDict):
    """The answer. `content` is null if there are tool calls and no text. `reasoning_content` and `reasoning` have the same text."""

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
    """A candidate token for one position of the prompt; rank 1 is the most likely one."""

    logprob: float
    rank: int
    decoded_token: str


class ChatCompletion(TypedDict):
    """The answer to a chat. If the request asked for `prompt_logprobs`, the field maps token ids to candidates for each position of
    the prompt, and is null for the first position."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_logprobs: NotRequired[list[dict[str, PromptTokenLogprob] | None]]


class TextLogprobs(TypedDict):
    """Parallel lists with one entry per token. The log-probabilities of a prompt's first token are null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(TypedDict):
    """One of the `n` continuations of a prompt; all choices of a prompt come before those of the next one. `prompt_logprobs` has
    the form of a chat completion's."""

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


class EmbeddingObject(TypedDict):
    """The embedding of one input: numbers, or the base64 text of their bytes as float32, least significant byte first."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class PromptUsage(TypedDict):
    """Token counts of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    """The embeddings of all inputs."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: PromptUsage


class ScoreObject(TypedDict):
    """How well the two texts of one pair fit, from 0 to 1."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(TypedDict):
    """The scores of all pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreObject]
    usage: PromptUsage


class RerankDocument(TypedDict):
    """A document as the client sent it."""

    text: str


class RerankResult(TypedDict):
    """One document's place in the request, its score from 0 to 1, and itself unless the client wants it left out."""

    index: int
    relevance_score: float
    document: NotRequired[RerankDocument]


class Reranking(TypedDict):
    """The documents that fit the query best, in order."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PromptUsage


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
    """A KV cache group of a worker: its number format, and its bytes per token on the first rank, quantization scales included."""

    group: str
    dtype: str
    bytes_per_token: float


class ModelVersion(TypedDict):
    """The workers that take requests and have one identity. New requests go to the list's first version, unless it is full."""

    system_fingerprint: str
    identity: str
    workers: int


class ModelCard(TypedDict):
    """A served model, or a LoRA adapter, whose `root` is its path and whose `parent` is the model. `max_model_len` is null until
    the first worker has joined, and `kv_cache` is that of one present worker. The model has several versions while a new one
    replaces an old one."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    kv_cache: list[KvGroupCard]
    versions: list[ModelVersion]


class ModelList(TypedDict):
    """The served models."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(TypedDict):
    """Return whether requests can be served."""

    status: str

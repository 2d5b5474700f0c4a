"""The JSON bodies of /v1/responses, as typed dicts: the response object, its output items, and its usage."""

from typing import (
    Any,
    Literal,
    NotRequired,  # pydantic reads typing's own from Python 3.12 on only
)

from typing_extensions import TypedDict

from transom_cluster.openai.answer.response_types import ChosenToken, OutputTokensDetails, UsageExtensions

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    """The text of a message. `logprobs` is empty unless the request asked for log-probabilities."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChosenToken]


class MessageItem(TypedDict):
    """A message of the model."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(TypedDict):
    """The text of a reasoning item."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(TypedDict):
    """The model's reasoning. `summary` is empty, because the server makes no summaries."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: NotRequired[str]


class FunctionCallItem(TypedDict):
    """A call of a function; `arguments` is the JSON text of an object."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: NotRequired[str]


class CustomToolCallItem(TypedDict):
    """A call of a custom tool, whose input is free text."""

    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: NotRequired[str]


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem


class InputTokensDetails(TypedDict):
    """Input tokens that came from the prefix cache. `cache_write_tokens` is 0, because writing the cache costs nothing here;
    OpenAI's client needs the field."""

    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(UsageExtensions):
    """Token counts of the request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(TypedDict):
    """Why a response failed; `code` is one of OpenAI's."""

    code: str
    message: str


class IncompleteDetails(TypedDict):
    """Why a response is not complete: the output reached `max_output_tokens` or the model's length."""

    reason: Literal["max_output_tokens"]


class ReasoningEcho(TypedDict):
    """The request's field `reasoning`, with its defaults."""

    effort: str | None
    summary: str | None


class TextEcho(TypedDict):
    """The request's field `text`, with its defaults."""

    format: dict[str, Any]
    verbosity: NotRequired[str]


class RequestEcho(TypedDict):
    """The fields of the request that its response repeats, with their defaults."""

    instructions: str | None
    max_output_tokens: int | None
    parallel_tool_calls: bool
    prompt_cache_key: NotRequired[str]
    reasoning: ReasoningEcho
    safety_identifier: NotRequired[str]
    service_tier: Literal["default"]
    store: Literal[False]
    background: Literal[False]
    previous_response_id: None
    temperature: float
    text: TextEcho
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    metadata: dict[str, str]
    user: NotRequired[str]


class ResponseObject(RequestEcho):
    """The answer to a request. It has `usage` once it has ended without an error."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "failed", "in_progress", "incomplete"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: NotRequired[ResponseUsage]

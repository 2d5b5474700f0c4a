"""The request body of POST /v1/responses, and the fields that this server ignores or refuses there.

The server is stateless: it keeps no response, so each request carries its whole conversation in `input`. Fields that need stored
data (`previous_response_id`, `conversation`, `prompt`, `store: true`, `background: true`) are refused with an error that names
them.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw

from transom_cluster.openai.request.body import LateField, WireModel, any_json
from transom_cluster.openai.request.field_rules import FieldRules
from transom_cluster.openai.request.sampling_fields import SharedFields
from transom_cluster.openai.request.template_variables import TEMPLATE_VARIABLES, ReasoningEffort, Verbosity
from transom_core.contract import MAX_LOGPROBS
from transom_core.errors import RequestError

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
_INCLUDES = (LOGPROBS, ENCRYPTED_REASONING)
_INCLUDES_OF_HOSTED_TOOLS = (  # accepted without effect, since the server has no such tools
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)

_ITEMS = {"type": "array", "items": {"type": "object"}}
INPUT_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "string"}, _ITEMS],
    "examples": ["Why is the sky blue?", [{"role": "user", "content": "Why is the sky blue?"}]],
}
_ARRAY_SCHEMA = {
    "anyOf": [
        {
            "type": "array",
            "items": {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}},
        },
        {"type": "null"},
    ]
}
_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"enum": ["function", "custom", "allowed_tools"]}},
        },
        {"type": "null"},
    ]
}
METADATA: LateField[dict[str, str]] = LateField("metadata", dict[str, str])


class StreamOptions(WireModel, frozen=True, kw_only=True):
    """`stream_options`; `include_obfuscation` is accepted and ignored."""

    include_obfuscation: bool = False


class ReasoningField(WireModel, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """`reasoning`. The server makes no summaries, so `summary` is echoed and has no effect."""

    effort: ReasoningEffort | None = None
    summary: str | None = None
    generate_summary: str | None = None  # the old name of `summary`


class TextFormat(WireModel, frozen=True, kw_only=True):
    """`text.format`: the form that the answer's text must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: Raw = any_json()
    strict: bool | None = None


class TextField(WireModel, frozen=True, kw_only=True):
    """`text`: the answer's form, and `verbosity`, which chat templates may read."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ResponsesRequest(SharedFields, frozen=True, kw_only=True):
    """OpenAI's fields, and vLLM's additional ones. `None` means the default."""

    input: Annotated[Raw, Meta(extra_json_schema=INPUT_SCHEMA)]
    instructions: str | None = None
    tools: Annotated[Raw, Meta(extra_json_schema=_ARRAY_SCHEMA)] = any_json()
    tool_choice: Annotated[Raw, Meta(extra_json_schema=_CHOICE_SCHEMA)] = any_json()
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningField | None = None
    text: TextField | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[str] | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[Raw, Meta(extra_json_schema=METADATA.schema)] = any_json()
    safety_identifier: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    chat_template_kwargs: Annotated[Raw, Meta(extra_json_schema=TEMPLATE_VARIABLES.schema)] = any_json()

    @property
    def num_bytes(self) -> int:
        """Return the length of the JSON that the conversion to a chat parses."""
        return sum(len(memoryview(text)) for text in (self.input, self.tools, self.tool_choice))

    @property
    def includes_logprobs(self) -> bool:
        """Return whether the client asks for log-probabilities of the message's tokens."""
        return LOGPROBS in (self.include or ())

    @property
    def includes_encrypted_reasoning(self) -> bool:
        """Return whether reasoning items have `encrypted_content`, the only field of theirs that some clients send back."""
        return ENCRYPTED_REASONING in (self.include or ())

    def check_stateless(self) -> None:
        """Raise RequestError for a field that needs a stored response, or a value that the server does not support."""
        if self.previous_response_id is not None:
            raise RequestError(
                "previous_response_id is not supported: this server stores no responses. Send the whole conversation as input.",
                param="previous_response_id",
            )
        if self.store:
            raise RequestError(
                "store is true; this server stores no responses. Leave store out, or send false.", param="store"
            )
        if self.background:
            raise RequestError(
                "background is true; this server stores no responses that could be fetched later. Leave background out, "
                "or send false, and stream the response.",
                param="background",
            )
        if self.truncation == "auto":
            raise RequestError(
                "truncation is 'auto'; this server drops no items of the input. Leave truncation out, or send 'disabled', and "
                "shorten the input where it is too long.",
                param="truncation",
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true.", param="stream_options")
        for index, value in enumerate(self.include or ()):
            if value not in _INCLUDES + _INCLUDES_OF_HOSTED_TOOLS:
                allowed = ", ".join(_INCLUDES)
                raise RequestError(
                    f"include[{index}] is {value[:80]!r}; this server can include {allowed}.", param=f"include[{index}]"
                )


RESPONSES_RULES = FieldRules(
    ignored=frozenset(
        {
            "client_metadata",
            "max_tool_calls",  # limits calls of the tools that OpenAI hosts
            "prompt_cache_options",
            "prompt_cache_retention",
        }
    ),
    refused={
        "conversation": (),
        "prompt": (),
        "context_management": ([],),
        "moderation": (),
        "modalities": (["text"],),
    },
)

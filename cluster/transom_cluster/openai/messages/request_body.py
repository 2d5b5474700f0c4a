"""The request bodies of POST /v1/messages and /v1/messages/count_tokens, and the fields that this server ignores or refuses there.

Both routes take the same fields, so that a client may count the tokens of a request by sending its body unchanged.
"""

from typing import Annotated, Literal

from msgspec import Meta, Raw

from transom_cluster.openai.request.body import NULL, OpenModel, WireModel, any_json, inlined_schema
from transom_cluster.openai.request.field_rules import FieldRules
from transom_cluster.openai.request.sampling_fields import SharedFields, StopString
from transom_cluster.openai.request.template_variables import TEMPLATE_VARIABLES, ReasoningEffort


class MarkedModel(OpenModel, frozen=True, kw_only=True):
    """A block that may have a cache mark: with anything but null, later requests repeat the prompt up to the block's end."""

    cache_control: Raw = any_json()

    @property
    def is_marked(self) -> bool:
        """Return whether the block has a cache mark."""
        return self.cache_control != NULL


class TextBlock(MarkedModel, frozen=True, kw_only=True, tag="text"):
    """Text of any role."""

    text: str


class OnlyTextBlock(MarkedModel, frozen=True, kw_only=True):
    """Text where no other type is allowed; msgspec takes a type of only one tagged class for optional."""

    type: Literal["text"]
    text: str


class ThinkingBlock(OpenModel, frozen=True, kw_only=True, tag="thinking"):
    """The assistant's reasoning. The signature of reasoning that was not shown has its text, if this server wrote it."""

    thinking: str = ""
    signature: str = ""


class RedactedThinkingBlock(OpenModel, frozen=True, kw_only=True, tag="redacted_thinking"):
    """The assistant's reasoning, encoded."""

    data: str


class ToolUseBlock(MarkedModel, frozen=True, kw_only=True, tag="tool_use"):
    """A call of the assistant's."""

    id: str
    name: str
    input: dict[str, Raw]


class ToolResultBlock(MarkedModel, frozen=True, kw_only=True, tag="tool_result"):
    """The result of a call, which a user's message brings."""

    tool_use_id: str
    content: str | list[OnlyTextBlock] | None = None
    is_error: bool | None = None


AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock
Content = str | list[OnlyTextBlock] | list[TextBlock | ToolResultBlock] | list[AssistantBlock]


class UserMessage(OpenModel, frozen=True, kw_only=True, tag_field="role", tag="user"):
    """A message of the user, with results of calls."""

    content: str | list[TextBlock | ToolResultBlock]


class AssistantMessage(OpenModel, frozen=True, kw_only=True, tag_field="role", tag="assistant"):
    """A message of the model."""

    content: str | list[AssistantBlock]


class SystemMessage(OpenModel, frozen=True, kw_only=True, tag_field="role", tag="system"):
    """A system message inside the conversation."""

    content: str | list[OnlyTextBlock]


Message = UserMessage | AssistantMessage | SystemMessage


class Tool(OpenModel, frozen=True, kw_only=True):
    """A tool; one with a `type` other than "custom" is Anthropic's own."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: Raw = any_json()
    strict: bool | None = None


class ToolChoice(WireModel, frozen=True, kw_only=True):
    """`tool_choice`: whether the model may or must call tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(OpenModel, frozen=True, kw_only=True):
    """`thinking`: whether the model reasons, how much, and whether the answer shows it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1024)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(WireModel, frozen=True, kw_only=True):
    """`output_config.format`: the JSON Schema of the answer's text."""

    type: Literal["json_schema"]
    schema: Raw


class OutputConfig(WireModel, frozen=True, kw_only=True):
    """`output_config`: how much effort the answer takes, and its form."""

    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class CountTokensRequest(SharedFields, frozen=True, kw_only=True):
    """Anthropic's fields, and vLLM's additional ones. `None` means the default. `max_tokens` 0 only fills the prefix cache."""

    messages: Annotated[Raw, Meta(extra_json_schema=inlined_schema(Annotated[list[Message], Meta(min_length=1)]))]
    system: Annotated[Raw, Meta(extra_json_schema=inlined_schema(str | list[OnlyTextBlock] | None))] = any_json()
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    tools: Annotated[Raw, Meta(extra_json_schema=inlined_schema(list[Tool] | None))] = any_json()
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    stop_sequences: list[StopString] | None = None
    context_management: Raw = any_json()
    chat_template_kwargs: Annotated[Raw, Meta(extra_json_schema=TEMPLATE_VARIABLES.schema)] = any_json()

    @property
    def num_bytes(self) -> int:
        """Return the length of the JSON that the conversion to a chat parses."""
        return sum(len(memoryview(text)) for text in (self.messages, self.system, self.tools))


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """The same fields; `max_tokens` is required."""

    max_tokens: Annotated[int, Meta(ge=0)]


_IGNORED = (  # caching among them: every prefix is cached
    "cache_control", "diagnostics", "inference_geo", "metadata", "prompt_cache_key", "service_tier", "speed",
)  # fmt: skip
MESSAGES_RULES = FieldRules(
    ignored=frozenset((*_IGNORED, "user_profile_id", "workspace_id")), refused={"container": (), "mcp_servers": ([],)}
)

"""Parses the messages of a chat, and converts them to the form that chat templates read.

An assistant's message may have tool calls, and each `tool` message has the result of one call. As in vLLM, the id of a result need
not belong to a call of the chat: clients that shorten long chats leave results without their calls.
"""

from itertools import accumulate
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from transom_cluster.openai.request.body import NULL, WireModel, any_json, decode_field
from transom_cluster.openai.request.body_shape import check_depth
from transom_core.errors import RequestError

MAX_MESSAGES = 4096  # the chat template is rendered once for each of the last turns
# The work for an empty message, content part or tool call, in characters of text that take as long to render.
MESSAGE_CHARS = 100
PART_CHARS = 20
CALL_CHARS = 40
ROLES = ("system", "developer", "user", "assistant", "tool")

_JSON = msgspec.json.Decoder()
_TEXT = msgspec.json.Decoder(str)


class ContentPart(WireModel, frozen=True, kw_only=True):
    """One part of a message's content. The server takes only text; the error for another kind names it."""

    type: str
    text: str | None = None
    image_url: Raw = any_json()
    input_audio: Raw = any_json()
    video_url: Raw = any_json()
    file: Raw = any_json()
    refusal: Raw = any_json()
    cache_control: Raw = any_json()  # anything but null: later requests repeat the prompt up to this part

    @property
    def is_text(self) -> bool:
        """Return whether the part is text and has no other content."""
        others = (self.image_url, self.input_audio, self.video_url, self.file, self.refusal)
        return self.type == "text" and self.text is not None and others == (NULL,) * len(others)


class CalledFunction(WireModel, frozen=True, kw_only=True):
    """The function of a tool call. `arguments` is JSON in a string; the server accepts an object, too."""

    name: str
    arguments: Annotated[Raw, Meta(extra_json_schema={"type": "string"})] = any_json()
    parsed_arguments: Raw = any_json()  # OpenAI's client adds it; ignored


class ToolCall(WireModel, frozen=True, kw_only=True):
    """A call that the assistant made."""

    id: str | None = None
    type: Annotated[str, Meta(extra_json_schema={"enum": ["function"]})] = "function"
    function: CalledFunction
    index: int | None = None  # clients copy it from a stream's deltas; ignored

    @property
    def num_chars(self) -> int:
        """Return roughly how much work the call is, in characters of text."""
        return CALL_CHARS + len(self.function.name) + len(memoryview(self.function.arguments))


class ChatMessage(WireModel, frozen=True, kw_only=True):
    """One message. Fields whose only allowed value is null exist for clients that send a response's message back unchanged."""

    role: Annotated[str, Meta(extra_json_schema={"enum": ROLES})]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of `reasoning_content`
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    audio: None = None
    function_call: None = None
    annotations: Raw = any_json()
    parsed: Raw = any_json()  # OpenAI's client adds it; ignored

    @property
    def num_chars(self) -> int:
        """Return roughly how much work the message is, in characters of text. An empty message counts too, since it is rendered."""
        parts = self.content or ()
        text = len(parts) if isinstance(parts, str) else sum(PART_CHARS + len(part.text or "") for part in parts)
        others = (self.name, self.refusal, self.reasoning_content, self.reasoning)
        calls = sum(call.num_chars for call in self.tool_calls or ())
        return MESSAGE_CHARS + text + calls + sum(len(other or "") for other in others)


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Convert messages to the form that chat templates read: role, plain text, tool calls with their arguments as objects.

    A developer message becomes a system message, because that is the role that templates know. A tool's message without a name gets
    the name of the function whose result it has.

    Raises:
        RequestError: a message is not text, or its tool calls have a wrong form.
    """
    names: dict[str, str] = {}  # call id -> name of the called function
    converted = []
    for index, message in enumerate(messages):
        converted.append(_template_message(message, f"messages[{index}]", names))
        names |= {call.id: call.function.name for call in message.tool_calls or () if call.id is not None}
    return converted


def _template_message(message: ChatMessage, path: str, names: dict[str, str]) -> dict[str, Any]:
    _check_fields(message, path)
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message, path),
    }
    name = message.name
    if message.role == "tool":
        name = name or names.get(message.tool_call_id or "")
        if message.tool_call_id is not None:
            plain["tool_call_id"] = message.tool_call_id
    if name is not None:
        plain["name"] = name
    if message.tool_calls:
        plain["tool_calls"] = [
            _template_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    if marks := _cache_marks(message):
        plain["cache_marks"] = marks
    return plain | _reasoning(message, content=plain["content"])


def _check_fields(message: ChatMessage, path: str) -> None:
    """Raise RequestError for an unknown role, or for a field that belongs to messages of another role."""
    if message.role == "function":
        raise RequestError(
            f"{path}.role is 'function', of an older API; send role 'tool' with tool_call_id.", param=f"{path}.role"
        )
    if message.role not in ROLES:
        allowed = ", ".join(ROLES)
        raise RequestError(f"{path}.role is {message.role[:80]!r}; it must be one of {allowed}.", param=f"{path}.role")
    owners = dict.fromkeys(("tool_calls", "reasoning_content", "reasoning"), "assistant") | {"tool_call_id": "tool"}
    for field, role in owners.items():
        if getattr(message, field) and message.role != role:
            raise RequestError(
                f"{path}.{field} belongs to a message with role {role!r}, and this one has {message.role!r}; leave it out.",
                param=f"{path}.{field}",
            )


def _reasoning(message: ChatMessage, *, content: str | None) -> dict[str, str]:
    """Return an assistant's reasoning under each name that a template may read."""
    text = message.reasoning_content or message.reasoning
    if not text:
        return {}
    named = {"reasoning_content": text, "reasoning": text}
    # gpt-oss reads `thinking`; its template refuses a message with calls that has both `thinking` and content
    return named if message.tool_calls and content else {**named, "thinking": text}


def _template_call(call: ToolCall, path: str) -> dict[str, Any]:
    if call.type != "function":
        raise RequestError(f"{path}.type is {call.type[:80]!r}; it must be 'function'.", param=f"{path}.type")
    arguments = _arguments(call.function.arguments, f"{path}.function.arguments")
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function, **({} if call.id is None else {"id": call.id})}


def _arguments(given: Raw, path: str) -> dict[str, Any] | str:
    """Return a call's arguments as an object, or as text if the text is not a JSON object (such as that of a call that was cut
    off).

    Raises:
        RequestError: the field is neither a text nor an object, or is nested too deeply.
    """
    text = bytes(given)
    is_text = text.startswith(b'"')
    if is_text:
        text = decode_field(_TEXT, given, path).encode()
    if text.strip() in (b"", b"null"):
        return {}
    check_depth(text, path)
    try:
        value = _JSON.decode(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    if is_text:
        return text.decode()
    raise RequestError(f'{path} must be a JSON object as a text, such as \'{{"city": "Paris"}}\'.', param=path)


def _cache_marks(message: ChatMessage) -> tuple[int, ...]:
    """Return the number of characters of the message's text up to the end of each part that has a `cache_control`."""
    parts = [] if message.content is None or isinstance(message.content, str) else message.content
    ends = accumulate(len(part.text or "") for part in parts)
    return tuple(end for part, end in zip(parts, ends, strict=True) if part.cache_control != NULL)


def _text(message: ChatMessage, path: str) -> str | None:
    """Return a message's text; None for an assistant's message that has only tool calls."""
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return message.refusal or (None if message.tool_calls else "")
        if message.role == "tool":
            return ""
        raise RequestError(f"{path}.content is missing; send a string.", param=f"{path}.content")
    for i, part in enumerate(message.content):
        if not part.is_text:
            where = f"{path}.content[{i}]"
            raise RequestError(f"{where} has type {part.type!r}; this model takes text parts only.", param=where)
    return "".join(part.text or "" for part in message.content)

"""`OutputItems`: builds the output items of one response from the parts of the answer, and the stream events that describe them.

One item is open at a time. A part that does not belong to the open item closes it and opens the next one. The events of a message:

    output_item.added  content_part.added  output_text.delta ...  output_text.done  content_part.done  output_item.done

An item's id is made from the response's id and the item's position, so it is the same in all events and in the final object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, Literal

from transom_cluster.openai.answer.chat_message import call_id
from transom_cluster.openai.answer.json_pieces import LazyList
from transom_cluster.openai.answer.opaque_reasoning import write_reasoning
from transom_cluster.openai.answer.response_types import ChosenToken
from transom_cluster.openai.answer.shown_logprobs import chat_logprobs
from transom_cluster.openai.answer.writers import Event
from transom_cluster.openai.responses.custom_input import CustomInput
from transom_cluster.openai.responses.object_types import ItemStatus, OutputItem, ReasoningItem
from transom_cluster.openai.responses.responses_tools import ToolName, ToolNames
from transom_core.contract import LogprobTable, TokenLogprobs
from transom_core.text.markup.parts import AnswerPart, CallArguments, CallBegin, CallEnd, MessageText, ReasoningText
from transom_core.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemOptions:
    """What a request says about its output items. With `num_top_logprobs` None, messages have no log-probabilities."""

    response_id: str
    names: ToolNames
    tokenizer: Tokenizer
    num_top_logprobs: int | None = None
    includes_encrypted_reasoning: bool = False


class OutputItems:
    """The output items of a response that is being written; the last one may be open."""

    def __init__(self, options: ItemOptions) -> None:
        self._options = options
        self._items: list[_Item] = []
        self._open: _Item | None = None

    @property
    def bodies(self) -> list[OutputItem]:
        """Return all items, for the response object."""
        return [item.body for item in self._items]

    def add(self, part: AnswerPart, logprobs: Sequence[TokenLogprobs] = ()) -> Iterator[Event]:
        """Add the next part of the answer, with the log-probabilities of its tokens if it is message text; yield the stream's
        events for it."""
        match part:
            case MessageText(text):
                message = self._open
                if not isinstance(message, _Message):
                    message = _Message(self._options, len(self._items))
                    yield from self._begin(message)
                yield from message.add(text, logprobs)
            case ReasoningText(text):
                reasoning = self._open
                if not isinstance(reasoning, _Reasoning):
                    reasoning = _Reasoning(self._options, len(self._items))
                    yield from self._begin(reasoning)
                yield from reasoning.add(text)
            case CallBegin(_, name):
                tool = self._options.names.of_call(name)
                kind = _CustomCall if tool.kind == "custom" else _FunctionCall
                yield from self._begin(kind(self._options, len(self._items), tool))
            case CallArguments(_, text) if isinstance(self._open, _Call):
                yield from self._open.add(text)
            case CallEnd(_, is_complete) if isinstance(self._open, _Call):
                yield from self._close("completed" if is_complete else "incomplete")

    def end(self, status: Literal["completed", "incomplete"]) -> Iterator[Event]:
        """Close the open item at the answer's end, and yield its events. An answer without any part becomes an empty message."""
        if not self._items:
            yield from self._begin(_Message(self._options, 0))
        yield from self._close(status)

    def _begin(self, item: _Item) -> Iterator[Event]:
        yield from self._close("completed")
        self._open = item
        self._items.append(item)
        yield from item.opening()

    def _close(self, status: ItemStatus) -> Iterator[Event]:
        if self._open is not None:
            self._open.status = status
            yield from self._open.closing()
            self._open = None


class _Item(ABC):
    """One output item. `status` is "in_progress" until the item is closed."""

    prefix: str

    def __init__(self, options: ItemOptions, index: int) -> None:
        self.options = options
        self.index = index
        self.id = f"{self.prefix}_{options.response_id.removeprefix('resp_')}{index:04x}"
        self.status: ItemStatus = "in_progress"

    @property
    @abstractmethod
    def body(self) -> OutputItem:
        """Return the item's JSON object, with its content so far."""

    def opening(self) -> Iterator[Event]:
        """Yield the events for the item's beginning. The item has no content yet."""
        yield {"type": "response.output_item.added", "output_index": self.index, "item": self.body}

    def closing(self) -> Iterator[Event]:
        """Yield the events for the item's end."""
        yield {"type": "response.output_item.done", "output_index": self.index, "item": self.body}

    def event(self, kind: str, **fields: Any) -> Event:
        """Return an event about this item."""
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.index, **fields}


class _TextItem(_Item):
    """An item with one content part, which is text."""

    text_events: str

    def __init__(self, options: ItemOptions, index: int) -> None:
        super().__init__(options, index)
        self._text = StringIO()

    @property
    @abstractmethod
    def part(self) -> Any:
        """The JSON object of the content part, with its text so far."""

    def opening(self) -> Iterator[Event]:
        added = self.body
        added["content"] = []  # type: ignore[typeddict-unknown-key]
        yield {"type": "response.output_item.added", "output_index": self.index, "item": added}
        yield self.event("content_part.added", content_index=0, part=self.part)

    def text_event(self, kind: str, **fields: Any) -> Event:
        """Return an event about the item's text."""
        return self.event(f"{self.text_events}.{kind}", content_index=0, **fields)

    def closing(self) -> Iterator[Event]:
        yield self.event("content_part.done", content_index=0, part=self.part)
        yield from super().closing()


class _Message(_TextItem):
    prefix = "msg"
    text_events = "output_text"

    def __init__(self, options: ItemOptions, index: int) -> None:
        super().__init__(options, index)
        self._logprobs = LogprobTable(1)

    @property
    def part(self) -> Any:
        return {
            "type": "output_text",
            "text": self._text.getvalue(),
            "annotations": [],
            "logprobs": LazyList(lambda: self._entries(self._logprobs)),
        }

    @property
    def body(self) -> OutputItem:
        return {"id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": [self.part]}

    def add(self, text: str, logprobs: Sequence[TokenLogprobs]) -> Iterator[Event]:
        self._text.write(text)
        self._logprobs.extend(logprobs)
        yield self.text_event("delta", delta=text, logprobs=list(self._entries(logprobs)))

    def closing(self) -> Iterator[Event]:
        yield self.text_event("done", text=self._text.getvalue(), logprobs=self.part["logprobs"])
        yield from super().closing()

    def _entries(self, logprobs: Iterable[TokenLogprobs]) -> Iterator[ChosenToken]:
        return chat_logprobs(logprobs, self.options.num_top_logprobs or 0, self.options.tokenizer)


class _Reasoning(_TextItem):
    prefix = "rs"
    text_events = "reasoning_text"

    @property
    def part(self) -> Any:
        return {"type": "reasoning_text", "text": self._text.getvalue()}

    @property
    def body(self) -> OutputItem:
        body: ReasoningItem = {
            "id": self.id,
            "type": "reasoning",
            "status": self.status,
            "summary": [],
            "content": [self.part],
        }
        if self.options.includes_encrypted_reasoning and self.status != "in_progress":
            body["encrypted_content"] = write_reasoning(self._text.getvalue())
        return body

    def add(self, text: str) -> Iterator[Event]:
        self._text.write(text)
        yield self.text_event("delta", delta=text)

    def closing(self) -> Iterator[Event]:
        yield self.text_event("done", text=self._text.getvalue())
        yield from super().closing()


class _Call(_Item):
    def __init__(self, options: ItemOptions, index: int, tool: ToolName) -> None:
        super().__init__(options, index)
        self.tool = tool

    @property
    def call_fields(self) -> dict[str, Any]:
        called = call_id(self.options.response_id, 0, self.index)
        fields = {"id": self.id, "status": self.status, "call_id": called}
        named = {**fields, "name": self.tool.name}
        return named if self.tool.namespace is None else {**named, "namespace": self.tool.namespace}

    @abstractmethod
    def add(self, text: str) -> Iterator[Event]:
        """Add the next piece of the arguments' JSON, and yield the events for it."""


class _FunctionCall(_Call):
    prefix = "fc"

    def __init__(self, options: ItemOptions, index: int, tool: ToolName) -> None:
        super().__init__(options, index, tool)
        self._arguments = StringIO()

    @property
    def body(self) -> OutputItem:
        return {"type": "function_call", **self.call_fields, "arguments": self._arguments.getvalue()}  # type: ignore[return-value]

    def add(self, text: str) -> Iterator[Event]:
        self._arguments.write(text)
        yield self.event("function_call_arguments.delta", delta=text)

    def closing(self) -> Iterator[Event]:
        yield self.event("function_call_arguments.done", name=self.tool.name, arguments=self._arguments.getvalue())
        yield from super().closing()


class _CustomCall(_Call):
    prefix = "ctc"

    def __init__(self, options: ItemOptions, index: int, tool: ToolName) -> None:
        super().__init__(options, index, tool)
        self._input = CustomInput()

    @property
    def body(self) -> OutputItem:
        return {"type": "custom_tool_call", **self.call_fields, "input": self._input.text}  # type: ignore[return-value]

    def add(self, text: str) -> Iterator[Event]:
        yield from self._delta(self._input.push(text))

    def closing(self) -> Iterator[Event]:
        yield from self._delta(self._input.end())
        yield self.event("custom_tool_call_input.done", input=self._input.text)
        yield from super().closing()

    def _delta(self, text: str) -> Iterator[Event]:
        if text:
            yield self.event("custom_tool_call_input.delta", delta=text)

"""What a request says about its answer: which tools may be called, and what the answer must be."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


class MarkupTokenizer(Protocol):
    """The part of `transom_core.text.tokenizer.Tokenizer` that markup needs."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the ids of the tokens that end an answer."""

    def marker_id(self, text: str) -> int | None:
        """Return the id of the one token that is this marker; None if the text consists of ordinary tokens."""

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is special; `skip_special_tokens` leaves its text out of an answer."""

    def token(self, token_id: int) -> str:
        """Return a token's own text."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the model may call. `parameters` is the JSON schema of its arguments; an empty one allows any object."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""
    strict: bool = False


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """What the markup of an answer needs to know about the request.

    `prompt_end` is the end of the rendered prompt, about 200 characters. It shows whether the prompt has already opened the model's
    reasoning.
    """

    tools: tuple[ToolSpec, ...] = ()
    parses_tools: bool = False
    parses_reasoning: bool = False
    prompt_end: str = ""

    @property
    def is_parsed(self) -> bool:
        """Return whether an answer may have other parts than its message. If not, its text goes to the client unchanged."""
        return self.parses_tools or self.parses_reasoning


@dataclass(frozen=True, slots=True)
class FreeAnswer:
    """The message is any text."""


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    """The message is JSON, valid against `schema`; None: any JSON object."""

    schema: Mapping[str, Any] | bool | None = None


@dataclass(frozen=True, slots=True)
class LarkAnswer:
    """The message matches the rule `start` of this grammar, which is in llguidance's dialect of Lark."""

    text: str


@dataclass(frozen=True, slots=True)
class RegexAnswer:
    """The whole message matches a regular expression."""

    pattern: str


@dataclass(frozen=True, slots=True)
class ChoiceAnswer:
    """The message is one of these texts."""

    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ToolsDemand:
    """The tools that an answer may call, and whether it must call one.

    - `auto`: the answer is a message or calls. A `strict` tool's arguments are valid against its schema.
    - `required`: the answer is at least one call. All arguments are valid against their tools' schemas.

    `names` are the tools that may be called. Without `parallel`, there is at most one call.
    """

    mode: Literal["auto", "required"]
    names: tuple[str, ...]
    parallel: bool = True


MessageDemand = FreeAnswer | JsonAnswer | LarkAnswer | RegexAnswer | ChoiceAnswer

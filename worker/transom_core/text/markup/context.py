"""What a request says about its answer: the tools that may be called, and what the answer has to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


class MarkupTokenizer(Protocol):
    """The part of `transom_core.text.tokenizer.Tokenizer` that markup needs."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""

    def marker_id(self, text: str) -> int | None:
        """The id of the one token that is this marker; None where the text is ordinary tokens."""

    def is_special(self, token_id: int) -> bool:
        """Whether a token is special, so that it may have no text in an answer."""

    def token(self, token_id: int) -> str:
        """A token's own text."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the model may call. `parameters` is the JSON schema of its arguments; an empty one allows any object."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""
    strict: bool = False


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """The request as its answer's markup sees it.

    `prompt_end` is the end of the rendered prompt, some 200 characters: it shows whether the prompt has opened the model's
    reasoning already.
    """

    tools: tuple[ToolSpec, ...] = ()
    parses_tools: bool = False
    parses_reasoning: bool = False
    prompt_end: str = ""

    @property
    def is_parsed(self) -> bool:
        """Whether an answer may have other parts than its message. Otherwise its text goes to the client as it is."""
        return self.parses_tools or self.parses_reasoning


@dataclass(frozen=True, slots=True)
class FreeAnswer:
    """Nothing is demanded of the answer."""


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    """The message is JSON, valid against `schema`; None: any JSON object."""

    schema: Mapping[str, Any] | bool | None = None


@dataclass(frozen=True, slots=True)
class LarkAnswer:
    """The message is a text of this grammar, in llguidance's dialect of Lark, from its rule `start`."""

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
    """Which tools an answer may call, and whether it has to.

    - `auto`: the answer is a message, or calls; of a tool that is `strict`, the arguments are valid against the tool's schema;
    - `required`: the answer is calls, at least one, with arguments that are valid against the tools' schemas.

    `names`: the tools that may be called. Without `parallel`, there is at most one call.
    """

    mode: Literal["auto", "required"]
    names: tuple[str, ...]
    parallel: bool = True


MessageDemand = FreeAnswer | JsonAnswer | LarkAnswer | RegexAnswer | ChoiceAnswer

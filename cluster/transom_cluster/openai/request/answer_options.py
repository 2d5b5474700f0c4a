"""`AnswerOptions`: what a request's body says about its answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transom_cluster.openai.request.tool_fields import template_tools
from transom_core.text.markup.context import FreeAnswer, MessageDemand, ToolsDemand, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What a request's body says about its answer.

    `tools` are rendered into the prompt. `tools_demand` says which of them the model may or must call; with None the answer has no
    calls. `message` is the form that the message's text must have, for which the field `message_param` asks. `template_variables`
    go to the chat template. `num_chars` is the length of the JSON of all these fields.
    """

    tools: tuple[ToolSpec, ...] = ()
    tools_demand: ToolsDemand | None = None
    message: MessageDemand = field(default_factory=FreeAnswer)
    message_param: str = ""
    include_reasoning: bool = True
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    num_chars: int = 0

    @property
    def prompt_variables(self) -> dict[str, Any]:
        """Return the variables for the chat template, including the tools."""
        if self.tools_demand is None:
            return dict(self.template_variables)
        return {**self.template_variables, "tools": template_tools(self.tools)}

"""The request body of POST /v1/chat/completions."""

from typing import Annotated

from msgspec import Meta, Raw

from transom_cluster.openai.request.answer_options import AnswerOptions
from transom_cluster.openai.request.body import any_json
from transom_cluster.openai.request.message_fields import MAX_MESSAGES, ChatMessage
from transom_cluster.openai.request.sampling_fields import SamplingFields
from transom_cluster.openai.request.structured_output_fields import FindMarker, read_answer_form
from transom_cluster.openai.request.template_variables import (
    TEMPLATE_VARIABLES,
    ReasoningEffort,
    Verbosity,
    read_template_variables,
    reasoning_variables,
)
from transom_cluster.openai.request.tool_fields import TOOL_CHOICE_SCHEMA, TOOLS_SCHEMA, read_tools, read_tools_demand
from transom_core.contract import MAX_LOGPROBS, SamplingParams
from transom_core.errors import RequestError

EXAMPLE_CHAT = [{"role": "user", "content": "Why is the sky blue?"}]


class ChatCompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """The fields that the server supports. docs/http_api.md lists the fields that it ignores or refuses."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES, examples=[EXAMPLE_CHAT])]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[Raw, Meta(extra_json_schema=TOOLS_SCHEMA)] = any_json()
    tool_choice: Annotated[Raw, Meta(extra_json_schema=TOOL_CHOICE_SCHEMA)] = any_json()
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    verbosity: Verbosity | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: Annotated[Raw, Meta(extra_json_schema=TEMPLATE_VARIABLES.schema)] = any_json()

    def params(self) -> SamplingParams:
        """Build the sampling parameters that the worker receives. `max_completion_tokens` overrides `max_tokens`.

        Raises:
            RequestError: a value is out of range or contradicts another.
        """
        self.check_stream_options()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if max_tokens is not None and max_tokens < 1:
            name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            raise RequestError(f"{name} is {max_tokens}; it must be at least 1.", param=name)
        # None: no logprobs; 0: the logprob of the sampled token; n: those of the n most likely tokens as well
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling_params(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=self.prompt_logprobs)

    @property
    def num_option_bytes(self) -> int:
        """Return the number of bytes of the JSON texts that `answer_options` parses."""
        return self.num_form_bytes + sum(
            len(memoryview(text)) for text in (self.tools, self.tool_choice, self.chat_template_kwargs)
        )

    def answer_options(self, reasoning_parser: str | None, find_marker: FindMarker) -> AnswerOptions:
        """Parse the options of the answer: tools, the response format, and the chat template's variables.

        Raises:
            RequestError: a field is wrong, or two fields contradict each other; `param` names the field.
        """
        tools = read_tools(self.tools)
        variables = reasoning_variables(self.reasoning_effort, reasoning_parser=reasoning_parser)
        if self.verbosity is not None:
            variables["verbosity"] = self.verbosity
        demand = read_tools_demand(self.tool_choice, tools, parallel=self.parallel_tool_calls is not False)
        message, message_param = read_answer_form(self.form_texts, find_marker)
        return AnswerOptions(
            tools=tools,
            tools_demand=demand,
            message=message,
            message_param=message_param,
            include_reasoning=self.include_reasoning is not False,
            template_variables={**variables, **read_template_variables(self.chat_template_kwargs)},
            num_chars=self.num_option_bytes,
        )

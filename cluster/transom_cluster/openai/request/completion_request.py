"""The request bodies of POST /v1/completions, /tokenize and /detokenize."""

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from transom_cluster.openai.request.answer_options import AnswerOptions
from transom_cluster.openai.request.body import BodyModel, any_json, decode_field
from transom_cluster.openai.request.message_fields import MAX_MESSAGES, ChatMessage
from transom_cluster.openai.request.request_limits import ModelLimits, check_choices, check_length, check_total
from transom_cluster.openai.request.sampling_fields import SamplingFields
from transom_cluster.openai.request.structured_output_fields import FindMarker, read_answer_form
from transom_cluster.openai.request.template_variables import TEMPLATE_VARIABLES, read_template_variables
from transom_cluster.openai.request.token_id_lists import count_ids, read_id_lists, read_ids
from transom_cluster.openai.request.tool_fields import TOOLS_SCHEMA, read_tools, template_tools
from transom_core.contract import MAX_LOGPROBS, SamplingParams
from transom_core.errors import RequestError

DEFAULT_MAX_TOKENS = 16  # OpenAI's

_STRING, _IDS = {"type": "string"}, {"type": "array", "items": {"type": "integer"}}
PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [_STRING, {"type": "array", "items": _STRING}, _IDS, {"type": "array", "items": _IDS}],
    "examples": ["Once upon a time", ["One", "Two"], [72, 105]],
}
TOKENS_SCHEMA: dict[str, Any] = {**_IDS, "examples": [[72, 105]]}

_TEXT: msgspec.json.Decoder[str] = msgspec.json.Decoder(str)
_TEXTS: msgspec.json.Decoder[list[str]] = msgspec.json.Decoder(list[str])
_FIRST_ELEMENT = re.compile(rb"\[\s*(.)", re.DOTALL)


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """The fields that the server supports. docs/http_api.md lists the fields that it ignores or refuses."""

    prompt: Annotated[Raw, Meta(extra_json_schema=PROMPT_SCHEMA)]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool = True

    @property
    def echo_only(self) -> bool:
        """Return whether the client wants only the prompt back, with its log-probabilities: `echo` with `max_tokens` 0."""
        return bool(self.echo) and self.max_tokens == 0

    def prompts(self, limits: ModelLimits) -> list[str] | list[list[int]]:
        """Return the prompts of this batch: all texts, or all lists of token ids. Lists that are too long are refused before their
        ids become objects.

        Raises:
            RequestError: there is no prompt, the field has another form, or there are too many choices or ids.
            PromptTooLong: a prompt of ids exceeds the model's length.
        """
        num_choices, text = self.n or 1, bytes(self.prompt)
        first = _FIRST_ELEMENT.match(text)
        if text.startswith(b'"'):
            return [decode_field(_TEXT, text, "prompt")]
        if first is None:
            shown = text[:80].decode(errors="replace")
            raise RequestError(
                f"prompt is {shown}; send a text, token ids, a list of texts, or a list of lists of token ids.",
                param="prompt",
            )
        if first[1] == b"]":
            raise RequestError("prompt is an empty list; send at least one prompt.", param="prompt")
        if first[1] == b'"':
            texts = decode_field(_TEXTS, text, "prompt")
            check_choices(len(texts), num_choices, limits, param="prompt")
            return texts
        if first[1] == b"[":
            check_choices(text.count(b"[") - 1, num_choices, limits, param="prompt")
            check_total(count_ids(text), num_choices, limits, param="prompt")
            return read_id_lists(text, "prompt")
        check_length(count_ids(text), None, limits, param="prompt")
        return [read_ids(text, "prompt")]

    def params(self) -> SamplingParams:
        """Build the sampling parameters that the worker receives. With `echo_only` the engine computes one token, which the writer
        drops.

        Raises:
            RequestError: a value is out of range or contradicts another.
        """
        self.check_stream_options()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(f"best_of is {self.best_of}; only best_of equal to n is supported.", param="best_of")
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self.sampling_params(
            max_tokens=1 if self.echo_only else max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self._num_prompt_logprobs(),
        )

    def _num_prompt_logprobs(self) -> int | None:
        """Return the number of alternatives that the engine has to find for each prompt token, for `prompt_logprobs` and for an
        echo with `logprobs`; None if the response shows none."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((one for one in wanted if one is not None), default=None)

    def answer_options(self, find_marker: FindMarker) -> AnswerOptions:
        """Read what the body says about the answer, which is only the form of its text.

        Raises:
            RequestError: a field is malformed, or several fields ask for a form; `param` names the field.
        """
        message, message_param = read_answer_form(self.form_texts, find_marker)
        return AnswerOptions(message=message, message_param=message_param, num_chars=self.num_form_bytes)


class TokenizeRequest(BodyModel, frozen=True, kw_only=True):
    """A text, or messages for the chat template."""

    prompt: Annotated[str, Meta(examples=["Once upon a time"])] | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None  # default: true for a prompt; for messages the chat template decides
    add_generation_prompt: bool = True
    tools: Annotated[Raw, Meta(extra_json_schema=TOOLS_SCHEMA)] = any_json()
    chat_template_kwargs: Annotated[Raw, Meta(extra_json_schema=TEMPLATE_VARIABLES.schema)] = any_json()
    return_token_strs: bool = False

    def template_variables(self) -> dict[str, Any]:
        """Return the variables for the chat template, including the tools.

        Raises:
            RequestError: a tool is malformed, or a variable is refused.
        """
        variables, tools = read_template_variables(self.chat_template_kwargs), read_tools(self.tools)
        return {**variables, "tools": template_tools(tools)} if tools else variables


class DetokenizeRequest(BodyModel, frozen=True, kw_only=True):
    """Token ids to decode."""

    tokens: Annotated[Raw, Meta(extra_json_schema=TOKENS_SCHEMA)]

    def token_ids(self, limits: ModelLimits) -> list[int]:
        """Return the ids. Raises RequestError if the field is not a list of whole numbers, or has more than the model's length."""
        text = bytes(self.tokens)
        if (num_ids := count_ids(text)) > limits.max_model_len:
            raise RequestError(
                f"tokens has {num_ids:,} ids; at most {limits.max_model_len:,}, the model's length, are decoded at once.",
                param="tokens",
            )
        return read_ids(text, "tokens")

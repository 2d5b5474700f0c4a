"""The fields that request bodies share, and their conversion to `SamplingParams`."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw

from transom_cluster.openai.request.body import BodyModel, LateField, WireModel, any_json
from transom_cluster.openai.request.kv_policy_field import KvPolicyField
from transom_cluster.openai.request.structured_output_fields import FIELDS
from transom_core.contract import MAX_LOGPROBS, SamplingParams
from transom_core.errors import RequestError

MAX_STOP_CHARS = 1024
MAX_TOKEN_ENTRIES = 1024  # the worker handles every entry again for each output token
MAX_NUMBER = 2**31 - 1

StopString = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
_STOP_TOKEN_IDS: LateField[list[int]] = LateField(
    "stop_token_ids", Annotated[list[int], Meta(max_length=MAX_TOKEN_ENTRIES)]
)
_LOGIT_BIAS: LateField[dict[str, float]] = LateField(
    "logit_bias", Annotated[dict[str, float], Meta(max_length=MAX_TOKEN_ENTRIES)]
)


UsageChunks = Literal["none", "last", "every"]
"""Which chunks of a stream have the usage so far."""


class StreamOptions(WireModel, frozen=True, kw_only=True):
    """`stream_options` of OpenAI and vLLM; `include_obfuscation` is accepted and ignored."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class SharedFields(BodyModel, frozen=True, kw_only=True):
    """The fields that chats, text completions and responses all have: OpenAI's, then vLLM's. `None` means the default."""

    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None

    top_k: Annotated[int, Meta(le=MAX_NUMBER)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: StopString | list[StopString] | None = None
    min_tokens: Annotated[int, Meta(le=MAX_NUMBER)] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None  # `check_priority` checks the deployment's range
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    kv_policy: KvPolicyField | None = None  # None: the deployment's default policy
    kv_quality: bool | None = None


_COPIED = (
    *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
)
"""Fields that `SamplingParams` has under the same names, with the same values."""


class SamplingFields(SharedFields, frozen=True, kw_only=True):
    """Adds the fields that only chats and text completions have: OpenAI's, then vLLM's."""

    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: int | None = None
    logit_bias: Annotated[Raw, Meta(extra_json_schema=_LOGIT_BIAS.schema)] = any_json()
    stream_options: StreamOptions | None = None

    stop_token_ids: Annotated[Raw, Meta(extra_json_schema=_STOP_TOKEN_IDS.schema)] = any_json()
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    response_format: Annotated[Raw, Meta(extra_json_schema=FIELDS["response_format"].schema)] = any_json()
    structured_outputs: Annotated[Raw, Meta(extra_json_schema=FIELDS["structured_outputs"].schema)] = any_json()
    guided_json: Annotated[Raw, Meta(extra_json_schema=FIELDS["guided_json"].schema)] = any_json()
    guided_regex: Annotated[Raw, Meta(extra_json_schema=FIELDS["guided_regex"].schema)] = any_json()
    guided_choice: Annotated[Raw, Meta(extra_json_schema=FIELDS["guided_choice"].schema)] = any_json()
    guided_grammar: Annotated[Raw, Meta(extra_json_schema=FIELDS["guided_grammar"].schema)] = any_json()

    @property
    def include_usage(self) -> UsageChunks:
        """Return which chunks of the stream have the usage."""
        if self.stream_options is None or not self.stream_options.include_usage:
            return "none"
        return "every" if self.stream_options.continuous_usage_stats else "last"

    @property
    def num_form_bytes(self) -> int:
        """Return the length of the JSON of `form_texts`."""
        return sum(len(memoryview(text)) for text in self.form_texts.values())

    @property
    def form_texts(self) -> dict[str, Raw]:
        """The JSON of the fields that ask for a form of the answer's text, such as a JSON Schema, by name."""
        return {name: getattr(self, name) for name in FIELDS}

    def check_stream_options(self) -> None:
        """Raise RequestError for stream options without `stream`, as OpenAI does, and for `prompt_logprobs` with `stream`."""
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs come with a whole response only; leave them out, or send stream false.",
                param="prompt_logprobs",
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true.", param="stream_options")

    def check_priority(self, max_priority: int) -> None:
        """Raise RequestError for a priority outside `-max_priority ... max_priority`."""
        priority = self.priority or 0
        if abs(priority) > max_priority:
            given = priority if abs(priority) < 2**63 else f"a number of {len(str(priority))} digits"
            raise RequestError(
                f"priority is {given}; this server takes priorities from {-max_priority} (runs first) to {max_priority} "
                "(runs last). Send one of these, or none, which means 0.",
                param="priority",
            )

    def sampling_params(self, **more: Any) -> SamplingParams:
        """Convert these fields to the sampling parameters that the worker receives; `more` has those of the endpoint's own fields.

        Raises:
            RequestError: a value is out of range; `param` names the field.
        """
        given: dict[str, Any] = {
            **{name: getattr(self, name) for name in _COPIED},
            "stop": (self.stop,) if isinstance(self.stop, str) else self.stop,
            "stop_token_ids": _STOP_TOKEN_IDS.read(self.stop_token_ids),
            "logit_bias": self._logit_bias(),
        }
        return SamplingParams(**{name: value for name, value in given.items() if value is not None}, **more)

    def _logit_bias(self) -> dict[int, float] | None:
        biases = _LOGIT_BIAS.read(self.logit_bias)
        try:
            return None if biases is None else {int(token_id): bias for token_id, bias in biases.items()}
        except ValueError:
            raise RequestError("logit_bias has a key that is not a token id.", param="logit_bias") from None

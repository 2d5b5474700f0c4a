"""The request body of POST /v1/embeddings, and the base of those whose answers are numbers."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw

from transom_cluster.openai.request.body import NULL, BodyModel
from transom_cluster.openai.request.completion_request import PROMPT_SCHEMA, CompletionRequest
from transom_cluster.openai.request.field_rules import FieldRules
from transom_cluster.openai.request.kv_policy_field import KvPolicyField
from transom_core.contract import Pooling, SamplingParams
from transom_core.errors import RequestError

EMBEDDING_RULES = FieldRules(ignored=frozenset({"user"}), refused={"truncate_prompt_tokens": ()})


class PooledRequest(BodyModel, frozen=True, kw_only=True):
    """Fields of completions that requests for embeddings and scores have, too. Their prompts run as a completion of one token that
    the client does not get."""

    add_special_tokens: bool = True
    priority: int | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    kv_policy: KvPolicyField | None = None

    def completion(self, prompt: Raw = NULL) -> CompletionRequest:
        """Return the completion request with these fields."""
        same = ("model", "add_special_tokens", "priority", "cache_salt", "kv_policy")
        fields: dict[str, Any] = {name: getattr(self, name) for name in same}
        return CompletionRequest(prompt=prompt, max_tokens=1, **fields)

    def params(self, pooling: Pooling) -> SamplingParams:
        """Return the sampling parameters that the worker receives."""
        return SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling)


class EmbeddingRequest(PooledRequest, frozen=True, kw_only=True):
    """The fields that the server supports: OpenAI's, and those that choose how hidden states become an embedding."""

    input: Annotated[Raw, Meta(extra_json_schema=PROMPT_SCHEMA)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None

    pooling: Literal["last", "mean"] = "last"
    normalize: bool = True

    def check_dimensions(self, hidden_size: int) -> None:
        """Raise RequestError if the model's embeddings have fewer dimensions than the request asks for."""
        if self.dimensions is not None and self.dimensions > hidden_size:
            raise RequestError(
                f"dimensions is {self.dimensions}; this model's embeddings have {hidden_size}, so ask for fewer.",
                param="dimensions",
            )

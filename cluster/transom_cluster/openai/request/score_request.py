"""The request bodies of POST /v1/rerank and /v1/score: pairs of texts that a model with a classification head scores."""

from typing import Annotated

from msgspec import Meta

from transom_cluster.openai.request.body import WireModel
from transom_cluster.openai.request.embedding_request import PooledRequest
from transom_core.errors import RequestError


class Document(WireModel, frozen=True, kw_only=True):
    """A document as an object."""

    text: str


class RerankRequest(PooledRequest, frozen=True, kw_only=True):
    """The fields of Jina's, Cohere's and vLLM's API that the server supports."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=0)] | None = None  # vLLM's clients send 0 for all
    return_documents: bool = True

    @property
    def texts(self) -> list[str]:
        """Return the documents' texts."""
        return [one if isinstance(one, str) else one.text for one in self.documents]

    def pairs(self) -> list[tuple[str, str]]:
        """Return the query with each document."""
        return [(self.query, text) for text in self.texts]


class ScoreRequest(PooledRequest, frozen=True, kw_only=True):
    """The fields of vLLM's API that the server supports: one text and several, or as many as there are others."""

    text_1: str | list[str]
    text_2: str | list[str]

    def pairs(self) -> list[tuple[str, str]]:
        """Return the texts in pairs. Raises RequestError if their numbers differ, unless `text_1` is one text."""
        first, second = ([one] if isinstance(one, str) else one for one in (self.text_1, self.text_2))
        first = first * len(second) if len(first) == 1 else first
        if len(first) != len(second) or not first:
            raise RequestError(
                f"text_1 has {len(first)} texts and text_2 {len(second)}; send one text_1, or as many as text_2 has.",
                param="text_2",
            )
        return list(zip(first, second, strict=True))

"""Writes responses whose prompts become numbers: those of /v1/embeddings, /v1/rerank and /v1/score."""

import base64
import math
from array import array
from collections.abc import Iterator, Sequence

from transom_cluster.openai.answer.json_pieces import LazyList
from transom_cluster.openai.answer.response_types import (
    EmbeddingList,
    EmbeddingObject,
    PromptUsage,
    Reranking,
    RerankResult,
    ScoreList,
)
from transom_cluster.openai.answer.writers import ResponseMetadata, ResponseWriter
from transom_cluster.openai.request.embedding_request import EmbeddingRequest
from transom_cluster.openai.request.score_request import RerankRequest
from transom_core.contract import OutputEvent, Request


class PooledWriter(ResponseWriter):
    """Keeps what each prompt becomes, its vector."""

    prompt_only = True

    def __init__(self, metadata: ResponseMetadata, requests: Sequence[Request]) -> None:
        super().__init__(metadata, requests)
        self.vectors: dict[int, Sequence[float]] = {}  # prompt -> its embedding, or its logits by label

    def add(self, index: int, event: OutputEvent) -> None:
        """Keep the vector of prompt `index`."""
        if event.embedding is not None:
            self.vectors[index] = event.embedding

    @property
    def token_counts(self) -> PromptUsage:
        """Return the response's `usage`."""
        prompt_tokens = self.usage.body["prompt_tokens"]
        return {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}

    def chunks(self, index: int, event: OutputEvent) -> Iterator[str]:
        """Yield nothing, since numbers are not streamed."""
        return iter(())

    def stream_end(self) -> Iterator[str]:
        """Yield nothing, since numbers are not streamed."""
        return iter(())


class EmbeddingWriter(PooledWriter):
    """Writes the embedding of each prompt: cut to the dimensions that the client wants, then scaled to length 1."""

    def __init__(self, metadata: ResponseMetadata, requests: Sequence[Request], body: EmbeddingRequest) -> None:
        super().__init__(metadata, requests)
        self._wanted = body

    def add(self, index: int, event: OutputEvent) -> None:
        """Keep the embedding of prompt `index` in float32."""
        if event.embedding is not None:
            values = event.embedding[: self._wanted.dimensions]
            length = math.hypot(*values) if self._wanted.normalize else 1.0
            self.vectors[index] = array("f", [value / (length or 1.0) for value in values])

    def body(self) -> EmbeddingList:
        """Return the whole response."""
        return {
            "object": "list",
            "data": [self._object(index) for index in sorted(self.vectors)],
            "model": self.metadata.model,
            "usage": self.token_counts,
        }

    def _object(self, index: int) -> EmbeddingObject:
        values = self.vectors[index]
        is_text = self._wanted.encoding_format == "base64"
        shown = base64.b64encode(array("f", values).tobytes()).decode() if is_text else LazyList(lambda: values)
        return {"object": "embedding", "index": index, "embedding": shown}


class ScoreWriter(PooledWriter):
    """Writes the score of each pair of texts."""

    def body(self) -> ScoreList:
        """Return the whole response, in the order of the pairs."""
        return {
            "id": self.metadata.id,
            "object": "list",
            "created": self.metadata.created_s,
            "model": self.metadata.model,
            "data": [{"index": i, "object": "score", "score": _score(self.vectors[i])} for i in sorted(self.vectors)],
            "usage": self.token_counts,
        }


class RerankWriter(PooledWriter):
    """Writes the scores of documents, the best ones first; equal ones stay in the client's order."""

    def __init__(self, metadata: ResponseMetadata, requests: Sequence[Request], body: RerankRequest) -> None:
        super().__init__(metadata, requests)
        self._wanted, self._texts = body, body.texts

    def body(self) -> Reranking:
        """Return the whole response."""
        scores = {index: _score(self.vectors[index]) for index in sorted(self.vectors)}
        best = sorted(scores, key=scores.__getitem__, reverse=True)[: self._wanted.top_n or None]
        return {
            "id": self.metadata.id,
            "model": self.metadata.model,
            "results": [self._result(index, scores[index]) for index in best],
            "usage": self.token_counts,
        }

    def _result(self, index: int, score: float) -> RerankResult:
        result: RerankResult = {"index": index, "relevance_score": score}
        if self._wanted.return_documents:
            result["document"] = {"text": self._texts[index]}
        return result


def _score(logits: Sequence[float]) -> float:
    """Return the sigmoid of the logit of a classifier's only label, from 0 to 1."""
    (logit,) = logits
    power = math.exp(-abs(logit))  # at most 1, whatever the logit
    return (1.0 if logit >= 0 else power) / (1.0 + power)

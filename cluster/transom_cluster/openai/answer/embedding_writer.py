"""Writes responses of /v1/embeddings."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Iterator, Sequence

from transom_cluster.openai.answer.json_pieces import LazyList
from transom_cluster.openai.answer.response_types import EmbeddingList, EmbeddingObject
from transom_cluster.openai.answer.writers import ResponseMetadata, ResponseWriter
from transom_cluster.openai.request.embedding_request import EmbeddingRequest
from transom_core.contract import OutputEvent, Request


class EmbeddingWriter(ResponseWriter):
    """Writes the embedding of each prompt: cut to the dimensions that the client wants, then scaled to length 1."""

    prompt_only = True

    def __init__(self, metadata: ResponseMetadata, requests: Sequence[Request], body: EmbeddingRequest) -> None:
        super().__init__(metadata, requests)
        self._wanted = body
        self._embeddings: dict[int, array[float]] = {}  # prompt -> its embedding in float32

    def add(self, index: int, event: OutputEvent) -> None:
        """Keep the embedding of prompt `index`."""
        if event.embedding is not None:
            values = event.embedding[: self._wanted.dimensions]
            length = math.hypot(*values) if self._wanted.normalize else 1.0
            self._embeddings[index] = array("f", [value / (length or 1.0) for value in values])

    def body(self) -> EmbeddingList:
        """Return the whole response."""
        prompt_tokens = self.usage.body["prompt_tokens"]
        return {
            "object": "list",
            "data": [self._object(index) for index in sorted(self._embeddings)],
            "model": self.metadata.model,
            "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens},
        }

    def _object(self, index: int) -> EmbeddingObject:
        values = self._embeddings[index]
        is_text = self._wanted.encoding_format == "base64"
        shown = base64.b64encode(values.tobytes()).decode() if is_text else LazyList(lambda: values)
        return {"object": "embedding", "index": index, "embedding": shown}

    def chunks(self, index: int, event: OutputEvent) -> Iterator[str]:
        """Yield nothing, since embeddings are not streamed."""
        return iter(())

    def stream_end(self) -> Iterator[str]:
        """Yield nothing, since embeddings are not streamed."""
        return iter(())

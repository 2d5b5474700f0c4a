"""/v1/rerank and /v1/score over a real engine: the scores are transformers' own of the same pairs of texts."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest
import torch

from tests.checkpoints import make_classifier
from tests.cluster.engine_server import engine_server
from tests.tiny_checkpoints import tiny_tokenizer

QUERY, DOCUMENTS = "The sky", ["A window above a door", "bars that slide", "The sky over the sea is blue"]
Post = Callable[..., httpx.Response]
Scores = Callable[[Sequence[str]], list[float]]


@pytest.fixture(scope="module")
def classifier(tiny_model, tmp_path_factory) -> Iterator[tuple[Post, Scores]]:
    """Sends a request, and says what transformers finds for the query with some texts."""
    oracle = make_classifier(folder := tmp_path_factory.mktemp("classifier"), tiny_model)

    @torch.inference_mode()
    def scores(texts: Sequence[str]) -> list[float]:
        ids = [tiny_tokenizer()(QUERY, text, return_tensors="pt").input_ids for text in texts]
        return [oracle(one, use_cache=False).logits[0, 0].sigmoid().item() for one in ids]

    limits: dict[str, Any] = {"kv_cache_memory_bytes": "8MiB", "num_threads": 1, "dtype": "float32"}
    with engine_server(folder, **limits) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        yield lambda path, **body: client.post(path, json={"model": "tiny", **body}), scores


def test_documents_come_in_the_order_of_their_scores(classifier: tuple[Post, Scores]) -> None:
    post, scores = classifier
    expected = scores(DOCUMENTS)
    best = sorted(range(3), key=lambda i: -expected[i])
    assert max(expected) - min(expected) > 0.01
    body = post("/v1/rerank", query=QUERY, documents=[DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]).json()
    num_tokens = sum(len(tiny_tokenizer()(QUERY, text).input_ids) for text in DOCUMENTS)
    assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert [one["index"] for one in body["results"]] == best
    for one in body["results"]:
        assert one["relevance_score"] == pytest.approx(expected[one["index"]], abs=1e-5)
        assert one["document"] == {"text": DOCUMENTS[one["index"]]}
    first = post("/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=False).json()["results"]
    assert first == [{"index": best[0], "relevance_score": pytest.approx(expected[best[0]], abs=1e-5)}]


def test_scores_of_pairs(classifier: tuple[Post, Scores]) -> None:
    post, scores = classifier
    for first in (QUERY, [QUERY] * 3):
        body = post("/v1/score", text_1=first, text_2=DOCUMENTS).json()
        assert [one["index"] for one in body["data"]] == [0, 1, 2]
        assert [one["score"] for one in body["data"]] == pytest.approx(scores(DOCUMENTS), abs=1e-5)
    (one,) = post("/v1/score", text_1=QUERY, text_2=DOCUMENTS[0]).json()["data"]
    assert one == {"index": 0, "object": "score", "score": pytest.approx(scores(DOCUMENTS[:1])[0], abs=1e-5)}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "x", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "x", "documents": ["y"] * 129}, "documents"),
        ("/v1/rerank", {"query": "x", "documents": ["long " * 4000]}, "documents"),
        ("/v1/rerank", {"query": "x", "documents": ["y"], "top_n": -1}, "top_n"),
        ("/v1/score", {"text_1": ["x", "y"], "text_2": ["z"]}, "text_2"),
        ("/v1/completions", {"prompt": "x"}, "model"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}, "model"),
    ],
)
def test_errors_name_the_clients_fields(classifier: tuple[Post, Scores], path: str, body, param: str) -> None:
    answer = classifier[0](path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

"""/v1/embeddings with OpenAI's client: over a real engine, whose vectors must be transformers' own, and over a lost worker. And
/v1/rerank and /v1/score over a real engine: the scores are transformers' own of the same pairs of texts."""

import asyncio
import base64
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from tests.checkpoints import make_classifier
from tests.cluster.conftest import PATIENT, running_api, until
from tests.cluster.engine_server import EngineServer, engine_server
from tests.cluster.stub_worker import EMBEDDING, stub_workers
from tests.tiny_checkpoints import load_reference, tiny_tokenizer
from transom_core.config import LimitsConfig

TEXTS = ["The sky", "A window above a door, with bars that slide", "x"]
QUERY, DOCUMENTS = "The sky", ["A window above a door", "bars that slide", "The sky over the sea is blue"]
SETTINGS: dict[str, Any] = {"kv_cache_memory_bytes": "8MiB", "num_threads": 1, "dtype": "float32"}
Post = Callable[..., httpx.Response]
Scores = Callable[[Sequence[str]], list[float]]


@pytest.fixture(scope="module")
def served(tiny_model) -> Iterator[EngineServer]:
    with engine_server(tiny_model, **SETTINGS, max_num_batched_tokens=16) as running:
        yield running


@pytest.fixture(scope="module")
def client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0, timeout=120) as made:
        yield made


@torch.inference_mode()
def expected(folder, ids: list[int], pooling: str, dimensions: int | None = None) -> np.ndarray:
    states = load_reference(folder).model(torch.tensor([ids]), use_cache=False).last_hidden_state[0].double().numpy()
    vector = (states[-1] if pooling == "last" else states.mean(axis=0))[:dimensions]
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("dimensions", [None, 10])
def test_a_batch_of_texts(client, served, tiny_model, pooling: str, dimensions: int | None) -> None:
    """The client asks for base64 unless its caller asks for numbers, and decodes it."""
    sizes = {} if dimensions is None else {"dimensions": dimensions}
    answer = client.embeddings.create(model="tiny", input=TEXTS, extra_body={"pooling": pooling}, **sizes)
    prompts = [served.router.tokenizer.encode(text) for text in TEXTS]
    assert [one.index for one in answer.data] == [0, 1, 2]
    for one, ids in zip(answer.data, prompts, strict=True):
        np.testing.assert_allclose(one.embedding, expected(tiny_model, ids, pooling, dimensions), atol=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, prompts))


def test_numbers_and_base64_of_token_ids(client, tiny_model) -> None:
    ids = [[5, 6, 7], [*range(40, 90)]]
    numbers = client.embeddings.create(model="tiny", input=ids, encoding_format="float").data
    for one, prompt in zip(numbers, ids, strict=True):
        np.testing.assert_allclose(one.embedding, expected(tiny_model, prompt, "last"), atol=1e-5)
    body = {"input": ids[0], "encoding_format": "base64", "normalize": False}
    text = client.post("/embeddings", body=body, cast_to=httpx.Response).json()["data"][0]["embedding"]
    raw = np.frombuffer(base64.b64decode(text), "<f4")
    np.testing.assert_allclose(raw / np.linalg.norm(raw), numbers[0].embedding, atol=1e-6)
    assert np.linalg.norm(raw) > 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [2**20]}, "input"),
        ({"input": "x", "dimensions": 97}, "dimensions"),
        ({"input": "x", "extra_body": {"pooling": "max"}}, "pooling"),
        ({"input": [[5]] * 129}, "input"),
        ({"input": [7] * 4000}, "input"),
    ],
)
def test_errors_name_the_clients_fields(client, body, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="tiny", **body)
    assert refused.value.param == param
    assert "prompt" not in str(refused.value.message)


async def test_a_lost_worker_and_a_clients_limit() -> None:
    limits = LimitsConfig(tokens_per_minute=6)
    async with running_api(*stub_workers(2, max_events=0), **PATIENT, limits=limits) as api:
        answer = asyncio.create_task(api.client.post("/v1/embeddings", json={"input": ["ab"]}))
        await until(lambda: any(worker.num_silent for worker in api.workers))
        victim = next(worker for worker in api.workers if worker.num_running)
        for worker in api.workers:
            worker.max_events = None
        victim.kill()
        data = (await answer).json()["data"]
        assert [one["embedding"] for one in data] == [pytest.approx([x / 13 for x in EMBEDDING])]
        refused = await api.client.post("/v1/embeddings", json={"input": "abcdef"})
        assert refused.status_code == 429, refused.text


@pytest.fixture(scope="module")
def classifier(tiny_model, tmp_path_factory) -> Iterator[tuple[Post, Scores]]:
    """Sends a request, and says what transformers finds for the query with some texts."""
    oracle = make_classifier(folder := tmp_path_factory.mktemp("classifier"), tiny_model)

    @torch.inference_mode()
    def scores(texts: Sequence[str]) -> list[float]:
        ids = [tiny_tokenizer()(QUERY, text, return_tensors="pt").input_ids for text in texts]
        return [oracle(one, use_cache=False).logits[0, 0].sigmoid().item() for one in ids]

    with engine_server(folder, **SETTINGS) as server, httpx.Client(base_url=server.url, timeout=120) as client:
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
def test_errors_of_scores_name_the_clients_fields(classifier: tuple[Post, Scores], path: str, body, param: str) -> None:
    answer = classifier[0](path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

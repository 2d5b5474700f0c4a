"""/v1/embeddings with OpenAI's client: over a real engine, whose vectors must be transformers' own, and over a lost worker."""

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from tests.cluster.conftest import PATIENT, running_api, until
from tests.cluster.engine_server import EngineServer, engine_server
from tests.cluster.stub_worker import EMBEDDING, stub_workers
from tests.tiny_checkpoints import load_reference
from transom_core.config import LimitsConfig

TEXTS = ["The sky", "A window above a door, with bars that slide", "x"]


@pytest.fixture(scope="module")
def served(tiny_model) -> Iterator[EngineServer]:
    limits: dict[str, Any] = {
        "kv_cache_memory_bytes": "8MiB",
        "num_threads": 1,
        "max_num_batched_tokens": 16,
        "dtype": "float32",
    }
    with engine_server(tiny_model, **limits) as running:
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

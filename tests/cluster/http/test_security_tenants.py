"""Tenants and the prefix cache of a real engine: with --salt-by-key no client hits a prefix that another client sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.cluster.engine_server import EngineServer, engine_server

PROMPT = list(range(5, 105))
SMALL: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": "1MiB", "max_num_seqs": 2}


@pytest.fixture(scope="module", params=[True, False], ids=["client_cache_salt", "shared"])
def server(request: pytest.FixtureRequest, tiny_model) -> Iterator[tuple[EngineServer, bool]]:
    config = {"api_keys": ("a", "b"), "salt_by_key": request.param}
    with engine_server(tiny_model, server=config, **SMALL) as running:
        yield running, request.param


def num_cached(server: EngineServer, key: str, **fields: Any) -> int:
    body = {"prompt": PROMPT, "max_tokens": 1, **fields}
    headers = {"authorization": f"Bearer {key}"}
    usage = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120).json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_only_the_same_key_and_salt_hit(server: tuple[EngineServer, bool]) -> None:
    running, is_salted = server
    hit = 96  # whole blocks of the prompt
    assert num_cached(running, "a") == 0
    assert num_cached(running, "a") == hit
    assert num_cached(running, "b") == (0 if is_salted else hit)
    assert num_cached(running, "b") == hit
    assert num_cached(running, "a", cache_salt="x") == 0
    assert num_cached(running, "a", cache_salt="x") == hit
    assert num_cached(running, "b", cache_salt="x") == (0 if is_salted else hit)

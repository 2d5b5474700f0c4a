"""An operator pauses a server, replaces its weights and resumes it, while a client reads a stream."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import running_api
from tests.cluster.engine_server import engine_server
from tests.cluster.stub_worker import stub_workers
from tests.tiny_checkpoints import tiny_llama
from transom_cluster.http import weight_routes

KEYS = {"client": {"authorization": "Bearer client"}, "admin": {"authorization": "Bearer admin"}}
BODY: dict[str, Any] = {"prompt": list(range(5, 45)), "max_tokens": 200, "temperature": 0, "ignore_eos": True}
STREAM = BODY | {"stream": True, "stream_options": {"include_usage": True}}


def test_a_stream_that_spans_an_update_says_so_and_the_models_page_names_the_new_version(
    tiny_model: Path, tmp_path: Path
) -> None:
    other, admins = tiny_llama(tmp_path / "model", seed=1), tmp_path / "admins"
    admins.write_text("admin\n")
    admins.chmod(0o600)
    keys = {"api_keys": ("client",), "admin_api_key_file": str(admins)}
    settings: dict[str, Any] = {"kv_cache_memory_bytes": "8MiB", "num_threads": 1, "dtype": "float32"}
    with (
        engine_server(tiny_model, server=keys, **settings) as server,
        httpx.Client(base_url=server.url, timeout=300, headers=KEYS["admin"]) as admin,
    ):
        refused = admin.post("/pause", headers=KEYS["client"])
        assert refused.status_code == 403, refused.text
        versions = admin.get("/v1/models").json()["data"][0]["versions"]
        with admin.stream("POST", "/v1/completions", json=STREAM) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert admin.post("/pause", params={"mode": "keep"}).json() == {"workers": ["0"]}
            wrong = admin.post("/update_weights_from_disk", json={"model_path": str(tmp_path)})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "model_path")
            updated = admin.post("/update_weights_from_disk", json={"model_path": str(other)})
            assert updated.status_code == 200, updated.text
            assert admin.post("/resume").status_code == 200
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert chunks[-1]["usage"]["weight_updates"] == 1
        assert chunks[-1]["usage"]["completion_tokens"] == BODY["max_tokens"]
        answer = admin.post("/v1/completions", json=BODY).json()
        assert "weight_updates" not in answer["usage"]
        (version,) = admin.get("/v1/models").json()["data"][0]["versions"]
        assert version["identity"] != versions[0]["identity"]
        assert answer["system_fingerprint"] == version["system_fingerprint"]
        assert f'identity="{version["identity"]}"' in admin.get("/metrics").text
    with engine_server(other, **settings) as server:
        fresh = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=300).json()
    assert answer["choices"][0]["text"] == fresh["choices"][0]["text"]
    assert answer["system_fingerprint"] == fresh["system_fingerprint"]


async def test_all_workers_load_the_same_commit_of_a_hugging_face_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_routes, "with_commit", lambda name: f"{name}@abc")
    async with running_api(*(workers := stub_workers(2))) as api:
        answer = await api.client.post("/update_weights_from_disk", json={"model_path": "org/name"})
        assert (answer.status_code, [worker.loaded for worker in workers]) == (200, [["org/name@abc"]] * 2), answer.text

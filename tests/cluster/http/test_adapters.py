"""LoRA adapters: loaded and unloaded at run time with vLLM's routes, chosen by `model`, equal at all routers."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapter_folders import make_adapter, write_adapter
from tests.cluster.conftest import SHORT_TIMINGS, Api, StubPeers, make_router, running, running_api, until
from tests.cluster.stub_worker import StubWorker
from transom_cluster.router.adapter_registry import MAX_CHANGES, AdapterChange, AdapterRegistry
from transom_core.contract import Adapter
from transom_core.errors import ConfigError, RequestError


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with running_api(enable_lora=True, max_lora_rank=8) as running:
        yield running


async def load(api: Api, name: str, path: Path, **fields: Any) -> tuple[int, str]:
    body = {"lora_name": name, "lora_path": str(path), **fields}
    answer = await api.client.post("/v1/load_lora_adapter", json=body)
    return answer.status_code, answer.text if answer.status_code == 200 else answer.json()["error"]["message"]


async def unload(api: Api, name: str) -> tuple[int, str]:
    answer = await api.client.post("/v1/unload_lora_adapter", json={"lora_name": name})
    return answer.status_code, answer.text


async def test_an_adapter_is_a_model_from_loading_to_unloading(api: Api, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "sql")
    assert await load(api, "sql", tmp_path / "sql") == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert api.worker.tried == [adapter]
    base, card = (await api.client.get("/v1/models")).json()["data"]
    assert (card["id"], card["root"], card["parent"]) == ("sql", adapter.path, "stub")
    assert (base["id"], base["root"], base["parent"]) == ("stub", "stub", None)
    assert (await api.client.get("/v1/models/sql")).json() == card
    answers = [await api.complete(model="sql", n=2), await api.chat(model="sql"), await api.complete()]
    assert [answer.json()["model"] for answer in answers] == ["sql", "sql", "stub"]
    assert [one.adapter for one in api.worker.submitted] == [adapter] * 3 + [None]
    assert (await api.client.post("/tokenize", json={"model": "sql", "prompt": "a"})).json()["tokens"] == [97]
    assert await unload(api, "sql") == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert ((await api.complete(model="sql")).status_code, (await unload(api, "sql"))[0]) == (404, 404)
    assert [one["id"] for one in (await api.client.get("/v1/models")).json()["data"]] == ["stub"]


async def test_names_that_are_taken_and_wrong_adapters_are_refused(api: Api, tmp_path: Path) -> None:
    path, wrong = Path(write_adapter(tmp_path / "a")), Path(write_adapter(tmp_path / "wrong", r=9))
    assert "is the model's own name" in (await load(api, "stub", path))[1]
    assert await load(api, "a", wrong) == (400, f"lora_path: {wrong} has rank 9, and --max-lora-rank is 8; "
                                                "start the server with a larger one.")  # fmt: skip
    assert (await load(api, "a", path))[0] == 200
    assert "has already been loaded" in (await load(api, "a", path))[1]
    changed = make_adapter(tmp_path / "a")
    assert (await load(api, "a", path, load_inplace=True))[0] == 200
    await api.complete(model="a")
    assert api.worker.submitted[-1].adapter == changed
    api.worker.refusal = RequestError("q_proj has the wrong shape")
    assert await load(api, "b", path) == (400, "q_proj has the wrong shape")
    assert "this server has 'stub' and 'a'" in (await api.complete(model="b")).json()["error"]["message"]
    for body in ({"lora_name": "x"}, {"lora_name": "", "lora_path": "/x"}, {"lora_name": 3, "lora_path": "/x"}):
        answer = await api.client.post("/v1/load_lora_adapter", json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_a_server_without_adapters_says_how_to_start_one(tmp_path: Path) -> None:
    async with running_api() as api:
        assert "--enable-lora" in (await load(api, "a", tmp_path))[1]
    with pytest.raises(ConfigError, match=r"--lora-modules a: .*is missing"):
        make_router(StubWorker(), enable_lora=True, lora_modules=(("a", str(tmp_path / "none")),))
    async with running_api(StubWorker(can_open=False), enable_lora=True) as api:
        assert (await load(api, "a", Path(write_adapter(tmp_path / "a"))))[0] == 503


async def test_routers_tell_each_other(tmp_path: Path) -> None:
    modules = tuple((name, write_adapter(tmp_path / name, name.encode())) for name in ("start", "gone"))
    config: dict[str, Any] = {"enable_lora": True, "lora_modules": modules}
    other = make_router(StubWorker(), router_id="r1", **config)
    async with running_api(peers=StubPeers(other, TimeoutError()), **config) as api:
        assert (await load(api, "new", Path(write_adapter(tmp_path / "new"))))[0] == 200
        assert (await unload(api, "gone"))[0] == 200
        assert other.adapters.changes == api.router.adapters.changes
        late = make_router(StubWorker(), router_id="r2", peers=StubPeers(api.router), timings=SHORT_TIMINGS, **config)
        assert late.adapters.names == ["start", "gone"]
        async with running(late, 1):
            await until(lambda: late.adapters.names == ["start", "new"])
    async with running_api(peers=StubPeers(other), **config | {"lora_modules": ()}) as api:
        api.router.adapters.changes.clear()  # as if a request came before the first answer
        assert (await api.complete(model="new")).status_code == 200


def test_names_of_unloaded_adapters_are_forgotten() -> None:
    registry, adapter = AdapterRegistry(), Adapter(name="a", path="/a", identity="x")
    registry.merge({"kept": AdapterChange(0.0, adapter)})
    for number in range(2 * MAX_CHANGES):
        registry.merge({str(number): AdapterChange(number + 1.0, None)})
    assert len(registry.changes) == MAX_CHANGES
    assert registry.get("kept") is adapter
    assert str(2 * MAX_CHANGES - 1) in registry.changes

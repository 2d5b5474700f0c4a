"""Metrics over HTTP: all routers and workers on one page, each process on its own, formats, what is late, keys."""

import asyncio
import gzip
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.cluster.conftest import Api, StubPeers, make_router, running_api, sample, timings
from tests.cluster.stub_worker import StubWorker
from transom_cluster.http.api import build_api
from transom_cluster.http.shared_pages import SharedPages

# what Prometheus 2.42 sends
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def stub(worker: str) -> StubWorker:
    def page(openmetrics: bool) -> str:
        name = "transom_steps" if openmetrics else "transom_steps_total"
        head = f"# HELP {name} Steps.\n# TYPE {name} counter\n"
        return f'{head}transom_steps_total{{model="stub",worker="{worker}"}} 7.0\n' + "# EOF\n" * openmetrics

    return StubWorker(worker=worker, metrics=page)


def labels_of(text: str, name: str, label: str) -> list[str]:
    return [s.labels[label] for family in parse_text(text) for s in family.samples if s.name == name]


async def get(api: Api, path: str = "/metrics", **headers: str) -> Any:
    return await api.client.get(path, headers={"accept-encoding": "identity", **headers})


async def test_one_page_has_all_routers_and_workers() -> None:
    async with running_api(stub("w0"), stub("w1")) as api:
        api.router.peers = StubPeers(make_router(router_id="r1"), make_router(router_id="r2"))
        text = (await get(api)).text
    assert labels_of(text, "transom_steps_total", "worker") == ["w0", "w1"]
    assert labels_of(text, "transom_build_info", "router") == ["r0", "r1", "r2"]
    assert labels_of(text, "transom_router_in_flight_requests", "worker") == ["w0", "w1"]
    assert text.count("# TYPE transom_build_info ") == 1


async def test_what_does_not_answer_is_left_out_and_counted_by_kind() -> None:
    async with running_api(stub("w0"), stub("w1"), stub("w2"), timings=timings(scrape_timeout_s=0.01)) as api:
        api.workers[1].metrics = None
        api.workers[2].metrics_text = lambda **_: asyncio.Event().wait()  # type: ignore[method-assign,assignment]
        api.router.peers = StubPeers(TimeoutError(), make_router(router_id="r2"))
        text = (await get(api)).text
        assert labels_of(text, "transom_steps_total", "worker") == ["w0"]
        assert labels_of(text, "transom_build_info", "router") == ["r0", "r2"]
        assert [sample(api.router, "dropped_scrapes_total", target=one) for one in ("worker", "router")] == [2, 1]


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        (PROMETHEUS, True),
        ("application/openmetrics-text;q=0.3, text/plain;q=0.5", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=much", False),
        (BROWSER, False),
        ("", False),
    ],
)
async def test_the_client_chooses_the_format(accept: str, openmetrics: bool) -> None:
    async with running_api(stub("w0")) as api:
        api.router.peers = StubPeers(make_router(router_id="r1"))
        for path in ("/metrics", "/metrics/process?name=worker/w0", "/metrics/process?name=router/r1"):
            response = await get(api, path, accept=accept)
            kind = "application/openmetrics-text; version=1.0.0" if openmetrics else "text/plain; version=0.0.4"
            assert response.headers["content-type"] == f"{kind}; charset=utf-8"
            families = {family.name for family in (parse_openmetrics if openmetrics else parse_text)(response.text)}
            assert families
            assert response.text.endswith("# EOF\n") == openmetrics


@pytest.mark.parametrize(("accepted", "encoding"), [("gzip", "gzip"), ("br, gzip;q=0.5", "gzip"), ("gzip;q=0", None)])
async def test_pages_are_compressed_where_the_client_takes_that(accepted: str, encoding: str | None) -> None:
    async with running_api() as api:
        async with api.client.stream("GET", "/metrics", headers={"accept-encoding": accepted}) as response:
            body = b"".join([part async for part in response.aiter_raw()])
        assert response.headers.get("content-encoding") == encoding
        assert b"transom_build_info" in (gzip.decompress(body) if encoding else body)


async def test_exemplars_name_requests() -> None:
    async with running_api() as api:
        answer = (await api.complete(stream=False)).json()
        text = (await get(api, accept=PROMETHEUS)).text
    found = {
        sample.name: sample.exemplar.labels
        for family in parse_openmetrics(text)
        for sample in family.samples
        if sample.exemplar
    }
    request_id = {"request_id": f"{answer['id']}-0-0"}
    assert found == {
        "transom_router_request_seconds_bucket": request_id,
        "transom_router_first_token_seconds_bucket": request_id,
    }


async def test_tokens_are_counted_as_billed() -> None:
    async with running_api() as api:
        whole = (await api.complete(prompt=["hi", "there"], n=2, max_tokens=3)).json()["usage"]
        await api.complete(prompt="hello", max_tokens=4, stream=True)
        await api.complete(temperature=-1)
        text = (await get(api)).text
    values = {s.name: s.value for family in parse_text(text) for s in family.samples if s.name.endswith("tokens_total")}
    assert values["transom_router_prompt_tokens_total"] == whole["prompt_tokens"] + len("hello")
    assert values["transom_router_output_tokens_total"] == whole["completion_tokens"] + 4


async def test_discovery_has_a_target_for_each_process_at_the_address_asked() -> None:
    async with running_api(stub("w0"), stub("w1")) as api:
        api.router.peers = StubPeers(make_router(router_id="r2"), TimeoutError(), make_router(router_id="r1"))
        response = await get(api, "/metrics/sd", host="door.example:8443")
        assert response.headers["content-type"] == "application/json"
        document = response.json()
        for group in document:
            labels = group["labels"]
            assert group["targets"] == ["door.example:8443"]
            assert all(isinstance(value, str) for value in labels.values())
            assert not labels.keys() & {"worker", "router", "model"}
            page = await get(api, f"{labels['__metrics_path__']}?name={labels['__param_name']}")
            assert page.status_code == 200
            kind, _, process_id = labels["instance"].partition("/")
            assert (labels["__meta_transom_kind"], labels["__meta_transom_id"]) == (kind, process_id)
            assert {s.labels.get(kind) for family in parse_text(page.text) for s in family.samples} == {process_id}
        names = ["router/r0", "router/r1", "router/r2", "worker/w0", "worker/w1"]
        assert [group["labels"]["instance"] for group in document] == names


async def test_discovery_below_a_prefix() -> None:
    transport = httpx.ASGITransport(app=build_api(make_router(stub("w0"))), root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://r:8000") as client:
        (target,) = (await client.get("/llm/metrics/sd")).json()
    assert (target["targets"], target["labels"]["__metrics_path__"]) == (["r:8000"], "/llm/metrics/process")


async def test_processes_that_are_unknown_or_silent() -> None:
    async with running_api(stub("w0"), StubWorker(worker="w1", metrics=None)) as api:
        for name in ("worker/w9", "router/r9", "w0", "", "worker/", "other/w0"):
            response = await get(api, f"/metrics/process?name={name}")
            assert (response.status_code, response.json()["error"]["code"]) == (404, "process_not_found")
        assert (await get(api, "/metrics/process?name=worker/w1")).status_code == 504
        api.router.peers = StubPeers(TimeoutError(), make_router(router_id="r2"))
        assert (await get(api, "/metrics/process?name=router/r1")).status_code == 504
        assert (await get(api, "/metrics/process?name=router/r2")).status_code == 200
        response = await get(api, "/metrics/process")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "name")


async def test_one_collection_a_second_serves_all_callers() -> None:
    """Of 20 callers together one makes a page; after five of them, callers get the last page until a second has passed."""
    now_s, made = 0.0, []

    async def collect() -> str:
        made.append(now_s)
        await asyncio.sleep(0)
        return f"page {len(made)}"

    pages = SharedPages(clock=lambda: now_s)
    assert set(await asyncio.gather(*(pages.get("all", collect) for _ in range(20)))) == {"page 1"}
    assert [await pages.get("all", collect) for _ in range(6)] == [f"page {number}" for number in (2, 3, 4, 5, 5, 5)]
    now_s = 0.9
    assert await pages.get("all", collect) == "page 5"
    now_s = 1.0
    assert [await pages.get(name, collect) for name in ("all", "other")] == ["page 6", "page 7"]
    now_s = 100.0
    await pages.get("third", collect)
    assert len(pages) == 1  # those that no client asks for any more are forgotten


async def test_a_caller_that_leaves_takes_no_page_from_others() -> None:
    goes_on = asyncio.Event()

    async def collect() -> str:
        await goes_on.wait()
        return "page"

    pages = SharedPages()
    first, second = (asyncio.create_task(pages.get("all", collect)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    goes_on.set()
    assert await second == "page"


async def test_a_failed_collection_takes_a_token_and_no_newer_page() -> None:
    """Waiters of one failed collection wake up one after the other; the first one may have begun the next collection by then."""
    num_collections = 0

    async def collect() -> str:
        nonlocal num_collections
        num_collections += 1
        await asyncio.sleep(0)
        raise ConnectionError(f"collection {num_collections}")

    async def ask_again() -> None:
        for _ in range(10):
            with pytest.raises(ConnectionError):
                await pages.get("all", collect)

    pages = SharedPages(clock=lambda: 0.0)
    await asyncio.gather(*(ask_again() for _ in range(20)))
    assert num_collections == 5

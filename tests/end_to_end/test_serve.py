"""One server's life, from a user's first requests to its end: Ray is started once for all daily tests.

The server has two routers, two workers, windows over full layers, and an API key. First the official client asks what a user's
first hour touches, and a LoRA adapter is loaded, which some of the later streams use. Then a worker is killed, all is deployed
again as one worker of two ranks, a rank is killed, and the server ends. Every disturbance strikes while streams run, and each
client gets, on the same connection, the text of an undisturbed run. The tests follow one another on the one server. `make
test-all` adds ten minutes of random kills, of `benchmarks/serving/soak`.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import ray

from benchmarks.server_process import Server, start_server
from tests.adapter_folders import adapt_checkpoint
from tests.end_to_end.server import (
    API_KEY,
    HTTP,
    PATIENCE_S,
    assert_ended_cleanly,
    look_until,
    metric,
    replica_pids,
    wait_for_replicas,
)
from tests.end_to_end.streams import Stream, ask_all, bodies, items
from tests.end_to_end.two_routers import (
    check_answers,
    check_pages,
    check_prefixes,
    redeploy_under_load,
    replicas,
    wait_for_ranks,
    wait_for_workers,
    worker_changes,
)
from tests.engine_driver import make_engine, make_request, run

HAPROXY_FILES = 50_036

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1200)]

MODEL = "tiny"
MAX_TOKENS = 60
ADAPTER = "adapter"
REQUESTS = bodies(items(8), max_tokens=MAX_TOKENS)
REQUESTS[2]["model"] = REQUESTS[5]["model"] = ADAPTER
# By how much a replica of a kind may grow: a client's quarter of each cache (of compiled grammars, 64 MiB at a worker), timelines,
# and again as much for what the allocator keeps.
MEMORY_BYTES = {"router": 96 << 20, "worker": 128 << 20}
PAUSE_S = 1.0  # of a client between two answers, while new processes start on the cores that answer
SETTINGS: dict[str, Any] = {
    "served_model_name": MODEL,
    "api_key": API_KEY,
    "kv_cache_memory_bytes": "16MiB",
    "swap_space": "8MiB",
    "replicas": 2,
    "router_replicas": 2,
    "window": 64,
    "sinks": 4,
    "window_pattern": "SSF",
    "worker_wait_s": PATIENCE_S,  # streams wait for the ranks of the only worker
}
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    admins = tmp_path_factory.mktemp("serve") / "admins"
    admins.touch(mode=0o600)
    admins.write_text(API_KEY)
    with start_server(str(tiny_model), **SETTINGS, enable_lora=True, admin_api_key_file=admins) as server:
        yield server
        assert_ended_cleanly(server)


def client_of(server: Server) -> openai.OpenAI:
    """The official client."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0, timeout=PATIENCE_S)


def test_a_key_opens_the_api(server: Server) -> None:
    assert [model.id for model in client_of(server).models.list()] == [MODEL]
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200
    for headers in ({}, {"Authorization": "Bearer another"}):
        assert httpx.get(f"{server.url}/v1/models", headers=headers, timeout=PATIENCE_S).status_code == 401


def test_a_chat_and_a_call_stream_what_they_answer(server: Server) -> None:
    create = client_of(server).chat.completions.create
    body: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 60}
    parameters = {"name": "get_weather", "description": "Of a city.", "parameters": CITY}
    called: Any = {"tools": [{"type": "function", "function": parameters}], "tool_choice": "required"}

    whole = create(**body)
    chunks = list(create(**body, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

    call = (create(**body, **called).choices[0].message.tool_calls or [])[0].function
    assert call.name == "get_weather"
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    deltas = [chunk.choices[0].delta for chunk in create(**body, **called, stream=True)]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or () if piece.index == 0]
    assert "".join(piece.function.arguments or "" for piece in pieces if piece.function) == call.arguments


def test_a_client_that_leaves_frees_its_blocks(server: Server) -> None:
    body = {"prompt": "A long story:", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        for _ in range(6):
            next(lines)

    def left() -> tuple[float, float, float]:
        running = metric(server, "transom_requests_running")
        active = metric(server, "transom_kv_blocks", state="active")
        return running, active, metric(server, "transom_requests_total", finish_reason="abort")

    look_until(left, lambda found: found == (0, 0, 1))


def test_routers_and_workers_have_the_priority_of_the_command(server: Server) -> None:
    pids = [server.pid, *(pid for kind in ("router", "worker") for pid in replica_pids(server, kind))]
    assert len(pids) >= 3
    assert len({os.getpriority(os.PRIO_PROCESS, pid) for pid in pids}) == 1


def test_resident_memory_stays_within_a_sum_whatever_clients_send(server: Server) -> None:
    """After a first round, which starts child processes and fills pools of the allocator.

    A round's grammars take 27 MiB each, and its texts 8 MiB each as they are tokenised; bodies are left half-way.
    """
    wait_for_workers(server, 2)

    def send(path: str, body: dict[str, Any], *, timeout_s: float = PATIENCE_S) -> None:
        with contextlib.suppress(httpx.TimeoutException):
            HTTP.post(f"{server.url}{path}", json=body, timeout=timeout_s)

    def resident() -> dict[int, int]:
        pids = [pid for kind in MEMORY_BYTES for pid in replica_pids(server, kind)]
        pages = (Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in pids)
        return {pid: int(count) * resource.getpagesize() for pid, count in zip(pids, pages, strict=True)}

    def send_round(number: int) -> None:
        one: dict[str, Any] = {"prompt": f"{number}", "max_tokens": 1}
        grammars = [one | {"structured_outputs": {"regex": f"a{{1000000}}{number}b{i}"}} for i in range(8)]
        refused = [one | {"structured_outputs": {"regex": f"({number}{i}" * 20_000}} for i in range(12)]
        with ThreadPoolExecutor(6) as threads:
            calls = [threads.submit(send, "/v1/completions", body) for body in (*grammars, *refused)]
            calls += [threads.submit(send, "/tokenize", {"prompt": "\u1700" * 5_000}) for _ in range(6)]
            calls += [threads.submit(send, "/v1/completions", body, timeout_s=0.1) for body in grammars]
            for call in calls:
                call.result()

    send_round(0)
    before = resident()
    for number in (1, 2):
        send_round(number)
    look_until(lambda: metric(server, "transom_requests_running"), lambda running: running == 0)
    after = resident()
    for kind, most in MEMORY_BYTES.items():
        for pid in replica_pids(server, kind):
            assert after[pid] - before[pid] <= most, kind


@pytest.fixture(scope="module")
def merged(server: Server, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server has loaded an adapter; a checkpoint into which it is merged."""
    adapter, merged = adapt_checkpoint(tiny_model, tmp_path_factory.mktemp("adapted"))
    reply = HTTP.post(f"{server.url}/v1/load_lora_adapter", json={"lora_name": ADAPTER, "lora_path": adapter.path})
    assert reply.text == f"Success: LoRA adapter '{ADAPTER}' added successfully."
    return merged


def test_a_loaded_adapter_is_a_model(server: Server, merged: Path) -> None:
    assert [model.id for model in client_of(server).models.list()] == [MODEL, ADAPTER]
    body: Any = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
    own, adapted = (
        client_of(server).completions.create(model=name, **body, extra_body={"ignore_eos": True}).choices[0].text
        for name in (MODEL, ADAPTER)
    )
    engine = make_engine(str(merged), **{name: SETTINGS[name] for name in ("window", "sinks", "window_pattern")})
    (whole,) = run(engine, [make_request("r", engine.tokenizer.encode(body["prompt"]), max_tokens=40)])
    engine.shutdown()
    assert adapted == whole.text != own


@pytest.fixture(scope="module")
def undisturbed(server: Server, merged: Path) -> list[Stream]:
    wait_for_workers(server, 2)
    streams = asyncio.run(ask_all(server.url, REQUESTS))
    assert len({stream.text for stream in streams}) == len(streams)
    check_answers(streams, streams, MAX_TOKENS)
    return streams


def test_any_routers_page_has_all_routers_and_workers(server: Server, undisturbed: list[Stream]) -> None:
    check_pages(server, num_ranks=2)


def test_kv_moves_between_workers_by_calls(server: Server) -> None:
    one, other = wait_for_workers(server, 2)
    prompts: list[str | list[int]] = [
        [5 + i, *range(5, 205)] for i in range(16)
    ]  # at once, so that both workers get some
    asyncio.run(ask_all(server.url, bodies(prompts, max_tokens=8)))
    for source, target in ((one, other), (other, one)):
        asked = {"source": source, "target": target, "bytes": "65536", "wire": "ray"}
        reply = HTTP.post(f"{server.url}/transfers/measure", params=asked).json()
        assert reply["outcome"] == "fetched", reply


def test_routers_agree_where_a_prefix_is(server: Server) -> None:
    check_prefixes(server)


@pytest.mark.parametrize(
    "requests", [REQUESTS, pytest.param([], marks=pytest.mark.exhaustive)], ids=["streaming", "idle"]
)
def test_streams_outlive_a_killed_worker(
    server: Server, undisturbed: list[Stream], requests: list[dict[str, Any]]
) -> None:
    """A router may hear of an idle worker's end from Serve before its own stream to the worker breaks, and counts it the same."""
    workers = wait_for_workers(server, 2)
    before = look_until(lambda: worker_changes(server), lambda changes: len({router for router, _ in changes}) == 2)
    victim, _ = wait_for_replicas(server, "worker", 2)
    streams = asyncio.run(ask_all(server.url, requests, partial(os.kill, victim, signal.SIGKILL)))
    check_answers(streams, undisturbed[: len(requests)], MAX_TOKENS)
    wait_for_replicas(server, "worker", 2, without=victim)
    wait_for_workers(server, 2, other_than=workers)
    expected = {key: count + (key[1] != "drained") for key, count in before.items()}
    look_until(lambda: worker_changes(server), lambda changes: changes == expected)  # the same to both routers


def test_streams_outlive_a_redeploy_of_workers_and_routers(
    server: Server, undisturbed: list[Stream], tiny_model: Path
) -> None:
    before = replicas(server)
    settings = {"model": str(tiny_model), **SETTINGS, "enable_lora": True, "replicas": 1, "tensor_parallel_size": 2}
    answers = redeploy_under_load(server, settings, REQUESTS[:4], pause_s=PAUSE_S)
    for rounds, expected in zip(answers, undisturbed[:4], strict=True):
        check_answers(rounds, [expected] * len(rounds), MAX_TOKENS)
    wait_for_workers(server, 1)
    look_until(lambda: replicas(server), lambda pids: not before & pids)  # old ones end once they are drained


def test_streams_outlive_a_killed_rank_of_the_only_worker(server: Server, undisturbed: list[Stream]) -> None:
    """They stand still until the worker has started its ranks again."""
    victim, _ = wait_for_replicas(server, "rank", 2)
    streams = asyncio.run(ask_all(server.url, REQUESTS, partial(os.kill, victim, signal.SIGKILL)))
    check_answers(streams, undisturbed, MAX_TOKENS)
    wait_for_ranks(server, 2, without=victim)


def test_the_end_lets_streams_end(server: Server, undisturbed: list[Stream]) -> None:
    streams = asyncio.run(ask_all(server.url, REQUESTS, partial(server.process.send_signal, signal.SIGTERM)))
    check_answers(streams, undisturbed, MAX_TOKENS)
    server.process.wait(PATIENCE_S)
    assert_ended_cleanly(server)


@pytest.mark.exhaustive
@pytest.mark.skipif(
    ray.__version__ < "2.60" and resource.getrlimit(resource.RLIMIT_NOFILE)[1] < HAPROXY_FILES,
    reason=f"HAProxy, as Ray before 2.60 starts it, needs {HAPROXY_FILES} open files (ulimit -Hn)",
)
def test_the_demo_model_after_haproxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second server beside the first: it keeps to the subject, outlives its only worker, ends connections with half of a head
    while others go on, and ends at Ctrl-C."""
    monkeypatch.setenv("RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S", "5")
    settings = {"dtype": "float32", "kv_cache_memory_bytes": "512MiB", "haproxy": True, "worker_wait_s": PATIENCE_S}
    with start_server("smollm2", **settings) as server:
        question: Any = [{"role": "user", "content": "Name three colours of the rainbow."}]
        asked: Any = {"model": "smollm2", "messages": question, "temperature": 0, "max_tokens": 24}
        answer = client_of(server).chat.completions.create(**asked)
        assert "rainbow" in (answer.choices[0].message.content or "").lower()
        (whole,) = asyncio.run(ask_all(server.url, REQUESTS[:1]))
        with contextlib.ExitStack() as stack:
            address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
            stalled = [stack.enter_context(socket.create_connection(address, PATIENCE_S)) for _ in range(50)]
            for one in stalled:
                one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
            check_answers(asyncio.run(ask_all(server.url, REQUESTS[:1])), [whole], MAX_TOKENS)
            for one in stalled:
                assert one.makefile("rb").read().startswith(b"HTTP/1.1 408 ")  # and then the end
        (victim,) = wait_for_replicas(server, "worker", 1)
        (cut,) = asyncio.run(ask_all(server.url, REQUESTS[:1], partial(os.kill, victim, signal.SIGKILL)))
        check_answers([cut], [whole], MAX_TOKENS)
        wait_for_replicas(server, "worker", 1, without=victim)
        assert_ended_cleanly(server)

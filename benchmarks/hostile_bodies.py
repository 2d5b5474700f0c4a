"""What hostile request bodies cost a router: the longest stall of its event loop, CPU, and memory as a multiple of the body's size.

    python -m benchmarks.hostile_bodies [--mib 8] [--only prompt] [--json FILE]

Each body goes to the real app over a stub worker, with SmolLM2's tokenizer and chat template. A task on the same loop wakes up
every millisecond. A stall is the time between two of its turns, or the CPU time that the whole process used in between if that is
less: so what other processes of a busy machine take does not count. Memory is the peak that tracemalloc sees, in a run of its own,
without the body itself; the tokenizer's memory is Rust's, and not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

CHAT, COMPLETION, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
MIB = 2**20
MAX_MODEL_LEN = 131_072
BEAT_S = 0.001


def filled(before: str, unit: str, after: str) -> Callable[[int], bytes]:
    """A body of so many bytes: `unit` again and again, without the comma at its end, between the two."""

    def make(num_bytes: int) -> bytes:
        count = max(1, (num_bytes - len(before) - len(after)) // len(unit.encode()))
        return before.encode() + (unit * count).removesuffix(",").encode() + after.encode()

    return make


def numbered(before: str, unit: str, after: str) -> Callable[[int], bytes]:
    """A body of so many bytes whose units are numbered at `#`, so that no two are equal."""

    def make(num_bytes: int) -> bytes:
        count = (num_bytes - len(before) - len(after)) // (len(unit) + 6)
        return f"{before}{','.join(unit.replace('#', f'{i:07d}') for i in range(count))}{after}".encode()

    return make


USER = '"messages":[{"role":"user","content":"x"}]'
CONTENT = '{"max_tokens":1,"messages":[{"role":"user","content":'
BODIES: dict[str, tuple[str, Callable[[int], bytes]]] = {
    # name: path, and the body of a size
    "prompt: ids, then a string": (COMPLETION, filled('{"prompt":[', "1,", ',"x"]}')),
    "prompt: too many ids": (COMPLETION, filled('{"prompt":[', "1,", "]}")),
    "prompt: lists of ids": (COMPLETION, filled('{"max_tokens":1,"prompt":[', f"[{'999,' * 99_999}999],", "]}")),
    "prompt: lists of one id": (COMPLETION, filled('{"prompt":[', "[1],", "]}")),
    "prompt: empty lists": (COMPLETION, filled('{"prompt":[', "[],", "]}")),
    "prompt: short texts": (COMPLETION, filled('{"prompt":[', '"a",', "]}")),
    "prompt: texts, then a number": (COMPLETION, filled('{"prompt":[', '"ab",', ",1]}")),
    "prompt: one text": (COMPLETION, filled('{"prompt":"', "word ", '"}')),
    "prompt: escapes": (COMPLETION, filled('{"prompt":"', "\\n", '"}')),
    "prompt: wide characters": (COMPLETION, filled('{"prompt":"\U0001f600', "word ", '"}')),
    "prompt: objects": (COMPLETION, filled('{"prompt":[', "{},", "]}")),
    "prompt: floats": (COMPLETION, filled('{"prompt":[', "1.5,", "]}")),
    "stop: numbers": (COMPLETION, filled('{"prompt":"x","stop":[', "1,", "]}")),
    "stop: strings": (COMPLETION, filled('{"prompt":"x","stop":[', '"a",', "]}")),
    "stop_token_ids": (COMPLETION, filled('{"prompt":"x","stop_token_ids":[', "1,", "]}")),
    "logit_bias": (COMPLETION, numbered('{"prompt":"x","logit_bias":{', '"#":1', "}}")),
    "messages: empty": (CHAT, filled('{"messages":[', '{"role":"user","content":""},', "]}")),
    "messages: without content": (CHAT, filled('{"messages":[', '{"role":"assistant"},', "]}")),
    "messages: numbers": (CHAT, filled('{"messages":[', "1,", "]}")),
    "messages: unknown fields": (CHAT, numbered('{"messages":[{"role":"user",', '"x#":1', "}]}")),
    "content: parts": (CHAT, filled(CONTENT + "[", '{"type":"text","text":""},', "]}]}")),
    "content: numbers": (CHAT, filled(CONTENT + "[", "1,", "]}]}")),
    "content: one text": (CHAT, filled(CONTENT + '"', "word ", '"}]}')),
    "content: braces and quotes": (CHAT, filled(CONTENT + '"', '{\\"[', '"}]}')),
    "tool_calls": (CHAT, filled('{"messages":[{"role":"assistant","tool_calls":[', "1,", "]}]}")),
    "chat_template_kwargs": (CHAT, numbered("{" + USER + ',"chat_template_kwargs":{', '"x#":[]', "}}")),
    "tool_calls: right ones": (
        CHAT,
        filled(
            '{"messages":[{"role":"assistant","tool_calls":[', '{"function":{"name":"f","arguments":"{}"}},', "]}]}"
        ),
    ),
    "tool_calls: nesting": (
        CHAT,
        filled('{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"', "[", '"}}]}]}'),
    ),
    "tools": (CHAT, filled("{" + USER + ',"tools":[', '{"type":"function"},', "]}")),
    "tools: one enum": (
        CHAT,
        numbered(
            "{" + USER + ',"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":[', '"#"', "]}}}]}"
        ),
    ),
    "response_format": (
        CHAT,
        numbered(
            "{" + USER + ',"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"enum":[',
            "#",
            "]}}}}",
        ),
    ),
    "guided_choice": (COMPLETION, numbered('{"prompt":"x","guided_choice":[', '"#"', "]}")),
    "guided_grammar: EBNF": (COMPLETION, filled('{"prompt":"x","guided_grammar":"', "root ::= root\\n", '"}')),
    "metadata: lists": (CHAT, filled("{" + USER + ',"metadata":[', "[],", "]}")),
    "metadata: numbers": (CHAT, filled('{"max_tokens":1,' + USER + ',"metadata":[', "1,", "]}")),
    "unknown fields": (CHAT, numbered("{" + USER + ",", '"x#":1', "}")),
    "the same field again": (CHAT, filled("{" + USER + ",", '"n":1,', "}")),
    "nesting": (CHAT, filled("{" + USER + ',"metadata":', "[", "")),
    "a number of many digits": (COMPLETION, filled('{"prompt":"x","seed":', "1", "}")),
    "an unknown field with a long name": (COMPLETION, filled('{"prompt":"x","', "a", '":1}')),
    "tokens: ids": (DETOKENIZE, filled('{"tokens":[', "999,", "]}")),
    "tokens: ids, then a string": (DETOKENIZE, filled('{"tokens":[', "1,", ',"x"]}')),
    "tokenize: one text": (TOKENIZE, filled('{"prompt":"', "word ", '"}')),
    "tokenize: empty messages": (TOKENIZE, filled('{"messages":[', '{"role":"user","content":""},', "]}")),
    "not JSON": (COMPLETION, filled("", "[", "")),
}
SMALL_BODIES: dict[str, tuple[str, bytes]] = {
    # as many parts as are allowed, in as few bytes as they can have
    "4,096 empty messages": (CHAT, BODIES["messages: empty"][1](29 * 4096)),
    "12,000 empty parts": (CHAT, BODIES["content: parts"][1](26 * 12_000)),
    "60,000 strings": (COMPLETION, BODIES["prompt: short texts"][1](4 * 60_000)),
    "all variables of a template": (CHAT, BODIES["chat_template_kwargs"][1](60_000)),
    "5,000 calls": (CHAT, BODIES["tool_calls: right ones"][1](41 * 5000)),
    "a schema of 450,000 bytes": (CHAT, BODIES["tools: one enum"][1](400_000)),
    "256 rules of EBNF": (COMPLETION, BODIES["guided_grammar: EBNF"][1](250 * 15)),
}


@contextlib.asynccontextmanager
async def router_app() -> AsyncIterator[Any]:
    """The app of a router with a stub worker and a real tokenizer."""
    from tests.cluster import stub_worker
    from tests.cluster.conftest import running_api

    from transom_cluster.http.api import build_api
    from transom_core.model_files.resolve import resolve_model
    from transom_core.text.tokenizer import Tokenizer

    async with running_api(stub_worker.StubWorker()) as api:
        router: Any = api.router
        router.tokenizer = Tokenizer.load(resolve_model("smollm2"))
        known = router.limits.current
        router.limits.last_known = type(known)(max_model_len=MAX_MODEL_LEN, vocab_size=router.tokenizer.vocab_size)
        yield build_api(router)


async def post(app: Any, path: str, body: bytes) -> tuple[int, str]:
    """Send a body in pieces as a web server does; the status and the beginning of the response."""
    pieces = [body[i : i + 65_536] for i in range(0, len(body), 65_536)] or [b""]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not pieces:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"}
    where = {"path": path, "raw_path": path.encode(), "query_string": b"", "headers": [], "server": ("t", 80)}
    await app({**scope, **where, "client": ("t", 1)}, receive, send)
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])[:200].decode(errors="replace")


class Heart:
    """A task that wakes up every millisecond and notes its longest stall."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def beat(self) -> None:
        """Run until it is cancelled."""
        while True:
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            await asyncio.sleep(BEAT_S)
            gap_s = min(time.perf_counter() - wall_s, time.process_time() - cpu_s)
            self.longest_s = max(self.longest_s, gap_s)


async def measure(app: Any, path: str, body: bytes) -> dict[str, Any]:
    """Stall, CPU and status of one body, then the memory of another run."""
    heart = Heart()
    beating = asyncio.create_task(heart.beat())
    await asyncio.sleep(5 * BEAT_S)
    loop_s, all_s = time.thread_time(), time.process_time()
    status, text = await post(app, path, body)
    loop_s, all_s = time.thread_time() - loop_s, time.process_time() - all_s
    await asyncio.sleep(2 * BEAT_S)
    beating.cancel()
    with traced() as peak:
        await post(app, path, body)
    return {
        "bytes": len(body),
        "status": status,
        "stall_ms": heart.longest_s * 1e3,
        "loop_ms": loop_s * 1e3,
        "cpu_ms": all_s * 1e3,
        "memory": peak[0] / len(body),
        "answer": text,
    }


@contextlib.contextmanager
def traced() -> Iterator[list[int]]:
    """The peak of what is allocated inside, in bytes."""
    tracemalloc.start()
    peak: list[int] = []
    try:
        yield peak
    finally:
        peak.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()


async def main() -> None:
    """Measure every body and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=8.0, help="size of each body")
    parser.add_argument("--only", default="", help="measure only bodies with this text in their name")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    size = int(options.mib * MIB) - 1
    bodies = {name: (path, make(size)) for name, (path, make) in BODIES.items() if options.only in name}
    bodies |= {name: body for name, body in SMALL_BODIES.items() if options.only in name}
    figures = {}
    print(
        f"{'body':38} {'MiB':>6} {'status':>6} {'stall ms':>9} {'loop ms':>8} {'CPU ms':>8} {'memory':>7}", flush=True
    )
    async with router_app() as app:
        await post(app, COMPLETION, b'{"prompt":"warm up","max_tokens":1}')
        for name, (path, body) in bodies.items():
            one = figures[name] = await measure(app, path, body)
            print(
                f"{name:38} {one['bytes'] / MIB:6.2f} {one['status']:6} {one['stall_ms']:9.1f} {one['loop_ms']:8.1f} "
                f"{one['cpu_ms']:8.0f} {one['memory']:6.1f}x",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    asyncio.run(main())

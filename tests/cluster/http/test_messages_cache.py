"""A coding agent's session over /v1/messages against a real engine: its prefixes are found in every turn, whatever it sends that
differs in each request."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.cluster.engine_server import engine_server

BLOCK = 16
TURNS = 6
TOOLS: Any = [{"name": "read", "description": "Reads.", "input_schema": {"type": "object", "properties": {}}}]
MARK: Any = {"cache_control": {"type": "ephemeral"}}


def session(model: Path, *, strips: bool = True, **settings: Any) -> list[tuple[int, int]]:
    """(tokens of the prompt, tokens of it that were in the cache) of each turn.

    Each request has another nonce in the first block of the system prompt, and marks on that prompt's last block and on the last
    block of all. The model's answer is a call, whose result the next turn brings.
    """
    settings = {"kv_cache_memory_bytes": "8MiB", "num_threads": 1, "block_size": BLOCK, **settings}
    turns = []
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Fix the bug.", **MARK}]}]
    with (
        engine_server(model, server={"strip_billing_header": strips}, **settings) as server,
        anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0, timeout=120) as client,
    ):
        for turn in range(TURNS):
            nonce = f"x-anthropic-billing-header: cc_version=2.1.9; cc_entrypoint=cli; cch={turn * 7919:05x};"
            system = [{"type": "text", "text": nonce}, {"type": "text", "text": "You are an agent.", **MARK}]
            sent: Any = {"model": "tiny", "system": system, "messages": messages, "tools": TOOLS}
            counted = client.messages.count_tokens(**sent).input_tokens
            usage = client.messages.create(max_tokens=3, **sent).usage
            cached, created = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
            assert (counted, cached + created) == (usage.input_tokens + cached + created, counted // BLOCK * BLOCK)
            turns.append((counted, cached))
            call = {"type": "tool_use", "id": f"toolu_{turn}", "name": "read", "input": {"line": turn}}
            result = {"type": "tool_result", "tool_use_id": f"toolu_{turn}", "content": f"line {turn} of the file"}
            unmarked = [{**messages[-1], "content": [{**messages[-1]["content"][0], "cache_control": None}]}]
            new: Any = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [{**result, **MARK}]}]
            messages = [*messages[:-1], *unmarked, *new]
    return turns


@pytest.mark.parametrize("hybrid", [{}, {"window": 32, "window_pattern": "SF"}], ids=["full", "hybrid"])
def test_each_turn_computes_its_new_tokens_and_a_block_at_most(tiny_model: Path, hybrid: dict[str, Any]) -> None:
    turns = session(tiny_model, **hybrid)
    assert turns[0][1] == 0
    for (before, _), (prompt, cached) in pairwise(turns):
        assert prompt - cached <= prompt - before + BLOCK < prompt


def test_without_the_setting_the_line_ends_every_prefix(tiny_model: Path) -> None:
    turns = session(tiny_model, strips=False)
    assert all(cached < turns[0][0] - BLOCK for _, cached in turns)

"""A coding agent's sessions over /v1/messages: many turns, with the line that differs in each request and rolling cache marks.

Models with sliding windows, short convolutions and recurrent states, for which a prefix is cached only where a checkpoint stands.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.cluster.engine_server import EngineServer, engine_server
from tests.how_many import num_examples
from tests.lost_windows import lose_left_behind
from tests.tiny_checkpoints import VOCAB_SIZE
from tests.worker.models.test_dense_families import DELTA_NET

BLOCK, TURNS = 16, num_examples(daily=12, exhaustive=30)
SETTINGS: dict[str, Any] = dict(
    block_size=BLOCK, max_model_len=2048, kv_cache_memory_bytes="32MiB", window_repair=False
)
MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
SIZES: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 96, "max_position_embeddings": 2048}
KINDS: dict[str, dict[str, Any]] = {"windows": {"window": 48, "window_pattern": "SF"}, "convolutions": {}, "states": {}}


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("agent")
    match request.param:
        case "windows":
            folder = tiny_model
        case "convolutions":
            make_checkpoint(folder, "lfm2", **SIZES, layer_types=["conv", "full_attention"] * 2)
        case "states":
            make_checkpoint(folder, "qwen3_5_text", **(DELTA_NET | SIZES | {"num_hidden_layers": 4}))
    with engine_server(folder, **SETTINGS, **KINDS[request.param]) as running:
        yield running


def text(words: str, *, marked: bool = False) -> dict[str, Any]:
    return {"type": "text", "text": words, **(MARK if marked else {})}


def ask(
    server: EngineServer, system: list[dict[str, Any]], messages: list[dict[str, Any]], nonce: int
) -> tuple[int, int]:
    """The prompt's tokens, and those that were cached."""
    billing = text(f"x-anthropic-billing-header: cc_version=2; cch={nonce:05x};")
    body = {"model": "tiny", "max_tokens": 1, "system": [billing, *system], "messages": messages}
    answer = httpx.post(f"{server.url}/v1/messages", json=body, timeout=120).json()
    assert "usage" in answer, answer
    asyncio.run(server.until_quiet())
    lose_left_behind(server.replica.engine.scheduler.cache)  # as in a full pool: what no checkpoint pins goes
    cached = answer["usage"]["cache_read_input_tokens"]
    return answer["usage"]["input_tokens"] + answer["usage"]["cache_creation_input_tokens"] + cached, cached


def test_a_turn_computes_its_own_tokens_and_at_most_one_block(server: EngineServer) -> None:
    system = [text("You write code. " * 6, marked=True), text("The folder is /src.", marked=True)]
    messages: list[dict[str, Any]] = [{"role": "user", "content": [text("Mend the test.", marked=True)]}]
    before = 0
    for turn in range(TURNS):
        total, cached = ask(server, system, messages, nonce=turn)
        assert total - cached <= total - before + BLOCK or not turn, (turn, total, cached, before)
        before = total
        for message in messages[:-2]:  # the marks roll: the latest two messages of the user have one
            message["content"][-1].pop("cache_control", None)
        call = {"type": "tool_use", "id": f"t{turn}", "name": "read", "input": {}}
        result = {"type": "tool_result", "tool_use_id": f"t{turn}", "content": f"line {turn}", **MARK}
        messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


@pytest.mark.parametrize("marked", [True, False])
def test_another_session_hits_what_the_first_one_marked_inside_the_system_prompt(
    server: EngineServer, marked: bool
) -> None:
    """The sessions differ after the mark, so no message that they share ends there."""
    name = "marked" if marked else "plain"
    shared = text(f"You are a {name} agent. " * 8, marked=marked)
    for session in range(2):
        folder, question = text(f"{session} is the folder. " * 8), {"role": "user", "content": f"{session} Hello?"}
        total, cached = ask(server, [shared, folder], [question], nonce=session)
        assert total > 9 * BLOCK
        assert (cached >= 3 * BLOCK) == (marked and session == 1), (session, cached)

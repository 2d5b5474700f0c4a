"""What metrics and /debug/requests say of answers with reasoning and tool calls."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.cluster.conftest import Api, running_api, sample, until
from tests.cluster.openai.scripted_answer import ScriptedParser, ScriptedTokenizer, Step, events_of, request_of
from tests.cluster.speaking_worker import SpeakingWorker
from tests.cluster.stub_worker import ByteTokenizer
from transom_cluster.openai.answer.answer_reader import AnswerReader
from transom_cluster.telemetry.router_metrics import RouterMetrics
from transom_core.contract import FinishReason
from transom_core.text.markup.parts import (
    AnswerPart,
    CallArguments,
    CallBegin,
    CallEnd,
    MalformedMarkup,
    MessageText,
    ReasoningText,
)

SCRIPT = (
    Step("<think>", state="reasoning"),
    Step("Hm", (ReasoningText("Hm"),), "reasoning"),
    Step("</think>"),
    Step("<call>oops", (MalformedMarkup("<call>oops"), MessageText("<call>oops"))),
    Step("<call>f", (CallBegin(0, "f"),), "tool_call"),
    Step("{}</call>", (CallArguments(0, "{}"), CallEnd(0, is_complete=True))),
    Step("<call>g", (CallBegin(1, "g"),), "tool_call"),
    Step("oops</call>", (CallEnd(1, is_complete=False),)),
    Step("<call>h", (CallBegin(2, "h"),), "tool_call"),
)
AT_END: tuple[AnswerPart, ...] = (CallEnd(2, is_complete=False),)


def reader_of(steps: Sequence[Step], at_end: tuple[AnswerPart, ...] = ()) -> AnswerReader:
    return AnswerReader(ScriptedTokenizer(steps), request_of().params, ScriptedParser(steps, at_end))  # type: ignore[arg-type]


def read(reader: AnswerReader, steps: Sequence[Step], reason: FinishReason = "length") -> None:
    for event in events_of(steps, reason=reason):
        reader.read(event)


def test_calls_by_outcome_degraded_answers_and_reasoning_are_counted() -> None:
    metrics = RouterMetrics("r", model="m", tool_parser="hermes")
    readers = [reader_of(SCRIPT, AT_END), reader_of(SCRIPT[:3])]
    read(readers[0], SCRIPT)
    read(readers[1], SCRIPT[:3])
    metrics.answers.answered(readers)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"model": "m", "router": "r", **labels})

    def calls(outcome: str) -> float | None:
        return value("transom_router_tool_calls_total", parser="hermes", outcome=outcome)

    assert (calls("parsed"), calls("malformed"), calls("incomplete")) == (1, 2, 1)
    assert value("transom_router_degraded_answers_total", parser="hermes") == 1
    assert value("transom_router_reasoning_tokens_total") == 2


def test_a_broken_call_alone_does_not_degrade_an_answer() -> None:
    reader = reader_of(SCRIPT[6:8])
    read(reader, SCRIPT[6:8], "stop")
    assert not reader.tally.has_degraded
    assert reader.tally.num_malformed == 1


SPOKEN = '<think>Hm</think>Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}
PLACES = {  # what the answer is at, and how many calls have begun, where this follows
    "m</think>": ("reasoning", 0),
    "see": ("message", 0),
    "1}}": ("tool_call", 1),
}


async def lines_of(api: Api) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = (await api.client.get("/debug/requests")).json()["requests"]
    return lines


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("following", "expected"), PLACES.items())
async def test_debug_requests_show_what_a_running_answer_is_at(
    following: str, expected: tuple[str, int], stream: bool
) -> None:
    num_tokens = SPOKEN.index(following)  # each is a byte
    worker = SpeakingWorker(tokenizer=ByteTokenizer(), texts=(SPOKEN,), max_events=num_tokens)  # type: ignore[arg-type]
    async with running_api(worker, tool_call_parser="hermes", reasoning_parser="qwen3") as api:
        body = {**CHAT, "tool_choice": "required", "stream": stream}
        call = api.call("/v1/chat/completions", body)
        await until(lambda: worker.num_silent and worker.is_read)

        def figures(line: dict[str, Any]) -> tuple[Any, ...]:
            return line["state"], line["answers"], line["tool_calls"], line["grammar"]

        state, num_calls = expected
        await until(lambda: len(api.router.timelines.summaries("all", None, 1)) == 1)
        (line,) = await lines_of(api)
        assert figures(line) == ("running", [state], num_calls, True)
        worker.go()
        await call.task
        (line,) = await lines_of(api)
        assert figures(line) == ("finished", ["message"], 1, True)
        assert line["reasoning_tokens"] == len("Hm</think>") - 1
        assert sample(api.router, "tool_calls_total", parser="hermes", outcome="parsed") == 1
        assert sample(api.router, "reasoning_tokens_total") == line["reasoning_tokens"]

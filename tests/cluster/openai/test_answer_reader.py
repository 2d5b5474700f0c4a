"""The answer reader gives the parser each token with its part of the worker's text, however events are cut or joined."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given, settings, strategies as st

from tests.how_many import num_examples
from transom_cluster.openai.answer.answer_reader import NO_TOKEN_ID, AnswerReader
from transom_cluster.router.output_stream import joined
from transom_core.contract import OutputEvent, Request, SamplingParams
from transom_core.text.markup.parts import AnswerPart, MessageText, ReasoningText
from transom_worker.engine.running_request import RunningRequest
from transom_worker.scheduling.outputs import SequenceOutput

VOCABULARY: tuple[bytes, ...] = (
    b"a",
    b"b",
    b"ab",
    b"bca",
    "é".encode(),
    "\ufffd".encode(),
    b"\xc3",  # the first byte of é
    b"\xa9",  # the last one
    b"\xf0\x9f",  # the first half of an emoji
    b"\xa6\x9c",  # the second half
    b"<think>",  # added tokens that are not special: the text has them
    b"</think>",
    b"<call>",  # special: the text has them only without skip_special_tokens
    b"<end>",
)
THINK, END_THINK, CALL, END = range(10, 14)
SPECIAL = frozenset({CALL, END})


class Vocabulary:
    """A tokenizer of few tokens, so that short random sequences have broken characters, markers and stop strings."""

    vocab_size = len(VOCABULARY)
    whole_texts: ClassVar[dict[bool, dict[int, str]]] = {False: {}, True: {}}

    def token_bytes(self, token_id: int) -> bytes:
        return VOCABULARY[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in SPECIAL


@dataclass
class Recorder:
    """A parser of reasoning between two markers, which it knows by their ids; records what it is given."""

    state: Literal["reasoning", "message", "tool_call"] = "message"
    pushed: list[tuple[int, str]] = field(default_factory=list)
    has_ended: bool = False

    def push(self, token_id: int, text: str) -> list[AnswerPart]:
        assert not self.has_ended
        self.pushed.append((token_id, text))
        if token_id in (THINK, END_THINK):
            self.state = "reasoning" if token_id == THINK else "message"
            return []
        if not text:
            return []
        return [ReasoningText(text) if self.state == "reasoning" else MessageText(text)]

    def flush(self) -> list[AnswerPart]:
        self.has_ended = True
        return []


def worker_events(token_ids: Sequence[int], params: SamplingParams) -> list[OutputEvent]:
    """The events of a worker that samples these tokens, as far as its stop conditions let it."""
    request = Request(request_id="r", prompt_token_ids=(0,), params=params, seed=0)
    running = RunningRequest(request, Vocabulary(), eos_token_ids=frozenset({END}), max_model_len=1000, arrival_s=0.0)  # type: ignore[arg-type]
    events = []
    for position, token_id in enumerate(token_ids):
        if running.finish_reason is None:
            plain: Any = {"num_cached_tokens": 0, "index_version": 0, "at_limit": False}
            output = SequenceOutput("r", token_id, position, is_first=position == 0, **plain)
            events.append(running.token_event(output))
    return events


def read(events: Sequence[OutputEvent], params: SamplingParams) -> tuple[list[AnswerPart], Recorder, AnswerReader]:
    parser = Recorder()
    reader = AnswerReader(Vocabulary(), params, parser)  # type: ignore[arg-type]
    return [part for event in events for part in reader.read(event)], parser, reader


def texts(parts: Sequence[AnswerPart]) -> list[tuple[type, str]]:
    """The parts with neighbours of one kind joined."""
    found: list[tuple[type, str]] = []
    for part in parts:
        assert isinstance(part, MessageText | ReasoningText)
        if found and found[-1][0] is type(part):
            found[-1] = type(part), found[-1][1] + part.text
        else:
            found.append((type(part), part.text))
    return found


def split_text(text: str) -> list[tuple[type, str]]:
    """What the whole text says: reasoning between the markers, the markers themselves left out."""
    kind: type = MessageText
    found: list[tuple[type, str]] = []
    for piece in re.split("(</?think>)", text):
        if piece in ("<think>", "</think>"):
            kind = ReasoningText if piece == "<think>" else MessageText
        elif piece and found and found[-1][0] is kind:
            found[-1] = kind, found[-1][1] + piece
        elif piece:
            found.append((kind, piece))
    return found


params_st = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 24),
    min_tokens=st.sampled_from([0, 0, 0, 1]),
    stop=st.lists(
        st.one_of(
            st.text("ab\ufffdé", min_size=1, max_size=4),
            st.sampled_from(["ink>", "<think>", "b<", "</th", "<call>", "🦜", "a<end"]),
        ),
        max_size=2,
    ).map(tuple),
    stop_token_ids=st.sampled_from([(), (), (CALL,), (3,), (THINK,)]),
    ignore_eos=st.booleans(),
    include_stop_str_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
)
ids_st = st.lists(st.integers(0, len(VOCABULARY) - 1), min_size=1, max_size=24)


@given(token_ids=ids_st, params=params_st, cuts=st.sets(st.integers(1, 24)))
@settings(max_examples=num_examples(150, 20_000))
def test_the_parser_gets_the_workers_text_and_whole_tokens(
    token_ids: list[int], params: SamplingParams, cuts: set[int]
) -> None:
    events = worker_events(token_ids, params)
    parts, parser, reader = read(events, params)
    has_ended, text = events[-1].finish_reason is not None, "".join(event.text for event in events)
    given_text = "".join(text for _, text in parser.pushed)
    given_ids = [token_id for token_id, _ in parser.pushed if token_id != NO_TOKEN_ID]
    assert text.startswith(given_text)
    assert given_ids == token_ids[: len(given_ids)]
    assert reader.num_read == len(given_ids)
    in_spans = [i for i in range(reader.num_read) if reader.is_reasoning(i)]
    assert in_spans == [i for span in reader.reasoning_spans for i in span]
    assert reader.num_reasoning_tokens == len(in_spans)
    for token_id, own in parser.pushed:
        if token_id >= THINK:  # a marker is itself and nothing more
            assert own in ("", VOCABULARY[token_id].decode())
    if has_ended:
        assert given_text == text
        assert texts(parts) == split_text(text)
        if not isinstance(events[-1].stop_reason, str):
            assert given_ids == token_ids[: len(events)]
    bounds = [0, *sorted(cut for cut in cuts if 0 < cut < len(events)), len(events)]
    as_for_a_slow_client = [joined(events[a:b]) for a, b in pairwise(bounds)]
    joined_parts, joined_parser, joined_reader = read(as_for_a_slow_client, params)
    assert (joined_parser.pushed, texts(joined_parts)) == (parser.pushed, texts(parts))
    assert joined_reader.reasoning_spans == reader.reasoning_spans


def test_reasoning_is_counted_without_its_markers() -> None:
    params = SamplingParams(max_tokens=100)
    reader = read(worker_events([0, THINK, 0, 1, 2, END_THINK, 0, THINK, 3, END], params), params)[2]
    assert (reader.reasoning_spans, reader.num_reasoning_tokens) == ([range(2, 5), range(8, 10)], 5)


@pytest.mark.parametrize(
    ("stop", "pushed"), [("think>", [(0, "a"), (NO_TOKEN_ID, "<")]), ("<think>", [(0, "a")]), ("a<th", [])]
)
def test_a_marker_of_which_a_stop_string_cut_something_is_none(stop: str, pushed: list[tuple[int, str]]) -> None:
    params = SamplingParams(max_tokens=100, stop=(stop,))
    parser = read(worker_events([0, THINK, 1], params), params)[1]
    assert (parser.pushed, parser.state) == (pushed, "message")


def test_an_unfinished_character_goes_before_the_marker_after_it() -> None:
    params = SamplingParams(max_tokens=100)
    parser = read(worker_events([6, THINK, 6, END], params), params)[1]
    unfinished = [(6, ""), (NO_TOKEN_ID, "\ufffd")]
    assert parser.pushed == [*unfinished, (THINK, "<think>"), *unfinished, (END, "")]

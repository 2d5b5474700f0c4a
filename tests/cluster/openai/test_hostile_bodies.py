"""No body allocates more than ten times its size, or as much as is allowed to small ones; a wrong one ends at its first error.

Strings, arrays and objects are counted exactly, and too many of them are refused before anything is parsed.
"""

import json
import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from transom_cluster.openai.messages.chat_form import messages_chat
from transom_cluster.openai.messages.request_body import MessagesRequest
from transom_cluster.openai.openapi_document import POST_ENDPOINTS
from transom_cluster.openai.request import body_shape, completion_request
from transom_cluster.openai.request.body import BodyParser
from transom_cluster.openai.request.body_shape import MAX_CONTAINERS, MAX_STRINGS, SMALL_BODY_BYTES, check_shape
from transom_cluster.openai.request.chat_request import ChatCompletionRequest
from transom_cluster.openai.request.completion_request import CompletionRequest, DetokenizeRequest
from transom_cluster.openai.request.message_fields import template_messages
from transom_cluster.openai.request.request_limits import ModelLimits
from transom_cluster.openai.request.token_id_lists import PIECE_BYTES
from transom_core.errors import RequestError

CHAT, COMPLETION, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
MESSAGES = "/v1/messages"


def filled(before: str, unit: str, after: str) -> Callable[[int], bytes]:
    """A body of `num_bytes`: `unit` again and again, without the comma at its end, between the two."""

    def make(num_bytes: int) -> bytes:
        count = max(1, (num_bytes - len(before) - len(after)) // len(unit.encode()))
        return before.encode() + (unit * count).removesuffix(",").encode() + after.encode()

    return make


def numbered(before: str, unit: str, after: str) -> Callable[[int], bytes]:
    """A body of `num_bytes` whose units are numbered at `#`, so that no two are equal."""

    def make(num_bytes: int) -> bytes:
        count = (num_bytes - len(before) - len(after)) // (len(unit) + 6)
        return f"{before}{','.join(unit.replace('#', f'{i:07d}') for i in range(count))}{after}".encode()

    return make


USER = '"messages":[{"role":"user","content":"x"}]'
CONTENT = '{"max_tokens":1,"messages":[{"role":"user","content":'
CALLS = '{"messages":[{"role":"assistant","tool_calls":['
FUNCTION = ',"tools":[{"type":"function","function":{"name":"f",'
BODIES: dict[str, tuple[str, Callable[[int], bytes]]] = {
    # name: path, and the body of a size
    "prompt: ids, then a string": (COMPLETION, filled('{"prompt":[', "1,", ',"x"]}')),
    "prompt: lists of ids": (COMPLETION, filled('{"max_tokens":1,"prompt":[', f"[{'999,' * 9_999}999],", "]}")),
    "prompt: empty lists": (COMPLETION, filled('{"prompt":[', "[],", "]}")),
    "prompt: short texts": (COMPLETION, filled('{"prompt":[', '"a",', "]}")),
    "prompt: one text": (COMPLETION, filled('{"prompt":"', "word ", '"}')),
    "prompt: wide characters": (COMPLETION, filled('{"prompt":"\U0001f600', "word ", '"}')),
    "stop: strings": (COMPLETION, filled('{"prompt":"x","stop":[', '"a",', "]}")),
    "stop_token_ids": (COMPLETION, filled('{"prompt":"x","stop_token_ids":[', "1,", "]}")),
    "logit_bias": (COMPLETION, numbered('{"prompt":"x","logit_bias":{', '"#":1', "}}")),
    "messages: empty": (CHAT, filled('{"messages":[', '{"role":"user","content":""},', "]}")),
    "messages: unknown fields": (CHAT, numbered('{"messages":[{"role":"user",', '"x#":1', "}]}")),
    "content: parts": (CHAT, filled(CONTENT + "[", '{"type":"text","text":""},', "]}]}")),
    "content: one text": (CHAT, filled(CONTENT + '"', "word ", '"}]}')),
    "content: braces and quotes": (CHAT, filled(CONTENT + '"', '{\\"[', '"}]}')),
    "blocks: empty": (MESSAGES, filled(CONTENT + "[", '{"type":"text","text":""},', "]}]}")),
    "blocks: one text": (MESSAGES, filled(CONTENT + '[{"type":"text","text":"', "word ", '"}]}]}')),
    "chat_template_kwargs": (CHAT, numbered("{" + USER + ',"chat_template_kwargs":{', '"x#":[]', "}}")),
    "tool_calls: right ones": (CHAT, filled(CALLS, '{"function":{"name":"f","arguments":"{}"}},', "]}]}")),
    "tool_calls: nesting": (CHAT, filled(CALLS + '{"function":{"name":"f","arguments":"', "[", '"}}]}]}')),
    "tools: one enum": (CHAT, numbered("{" + USER + FUNCTION + '"parameters":{"enum":[', '"#"', "]}}}]}")),
    "guided_choice": (COMPLETION, numbered('{"prompt":"x","guided_choice":[', '"#"', "]}")),
    "guided_grammar: EBNF": (COMPLETION, filled('{"prompt":"x","guided_grammar":"', "root ::= root\\n", '"}')),
    "metadata: numbers": (CHAT, filled('{"max_tokens":1,' + USER + ',"metadata":[', "1,", "]}")),
    "unknown fields": (CHAT, numbered("{" + USER + ",", '"x#":1', "}")),
    "the same field again": (CHAT, filled("{" + USER + ",", '"n":1,', "}")),
    "a number of many digits": (COMPLETION, filled('{"prompt":"x","seed":', "1", "}")),
    "an unknown field with a long name": (COMPLETION, filled('{"prompt":"x","', "a", '":1}')),
    "tokens: ids": (DETOKENIZE, filled('{"tokens":[', "999,", "]}")),
    "tokenize: one text": (TOKENIZE, filled('{"prompt":"', "word ", '"}')),
    "not JSON": (COMPLETION, filled("", "[", "")),
}
SMALL_BODIES: dict[str, tuple[str, bytes]] = {
    # as many parts as are allowed, in as few bytes as they can have
    "4,096 empty messages": (CHAT, BODIES["messages: empty"][1](29 * 4096)),
    "12,000 empty parts": (CHAT, BODIES["content: parts"][1](26 * 12_000)),
    "12,000 empty blocks": (MESSAGES, BODIES["blocks: empty"][1](26 * 12_000)),
    "60,000 strings": (COMPLETION, BODIES["prompt: short texts"][1](4 * 60_000)),
    "all variables of a template": (CHAT, BODIES["chat_template_kwargs"][1](60_000)),
    "5,000 calls": (CHAT, BODIES["tool_calls: right ones"][1](41 * 5000)),
    "a schema of 450,000 bytes": (CHAT, BODIES["tools: one enum"][1](400_000)),
    "256 rules of EBNF": (COMPLETION, BODIES["guided_grammar: EBNF"][1](250 * 15)),
}

BODY_BYTES = 2**19
MORE_BYTES = dict.fromkeys(("tools: one enum", "guided_choice"), 9 * 66_000)  # 66,000 strings, more than are allowed
# For the parts that any body may have: 4,096 messages, 16,384 objects, 65,536 strings.
SMALL_ALLOWANCE_BYTES = 8 * 2**20
LIMITS = ModelLimits(max_model_len=2**22, vocab_size=1000)  # so that the model's length refuses nothing
PARSERS: dict[str, Any] = {path: BodyParser(model, rules) for path, (model, rules, _) in POST_ENDPOINTS.items()}
CASES = {name: (path, make(MORE_BYTES.get(name, BODY_BYTES))) for name, (path, make) in BODIES.items()} | SMALL_BODIES
GOOD = {
    "prompt: one text", "prompt: lists of ids", "prompt: wide characters", "content: one text",
    "content: braces and quotes", "blocks: one text", "metadata: numbers", "tokens: ids", "tokenize: one text",
    *SMALL_BODIES,
} - {"60,000 strings"}  # fmt: skip


def read(path: str, body: bytes) -> object:
    """What routes read of a body before they tokenise."""
    parsed = PARSERS[path].parse(body)
    if isinstance(parsed, CompletionRequest):
        return parsed.params(), parsed.prompts(LIMITS), parsed.answer_options(lambda _: None)
    if isinstance(parsed, ChatCompletionRequest):
        return parsed.params(), parsed.answer_options(None, lambda _: None), template_messages(parsed.messages)
    if isinstance(parsed, MessagesRequest):
        return messages_chat(parsed, strips_billing_header=True)
    return parsed.token_ids(LIMITS) if isinstance(parsed, DetokenizeRequest) else parsed


@pytest.mark.parametrize("name", CASES)
def test_a_body_allocates_ten_times_its_size_at_most(name):
    path, body = CASES[name]
    tracemalloc.start()
    try:
        if name in GOOD:
            read(path, body)
        else:
            with pytest.raises(RequestError):
                read(path, body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= max(10 * len(body), SMALL_ALLOWANCE_BYTES if name in SMALL_BODIES else 0)


def test_a_long_list_is_read_in_pieces_and_names_the_wrong_element(monkeypatch):
    ids = [i % 997 for i in range(PIECE_BYTES)]
    parser = PARSERS["/v1/completions"]
    assert parser.parse(msgspec.json.encode({"prompt": ids})).prompts(LIMITS) == [ids]
    lists = [ids, ids[:3], ids[5:]]
    assert parser.parse(msgspec.json.encode({"prompt": lists})).prompts(LIMITS) == lists
    with pytest.raises(RequestError, match='is "x": expected `int`') as caught:
        parser.parse(msgspec.json.encode({"prompt": [*ids, "x"]})).prompts(LIMITS)
    assert caught.value.param == f"prompt[{len(ids)}]"
    for wrong in (5, "]", [[1]], None):
        with pytest.raises(RequestError) as caught:
            parser.parse(msgspec.json.encode({"prompt": [ids, wrong, ids]})).prompts(LIMITS)
        assert str(caught.value.param).startswith("prompt[1]")


def test_lists_that_are_too_long_are_refused_before_any_id_is_read(monkeypatch):
    short = ModelLimits(max_model_len=1000, vocab_size=1000)
    monkeypatch.setattr(completion_request, "read_ids", lambda *_: pytest.fail("the ids were read"))
    with pytest.raises(RequestError, match="2000 tokens"):
        PARSERS["/v1/completions"].parse(msgspec.json.encode({"prompt": [1] * 2000})).prompts(short)
    with pytest.raises(RequestError, match="2,000 ids"):
        PARSERS["/detokenize"].parse(msgspec.json.encode({"tokens": [1] * 2000})).token_ids(short)


STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
values = st.recursive(
    st.text('a"\\[{,\n\u00e9', max_size=9) | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\[', max_size=3), inner, max_size=3),
)


@given(value=values, piece_bytes=st.integers(1, 9))
def test_strings_are_left_out_wherever_pieces_are_cut(value, piece_bytes):
    body = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_shape, "PIECE_BYTES", piece_bytes)
        outside = b"".join(body_shape._outside_strings(body))
    assert outside == STRING.sub(b"", body)


def padded(body: str) -> bytes:
    """A body that is long enough to be looked at."""
    return body.encode() + b" " * SMALL_BODY_BYTES


@pytest.mark.parametrize(
    ("before", "unit", "most", "reason"),
    [
        ('"' + "[]," * MAX_CONTAINERS + '",', "[],", MAX_CONTAINERS - 1, "arrays and objects"),
        ('"' + "{}," * MAX_CONTAINERS + '",', "{},", MAX_CONTAINERS - 1, "arrays and objects"),
        ("", r'"\"",', MAX_STRINGS, "65,536 strings"),
    ],
    ids=["arrays", "objects", "strings"],
)
def test_the_limits_count_what_is_outside_of_strings(before, unit, most, reason):
    check_shape(padded("[" + before + unit * most))
    with pytest.raises(RequestError, match=reason):
        check_shape(padded("[" + before + unit * (most + 1)))

"""Bodies that cost a parser as much as a client can make them cost: what a test or a benchmark posts, by name."""

from __future__ import annotations

from collections.abc import Callable

CHAT, COMPLETION, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"


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
BODIES: dict[str, tuple[str, Callable[[int], bytes]]] = {
    # name: path, and the body of a size
    "prompt: ids, then a string": (COMPLETION, filled('{"prompt":[', "1,", ',"x"]}')),
    "prompt: lists of ids": (COMPLETION, filled('{"max_tokens":1,"prompt":[', f"[{'999,' * 99_999}999],", "]}")),
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
    "tools: one enum": (
        CHAT,
        numbered(
            "{" + USER + ',"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":[', '"#"', "]}}}]}"
        ),
    ),
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
    "60,000 strings": (COMPLETION, BODIES["prompt: short texts"][1](4 * 60_000)),
    "all variables of a template": (CHAT, BODIES["chat_template_kwargs"][1](60_000)),
    "5,000 calls": (CHAT, BODIES["tool_calls: right ones"][1](41 * 5000)),
    "a schema of 450,000 bytes": (CHAT, BODIES["tools: one enum"][1](400_000)),
    "256 rules of EBNF": (COMPLETION, BODIES["guided_grammar: EBNF"][1](250 * 15)),
}

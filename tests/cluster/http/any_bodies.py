"""`bodies`: random requests with any JSON in any field."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from transom_cluster.openai.request.body import BodyModel
from transom_cluster.openai.request.chat_request import ChatCompletionRequest
from transom_cluster.openai.request.completion_request import CompletionRequest, DetokenizeRequest, TokenizeRequest
from transom_cluster.openai.request.field_rules import CHAT_RULES, COMPLETION_RULES

MODELS: dict[str, tuple[type[BodyModel], Any]] = {
    "/v1/chat/completions": (ChatCompletionRequest, CHAT_RULES),
    "/v1/completions": (CompletionRequest, COMPLETION_RULES),
    "/tokenize": (TokenizeRequest, None),
    "/detokenize": (DetokenizeRequest, None),
}

numbers = st.one_of(
    st.integers(-3, 30),
    st.sampled_from([256, 259, 260, 2**31, 2**63, 2**64, -(2**64), 10**400]),
    st.floats(-3, 3),
    st.sampled_from([1e308, float("inf"), float("nan"), -0.0]),
)
scalars = st.one_of(
    st.none(), st.booleans(), numbers, st.text(max_size=5), st.sampled_from(["stub", "text", "none", "é\0"])
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
parts = st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=4)}) | anything
names = st.sampled_from(["f", "g", "a b", ""])
schemas = st.sampled_from(
    [{}, {"type": "object", "properties": {"a": {"enum": ["x", 1]}}, "required": ["a"]}, {"not": {}}]
)
calls = st.fixed_dictionaries(
    {
        "function": st.fixed_dictionaries(
            {"name": names, "arguments": st.sampled_from(["{}", '{"a"', "", "[]"]) | anything}
        )
    },
    optional={"id": scalars, "type": st.sampled_from(["function", "custom"]), "x": anything},
)
functions = st.fixed_dictionaries({"name": names}, optional={"parameters": schemas | anything, "strict": st.booleans()})
tools = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["function"] * 3 + ["custom"]), "function": functions}), max_size=3
)
choices = st.sampled_from(["none", "auto", "required"]) | st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": names})}
)
json_formats = st.fixed_dictionaries({"name": names}, optional={"schema": schemas | anything, "strict": st.booleans()})
formats = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "json_object", "json_schema", "structural_tag"])},
    optional={"json_schema": json_formats},
)
grammars = st.sampled_from(["start: /a/", 'root ::= "a" | "b"', "root ::= [", "start:", ""])
outputs = st.fixed_dictionaries(
    {},
    optional={
        "json": schemas,
        "regex": st.text("a(|", max_size=3),
        "choice": st.lists(st.text(max_size=2)),
        "grammar": grammars,
    },
)
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
            "content": st.text(max_size=4) | st.lists(parts, max_size=2) | anything,
        },
        optional={
            "name": anything,
            "tool_calls": st.lists(calls, max_size=2) | anything,
            "tool_call_id": scalars,
            "reasoning": st.text(max_size=4),
            "x": anything,
        },
    ),
    min_size=1,
    max_size=3,
)
token_ids = st.lists(st.integers(0, 259), min_size=1, max_size=4)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "messages": messages,
    "prompt": st.text(min_size=1, max_size=4) | token_ids | st.lists(token_ids, min_size=1, max_size=3),
    "tokens": token_ids,
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "logit_bias": st.dictionaries(st.integers(-1, 260).map(str), numbers, max_size=2),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["messages", "tools", "x"]), anything, max_size=2),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "tools": tools,
    "tool_choice": choices,
    "parallel_tool_calls": st.booleans(),
    "response_format": formats,
    "structured_outputs": outputs,
    "guided_json": schemas,
    "guided_grammar": grammars,
    "reasoning_effort": st.sampled_from(["none", "low", "high"]),
    "n": st.integers(1, 3),
    "max_tokens": st.integers(0, 5),
}
REQUIRED = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/tokenize": "prompt",
    "/detokenize": "tokens",
}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path and a body that is mostly right: some fields with values that suit them, some with anything."""
    path = draw(st.sampled_from(list(MODELS)))
    model, rules = MODELS[path]
    names = [
        *model.__struct_fields__,
        *(rules.refused if rules else ()),
        *(rules.ignored if rules else ()),
        "no-such field",
    ]
    body = {REQUIRED[path]: draw(GOOD[REQUIRED[path]])}
    for name in draw(st.lists(st.sampled_from(names), max_size=4, unique=True)):
        body[name] = draw(GOOD.get(name, anything) if draw(st.integers(0, 3)) else anything)
    return path, body

"""What a body says about tools, forms and reasoning reaches the chat template and the worker's grammar, or is refused."""

import json
from typing import Any

import pytest

from tests.cluster.conftest import Api, running_api
from tests.cluster.http.test_http_errors import problem
from transom_cluster.openai.answer.answer_markup import AnswerMarkup
from transom_cluster.openai.request.template_variables import reasoning_variables
from transom_core.errors import ConfigError, RequestError
from transom_core.text.markup.formats import answer_format

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **fields}}


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "title": "MARK"}}}


def grammar(api: Api) -> str | None:
    """The grammar of the last request, which every choice has."""
    grammars = {request.grammar for request in api.worker.submitted[-2:]}
    assert len(grammars) == 1
    return grammars.pop()


@pytest.fixture
def variables(api, monkeypatch) -> list[Any]:
    """What chat templates are given, as further variables."""
    given: list[Any] = []
    render = api.router.tokenizer.apply_chat_template

    def noted(messages, **values):
        given.append(values["extra"])
        return render(messages, **values)

    monkeypatch.setattr(api.router.tokenizer, "apply_chat_template", noted)
    return given


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        # where nothing is demanded there is no grammar
        ({}, None),
        ({"tools": [tool()], "tool_choice": "auto", "parallel_tool_calls": True}, None),
        ({"tools": [tool(strict=True)], "tool_choice": "none"}, None),
        ({"tools": [], "tool_choice": "auto"}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"tools": [tool()], "tool_choice": "required"}, ["weather", "city"]),
        (
            {"tools": [tool("a"), tool("b")], "tool_choice": {"type": "function", "function": {"name": "b"}}},
            ["b", "city"],
        ),
        ({"tools": [tool(strict=True)]}, ["weather", "city"]),
        ({"tools": [tool()], "parallel_tool_calls": False}, ["weather"]),
        ({"response_format": {"type": "json_object"}}, ["%json"]),
        ({"response_format": SCHEMA}, ["MARK"]),
        ({"response_format": SCHEMA, "tools": [tool()]}, ["MARK", "weather"]),
    ],
)
async def test_what_is_demanded_is_in_every_choices_grammar(api, fields, words):
    assert (await api.chat(n=2, **fields)).status_code == 200
    text = grammar(api)
    assert (text is None) == (words is None)
    assert [word for word in words or () if word not in (text or "")] == []


async def test_a_completion_is_held_to_a_form_as_well(api):
    for fields in ({"response_format": SCHEMA}, {"structured_outputs": {"json": {"title": "MARK"}}}):
        assert (await api.complete(prompt=["a", "b"], **fields)).status_code == 200
        assert "MARK" in (grammar(api) or "")


async def test_tools_are_rendered_unless_the_client_wants_no_calls(api, variables):
    rendered = {"type": "function", "function": {"name": "weather", "description": "", "parameters": CITY}}
    await api.chat(tools=[tool(strict=True)])
    await api.chat(tools=[tool()], tool_choice="none")
    await api.client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}], "tools": [tool()]})
    assert variables == [{"tools": [rendered]}, None, {"tools": [rendered]}]


async def test_effort_and_verbosity_reach_the_template_and_its_own_variables_come_first(api, variables):
    await api.chat(reasoning_effort="none", verbosity="low")
    await api.chat(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})
    off = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False, "verbosity": "low"}
    assert variables == [off, {"reasoning_effort": "high", "enable_thinking": False, "thinking": True}]


def test_a_model_with_some_efforts_refuses_the_others():
    assert reasoning_variables("low", reasoning_parser="openai_gptoss")["reasoning_effort"] == "low"
    with pytest.raises(RequestError, match="low, medium, high") as caught:
        reasoning_variables("none", reasoning_parser="openai_gptoss")
    assert caught.value.param == "reasoning_effort"


async def test_a_server_may_allow_calls_only_on_demand():
    async with running_api(enable_auto_tool_choice=False) as api:
        assert problem(await api.chat(tools=[tool()]), 400)["param"] == "tool_choice"
        for choice in ("required", "none"):
            assert (await api.chat(tools=[tool()], tool_choice=choice)).status_code == 200


async def test_tools_need_a_markup_that_is_known(api):
    api.router.answer_markup = AnswerMarkup(format=answer_format())
    for choice in ("auto", "required"):
        error = problem(await api.chat(tools=[tool()], tool_choice=choice), 400)
        assert error["param"] == "tools"
        assert "--tool-call-parser" in error["message"]


def test_a_template_without_tools_takes_no_other_parser_than_the_default(api):
    tokenizer = api.router.tokenizer
    assert AnswerMarkup.choose(tokenizer).tool_parser == "hermes"
    assert AnswerMarkup.choose(tokenizer, tool_parser="none").tool_parser is None
    with pytest.raises(ConfigError, match="knows no tools"):
        AnswerMarkup.choose(tokenizer, tool_parser="llama3_json")


async def test_a_name_that_would_pass_a_refusal_is_refused(api):
    names = ("tools", "xml_tools", "tool_choice", "functions", "documents", "Tools", "messages", "chat_template")
    for name in (*names, "add_generation_prompt", "continue_final_message"):
        body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"x": 1, name: [{"a": 1}]}}
        for path in ("/v1/chat/completions", "/tokenize"):
            assert problem(await api.client.post(path, json=body), 400)["param"] == f"chat_template_kwargs.{name}"
    assert api.worker.submitted == []


async def test_other_names_and_neutral_values_reach_the_template(api, variables):
    own = {"enable_thinking": False, "tools": None, "documents": [], "tools_in_user_message": False}
    for given in (own, {}, None):
        assert (await api.chat(chat_template_kwargs=given)).status_code == 200
    assert variables == [own, None, None]


@pytest.mark.parametrize(
    "value",
    [[], "x", 5, {"a": "b" * 70_000}, {"x": json.loads("[" * 200 + "]" * 200)}],
    ids=["[]", "x", "5", "long", "deep"],
)
async def test_what_is_no_object_or_too_long_or_too_deep_is_refused(api, value):
    assert problem(await api.chat(chat_template_kwargs=value), 400)["param"] == "chat_template_kwargs"

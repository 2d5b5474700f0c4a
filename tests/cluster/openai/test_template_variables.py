"""`chat_template_kwargs` cannot carry what a field of the request would be refused for."""

from __future__ import annotations

import pytest

from tests.cluster.http.test_http_errors import problem

MESSAGES = [{"role": "user", "content": "x"}]


async def test_a_name_that_would_pass_a_refusal_is_refused(api):
    names = ("tools", "xml_tools", "tool_choice", "functions", "documents", "Tools", "messages", "chat_template")
    for name in (*names, "add_generation_prompt", "continue_final_message"):
        body = {"messages": MESSAGES, "chat_template_kwargs": {"x": 1, name: [{"a": 1}]}}
        for path in ("/v1/chat/completions", "/tokenize"):
            assert problem(await api.client.post(path, json=body), 400)["param"] == f"chat_template_kwargs.{name}"
    assert api.worker.submitted == []


async def test_other_names_and_neutral_values_reach_the_template(api, monkeypatch):
    given = []
    render = api.router.tokenizer.apply_chat_template

    def noted(messages, **values):
        given.append(values["extra"])
        return render(messages, **values)

    monkeypatch.setattr(api.router.tokenizer, "apply_chat_template", noted)
    for variables in ({"enable_thinking": False, "tools": None, "documents": []}, {}, None):
        assert (await api.chat(chat_template_kwargs=variables)).status_code == 200
    assert given == [{"enable_thinking": False, "tools": None, "documents": []}, None, None]


@pytest.mark.parametrize("value", [[], "x", 5, {"a": "b" * 70_000}])
async def test_what_is_no_object_or_too_long_is_refused(api, value):
    assert problem(await api.chat(chat_template_kwargs=value), 400)["param"] == "chat_template_kwargs"


async def test_switches_about_tools_are_no_tools_and_depth_is_bounded(api):
    assert (await api.chat(chat_template_kwargs={"tools_in_user_message": False})).status_code == 200
    deep: list = []
    for _ in range(200):
        deep = [deep]
    assert "nested deeper" in problem(await api.chat(chat_template_kwargs={"x": deep}), 400)["message"]

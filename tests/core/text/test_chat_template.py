"""Chat prompts: as transformers renders them, with exact turn boundaries and clear refusals. Chat templates run in a child process
under limits of CPU time and memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from tests.tiny_checkpoints import tiny_llama
from transom_core.errors import ModelError, RequestError
from transom_core.model_files.resolve import resolve_model
from transom_core.text.chat_template import MAX_TURN_BOUNDARIES, ChatTemplate
from transom_core.text.template_renderer import TemplateRenderer, TemplateTooExpensive
from transom_core.text.tokenizer import Tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi, 1 + 1 <|im_end|>?"},
    {"role": "assistant", "content": "2 🦜"},
    {"role": "user", "content": "Why?"},
]
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


TEMPLATES = [
    None,
    "{{ bos_token }}{% for m in messages %}\n    {% if loop.first %}\n{{ m | tojson }}\n    {% continue %}\n"
    "{% endif %}{% generation %}{{ m['content'] | trim }}{% endgeneration %}{{ eos_token }}\n{% endfor %}",
    "{{ strftime_now('%Y')[:2] }}{{ messages[0].content }}{{ flavour }}{% if tools is none %}-{% endif %}",
]
# How DeepSeek R1, MiniMax M2 and LFM2.5 write a message of calls without content.
NO_CONTENT = (
    "a{{ messages[0].content }}b{{ tools }}",
    "a{% for x in messages[0].content %}{{ x }}{% endfor %}b{{ tools }}",
)
LONE_SURROGATE = [{"role": "user", "content": "Hi \ud83d"}]
ECHO = "{% for m in messages %}{{ m.content }}.{% endfor %}{{ extra }}"
FOREVER = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
DOUBLES = "{% set n = namespace(x='aa') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
NESTS = "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | string }}"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("generation", [True, False])
def test_renders_as_transformers(folder: Path, tiny: Tokenizer, template: str | None, generation: bool) -> None:
    oracle = AutoTokenizer.from_pretrained(folder)
    options: dict[str, Any] = {"add_generation_prompt": generation}
    want = oracle.apply_chat_template(CHAT, chat_template=template, tokenize=False, flavour="plum", **options)
    got = tiny.apply_chat_template(CHAT, template=template, extra={"flavour": "plum"}, **options)
    assert got.text == want
    assert list(got.token_ids) == oracle(want, add_special_tokens=False)["input_ids"]


PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
WEATHER = {"name": "weather", "description": "The weather of a <place>.", "parameters": PLACE}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Köln"}}}
TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Köln?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": "rain"},
]
TOOL_TEMPLATE = """
{%- if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool | tojson(indent=1) }}{% endfor %}{{ '</tools>' }}{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}<call>{{ call.function.name }}{{ call.function.arguments | tojson }}</call>{% endfor %}
<|im_end|>
{% endfor %}"""


def test_tools_are_rendered_as_transformers_does(folder: Path, tiny: Tokenizer) -> None:
    oracle = AutoTokenizer.from_pretrained(folder)
    want = oracle.apply_chat_template(
        TOOL_CHAT, tools=TOOLS, chat_template=TOOL_TEMPLATE, tokenize=False, add_generation_prompt=True
    )
    got = tiny.apply_chat_template(TOOL_CHAT, template=TOOL_TEMPLATE, extra={"tools": TOOLS})
    assert got.text == want
    assert "<call>weather" in want
    assert len(got.turn_boundaries) == 3


@pytest.mark.parametrize("template", NO_CONTENT)
def test_a_message_of_calls_alone_has_no_text(tiny: Tokenizer, template: str) -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]
    assert tiny.apply_chat_template(messages, template=template, add_generation_prompt=False).text == "ab"


@pytest.mark.parametrize("form", ["own file", "in tokenizer_config.json", "by name", "by name in files"])
def test_the_folders_template_in_every_form(folder: Path, tmp_path: Path, form: str) -> None:
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    by_name = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    match form:
        case "own file":
            (tmp_path / "chat_template.jinja").write_text("plain")
        case "by name in files":
            (tmp_path / "chat_template.jinja").write_text("plain")
            (tmp_path / "additional_chat_templates").mkdir()
            (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
        case "by name":
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": by_name}))
        case _:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "plain"}))
    tokenizer = Tokenizer.load(resolve_model(str(tmp_path)))
    assert tokenizer.apply_chat_template(CHAT).text == "plain"
    with_tools = tokenizer.apply_chat_template(CHAT, extra={"tools": TOOLS}).text
    assert with_tools == ("with tools" if "by name" in form else "plain")


def test_templates_that_look_ahead_have_no_boundary(tiny: Tokenizer) -> None:
    chat = tiny.apply_chat_template(CHAT, template="{{ messages | length }} " + PLAIN)
    assert chat.turn_boundaries == (len(chat.token_ids),)


def test_long_chats_keep_the_first_and_the_latest_boundaries(tiny: Tokenizer) -> None:
    messages = [{"role": "system", "content": "s"}, *({"role": "user", "content": f"m{i}"} for i in range(100))]
    chat = tiny.apply_chat_template(messages, add_generation_prompt=False)
    assert len(chat.turn_boundaries) == MAX_TURN_BOUNDARIES
    assert tiny.decode(chat.token_ids[: chat.turn_boundaries[0]]) == "system\ns\n"
    assert chat.turn_boundaries[-1] == len(chat.token_ids)


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "empty"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([{"role": "user", "content": 7}], "int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
        ([{"role": "user", "content": ["x"]}], "str"),
    ],
)
def test_malformed_messages_are_named(tiny: Tokenizer, messages: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match) as caught:
        tiny.apply_chat_template(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "param", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", "messages", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "messages", "refuses"),
        ("{% for %}", "chat_template", "does not parse"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "messages", "unsafe"),
        ("{{ messages.append(1) }}", "messages", "unsafe"),
    ],
)
def test_what_a_template_raises_is_the_clients_error(tiny: Tokenizer, template: str, param: str, match: str) -> None:
    with pytest.raises(RequestError, match=match) as caught:
        tiny.apply_chat_template(CHAT, template=template)
    assert caught.value.param == param


def test_without_a_template_completions_are_named(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    bare = Tokenizer.load(resolve_model(str(tmp_path)))
    assert not bare.has_chat_template
    with pytest.raises(RequestError, match="/v1/completions"):
        bare.apply_chat_template(CHAT)


@pytest.fixture
def renderer() -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer(cpu_s=0.3, memory_bytes=256 << 20)
    yield renderer
    pids = renderer.pids
    renderer.close()
    assert not renderer.pids
    assert not any(map(psutil.pid_exists, pids))


def render(renderer: TemplateRenderer, source: str, *, extra: dict[str, object] | None = None) -> str:
    template = ChatTemplate(source=source, special_tokens={})
    return renderer.render(template, LONE_SURROGATE, add_generation_prompt=True, extra=extra).text


def test_a_child_renders_and_is_kept(renderer: TemplateRenderer) -> None:
    assert render(renderer, ECHO, extra={"extra": "\x00é"}) == "Hi \ud83d.\x00é"
    pids = renderer.pids
    assert len(pids) == 1
    assert render(renderer, ECHO) == "Hi \ud83d."
    assert renderer.pids == pids


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (FOREVER, "more than 0.3 s"),
        (NESTS, "more than 0.3 s|MiB of memory"),
        (DOUBLES, "more than 0.3 s|MiB of memory|characters"),
        ("{{ 'a' * 10000000000 }}", "MiB of memory"),
    ],
)
def test_a_template_without_bounds_is_stopped(renderer: TemplateRenderer, source: str, problem: str) -> None:
    with pytest.raises(TemplateTooExpensive, match=problem):
        render(renderer, source)
    assert render(renderer, ECHO) == "Hi \ud83d."  # the next chat has a new child


def test_a_prompt_of_too_many_characters_is_refused() -> None:
    """With seconds to spare: on a busy machine making the text takes longer than 0.3 s."""
    renderer = TemplateRenderer(cpu_s=30.0, memory_bytes=64 << 20)
    with pytest.raises(TemplateTooExpensive, match="5000000 characters"):
        render(renderer, "{{ 'a' * 5000000 }}")
    renderer.close()


@pytest.mark.parametrize("source", ["{% for %}", "(" * 10 + "{{ " + "(" * 3000, "{{ raise_exception('no') }}"])
def test_a_refusal_keeps_the_child(renderer: TemplateRenderer, source: str) -> None:
    render(renderer, ECHO)
    pids = renderer.pids
    with pytest.raises(RequestError, match="chat template"):
        render(renderer, source)
    assert renderer.pids == pids


def test_the_start_refuses_a_template_that_takes_too_much(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, layers=1)
    (folder / "chat_template.jinja").write_text("{{ 'a' * 10000000000 }}")
    with pytest.raises(ModelError, match="chat template is broken"):
        Tokenizer.load(resolve_model(str(folder))).check_chat_template()
    (folder / "chat_template.jinja").write_text("{{ raise_exception('a system message first') }}")
    children = psutil.Process().children()
    Tokenizer.load(resolve_model(str(folder))).check_chat_template()
    assert psutil.Process().children() == children

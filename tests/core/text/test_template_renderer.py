"""Chat templates run in a child process under limits of CPU time and memory."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.tiny_checkpoints import tiny_llama
from transom_core.errors import ModelError, RequestError
from transom_core.model_files.resolve import resolve_model
from transom_core.text.chat_template import ChatTemplate
from transom_core.text.template_renderer import TemplateRenderer, TemplateTooExpensive
from transom_core.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "Hi \ud83d"}]
ECHO = "{% for m in messages %}{{ m.content }}.{% endfor %}{{ extra }}"
FOREVER = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
DOUBLES = "{% set n = namespace(x='aa') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
NESTS = "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | string }}"


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
    return renderer.render(template, CHAT, add_generation_prompt=True, extra=extra).text


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

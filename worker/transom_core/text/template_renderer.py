"""Renders chats in child processes under limits of CPU time and memory.

A chat template is code from the model's author. Jinja's sandbox keeps it away from files, network and Python's internals, but
does not stop endless loops or strings of many gigabytes. So templates never run in a process that serves requests
(`limited_children`). The first chat starts a child, which takes about 0.1 s; later chats reuse it. A task:

    {"template": {the fields of ChatTemplate}, "messages": [...], "add_generation_prompt": true, "extra": null, "max_chars": 1000}

Its answer is one of

    {"text": "...", "turn_ends": [12, 40], "cache_marks": [30]}
    {"refused": "The chat template refuses ...", "param": "messages"}       a RequestError
    {"too_large": "it needs more than ... of memory"}
"""

import atexit
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from transom_core.errors import RequestError
from transom_core.limited_children import LimitedChildren, Message, Respond
from transom_core.text.chat_template import ChatTemplate, RenderedChat

CPU_S = 10.0  # for one chat; 128,000 tokens in 40 turns take 0.2 s
MEMORY_BYTES = 1 << 30  # for one chat
# The answer as ASCII JSON takes up to 6 bytes per character, twice while it is written; the text itself takes up to 4.
_BYTES_PER_CHAR = 16


class TemplateTooExpensive(RequestError):
    """Raised when a template exceeds its limit of CPU time or memory for a request's messages."""


class TemplateRenderer:
    """Renders chats in a few child processes; any thread may call `render`.

    `cpu_s` limits the CPU time of one chat, and `memory_bytes` its memory.
    """

    def __init__(self, *, cpu_s: float = CPU_S, memory_bytes: int = MEMORY_BYTES) -> None:
        self._children = LimitedChildren(__name__, cpu_s=cpu_s, memory_bytes=memory_bytes)
        self._max_chars = memory_bytes // _BYTES_PER_CHAR

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the ids of the child processes that run."""
        return self._children.pids

    def render(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        extra: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Render messages that `read_messages` has checked.

        Raises:
            RequestError: the template refuses the messages, does not parse, or exceeds a limit.
        """
        answer = self._children.ask(
            {
                "template": asdict(template),
                "messages": list(messages),
                "add_generation_prompt": add_generation_prompt,
                "extra": extra,
                "max_chars": self._max_chars,
            }
        )
        if "text" in answer:
            text, ends, marks = answer["text"], answer["turn_ends"], answer["cache_marks"]
            return RenderedChat(text=text, turn_ends=tuple(ends), cache_marks=tuple(marks))
        if "refused" in answer:
            raise RequestError(answer["refused"], param=answer["param"])
        reason = answer.get("too_large") or answer.get("killed") or answer["unprepared"]
        raise TemplateTooExpensive(
            f"The chat template was stopped: {reason}. Send shorter messages, or render the prompt yourself and send it to "
            "/v1/completions.",
            param=template.param,
        )

    def close(self) -> None:
        """End the child processes. Idempotent; a later chat starts another child."""
        self._children.close()


_RENDERERS: dict[int, TemplateRenderer] = {}  # pid -> renderer: a forked process must not use its parent's pipes
_LOCK = threading.Lock()


def shared_renderer() -> TemplateRenderer:
    """Return this process's renderer."""
    with _LOCK:
        renderer = _RENDERERS.get(os.getpid())
        if renderer is None:
            renderer = _RENDERERS[os.getpid()] = TemplateRenderer()
            atexit.register(renderer.close)
        return renderer


def prepare(first: Message) -> Respond:
    """Return the function that does a child's tasks."""
    return _render


def _render(task: Message) -> Message:
    try:
        chat = ChatTemplate(**task["template"]).render_chat(
            task["messages"], add_generation_prompt=task["add_generation_prompt"], extra=task["extra"]
        )
    except RequestError as error:
        return {"refused": str(error), "param": error.param}
    if len(chat.text) > task["max_chars"]:
        return {"too_large": f"it makes a prompt of {len(chat.text)} characters; {task['max_chars']} are allowed"}
    return {"text": chat.text, "turn_ends": chat.turn_ends, "cache_marks": chat.cache_marks}

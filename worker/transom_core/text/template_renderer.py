"""Renders chats in child processes (`template_process`), which stop a template that loops or allocates without bound.

The first chat starts a child, which takes about 0.1 s; later chats reuse it.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from transom_core.errors import RequestError
from transom_core.limited_children import LimitedChildren
from transom_core.text.chat_template import ChatTemplate, RenderedChat

CPU_S = 10.0  # for one chat; 128,000 tokens in 40 turns take 0.2 s
MEMORY_BYTES = 1 << 30  # for one child


class TemplateTooExpensive(RequestError):
    """Raised when a template exceeds its limit of CPU time or memory for a request's messages."""


class TemplateRenderer:
    """Renders chats in a few child processes; any thread may call `render`.

    `cpu_s` limits the CPU time of one chat, and `memory_bytes` the memory of one child.
    """

    def __init__(self, *, cpu_s: float = CPU_S, memory_bytes: int = MEMORY_BYTES) -> None:
        self._children = LimitedChildren("transom_core.text.template_process", cpu_s=cpu_s, memory_bytes=memory_bytes)

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
                "template": {
                    "source": template.source,
                    "tool_source": template.tool_source,
                    "special_tokens": dict(template.special_tokens),
                    "param": template.param,
                },
                "messages": list(messages),
                "add_generation_prompt": add_generation_prompt,
                "extra": extra,
            }
        )
        if "text" in answer:
            return RenderedChat(text=answer["text"], turn_ends=tuple(answer["turn_ends"]))
        if "refused" in answer:
            raise RequestError(answer["refused"], param=answer["param"])
        reason = answer.get("too_large") or answer["killed"]
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

"""Renders chats in child processes (`template_process`), which end a template that loops or allocates without bound.

The first chat starts a child (about 0.1 s); later ones reuse it. A chat takes a child to itself: when all are busy and there are
MAX_PROCESSES, it waits. The children end with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transom_worker.errors import RequestError
from transom_worker.text.chat_template import ChatTemplate, RenderedChat
from transom_worker.text.template_process import receive, send

MAX_PROCESSES = 2
CPU_S = 10.0  # for one chat; 128,000 tokens in 40 turns take 0.2 s
MEMORY_BYTES = 1 << 30  # for one child
_KEPT_VARIABLES = (
    "LD_LIBRARY_PATH",
    "TZ",
)  # of the environment; it may hold keys, which a template has no business with


class TemplateTooExpensive(RequestError):
    """A template exceeded its limit of CPU time or memory for these messages."""


class TemplateRenderer:
    """A few child processes; any thread may call `render`. The limits are for one chat: seconds of CPU time, and bytes."""

    def __init__(self, *, cpu_s: float = CPU_S, memory_bytes: int = MEMORY_BYTES) -> None:
        self._cpu_s, self._memory_bytes = cpu_s, memory_bytes
        self._free = threading.BoundedSemaphore(MAX_PROCESSES)
        self._idle: list[subprocess.Popen[bytes]] = []
        self._all: set[subprocess.Popen[bytes]] = set()

    @property
    def pids(self) -> tuple[int, ...]:
        """The child processes that run."""
        return tuple(process.pid for process in self._all)

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
        request = {
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
        for _ in range(2):  # once more if the child was killed from outside, perhaps while it was idle
            with self._process() as process:
                response = self._exchange(process, request)
            if "killed" not in response:
                break
        if "text" in response:
            return RenderedChat(text=response["text"], turn_ends=tuple(response["turn_ends"]))
        if "refused" in response:
            raise RequestError(response["refused"], param=response["param"])
        reason = response.get("too_large") or response["killed"]
        raise TemplateTooExpensive(
            f"The chat template was stopped: {reason}. Send shorter messages, or render the prompt yourself and send it to "
            "/v1/completions.",
            param=template.param,
        )

    def close(self) -> None:
        """End the child processes; idempotent. A later chat would start another."""
        self._idle.clear()
        for process in list(self._all):
            self._end(process)

    @contextlib.contextmanager
    def _process(self) -> Iterator[subprocess.Popen[bytes]]:
        """Lend a child, and take it back if it was not ended meanwhile."""
        with self._free:
            process = self._idle.pop() if self._idle else self._start()
            try:
                yield process
            except BaseException:
                self._end(process)  # a response may be on its way: it would be taken for the next chat's
                raise
            if process in self._all:
                self._idle.append(process)

    def _exchange(self, process: subprocess.Popen[bytes], request: dict[str, Any]) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # the child has ended: its exit status says why
            send(process.stdin, request)
        response = receive(process.stdout)
        if response is not None and "too_large" not in response:
            return response
        if response is None:
            status = process.wait()
            response = (
                {"too_large": f"it took more than {self._cpu_s:g} s"}
                if status == -signal.SIGPROF
                else {
                    "killed": f"its process ended ({status}; its memory is limited to {self._memory_bytes >> 20} MiB)"
                }
            )
        self._end(process)  # after a failed allocation a fresh child is safer
        return response

    def _start(self) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(path for path in sys.path if path)
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        process = subprocess.Popen(
            [
                sys.executable,
                "-S",
                "-m",
                "transom_worker.text.template_process",
                str(self._cpu_s),
                str(self._memory_bytes),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**kept, "PYTHONPATH": paths, "PYTHONUTF8": "1"},
        )
        self._all.add(process)
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._all.discard(process)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        process.kill()
        process.wait()


_RENDERERS: dict[int, TemplateRenderer] = {}  # by pid: a process that forks does not share its pipes
_LOCK = threading.Lock()


def shared_renderer() -> TemplateRenderer:
    """This process's renderer."""
    with _LOCK:
        renderer = _RENDERERS.get(os.getpid())
        if renderer is None:
            renderer = _RENDERERS[os.getpid()] = TemplateRenderer()
            atexit.register(renderer.close)
        return renderer

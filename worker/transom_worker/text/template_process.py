"""Renders chat templates in a process of its own, under limits of CPU time and memory, as a child of a router or of `LLM`.

A chat template is code from the model's author. Jinja's sandbox keeps it from files, network and Python's internals, but not
from loops that never end or from strings of many gigabytes. So no template runs in a process that serves requests: the child
ends by a signal when a chat takes too long, and its parent (`template_renderer`) starts another.

Both pipes carry messages of four bytes of length (little-endian) and as many bytes of JSON in ASCII. A request:

    {"template": {the fields of ChatTemplate}, "messages": [...], "add_generation_prompt": true, "extra": null}

Its response is one of

    {"text": "...", "turn_ends": [12, 40]}
    {"refused": "The chat template refuses ...", "param": "messages"}       a RequestError
    {"too_large": "it needs more than ... of memory"}

This module runs as `python -m transom_worker.text.template_process CPU_S MEMORY_BYTES` and ends with its standard input.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import IO, Any

from transom_worker.errors import RequestError
from transom_worker.text.chat_template import ChatTemplate

_LENGTH_BYTES = 4


def send(pipe: IO[bytes], message: dict[str, Any]) -> None:
    """Write one message.

    Raises:
        OSError: the other process has ended.
        TypeError, ValueError: a value of the message is not JSON's.
    """
    data = json.dumps(message).encode("ascii")
    pipe.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> dict[str, Any] | None:
    """Read one message; None if the other process has ended."""
    length = pipe.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    data = pipe.read(int.from_bytes(length, "little"))
    if len(data) < int.from_bytes(length, "little"):
        return None
    message: dict[str, Any] = json.loads(data)
    return message


def _main(cpu_s: float, memory_bytes: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the parent decides
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, responses = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    while (request := receive(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends the process, whatever code is running
        response = _respond(request, memory_bytes)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(responses, response)


def _respond(request: dict[str, Any], memory_bytes: int) -> dict[str, Any]:
    try:
        template = ChatTemplate(**request["template"])
        chat = template.render_chat(
            request["messages"], add_generation_prompt=request["add_generation_prompt"], extra=request["extra"]
        )
    except RequestError as error:
        return {"refused": str(error), "param": error.param}
    except MemoryError:
        return {"too_large": f"it needs more than {memory_bytes >> 20} MiB of memory"}
    # JSON in ASCII takes up to six bytes a character, and exists twice while it is written.
    if len(chat.text) > memory_bytes // 16:
        return {"too_large": f"it makes a prompt of {len(chat.text)} characters; {memory_bytes // 16} are allowed"}
    return {"text": chat.text, "turn_ends": chat.turn_ends}


if __name__ == "__main__":
    _main(float(sys.argv[1]), int(sys.argv[2]))

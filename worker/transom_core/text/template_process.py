"""The main program of a child process of a router or of `LLM` that renders chat templates under limits of CPU time and memory.

A chat template is code from the model's author. Jinja's sandbox keeps it away from files, network and Python's internals, but
does not stop endless loops or strings of many gigabytes. So templates never run in a process that serves requests
(`limited_children`). A task:

    {"template": {the fields of ChatTemplate}, "messages": [...], "add_generation_prompt": true, "extra": null}

Its answer is one of

    {"text": "...", "turn_ends": [12, 40]}
    {"refused": "The chat template refuses ...", "param": "messages"}       a RequestError
    {"too_large": "it needs more than ... of memory"}
"""

from __future__ import annotations

import sys
from typing import Any

from transom_core.errors import RequestError
from transom_core.limited_children import serve
from transom_core.text.chat_template import ChatTemplate


def _respond(task: dict[str, Any]) -> dict[str, Any]:
    memory_bytes = int(sys.argv[2])
    try:
        template = ChatTemplate(**task["template"])
        chat = template.render_chat(
            task["messages"], add_generation_prompt=task["add_generation_prompt"], extra=task["extra"]
        )
    except RequestError as error:
        return {"refused": str(error), "param": error.param}
    # The answer as ASCII JSON takes up to 6 bytes per character, twice while it is written; the text itself takes up to 4.
    if len(chat.text) > memory_bytes // 16:
        return {"too_large": f"it makes a prompt of {len(chat.text)} characters; {memory_bytes // 16} are allowed"}
    return {"text": chat.text, "turn_ends": chat.turn_ends}


if __name__ == "__main__":
    serve(_respond)

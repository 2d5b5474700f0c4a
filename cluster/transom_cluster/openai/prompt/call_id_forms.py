"""Rewrites the ids of tool calls in a chat's history to the form that the model has learnt, if its chat template renders them.

This server's own ids are `call_` and 24 hexadecimal digits for every model. Most templates leave the ids out of the prompt. Those
of two model families render them:

- `mistral`: nine letters and digits; the template refuses other ids;
- `kimi_k2`: `functions.NAME:INDEX`, where INDEX counts all calls of the chat from 0.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_MISTRAL = re.compile(r"[a-zA-Z0-9]{9}")

CallIdForm = Callable[[str, str, int], str]
"""Makes the id of a call from the client's id (empty without one), the function's name, and the call's number in the chat."""


def _mistral(given: str, name: str, number: int) -> str:
    return given if _MISTRAL.fullmatch(given) else hashlib.sha256((given or f"{number}").encode()).hexdigest()[:9]


def _kimi(given: str, name: str, number: int) -> str:
    return f"functions.{name}:{number}"


_FORMS: dict[str, CallIdForm] = {"mistral": _mistral, "kimi_k2": _kimi}


def with_learnt_call_ids(messages: Iterable[dict[str, Any]], tool_parser: str | None) -> list[dict[str, Any]]:
    """Return the messages with the ids of calls and of their results in the form that the model family of `tool_parser` has learnt.

    A result whose call is missing from the chat gets an id as if its call were the next one.
    """
    form = _FORMS.get(tool_parser or "")
    return list(messages) if form is None else list(_rewritten(messages, form))


def _rewritten(messages: Iterable[dict[str, Any]], form: CallIdForm) -> Iterator[dict[str, Any]]:
    """Yield the messages with their ids in the form `form`; a result gets the id of its call."""
    learnt: dict[str, str] = {}  # the client's id -> the id in the learnt form
    number = 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            given = call.get("id", "")
            learnt[given] = form(given, call["function"]["name"], number)
            calls.append({**call, "id": learnt[given]})
            number += 1
        if calls:
            yield {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            given = message.get("tool_call_id", "")
            found = learnt.get(given) or form(given, message.get("name", "function"), number)
            yield {**message, "tool_call_id": found}
        else:
            yield message

"""`ConvertedChat`: a request of another API, as the chat request that asks for the same answer.

The server handles the chat request like one of /v1/chat/completions, so all APIs accept the same values. An error about a field of
the chat request is reported under the name of the field that the client sent.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from transom_cluster.openai.request.body import NULL, decode_field
from transom_cluster.openai.request.chat_request import ChatCompletionRequest
from transom_core.errors import RequestError

MAX_WARNING_CHARS = 1000
_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?\.?")
_HEAD = re.compile(r"\w+")
_CHAT: msgspec.json.Decoder[ChatCompletionRequest] = msgspec.json.Decoder(ChatCompletionRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedChat:
    """The chat request, the path of each of its tools in the client's body, and a warning for each part that was skipped.

    `names` maps a field of the chat, or of one of its functions, to the client's field where the two have different names. Several
    parts of the client's body may become one message, so the name for `messages` never has an index.
    """

    names: ClassVar[Mapping[str, str]] = {}

    chat: ChatCompletionRequest
    tool_paths: tuple[str, ...]
    warnings: tuple[str, ...]

    def named_errors(self) -> contextlib.AbstractContextManager[None]:
        """Convert an error about the chat request to one about the client's request."""
        return renamed_errors(self._param)

    def _param(self, param: str) -> str:
        """Return the path of the client's field that became the field `param` of the chat."""
        if tool := _TOOL.match(param):
            field = param[tool.end() :]
            return ".".join(filter(None, (self.tool_paths[int(tool[1])], self.names.get(field, field))))
        head = _HEAD.match(param)
        name = None if head is None else self.names.get(head[0])
        if head is None or name is None:
            return param
        return name if head[0] == "messages" else name + param[head.end() :]

    @property
    def headers(self) -> dict[str, str]:
        """Return the response's header with the warnings, if there are any: printable ASCII, at most MAX_WARNING_CHARS
        characters."""
        shown = "; ".join(self.warnings).encode("ascii", "replace").decode()
        printable = "".join(char if char.isprintable() else "?" for char in shown)
        return {"x-transom-warning": printable[:MAX_WARNING_CHARS]} if printable else {}


@contextlib.contextmanager
def renamed_errors(name_of: Callable[[str], str | None]) -> Iterator[None]:
    """Convert an error about a field to one about the client's field `name_of(field)`; None: the field has the same name."""
    try:
        yield
    except RequestError as error:
        param = error.param
        changed = None if param is None else name_of(param)
        if param is None or changed is None or changed == param:
            raise
        raise type(error)(str(error).replace(param, changed), param=changed) from None


def chat_of(fields: Mapping[str, Any]) -> ChatCompletionRequest:
    """Make the chat request with these fields; None and null stand for fields that are not given.

    Raises:
        RequestError: a field is malformed; `param` names the chat's field.
    """
    given = {name: value for name, value in fields.items() if value is not None and value != NULL}
    return decode_field(_CHAT, msgspec.json.encode(given), "")

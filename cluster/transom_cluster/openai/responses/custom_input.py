"""`CustomInput`: extracts the text of a custom tool's call from the streamed JSON arguments of its function.

A custom tool takes free text. The model sees a function with one string argument, `input` (`responses_tools`). Example: the pieces
`{"inp`, `ut": "ls\\` and `n-l"}` give the text `ls`, a line feed and `-l`, each part as soon as it is known.
"""

import json
import re

from transom_cluster.openai.responses.responses_tools import CUSTOM_INPUT

_OPENING = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_WHOLE = re.compile(  # complete characters and escapes; the two escapes of a surrogate pair are matched together
    r'(?:[^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r'|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\["\\/bfnrt])*'
)


class CustomInput:
    """Reads the arguments of one call. `text` is the call's text so far."""

    def __init__(self) -> None:
        self._unread = ""
        self._is_open = False  # whether `_unread` begins inside the string
        self._has_ended = False
        self.text = ""

    def push(self, arguments: str) -> str:
        """Add the next piece of the arguments' JSON, and return the next piece of the text."""
        self._unread += arguments
        if not self._is_open and not self._has_ended and (opening := _OPENING.match(self._unread)):
            self._is_open, self._unread = True, self._unread[opening.end() :]
        if not self._is_open:
            return ""
        known = _WHOLE.match(self._unread)
        raw = known[0] if known else ""
        self._unread = self._unread[len(raw) :]
        if self._unread.startswith('"'):
            self._is_open, self._has_ended = False, True
        piece = str(json.loads(f'"{raw}"', strict=False))
        self.text += piece
        return piece

    def end(self) -> str:
        """End the arguments. If they are not an object with the string `input`, return the rest unchanged, as text of the call."""
        if self._has_ended:
            return ""
        self.text += self._unread
        return self._unread

"""Encodes a reasoning item's text for its field `encrypted_content`, and decodes it.

OpenAI encrypts its models' reasoning in this field, so that a client without stored responses can send it back with the next
request. Clients such as Codex send back only this field and drop the readable text. This server does not hide reasoning: the field
holds the same text as the item's `content`, in Base64 with a mark, so that the next request has the text again. It is neither
encrypted nor signed: a client could write its own, just as it can write any other message of its conversation.
"""

import base64
import binascii

_MARK = "transom.1."


def write_reasoning(text: str) -> str:
    """Return the value of `encrypted_content` for a reasoning text."""
    return _MARK + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def read_reasoning(encoded: str) -> str | None:
    """Return the reasoning text of an `encrypted_content` that this server wrote; None for one of another server."""
    if not encoded.startswith(_MARK):
        return None
    try:
        return base64.b64decode(encoded[len(_MARK) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None

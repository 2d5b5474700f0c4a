"""The ids of tool calls: `call_` and 24 hexadecimal digits.

An id is a digest of the response's id, which is random, the choice's number and the call's number. So it is unique, it is the same
after a migration to another worker, and there is nothing to remember.
"""

from __future__ import annotations

import hashlib

NUM_DIGITS = 24


def call_id(response_id: str, choice: int, call: int) -> str:
    """The id of the `call`-th call of a response's choice, both counted from 0."""
    digest = hashlib.sha256(f"{response_id}/{choice}/{call}".encode()).hexdigest()
    return f"call_{digest[:NUM_DIGITS]}"

"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re

from transom_worker.errors import ConfigError


def parse_bytes(text: str, *, name: str) -> int:
    """Bytes from a number with an optional unit: 4096, 512MiB, 1.5GiB, 2GB.

    Raises:
        ConfigError: not such a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if not match:
        raise ConfigError(f"{name} is {text!r}; give bytes, or a size such as 512MiB or 4GiB.")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))

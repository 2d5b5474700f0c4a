"""Parses sizes in bytes as people write them, such as 512MiB."""

import re
from decimal import Decimal

from transom_core.errors import ConfigError


def parse_bytes(text: str, *, name: str) -> int:
    """Parse a number with an optional unit: 4096, 512MiB, 1.5GiB, 2GB (1000 ** 3). `name` is the setting, for the error message.

    Raises:
        ConfigError: the text is not such a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if not match:
        raise ConfigError(f"{name} is {text!r}; give bytes, or a size such as 512MiB or 4GiB.")
    number, prefix, binary = match.groups()
    return int(Decimal(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))

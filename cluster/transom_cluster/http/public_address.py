"""Finds the address at which a client reaches this API, through proxies that may change scheme, host and path."""

from __future__ import annotations

import re
from typing import NamedTuple

from starlette.requests import Request

_HOST = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")
_PREFIX = re.compile(r"(?:/[A-Za-z0-9._~-]+)+")


class PublicAddress(NamedTuple):
    """The API's address from outside.

    `host` includes the port unless it is the scheme's default; `prefix` is the path in front of all of the app's paths.
    """

    host: str
    prefix: str
    is_https: bool


def public_address(request: Request) -> PublicAddress:
    """The address in the request itself, unless a reverse proxy's headers give another.

    The headers are `X-Forwarded-Host`, `X-Forwarded-Prefix` (the prefix that the proxy removed from the path) and
    `X-Forwarded-Proto`. Of several values the first counts, which is the outermost proxy's. Values without the form of a host or a
    path are ignored. A client that forges these headers misleads only itself.
    """
    host = _forwarded(request, "host", _HOST) or request.url.netloc
    removed = _forwarded(request, "prefix", _PREFIX)
    mounted_at = request.scope.get("root_path", "").rstrip("/")
    # Serve's `root_path` setting may repeat what the header says; the prefix must appear once.
    prefix = mounted_at if f"{mounted_at}/".startswith(f"{removed}/") else removed + mounted_at
    is_https = request.url.scheme == "https" or request.headers.get("x-forwarded-proto", "").lower().startswith("https")
    return PublicAddress(host, prefix, is_https)


def _forwarded(request: Request, name: str, shape: re.Pattern[str]) -> str:
    value = request.headers.get(f"x-forwarded-{name}", "").partition(",")[0].strip().rstrip("/")
    return value if shape.fullmatch(value) else ""

"""How the one that asked reaches this app: through proxies that may change scheme, host and path on the way."""

from __future__ import annotations

import re
from typing import NamedTuple

from starlette.requests import Request

_HOST = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")
_PREFIX = re.compile(r"(?:/[A-Za-z0-9._~-]+)+")


class PublicAddress(NamedTuple):
    """Host (with its port where that is not the scheme's), the path in front of all of the app's, whether TLS is certain."""

    host: str
    prefix: str
    is_https: bool


def public_address(request: Request) -> PublicAddress:
    """As the request has it, unless a reverse proxy says otherwise.

    `X-Forwarded-Host`, `-Prefix` (what it took off the path) and `-Proto` are a proxy's usual way; of several values the first is
    the outermost proxy's. What is not shaped like a host or a path counts for nothing. Who forges them misleads only themselves.
    """
    host = _forwarded(request, "host", _HOST) or request.url.netloc
    taken_off = _forwarded(request, "prefix", _PREFIX)
    mounted_at = request.scope.get("root_path", "").rstrip("/")
    # Serve's own `root_path` setting says the same as the header does: once is enough.
    prefix = mounted_at if f"{mounted_at}/".startswith(f"{taken_off}/") else taken_off + mounted_at
    is_https = request.url.scheme == "https" or request.headers.get("x-forwarded-proto", "").lower().startswith("https")
    return PublicAddress(host, prefix, is_https)


def _forwarded(request: Request, name: str, shape: re.Pattern[str]) -> str:
    value = request.headers.get(f"x-forwarded-{name}", "").partition(",")[0].strip().rstrip("/")
    return value if shape.fullmatch(value) else ""

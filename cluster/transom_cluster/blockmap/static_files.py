"""Serves the files of the block map's page from this package's `static` folder. They hold no data of the cluster, so they need no
API key."""

import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

STATIC = Path(__file__).parent / "static"
PAGE = "index.html"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_HEADERS = {
    "cache-control": "no-cache",  # browsers cache the files but revalidate them each time, so that versions never mix
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
}


def file_response(name: str, request: Request) -> Response | None:
    """Return a response with one file, or status 304 if the client has it already; None if there is no such file to serve."""
    kind = CONTENT_TYPES.get(Path(name).suffix)
    if kind is None or not _NAME.fullmatch(name):
        return None
    try:
        content = (STATIC / name).read_bytes()
    except OSError:
        return None
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "etag": tag, **(_PAGE_HEADERS if name == PAGE else {})}
    if tag in [given.strip().removeprefix("W/") for given in request.headers.get("if-none-match", "").split(",")]:
        return Response(status_code=304, headers=headers)
    return Response(content, headers={**headers, "content-type": kind})

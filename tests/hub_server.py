"""A stand-in for the Hugging Face hub on loopback: the routes that `huggingface_hub` calls, and what was asked of it."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

HUB_ID, COMMIT = "org/name", "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """Serves `files` (by path) as the model `org/name`.

    `num_bytes` counts the bytes sent of each file and `ranges` has the Range header of each GET. A download of a path in `cut_at`
    breaks off after this number of bytes, once; then the server answers 503 until `is_down` is false.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.num_bytes: Counter[str] = Counter()
        self.ranges: dict[str, list[str | None]] = {}
        self.cut_at: dict[str, int] = {}
        self.goes_down_after_cut = False
        self.is_down = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def hub_server(files: dict[str, bytes]) -> Iterator[HubServer]:
    """A running stand-in."""
    server = HubServer(files)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        if hub.is_down:
            self._send(503, b"")
        elif path in (f"/api/models/{HUB_ID}", *(f"/api/models/{HUB_ID}/revision/{one}" for one in ("main", COMMIT))):
            siblings = [{"rfilename": name} for name in hub.files]
            self._send_json({"id": HUB_ID, "modelId": HUB_ID, "sha": COMMIT, "siblings": siblings})
        elif path == f"/api/models/{HUB_ID}/tree/{COMMIT}":
            self._send_json([_entry(name, content) for name, content in hub.files.items()])
        elif path.startswith(prefix := f"/{HUB_ID}/resolve/{COMMIT}/") and path.removeprefix(prefix) in hub.files:
            self._send_file(path.removeprefix(prefix), with_body=with_body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", _missing(path))
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send_file(self, name: str, *, with_body: bool) -> None:
        hub, content = self.server, self.server.files[name]
        asked = self.headers.get("Range") if with_body else None
        begin = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - begin))
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if not with_body:
            return
        hub.ranges.setdefault(name, []).append(asked)
        end = hub.cut_at.pop(name, len(content))
        self.wfile.write(content[begin:end])
        hub.num_bytes[name] += end - begin
        if end < len(content):
            hub.is_down = hub.goes_down_after_cut
            self.close_connection = True

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _missing(path: str) -> str:
    """The hub's name for what is not there."""
    return "EntryNotFound" if "/resolve/" in path else "RevisionNotFound" if "/revision/" in path else "RepoNotFound"


def _entry(name: str, content: bytes) -> dict[str, object]:
    digest = hashlib.sha1(content).hexdigest()
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": digest}
    if name.endswith(".safetensors"):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry

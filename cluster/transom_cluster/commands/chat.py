"""`transom chat`: a conversation in the terminal with a running server, streamed over HTTP."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

LOOPBACK = ("127.0.0.1", "localhost", "::1")  # a proxy from the environment cannot reach these hosts
HELP = "/reset starts a new conversation, /quit ends the program. Ctrl-C stops a response."


class ChatFailed(Exception):
    """The server refused the request or could not be reached. The message is for the user."""


@dataclass(kw_only=True)
class ChatSession:
    """A conversation with one server. `messages` has all messages so far, in OpenAI's form."""

    url: str
    model: str | None = None
    system: str | None = None
    api_key: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = httpx.Timeout(10.0, read=None)
        self.url = self.url.rstrip("/").removesuffix("/v1")  # OpenAI's clients call the URL with /v1 the base URL
        is_local = httpx.URL(self.url).host in LOOPBACK
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=not is_local)
        self.reset()

    def connect(self) -> str:
        """Ask the server for the served model's name, and return the name of the model that this conversation uses.

        Raises:
            ChatFailed: there is no server, or it refuses the request.
        """
        with _as_chat_failure(self.url):
            response = self._client.get("/v1/models")
            _check(response)
            name: str = response.json()["data"][0]["id"]
        return self.model or name

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str) -> Iterator[str]:
        """Send a message and yield the pieces of the response. A response that the user stops early stays in the conversation.

        Raises:
            ChatFailed: there is no server, or it refuses the request; if no piece has come, the conversation is as before.
        """
        self.messages.append({"role": "user", "content": text})
        response: list[str] = []
        try:
            for piece in self._stream():
                response.append(piece)
                yield piece
        finally:
            if response:
                self.messages.append({"role": "assistant", "content": "".join(response)})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[str]:
        body = {name: value for name, value in self.options.items() if value is not None}
        body |= {"messages": self.messages, "stream": True} | ({"model": self.model} if self.model else {})
        with _as_chat_failure(self.url), self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
            _check(response)
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield _piece(json.loads(line.removeprefix("data: ")))


def run_chat(session: ChatSession) -> int:
    """Read the user's lines in a loop and print the responses; return the exit code."""
    try:
        print(f"{session.connect()} at {session.url}. {HELP}")
    except ChatFailed as error:
        print(f"transom: {error}")
        return 1
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if line == "/quit":
            return 0
        if line == "/reset":
            session.reset()
        elif line.startswith("/"):
            print(HELP)
        elif line:
            _print_response(session, line)


def _print_response(session: ChatSession, line: str) -> None:
    try:
        with contextlib.closing(session.ask(line)) as pieces:  # type: ignore[type-var]  # a generator
            for piece in pieces:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [ended]", end="")
    except ChatFailed as error:
        print(f"transom: {error}", end="")
    print()


def _piece(chunk: dict[str, Any]) -> str:
    if "error" in chunk:
        raise ChatFailed(chunk["error"]["message"])
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def _check(response: httpx.Response) -> None:
    if response.status_code != 200:
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"status {response.status_code}"
        raise ChatFailed(message)


@contextlib.contextmanager
def _as_chat_failure(url: str) -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        raise ChatFailed(f"{url} does not answer ({error}); start a server with: transom serve smollm2") from None

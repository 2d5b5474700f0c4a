"""Settings of the HTTP server: tools and reasoning, addresses, keys and limits of clients, logs and traces."""

import json
import re
from collections.abc import Sequence

from pydantic import BaseModel, Field

from transom_core.config import NO_PARSER, LogFormat, MetricsCompat
from transom_core.errors import ConfigError, RequestError


class AnswerSettings(BaseModel):
    """The markup of tool calls and of reasoning in answers."""

    tool_call_parser: str | None = Field(
        None,
        description="The markup of the model's tool calls, by vLLM's names (docs/tool_calls.md); none: calls are ordinary "
        "text. If unset: by the model's type and chat template; the log says which.",
    )
    enable_auto_tool_choice: bool = Field(
        True,
        description="Allows tool_choice auto, the default of requests with tools; off: such requests are refused "
        "with 400.",
    )
    reasoning_parser: str | None = Field(
        None, description="The markup of the model's reasoning, named and chosen as that of --tool-call-parser."
    )

    def check_parsers(self) -> None:
        """Raise ConfigError if a parser is unknown, or the two do not fit together."""
        given = [None if one == NO_PARSER else one for one in (self.tool_call_parser, self.reasoning_parser)]
        if given == [None, None]:
            return
        from transom_core.text.markup.formats import answer_format

        try:
            answer_format(*given)
        except RequestError as error:
            raise ConfigError(f"--tool-call-parser, --reasoning-parser: {error}") from None


class HttpSettings(BaseModel):
    """Where the server listens, and what it takes."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    haproxy: bool = Field(False, description="Serve over HAProxy, with Ray Serve's settings for throughput.")
    request_timeout_s: float | None = Field(
        None, gt=0, description="Requests that take longer, from arrival to the last token, end with an error."
    )
    max_body_bytes: int = Field(8 * 2**20, ge=1024, description="Larger request bodies are refused with 413.")
    body_timeout_s: float = Field(
        60.0, gt=0, description="Requests whose bodies take longer to arrive are refused with 408."
    )
    max_header_bytes: int = Field(64 * 2**10, ge=1024, description="Larger request headers are refused with 431.")
    allowed_origins: tuple[str, ...] = Field(
        (),
        description="An origin whose web pages may call this API from a browser (CORS), such as https://chat.example.com; * "
        "allows all. If unset: none.",
    )
    strip_billing_header: bool = Field(
        True,
        description="/v1/messages: leave out the billing header that coding agents put before the system prompt "
        "(docs/http_api.md).",
    )


class ClientSettings(BaseModel):
    """API keys, and the limits of each client."""

    api_key: tuple[str, ...] = Field((), description="Clients must send one of these as a bearer token.")
    api_key_file: str | None = Field(
        None,
        description="A file with one such key per line, perhaps with the weight of its client's share: `KEY weight=2`. "
        "Lines that begin with # are comments.",
    )
    admin_api_key_file: str | None = Field(
        None,
        description="A file of admin keys; only they open the routes that show all clients together: the block map and "
        "/metrics.",
    )
    salt_by_key: bool = Field(False, description="Clients with different API keys share no cached prefixes.")
    requests_per_minute: int | None = Field(
        None, ge=1, description="Requests of each API key per minute; more get 429."
    )
    concurrent_requests: int | None = Field(
        None, ge=1, description="Requests of each API key at once; more get 429. If unset: 7,500."
    )
    concurrent_sequences: int | None = Field(
        None, ge=1, description="Sequences of each API key at once (a request's prompts times n); more get 429."
    )
    tokens_per_minute: int | None = Field(
        None,
        ge=1,
        description="Tokens of each API key per minute, of prompts and outputs; further requests get 429. A "
        "request starts if its prompt fits.",
    )
    max_choices: int = Field(128, ge=1, description="Sequences of one request (prompts times n); more get 400.")
    get_requests_per_minute: int = Field(
        6000,
        ge=1,
        description="GET requests of each API key per minute (metrics, models, the block map); more get 429.",
    )
    concurrent_get_requests: int = Field(64, ge=1, description="GET requests of each API key at once; more get 429.")
    costly_get_requests_per_minute: int = Field(
        120,
        ge=1,
        description="Those of them for which other processes are asked (/metrics, /metrics/sd, /debug/requests).",
    )
    block_map_streams: int = Field(
        4,
        ge=1,
        description="Open streams of the block map of each API key and router; more get 429. A worker serves 16.",
    )


class LogSettings(BaseModel):
    """Logs, metrics and traces."""

    log_format: LogFormat = Field(
        "text", description="json: one JSON object per line, and one line for each request that has ended."
    )
    log_prompts: bool = Field(
        False, description="Log every prompt, and the messages of internal errors, which may quote prompts and outputs."
    )
    metrics_compat: MetricsCompat = Field(
        "none", description="Add to /metrics the names of another server (docs/from_vllm.md)."
    )
    otlp_traces_endpoint: str | None = Field(
        None, description="Send OpenTelemetry spans there, such as http://127.0.0.1:4318/v1/traces."
    )
    trace_sample_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of requests to trace where the client's traceparent header does not say."
    )

    def check_endpoint(self) -> None:
        """Raise ConfigError if the endpoint of traces is not a URL."""
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not re.match(r"https?://[^/]", endpoint):
            raise ConfigError(
                f"--otlp-traces-endpoint is {endpoint!r}; give the http:// or https:// URL of an OTLP receiver, such as "
                "http://127.0.0.1:4318/v1/traces."
            )


def read_origins(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return a list of origins, each of which is given as text or, as for vLLM's flag, in a JSON list.

    Raises:
        ConfigError: one is neither * nor an origin.
    """
    origins: list[str] = []
    for one in (given,) if isinstance(given, str) else given:
        try:
            listed = json.loads(one) if one.startswith("[") else [one]
        except ValueError:
            listed = [one]
        origins += map(str, listed)
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^/?#\s]+", origin):
            raise ConfigError(
                f"--allowed-origins has {origin!r}; give an origin, which has a scheme, a host and perhaps a port, and nothing "
                "after them, such as https://chat.example.com; or * for all."
            )
    return tuple(origins)

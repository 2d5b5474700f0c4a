"""Bytes that are no HTTP, and HTTP with broken bytes, on a real server's port: it answers or closes, and serves as before."""

import json
import socket

from hypothesis import given, settings, strategies as st

from tests.cluster.conftest import HttpServer, num_in_flight, until
from tests.cluster.http.test_fuzz_engine import FUZZ
from tests.how_many import num_examples

BODY = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()
REQUESTS = [
    b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    % (len(BODY), BODY),
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
    % (len(BODY), BODY),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),  # a TLS handshake begins so
    b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n",
]


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Random bytes, or a request that is broken at a few places."""
    if draw(st.integers(0, 3)) == 0:
        return draw(st.binary(min_size=1, max_size=2000))
    data = draw(st.sampled_from(REQUESTS))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=6)) + data[at + draw(st.integers(0, 6)) :]
    return data + draw(st.sampled_from([b"", b"\r\n\r\n", REQUESTS[0]]))


@settings(FUZZ, max_examples=num_examples(30, 5000))
@given(streams())
def test_any_bytes_on_the_port(server: HttpServer, data: bytes) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionResetError:  # uvicorn closes at once where bytes are left that it does not read
            pass
    assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
    assert b"HTTP/1.1 500" not in answer
    server.call(until(lambda: num_in_flight(server.router) == 0))

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_connection import Connection, Server, decode, request_bytes

PIECES = [b"data: 1\n\n", b"data: 0\n\n", b"data: [DONE]\n\n"]
BODY = b"".join(PIECES)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = (
    HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in PIECES)
    + b"0\r\n\r\n"
)
SIZED = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
TO_END = HEAD + b"\r\n" + BODY


def cut(data, sizes):
    """Packets of these sizes, then the rest."""
    packets, begin = [], 0
    for size in sizes:
        packets.append(data[begin : begin + size])
        begin += size
    return [packet for packet in [*packets, data[begin:]] if packet]


@pytest.mark.parametrize("answer", [CHUNKED, SIZED, TO_END], ids=["chunked", "sized", "to-end"])
@given(sizes=st.lists(st.integers(1, 40), max_size=20))
def test_decoding_does_not_depend_on_how_packets_were_cut(answer, sizes):
    packets = [(float(i), packet) for i, packet in enumerate(cut(answer, sizes))]
    status, body = decode(packets)
    assert status == 200
    assert b"".join(data for _, data in body) == BODY
    assert [time_s for time_s, _ in body] == sorted(time_s for time_s, _ in body)


@pytest.mark.parametrize("answer", [CHUNKED, SIZED], ids=["chunked", "sized"])
@given(sizes=st.lists(st.integers(1, 40), max_size=20))
async def test_a_connection_knows_the_end_at_the_last_byte_and_not_before(answer, sizes):
    connection = Connection()
    connection._transport = Sink()  # type: ignore[assignment]
    exchange = connection.exchange(b"request")
    exchange.send(None)
    packets = cut(answer, sizes)
    for packet in packets[:-1]:
        connection.data_received(packet)
    assert connection._done is not None
    assert not connection._done.done()
    connection.data_received(packets[-1])
    assert [packet for _, packet in connection._done.result()] == packets
    exchange.close()


@pytest.mark.parametrize("answer", [CHUNKED[:-9], SIZED[:-1], b"", b"SMTP ready\r\n\r\n", HEAD])
def test_what_broke_off_or_is_not_http_is_an_error(answer):
    with pytest.raises(ConnectionError):
        decode([(0.0, answer)])


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000, False, "")),
        ("http://127.0.0.1:8000/v1/", ("127.0.0.1", 8000, False, "")),
        ("https://example.org/llm/v1", ("example.org", 443, True, "/llm")),
    ],
)
def test_urls(url, expected):
    server = Server.parse(url)
    assert (server.host, server.port, server.tls, server.prefix) == expected


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ValueError, match="is not a URL"):
        Server.parse(url)


def test_request_has_length_host_and_prefix():
    server = Server.parse("http://h:1/llm/v1")
    head, _, body = request_bytes(server, "POST", "/v1/x", body=b"{}", api_key="k").partition(b"\r\n\r\n")
    assert body == b"{}"
    assert head.startswith(b"POST /llm/v1/x HTTP/1.1\r\nHost: h:1\r\n")
    assert b"Content-Length: 2" in head
    assert b"Authorization: Bearer k" in head


class Sink:
    """A transport that forgets what is written."""

    def write(self, data):
        pass

"""Bytes and programs that do not belong to a start, at the executor's TCP socket: ranks connect as before."""

import random
import socket

import zmq

from transom_core.settings.settings import Settings
from transom_worker.execution.ranks.channel import ExecutorChannel, RankChannel
from transom_worker.execution.ranks.messages import Hello, RankSetup

BEGINNINGS = [b"", b"\xff" + bytes(8) + b"\x7f", b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01CURVE" + bytes(48), b"\xff" * 10]
NUM_STREAMS = 200


def test_strangers_neither_reach_nor_stop_the_executor() -> None:
    channel = ExecutorChannel("127.0.0.1")
    try:
        port = int(channel.endpoint.rsplit(":", 1)[1])
        for _ in range(NUM_STREAMS):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(random.choice(BEGINNINGS) + random.randbytes(random.randrange(400)))
        with zmq.Context() as context:
            plain = knock(context, channel.endpoint)
            wrong, _ = zmq.curve_keypair()
            other = knock(context, channel.endpoint, server_key=wrong)
            rank = RankChannel(setup(channel))
            rank.send(Hello(host="here", ip="127.0.0.1", process_id=1))
            # The first message that arrives is the rank's, and there is no other.
            received = channel.receive(60)
            assert received is not None
            assert received[0] == 0
            assert isinstance(received[1], Hello)
            assert channel.receive(0) is None
            rank.close()
            plain.close()
            other.close()
    finally:
        channel.close()


def setup(channel: ExecutorChannel) -> RankSetup:
    config = Settings.parse(model="none").engine_config()
    return RankSetup(config=config, rank=0, size=1, endpoint=channel.endpoint, server_key=channel.server_key)


def knock(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, server_key: bytes | None = None
) -> zmq.Socket[bytes]:
    """A peer that calls itself rank 0 and sends a pickle, without encryption or with another server's key."""
    stranger: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.setsockopt(zmq.ROUTING_ID, b"rank 0")
    if server_key is not None:
        public, secret = zmq.curve_keypair()
        stranger.setsockopt(zmq.CURVE_SERVERKEY, server_key)
        stranger.setsockopt(zmq.CURVE_PUBLICKEY, public)
        stranger.setsockopt(zmq.CURVE_SECRETKEY, secret)
    stranger.connect(endpoint)
    stranger.send(b"cos\nsystem\n(S'true'\ntR.")
    return stranger

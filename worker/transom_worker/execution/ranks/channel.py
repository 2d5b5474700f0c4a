"""The wire between an executor and its ranks: one ZeroMQ socket at the executor, one at each rank.

It is encrypted with keys that are made for each start (CURVE): who does not hold the executor's public key, which travels with a
rank's setup alone, can neither read nor connect. On one host it is a local socket without a file, so that nothing is left
however processes end; across hosts TCP on the node's address.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import sys
from typing import Any

import zmq

from transom_worker.execution.ranks.messages import RankSetup, decode, encode

LINGER_S = 1.0  # for a rank's last words


class ExecutorChannel:
    """The executor's end. One thread uses it; `wake` may be called from any."""

    def __init__(self, ip: str | None = None) -> None:
        """`ip`: the node's own address, where ranks may be on other hosts."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # without it a message to nobody is lost unseen
        self.server_key, secret = zmq.curve_keypair()
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self.endpoint = self._bind(ip)
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)

    def send(self, rank: int, message: object) -> None:
        """Hand a message to one rank, which has spoken before; never waits."""
        self._send(rank, zmq.Frame(encode(message)))

    def send_all(self, size: int, message: object) -> None:
        """One message to all ranks, turned into bytes once."""
        frame = zmq.Frame(encode(message))
        for rank in range(size):
            self._send(rank, frame)

    def receive(self, timeout_s: float) -> tuple[int, Any] | None:
        """The next message and the rank it comes from; None when the time is over or somebody called `wake`."""
        ready = dict(self._poller.poll(math.ceil(max(0.0, timeout_s) * 1e3)))
        if self._woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        if self._socket not in ready:
            return None
        identity, data = self._socket.recv_multipart()
        return int(identity.split()[1]), decode(data)

    def wake(self) -> None:
        """Let `receive` return at once, now or when it is next called."""
        with contextlib.suppress(OSError):  # full: it will wake; closed: nobody waits
            self._waker.send(b"\0")

    def close(self) -> None:
        """Let go of the sockets; idempotent."""
        self._socket.close()
        self._context.term()
        self._woken.close()
        self._waker.close()

    def _send(self, rank: int, frame: zmq.Frame) -> None:
        try:
            self._socket.send_multipart([_identity(rank), frame], copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # it has ended, which its launcher tells
                raise

    def _bind(self, ip: str | None) -> str:
        if ip is None and sys.platform == "linux":
            endpoint = f"ipc://@transom-{os.getpid()}-{secrets.token_hex(8)}"  # a name that belongs to no folder
            self._socket.bind(endpoint)
            return endpoint
        ip = ip or "127.0.0.1"
        self._socket.setsockopt(zmq.IPV6, int(":" in ip))
        place = f"tcp://[{ip}]" if ":" in ip else f"tcp://{ip}"
        return f"{place}:{self._socket.bind_to_random_port(place)}"


class RankChannel:
    """A rank's end."""

    def __init__(self, setup: RankSetup) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.IPV6, int("[" in setup.endpoint))
        self._socket.setsockopt(zmq.ROUTING_ID, _identity(setup.rank))
        public, secret = zmq.curve_keypair()
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, setup.server_key)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.connect(setup.endpoint)

    def send(self, message: object) -> None:
        """Hand a message to the executor."""
        self._socket.send(encode(message))

    def receive(self) -> Any:
        """Wait for the executor's next message."""
        return decode(self._socket.recv())

    def close(self) -> None:
        """Send what is waiting, if the executor takes it in time, and close."""
        self._socket.close(linger=int(LINGER_S * 1e3))
        self._context.term()


def _identity(rank: int) -> bytes:
    return b"rank %d" % rank

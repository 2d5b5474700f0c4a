"""Connects an executor with its ranks: by one ZeroMQ socket at the executor, and one at each rank.

The connection is encrypted (CURVE) with keys that are made for each start. The executor's public key is only in the ranks' setups,
so a process without a setup can neither read messages nor connect. On one host the socket is a local socket without a file: so no
file is left, however the processes end. Across hosts it is a TCP socket on the node's address.
"""

import contextlib
import math
import os
import secrets
import socket
import sys
from typing import Any

import zmq

from transom_worker.execution.ranks.messages import RankSetup, decode, encode

LINGER_S = 1.0  # how long an ending rank tries to deliver its last message, which has the reason


class ExecutorChannel:
    """The executor's end of the connection. Only one thread uses it; any thread may call `wake`."""

    def __init__(self, ip: str | None = None) -> None:
        """Open the socket. `ip` is this node's address if ranks may be on other hosts, and None if all ranks are on this host."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # Closing the socket does not wait for unsent messages, and its queues have no limit, so sending never blocks.
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        # Without this option, a message to a rank that is not connected disappears without an error.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
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
        """Send a message to one rank without waiting. The rank must have sent a message before."""
        self._send(rank, zmq.Frame(encode(message)))

    def send_all(self, size: int, message: object) -> None:
        """Send one message to all ranks; it is pickled only once."""
        frame = zmq.Frame(encode(message))
        for rank in range(size):
            self._send(rank, frame)

    def receive(self, timeout_s: float) -> tuple[int, Any] | None:
        """Return the next message and its rank; None when the timeout is over or another thread has called `wake`."""
        ready = dict(self._poller.poll(math.ceil(max(0.0, timeout_s) * 1e3)))
        if self._woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        if self._socket not in ready:
            return None
        identity, data = self._socket.recv_multipart()
        return int(identity.split()[1]), decode(data)

    def has_message(self) -> bool:
        """Return whether a message has come."""
        return bool(self._socket.poll(0))

    def wake(self) -> None:
        """Make the current call of `receive`, or the next one, return at once."""
        # If the socket is full, `receive` wakes anyway; if it is closed, no call of `receive` is left to wake.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def close(self) -> None:
        """Close the sockets; idempotent."""
        self._socket.close()
        self._context.term()
        self._woken.close()
        self._waker.close()

    def _send(self, rank: int, frame: zmq.Frame) -> None:
        try:
            self._socket.send_multipart([_identity(rank), frame], copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # the rank has ended, which its launcher reports
                raise

    def _bind(self, ip: str | None) -> str:
        if ip is None and sys.platform == "linux":
            endpoint = f"ipc://@transom-{os.getpid()}-{secrets.token_hex(8)}"  # an abstract name, without a file
            self._socket.bind(endpoint)
            return endpoint
        ip = ip or "127.0.0.1"
        self._socket.setsockopt(zmq.IPV6, int(":" in ip))
        interface = f"tcp://[{ip}]" if ":" in ip else f"tcp://{ip}"
        return f"{interface}:{self._socket.bind_to_random_port(interface)}"


class RankChannel:
    """A rank's end of the connection. Of several connections of a rank, all but one have a `suffix` of their own."""

    def __init__(self, setup: RankSetup, suffix: bytes = b"") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.IPV6, int("[" in setup.endpoint))
        self._socket.setsockopt(zmq.ROUTING_ID, _identity(setup.rank) + suffix)
        public, secret = zmq.curve_keypair()
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, setup.server_key)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.connect(setup.endpoint)

    def send(self, message: object) -> None:
        """Send a message to the executor."""
        self._socket.send(encode(message))

    def has_message(self) -> bool:
        """Return whether `receive` would return at once."""
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)  # a fifth of what `poll` costs

    def receive(self) -> Any:
        """Wait for the executor's next message."""
        return decode(self._socket.recv())

    def close(self) -> None:
        """Send the queued messages, if the executor takes them within `LINGER_S`, and close the socket."""
        self._socket.close(linger=int(LINGER_S * 1e3))
        self._context.term()


def _identity(rank: int) -> bytes:
    return b"rank %d" % rank

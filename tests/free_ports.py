"""Ports for servers that want to be told theirs before they start."""

import socket

PORTS = range(20_000, 30_000)  # from which neither the kernel nor Ray gives ports to those who take any
_claims: list[socket.socket] = []  # for as long as this process lives


def free_port() -> int:
    """A port on which no process listens, and that no other test process gets while this one lives."""
    for port in PORTS:
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0transom-test-port-{port}")
            with socket.create_server(("127.0.0.1", port)):
                _claims.append(claim)
                return port
        except OSError:  # another test's, or a stranger's
            claim.close()
    raise AssertionError(f"none of the ports {PORTS.start} to {PORTS.stop - 1} is free")

"""An ASGI app behind uvicorn, on a thread and a random loopback port."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

PATIENCE_S = 120


@contextlib.contextmanager
def served(
    app: Any, is_ready: Callable[[], bool] = lambda: True, **config: Any
) -> Iterator[tuple[int, asyncio.AbstractEventLoop]]:
    """Serve until the block ends: the port and the server's event loop, once `is_ready`. `config` are fields of uvicorn's."""
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio sends answers at once only if the protocol is named
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", ws="none", **config))
    loops: list[asyncio.AbstractEventLoop] = []
    ready = threading.Event()

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not (server.started and is_ready()) and not task.done():
            await asyncio.sleep(0.005)
        ready.set()
        await task

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield listener.getsockname()[1], loops[0]
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()

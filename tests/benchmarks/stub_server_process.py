"""A stub completions server as a process, for benchmarks that start servers: `python stub_server_process.py PORT`."""

from __future__ import annotations

import asyncio
import contextlib
import sys

from tests.benchmarks.stub_server import StubServer, completion


async def serve(port: int) -> None:
    async with StubServer(completion, port=port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(int(sys.argv[1])))

"""A stub completions server as a process: `python -m tests.benchmarks.stub_server_process PORT`."""

from __future__ import annotations

import asyncio
import sys

from tests.benchmarks.stub_server import StubServer, completion


async def serve(port: int) -> None:
    async with StubServer(completion, port=port):
        print("serving", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))

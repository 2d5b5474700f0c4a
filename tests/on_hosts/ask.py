"""Runs on a host outside the cluster: several streams at once; a line when all of them have begun, then each one's answer as JSON.

python ask.py URL KEY STREAMS MAX_TOKENS
"""

import asyncio
import json
import sys
from typing import Any

import httpx

BEGUN_AFTER = 8  # tokens
TIMEOUT_S = 110.0


async def main(url: str, key: str, num_streams: int, max_tokens: int) -> None:
    """Ask, and print."""
    begun = asyncio.Barrier(num_streams)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False) as client:
        answers = await asyncio.gather(*(stream(client, begun, i, max_tokens) for i in range(num_streams)))
    print(json.dumps(answers), flush=True)


async def stream(client: httpx.AsyncClient, begun: asyncio.Barrier, index: int, max_tokens: int) -> dict[str, Any]:
    """One greedy answer: its text, how it ended, and whether the stream was whole."""
    prompt = f"Story number {index}:"
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    text, events, end, whole = "", 0, None, False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            return {"error": (await response.aread()).decode()}
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                whole = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return {"error": event["error"]["message"]}
                text += event["choices"][0]["text"]
                end = event["choices"][0]["finish_reason"] or end
                events += 1
                if events == BEGUN_AFTER:
                    await announce(begun)
    return {"text": text, "end": end, "whole": whole}


async def announce(begun: asyncio.Barrier) -> None:
    """Say so once, when the last stream has begun."""
    async with begun as position:
        if position == 0:  # type: ignore[comparison-overlap]
            print("begun", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))

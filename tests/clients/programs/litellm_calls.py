"""litellm against the server at argv[1], and a classifier's at argv[2]: prints one JSON line for each check."""

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it fetches prices when it is imported
import litellm

litellm.suppress_debug_info = True

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]},
    },
}
URL = f"{sys.argv[1]}/v1"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 48, "temperature": 0}


def check(name: str, holds: object) -> None:
    assert holds, name
    print(json.dumps({"check": name}))


for provider in ("openai", "hosted_vllm"):
    there: dict[str, Any] = {"model": f"{provider}/tiny", "api_base": URL, "api_key": "unused", "num_retries": 0}
    answer = litellm.completion(**there, **ASKED)
    text = answer.choices[0].message.content
    check(f"{provider} chat", text and answer.usage.completion_tokens)
    chunks = list(litellm.completion(**there, **ASKED, stream=True, stream_options={"include_usage": True}))
    check(f"{provider} stream", litellm.stream_chunk_builder(chunks).choices[0].message.content == text)
    called = litellm.completion(**there, **ASKED, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls
    check(f"{provider} tool call", json.loads(called[0].function.arguments) == {"city": "Paris"})
    check(f"{provider} embedding", len(litellm.embedding(**there, input=["a", "b"]).data) == 2)

there = {"model": "openai/tiny", "api_base": URL, "api_key": "unused", "num_retries": 0}
check("completion", litellm.text_completion(**there, prompt="Once", max_tokens=4).choices[0].text)
check("responses", litellm.responses(**there, input="Say hello.", max_output_tokens=16).output)
messages = {"model": "anthropic/tiny", "api_base": sys.argv[1], "api_key": "unused"}
check("messages", litellm.completion(**messages, **ASKED).choices[0].message.content == text)
scored = litellm.rerank("hosted_vllm/tiny", "a", ["b", "c"], api_base=f"{sys.argv[2]}/v1", api_key="unused", top_n=1)
check("rerank", len(scored.results) == 1)
try:
    litellm.completion(**there, **{**ASKED, "temperature": 200})
except litellm.BadRequestError as error:
    check("an error", "temperature" in str(error))

"""openai-agents against the server at argv[1]: prints one JSON line for each check."""

import asyncio
import json
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

CALLED: list[str] = []
STOP = {"stop": [".", "!"]}  # the agent takes no answer that ends at its length, and the demo model talks on


class Weather(BaseModel):
    sky: Literal["clear", "cloudy"]


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    CALLED.append(city)
    return "The sky is clear."


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0, timeout=300)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model="tiny", openai_client=client)
        for streamed in (False, True):
            CALLED.clear()
            agent = Agent(
                name="a",
                instructions="Help.",
                model=model,
                tools=[weather],
                model_settings=ModelSettings(tool_choice="required", temperature=0, max_tokens=256, extra_body=STOP),
            )
            if streamed:
                result = Runner.run_streamed(agent, "Weather in Paris?")
                kinds = [event.type async for event in result.stream_events()]
                assert "raw_response_event" in kinds
            else:
                result = await Runner.run(agent, "Weather in Paris?")
            assert CALLED, "the tool was not called"
            assert result.final_output, "there is no final output"
            print(json.dumps({"check": f"{kind.__name__} tool, streamed {streamed}"}))
        typed = Agent(
            name="t", model=model, output_type=Weather, model_settings=ModelSettings(temperature=0, max_tokens=48)
        )
        result = await Runner.run(typed, "The sky is clear.")
        assert isinstance(result.final_output, Weather)
        print(json.dumps({"check": f"{kind.__name__} output type"}))


asyncio.run(main())

"""`ForcedTool`: middleware that makes the first request of a client's turn call one tool with one of some fixed arguments.

Clients such as Codex always send `tool_choice: "auto"`, and the demo model is too small to call a tool of its own accord. So the
test changes the body of a request without a tool's result before the server reads it, and nothing else:

- `tool_choice` names the tool;
- the tool's parameters are replaced by a schema that allows only the given arguments: no shell runs what the model makes up.

A request with a tool's result gets `tool_choice: "none"`, so that the turn ends. The server holds the model to all this by its
ordinary grammar.
"""

import json
from typing import Any


class ForcedTool:
    """Puts this around an ASGI app; `num_forced` counts the requests that were changed, `bodies` has all that were sent."""

    def __init__(self, app: Any, tool: str, arguments: dict[str, str]) -> None:
        self._app = app
        self._tool = tool
        self._schema = {
            "type": "object",
            "properties": {name: {"type": "string", "enum": [value]} for name, value in arguments.items()},
            "required": list(arguments),
            "additionalProperties": False,
        }
        self.num_forced = 0
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/v1/responses":
            await self._app(scope, receive, send)
            return
        content, more = b"", True
        while more:
            message = await receive()
            content, more = content + message.get("body", b""), message.get("more_body", False)
        body = json.loads(content)
        self.bodies.append(body)
        has_result = any(item.get("type") == "function_call_output" for item in body["input"])
        self.num_forced += not has_result
        content = json.dumps({**body, "tool_choice": "none"} if has_result else self._forced(body)).encode()
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(content)).encode())]}
        sent = False

        async def receive_forced() -> Any:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": content, "more_body": False}

        await self._app(scope, receive_forced, send)

    def _forced(self, body: dict[str, Any]) -> dict[str, Any]:
        tools = [
            {**tool, "parameters": self._schema} if tool.get("name") == self._tool else tool for tool in body["tools"]
        ]
        return {**body, "tools": tools, "tool_choice": {"type": "function", "name": self._tool}}

"""Completes the OpenAPI document with what FastAPI cannot derive: request bodies, response bodies, errors and API keys.

FastAPI knows only the routes' paths, since handlers parse bodies themselves and return finished responses.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
from pydantic import TypeAdapter

from transom_cluster.openai.answer import response_types
from transom_cluster.openai.messages.object_types import (
    OVERLOADED_STATUS,
    MessageObject,
    MessagesErrorBody,
    MessageTokensCount,
    is_messages_path,
)
from transom_cluster.openai.messages.request_body import MESSAGES_RULES, CountTokensRequest, MessagesRequest
from transom_cluster.openai.request.body import BodyModel
from transom_cluster.openai.request.chat_request import ChatCompletionRequest
from transom_cluster.openai.request.completion_request import CompletionRequest, DetokenizeRequest, TokenizeRequest
from transom_cluster.openai.request.embedding_request import EMBEDDING_RULES, EmbeddingRequest
from transom_cluster.openai.request.field_rules import (
    CHAT_RULES,
    COMPLETION_RULES,
    NO_RULES,
    TOKENIZE_RULES,
    FieldRules,
)
from transom_cluster.openai.request.score_request import RerankRequest, ScoreRequest
from transom_cluster.openai.responses.object_types import ResponseObject
from transom_cluster.openai.responses.request_body import RESPONSES_RULES, ResponsesRequest

POST_ENDPOINTS: dict[str, tuple[type[BodyModel], FieldRules, type[Any]]] = {
    # path of a POST route -> its request body, the rules for fields that the body's class lacks, its response body
    "/v1/chat/completions": (ChatCompletionRequest, CHAT_RULES, response_types.ChatCompletion),
    "/v1/completions": (CompletionRequest, COMPLETION_RULES, response_types.Completion),
    "/v1/responses": (ResponsesRequest, RESPONSES_RULES, ResponseObject),
    "/v1/messages": (MessagesRequest, MESSAGES_RULES, MessageObject),
    "/v1/messages/count_tokens": (CountTokensRequest, MESSAGES_RULES, MessageTokensCount),
    "/v1/embeddings": (EmbeddingRequest, EMBEDDING_RULES, response_types.EmbeddingList),
    "/v1/rerank": (RerankRequest, EMBEDDING_RULES, response_types.Reranking),
    "/v1/score": (ScoreRequest, EMBEDDING_RULES, response_types.ScoreList),
    "/tokenize": (TokenizeRequest, TOKENIZE_RULES, response_types.Tokens),
    "/detokenize": (DetokenizeRequest, NO_RULES, response_types.Text),
}
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_GET_RESPONSES: dict[str, type[Any]] = {
    "/health": response_types.Health,
    "/v1/models": response_types.ModelList,
    "/v1/models/{model_id}": response_types.ModelCard,
}
_METRICS_PATHS = ("/metrics", "/metrics/process")
_ERRORS = {  # status -> description; only routes below /v1/messages send `OVERLOADED_STATUS`
    400: "Malformed, a field that is wrong or not supported, or a prompt that is too long.",
    401: "No API key, or a wrong one.",
    404: "Another model than the served one.",
    408: "The request took longer than it may.",
    413: "The body is too large.",
    429: "This client's own limit of requests, a minute or at once.",
    431: "The headers are too large.",
    500: "The server failed; its log has the reason.",
    503: "Overloaded, or no worker is ready.",
    OVERLOADED_STATUS: "Overloaded.",
}
_GET_ERRORS = (401, 429, 431, 500)
_EVENT = {  # the schema of one server-sent event of a stream
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string", "description": "A chunk as JSON, an error, or [DONE] at the end."}},
}
_RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "string", "pattern": "^[0-9]+$"}}}


def complete_openapi_document(
    document: dict[str, Any], *, needs_key: bool, open_paths: frozenset[str], admin_paths: frozenset[str] = frozenset()
) -> None:
    """Add bodies, responses, errors and API keys to FastAPI's `document`, in place.

    With `needs_key` every path needs an API key, except `open_paths`. `admin_paths` need an admin key. Both have only GET routes.
    """
    schemas: dict[str, Any] = {}
    document["components"] = {"schemas": schemas}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["responses"] = _responses(path, method, operation, schemas)
            if method == "post":
                operation["requestBody"] = {"required": True, "content": _json(_add_body(path, schemas))}
    for path in admin_paths:
        error = _json(_add(response_types.ErrorBody, schemas))
        document["paths"][path]["get"]["responses"]["403"] = {"description": "Not an admin key.", "content": error}
        document["paths"][path]["get"]["security"] = [{"key": []}]
    if needs_key or admin_paths:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    if needs_key:
        document["security"] = [{"key": []}]
        for path in open_paths & document["paths"].keys():
            document["paths"][path]["get"]["security"] = []


def _responses(path: str, method: str, operation: Mapping[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Return an operation's responses by status. A route that no table above has declares its own response bodies."""
    if path in POST_ENDPOINTS:
        content = _json(_add(POST_ENDPOINTS[path][2], schemas))
    elif path in _GET_RESPONSES:
        content = _json(_add(_GET_RESPONSES[path], schemas))
    elif path in _METRICS_PATHS:
        content = {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "application/openmetrics-text")}
    else:
        content = operation["responses"]["200"]["content"]
    if path in _STREAMED:
        content["text/event-stream"] = {"schema": _EVENT}
    responses = {"200": {"description": "The answer.", "content": content}}
    error_type = MessagesErrorBody if is_messages_path(path) else response_types.ErrorBody
    for status in _statuses(path, method):
        responses[str(status)] = _error(status, _add(error_type, schemas))
    for declared, response in operation["responses"].items():  # declared by the route itself
        if declared not in ("200", "422"):  # FastAPI declares 422; this API sends 400 instead
            responses[declared] = {**response, "content": _json(_add(response_types.ErrorBody, schemas))}
    if path == "/health":
        responses["503"] = {"description": "No worker is ready.", "content": content, "headers": _RETRY}
    return responses


def _statuses(path: str, method: str) -> list[int]:
    """Return the statuses of an operation's errors. A path with a parameter, such as a model's name, may name none (404)."""
    statuses = {*(_ERRORS if method == "post" else _GET_ERRORS), *([404] if "{" in path else [])}
    return sorted(statuses if is_messages_path(path) else statuses - {OVERLOADED_STATUS})


def _error(status: int, schema: dict[str, Any]) -> dict[str, Any]:
    headers = {"headers": _RETRY} if status in (429, 503, OVERLOADED_STATUS) else {}
    return {"description": _ERRORS[status], "content": _json(schema), **headers}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _add(model: type[Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Add the schema of a response body, and the schemas that it refers to; return a reference to it."""
    if model.__name__ not in schemas:
        schema = dict(_schema(model))  # type: ignore[arg-type] # mypy takes a class for unhashable
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    return {"$ref": f"#/components/schemas/{model.__name__}"}


@cache
def _schema(model: type[Any]) -> Mapping[str, Any]:
    """Return the JSON Schema of a response body; its objects allow no other properties. Cached: callers must not change it."""
    schema = TypeAdapter(model).json_schema(ref_template="#/components/schemas/{model}")
    for part in (schema, *schema.get("$defs", {}).values()):
        part["additionalProperties"] = False
    return schema


def _add_body(path: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """Add a request body's schema, and return a reference to it. The schema lists ignored fields, and unsupported fields with their
    neutral values, which ask for the default behaviour and are the only ones that the server accepts."""
    model, rules, _ = POST_ENDPOINTS[path]
    reference, added = _body_schemas(model)
    properties = dict(added[model.__name__]["properties"])
    schemas.update(added)
    schemas[model.__name__] = {**added[model.__name__], "properties": properties}
    for name in sorted(rules.ignored):
        properties.setdefault(name, {"description": "Accepted without effect."})
    for name, neutral in sorted(rules.refused.items()):
        properties.setdefault(name, {"description": "Not supported yet.", "enum": [*neutral, None]})
    return reference


@cache
def _body_schemas(model: type[BodyModel]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a reference to a request body's JSON Schema, and a dict of the schemas by name: this one, and those that it refers to.
    Both are cached: callers must not change them."""
    (reference,), added = msgspec.json.schema_components([model], ref_template="#/components/schemas/{name}")
    return reference, added

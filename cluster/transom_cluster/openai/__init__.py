"""OpenAI's wire format: request bodies and their checks, response bodies, errors, server-sent events, the OpenAPI document."""

"""OpenAI's wire format: request bodies and their checks, response bodies, errors, server-sent events, and the OpenAPI document."""

"""OpenAI's wire format, and Anthropic's for messages: request bodies and their checks, response bodies, errors, server-sent events,
and the OpenAPI document."""

"""The wire: OpenAI shapes, their checks, their errors, server-sent events."""

"""The HTTP API: the FastAPI app, its middleware and routes, API keys, client limits, and the responses that run generations."""

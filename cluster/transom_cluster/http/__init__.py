"""The HTTP API: the FastAPI app, its middleware, all routes, API keys, client limits, and the writers of responses."""

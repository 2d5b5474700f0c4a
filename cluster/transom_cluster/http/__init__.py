"""The HTTP API: the FastAPI app, its middleware, all routes, API keys, limits of clients, and the responses of generations."""

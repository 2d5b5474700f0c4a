"""Routing, without Ray and without I/O: the choice of a worker for each request, and how many workers the load needs."""

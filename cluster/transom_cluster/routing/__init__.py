"""Routing, without Ray and without I/O: chooses a worker for each request, and computes how many workers the load needs."""

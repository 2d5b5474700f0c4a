"""What a worker reports about itself: the engine's event stream, Prometheus metrics, request timelines, spans and request log
lines."""

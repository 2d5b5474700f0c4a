"""Telemetry that routers and workers share: labels, the process's own metrics, request timelines and tracing."""

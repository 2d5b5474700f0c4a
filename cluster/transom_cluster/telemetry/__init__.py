"""The router's telemetry: Prometheus metrics, request timelines, and OpenTelemetry spans."""

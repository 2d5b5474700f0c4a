"""What a router reports: Prometheus metrics, request timelines, and OpenTelemetry spans."""

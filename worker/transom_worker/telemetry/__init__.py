"""What a worker reports: Prometheus metrics, request timelines, and OpenTelemetry spans."""

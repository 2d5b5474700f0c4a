"""What clients of the HTTP server see: under load, under kills and redeploys, and when a worker is lost."""

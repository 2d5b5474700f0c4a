"""Grafana's dashboards of Transom as code: `make dashboards` writes `json/` from it, and a test keeps the two equal."""

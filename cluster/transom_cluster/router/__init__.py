"""The router: the request queue, in-flight requests, connections to workers, and failover."""

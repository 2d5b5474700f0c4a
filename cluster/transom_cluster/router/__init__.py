"""The router without HTTP and Ray: request queue, in-flight requests, worker connections, failover, and queries to other
routers."""

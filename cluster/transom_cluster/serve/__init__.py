"""Everything that depends on Ray Serve: replicas of workers and routers, autoscaling, and the resources asked of Ray."""

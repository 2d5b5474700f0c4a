"""The code that depends on Ray Serve: replicas of workers and routers, autoscaling, and the resources that workers request from
Ray."""

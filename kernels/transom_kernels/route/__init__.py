"""MoE routers: which experts each token goes to, and with which weight."""

from transom_kernels.route.op import Routing, Score, route, router_layout

__all__ = ["Routing", "Score", "route", "router_layout"]

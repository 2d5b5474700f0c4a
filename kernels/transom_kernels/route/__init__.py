"""MoE routers: which experts each token goes to, and with which weight."""

from transom_kernels.route.op import route, router_layout
from transom_kernels.route.reference import Routing, Score

__all__ = ["Routing", "Score", "route", "router_layout"]

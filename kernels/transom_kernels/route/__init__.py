"""Routers of mixtures: which experts every token goes to, and how much each of them counts."""

from transom_kernels.route.op import arranged, route
from transom_kernels.route.rule import Routing, Score

__all__ = ["Routing", "Score", "arranged", "route"]

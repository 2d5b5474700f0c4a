"""Hyper-connections: several residual streams, mixed into each sublayer's input and from its output."""

from transom_kernels.hyper_connections.op import hc_head, hc_norm, hc_post, hc_pre, hc_project

__all__ = ["hc_head", "hc_norm", "hc_post", "hc_pre", "hc_project"]

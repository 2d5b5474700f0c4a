"""Hyper-connections: a residual of several streams, mixed into a sublayer's input and from its output."""

from transom_kernels.hyper_connections.op import hc_head, hc_norm, hc_post, hc_pre

__all__ = ["hc_head", "hc_norm", "hc_post", "hc_pre"]

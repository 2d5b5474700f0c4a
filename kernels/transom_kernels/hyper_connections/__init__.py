"""Hyper-connections (DeepSeek V4): several residual streams instead of one, mixed before and after each sublayer."""

from transom_kernels.hyper_connections.op import hc_head, hc_norm, hc_post, hc_pre

__all__ = ["hc_head", "hc_norm", "hc_post", "hc_pre"]

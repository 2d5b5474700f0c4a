"""Says why a model cannot serve requests with a KV policy: a request's own rule for which tokens full-attention layers keep."""

from __future__ import annotations

from transom_core.model_config.architecture import Architecture


def kv_policy_obstacle(architecture: Architecture) -> str:
    """Return the reason, worded to follow "and" in a message; "" if all layers have full attention and so can follow a policy.

    The model's layers decide, not the cache's groups: without a hybrid cache, the groups keep every token, even those that layers
    with a window do not read.
    """
    layers = architecture.layers
    counts = {
        "a latent cache": sum(layer.latent or layer.compression is not None for layer in layers),
        "sliding windows": sum(layer.window is not None for layer in layers),
        "chunked attention": sum(layer.chunk is not None for layer in layers),
    }
    found = [f"{count} of its {len(layers)} layers have {what}" for what, count in counts.items() if count]
    return f"in this one {' and '.join(found)}" if found else ""

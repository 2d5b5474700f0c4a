"""Says why a model's layers cannot follow a request's KV policy, its own rule for what full-attention layers keep."""

from __future__ import annotations

from transom_core.model_config.architecture import Architecture


def kv_policy_obstacle(architecture: Architecture) -> str:
    """Return the reason, to be continued after "and"; empty if all layers have full attention and so can follow a policy.

    The model's layers decide, not the cache's groups: without a hybrid cache the groups keep every token although the layers do
    not read them.
    """
    layers = architecture.layers
    counts = {
        "a latent cache": sum(layer.latent or layer.compression is not None for layer in layers),
        "sliding windows": sum(layer.window is not None for layer in layers),
        "chunked attention": sum(layer.chunk is not None for layer in layers),
    }
    found = [f"{count} of its {len(layers)} layers have {what}" for what, count in counts.items() if count]
    return f"in this one {' and '.join(found)}" if found else ""

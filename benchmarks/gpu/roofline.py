"""The bytes of a decode step and the operations of a prompt, of which `models` makes the least time that the device allows."""

from __future__ import annotations

from transom_core.model_config.architecture import Architecture

EXPERT_BYTES = 17 / 32  # of an expert's weight in MXFP4: half a byte, and a byte for every 32


def step_bytes(architecture: Architecture, weight_bytes: int, batch: int, context: int) -> int:
    """What a decode step has to read: weights but the embedding's table, of experts those that some token is likely to choose, and
    every visible key and value."""
    read = weight_bytes
    if not architecture.tie_embeddings:
        read -= 2 * architecture.vocab_size * architecture.hidden_size
    read -= int(EXPERT_BYTES * _num_expert_weights(architecture) * (1 - _used_share(architecture, batch)))
    return read + batch * cached_bytes(architecture, context)


def cached_bytes(architecture: Architecture, context: int) -> int:
    """The visible keys and values of a sequence, of two bytes each."""
    return sum(
        2 * 2 * (min(context, layer.window) if layer.window else context) * layer.num_kv_heads * layer.head_size
        for layer in architecture.layers
    )


def prompt_flops(architecture: Architecture, weight_bytes: int, tokens: int) -> int:
    """Of one prompt: two for every weight that a token meets (the head meets the last alone), and attention's."""
    experts = _num_expert_weights(architecture)
    others = (weight_bytes - int(EXPERT_BYTES * experts)) // 2  # of two bytes each
    others -= architecture.vocab_size * architecture.hidden_size * (1 if architecture.tie_embeddings else 2)
    flops = 2 * (others + int(experts * _used_share(architecture, 1))) * tokens
    for layer in architecture.layers:
        window = min(layer.window or tokens, tokens)
        pairs = window * tokens - window * (window - 1) // 2
        flops += 4 * layer.num_heads * layer.head_size * pairs
    return flops


def _num_expert_weights(architecture: Architecture) -> int:
    mixture = architecture.mixture
    if mixture is None:
        return 0
    matrices = 3 * mixture.num_experts * mixture.inner_size * architecture.hidden_size
    return matrices * architecture.num_layers  # of the geometries here, every layer has experts


def _used_share(architecture: Architecture, batch: int) -> float:
    """Of the experts, where every token chooses at random."""
    mixture = architecture.mixture
    return 1.0 if mixture is None else 1 - (1 - mixture.num_chosen / mixture.num_experts) ** batch

"""What a decode step of each model must take on an H200, before it was measured: bytes, launches, and the time that follows.

    python -m benchmarks.gpu.roofline

prints the table of docs/gpu.md. `models` puts the same prediction beside each figure, with the ceilings that it measured: a first
run says at once which prediction was wrong. A step is predicted to take

    bytes / (SHARE x copy bandwidth) + launches x DRAIN_S

since matrix products of few rows reach some 80 % of the copy bandwidth (cuBLAS; our attention is promised 85 %), and each kernel of
a CUDA graph waits until the one before it has left the device. The host adds nothing: it launches the next step meanwhile.
"""

from benchmarks.gpu.geometries import GEOMETRIES, config_json, geometry
from transom_core.model_config.architecture import Architecture, read_architecture

COPY_BYTES_PER_S = 4.3e12  # of an H200, as published measurements have it
SHARE, DRAIN_S = 0.8, 2.3e-6
# Of a layer: norms, products, qkv preparation, attention, gate; router, sort, sums.
DENSE_LAUNCHES, EXPERT_LAUNCHES = 9, 12
WHOLE_KEYS = 256  # attention of longer contexts and windows is split, which takes another launch
OTHER_LAUNCHES = 8  # embedding, last norm, head, sampling
EXPERT_BYTES = 17 / 32  # of an expert's weight in MXFP4: half a byte, and a byte for every 32
SIZES = ((1, 1024), (64, 1024), (256, 1024), (1, 8192), (64, 8192))


def predicted_step_s(architecture: Architecture, num_bytes: int, copy_bytes_per_s: float) -> float:
    """The predicted seconds of a decode step that reads these bytes."""
    return num_bytes / (SHARE * copy_bytes_per_s) + num_launches(architecture) * DRAIN_S


def num_launches(architecture: Architecture) -> int:
    """The kernels of a decode step."""
    each = DENSE_LAUNCHES if architecture.mixture is None else EXPERT_LAUNCHES
    num_split = sum(not layer.window or layer.window > WHOLE_KEYS for layer in architecture.layers)
    return each * architecture.num_layers + num_split + OTHER_LAUNCHES


def weight_bytes(architecture: Architecture) -> int:
    """The bytes of all weights, in bfloat16 and experts in MXFP4."""
    hidden, table = architecture.hidden_size, architecture.vocab_size * architecture.hidden_size
    attention = sum(
        2 * hidden * layer.head_size * (layer.num_heads + layer.num_kv_heads) for layer in architecture.layers
    )
    dense = 0 if architecture.mixture else 3 * hidden * architecture.intermediate_size * architecture.num_layers
    tables = table * (1 if architecture.tie_embeddings else 2)
    return 2 * (attention + dense + tables) + int(EXPERT_BYTES * _num_expert_weights(architecture))


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


def main() -> None:
    """Print a Markdown table."""
    print("| model | batch | context | GB read | launches | floor ms | predicted ms | tokens/s |")
    print("|---|---|---|---|---|---|---|---|")
    for name in GEOMETRIES:
        architecture = read_architecture(config_json(geometry(name)))
        for batch, context in SIZES:
            num_bytes = step_bytes(architecture, weight_bytes(architecture), batch, context)
            predicted_s = predicted_step_s(architecture, num_bytes, COPY_BYTES_PER_S)
            print(
                f"| {name} | {batch} | {context:,} | {num_bytes / 1e9:.1f} | {num_launches(architecture)} "
                f"| {1e3 * num_bytes / COPY_BYTES_PER_S:.2f} | {1e3 * predicted_s:.2f} | {batch / predicted_s:,.0f} |"
            )


if __name__ == "__main__":
    main()

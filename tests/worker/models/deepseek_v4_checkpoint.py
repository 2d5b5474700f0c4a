"""A small random DeepSeek V4 checkpoint: every kind of layer, small windows, ratios 4 and 16, a few chosen entries."""

from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from tests.checkpoints import SIZES, VOCAB_SIZE, scale_weights
from tests.tiny_checkpoints import tiny_tokenizer

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
LAYERS = (SLIDING, SPARSE, HEAVY, SPARSE)
RATES = {SPARSE: 4, HEAVY: 16}
WINDOW = 16

_SIZES: dict[str, Any] = {
    **{"num_hidden_layers": len(LAYERS), "layer_types": list(LAYERS), "compress_rates": RATES},
    **{"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "partial_rotary_factor": 0.25},
    **{"q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 24, "hc_sinkhorn_iters": 5, "sliding_window": WINDOW},
    "index_n_heads": 16,  # with few heads all scores may be 0, and ties prove nothing
    **{"index_head_dim": 16, "index_topk": 5, "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"]},
    **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "swiglu_limit": 2.0},
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
}


def make_deepseek_v4(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write a checkpoint into `folder`, and return it."""
    torch.manual_seed(seed)
    sizes = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
    settings = DeepseekV4Config(**(sizes | _SIZES | config))
    settings._attn_implementation = "eager"
    model = DeepseekV4ForCausalLM(settings).eval()
    with torch.no_grad():
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):
                experts = [torch.randperm(settings.n_routed_experts) for _ in range(VOCAB_SIZE)]
                table.copy_(torch.stack(experts)[:, : settings.num_experts_per_tok])
            elif name.endswith("e_score_correction_bias"):
                table.normal_(0.0, 0.3)
    scale_weights(model)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder

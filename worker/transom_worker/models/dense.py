"""The dense families of the shared decoder. Each row names a family's differences from llama:

    llama, smollm3, mistral, ministral, qwen2   none here: windows, NoPE layers and biases are in `Architecture`
    qwen3          QK norm of each head
    gemma2         norms before and after attention and MLP, norm weights minus 1, soft caps (in `Architecture`)
    gemma3_text    as gemma2, and QK norm of each head
    olmo3          norms after attention and MLP only, QK norm over all heads
    cohere2        LayerNorm, attention and MLP in parallel (parallel residual), NoPE in layers without a window

Sources: the classes of these names in transformers (`models/<family>/modeling_<family>.py`).
"""

from __future__ import annotations

from dataclasses import replace

from transom_worker.models.style import Style

_GEMMA = Style(
    norm_after_attention="post_attention_layernorm",
    norm_before_mlp="pre_feedforward_layernorm",
    norm_after_mlp="post_feedforward_layernorm",
    norm_plus_one=True,
)
DENSE_STYLES = {
    "llama": Style(),
    "smollm3": Style(),
    "mistral": Style(),
    "ministral": Style(),
    "qwen2": Style(),
    "qwen3": Style(qk_norm="each"),
    "gemma2": _GEMMA,
    "gemma3_text": replace(_GEMMA, qk_norm="each"),
    "olmo3": Style(
        norm_before_attention="",
        norm_after_attention="post_attention_layernorm",
        norm_before_mlp="",
        norm_after_mlp="post_feedforward_layernorm",
        norm_wide=True,
        qk_norm="all",
    ),
    "cohere2": Style(norm_before_mlp="", parallel_residual=True, norm_takes_mean=True),
}

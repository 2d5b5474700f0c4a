"""Builds and runs DeepSeek V4's decoder.

- Attention reads a window of latent rows, and in most layers also compressed entries (`v4_attention.py`, `compressor.py`).
- The residual consists of several streams; hyper-connections connect them with each sublayer (`hyper_connections.py`).
- All layers are MoE; the first ones route by token id (`v4_experts.py`).

Sources: DeepSeek's model card and paper of V4, transformers' `DeepseekV4ForCausalLM`.

Legend: T tokens, R rows whose logits are requested, S residual streams, N hidden width, V this rank's part of the vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from transom_core.errors import ConfigError, ModelError
from transom_core.model_config.architecture import Architecture
from transom_core.model_config.deepseek_v4 import DeepseekV4Shape
from transom_core.model_config.rope import Rope
from transom_worker.models.deepseek_v4.attention_metadata import AttentionMetadata
from transom_worker.models.deepseek_v4.hyper_connections import HyperConnection, HyperConnectionHead
from transom_worker.models.deepseek_v4.v4_attention import LatentAttention
from transom_worker.models.deepseek_v4.v4_experts import ExpertLayer
from transom_worker.models.frequencies import frequencies
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.models.layers.rotary_embedding import RotaryEmbedding, RotaryTables
from transom_worker.models.loading import Loader
from transom_worker.models.model import Model
from transom_worker.models.weights.checkpoint import Weights
from transom_worker.models.weights.renamed_weights import RenamedWeights

# Names that transformers saves, and the published ones. transformers puts most names under `model.` and calls a layer's latent norm
# `norm`; the other names within layers are equal.
_PUBLISHED = (
    ("model.embed_tokens.", "embed."),
    ("model.hc_head.hc_", "hc_head_"),
    ("model.", ""),
    (".attn.norm.", ".attn.kv_norm."),
)


class DeepseekV4(Model):
    """DeepSeek V4's decoder: embedding, layers over several residual streams, output head."""

    def __init__(self, architecture: Architecture, load: Loader) -> None:
        """`load` reads tensors by their names in the checkpoint.

        Raises:
            ModelError: the config has layers without a window.
            ConfigError: --sinks or --chunk was given, which these layers do not support.
        """
        shape = _checked(architecture)
        load = replace(load, weights=_either_name(load.weights))
        eps, table = architecture.rms_norm_eps, (architecture.vocab_size, architecture.hidden_size)
        self.architecture, self._num_residual_streams = architecture, shape.num_residual_streams
        self.vocab = load.share(architecture.vocab_size)
        self._embedding = load.embedding("model.embed_tokens", table)
        self._layers = [
            DeepseekV4Layer(load.under(f"model.layers.{index}."), architecture, shape, index)
            for index in range(architecture.num_layers)
        ]
        self._hyper_connection_head = HyperConnectionHead(load, "model.hc_head.hc", architecture, shape)
        self._norm = load.norm("model.norm", eps, size=architecture.hidden_size)
        tied = architecture.tie_embeddings
        self._head = load.head(
            "model.embed_tokens" if tied else "head", table, tied_to=self._embedding if tied else None
        )
        self._rotary = {rope: _rotary(rope, load) for rope in set(architecture.ropes) if rope is not None}
        self._entry_rope = _entry_rope(architecture)
        ends = self._embedding.weight_bytes + self._norm.weight_bytes + self._head.weight_bytes
        self.weight_bytes = (
            ends + self._hyper_connection_head.weight_bytes + sum(layer.weight_bytes for layer in self._layers)
        )

    @torch.inference_mode()
    def logits(self, hidden_RN: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        return self._head(hidden_RN)

    @torch.inference_mode()
    def hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """See `Model.hidden`; this writes latent rows and entries into the caches."""
        metadata = AttentionMetadata(batch, None if self._entry_rope is None else self._rotary[self._entry_rope])
        tables = {rope: rotary(batch.positions) for rope, rotary in self._rotary.items()}
        x_TSN = self._embedding(batch.token_ids)[:, None].expand(-1, self._num_residual_streams, -1)
        token_ids = batch.token_ids
        for index, layer in enumerate(self._layers):
            rope = self.architecture.ropes[index]
            assert rope is not None
            x_TSN = layer.attend(x_TSN, tables[rope], metadata)
            if index == len(self._layers) - 1:  # no later layer reads the other rows
                x_TSN, token_ids = x_TSN[batch.logit_rows], token_ids[batch.logit_rows]
            x_TSN = layer.feed_forward(x_TSN, token_ids)
        return self._norm(self._hyper_connection_head(x_TSN))


class DeepseekV4Layer:
    """One decoder layer: attention and experts, each with a hyper-connection around it."""

    def __init__(self, load: Loader, architecture: Architecture, shape: DeepseekV4Shape, index: int) -> None:
        eps, hidden = architecture.rms_norm_eps, architecture.hidden_size
        self._index = index
        self._attention = LatentAttention(load.under("attn."), architecture, shape, index)
        self._experts = ExpertLayer(load.under("ffn."), architecture, shape, hashed=shape.hashed[index])
        self._attention_norm = load.norm("attn_norm", eps, size=hidden)
        self._expert_norm = load.norm("ffn_norm", eps, size=hidden)
        self._attention_connection = HyperConnection(load, "hc_attn", architecture, shape)
        self._expert_connection = HyperConnection(load, "hc_ffn", architecture, shape)
        norms, mixers = (self._attention_norm, self._expert_norm), (self._attention_connection, self._expert_connection)
        self.weight_bytes = sum(part.weight_bytes for part in (self._attention, self._experts, *norms, *mixers))

    def attend(self, x_TSN: torch.Tensor, tables: RotaryTables, metadata: AttentionMetadata) -> torch.Tensor:
        """Return the residual streams [T, S, N] after attention."""
        batch, index = metadata.batch, self._index
        x_TN, post_TS, mix_TSS = self._attention_connection.before_sublayer(x_TSN)
        y_TN = self._attention(
            self._attention_norm(x_TN),
            tables,
            batch.caches[index],
            batch.group_of_layer[index],
            batch.compressed[index] if batch.compressed else None,
            metadata,
        )
        return self._attention_connection.after_sublayer(y_TN, x_TSN, post_TS, mix_TSS)

    def feed_forward(self, x_TSN: torch.Tensor, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Return the residual streams [T, S, N] after the experts."""
        x_TN, post_TS, mix_TSS = self._expert_connection.before_sublayer(x_TSN)
        y_TN = self._experts(self._expert_norm(x_TN), token_ids_T)
        return self._expert_connection.after_sublayer(y_TN, x_TSN, post_TS, mix_TSS)


def _checked(architecture: Architecture) -> DeepseekV4Shape:
    """Check that the model can run, and return the sizes that only this family has."""
    if architecture.deepseek_v4 is None or any(layer.window is None for layer in architecture.layers):
        raise ModelError("A deepseek_v4 model has a window in every layer; config.json gives some without one.")
    if any(layer.sinks or layer.chunk is not None for layer in architecture.layers):
        raise ConfigError("--sinks and --chunk were given; deepseek_v4 layers have windows only. Leave them out.")
    return architecture.deepseek_v4


def _rotary(rope: Rope, load: Loader) -> RotaryEmbedding:
    """Make the rotary embedding of a RoPE; pairs stay interleaved."""
    frequency = frequencies(rope, load.device)
    return RotaryEmbedding(frequency, dtype=load.dtype, scale=rope.attention_factor, interleaved=True)


def _entry_rope(architecture: Architecture) -> Rope | None:
    """Return the RoPE of compressed entries: that of the layers with entries. None if no layer has entries."""
    pairs = zip(architecture.layers, architecture.ropes, strict=True)
    return next((rope for layer, rope in pairs if layer.compression is not None), None)


def _either_name(weights: Weights) -> Weights:
    """Return the weights under transformers' names, whichever of the two namings the checkpoint has."""
    saved = any(name.startswith("model.") for name in weights.names)
    return weights if saved else RenamedWeights(weights, published_name)


def published_name(name: str) -> str:
    """Return the published name of a tensor that transformers saves as `name`."""
    for saved, published in _PUBLISHED:
        name = name.replace(saved, published, 1)
    return name

"""Builds and runs DeepSeek V4's decoder.

- Attention reads a window of latent rows, and in most layers also compressed entries (`v4_attention.py`, `compressor.py`).
- The residual consists of several streams; coefficients, which hyper-connections project from the streams in float32, say
  how a sublayer reads and writes each stream (`transom_kernels.hyper_connections.op` has the formulas).
- All layers are MoE; the first ones route by token id (`v4_experts.py`).

Sources: DeepSeek's model card and paper of V4, transformers' `DeepseekV4ForCausalLM`.

Legend: T tokens, R rows whose logits are requested, S residual streams, N hidden width, M coefficients, V this rank's part of the
vocabulary.
"""

from dataclasses import replace

import torch

from transom_core.errors import ConfigError, ModelError
from transom_core.model_config.architecture import Architecture
from transom_core.model_config.deepseek_v4 import DeepseekV4Shape
from transom_core.model_config.rope import Rope
from transom_kernels.hyper_connections import hc_head, hc_norm, hc_post, hc_pre
from transom_worker.models.deepseek_v4.attention_metadata import AttentionMetadata
from transom_worker.models.deepseek_v4.v4_attention import LatentAttention
from transom_worker.models.deepseek_v4.v4_experts import ExpertLayer
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.models.layers.linear import make_linear
from transom_worker.models.layers.rotary_embedding import RotaryEmbedding, RotaryTables, frequencies
from transom_worker.models.loading import Loader
from transom_worker.models.model import Model
from transom_worker.models.weights.checkpoint import Weights, WeightsView


class _Coefficients:
    """Projects normalised streams to coefficients of `sizes`; each kind of coefficient has its own scale."""

    def __init__(
        self, load: Loader, name: str, architecture: Architecture, shape: DeepseekV4Shape, sizes: tuple[int, ...]
    ) -> None:
        """`name` is the prefix of the tensors' names."""

        def tensor(part: str, *shape: int) -> torch.Tensor:
            return load.tensor(f"{name}_{part}", torch.float32, shape=shape)

        self._eps, self._norm_eps = shape.hyper_connection_eps, architecture.rms_norm_eps
        self._projection = make_linear(tensor("fn", sum(sizes), shape.num_residual_streams * architecture.hidden_size))
        self._base = tensor("base", sum(sizes))
        scales = zip(tensor("scale", len(sizes)), sizes, strict=True)
        self._scale = torch.cat([scale.expand(size) for scale, size in scales])
        self.weight_bytes = self._projection.weight_bytes + self._base.nbytes + self._scale.nbytes

    def _project(self, x_TSN: torch.Tensor) -> torch.Tensor:
        """Return the projected coefficients [T, M], before scale and base."""
        return self._projection(hc_norm(x_TSN, self._norm_eps))


class HyperConnection(_Coefficients):
    """The hyper-connection of one sublayer: makes its input from the streams, and puts its output back into them."""

    def __init__(self, load: Loader, name: str, architecture: Architecture, shape: DeepseekV4Shape) -> None:
        size = shape.num_residual_streams
        # Weights to read each stream, weights to write each stream, and the matrix that mixes the streams.
        super().__init__(load, name, architecture, shape, (size, size, size * size))
        # Normalisations of the matrix by columns and rows (Sinkhorn's iteration), after which both sum to nearly 1.
        self._rounds = shape.sinkhorn_rounds

    def before_sublayer(self, x_TSN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the sublayer's input [T, N], the output's weights `post` [T, S] and the streams' mixing matrix [T, S from, S to]
        (`hc_pre`)."""
        return hc_pre(x_TSN, self._project(x_TSN), self._scale, self._base, rounds=self._rounds, eps=self._eps)

    def after_sublayer(
        self, y_TN: torch.Tensor, x_TSN: torch.Tensor, post_TS: torch.Tensor, mix_TSS: torch.Tensor
    ) -> torch.Tensor:
        """Return the residual streams [T, S, N] after the sublayer with output `y` [T, N] (`hc_post`)."""
        return hc_post(y_TN, x_TSN, post_TS, mix_TSS)


class HyperConnectionHead(_Coefficients):
    """Sums the residual streams into one, before the final norm (`hc_head`)."""

    def __init__(self, load: Loader, name: str, architecture: Architecture, shape: DeepseekV4Shape) -> None:
        super().__init__(load, name, architecture, shape, (shape.num_residual_streams,))

    def __call__(self, x_TSN: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum [T, N] of the streams [T, S, N]."""
        return hc_head(x_TSN, self._project(x_TSN), self._scale, self._base, eps=self._eps)


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
    return weights if saved else WeightsView(weights, published_name)


def published_name(name: str) -> str:
    """Return the published name of a tensor that transformers saves as `name`."""
    for saved, published in _PUBLISHED:
        name = name.replace(saved, published, 1)
    return name

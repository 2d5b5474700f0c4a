"""Divides a model's layers into KV cache groups: parts of layers that keep the same tokens for the same time share a group.

Example: gpt-oss alternates layers with a window of 128 tokens and layers with full attention, so it has two groups, `full` and
`window_128`. A layer of DeepSeek V4 has parts in several groups: recent rows, compressed entries and compressor state.
"""

from __future__ import annotations

from typing import NamedTuple

from transom_worker.errors import ConfigError
from transom_worker.kvcache.groups import GroupKind, GroupSpec
from transom_worker.kvcache.layout import Role
from transom_worker.model_config.architecture import Architecture
from transom_worker.model_config.layer_attention import LayerAttention


class Rule(NamedTuple):
    """Which tokens are kept (`kvcache.groups`); the sizes that a kind has no use for are 0."""

    kind: GroupKind
    window: int = 0
    sinks: int = 0
    chunk: int = 0
    ratio: int = 0
    overlap: int = 0

    @property
    def name(self) -> str:
        """The group's name in reports and metrics, such as window_128."""
        sizes = {"sinks": self.sinks, "window": self.window, "chunk": self.chunk}
        words = [f"{word}_{size}" for word, size in sizes.items() if size]
        return "_".join(words) or (f"{self.kind}_{self.ratio}" if self.ratio else str(self.kind))


def layer_rules(layer: LayerAttention, *, hybrid: bool) -> dict[Role, Rule]:
    """Return the parts of a layer's cache and the rule of each; none if the layer reads another layer's cache.

    `hybrid=False` keeps every token where a window, chunk or compressor state would slide.
    """
    if layer.reads_cache_of is not None:
        return {}
    everything = Rule(GroupKind.LATENT if layer.latent else GroupKind.FULL)
    rules = {Role.KV: _kv_rule(layer, everything) if hybrid else everything}
    compression = layer.compression
    if compression is None:
        return rules
    ratio = compression.ratio
    state = Rule(GroupKind.COMPRESSOR_STATE, ratio=ratio, overlap=compression.overlap) if hybrid else everything
    rules |= {Role.COMPRESSED: Rule(GroupKind.COMPRESSED, ratio=ratio), Role.STATE: state}
    if compression.index_size:
        rules |= {Role.INDEXER: Rule(GroupKind.INDEXER, ratio=ratio), Role.INDEXER_STATE: state}
    return rules


def make_groups(architecture: Architecture, *, block_size: int, hybrid: bool) -> tuple[GroupSpec, ...]:
    """Return the groups: those that keep every token first, then sliding ones, each in the order of their first layer.

    A block has `block_size` tokens (a hash block); in groups of compressed entries at least one entry.

    Raises:
        ConfigError: neither of the block size and the compression ratio divides the other.
    """
    members: dict[Rule, list[int]] = {}
    for index, layer in enumerate(architecture.layers):
        for rule in dict.fromkeys(layer_rules(layer, hybrid=hybrid).values()):
            members.setdefault(rule, []).append(index)
    groups = [_group(rule, tuple(layers), block_size) for rule, layers in members.items()]
    return tuple(sorted(groups, key=lambda group: (not group.keeps_everything, group.layers[0])))


def _kv_rule(layer: LayerAttention, everything: Rule) -> Rule:
    if layer.window is not None:
        kind = GroupKind.SINKS_WINDOW if layer.sinks else GroupKind.WINDOW
        return Rule(kind, window=layer.window, sinks=layer.sinks)
    return everything if layer.chunk is None else Rule(GroupKind.CHUNK, chunk=layer.chunk)


def _group(rule: Rule, layers: tuple[int, ...], hash_block_size: int) -> GroupSpec:
    by_entry = rule.kind in (GroupKind.COMPRESSED, GroupKind.INDEXER)
    block_size = max(hash_block_size, rule.ratio) if by_entry else hash_block_size
    if by_entry and (block_size % hash_block_size or block_size % rule.ratio):
        raise ConfigError(
            f"--block-size is {hash_block_size}, and layers compress {rule.ratio} tokens to an entry; give a block size that "
            f"divides {rule.ratio} or is a multiple of it."
        )
    return GroupSpec(name=rule.name, layers=layers, block_size=block_size, **rule._asdict())

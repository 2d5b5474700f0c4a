"""Divides the KV caches of a model's layers into groups: parts of layers that keep the same tokens for the same time share a group.

Example: gpt-oss alternates layers with a window of 128 tokens and layers with full attention, so it has two groups, `full` and
`window_128`. A layer of DeepSeek V4 has parts in several groups: recent rows, compressed entries and compressor state.

`group_formats` resolves `--kv-cache-dtype`: the number format of each group, or why a group cannot have the format given. Layers
with latent attention keep other tensors than keys and values (`planner.blocks` defines them):

- Latent rows, compressed entries and indexer keys can be planned in 16 or 32 bits, or in fp8, as such models are published. The
  engine runs them in the model's own format only.
- Compressor states and recurrent states are always float32, and rows of convolutions have the model's format.
"""

from collections.abc import Sequence
from typing import NamedTuple

from transom_core.errors import ConfigError
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.layout import GroupLayout, Role
from transom_core.model_config.architecture import Architecture
from transom_core.model_config.layer_attention import LayerAttention
from transom_core.settings.kv_dtypes import AUTO, QUANTISED, KvDtypes


class Rule(NamedTuple):
    """Which tokens a part of a layer's cache keeps (`transom_core.kv_cache.groups`). Sizes that the kind does not use are 0.

    Parts with equal rules share a group.
    """

    kind: GroupKind
    window: int = 0  # tokens that a query reads, itself included
    sinks: int = 0  # first tokens that are always kept
    chunk: int = 0  # tokens of a chunk of local attention
    ratio: int = 0  # tokens per compressed entry
    overlap: int = 0  # how many preceding runs of `ratio` tokens an entry is made of besides its own

    @property
    def name(self) -> str:
        """Return the group's name in reports and metrics, such as window_128."""
        if self.kind is GroupKind.STATE:
            return str(self.kind)
        window = "convolution" if self.kind is GroupKind.CONVOLUTION else "window"
        sizes = {"sinks": self.sinks, window: self.window, "chunk": self.chunk}
        words = [f"{word}_{size}" for word, size in sizes.items() if size]
        return "_".join(words) or (f"{self.kind}_{self.ratio}" if self.ratio else str(self.kind))


def layer_rules(layer: LayerAttention, *, hybrid: bool) -> dict[Role, Rule]:
    """Return role -> rule for the parts of a layer's cache; empty if the layer reads another layer's cache.

    `hybrid=False` keeps every token, even if the window, chunk or compressor state no longer needs it. Rows of a convolution always
    slide, since they are no keys and values that could share a full group's format, and of recurrent layers there is only a state.
    """
    if layer.reads_cache_of is not None:
        return {}
    if layer.recurrent is not None:
        return dict.fromkeys(
            (Role.RECURRENT, Role.CONVOLVED_KEYS, Role.CONVOLVED_VALUES), Rule(GroupKind.STATE, window=2)
        )
    if layer.convolution is not None:
        return {Role.KV: Rule(GroupKind.CONVOLUTION, window=layer.convolution)}
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
    """Return the groups: first those that keep every token, then the others (*sliding groups*); both are ordered by first layer.

    A block has `block_size` tokens. In groups of compressed entries it has more, if one entry stands for more tokens.

    Raises:
        ConfigError: neither does the block size divide the compression ratio nor the ratio the block size.
    """
    members: dict[Rule, list[int]] = {}
    for index, layer in enumerate(architecture.layers):
        for rule in dict.fromkeys(layer_rules(layer, hybrid=hybrid).values()):
            members.setdefault(rule, []).append(index)
    groups = [_group(rule, tuple(layers), block_size) for rule, layers in members.items()]
    return tuple(sorted(groups, key=lambda group: (not group.keeps_everything, group.layers[0])))


def _kv_rule(layer: LayerAttention, everything: Rule) -> Rule:
    """Return the rule of a layer's keys and values, which is `everything` if the layer has neither window nor chunk."""
    if layer.window is not None:
        kind = GroupKind.SINKS_WINDOW if layer.sinks else GroupKind.WINDOW
        return Rule(kind, window=layer.window, sinks=layer.sinks)
    return everything if layer.chunk is None else Rule(GroupKind.CHUNK, chunk=layer.chunk)


def _group(rule: Rule, layers: tuple[int, ...], hash_block_size: int) -> GroupSpec:
    """Return the group of these layers; `hash_block_size` is `--block-size`, the number of tokens that are hashed together."""
    by_entry = rule.kind in (GroupKind.COMPRESSED, GroupKind.INDEXER)
    block_size = max(hash_block_size, rule.ratio) if by_entry else hash_block_size
    if by_entry and (block_size % hash_block_size or block_size % rule.ratio):
        raise ConfigError(
            f"--block-size is {hash_block_size}, and layers compress {rule.ratio} tokens to an entry; give a block size that "
            f"divides {rule.ratio} or is a multiple of it."
        )
    return GroupSpec(name=rule.name, layers=layers, block_size=block_size, **rule._asdict())


STATE_FORMAT = "float32"
_FIXED_FORMATS = (
    GroupKind.COMPRESSOR_STATE,
    GroupKind.CONVOLUTION,
    GroupKind.STATE,
)  # `--kv-cache-dtype` does not change them


def group_formats(
    architecture: Architecture, groups: Sequence[GroupSpec], kv_cache_dtype: str, dtype: str
) -> list[str]:
    """Return each group's number format, in the order of `groups`; `auto` means the model's `dtype`.

    Raises:
        ConfigError: the setting has an unknown format, names a group that the model does not have, or gives a group a format that
            it cannot have.
    """
    asked = KvDtypes.parse(kv_cache_dtype)
    asked.check_groups((spec.name, str(spec.kind)) for spec in groups)
    return [_group_format(architecture, spec, asked, dtype) for spec in groups]


def cache_format(groups: Sequence[GroupLayout]) -> str:
    """Return the one number format of all groups, or each group's in the setting's syntax: full=int8,window_128=bfloat16."""
    formats = {group.spec.name: group.format for group in groups if group.spec.kind not in _FIXED_FORMATS}
    found = set(formats.values())
    return found.pop() if len(found) == 1 else ",".join(f"{name}={value}" for name, value in formats.items())


def _group_format(architecture: Architecture, spec: GroupSpec, asked: KvDtypes, dtype: str) -> str:
    name, kind = spec.name, str(spec.kind)
    found = asked.of(name, kind)
    if spec.kind in _FIXED_FORMATS:
        fixed = STATE_FORMAT if spec.kind is GroupKind.COMPRESSOR_STATE else dtype
        if asked.names(name, kind) and found not in (AUTO, fixed):
            raise ConfigError(
                f"--kv-cache-dtype asks for {found} in KV group {name}, which sums up in {fixed}; leave it out."
            )
        return fixed
    layers = [architecture.layers[index] for index in spec.layers]
    if found in ("int8", "int4") and any(layer.latent for layer in layers):
        raise ConfigError(
            f"--kv-cache-dtype asks for {found} in KV group {name}, whose rows are keys and values of all heads at once (latent "
            "attention); such rows can be auto, bfloat16, float16 or float32, and in plans fp8."
        )
    if found == "int4":
        odd = [layer for layer in layers if layer.head_size % 2 or (layer.value_size or 0) % 2]
        if odd:
            raise ConfigError(
                f"--kv-cache-dtype asks for int4 in KV group {name}, which keeps two values in a byte, and heads of this model "
                f"have {odd[0].head_size} elements (values {odd[0].value_size or odd[0].head_size}); give int8."
            )
    return dtype if found == AUTO else found


def check_runs(groups: Sequence[GroupLayout], dtype: str) -> None:
    """Check that the attention operators can read each group's number format with queries in the model's `dtype`.

    Raises:
        ConfigError: a group is neither quantised nor in the model's format, or has latent rows that are not in the model's format.
    """
    for group in groups:
        tensors = next(iter(group.layers))
        if group.format == dtype or group.spec.kind in (GroupKind.COMPRESSOR_STATE, GroupKind.STATE):
            continue
        asked = f"--kv-cache-dtype asks for {group.format} in KV group {group.spec.name}"
        if tensors.k_offset == tensors.v_offset or group.spec.kind is GroupKind.LATENT:
            raise ConfigError(
                f"{asked}, whose rows are keys and values of all heads at once (latent attention); such groups run in the model's "
                f"format, {dtype}, alone: give auto."
            )
        if group.format not in QUANTISED:
            raise ConfigError(
                f"{asked}, and the model runs in {dtype}; give auto, {', '.join(QUANTISED)}, or --dtype {group.format}."
            )

"""Resolves `--kv-cache-dtype` for a model: the number format of each KV cache group, or why a group cannot have the format given.

Layers with latent attention keep other tensors than keys and values (`planner.blocks` defines them):

- Latent rows, compressed entries and indexer keys can be planned in 16 or 32 bits, or in fp8, as such models are published. The
  engine runs them in the model's own format only.
- Compressor states are always float32.
"""

from __future__ import annotations

from collections.abc import Sequence

from transom_core.errors import ConfigError
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.layout import GroupLayout
from transom_core.model_config.architecture import Architecture
from transom_core.settings.kv_dtypes import AUTO, QUANTISED, KvDtypes

STATE_FORMAT = "float32"


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
    formats = {group.spec.name: group.format for group in groups if group.spec.kind is not GroupKind.COMPRESSOR_STATE}
    found = set(formats.values())
    return found.pop() if len(found) == 1 else ",".join(f"{name}={value}" for name, value in formats.items())


def _group_format(architecture: Architecture, spec: GroupSpec, asked: KvDtypes, dtype: str) -> str:
    name, kind = spec.name, str(spec.kind)
    found = asked.of(name, kind)
    if spec.kind is GroupKind.COMPRESSOR_STATE:
        if asked.names(name, kind) and found not in (AUTO, STATE_FORMAT):
            raise ConfigError(
                f"--kv-cache-dtype asks for {found} in KV group {name}, which sums up in float32; leave it out."
            )
        return STATE_FORMAT
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
        if group.format == dtype or group.spec.kind is GroupKind.COMPRESSOR_STATE:
            continue
        asked = f"--kv-cache-dtype asks for {group.format} in KV group {group.spec.name}"
        if tensors.k_offset == tensors.v_offset:
            raise ConfigError(
                f"{asked}, whose rows are keys and values of all heads at once (latent attention); such groups run in the model's "
                f"format, {dtype}, alone: give auto."
            )
        if group.format not in QUANTISED:
            raise ConfigError(
                f"{asked}, and the model runs in {dtype}; give auto, {', '.join(QUANTISED)}, or --dtype {group.format}."
            )

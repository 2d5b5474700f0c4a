"""`KvDtypes`: the number formats of the KV cache that `--kv-cache-dtype` asks for, one for all KV cache groups or one for each.

Examples of the setting:

    auto                         the model's own number format
    int8                         every group in int8
    window=bfloat16,full=int8    by a group's kind, or by its name (window_128=bfloat16); groups that are not named stay auto
    int4,window=bfloat16         int4 for all groups that are not named

An entry for a group's name overrides one for its kind. fp8, int8 and int4 are *quantised*: for each KV head a token has a float32
scale for its key and one for its value, which are computed when the token is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from transom_core.errors import ConfigError

AUTO = "auto"
QUANTISED = ("fp8", "int8", "int4")
FORMATS = ("bfloat16", "float16", "float32", *QUANTISED)
ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp8_e4m3": "fp8",
    "fp8_ds_mla": "fp8",
    "fp8_per_token_head": "fp8",
    "int8_per_token_head": "int8",
    "int4_per_token_head": "int4",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvDtypes:
    """The number format of each KV cache group: `by_group` maps kinds and names to formats, `default` is for all other groups."""

    default: str = AUTO
    by_group: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> KvDtypes:
        """Read the setting.

        Raises:
            ConfigError: a format is unknown, or a group or the default is given twice.
        """
        defaults: list[str] = []
        by_group: dict[str, str] = {}
        for entry in text.split(","):
            group, equals, name = (part.strip() for part in entry.partition("="))
            if not equals:
                defaults.append(_format(group, text))
            elif not group or group in by_group:
                raise ConfigError(f"--kv-cache-dtype {text} names {group!r} twice or not at all; give each group once.")
            else:
                by_group[group] = _format(name, text)
        if len(defaults) > 1:
            raise ConfigError(
                f"--kv-cache-dtype {text} has several formats without a group; give one for all groups, or GROUP=FORMAT for each."
            )
        return cls(default=defaults[0] if defaults else AUTO, by_group=by_group)

    def of(self, name: str, kind: str) -> str:
        """Return the format of the group with this name and kind, or `auto`."""
        return self.by_group.get(name, self.by_group.get(kind, self.default))

    def names(self, name: str, kind: str) -> bool:
        """Return whether the setting names this group, or its kind."""
        return name in self.by_group or kind in self.by_group

    def check_groups(self, groups: Iterable[tuple[str, str]]) -> None:
        """Check that every group that the setting names is one of `groups`, which are pairs (name, kind).

        Raises:
            ConfigError: the model has no such group; the message lists the groups that it has.
        """
        found = list(groups)
        known = {word for pair in found for word in pair}
        unknown = [group for group in self.by_group if group not in known]
        if unknown:
            listed = ", ".join(name if name == kind else f"{name} (kind {kind})" for name, kind in found)
            raise ConfigError(
                f"--kv-cache-dtype names {', '.join(unknown)}, and the KV groups of this model are {listed}; name these or their "
                "kinds."
            )


def as_text(value: str | Mapping[str, str]) -> str:
    """Return the setting as text; Python and YAML may give a mapping of groups to formats instead."""
    return value if isinstance(value, str) else ",".join(f"{group}={name}" for group, name in value.items())


def _format(name: str, text: str) -> str:
    known = ALIASES.get(name, name)
    if known != AUTO and known not in FORMATS:
        raise ConfigError(
            f"--kv-cache-dtype is {text!r}, and {name!r} is no format; give auto, {', '.join(FORMATS)}, or one for each KV group, "
            "such as window=bfloat16,full=int8."
        )
    return known

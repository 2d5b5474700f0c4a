"""The request field `kv_policy`: which keys and values the model's full-attention layers keep for this request.

The field's `type` selects one of the forms below. A form accepts only its own fields.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from transom_cluster.openai.request.body import WireModel
from transom_core.contract import AdaptivePolicy, HeavyPolicy, KvPolicy, WindowPolicy
from transom_core.contract.kv_policy import DEFAULT_SINKS

Sinks = Annotated[int, Meta(ge=0, description="First tokens, which are always kept.")]
Tokens = Annotated[int, Meta(ge=1)]


class FullField(WireModel, frozen=True, kw_only=True, tag_field="type", tag="full"):
    """Keeps everything, as if there were no policy. With this form a request opts out of the server's default policy."""


class WindowField(WireModel, frozen=True, kw_only=True, tag_field="type", tag="window"):
    """Keeps the first `sinks` tokens and the last `window` ones."""

    sinks: Sinks = DEFAULT_SINKS
    window: Tokens


class AdaptiveField(WireModel, frozen=True, kw_only=True, tag_field="type", tag="adaptive"):
    """Keeps a window that grows while its far edge gets at least the share `threshold` of the attention, and shrinks otherwise."""

    sinks: Sinks = DEFAULT_SINKS
    min_window: Tokens
    max_window: Tokens
    threshold: Annotated[float, Meta(gt=0, lt=1)]


class HeavyField(WireModel, frozen=True, kw_only=True, tag_field="type", tag="heavy"):
    """Keeps `budget` tokens: the first ones, the last ones, and the blocks that have got the most attention."""

    sinks: Sinks = DEFAULT_SINKS
    budget: Tokens


KvPolicyField = FullField | WindowField | AdaptiveField | HeavyField
_POLICIES: dict[type[WireModel], type[WindowPolicy | AdaptivePolicy | HeavyPolicy]] = {
    # form of the field -> policy with the same fields
    WindowField: WindowPolicy,
    AdaptiveField: AdaptivePolicy,
    HeavyField: HeavyPolicy,
}


def kv_policy_of(field: KvPolicyField | None, default: KvPolicy | None) -> KvPolicy | None:
    """Return the policy of a request with this field, on a server with this default; None means that everything is kept.

    Raises:
        RequestError: the values contradict each other; `param` names the field.
    """
    if field is None:
        return default
    return None if isinstance(field, FullField) else _POLICIES[type(field)](**msgspec.structs.asdict(field))

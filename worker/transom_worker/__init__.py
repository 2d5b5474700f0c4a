"""One worker of Transom: settings, model files, KV cache, scheduler, execution and engine.

`LLM`, `LoRARequest` and `SamplingParams` are the public names, for offline use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transom_core.contract import SamplingParams
    from transom_worker.llm import LLM, LoRARequest

__all__ = ["LLM", "LoRARequest", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import the public names at their first use, so that a router can import submodules without torch."""
    if name == "SamplingParams":
        from transom_core.contract import SamplingParams

        return SamplingParams
    if name in __all__:
        from transom_worker import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

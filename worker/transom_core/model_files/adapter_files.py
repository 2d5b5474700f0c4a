"""Finds a LoRA adapter in PEFT's format, and refuses those that would be computed wrongly. Imports no torch.

An adapter is a folder, or a Hugging Face id, with two files: `adapter_config.json` (PEFT's `LoraConfig`) and
`adapter_model.safetensors`. It changes a projection from `W x` to `W x + scale * B (A x)`; `LoraConfig` gives `scale` as
`lora_alpha / r`, with rsLoRA as `lora_alpha / sqrt(r)`. `rank_pattern` and `alpha_pattern` give single modules their own `r` and
`lora_alpha`: a key is a regular expression for the end of a module's name.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from transom_core.errors import ModelError, RequestError
from transom_core.model_files.hub import download
from transom_core.model_files.resolve import is_hub_id
from transom_core.model_files.text_files import read_json

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

# Options of `LoraConfig` that change what an adapter computes, or weights besides A and B; each must be absent, false or empty.
_UNSUPPORTED = (
    *("use_dora", "use_qalora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters"),
    *("layer_replication", "alora_invocation_tokens", "arrow_config", "use_bdlora"),
)
# Initialisations that subtract B A from the base model's weights, so that the adapter fits only those changed weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """A resolved adapter: its folder here, the name by which other hosts find the same files, and its config."""

    folder: Path
    name: str
    config: dict[str, Any]

    @property
    def weights(self) -> Path:
        """Return the path of the adapter's weights."""
        return self.folder / WEIGHTS_FILE

    def identity(self) -> str:
        """Read both files, and return a digest of their bytes. Raises RequestError: they cannot be read."""
        digest = sha256()
        try:
            for path in (self.folder / CONFIG_FILE, self.weights):
                with path.open("rb") as file:
                    digest.update(file_digest(file, "sha256").digest())  # in pieces: files may have gigabytes
        except OSError as error:
            raise RequestError(f"lora_path: {path} cannot be read: {error.strerror}.", param="lora_path") from None
        return digest.hexdigest()

    def rank(self, module: str) -> int:
        """Return the rank of a module, which PEFT names, such as `model.layers.0.self_attn.q_proj`."""
        return int(_own(self.config.get("rank_pattern"), module, self.config["r"]))

    def scale(self, module: str) -> float:
        """Return the factor of B (A x) in a module."""
        alpha, rank = _own(self.config.get("alpha_pattern"), module, self.config["lora_alpha"]), self.rank(module)
        return float(alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank))


def resolve_adapter(path: str, *, max_rank: int) -> AdapterFiles:
    """Find an adapter, and read its config. A Hugging Face id is downloaded where it is not in the local cache.

    Raises:
        RequestError: there is no such adapter, or it is of a kind or rank that is not supported; `param` is "lora_path".
    """
    try:
        folder = Path(path).expanduser().absolute()
        name = str(folder)
        if not folder.exists() and is_hub_id(path):
            folder = download(path, [CONFIG_FILE, WEIGHTS_FILE])
            name = f"{path.partition('@')[0]}@{folder.name}"
        config = read_json(folder / CONFIG_FILE)
        if problem := _problem(config, max_rank):
            raise ModelError(f"{path} {problem}")
        if not (folder / WEIGHTS_FILE).is_file():
            raise ModelError(f"{path} has no {WEIGHTS_FILE}; pickled weights (.bin) are never loaded, convert them.")
        return AdapterFiles(folder=folder, name=name, config=config)
    except ModelError as error:
        raise RequestError(f"lora_path: {error}", param="lora_path") from None


def _problem(config: Mapping[str, Any], max_rank: int) -> str:
    """Return why an adapter with this config is refused; empty if it is not."""
    kind, rank, alpha = config.get("peft_type"), config.get("r"), config.get("lora_alpha")
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    if kind != "LORA":
        return f"has peft_type {str(kind)[:40]!r}; only LORA is supported."
    if config.get("bias", "none") != "none":
        return f"has bias {str(config['bias'])[:40]!r}; only adapters with bias none are supported."
    for option in _UNSUPPORTED:
        if config.get(option):
            return f"uses {option}, which is not supported; train the adapter without it."
    if str(config.get("init_lora_weights")).startswith(_CHANGES_BASE):
        return (
            f"has init_lora_weights {config['init_lora_weights']!r}, which changes the base model's weights; save it with PEFT's "
            "path_initial_model_for_weight_conversion."
        )
    if not (isinstance(ranks, dict) and isinstance(alphas, dict) and all(map(_is_pattern, (*ranks, *alphas)))):
        return "has a rank_pattern or alpha_pattern that is no object of regular expressions; save the adapter again."
    if any(type(one) is not int or one < 1 for one in (rank, *ranks.values())):
        return "has a rank r that is not a whole number above 0; save the adapter again."
    if any(type(one) not in (int, float) for one in (alpha, *alphas.values())):
        return "has a lora_alpha that is not a number; save the adapter again."
    if (largest := max(rank, *ranks.values(), 0)) > max_rank:
        return f"has rank {largest}, and --max-lora-rank is {max_rank}; start the server with a larger one."
    return ""


def _is_pattern(key: str) -> bool:
    try:
        re.compile(key)
    except re.error:
        return False
    return True


def _own(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Return a module's own value by PEFT's rule: that of the first key that matches the end of its name, from a dot on."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default

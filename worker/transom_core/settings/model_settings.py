"""Settings of the model: its files and number formats, and the windows and chunks that turn any model into a hybrid-attention
model."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, Field

from transom_core.config import Device, Dtype
from transom_core.errors import ConfigError


class ModelSettings(BaseModel):
    """The model, its device and its number format."""

    model: str = Field(
        description="Folder of safetensors, a .gguf file, a Hugging Face id (org/name or org/name@revision), or smollm2 (the demo)."
    )
    served_model_name: str | None = Field(None, description="The model's name in the API; the value of MODEL if unset.")
    dtype: Dtype = Field(
        "auto",
        description="Number format of weights and activations; auto: float32 for a float32 checkpoint, else bfloat16.",
    )
    device: Device = Field("auto", description="auto takes CUDA where torch finds a GPU, else the CPU.")
    quantization: Literal["none", "int8", "int4", "gguf"] = Field(
        "none",
        description="On CPUs. int8, int4: the weights of linear layers have 8 or 4 bits, with a scale for every 32 columns; "
        "gguf: tensors that a GGUF file has in Q8_0, Q4_0 or Q4_1 stay so.",
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Longest prompt and output together, in tokens; the model's own limit if unset, or less where the "
        "KV pool is smaller.",
    )
    seed: int | None = Field(None, description="Makes requests without a seed of their own repeatable.")
    enforce_eager: bool = Field(False, description="On CUDA: launch every kernel, without CUDA graphs.")


class HybridSettings(BaseModel):
    """Windows and chunks for layers of a model that was trained without them."""

    window: int | None = Field(
        None,
        ge=1,
        description="Turns layers into sliding-window layers of this many tokens, the query included.",
    )
    sinks: int = Field(
        0, ge=0, description="Sink tokens: the first tokens of a sequence, which layers with a window keep as well."
    )
    chunk: int | None = Field(
        None,
        ge=1,
        description="Turns layers into chunked-attention layers, whose queries see the tokens since the last multiple "
        "of this many.",
    )
    window_pattern: str = Field(
        "S",
        description="Repeated over the layers: S sliding window (needs --window), C chunked attention (needs --chunk), "
        "F full attention.",
    )

    def check_pattern(self) -> None:
        """Raise ConfigError if pattern, window, sinks and chunk do not fit together."""
        pattern = self.window_pattern
        if not re.fullmatch(r"[SCF]+", pattern):
            raise ConfigError(
                f"--window-pattern is {pattern!r}; use letters S (window), C (chunked) and F (full), such as SSF."
            )
        if (self.chunk is None) != ("C" not in pattern):
            raise ConfigError(
                f"--chunk is {self.chunk} and --window-pattern {pattern!r}; layers with the letter C take --chunk: give both, "
                "such as --chunk 8192 --window-pattern CCCF, or neither."
            )
        needs_window = self.sinks or ("S" in pattern if self.chunk else pattern != "S")
        if self.window is None and needs_window:
            raise ConfigError("--sinks and --window-pattern need --window; give a window in tokens.")

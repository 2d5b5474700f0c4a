"""Settings of LoRA adapters: whether workers take any, and the memory that they keep for them."""

from collections.abc import Iterable, Mapping

from pydantic import BaseModel, Field

from transom_core.errors import ConfigError

RANKS = (8, 16, 32, 64, 128, 256)


class LoraSettings(BaseModel):
    """LoRA adapters (docs/lora.md)."""

    enable_lora: bool = Field(
        False, description="Serve LoRA adapters in PEFT's format; a request chooses one by its name as `model`."
    )
    max_loras: int = Field(
        4, ge=1, le=64, description="Slots: how many different adapters a worker's requests can use at once."
    )
    max_lora_rank: int = Field(
        16,
        description="Largest rank of an adapter: 8, 16, 32, 64, 128 or 256. Each slot takes the memory of this rank.",
    )
    lora_modules: tuple[tuple[str, str], ...] = Field(
        (), description="NAME=PATH of an adapter that is there from the start: a folder, or a Hugging Face id."
    )

    def check_lora(self, model_names: Iterable[str]) -> None:
        """Raise ConfigError if the settings of adapters are wrong, or an adapter has one of the model's names."""
        if self.max_lora_rank not in RANKS:
            raise ConfigError(f"--max-lora-rank is {self.max_lora_rank}; give one of {', '.join(map(str, RANKS))}.")
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("--lora-modules needs --enable-lora.")
        taken = set(model_names)
        for name, _ in self.lora_modules:
            if name in taken:
                raise ConfigError(
                    f"--lora-modules has the name {name!r}, which the model or another adapter has; give each its own."
                )
            taken.add(name)


def read_lora_modules(given: str | Mapping[str, str] | Iterable[object]) -> tuple[object, ...]:
    """Return the names and paths of adapters that are given as NAME=PATH, as a mapping from names to paths, or in pairs.

    Raises:
        ConfigError: a text is not NAME=PATH.
    """
    if isinstance(given, Mapping):
        return tuple(given.items())
    read: list[object] = []
    for one in (given,) if isinstance(given, str) else given:
        if isinstance(one, str):
            name, _, path = (part.strip() for part in one.partition("="))
            if not (name and path):
                raise ConfigError(f"--lora-modules is {one!r}; give a name and a path, such as sql=/models/sql-lora.")
            read.append((name, path))
        else:
            read.append(one)
    return tuple(read)

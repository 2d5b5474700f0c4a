"""A LoRA adapter, as routers and workers name it to each other."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One version of a LoRA adapter.

    `name` is its name in the API. `path` is a folder on each worker's host, or a Hugging Face id with its commit. `identity` is a
    digest of the adapter's files: adapters with equal content share cached prefixes and a slot, whatever their names are.
    """

    name: str
    path: str
    identity: str

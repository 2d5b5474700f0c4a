"""`AdapterRegistry`: the LoRA adapters that a router serves, by name, in agreement with the other routers.

- **change**: the last thing that happened to a name, with its time: an adapter was loaded, or unloaded (None). Of two changes of a
  name the later one counts. The adapters from the start (`--lora-modules`) count as changes at time 0, so any later change replaces
  them.
"""

from collections.abc import Mapping
from typing import NamedTuple

from transom_core.contract import Adapter

MAX_CHANGES = 1000  # names that a router remembers, unloaded ones included


class AdapterChange(NamedTuple):
    """The last change of a name: when it happened, in seconds since the epoch, and the adapter that the name has since."""

    time_s: float
    adapter: Adapter | None


class AdapterRegistry:
    """The adapters of one router; `changes` has the last change of each name."""

    def __init__(self) -> None:
        self.changes: dict[str, AdapterChange] = {}

    @property
    def names(self) -> list[str]:
        """Return the names of all adapters."""
        return [name for name, change in self.changes.items() if change.adapter is not None]

    def get(self, name: str | None) -> Adapter | None:
        """Return the adapter with this name; None if there is none."""
        change = None if name is None else self.changes.get(name)
        return None if change is None else change.adapter

    def merge(self, changes: Mapping[str, AdapterChange]) -> None:
        """Apply the changes that another router knows, where they are later than those known here. Where there are too many, the
        oldest unloaded names are forgotten."""
        for name, change in changes.items():
            if name not in self.changes or change.time_s > self.changes[name].time_s:
                self.changes[name] = change
        unloaded = sorted((change.time_s, name) for name, change in self.changes.items() if change.adapter is None)
        for _, name in unloaded[: max(0, len(self.changes) - MAX_CHANGES)]:
            del self.changes[name]

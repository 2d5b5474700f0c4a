"""A page of metrics: sums of samples by their labels."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


@dataclass(slots=True)
class Page:
    """Samples by name."""

    samples: dict[str, list[Sample]]

    @classmethod
    def read(cls, text: str) -> Page:
        """Read Prometheus' text format."""
        samples: dict[str, list[Sample]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(sample)
        return cls(samples)

    def sum(self, name: str, **labels: str) -> float:
        """Sum of the samples whose labels match."""
        return sum(one.value for one in self._matching(name, labels))

    def labels(self, name: str, label: str, **labels: str) -> set[str]:
        """All values of a label."""
        return {one.labels[label] for one in self._matching(name, labels) if label in one.labels}

    def _matching(self, name: str, labels: dict[str, str]) -> list[Sample]:
        found = self.samples.get(name, [])
        return [one for one in found if all(one.labels.get(key) == value for key, value in labels.items())]

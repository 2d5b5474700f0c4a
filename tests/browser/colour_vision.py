"""How different colours look with normal vision and without one kind of cone."""

from __future__ import annotations

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
VISIONS = {
    "normal": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
# Ottosson's OKLab: linear RGB to cones, and cone responses to lightness and two opponent axes.
TO_CONES = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
TO_LAB = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)


def contrast(first: str, second: str) -> float:
    """WCAG's contrast ratio of two #rrggbb."""
    darker, lighter = sorted((_luminance(first), _luminance(second)))
    return (lighter + 0.05) / (darker + 0.05)


def distance(first: str, second: str, vision: str) -> float:
    """The distance in OKLab of two #rrggbb as a person with that vision sees them; 0.02 is just noticed side by side."""
    a, b = (_lab([max(0.0, value) for value in _times(VISIONS[vision], _linear(colour))]) for colour in (first, second))
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5


def _linear(colour: str) -> list[float]:
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]


def _luminance(colour: str) -> float:
    red, green, blue = _linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _lab(linear: list[float]) -> list[float]:
    return _times(TO_LAB, [value ** (1 / 3) for value in _times(TO_CONES, linear)])


def _times(matrix: tuple[tuple[float, ...], ...], vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]

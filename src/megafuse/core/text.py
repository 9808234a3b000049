"""Numbers in prose."""

from __future__ import annotations


def quantity(value: float, unit: str) -> str:
    """``value`` in three digits with a decimal prefix: 1.68 GB, 12.3 us."""
    value = float(f"{value:.3g}")
    if value == 0:
        return f"0 {unit}"
    prefixes = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))
    scale, prefix = next((p for p in prefixes if abs(value) >= p[0]), (1e-9, "n"))
    return f"{value / scale:.3g} {prefix}{unit}"


def counted(number: int, what: str) -> str:
    """A number of things: 1 kernel, 2 kernels."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"

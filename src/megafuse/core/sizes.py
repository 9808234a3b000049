"""Sizes that are left open, so that one program serves many: integer polynomials in named sizes such as a batch's.

An open ``Size`` stands where an ``int`` may stand: shapes, strides, axis sizes, offsets. It adds, multiplies and
divides like one. A question about it (is it equal, smaller, divisible) has an answer only if the answer is the same for
all values that its ``Dim``s may take; otherwise ``OpenSize`` is raised, and whoever asked takes the way that is right
in both cases, or the sizes cannot be left open. So a plan made with open sizes is right for all of them, by proof and
not by trial. Where a size meets a float (a predicted time) its typical value counts; ``typical`` gives it on purpose.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

WIDE = 2**31 - 2**20  # elements from which offsets take 64 bits: the last tile reaches past the end
LEAST = 2  # sizes 0 and 1 have programs of their own: PyTorch broadcasts and squeezes them
Value = TypeVar("Value")


class OpenSize(Exception):
    """A question about an open size whose answer depends on the size; the text is the question."""


@dataclasses.dataclass(frozen=True)
class Dim:
    """An open size of ``LEAST`` or more. ``typical`` is the value for which plans are made good.

    ``wide``: values made of it may reach 2**31, so that indices take 64 bits.
    """

    name: str
    typical: int
    wide: bool = False

    @property
    def least(self) -> int:
        """The smallest value."""
        return LEAST

    def at(self, values: Mapping[str, int]) -> int:
        """The value among ``values``."""
        return values[self.name]

    def text(self, names: Mapping[str, str]) -> str:
        """Source text of the value."""
        return names.get(self.name, self.name)


@dataclasses.dataclass(frozen=True)
class Quotient:
    """``above // below``, rounded down, where the division leaves a rest. ``above`` grows with all sizes."""

    above: Size
    below: int

    @property
    def name(self) -> str:
        """A key to sort by."""
        return f"{self.above!r} // {self.below}"

    @property
    def least(self) -> int:
        """A bound from below, but ``LEAST`` at least: quotients count blocks, and what serves two serves one."""
        return max(LEAST, _signs(self.above)[0] // self.below)

    @property
    def typical(self) -> int:
        """The quotient at typical sizes."""
        return self.above.typical // self.below

    def at(self, values: Mapping[str, int]) -> int:
        """The value at given sizes."""
        return self.above.at(values) // self.below

    def text(self, names: Mapping[str, str]) -> str:
        """Source text of the quotient."""
        return f"({self.above.text(names)}) // {self.below}"


Atom = Dim | Quotient
Product = tuple[Atom, ...]  # sorted by name; () is 1
Terms = dict[Product, int]


class Size:
    """``sum(factor * product of atoms)``; made by arithmetic on others and by ``open_size``, never constant."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self._hash = hash(frozenset(terms.items()))

    # --- arithmetic ---------------------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Any:
        if isinstance(other, float):
            return self.typical + other
        out = dict(self.terms)
        for product, factor in _terms(other).items():
            out[product] = out.get(product, 0) + factor
        return _size(out)

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, float):
            return self.typical * other
        out: Terms = {}
        for p, f in self.terms.items():
            for q, g in _terms(other).items():
                product = tuple(sorted((*p, *q), key=lambda a: a.name))
                out[product] = out.get(product, 0) + f * g
        return _size(out)

    def __neg__(self) -> Any:
        return self * -1

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: Any) -> float:
        return self.typical / typical(other)

    def __rtruediv__(self, other: Any) -> float:
        return typical(other) / self.typical

    def __divmod__(self, other: Any) -> Any:
        return _divide(self, other)

    def __rdivmod__(self, other: Any) -> Any:
        return _divide(other, self)

    def __mod__(self, other: Any) -> Any:
        return _divide(self, other)[1]

    def __rmod__(self, other: Any) -> Any:
        return _divide(other, self)[1]

    def __floordiv__(self, other: Any) -> Any:
        try:
            return _divide(self, other)[0]
        except OpenSize:
            const, rises, _ = _signs(self)
            if not isinstance(other, int) or other <= 0 or const < 0 or not rises:
                raise
            return _size({(Quotient(self, other),): 1})

    def __rfloordiv__(self, other: Any) -> Any:
        return _divide(other, self)[0]

    def __abs__(self) -> Any:
        return self if self >= 0 else -self

    # --- questions ----------------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        """The same for all values: a size that is equal to another only at times counts as another."""
        return self is other or (isinstance(other, Size) and self._hash == other._hash and self.terms == other.terms)

    def __hash__(self) -> int:
        return self._hash

    def __bool__(self) -> bool:
        return self > 0 or self < 0 or _undecided(f"is {self!r} zero")

    def __lt__(self, other: Any) -> bool:
        return _sign_of(other - self, f"is {self!r} < {other!r}", strict=True)

    def __gt__(self, other: Any) -> bool:
        return _sign_of(self - other, f"is {self!r} > {other!r}", strict=True)

    def __le__(self, other: Any) -> bool:
        return _sign_of(other - self, f"is {self!r} <= {other!r}", strict=False)

    def __ge__(self, other: Any) -> bool:
        return _sign_of(self - other, f"is {self!r} >= {other!r}", strict=False)

    def __index__(self) -> int:
        raise OpenSize(f"what is {self!r}")

    # --- values and text ----------------------------------------------------------------------------------------------

    @property
    def typical(self) -> int:
        """The value at typical sizes."""
        return _value(self, lambda a: a.typical)

    def at(self, values: Mapping[str, int]) -> int:
        """The value where each open size has the value that ``values`` has under its name."""
        return _value(self, lambda a: a.at(values))

    def dims(self) -> Iterator[Dim]:
        """The open sizes in it."""
        for atom in (a for product in self.terms for a in product):
            yield from (atom.above.dims() if isinstance(atom, Quotient) else (atom,))

    def text(self, names: Mapping[str, str] | None = None) -> str:
        """Source text: ``n * 20 + 4``. ``names``: other texts for the names."""
        parts = []
        for product, factor in sorted(self.terms.items(), key=lambda t: (-len(t[0]), [a.name for a in t[0]])):
            factors = [a.text(names or {}) for a in product]
            if len(factors) > 1 or abs(factor) != 1:
                factors = [f"({f})" if " // " in f else f for f in factors]
            number = [str(abs(factor))] * (abs(factor) != 1 or not product)
            parts.append((" - " if factor < 0 else " + ") + " * ".join([*factors, *number]))
        text = "".join(parts)
        return text[3:] if text.startswith(" + ") else f"-{text[3:]}"

    def __repr__(self) -> str:
        return self.text()

    def __str__(self) -> str:
        """The text as a part of another: in brackets unless it is a name."""
        text = self.text()
        return text if text.isidentifier() else f"({text})"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def open_size(dim: Dim) -> Any:
    """``dim`` as a size."""
    return _size({(dim,): 1})


def typical(size: Any) -> Any:
    """The value for which plans are made good: of an open size its typical one, of a number the number."""
    return size.typical if isinstance(size, Size) else size


def huge(size: int) -> bool:
    """The size may be too large for 32-bit indices."""
    return any(d.wide for d in size.dims()) if isinstance(size, Size) else size >= WIDE


def is_open(size: object) -> bool:
    """True for a size that is left open."""
    return isinstance(size, Size)


def divides(part: int, size: int) -> bool:
    """``size`` is a multiple of ``part``, whatever the open sizes are."""
    try:
        return bool(size % part == 0)
    except OpenSize:
        return False


def may_exceed(size: int, bound: int) -> bool:
    """``size > bound`` for some values of the open sizes."""
    try:
        return bool(size > bound)
    except OpenSize:
        return True


def ceil_div(size: int, part: int) -> int:
    """``size / part``, rounded up."""
    return (size + part - 1) // part


def open_dims(value: Any) -> tuple[Dim, ...]:
    """The open sizes anywhere in ``value`` (tuples, lists and dataclasses of such), by name."""
    found: dict[str, Dim] = {}
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Size):
            found.update({d.name: d for d in item.dims()})
        elif isinstance(item, tuple | list):
            stack.extend(item)
        elif hasattr(item, "terms"):
            stack.extend((item.terms, item.const))
        elif dataclasses.is_dataclass(item):
            stack.extend(getattr(item, f.name) for f in dataclasses.fields(item))
    return tuple(found[name] for name in sorted(found))


def settle(value: Value, sizes: Mapping[str, int]) -> Value:
    """``value`` with all open sizes at their values: in tuples, lists, dicts and dataclasses. What has none stays."""
    found: Any = value
    if isinstance(found, Size):
        found = found.at(sizes)
    elif isinstance(found, tuple | list):
        items = [settle(v, sizes) for v in found]
        if any(a is not b for a, b in zip(items, found, strict=True)):
            found = type(found)(items)
    elif isinstance(found, dict):
        found = {k: settle(v, sizes) for k, v in found.items()}
    elif dataclasses.is_dataclass(found) and not isinstance(found, type):
        old = {f.name: getattr(found, f.name) for f in dataclasses.fields(found) if f.init}
        new = {name: settle(v, sizes) for name, v in old.items()}
        found = dataclasses.replace(found, **new) if any(new[n] is not old[n] for n in old) else found
    return found  # type: ignore[no-any-return]


def _terms(value: Any) -> Terms:
    return value.terms if isinstance(value, Size) else {(): value}


def _size(terms: Terms) -> Any:
    kept = {product: factor for product, factor in terms.items() if factor}
    return Size(kept) if any(kept) else kept.get((), 0)


def _value(size: Size, of: Callable[[Atom], int]) -> int:
    return sum(factor * math.prod(map(of, product)) for product, factor in size.terms.items())


def _undecided(question: str) -> bool:
    raise OpenSize(question)


@functools.lru_cache(maxsize=65536)
def _signs(size: Size) -> tuple[int, bool, bool]:
    """With every atom written as its least value plus a rest: the constant, and whether rests only add, only take."""
    total: Terms = {(): 0}
    for product, factor in size.terms.items():
        parts: Terms = {(): factor}
        for atom in product:
            grown: Terms = {}
            for p, f in parts.items():
                grown[p] = grown.get(p, 0) + f * atom.least
                grown[(*p, atom)] = grown.get((*p, atom), 0) + f
            parts = grown
        for p, f in parts.items():
            total[p] = total.get(p, 0) + f
    const = total.pop(())
    return const, all(f >= 0 for f in total.values()), all(f <= 0 for f in total.values())


def _sign_of(size: Any, question: str, *, strict: bool) -> bool:
    """Whether ``size`` is positive (or, unless ``strict``, zero) for all values, or for none."""
    if isinstance(size, float):
        return size > 0 or (size == 0 and not strict)
    const, rises, falls = _signs(size) if isinstance(size, Size) else (size, True, True)
    low = 1 if strict else 0
    if rises and const >= low:
        return True
    if falls and const < low:
        return False
    return _undecided(question)


def _divide(above: Any, below: Any) -> tuple[Any, Any]:
    """Quotient and rest, where the rest is a number: by polynomial division, or of the constant alone."""
    if isinstance(below, int) and below > 0 and isinstance(above, Size):
        rest = above.terms.get((), 0)
        if all(f % below == 0 for p, f in above.terms.items() if p):
            kept = {p: f // below for p, f in above.terms.items() if p}
            return _size({**kept, (): rest // below}), rest % below
    quotient: Any = 0
    left: Any = above
    divisor = _terms(below)
    lead = max(divisor, key=_order)
    while isinstance(left, Size) or left:
        terms = _terms(left)
        head = max(terms, key=_order)
        product = _without(head, lead)
        if product is None or terms[head] % divisor[lead]:
            raise OpenSize(f"is {above!r} a multiple of {below!r}")
        step = _size({product: terms[head] // divisor[lead]})
        quotient, left = quotient + step, left - step * below
    return quotient, 0


def _order(product: Product) -> tuple[int, list[str]]:
    return len(product), [a.name for a in product]


def _without(product: Product, part: Product) -> Product | None:
    """``product`` less the atoms of ``part``; None where it lacks one."""
    left = list(product)
    for atom in part:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)

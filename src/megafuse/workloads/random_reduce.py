"""Making a failing random module smaller, one change at a time, as long as it still fails."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megafuse.workloads.random_modules import NAME, NO_FLOATS, Leaf, Line, ModuleProgram

Fails = Callable[[ModuleProgram], bool]


def reduce_program(program: ModuleProgram, fails: Fails, *, seconds: float = 60.0) -> ModuleProgram:
    """The smallest module found within ``seconds`` for which ``fails`` still holds; at least ``program`` itself.

    ``fails`` is asked only about modules that run without megafuse.
    """
    end = time.monotonic() + seconds
    found = True
    while found:
        found = False
        for candidate in _smaller(program):
            if time.monotonic() > end:
                return program
            if runs(candidate) and fails(candidate):
                program, found = candidate, True
                break
    return program


def runs(program: ModuleProgram) -> bool:
    """Whether the plain module runs, with finite results."""
    try:
        results = _values(program)
    except Exception:  # whatever a changed size breaks
        return False
    return all(bool(torch.isfinite(t).all()) for t in results if t.is_floating_point())


def _values(program: ModuleProgram) -> list[Tensor]:
    module, inputs = program.make()
    made = module(*inputs)
    return list(made) if isinstance(made, tuple) else [made]


def _smaller(program: ModuleProgram) -> Iterator[ModuleProgram]:
    """Modules with less in them, the largest steps first."""
    seen = {program}
    for way in (_fewer_results, _earlier_results, _cut_before, _shortcuts, _plainer, _narrower):
        for candidate in way(program):
            pruned = candidate.pruned()
            if pruned not in seen:
                seen.add(pruned)
                yield pruned


def _fewer_results(program: ModuleProgram) -> Iterator[ModuleProgram]:
    if len(program.results) > 1:
        yield from (replace(program, results=(name,)) for name in program.results)
        yield from (replace(program, results=_without(program.results, name)) for name in program.results)


def _earlier_results(program: ModuleProgram) -> Iterator[ModuleProgram]:
    """A value that a result is made of, in place of the result."""
    reads = {line.name: line.reads for line in program.lines}
    for name in program.results:
        for read in reads.get(name, ()):
            others = _without(program.results, name)
            if read in reads and read not in others:
                yield replace(program, results=(*others, read))


def _cut_before(program: ModuleProgram) -> Iterator[ModuleProgram]:
    """An input in place of a computed value, the latest value first; dropped with all that only it needs."""
    names = [line.name for line in program.lines]
    shapes = {n: tuple(t.shape) for n, t in zip(names, _values(replace(program, results=tuple(names))), strict=True)}
    free = 1 + max(int(leaf.name.lstrip("self.xwb")) for leaf in program.leaves)
    for name in reversed(names):
        if name not in program.results:
            leaf = Leaf(f"x{free}", shapes[name])
            yield _replaced(replace(program, leaves=(*program.leaves, leaf)), name, leaf.name)


def _shortcuts(program: ModuleProgram) -> Iterator[ModuleProgram]:
    """One of its operands in place of a computed value."""
    for line in reversed(program.lines):
        for read in line.reads:
            if not read.startswith("self.m") and read not in program.results:
                yield _replaced(program, line.name, read)


def _replaced(program: ModuleProgram, old: str, new: str) -> ModuleProgram:
    lines = tuple(line.renamed({old: new}) for line in program.lines if line.name != old)
    results = tuple(dict.fromkeys(new if name == old else name for name in program.results))
    return replace(program, lines=lines, results=results)


def _plainer(program: ModuleProgram) -> Iterator[ModuleProgram]:
    """Leaves that lie plainly in memory and have gradients; submodules without frozen or shared parameters."""
    for i, leaf in enumerate(program.leaves):
        changes = [replace(leaf, layout="plain")] if leaf.layout not in NO_FLOATS else []
        changes += [replace(leaf, scale=1.0)] if leaf.layout != "mask" else []
        changes += [replace(leaf, requires_grad=True)] if not leaf.name.startswith("self.b") else []
        for change in changes:
            yield replace(program, leaves=(*program.leaves[:i], change, *program.leaves[i + 1 :]))
    for i, child in enumerate(program.children):
        for plain in (replace(child, frozen=()), replace(child, shares_weight_of="")):
            yield replace(program, children=(*program.children[:i], plain, *program.children[i + 1 :]))


def _narrower(program: ModuleProgram) -> Iterator[ModuleProgram]:
    """Sizes made smaller wherever their numbers stand; what that breaks does not run and is passed over."""
    sizes = {n for leaf in program.leaves for n in leaf.shape if n > 1}
    sizes |= {int(n) for child in program.children for n in re.findall(r"\b\d+\b", child.text) if int(n) > 1}
    for factor in (2, 3, 5, 7):
        yield _resized(program, lambda n, f=factor: n // f if n % f == 0 else n)  # type: ignore[misc]
    for size in sorted(sizes, reverse=True):
        for smaller in dict.fromkeys((1, 2, size // 2, size - 1)):
            if 0 < smaller < size:
                yield _resized(program, lambda n, old=size, new=smaller: new if n == old else n)  # type: ignore[misc]


def _resized(program: ModuleProgram, size: Callable[[int], int]) -> ModuleProgram:
    def change(text: str) -> str:
        kept = [m[0] for m in NAME.finditer(text)]
        parts = [re.sub(r"(?<![\w.])[1-9]\d*(?![\w.])", lambda m: str(size(int(m[0]))), p) for p in NAME.split(text)]
        return "".join(a + b for a, b in zip(parts, [*kept, ""], strict=True))

    scales = (float(size(int(leaf.scale))) if leaf.layout == "index" else leaf.scale for leaf in program.leaves)
    shapes = (tuple(map(size, leaf.shape)) for leaf in program.leaves)
    made = zip(program.leaves, shapes, scales, strict=True)
    leaves = tuple(replace(leaf, shape=shape, scale=scale) for leaf, shape, scale in made)
    children = tuple(replace(c, text=change(c.text)) for c in program.children)
    lines = tuple(Line(line.name, change(line.expression)) for line in program.lines)
    return replace(program, leaves=leaves, children=children, lines=lines)


def _without(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    return tuple(n for n in names if n != name)

"""Random modules: a frozen description, and the source text of the plain module that it describes.

The text is what runs, so a failure prints as a program that anyone can run. Names say what a thing is: inputs ``x0``,
values ``v0``, parameters ``self.w0``, buffers ``self.b0`` and submodules ``self.m0``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = ("plain", "transposed", "sliced", "expanded", "mask", "index")
NO_FLOATS = ("mask", "index")  # layouts of tensors that have no gradient
NAME = re.compile(r"\b(?:self\.[wbm]\d+|[xv]\d+)\b")
INDENT = " " * 8


@dataclass(frozen=True)
class Leaf:
    """A tensor that a module takes or owns: normal values times ``scale``.

    Of layout ``mask`` their signs, of layout ``index`` integers below ``scale``.
    """

    name: str
    shape: tuple[int, ...]
    layout: str = "plain"
    scale: float = 1.0
    requires_grad: bool = True

    @property
    def text(self) -> str:
        """The expression that makes it."""
        rows, last = self.shape[:-1], self.shape[-1] if self.shape else 1
        if self.layout == "transposed":
            return f"{self._normal((*rows[:-1], last, rows[-1]))}.transpose(-1, -2)"
        if self.layout == "sliced":
            return f"{self._normal((*rows, 2 * last + 1))}[..., 1 : {2 * last} : 2]"
        if self.layout == "expanded":
            return f"{self._normal((1, *self.shape[1:]))}.expand{self.shape}"
        if self.layout == "index":
            return f"(normal({', '.join(map(str, self.shape))}) * 37).long() % {int(self.scale)}"
        return self._normal(self.shape) + (" > 0" if self.layout == "mask" else "")

    def _normal(self, shape: tuple[int, ...]) -> str:
        sizes = [str(n) for n in shape]
        return f"normal({', '.join(sizes if self.scale == 1 else [*sizes, f'scale={self.scale}'])})"


@dataclass(frozen=True)
class Child:
    """A submodule: how it is made, its frozen parameters, and another child whose weight it shares."""

    name: str
    text: str
    frozen: tuple[str, ...] = ()
    shares_weight_of: str = ""


@dataclass(frozen=True)
class Line:
    """``name = expression`` in ``forward``."""

    name: str
    expression: str

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of values, inputs, parameters, buffers and submodules in the expression, each once."""
        return tuple(dict.fromkeys(NAME.findall(self.expression)))

    def renamed(self, names: dict[str, str]) -> Line:
        """The line reading other values."""
        return replace(self, expression=NAME.sub(lambda m: names.get(m[0], m[0]), self.expression))


@dataclass(frozen=True)
class ModuleProgram:
    """A module's description. ``seed`` is that of its values; ``dtype`` is a key of ``DTYPES``."""

    dtype: str
    seed: int
    leaves: tuple[Leaf, ...]
    children: tuple[Child, ...]
    lines: tuple[Line, ...]
    results: tuple[str, ...]

    @property
    def inputs(self) -> tuple[Leaf, ...]:
        """What ``forward`` takes."""
        return tuple(leaf for leaf in self.leaves if not leaf.name.startswith("self."))

    @property
    def state(self) -> tuple[Leaf, ...]:
        """Parameters and buffers that the module itself owns."""
        return tuple(leaf for leaf in self.leaves if leaf.name.startswith("self."))

    def source(self, device: str = "cpu") -> str:
        """Python text that makes ``module`` and ``inputs`` on ``device``."""
        inputs = "".join(f"    {_with_grad(leaf)},\n" for leaf in self.inputs)
        parts = [
            "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n",
            f'DEVICE, DTYPE = "{device}", {DTYPES[self.dtype]}\n\n',
            "def normal(*shape, scale=1.0):\n    return (torch.randn(shape) * scale).to(DEVICE, DTYPE)\n\n",
            f"class RandomModule(nn.Module):\n    def __init__(self):\n{INDENT}super().__init__()",
            *(INDENT + line for line in self._init_lines()),
            f"\n    def forward(self, {', '.join(leaf.name for leaf in self.inputs)}):",
            *(f"{INDENT}{line.name} = {line.expression}" for line in self.lines),
            f"{INDENT}return {', '.join(self.results)}\n\n",
            f"torch.manual_seed({self.seed})\nmodule = RandomModule().to(DEVICE, DTYPE)\ninputs = (\n{inputs})\n",
        ]
        return "\n".join(parts)

    def _init_lines(self) -> list[str]:
        made = [_state_line(leaf) for leaf in self.state]
        for child in self.children:
            made.append(f"{child.name} = {child.text}")
            if child.shares_weight_of:
                made.append(f"{child.name}.weight = {child.shares_weight_of}.weight")
            made += [f"{child.name}.{name}.requires_grad_(False)" for name in child.frozen]
        if self.children:  # gammas of ones and betas of zeros would hide a forgotten one
            made += ["for parameter in self.parameters():"]
            made += ["    parameter.data.add_(0.1 * torch.randn_like(parameter))"]
        return made

    def make(self, device: str = "cpu") -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The module and its inputs, by running :meth:`source`; the global random state is left as it was."""
        names: dict[str, Any] = {}
        with torch.random.fork_rng(devices=[]):
            exec(compile(self.source(device), f"random_module_{self.seed}.py", "exec"), names)
        return names["module"], names["inputs"]

    def reproducer(self, device: str = "cpu", options: str = "") -> str:
        """A program that makes the module, fuses it and prints its check; ``options``: arguments of CheckOptions."""
        target = "cuda" if device.startswith("cuda") else "interpret"
        calls = f'import megafuse\n\nfused = megafuse.fuse(module, *inputs, target="{target}")\n'
        made = f"from megafuse.validate import CheckOptions\n\noptions = CheckOptions({options})\n" if options else ""
        check = f"megafuse.check(module, *inputs, fused=fused{', options=options' if options else ''})"
        return f"{self.source(device)}\n{calls}{made}print({check})\n"

    def pruned(self) -> ModuleProgram:
        """Without the lines, leaves and submodules that no result needs; at least one input stays."""
        needed, lines = set(self.results), []
        for line in reversed(self.lines):
            if line.name in needed:
                needed.update(line.reads)
                lines.append(line)
        needed.update(c.shares_weight_of for c in self.children if c.name in needed)
        leaves = [leaf for leaf in self.leaves if leaf.name in needed]
        if not any(leaf in self.inputs for leaf in leaves):
            leaves.insert(0, self.inputs[0])
        children = tuple(c for c in self.children if c.name in needed)
        return replace(self, leaves=tuple(leaves), children=children, lines=tuple(reversed(lines)))


def _state_line(leaf: Leaf) -> str:
    if leaf.name.startswith("self.b"):
        return f'self.register_buffer("{leaf.name[5:]}", {leaf.text})'
    return f"{leaf.name} = nn.Parameter({leaf.text}{'' if leaf.requires_grad else ', requires_grad=False'})"


def _with_grad(leaf: Leaf) -> str:
    return f"{leaf.text}.requires_grad_()" if leaf.requires_grad and leaf.layout not in NO_FLOATS else leaf.text

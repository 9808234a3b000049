"""``megafuse check --sanitize``: generated kernels under NVIDIA's compute-sanitizer.

Each case runs in processes of its own: once plainly, which fills Triton's cache and shows that it works, then once
under each tool. ``python -m megafuse.cli.sanitize SPEC`` is what runs there: one step of one case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megafuse.api import engine_of
from megafuse.cli.inputs import parse_dtype
from megafuse.cli.running import fuse_example
from megafuse.cli.selection import Selection
from megafuse.cli.targets import Example, make_example
from megafuse.core.errors import TargetError
from megafuse.runtime.timer import require_cuda
from megafuse.validate.sanitizer import Sanitized, find_sanitizer, run_sanitized
from megafuse.workloads import get

SOURCES = Path(__file__).resolve().parents[2]
SECONDS = 300.0  # that one process may take
PROCESSES = 8  # at a time
RAN = "megafuse ran "

# Ragged shapes: rows and columns that no tile divides, with strides that tensor descriptors take (multiples of eight
# elements) and with odd ones; single elements at the end of rows; columns wider than a tile.
SUITE: tuple[tuple[str, str, dict[str, int]], ...] = (
    ("rank_mixer_block", "bfloat16", {"batch": 131, "tokens": 6, "dim": 72, "k": 2}),
    ("rank_mixer_block", "float16", {"batch": 3, "tokens": 7, "dim": 21, "k": 3}),
    ("gelu_ffn", "bfloat16", {"batch": 3, "tokens": 67, "dim": 136, "hidden": 264}),
    ("gelu_ffn", "float32", {"batch": 3, "tokens": 5, "dim": 27, "hidden": 53}),
    ("swiglu_ffn", "float16", {"batch": 3, "tokens": 43, "dim": 72, "hidden": 200}),
    ("softplus_mlp", "float16", {"batch": 131, "dim": 37, "hidden": 100, "out": 3}),
    ("log_softmax_head", "bfloat16", {"batch": 3, "tokens": 5, "dim": 27, "classes": 20011}),
)


@dataclass(frozen=True)
class SanitizeCase:
    """One step to run: ``spec`` is what the process takes, as JSON."""

    title: str
    spec: str


@dataclass(frozen=True)
class CaseRuns:
    """What came of one case. ``kernels``: generated ones that a step launches; ``products``: those that multiply."""

    title: str
    kernels: int
    products: int
    runs: tuple[Sanitized, ...]

    def lines(self) -> list[str]:
        """The case in words, one line a tool."""
        head = f"{self.title}: {self.kernels} generated kernels, {self.products} of them products"
        return [head, *(f"  {r.tool}: {r.problem or 'clean'}" for r in self.runs)]


def cases_of(selection: Selection) -> list[SanitizeCase]:
    """What to run: the case that ``selection`` names, or where it names none the ragged ones."""
    named = {f.name for f in fields(Selection)} - {"seed", "device", "dots"}
    if any(getattr(selection, n) != getattr(Selection(), n) for n in named):
        given = {**asdict(selection), "package": str(selection.package) if selection.package else None}
        title = selection.module or selection.workload or selection.subgraph or "RankMixer block"
        return [SanitizeCase(title, json.dumps({"selection": given}))]
    found = []
    for workload, dtype, sizes in SUITE:
        shape = " ".join(f"{n}={v}" for n, v in sizes.items())
        spec = {"workload": workload, "dtype": dtype, "sizes": sizes, "seed": selection.seed, "dots": selection.dots}
        found.append(SanitizeCase(f"{workload} {shape} {dtype}", json.dumps(spec)))
    return found


def sanitize_selection(selection: Selection, tools: Sequence[str]) -> tuple[bool, str]:
    """Run steps under ``tools``: whether all were clean, and the report.

    Raises:
        TargetError: no GPU, no compute-sanitizer, or a case does not run without it.
    """
    require_cuda()
    program = find_sanitizer()
    with ThreadPoolExecutor(PROCESSES) as pool:
        done = list(pool.map(lambda case: _run_case(case, tools, program), cases_of(selection)))
    clean = all(not r.problem for c in done for r in c.runs)
    verdict = f"{sum(c.kernels for c in done)} generated kernels under {', '.join(tools)}: "
    return clean, "\n".join(
        [*(line for c in done for line in c.lines()), verdict + ("clean" if clean else "NOT CLEAN")]
    )


def command_of(case: SanitizeCase) -> list[str]:
    """What runs a case in a process of its own."""
    return [sys.executable, "-m", "megafuse.cli.sanitize", case.spec]


def _run_case(case: SanitizeCase, tools: Sequence[str], program: str) -> CaseRuns:
    command = command_of(case)
    paths = [str(SOURCES), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        plain = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=env, check=False)
    except subprocess.TimeoutExpired as error:
        raise TargetError(f"{case.title} took more than {SECONDS:g} s without {program}") from error
    counts = ran(plain.stdout)
    if plain.returncode or counts is None:
        raise TargetError(f"{case.title} does not run without {program}: {(plain.stdout + plain.stderr)[-1500:]}")
    runs = tuple(run_sanitized(tool, program, command, env, SECONDS) for tool in tools)
    return CaseRuns(case.title, *counts, tuple(r if ran(r.output) else _unfinished(r) for r in runs))


def _unfinished(run: Sanitized) -> Sanitized:
    """A run that did not come to its end is not clean, whatever the summary says."""
    return Sanitized(run.tool, run.count, run.findings, run.status or 1, run.output)


def ran(output: str) -> tuple[int, int] | None:
    """Numbers of kernels and of products that a process says it ran; None where it did not come to its end."""
    lines = [line for line in output.splitlines() if line.startswith(RAN)]
    if not lines:
        return None
    kernels, products = lines[-1].removeprefix(RAN).split()
    return int(kernels), int(products)


def example_of(spec: dict[str, Any], device: str) -> tuple[Example, str]:
    """The example of a process's argument, and how its dots are run."""
    if "selection" in spec:
        given = spec["selection"]
        package = Path(given["package"]) if given["package"] else None
        selection = Selection(**{**given, "package": package, "inputs": tuple(given["inputs"])})
        return make_example(selection, "odd", device), selection.dots
    dtype = parse_dtype(spec["dtype"], "--dtype")
    module, inputs = get(spec["workload"]).make(spec["sizes"], dtype=dtype, device=device, seed=spec["seed"])
    return Example(spec["workload"], module, inputs), spec["dots"]


def run_step(example: Example, device: str, dots: str) -> tuple[int, int]:
    """Fuse, run forward and backward once; the numbers of generated kernels and of products among them."""
    fused = fuse_example(example, device, dots=dots)
    out = fused(*example.args, **example.kwargs)
    roots = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
    if device == "cuda":
        torch.cuda.synchronize()
    made = [k for b in engine_of(fused).bindings if b.compiled is not None for k in b.compiled.step.kernels]
    return len(made), sum(k.dot is not None or k.chain is not None for k in made)


def main(argv: Sequence[str] | None = None) -> int:
    """One step of one case on the GPU."""
    spec = json.loads((sys.argv[1:] if argv is None else list(argv))[0])
    require_cuda()
    example, dots = example_of(spec, "cuda")
    kernels, products = run_step(example, "cuda", dots)
    print(f"{RAN}{kernels} {products}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Generated dots against the library: ``python benchmarks/dots.py [--compile-only] [--only TEXT] [--rounds N]``.

Six products of a RankMixer step at its production size and at a small one, each as the step's tensors lie: the plain
product against ``torch.bmm(out=)``, and the product with bias and residual in its epilogue against ``torch.bmm(out=)``
followed by a generated kernel that adds both. Every kernel's result is checked by the package's rule before it is
timed. All kernels are compiled first, in several processes. Rounds alternate, the L2 cache is flushed before each
sample. Prints a table; the record with all samples goes to benchmarks/results.

``--steps``: forward and backward of three networks that are little but products, with generated products, beside eager
and ``torch.compile``; options behind ``--`` are those of benchmarks/workloads.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from megafuse.bench.record import RESULTS, CaseResult, Record, RivalResult, begin
from megafuse.bench.run import failed, prepare_gpu, run_cases, settings_from
from megafuse.bench.timing import CudaTimer, copy_bandwidth, time_rounds
from megafuse.bench.workloads import build_parser, workload_table
from megafuse.codegen.artifact import KernelSource
from megafuse.codegen.dot_program import PRODUCT, DotProgram, Matrices
from megafuse.codegen.program import (
    Affine,
    Axis,
    Compute,
    Convert,
    Level,
    Load,
    Param,
    Pass,
    Phase,
    Statement,
    Store,
    TileProgram,
)
from megafuse.codegen.triton import print_kernel
from megafuse.core.device import DeviceSpec, device_spec
from megafuse.core.dtypes import DType
from megafuse.core.errors import MegafuseError
from megafuse.runtime.device import live_device_spec, target_spec
from megafuse.runtime.offline import compile_offline
from megafuse.runtime.shim import cuda_launcher
from megafuse.schedule.dot_tiling import choose_dot_tile
from megafuse.schedule.types import DotTile
from megafuse.validate.compare import measure
from megafuse.validate.verdict import judge

BF16, F32 = DType.BF16, DType.F32
LLAMA = {"batch": 1, "tokens": 4096, "dim": 4096, "hidden": 14336}
SIZES = {"production": (1024, 64, 1280, 2), "small": (256, 32, 512, 2)}  # B, T, D, k
Strides = tuple[int, int, int]


@dataclass(frozen=True)
class Shape:
    """One product ``[P, M, K] x [P, K, N]`` and the strides of its operands and its result."""

    name: str
    problems: int
    rows: int
    cols: int
    inner: int
    a: Strides
    b: Strides
    out: Strides


def shapes(size: str) -> Iterator[Shape]:
    """The six products of a step: activations are ``[B, T, width]``, weights ``[T, in, out]``."""
    b, t, d, k = SIZES[size]
    h = k * d

    def act(width: int) -> Strides:  # [T, B, width]
        return width, t * width, 1

    def flip(strides: Strides) -> Strides:
        return strides[0], strides[2], strides[1]

    def weight(rows: int, cols: int) -> Strides:
        return rows * cols, cols, 1

    w1, wout = weight(d, 2 * h), weight(h, d)
    yield Shape(f"{size} fwd1", t, b, 2 * h, d, act(d), w1, act(2 * h))
    yield Shape(f"{size} fwd2", t, b, d, h, act(h), wout, act(d))
    yield Shape(f"{size} dh", t, b, h, d, act(d), flip(wout), act(h))
    yield Shape(f"{size} dx", t, b, d, 2 * h, act(2 * h), flip(w1), act(d))
    yield Shape(f"{size} dwout", t, h, d, b, flip(act(h)), act(d), wout)
    yield Shape(f"{size} dw1", t, d, 2 * h, b, flip(act(d)), act(2 * h), w1)


def at(strides: Strides, names: str = "pmn") -> Affine:
    """The element of those axes."""
    return Affine(tuple((name, step) for name, step in zip(names, strides, strict=True) if step))


def epilogue(s: Shape, last: str, fused: bool) -> tuple[Statement, ...]:
    """Round ``last``; add bias and residual (each sum rounded) where ``fused``; store."""
    found: list[Statement] = []
    if fused:
        bias, full = Affine((("p", s.cols), ("n", 1))), at(s.out)
        for name, index, level in (("bias", bias, Level.COL), ("residual", full, Level.TILE)):
            found.append(Load(f"{name}_h", name, index, level, BF16))
            found.append(Convert(f"{name}_x", f"{name}_h", level, BF16, F32))
            found.append(Compute(f"plus_{name}", "add", (last, f"{name}_x"), Level.TILE, F32, F32))
            found.append(Convert(f"r_{name}", f"plus_{name}", Level.TILE, F32, F32, BF16))
            last = f"r_{name}"
    found.append(Convert("y_h", last, Level.TILE, F32, BF16))
    return (*found, Store("y", at(s.out), "y_h", Level.TILE))


def params(s: Shape, first: tuple[Param, ...], fused: bool) -> tuple[Param, ...]:
    """Buffers in order: what comes first, bias and residual, the result."""
    full = (s.problems, s.rows, s.cols)
    more = (Param("bias", BF16, (s.problems, s.cols), (s.cols, 1), False), Param("residual", BF16, full, s.out, False))
    return (*first, *(more if fused else ()), Param("y", BF16, full, s.out, True))


def dot_program(s: Shape, tile: DotTile, fused: bool, descriptors: bool) -> DotProgram:
    """The generated product."""
    rounding = Convert("product", PRODUCT, Level.TILE, F32, F32, BF16)
    body = Pass((rounding, *epilogue(s, "product", fused)))
    phase = Phase(
        "epilogue", (Axis("p", s.problems),), (Axis("m", s.rows),), (Axis("n", s.cols),), tile.rows, tile.rows, (body,),
        (tile.cols // tile.parts,), col_grid=True,
    )  # fmt: skip
    first = (
        Param("a", BF16, (s.problems, s.rows, s.inner), s.a, False),
        Param("b", BF16, (s.problems, s.inner, s.cols), s.b, False),
    )
    return DotProgram(
        name_of(s, tile, fused), ("A product with its epilogue.",), params(s, first, fused), Matrices("a", s.a),
        Matrices("b", s.b), s.inner, tile.depth, tile.parts, phase, tile.programs, tile.num_warps, tile.num_stages,
        group=tile.group, descriptors=descriptors,
    )  # fmt: skip


def add_program(s: Shape) -> TileProgram:
    """The separate kernel: ``y = (product + bias) + residual``, two rows of a problem per program."""
    load = (Load("product_h", "product", at(s.out), Level.TILE, BF16), Convert("x", "product_h", Level.TILE, BF16, F32))
    body = Pass((*load, *epilogue(s, "x", True)))
    pieces, left = [], s.cols
    while left:
        pieces.append(1 << (left.bit_length() - 1))
        left -= pieces[-1]
    phase = Phase(
        "add", (Axis("p", s.problems),), (Axis("m", s.rows),), (Axis("n", s.cols),), 2, 2, (body,), tuple(pieces)
    )
    first = (Param("product", BF16, (s.problems, s.rows, s.cols), s.out, False),)
    return TileProgram(f"add_{s.name}", ("Adds bias and residual.",), params(s, first, True), (phase,), 8)


def name_of(s: Shape, tile: DotTile, fused: bool) -> str:
    """A kernel's name: all that was chosen."""
    chosen = f"{tile.rows}x{tile.cols}x{tile.depth}_p{tile.parts}_w{tile.num_warps}_s{tile.num_stages}_g{tile.group}"
    return f"{s.name.replace(' ', '_')}_{'epi' if fused else 'plain'}_{chosen}"


def tiles(s: Shape, fused: bool, device: DeviceSpec) -> list[DotTile]:
    """The planner's choice, and some others."""
    chosen = choose_dot_tile((s.problems, s.rows, s.cols, s.inner), BF16, device, 2 if fused else 1)
    big = DotTile(128, 256, 64, 2, device.sms, 8, 3)
    others = [big, replace(big, group=16), replace(big, parts=4, num_stages=3 if fused else 4)]
    if s.name.startswith("small"):
        others += [DotTile(128, 128, 64, 1, 2 * device.sms, 4, 3), DotTile(64, 256, 64, 2, 2 * device.sms, 4, 2)]
    else:
        others += [replace(big, rows=256, cols=128, parts=1 if not fused else 2)]
    return list({replace(t, why=""): None for t in (replace(chosen, why=""), *others)})


@dataclass(frozen=True)
class Candidate:
    """A generated kernel of one shape; ``chosen``: by the planner's rule."""

    shape: Shape
    fused: bool
    tile: DotTile
    source: KernelSource
    chosen: bool


def candidates(only: str, device: DeviceSpec) -> list[Candidate]:
    """All of them."""
    found = []
    for shape in (s for size in SIZES for s in shapes(size) if only in s.name):
        for fused in (False, True):
            for n, tile in enumerate(tiles(shape, fused, device)):
                source = print_kernel(dot_program(shape, tile, fused, device.arch >= 90))
                found.append(Candidate(shape, fused, tile, source, n == 0))
    return found


def compiled(all_: list[Candidate], arch: int, processes: int, errors: list[str]) -> list[Candidate]:
    """Those that compile, without spills. Triton keeps the results in its cache, where the launches find them."""
    good = []
    for candidate, report in zip(
        all_, compile_offline([c.source for c in all_], arch, processes=processes), strict=True
    ):
        say(
            f"{report.entry}: {report.registers} registers, {report.spills} spilled, {report.shared} shared, "
            f"{report.seconds:.1f} s {report.error[-200:]}"
        )
        limit = device_spec(arch).shared_per_block
        if report.error or report.shared > limit:
            errors.append(f"{report.entry}: {report.error[-200:] or f'{report.shared} bytes of shared memory'}")
        else:
            good.append(candidate)
    return good


class Bench:
    """Tensors and works of one shape."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = s = shape
        make = torch.Generator("cuda").manual_seed(seed)

        def random(sizes: tuple[int, int, int], strides: Strides, scale: float) -> Tensor:
            flat = torch.randn(sizes[0] * sizes[1] * sizes[2], generator=make, device="cuda", dtype=torch.bfloat16)
            return (flat * scale).as_strided(sizes, strides)

        self.a = random((s.problems, s.rows, s.inner), s.a, 1.0)
        self.b = random((s.problems, s.inner, s.cols), s.b, s.inner**-0.5)
        self.residual = random((s.problems, s.rows, s.cols), s.out, 1.0)
        self.bias = torch.randn(s.problems, s.cols, generator=make, device="cuda", dtype=torch.bfloat16)
        self.product, self.y = (
            torch.empty_like(self.residual.as_strided((self.residual.numel(),), (1,))) for _ in "ab"
        )
        self.add = cuda_launcher(print_kernel(add_program(s)))

    def view(self, flat: Tensor) -> Tensor:
        """The result's matrices."""
        return flat.as_strided((self.shape.problems, self.shape.rows, self.shape.cols), self.shape.out)

    def library(self, fused: bool) -> Callable[[], Any]:
        """``torch.bmm(out=)``, and the separate kernel."""
        target = self.view(self.product)

        def plain() -> None:
            torch.bmm(self.a, self.b, out=target)

        def both() -> None:
            plain()
            self.add(self.product, self.bias, self.residual, self.y)

        return both if fused else plain

    def generated(self, candidate: Candidate) -> Callable[[], Any]:
        """A candidate's launch."""
        launch = cuda_launcher(candidate.source)
        more = (self.bias, self.residual) if candidate.fused else ()
        return lambda: launch(self.a, self.b, *more, self.y)

    def wrong(self, work: Callable[[], Any], fused: bool) -> str:
        """Why a candidate's result fails the package's rule; empty where it passes. Three problems are looked at."""
        self.library(fused)()
        expected = self.view(self.y if fused else self.product).clone()
        self.y.fill_(float("nan"))
        work()
        if not bool(torch.isfinite(self.view(self.y)).all()):
            return "a result is not finite"
        for p in sorted({0, self.shape.problems // 2, self.shape.problems - 1}):
            oracle = self.a[p].double() @ self.b[p].double()
            if fused:
                oracle = oracle + self.bias[p].double() + self.residual[p].double()
            verdicts = judge([measure(f"problem {p}", "output", self.view(self.y)[p], expected[p], oracle)])
            bad = [str(v) for v in verdicts if not v.ok]
            if bad:
                return "; ".join(bad)
        first = self.y.clone()
        work()
        return "" if torch.equal(first, self.y) else "two runs differ"


def run_shape(shape: Shape, mine: list[Candidate], rounds: int, timer: CudaTimer) -> CaseResult:
    """Check and time the candidates of one shape."""
    start = time.perf_counter()
    result = CaseResult(shape.name, facts={"P,M,N,K": [shape.problems, shape.rows, shape.cols, shape.inner]})
    bench = Bench(shape, seed=1)
    flops = 2.0 * shape.problems * shape.rows * shape.cols * shape.inner
    for fused in (False, True):
        library = "bmm + add" if fused else "bmm"
        works = {library: bench.library(fused)}
        works[library]()
        for candidate in (c for c in mine if c.fused is fused):
            work = bench.generated(candidate)
            try:
                why = bench.wrong(work, fused)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"[:300]
            if why:
                result.errors.append(f"{candidate.source.entry}: {why}")
            else:
                works[candidate.source.entry] = work
        times = time_rounds(works, rounds=rounds, timer=timer)
        base = times[library].kept.median
        chosen = {c.source.entry for c in mine if c.chosen}
        for name, taken in times.items():
            median = taken.kept.median
            mark = "*" if name in chosen else " "
            say(
                f"{shape.name:18}{mark} {name:58} {median:8.1f} us {flops / median / 1e6:6.0f} TFLOP/s "
                f"{base / median:5.2f}x"
            )
            result.rivals[name] = RivalResult(
                name, step=taken.as_dict(), plan={"chosen": name in chosen, "fused": fused}
            )
    for line in result.errors:
        say(f"WRONG {line}")
    result.seconds = time.perf_counter() - start
    return result


def say(line: str) -> None:
    """One line of the report, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def run_steps(more: Sequence[str]) -> int:
    """A GELU network per token without biases, a Llama FFN, and an MLP with narrow weight gradients."""
    parser = build_parser()
    parser.set_defaults(rivals="eager,compile,megafuse", what="step,graph", dots="auto", rounds=20)
    args = parser.parse_args(more)
    sources: list[dict[str, Any]] = [
        {"kind": "workload", "name": "token_ffn", "dtype": "bfloat16", "size": "gpu"},
        {"kind": "workload", "name": "swiglu_ffn", "dtype": "bfloat16", "size": LLAMA},
        {"kind": "workload", "name": "softplus_mlp", "dtype": "bfloat16", "size": "gpu"},  # sums, parts of K
    ]
    try:
        settings = settings_from(args)
        prepare_gpu()
    except MegafuseError as error:
        say(f"error: {error}")
        return 2
    return int(failed(run_cases("dot_steps", sources, settings, args, show=workload_table)))


def main() -> int:
    """Compile, check, time, record; 1 where a result was wrong."""
    parser = argparse.ArgumentParser(description="Generated dots against the library.")
    parser.add_argument("--compile-only", action="store_true", help="compile for sm_90 and stop; needs no GPU")
    parser.add_argument("--only", default="", help="shapes whose name holds this text")
    parser.add_argument("--steps", action="store_true", help="whole networks instead of single products")
    parser.add_argument("more", nargs="*", help="behind --: options of --steps")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.steps:
        return run_steps(options.more)
    device = target_spec(90) if options.compile_only else live_device_spec(torch.device("cuda"))
    errors: list[str] = []
    start = time.perf_counter()
    mine = compiled(candidates(options.only, device), device.arch, options.processes, errors)
    say(f"{len(mine)} kernels compiled in {time.perf_counter() - start:.0f} s; {len(errors)} did not")
    if options.compile_only:
        return 1 if errors else 0
    head = begin("dots", {"rounds": options.rounds, "only": options.only})
    rate, copies = copy_bandwidth()
    cases: list[CaseResult] = []
    timer = CudaTimer()
    for shape in dict.fromkeys(c.shape for c in mine):
        cases.append(run_shape(shape, [c for c in mine if c.shape == shape], options.rounds, timer))
        torch.cuda.empty_cache()
        record = Record(
            **head, copy={"bytes_per_second": rate, **copies.as_dict()}, cases=tuple(cases), errors=tuple(errors)
        )
        path = record.write(options.out)
    say(f"record: {path}")
    return 1 if any(c.errors for c in cases) else 0


if __name__ == "__main__":
    raise SystemExit(main())

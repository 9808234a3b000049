"""A small hand-written step, ``y = (x @ w)^2 + b``, with NumPy kernels; and its original."""

from __future__ import annotations

import torch

from megafuse.codegen.artifact import Artifact, HostSource, KernelSource
from megafuse.codegen.host import print_host
from megafuse.core.dtypes import DType
from megafuse.runtime.autograd import StepSpec
from megafuse.runtime.step import LoadedStep
from megafuse.schedule.types import Alloc, Buffer, DotCall, Free, KernelSchedule, Launch, Step, View

F32 = DType.F32
SQUARE = '''"""y = z * z + b over [M, N]."""
import numpy as np


def square_bias(z, b, y):
    n = b.size
    acc = np.float64 if z.dtype == np.float64 else np.float32
    y[:] = (z.reshape(-1, n).astype(acc) ** 2 + b.astype(acc)).reshape(-1).astype(y.dtype)
'''
SQUARE_BACKWARD = '''"""dz = 2 z dy (into dz); db = sum of dy over rows."""
import numpy as np


def square_bias_backward(z, dy, dz, db):
    n = db.size
    acc = np.float64 if z.dtype == np.float64 else np.float32
    db[:] = dy.reshape(-1, n).astype(acc).sum(0).astype(db.dtype)
    dz[:] = (2 * z.astype(acc) * dy.astype(acc)).astype(dz.dtype)
'''


def kernel(*writes: str) -> KernelSchedule:
    """A kernel of which nothing is known but what it writes."""
    return KernelSchedule("k", (), (), writes, num_warps=4, num_stages=1, dram_bytes=0)


def row_major(*shape: int) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def full(buffer: Buffer, *, lead: bool = False) -> View:
    view = View(buffer.name, buffer.shape, buffer.strides)
    return View(view.buffer, (1, *view.shape), (buffer.strides[0] * buffer.shape[0], *view.strides)) if lead else view


def transposed(view: View) -> View:
    p, m, n = view.shape
    sp, sm, sn = view.strides
    return View(view.buffer, (p, n, m), (sp, sn, sm), view.offset)


def square_step(m: int, k: int, n: int, dtype: DType = F32, *, in_place: bool = False) -> Step:
    """With ``in_place``, backward writes dz over the saved z."""

    def make(name: str, kind: str, *shape: int, position: int = -1) -> Buffer:
        return Buffer(name, shape, row_major(*shape), dtype, kind, position)

    x, w, b = (
        make("x", "input", m, k, position=0),
        make("w", "input", k, n, position=1),
        make("b", "input", n, position=2),
    )
    z, y = make("z", "saved", m, n), make("y", "output", m, n)
    dy, dz = make("dy", "tangent", m, n, position=3), make("dz", "temp", m, n)
    dx, dw, db = make("dx", "grad", m, k), make("dw", "grad", k, n), make("db", "grad", n)
    x3, w3, z3, dz3 = (full(t, lead=True) for t in (x, w, z, z if in_place else dz))
    forward = (
        Alloc("z"), DotCall(z3, x3, w3), Alloc("y"), Launch(0, ("z", "b", "y")),
    )  # fmt: skip
    backward = (
        *([] if in_place else [Alloc("dz")]), Alloc("db"), Launch(1, ("z", "dy", "z" if in_place else "dz", "db")),
        *([] if in_place else [Free("z")]),
        Alloc("dx"), DotCall(full(dx, lead=True), dz3, transposed(w3)),
        Alloc("dw"), DotCall(full(dw, lead=True), transposed(x3), dz3),
        Free("z" if in_place else "dz"), Free("x"), Free("w"),
    )  # fmt: skip
    kernels = (kernel("y"), kernel("z" if in_place else "dz", "db"))
    buffers = (x, w, b, z, y, dy, dz, dx, dw, db)
    return Step(
        buffers, kernels, forward, backward, (full(y),), (full(dx), full(dw), full(db)), ("x", "w", "z")
    )  # fmt: skip


def square_kernels(dtype: DType = F32) -> tuple[KernelSource, ...]:
    first = KernelSource("square_bias", "numpy", SQUARE, tuple((p, dtype) for p in ("z", "b", "y")), (1, 1), 4, 1)
    names = ("z", "dy", "dz", "db")
    second = KernelSource(
        "square_bias_backward", "numpy", SQUARE_BACKWARD, tuple((p, dtype) for p in names), (1, 1), 4, 1
    )
    return first, second


def square_artifact(step: Step, dtype: DType = F32) -> Artifact:
    kernels = square_kernels(dtype)
    return Artifact(kernels, print_host(step, [k.entry for k in kernels], tangent_base=3))


def original(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
    return ((x @ w) ** 2 + b,)


def square_spec(m: int, k: int, n: int, dtype: DType = F32, *, in_place: bool = False, **options: object) -> StepSpec:
    artifact = square_artifact(square_step(m, k, n, dtype, in_place=in_place), dtype)
    loaded = LoadedStep(artifact, "interpret", "cpu", poison=True)
    options = {"original": original, **options}
    return StepSpec(loaded, 3, (True,), tangent_of=(0,), grad_of=(0, 1, 2), **options)


def square_inputs(m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = ((m, k), (k, n), (n,))
    return [torch.randn(s, generator=rng).to(dtype).requires_grad_() for s in shapes]


def host_spec(text: str, needs: tuple[str, ...] = (), **options: object) -> StepSpec:
    """A spec around hand-written launch code."""
    loaded = LoadedStep(Artifact((), HostSource(text, needs)), "interpret", "cpu")
    return StepSpec(loaded, **options)

"""What of the runtime only a GPU can show: launches, streams, graphs, library products, allocation, timing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megafuse.codegen.artifact import Artifact, KernelSource
from megafuse.codegen.host import print_host
from megafuse.core.dtypes import DType
from megafuse.runtime import dots, environment, shim, timer
from megafuse.runtime.autograd import StepSpec, apply
from megafuse.runtime.device import live_device_spec
from megafuse.runtime.offline import compile_offline
from megafuse.runtime.step import LoadedStep

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from runtime_examples import original, square_inputs, square_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
M, K, N = 64, 32, 128  # N is the kernels' block

ADD = '''"""y = x + 1 over 1024 elements."""
import triton
import triton.language as tl


@triton.jit
def add_one(x_ptr, y_ptr):
    offs = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs) + 1)
'''
SQUARE = '''"""y = z * z + b, one row a program."""
import triton
import triton.language as tl


@triton.jit
def square_bias(z_ptr, b_ptr, y_ptr):
    offs = tl.arange(0, 128)
    rows = tl.program_id(0) * 128 + offs
    z = tl.load(z_ptr + rows).to(tl.float32)
    tl.store(y_ptr + rows, z * z + tl.load(b_ptr + offs).to(tl.float32))
'''
SQUARE_BACKWARD = '''"""dz = 2 z dy; db = sum of dy over rows; one program."""
import triton
import triton.language as tl


@triton.jit
def square_bias_backward(z_ptr, dy_ptr, dz_ptr, db_ptr):
    offs = tl.arange(0, 128)
    acc = tl.zeros([128], tl.float32)
    for row in range(64):
        dy = tl.load(dy_ptr + row * 128 + offs).to(tl.float32)
        acc += dy
        tl.store(dz_ptr + row * 128 + offs, 2 * dy * tl.load(z_ptr + row * 128 + offs).to(tl.float32))
    tl.store(db_ptr + offs, acc)
'''


def add_source() -> KernelSource:
    return KernelSource("add_one", "triton", ADD, (("x_ptr", DType.F32), ("y_ptr", DType.F32)), (8, 1), 4, 1, (1,))


def square_sources(dtype: DType) -> tuple[KernelSource, KernelSource]:
    first, second = (tuple((p, dtype) for p in names.split()) for names in ("z b y", "z dy dz db"))
    return (
        KernelSource("square_bias", "triton", SQUARE, first, (M, 1), 4, 1),
        KernelSource("square_bias_backward", "triton", SQUARE_BACKWARD, second, (1, 1), 4, 1),
    )


def cuda_spec(dtype: DType, **options: bool) -> StepSpec:
    first = KernelSource("square_bias", "triton", SQUARE, tuple((p, dtype) for p in "zby"), (M, 1), 4, 1)
    names = ("z", "dy", "dz", "db")
    second = KernelSource(
        "square_bias_backward", "triton", SQUARE_BACKWARD, tuple((p, dtype) for p in names), (1, 1), 4, 1
    )
    step = square_step(M, K, N, dtype, in_place=options.get("in_place", False))
    host = print_host(step, [first.entry, second.entry], tangent_base=3)
    loaded = LoadedStep(Artifact((first, second), host), "cuda", "cuda", poison=options.get("poison", False))
    return StepSpec(loaded, 3, (True,), tangent_of=(0,), grad_of=(0, 1, 2), original=original)


def cuda_inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [t.detach().cuda().requires_grad_() for t in square_inputs(M, K, N, dtype)]


def kernels_of(work: Callable[[], object]) -> list[str]:
    """Names of the GPU kernels and copies that ``work`` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        work()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def test_fast_launches_are_bound_on_known_versions_and_right() -> None:
    kernel = shim.cuda_kernel(add_source())
    base = torch.randn(1040, device="cuda")
    for start in (0, 4, 1, 2):  # 16-byte aligned twice, then not
        x = base[start : start + 1024]
        for _ in range(3):
            y = torch.full_like(x, float("nan"))
            kernel.launch(0, x.data_ptr(), y.data_ptr())
            assert torch.equal(y, x + 1)
    known = shim.triton_version() in shim._BINDERS
    assert all((bound is not None) is known for bound in kernel.variants.values())
    assert len(kernel.variants) == 2
    if known:
        y.zero_()
        kernel.direct(torch.cuda.current_device())(
            torch.cuda.current_stream().cuda_stream, base.data_ptr(), y.data_ptr()
        )
        assert torch.equal(y, base[:1024] + 1)


def test_fast_launch_costs_less_than_the_plain_one() -> None:
    kernel, x = shim.cuda_kernel(add_source()), torch.randn(1024, device="cuda")
    pointers = (x.data_ptr(), torch.empty_like(x).data_ptr())
    plain = timer.time_host(lambda: kernel.plain(pointers))
    fast = timer.time_host(lambda: kernel.launch(0, *pointers))
    print(f"host time of a launch: plain {plain}, fast {fast}")
    if shim.triton_version() in shim._BINDERS:
        assert fast.median < plain.median


def test_hooks_see_launches() -> None:
    triton = pytest.importorskip("triton")
    knobs = pytest.importorskip("triton.knobs")
    if not hasattr(knobs.runtime.launch_enter_hook, "add"):
        pytest.skip(f"Triton {triton.__version__} has no hook chains")
    run, x = shim.cuda_launcher(add_source()), torch.randn(1024, device="cuda")
    y, seen = torch.empty_like(x), []
    hook = seen.append
    run(x, y)
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        run(x, y)
        run(x, y)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    run(x, y)
    assert len(seen) == 2


def test_launches_go_to_the_current_stream() -> None:
    run, side = shim.cuda_launcher(add_source()), torch.cuda.Stream()
    x = torch.zeros(1024, device="cuda")
    y = torch.empty_like(x)
    run(x, y)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(5)
        run(x, y)  # on any other stream it would read zeros
    torch.cuda.synchronize()
    assert y.eq(6).all()


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F16])
@pytest.mark.parametrize("in_place", [False, True])
def test_step_agrees_with_eager_and_repeats_bitwise(dtype: DType, in_place: bool) -> None:
    torch_dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype.value]
    spec, inputs = cuda_spec(dtype, in_place=in_place, poison=True), cuda_inputs(torch_dtype)
    (y,) = apply(spec, *inputs)
    tangent = torch.randn_like(y)
    runs = [torch.autograd.grad(y, inputs, tangent, retain_graph=keep) for keep in (True, True, False)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    (exact,) = original(*wide)
    expected = torch.autograd.grad(exact, wide, tangent.double())
    tolerance = 1e-4 if dtype is DType.F32 else 5e-2
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=tolerance)
    for grads in runs:
        for found, first, wanted in zip(grads, runs[0], expected, strict=True):
            assert torch.equal(found, first)
            torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance * wanted.std().item())


def test_no_copy_kernel_runs_in_a_step() -> None:
    spec, inputs = cuda_spec(DType.BF16), cuda_inputs(torch.bfloat16)
    tangent = torch.randn(M, N, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        for t in inputs:
            t.grad = None
        apply(spec, *inputs)[0].backward(tangent)

    step()
    found = kernels_of(step)
    print(found)
    assert not [name for name in found if "copy" in name.lower() or "clone" in name.lower() or "Memcpy" in name]
    assert sum("square_bias" in name for name in found) == 2


def test_saved_tensors_are_freed_and_memory_returns() -> None:
    spec, inputs = cuda_spec(DType.F32), cuda_inputs()
    apply(spec, *inputs)[0].sum().backward()
    for t in inputs:
        t.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        apply(spec, *inputs)[0].sum().backward()
        for t in inputs:
            t.grad = None
    assert torch.cuda.memory_allocated() == before


def test_a_step_can_be_captured_in_a_cuda_graph() -> None:
    spec, inputs = cuda_spec(DType.F32), cuda_inputs()
    tangent = torch.randn(M, N, device="cuda")
    expected = torch.autograd.grad(apply(spec, *inputs)[0], inputs, tangent)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.autograd.grad(apply(spec, *inputs)[0], inputs, tangent)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(apply(spec, *inputs)[0], inputs, tangent)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_products_copy_no_operand() -> None:
    notes: list[str] = []
    table = dots.products(torch.device("cuda"), notes)
    a = torch.randn(128, 8, 64, device="cuda", dtype=torch.bfloat16).transpose(0, 1)  # [8, 128, 64], batch inside
    b = torch.randn(8, 256, 64, device="cuda", dtype=torch.bfloat16).mT
    out = torch.empty(128, 8, 256, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
    cases = [("bmm", (a, b), out), ("mm", (a[0], b[0]), out[0])]
    for name, operands, result in cases:
        table[name](*operands, out=result)
        found = kernels_of(lambda: table[name](*operands, out=result))  # noqa: B023
        assert len(found) == 1, found
        exact = getattr(torch, name)(*[t.double() for t in operands])
        torch.testing.assert_close(result.double(), exact, rtol=2e-2, atol=2e-1)
    assert notes == []


def test_bias_and_wide_results() -> None:
    notes: list[str] = []
    table = dots.products(torch.device("cuda"), notes)
    a, b = (torch.randn(4, 64, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    bias = torch.randn(64, device="cuda", dtype=torch.float16)
    for name, operands in {
        "addmm": (bias, a[0], b[0]),
        "baddbmm": (bias, a, b),
        "mm": (a[0], b[0]),
        "bmm": (a, b),
    }.items():
        exact = getattr(torch, name)(*[t.double() for t in operands])
        for dtype, tolerance in ((torch.float16, 1e-2), (torch.float32, 1e-4)):
            out = torch.empty(exact.shape, device="cuda", dtype=dtype)
            table[name if dtype is torch.float16 else f"mixed_{name}"](*operands, out=out)
            torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance * 10)
    print(notes)


def test_timers_and_facts() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    y = torch.empty_like(x)
    events = timer.time_events(lambda: y.copy_(x))
    graph = timer.time_graph([lambda: y.copy_(x)] * 4)
    host = timer.time_host(lambda: y.copy_(x), steps=50)
    print(events, graph, host, environment.environment(), live_device_spec(), sep="\n")
    assert 10 < events.median < 2000
    assert 5 < graph.median < 2000
    assert host.median > 1


def test_offline_reports_agree_with_the_driver() -> None:
    source = add_source()
    major, minor = torch.cuda.get_device_capability()
    (report,) = compile_offline([source], major * 10 + minor)
    x = torch.randn(1024, device="cuda")
    compiled = shim.cuda_kernel(source).plain((x.data_ptr(), torch.empty_like(x).data_ptr()))
    assert report.error == ""
    assert report.registers == compiled.n_regs
    assert report.shared == compiled.metadata.shared

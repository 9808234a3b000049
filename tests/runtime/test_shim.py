from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megafuse.codegen.artifact import KernelSource
from megafuse.core.dtypes import DType
from megafuse.core.errors import TargetError
from megafuse.runtime import assembled, shim, shim_worker
from megafuse.runtime.offline import compile_offline
from megafuse.runtime.shim_worker import fault_of, read_before_written

ADD = '''"""y = x + 1, in blocks of 64."""
import triton
import triton.language as tl


@triton.jit
def add_one(x_ptr, y_ptr, BLOCK: tl.constexpr = 64):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs) + 1)
'''


def source(
    dtype: DType = DType.F32, text: str = ADD, entry: str = "add_one", grid: tuple[int, int] = (2, 1)
) -> KernelSource:
    return KernelSource(entry, "triton", text, (("x_ptr", dtype), ("y_ptr", dtype)), grid, 4, 1, (1,))


class FakeKernel:
    """A JIT kernel whose plain launches and native launches are logged."""

    def __init__(self) -> None:
        self.plain, self.warmed, self.native, self.pre_run_hooks = 0, [], [], []
        self.asm: dict[str, object] = {}
        self.fn = lambda x, y, block=64: None
        self.run = SimpleNamespace(
            launch=lambda *a: self.native.append(a), global_scratch_size=0, profile_scratch_size=0, gsan_enabled=False,
            launch_cooperative_grid=False, launch_pdl=True, arg_annotations="notes", kernel_signature=b"sig",
        )  # fmt: skip

    def __getitem__(self, grid):
        def call(*tensors, num_warps, num_stages):
            self.plain += 1
            return SimpleNamespace(run=self.run, function=77, packed_metadata=(4, 1, 0))

        return call

    def warmup(self, *tensors, grid, num_warps, num_stages):
        self.warmed.append(self.plain)
        for hook in self.pre_run_hooks:
            hook(*tensors)
        return SimpleNamespace(asm=self.asm)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch):
    """``make(version) -> (kernel, launch, runtime knobs)`` on CPU tensors, which count as device -1."""

    def make(version: str, grid: tuple[int, int] = (2, 1)):
        kernel = FakeKernel()
        hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=SimpleNamespace(calls=[]))
        module = SimpleNamespace(__version__=version, knobs=SimpleNamespace(runtime=hooks))
        monkeypatch.setattr(shim, "_triton", lambda: module)
        monkeypatch.setattr(shim, "_entry", lambda _: kernel)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        return kernel, shim.cuda_launcher(source(grid=grid)), hooks

    return make


def test_36_calls_the_native_launcher_with_addresses(fake) -> None:
    kernel, launch, _ = fake("3.6.0")
    x, y = torch.zeros(128), torch.zeros(128)
    launch(x, y)
    assert (kernel.plain, kernel.native) == (1, [])
    launch(x, y)
    expected = (2, 1, 1, 5, 77, False, True, None, None, (4, 1, 0), None, None, None, x.data_ptr(), y.data_ptr(), 64)
    assert (kernel.plain, kernel.native) == (1, [expected])


def test_39_calls_the_native_launcher_with_addresses(fake) -> None:
    kernel, launch, _ = fake("3.9.1")
    x, y = torch.zeros(128), torch.zeros(128)
    launch(x, y)
    launch(x, y)
    expected = (
        2, 1, 1, 5, 77, False, True, (4, 1, 0), None, None, None, None, None, "notes", b"sig",
        (x.data_ptr(), y.data_ptr(), 64),
    )  # fmt: skip
    assert kernel.native == [expected]


def test_unknown_versions_and_unknown_launchers_take_the_plain_road(fake) -> None:
    for version, attribute in (("3.2.0", None), ("4.0.0", None), ("3.6.0", "launch"), ("3.9.0", "gsan_enabled")):
        kernel, launch, _ = fake(version)
        if attribute:
            delattr(kernel.run, attribute)
        for _ in range(3):
            launch(torch.zeros(128), torch.zeros(128))
        assert (kernel.plain, kernel.native) == (3, [])


def test_kernels_with_scratch_memory_take_the_plain_road(fake) -> None:
    kernel, launch, _ = fake("3.6.0")
    kernel.run.global_scratch_size = 128
    for _ in range(2):
        launch(torch.zeros(128), torch.zeros(128))
    assert kernel.plain == 2


def test_hooks_see_every_launch(fake) -> None:
    kernel, launch, knobs = fake("3.6.0")
    x, y = torch.zeros(128), torch.zeros(128)
    launch(x, y)
    knobs.launch_enter_hook.calls.append(print)
    launch(x, y)
    assert (kernel.plain, len(kernel.native)) == (2, 0)
    knobs.launch_enter_hook.calls.clear()
    kernel.pre_run_hooks.append(print)
    launch(x, y)
    assert (kernel.plain, len(kernel.native)) == (3, 0)
    kernel.pre_run_hooks.clear()
    launch(x, y)
    assert (kernel.plain, len(kernel.native)) == (3, 1)


def test_each_alignment_pattern_has_its_own_variant(fake) -> None:
    kernel, launch, _ = fake("3.6.0")
    base = torch.zeros(200)
    aligned, odd = base[:128], base[1:129]
    for x, y in ((aligned, aligned), (odd, aligned), (aligned, odd), (odd, odd)) * 2:
        launch(x, y)
    assert (kernel.plain, len(kernel.native)) == (4, 4)


def test_an_empty_grid_launches_nothing(fake) -> None:
    kernel, launch, _ = fake("3.6.0", grid=(0, 1))
    launch(torch.zeros(0), torch.zeros(0))
    assert kernel.plain == 0


def test_the_interpreter_must_be_chosen_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(TargetError, match="interpreter is off"):
        shim.interpreted_kernel(source())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(TargetError, match="wrong in bf16"):
        shim.interpreted_kernel(source(DType.BF16))
    with pytest.raises(TargetError, match="would not run on the GPU"):
        shim.cuda_launcher(source())


def test_interpreted_kernels_run_on_cpu_tensors() -> None:
    pytest.importorskip("triton")
    program = """
import torch
from megafuse.runtime.places import Place
from test_shim import DType, shim, source
for dtype, torch_dtype in ((DType.F32, torch.float32), (DType.F16, torch.float16)):
    x, y = torch.randn(128).to(torch_dtype), torch.zeros(128, dtype=torch_dtype)
    shim.interpreted_kernel(source(dtype))(None, Place(x.requires_grad_()), Place(y))
    assert torch.equal(y, x + 1), y
print("equal")
"""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), *filter(None, sys.path)])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "equal\n", done.stderr


def test_offline_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # must not reach the compiler
    crash = source(text="import os\nos._exit(3)\n", entry="crash")
    wrong = source(text=ADD.replace("tl.load(x_ptr", "tl.load(nothing"))
    reports = compile_offline([source(), crash, wrong, source(DType.BF16)], 90)
    good, crashed, failed, other = reports
    for report in (good, other):
        assert report.error == ""
        assert 0 < report.registers < 256 and report.spills == 0 and report.cubin_bytes > 500 and report.ptx_bytes > 500
    assert "ended with 3" in crashed.error
    assert "nothing" in failed.error
    assert [r.entry for r in reports] == ["add_one", "crash", "add_one", "add_one"]


def test_offline_compilation_of_other_text() -> None:
    numpy = KernelSource("k", "numpy", "", (), (1, 1), 4, 1)
    with pytest.raises(TargetError, match="numpy text"):
        compile_offline([numpy])
    assert compile_offline([]) == []


@pytest.mark.parametrize(
    ("version", "capability", "skip", "expected"),
    [((3, 4), (9, 0), 0, "described"), ((3, 9), (10, 0), 0, "described"), ((3, 3), (9, 0), 0, "plain"),
     ((3, 6), (8, 0), 0, "plain"), ((3, 6), (9, 0), 1, "plain")],
)  # fmt: skip
def test_descriptors_are_made_of_aligned_tensors_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch, version, capability, skip, expected
):
    monkeypatch.setattr(shim, "triton_version", lambda: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(shim, "_entry", lambda source: source.text)
    called: list[str] = []
    monkeypatch.setattr(shim.CudaKernel, "launch", lambda self, *_: called.append(self.kernel))
    monkeypatch.setattr(shim.CudaKernel, "direct", lambda self, device: self.kernel)
    fallback = dataclasses.replace(source(), text="plain")
    kernel = shim.cuda_kernel(dataclasses.replace(source(), text="described", aligned=(1,), fallback=fallback))
    kernel.launch(0, 256 + 4, 512 + 4 * skip)  # what no descriptor is made of may lie anywhere
    assert called == [expected]
    assert skip or kernel.direct(0) == expected


def test_descriptors_get_memory_from_pytorch_in_any_thread():
    pytest.importorskip("triton")
    allocation = pytest.importorskip("triton.runtime._allocation")
    found = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *tensors, **options: found.append(allocation._allocator.get()(64, 16, None))

    kernel = shim.CudaKernel(Kernel(), dataclasses.replace(source(), aligned=(0,)))
    before = allocation._allocator.get()
    thread = threading.Thread(target=kernel.plain, args=((256, 512),))
    thread.start()
    thread.join()
    kernel.plain((256, 512))
    assert [(t.numel(), t.dtype) for t in found] == [(64, torch.int8)] * 2
    assert allocation._allocator.get() is before, "the user's allocator stays"


def test_the_direct_launch_is_that_of_aligned_addresses(fake) -> None:
    kernel, _, _ = fake("3.6.0")
    made = shim.CudaKernel(kernel, source())
    base = torch.zeros(200).data_ptr()
    base += -base % 16
    made.launch(0, base + 4, base)
    assert made.direct(-1) is None
    made.launch(0, base, base)
    bound = made.direct(-1)
    bound(9, base, base + 4)
    assert kernel.native[-1][3] == 9
    assert kernel.native[-1][-3:] == (base, base + 4, 64)
    assert made.direct(0) is None
    empty = shim.CudaKernel(kernel, source(grid=(0, 1)))
    before = len(kernel.native)
    empty.direct(0)(9, base, base)
    assert len(kernel.native) == before


SASS = """
        /*0110*/                   S2UR UR4, SR_CgaCtaId ;
        /*0120*/                   UMOV UR61, 0x400 ;
        /*0130*/              @!P0 ULEA UR61, UR4, UR61, 0x18 ;
        /*0140*/                   UIADD3 UR8, UP0, UR61, 0x2, URZ ;
        /*0150*/                   UIADD3.X UR9, UR4, 0x40000040, URZ, UP0, !UPT ;
        /*0160*/                   UIADD3.64 UR16, UR8, 0x2, URZ ;
        /*0168*/                   UIADD3.64 UR18, UR8, 0x4, URZ ;
        /*0170*/                   HGMMA.64x32x16.F32 R40, gdesc[UR16], R40 ;
        /*0178*/                   UIADD3.64 UR26, UR8, 0x6, URZ ;
        /*017c*/                   HGMMA.64x32x16.F32 R24, R40, gdesc[UR24], R24 ;
        /*0180*/                   STS.128 [R76+UR17+0x1c00], R24 ;
        /*0190*/                   STS.64 [R76+UR61], R24 ;
        /*01a0*/                   ULDC.64 UR20, c[0x0][0x208] ;
        /*01b0*/              @!P0 LDG.E.U16 R10, desc[UR20][R4.64] ;
"""


def test_registers_that_are_read_before_they_are_written_are_found() -> None:
    """As ptxas 12.8 drops the write of an address that two instructions read, or of its upper half."""
    assert not read_before_written(SASS)
    assert set(read_before_written(SASS.replace("UMOV UR61, 0x400", "NOP"))) == {"UR61"}
    assert set(read_before_written(SASS.replace("UIADD3.X UR9, UR4", "UIADD3.X UR10, UR4"))) == {"UR9"}
    assert set(read_before_written(SASS.replace("UIADD3 UR8, UP0, UR61", "UIADD3 UR8, UP0, UR8"))) == {"UR8"}
    assert set(read_before_written(SASS.replace("UIADD3.64 UR16, UR8, 0x2, URZ", "NOP"))) == {"UR16", "UR17"}
    assert set(read_before_written(SASS.replace("UIADD3.64 UR18, UR8, 0x4, URZ", "NOP"))) == {"UR18", "UR19"}
    assert set(read_before_written(SASS.replace("UIADD3.64 UR26, UR8, 0x6, URZ", "NOP"))) == {"UR26", "UR27"}
    assert set(read_before_written(SASS.replace("ULDC.64 UR20", "ULDC UR20"))) == {"UR21"}


def test_machine_code_is_looked_at_where_operands_have_several_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def listing(cubin: bytes, option: str) -> str:
        asked.append(option)
        return SASS.replace("UMOV UR61, 0x400", "NOP")

    monkeypatch.setattr(shim_worker, "_cuobjdump", listing)
    wide, narrow = 4611686293305294848, -9223371899415822336
    one = f"or.b64 \t%rd37, %rd131, {wide};\nadd.s64 \t%rd39, %rd131, {wide + 2};"
    assert fault_of(one, b"") == "" and not asked
    assert "UR61" in fault_of(f"{one}\nor.b64 \t%rd38, %rd132, {narrow};", b"") and asked == ["-sass"]


ADDED = "add.s16x2 \t%r1, %r2, %r3;\n"
LOST = "/*0100*/ VIADD.16x2 R5, R4, 0x10001 ;\n/*0110*/ VIADD.16x2 R4, R4, 0x0 ;"


@pytest.mark.parametrize("sass", [LOST, "/*0100*/ @P0 VIADD.16x2 R5, R4, -0x1 ;"])
def test_packed_additions_of_constants_are_refused(sass: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shim_worker, "_cuobjdump", lambda cubin, option: sass)
    assert "packed" in shim_worker.fault_of(ADDED, b"")
    assert not shim_worker.fault_of("add.s32 \t%r1, %r2, 65537;", b"")


def test_packed_additions_of_values_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    values = "/*0100*/ VIADD.16x2 R5, R4, R9 ;\n/*0110*/ IADD3 R4, R4, 0x10001, RZ ;"
    monkeypatch.setattr(shim_worker, "_cuobjdump", lambda cubin, option: values)
    assert not shim_worker.fault_of(ADDED, b"")


def test_packed_additions_that_cannot_be_looked_at_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(cubin: bytes, option: str) -> str:
        raise FileNotFoundError("cuobjdump")

    monkeypatch.setattr(shim_worker, "_cuobjdump", missing)
    assert "packed" in shim_worker.fault_of(ADDED, b"")


KEPT = """
        /*0dc0*/                   MOV R12, UR12 ;
        /*0dd0*/                   UIADD3.64 UR4, UR8, 0x3fe, URZ ;
        /*0de0*/                   {use} ;
        /*0df0*/              {guard} IMAD.U32 R12, RZ, RZ, UR5 ;
"""


@pytest.mark.parametrize("use", ["R2UR UR5, R13", "STG.E desc[UR60][R6.64], R5", "HGMMA.64x16x16 R24, gdesc[UR8], R24"])
def test_addresses_kept_in_a_register_and_written_over_are_seen(use: str) -> None:
    assert shim_worker.written_for_nothing(KEPT.format(use=use, guard="")) == ["R12"]
    assert not shim_worker.written_for_nothing(KEPT.format(use=use, guard="@P0"))


@pytest.mark.parametrize(
    "use",
    [
        "IMAD R12, R21, 0x1400, RZ",
        "R2UR UR5, R12", "STG.E.128 desc[UR60][R6.64], R12", "STS.64 [R12+0x10], R2", "LDG.E R8, desc[UR60][R12.64]",
        "STS.128 [R4], R10", "IADD3 R12, R12, 0x1, RZ", "HGMMA.64x128x16.F32 R8, gdesc[UR4], R8", "@P0 BRA 0x40",
        "EXIT",
    ],
)  # fmt: skip
def test_addresses_that_are_read_are_not(use: str) -> None:
    assert not shim_worker.written_for_nothing(KEPT.format(use=use, guard=""))


def test_what_the_assembler_made_wrong_is_never_launched(fake) -> None:
    kernel, _, _ = fake("3.6.0")
    kernel.asm = {"ptx": ADDED, "cubin": b""}
    made = shim.CudaKernel(kernel, source())
    for refused in (made.assemble, lambda: made.launch(0, 256, 512)):
        with pytest.raises(TargetError, match="add_one: LLVM made packed"):
            refused()
    assert (kernel.plain, kernel.native) == (0, [])
    kernel.asm = {}
    made.assemble()
    assert kernel.plain == 0
    made.launch(0, 256, 512)
    made.launch(0, 256, 512)
    assert kernel.plain == 1
    assert kernel.warmed == [0, 0, 0, 0], "compiled before the first launch, and not again"
    nothing = shim.CudaKernel(kernel, source(grid=(0, 1))).assemble()
    assert len(kernel.warmed) == 4
    assert (nothing.code, nothing.shared, nothing.spills()) == ("", 0, 0)


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_said_of_a_kernel_that_was_not_launched(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(cubin: bytes) -> dict[str, int]:
        if fails:
            raise subprocess.CalledProcessError(1, "cuobjdump")
        return {"registers": 255, "spills": len(cubin)}

    monkeypatch.setattr(assembled, "resource_usage", usage)
    made = assembled.Assembled(SimpleNamespace(asm={"cubin": b"code"}, metadata=SimpleNamespace(shared=4096)))
    assert (len(made.code), made.shared, made.spills()) == (64, 4096, 0 if fails else 4)


def test_hooks_of_a_kernel_do_not_see_that_it_is_compiled(fake) -> None:
    kernel, _, _ = fake("3.6.0")
    seen: list[tuple[object, ...]] = []

    def hook(*tensors: object) -> None:
        seen.append(tensors)

    kernel.pre_run_hooks.append(hook)
    shim.CudaKernel(kernel, source()).launch(0, 256, 512)
    assert (len(kernel.warmed), kernel.plain) == (1, 1)
    assert seen == [], "the fake's launch calls none"
    assert kernel.pre_run_hooks == [hook]

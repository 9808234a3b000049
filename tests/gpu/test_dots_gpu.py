"""Generated products inside fused modules on a GPU, right by the rule; repeated runs, tensors that are not aligned."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megafuse
from megafuse.api import engine_of
from megafuse.validate import check

pytestmark = pytest.mark.gpu

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}


class TokenFFN(nn.Module):
    """A GELU network per token; its output is added to its input."""

    def __init__(self, tokens: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(tokens, dim, hidden) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(tokens, hidden, dim) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(torch.bmm(x.transpose(0, 1), self.w1))
        return x + torch.bmm(hidden, self.w2).transpose(0, 1)


class Residual(nn.Module):
    """Linear layers with biases and a residual."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.silu(self.inner(x)))


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "small": (lambda: TokenFFN(4, 64, 128), (64, 4, 64)),
    "odd": (lambda: TokenFFN(5, 37, 91), (129, 5, 37)),
    "token_ffn": (lambda: TokenFFN(16, 512, 1024), (512, 16, 512)),
    "few_rows": (lambda: Residual(256, 512), (2, 256)),
    "residual": (lambda: Residual(1024, 4096), (2048, 1024)),
    "residual_odd": (lambda: Residual(1000, 1336), (777, 1000)),
}


@pytest.fixture
def tf32(request: pytest.FixtureRequest) -> Iterator[None]:
    """TF32 as the case's dtype says."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.node.callspec.params.get("dtype") == "tf32"
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def make(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    build, shape = MODULES[name]
    torch.manual_seed(0)
    return build().to("cuda", dtype), torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)


def fused_dots(fused: object) -> int:
    """Generated products of all bindings."""
    made = [b.compiled for b in engine_of(fused).bindings if b.compiled is not None]
    return sum(k.dot is not None for c in made for k in c.step.kernels)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODULES)
def test_modules_with_generated_products(name: str, dtype: str) -> None:
    module, x = make(name, DTYPES[dtype])
    fused = megafuse.fuse(module, x, dots="auto", chains=False)
    assert bool(fused_dots(fused)) == (dtype in ("fp16", "bf16"))  # fp32 products stay with the library
    check(module, x, fused=fused).raise_if_failed()


@pytest.mark.parametrize(("rows", "width"), [(65536, 128), (30011, 91)])
def test_weight_gradients_in_parts_of_k(rows: int, width: int) -> None:
    torch.manual_seed(0)
    module = nn.Linear(width, width, bias=False).to("cuda", torch.bfloat16)
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    fused = megafuse.fuse(module, x, dots="auto", chains=False)
    made = [b.compiled for b in engine_of(fused).bindings if b.compiled is not None]
    assert any(k.dot is not None and k.dot.splits > 1 for c in made for k in c.step.kernels)
    check(module, x, fused=fused).raise_if_failed()


def test_bias_gradients_from_the_tiles_of_a_product() -> None:
    module, x = make("residual_odd", torch.bfloat16)
    fused = megafuse.fuse(module, x, dots="auto", chains=False)
    made = [b.compiled for b in engine_of(fused).bindings if b.compiled is not None]
    assert any(w.startswith("partial") for c in made for k in c.step.kernels if k.dot is not None for w in k.writes)
    check(module, x, fused=fused).raise_if_failed()


def test_a_budget_of_memory_is_kept() -> None:
    """Measured, not predicted: peak of the allocations of a step."""

    def peak(fused: nn.Module) -> int:
        fused(x).sum().backward()
        module.zero_grad(set_to_none=True)
        x.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fused(x).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    torch.manual_seed(0)
    module = nn.Sequential(*(Residual(512, 2048) for _ in range(4))).to("cuda", torch.bfloat16)
    x = torch.randn(8192, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    free = peak(megafuse.fuse(module, x, chains=False))
    fused = megafuse.fuse(module, x, chains=False, memory_budget=int(0.7 * free))
    assert peak(fused) < 0.75 * free
    check(module, x, fused=fused).raise_if_failed()


def test_tensors_that_are_not_aligned() -> None:
    module, x = make("small", torch.bfloat16)
    fused = megafuse.fuse(module, x, dots="auto", chains=False)
    assert fused_dots(fused)
    flat = torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)
    moved = flat[1:].view(x.shape).copy_(x.detach()).requires_grad_()
    out = fused(moved)
    out.sum().backward()
    assert torch.equal(out, fused(x))


def test_the_step_can_be_captured_in_a_graph() -> None:
    """The memory that descriptors take is the graph's own."""
    module, x = make("token_ffn", torch.bfloat16)
    fused = megafuse.fuse(module, x, dots="auto")
    assert fused_dots(fused)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            expected = fused(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = fused(x)
    for _ in range(2):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)

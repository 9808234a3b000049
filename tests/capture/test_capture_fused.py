"""The table of calls through the whole road, forward and backward: in generated kernels, and right by the rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megafuse
from capture_table import MODULES, OPAQUE, TABLES, WIDE
from megafuse.api import engine_of
from megafuse.capture.registry import lookup
from megafuse.compiler import Compiled
from megafuse.ir.types import Cast, Map, Opaque, Reduce
from megafuse.validate import CheckOptions, check

FEW = CheckOptions(seeds=3, small_seeds=2, repeats=1)
FORMS = {"fp32": (torch.float32, (4, 4, 8)), "bf16_odd": (torch.bfloat16, (3, 5, 7))}
NO_FORMULA = set("equal frexp gcd lcm igamma igammac".split())
NO_DERIVATIVE = {  # special functions that PyTorch itself cannot differentiate, or only in part
    f"special_{name}" for name in "airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_k0 "
    "modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 zeta".split()
}  # fmt: skip
RECURRENCES = {  # of a length that is data
    f"special_{kind}polynomial_{name}" for kind, names in (("chebyshev_", "tuvw"), ("shifted_chebyshev_", "tuvw"),
    ("laguerre_", "l"), ("legendre_", "p"), ("hermite_", ["h", "he"])) for name in names
}  # fmt: skip
SPECIAL = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0, 1e-3, 3e38, -0.5, 2.0, 0.5])
CPU_DIFFERS = {  # where PyTorch's CPU kernels and CUDA kernels disagree; the formula is that of CUDA
    "addcmul": "overflow of the product before it is scaled",
    "fmod": "huge quotients are NaN on the CPU",
    "logit": "gradient at NaN",
    "hard": "gradient at NaN",
    "shrinks": "gradient at NaN",
}
TIES = torch.tensor([1.0, 2.0, 3.0])


def faults_of_pytorch() -> dict[str, str]:
    """Functions of the table that older releases of PyTorch get wrong, or do not have, where they can be compared."""
    found = {}
    x = torch.ones(2, requires_grad=True)
    try:
        torch.autograd.grad(x.aminmax(dim=0).max, x)
    except RuntimeError as error:
        found["aminmax"] = f"this release of PyTorch: {error}"
    if torch.full((64,), 3e38).log1p().isinf().any():  # a vector: single values are right
        found["log1p"] = "this release of PyTorch: on the CPU log1p of large numbers is infinite"
    return found


FAULTS = faults_of_pytorch()


def skip_if_faulty(name: str) -> None:
    if name in FAULTS:
        pytest.skip(FAULTS[name])


def inputs(dtype: torch.dtype, shape: tuple[int, ...], values: Tensor | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    if values is None:
        drawn = [torch.randn(shape, generator=generator) for _ in range(3)]
    else:
        drawn = [values[torch.randint(len(values), shape, generator=generator)] for _ in range(3)]
    return [x.to(dtype).requires_grad_() for x in drawn]


def compiled_of(fused: Any) -> Compiled:
    compiled = engine_of(fused).bindings[0].compiled
    assert compiled is not None
    return compiled


def left_out(fused: Any) -> list[str]:
    return [str(entry) for entry in compiled_of(fused).captured.support.opaque]


def groups(size: int = 4) -> list[Any]:
    """A few functions of a table at a time: one capture for each group."""
    parts = [(title, list(table)[i : i + size]) for title, table in TABLES.items() for i in range(0, len(table), size)]
    return [pytest.param(title, names, id=f"{title}-{names[0]}") for title, names in parts]


def grouped(title: str, names: list[str]) -> Any:
    def every(x: Tensor, y: Tensor, z: Tensor) -> dict[str, Any]:
        return {name: TABLES[title][name](x, y, z) for name in names}

    return every


def test_every_pointwise_op_is_known() -> None:
    """PyTorch's own list: each is converted, taken apart on every device, or one of those named here."""
    missing = set()
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None) if space == "aten" else None
        if op is None or torch.Tag.pointwise not in op.tags or op._schema.is_mutable or lookup(op):
            continue
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        if not has(op.name(), "CompositeImplicitAutograd") or has(op.name(), "CPU"):
            missing.add(base)
    assert {name for name in missing if not name.startswith("special_")} <= NO_FORMULA
    assert {name for name in missing if name.startswith("special_")} <= NO_DERIVATIVE | RECURRENCES


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("title", "names"), groups())
def test_fused_and_right(title: str, names: list[str], form: str) -> None:
    names = [name for name in names if name != "aminmax" or name not in FAULTS]
    every, args = grouped(title, names), inputs(*FORMS[form])
    fused = megafuse.fuse(every, *args, target="interpret")
    assert not left_out(fused)
    check(every, *args, fused=fused, options=FEW).raise_if_failed()


@pytest.mark.parametrize("name", WIDE)
def test_what_pytorch_has_in_fp32_alone(name: str) -> None:
    args = inputs(*FORMS["fp32"])
    fused = megafuse.fuse(WIDE[name], *args, target="interpret")
    assert not left_out(fused)
    check(WIDE[name], *args, fused=fused, options=FEW).raise_if_failed()


@pytest.mark.parametrize("name", OPAQUE)
def test_left_to_aten_with_a_reason(name: str) -> None:
    """Runs as it is, says why and where; all around it is generated."""
    fn, reason = OPAQUE[name]

    def around(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return fn(x * y, y, z) * 2

    args = inputs(*FORMS["fp32"])
    fused = megafuse.fuse(around, *args, target="interpret")
    assert left_out(fused)
    assert any(reason in text and "capture_table.py" in text for text in left_out(fused)), left_out(fused)
    check(around, *args, fused=fused, options=FEW).raise_if_failed()


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    """At least 95 % of the floating-point ops other than products, and no ATen op."""
    torch.manual_seed(0)
    module, shape = MODULES[name]()
    x = torch.randn(shape, requires_grad=True)
    fused = megafuse.fuse(module, x, target="interpret")
    assert not left_out(fused)
    nodes = compiled_of(fused).graph.nodes
    made = sum(n.dtype.is_float and n.is_a(Map, Cast, Reduce) for n in nodes)
    assert made >= 0.95 * (made + sum(n.is_a(Opaque) for n in nodes)) > 0
    check(module, x, fused=fused, options=FEW).raise_if_failed()


@pytest.mark.parametrize("name", [*"extremes extremes_dim aminmax argmax norm_inf maximum fmax_fmin clamp".split()])
def test_ties(name: str) -> None:
    """Equal values share a gradient, or the first takes it, as in PyTorch."""
    skip_if_faulty(name)
    fn = next(table[name] for table in TABLES.values() if name in table)
    args = inputs(torch.float32, (4, 4, 8), TIES)
    check(fn, *args, fused=megafuse.fuse(fn, *args, target="interpret"), options=FEW).raise_if_failed()


def kinds(x: Tensor) -> Tensor:
    """0 for numbers, 1 and 2 for infinities, 3 for NaN."""
    return x.isposinf() * 1 + x.isneginf() * 2 + x.isnan() * 3


@pytest.mark.parametrize("name", [n for t in ("pointwise", "activations") for n in TABLES[t] if n not in CPU_DIFFERS])
def test_special_values(name: str) -> None:
    """NaN and infinities are where PyTorch has them, in output and gradients, for all triples of special values."""
    skip_if_faulty(name)
    fn = TABLES["pointwise"].get(name) or TABLES["activations"][name]
    triples = torch.cartesian_prod(SPECIAL, SPECIAL, SPECIAL)
    args = [triples[:, i].reshape(1, 12, 144).clone().requires_grad_() for i in range(3)]
    found = []
    for call in (fn, megafuse.fuse(fn, *args, target="interpret")):
        out = call(*args)
        found.append([out, *torch.autograd.grad(out, args, torch.ones_like(out), allow_unused=True)])
    for theirs, ours in zip(*found, strict=True):
        assert (theirs is None) == (ours is None)
        assert theirs is None or torch.equal(kinds(ours), kinds(theirs))


def test_dropout_draws_what_eager_draws() -> None:
    """The mask comes from PyTorch's generator; its product in backward is generated."""
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.3), nn.Tanh())
    x = torch.randn(5, 8, requires_grad=True)
    fused = megafuse.fuse(module, x, target="interpret")
    assert [text.split(":")[0] for text in left_out(fused)] == ["aten.native_dropout.default"]
    results = []
    for call in (module, fused, fused):
        x.grad = None
        torch.manual_seed(7)
        out = call(x)
        out.sum().backward()
        results.append((out.detach(), x.grad))
    for out, grad in results[1:]:
        torch.testing.assert_close(out, results[0][0])
        torch.testing.assert_close(grad, results[0][1])
    assert torch.equal(results[1][0], results[2][0])


def test_a_class_out_of_range_is_seen() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    target = torch.tensor([1, 9, 2, -1])
    fused = megafuse.fuse(lambda x, t: nn.functional.cross_entropy(x, t, reduction="none"), x, target,
                          target="interpret")  # fmt: skip
    assert fused(x, target).isnan().tolist() == [False, True, False, True]

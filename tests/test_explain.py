"""``explain``: what it says of kernels, products, opaque ops, memory and eager, on modules small enough to count."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megafuse
import megafuse.nn
from megafuse.compiler import compile_call
from megafuse.core.device import device_spec
from megafuse.core.text import quantity
from megafuse.explanation import estimate_eager, explain_compiled
from megafuse.explanation.text import format_plan


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        h = self.up(self.norm(x))
        return x + nn.functional.silu(h)


@pytest.fixture(scope="module")
def explained():
    x = torch.randn(6, 16, requires_grad=True)
    fused = megafuse.fuse(Gated(), x, target="interpret", chains=False)
    fused(x)
    return megafuse.explain(fused)


def test_one_plan_for_each_binding(explained):
    assert explained.subject == "Gated"
    (plan,) = explained
    assert plan.title == "x f32[6, 16]"
    assert "H200" in plan.device


def test_kernels_name_the_users_lines(explained):
    (plan,) = explained
    assert {k.forward for k in plan.kernels} == {True, False}
    lines = [s for k in plan.kernels for s in k.sources]
    assert any("test_explain.py" in s and "silu(h)" in s for s in lines)
    for kernel in plan.kernels:
        assert kernel.writes
        assert kernel.phases
        assert kernel.seconds > 0
        assert kernel.dram_bytes == sum(t.nbytes for t in (*kernel.reads, *kernel.writes))


def test_tensors_are_named_by_what_they_are(explained):
    (plan,) = explained
    words = " ".join(plan.names)
    given = ("argument x", "parameter norm.weight", "upstream gradient of output", "dot of test_explain.py:")
    for what in (*given, *(f"gradient of {n}" for n in ("argument x", "parameter norm.weight", "parameter up.bias"))):
        assert f" = {what}" in words, what
    named = {part.partition(" = ")[0].strip() for line in plan.names for part in line.split(",")}
    temporary = {t.name for c in plan.kernels for t in (*c.reads, *c.writes) if t.kind != "temp"}
    assert temporary <= named
    assert all(line in str(explained) for line in plan.names)


def test_a_plan_that_is_interpreted_says_so(explained):
    said = "its kernels run here as NumPy on the CPU (target='interpret'), not on that GPU: right, but slow"
    assert f"(sm_90)\n  {said}\n" in str(explained)


def test_sizes_that_share_a_plan_are_listed():
    fused = megafuse.fuse(Gated(), torch.randn(6, 16), target="interpret")
    for rows in (3, 5, 1, 5, 6):
        fused(torch.randn(rows, 16))
    explained = megafuse.explain(fused)
    assert [p.title.partition(" (")[0] for p in explained] == ["x f32[6, 16]", "x f32[n, 16]", "x f32[1, 16]"]
    assert [p.serves for p in explained] == ["", "n = 3, 5", ""]
    assert "3 plans, one for each kind of call" in str(explained)
    assert "sizes share this plan; so far it serves n = 3, 5\n" in str(explained)


def test_products_have_shapes_and_the_library_call(explained):
    (plan,) = explained
    assert len(plan.dots) == 3
    assert plan.flops == 3 * 2 * 6 * 16 * 16
    assert all(d.call in ("torch.mm", "torch.addmm", "torch.bmm", "torch.baddbmm") for d in plan.dots)
    assert "[1, 6, 16] x [1, 16, 16]" in plan.dots[0].what


def test_boundaries_name_kernels_and_no_node_numbers(explained):
    (plan,) = explained
    names = {k.name for k in plan.kernels}
    assert plan.edges
    for edge in plan.edges:
        assert {edge.first, edge.second} <= names
        assert "%" not in edge.reason


def test_saved_tensors_and_totals(explained):
    (plan,) = explained
    assert plan.saved_bytes == sum(t.nbytes for t in plan.saved if t.kind == "saved")
    assert plan.saved_bytes > 0
    assert plan.coverage.share == 1.0
    assert plan.dram_bytes == sum(c.dram_bytes for c in plan.calls)
    assert plan.eager is not None
    assert len(plan.eager.ops) > 5


def test_the_text_says_it_all(explained):
    text = str(explained)
    (plan,) = explained
    for part in (*(k.name for k in plan.kernels), "boundaries", "saved for backward", "predicted", "eager:", "tile"):
        assert part in text


def test_rows_abreast_are_said_in_words():
    module = nn.LayerNorm(4096, device="meta", dtype=torch.bfloat16)
    x = torch.empty(65536, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    text = format_plan(explain_compiled(compile_call(module, (x,), {}, device_spec(90))))
    assert "65536 rows of 4096 columns, in tiles of 2 rows abreast x 4096 columns" in text
    assert "in tiles of 1 row x 4096 columns" in text, "forward"


def sorted_silu(x):
    return torch.sort(nn.functional.silu(x))[0] * 2.0


def test_opaque_ops_are_named_with_line_and_reason():
    x = torch.randn(3, 8, requires_grad=True)
    (plan,) = megafuse.explain(megafuse.fuse(sorted_silu, x, target="interpret"))
    assert any("aten.sort" in o and "test_explain.py" in o for o in plan.opaque)
    assert plan.coverage.opaque > 0
    assert 0 < plan.coverage.share < 1
    assert any(not c.is_dot for c in plan.calls if hasattr(c, "is_dot"))


def test_a_binding_that_is_not_fused_says_why():
    with pytest.warns(megafuse.NotFusedWarning):
        fused = megafuse.fuse(sorted_silu, torch.randn(3, 8))
    assert "not fused" in str(megafuse.explain(fused))


def test_what_did_not_come_from_fuse_is_refused():
    with pytest.raises(megafuse.InputError, match="Linear"):
        megafuse.explain(nn.Linear(2, 2))


def test_eager_reads_inputs_and_writes_outputs_once():
    x = torch.empty(4, 8, device="meta")
    y = torch.empty(8, device="meta")
    found = estimate_eager(lambda a, b: (a + b).reshape(32).relu(), [x, y], device_spec(90))
    assert [(o.name, o.dram_bytes) for o in found.ops] == [("add", 4 * (32 + 8 + 32)), ("relu", 4 * 64)]


def test_eager_counts_flops_of_products_and_the_backward():
    a = torch.empty(4, 8, device="meta", requires_grad=True)
    b = torch.empty(8, 2, device="meta", requires_grad=True)
    found = estimate_eager(torch.mm, [a, b], device_spec(90))
    assert sum(o.flops for o in found.ops) == 3 * 2 * 4 * 8 * 2


def test_eager_without_an_estimate():
    assert estimate_eager(lambda a: a[a > 0], [torch.empty(4, device="meta")], device_spec(90)) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (12.0, "12 B"),
        (999, "999 B"),
        (999.9, "1 kB"),
        (1.68e9, "1.68 GB"),
        (0.00123, "1.23 mB"),
        (2e-9, "2 nB"),
        (9.9999e-7, "1 uB"),
    ],
)
def test_quantities(value, text):
    assert quantity(value, "B") == text


# ---------------------------------------------------------------- bad input, through the API


@pytest.fixture
def linear():
    return nn.Sequential(nn.Linear(16, 16), nn.SiLU())


def test_integer_inputs_are_named(linear):
    with pytest.raises(
        megafuse.MegafuseError, match=r"convert one of them: argument input is int64, parameter 0.weight is float32"
    ):
        megafuse.fuse(linear, torch.ones(2, 16, dtype=torch.long), target="interpret")


def test_mixed_dtypes_are_named(linear):
    with pytest.raises(
        megafuse.MegafuseError, match=r"one of them: argument input is bfloat16, parameter 0.weight is float32"
    ):
        megafuse.fuse(linear, torch.ones(2, 16, dtype=torch.bfloat16), target="interpret")


def test_mixed_devices_are_named(linear):
    with pytest.raises(megafuse.InputError, match=r"argument input is on meta, but parameter 0.weight is on cpu"):
        megafuse.fuse(linear, torch.ones(2, 16, device="meta"), target="interpret")


def test_unsupported_ops_under_strict_are_named():
    with pytest.raises(megafuse.UnsupportedError, match=r"aten.sort.*test_explain.py"):
        megafuse.fuse(sorted_silu, torch.ones(2, 16), target="interpret", strict=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_gpu_asked_for_where_there_is_none(linear):
    with pytest.raises(megafuse.TargetError, match="target='cuda'"):
        megafuse.fuse(linear, torch.ones(2, 16), target="cuda")


def test_public_names_exist():
    for name in megafuse.__all__:
        assert getattr(megafuse, name) is not None
    assert set(megafuse.__all__) <= set(dir(megafuse))
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        megafuse.nothing_of_the_kind  # noqa: B018


def test_a_module_that_was_not_called_has_no_plan_yet():
    assert "no plan yet" in str(megafuse.explain(megafuse.nn.MLP([4, 4, 2], target="interpret")))


def test_a_cast_that_lines_share_is_no_work_of_the_first_of_them() -> None:
    """The residual reads what the norm reads, widened as it is there."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.LayerNorm(512), nn.Linear(512, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(x)
            return self.out(h) + x

    x = torch.empty(4096, 512, dtype=torch.bfloat16, device="meta")
    plan = explain_compiled(compile_call(Residual().to("meta", torch.bfloat16), (x,), {}, device_spec(90)))
    last = [k for k in plan.kernels if k.forward][-1]
    assert any("self.out(h) + x" in line for line in last.sources)
    assert not any("self.norm(x)" in line for line in last.sources)

"""``explain`` gives a reason for every kernel that does not run in the one before it, in words that a user knows."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megafuse
from megafuse.explanation import PlanInfo
from megafuse.explanation.text import MAX_SOURCES, format_plan

X = torch.randn(24, 16, requires_grad=True)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x):
        return x + self.net(self.norm(x))


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, ids):
        return self.head(self.norm(self.table(ids)).mean(1))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


def sorted_loss(pred, target):
    return F.kl_div(F.log_softmax(torch.sort(pred)[0], -1), F.softmax(target, -1), reduction="batchmean") * 0.5


def apart(x, y):
    return x.sin(), y.softmax(0).cos()


def two_of_one(x):
    return F.softmax(x, 0), F.softmax(x, 1), x.sum()


def normed():
    weight_norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(weight_norm(nn.Linear(16, 32)), nn.Softplus(), weight_norm(nn.Linear(32, 4)))


CASES = {
    "residual": (lambda: Residual(), (X,), {}),
    "one by one": (lambda: Residual(), (X,), {"chains": False}),
    "generated products": (lambda: Residual().bfloat16(), (X.bfloat16(),), {"chains": False, "dots": "auto"}),
    "table": (lambda: Table(), (torch.randint(0, 50, (6, 5)),), {}),
    "convolution": (lambda: Images(), (torch.randn(2, 3, 8, 8),), {}),
    "weight norm": (normed, (X,), {}),
    "loss": (lambda: sorted_loss, (X, torch.randn(24, 16)), {}),
    "apart": (lambda: apart, (X, torch.randn(5, 1000, requires_grad=True)), {}),
    "two of one": (lambda: two_of_one, (torch.randn(300, 2000, requires_grad=True),), {}),
    "one row": (lambda: Residual(), (torch.randn(1, 16),), {}),
}


@pytest.fixture(scope="module", params=CASES)
def plan(request: pytest.FixtureRequest) -> PlanInfo:
    make, args, options = CASES[request.param]
    torch.manual_seed(0)
    (found,) = megafuse.explain(megafuse.fuse(make(), *args, target="interpret", **options))
    return found


def test_every_kernel_that_reads_anothers_result_has_a_reason(plan):
    reasons = {(e.first, e.second): e.reason for e in plan.edges}
    assert all(reasons.values())
    assert {k for e in reasons for k in e} <= {k.name for k in plan.kernels}
    for number, reader in enumerate(plan.kernels):
        for maker in plan.kernels[:number]:
            made = {t.name for t in maker.writes} & {t.name for t in reader.reads}
            if made and maker.forward == reader.forward:
                assert (maker.name, reader.name) in reasons, made


def test_neighbours_have_a_reason(plan):
    found = {frozenset((e.first, e.second)) for e in plan.edges}
    for one, other in zip(plan.calls, plan.calls[1:], strict=False):
        if one in plan.kernels and other in plan.kernels and one.forward == other.forward:
            assert frozenset((one.name, other.name)) in found


def test_what_adds_up_partial_sums_says_so(plan):
    for reader in plan.kernels:
        partial = {t.name for t in reader.reads if t.name.startswith("partial_")}
        for maker in plan.kernels:
            if partial & {t.name for t in maker.writes}:
                (first, *_) = [e for e in plan.edges if (e.first, e.second) == (maker.name, reader.name)]
                assert "a sum for each program of the first; the second adds them up" in first.reason
                assert first.reason.startswith("partial_")


def test_partial_sums_are_explained_with_what_they_become(plan):
    text = "\n".join(plan.names)
    for reader in plan.kernels:
        parts = [t.name for t in reader.reads if t.name.startswith("partial_")]
        become = f"that {reader.name} adds up to {', '.join(t.name for t in reader.writes)}"
        assert (f"{', '.join(parts)} = parts of the sums {become}" in text) if parts else become not in text


def test_a_tile_is_told_after_what_it_walks(plan):
    text = format_plan(plan)
    form = r"\d+ rows? of \d+ columns?, in tiles of \d+ rows?( abreast)? x [\d+]+ columns?( \(.*\))?$"
    assert len(re.findall(form, text, re.MULTILINE)) == text.count("in tiles of") >= (1 if plan.kernels else 0)


def test_reasons_are_in_the_order_of_the_kernels(plan):
    order = [k.name for k in plan.kernels]
    places = [(order.index(e.first), order.index(e.second)) for e in plan.edges]
    assert places == sorted(places)


def test_every_reason_can_be_read(plan):
    lines = format_plan(plan).splitlines()
    for edge in plan.edges:
        head = next(line for line in lines if line.startswith(f"  {str(edge).removesuffix(edge.reason)}"))
        below = itertools.takewhile(lambda line: line.startswith("    and "), lines[lines.index(head) + 1 :])
        assert head.endswith(edge.reason) or f"    and {edge.reason}" in below


def test_words_are_plain(plan):
    text = format_plan(plan)
    assert not re.search(
        r"(?<![\d.,x] )\b1 (rows|columns|kernels|products|ops|calls|warps|lines|values|programs|tiles|chains|pieces)\b",
        text,
    )
    assert not re.search(r"\bnest|\bdots\b|%\d|\b0 s\b|\b0 generated|\b0 library", text)
    for call in plan.calls:
        bandwidth, peak = call.shares
        assert 0 < bandwidth <= 1 and 0 <= peak <= 1
        assert (peak > 0) == (call.flops > 0)
        assert f"{100 * bandwidth:.0f} % of DRAM bandwidth" in text


def test_products_are_counted_wherever_they_run(plan):
    count = len(plan.dots) + sum(k.num_products for k in plan.kernels)
    assert (count > 0) == (plan.flops > 0)
    text = format_plan(plan)
    assert "matrix products: none" in text if not count else f"{len(plan.dots)} by the library" in text


def test_plans_that_were_compared_are_told():
    text = str(megafuse.explain(megafuse.fuse(normed(), X, target="interpret")))
    assert re.search(
        r"plans compared\n  taken: separate kernels, \d chains?\n  [\d.]+ us slower \(predicted\): separate kernels\n",
        text,
    )


def test_long_lists_of_lines_end_with_a_count():
    stack = nn.Sequential(*(nn.LayerNorm(16) for _ in range(MAX_SOURCES + 1)))
    with torch.no_grad():
        text = str(megafuse.explain(megafuse.fuse(stack, X.detach(), target="interpret")))
    assert "    and 1 more line\n" in text

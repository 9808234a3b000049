from __future__ import annotations

import pytest
import torch
from torch import nn

from bench_fakes import net_case
from megafuse.bench import rivals
from megafuse.bench.cases import make_case, parse_shapes
from megafuse.bench.measure import Settings, measure_case
from megafuse.bench.plan import PlanFacts, plan_facts
from megafuse.bench.rivals import NotValidated, make_rival, parse_rivals
from megafuse.bench.verify import _judge_draws, one_seed_failures, verify
from megafuse.core.errors import InputError
from megafuse.validate.problem import Problem


class Wrong(nn.Module):
    """The case's module with every output off by a hundredth."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 1.01


def test_the_reference_validates_and_a_wrong_rival_does_not() -> None:
    case = net_case()
    assert one_seed_failures(case, case.module) == ((), 0)
    found, more = one_seed_failures(case, Wrong(case.module))
    assert more == 0, "an error of a hundredth leaves no doubt"
    assert any(f.startswith("output out") for f in found)


class Enlarged(nn.Module):
    """The case's module with its fp32 errors made larger at the first call, and ``later`` times as large afterwards."""

    def __init__(self, inner: nn.Module, later: float) -> None:
        super().__init__()
        self.inner, self.factors, self.calls = inner, (3.0, later), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        near = self.inner(x)
        state = {n: p.detach().double() for n, p in self.inner.named_parameters()}
        exact = torch.func.functional_call(self.inner, state, (x.detach().double(),))
        error = near.detach().double() - exact
        return near + ((self.factors[self.calls > 1] - 1) * error).float()


@pytest.mark.parametrize("later", [1.0, 3.0])
def test_a_doubt_about_a_rival_is_settled_by_further_draws_and_told(later: float) -> None:
    case = net_case(rows=16)
    rival = Enlarged(case.module, later)
    checked = verify(case, rival, generated=False)
    assert checked.ok == (later == 1.0), checked
    assert "decided by 16 further draws" in checked.how
    assert rival.calls == 1 + 16


class Struck(nn.Module):
    """The case's module with one element of its first result off by ``size``."""

    def __init__(self, inner: nn.Module, size: float) -> None:
        super().__init__()
        self.inner, self.size, self.calls = inner, size, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out = self.inner(x)
        off = torch.zeros_like(out)
        off.view(-1)[0] = self.size if self.calls == 1 else 0.0
        return out + off


def test_one_wrong_element_of_a_rival_is_not_forgotten_for_further_draws() -> None:
    case = net_case(rows=16)
    _, verdicts = _judge_draws(Problem.of(case.module, case.args, case.kwargs), case.module, range(1, 18))
    largest = next(v.unfused_max for v in verdicts if v.name == "output out")
    rival = Struck(case.module, 8 * largest)
    failures, more = one_seed_failures(case, rival)
    assert more == 16 and rival.calls == 1 + 16
    assert len(failures) == 1 and "output out: largest error" in failures[0] and "of the first draws" in failures[0]


def test_a_wrong_rival_is_recorded_and_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rivals.MAKERS, "compile", lambda case: Wrong(case.module))
    case = net_case()
    result = measure_case(case, Settings(rivals=("eager", "compile"), sections=("host",), host_steps=2))
    assert result.rivals["compile"].checked["ok"] is False
    assert result.rivals["compile"].checked["failures"]
    assert result.rivals["compile"].host == {}
    assert result.rivals["eager"].checked["ok"]
    with pytest.raises(NotValidated, match="compile is not timed"):
        make_rival("compile", case).step(case)


def test_a_rival_that_cannot_be_made_is_a_row_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(case: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setitem(rivals.MAKERS, "compile", fail)
    rival = make_rival("compile", net_case())
    assert rival.fn is None
    assert rival.error == "RuntimeError: no compiler here"
    assert not rival.usable


def test_megafuse_validates_on_the_cpu_and_tells_its_plan() -> None:
    case = net_case(rows=32)
    rival = make_rival("megafuse", case, level="quick")
    assert rival.usable, (rival.error, rival.checked)
    facts = plan_facts(rival.fn)
    assert len(facts.kernels) >= 2
    assert facts.dots + facts.generated_dots >= 6
    assert facts.opaque_calls == 0
    assert facts.coverage_by_elements == facts.coverage_by_calls == 1.0
    assert facts.kernel_bytes == sum(k.bytes * k.launches for k in facts.kernels) > 0
    assert facts.as_dict(100)["kernel_bytes_per_input"] == facts.kernel_bytes / 100


def test_a_step_without_generated_kernels_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rivals.MAKERS, "megafuse", lambda case: case.module)
    monkeypatch.setattr(rivals, "plan_facts", lambda fn: PlanFacts(reason="slower"))
    rival = make_rival("megafuse", net_case())
    assert not rival.usable
    assert rival.checked.failures == ("no generated kernel slower",)


def test_cases_can_be_made_from_their_source() -> None:
    made = make_case({"kind": "rank_mixer", "shape": [2, 4, 16, 2], "dtype": "float32"}, device="cpu")
    again = make_case(made.source, device="cpu")
    assert torch.equal(made.args[0], again.args[0])
    assert torch.equal(made.cotangents[0], again.cotangents[0])
    other = make_case({"kind": "workload", "name": "swiglu_ffn", "dtype": "float32", "size": "small"}, device="cpu")
    assert other.cotangents[0].dtype == torch.float32
    assert make_case(other.source, device="cpu").name == other.name
    with pytest.raises(InputError, match="unknown kind"):
        make_case({"kind": "other"})


def test_options_are_checked() -> None:
    assert parse_shapes("4,16,128,2; 1,8,64,2;") == [(4, 16, 128, 2), (1, 8, 64, 2)]
    assert parse_rivals("megafuse,eager,megafuse") == ["eager", "megafuse"]
    with pytest.raises(InputError, match="B,T,D,k"):
        parse_shapes("4,16,128")
    with pytest.raises(InputError, match="unknown rival"):
        parse_rivals("jax")


def test_a_case_names_how_products_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(rivals, "fuse", lambda module, *args, **options: asked.append(options["dots"]) or module)
    size = {"batch": 1, "tokens": 3, "dim": 8, "hidden": 12}
    source = {"kind": "workload", "name": "swiglu_ffn", "dtype": "float32", "size": size}
    plain, generated = make_case(source, "cpu"), make_case({**source, "dots": "auto"}, "cpu")
    assert plain.args[0].shape == (1, 3, 8), "sizes may be given instead of a name"
    for case in (plain, generated):
        rivals.MAKERS["megafuse"](case)
    assert asked == ["library", "auto"]
    assert generated.source["dots"] == generated.facts["dots"] == "auto" and generated.name.endswith("dots=auto")
    assert plain.source == source

from __future__ import annotations

import pytest
import torch

from bench_fakes import FakeTimer, net_case
from megafuse.bench.dots import products_work, record_dots
from megafuse.bench.step import make_step
from megafuse.bench.timing import Times, time_host_rounds, time_rounds, turns, warm_up
from megafuse.core.errors import InputError


def test_rounds_alternate_and_flush_outside_the_interval() -> None:
    timer = FakeTimer()
    works = {"a": timer.work("a", 2.0), "b": timer.work("b", 3.0)}
    found = time_rounds(works, rounds=4, timer=timer)
    assert found["a"].raw == (2000.0,) * 5
    assert found["b"].raw == (3000.0,) * 5
    ran = [entry for entry in timer.log if entry in works]
    assert ran == ["a", "b", "b", "a", "b", "a", "a", "b", "a", "b"]
    assert timer.log[:3] == ["sync", "flush", "a"]
    assert timer.log.count("flush") == 10
    assert timer.log.count("sync") == 2


def test_every_work_takes_every_place() -> None:
    names = ["a", "b", "c"]
    orders = [turns(names, n) for n in range(6)]
    assert all(sorted(o) == names for o in orders)
    assert all({o[place] for o in orders} == set(names) for place in range(3))


def test_statistics_drop_the_first_sample() -> None:
    times = Times((100.0, 1.0, 3.0))
    assert times.mean == 2.0
    facts = times.as_dict()
    assert (facts["min"], facts["max"], facts["samples"]) == (1.0, 3.0, 2)
    assert facts["raw"] == [100.0, 1.0, 3.0]
    assert Times((5.0,)).mean == 5.0


def test_no_round_is_refused() -> None:
    with pytest.raises(InputError, match="rounds"):
        time_rounds({}, rounds=0, timer=FakeTimer())


def test_host_rounds_sync_around_each_sample() -> None:
    calls: list[str] = []
    found = time_host_rounds({"a": lambda: calls.append("a")}, rounds=2, steps=3, sync=lambda: calls.append("sync"))
    assert calls == ["sync", "a", "a", "a", "sync"] * 2
    assert len(found["a"].raw) == 2


def test_a_failing_work_is_left_out_and_named() -> None:
    errors: list[str] = []

    def fail() -> None:
        raise RuntimeError("no memory")

    good = warm_up({"bad": fail, "good": lambda: None}, 2, errors, "step")
    assert list(good) == ["good"]
    assert errors == ["step of bad: RuntimeError: no memory"]


def test_products_of_a_step_are_recorded_with_their_own_tensors() -> None:
    case = net_case(rows=32)
    dots = record_dots(make_step(case, case.module))
    assert len(dots) == 6  # two in forward, two for each in backward
    assert sum(d.flops for d in dots) == 3 * 2 * (2 * 32 * 8 * 16)
    first = dots[0]
    assert first.a.data_ptr() == case.args[0].data_ptr()
    assert first.shape == (1, 32, 8, 16)
    assert first.bytes == 4 * (32 * 8 + 8 * 16 + 32 * 16)
    with torch.no_grad():
        products_work(dots)()


def test_step_clears_gradients_and_runs_backward() -> None:
    case = net_case(rows=4)
    step = make_step(case, case.module)
    step()
    first = [g.clone() for g in case.gradients()]
    step()
    assert len(first) == 4  # input, two weights, one bias
    assert all(torch.equal(a, b) for a, b in zip(first, case.gradients(), strict=True))
    case.clear_gradients()
    assert case.gradients() == []

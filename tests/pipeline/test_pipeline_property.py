"""Random programs: the graph means what PyTorch computes, and the generated kernels compute what the graph means.

``MEGAFUSE_PROPERTY_EXAMPLES=5000`` runs more examples, drawn anew each time.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings

import megafuse
from megafuse.validate import CheckOptions, check
from pipeline_helpers import compiled_of, graph_differences
from pipeline_programs import ArgumentSpec, Program, programs

EXAMPLES = int(os.environ.get("MEGAFUSE_PROPERTY_EXAMPLES", "0"))
FIRST = CheckOptions(seeds=2, small_seeds=0, repeats=1, ask_again=False)
AGAIN = replace(
    FIRST, seeds=14, first_seed=50, ask_again=True
)  # two draws of a few elements each are no statistics: what fails must last
LIMITS = settings(
    max_examples=EXAMPLES or 40,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink) if EXAMPLES else (Phase.generate,),
)


def run(program: Program) -> None:
    """Fuse a program in fp32 and compare graph and kernels with PyTorch."""
    fn, args = program.function(), program.tensors()
    fused = megafuse.fuse(fn, *args, target="interpret")
    compiled = compiled_of(fused)
    for name, graph in (("captured", compiled.captured.graph), ("rewritten", compiled.graph)):
        assert not graph_differences(fn, args, compiled.captured, graph, 1e-6), f"the {name} graph is wrong"
    report = check(fn, *args, fused=fused, options=FIRST)
    if not report.ok and not report.structure and not report.determinism:
        report = check(fn, *args, fused=fused, options=AGAIN)
    assert report.ok, str(report)


@pytest.mark.timeout(0 if EXAMPLES else 300)
@LIMITS
@given(programs())
def test_random_programs(program: Program) -> None:
    note(str(program))
    run(program)


@pytest.mark.timeout(0 if EXAMPLES else 300)
@settings(LIMITS, max_examples=max(10, EXAMPLES // 4))
@given(programs())
def test_random_programs_in_bf16(program: Program) -> None:
    """Kernels run, repeat bit by bit and give results of the right kind; the numbers are judged where they can be."""
    note(str(program))
    fn, args = program.function(), program.tensors(torch.bfloat16)
    fused = megafuse.fuse(fn, *args, target="interpret")
    report = check(fn, *args, fused=fused, options=FIRST)
    assert not report.structure, report.structure
    assert not report.determinism, report.determinism


def given_by_hand(results: str, lines: str, **arguments: tuple[int, ...]) -> Program:
    """A program written out."""
    specs = tuple(ArgumentSpec(name, shape) for name, shape in arguments.items())
    return Program(tuple(lines.splitlines()), tuple(results.split()), specs)


FOUND = {
    # a gradient that is the upstream gradient itself
    "tangent_is_gradient": given_by_hand("y", "y = x + 1.5", x=(3, 4)),
    "output_is_a_copy": given_by_hand("y", "y = x.clone()", x=(3, 4)),
    "output_is_input": given_by_hand("x y", "y = x * 2", x=(3, 4)),
    # a reduction read inside one part of a concat: the part's guard speaks of other columns
    "reduction_under_guard": given_by_hand("v z", "v = x.roll(1, 0)\nz = F.log_softmax(v, -1)", x=(5,)),
    "flipped_amax": given_by_hand(
        "y", "v = x.sum(-1, keepdim=True)\nv = torch.cat([v, v * 2], 0).flip(0)\ny = v.amax(-1)", x=(2,)
    ),
    # a flip is no strided view that the library could read
    "flip_into_dot": given_by_hand("y", "y = x.flip(1) @ w", x=(4, 3), w=(3, 2)),
    "flip_of_dot": given_by_hand("y", "y = (x @ w).flip(0)", x=(4, 3), w=(3, 2)),
    "flip_into_opaque": given_by_hand("y", "y = torch.cumsum(x, -1) * 0.5", x=(3, 4)),
    # outputs that are expanded, or parts of something larger
    "expanded_output": given_by_hand("y", "y = torch.tanh(x).unsqueeze(0).expand(2, 3, 4)", x=(3, 4)),
    "part_output": given_by_hand("y", "y = torch.tanh(x).narrow(1, 1, 2)", x=(3, 4)),
    # a value read through another one that has memory of its own
    "operand_behind_output": given_by_hand("z y", "y = x.reshape(12, 4)\nz = F.linear(y, w)", x=(4, 3, 4), w=(1, 4)),
    # one value returned in two layouts
    "dot_in_two_layouts": given_by_hand(
        "z y", "y = x @ w\nz = y.transpose(1, 2).contiguous()", x=(1, 7, 12), w=(12, 2)
    ),
    "map_in_two_layouts": given_by_hand("z y", "y = torch.cos(x)\nz = y.t().contiguous()", x=(4, 4)),
    # a backward value computed from a forward column reduction
    "backward_follower": given_by_hand(
        "y v",
        "v = F.log_softmax(x, -1).reshape(5, 1, 5, 8)\nu = v[:, :, :, 4::3]\n"
        "u = u * torch.rsqrt(u.pow(2).mean(0, keepdim=True) + 0.1)\ny = F.layer_norm(u, (2,), eps=1e-2) @ w",
        x=(5, 5, 8),
        w=(2, 4),
    ),
}


# inputs that do not lie plainly in memory
for _layout in ("transposed", "sliced", "expanded"):
    _x = ArgumentSpec("x", (4, 3, 10), _layout)
    FOUND[f"reshape_of_{_layout}"] = Program(("y = torch.sigmoid(x.reshape(6, 20)).sum(0)",), ("y",), (_x,))
    FOUND[f"copy_of_{_layout}"] = Program(("y = x.contiguous()", "z = x.reshape(6, 20)"), ("y", "z"), (_x,))


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_once_failed(name: str) -> None:
    run(FOUND[name])

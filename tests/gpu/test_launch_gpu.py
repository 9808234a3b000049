"""The launch path on a GPU: launch code without checks, pools, CUDA graphs of whole steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megafuse
from megafuse.api import engine_of
from megafuse.codegen.host import print_host
from megafuse.runtime import shim
from megafuse.runtime.direct import Direct
from megafuse.runtime.graphs import CudaRecorder, GraphedStep
from megafuse.runtime.step import LoadedStep
from megafuse.schedule.pools import LIMIT
from megafuse.workloads.rank_mixer_block import RankMixerBlock

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPE = (4, 16, 128)  # B, T, D


def block(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return RankMixerBlock(SHAPE[1], SHAPE[2], 2).to("cuda", torch.bfloat16)


def draw(seed: int, *shape: int) -> Tensor:
    rng = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape or SHAPE, generator=rng, device="cuda").bfloat16()


def step(fused: Any, module: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    """Output and gradients of one step."""
    x = x.detach().requires_grad_()
    out = fused(x)
    out.backward(g)
    found = [out.detach(), x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad(set_to_none=True)
    return found


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def loaded(fused: Any) -> Any:
    (bound,) = engine_of(fused).bindings
    return bound.spec.step


def known() -> bool:
    return shim.triton_version() in shim._BINDERS


def test_launch_code_without_checks_gives_the_same_bits() -> None:
    module = block()
    fused = megafuse.fuse(module, draw(1).requires_grad_())
    first = step(fused, module, draw(1), draw(2))
    forward, backward = loaded(fused).forward.__self__, loaded(fused).backward.__self__
    assert isinstance(forward, Direct)
    assert forward.ready == backward.ready == known()
    assert equal(step(fused, module, draw(1), draw(2)), first)
    odd = torch.zeros(1 + first[0].numel(), device="cuda", dtype=torch.bfloat16)[1:].view(SHAPE)
    odd.copy_(draw(2))
    assert odd.data_ptr() % 16
    assert equal(step(fused, module, draw(1), odd), first), "a tangent that is not aligned"


def test_launch_hooks_see_every_launch_of_a_step() -> None:
    knobs = pytest.importorskip("triton.knobs")
    if not hasattr(knobs.runtime.launch_enter_hook, "add"):
        pytest.skip("this Triton has no hook chains")
    module, seen = block(), []
    fused = megafuse.fuse(module, draw(1).requires_grad_())
    for _ in range(2):
        step(fused, module, draw(1), draw(2))
    hook = seen.append
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        step(fused, module, draw(1), draw(2))
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    plan = engine_of(fused).bindings[0].compiled.step
    launches = [c for c in (*plan.forward, *plan.backward) if type(c).__name__ == "Launch"]
    assert len(seen) == len(launches)


def test_steps_go_to_the_current_stream() -> None:
    module, side = block(), torch.cuda.Stream()
    fused = megafuse.fuse(module, draw(1).requires_grad_())
    expected = [step(fused, module, draw(1), draw(2)) for _ in range(2)][-1]
    torch.cuda.synchronize()
    x = torch.zeros(SHAPE, device="cuda", dtype=torch.bfloat16)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.copy_(draw(1))
        found = step(fused, module, x, draw(2))  # on any other stream it would read zeros
    torch.cuda.synchronize()
    assert equal(found, expected)


def test_pools_raise_the_peak_by_no_more_than_their_limit() -> None:
    module = block()
    fused = megafuse.fuse(module, draw(1).requires_grad_())
    bound = engine_of(fused).bindings[0]
    compiled, plan = bound.compiled, bound.compiled.step
    assert {p.kind for p in plan.pools} >= {"backward", "saved"}
    artifact = compiled.artifact("triton")
    host = print_host(
        replace(plan, pools=()), [k.entry for k in artifact.kernels], tangent_base=len(compiled.captured.leaves)
    )
    inputs = engine_of(fused).structure((draw(1),), {}).getter((draw(1).requires_grad_(),), {})
    peaks, found = [], []
    for text in (host, artifact.host):
        one = LoadedStep(replace(artifact, host=text), "cuda", "cuda")
        for _ in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.no_grad():
                outputs, saved = one.forward(list(inputs))
                grads = one.backward(saved, [draw(2)])
            peak = torch.cuda.max_memory_allocated() - before
        peaks.append(peak)
        found.append([*outputs, *grads])
        del outputs, saved, grads
    assert equal(*found)
    assert peaks[1] <= peaks[0] + 2 * LIMIT


@pytest.fixture
def graphed() -> tuple[nn.Module, Any, Any]:
    """A block, fused plainly and with graphs."""
    module = block()
    x = draw(1).requires_grad_()
    return module, megafuse.fuse(module, x), megafuse.fuse(module, x, cuda_graph=True)


def test_graphs_give_the_bits_of_plain_launches_on_every_new_input(graphed: Any) -> None:
    module, plain, fast = graphed
    held = []
    for number in range(8):
        x, g = draw(number), draw(100 + number)
        held.append((step(fast, module, x, g), step(plain, module, x, g)))
    made = loaded(fast)
    assert isinstance(made, GraphedStep)
    assert made.recorded is not None, made.reason
    torch.cuda.synchronize()
    assert all(equal(a, b) for a, b in held), "nothing that the caller holds is written again"


def test_training_with_graphs_is_training_without(graphed: Any) -> None:
    def train(cuda_graph: bool) -> list[Tensor]:
        module = block(3)
        fused = megafuse.fuse(module, draw(1).requires_grad_(), cuda_graph=cuda_graph)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)
        losses = []
        for number in range(12):
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            for part in range(2):  # gradients are accumulated
                loss = (fused(draw(10 * number + part)) - draw(5)).float().square().mean()
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
        return [*losses, *(p.detach().clone() for p in module.parameters())]

    assert equal(train(True), train(False))


def test_two_forwards_before_their_backwards(graphed: Any) -> None:
    module, plain, fast = graphed
    for number in range(4):
        step(fast, module, draw(number), draw(9))
    xs = [draw(n).requires_grad_() for n in (21, 22, 23)]
    outs = [fast(x) for x in xs]
    for out in reversed(outs):
        out.backward(draw(9))
    grads = [p.grad.clone() for p in module.parameters()]
    module.zero_grad(set_to_none=True)
    others = [x.detach().clone().requires_grad_() for x in xs]
    for out in reversed([plain(x) for x in others]):
        out.backward(draw(9))
    assert equal([x.grad for x in xs], [x.grad for x in others])
    assert equal(grads, [p.grad for p in module.parameters()])


def test_a_graph_is_not_replayed_on_another_stream(graphed: Any) -> None:
    module, plain, fast = graphed
    expected = step(plain, module, draw(1), draw(2))
    for _ in range(4):
        step(fast, module, draw(1), draw(2))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    found = []
    for _ in range(4):
        with torch.cuda.stream(side):
            found.append(step(fast, module, draw(1), draw(2)))
        found.append(step(fast, module, draw(1), draw(2)))
    torch.cuda.synchronize()
    assert all(equal(f, expected) for f in found)


def test_inputs_that_move_are_recorded_again(graphed: Any) -> None:
    """The first graphs are gone by then, and their memory pool with them."""
    module, plain, fast = graphed
    for number in range(8):
        held = [draw(n) for n in range(number)]  # so that the next input lies elsewhere
        expected = step(plain, module, draw(number), draw(2))
        assert equal(step(fast, module, draw(number), draw(2)), expected)
        with torch.no_grad():
            for p in module.parameters():
                p.data = p.data.clone()
        del held
    assert loaded(fast).recorded is not None, loaded(fast).reason


def test_random_numbers_work_after_a_recording_that_failed() -> None:
    recorder = CudaRecorder(torch.device("cuda", torch.cuda.current_device()))
    for _ in range(2):
        with pytest.raises(RuntimeError):
            recorder.record(lambda: torch.randn(4, device="cuda").sum().item())
        assert torch.randn(4, device="cuda").isfinite().all()
    replay, made = recorder.record(lambda: torch.randn(4, device="cuda"))
    replay()
    first = made.clone()
    replay()
    assert not torch.equal(first, made)


def test_random_masks_differ_from_replay_to_replay() -> None:
    class Dropped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.gelu(nn.functional.dropout(x, 0.5))

    fast = megafuse.fuse(Dropped(), torch.ones(64, 64, device="cuda"), cuda_graph=True)
    masks = [fast(torch.ones(64, 64, device="cuda")).ne(0) for _ in range(8)]
    assert loaded(fast).recorded is not None, loaded(fast).reason
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
    assert all(0.4 < m.float().mean() < 0.6 for m in masks)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_make_graphed_callables_takes_fused_modules(cuda_graph: bool) -> None:
    module = block()
    x = draw(1).requires_grad_()
    plain = megafuse.fuse(module, x)
    expected = step(plain, module, draw(7), draw(2))
    fused = megafuse.fuse(module, x, cuda_graph=cuda_graph)
    made = torch.cuda.make_graphed_callables(fused, (draw(1).requires_grad_(),))
    for _ in range(3):
        assert equal(step(made, module, draw(7), draw(2)), expected)


def test_check_passes_with_graphs(graphed: Any) -> None:
    module, _, fast = graphed
    report = megafuse.check(module, draw(1).requires_grad_(), fused=fast)
    assert report.ok, report.failures

"""Training with a fused module: optimizers, accumulation, hooks on parameters, checkpointing, wrappers, transforms."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megafuse
from life_modules import Net, batch, close, fused_net, net, results
from megafuse.api import engine_of


@pytest.mark.parametrize("flavour", ["fused", "foreach"])
def test_twenty_steps_of_adamw(flavour: str) -> None:
    losses = []
    for use_fused in (False, True):
        module = net()
        call = megafuse.fuse(module, batch(), target="interpret") if use_fused else module
        optimizer = torch.optim.AdamW(call.parameters(), lr=1e-2, **{flavour: True})
        found = []
        for step in range(20):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss = call(batch(seed=step)).sin().square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        losses.append(torch.stack(found))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-6)
    assert losses[0][-1] != losses[0][0]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate_over_backward_calls(set_to_none: bool) -> None:
    module, fused, _ = fused_net()
    grads = []
    for fn in (module, fused):
        module.zero_grad(set_to_none=True)
        for round_ in range(2):
            module.zero_grad(set_to_none=set_to_none)
            for seed in range(3):
                fn(batch(seed=seed + round_)).sin().sum().backward()
        grads.append({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() == {n for n, _ in module.named_parameters()}
    close(list(grads[1].values()), list(grads[0].values()))


def test_a_gradient_is_not_shared_between_parameters_or_calls() -> None:
    module, fused, x = fused_net()
    fused(x).sum().backward()
    first = module.norm.bias.grad
    assert first is not None
    kept = first.clone()
    module.zero_grad(set_to_none=True)
    fused(x).cos().sum().backward()
    assert torch.equal(first, kept)
    pointers = [p.grad.data_ptr() for p in module.parameters() if p.grad is not None]
    assert len(set(pointers)) == len(pointers)


def test_hooks_on_parameters_fire() -> None:
    module, fused, x = fused_net()
    seen: list[str] = []
    module.w1.weight.register_hook(lambda g: g * 2)
    handle = module.w2.weight.register_post_accumulate_grad_hook(lambda p: seen.append("w2"))
    want = results(module, module, x)[1]
    close(results(fused, module, x)[1], want)
    fused(x).sum().backward()
    assert seen == ["w2"]
    handle.remove()
    plain = net()
    close(results(fused, module, x)[1]["w1.weight"], 2 * results(plain, plain, x)[1]["w1.weight"])


def test_hooks_on_outputs_and_retained_gradients() -> None:
    module, fused, x = fused_net()
    found = []
    for fn in (module, fused):
        given = x.detach().clone().requires_grad_() * 1.0  # not a leaf
        given.retain_grad()
        out = fn(given)
        out.retain_grad()
        out.register_hook(lambda g: g * 3)
        out.sin().sum().backward()
        found.append((given.grad, out.grad))
    close(found[1], found[0])


COTANGENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda y: y.sum(), "one row": lambda y: y[2].sum(),
    "mean of the transposed": lambda y: y.t().square().mean(),
    "every other": lambda y: y[::2, 1::2].sin().sum(), "expanded": lambda y: y.expand(3, *y.shape).sum(),
    "used twice": lambda y: (y * y.detach()).sum() + y.sum(),
}  # fmt: skip


@pytest.mark.parametrize("which", COTANGENTS)
def test_cotangents(which: str) -> None:
    module, fused, x = fused_net()
    want, found = (torch.autograd.grad(COTANGENTS[which](f(x)), [x, *module.parameters()]) for f in (module, fused))
    close(found, want)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant: bool) -> None:
    module, fused, x = fused_net()
    wrapped = functools.partial(checkpoint, fused, use_reentrant=use_reentrant)
    close(_backward(wrapped, module, x), _backward(module, module, x))


def _backward(fn: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor | None]:
    module.zero_grad(set_to_none=True)
    given = x.detach().clone().requires_grad_()
    fn(given).sin().sum().backward()
    return [given.grad, *(p.grad for p in module.parameters())]


def test_checkpointing_inside_a_fused_function() -> None:
    module, x = net(), batch()

    def fn(x: Tensor) -> Tensor:
        return checkpoint(module, x, use_reentrant=False) * 2

    fused = megafuse.fuse(fn, x, target="interpret")
    close(results(fused, module, x), results(fn, module, x))


def test_functional_call() -> None:
    module, fused, x = fused_net()
    other = {n: p.detach().clone().mul_(1.5).requires_grad_() for n, p in module.named_parameters()}
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    found = []
    for fn in (module, fused):
        out = torch.func.functional_call(fn, other, (x,))
        found.append([out, *torch.autograd.grad(out.sin().sum(), list(other.values()))])
    close(found[1], found[0])
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())
    computed = {n: p * 2 for n, p in other.items()}  # not leaves
    close(torch.func.functional_call(fused, computed, (x,)), torch.func.functional_call(module, computed, (x,)))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda fn, x: torch.func.grad(lambda v: fn(v).sin().sum())(x),
    "vmap": lambda fn, x: torch.func.vmap(fn)(torch.stack([x, 2 * x])),
    "jvp": lambda fn, x: torch.func.jvp(fn, (x,), (torch.ones_like(x),)),
    "jacrev": lambda fn, x: torch.func.jacrev(lambda v: fn(v).sum(0))(x),
    "vmap of grad": lambda fn, x: torch.func.vmap(torch.func.grad(lambda v: fn(v[None]).sum()))(x),
}


@pytest.mark.parametrize("which", TRANSFORMS)
def test_function_transforms_run_the_original(which: str) -> None:
    module, fused, x = fused_net()
    x = x.detach()
    with pytest.warns(megafuse.NotFusedWarning, match="torch.func"):
        found = TRANSFORMS[which](fused, x)
    close(found, TRANSFORMS[which](module, x))
    close(results(fused, module, batch()), results(module, module, batch()))


def test_forward_mode_differentiation_runs_the_original() -> None:
    module, fused, x = fused_net()
    found = []
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        with pytest.warns(megafuse.NotFusedWarning, match="forward-mode"):
            found.append(torch.autograd.forward_ad.unpack_dual(fused(dual)).tangent)
        found.append(torch.autograd.forward_ad.unpack_dual(module(dual)).tangent)
    close(found[0], found[1])


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("gloo")
def test_distributed_data_parallel_around_a_fused_module() -> None:
    module, fused, x = fused_net()
    ddp = nn.parallel.DistributedDataParallel(fused)
    calls: list[int] = []

    def hook(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        state.append(bucket.index())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future

    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}  # not as strings
    ddp.register_comm_hook(calls, hook)
    found = _backward(ddp, module, x)[1:]
    assert calls
    close(found, [2 * g for g in _backward(module, module, x)[1:] if g is not None])


def run_together(work: Callable[[int], Any], count: int = 4) -> list[Any]:
    """``work(i)`` in ``count`` threads that start at once; their results, or the first error."""
    barrier, found, errors = threading.Barrier(count), {}, []

    def run(i: int) -> None:
        barrier.wait()
        try:
            found[i] = work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[i] for i in range(count)]


def test_threads_call_one_fused_module_from_the_first_call_on() -> None:
    module, fused, _ = fused_net()
    inputs = [batch(rows=3 + i // 2, seed=i) for i in range(4)]  # shapes that are new to all
    found = run_together(lambda i: results(fused, module, inputs[i]))
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in module.parameters())
    close(found, [results(module, module, x) for x in inputs])
    assert all(b.spec is not None for b in engine_of(fused).bindings)


def test_threads_use_the_module_itself_while_another_captures() -> None:
    module, x = net(), batch()
    want = module(x).detach()
    stop = threading.Event()

    def work(i: int) -> list[Tensor]:
        if i == 0:
            fused = [megafuse.fuse(module, batch(rows), target="interpret") for rows in (2, 3, 5)]
            stop.set()
            return [fused[2](x).detach()]
        outs = []
        while not stop.is_set():
            outs.append(module(x).detach())
        return outs

    for outs in run_together(work):
        close(outs, [want] * len(outs))


def test_two_captures_of_one_module_at_once() -> None:
    module = net()
    inputs = [batch(rows=2 + i) for i in range(4)]
    fused = run_together(lambda i: megafuse.fuse(module, inputs[i], target="interpret"))
    close([f(x) for f, x in zip(fused, inputs, strict=True)], [module(x) for x in inputs])
    assert isinstance(fused[0], Net)

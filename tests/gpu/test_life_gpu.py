"""PyTorch's ordinary life on a GPU: autocast, gradient scaling, streams, threads, moves between devices, optimizers."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megafuse
from megafuse.api import engine_of
from megafuse.validate import CheckOptions, check

PIPELINE = Path(__file__).resolve().parents[1] / "pipeline"
if str(PIPELINE) not in sys.path:
    sys.path.insert(0, str(PIPELINE))

from life_modules import Net, close, net, results  # noqa: E402

pytestmark = pytest.mark.gpu

FEW = CheckOptions(seeds=2, small_seeds=1, repeats=2)
NARROW = [torch.bfloat16, torch.float16]


def batch(rows: int = 64, seed: int = 1, device: str = "cuda") -> Tensor:
    """A leaf input [rows, 6]."""
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed)).to(device)
    return x.requires_grad_()


def fused_net() -> tuple[Net, Net, Tensor]:
    """A module on the GPU, its fused twin and an input."""
    module, x = net().cuda(), batch()
    return module, megafuse.fuse(module, x, target="cuda"), x


def attention(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bd,ed->be", x, w).softmax(-1) @ w


def mixed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x @ w
    return torch.cat([y, x]), y.exp(), F.layer_norm(y, (16,)), y.sum(0), F.softplus(y), y.pow(2), F.mse_loss(y, x)


def disabled_inside(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    with torch.autocast("cuda", enabled=False):
        z = y.float() @ w
    return y, z


FUNCTIONS: list[Callable[[Tensor, Tensor], object]] = [attention, mixed, disabled_inside]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_casts_are_autocasts(fn: Callable[[Tensor, Tensor], object], dtype: torch.dtype) -> None:
    x = torch.randn(16, 16, device="cuda", requires_grad=True)
    w = nn.Parameter(torch.randn(16, 16, device="cuda") * 0.3)
    with torch.autocast("cuda", dtype=dtype):
        fused = megafuse.fuse(fn, x, w, target="cuda")
        ours, theirs = fused(x, w), fn(x, w)
        both = zip(*([o] if isinstance(o, Tensor) else list(o) for o in (ours, theirs)), strict=True)  # type: ignore[call-overload]
        assert all(a.dtype is b.dtype for a, b in both)
        check(fn, x, w, fused=fused, options=FEW).raise_if_failed()


@pytest.mark.parametrize("dtype", NARROW)
def test_autocast_entered_and_left_after_fusing(dtype: torch.dtype) -> None:
    module, fused, x = fused_net()
    plain = fused(x)
    with torch.autocast("cuda", dtype=dtype):
        check(module, x, fused=fused, options=FEW).raise_if_failed()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fused(x), plain)
    assert torch.equal(fused(x), plain)
    assert len(engine_of(fused).bindings) == 2


@pytest.mark.parametrize("overflow", [False, True])
def test_grad_scaler(overflow: bool) -> None:
    found = []
    for use_fused in (False, True):
        module, x = net().cuda(), batch()
        call = megafuse.fuse(module, x, target="cuda") if use_fused else module
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40 if overflow else 2.0**8)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = call(x).float().sin().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append((scaler.get_scale(), module.w1.weight.detach().clone()))
    assert found[0][0] == found[1][0]
    close(found[1][1], found[0][1], loose=True)


@pytest.mark.parametrize("flavour", ["fused", "foreach", "capturable"])
def test_twenty_steps_of_adamw(flavour: str) -> None:
    losses = []
    for use_fused in (False, True):
        module = net().cuda()
        call = megafuse.fuse(module, batch(), target="cuda") if use_fused else module
        optimizer = torch.optim.AdamW(call.parameters(), lr=1e-2, **{flavour: True})
        found = []
        for step in range(20):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss = call(batch(seed=step)).sin().square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        losses.append(torch.stack(found))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-5)


def test_side_streams() -> None:
    """Forward on one stream, backward called on another: what PyTorch orders, stays ordered."""
    module, fused, x = fused_net()
    want = results(module, module, x)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(20):
        first, second = streams
        first.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(first):
            torch.cuda._sleep(2_000_000)
            given = x.detach().clone().requires_grad_()
            out = fused(given)
            loss = out.sin().sum()
        second.wait_stream(first)
        with torch.cuda.stream(second):
            grads = torch.autograd.grad(loss, [given, *module.parameters()])
            copies = [g.clone() for g in grads]
        torch.cuda.current_stream().wait_stream(second)
        close([out.detach(), *copies], [want[0], *want[1].values()])


# The threads share parameters, whose gradient nodes keep the stream of the first: PyTorch says so, fused or not.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_each_thread_on_a_stream_of_its_own_from_the_first_call_on() -> None:
    module, fused, _ = fused_net()
    inputs = [batch(rows=30 + i // 2, seed=i) for i in range(4)]
    torch.cuda.synchronize()
    found: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}
    errors: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work(i: int) -> None:
        try:
            barrier.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    found[i] = results(fused, module, inputs[i])
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    close([found[i] for i in range(4)], [results(module, module, x) for x in inputs])


def test_moves_between_devices_and_types() -> None:
    module = net()
    with pytest.warns(megafuse.NotFusedWarning, match="on the CPU"):
        fused = megafuse.fuse(module, batch(device="cpu"))
    fused.cuda()
    close(results(fused, module, batch()), results(module, module, batch()))
    assert engine_of(fused).bindings[-1].spec is not None
    fused.half()
    x = batch().detach().half().requires_grad_()
    close(results(fused, module, x), results(module, module, x), loose=True)
    fused.float().cpu()
    close(fused(batch(device="cpu")), module(batch(device="cpu")))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant: bool) -> None:
    module, fused, x = fused_net()
    found = []
    for fn in (module, functools.partial(checkpoint, fused, use_reentrant=use_reentrant)):
        module.zero_grad(set_to_none=True)
        given = x.detach().clone().requires_grad_()
        fn(given).sin().sum().backward()
        found.append([given.grad, *(p.grad for p in module.parameters())])
    close(found[1], found[0])


def test_double_backward_under_autocast() -> None:
    module, fused, x = fused_net()
    found = []
    for fn in (module, fused):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = fn(x).float().pow(2).sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        found.append(torch.autograd.grad(grad.sum(), module.w1.weight)[0])
    close(found[1], found[0], loose=True)


def test_inference_mode() -> None:
    module, fused, x = fused_net()
    with torch.inference_mode():
        out = fused(x)
        assert out.is_inference()
        close(out, module(x))


def test_function_transforms_run_the_original() -> None:
    module, fused, x = fused_net()
    with pytest.warns(megafuse.NotFusedWarning, match="torch.func"):
        found = torch.func.vmap(fused)(torch.stack([x, 2 * x]))
    close(found, torch.func.vmap(module)(torch.stack([x, 2 * x])))

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megafuse.codegen.host import print_host
from megafuse.core.dtypes import DType
from megafuse.core.errors import VerifyError
from megafuse.schedule.types import Alloc, Buffer, DotCall, Free, Launch, OpaqueCall, Pool, Step, View
from runtime_examples import full, kernel, row_major, square_step

BF16 = DType.BF16


def buffer(name: str, kind: str, *shape: int, position: int = -1, strides: tuple[int, ...] | None = None) -> Buffer:
    return Buffer(name, shape, strides or row_major(*shape), BF16, kind, position)


def step(
    buffers: list[Buffer], forward: list, *, backward: tuple = (), outputs: tuple = (), grads: tuple = (), **more
) -> Step:
    made = (kernel(*(b.name for b in buffers if b.kind in ("temp", "grad"))),)
    kernels, saved = more.get("kernels", made), more.get("saved", ())
    return Step(tuple(buffers), kernels, tuple(forward), backward, outputs, grads, saved)


def test_prints_forward_and_backward_as_written_by_hand() -> None:
    source = print_host(square_step(4, 3, 5), ["k0", "k1"], tangent_base=3)
    forward, backward = source.text.split("def backward")
    assert "SAVED_INPUTS = (0, 1, -1)" in forward
    assert "OVERWRITTEN = ()" in forward
    assert "x = inputs[0]  # f32[4, 3]" in forward
    assert "z = empty((4, 5), (5, 1), f32)" in forward
    assert "mm(x, w, out=z)  # [4, 3] @ [3, 5] -> [4, 5]" in forward
    assert "stream = current_stream()" in forward
    assert "k0(stream, address(z), address(b), address(y))" in forward
    assert "return [y], [x, w, z]" in forward
    assert "dy = arrange(tangents[0], (4, 5), (5, 1), f32)" in backward
    assert "mm(dz, part(w, (5, 3), (1, 5), 0), out=dx)" in backward
    assert "del dz, x, w" in backward
    assert "return [dx, dw, db]" in backward
    assert "TANGENTS = {0: ((4, 5), (5, 1), f32)}" in forward
    assert source.needs == ("address", "arrange", "current_stream", "empty", "f32", "k0", "k1", "mm", "part")


def test_batched_views_bias_and_repeated_views() -> None:
    a, b = buffer("a", "input", 4, 3, 8, position=0), buffer("b", "input", 3, 8, 8, position=1)
    bias, out = buffer("bias", "input", 8, position=2), buffer("out", "output", 4, 3, 8)
    rows = View("a", (3, 4, 8), (8, 24, 1))
    calls = [Alloc("out"), DotCall(View("out", (3, 4, 8), (8, 24, 1)), rows, full(b), full(bias)),
             DotCall(View("out", (3, 4, 8), (8, 24, 1)), rows, full(b))]  # fmt: skip
    text = print_host(step([a, b, bias, out], calls, outputs=(full(out),)), []).text
    assert "a_view1 = part(a, (3, 4, 8), (8, 24, 1), 0)" in text
    assert "out_view1 = part(out, (3, 4, 8), (8, 24, 1), 0)" in text
    assert "baddbmm(bias, a_view1, b, out=out_view1)" in text
    assert "bmm(a_view1, b, out=out_view1)  # [3, 4, 8] @ [3, 8, 8] -> [3, 4, 8]" in text


def test_single_problem_with_bias_is_addmm() -> None:
    a, w, bias = (
        buffer("a", "input", 4, 8, position=0),
        buffer("w", "input", 8, 8, position=1),
        buffer("c", "input", 8, position=2),
    )
    out = buffer("out", "output", 4, 8)
    call = DotCall(*(full(t, lead=True) for t in (out, a, w)), full(bias))
    assert (
        "addmm(c, a, w, out=out)"
        in print_host(step([a, w, bias, out], [Alloc("out"), call], outputs=(full(out),)), []).text
    )


def test_freeing_a_buffer_frees_its_named_views() -> None:
    a, t, out = buffer("a", "input", 4, 4, position=0), buffer("t", "temp", 4, 4), buffer("out", "output", 4, 4)
    flipped = View("t", (1, 4, 4), (16, 1, 4))
    dots = [DotCall(full(out, lead=True), flipped, b) for b in (flipped, full(t, lead=True))]
    calls = [Alloc("t"), Launch(0, ("a", "t")), Alloc("out"), *dots, Free("t"), Free("a")]
    text = print_host(step([a, t, out], calls, outputs=(full(out),)), ["copy"]).text
    assert "t_view1 = part(t, (4, 4), (1, 4), 0)" in text
    assert "del t, t_view1, a" in text


def test_outputs_views_of_inputs_and_none() -> None:
    a, t = buffer("a", "input", 4, 2, position=1), buffer("t", "output", 4, 2)
    outputs = (View("a", (2,), (2,), 1), None, View("t", (2, 4), (1, 2)), full(a), View("t", (4,), (2,)))
    text = print_host(step([a, t], [Alloc("t"), Launch(0, ("a", "t"))], outputs=outputs), ["k"]).text
    assert "a = inputs[1]" in text
    returned = ["view(a, (2,), (2,), 1)", "None", "detached(view(t, (2, 4), (1, 2), 0))", "a"]
    assert f"[{', '.join([*returned, 'detached(view(t, (4,), (2,), 0))'])}], []" in text


def test_a_buffer_that_is_used_under_one_view_alone_is_allocated_as_that() -> None:
    a, t, u = buffer("a", "input", 4, 2, position=0), buffer("t", "output", 4, 2), buffer("u", "output", 4, 2)
    outputs = (View("t", (2, 4), (1, 2)), View("u", (3, 2), (2, 1)))
    calls = [Alloc("t"), Alloc("u"), Launch(0, ("a", "t"))]
    text = print_host(step([a, t, u], calls, outputs=outputs), ["k"]).text
    assert "t = empty((2, 4), (1, 2), bf16)" in text
    assert "u = empty((4, 2), (2, 1), bf16)" in text
    assert "return [t, detached(view(u, (3, 2), (2, 1), 0))], []" in text
    saved = print_host(step([a, t, u], calls, outputs=outputs, saved=("t",)), ["k"]).text
    assert "return [detached(view(t, (2, 4), (1, 2), 0)), " in saved, "backward relies on the strides of the plan"


def test_gradients_share_memory_with_nothing() -> None:
    dy, own, saved = buffer("dy", "tangent", 4, 2, position=0), buffer("g", "grad", 8), buffer("s", "saved", 4)
    grads = (full(dy), View("dy", (4,), (2,)), full(own), View("g", (4,), (1,)), full(saved), None)
    s = step([dy, own, saved], [Alloc("s")], backward=(Alloc("g"), Launch(0, ("dy", "g"))), grads=grads, saved=("s",))
    text = print_host(s, ["k"]).text
    expected = ["dy", "fresh(part(dy, (4,), (2,), 0))", "g", "fresh(part(g, (4,), (1,), 0))", "fresh(s)", "None"]
    assert f"return [{', '.join(expected)}]" in text


def test_disjoint_parts_of_one_gradient_buffer_are_not_copied() -> None:
    dy, own = buffer("dy", "tangent", 8, position=0), buffer("g", "grad", 8)
    grads = (View("g", (4,), (1,)), View("g", (4,), (1,), 4))
    text = print_host(step([dy, own], [], backward=(Alloc("g"), Launch(0, ("dy", "g"))), grads=grads), ["k"]).text
    assert "fresh" not in text


def test_opaque_call_and_long_reason() -> None:
    a, r = buffer("a", "input", 4, 2, position=0), buffer("r", "output", 4, 2)
    call = OpaqueCall(7, (full(a), View("a", (4,), (2,))), (None, "r"), "aten.cumsum: no converter")
    text = print_host(step([a, r], [call], outputs=(full(r),)), []).text
    assert "_, r = opaque(7, (a, view(a, (4,), (2,), 0)))  # aten.cumsum: no converter" in text
    assert "r = arrange(r, (4, 2), (2, 1), bf16)" in text


def test_tangent_position_is_counted_from_the_base() -> None:
    dy, g = buffer("dy", "tangent", 4, position=5), buffer("g", "grad", 4)
    s = step([dy, g], [], backward=(Alloc("g"), Launch(0, ("dy", "g"))), grads=(full(g),))
    assert "dy = arrange(tangents[2]," in print_host(s, ["k"], tangent_base=3).text


def test_names_never_collide() -> None:
    buffers = [
        buffer(n, "input", 2, position=i) for i, n in enumerate(("view", "k", "a.b", "a_b", "class", "inputs", "bf16"))
    ]
    text = print_host(step(buffers, [Launch(0, tuple(b.name for b in buffers))]), ["k"]).text
    given = ("view_v2", "k_v2", "a_b", "a_b_v2", "class_v2", "inputs_v2", "bf16_v2")
    assert re.findall(r"address\((\w+)\)", text) == [*given]
    compile(text, "host", "exec")


def test_saved_memory_that_backward_writes_over_is_listed() -> None:
    assert "OVERWRITTEN = (2,)" in print_host(square_step(4, 3, 5, in_place=True), ["k0", "k1"], tangent_base=3).text


@pytest.mark.parametrize("calls", [[Launch(0, ("a", "t"))], [Alloc("t"), Free("t"), Launch(0, ("a", "t"))]])
def test_use_of_a_buffer_that_is_not_there(calls: list) -> None:
    a, t = buffer("a", "input", 4, position=0), buffer("t", "temp", 4)
    with pytest.raises(VerifyError, match="'t'"):
        print_host(step([a, t], calls), ["k"])


def test_writing_to_an_input_is_refused() -> None:
    a = buffer("a", "input", 4, position=0)
    with pytest.raises(VerifyError, match="input 'a'"):
        print_host(step([a], [Launch(0, ("a",))], kernels=(kernel("a"),)), ["k"])


def test_writing_over_an_output_is_refused() -> None:
    a, y = buffer("a", "input", 4, position=0), buffer("y", "output", 4)
    s = step(
        [a, y], [Alloc("y"), Launch(0, ("a", "y"))], backward=(Launch(0, ("a", "y")),), outputs=(full(y),),
        saved=("a", "y"), kernels=(kernel("y"),),
    )  # fmt: skip
    with pytest.raises(VerifyError, match="returned to the caller"):
        print_host(s, ["k"])


def test_long_calls_are_wrapped() -> None:
    shape = (2, 3, 4, 5, 6)
    buffers = [buffer(f"a_rather_long_buffer_name_{i}", "input", *shape, position=i) for i in range(8)]
    text = print_host(step(buffers, [Launch(0, tuple(b.name for b in buffers))]), ["kernel"]).text
    assert max(map(len, text.splitlines())) <= 120
    compile(text, "host", "exec")


def test_products_of_several_types_are_told_apart() -> None:
    a, b = buffer("a", "input", 4, 8, position=0), buffer("b", "input", 8, 8, position=1)
    out = Buffer("out", (4, 8), (8, 1), DType.F32, "output")
    call = DotCall(*(full(t, lead=True) for t in (out, a, b)))
    assert (
        "mixed_mm(a, b, out=out)" in print_host(step([a, b, out], [Alloc("out"), call], outputs=(full(out),)), []).text
    )


def test_pools_are_allocated_at_their_first_buffer_and_freed_after_the_last() -> None:
    x, y = buffer("x", "input", 4, position=0), buffer("y", "output", 4)
    small = [buffer(n, "temp", 4) for n in ("p", "q")]
    calls = [Alloc("p"), Launch(0, ("x", "p")), Alloc("q"), Launch(0, ("p", "q")), Free("p"), Alloc("y"),
             Launch(0, ("q", "y")), Free("q"), Free("x")]  # fmt: skip
    plain = step([x, *small, y], calls, outputs=(full(y),))
    text = print_host(replace(plain, pools=(Pool("forward", 256, {"p": 0, "q": 128}),)), ["k"]).text
    expected = """    stream = current_stream()
    workspace_memory = empty((256,), (1,), u8)
    workspace = address(workspace_memory)
    p = workspace + 0  # bf16[4]
    k(stream, address(x), p)
    q = workspace + 128  # bf16[4]
    k(stream, p, q)
    y = empty((4,), (1,), bf16)
    k(stream, q, address(y))
    del workspace_memory, x
"""
    assert expected in text


def test_the_pool_of_saved_buffers_is_one_saved_tensor() -> None:
    x, dy, dx = buffer("x", "input", 4, position=0), buffer("dy", "tangent", 4, position=1), buffer("dx", "grad", 4)
    kept = [buffer(n, "saved", 4) for n in ("p", "saved")]
    s = step(
        [x, dy, dx, *kept], [Alloc("p"), Alloc("saved"), Launch(0, ("x", "p", "saved"))], saved=("p", "x", "saved"),
        backward=(Alloc("dx"), Launch(0, ("p", "saved", "dy", "x", "dx")), Free("p"), Free("saved"), Free("x")),
        grads=(full(dx),), kernels=(kernel("dx"),),
    )  # fmt: skip
    s = replace(s, pools=(Pool("saved", 256, {"p": 0, "saved": 128}),))
    source = print_host(s, ["k"], tangent_base=1)
    forward, backward = source.text.split("def backward")
    assert "SAVED_INPUTS = (-1, 0)" in forward
    assert "SAVED_STRIDES = ((1,), (1,))" in forward
    assert "return [], [kept_memory, x]" in forward
    assert "kept_memory = saved[0]\n" in backward
    assert "saved_v2 = kept + 128  # bf16[4]" in backward
    assert "k(stream, p, saved_v2, address(dy), address(x), address(dx))" in backward
    assert "del kept_memory, x" in backward

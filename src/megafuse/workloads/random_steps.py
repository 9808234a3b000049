"""What random modules are made of: each step writes one or a few lines that continue from a value.

A step is ``step(w, x) -> name | None``: it adds lines to the writer ``w`` that use ``x`` and returns the value made, or
None where nothing fits the shape of ``x``.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence

from megafuse.workloads.random_modules import ModuleProgram
from megafuse.workloads.random_writer import MAX_ELEMENTS, SIZES, Draw, Writer

Step = Callable[[Writer, str], "str | None"]

SMOOTH = (
    "F.silu({x})|torch.tanh({x})|F.gelu({x})|{x} * 0.5|{x} + 1.5|torch.sigmoid({x})|F.softplus({x})|-{x}|"
    "torch.sqrt({x} * {x} + 1)|torch.exp(-{x} * {x})|torch.cos({x})|F.gelu({x}, approximate='tanh')|"
    "2 / (1 + {x} * {x})|{x}**2|F.mish({x})|torch.erf({x})|torch.sigmoid({x}.float()).to({x}.dtype)|F.logsigmoid({x})|"
    "{x} * {x} * 0.3|{x} * torch.sigmoid(1.702 * {x})|torch.log1p({x} * {x})|1 - {x}|{x}.clone().mul_(0.7)|"
    "30 * torch.tanh({x} / 30)|F.silu({x}.float() * 0.5).to({x}.dtype)|F.softplus({x}, beta=2)|"
    "torch.lerp({x}, {x} * {x}, 0.3)"
).split("|")
JUMPS = (
    "F.relu({x})|{x}.abs()|torch.exp(-{x}.abs())|F.leaky_relu({x}, 0.1)|F.elu({x})|{x}.clamp(-0.7, 0.9)|F.relu6({x})|"
    "F.hardswish({x})|torch.where({x} > 0.1, {x}, 0.3)|F.hardsigmoid({x})|{x}.clamp(min=-0.5)|"
    "torch.sign({x}) * 0.5 + {x}|{x}.masked_fill({x} < -0.4, 0.0)|F.relu({x}).pow(2)"
).split("|")


def _axis(w: Writer, x: str) -> int:
    return -1 - w.draw.up_to(len(w.shape(x)) - 1)


def _norm_axis(w: Writer, x: str) -> int | None:
    axis = _axis(w, x) if w.draw.maybe(3) else -1
    return axis if w.spread(x, (axis,)) else None


def pointwise(w: Writer, x: str) -> str | None:
    """A function of one value."""
    choices = SMOOTH + JUMPS if w.may_jump(x) else SMOOTH
    return w.emit(w.draw.one_of(choices).replace("{x}", x))


def _partner(w: Writer, x: str) -> str:
    """Something that broadcasts to the shape of ``x``: an earlier value, or a new tensor."""
    shape = w.shape(x)
    same = [n for n in w.tensors if n != x and w.shape(n) == shape]
    wide = [n for n in w.tensors if n != x and w.shape(n)[-1:] == shape[-1:] and len(w.shape(n)) <= len(shape)]
    kind = w.draw.up_to(3)
    if kind == 0 and same:
        return w.draw.one_of(same)
    if kind == 1 and wide:
        return w.draw.one_of(wide)
    keep = [n if w.draw.up_to(1) == 0 else 1 for n in shape]
    return w.leaf(keep[w.draw.up_to(len(keep) - 1) :])


def binary(w: Writer, x: str) -> str | None:
    """A function of two values, often of different shapes: sums, products, gates, masks."""
    y = _partner(w, x)
    forms = [f"{x} + {y}", f"{x} * {y}", f"{x} - {y}", f"{x} * torch.sigmoid({y})", f"{x} / (2 + {y} * {y})"]
    forms += [f"torch.addcmul({x}, {y}, torch.tanh({x}))", f"{y} * F.silu({x})", f"{x} * (1 + {y})"]
    if w.may_jump(x, y):
        forms += [f"torch.maximum({x}, {y})", f"torch.where({y} > 0, {x}, {x} * 0.1)", f"torch.minimum({x}, {y})"]
    return w.emit(w.draw.one_of(forms))


def masked(w: Writer, x: str) -> str | None:
    """Some elements replaced, by a mask that broadcasts."""
    keep = [n if w.draw.up_to(1) == 0 else 1 for n in w.shape(x)]
    mask = w.leaf(keep, w.draw.one_of("xb"), layout="mask")
    forms = [f"{x}.masked_fill({mask}, 0.0)", f"torch.where({mask}, {x}, torch.tanh({x}))", f"{x} * {mask}"]
    return w.emit(w.draw.one_of(forms))


def residual(w: Writer, x: str) -> str | None:
    """A sum with an earlier value of the same shape, or with a function of itself."""
    same = [n for n in w.values if n != x and n in w.tensors and w.shape(n) == w.shape(x)]
    return w.emit(f"{x} + {w.draw.one_of(same)}" if same else f"{x} + torch.tanh({x} * 0.5)")


def norm(w: Writer, x: str) -> str | None:
    """A norm from the library or by hand, in the input's type or in fp32."""
    axis = _norm_axis(w, x)
    if axis is None:
        return None
    shape = w.shape(x)
    n = shape[-1]
    if axis == -1 and n > 1:
        kind = w.draw.up_to(7)
        if kind == 0:
            return w.emit(f"F.layer_norm({x}, ({n},), {w.leaf((n,), 'w')}, {w.leaf((n,), 'w')}, 1e-3)")
        if kind == 1:
            options = w.draw.one_of(["", ", eps=1e-2", ", elementwise_affine=False", ", bias=False"])
            text = _again(w, f"nn.LayerNorm({n}") or f"nn.LayerNorm({n}{options})"
            return w.emit(f"{w.child(text)}({x})")
        if kind == 2:
            return w.emit(f"{w.child(f'nn.RMSNorm({n}, eps=1e-3)')}({x})")
        if kind == 3:
            weight, bias = w.leaf((n,), "w"), w.leaf((n,), "w")
            made = f"F.layer_norm({x}.float(), ({n},), {weight}.float(), {bias}.float(), 1e-3)"
            return w.emit(f"{made}.to({x}.dtype)")
        if kind == 4 and len(shape) > 1 and w.spread(x, (-1, -2)):
            return w.emit(f"F.layer_norm({x}, {shape[-2:]}, eps=1e-2)")
    return _norm_by_hand(w, x, axis)


def _norm_by_hand(w: Writer, x: str, axis: int) -> str | None:
    kind = w.draw.up_to(5)
    if kind == 0:
        return w.emit(f"F.softmax({x}, {axis})")
    if kind == 1:
        return w.emit(f"F.log_softmax({x}, {axis})")
    if kind == 2:
        return w.emit(f"{x} * torch.rsqrt({x}.pow(2).mean({axis}, keepdim=True) + 0.1)")
    if kind == 3:
        wide = w.emit(f"{x}.float()") or x
        scaled = f"{wide} * torch.rsqrt({wide}.pow(2).mean({axis}, keepdim=True) + 1e-2)"
        return w.emit(f"({scaled}).to({x}.dtype) * {_partner(w, x)}")
    if kind == 4:
        return w.emit(f"{x} / (torch.linalg.vector_norm({x}, dim={axis}, keepdim=True) + 1)")
    centred = w.emit(f"{x} - {x}.mean({axis}, keepdim=True)") or x
    return w.emit(f"{centred} / torch.sqrt(({centred} * {centred}).mean({axis}, keepdim=True) + 0.1)")


def reduction(w: Writer, x: str) -> str | None:
    """A sum, mean or extreme over one or two axes, or what is left of the mean."""
    rank = len(w.shape(x))
    first = _axis(w, x)
    axes = (first, -1 - (-first) % rank) if rank > 1 and w.draw.maybe(3) else (first,)
    axis = str(axes if len(axes) > 1 else first)
    keep = w.draw.one_of([False, True])
    forms = [f"{x}.mean({axis}, keepdim={keep})", f"{x}.sum({axis}, keepdim={keep}) * 0.3"]
    forms += [f"{x} - {x}.mean({axis}, keepdim=True)", f"{x}.float().mean({axis}, keepdim={keep}).to({x}.dtype)"]
    if w.may_jump(x):
        forms += [f"{x}.amax({axis}, keepdim={keep})", f"{x}.amin({axis}, keepdim={keep})"]
    if w.spread(x, axes):
        forms += [f"torch.logsumexp({x}, {axis}, keepdim={keep})", f"{x}.var({axis}, correction=0, keepdim={keep})"]
    return w.emit(w.draw.one_of(forms))


def move(w: Writer, x: str) -> str | None:
    """Elements in other places."""
    shape = w.shape(x)
    axis = w.draw.up_to(len(shape) - 1)
    return w.emit_move(w.draw.one_of([_reshape, _turn, _cut, _grow])(w, x, shape, axis))


def _reshape(w: Writer, x: str, shape: tuple[int, ...], axis: int) -> str:
    before, after = shape[:axis], shape[axis + 1 :]
    if after and w.draw.maybe(2):
        return f"{x}.reshape({(*before, shape[axis] * after[0], *after[1:])})"
    if math.prod(shape) % 6 == 0 and w.draw.maybe(4):
        return f"{x}.reshape({w.draw.one_of([(6, -1), (-1, 3), (2, 3, -1), (-1,)])})"
    factor = w.draw.one_of([f for f in range(1, shape[axis] + 1) if shape[axis] % f == 0])
    return f"{x}.reshape({(*before, shape[axis] // factor, factor, *after)})"


def _turn(w: Writer, x: str, shape: tuple[int, ...], axis: int) -> str:
    other = w.draw.up_to(len(shape) - 1)
    forms = [f"{x}.permute({w.draw.shuffled(range(len(shape)))})", f"{x}.transpose({axis}, {other}).contiguous()"]
    forms += [
        f"{x}.flip({axis})",
        f"{x}.roll({1 + w.draw.up_to(shape[axis])}, {axis})",
        f"{x}.movedim({axis}, {other})",
    ]
    return w.draw.one_of(forms)


def _cut(w: Writer, x: str, shape: tuple[int, ...], axis: int) -> str:
    size = shape[axis]
    start = w.draw.up_to(size - 1)
    length = 1 + w.draw.up_to(size - 1 - start)
    forms = [f"{x}.narrow({axis}, {start}, {length})", f"{x}[{':, ' * axis}{start}::{1 + w.draw.up_to(2)}]"]
    forms += [f"{x}.select({axis}, {start})", f"{x}.split({length}, {axis})[0]", f"{x}.chunk(2, {axis})[-1]"]
    return w.draw.one_of(forms)


def _grow(w: Writer, x: str, shape: tuple[int, ...], axis: int) -> str:
    end = f"{w.draw.up_to(2)}, {w.draw.up_to(2)}"
    forms = [f"F.pad({x}, ({end}))", f"torch.cat([{x}, {x}], {axis})", f"{x}.unsqueeze({axis})"]
    if len(shape) > 1:
        forms += [f"F.pad({x}, (0, 0, {end}))"]
    return w.draw.one_of(forms)


def join(w: Writer, x: str) -> str | None:
    """Concatenation or stacking with something computed from the same value, or with another value."""
    axis = _axis(w, x)
    shape = list(w.shape(x))
    shape[axis] = w.draw.one_of(SIZES[:6])
    y = w.leaf(shape) if w.draw.maybe(3) else w.draw.one_of([f"torch.tanh({x})", f"{x} * 2", f"torch.sin({x})"])
    if not y.startswith(("x", "self")) and w.draw.maybe(2):
        return w.emit(f"torch.stack([{x}, {y}], {axis})")
    return w.emit(f"torch.cat([{', '.join(w.draw.shuffled([x, y]))}], {axis})")


def widen(w: Writer, x: str) -> str | None:
    """A broadcast along a new axis, times a weight."""
    shape = w.shape(x)
    axis = w.draw.up_to(len(shape) - 1)
    wide = (*shape[:axis], 2 + w.draw.up_to(2), *shape[axis:])
    return w.emit(f"{x}.unsqueeze({axis}).expand{wide} * {w.leaf(wide)}")


def mix(w: Writer, x: str) -> str | None:
    """Cut, swap, join: what a token mixer does."""
    shape = w.shape(x)
    if len(shape) < 2 or shape[-1] % shape[-2]:
        return None
    t, d = shape[-2:]
    return w.emit_move(f"{x}.reshape({(*shape[:-2], t, t, d // t)}).transpose(-3, -2).reshape({shape})")


def gate(w: Writer, x: str) -> str | None:
    """Parts of a value that gate one another; at times a part is left unused."""
    axis, parts = _axis(w, x), w.draw.one_of([2, 3])
    if w.shape(x)[axis] % parts:
        return None
    a, b, *_ = (f"{x}.chunk({parts}, {axis})[{i}]" for i in w.draw.shuffled(range(parts)))
    forms = [f"{a} * torch.sigmoid({b})", f"F.silu({a}) * {b}", f"torch.cat([{b}, torch.tanh({a})], {axis})"]
    forms += [f"{a} + {b}"] + ([f"F.glu({x}, {axis})"] if parts == 2 else [])
    return w.emit(w.draw.one_of(forms))


def _again(w: Writer, beginning: str) -> str | None:
    """The text of an earlier submodule that begins so, once in two times: the new one shares its weight."""
    found = [c.text for c in w.children if re.match(re.escape(beginning) + r"\b", c.text)]
    return w.draw.one_of(found) if found and w.draw.maybe(2) else None


def dot(w: Writer, x: str) -> str | None:
    """A product with weights: shared by all tokens or one matrix per token, from the library or as einsum."""
    shape = w.shape(x)
    k, n = shape[-1], w.draw.one_of(SIZES)
    scale = 1 / math.sqrt(k)
    kind = w.draw.up_to(7)
    if kind == 1:
        return w.emit(f"F.linear({x}, {w.leaf((n, k), 'w', scale=scale)}, {w.leaf((n,), 'w')})")
    if kind in (2, 3):
        options = f"{w.draw.one_of([k, n])}{w.draw.one_of(['', ', bias=False'])}"
        text = _again(w, f"nn.Linear({k}") or f"nn.Linear({k}, {options})"
        return w.emit(f"{w.child(text)}({x})")
    if len(shape) == 3:
        t = shape[1]
        if kind in (4, 5):
            made = _per_token(w, x, n, by_name=kind == 5)
            again = made and w.draw.maybe(2) and w.emit(w.draw.one_of(SMOOTH).replace("{x}", made))
            return _per_token(w, again, w.draw.one_of(SIZES), by_name=w.draw.maybe(2)) if again else made
        if kind == 6:
            return w.emit(f"torch.einsum('bth,st->bsh', {x}, {w.leaf((n, t), scale=t**-0.5)})")
    if kind == 7 and len(shape) == 2:
        return w.emit(f"torch.addmm({w.leaf((n,), 'w')}, {x}, {w.leaf((k, n), 'w', scale=scale)})")
    tied = [m for m in w.tensors if m.startswith("self.w") and len(w.shape(m)) == 2 and w.shape(m)[1] == k]
    if tied and w.draw.maybe(2):
        return w.emit(f"{x} @ {w.draw.one_of(tied)}.t()")
    return w.emit(f"{x} @ {w.leaf((k, n), scale=scale)}")


def _per_token(w: Writer, x: str, n: int, *, by_name: bool) -> str | None:
    """A product with one matrix per token: ``by_name`` as einsum, else from the library, with a bias."""
    _, t, k = w.shape(x)
    weight = w.leaf((t, k, n), "w", scale=1 / math.sqrt(k))
    if by_name:
        return w.emit(f"torch.einsum('btd,tdh->bth', {x}, {weight})")
    return w.emit(f"torch.bmm({x}.transpose(0, 1), {weight}).transpose(0, 1) + {w.leaf((t, n), 'w')}")


def reused(w: Writer, x: str) -> str | None:
    """A submodule called once more, where one takes values of this width."""
    fitting = [c.name for c in w.children if c.text.startswith(f"nn.Linear({w.shape(x)[-1]},")]
    return w.emit(f"{w.draw.one_of(fitting)}({x})") if fitting else None


def attend(w: Writer, x: str) -> str | None:
    """Scores of all pairs, their softmax, and the weighted sum; at times the scores alone."""
    shape = w.shape(x)
    if len(shape) < 2:
        return None
    scores = w.emit(f"{x} @ {x}.transpose(-1, -2) * {shape[-1] ** -0.5:.3f}")
    if scores is None or w.draw.maybe(3) or not w.spread(scores, (-1,)):
        return scores
    return w.emit(f"F.softmax({scores}, -1) @ {x}")


def ffn(w: Writer, x: str) -> str | None:
    """Norm, two products with an activation or a gate between them, and a residual."""
    d, h = w.shape(x)[-1], w.draw.one_of(SIZES)
    before = (norm(w, x) if w.draw.maybe(2) else None) or x
    if w.shape(before) != w.shape(x):
        before = x
    hidden = w.emit(f"{w.child(f'nn.Linear({d}, {h})')}({before})")
    if hidden and w.draw.maybe(2):
        hidden = w.emit(f"F.silu({hidden}) * {w.child(f'nn.Linear({d}, {h}, bias=False)')}({before})")
    else:
        hidden = hidden and pointwise(w, hidden)
    out = hidden and w.emit(f"{w.child(f'nn.Linear({h}, {d})')}({hidden})")
    return out and w.emit(f"{x} + {out}")


def by_index(w: Writer, x: str) -> str | None:
    """Elements at integers that are given: of the value along an axis, or rows of a table that go with it.

    What PyTorch adds up with atomics in backward gets two terms at most: the sum of more has no fixed order on a GPU.
    """
    shape = w.shape(x)
    axis, count = w.draw.up_to(len(shape) - 1), w.draw.one_of(SIZES)
    size, kind = shape[axis], w.draw.up_to(4)

    def index(dims: Sequence[int], below: int) -> str:
        return w.leaf(dims, w.draw.one_of("xb"), layout="index", scale=below)

    if kind == 0:
        return w.emit(f"{x} + F.embedding({index(shape[:-1] or (1,), count)}, {w.leaf((count, shape[-1]), 'w')})")
    if kind == 1:
        table = w.child(f"nn.Embedding({count}, {shape[-1]}{w.draw.one_of(['', ', padding_idx=0'])})")
        return w.emit(f"{x} * {table}({index(shape[:-1] or (1,), count)})")
    if kind == 2:
        return w.emit_move(f"{x}.index_select({axis}, {index((min(count, 2),), size)})")
    if kind == 3:
        from_the_end = w.draw.one_of(["", f" - {size}"])
        return w.emit_move(f"{x}[{':, ' * axis}{index((2, count) if count < 4 else (count,), size)}{from_the_end}]")
    return w.emit_move(f"{x}.gather({axis}, {index((*shape[:axis], min(count, 2), *shape[axis + 1 :]), size)})")


def left_as_is(w: Writer, x: str) -> str | None:
    """An op that no generated kernel computes."""
    return w.emit(f"torch.cumsum({x}, {_axis(w, x)}) * 0.2")


STEPS: tuple[Step, ...] = (
    pointwise, binary, norm, move, dot, residual, reduction, gate, mix, join, ffn, attend, masked, widen,
    pointwise, binary, norm, move, dot, residual, binary, norm, move, mix, left_as_is, reused, reused, by_index,
)  # fmt: skip


def _shape(draw: Draw) -> list[int]:
    """Often [B, T, D] with T tokens that divide D; now and then one wide row."""
    if draw.maybe(12):
        return [draw.one_of([1, 2, 3]), draw.one_of([65, 129, 260, 520, 1040])]
    if draw.maybe(2):
        tokens = draw.one_of([2, 3, 4, 5, 8])
        return [draw.one_of([2, 3, 1, 5, 7]), tokens, tokens * draw.one_of([2, 1, 3, 5])]
    shape = [draw.one_of(SIZES) for _ in range(draw.one_of([2, 3, 3, 1, 4]))]
    while math.prod(shape) > MAX_ELEMENTS // 4:
        shape = [max(1, n // 2) for n in shape]
    return shape


def write(draw: Draw, dtype: str = "fp32", seed: int = 0, most: int = 12) -> ModuleProgram:
    """A module of up to ``most`` steps, with one to three results."""
    w = Writer(draw, dtype, seed)
    shape = _shape(draw)
    w.leaf(shape, "x")
    for _ in range(draw.up_to(2)):
        w.leaf(shape if draw.up_to(1) == 0 else shape[-1:], "x")
    made: list[str] = []
    for _ in range(1 + draw.up_to(most - 1)):
        pool = [n for n in [*reversed(made), *(n for n in w.values if n[0] == "x")] if n in w.tensors and w.shape(n)]
        x = pool[0] if not draw.maybe(3) else draw.one_of(pool)
        name = draw.one_of(STEPS)(w, x)
        made += [name] if name else []
    made = made or [w.emit(f"{w.leaves[0].name} * 2") or w.leaves[0].name]
    results = [made[-1], *(draw.one_of(made) for _ in range(draw.up_to(2)))]
    return w.program(list(dict.fromkeys(results)))


def random_program(seed: int, dtype: str = "fp32", most: int = 12) -> ModuleProgram:
    """The module of a number: the same in every process and on every machine."""
    numbers = random.Random(f"{seed} {dtype}")
    return write(Draw(lambda high: numbers.randint(0, high)), dtype, seed, most)

"""How each pointwise function of ``ir.ops`` is written in Triton, as data.

A template is looked up by the kind of its arguments, most special first: the type itself, then "float" or "int", then
"any". ``{a}``, ``{b}``, ``{c}`` are operands, ``{t}`` the Triton type of the arguments. Precision:

* fp32 division and square root are IEEE (``div_rn``, ``sqrt_rn``); Triton's ``/`` and ``tl.sqrt`` are approximate;
* ``tl.log``, ``tl.sin``, ``tl.erf`` and the like compile to libdevice, an ulp or two of fp32;
* ``tl.exp`` is one ``ex2.approx`` of ``x * log2(e)``, whose relative error grows to ``|x| * 2**-24``: used where a
  16-bit type is in play (``FAST``; ``narrow`` makes further forms), and libdevice's two-step reduction otherwise;
* ``_rsqrt`` is ``rsqrt.approx`` in fp32, as CUDA's own ``rsqrtf`` is; fp64 divides by the exact root;
* Triton links libdevice for flushing subnormal fp32 numbers to 0: where that is seen, helpers go round it
  (docs/numerics.md lists what is left);
* Triton's ``-x`` is ``0 - x``, which loses the sign of zero: floats are multiplied by -1.
"""

from __future__ import annotations

from megafuse.core.dtypes import DType

_LIBDEVICE = (
    "round:rint trunc expm1 log1p log10 tan tanh erfc asin acos atan sinh cosh asinh acosh atanh pow atan2 "
    "copysign hypot nextafter erfinv erfcx ndtri:normcdfinv"
)
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
_NAN_WINS = "propagate_nan=tl.PropagateNan.ALL"


def _libdevice(entry: str) -> tuple[str, dict[str, str]]:
    fn, _, name = entry.partition(":")
    args = "{a}, {b}" if fn in ("pow", "atan2", "copysign", "hypot", "nextafter") else "{a}"
    return fn, {"float": f"libdevice.{name or fn}({args})"}


TEMPLATES: dict[str, dict[str, str]] = {
    **{fn: {"any": f"{{a}} {symbol} {{b}}"} for fn, symbol in _INFIX.items()},
    **dict(_libdevice(entry) for entry in _LIBDEVICE.split()),
    "neg": {"float": "{a} * -1.0", "any": "-{a}"},
    "abs": {"any": "tl.abs({a})", "u8": "{a}", "bool": "{a}"},
    "sign": {"any": "({a} > 0).to({t}) - ({a} < 0).to({t})", "u8": "({a} > 0).to({t})", "bool": "{a}"},
    "floor": {"f32": "_floor({a})", "f64": "tl.floor({a})", "any": "{a}"},
    "ceil": {"f32": "_ceil({a})", "f64": "tl.ceil({a})", "any": "{a}"},
    "not": {"any": "~{a}"},
    "sqrt": {"f32": "tl.math.sqrt_rn({a})", "f64": "tl.sqrt({a})"},
    "rsqrt": {"f32": "_rsqrt({a})", "f64": "1.0 / tl.sqrt({a})"},
    "recip": {"f32": "tl.math.div_rn(1.0, {a})", "f64": "1.0 / {a}"},
    "exp": {"f32": "libdevice.exp({a})", "f64": "tl.exp({a})"},
    "exp2": {"f32": "tl.exp2({a})", "f64": "tl.exp2({a})"},
    "log": {"float": "tl.log({a})"},
    "log2": {"float": "tl.log2({a})"},
    "sin": {"float": "tl.sin({a})"},
    "cos": {"float": "tl.cos({a})"},
    "erf": {"float": "tl.erf({a})"},
    "sigmoid": {
        "f32": "tl.math.div_rn(1.0, 1.0 + libdevice.exp(-{a}))",
        "f64": "1.0 / (1.0 + tl.exp(-{a}))",
    },
    "lgamma": {"float": "_lgamma({a})"},
    "digamma": {"float": "_digamma({a})"},
    "fmod": {"float": "_fmod({a}, {b})", "any": "{a} % {b}"},
    "maximum": {"float": f"tl.maximum({{a}}, {{b}}, {_NAN_WINS})", "any": "tl.maximum({a}, {b})"},
    "minimum": {"float": f"tl.minimum({{a}}, {{b}}, {_NAN_WINS})", "any": "tl.minimum({a}, {b})"},
    "div": {"f32": "tl.math.div_rn({a}, {b})", "f64": "{a} / {b}", "any": "{a} // {b}"},
    "remainder": {"float": "_remainder({a}, {b})", "int": "_remainder_int({a}, {b})", "u8": "{a} % {b}"},
    "floordiv": {"float": "_floordiv({a}, {b})", "int": "_floordiv_int({a}, {b})", "u8": "{a} // {b}"},
    "isnan": {"float": "{a} != {a}", "any": "{a} != {a}"},
    "isinf": {"float": 'tl.abs({a}) == float("inf")', "any": "{a} != {a}"},
    "where": {"any": "tl.where({a}, {b}, {c})"},
}
TEMPLATES["round"]["any"] = TEMPLATES["trunc"]["any"] = "{a}"
TEMPLATES["pow"]["int"] = "_pow_int({a}, {b})"
TEMPLATES["pow"]["u8"] = "_power({a}, {b})"
# Bits of bools: their sums and products do not wrap, and their order is that of 0 and 1.
for _fn, _text in {
    "add": "{a} | {b}", "mul": "{a} & {b}", "maximum": "{a} | {b}", "minimum": "{a} & {b}", "sub": "{a} ^ {b}",
    "eq": "{a} == {b}", "ne": "{a} ^ {b}", "lt": "~{a} & {b}", "le": "~{a} | {b}", "gt": "{a} & ~{b}",
    "ge": "{a} | ~{b}",
}.items():  # fmt: skip
    TEMPLATES.setdefault(_fn, {})["bool"] = _text

for _fn in ("add", "sub", "mul"):
    TEMPLATES[_fn]["bf16"] = f"_{_fn}_bf16({{a}}, {{b}})"

FAST = {
    "exp": "_exp({a})", "sigmoid": "_sigmoid({a})",
    "near_tanh": "_tanh({a})", "near_div": "{a} / {b}",  # made by ``narrow``
    "one_plus_erf": "_one_plus_erf({a})", "one_plus_tanh": "_one_plus_tanh({a})",
}  # fmt: skip
FAST_UNIT = {"log1p": "_log1p_unit({a})"}  # of arguments from 0 to 1
_BOUNDS = {("abs", ""): "positive", ("neg", "positive"): "negative", ("exp", "negative"): "unit"}
CASTS_LITERALS = frozenset("add sub mul eq ne lt le gt ge and or xor shl shr where".split())  # beside an operand


def bound(fn: str, argument: str) -> str:
    """What is known of the range of ``fn`` of one argument: positive, negative (0 included), unit (0 to 1), or ""."""
    return _BOUNDS.get((fn, "" if fn == "abs" else argument), "")


def template(fn: str, dtype: DType, fast: bool, argument: str = "") -> str:
    """The text of ``fn`` on arguments of ``dtype``; ``fast`` allows errors of 1e-5 of the value in fp32.

    ``argument``: what is known of the first argument's range; see ``bound``.

    Raises:
        ValueError: ``fn`` is not defined on this type.
    """
    if fast and dtype is DType.F32 and argument == "unit" and fn in FAST_UNIT:
        return FAST_UNIT[fn]
    if fast and dtype is DType.F32 and fn in FAST:
        return FAST[fn]
    variants = TEMPLATES[fn.removeprefix("near_")]
    for kind in (dtype.value, "float" if dtype.is_float else "int", "any"):
        if kind in variants:
            return variants[kind]
    raise ValueError(f"{fn} is not defined on {dtype.value}")

"""How each pointwise function of ``ir.ops`` is written in NumPy, as data.

A template is looked up by the kind of its arguments: the type itself, then "float" or "int", then "any".
"""

from __future__ import annotations

from megafuse.core.dtypes import DType

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
_UFUNC = (
    "sqrt exp exp2 expm1 log log2 log1p log10 sin cos tan tanh asin:arcsin acos:arccos atan:arctan sinh cosh "
    "asinh:arcsinh acosh:arccosh atanh:arctanh"
)
_UFUNC_2 = "pow:power fmod atan2:arctan2 copysign hypot nextafter maximum minimum"


def _named(entries: str, args: str) -> dict[str, dict[str, str]]:
    pairs = (entry.partition(":") for entry in entries.split())
    return {fn: {"any": f"np.{name or fn}({args})"} for fn, _, name in pairs}


TEMPLATES: dict[str, dict[str, str]] = {
    **{fn: {"any": f"{{a}} {symbol} {{b}}"} for fn, symbol in _INFIX.items()},
    **_named(_UFUNC, "{a}"),
    **_named(_UFUNC_2, "{a}, {b}"),
    "neg": {"any": "-{a}"},
    "abs": {"any": "np.abs({a})"},
    "sign": {"any": "({a} > 0).astype({t}) - ({a} < 0).astype({t})", "bool": "{a}"},
    "floor": {"float": "np.floor({a})", "any": "{a}"},
    "ceil": {"float": "np.ceil({a})", "any": "{a}"},
    "round": {"float": "np.rint({a})", "any": "{a}"},
    "trunc": {"float": "np.trunc({a})", "any": "{a}"},
    "not": {"any": "~{a}"},
    "rsqrt": {"float": "1.0 / np.sqrt({a})"},
    "recip": {"float": "1.0 / {a}"},
    "sigmoid": {"float": "1.0 / (1.0 + np.exp(-{a}))"},
    "erf": {"float": "_elementwise(math.erf, {a})"},
    "erfc": {"float": "_elementwise(math.erfc, {a})"},
    "lgamma": {"float": "_elementwise(_lgamma, {a})"},
    "digamma": {"float": "_elementwise(_digamma, {a})"},
    "erfinv": {"float": "_elementwise(_erfinv, {a})"},
    "erfcx": {"float": "_elementwise(_erfcx, {a})"},
    "ndtri": {"float": "_elementwise(_ndtri, {a})"},
    "div": {"float": "{a} / {b}", "any": "_div_int({a}, {b})"},
    "remainder": {"any": "_remainder({a}, {b})"},
    "floordiv": {"float": "_floordiv({a}, {b})", "any": "np.floor_divide({a}, {b})"},
    "isnan": {"any": "np.isnan({a})"},
    "isinf": {"any": "np.isinf({a})"},
    "where": {"any": "np.where({a}, {b}, {c})"},
}
TEMPLATES["pow"]["int"] = "_pow_int({a}, {b})"
TEMPLATES["add"]["bool"] = "{a} | {b}"
TEMPLATES["sub"]["bool"] = "{a} ^ {b}"
TEMPLATES["mul"]["bool"] = "{a} & {b}"
BARE_LITERALS = frozenset(_INFIX)


def template(fn: str, dtype: DType) -> str:
    """The text of ``fn`` on arguments of ``dtype``.

    Raises:
        ValueError: ``fn`` is not defined on this type.
    """
    variants = TEMPLATES[fn]
    for kind in (dtype.value, "float" if dtype.is_float else "int", "any"):
        if kind in variants:
            return variants[kind]
    raise ValueError(f"{fn} is not defined on {dtype.value}")

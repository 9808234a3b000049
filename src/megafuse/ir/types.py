"""Types of graph values and the attribute records of each op."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megafuse.core.dtypes import DType
from megafuse.core.sizes import typical


@dataclass(frozen=True)
class TensorType:
    """A value's logical shape and element type. Layout in memory is not part of it: the planner chooses that."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes when dense (of open sizes, the typical one)."""
        return int(typical(self.numel)) * self.dtype.size

    def __str__(self) -> str:
        return f"{self.dtype.value}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Origin:
    """Where a node came from: a line of the user's code, and the module in which it ran.

    ``module``: path and class, as in ``net.1 (GELU)``; empty in the module that is fused itself. ``file`` is empty
    where no line of the user's computes the node, as in a plain ``nn.Sequential``: the module alone says where it is.
    """

    file: str
    line: int
    code: str = ""
    module: str = ""

    def __str__(self) -> str:
        if not self.file:
            return f"module {self.module}"
        return f"{self.file}:{self.line} in {self.module}" if self.module else f"{self.file}:{self.line}"

    @property
    def with_code(self) -> str:
        """The place and, where it is known, the text of the line."""
        return f"{self}  {self.code}" if self.code else str(self)


@dataclass(frozen=True)
class Input:
    """A graph input. ``strides`` in elements as given at capture; ``role``: param, buffer, arg or tangent."""

    name: str
    position: int
    strides: tuple[int, ...]
    role: str


@dataclass(frozen=True)
class Const:
    """A scalar constant; the node's shape is ()."""

    value: float | int | bool


@dataclass(frozen=True)
class Iota:
    """The index along ``axis`` of the node's own shape, as an integer."""

    axis: int


@dataclass(frozen=True)
class Map:
    """A pointwise function of arguments of one common shape (scalar constants aside); see ``ops.MAP_FNS``."""

    fn: str


@dataclass(frozen=True)
class Cast:
    """Conversion to the node's dtype, rounding to nearest even."""


@dataclass(frozen=True)
class Reduce:
    """``fn`` (sum, max, min, prod) over ``axes``; reduced dims are dropped."""

    fn: str
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Dot:
    """``[P, M, K] x [P, K, N] -> [P, M, N]``, accumulated in fp32, rounded once to the node's dtype.

    An optional third argument of shape [N] is added before the rounding (the library's bias epilogue).
    """


@dataclass(frozen=True)
class Again:
    """The argument, as the start of values that are computed once more instead of being shared with the first time."""


@dataclass(frozen=True)
class Permute:
    """Output dim ``i`` is input dim ``perm[i]``."""

    perm: tuple[int, ...]


@dataclass(frozen=True)
class Reshape:
    """Same elements in row-major order under the node's shape."""


@dataclass(frozen=True)
class Expand:
    """Same rank; dims of size 1 repeat to the node's size."""


@dataclass(frozen=True)
class Slice:
    """Output index ``i`` reads input index ``start + step * i`` in each dim; ``step`` may be negative (flip)."""

    starts: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True)
class Pad:
    """``lo`` elements of ``value`` before the input in each dim, and as many after as the node's shape leaves."""

    lo: tuple[int, ...]
    value: float


@dataclass(frozen=True)
class Concat:
    """The arguments one after another along ``axis``."""

    axis: int


@dataclass(frozen=True)
class Gather:
    """``table[..., index, ...]``: along ``axis``, elements are read where the index says; else, at their own place.

    The arguments are the table and an integer index of the node's shape; the table has that shape too, but for
    ``axis``. What lies outside of the table (negative indices too) is NaN; 0 or false in tables of no floats.
    """

    axis: int


@dataclass(frozen=True)
class Opaque:
    """An ATen call that runs as is. ``call`` indexes the capture's side table of calls; ``reason`` says why.

    The node's own type is that of the first tensor result; further results are read by ``Pick``.
    """

    target: str
    call: int
    reason: str
    results: tuple[TensorType | None, ...]


@dataclass(frozen=True)
class Pick:
    """Result ``index`` of an opaque call."""

    index: int


Attrs = (
    Input | Const | Iota | Map | Cast | Reduce | Dot | Again | Permute | Reshape | Expand | Slice | Pad | Concat
    | Gather | Opaque | Pick
)  # fmt: skip
MOVES = (Permute, Reshape, Expand, Slice, Pad, Concat)

"""The records that ``explain`` returns. Bytes are DRAM bytes, seconds are predictions of the cost model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megafuse.core.occupancy import Occupancy
from megafuse.explanation.eager import EagerEstimate


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in memory. ``kind``: input, tangent, output, grad, saved or temp."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    kind: str

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class PhaseInfo:
    """One loop nest of a kernel: rows walked, columns held, its tile and why that one.

    ``abreast``: single rows that a program works on side by side.
    """

    rows: int
    cols: int
    row_tile: int
    pieces: tuple[int, ...]
    why: str
    abreast: int = 1


@dataclass(frozen=True)
class Resources:
    """What compiling a kernel told: registers and bytes spilled of a thread, shared memory (bytes) of a program.

    ``programs``: how many are launched; ``room``: how many fit on an SM. ``pace``: what most likely sets its pace.
    ``error`` says why there are no figures.
    """

    registers: int = 0
    spills: int = 0
    shared: int = 0
    programs: int = 0
    room: Occupancy | None = None
    pace: str = ""
    error: str = ""


@dataclass(frozen=True)
class KernelInfo:
    """A generated kernel. ``sources``: the user's lines that it computes; ``seconds`` include the launch.

    ``product``: the matrix products that it computes, if any; ``num_products`` and ``flops`` are theirs.
    ``shares``: of DRAM bandwidth and of the peak of matrix units, at ``measured`` time where that is known.
    ``measured``: seconds of a launch on this GPU, where its tiles were measured. ``resources``: where it was compiled.
    ``coalesced``: what its loads use of the memory sectors that they touch. ``apart``: its phases are small kernels
    that share the launch. ``last_first``: programs start with the last rows, which the L2 holds.
    """

    name: str
    forward: bool
    sources: tuple[str, ...]
    reads: tuple[TensorInfo, ...]
    writes: tuple[TensorInfo, ...]
    phases: tuple[PhaseInfo, ...]
    num_warps: int
    dram_bytes: int
    seconds: float
    product: str = ""
    num_products: int = 0
    flops: int = 0
    shares: tuple[float, float] = (0.0, 0.0)
    measured: float | None = None
    coalesced: float = 1.0
    resources: Resources | None = None
    apart: bool = False
    last_first: bool = False


@dataclass(frozen=True)
class LibraryInfo:
    """A library product or an op that runs as it is.

    ``call``: the library function or ATen op; ``what``: shapes, or the reason; ``where``: the user's line. ``seconds``
    of an opaque op is the time of its memory traffic alone. ``shares``: of DRAM bandwidth and of the peak of matrix
    units.
    """

    call: str
    what: str
    where: str
    forward: bool
    is_dot: bool
    flops: int
    dram_bytes: int
    seconds: float
    shares: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Edge:
    """Why ``first`` and ``second`` (kernels; equal: two phases of one kernel) are not one pass."""

    first: str
    second: str
    reason: str

    def __str__(self) -> str:
        place = f"phases of {self.first}" if self.first == self.second else f"{self.first} | {self.second}"
        return f"{place}: {self.reason}"


@dataclass(frozen=True)
class Coverage:
    """Floating-point ops of the graph other than dots: nodes (and results) in generated kernels, and opaque calls."""

    generated: int
    opaque: int
    generated_results: int
    opaque_results: int

    @property
    def share(self) -> float:
        """Share of the ops that run in generated kernels; 1.0 where there are none at all."""
        total = self.generated + self.opaque
        return self.generated / total if total else 1.0


Call = KernelInfo | LibraryInfo


@dataclass(frozen=True)
class PlanInfo:
    """One binding: everything planned for calls of these shapes. ``reason`` is set where the original ops run.

    ``names`` say what the tensors are, a line for each kind; ``runs_as`` how the plan runs here, where that is not on
    ``device``; ``serves`` for which values of its open sizes. ``candidates``: plans that were compared, cheapest
    first: name, seconds up to what they have in common, and whether predicted or measured; the first was taken.
    """

    title: str
    device: str = ""
    calls: tuple[Call, ...] = ()
    edges: tuple[Edge, ...] = ()
    decisions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    saved: tuple[TensorInfo, ...] = ()
    peak_bytes: int = 0  # most that a step has allocated at a time beside its inputs, predicted
    recomputed: int = 0
    opaque: tuple[str, ...] = ()
    coverage: Coverage = Coverage(0, 0, 0, 0)
    eager: EagerEstimate | None = None
    reason: str = ""
    compile_seconds: dict[str, float] = field(default_factory=dict, compare=False)
    names: tuple[str, ...] = ()
    runs_as: str = ""
    serves: str = ""
    candidates: tuple[tuple[str, float, str], ...] = ()

    @property
    def kernels(self) -> tuple[KernelInfo, ...]:
        """Generated kernels in order of launch."""
        return tuple(c for c in self.calls if isinstance(c, KernelInfo))

    @property
    def dots(self) -> tuple[LibraryInfo, ...]:
        """Library products in order."""
        return tuple(c for c in self.calls if isinstance(c, LibraryInfo) and c.is_dot)

    @property
    def dram_bytes(self) -> int:
        """Predicted DRAM traffic of one step."""
        return sum(c.dram_bytes for c in self.calls)

    @property
    def seconds(self) -> float:
        """Predicted time of one step."""
        return sum(c.seconds for c in self.calls)

    @property
    def dot_seconds(self) -> float:
        """The part of ``seconds`` that the library products take; those of generated kernels are not told apart."""
        return sum(c.seconds for c in self.dots)

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products of one step."""
        return sum(c.flops for c in self.calls)

    @property
    def saved_bytes(self) -> int:
        """Bytes kept from forward to backward beyond inputs and outputs."""
        return sum(t.nbytes for t in self.saved if t.kind == "saved")


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` found: one plan for each binding, oldest first. ``str()`` gives the text."""

    subject: str
    plans: tuple[PlanInfo, ...]
    text: str = field(default="", repr=False)

    def __str__(self) -> str:
        return self.text

    def __iter__(self) -> Iterator[PlanInfo]:
        return iter(self.plans)

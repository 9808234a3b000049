"""Names in launch code, and the lines about pools: where their memory comes from, and where a buffer lies in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megafuse.codegen.writer import Writer
from megafuse.core.dtypes import DType
from megafuse.schedule.types import Buffer, Pool, Step

SAVED_POOL = "(saved pool)"  # stands for the pool among the names of saved buffers


@dataclass(frozen=True)
class Names:
    """Names in launch code: of buffers, and of pools by kind (the address; the tensor is called ``..._memory``)."""

    buffers: Mapping[str, str]
    pools: Mapping[str, str]


def dtype_token(dtype: DType) -> str:
    """The name of ``dtype`` in launch code: its value, but ``bool_`` for BOOL."""
    return "bool_" if dtype is DType.BOOL else dtype.value


class Pools:
    """The pools of one function: where a buffer lies in one, and when a pool's memory may go.

    ``kinds``: those of its own, and in backward the saved one, whose memory it is given.
    """

    def __init__(self, step: Step, kinds: Iterable[str], names: Names, writer: Writer) -> None:
        self.pools: dict[str, Pool] = {n: p for p in step.pools if p.kind in kinds for n in p.places}
        self.names, self.writer = names, writer
        self.alive: dict[str, set[str]] = {}  # buffers that have not died, of the pools whose memory is there

    def __contains__(self, buffer: str) -> bool:
        return buffer in self.pools

    def memory(self, kind: str) -> str:
        """The name of a pool's tensor."""
        return f"{self.names.pools[kind]}_memory"

    def open(self, pool: Pool, source: str) -> None:
        """Print where a pool's memory comes from."""
        self.alive[pool.kind] = set(pool.places)
        self.writer.line(f"{self.memory(pool.kind)} = {source}")
        self.writer.line(f"{self.names.pools[pool.kind]} = address({self.memory(pool.kind)})")

    def place(self, buffer: Buffer) -> bool:
        """Print where a buffer lies in its pool; True where the pool is allocated first."""
        pool = self.pools[buffer.name]
        if new := pool.kind not in self.alive:
            self.open(pool, f"empty(({pool.nbytes},), (1,), {dtype_token(DType.U8)})")
        shape = ", ".join(map(repr, buffer.shape))
        at = f"{self.names.pools[pool.kind]} + {pool.places[buffer.name]}"
        self.writer.line(f"{self.names.buffers[buffer.name]} = {at}  # {buffer.dtype.value}[{shape}]")
        return new

    def died(self, buffer: str, keep: str) -> list[str]:
        """Names to delete once a buffer is dead: the memory, after the last one. The pool of kind ``keep`` stays."""
        kind = self.pools[buffer].kind
        self.alive[kind].discard(buffer)
        return [] if self.alive[kind] or kind == keep else [self.memory(kind)]

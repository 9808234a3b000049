"""``torch.compile(m, backend="megafuse")``: the door through Dynamo."""

from megafuse.dynamo.backend import backend

__all__ = ["backend"]

"""Tracing: a dry run on stand-ins, which settles structure and errors, then AOTAutograd's joint graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch._functorch.aot_autograd import aot_function
from torch.fx import traceback as fx_traceback
from torch.utils import _pytree as pytree

from megafuse.capture.autocast import autocast_on
from megafuse.capture.checks import REGISTER, check_side_effects
from megafuse.capture.composites import composite_gradients, op_without_gradient
from megafuse.capture.devices import Elsewhere
from megafuse.capture.kept import kept
from megafuse.capture.leaves import FlatCall, Fn
from megafuse.capture.modes import Constants, TraceMode, stand_in
from megafuse.capture.origins import module_names, node_origins, raised_by_user, traceback_origin
from megafuse.capture.state import TRACING, swapped_state
from megafuse.capture.strides import RealStrides
from megafuse.capture.types import OutSpec
from megafuse.core.errors import CaptureError, MegafuseError, NotFusableError, users_error
from megafuse.ir.views import is_dense

_DATA_DEPENDENT = (
    "called on meta tensors", "out of meta tensor", "data-dependent", "datadependent", "unbacked",
    "_local_scalar_dense", "nonzero", "aten::masked_select", "aten::equal", "boolean value of tensor",
    "tensor to numpy",
)  # fmt: skip
_NO_META_KERNEL = "no fake impl or meta kernel"
STAGE = "while megafuse traced it for the first call of this kind (capture, on tensors without data)"
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass
class Source:
    """One tensor that becomes a graph input: its kind, path, real value and name."""

    kind: str
    path: tuple[int | str, ...]
    tensor: torch.Tensor
    label: str


@dataclass
class Subject:
    """What is traced: the callable, its flattened arguments, and the tensors that become graph inputs.

    A tensor that is an argument and also a parameter is two inputs; autograd adds their gradients.
    """

    fn: Fn
    call: FlatCall
    sources: list[Source]
    device: torch.device
    constants: Constants = field(default_factory=Constants)
    changed: list[str] = field(default_factory=list)  # what the last run changed besides buffers
    elsewhere: Elsewhere = field(init=False)  # tensors that the last run made on another device

    def __post_init__(self) -> None:
        self.elsewhere = Elsewhere(self.device)
        labels = ["" if at is None else self.call.labels[at] for at in self.call.module_at]
        self.names = module_names(self.call.modules, labels)

    def run(self, stand_ins: Sequence[torch.Tensor], constants: Sequence[torch.Tensor] | None) -> Any:
        """Call the function on stand-ins, one for each source."""
        swaps = {id(s.tensor): t for s, t in zip(self.sources, stand_ins, strict=True) if s.kind in ("param", "buffer")}
        arguments = list(self.call.leaves)
        for source, tensor in zip(self.sources, stand_ins, strict=True):
            if source.kind == "arg":
                arguments[self.call.tensors[int(source.path[0])]] = tensor
        by_id = {id(s.tensor): t for s, t in zip(self.sources, stand_ins, strict=True)}
        args, kwargs = pytree.tree_unflatten(arguments, self.call.spec)
        with TRACING, kept(self.call.scope) as outside, swapped_state(self.call.modules, swaps) as inside:
            mode = TraceMode(by_id | swaps, self.constants, constants, self.device, stop="run", modules=self.names)
            self.elsewhere = mode.elsewhere
            with mode, autocast_on("cpu" if self.device.type == "cpu" else "cuda", self.cast_once(stand_ins)):
                result = self.fn(*args, **kwargs)
            rebound = self.rebound(swaps)
            now, spec = pytree.tree_flatten((args, kwargs))
        same = spec == self.call.spec and all(a is b for a, b in zip(now, arguments, strict=True))
        self.changed = [*inside, *outside, *([] if same else ["a list or dict among its arguments"])]
        return result, rebound

    def cast_once(self, stand_ins: Sequence[torch.Tensor]) -> set[int]:
        """Ids of the stand-ins of leaves that require gradients: autocast casts each of those once."""
        pairs = zip(self.sources, stand_ins, strict=True)
        return {id(t) for s, t in pairs if s.tensor.requires_grad and s.tensor.is_leaf and not s.tensor._is_view()}

    def rebound(self, swaps: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Buffers that the function bound to new tensors: source number -> new tensor."""
        new: dict[int, torch.Tensor] = {}
        for number, source in enumerate(self.sources):
            if source.kind != "buffer":
                continue
            owner = self.call.modules[int(source.path[0])]
            *parents, last = str(source.path[1]).split(".")
            for name in parents:
                owner = getattr(owner, name)
            now = owner._buffers.get(last)
            if now is not None and now is not swaps.get(id(source.tensor)):
                new[number] = now
        return new


@dataclass
class DryRun:
    """What the dry run on stand-ins told of the user's output.

    ``mutable`` are the leaves that may change in place: what may be a buffer (a batch norm on stand-ins leaves no trace
    of its change), and what was seen to change. Each becomes a forward output; those that stay as they are go again.
    """

    spec: OutSpec
    strides: tuple[tuple[int, ...], ...]
    requires_grad: tuple[bool, ...]
    alias: tuple[int | None, ...]
    shared: tuple[int | None, ...]  # the first earlier output in whose memory an output lies
    mutable: tuple[int, ...]


@dataclass
class Traced:
    """The recorded graph and how many of its outputs are forward outputs; ``joint`` when it has gradients."""

    module: torch.fx.GraphModule
    num_forward: int
    joint: bool


class _Recorded(Exception):
    """Ends AOTAutograd as soon as the graph is recorded: nothing is to be compiled."""


def dry_run(subject: Subject) -> DryRun:
    """Run the function once on stand-ins, eagerly. Errors of the user's own code pass through as they are."""
    stand_ins = [stand_in(s.tensor) for s in subject.sources]
    versions = [t._version for t in stand_ins]
    try:
        with RealStrides(subject.device):
            result, rebound = subject.run(stand_ins, None)
    except Exception as error:
        explain(error, subject)
    check_side_effects(subject.changed, subject.call.modules)
    flat, spec = pytree.tree_flatten(result, is_leaf=lambda v: isinstance(v, torch.Size))  # else it becomes a tuple
    tensors = [v for v in flat if isinstance(v, torch.Tensor)]
    subject.elsewhere.check_outputs(tensors)
    places = iter(range(len(tensors)))
    leaves = tuple(("tensor", next(places)) if isinstance(v, torch.Tensor) else _constant(v) for v in flat)
    changed = [i for i, (t, v) in enumerate(zip(stand_ins, versions, strict=True)) if t._version != v]
    _check_mutations(subject, changed, stand_ins)
    storages = {_storage(t): i for i, t in reversed(list(enumerate(stand_ins)))}
    return DryRun(
        OutSpec(spec, leaves),
        tuple(tuple(t.stride()) for t in tensors),
        tuple(t.requires_grad for t in tensors),
        tuple(storages.get(_storage(t)) for t in tensors),
        tuple(_first_with(_storage(t), tensors[:i]) for i, t in enumerate(tensors)),
        tuple(sorted({*changed, *rebound, *(i for i, s in enumerate(subject.sources) if _may_change(s))})),
    )


def _may_change(source: Source) -> bool:
    """Buffers, and what may be one: a dense argument without a gradient, such as the statistics of a batch norm."""
    tensor = source.tensor
    plain = source.kind == "arg" and not tensor.requires_grad and is_dense(tensor.shape, tensor.stride())
    return source.kind == "buffer" or plain


def _first_with(storage: int, tensors: Sequence[torch.Tensor]) -> int | None:
    return next((i for i, t in enumerate(tensors) if _storage(t) == storage), None)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _constant(value: Any) -> tuple[str, Any]:
    if isinstance(value, torch.Size):
        return "size", tuple(value)
    if not isinstance(value, _PLAIN) and any(
        isinstance(v, torch.Tensor) for v in getattr(value, "__dict__", {}).values()
    ):
        raise CaptureError(
            f"the output holds tensors inside a {type(value).__name__}",
            hint=f"return tensors, tuples, lists or dicts, or call {REGISTER} for the class",
        )
    return "value", value


def _check_mutations(subject: Subject, changed: Sequence[int], stand_ins: Sequence[torch.Tensor]) -> None:
    for i in changed:
        source = subject.sources[i]
        if stand_ins[i].grad_fn is not None:
            raise CaptureError(f"{source.label} is changed in place by values that take part in gradients",
                               hint="return the new value instead, or change it under torch.no_grad()")  # fmt: skip
        shared = [s.label for s in subject.sources if s is not source and _overlap(s.tensor, source.tensor)]
        if shared:
            raise CaptureError(f"{source.label} is changed in place and shares memory with {shared[0]}",
                               hint="clone one of them")  # fmt: skip


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.device.type == "meta" or not a.numel() or not b.numel():
        return a is b
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def explain(error: Exception, subject: Subject) -> NoReturn:
    """Re-raise an error of tracing: the user's own as it is, PyTorch's with the user's line and a remedy."""
    text = str(error)
    where = traceback_origin(error.__traceback__, subject.names)
    line = where.with_code if where else None
    if isinstance(error, MegafuseError):
        raise error
    if raised_by_user(error.__traceback__):
        raise users_error(error, STAGE)
    if any(mark in text.lower() or mark in type(error).__name__.lower() for mark in _DATA_DEPENDENT):
        raise CaptureError(
            f"the control flow or a shape depends on a tensor's values: {_what_depends(text)}",
            where=line,
            hint="use torch.where or a mask instead, or keep this part outside of the fused function",
        ) from error
    if _NO_META_KERNEL in text.lower():
        raise NotFusableError(
            f"an op has no kernel for tensors without data: {_first_line(text).split('. ')[0]}",
            where=line,
            hint="register one (torch.library.register_fake), or keep the op outside of the fused function",
        ) from error
    if isinstance(error, RuntimeError):
        raise CaptureError(f"PyTorch refused the call: {_first_line(text)}", where=line,
                           hint=argument_kinds(subject)) from error  # fmt: skip
    raise users_error(error, STAGE)


def _what_depends(text: str) -> str:
    """What asks for values. PyTorch's own texts on shapes speak of its settings."""
    if "nonzero" in text or "masked_select" in text:
        return "how many elements a mask selects, or nonzero finds"
    if "tensor to numpy" in text:
        return "Tensor.numpy() reads them"
    return _first_line(text)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no message"


def argument_kinds(subject: Subject) -> str:
    """The arguments' element types and shapes, and those of the parameters where they differ."""
    given = [f"{s.label} is {_describe(s.tensor)}" for s in subject.sources if s.kind == "arg"]
    held = sorted({str(s.tensor.dtype) for s in subject.sources if s.kind == "param"})
    parameters = f"; parameters are {', '.join(held)}" if held else ""
    return f"check shapes and element types: {', '.join(given) or 'no tensor arguments'}{parameters}"


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


UNTRACED = (
    "replace indexing by Python lists with torch.tensor([...]), or keep the part that is named out of the function"
)


def trace(subject: Subject, dry: DryRun) -> Traced:
    """The joint forward+backward graph, or the forward graph where nothing needs a gradient."""
    reals = subject.constants.found
    inputs = [stand_in(s.tensor) for s in subject.sources] + [stand_in(t) for t in reals]
    box: list[Traced] = []

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return _outputs(subject, dry, tensors)

    def partition(joint: torch.fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any) -> NoReturn:
        box.append(Traced(joint, num_fwd_outputs, True))
        raise _Recorded

    def inference(forward: Any, _inputs: Any) -> NoReturn:
        box.append(Traced(forward, len(_output_args(forward)), False))
        raise _Recorded

    make: Any = aot_function
    traced: Callable[..., Any] = make(
        flat, fw_compiler=inference, bw_compiler=inference, inference_compiler=inference, partition_fn=partition,
        decompositions=None,
    )  # fmt: skip
    said: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as said, fx_traceback.preserve_node_meta(), composite_gradients():
            warnings.simplefilter("always")
            traced(*inputs)
    except _Recorded:
        pass
    except AssertionError as error:  # the dry run went well: it is tracing that does not take the function
        said_first = str(error).split("\n", 1)[0]
        raise CaptureError(f"PyTorch cannot trace the function: {said_first}", hint=UNTRACED) from error
    except Exception as error:
        explain(error, subject)
    if missing := op_without_gradient(said):
        raise CaptureError(f"{missing} has no derivative on stand-ins", hint="keep it outside of the fused function")
    if not box:
        raise CaptureError("PyTorch recorded no graph", hint="does the function compute anything with tensors?")
    _refuse_effects(box[0].module)
    return box[0]


def _refuse_effects(module: torch.fx.GraphModule) -> None:
    """No op does more than give results: PyTorch threads a token through those (a check of values that may raise)."""
    for node in module.graph.nodes:
        if node.target is torch.ops.higher_order.with_effects:
            raise NotFusableError(
                f"{node.args[1]} does more than give results",
                where=str(node_origins(module.graph)[node]),
                hint="keep it outside of the fused function",
            )


def _output_args(module: torch.fx.GraphModule) -> list[Any]:
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    return list(pytree.tree_leaves(output.args[0]))


def _outputs(subject: Subject, dry: DryRun, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The function's output tensors, then the new values of leaves changed in place.

    Outputs are cloned so that views of inputs are outputs like any other; changed leaves are cloned on the way in, so
    that the change is an output and not a mutation.
    """
    count = len(subject.sources)
    given = [t.clone() if i in dry.mutable else t for i, t in enumerate(tensors[:count])]
    result, rebound = subject.run(given, tensors[count:])
    outputs = [v.clone() for v in pytree.tree_leaves(result) if isinstance(v, torch.Tensor)]
    return outputs + [rebound.get(i, given[i]).detach().clone() for i in dry.mutable]

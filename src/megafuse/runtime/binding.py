"""Which program serves a call: the exact binding key, looked up at every call, and the program key behind it."""

from __future__ import annotations

import functools
import hashlib
import operator
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from megafuse.core.errors import InputError, LaunchError

Binding = TypeVar("Binding")
RawKey = tuple[Any, ...]
Check = Callable[[Sequence[Tensor]], bool]
_PER_TENSOR, _ALIGN = 6, 15
MAX_BINDINGS = 256
_TYPES = frozenset({Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", Tensor)})  # all that is not a subclass
_any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_grad, _inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms


@dataclass(frozen=True)
class TensorKey:
    """What a binding assumes of one tensor. ``aligned``: the first element's address is a multiple of 16 bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    aligned: bool


@dataclass(frozen=True)
class Flags:
    """PyTorch's settings that a binding assumes. ``autocast``: dtype in force for the device, or None."""

    grad: bool
    inference: bool
    autocast: torch.dtype | None
    tf32: bool
    deterministic: bool


@dataclass(frozen=True)
class BindingKey:
    """Everything exact about one call: its tensors, PyTorch's settings, and ``extra`` (plain arguments, modes)."""

    tensors: tuple[TensorKey, ...]
    flags: Flags
    extra: Hashable = ()

    @property
    def device(self) -> torch.device:
        """The device of the call's tensors; the CPU's where there are none."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    @property
    def trains(self) -> bool:
        """True when autograd will want gradients."""
        return self.flags.grad and not self.flags.inference and any(t.requires_grad for t in self.tensors)

    def program_key(self, structure: str, target: str, options: Sequence[tuple[str, str]] = ()) -> ProgramKey:
        """The key of the program that serves this binding; see ``ProgramKey``."""
        tensors = tuple(
            (t.shape, t.strides, str(t.dtype).removeprefix("torch."), t.requires_grad and self.trains, t.aligned)
            for t in self.tensors
        )
        flags = self.flags
        settings = (
            ("trains", str(self.trains)),
            ("autocast", str(flags.autocast)),
            ("tf32", str(flags.tf32)),
            ("deterministic", str(flags.deterministic)),
        )
        return ProgramKey(structure, target, tensors, (*settings, *options))


@dataclass(frozen=True)
class ProgramKey:
    """Everything that generated code assumed, in plain values that mean the same in every process.

    ``structure`` is a digest of the captured graph (with its constants), ``target`` names the GPU model or interpreter,
    ``tensors`` holds (shape, strides, dtype, takes a gradient, aligned) of each, ``options`` are names and values: of
    PyTorch's settings, of the compiler's, of the versions. Devices of one model share programs. Programs are
    specialised to exact shapes, the batch size included.
    """

    structure: str
    target: str
    tensors: tuple[tuple[tuple[int, ...], tuple[int, ...], str, bool, bool], ...]
    options: tuple[tuple[str, str], ...] = ()

    @property
    def digest(self) -> str:
        """Content hash, the same in every process."""
        key = (self.structure, self.target, [tuple(map(_plain, t)) for t in self.tensors], sorted(self.options))
        return hashlib.sha256(repr(key).encode()).hexdigest()[:24]


Compile = Callable[..., Binding]


class Binder(Generic[Binding]):
    """Finds the binding of a call, or has it made.

    ``compile(key, tensors, *more)`` makes the binding of a new key; it runs once per key, one thread at a time.
    Bindings are kept in the order of their making; past ``limit`` the oldest is dropped.

    A call is first held against the binding last found under the same settings, by one native comparison; the exact key
    is built only when that fails.
    """

    def __init__(self, compile: Compile[Binding], *, limit: int = MAX_BINDINGS) -> None:  # noqa: A002
        self._compile = compile
        self._limit = limit
        self._bindings: dict[RawKey, tuple[Check, Binding]] = {}
        self._recent: dict[RawKey, tuple[Check, Binding]] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._bindings)

    def kept(self) -> list[Binding]:
        """The bindings of now, oldest first."""
        return [binding for _, binding in list(self._bindings.values())]

    def find(self, tensors: Sequence[Tensor], extra: Hashable = (), *more: Any) -> Binding:
        """The binding for ``tensors`` and PyTorch's settings of now. ``extra``: plain arguments and modes.

        ``more`` is handed on to ``compile``.

        Raises:
            LaunchError: something other than a dense tensor, or tensors on several devices.
            InputError: a tensor subclass.
        """
        try:
            flags = raw_flags(tensors, extra)
            recent = self._recent.get(flags)
            if recent is not None and recent[0](tensors):
                return recent[1]
            key = (raw_tensors(tensors), flags)
            entry = self._bindings.get(key)
        except (AttributeError, RuntimeError, TypeError, NotImplementedError) as error:
            check_call(tensors, extra)
            raise LaunchError(f"the call's arguments cannot be bound: {error}") from error
        if entry is None:
            entry = self._make(key, tensors, more)
        self._recent[flags] = entry
        return entry[1]

    def _make(self, key: RawKey, tensors: Sequence[Tensor], more: tuple[Any, ...]) -> tuple[Check, Binding]:
        check_call(tensors, key[1][-1])
        with self._lock:
            if key not in self._bindings:
                made = self._compile(describe(key), tensors, *more)
                if len(self._bindings) >= self._limit:
                    self._bindings.pop(next(iter(self._bindings)))
                    self._recent.clear()
                self._bindings[key] = (native_check(tensors), made)
            return self._bindings[key]


def raw_tensors(tensors: Sequence[Tensor]) -> RawKey:
    """The tensors' part of a binding key as one flat tuple, six entries a tensor; ``describe`` names them."""
    key: list[Any] = []
    for t in tensors:
        if type(t) not in _TYPES or t.is_neg():
            check_call(tensors, ())
        key += (t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.data_ptr() & _ALIGN)
    return tuple(key)


def raw_flags(tensors: Sequence[Tensor], extra: Hashable = ()) -> RawKey:
    """PyTorch's settings and ``extra``, in the order of the fields of ``Flags``."""
    return (
        _grad(),
        _inference(),
        _autocast(tensors) if _any_autocast() else None,
        _tf32(),
        _deterministic(),
        extra,
    )


def _autocast(tensors: Sequence[Tensor]) -> torch.dtype | None:
    kind = tensors[0].device.type if tensors else "cpu"
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def describe(key: RawKey) -> BindingKey:
    """A flat key with its parts named."""
    values, (*flags, extra) = key  # type: ignore[misc]
    tensors = tuple(
        TensorKey(tuple(shape), strides, dtype, device, requires_grad, low == 0)
        for shape, strides, dtype, device, requires_grad, low in zip(*[iter(values)] * _PER_TENSOR, strict=True)
    )
    return BindingKey(tensors, Flags(*flags), extra)


def native_check(tensors: Sequence[Tensor]) -> Check:
    """A quick test that other tensors have the same type, device, dtype, shape, strides and requires-grad, all aligned.

    It may say no where the exact key is the same; never yes where it differs. Where this PyTorch lacks the native
    comparison, or a tensor is not aligned, it always says no.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    if guards is None or not hasattr(guards, "TensorGuards") or not tensors or not _aligned(tensors):
        return _never
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    try:
        check = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        if check(*tensors) is not True:
            return _never
    except (TypeError, RuntimeError):
        return _never
    count, either, address = len(sizes), functools.partial(functools.reduce, operator.or_), Tensor.data_ptr
    return lambda given: len(given) == count and check(*given) and not either(map(address, given)) & _ALIGN


def _never(tensors: Sequence[Tensor]) -> bool:
    return False


def _aligned(tensors: Sequence[Tensor]) -> bool:
    low = 0
    for pointer in map(Tensor.data_ptr, tensors):
        low |= pointer
    return low & _ALIGN == 0


def check_call(tensors: Sequence[Any], extra: Any) -> None:
    """Say plainly what is wrong with a call's tensors; returns where nothing is."""
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise LaunchError(f"input {position} is {type(tensor).__name__}, not a tensor")
        if type(tensor) not in _TYPES:
            raise InputError(f"input {position} is a {type(tensor).__name__}: tensor subclasses are not supported",
                             hint="pass a plain torch.Tensor (for a distributed tensor, its local part)")  # fmt: skip
        if tensor.layout is not torch.strided:
            raise LaunchError(f"input {position} has layout {tensor.layout}", hint="give dense tensors")
        if tensor.is_conj() or tensor.is_neg():
            what = f"input {position} has a pending conjugation or negation"
            raise LaunchError(what, hint="call .resolve_conj() or .resolve_neg()")
    devices = list(dict.fromkeys(t.device for t in tensors))
    if len(devices) > 1:
        raise LaunchError(f"inputs are on several devices: {', '.join(map(str, devices))}", hint="move them to one")
    try:
        hash(extra)
    except TypeError as error:
        raise LaunchError(f"a plain argument cannot be part of a key: {error}", hint="pass hashable values") from error


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, tuple) else value


def _tf32_reader() -> Callable[[], bool]:
    """How this PyTorch tells whether fp32 products may use TF32; newer ones refuse the old question at times."""
    getter = getattr(torch._C, "_get_fp32_precision_getter", None)
    if getter is None:
        return torch._C._get_cublas_allow_tf32
    return lambda: getter("cuda", "matmul") == "tf32"


_tf32 = _tf32_reader()

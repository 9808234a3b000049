"""Explanations as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from megafuse.core.text import counted, quantity
from megafuse.explanation.records import Call, KernelInfo, LibraryInfo, PhaseInfo, PlanInfo, Resources, TensorInfo

MAX_SOURCES = 12


def format_explanation(subject: str, plans: Sequence[PlanInfo]) -> str:
    """Text of all bindings."""
    if not plans:
        return f"{subject}: no plan yet; it is made at the first call\n"
    each = ", one for each kind of call" if len(plans) > 1 else ""
    return "\n\n".join([f"{subject}: {counted(len(plans), 'plan')}{each}", *(format_plan(p) for p in plans)]) + "\n"


def format_plan(plan: PlanInfo) -> str:
    """Text of one binding: every call with what it computes and moves, then boundaries, memory and totals."""
    if plan.reason:
        return f"{plan.title}: not fused\n  {plan.reason}"
    lines = [f"plan for {plan.title} on {plan.device}"]
    lines += [f"  sizes share this plan; so far it serves {plan.serves}"] if plan.serves else []
    lines += [f"  its kernels run here as {plan.runs_as}: right, but slow"] if plan.runs_as else []
    for title, forward in (("forward", True), ("backward", False)):
        calls = [c for c in plan.calls if c.forward is forward]
        lines += [f"{title}: {_counts(calls)}", *(line for c in calls for line in _call_lines(c))] if calls else []
    lines += _section("names", plan.names)
    lines += _section("boundaries: why these are not one pass", _edge_lines(plan))
    lines += _section("decisions", [*plan.decisions, *plan.notes])
    lines += _section("plans compared", _candidate_lines(plan))
    lines += _saved_lines(plan)
    lines += _section("ops that run as they are", plan.opaque)
    return "\n".join([*lines, format_summary(plan)])


def format_summary(plan: PlanInfo) -> str:
    """Totals of one binding beside eager's estimate; all of it predicted, nothing measured."""
    cover = plan.coverage
    lines = [
        "totals (predicted, not measured)",
        f"  ops besides matrix products: {cover.generated} in generated kernels, {cover.opaque} run as they are "
        f"({100 * cover.share:.1f} % generated)",
        f"  matrix products: {_products(plan)}",
        f"  plan:  {_total(len(plan.calls), plan.dram_bytes, plan.seconds)}",
    ]
    if plan.eager is None:
        return "\n".join([*lines, "  eager: no estimate (the original does not run on tensors without data)"])
    eager = plan.eager
    lines.append(f"  eager: {_total(len(eager.ops), eager.dram_bytes, eager.seconds)}  (rule: {eager.rule})")
    return "\n".join(lines)


def _products(plan: PlanInfo) -> str:
    inside = sum(k.num_products for k in plan.kernels)
    if not plan.dots and not inside:
        return "none"
    library = f"; {quantity(plan.dot_seconds, 's')} in the library" if plan.dots else ""
    counts = f"{len(plan.dots)} by the library, {inside} in generated kernels"
    return f"{counts}; {quantity(plan.flops, 'flop')} in all{library}"


def _total(calls: int, dram_bytes: int, seconds: float) -> str:
    return (
        f"{calls:3} {'call' if calls == 1 else 'calls'}, {quantity(dram_bytes, 'B')} of DRAM traffic, "
        f"{quantity(seconds, 's')}"
    )


def _counts(calls: Sequence[Call]) -> str:
    kernels = sum(isinstance(c, KernelInfo) for c in calls)
    dots = sum(isinstance(c, LibraryInfo) and c.is_dot for c in calls)
    opaque = len(calls) - kernels - dots
    kinds = ((kernels, "generated kernel"), (dots, "library product"), (opaque, "other ATen op"))
    return ", ".join(counted(number, what) for number, what in kinds if number)


def _call_lines(call: Call) -> list[str]:
    cost = f"{quantity(call.dram_bytes, 'B')}, {quantity(call.seconds, 's')}"
    shares = _shares(call)
    if isinstance(call, LibraryInfo):
        where = f"    {call.where}" if call.where else ""
        return [f"  {call.call}  {call.what}  ({cost}; {shares})", *([where] if where else [])]
    measured = "" if call.measured is None else f" predicted, {quantity(call.measured, 's')} measured"
    lines = [f"  {call.name}  ({cost}{measured}; {shares}; {counted(call.num_warps, 'warp')})"]
    lines += [f"    multiplies {call.product}"] if call.product else []
    lines += [f"    computes {s}" for s in call.sources[:MAX_SOURCES]]
    if len(call.sources) > MAX_SOURCES:
        lines.append(f"    and {counted(len(call.sources) - MAX_SOURCES, 'more line')}")
    lines += [f"    reads  {_tensors(call.reads)}", f"    writes {_tensors(call.writes)}"]
    lines += [f"    {line}" for line in _phases(call)]
    if call.resources is None:
        return lines
    loads = f"loads use {100 * call.coalesced:.0f} % of the memory sectors that they touch"
    return [*lines, f"    {resources_text(call.resources)}", f"    {loads}"]


def _shares(call: Call) -> str:
    """How near a call comes to what the device can do."""
    bandwidth, peak = (f"{100 * share:.0f} %" for share in call.shares)
    return f"{bandwidth} of DRAM bandwidth" + (f", {peak} of matrix peak" if call.flops else "")


def _candidate_lines(plan: PlanInfo) -> list[str]:
    """The plans that were compared, cheapest first; none where there was one alone."""
    if len(plan.candidates) < 2:
        return []
    (taken, least, _), *others = plan.candidates
    lines = (f"{quantity(seconds - least, 's')} slower ({how}): {name}" for name, seconds, how in others)
    return [f"taken: {taken}", *lines]


def resources_text(found: Resources) -> str:
    """One line on a compiled kernel."""
    if found.room is None:
        return f"not compiled: {found.error}"
    room = found.room
    return (
        f"{found.registers} registers, {found.spills} B spilled, {quantity(found.shared, 'B')} shared memory; "
        f"{counted(found.programs, 'program')}, room for {room.programs} on an SM: {100 * room.share:.0f} % of its "
        f"threads, limited by {room.limit}; paced by {found.pace}"
    )


def _tensors(tensors: Iterable[TensorInfo]) -> str:
    return ", ".join(map(str, tensors)) or "nothing"


def _phases(kernel: KernelInfo) -> list[str]:
    tiles = list(map(_tile, kernel.phases))
    if kernel.apart:
        alike = [f"{count} with {tile}" for tile, count in Counter(tiles).items()]
        return [f"{len(tiles)} small kernels that share a launch: {alike[0]}", *(f"and {one}" for one in alike[1:])]
    if kernel.last_first:
        tiles[0] += ", the last rows first: the L2 holds these from the call before"
    return tiles if len(tiles) == 1 else [f"phase {n}: {tile}" for n, tile in enumerate(tiles)]


def _tile(phase: PhaseInfo) -> str:
    """What is walked, then how much of it at a time: a tile is a power of two, so it may be larger than the whole."""
    cols = "+".join(map(str, phase.pieces))
    why = f" ({phase.why})" if phase.why else ""
    rows = f"{phase.abreast} rows abreast" if phase.abreast > 1 else counted(phase.row_tile, "row")
    tile = f"{rows} x {cols} {'column' if cols == '1' else 'columns'}"
    return f"{counted(phase.rows, 'row')} of {counted(phase.cols, 'column')}, in tiles of {tile}{why}"


def _section(title: str, items: Iterable[str]) -> list[str]:
    listed = list(items)
    return [title, *(f"  {i}" for i in listed)] if listed else []


def _edge_lines(plan: PlanInfo) -> list[str]:
    """The first reason of each pair of kernels; further ones below, indented."""
    pairs: dict[tuple[str, str], list[str]] = {}
    for edge in plan.edges:
        reasons = pairs.setdefault((edge.first, edge.second), [])
        reasons.append(f"  and {edge.reason}" if reasons else str(edge))
    return [line for reasons in pairs.values() for line in dict.fromkeys(reasons)]


def _saved_lines(plan: PlanInfo) -> list[str]:
    """What forward keeps for backward: new memory first, then what is there anyway."""
    what = "(outputs, saved, temporaries, gradients)"
    peak = f"memory: at most {quantity(plan.peak_bytes, 'B')} allocated at a time {what}"
    if not plan.saved:
        return [peak]
    own = sorted((t for t in plan.saved if t.kind == "saved"), key=lambda t: -t.nbytes)
    lines = [f"saved for backward: {quantity(plan.saved_bytes, 'B')} beyond inputs and outputs"]
    lines += [f"  {t}  {quantity(t.nbytes, 'B')}" for t in own]
    rest = [t.name for t in plan.saved if t.kind != "saved"]
    lines += [f"  kept anyway: {', '.join(rest)}"] if rest else []
    if plan.recomputed:
        values = f"{counted(plan.recomputed, 'forward value')} {'is' if plan.recomputed == 1 else 'are'}"
        lines.append(f"  {values} not saved but computed again inside backward kernels")
    return [*lines, peak]

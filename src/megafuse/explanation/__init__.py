"""What megafuse planned for a fused callable, and why: ``explain`` and the records that it returns."""

from megafuse.explanation.build import explain, explain_compiled
from megafuse.explanation.eager import EagerEstimate, EagerOp, estimate_eager
from megafuse.explanation.records import (
    Coverage,
    Edge,
    Explanation,
    KernelInfo,
    LibraryInfo,
    PhaseInfo,
    PlanInfo,
    Resources,
    TensorInfo,
)
from megafuse.explanation.resources import compiled_resources, with_resources
from megafuse.explanation.schedule_text import format_schedule
from megafuse.explanation.text import format_plan, format_summary

__all__ = [
    "Coverage",
    "EagerEstimate",
    "EagerOp",
    "Edge",
    "Explanation",
    "KernelInfo",
    "LibraryInfo",
    "PhaseInfo",
    "PlanInfo",
    "Resources",
    "TensorInfo",
    "compiled_resources",
    "estimate_eager",
    "explain",
    "explain_compiled",
    "format_plan",
    "format_schedule",
    "format_summary",
    "with_resources",
]

"""Validation: one tolerance table, one compare function, the fp64 oracle, determinism, poisoned memory, planted faults.

The rule and its derivation are in docs/numerics.md.
"""

from megafuse.validate.check import CHECK_OPTIONS, CheckOptions, check
from megafuse.validate.compare import Sample, compare, measure, same_bits
from megafuse.validate.errors import FaultNotPlanted, OracleError
from megafuse.validate.faults import REQUIRED_FAULTS, Fault, plant, require_complete, text_fault
from megafuse.validate.oracle import PromoteMode, oracle
from megafuse.validate.poison import PoisonMode, poison_, poisoned_allocations
from megafuse.validate.report import CheckReport
from megafuse.validate.running import Run
from megafuse.validate.tolerance import PRECISIONS, RULE, Precision, Rule
from megafuse.validate.verdict import Part, Verdict, decided, in_doubt, judge

__all__ = [
    "CHECK_OPTIONS",
    "PRECISIONS",
    "REQUIRED_FAULTS",
    "RULE",
    "CheckOptions",
    "CheckReport",
    "Fault",
    "FaultNotPlanted",
    "OracleError",
    "Part",
    "PoisonMode",
    "Precision",
    "PromoteMode",
    "Rule",
    "Run",
    "Sample",
    "Verdict",
    "check",
    "compare",
    "decided",
    "in_doubt",
    "judge",
    "measure",
    "oracle",
    "plant",
    "poison_",
    "poisoned_allocations",
    "require_complete",
    "same_bits",
    "text_fault",
]

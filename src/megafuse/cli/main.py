"""``megafuse``: the commands and their options; each is a few lines over the public calls.

What works with PyTorch is loaded by the commands that need it, so that help and the others answer at once.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from megafuse.cli.bench import bench_list, run_bench
from megafuse.cli.cache import cache_report, clear_cache, tuned_report
from megafuse.cli.selection import Selection, plans_selection, takes_selection
from megafuse.cli.stage import Stage
from megafuse.core.errors import MegafuseError, stage_of, trimmed

BAD_INPUT = 2
FAILED = 1
Arch = Annotated[int | None, typer.Option(help="plan for this compute capability (90: sm_90), not for the GPU at hand")]
Strict = Annotated[bool, typer.Option("--strict", help="an error where an op would run unfused")]

app = typer.Typer(
    help="A PyTorch module in, fused and checked GPU kernels out. --debug shows the traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _part(name: str) -> Any:
    """A module of this package, loaded when a command needs it."""
    return import_module(f"megafuse.{name}")


@app.command()
@takes_selection
def demo(
    selection: Selection,
    record: Annotated[Path, typer.Option(help="where the JSON record goes")] = Path("out/demo.json"),
    traffic: Annotated[bool, typer.Option(help="on a GPU: measure DRAM traffic with ncu, which takes a minute")] = True,
) -> None:
    """Plan, check and measure a module beside eager and torch.compile; without a GPU: simulate and compile."""
    raise typer.Exit(0 if _part("cli.demo").run_demo(selection, record, traffic=traffic) else FAILED)


@app.command()
@plans_selection
def explain(
    selection: Selection,
    arch: Arch = None,
    strict: Strict = False,
    resources: Annotated[
        bool, typer.Option("--resources", help="compile the kernels: registers, spills, occupancy, what limits them")
    ] = False,
    memory_budget: Annotated[
        float | None, typer.Option(help="MB that a step may have allocated at a time; more is computed again")
    ] = None,
) -> None:
    """Say what was planned and why: kernels, boundaries, bytes and predicted time. Nothing is run."""
    budget = None if memory_budget is None else int(memory_budget * 1e6)
    planned = _part("cli.planning").plan_selection(selection, arch, strict=strict, memory_budget=budget)
    typer.echo(f"{planned.example.title}\n{_part('explanation').format_plan(planned.info(resources=resources))}")


@app.command()
@plans_selection
def show(
    selection: Selection,
    stage: Annotated[Stage, typer.Argument(help="graph, plan, schedule or code")],
    arch: Arch = None,
    backend: Annotated[str, typer.Option(help="of code: triton or numpy")] = "triton",
    kernel: Annotated[str | None, typer.Option(help="of code: only the kernels whose name contains this")] = None,
) -> None:
    """Print one stage of the compilation as text."""
    planned = _part("cli.planning").plan_selection(selection, arch)
    typer.echo(_part("cli.show").show_stage(planned, stage, backend=backend, kernel=kernel))


@app.command()
@takes_selection
def check(
    selection: Selection,
    strict: Strict = False,
    seeds: Annotated[int, typer.Option(help="inputs drawn")] = 5,
    sanitize: Annotated[
        str | None, typer.Option(help="run one step under compute-sanitizer instead: memcheck,racecheck,...")
    ] = None,
) -> None:
    """Compare the fused module with the original: outputs and all gradients, by the acceptance rule.

    With --sanitize and no module named: dot and map/reduce kernels at ragged shapes, checked for accesses and races.
    """
    if sanitize is not None:
        tools = _part("validate.sanitizer").parse_tools(sanitize)
        clean, text = _part("cli.sanitize").sanitize_selection(selection, tools)
        typer.echo(text)
        raise typer.Exit(0 if clean else FAILED)
    report = _part("cli.running").check_selection(selection, strict=strict, seeds=seeds)
    typer.echo(str(report))
    if not report.notes and _part("cli.targets").pick_device(selection) == "cpu":
        typer.echo("the generated programs ran as NumPy on the CPU; nothing ran on a GPU")
    raise typer.Exit(0 if report.ok else FAILED)


@app.command()
def fuzz(
    count: Annotated[int, typer.Option(help="modules")] = 200,
    seed: Annotated[int, typer.Option(help="number of the first module")] = 0,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or all: each module one of them in turn")] = "all",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    jobs: Annotated[int, typer.Option(help="processes")] = 2,
    seconds: Annotated[float, typer.Option(help="start no module after so many seconds")] = math.inf,
    each: Annotated[float, typer.Option(help="seconds that one module may take")] = 120.0,
    reduce_for: Annotated[float, typer.Option(help="seconds for making a failing module smaller")] = 60.0,
) -> None:
    """Check random modules; print what fails as a small program, and how to have it again."""
    part = _part("cli.fuzz")
    todo = part.cases(seed, count, dtype, _part("cli.targets").pick_device(Selection(device=device)))
    passed = part.run_fuzz(todo, jobs=jobs, seconds=seconds, each=each, reduce_for=reduce_for)
    raise typer.Exit(0 if passed else FAILED)


@app.command()
@plans_selection
def tune(
    selection: Selection,
    seconds: Annotated[float, typer.Option(help="end the search after so long; what is settled is kept")] = 90.0,
    again: Annotated[bool, typer.Option("--again", help="measure what has been measured before, too")] = False,
    export: Annotated[Path | None, typer.Option(help="write the plan to this file, for fuse(plan=...)")] = None,
) -> None:
    """Measure the tiles of a module's kernels on the GPU at hand, keep the best ones, and show what was found."""
    typer.echo(_part("cli.tuning").tune_selection(selection, seconds=seconds, again=again, export=export))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="mlp, weightnorm, ...; without a name: the list")] = "--help",
) -> None:
    """Validate and time megafuse beside eager and torch.compile: bench mlp, bench weightnorm, ..."""
    if name == "--help":
        typer.echo(bench_list())
    else:
        raise typer.Exit(run_bench(name, context.args))


@app.command()
def doctor() -> None:
    """Show versions, GPU, compilers and cache, and what works here."""
    typer.echo(_part("cli.doctor").doctor_report())


@app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="delete what is in it")] = False,
    tuned: Annotated[bool, typer.Option("--tuned", help="only what was measured: list it, or with --clear drop it")] = (
        False
    ),
) -> None:
    """Show where the cache is, how large, and what was measured; or clear it."""
    typer.echo(clear_cache(tuned=tuned) if clear else tuned_report() if tuned else cache_report())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and exit. Status 2: bad input (said in a few lines); 1: a check failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        app([a for a in given if a != "--debug"], prog_name="megafuse")
    except MegafuseError as error:
        if debug:
            raise
        typer.echo(f"error: {error}", err=True)
        sys.exit(BAD_INPUT)
    except Exception as error:
        stage = stage_of(error)
        if debug or stage is None:
            raise
        lines = traceback.format_list(traceback.extract_tb(trimmed(error).__traceback__))
        notes = getattr(error, "__notes__", ())
        said = "".join(line for line in traceback.format_exception_only(error) if line.rstrip("\n") not in notes)
        typer.echo(f"error in your code, {stage}:\n{''.join(lines)}{said.rstrip()}", err=True)
        sys.exit(BAD_INPUT)

"""Bad input: a few clear lines that name the argument, exit status 2, no traceback."""

from __future__ import annotations

import pytest
import torch

from megafuse.cli.inputs import parse_input
from megafuse.core.errors import InputError, MegafuseError

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
GATED = ("--module", "cli_modules:gated", "--device", "cpu")

EXPLAIN = ("explain", "--input", "2,16", "--module")
CASES = {
    "dim": (("explain", "--tokens", 4, "--dim", 18), "--dim", "multiple of tokens"),
    "dim of a workload": (("explain", "--workload", "rank_mixer_block", "--tokens", 4, "--dim", 18), "dim", "multiple"),
    "batch size": (("explain", "--batch-size", 0), "--batch-size", "at least 1"),
    "dtype": (("explain", "--dtype", "float8"), "--dtype", "float8"),
    "integer dtype": (("explain", "--dtype", "int64"), "--dtype", "integer"),
    "device": (("check", "--device", "tpu"), "--device", "tpu"),
    "workload": (("explain", "--workload", "nothing"), "--workload", "nothing"),
    "size that is not there": (("explain", "--workload", "gelu_ffn", "--k", 2), "--k", "no such size"),
    "subgraph": (("explain", "--subgraph", "moe"), "--subgraph", "moe"),
    "package": (("explain", "--package", "/nowhere"), "--package", "/nowhere"),
    "two targets": (("explain", "--workload", "gelu_ffn", "--subgraph", "dense_ffn_v2"), "--workload", "exclude"),
    "input without module": (("explain", "--input", "2,4"), "--input", "--module"),
    "module without input": (("explain", "--module", "cli_modules:gated"), "--input", "missing"),
    "module's form": (("explain", "--module", "cli_modules", "--input", "2"), "--module", "pkg.mod:factory"),
    "module's name": (("explain", "--module", "cli_none:x", "--input", "2"), "--module", "cli_none"),
    "module's attribute": (("explain", "--module", "cli_modules:nope", "--input", "2"), "--module", "nope"),
    "factory's arguments": ((*EXPLAIN, "cli_modules:takes_arguments"), "--module", "without"),
    "factory's kind": ((*EXPLAIN, "cli_modules:NUMBER"), "--module", "of type int, no factory"),
    "fewer inputs": ((*EXPLAIN, "cli_modules:Two"), "--input: 1 given", "Two.forward(a, b)"),
    "more inputs": (("explain", *GATED[:2], "--input", "2,16", "--input", "2"), "--input: 2 given", "forward(input)"),
    "inner shapes": ((*EXPLAIN, "cli_modules:two_shapes"), "at module 1 (Linear)", "input is float32[2, 16]"),
    "requires_grad": (("explain", *GATED[:2], "--input", "2,16:float32:requires_grad"), "requires_grad", "no_grad"),
    "module's dtype": (("explain", *GATED[:2], "--input", "2,16", "--dtype", "int64"), "--dtype", "integer"),
    "package for a module": (("explain", *GATED[:2], "--input", "2", "--package", "."), "--package", "leave it out"),
    "factory's result": ((*EXPLAIN, "cli_modules:returns_nothing"), "--module", "NoneType"),
    "input's shape": (("explain", *GATED[:2], "--input", "2,x"), "--input", "2,x"),
    "integer input": (("check", *GATED, "--input", "2,16:int64"), "input", "int64"),
    "mixed dtypes": (("check", *GATED, "--input", "2,16:bfloat16"), "input", "bfloat16"),
    "strict": ((*EXPLAIN, "cli_modules:sorts", "--strict"), "aten.sort", "cli_modules.py"),
    "kernel": (("show", "code", *GATED[:2], "--input", "2,16", "--kernel", "zzz"), "--kernel", "zzz"),
    "backend": (("show", "code", *GATED[:2], "--input", "2,16", "--backend", "cuda"), "back end", "triton"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_said_in_a_few_lines(megafuse_cli, name):
    arguments, named, also = CASES[name]
    status, out, err = megafuse_cli(*arguments)
    assert status == 2
    assert err.startswith("error: ")
    assert named in err
    assert also in err
    assert "Traceback" not in err + out


@needs_no_gpu
@pytest.mark.parametrize("command", ["check", "demo"])
def test_a_gpu_asked_for_where_there_is_none(megafuse_cli, command):
    status, _, err = megafuse_cli(command, "--device", "cuda")
    assert status == 2
    assert "--device" in err
    assert "no GPU" in err


def test_unknown_option_and_command_end_with_status_2(megafuse_cli):
    assert megafuse_cli("explain", "--nothing")[0] == 2
    assert megafuse_cli("polish")[0] == 2
    assert megafuse_cli("show", "everything")[0] == 2


def test_debug_lets_the_traceback_through():
    from megafuse.cli.main import main

    with pytest.raises(InputError, match="--dtype"):
        main(["explain", "--dtype", "float8", "--debug"])


@pytest.mark.parametrize(
    "text", ["2,-1", "2,4:float3", "2,4:float32:grad:please", "2:int64:requires_grad", "2:no_grad:float32"]
)
def test_inputs_that_are_not_understood(text):
    with pytest.raises(InputError, match="--input"):
        parse_input(text, torch.device("cpu"))


def test_inputs():
    x = parse_input("2,4,16:bfloat16", torch.device("cpu"))
    assert (x.shape, x.dtype, x.requires_grad) == ((2, 4, 16), torch.bfloat16, True)
    assert not parse_input("3:float32:no_grad", torch.device("cpu")).requires_grad
    assert not parse_input("3:no_grad", torch.device("cpu")).requires_grad
    assert parse_input("3", torch.device("cpu"), "float16").dtype == torch.float16
    assert parse_input("", torch.device("cpu")).shape == ()
    ids = parse_input("5:int64", torch.device("cpu"))
    assert ids.dtype == torch.int64
    assert not ids.requires_grad


def test_every_error_has_its_text_in_one_place():
    error = MegafuseError("what", where="file.py:3", hint="do this")
    assert str(error).splitlines() == ["what", "  at file.py:3", "  what to do: do this"]


def test_an_error_in_the_users_module_shows_the_users_code(megafuse_cli):
    status, out, err = megafuse_cli("explain", "--module", "cli_modules:adds_a_string", "--input", "2,16")
    assert status == 2
    assert err.startswith("error in your code, while megafuse traced it")
    assert 'return lambda x: x + "a string"' in err
    assert "TypeError" in err
    assert "/megafuse/" not in err + out


@pytest.mark.parametrize(
    ("name", "stage", "said"),
    [
        ("cli_modules:raises", "called cli_modules:raises()", "ValueError: first line\nsecond line\n"),
        ("cli_modules:type_error_inside", "called cli_modules:type_error_inside()", 'return nn.Linear("a", 3)'),
        ("cli_broken:x", "imported cli_broken", "ModuleNotFoundError: No module named 'nothing_of_that_name'\n"),
        ("cli_syntax:x", "imported cli_syntax", "SyntaxError: "),
    ],
)
def test_an_error_while_the_users_module_is_made_shows_the_users_code(
    megafuse_cli, tmp_path, monkeypatch, name, stage, said
):
    (tmp_path / "cli_broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "cli_syntax.py").write_text("def f(:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    status, out, err = megafuse_cli("explain", "--module", name, "--input", "2,16")
    assert status == 2
    assert err.startswith(f"error in your code, while megafuse {stage}:\n  File ")
    assert said in err
    assert "/megafuse/" not in (err + out).replace(str(tmp_path), "")
    assert "raised in your code" not in err


@pytest.mark.parametrize("command", ["explain", "tune", "show"])
def test_what_runs_nowhere_takes_no_device(megafuse_cli, command):
    status, _, err = megafuse_cli(command, *(["plan"] if command == "show" else []), "--device", "cpu")
    assert status == 2
    assert "--device" in err


def test_inputs_take_the_type_of_the_module(megafuse_cli):
    status, out, _ = megafuse_cli("explain", *GATED[:2], "--input", "2,16", "--dtype", "bfloat16")
    assert status == 0
    assert "plan for input bf16[2, 16]" in out


def test_an_input_without_gradient_has_none(megafuse_cli):
    wants = [megafuse_cli("explain", *GATED[:2], "--input", f"2,16{form}")[1] for form in ("", ":no_grad")]
    assert ["gradient of argument input" in out for out in wants] == [True, False]

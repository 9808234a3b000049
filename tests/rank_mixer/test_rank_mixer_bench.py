"""Parser, report line, seeds, measured step and worker set-up of the benchmark, on CPU."""

import contextlib
import dataclasses

import pytest
import torch
from torch import Tensor, nn

from rank_mixer_src import bench_rank_mixer, runner
from rank_mixer_src.config import ConfigError, WorkloadConfig
from rank_mixer_src.timing import TimingResult
from rank_mixer_src.worker import Worker, read_worker
from rank_mixer_src.workload import Workload, build_workload, check_output_shape, run_step

SMALL = WorkloadConfig(batch_size=2, tokens=4, dim=16, dtype="float32", seed=7101)
NEEDS_NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="shows the message of a machine without a GPU")


def parse(*argv: str) -> WorkloadConfig:
    parser = bench_rank_mixer.build_parser()
    return bench_rank_mixer.make_config(parser, parser.parse_args(argv))


def test_defaults_are_the_production_run() -> None:
    config = parse()
    assert (config.batch_size, config.tokens, config.dim, config.k, config.hidden) == (1024, 64, 1280, 2, 2560)
    assert (config.ffn_type, config.gemm_backend, config.dtype, config.tf32) == ("dense_v2", "bmm", "bfloat16", False)


@pytest.mark.parametrize(
    "line",
    [
        "--batch-size 1024 --tokens 64 --dim 1280 --k 2 --ffn-type dense_v2 --gemm-backend grouped",
        "--warmup 1 --num-tests 1",
        "--dtype float32 --gemm-backend bmm",
        "--dtype float32 --tf32 --gemm-backend bmm",
        "--dtype float16 --gemm-backend bmm",
        "--k 3 --seed 7101 --moe-experts 4",
        "--warmup 1 --warmup 0",
    ],
)
def test_accepts_the_documented_options(line: str) -> None:
    assert isinstance(parse(*line.split()), WorkloadConfig)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--ep-group-size 1", "unrecognized arguments: --ep-group-size"),
        ("--backward", "unrecognized arguments: --backward"),
        ("--check-correctness", "unrecognized arguments: --check-correctness"),
        ("--sleep-ms 0", "unrecognized arguments: --sleep-ms"),
        ("--batch 4", "unrecognized arguments: --batch"),
        ("--ffn-type sparse_moe --moe-experts 2", "argument --ffn-type: sparse_moe is an extension"),
        ("--ffn-type other", "argument --ffn-type"),
        ("--gemm-backend other", "argument --gemm-backend"),
        ("--dtype float64", "argument --dtype"),
        ("--moe-experts 3", "argument --moe-experts"),
        ("--tokens 48", "argument --dim: must be a multiple of tokens"),
        ("--k 0", "argument --k: must be at least 1"),
        ("--batch-size 0", "argument --batch-size: must be at least 1"),
        ("--num-tests 0", "argument --num-tests: must be at least 1"),
        ("--warmup -1", "argument --warmup: must not be negative"),
    ],
)
def test_rejects_and_names_the_argument(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_rank_mixer.main(line.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_list_backends_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_rank_mixer.main(["--list-backends"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["bmm", "grouped"]


@NEEDS_NO_GPU
def test_says_what_it_needs_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_rank_mixer.main([]) == 1
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_tf32_is_noted_where_it_has_no_effect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_rank_mixer, "run_benchmark", lambda config, worker: TimingResult((0.5,), (0.5,)))
    assert bench_rank_mixer.main(["--tf32"]) == 0
    printed = capsys.readouterr()
    assert "no effect on bfloat16" in printed.err
    assert "mean=500000.00us" in printed.out


def test_report_line() -> None:
    result = TimingResult(samples_s=(0.001, 0.003), raw_s=(0.005, 0.001, 0.003))
    line = runner.format_result(WorkloadConfig(num_tests=3), Worker(), result)
    assert "B=1024 T=64 D=1280 k=2 H=2560 T_local=64" in line
    assert "A2A_bytes_per_rank=0" in line
    assert "mode=fwd+bwd" in line
    assert "EP=1" in line
    assert "mean=2000.00us min=1000.00us max=3000.00us" in line
    assert "\n" not in line


class CountingDevice:
    """A timing device without a clock; every measurement takes 1 ms."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"

    def synchronize(self) -> None: ...
    def flush_l2(self) -> None: ...
    def barrier(self) -> None: ...
    def record(self) -> None: ...

    def event(self) -> "CountingDevice":
        return self

    def elapsed_time(self, end_event: object, /) -> float:
        return 1.0


def test_run_makes_one_untimed_step_then_warmup_then_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Tensor] = []

    def step(workload: Workload) -> Tensor:
        steps.append(workload.inputs)
        return workload.inputs

    monkeypatch.setattr(runner, "worker_session", lambda worker: contextlib.nullcontext())
    monkeypatch.setattr(runner, "CudaTimingDevice", CountingDevice)
    monkeypatch.setattr(Worker, "device", torch.device("cpu"))
    monkeypatch.setattr(Workload, "step", step)
    config = dataclasses.replace(SMALL, warmup=2, num_tests=3)
    result = runner.run_benchmark(config, Worker())
    assert len(steps) == 1 + 2 + 3
    assert result.raw_s == (0.001,) * 3
    assert torch.backends.cuda.matmul.allow_tf32 is False


def test_config_names_unknown_dtype_and_negative_seed() -> None:
    for argument, value in (("dtype", "float64"), ("seed", -1), ("ffn_type", "other")):
        with pytest.raises(ConfigError) as caught:
            WorkloadConfig(**{argument: value})  # type: ignore[arg-type]
        assert caught.value.argument == argument


def all_tensors(rank: int) -> list[Tensor]:
    workload = build_workload(SMALL, rank=rank, device="cpu")
    return [workload.inputs, workload.grad_output, *workload.block.parameters()]


def test_same_seed_and_rank_give_the_same_tensors() -> None:
    for first, second in zip(all_tensors(1), all_tensors(1), strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(all_tensors(0)[0], all_tensors(1)[0])
    assert not torch.equal(all_tensors(0)[1], all_tensors(1)[1])


def test_seed_rule() -> None:
    workload = build_workload(SMALL, rank=3, device="cpu")
    generator = torch.Generator().manual_seed(SMALL.seed + 1000 + 3)
    assert torch.equal(workload.grad_output, torch.randn(2, 4, 16, generator=generator))
    torch.manual_seed(SMALL.seed + 3)
    bound = (6 / (4 * 16)) ** 0.5
    w1 = dict(workload.block.named_parameters())["ffn.w1"]
    assert torch.equal(w1, torch.empty(4, 16, 64).uniform_(-bound, bound))


def step_gradients(workload: Workload) -> list[Tensor]:
    workload.step()
    found = [value.grad for value in (workload.inputs, *workload.block.parameters())]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


def test_step_replaces_gradients() -> None:
    workload = build_workload(SMALL, device="cpu")
    first = step_gradients(workload)
    second = step_gradients(workload)
    for before, after in zip(first, second, strict=True):
        assert before is not after
        assert torch.equal(before, after)


def test_step_calls_the_block_as_documented() -> None:
    class Recorder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[dict[str, object]] = []

        def zero_grad(self, set_to_none: bool = False) -> None:
            self.calls.append({"set_to_none": set_to_none})

        def forward(self, inputs: Tensor, **keywords: object) -> Tensor:
            assert inputs.grad is None
            self.calls.append(keywords)
            return inputs * 2

    block, inputs = Recorder(), torch.randn(1, 2, 4, requires_grad=True)
    inputs.grad = torch.ones_like(inputs)
    run_step(block, inputs, torch.ones_like(inputs))
    assert block.calls == [{"set_to_none": True}, {"overlap": "none"}]
    assert torch.equal(inputs.grad, torch.full_like(inputs, 2.0))


def test_output_shape_check() -> None:
    check_output_shape(torch.empty(2, 4), torch.empty(2, 4))
    with pytest.raises(RuntimeError, match="output shape"):
        check_output_shape(torch.empty(2, 3), torch.empty(2, 4))


def test_worker_from_environment() -> None:
    assert read_worker({}) == Worker(rank=0, world_size=1, local_rank=0, launched=False)
    launched = read_worker({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    assert launched == Worker(rank=5, world_size=8, local_rank=1, launched=True)
    assert launched.device == torch.device("cuda", 1)

from __future__ import annotations

import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megafuse.core.device import device_spec
from megafuse.core.errors import InputError, TargetError
from megafuse.runtime import cachedir, device, environment, loading, timer
from megafuse.runtime.device import live_device_spec, target_spec

NO_GPU = not torch.cuda.is_available()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGAFUSE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cache_directory_is_private_and_text_is_kept(cache: Path) -> None:
    path = cachedir.write_text("a/b.py", "x = 1\n")
    assert path == cache / "a" / "b.py"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    before = path.stat().st_mtime_ns
    assert cachedir.write_text("a/b.py", "x = 1\n").stat().st_mtime_ns == before
    path.write_bytes(b"\xff corrupted")
    assert cachedir.write_text("a/b.py", "x = 1\n").read_text() == "x = 1\n"
    assert [p.name for p in path.parent.iterdir()] == ["b.py"]


def test_an_open_directory_is_made_private(cache: Path) -> None:
    cache.mkdir(mode=0o755)
    cachedir._prepared.cache_clear()
    assert stat.S_IMODE(cachedir.cache_dir().stat().st_mode) == 0o700


def test_a_path_that_cannot_be_a_directory_is_replaced_by_a_temporary_one(cache: Path) -> None:
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file")
    found = cachedir.write_text("c.py", "y = 2\n")
    assert cache not in found.parents
    assert found.read_text() == "y = 2\n"


def test_a_disk_that_fails_later_is_replaced_too(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cachedir.cache_dir()
    original = cachedir._write

    def full(path: Path, text: str) -> Path:
        if cache in path.parents:
            raise OSError("no space left")
        return original(path, text)

    monkeypatch.setattr(cachedir, "_write", full)
    assert cachedir.write_text("d.py", "z = 3\n").read_text() == "z = 3\n"


def test_code_comes_from_the_text_and_its_source_can_be_read(cache: Path) -> None:
    import inspect

    text = '"""Doc."""\n\n\ndef twice(x):\n    return 2 * x\n'
    module = loading.load_module(text, "twice")
    assert module.twice(4) == 8
    assert inspect.getsource(module.twice) == "def twice(x):\n    return 2 * x\n"
    assert loading.load_module(text, "twice") is module
    assert loading.load_host(text, {"extra": 1})["extra"] == 1


def test_samples() -> None:
    samples = timer.Samples((5.0, 1.0, 2.0, 3.0, 4.0))
    assert (samples.median, samples.p20, samples.p80) == (3.0, pytest.approx(1.8), pytest.approx(4.2))
    assert str(samples) == "3.0 us (p20 1.8, p80 4.2, 5 samples)"
    assert timer.Samples((7.0,)).p80 == 7.0


def test_host_time_runs_anywhere() -> None:
    samples = timer.time_host(lambda: time.sleep(1e-3), steps=5, samples=3)
    assert len(samples.microseconds) == 3
    assert samples.median >= 1000


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_device_timing_needs_a_device() -> None:
    with pytest.raises(TargetError, match="no CUDA device"):
        timer.time_events(lambda: None)
    with pytest.raises(TargetError, match="no CUDA device"):
        timer.time_graph([lambda: None])
    with pytest.raises(InputError, match="works is empty"):
        timer.time_graph([])
    with pytest.raises(TargetError, match="no CUDA device"):
        live_device_spec()


@pytest.mark.parametrize(("arch", "version", "at_once"), [
    (90, (3, 6), True), (90, (3, 9), False), (90, None, False), (80, (3, 6), False), (86, (3, 6), False),
    (100, (3, 6), False),
])  # fmt: skip
def test_what_triton_does_for_a_device(
    arch: int, version: tuple[int, int] | None, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed() -> tuple[int, int]:
        if version is None:
            raise TargetError("Triton is not installed")
        return version

    monkeypatch.setattr(device, "triton_version", installed)
    assert target_spec(arch, sms=7) == replace(device_spec(arch, sms=7), stores_at_once=at_once)


def test_environment_names_versions() -> None:
    facts = environment.environment()
    assert facts["torch"] == torch.__version__
    assert {"python", "numpy", "system"} <= set(facts)
    assert ("gpu" in facts) is not NO_GPU

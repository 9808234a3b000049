"""What was measured, on disk: corruption, other processes, kills, a disk that cannot be written; plan files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace

import filelock
import pytest
import torch

import megafuse
from megafuse.api import engine_of
from megafuse.compiler import KnownTiles, Options, complete, find_known, reschedule
from megafuse.compiler.plans import tiles_as_data
from megafuse.compiler.variants import KernelTiles, Tile, subjects
from megafuse.core.errors import InputError
from megafuse.runtime import cachedir, plan_store
from megafuse.runtime.plan_store import Entry, TuningWarning, read_entry, read_plan, write_entry, write_plan
from megafuse.tune.step import entries_of, run
from tune_helpers import CASES, DEVICE, Norms, bench_with, by_distance

TILE = {
    "row_tile": 2, "rows_per_chunk": 2, "pieces": [64], "col_block": 0, "col_grid": False, "num_stages": 1,
    "hoist": True, "abreast": 1,
}  # fmt: skip
ENTRY = Entry("k" * 32, "k0_x", (TILE,), 4, 1e-5, 2e-5, {"registers": 40})
ENVIRONMENT = ("MEGAFUSE_FAST_AUTOTUNE", "MLP_FAST_AUTOTUNE", "MEGAFUSE_PLAN", "MEGAFUSE_REQUIRE_PLAN")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGAFUSE_CACHE_DIR", str(tmp_path / "cache"))
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    plan_store._say_once.cache_clear()
    return tmp_path / "cache" / plan_store.FOLDER


def same(entry, other=ENTRY):
    return entry is not None and (entry.key, dict(entry.tiles[0]), entry.num_warps) == (other.key, TILE, 4)


def test_an_entry_is_found_again_on_its_device_alone(folder):
    path = write_entry(ENTRY, "NVIDIA H200")
    assert path.parent == folder
    assert same(read_entry(ENTRY.key, "NVIDIA H200"))
    assert read_entry(ENTRY.key, "NVIDIA H100") is None
    assert read_entry("other", "NVIDIA H200") is None
    assert path.stat().st_mode & 0o077 == 0
    assert folder.stat().st_mode & 0o077 == 0


def test_another_version_of_triton_does_not_find_it(monkeypatch):
    write_entry(ENTRY, "gpu")
    monkeypatch.setattr(plan_store, "_versions", lambda: {"triton": "0.0"})
    assert read_entry(ENTRY.key, "gpu") is None


CORRUPT = {
    "empty": b"",
    "cut off": b'{"key": "kkk',
    "no JSON": b"\x80\x04\x95 pickle",
    "not UTF-8": b"\xff\xfe\xff",
    "a list": b"[1, 2]",
    "no tiles": json.dumps({**vars(ENTRY), "tiles": None}).encode(),
    "words for numbers": json.dumps({**vars(ENTRY), "num_warps": "many"}).encode(),
    "another kernel": json.dumps({**vars(ENTRY), "key": "other"}).encode(),
    "a deep nest": b"[" * 5_000,
    "too long": json.dumps({**vars(ENTRY), "facts": {"padding": "x" * 50_000}}).encode(),
}


@pytest.mark.parametrize("name", CORRUPT)
def test_a_corrupt_file_is_said_dropped_and_written_anew(name):
    path = write_entry(ENTRY, "gpu")
    path.write_bytes(CORRUPT[name])
    with pytest.warns(TuningWarning, match="not usable"):
        assert read_entry(ENTRY.key, "gpu") is None
    assert not path.exists()
    assert read_entry(ENTRY.key, "gpu") is None  # said once
    assert plan_store.all_entries() == []
    write_entry(ENTRY, "gpu")
    assert same(read_entry(ENTRY.key, "gpu"))


@pytest.mark.parametrize(
    "change",
    [{"row_tile": 2.5}, {"pieces": 64}, {"hoist": "yes"}, {"row_tile": -2}, {"row_tile": True}, {"abreast": "two"}],
)
def test_tiles_of_the_wrong_types_are_dropped(change):
    write_entry(replace(ENTRY, tiles=({**TILE, **change},)), "gpu")
    with pytest.warns(TuningWarning, match="not usable"):
        assert KnownTiles("gpu")(ENTRY.key) is None


def test_tiles_without_all_of_their_fields_are_dropped():
    for name in TILE:
        write_entry(replace(ENTRY, tiles=({k: v for k, v in TILE.items() if k != name},)), "gpu")
        with pytest.warns(TuningWarning, match=f"a tile without '{name}'"):
            assert KnownTiles("gpu")(ENTRY.key) is None
        plan_store._say_once.cache_clear()


def test_tiles_survive_being_kept():
    tile = Tile(1, 64, (2048, 512), num_warps=8, num_stages=3, abreast=2, why="measured")
    kept = KernelTiles((tile, replace(tile, hoist=False, abreast=1)), 8)
    write_entry(replace(ENTRY, tiles=tiles_as_data(kept), num_warps=8), "gpu")
    assert KnownTiles("gpu")(ENTRY.key) == kept


@pytest.mark.parametrize(
    "change",
    [{"row_tile": 3}, {"pieces": []}, {"pieces": [16]}, {"row_tile": 2**40}, {"num_stages": 99}, {"abreast": 2}],
)
def test_illegal_tiles_are_not_taken_and_the_plan_says_so(change):
    compiled = CASES["norms"]()
    subject = subjects(compiled.step)[0]
    write_entry(replace(ENTRY, key=subject.key, tiles=({**TILE, **change},)), "gpu")
    made = reschedule(compiled, KnownTiles("gpu"))
    assert subjects(made.step)[0].tiles == subject.tiles
    assert any(subject.name in note and "not taken" in note for note in made.step.notes)
    device = replace(compiled.device, name="gpu")
    with pytest.warns(TuningWarning, match="its tiles are not legal"):
        run(replace(compiled, device=device), bench_with(by_distance(8, 8)), None, seconds=0.0)
    assert KnownTiles("gpu")(subject.key) is not None


def test_a_disk_that_cannot_be_written_is_said_and_does_no_harm(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGAFUSE_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.warns(TuningWarning, match="cannot be written"):
        write_entry(ENTRY, "gpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_entry(ENTRY, "gpu")  # said once
        assert same(read_entry(ENTRY.key, "gpu"))


def test_a_disk_that_is_full_is_said_and_does_no_harm(monkeypatch, folder):
    good = cachedir._write
    cachedir.cache_dir()

    def write(path, text):
        if path.is_relative_to(folder.parent):
            raise OSError(28, "No space left on device")
        return good(path, text)

    monkeypatch.setattr(cachedir, "_write", write)
    with pytest.warns(TuningWarning, match="cannot be written"):
        write_entry(ENTRY, "gpu")
    assert same(read_entry(ENTRY.key, "gpu"))


WRITER = """
import sys, json
from megafuse.runtime.plan_store import Entry, write_entry, read_entry
data = json.loads(sys.argv[1])
for n in range(int(sys.argv[2])):
    entry = Entry(data["key"], "k0_x", tuple(data["tiles"]), 4, 1e-5 * (n + 1), 2e-5, {"padding": "x" * 10_000})
    write_entry(entry, "gpu")
    assert read_entry(data["key"], "gpu").num_warps == 4
"""


def writer(count):
    data = json.dumps({"key": ENTRY.key, "tiles": [TILE]})
    command = [sys.executable, "-W", "error", "-c", WRITER, data, str(count)]
    return subprocess.Popen(command, env=dict(os.environ), stderr=subprocess.PIPE, text=True)


def test_eight_processes_at_once():
    processes = [writer(40) for _ in range(8)]
    assert [(p.communicate(timeout=120)[1], p.returncode) for p in processes] == [("", 0)] * 8
    assert same(read_entry(ENTRY.key, "gpu"))


def test_a_killed_process_leaves_no_half_of_a_file(folder):
    for wait in (0.0, 0.01, 0.05):
        process = writer(100_000)
        while not (folder.is_dir() and list(folder.glob("*.json"))):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert same(read_entry(ENTRY.key, "gpu"))


def test_one_process_measures_at_a_time(tmp_path):
    held = filelock.FileLock(str(cachedir.cache_dir() / "tuning.lock"))
    with held, pytest.warns(TuningWarning, match="without its lock"), plan_store.tuning_lock(0.2):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with plan_store.tuning_lock(0.2), pytest.raises(filelock.Timeout):
            filelock.FileLock(held.lock_file, timeout=0.1).acquire()
    held.acquire(timeout=1)
    held.release()


# ---------------------------------------------------------------- what fuse takes of it


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    return Norms(96), torch.randn(150, 96, requires_grad=True)


def tune_for_interpreter(compiled):
    """Measure with made-up times, kept where interpreted kernels look."""
    device = replace(compiled.device, name="interpreter")
    return run(replace(compiled, device=device), bench_with(by_distance(8, 8)), None, seconds=100.0)


def tiles_in(fused):
    (bound,) = engine_of(fused).bindings
    return {k.key: (k.num_warps, k.phases[0].tile) for k in bound.compiled.step.kernels}


def test_what_is_kept_is_taken_without_asking_and_right(module, monkeypatch):
    fn, x = module
    before = tiles_in(megafuse.fuse(fn, x, target="interpret"))
    result = tune_for_interpreter(CASES["norms"]())
    assert any(k.changed for k in result.kernels)
    fused = megafuse.fuse(fn, x, target="interpret")
    taken = tiles_in(fused)
    for kernel in result.kernels:
        if kernel.subject.key in taken:
            assert taken[kernel.subject.key][0] == kernel.tiles.num_warps
    assert taken != before
    assert megafuse.check(fn, x, fused=fused).ok
    text = str(megafuse.explain(fused))
    assert text.count("s measured; ") == len(taken)
    assert "predicted, " in text
    assert tiles_in(megafuse.fuse(fn, x, target="interpret", tune=False)) == before
    for name in ("MEGAFUSE_FAST_AUTOTUNE", "MLP_FAST_AUTOTUNE"):
        with monkeypatch.context() as inside:
            inside.setenv(name, "1")
            assert tiles_in(megafuse.fuse(fn, x, target="interpret")) == before


def test_tuning_without_a_gpu_is_said(module):
    fn, x = module
    with pytest.warns(TuningWarning, match="nothing can be timed"):
        megafuse.fuse(fn, x, target="interpret", tune=True)


@pytest.fixture
def plan(tmp_path):
    compiled = CASES["norms"]()
    tune_for_interpreter(compiled)
    entries = entries_of(replace(compiled, device=replace(compiled.device, name="interpreter")))
    assert entries
    path = tmp_path / "plan.json"
    write_plan(path, "NVIDIA H200", entries)
    for kept in (tmp_path / "cache" / plan_store.FOLDER).iterdir():
        kept.unlink()
    return path, entries


def test_a_plan_is_taken_and_nothing_else(module, plan, monkeypatch):
    fn, x = module
    path, entries = plan
    assert list(read_plan(path).entries.values()) == [replace(e, tiles=tuple(map(dict, e.tiles))) for e in entries]
    warps = {e.key: e.num_warps for e in entries}
    taken = tiles_in(megafuse.fuse(fn, x, target="interpret", plan=path))
    assert {k: w for k, (w, _) in taken.items()} == warps
    monkeypatch.setenv("MEGAFUSE_PLAN", str(path))
    monkeypatch.setenv("MEGAFUSE_REQUIRE_PLAN", "1")
    assert tiles_in(megafuse.fuse(fn, x, target="interpret")) == taken
    with pytest.raises(InputError, match="has no usable entry for k0"):
        megafuse.fuse(fn, torch.randn(90, 96, requires_grad=True), target="interpret")


def test_a_required_plan_without_a_file_means_the_cache(module, monkeypatch):
    fn, x = module
    monkeypatch.setenv("MEGAFUSE_REQUIRE_PLAN", "1")
    with pytest.raises(InputError, match="the cache has no usable entry for k0"):
        megafuse.fuse(fn, x, target="interpret")
    tune_for_interpreter(CASES["norms"]())
    megafuse.fuse(fn, x, target="interpret")


def test_a_plan_for_another_gpu_is_refused(plan):
    path, _ = plan
    assert find_known(DEVICE, "cuda", plan=str(path)).plan is not None
    with pytest.raises(InputError, match="measured on NVIDIA H200, this is NVIDIA B200"):
        find_known(replace(DEVICE, name="NVIDIA B200"), "cuda", plan=str(path))


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"kind": "megafuse plan", "format": 999, "device": "", "kernels": {}}']
)
def test_a_file_that_is_no_plan_is_an_error(module, tmp_path, text):
    fn, x = module
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(InputError, match="is no plan file of format"):
        megafuse.fuse(fn, x, target="interpret", plan=str(path))
    with pytest.raises(InputError, match="cannot read the plan"):
        megafuse.fuse(fn, x, target="interpret", plan=tmp_path / "none.json")


def test_a_plan_with_tiles_that_are_none_is_an_error(module, plan):
    fn, x = module
    path, _ = plan
    data = json.loads(path.read_text())
    for entry in data["kernels"].values():
        entry["tiles"][0]["row_tile"] = "two"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match="is not usable"):
        megafuse.fuse(fn, x, target="interpret", plan=path)


def test_tune_and_a_plan_exclude_each_other():
    with pytest.raises(InputError, match="tune=True and a plan"):
        Options(tune=True, plan="plan.json")


def test_a_tuner_is_called_once_for_what_is_missing():
    compiled = CASES["norms"]()
    called = []

    def tuner(given, device):
        called.append(given)
        run(given, bench_with(by_distance(8, 8)), None, seconds=100.0)

    for _ in range(2):
        known = find_known(DEVICE, "cuda", tune=True)
        made = complete(reschedule(compiled, known), known, tuner, torch.device("cpu"))
        assert set(made.measured) == {k.key for k in made.step.kernels}
    assert len(called) == 1


BAD_NUMBERS = [
    *(("num_warps", v) for v in ("1e999", "4.7", '"4"', "true", "null")),
    *(("seconds", v) for v in ("1" + "0" * 400, "null", "[]")),
]


@pytest.mark.parametrize(("name", "value"), BAD_NUMBERS)
def test_numbers_out_of_range_are_no_entry(name, value):
    fields = {"key": '"k"', "name": '"n"', "tiles": "[]", "num_warps": "4", "seconds": "1", "heuristic_seconds": "1"}
    text = ", ".join(f'"{k}": {v}' for k, v in {**fields, name: value, "facts": "{}"}.items())
    with pytest.raises(ValueError, match="no entry"):
        Entry.of(json.loads(f"{{{text}}}"))


def test_a_tile_that_is_refused_counts_as_none(module, plan, monkeypatch):
    """What is required must be what runs."""
    fn, x = module
    path, entries = plan
    data = json.loads(path.read_text())
    for kernel in data["kernels"].values():
        kernel["tiles"][0]["row_tile"] = 3
    path.write_text(json.dumps(data))
    fused = megafuse.fuse(fn, x, target="interpret", plan=path)
    (bound,) = engine_of(fused).bindings
    assert bound.compiled is not None and bound.compiled.step.refused == set(entries_keys(entries))
    monkeypatch.setenv("MEGAFUSE_REQUIRE_PLAN", "1")
    with pytest.raises(InputError, match="has no usable entry"):
        megafuse.fuse(fn, x, target="interpret", plan=path)


def entries_keys(entries):
    return [e.key for e in entries]

"""The benchmarks run, what their files claim holds, the pictures are up to date."""

import re

import pytest
from helpers import ROOT, of_benchmarks, python

pytestmark = pytest.mark.published

pytest.importorskip("matplotlib")

COMMITTED = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"

pictures, record, result_tables, suite = of_benchmarks(
    "pictures", "record", "result_tables", "suite"
)


def run(script, *arguments, **environment):
    """What a script of the benchmarks prints; warnings are errors there, too."""
    command = "-W", "error", f"benchmarks/{script}", *arguments
    done = python(*command, cwd=ROOT, PYTHONWARNINGS="error", **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_provenance(result):
    assert result["command"].startswith("python benchmarks/")
    assert re.match(r"\d{4}-\d\d-\d\d", result["date"])
    assert result["device"]
    for name in ("jax", "jaxlib", "optax", "python"):
        assert re.match(r"\d+\.\d+", result["versions"][name])


def test_the_suite_writes_its_files_draws_them_and_ends_with_one_table(tmp_path):
    results, drawn = tmp_path / "results", tmp_path / "pictures"
    folders = "--results", results, "--pictures", drawn
    said = run("suite.py", "--quick", *folders, timeout=900)  # of two busy cores
    assert {path.name for path in results.iterdir()} == set(suite.COMMANDS)
    for name in suite.COMMANDS:
        check_provenance(record.read(results / name))
    for name, (file, _) in pictures.PICTURES.items():
        if file != "accelerators.json":  # by compilers that the suite does without
            text = (drawn / f"{name}.svg").read_text()
            assert pictures.digest(results / file) in text
    lines = list(suite.lines_of(results))
    *_, last = said.strip().splitlines()
    assert {line.script for line in lines} >= {"sweep.py", "any_loss.py", "head.py"}
    assert re.split(r"\s{2,}", last) == lines[-1].cells


def test_what_a_change_costs_is_said_by_loss_and_figure(tmp_path):
    before = tmp_path / "before.json"
    assert run("compare.py", "--quick", "--json", before) == "2 losses.\n"
    same = run("compare.py", "--quick", "--to", before)
    assert same.endswith("2 losses, 0 figures differ.\n")
    text = before.read_text()
    before.write_text(text.replace('"forward": 1', '"forward": 2'))
    assert "value_and_grad: forward" in run("compare.py", "--quick", "--to", before)
    before.write_text(text.replace('"forward": 1', '"forward": 0'))
    worse = python("benchmarks/compare.py", "--quick", "--to", before, cwd=ROOT)
    assert worse.returncode == 1
    assert "value_and_grad: forward" in worse.stdout


def test_the_committed_pictures_were_drawn_from_the_committed_files():
    assert {p.stem for p in PICTURES.glob("*.svg")} == set(pictures.PICTURES)
    for name, (file, _) in pictures.PICTURES.items():
        text = (PICTURES / f"{name}.svg").read_text("utf-8")
        assert pictures.digest(COMMITTED / file) in text
        assert len(text) < 150_000


def test_the_tables_of_results_are_those_of_the_committed_files():
    """And one number that is another one would be seen."""
    text = result_tables.PAGE.read_text("utf-8")
    assert len(result_tables.TABLE.findall(text)) > 40
    assert result_tables.printed(text) == text
    other = text.replace("| 1 |", "| 2 |", 1)
    assert result_tables.printed(other) == text != other


def test_the_gpu_benchmark_runs_from_end_to_end():
    said = run("gpu.py", "--tiny", JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    for title in ("Peak", "Tokens a second", "A micro-step", "Kernels"):
        assert title in said
    [planned] = re.findall(r"^ga_optax +- +([\d,]+) +[\d,]+$", said, re.M)
    assert int(planned.replace(",", "")) > 0

"""The benchmarks run, what their files claim holds, the pictures are up to date."""

import importlib
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import python

pytestmark = pytest.mark.published

pytest.importorskip("matplotlib")

ROOT = pathlib.Path(__file__).parents[1]
COMMITTED = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"

sys.path.insert(0, str(ROOT / "benchmarks"))
any_loss, peers, pictures, record, reference_model, suite = (
    importlib.import_module(name)
    for name in ["any_loss", "peers", "pictures", "record", "reference_model", "suite"]
)
sys.path.remove(str(ROOT / "benchmarks"))


def run(script, *arguments, **environment):
    """What a script of the benchmarks prints; warnings are errors there, too."""
    command = "-W", "error", f"benchmarks/{script}", *arguments
    done = python(*command, cwd=ROOT, PYTHONWARNINGS="error", **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- What the files say ----------------------------------------------------------------


def check_provenance(result):
    assert result["command"].startswith("python benchmarks/")
    assert re.match(r"\d{4}-\d\d-\d\d", result["date"])
    assert result["device"]
    for name in ("jax", "jaxlib", "optax", "python"):
        assert re.match(r"\d+\.\d+", result["versions"][name])


# By compilers that the suite does without, and by trainers.
COMPILED = {
    "accelerators.json": "python benchmarks/accelerators.py --json",
    "head_compiled.json": "python benchmarks/head.py --targets",
}
OF_TRAINERS = {"trainers.json": "python benchmarks/trainers.py --json"}


def test_the_claims_of_the_committed_files_hold():
    read = {path.name: record.read(path) for path in COMMITTED.glob("*.json")}
    for row in read["any_loss.json"]["results"]:
        for way, error in row["difference"].items():
            # In float32, of a gradient of many terms; the plain scan's is another one.
            assert error < 1e-4 if way in any_loss.EXACT else error > 1e-3
    for name in ("head.json", "head_compiled.json"):
        for row in read[name]["results"]:
            assert all(error < 1e-5 for error in row.get("error", {}).values())
    for name in COMPILED:
        for package in ("libtpu", "jax-cuda12-plugin"):
            assert re.match(r"\d+\.\d+", read[name]["versions"][package])
    rows = read["trainers.json"]["results"]
    assert {row["trainer"] for row in rows} >= {"google-tunix", "keras", "maxtext"}
    for row in rows:
        assert row["off"]["ga_optax"] < 1e-6
        assert row["megabytes"]["ga_optax"] <= row["megabytes"]["undivided"] / 2
    assert any(row["off"]["their accumulation"] > 0.01 for row in rows)
    for row in read["dispatch.json"]["results"]:
        leaves = row["state_leaves"]
        assert {n - leaves["optax.MultiSteps"] for n in leaves.values()} == {0, 2}
    sent = read["collectives.json"]
    for row in sent["results"]:  # the gradient and the value, once
        assert row["bytes"]["ga_optax"] <= sent["gradient_bytes"] + 64
        assert row["work_over_share"]["ga_optax"] == 1
    for row in sent["logical"]:  # the gradient; the value and the weight in n parts
        most = row["ring_bytes"] + 16 * row["devices"]
        assert max(row["wire_bytes"].values()) <= most
    for row in read["gpu_any_loss.json"]["results"]:  # of 10 bits, by a GPU
        for way, error in row["difference"].items():
            assert error < 1e-3 if way in any_loss.EXACT else error > 1e-3
    peaks = {row["way"]: row for row in read["gpu_peak.json"]["results"]}
    ours, scan = peaks[peers.OURS], peaks[peers.SCAN]
    assert ours["peak_bytes"] == pytest.approx(ours["plan_bytes"], rel=1e-3)
    assert ours["peak_bytes"] < scan["peak_bytes"] - ours["param_bytes"]
    inside = {r["way"]: r for r in read["gpu_programs_cublas.json"]["results"]}
    assert inside[peers.OURS]["separate"] == inside[peers.OURS]["beta_zero"] == 0
    took = read["compile_time.json"]
    assert {row["program"] for row in took["large"]} >= {"100 leaves", "5000 leaves"}
    assert all(row["over_plain_scan"] <= 1.5 for row in took["large"])
    rows = {row["program"]: row for row in took["rows_meet"]}
    assert {"10 batch norms", "100 batch norms"} <= set(rows)
    for program, row in rows.items():
        most = 3 if "attention" in program else 6
        assert row["seconds_over_plain_scan"] <= most
        assert row["lines_over_plain_scan"] <= 5


# -- The suite, quick ------------------------------------------------------------------


# Twelve benchmarks, each in a process of its own, and the pictures.
def test_the_suite_writes_its_files_draws_them_and_ends_with_one_table(tmp_path):
    results, drawn = tmp_path / "results", tmp_path / "pictures"
    said = run("suite.py", "--quick", "--results", results, "--pictures", drawn)
    assert {path.name for path in results.iterdir()} == set(suite.COMMANDS)
    for name in suite.COMMANDS:
        check_provenance(record.read(results / name))
    for name, (file, _) in pictures.PICTURES.items():
        if file not in COMPILED:
            text = (drawn / f"{name}.svg").read_text()
            assert pictures.digest(results / file) in text
    rows = suite.rows_of(results)
    *_, last = said.strip().splitlines()
    assert len(rows) >= 15
    assert last.startswith(rows[-1][0])
    assert re.findall(r"\d+\.\d\d|-", last)[-len(suite.COLUMNS) :] == rows[-1][3:]


def test_every_file_of_results_is_made_by_the_suite_and_by_its_own_command():
    every = {path.name for path in COMMITTED.glob("*.json")}
    ours = {name for name in every if not name.startswith("gpu_")}
    starts = COMPILED | OF_TRAINERS
    for name, command in suite.COMMANDS.items():
        starts[name] = " ".join(["python", f"benchmarks/{command[0]}", *command[1:]])
    assert ours == set(starts)
    for name, start in starts.items():
        result = record.read(COMMITTED / name)
        check_provenance(result)
        assert result["command"].startswith(start), name
    for name in every - ours:
        result = record.read(COMMITTED / name)
        check_provenance(result)
        assert result["device"].startswith("gpu: "), name


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


# -- The pictures ----------------------------------------------------------------------


def test_the_committed_pictures_were_drawn_from_the_committed_files():
    assert {p.stem for p in PICTURES.glob("*.svg")} == set(pictures.PICTURES)
    for name, (file, _) in pictures.PICTURES.items():
        text = (PICTURES / f"{name}.svg").read_text("utf-8")
        assert pictures.digest(COMMITTED / file) in text
        assert len(text) < 150_000


def test_the_page_about_ones_own_machine_explains_every_unit_of_the_table():
    text = (ROOT / "docs" / "your_machine.md").read_text("utf-8")
    units = {unit for _, _, unit, *_ in suite.rows_of(COMMITTED)}
    assert len(units) > 5
    assert [unit for unit in sorted(units) if f"| {unit} |" not in text] == []


# -- The ways --------------------------------------------------------------------------

# optax.MultiSteps keeps a running mean, and a third of an integer would round.
K, ROWS = 2, 2


def integer_loss(params, x):
    """A loss whose gradients are integers: no way may round."""
    return jnp.mean(jnp.sum(x @ params["w"], axis=1))


@pytest.mark.usefixtures("optax_promotion")
def test_every_way_that_is_compared_gives_the_same_parameters():
    rng = np.random.default_rng(0)
    batch = 4.0 * jnp.asarray(rng.integers(-4, 5, size=(K * ROWS, 3)), jnp.float32)
    params = {"w": jnp.asarray(rng.integers(-4, 5, size=(3, 2)), jnp.float32)}
    # The gradient of the mean over rows, and a step of SGD with rate 1.
    expected = np.asarray(params["w"] - batch.mean(axis=0)[:, None])
    opt = optax.sgd(1.0)
    one = peers.in_one_call(integer_loss, K, ROWS)
    one[peers.UNROLLED] = peers.unrolled_loop(integer_loss, K)
    loops = peers.in_many_calls(integer_loss, opt, K)
    ours = peers.ga.MultiSteps(opt, K)
    loops["counts"] = peers.HostLoop(integer_loss, ours, K, counts=True)
    assert len(one) + len(loops) >= 8
    steps = {way: peers.step_of(gradient, opt) for way, gradient in one.items()}
    for way, step in (steps | loops).items():
        own = jax.tree.map(jnp.copy, params)
        state = step.init(own) if way in loops else (own, opt.init(own))
        got = jax.tree.leaves(step(state, batch)[0])[0]
        np.testing.assert_array_equal(got, expected, err_msg=way)


# -- The GPU's part --------------------------------------------------------------------


# It compiles fifteen programs.
def test_the_gpu_benchmark_runs_from_end_to_end():
    said = run("gpu.py", "--tiny", JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    for title in ("Peak", "Tokens a second", "A micro-step", "Kernels"):
        assert title in said
    [planned] = re.findall(r"^ga_optax +- +([\d,]+) +[\d,]+$", said, re.M)
    assert int(planned.replace(",", "")) > 0

"""The benchmarks run, their files are consistent, the pictures are up to date."""

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
    """Runs a script of the benchmarks; warnings are errors there, too."""
    command = "-W", "error", f"benchmarks/{script}", *arguments
    return python(*command, cwd=ROOT, PYTHONWARNINGS="error", **environment)


# -- What the files say ----------------------------------------------------------------


def check_provenance(result):
    assert result["command"].startswith("python benchmarks/")
    assert re.match(r"\d{4}-\d\d-\d\d", result["date"])
    assert result["device"]
    for name in ("jax", "jaxlib", "optax", "python"):
        assert re.match(r"\d+\.\d+", result["versions"][name])


def over(field, below):
    """A field over another number of its row or file, for each way."""
    return lambda result, row, way: row[field][way] / below(result, row)


def param_bytes(result, row):
    return row.get("param_bytes") or result["param_bytes"]


def gradient_bytes(result, row):
    return result["gradient_bytes"]


def floor(result, row):
    ms, k = row["ms"], row["k"]
    return (k > 1) * ms["add"] + ms["plain step"] / k


def undivided(field):
    return lambda result, row: row[field][any_loss.UNDIVIDED]


def million(result, row):
    return 1e6


SWEEP = {
    "over_floor": over("ms", floor),
    "optax_over_it": lambda result, row, way: (
        row["ms"]["optax.MultiSteps"] / row["ms"][way]
    ),
}
# What the README and the pictures show of numbers that are made of others:
# `{file: {rows: {field: of what}}}`.
DERIVED = {
    "any_loss.json": {
        "results": {
            "mb": over("temporaries", million),
            "memory_ratio": over("temporaries", undivided("temporaries")),
            "time_ratio": over("seconds", undivided("seconds")),
        }
    },
    "collectives.json": {"results": {"over_gradient": over("bytes", gradient_bytes)}},
    "memory.json": {
        "results": {
            "mb": over("bytes", million),
            "over_params": over("bytes", param_bytes),
        }
    },
    "sweep.json": dict.fromkeys(("by_size", "by_k", "by_optimizer"), SWEEP),
}
# By compilers that the suite does without.
COMPILED = {
    "accelerators.json": "python benchmarks/accelerators.py --json",
    "head_compiled.json": "python benchmarks/head.py --targets",
}
# By trainers that the suite does without.
OF_TRAINERS = {"trainers.json": "python benchmarks/trainers.py --json"}


def numbers(name, result):
    """What a file says of other numbers in it, and what these make."""
    for group, fields in DERIVED[name].items():
        for row in result[group]:
            for field, due in fields.items():
                for way, found in row[field].items():
                    yield (group, field, way), found, due(result, row, way)


def check(name, result):
    found = list(numbers(name, result))
    assert len(found) >= 6
    for where, said, due in found:
        assert said == pytest.approx(due, rel=1e-12, abs=0), where


@pytest.mark.parametrize("name", DERIVED)
def test_the_published_numbers_of_the_committed_files_are_consistent(name):
    result = record.read(COMMITTED / name)
    check(name, result)
    # The twin: numbers that are a percent off are not.
    for group, fields in DERIVED[name].items():
        for row in result[group]:
            for field in fields:
                row[field] = {way: 1.01 * x or 0.01 for way, x in row[field].items()}
    for where, said, due in numbers(name, result):
        assert said != pytest.approx(due, rel=1e-3, abs=0), where


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
        more = {
            way: n - row["state_leaves"]["optax.MultiSteps"]
            for way, n in row["state_leaves"].items()
        }
        assert set(more.values()) == {0, 2}
    sent = read["collectives.json"]
    for row in sent["results"]:  # the gradient and the value, once
        assert row["bytes"]["ga_optax"] <= sent["gradient_bytes"] + 64
        assert row["work_over_share"]["ga_optax"] == 1
    for row in sent["logical"]:  # the gradient; the value and the weight in n parts
        most = row["ring_bytes"] + 16 * row["devices"]
        assert max(row["wire_bytes"].values()) <= most
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


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The folders of a quick run of all of it, and what it printed."""
    folder = tmp_path_factory.mktemp("quick")
    results, drawn = folder / "results", folder / "pictures"
    done = run("suite.py", "--quick", "--results", results, "--pictures", drawn)
    assert done.returncode == 0, done.stderr
    return results, drawn, done.stdout


# Eleven benchmarks, each in a process of its own, and the pictures.
def test_the_suite_runs_and_writes_consistent_files(quick):
    results, _, _ = quick
    assert {path.name for path in results.iterdir()} == set(suite.COMMANDS)
    for name in suite.COMMANDS:
        result = record.read(results / name)
        check_provenance(result)
        if name in DERIVED:
            check(name, result)


def test_the_suite_prints_one_table_at_its_end(quick):
    results, _, printed = quick
    table = printed.partition("all of it\n")[2]
    header, _, *lines = table.strip().splitlines()
    assert header.split()[:3] == ["case", "k", "unit"]
    rows = suite.rows_of(results)
    assert len(lines) == len(rows) >= 15
    for line, row in zip(lines, rows, strict=True):
        assert line.startswith(row[0])
        assert re.findall(r"\d+\.\d\d|-", line)[-len(suite.COLUMNS) :] == row[3:]


def test_the_suite_draws_what_it_measured(quick):
    results, drawn, _ = quick
    done = run("suite.py", "--quick")  # which would overwrite the measurements
    assert done.returncode == 2
    assert "--quick needs folders of its own" in done.stderr
    for name, (file, _) in pictures.PICTURES.items():
        if file in COMPILED:
            continue
        text = (drawn / f"{name}.svg").read_text()
        assert pictures.digest(results / file) in text


def test_every_file_of_results_is_made_by_the_suite_and_by_its_own_command():
    ours = {p.name for p in COMMITTED.glob("*.json") if not p.name.startswith("gpu_")}
    outside = COMPILED | OF_TRAINERS
    assert ours == {*suite.COMMANDS, *outside}
    starts = {
        name: " ".join(["python", f"benchmarks/{command[0]}", *command[1:]])
        for name, command in suite.COMMANDS.items()
    }
    for name, start in (starts | outside).items():
        result = record.read(COMMITTED / name)
        check_provenance(result)
        assert result["command"].startswith(start), name


# -- The pictures ----------------------------------------------------------------------


def test_the_committed_pictures_were_drawn_from_the_committed_files(tmp_path):
    assert {p.stem for p in PICTURES.glob("*.svg")} == set(pictures.PICTURES)
    for name, (file, _) in pictures.PICTURES.items():
        text = (PICTURES / f"{name}.svg").read_text("utf-8")
        assert pictures.digest(COMMITTED / file) in text
        assert len(text) < 150_000
        changed = tmp_path / file  # the twin: of another file
        changed.write_bytes((COMMITTED / file).read_bytes() + b"\n")
        assert pictures.digest(changed) not in text


def test_the_page_about_ones_own_machine_explains_every_unit_of_the_table():
    text = (ROOT / "docs" / "your_machine.md").read_text("utf-8")
    units = {unit for _, _, unit, *_ in suite.rows_of(COMMITTED)}
    assert len(units) > 5
    assert [unit for unit in sorted(units) if f"| {unit} |" not in text] == []


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_every_line_of_a_picture_has_a_name_and_shows_numbers_of_its_file(name):
    file, draw = pictures.PICTURES[name]
    figure = draw(record.read(COMMITTED / file))
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(names) == len(set(names)) >= 3
    lines = [line for ax in figure.axes for line in ax.get_lines()]
    named = [line for line in lines if not line.get_label().startswith("_")]
    shown = {float(y) for line in named for y in line.get_ydata()}
    assert len(shown) > 5
    assert shown <= set(numbers_in(record.read(COMMITTED / file)))
    pictures.plt.close(figure)


def numbers_in(result):
    """All numbers of a file."""
    return [float(x) for x in jax.tree.leaves(result) if isinstance(x, int | float)]


# -- The ways --------------------------------------------------------------------------

# optax.MultiSteps keeps a running mean, and a third of an integer would round.
K, ROWS = 2, 2


def integer_loss(params, x):
    """A loss whose gradients are integers: no way may round."""
    return jnp.mean(jnp.sum(x @ params["w"], axis=1))


def integers():
    rng = np.random.default_rng(0)
    batch = 4.0 * rng.integers(-4, 5, size=(K * ROWS, 3)).astype(np.float32)
    params = {"w": jnp.asarray(rng.integers(-4, 5, size=(3, 2)), jnp.float32)}
    # The gradient of the mean over rows, and a step of SGD with rate 1.
    expected = params["w"] - batch.mean(axis=0)[:, None]
    return params, jnp.asarray(batch), np.asarray(expected)


def all_ways(k):
    opt = optax.sgd(1.0)
    one = peers.in_one_call(integer_loss, k, ROWS)
    one[peers.UNROLLED] = peers.unrolled_loop(integer_loss, k)
    many = peers.in_many_calls(integer_loss, opt, k)
    ours = peers.ga.MultiSteps(opt, k)
    many["counts"] = peers.HostLoop(integer_loss, ours, k, counts=True)
    return opt, one, many


@pytest.mark.usefixtures("optax_promotion")
def test_every_way_that_is_compared_gives_the_same_parameters():
    params, batch, expected = integers()
    opt, one, many = all_ways(K)
    assert len(one) + len(many) >= 8
    for way, gradient in one.items():
        copy_ = jax.tree.map(jnp.copy, params)
        state, _ = peers.step_of(gradient, opt)((copy_, opt.init(params)), batch)
        np.testing.assert_array_equal(state[0]["w"], expected, err_msg=way)
    for way, loop in many.items():
        state, _ = loop(loop.init(params), batch)
        got = jax.tree.leaves(state)[0]
        np.testing.assert_array_equal(got, expected, err_msg=way)


def test_a_way_that_drops_a_micro_batch_gives_others():
    params, batch, expected = integers()
    opt, one, _ = all_ways(K)
    dropped = batch.at[-ROWS:].set(0.0)
    state, _ = peers.step_of(one[peers.SCAN], opt)((params, opt.init(params)), dropped)
    assert np.any(np.asarray(state[0]["w"]) != expected)


# -- The GPU's part --------------------------------------------------------------------


def test_the_gpu_benchmark_refuses_other_devices(tmp_path):
    for arguments in ([], ["--out", tmp_path], ["--parts", "window"]):
        done = run("gpu.py", *arguments, JAX_PLATFORMS="cpu")
        assert done.returncode == 1
        assert "need a GPU, but JAX's first device is cpu" in done.stderr
    done = run("gpu.py", "--tiny", "--out", tmp_path, JAX_PLATFORMS="cpu")
    assert done.returncode == 2
    assert "--tiny measures nothing" in done.stderr
    assert list(tmp_path.iterdir()) == []


# It compiles fifteen programs.
def test_the_gpu_benchmark_runs_from_end_to_end():
    done = run("gpu.py", "--tiny", JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    assert done.returncode == 0, done.stderr
    for title in ("Peak", "Tokens a second", "A micro-step", "Kernels"):
        assert title in done.stdout
    [planned] = re.findall(r"^ga_optax +- +([\d,]+) +[\d,]+$", done.stdout, re.M)
    assert int(planned.replace(",", "")) > 0

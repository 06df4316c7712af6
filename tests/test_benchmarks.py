"""The benchmarks run, their files are consistent, the pictures are up to date."""

import importlib
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytestmark = pytest.mark.published

pytest.importorskip("matplotlib")

ROOT = pathlib.Path(__file__).parents[1]
COMMITTED = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"

sys.path.insert(0, str(ROOT / "benchmarks"))
any_loss, head, hlo, peers, pictures, record, reference_model, suite = (
    importlib.import_module(name)
    for name in (
        *("any_loss", "head", "hlo", "peers", "pictures"),
        *("record", "reference_model", "suite"),
    )
)
sys.path.remove(str(ROOT / "benchmarks"))


def run(script, *arguments, **environment):
    """Runs a script of the benchmarks; warnings are errors there, too."""
    return subprocess.run(
        [sys.executable, "-W", "error", f"benchmarks/{script}", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        | {"PYTHONWARNINGS": "error"}
        | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


# -- What the files say ----------------------------------------------------------------


def check_provenance(result):
    assert result["command"].startswith("python benchmarks/")
    assert re.match(r"\d{4}-\d\d-\d\d", result["date"])
    assert result["device"]
    for name in ("jax", "jaxlib", "optax", "python"):
        assert re.match(r"\d+\.\d+", result["versions"][name])


def of(*path, over):
    """A field over another one, for each way: `row[path][way] / over(result, row)`."""
    return lambda result, row, way: _in(row, path, way) / over(result, row)


def _in(row, path, way):
    for key in path:
        row = row[key]
    return row[way] if isinstance(row, dict) else row


def beside(group, **same):
    """Of the row with another side, but for the same optimizer, say."""
    return lambda result, row: next(
        other
        for other in result[group]
        if all(other[key] == value for key, value in same.items())
        and other.get("optimizer") == row.get("optimizer")
    )


def one(number):
    return lambda result, row: number


def param_bytes(result, row):
    return row.get("param_bytes") or result["param_bytes"]


def gradient_bytes(result, row):
    return row.get("gradient_bytes") or result["gradient_bytes"]


def ms_of(result, side, row):
    return beside("rows", side=side)(result, row)["ms"]


def floor(result, row):
    return ms_of(result, "add", row) + ms_of(result, "plain step", row) / result["k"]


def swept_floor(result, row):
    ms, k = row["ms"], row["k"]
    return (k > 1) * ms["add"] + ms["plain step"] / k


def parts(result, row):
    k, s = result["num_microbatches"], row["seconds"]
    return k * s["gradient"] + (k - 1) * s["add"] + s["update"]


def fastest_peer(result, row):
    return min(row["seconds"][way] for way in row["ratio_to_parts"] if "ga" not in way)


def by_hand(result, row, way):
    inside = "ga_optax", "plain scan", "optax.microbatching"
    return row["ms"][way] / row["ms"]["plain scan" if way in inside else "two programs"]


def best_head(result, row, column):
    rows = {row["way"]: row["temporaries"] for row in result["results"]}
    return row["temporaries"][column] / min(rows[w][column] for w in head.BY_HAND)


def whole_head(result, row, column):
    [whole] = [r for r in result["results"] if r["way"] == head.UNDIVIDED]
    return row["seconds"][column] / whole["seconds"][column]


def a_window(result, row, target):
    inside, last = (row[f"bytes_{at}"][target] for at in ("inside", "closes"))
    return ((result["num_microbatches"] - 1) * inside + last) / row["param_bytes"]


def needed_mb(result, row, target):
    kept = ("temporaries", "arguments", "outputs")
    return (sum(row[x][target] for x in kept) - row["aliased"][target]) / 1e6


def alone(result, row):
    window = "dense" if row in result["window_dense"] else "reference"
    return result[f"window_{window}"][0]


def over_alone(with_one):
    def ratio(result, row, target):
        whole = alone(result, row)
        gradient = whole["aliased"][target] / 3 if with_one else 0
        return row["temporaries"][target] / (whole["temporaries"][target] + gradient)

    return ratio


def ring(result, row):
    n = row["devices"]
    return 2 * (n - 1) / n * result["gradient_bytes"]


def of_optax(field):
    return lambda result, row: row[field]["optax.MultiSteps"]


def scan(field):
    return lambda result, row: row[field]["plain scan"]


def undivided(field):
    return lambda result, row: row[field][any_loss.UNDIVIDED]


MILLION = one(1e6)
MICRO_STEP = {
    "rows": {
        "over_floor": of("ms", over=floor),
        "optax_over_it": lambda result, row, way: (
            ms_of(result, "optax.MultiSteps", row) / row["ms"]
        ),
    }
}
SWEEP = {
    "floor": lambda result, row, way: swept_floor(result, row),
    "over_floor": of("ms", over=swept_floor),
    "optax_over_it": lambda result, row, way: (
        row["ms"]["optax.MultiSteps"] / row["ms"][way]
    ),
    "million_parameters": of("parameters", over=MILLION),
}
HEAD = {
    "results": {
        "mb": of("temporaries", over=MILLION),
        "over_best": best_head,
        "time_ratio": whole_head,
    }
}
OF_A_WINDOW = {
    "needed_mb": needed_mb,
    "over_alone": over_alone(False),
    "over_alone_and_one": over_alone(True),
    "over_params_copied": of("copied", over=param_bytes),
}
ON_DEVICES = {
    "over_gradient": lambda result, row, way: (
        sum(row["by_kind"].values()) / row["gradient_bytes"]
    ),
    "over_gradient_in_loop": of("bytes_in_loop", over=gradient_bytes),
    "needed_mb": of("needed", over=MILLION),
}
# What is made of other numbers: `{file: {rows: {field: of what}}}`.
DERIVED = {
    "accelerators.json": {
        "micro_step": {
            "over_params_inside": of("bytes_inside", over=param_bytes),
            "over_params_closes": of("bytes_closes", over=param_bytes),
            "over_params_window": a_window,
            "over_params_temporaries": of("temporaries", over=param_bytes),
        },
        **dict.fromkeys(("window_dense", "window_reference"), OF_A_WINDOW),
        **dict.fromkeys(("devices_8", "devices_64", "devices_256"), ON_DEVICES),
    },
    "any_loss.json": {
        "results": {
            "mb": of("temporaries", over=MILLION),
            "memory_ratio": of("temporaries", over=undivided("temporaries")),
            "time_ratio": of("seconds", over=undivided("seconds")),
        }
    },
    "collectives.json": {
        "results": {"over_gradient": of("bytes", over=gradient_bytes)},
        "logical": {
            "ring_bytes": lambda result, row, way: ring(result, row),
            "over_ring": of("wire_bytes", over=lambda *x: ring(*x) or 1),
            "over_all_reduce": of("ms", over=lambda _, row: row["ms"]["all-reduce"]),
        },
    },
    "compile_time.json": {
        "results": {"over_plain_scan": of("seconds", over=scan("seconds"))},
        "large": {"over_plain_scan": of("seconds", "ga_optax", over=scan("seconds"))},
        "rows_meet": {
            f"{what}_over_plain_scan": of(what, "ga_optax", over=scan(what))
            for what in ("seconds", "lines")
        },
    },
    "dispatch.json": {"results": {"over_optax": of("us", over=of_optax("us"))}},
    "leaves.json": {
        "results": {
            "param_mb": of("param_bytes", over=MILLION),
            "over_params": of("temporaries", over=param_bytes),
            "over_hand": by_hand,
        }
    },
    "memory.json": {
        "results": {
            "mb": of("bytes", over=MILLION),
            "over_params": of("bytes", over=param_bytes),
        }
    },
    "micro_step.json": MICRO_STEP,
    "micro_step_muon.json": MICRO_STEP,
    "sweep.json": dict.fromkeys(("by_size", "by_k", "by_optimizer"), SWEEP),
    "window.json": {
        "results": {
            "sum_of_parts": lambda result, row, way: parts(result, row),
            "ratio_to_parts": of("seconds", over=parts),
            "ratio_to_fastest_peer": of("seconds", over=fastest_peer),
        }
    },
    "head.json": HEAD,
    "head_compiled.json": HEAD,
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
                if isinstance(row.get(field), dict):
                    for way, found in row[field].items():
                        yield (group, field, way), found, due(result, row, way)
                elif field in row:
                    yield (group, field), row[field], due(result, row, None)


def check(name, result):
    found = 0
    for where, said, due in numbers(name, result):
        assert said == pytest.approx(due, rel=1e-12, abs=0), where
        found += 1
    assert found >= 6


@pytest.mark.parametrize("name", DERIVED)
def test_the_numbers_of_the_committed_files_are_consistent(name):
    result = record.read(COMMITTED / name)
    check_provenance(result)
    check(name, result)
    # The twin: numbers that are a percent off are not.
    changed = {
        group: [
            {field: off(x) if field in fields else x for field, x in row.items()}
            for row in result[group]
        ]
        for group, fields in DERIVED[name].items()
    }
    for where, said, due in numbers(name, result | changed):
        assert said != pytest.approx(due, rel=1e-3, abs=0), where


def off(x):
    if isinstance(x, dict):
        return {way: off(number) for way, number in x.items()}
    return 1.01 * x or 0.01


def test_the_claims_of_the_committed_files_hold():
    read = {name: record.read(COMMITTED / name) for name in DERIVED}
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
    rows = record.read(COMMITTED / "trainers.json")["results"]
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
    for name, start in outside.items():
        assert record.read(COMMITTED / name)["command"].startswith(start), name
    for name, command in suite.COMMANDS.items():
        recorded = record.read(COMMITTED / name)["command"]
        start = " ".join(["python", f"benchmarks/{command[0]}", *command[1:]])
        assert recorded.startswith(start), name


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
def test_every_number_is_in_the_picture_and_every_line_has_a_name(name):
    file, draw = pictures.PICTURES[name]
    result = record.read(COMMITTED / file)
    figure = draw(result)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(names) == len(set(names)) >= 3
    shown = {
        float(y)
        for ax in figure.axes
        for line in ax.get_lines()
        if not line.get_label().startswith("_")
        for y in line.get_ydata()
    }
    groups = ("by_size", "by_k", "by_optimizer", "results")
    rows = [row for group in groups for row in result.get(group, [])]
    fields = {
        "memory": ["mb"],
        "collectives": ["over_gradient"],
        "micro_step": ["over_floor"],
        "any_loss": ["time_ratio", "memory_ratio"],
    }.get(name, [])
    expected = {y for row in rows for f in fields for y in row[f].values()}
    compiled = pictures.COMPILED_FIELDS if name == "accelerators" else {}
    for part, field in compiled.items():
        drawn = [row for row in result[part] if row["way"] in pictures.STYLES]
        expected |= {y for row in drawn for y in row[field].values()}
    # A line at 1 is the undivided batch.
    ways = peers.OURS_PLAIN, any_loss.UNDIVIDED
    left_out = {row[f].get(way) for row in rows for f in fields for way in ways}
    assert expected - left_out <= shown <= expected
    pictures.plt.close(figure)


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


# -- Reading HLO -----------------------------------------------------------------------


def test_the_additions_of_a_window_on_this_machine_are_one_gradient():
    params = jax.eval_shape(lambda: peers.make_params(3, 16))
    shapes = {p.shape for p in jax.tree.leaves(params)}
    shapes |= {shape[1:] for shape in shapes}
    batch = jax.ShapeDtypeStruct((4 * 5, 16), jnp.float32)
    elements = sum(p.size for p in jax.tree.leaves(params))
    for way, gradient in peers.in_one_call(peers.scanned_loss, 4, 5).items():
        text = jax.jit(gradient).lower(params, batch).compile().as_text()
        adds = hlo.count_adds(text, shapes, k=4)
        assert adds.separate_elements == elements, way


def test_the_arithmetic_of_matrix_products_is_counted_in_loops():
    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda h, _: (h @ w, None), x, length=5)[0])

    w, x = (
        jax.ShapeDtypeStruct((8, 8), "float32"),
        jax.ShapeDtypeStruct((4, 8), "float32"),
    )
    text = jax.jit(loss).lower(w, x).compile().as_text()
    assert hlo.dot_flops(text) == 5 * 2 * 4 * 8 * 8


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
    kernels = done.stdout.partition("Kernels")[2]
    params = jax.eval_shape(lambda: reference_model.init(reference_model.TINY))
    shapes = reference_model.gradient_shapes(params)
    matrices = [x for x in jax.tree.leaves(params) if x.shape in shapes]
    elements = f"{sum(x.size for x in matrices):,}"
    ways = kernels.splitlines()[3:]
    assert len(ways) == 6
    # Ours has sums that come out in float32, which need no kernel to be added; without
    # passes (the next row) it is the plain scan.
    assert [elements in way for way in ways] == [False] + [True] * 5, kernels


def test_the_results_are_json_that_any_reader_reads(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        record.write(tmp_path / "a.json", {"ratio": float("nan")})
    record.write(tmp_path / "b.json", {"ratio": 1.5})
    result = json.loads((tmp_path / "b.json").read_text())
    assert result["ratio"] == 1.5
    assert {"command", "date", "device", "versions"} <= set(result)

"""The benchmarks run, their files are consistent, the pictures are up to date."""

import copy
import functools
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
any_loss, hlo, peers, pictures, record, reference_model, suite = (
    importlib.import_module(name)
    for name in (
        *("any_loss", "hlo", "peers", "pictures"),
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


def equal(a, b):
    assert a == pytest.approx(b, rel=1e-12, abs=0)


def check_provenance(result):
    assert result["command"].startswith("python benchmarks/")
    assert re.match(r"\d{4}-\d\d-\d\d", result["date"])
    assert result["device"]
    for name in ("jax", "jaxlib", "optax", "python"):
        assert re.match(r"\d+\.\d+", result["versions"][name])


def check_micro_step(result):
    for name in {row["optimizer"] for row in result["rows"]}:
        row_of = {r["side"]: r for r in result["rows"] if r["optimizer"] == name}
        ms = {side: row["ms"] for side, row in row_of.items()}
        equal(ms["floor"], ms["add"] + ms["plain step"] / result["k"])
        for side, row in row_of.items():
            equal(row["over_floor"], ms[side] / ms["floor"])
            equal(row["optax_over_it"], ms["optax.MultiSteps"] / ms[side])
        assert row_of["ga apply_gradients"]["temporaries_mb"] >= 0


def check_sweep(result):
    for row in (*result["by_size"], *result["by_k"], *result["by_optimizer"]):
        ms, k = row["ms"], row["k"]
        add = 0 if k == 1 else ms["add"]
        equal(ms["floor"], add + ms["plain step"] / k)
        for side, over in row["over_floor"].items():
            equal(over, ms[side] / ms["floor"])
            equal(row["optax_over_it"][side], ms["optax.MultiSteps"] / ms[side])
        equal(row["million_parameters"], row["parameters"] / 1e6)


def check_window(result):
    k = result["num_microbatches"]
    for row in result["results"]:
        s = row["seconds"]
        parts = k * s["gradient"] + (k - 1) * s["add"] + s["update"]
        equal(row["sum_of_parts"], parts)
        for way, ratio in row["ratio_to_parts"].items():
            equal(ratio, s[way] / parts)
        fastest = min(s[way] for way in row["ratio_to_parts"] if "ga" not in way)
        for way, ratio in row["ratio_to_fastest_peer"].items():
            equal(ratio, s[way] / fastest)


def check_memory(result):
    elements = 2 * result["layers"] * result["width"] * 4 * result["width"]
    assert result["param_bytes"] == 4 * elements
    for row in result["results"]:
        for way, size in row["bytes"].items():
            equal(row["mb"][way], size / 1e6)
            equal(row["over_params"][way], size / result["param_bytes"])


def check_collectives(result):
    for row in result["results"]:
        for way, size in row["bytes"].items():
            equal(row["over_gradient"][way], size / result["gradient_bytes"])
            assert row["work_over_share"][way] >= 1
        # The gradient and the value, once.
        assert row["bytes"]["ga_optax"] <= result["gradient_bytes"] + 64
        assert row["work_over_share"]["ga_optax"] == 1
    for row in result["logical"]:
        n = row["devices"]
        equal(row["ring_bytes"], 2 * (n - 1) / n * result["gradient_bytes"])
        for way, size in row["wire_bytes"].items():
            equal(row["over_ring"][way], size / (row["ring_bytes"] or 1))
            # The gradient, and the value and the weight in n parts.
            assert size <= row["ring_bytes"] + 16 * n
            equal(row["over_all_reduce"][way], row["ms"][way] / row["ms"]["all-reduce"])


def check_compile_time(result):
    for row in result["results"]:
        for way, ratio in row["over_plain_scan"].items():
            equal(ratio, row["seconds"][way] / row["seconds"]["plain scan"])
    for row in result["large"]:
        ours, scan = row["seconds"]["ga_optax"], row["seconds"]["plain scan"]
        equal(row["over_plain_scan"], ours / scan)
    for row in result["rows_meet"]:
        for what in ("seconds", "lines"):
            ours = row[what]["ga_optax"]
            equal(row[f"{what}_over_plain_scan"], ours / row[what]["plain scan"])


def check_dispatch(result):
    for row in result["results"]:
        theirs = "optax.MultiSteps"
        for way, ratio in row["over_optax"].items():
            equal(ratio, row["us"][way] / row["us"][theirs])
            more = row["state_leaves"][way] - row["state_leaves"][theirs]
            assert more == (0 if way == theirs else 2)


def check_leaves(result):
    for row in result["results"]:
        equal(row["param_mb"], row["param_bytes"] / 1e6)
        for way, size in row["temporaries"].items():
            equal(row["over_params"][way], size / row["param_bytes"])
        inside = ("ga_optax", "plain scan", "optax.microbatching")
        for way, ratio in row["over_hand"].items():
            hand = "plain scan" if way in inside else "two programs"
            equal(ratio, row["ms"][way] / row["ms"][hand])


def check_accelerators(result):
    k = result["num_microbatches"]
    for name in ("libtpu", "jax-cuda12-plugin"):
        assert re.match(r"\d+\.\d+", result["versions"][name])
    for row in result["micro_step"]:
        size = row["param_bytes"]
        for target, last in row["bytes_closes"].items():
            inside = row["bytes_inside"][target]
            equal(row["over_params_inside"][target], inside / size)
            equal(row["over_params_closes"][target], last / size)
            equal(row["over_params_window"][target], ((k - 1) * inside + last) / size)
            most = row["temporaries"][target]
            equal(row["over_params_temporaries"][target], most / size)
    for alone, *others in (result["window_dense"], result["window_reference"]):
        assert alone["way"] == "one micro-batch"
        for row in (alone, *others):
            for target, size in row["temporaries"].items():
                total = size + row["arguments"][target] + row["outputs"][target]
                equal(row["needed_mb"][target], (total - row["aliased"][target]) / 1e6)
                peak = alone["temporaries"][target]
                equal(row["over_alone"][target], size / peak)
                with_one = size / (peak + alone["aliased"][target] / 3)
                equal(row["over_alone_and_one"][target], with_one)
                copied = row["copied"][target] / row["param_bytes"]
                equal(row["over_params_copied"][target], copied)
    for number in DEVICES:
        for row in result[f"devices_{number}"]:
            size, sent = row["gradient_bytes"], sum(row["by_kind"].values())
            equal(row["over_gradient"], sent / size)
            equal(row["over_gradient_in_loop"], row["bytes_in_loop"] / size)
            equal(row["needed_mb"], row["needed"] / 1e6)


DEVICES = (8, 64, 256)
COMPILED = "accelerators.json"  # by compilers that the suite does without


def check_any_loss(result):
    for row in result["results"]:
        seconds, sizes = row["seconds"], row["temporaries"]
        for way, size in sizes.items():
            equal(row["mb"][way], size / 1e6)
            equal(row["memory_ratio"][way], size / sizes[any_loss.UNDIVIDED])
            ratio = seconds[way] / seconds[any_loss.UNDIVIDED]
            equal(row["time_ratio"][way], ratio)
            # In float32, of a gradient of many terms; the plain scan's is another one.
            near, far = row["difference"][way] < 1e-4, row["difference"][way] > 1e-3
            assert near if way in any_loss.EXACT else far


CHECKS = {
    "accelerators.json": check_accelerators,
    "collectives.json": check_collectives,
    "compile_time.json": check_compile_time,
    "dispatch.json": check_dispatch,
    "leaves.json": check_leaves,
    "memory.json": check_memory,
    "micro_step.json": check_micro_step,
    "micro_step_muon.json": check_micro_step,
    "sweep.json": check_sweep,
    "window.json": check_window,
    "any_loss.json": check_any_loss,
}


def leaves(content, path=()):
    """The path of every number in a file that is a ratio, or made of others."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from leaves(value, (*path, key))
    elif isinstance(content, list):
        for i, value in enumerate(content):
            yield from leaves(value, (*path, i))
    elif isinstance(content, float):
        yield path


@pytest.mark.parametrize("name", CHECKS)
def test_the_numbers_of_the_committed_files_are_consistent(name):
    result = record.read(COMMITTED / name)
    check_provenance(result)
    CHECKS[name](result)


def test_a_ratio_that_is_not_of_its_numbers_is_found():
    derived = ("over", "ratio", "sum_of_parts", "mb", "million_parameters")
    for name, check in CHECKS.items():
        result = record.read(COMMITTED / name)
        found = 0
        for path in leaves(result):
            text = "/".join(map(str, path))
            # What was counted, and is made of no other number in the file.
            counted = "temporaries" in text or "work_over_share" in text
            if counted or not any(word in text for word in derived):
                continue
            changed = copy.deepcopy(result)
            within = changed
            for key in path[:-1]:
                within = within[key]
            within[path[-1]] = 1.01 * within[path[-1]] or 0.01
            with pytest.raises(AssertionError):
                check(changed)
            found += 1
        assert found >= 6, name


# -- The suite, quick ------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The folders of a quick run of all of it, and what it printed."""
    folder = tmp_path_factory.mktemp("quick")
    results, drawn = folder / "results", folder / "pictures"
    done = run("suite.py", "--quick", "--results", results, "--pictures", drawn)
    assert done.returncode == 0, done.stderr
    return results, drawn, done.stdout


# Ten benchmarks, each in a process of its own, and the pictures.
def test_the_suite_runs_and_writes_consistent_files(quick):
    results, _, _ = quick
    assert {path.name for path in results.iterdir()} == set(suite.COMMANDS)
    for name in suite.COMMANDS:
        result, check = record.read(results / name), CHECKS[name]
        check_provenance(result)
        check(result)


def test_the_suite_prints_one_table_at_its_end(quick):
    results, _, printed = quick
    table = printed.partition("all of it\n")[2]
    head, _, *lines = table.strip().splitlines()
    assert head.split()[:3] == ["case", "k", "unit"]
    rows = suite.rows_of(results)
    assert len(lines) == len(rows) >= 15
    for line, row in zip(lines, rows, strict=True):
        assert line.startswith(row[0])
        assert re.findall(r"\d+\.\d\d|-", line)[-len(suite.COLUMNS) :] == row[3:]


def test_the_suite_draws_what_it_measured(quick):
    results, drawn, _ = quick
    for name, (file, _) in pictures.PICTURES.items():
        if file == COMPILED:
            continue
        text = (drawn / f"{name}.svg").read_text()
        assert pictures.digest(results / file) in text


def test_a_quick_run_does_not_overwrite_the_measurements():
    done = run("suite.py", "--quick")
    assert done.returncode == 2
    assert "--quick needs folders of its own" in done.stderr


def test_every_file_of_results_is_made_by_the_suite_and_by_its_own_command():
    ours = {p.name for p in COMMITTED.glob("*.json") if not p.name.startswith("gpu_")}
    assert ours == {*suite.COMMANDS, COMPILED}
    recorded = record.read(COMMITTED / COMPILED)["command"]
    assert recorded.startswith("python benchmarks/accelerators.py --json")
    for name, command in suite.COMMANDS.items():
        recorded = record.read(COMMITTED / name)["command"]
        start = " ".join(["python", f"benchmarks/{command[0]}", *command[1:]])
        assert recorded.startswith(start), name


# -- The pictures ----------------------------------------------------------------------


def test_to_trace_a_program_took_at_most_half_again_of_a_plain_scan():
    large = record.read(COMMITTED / "compile_time.json")["large"]
    assert {row["program"] for row in large} >= {"100 leaves", "5000 leaves"}
    assert all(row["over_plain_scan"] <= 1.5 for row in large)


def test_levels_took_a_few_times_what_a_plain_scan_takes_whatever_their_number():
    rows = record.read(COMMITTED / "compile_time.json")["rows_meet"]
    assert {row["program"] for row in rows} >= {"10 batch norms", "100 batch norms"}
    for row in rows:
        most = 3 if "attention" in row["program"] else 6
        assert row["seconds_over_plain_scan"] <= most
        assert row["lines_over_plain_scan"] <= 5


def test_the_committed_pictures_were_drawn_from_the_committed_files():
    assert {p.stem for p in PICTURES.glob("*.svg")} == set(pictures.PICTURES)
    for name, (file, _) in pictures.PICTURES.items():
        text = (PICTURES / f"{name}.svg").read_text("utf-8")
        assert pictures.digest(COMMITTED / file) in text
        assert len(text) < 150_000


def test_a_picture_of_another_file_is_found(tmp_path):
    for name, (file, _) in pictures.PICTURES.items():
        changed = tmp_path / file
        changed.write_bytes((COMMITTED / file).read_bytes() + b"\n")
        text = (PICTURES / f"{name}.svg").read_text("utf-8")
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


def test_the_stand_in_for_shampoo_is_its_preconditioner():
    g = np.random.default_rng(0).normal(size=(3, 5))

    def root(m):
        values, vectors = np.linalg.eigh(m)
        return (vectors * np.maximum(values, 1e-6) ** -0.25) @ vectors.T

    left, right = 1e-6 * np.eye(3) + g @ g.T, 1e-6 * np.eye(5) + g.T @ g
    with jax.enable_x64(True):
        opt = peers.shampoo_like(0.5)
        grads = {"w": jnp.asarray(g)}
        updates, _ = opt.update(grads, opt.init(grads))
        got = np.asarray(updates["w"])
    # Singular values become (s²)^(-1/4) s (s²)^(-1/4) = 1 for those that g has.
    np.testing.assert_allclose(got, -0.5 * root(left) @ g @ root(right), rtol=1e-9)
    np.testing.assert_allclose(np.linalg.svd(got)[1], 0.5, rtol=1e-5)


# -- Reading HLO -----------------------------------------------------------------------

BUFFER = "f32[1024]{0:T(1024)}"
MICRO_STEP = f"""HloModule micro_step, is_scheduled=true

%leave (p: ({BUFFER})) -> {BUFFER} {{
  %p = ({BUFFER}) parameter(0)
  ROOT %same = {BUFFER} get-tuple-element(%p), index=0
}}

%update (p: ({BUFFER})) -> {BUFFER} {{
  %p = ({BUFFER}) parameter(0)
  %old = {BUFFER} get-tuple-element(%p), index=0
  ROOT %new = {BUFFER} multiply(%old, %old)
}}

ENTRY %main (closes: pred[], total: f32[1024], grad: f32[1024]) -> f32[1024] {{
  %closes = pred[] parameter(0)
  %total = {BUFFER} parameter(1)
  %grad = {BUFFER} parameter(2)
  %fetch = (f32[1024]{{0:T(1024)S(1)}}, {BUFFER}, u32[]{{:S(2)}}) copy-start(%grad)
  %here = f32[1024]{{0:T(1024)S(1)}} copy-done(%fetch)
  %sum = {BUFFER} add(%total, %here)
  COPY
  %all = ({BUFFER}) tuple(%sum)
  ROOT %next = {BUFFER} conditional(%closes, %all, %all), BRANCHES
}}
""".replace("BRANCHES", "branch_computations={%update, %leave}")


@pytest.mark.parametrize(
    ("pick", "passes", "kernels"), [(min, 3, 1), (max, 5, 2)], ids=["inside", "closes"]
)
def test_a_micro_step_is_counted_by_branch(pick, passes, kernels):
    """The gradient is read once, though it goes through a TPU's fast memory."""
    found = hlo.traffic(MICRO_STEP.replace("COPY", ""), pick)
    assert found == hlo.Traffic(passes * 4096, kernels, copied=0, branches=1)
    copy = f"%copied = {BUFFER} copy(%sum)"
    found = hlo.traffic(MICRO_STEP.replace("COPY", copy), pick)
    assert found == hlo.Traffic((passes + 2) * 4096, kernels + 1, 4096, branches=1)


def test_the_kernels_of_a_loop_count_as_often_as_it_runs():
    inner = "%k = f32[64,32]{1,0} add(%a, %b)"
    more = hlo.traffic(module("", inner)).kernels - hlo.traffic(module("")).kernels
    assert more == 8 * 24
    unknown = module("", inner).replace('"known_trip_count":{"n":"24"}', "")
    with pytest.raises(ValueError, match="no known trip count"):
        hlo.traffic(unknown)


GEMM = (
    'custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
    '{"alpha_real":1,"alpha_imag":0,"beta":%s,"epilogue":"DEFAULT"}}'
)
LOOP = (
    'condition=%%c, body=%%%s, backend_config={"known_trip_count":{"n":"%d"}}, '
    'metadata={op_name="while"}'
)


def module(body, inner="", trips=8, inner_trips=24):
    """A window: `body` in a loop over micro-batches, `inner` in one over layers."""
    outer, within = LOOP % ("micro_step", trips), LOOP % ("layer", inner_trips)
    return f"""HloModule jit_step, is_scheduled=true

%add_one (p0: f32[64,32], p1: f32[64,32]) -> f32[64,32] {{
  %p0 = f32[64,32]{{1,0}} parameter(0)
  %p1 = f32[64,32]{{1,0}} parameter(1)
  ROOT %sum = f32[64,32]{{1,0}} add(%p0, %p1)
}}

%add_slice (p0: f32[24,64,32], p1: f32[1,64,32]) -> f32[24,64,32] {{
  %p0 = f32[24,64,32]{{2,1,0}} parameter(0)
  %p1 = f32[1,64,32]{{2,1,0}} parameter(1)
  %sum = f32[1,64,32]{{2,1,0}} add(%p1, %p1)
  ROOT %put = f32[24,64,32]{{2,1,0}} dynamic-update-slice(%p0, %sum)
}}

%multiply_and_add (p0: bf16[8,64], p1: bf16[8,32], p2: f32[64,32]) -> f32[64,32] {{
  %p0 = bf16[8,64]{{1,0}} parameter(0)
  %p1 = bf16[8,32]{{1,0}} parameter(1)
  %p2 = f32[64,32]{{1,0}} parameter(2)
  %dot = f32[64,32]{{1,0}} dot(%p0, %p1), lhs_contracting_dims={{0}}
  ROOT %sum = f32[64,32]{{1,0}} add(%dot, %p2)
}}

%sliced_gemm (p0: bf16[8,64], p1: bf16[8,32], p2: f32[24,64,32]) -> f32[24,64,32] {{
  %p0 = bf16[8,64]{{1,0}} parameter(0)
  %p1 = bf16[8,32]{{1,0}} parameter(1)
  %p2 = f32[24,64,32]{{2,1,0}} parameter(2)
  %slice = f32[64,32]{{1,0}} bitcast(%p2)
  %gemm = f32[64,32]{{1,0}} custom-call(%p0, %p1, %slice), {GEMM % 1}
  ROOT %put = f32[24,64,32]{{2,1,0}} dynamic-update-slice(%p2, %gemm)
}}

%other (p0: f32[8,64]) -> f32[8,64] {{
  %p0 = f32[8,64]{{1,0}} parameter(0)
  ROOT %sum = f32[8,64]{{1,0}} add(%p0, %p0)
}}

%layer (p: (s32[])) -> (s32[]) {{
  {inner}
  ROOT %t = (s32[]) tuple(%i)
}}

%micro_step (p: (s32[])) -> (s32[]) {{
  %x = bf16[8,64]{{1,0}} parameter(0)
  {body}
  %scan = (s32[]) while(%t), {within}
  ROOT %t = (s32[]) tuple(%i)
}}

ENTRY %main (p: f32[64,32]) -> f32[64,32] {{
  %p = f32[64,32]{{1,0}} parameter(0)
  %loop = (s32[]) while(%t), {outer}
  ROOT %adam = f32[64,32]{{1,0}} fusion(%p, %p), kind=kLoop, calls=%add_one
}}
"""


SHAPES = {(64, 32), (24, 64, 32)}
KERNELS = {
    "%k = f32[64,32]{1,0} add(%a, %b)": {"separate": 1, "separate_elements": 2048},
    "%k = f32[64,32]{1,0} fusion(%a, %b), kind=kLoop, calls=%add_one": {
        "separate": 1,
        "separate_elements": 2048,
    },
    "%k = f32[24,64,32]{2,1,0} fusion(%a, %b), kind=kLoop, calls=%add_slice": {
        "separate": 1,
        "separate_elements": 2048,
    },
    "%k = f32[64,32]{1,0} fusion(%a), kind=kCustom, calls=%multiply_and_add": {
        "in_gemm": 1
    },
    # The accumulator is the third operand, and in newer programs space to work in
    # comes along with the result.
    f"%k = (f32[64,32]{{1,0}}, s8[64]{{0}}) custom-call(%x, %y, %acc), {GEMM % 1}": {
        "beta_one": 1
    },
    f"%k = f32[64,32]{{1,0}} custom-call(%x, %y, %acc), {GEMM % '1.0'}": {
        "beta_one": 1
    },
    f"%k = f32[64,32]{{1,0}} custom-call(%x, %y), {GEMM % 0}": {"beta_zero": 1},
    "%k = f32[64,32]{1,0} custom-call(%x, %y, %acc), "
    'custom_call_target="__cublas$lt$matmul", '
    r'backend_config="{\"alpha_real\":1,\"beta\":1,\"epilogue\":\"DEFAULT\"}"': {
        "beta_one": 1
    },
    "%k = f32[24,64,32]{2,1,0} fusion(%x, %y, %z), kind=kCustom, calls=%sliced_gemm": {
        "beta_one": 1
    },
    # An activation, and the product that gives it.
    "%k = f32[8,64]{1,0} fusion(%a), kind=kLoop, calls=%other": {},
    f"%k = bf16[8,64]{{1,0}} custom-call(%x, %y, %acc), {GEMM % 1}": {},
    'custom-call(%x), custom_call_target="__cudnn$fmha"': {},
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_is_counted_for_what_it_is(kernel):
    found = hlo.count_adds(module(kernel), SHAPES, k=8)
    assert found == hlo.Adds(**KERNELS[kernel])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_in_the_loop_over_layers_counts_once_a_layer(kernel):
    found = hlo.count_adds(module("", kernel), SHAPES, k=8)
    once = KERNELS[kernel]
    assert found == hlo.Adds(**{name: 24 * count for name, count in once.items()})


def test_the_optimizer_outside_the_loop_is_not_a_micro_step():
    assert hlo.count_adds(module(""), SHAPES, k=8) == hlo.Adds()
    whole = hlo.count_adds(module(""), SHAPES)
    assert whole == hlo.Adds(separate=1, separate_elements=2048)


def test_a_loop_that_is_not_there_or_of_unknown_length_is_not_counted():
    add = "%k = f32[64,32]{1,0} add(%a, %b)"
    assert hlo.count_adds(module(add), SHAPES, k=4) is None
    unknown = module("", add).replace('"known_trip_count":{"n":"24"}', "")
    assert hlo.count_adds(unknown, SHAPES, k=8) is None


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="must be an optimised HLO module"):
        hlo.count_adds("nothing", SHAPES)


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


def test_the_reference_model_has_the_sizes_that_it_is_named_for():
    config = reference_model.Config()
    params = jax.eval_shape(functools.partial(reference_model.init, config))
    stacked = jax.tree.leaves(params["layers"])
    layer = sum(x.size for x in stacked) // config.layers
    assert layer == 15_206_400
    accumulated = [*stacked, params["head"], params["norm_final"]]
    assert round(4 * sum(x.size for x in accumulated) / 2**20) == 1520
    tokens = jax.ShapeDtypeStruct((8, config.length + 1), jnp.int32)
    with jax.numpy_dtype_promotion("standard"):
        loss = functools.partial(reference_model.loss, config)
        value, grads = jax.eval_shape(jax.value_and_grad(loss), params, tokens)
    assert value.shape == ()
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


@pytest.mark.usefixtures("optax_promotion")
def test_the_reference_model_sees_only_what_came_before():
    config = reference_model.TINY
    params = reference_model.init(config)
    loss = jax.jit(functools.partial(reference_model.loss, config))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocabulary, (1, config.length + 1))
    each = []
    for last in (3, 5):  # two values of the last token, which is a label alone
        tokens[0, -1] = last
        each.append(float(loss(params, jnp.asarray(tokens, jnp.int32))))
    assert each[0] != each[1]
    # Untrained, it knows nothing: about the logarithm of the vocabulary.
    assert abs(each[0] - np.log(config.vocabulary)) < 1.5


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

"""The notebooks run, their assertions and the answers of their exercises hold."""

import json
import os
import sys

import pytest
from helpers import ROOT

nbclient = pytest.importorskip("nbclient", reason="it runs notebooks: the group `dev`")
nbformat = pytest.importorskip("nbformat")

pytestmark = pytest.mark.published

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
assert [path.name[0] for path in NOTEBOOKS] == list("123456")


IMPORTS = "import functools, inspect, warnings"
# The folded answers, as code that runs after the cells of the notebook.
ANSWERS = {
    "1": """
K = 8
eight, losses_eight = train(ga.value_and_grad(loss, K))
create = functools.partial(
    ga.flax.TrainState.create, apply_fn=network.apply, params=params
)
eight_calls, _ = train_one_by_one(create(tx=ga.MultiSteps(opt, K)))
np.testing.assert_allclose(losses_eight, losses, rtol=1e-4)
for run in (eight, eight_calls):
    assert distance(run.params, state.params) < 2**-12
assert ga.stats(eight_calls.opt_state).micro_steps == eight_calls.step == 480
assert eight_calls.optimizer_steps == STEPS
""",
    "1, unequal rows": """
ends = [0, 2, 6, 10, 16]
parts = [slice(*pair) for pair in zip(ends, ends[1:])]
grads = [jax.grad(squared_error)(w, x[part], y[part]) for part in parts]
rows = [len(x[part]) for part in parts]
whole = jax.grad(squared_error)(w, x, y)
assert rows == [2, 4, 4, 6]
assert not jnp.allclose(sum(grads) / 4, whole)
assert jnp.allclose(sum(n * g for n, g in zip(rows, grads)) / 16, whole)
tx = ga.MultiSteps(optax.sgd(1.0), 4)
new, opt_state = w, tx.init(w)
for n, g in zip(rows, grads):
    new, opt_state = ga.apply_gradients(tx, g, opt_state, new, weight=n)
assert jnp.allclose(w - new, whole)
""",
    "1, another micro-batch": """
K = 4
source = inspect.getsource(train_without_one)
exec(source.replace("(30, 0)", "(10, 2)").replace("i == 30", "i == 10"))
assert distance(train_without_one().params, state.params) > 2**-12
""",
    "2": """
equal = batch | {"mask": jnp.tile(jnp.arange(32) < 9, (32, 1)).astype(jnp.float32)}
report = ga.verify(token_mean, params, equal, K)
assert report.ok
assert report.cause is ga.Cause.ROUNDING
assert ga.verify(lambda p, b: mean_over_batch(p, b) / K, params, batch, K).ok
""",
    "2, a median": """
source = inspect.getsource(normalised)
exec(source.replace("hidden.mean(axis, ", "jnp.median(hidden, axis, "))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert off_under_the_law(batch_norm) < 1e-5
assert "sort" in str(caught[0].message)
report = str(ga.batch_dependencies(batch_norm, K)(params, batch))
assert "sort, computed whole" in report
""",
    "3": """
options = {"batch_size": BATCH, "candidates": [1, 2, 4, 8, 16]}


def planned(memory_limit):
    with contextlib.redirect_stderr(io.StringIO()):
        return ga.plan(
            make_step, params, state, x, memory_limit=memory_limit, **options
        )


try:
    planned("60MB")
    raise AssertionError
except ga.NothingFitsError as error:
    assert "the smallest need is" in str(error)
assert 60 < 4 * parameters < 68
fitting = [k for k, mb in zip(KS, needs["ga_optax"]) if mb <= 100]
assert planned("100MB").num_microbatches == fitting[0]
is_new = jax.__version_info__ >= (0, 11, 1)
assert fitting[0] == 4 or not is_new
""",
    "3, SGD": """
opt = optax.sgd(1e-3)
state = jax.eval_shape(opt.init, params)
less = needs["ga_optax"][-1] - megabytes(make_step(16))
assert abs(less - 2 * parameters) < 0.1
opt = optax.adam(1e-3)
state = jax.eval_shape(opt.init, params)
""",
    "3, without a checkpoint": """
exec(inspect.getsource(loss).replace("@jax.checkpoint", ""))
assert all(megabytes(make_step(k)) > mb for k, mb in zip(KS, needs["ga_optax"]))
assert planned("120MB").num_microbatches == 8 or not is_new
""",
    "4": """
audit = ga.audit(compiled(by_hand(1)), mesh)
assert [c.kind for c in audit.collectives] == ["all-reduce"]
assert not audit.in_loop
audit = ga.audit(compiled(neighbours), mesh)
gathers = sorted(c.num_bytes for c in audit.collectives if c.kind == "all-gather")
assert gathers == [4096, 16384]
with jax.enable_x64(True):
    rest = [np.delete(a, np.s_[256:384], 0) for a in (x64, y64)]
    assert difference(jax.grad(loss)(exact, rest), undivided) > 2**-26
""",
    "5": """
assert 0.2 < np.mean(np.asarray(estimates)[:, 0] < 0) < 0.3
K, ROWS = 4, 16
exec(inspect.getsource(window))
params, state, estimates = jax.tree.map(jnp.copy, start), still.init(start), []
still = ga.MultiSteps(optax.sgd(0.0), K, track_norm=True)
for step in range(300):
    params, state, estimate = window(still, params, state, key, step)
    estimates.append(estimate)
assert low < noise_scale(estimates)[0] < high
squares = np.asarray(estimates)[:, 0]
assert 0.4 < squares.std() / squares.mean() < 0.5
""",
    "6": """
with jax.enable_x64(True):
    exact = jax.tree.map(np.float64, (params, batch))
    undivided = jax.jit(jax.grad(contrastive))(*exact)
    off = relative(jax.jit(each_by_itself(contrastive, 2))(*exact)[1], undivided)
assert 3e-3 < off < 5e-3

source = inspect.getsource(normalised)
exec(source.replace("axis=0", "axis=1, keepdims=True"))
report = str(ga.batch_dependencies(normalised, 16)(layers, rows))
assert "No row needs another: 1 forward pass and 1 backward pass" in report


def penalised(params, pairs):
    squares = [jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)]
    return contrastive(params, pairs) + sum(squares)


value, grads = jax.jit(ga.value_and_grad(penalised, 16))(params, batch)
assert jnp.allclose(value, penalised(params, batch))
assert relative(grads, jax.grad(penalised)(params, batch)) < 1e-5
""",
}

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@each
def test_the_notebook_runs_and_its_assertions_hold(path, tmp_path, monkeypatch):
    # A new user's environment, but that our own sources are found.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    notebook = nbformat.read(path, as_version=4)
    answers = [code for name, code in ANSWERS.items() if name[0] == path.name[0]]
    notebook.cells += map(nbformat.v4.new_code_cell, [IMPORTS, *answers])
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=place).execute()
    for output in outputs_of(notebook):
        assert output.get("name") != "stderr", output["text"]


def outputs_of(notebook):
    return [x for cell in notebook["cells"] for x in cell.get("outputs", [])]


@each
def test_the_notebook_asserts_draws_installs_and_keeps_small_outputs(path):
    assert path.stat().st_size < 300_000
    notebook = json.loads(path.read_text("utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert "%pip install" in "".join(code[0]["source"])
    assert any("assert " in line for cell in code for line in cell["source"])
    outputs = outputs_of(notebook)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert "/home/" not in json.dumps(outputs)

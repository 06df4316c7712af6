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
assert [path.name[0] for path in NOTEBOOKS] == list("12")


IMPORTS = "import functools, inspect"
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
def penalised(params, pairs):
    squares = [jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)]
    return contrastive(params, pairs) + sum(squares)


value, grads = jax.jit(ga.value_and_grad(penalised, 16))(params, batch)
assert jnp.allclose(value, penalised(params, batch))
assert relative(grads, jax.grad(penalised)(params, batch)) < 1e-5
""",
    "2, less memory": """
try:
    planned("20MB")
    raise AssertionError
except ga.NothingFitsError as error:
    assert "the smallest need is" in str(error)
""",
    "2, in the loop": """
[repeated] = [c for c in audit(8).in_loop if c.kind == "all-reduce"]
assert repeated.times == 8
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

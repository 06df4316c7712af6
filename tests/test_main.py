"""`ga-optax`: the page, the exit status, and what it says to typos."""

import json
import pathlib
import re
import shlex
import sys
import tomllib

import helpers
import pytest

from ga_optax.__main__ import main

ROOT = pathlib.Path(__file__).parents[1]

MODULE = """
import jax
import jax.numpy as jnp
import ga_optax as ga

# -- What `verify` takes

def make_inputs():
    mask = jnp.array([1.0] * 5 + [0] * 3)
    batch = {"x": jnp.arange(16.0).reshape(8, 2) / 8, "mask": mask}
    return {"w": jnp.array([1.0, -2.0])}, batch

def errors(params, batch):
    return (batch["x"] @ params["w"]) ** 2

def mean(params, batch):
    return jnp.mean(errors(params, batch))

def total(params, batch):
    return jnp.sum(errors(params, batch))

def masked(params, batch):
    return jnp.sum(errors(params, batch) * batch["mask"]) / jnp.sum(batch["mask"])

def masked_with_aux(params, batch):
    return masked(params, batch), batch["mask"].sum()

given = lambda batch, count: count

def turned():
    params, batch = make_inputs()
    return params, {**batch, "x": batch["x"].T}

of_turned = lambda params, batch: mean(params, {"x": batch["x"].T})
with_key = lambda: (*make_inputs(), jax.random.key(0))
keyed = lambda params, batch, key: mean(params, batch) * jax.random.uniform(key)
one_thing = lambda: 1
misused = lambda params, batch: ga.value_and_grad(mean, 3)(params, batch)[0]
number = 3

def broken(*args):
    raise RuntimeError("a bug of the user's")

class Losses:
    mean = staticmethod(mean)

# -- What `plan` takes

def make_step(num_microbatches):
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w))

    def step(w, x):
        rows = x.reshape(num_microbatches, -1, x.shape[1])
        add = lambda total, x: (total + jax.grad(loss)(w, x), None)
        return w - jax.lax.scan(add, jnp.zeros_like(w), rows)[0]

    return jax.jit(step, donate_argnums=0)

shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
shapes = lambda: (shape(64, 64), shape(4096, 64))
ragged = lambda: (shape(64, 64), {"x": shape(4096, 64), "scale": shape()})
"""

HLO = """\
HloModule jit_step

ENTRY %main (p: f32[8,4]) -> f32[16,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %r = f32[16,4]{1,0} all-gather(%p), replica_groups={{0,1}}, dimensions={0}
}
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "code.txt").write_text(HLO)
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "users_code.py").write_text(MODULE)
    (tmp_path / "users_bug.py").write_text("import not_installed_anywhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield tmp_path
    for name in ("users_code", "users_bug"):
        sys.modules.pop(name, None)


@pytest.fixture
def run(capsys):
    """Status, output and errors of a command; names stand for those of the module."""

    def command(line):
        words = shlex.split(line)
        for i, word in enumerate(words[1:3], 1):
            if not re.search(r"users_|:|\.txt|^-", word):
                words[i] = f"users_code:{word}"
        try:
            status = main(words)
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return command


VERIFY, PLAN = "make_inputs -k 4", "--memory-limit 1GiB --candidates 1 16"
STEP, FEW = "plan make_step shapes", "--candidates 1 16 --memory-limit"
SAME, ALL = "the same gradient", "num_microbatches=1 of 4096 examples"
TURNED = "verify of_turned turned -k 4"
TOO_LITTLE = "fit into 1000.00 KiB, but no candidate does"
BY_AUX = "--has-aux --weight-fn users_code:given"


@pytest.mark.grid(6, 16)
@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        (f"verify mean {VERIFY}", 0, SAME),
        (f"verify Losses.mean {VERIFY}", 0, SAME),
        (f"verify total {VERIFY}", 1, "(SCALE)"),
        (f"verify masked {VERIFY}", 2, "(NOT_FINITE)"),
        (f"verify masked_with_aux {VERIFY} {BY_AUX}", 0, SAME),
        (f"{TURNED} --batch-axes \"{{'x': 1, 'mask': 0}}\"", 0, SAME),
        ("verify keyed with_key -k 4", 1, "(RANDOMNESS)"),
        (f"{STEP} {PLAN}", 0, ALL),
        (f"{STEP} --batch-size 4096 {PLAN}", 0, ALL),
        (f"{STEP} {FEW} 1500KiB", 0, "num_microbatches=16 of 256 examples needs 1."),
        pytest.param(f"{STEP} {FEW} 1000KiB", 1, TOO_LITTLE, marks=pytest.mark.cpu),
        ("audit code.txt", 0, "1 collective, none in a loop"),
    ],
)
def test_the_status_says_what_the_page_does(run, line, status, said):
    found, out, err = run(line)
    assert found == status, err
    assert said in " ".join(out.split())
    assert err == "" or "plan" in line  # progress


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("verify users_code make_inputs -k 2", "Write users_code:loss"),
        ("verify users_code.py:mean make_inputs -k 2", "Write users_code:mean"),
        ("verify no_such_module:f make_inputs -k 2", "no 'no_such_module'"),
        ("verify nothing make_inputs -k 2", "no attribute 'nothing'"),
        ("verify totals make_inputs -k 2", "Did you mean total?"),
        ("verify Losses.man make_inputs -k 2", "Did you mean mean?"),
        ("verify number make_inputs -k 2", "it is of type int. Name"),
        ("verify mean one_thing -k 2", "a value of type int"),
        ("verify mean make_inputs -k 3", "must divide"),
        (f"verify mean {VERIFY} --batch-axes 'x: 1'", "as Python writes it"),
        ("plan make_step one_thing", "must return the arguments of the step"),
        ("plan make_step ragged", "no common axis 0. Pass --batch-size"),
        pytest.param(STEP, "memory_limit must be given", marks=pytest.mark.cpu),
        (f"{STEP} --target mac", "target must be one of"),
        ("audit notes.txt", "cannot read"),
        # Code that raises: with its traceback.
        (f"verify broken {VERIFY}", "users_code.py | a bug of the user's"),
        (f"verify misused {VERIFY}", "users_code.py | must divide the batch axis"),
        (f"verify users_bug:loss {VERIFY}", "users_bug.py | not_installed_anywhere"),
        (f"plan make_step broken {PLAN}", "users_code.py | a bug of the user's"),
        (f"plan make_step ragged --batch-size 4096 {PLAN}", "users_code.py | reshape"),
    ],
)
def test_what_is_wrong_is_status_2_and_says_what_to_do(run, line, said):
    status, _, err = run(line)
    assert status == 2
    place, *of_code = said.split(" | ")
    assert {part in " ".join(err.split()) for part in (place, *of_code)} == {True}
    assert ("Traceback" in err) == bool(of_code)


@pytest.mark.parametrize(
    ("line", "status", "due"),
    [
        (f"verify masked {VERIFY}", 2, '"cause": "NOT_FINITE" | "ok": false'),
        (f"{STEP} {PLAN}", 0, '"num_microbatches": 1'),
        (f"{STEP} {FEW} 1000KiB", 1, '"message": | no candidate does'),
        ("audit code.txt", 0, '"in_loop": []'),
    ],
)
def test_as_json_it_is_the_report(run, line, status, due):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    found, out, _ = run(f"{line} --json")
    report = json.dumps(json.loads(out, parse_constant=refuse))
    assert found == status
    assert {part in report for part in due.split(" | ")} == {True}


@pytest.mark.parametrize("line", ["--help", "verify --help"])
def test_the_help_is_a_page_to_read(run, line):
    status, out, _ = run(line)
    assert status == 0
    assert "ga-optax verify" in out or "ga-optax COMMAND" in out
    assert max(map(len, out.split("\n"))) <= 100


def test_the_version_is_that_of_the_package(run):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert run("--version") == (0, f"ga-optax {project['version']}\n", "")
    assert project["scripts"] == {"ga-optax": "ga_optax.__main__:main"}
    assert run("")[0] == 2


@pytest.mark.slow
def test_it_runs_as_a_module_in_a_directory_with_the_users_code(module):
    command = ["verify", "users_code:total", "users_code:make_inputs", "-k", "2"]
    done = helpers.python("-m", "ga_optax", *command, cwd=module)
    assert done.returncode == 1, done.stderr
    assert "2 times too small" in done.stdout

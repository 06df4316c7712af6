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

def given(batch, count):
    return count

def turned():
    params, batch = make_inputs()
    return params, {**batch, "x": batch["x"].T}

def of_turned(params, batch):
    return mean(params, {"x": batch["x"].T})

def with_key():
    return (*make_inputs(), jax.random.key(0))

def keyed(params, batch, key):
    return mean(params, batch) * jax.random.uniform(key)

def one_thing():
    return 1

def broken(*args):
    raise RuntimeError("a bug of the user's")

def misused(params, batch):
    return ga.value_and_grad(mean, 3)(params, batch)[0]

class Losses:
    mean = staticmethod(mean)

number = 3

# -- What `plan` takes

def make_step(num_microbatches):
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w))

    def step(w, x):
        rows = x.reshape(num_microbatches, -1, x.shape[1])
        add = lambda total, x: (total + jax.grad(loss)(w, x), None)
        return w - jax.lax.scan(add, jnp.zeros_like(w), rows)[0]

    return jax.jit(step, donate_argnums=0)

def shapes():
    shape = jax.ShapeDtypeStruct
    return shape((64, 64), jnp.float32), shape((4096, 64), jnp.float32)

def ragged():
    w, x = shapes()
    return w, {"x": x, "scale": jax.ShapeDtypeStruct((), jnp.float32)}

"""

HLO = """\
HloModule jit_step

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %r = f32[8,4]{1,0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
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
        names = [
            x if re.search(r"users_|:|\.txt|^-", x) else f"users_code:{x}"
            for x in words[1:3]
        ]
        try:
            status = main([words[0], *names, *words[3:]])
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return command


VERIFY, PLAN = "make_inputs -k 4", "--memory-limit 1GiB --candidates 1 16"
STEP, FEW = "plan make_step shapes", "--candidates 1 16 --memory-limit"
SAME, ALL = "The same gradient", "num_microbatches=1 of 4096 examples"
TURNED = "verify of_turned turned -k 4"


@pytest.mark.grid(6, 16)
@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        (f"verify mean {VERIFY}", 0, SAME),
        (f"verify Losses.mean {VERIFY}", 0, SAME),
        (f"verify total {VERIFY}", 1, "(SCALE)"),
        (f"verify masked {VERIFY}", 2, "(NOT_FINITE)"),
        (
            f"verify masked_with_aux {VERIFY} --has-aux --weight-fn users_code:given",
            0,
            SAME,
        ),
        (f"{TURNED} --batch-axes \"{{'x': 1, 'mask': 0}}\"", 0, SAME),
        ("verify keyed with_key -k 4", 1, "(RANDOMNESS)"),
        (f"{STEP} {PLAN}", 0, ALL),
        (f"{STEP} --batch-size 4096 {PLAN}", 0, ALL),
        (f"{STEP} {FEW} 1500KiB", 0, "num_microbatches=16 of 256 examples needs 1."),
        (f"{STEP} {FEW} 1000KiB", 1, "fit into 1000.00 KiB, but no candidate does"),
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
        (STEP, "memory_limit must be given"),  # a CPU has none
        (f"{STEP} --target mac", "target must be one of"),
        ("audit notes.txt", "cannot read"),
        # Code that raises: with its traceback.
        (f"verify broken {VERIFY}", "users_code.py | a bug of the user's"),
        (f"verify misused {VERIFY}", "users_code.py | must divide the batch axis"),
        (f"verify users_bug:loss {VERIFY}", "users_bug.py | not_installed_anywhere"),
        (f"plan make_step broken {PLAN}", "users_code.py | a bug of the user's"),
        (
            f"plan make_step ragged --batch-size 4096 {PLAN}",
            "users_code.py | reshape",
        ),
    ],
)
def test_what_is_wrong_is_status_2_and_says_what_to_do(run, line, said):
    status, _, err = run(line)
    assert status == 2
    place, *parts = said.split(" | ")
    assert [part for part in (place, *parts) if part not in " ".join(err.split())] == []
    assert ("Traceback" in err) == bool(parts)


@pytest.mark.parametrize(
    ("line", "status", "due"),
    [
        (f"verify masked {VERIFY}", 2, {"cause": "NOT_FINITE", "ok": False}),
        (f"{STEP} {PLAN}", 0, {"num_microbatches": 1}),
        ("audit code.txt", 0, {"in_loop": []}),
    ],
)
def test_as_json_it_is_the_report(run, line, status, due):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    found, out, _ = run(f"{line} --json")
    report = json.loads(out, parse_constant=refuse)
    assert found == status
    assert {name: report[name] for name in due} == due


def test_as_json_a_plan_that_does_not_fit_is_its_message(run):
    status, out, _ = run(f"{STEP} {FEW} 1000KiB --json")
    assert status == 1
    assert "no candidate does" in json.loads(out)["message"]


@pytest.mark.parametrize("arguments", [["--help"], ["verify", "--help"]])
def test_the_help_is_a_page_to_read(capsys, arguments):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 0
    out = capsys.readouterr().out
    assert "ga-optax verify" in out or "ga-optax COMMAND" in out
    assert max(map(len, out.split("\n"))) <= 100


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    assert capsys.readouterr().out == f"ga-optax {project['version']}\n"
    assert project["scripts"] == {"ga-optax": "ga_optax.__main__:main"}
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2


@pytest.mark.slow
def test_it_runs_as_a_module_in_a_directory_with_the_users_code(module):
    command = ["verify", "users_code:total", "users_code:make_inputs", "-k", "2"]
    done = helpers.python("-m", "ga_optax", *command, cwd=module)
    assert done.returncode == 1, done.stderr
    assert "2 times too small" in done.stdout

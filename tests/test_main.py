"""`ga-optax verify`: the page, the exit status, and what it says to typos."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap
import tomllib

import pytest

import ga_optax as ga
from ga_optax.__main__ import main

ROOT = pathlib.Path(__file__).parents[1]

MODULE = """
import jax
import jax.numpy as jnp
import ga_optax as ga

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

def with_aux(params, batch):
    return mean(params, batch), batch

def masked_with_aux(params, batch):
    return masked(params, batch), batch["mask"].sum()

def given(batch, count):
    return count

def turned():
    params, batch = make_inputs()
    return params, {**batch, "x": batch["x"].T}

def of_turned(params, batch):
    return mean(params, {"x": batch["x"].T})

def count(batch):
    return batch["mask"].sum()

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
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "users_code.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "users_bug.py").write_text("import not_installed_anywhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield tmp_path
    for name in ("users_code", "users_bug"):
        sys.modules.pop(name, None)


def verify(loss, *options, make_inputs="make_inputs", k="4"):
    names = [f"users_code:{name}" for name in (loss, make_inputs)]
    return main(["verify", *names, "--num-microbatches", k, *options])


@pytest.mark.grid(1, 2)
@pytest.mark.parametrize(
    ("loss", "options", "status", "word"),
    [
        ("mean", (), 0, "The same gradient"),
        ("Losses.mean", (), 0, "The same gradient"),
        ("with_aux", ("--has-aux",), 0, "The same gradient"),
        ("total", (), 1, "(SCALE)"),
        ("masked", (), 2, "(NOT_FINITE)"),
        ("masked", ("--weight-fn", "users_code:count"), 0, "The same gradient"),
        (
            "masked_with_aux",
            ("--has-aux", "--weight-fn", "users_code:given"),
            0,
            "The same gradient",
        ),
    ],
)
def test_it_prints_the_page_and_the_status_says_whether_it_is_equal(
    module, capsys, loss, options, status, word
):
    assert verify(loss, *options) == status
    out, err = capsys.readouterr()
    assert word in out
    assert err == ""


@pytest.mark.exhaustive
def test_it_is_told_of_axes_as_accumulate_is(module, capsys):
    axes = "{'x': 1, 'mask': 0}"
    assert verify("of_turned", "--batch-axes", axes, make_inputs="turned") == 0
    assert capsys.readouterr().out.count("The same gradient") == 1
    with pytest.raises(SystemExit):  # the twin
        verify("of_turned", make_inputs="turned")


@pytest.mark.exhaustive
def test_a_key_that_make_inputs_returns_reaches_the_loss(module, capsys):
    assert verify("keyed", make_inputs="with_key") == 1
    assert "(RANDOMNESS)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["users_code", "users_code:make_inputs"], "Write users_code:loss"),
        (["users_code.py:mean", "users_code:make_inputs"], "Write users_code:mean"),
        (["a/users_code.py:mean", "users_code:make_inputs"], "Write users_code:mean"),
        (["no_such_module:f", "users_code:make_inputs"], "no 'no_such_module'"),
        (["users_code:nothing", "users_code:make_inputs"], "no attribute 'nothing'"),
        (["users_code:zzz", "users_code:make_inputs"], "Check the name."),
        (["users_code:totals", "users_code:make_inputs"], "Did you mean total?"),
        (["users_code:Losses.man", "users_code:make_inputs"], "Did you mean mean?"),
        (["users_code:number", "users_code:make_inputs"], "it is of type int. Name"),
        (["users_code:mean", "users_code:one_thing"], "a value of type int"),
        (["users_code:mean", "users_code:make_inputs", "-k", "3"], "must divide"),
        (["users_code:errors", "users_code:make_inputs"], "must be a scalar"),
        (["users_code:with_aux", "users_code:make_inputs"], "Pass has_aux=True"),
        (
            ["users_code:mean", "users_code:make_inputs", "--batch-axes", "x: 1"],
            "as Python writes it",
        ),
        (
            ["users_code:mean", "users_code:make_inputs", "--batch-axes", "{'x': 1}"],
            "a prefix of the batch",
        ),
    ],
)
def test_a_wrong_argument_is_status_2_and_says_what_to_do(
    module, capsys, arguments, words
):
    with pytest.raises(SystemExit) as error:
        main(["verify", "-k", "2", *arguments])
    assert error.value.code == 2
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("loss", "make_inputs", "words"),
    [
        ("broken", "make_inputs", "a bug of the user's"),
        ("mean", "broken", "a bug of the user's"),
        ("misused", "make_inputs", "must divide the batch axis"),
    ],
)
def test_code_that_raises_is_status_2_with_its_traceback(
    module, capsys, loss, make_inputs, words
):
    assert verify(loss, make_inputs=make_inputs) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "users_code.py" in err


def test_a_module_that_fails_to_import_is_status_2_with_its_traceback(module, capsys):
    names = ["users_bug:loss", "users_code:make_inputs"]
    assert main(["verify", *names, "-k", "2"]) == 2
    err = capsys.readouterr().err
    assert "not_installed_anywhere" in err
    assert "users_bug.py" in err


@pytest.mark.parametrize("arguments", [["--help"], ["verify", "--help"]])
def test_the_help_is_a_page_to_read(capsys, arguments):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 0
    out = capsys.readouterr().out
    assert "ga-optax verify" in out or "ga-optax COMMAND" in out
    assert max(map(len, out.split("\n"))) <= 100


@pytest.mark.parametrize(
    ("loss", "status", "cause"), [("total", 1, "SCALE"), ("masked", 2, "NOT_FINITE")]
)
def test_as_json_it_is_the_report(module, capsys, loss, status, cause):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    assert verify(loss, "--json") == status
    report = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert report["cause"] == cause
    assert report["ok"] is False
    assert report["num_microbatches"] == 4


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    assert capsys.readouterr().out == f"ga-optax {project['version']}\n"
    assert project["scripts"] == {"ga-optax": "ga_optax.__main__:main"}


def test_no_command_is_status_2(capsys):
    with pytest.raises(SystemExit) as error:
        main([])
    assert error.value.code == 2


@pytest.mark.exhaustive
def test_it_runs_as_a_module_in_a_directory_with_the_users_code(module):
    run = subprocess.run(
        [
            *(sys.executable, "-m", "ga_optax", "verify"),
            *("users_code:total", "users_code:make_inputs", "--num-microbatches", "2"),
        ],
        capture_output=True,
        text=True,
        cwd=module,
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(ga.__file__).parents[1])},
    )
    assert run.returncode == 1, run.stderr
    assert "2 times too small" in run.stdout
    assert run.stderr == ""

"""`ga-optax plan`: the page, the exit status, and what it says to typos."""

import json
import os
import subprocess
import sys

import pytest
from jax.experimental import topologies

from ga_optax.__main__ import main

MODULE = """
import jax
import jax.numpy as jnp

def make_step(num_microbatches):
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w))

    def step(w, x):
        rows = x.reshape(num_microbatches, -1, x.shape[1])
        add = lambda total, x: (total + jax.grad(loss)(w, x), None)
        return w - jax.lax.scan(add, jnp.zeros_like(w), rows)[0]

    return jax.jit(step, donate_argnums=0)

def make_inputs():
    shape = jax.ShapeDtypeStruct
    return shape((64, 64), jnp.float32), shape((4096, 64), jnp.float32)

def ragged():
    w, x = make_inputs()
    return w, {"x": x, "scale": jax.ShapeDtypeStruct((), jnp.float32)}

def one_thing():
    return 1

def broken(*args):
    raise RuntimeError("a bug of the user's")

def not_jitted(num_microbatches):
    return len
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "users_steps.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "users_steps", raising=False)


def plan(step, inputs, *options):
    return main(["plan", f"users_steps:{step}", f"users_steps:{inputs}", *options])


FEW = ("--candidates", "1", "16")
LIMIT = ("--memory-limit", "1GiB")


def test_the_page_names_the_fewest_that_fit_and_progress_goes_to_stderr(capsys):
    assert plan("make_step", "make_inputs", "--memory-limit", "1500KiB", *FEW) == 0
    out, err = capsys.readouterr()
    assert "num_microbatches=16 of 256 examples needs 1." in out
    assert out.splitlines()[1].split()[:2] == ["1", "4096"]
    assert "num_microbatches=1: compiling ... " in err
    assert "num_microbatches=16: compiling ... " in err


def test_the_answer_follows_the_limit(capsys):
    assert plan("make_step", "make_inputs", "--memory-limit", "1GB", *FEW) == 0
    assert "num_microbatches=1 of 4096 examples" in capsys.readouterr().out


def test_a_compiler_that_is_not_installed_is_said_without_a_traceback(
    monkeypatch, capsys
):
    def missing(*_, **__):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(SystemExit) as error:
        plan("make_step", "make_inputs", "--target", "h100")
    assert error.value.code == 2
    err = capsys.readouterr().err
    assert 'pip install "ga_optax[target-gpu]"' in err
    assert "topology not implemented for cuda" in err
    assert "Traceback" not in err
    assert len(err) < 800


def test_where_nothing_fits_the_status_is_1_and_the_page_says_what_it_takes(capsys):
    assert plan("make_step", "make_inputs", "--memory-limit", "1000KiB", *FEW) == 1
    out = capsys.readouterr().out
    assert "The step must fit into 1000.00 KiB, but no candidate does" in out
    assert "with num_microbatches=16" in out


def test_as_json_it_is_the_plan_or_the_message(capsys):
    assert plan("make_step", "make_inputs", *LIMIT, *FEW, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_microbatches"] == 1
    assert found["bytes"] == found["candidates"][0]["bytes"] > 0
    few = ("--memory-limit", "1000KiB", *FEW, "--json")
    assert plan("make_step", "make_inputs", *few) == 1
    assert "no candidate does" in json.loads(capsys.readouterr().out)["message"]


@pytest.mark.slow
def test_the_command_runs_as_it_is_printed_in_its_help(tmp_path):
    command = [sys.executable, "-m", "ga_optax", "plan"]
    names = ["users_steps:make_step", "users_steps:make_inputs"]
    where = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [*command, *names, "--memory-limit", "16GiB"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": where, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "num_microbatches=1 of 4096 examples" in done.stdout


@pytest.mark.parametrize(
    ("step", "inputs", "options", "words"),
    [
        ("make_step", "make_inputs", ("--memory-limit", "16G"), "but it is '16G'"),
        ("make_step", "one_thing", (), "must return the arguments of the step"),
        ("make_step", "ragged", (), "no common axis 0. Pass --batch-size"),
        ("make_steps", "make_inputs", (), "Did you mean make_step"),
        ("not_jitted", "make_inputs", LIMIT, "which has no `lower`"),
        (
            "make_step",
            "make_inputs",
            (*LIMIT, "--candidates", "3"),
            "but 3 does",
        ),
        (
            "make_step",
            "make_inputs",
            (*LIMIT, "--batch-size", "0"),
            "must be at",
        ),
        # A CPU has no limit of its own.
        ("make_step", "make_inputs", (), "memory_limit must be given"),
    ],
)
def test_what_was_typed_wrongly_is_said_with_status_2(
    step, inputs, options, words, capsys
):
    with pytest.raises(SystemExit) as stop:
        plan(step, inputs, *options)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert words in " ".join(err.split())
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("step", "inputs"), [("make_step", "broken"), ("broken", "make_inputs")]
)
def test_what_the_users_code_raises_is_shown_with_status_2(step, inputs, capsys):
    assert plan(step, inputs, *LIMIT) == 2
    err = capsys.readouterr().err
    assert "a bug of the user's" in err
    assert "users_steps.py" in err


def test_the_batch_size_can_be_given(capsys):
    options = ("--memory-limit", "1GiB", "--batch-size", "4096", *FEW)
    assert plan("make_step", "ragged", *options) == 2  # its step takes an array
    assert plan("make_step", "make_inputs", *options) == 0

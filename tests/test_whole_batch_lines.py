"""Every meeting of rows names a line of the user's code, in whatever function it is."""

import contextlib
import os
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import whole_losses
import whole_models
import whole_programs
from test_whole_batch_rules import RULES, loss_of

import ga_optax as ga
from ga_optax._calls import savings
from ga_optax._passes import ir, places

pytestmark = pytest.mark.usefixtures("optax_promotion")
HERE = os.path.dirname(__file__) + os.sep


def lines_of(fun, *args, **options):
    found = ga.batch_dependencies(fun, 4, **options)(*args)
    stored = [x.line for x in (*found.meetings, *found.kept)]
    return stored + [line for _, line, _ in found.whole]


def of_losses():
    args = whole_losses.arguments(dtype=np.float32)
    return [(fun, args, {}) for fun in whole_losses.LOSSES.values()]


def of_models():
    args, options = whole_models.arguments(dtype=np.float32), {"has_aux": True}
    return [(fun, args, options) for fun in whole_models.MODELS.values()]


def of_rules():
    [w], batch = whole_programs.arguments(1)
    return [(loss_of(name), (w, batch["x"]), {"has_aux": True}) for name in RULES]


PARTS = 6


@pytest.mark.grid(1, 3)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("programs", [of_losses, of_models, of_rules])
def test_no_line_is_empty_or_of_a_package(programs, part):
    some = programs()[part::PARTS]
    lines = [line for fun, args, more in some for line in lines_of(fun, *args, **more)]
    assert lines
    assert [line for line in lines if not line.startswith(HERE)] == []


def spread(p, b):
    h = b["x"] @ p["i"]
    return jnp.var(h, 0).sum()  # its two sums are in a jitted function of JAX's


def entropies(p, b):
    logits = b["x"] @ p["i"]
    every = logits @ logits.T
    return optax.softmax_cross_entropy(every, jnp.eye(len(every))).mean() ** 2


@pytest.mark.parametrize("fun", [spread, entropies])
def test_what_packages_do_is_said_of_the_line_that_calls_them(fun, monkeypatch):
    args = whole_losses.arguments(dtype=np.float32)
    first = fun.__code__.co_firstlineno
    for line in lines_of(fun, *args):
        path, number, _ = line.split(":", 2)
        assert path == __file__
        assert first < int(number) <= first + 4
    # The twin: an equation in a jitted function knows nothing of its caller.
    monkeypatch.setattr(places, "placed", lambda equation, around: equation)
    lines = lines_of(spread, *args)
    assert "an unknown line" in lines


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        return x


def test_beside_the_line_stands_the_module_inside(monkeypatch):
    x = jnp.ones((16, 4))
    variables = Network().init(jax.random.key(0), x)

    def fun(p, x):
        out, _ = Network().apply(variables | p, x, mutable=["batch_stats"])
        return jnp.mean((out * jnp.linspace(0, 1, 16)[:, None]) ** 2)

    params = {"params": variables["params"]}
    found = ga.batch_dependencies(fun, 4)(params, x)
    sums = [m.line.split(", in ")[1] for m in found.meetings if m.kind == "sum"]
    scopes = [f"Network/BatchNorm_{i}" for i in range(2)]
    assert sorted(set(sums)) == scopes
    rows = [row for row in str(found).splitlines() if "a sum of" in row]
    assert [row.rpartition(", in ")[2] for row in rows] == scopes
    # The twin: by its line alone it is one.
    monkeypatch.setattr(places, "place_of", lambda source, *names: source_line(source))
    found = ga.batch_dependencies(fun, 4)(params, x)
    assert len([row for row in str(found).splitlines() if "a sum of" in row]) == 1


source_line = places.line_of


def test_beside_the_line_stands_the_function_of_a_package_inside():
    def fun(w, x):
        return optax.losses.ntxent(x @ w, jnp.arange(16) % 4) ** 2

    lines = lines_of(fun, jnp.ones((4, 3)), jnp.ones((16, 4)))
    assert any(line.endswith(", in ntxent") for line in lines)
    # JAX's own functions are known by their names in the line.
    lines = lines_of(spread, *whole_losses.arguments(dtype=np.float32))
    assert not any(", in " in line for line in lines)


def test_what_runs_in_no_pass_has_no_line_for_all():
    def text(fun):
        return str(ga.batch_dependencies(fun, 4)(jnp.ones((4, 3)), jnp.ones((16, 4))))

    assert "sort, computed whole" in text(lambda w, x: jnp.mean(jnp.sort(x, 0)))
    assert "In all:" not in text(lambda w, x: jnp.mean(jnp.sort(x, 0)))
    assert "In all:" in text(lambda w, x: jnp.mean(jnp.sort(x @ w, 0)))  # the twin


def test_what_is_hidden_in_a_primitive_is_named():
    """In newer versions of JAX: in older ones nothing is."""
    closed = jax.make_jaxpr(lambda x: jnp.nonzero(x, size=3)[0])(jnp.ones(3))
    names = [ir.name_of(e) for e in ir.equations(closed.jaxpr)]
    assert names
    assert "call_hi_primitive" not in names


# -- Computed whole --------------------------------------------------------------------

W = jnp.ones((4, 8))


def sorted_alone(w, x):
    return jnp.sort(x @ w, 0)[:3].mean()


def said(fun, x, calls=1):
    """The lines of the test that are warned of, where it is called so often."""
    step = jax.jit(ga.value_and_grad(fun, 4))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for i in range(calls):
            step(W, jnp.ones((x + 4 * i, 4)))
    texts = [str(w.message) for w in found]
    assert all("sort, computed whole" in text for text in texts)
    return [int(re.search(re.escape(__file__) + r":(\d+)", text)[1]) for text in texts]


@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit])
def test_what_is_larger_whole_than_a_step_is_said_once_with_its_line(wrap, monkeypatch):
    # Of so small a loss nothing is said.
    assert said(wrap(sorted_alone), 16) == []
    monkeypatch.setattr(savings, "FEW_BYTES", 0)
    monkeypatch.setattr(savings, "_said", set())
    line = sorted_alone.__code__.co_firstlineno + 1
    assert said(wrap(sorted_alone), 16, calls=2) == [line]
    found = ga.batch_dependencies(wrap(sorted_alone), 4)(W, jnp.ones((16, 4)))
    [(name, where, size)] = found.whole
    assert (name, size) == ("sort", 16 * 8)
    assert f":{line}:" in where
    assert "sort, computed whole: 128 numbers" in str(found)


def test_the_name_of_a_scope_is_printed_once():
    def fun(w, x, depth=1):
        with contextlib.ExitStack() as scopes:
            for _ in range(depth):
                scopes.enter_context(jax.named_scope("head"))
            h = x @ w
            return jnp.var(h, 0).sum() ** 2 + jnp.std(h, 0).sum() ** 2

    args = jnp.ones((4, 3)), jnp.ones((16, 4))
    lines = lines_of(fun, *args)
    assert any(line.endswith(", in head") for line in lines)
    assert not any("head/head" in line for line in lines)
    # The twin: two scopes are two.
    assert any("head/head" in x for x in lines_of(lambda w, x: fun(w, x, 2), *args))

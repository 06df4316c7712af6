"""For each pass of the table: that it does something, what it equals, what it leaves.

A pass without a program here fails all of these tests.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._loop import in_place
from ga_optax._passes import ir, notes, table

K, DEVICES, ROWS, WIDTH, LAYERS = 2, 2, 4, 4, 3
EACH = pytest.mark.parametrize("one", table.PASSES, ids=lambda one: one.name)


class Example(NamedTuple):
    """A loss for which a pass does something.

    Attributes:
      loss: of a stack of matrices, and rows.
      kept: one of which it leaves something alone.
      why: how the log says so.
      options: of the call, given a mesh and the specs of the parameters.
      eps: of the dtype in which the loss computes.
      refs: whether the pass needs references.
    """

    loss: Any
    kept: Any
    why: str
    options: Any = lambda mesh: {}
    eps: float = float(np.finfo(np.float32).eps)
    refs: bool = False


def arguments():
    return normal(LAYERS, WIDTH, WIDTH) / 2, normal(K * DEVICES * ROWS, WIDTH, seed=1)


def mean_square(x):
    return jnp.mean(x.astype(jnp.float32) ** 2)


@jax.custom_vjp
def ruled(x):
    return x


ruled.defvjp(lambda x: (x, None), lambda _, g: (g,))


def scanned(w, x, layer=lambda h, w: jnp.tanh(h @ w)):
    return mean_square(jax.lax.scan(lambda h, w: (layer(h, w), None), x, w)[0])


def with_table(w, x, rule=lambda x: x):
    angles = rule(jnp.cos(jnp.arange(WIDTH, dtype=jnp.float32) * 0.3))
    return scanned(w, x, lambda h, w: jnp.tanh(h @ w) * angles[None])


def in_bfloat16(w, x):
    return scanned(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16))


def cast_twice_read(w, x):
    low = w.astype(jnp.bfloat16)
    h = x.astype(jnp.bfloat16)
    return scanned(low, h) + scanned(low, h, lambda h, w: h @ w)


def chosen(w, x):
    """A sharded parameter is used inside a branch."""
    h = jax.lax.cond(x[0, 0] > 0, lambda w: x @ w[0], lambda w: x @ w[1], w)
    return mean_square(h)


def unrolled(w, x, rule=jnp.tanh):
    for i in range(LAYERS):
        x = rule(x @ w[i])
    return mean_square(x)


def product_in_bfloat16(w, x, rule=lambda w: w):
    matrix = rule(w.reshape(WIDTH, LAYERS * WIDTH).astype(jnp.bfloat16))
    return mean_square(jnp.tanh(x.astype(jnp.bfloat16) @ matrix))


def rounded_in_bfloat16(w, x):
    return product_in_bfloat16(w, x, lambda w: jax.lax.reduce_precision(w, 8, 4))


def doubled(w, x):
    """What is computed twice."""
    return scanned(w, x, lambda h, w: jnp.tanh(h @ w) + jnp.tanh(h @ w))


def printing(w, x):
    jax.debug.callback(lambda _: None, x[0, 0])
    return doubled(w, x)


def each(mesh):
    spec = P(None, "data")
    axis = ga.DataAxis("data", mesh=mesh, param_specs=spec, sync="each")
    return {"data_axis": axis}


def logical(mesh):
    return {"data_axis": ga.DataAxis("data", mesh=mesh, logical_devices=2 * DEVICES)}


LOW = float(jnp.finfo(jnp.bfloat16).eps)
EXAMPLES = {
    "constants": Example(
        with_table, lambda w, x: with_table(w, x, ruled), "custom_vjp_call"
    ),
    "casts": Example(
        in_bfloat16, cast_twice_read, "not read by one scan alone", eps=LOW, refs=True
    ),
    "gathered": Example(scanned, chosen, "cond gets parameters", each),
    "repeats": Example(
        unrolled, lambda w, x: unrolled(w, x, lambda h: h * h), "reads a value twice"
    ),
    "products": Example(
        product_in_bfloat16, rounded_in_bfloat16, "out of reduce_precision", eps=LOW
    ),
    "duplicates": Example(doubled, printing, "more than compute", logical),
}


@pytest.fixture
def mesh():
    auto = jax.sharding.AxisType.Auto
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(auto,))


def gradients(example, mesh, **options):
    """Value and gradients of the example."""
    fun = ga.value_and_grad(example.loss, K, **example.options(mesh), **options)
    return jax.jit(fun)(*arguments())


def skip(example):
    if example.refs and not in_place.HAS_REFS:
        pytest.skip("before jax 0.11.1")


def replace(monkeypatch, one, change):
    """Puts another pass in the place of one."""
    new = one._replace(change=change)
    passes = tuple(new if it is one else it for it in table.PASSES)
    monkeypatch.setattr(table, "PASSES", passes)


def doubling(one):
    """The pass, and what doubles the first result of its programs."""

    def change(program, facts):
        jaxpr, consts = one.change(program, facts)
        old, *rest = jaxpr.outvars
        new = type(jaxpr.invars[0])(old.aval)
        more = ir.traced(lambda x: x + x, [old], new, jaxpr.eqns[-1])
        eqns = [*jaxpr.eqns, *more]
        return ir.Program(jaxpr.replace(eqns=eqns, outvars=[new, *rest]), consts)

    return change


@EACH
def test_every_pass_equals_the_call_without_it(one, mesh, monkeypatch):
    """To c·n·eps·Σ|terms|: both are sums of the same terms in other orders."""
    example = EXAMPLES[one.name]
    skip(example)
    w, x = arguments()
    terms = [
        jax.tree.map(jnp.abs, jax.value_and_grad(example.loss)(w, part))
        for part in jnp.split(x, K * DEVICES)
    ]
    most = jax.tree.map(lambda *xs: 16 * example.eps * sum(xs).max(), *terms)
    plain = gradients(example, mesh, optimize=False)

    def differs():
        got = gradients(example, mesh)
        off = jax.tree.map(
            lambda a, b, m: jnp.any(jnp.abs(a - b) > m), got, plain, most
        )
        return any(map(bool, jax.tree.leaves(off)))

    assert not differs()
    replace(monkeypatch, one, doubling(one))  # the twin
    assert differs()


@EACH
def test_every_pass_says_what_it_leaves_alone_and_where(one, mesh):
    example = EXAMPLES[one.name]
    skip(example)

    def said(loss):
        fun = ga.value_and_grad(loss, K, **example.options(mesh))
        with notes.recorded() as lines:
            jax.make_jaxpr(fun)(*arguments())
        return [line for line in lines if line.startswith(f"The pass {one.name!r}")]

    assert said(example.loss) == []
    [line] = said(example.kept)
    assert example.why in line
    assert "test_passes_each.py" in line

"""What layers of a model have in common is partitioned and traced once."""

import jax
import jax.numpy as jnp
import pytest

import ga_optax as ga
from ga_optax._partition.writer import Writer
from ga_optax._passes import ir


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(
    lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.clip(ct, -1, 1) * jnp.cos(x),)
)


def dropped(x):
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, x.shape), x, 0.0)


def remat():
    return jax.checkpoint(lambda x: jnp.tanh(x) * 2)  # each time a new function


LAYERS = {
    "checkpoint": lambda x: remat()(x),
    "jvp": jax.nn.relu,
    "vjp": clipped,
    "draw": dropped,
}


def traced(layer, number, k=2, width=lambda i: 4):
    """The program of a loss with so many layers."""

    def loss(params, x):
        for i, w in enumerate(params):
            x = layer(x[:, :1] * w[None]) + float(i)
        return jnp.mean(x**2)

    params = [jnp.ones(width(i)) for i in range(number)]
    return jax.make_jaxpr(ga.value_and_grad(loss, k))(params, jnp.ones((8, 4)))


@pytest.mark.parametrize("name", LAYERS)
def test_jax_runs_the_rules_of_alike_layers_on_one_program(name, monkeypatch):
    def programs(number):
        every = [
            e
            for s in traced(LAYERS[name], number).eqns
            if s.primitive.name == "scan"
            for e in s.params["jaxpr"].eqns
        ]
        found = [e.params["jaxpr"] for e in every if ir.is_inline(e)]
        return len({id(getattr(x, "jaxpr", x)) for x in found}), len(found)

    (few, calls), (many, more) = map(programs, (2, 7))
    assert few == many
    assert calls < more
    monkeypatch.setattr(Writer, "once", lambda self, make, *its: make())  # the twin
    assert programs(2)[0] < programs(7)[0]

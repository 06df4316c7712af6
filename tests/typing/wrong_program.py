"""The twin: one mistake a line, each of which the type checker has to find."""

import jax
import jax.numpy as jnp
import optax

import ga_optax as ga


def loss(params: jax.Array, batch: jax.Array) -> jax.Array:
    return jnp.mean(params * batch)


def mistakes(params: jax.Array, batch: jax.Array, acc: ga.accumulator.Accumulator):
    tx = ga.MultiSteps(optax.sgd(0.1), 4)
    state = tx.init(params)
    ga.value_and_grad()  # wrong: the loss is missing
    ga.value_and_grad(loss, "4")  # wrong: a string
    ga.value_and_grad(loss, 4, weight_func=None)  # wrong: no such option
    ga.value_and_grad(4, loss)  # wrong: the other way round
    ga.MultiSteps(optax.sgd(0.1), every_k_schedule="4")  # wrong: a string
    ga.MultiSteps(optax.sgd(0.1), 4, use_mean=True)  # wrong: no such option
    ga.apply_gradients(tx, params, state, params, None, True)  # wrong: by keyword alone
    ga.apply_gradients(tx, params, state, params, emit="yes")  # wrong: a string
    ga.flush(optax.sgd(0.1), state, params)  # wrong: does not accumulate
    print(ga.stats(state).step)  # wrong: steps
    print(acc.mean)  # wrong: a function of the module
    ga.plan(loss, params, batch)  # wrong: batch_size is missing
    print(ga.verify(loss, params, batch, 2).reason)  # wrong: cause
    number: int = ga.has_updated(state)  # wrong: an array
    ga.audit(loss)  # wrong: not compiled
    return number, ga.accumulate_gradients  # wrong: no such name

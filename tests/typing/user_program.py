"""A user's program, written with types: the type checker passes, and it runs."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import ga_optax as ga

Params = dict[str, jax.Array]
Batch = dict[str, jax.Array]


def loss(params: Params, batch: Batch) -> jax.Array:
    errors = jnp.square(batch["x"] @ params["w"] - batch["y"])
    return jnp.sum(errors * batch["mask"]) / jnp.sum(batch["mask"])


def tokens(batch: Batch) -> jax.Array:
    return jnp.sum(batch["mask"])


def make_step(num_microbatches: int) -> Any:
    return jax.jit(ga.value_and_grad(loss, num_microbatches))


tx: ga.MultiSteps = ga.MultiSteps(
    optax.adam(1e-2), every_k_schedule=lambda step: 1 + step // 2
)
chain: optax.GradientTransformationExtraArgs = optax.chain(
    optax.clip_by_global_norm(1.0),
    ga.MultiSteps(optax.sgd(0.1), 4, accumulator_dtype=jnp.bfloat16),
)


@jax.jit
def micro_step(
    params: Params, state: optax.OptState, batch: Batch
) -> tuple[optax.Params, optax.OptState]:
    grads = jax.grad(loss)(params, batch)
    return ga.apply_gradients(tx, grads, state, params, weight=tokens(batch))


def main() -> None:
    params: Params = {"w": jnp.zeros(3)}
    x = jnp.arange(24, dtype=jnp.float32).reshape(8, 3) / 24
    batch: Batch = {"x": x, "y": jnp.ones(8), "mask": jnp.ones(8)}

    # Inside one call.
    value, grads = make_step(4)(params, batch)
    add = ga.accumulate(loss, 2, weight_fn=tokens)
    acc: ga.accumulator.Accumulator = ga.accumulator.init(params)
    value, acc = add(acc, params, batch)
    weight: jax.Array = acc.weight
    mean: optax.Updates = ga.accumulator.mean(acc)

    # Across calls.
    state: optax.OptState = tx.init(params)
    new_params, state = micro_step(params, state, batch)
    new_params, state = ga.flush(tx, state, new_params)
    updates, chain_state = chain.update(grads, chain.init(params), params)
    stats: ga.Stats = ga.stats(state)
    steps: jax.Array = stats.steps
    emitted: jax.Array = ga.has_updated(state)

    # What comes back has its type, too.
    report: ga.Report = ga.verify(loss, params, batch, 4, weight_fn=tokens)
    ok: bool = report.ok
    cause: ga.Cause = report.cause
    plan: ga.Plan = ga.plan(
        make_step, params, batch, batch_size=8, memory_limit="1 GiB"
    )
    fits: int = plan.num_microbatches
    audit: ga.Audit = ga.audit(make_step(fits).lower(params, batch).compile())
    kinds: list[str] = [collective.kind for collective in audit.collectives]
    indices: jax.Array = ga.data.window_indices(jax.random.key(0), 0, 100, 8, 4)
    part: ga.blocks.Partition = ga.blocks.partition(params, 1)
    norms = ga.blocks.norms(part, mean)
    grown = ga.MultiSteps(optax.sgd(0.1), lambda step: jnp.minimum(1 + step, 4))

    print(value, weight, updates, chain_state, steps, emitted, ok, cause, kinds)
    print(indices.shape, norms, grown)


if __name__ == "__main__":
    main()

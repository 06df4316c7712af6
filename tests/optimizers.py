"""Every gradient transformation of optax and optax.contrib, found by inspection.

A factory that a newer Optax adds is found by itself, and tested with its defaults.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import optax
import optax.contrib

RATE = 1e-2
ADAM = optax.adam(RATE)
MASK = {"b": False, "w": True}

# Arguments of those that need more than a rate.
ARGUMENTS = {
    "adaptive_grad_clip": {"clipping": 0.1},
    "add_noise": {"eta": 0.1, "gamma": 0.5, "key": 0},
    "apply_if_finite": {"inner": ADAM, "max_consecutive_errors": 3},
    "chain": [optax.clip(1.0), ADAM],
    "clip": {"max_delta": 1.0},
    "clip_by_block_rms": {"threshold": 1.0},
    "clip_by_global_norm": {"max_norm": 1.0},
    "conditionally_mask": {"inner": ADAM, "should_transform_fn": lambda n: n > 0},
    "conditionally_transform": {"inner": ADAM, "should_transform_fn": lambda n: n > 0},
    "ema": {"decay": 0.9},
    "flatten": {"inner": ADAM},
    "freeze": {"mask": MASK},
    "inject_hyperparams": [lambda: optax.inject_hyperparams(optax.sgd)(RATE)],
    "masked": {"inner": ADAM, "mask": MASK},
    "mechanize": {"base_optimizer": ADAM},
    "multi_transform": [{"x": ADAM, "y": optax.sgd(RATE)}, {"b": "x", "w": "y"}],
    "named_chain": [("clip", optax.clip(1.0)), ("adam", ADAM)],
    "noisy_sgd": {"learning_rate": RATE, "key": 0},
    "partition": [{"x": ADAM, "y": optax.sgd(RATE)}, {"b": "x", "w": "y"}],
    "sam": {
        "optimizer": optax.sgd(RATE),
        "adv_optimizer": optax.chain(optax.contrib.normalize(), optax.sgd(0.05)),
    },
    "scale_by_backtracking_linesearch": {"max_backtracking_steps": 4},
    "scale_by_schedule": {"step_size_fn": lambda n: 0.1 * n},
    "scale_by_zoom_linesearch": {"max_linesearch_steps": 4},
    "schedule_free": {"base_optimizer": ADAM, "learning_rate": RATE},
    "selective_transform": {"optimizer": ADAM, "freeze_mask": MASK},
    "split_real_and_imaginary": {"inner": ADAM},
    "stateless": {"f": lambda updates, params: updates},
    "stateless_with_tree_map": {"f": lambda update, param: update},
    "trace": {"decay": 0.9},
    "with_extra_args_support": {"tx": ADAM},
}

# Not optimizers on their own, or not for gradients with the parameters' shapes.
LEFT_OUT = {
    "inject_hyperparams": "tested by name in test_multi_steps_composition.py",
    "inject_stateful_hyperparams": "as inject_hyperparams",
    "lookahead": "takes LookaheadParams, two trees in one",
    "measure_with_ema": "wraps a function of the user's",
    "snapshot": "wraps a function of the user's",
    "scale_by_muon": "needs a tree of dimension numbers; muon makes it",
    "differentially_private_aggregate": "takes one gradient per example",
    "dpsgd": "takes one gradient per example",
}

# Their result depends on the dtype or the moment in which they draw.
RANDOM = {"add_noise", "noisy_sgd"}

# Their updates are differences of parameters, which are stored in the dtype.
DIFFERENCES = {
    "madgrad",
    "scale_by_madgrad",
    "schedule_free",
    "schedule_free_adamw",
    "schedule_free_sgd",
}

# Their slopes divide by differences of singular values, some of which are close: in
# float32 nothing but rounding is left of them, another on each kind of CPU.
DECOMPOSE = {"galore", "scale_by_galore"}

# They loop until a condition holds, which has no reverse mode, on their own either.
NOT_DIFFERENTIABLE = {"lbfgs", "scale_by_zoom_linesearch"}


@functools.cache
def factories():
    """Pairs (name, function that makes the transformation)."""
    found = {}
    for module in (optax, optax.contrib):
        for name, factory in vars(module).items():
            if name.startswith("_") or name in LEFT_OUT or not callable(factory):
                continue
            try:
                signature = inspect.signature(factory)
            except (TypeError, ValueError):
                continue
            if "GradientTransformation" not in str(signature.return_annotation):
                continue
            found[name] = _maker(factory, signature, ARGUMENTS.get(name))
    return found


def _maker(factory, signature, arguments):
    if isinstance(arguments, list):
        return lambda: factory(*arguments)
    if arguments is None:
        arguments = {
            p.name: RATE
            for p in signature.parameters.values()
            if p.default is p.empty
            and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
    return lambda: factory(**arguments)


def problem(dtype):
    """Parameters, two gradients with an exact mean, and a loss."""
    w = jnp.arange(12.0).reshape(4, 3) / 8
    params = {"b": jnp.full(3, 0.5), "w": w - 0.5}
    mean = {"b": jnp.array([0.5, -1.0, 0.25]), "w": 1.0 - w}
    apart = {"b": jnp.full(3, 0.25), "w": jnp.full((4, 3), 0.125)}
    grads = [
        jax.tree.map(jnp.add, mean, apart),
        jax.tree.map(jnp.subtract, mean, apart),
    ]

    def loss(p):
        terms = jax.tree.map(lambda x: jnp.sum(jnp.square(x - 1)), p)
        return terms["b"] + terms["w"]

    cast = lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)  # noqa: E731
    return cast(params), [cast(g) for g in grads], cast(mean), loss


def extra_arguments(name, params, mean, loss):
    """What this transformation wants beside the gradient, and only that."""
    if name == "sam":
        return {}
    if name == "sophia":
        return {"obj_fn": loss}
    if "momo" in name or "polyak" in name or name == "reduce_on_plateau":
        return {"value": loss(params)}
    if "lbfgs" in name or "linesearch" in name:
        return {"value": loss(params), "grad": mean, "value_fn": loss}
    return {}

"""A call at top level with a data axis: a region of the mesh, over that axis alone."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ga_optax._calls.call import Call, DoesNotFitError
from ga_optax._devices import collectives, meshes

WHOLE: Any = PartitionSpec()


class ManualAxisError(DoesNotFitError):
    """`fun` shards something over a data axis that is bound, or over its mesh."""


def over_mesh(
    call: Call,
    run: Callable[..., Any],
    *others: tuple[Any, Any],
    results: Any,
    check_vma: bool,
) -> Any:
    """`run(call, *others)` in a `shard_map` over the data axes.

    Args:
      call: the call at top level.
      run: what a device does with its part of it.
      others: further arguments, each with its specs.
      results: the specs of the results; `gradients(call)` are those of gradients.
      check_vma: as for `jax.shard_map`. JAX has no types for an axis beside the mesh,
        nor for a constraint over all of it.
    """
    options, mesh, axes = call.options, call.mesh, call.options.axes
    operands, specs = call.others, dict.fromkeys(call.others, WHOLE)
    for role in call.roles:
        operands |= call.leaves(role)
        specs |= dict.fromkeys(call.leaves(role), WHOLE)
    lie = [place.spec for place in call.lie()]
    specs |= zip(call.leaves("argnums"), lie, strict=True)
    of_batch = [meshes.split_spec(axes, axis) for axis in call.split_axes]
    specs |= zip(call.leaves("batch_argnums"), of_batch, strict=True)
    inside = call._replace(
        mesh=None,
        specs=jax.tree.structure(call.params).unflatten(lie),
        grad_specs=None if call.grad_specs is None else gradients(call),
    )

    def local(leaves: Any, num_real: Any, *others: Any) -> Any:
        its = options._replace(num_real_microbatches=num_real)
        return run(inside.with_leaves(leaves)._replace(options=its), *others)

    values, of_others = [x for x, _ in others], [spec for _, spec in others]
    in_and_out = (specs, WHOLE, *of_others), results
    mapped = collectives.over_mesh(local, mesh, axes, in_and_out, check_vma)
    return mapped(operands, options.num_real_microbatches, *values)


def gradients(call: Call) -> Any:
    """The specs of gradients, which come back from the region."""
    return jax.tree.structure(call.params).unflatten(
        place.spec for place in call.lie(of_gradients=True)
    )


# -- What JAX says of axes -------------------------------------------------------------


@contextlib.contextmanager
def explained(call: Call) -> Iterator[None]:
    """What JAX says of axes is said in the words of the options."""
    try:
        yield
    except (NameError, NotImplementedError, ValueError) as error:
        text = str(error)
        for words, todo in _NOTES.items():
            if words in text:
                error.add_note(todo)
        names = [name for name in call.axes if f"'{name}'" in text]
        if names and "Manual" in text:
            raise ManualAxisError(f"{_manual(names[0])} JAX says: {error}") from error
        raise


_CLOSED_OVER = (
    "If fun closes over an array that lies on the mesh, pass it as an argument: what "
    "has no role there goes whole to every device."
)
_NOTES = {
    "unbound axis name": "fun communicates over an axis that nothing here binds. With "
    "value_and_grad it needs no collectives over micro-batches, for it sees all rows.",
    "Closing over": f"In terms of ga_optax: {_CLOSED_OVER}",
}


def _manual(name: str) -> str:
    """What to do about a sharding over a data axis that is bound."""
    return (
        "With a data_axis fun must not shard anything over it by a PartitionSpec, "
        f"since it sees the rows of one device, but it names {name!r}. Pass "
        "with_sharding_constraint a NamedSharding, out of which the data axis is "
        "taken, or a PartitionSpec of other axes alone (in Flax, take the name out "
        "of the logical axis rules, in Haliax out of the axis mapping). In your "
        "own jax.shard_map, pass check_vma=False, too. Or pass "
        'sync="each", or no data_axis, and every micro-batch '
        f"is reduced. {_CLOSED_OVER}"
    )


def check_not_reduced(call: Call, loss: Any) -> None:
    """Raises if the loss is that of all devices already."""
    reduced = [name for name in call.axes if name not in meshes.varying(loss)]
    if reduced and meshes.checks_varying():
        raise DoesNotFitError(
            "fun must return the loss of one device's micro-batch, but its loss is the "
            f"same on all devices along {reduced[0]!r}: it is reduced already. Take "
            "the psum or pmean out of fun: the window is reduced once, at its end."
        )

"""A call at top level with a data axis: a region of the mesh, over that axis alone."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ga_optax._calls.call import Call
from ga_optax._calls.devices import DoesNotFitError
from ga_optax._devices import collectives, meshes
from ga_optax._passes import read
from ga_optax._passes.shards import Shard, either

WHOLE: Any = PartitionSpec()


class ManualAxisError(DoesNotFitError):
    """`fun` shards something over a data axis that is bound, or over its mesh."""


def over_mesh(
    call: Call,
    run: Callable[..., Any],
    *others: tuple[Any, Any],
    results: Any,
    check_vma: bool,
    closed_over: Sequence[Any] = (),
) -> Any:
    """`run(call, *others)` in a `shard_map` over the data axes.

    Args:
      call: the call at top level.
      run: the function that each device runs on its part of the call.
      others: further arguments, each with its specs.
      results: the specs of the results; `gradients(call)` are those of gradients.
      check_vma: as for `jax.shard_map`. JAX has no types for an axis beside the mesh,
        nor for a constraint over all of it.
      closed_over: the arrays that `fun` closes over, as far as they are known.
    """
    options, mesh, axes = call.options, call.devices.mesh, call.devices.axes
    operands, specs = call.others, dict.fromkeys(call.others, WHOLE)
    for role in call.roles:
        operands |= call.leaves(role)
        specs |= dict.fromkeys(call.leaves(role), WHOLE)
    of_params = [place.spec for place in call.devices.params]
    specs |= zip(call.leaves("argnums"), of_params, strict=True)
    of_batch = [meshes.split_spec(axes, axis) for axis in call.split_axes]
    specs |= zip(call.leaves("batch_argnums"), of_batch, strict=True)
    inside = call.devices._replace(mesh=None, is_checked=check_vma)
    values, of_others = [x for x, _ in others], [spec for _, spec in others]
    given = {id(x) for x in operands.values()}
    more = {
        -1 - i: x
        for i, x in enumerate(closed_over)
        if collectives.is_operand(x) and id(x) not in given
    }
    known, perhaps = _dims_of_shards(call, call.others | more)
    operands |= {n: x for n, x in more.items() if n in known or n in perhaps}
    specs |= dict.fromkeys(operands.keys() & more.keys(), WHOLE)

    def mapped(dims: Mapping[int, int]) -> Callable[[Any], Any]:
        """The function, to which some operands come split along a dimension."""

        def local(leaves: Any, num_real: Any, *others: Any) -> Any:
            shards = {n: Shard(leaves[n], d, axes) for n, d in dims.items()}
            whole = {n: x.whole() for n, x in shards.items()}
            # What fun closes over it sees as it is outside.
            by_id = {id(more.get(n, whole[n])): x for n, x in shards.items()}
            here = call.with_leaves(leaves | whole)._replace(
                options=options._replace(num_real_microbatches=num_real),
                devices=inside._replace(shards=by_id),
            )
            return run(here, *others)

        of_shards = {n: meshes.split_spec(axes, d) for n, d in dims.items()}
        in_and_out = (specs | of_shards, WHOLE, *of_others), results
        region = collectives.over_mesh(local, mesh, axes, in_and_out, check_vma)
        return lambda args: region(*args)

    args = operands, options.num_real_microbatches, *values
    if not perhaps:
        return mapped(known)(args)
    watched = [operands[n] for n in perhaps]
    return either(mapped(known), mapped(known | perhaps), args, watched, axes)


def _dims_of_shards(
    call: Call, arrays: Mapping[int, Any]
) -> tuple[dict[int, int], dict[int, int]]:
    """The dimensions along which the data axes shard arrays without rows or gradients.

    Returns: the dimensions of arrays that are sharded, and of arrays that may be.
    """
    known: dict[int, int] = {}
    perhaps: dict[int, int] = {}
    axes, devices = call.devices.axes, call.devices.number
    for n, x in arrays.items() if call.options.optimize and devices > 1 else ():
        dims = meshes.dims_that_split(x, devices)
        if not dims or read.numbers(x.shape) * x.dtype.itemsize < _SMALL:
            continue
        spec = meshes.known_spec(x)
        named = [bool({*meshes.names_in(x)} & {*axes}) for x in spec or ()]
        if any(named):
            known[n] = next((d for d in dims if any(named[d : d + 1])), dims[0])
        elif spec is None:
            perhaps[n] = dims[0]
    return known, perhaps


_SMALL = 2**16  # bytes: what has fewer is gathered once, for a message takes longer


def gradients(call: Call) -> Any:
    """The specs of gradients, which come back from the region."""
    specs = [place.spec for place in call.devices.gradients]
    return jax.tree.structure(call.params).unflatten(specs) if specs else ()


# -- The errors of JAX about axes ------------------------------------------------------


@contextlib.contextmanager
def explained(call: Call) -> Iterator[None]:
    """Adds to the errors of JAX about axes what to do, in the words of the options."""
    try:
        yield
    except (NameError, NotImplementedError, ValueError) as error:
        text = str(error)
        for words, todo in _ADVICE.items():
            if words in text:
                error.add_note(todo)
        names = [name for name in call.devices.bound if f"'{name}'" in text]
        if names and "Manual" in text:
            todo = _SHARDS if "constraint" in text else _CLOSES
            text = f"{todo.format(names[0])} JAX says: {error}"
            raise ManualAxisError(text) from error
        raise


_AS_ARGUMENT = "an argument without a role goes whole to every device."
_ADVICE = {
    "unbound axis name": "fun communicates over an axis that is not bound here. With "
    "value_and_grad fun needs no collectives: it sees all rows.",
    "Closing over": "In terms of ga_optax: if fun closes over an array that lies on "
    f"the mesh, pass it as an argument: {_AS_ARGUMENT}",
}

# The advice on a sharding over a data axis that is bound, and on an array of the mesh.
_SHARDS = (
    "With a data_axis fun must not shard anything over it by a PartitionSpec, since it "
    "sees the rows of one device, but it names {!r}. Pass with_sharding_constraint a "
    "NamedSharding, out of which the data axis is taken, or a PartitionSpec of other "
    "axes alone (in Flax, take the name out of the logical axis rules, in Haliax out "
    "of the axis mapping). In your own jax.shard_map, pass check_vma=False, too. Or "
    'pass sync="each", or no data_axis, and every micro-batch is reduced.'
)
_CLOSES = (
    "With a data_axis fun must get arrays as arguments, since it runs on one device of "
    "{!r}, but here it closes over an array that lies on the mesh. Pass the array: "
    + _AS_ARGUMENT
)


def check_not_reduced(call: Call, loss: Any) -> None:
    """Raises if the loss is that of all devices already."""
    reduced = [name for name in call.devices.bound if name not in meshes.varying(loss)]
    if reduced and meshes.checks_varying():
        raise DoesNotFitError(
            "fun must return the loss of one device's micro-batch, but its loss is the "
            f"same on all devices along {reduced[0]!r}: it is reduced already. Take "
            "the psum or pmean out of fun: the window is reduced once, at its end."
        )

"""One call of the fold inside a call: its arguments by role, checked and placed."""

import inspect
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ga_optax import config
from ga_optax._checks import (
    check_arrays,
    check_gradients,
    divisors,
    named_leaves,
    nodes_of,
    one_of,
)
from ga_optax._devices import collectives, membership, meshes
from ga_optax._devices.meshes import Axes, Placement
from ga_optax._inside import merges, said_once
from ga_optax._inside.options import NAMES, Argument, FromAux, Options
from ga_optax._passes import probe


class Call(NamedTuple):
    """One call of the returned function: its arguments by role.

    Attributes:
      options: the options.
      args: the positional arguments.
      kwargs: the keyword arguments.
      roles: the positions and keywords of each role.
      batch_axes: along which axis each leaf of the batch arguments is split; None if
        it goes to each micro-batch whole, as it came.
      mesh: the mesh whose data axes split this call's batch; None if there is no data
        axis, and inside a `shard_map` that binds it.
      specs: how the data axes shard the parameters: `DataAxis.param_specs`, or what
        was found.
      grad_specs: how they shard the gradients of whole parameters; None if as those.
      where: how to merge the gradient of each parameter leaf over the data axes that
        are bound.
    """

    options: Options
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    roles: dict[str, tuple[Argument, ...]]
    batch_axes: Sequence[int | None] = ()
    mesh: Any = None
    specs: Any = None
    grad_specs: Any = None
    where: Sequence[Placement] = ()

    @classmethod
    def make(cls, options: Options, args: Any, kwargs: Any) -> "Call":
        """Checks the arguments; raises before `fun` is traced."""
        optimize = options.optimize and config.optimize and probe.usable()
        if optimize:
            said_once.what_is_missing()
        options = options._replace(optimize=optimize)
        call = cls(options, args, kwargs, options.roles(len(args), kwargs))
        for i in call.roles["argnums"]:
            check_parameters(i, call.at(i))
            check_gradients(call.at(i), call.at(i), name=_argument(i))
        for i in call.roles["rng_argnums"]:
            _check_keys(i, call.at(i))
        for i in call.roles["carry_argnums"]:
            check_arrays(_argument(i), call.at(i), "Carry arrays alone.")
        call = call._replace(batch_axes=_axes_of_batch(call))
        if not options.whole_batch:
            _check_no_keys(call)
        if options.data_axis is not None:
            axis = options.data_axis
            mesh = meshes.find_mesh(axis.axes, axis.mesh, call.batch)
            whole = axis.grad_specs is not None
            specs = PartitionSpec() if whole else axis.param_specs
            call = call._replace(mesh=mesh, specs=specs, grad_specs=axis.grad_specs)
        _check_axis(options)
        _check_logical(call)
        _check_carry(call)
        _check_batch(call)
        _check_weight_fn(call)
        return call

    def at(self, place: Argument) -> Any:
        """The argument at a position, or that of a keyword."""
        return self.kwargs[place] if isinstance(place, str) else self.args[place]

    def role(self, name: str) -> tuple[Any, ...]:
        """The arguments with a role."""
        return tuple(self.at(i) for i in self.roles[name])

    @property
    def without_role(self) -> list[Argument]:
        """Where the arguments stand that have none."""
        with_role = {i for places in self.roles.values() for i in places}
        return [i for i in (*range(len(self.args)), *self.kwargs) if i not in with_role]

    @property
    def unsplit(self) -> list[Argument]:
        """Where the arguments stand that have a role and are not split."""
        roles = self.roles.items()
        return [i for name, places in roles for i in places if name != "batch_argnums"]

    def alone(self) -> "Call":
        """The same as a plain program if its window is one micro-batch on one device.

        There is nothing to add, so no bits depend on a grouping.
        """
        options = self.options
        if options.num_microbatches > 1 or options.axes or options.axis_name:
            return self
        return self._replace(options=options._replace(optimize=False))

    @property
    def batch(self) -> list[Any]:
        """What is split: the leaves of the batch that have an axis."""
        leaves = jax.tree.leaves(self.role("batch_argnums"))
        pairs = zip(leaves, self.batch_axes, strict=True)
        return [x for x, axis in pairs if axis is not None]

    @property
    def split_axes(self) -> list[int]:
        """The axes of `batch`."""
        return [axis for axis in self.batch_axes if axis is not None]

    @property
    def params(self) -> Any:
        """What to differentiate with respect to, in the structure of the result."""
        params = self.role("argnums")
        return params[0] if isinstance(self.options.argnums, int) else params

    @property
    def merges(self) -> list[merges.Sum]:
        """How the gradient of each leaf is merged over micro-batches and devices."""
        found = merges.of_leaves(self.params)
        # There the gradient is one of the whole batch, of which each has its part.
        is_whole = self.options.whole_batch
        return [merges.SUM] * len(found) if is_whole else found

    @property
    def axes(self) -> Axes:
        """The data axes that are bound: over which this call is one device's part."""
        return self.options.axes if self.mesh is None else ()

    @property
    def logical(self) -> int:
        """How many logical devices this device stands for; 0 if there are none."""
        total = self.options.logical_devices
        return total and total // meshes.num_devices(self.options.axes, self.mesh)

    @property
    def num_parts(self) -> int:
        """Into how many micro-batches this call splits the rows of a device."""
        return self.options.num_microbatches * (self.logical or 1)

    @property
    def axis_env(self) -> list[tuple[str, int]]:
        """The named axis of the micro-batches of all devices, and its size."""
        options = self.options
        if options.axis_name is None:
            return []
        devices = meshes.num_devices(self.axes, None) if self.axes else 1
        return [(options.axis_name, options.num_microbatches * devices)]

    @property
    def strided(self) -> bool | None:
        """Whether micro-batch i holds the rows i, i + k, ...; None if it is not known.

        See `membership`.
        """
        given = self.options.strided
        return self.distributed if given is None else given

    @property
    def distributed(self) -> bool | None:
        """Whether the compiler distributes it over devices; None if it is not known."""
        everything, options = (self.args, self.kwargs), self.options
        if options.axes or self.num_parts == 1:
            return False
        if options.optimize and meshes.is_open(everything) and membership.can_wait():
            return None
        return meshes.is_distributed(everything)

    @property
    def sent(self) -> dict[int, Placement]:
        """Which gradients are scattered before they are added, and how."""
        if not self.options.scatters:
            return {}
        pairs = enumerate(zip(self.where, self.merges, strict=True))
        return {i: x for i, (x, merge) in pairs if x.dims and merge.is_sum}

    def placed(self, total: Any, zero: float = 0.0) -> Any:
        """An accumulator, empty or of all devices, sharded as it is to be.

        `zero` is what an empty one holds.
        """
        if sent := self.sent:
            leaves, structure = jax.tree.flatten(total)
            for i, place in sent.items():
                leaves[i] = collectives.part(leaves[i], place, zero)
            return structure.unflatten(leaves)
        if self.mesh is None or self.specs is None:
            return total
        return collectives.constrain(total, self.specs, self.mesh)

    def with_args(self, new: dict[Argument, Any]) -> "Call":
        """The same call with other arguments at some places."""
        return self._replace(
            args=tuple(new.get(i, x) for i, x in enumerate(self.args)),
            kwargs={i: new.get(i, x) for i, x in self.kwargs.items()},
        )

    def with_batch(self, batch: Sequence[Any]) -> "Call":
        """The same call with other leaves in place of `batch`."""
        leaves, structure = jax.tree.flatten(self.role("batch_argnums"))
        new = iter(batch)
        pairs = zip(leaves, self.batch_axes, strict=True)
        leaves = [x if axis is None else next(new) for x, axis in pairs]
        args = structure.unflatten(leaves)
        return self.with_args(dict(zip(self.roles["batch_argnums"], args, strict=True)))

    def others(self) -> dict[int, Any]:
        """What has no role and has to be an operand of a region of a mesh, by number.

        All else that has none, such as numbers and flags, goes to `fun` as it came.
        """
        leaves, _ = self._without_roles()
        return {i: x for i, x in enumerate(leaves) if collectives.is_operand(x)}

    def with_others(self, new: dict[int, Any]) -> "Call":
        """The same call with others in place of `others`."""
        leaves, structure = self._without_roles()
        every = [new.get(i, x) for i, x in enumerate(leaves)]
        args, kwargs = jax.tree.unflatten(structure, every)
        bare = self._replace(args=args, kwargs=kwargs)
        return bare.with_args({i: self.at(i) for i in self.unsplit}).with_batch(
            self.batch
        )

    def _without_roles(self) -> tuple[list[Any], Any]:
        """The leaves of all that has no role, and the structure of the arguments."""
        bare = self.with_args(dict.fromkeys(self.unsplit))
        bare = bare.with_batch([0] * len(self.split_axes))
        return jax.tree.flatten((bare.args, bare.kwargs))

    def on_device(self) -> "Call":
        """The same with every argument of a role made this device's own.

        Parameters that the data axes shard come out whole; keys differ by device.
        """
        axes = self.axes
        if not axes:
            return self
        known = meshes.checks_varying()
        split = frozenset().union(*map(meshes.varying, self.batch))
        same = tuple(name for name in axes if name not in split)
        if known and same:
            raise ValueError(
                f"The batch must differ between the devices along {axes}, but it is "
                f"the same along {same}. Name {axes} in the in_specs of the shard_map."
            )
        params, where = self._params_on_device(known)
        new = dict(zip(self.roles["argnums"], params, strict=True))
        device = jax.lax.axis_index(axes)
        for role in ("rng_argnums", "carry_argnums"):
            for i in self.roles[role]:
                new[i] = collectives.vary(self.at(i), axes)
                if role == "rng_argnums" and not self.logical:
                    new[i] = jax.tree.map(
                        lambda k: jax.random.fold_in(k, device), new[i]
                    )
        batch = collectives.vary(self.batch, axes)
        return self.with_args(new).with_batch(batch)._replace(where=where)

    def _params_on_device(self, known: bool) -> tuple[Any, list[Placement]]:
        axes, params = self.axes, self.role("argnums")
        where = meshes.placements(self.params, self.specs, axes, None)
        if self.options.each and not known and self.specs is None:
            raise ValueError(
                f'sync="each" must know which parameters are sharded over {axes}, but '
                "this shard_map has check_vma=False. Pass DataAxis(param_specs=), or "
                "leave check_vma on."
            )
        for i, (name, x) in enumerate(named_leaves(params)):
            sharded, varying = where[i].axes, meshes.varying(x)
            loose = tuple(n for n in axes if n in varying and n not in sharded)
            if self.options.each:
                summed = tuple(n for n in axes if n in varying or n in sharded)
                where[i] = Placement(summed=summed)
            elif loose:
                raise ValueError(
                    "Parameters must be the same on all devices along the data axis, "
                    f"or param_specs must say how they are sharded, but {name} differs "
                    f"along {loose}. Pass DataAxis(param_specs=); or "
                    'sync="each", if fun itself gathers them.'
                )
            if self.logical and any(meshes.num_parts(x, d) > 1 for d in range(x.ndim)):
                raise ValueError(
                    "logical_devices needs automatic axes beside the data axis, up to "
                    f"jax 0.12, but an explicit one shards {name}: its type is "
                    f"{jax.typeof(x)}. Use AxisType.Auto, or leave logical_devices out."
                )
        leaves, structure = jax.tree.flatten(collectives.vary(params, axes))
        leaves = collectives.gather(leaves, where)
        if self.grad_specs is not None:
            where = meshes.placements(
                self.params, self.grad_specs, axes, None, "grad_specs"
            )
        return jax.tree.unflatten(structure, leaves), where


# -- Checks ----------------------------------------------------------------------------


def _argument(place: Argument) -> str:
    """How messages name an argument."""
    return f"argument {place!r}"


def _line(call: Call, role: str, place: Argument) -> str:
    """The option that gives a role to one more argument, as users write it."""
    named = isinstance(place, str)
    places = [i for i in call.roles[role] if isinstance(i, str) == named]
    value = (*places, place) if places else place
    return f"{NAMES[role] if named else role}={value!r}"


def check_parameters(place: Argument, tree: Any) -> None:
    """Raises if parameters of a Flax module come with other state of it."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    nodes = nodes_of(nnx.Variable, tree)
    others = [(path, x) for path, x in nodes.items() if not isinstance(x, nnx.Param)]
    if 0 < len(others) < len(nodes):
        path, node = others[0]
        raise TypeError(
            f"What is differentiated must be parameters alone, but leaf {path} of "
            f"{_argument(place)} is of type {type(node).__name__}, and fun could not "
            "update it. Use the functions of ga_optax.flax, which take modules; or "
            "graph, params, rest = nnx.split(model, nnx.Param, ...), and "
            "nnx.merge(graph, params, rest, copy=True) in fun."
        )


def _check_keys(place: Argument, tree: Any) -> None:
    check_arrays(_argument(place), tree, "Pass PRNG keys alone.")
    for name, leaf in named_leaves(tree):
        shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
        typed = jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
        raw = dtype == jnp.uint32 and len(shape) == 1
        if not (typed or raw):
            raise ValueError(
                "rng_argnums and rng_argnames must name PRNG keys, or trees of them, "
                f"but {name} of {_argument(place)} has shape {shape} and dtype "
                f"{dtype.name}. Pass one key; every micro-batch derives its own."
            )


def _check_no_keys(call: Call) -> None:
    """Raises if a PRNG key would be the same in all micro-batches: so would masks."""
    for place in call.without_role:
        for name, leaf in named_leaves(call.at(place)):
            if _is_key(leaf):
                raise ValueError(
                    f"A PRNG key must differ between micro-batches, but {name} of "
                    f"{_argument(place)} goes to each as it is. Pass keys by "
                    f"themselves, and {_line(call, 'rng_argnums', place)}."
                )
    for (name, leaf), axis in zip(_named_batch(call), call.batch_axes, strict=True):
        if axis is None and _is_key(leaf):
            raise ValueError(
                f"A PRNG key must differ between micro-batches, but {name} goes to "
                "each as it is. Pass it by itself, and name it in rng_argnums."
            )


def _check_carry(call: Call) -> None:
    """Raises if a key is in a carry that is averaged over devices or micro-batches."""
    # At top level with sync="each" no data axis is ever bound, and it threads.
    is_global = call.mesh is not None and call.options.each
    if (not call.options.axes or is_global) and call.options.axis_name is None:
        return
    for name, leaf in named_leaves(call.role("carry_argnums")):
        if _is_key(leaf):
            raise TypeError(
                "With a data_axis or axis_name the carry must hold numbers to average, "
                f"but {name} of it is a PRNG key. Name it in rng_argnums."
            )


def _is_key(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array)
    return is_array and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _check_weight_fn(call: Call) -> None:
    if call.options.weight_fn is None or isinstance(call.options.weight_fn, FromAux):
        return
    try:
        signature = inspect.signature(call.options.weight_fn)
    except ValueError:  # of a built-in function
        return
    try:
        signature.bind(*call.role("batch_argnums"))
    except TypeError as error:
        due = " and ".join(map(_argument, call.roles["batch_argnums"]))
        raise TypeError(
            f"weight_fn must take the batch arguments, {due}, by position, but it "
            f"takes {signature}: {error}. Give it one parameter for each of them."
        ) from None


def _named_batch(call: Call) -> list[tuple[str, Any]]:
    """The leaves of the batch arguments, each with its name."""
    places = call.roles["batch_argnums"]
    leaves = []
    for i in places:
        for name, x in named_leaves(call.at(i)):
            alone = len(places) == 1 and x is not call.at(i)
            leaves.append((name if alone else f"{name} of {_argument(i)}", x))
    return leaves


def _axes_of_batch(call: Call) -> list[int | None]:
    """The axis of each leaf of the batch, not negative; None for what goes whole."""
    axes, batch = call.options.batch_axes, call.role("batch_argnums")
    if isinstance(axes, list):
        axes = tuple(axes)
    if len(batch) == 1 and not (_is_single(axes) and not _is_single(batch[0])):
        axes = (axes,)
    try:
        of_leaves = jax.tree.broadcast(axes, batch, is_leaf=lambda x: x is None)
    except ValueError:
        tree = jax.tree.structure(batch if len(batch) > 1 else batch[0])
        raise ValueError(
            "batch_axes must be a prefix of the batch (of a tuple of the arguments, if "
            f"there are several), but it is {call.options.batch_axes!r}, and the batch "
            f"is {tree}. Pass an int, None, or one for each part."
        ) from None
    named = _named_batch(call)
    found = jax.tree.structure(batch).flatten_up_to(of_leaves)
    for i, ((name, x), axis) in enumerate(zip(named, found, strict=True)):
        if axis is None:
            continue
        todo = "Give it None in batch_axes to pass it to each micro-batch as it is."
        if _is_key(x) and not call.options.whole_batch:
            todo = "Pass keys by themselves, and name them in rng_argnums."
        check_arrays(name, x, todo)
        ndim = jnp.ndim(x)
        if not -ndim <= axis < ndim:
            has = f"has shape {jnp.shape(x)}" if ndim else "is a scalar"
            raise ValueError(
                "Every leaf of the batch must have a batch axis, here axis "
                f"{axis}, but {name} {has}. {todo}"
            )
        found[i] = axis % ndim
    return found


def _is_single(tree: Any) -> bool:
    """Whether it is a sequence of one: axes of one argument, or an argument like it."""
    return isinstance(tree, (tuple, list)) and len(tree) == 1


def _check_axis(options: Options) -> None:
    name = options.axis_name
    if name is not None and meshes.checks_varying():
        raise ValueError(
            f"Inside a jax.shard_map axis_name={name!r} needs check_vma=False, but "
            "this one checks: JAX has no types for an axis beside its mesh. Pass that, "
            "or call at top level with data_axis=."
        )


def _check_logical(call: Call) -> None:
    total, axes = call.options.logical_devices, call.options.axes
    devices = meshes.num_devices(axes, call.mesh) if total else 1
    if total % devices:
        raise ValueError(
            f"The devices along data_axis={axes} must divide logical_devices={total}, "
            f"but there are {devices}. Use {one_of(divisors(total))} of them, or other "
            "logical devices (and then other bits)."
        )


def _check_batch(call: Call) -> None:
    rows, came = _rows_of_batch(call)
    devices, kind = _num_splits(call)
    part, rest = divmod(rows, devices)
    if rest:
        raise ValueError(
            f"The {devices} {kind} along data_axis={call.options.axes} must divide the "
            f"batch axis, but {came}. Use a batch of {rows - rest or devices} or "
            f"{rows - rest + devices} examples."
        )
    k = call.options.num_microbatches
    if devices * k > 1 and not call.options.whole_batch:
        _check_no_batch(call, rows)
    if not isinstance(part, int) and not _divides(k, part):
        raise ValueError(
            f"num_microbatches={k} must divide the batch axis, but {came}. Export a "
            f'dimension that it divides, such as jax.export.symbolic_shape("{k}*b").'
        )
    if part % k:
        what = _what_is_split(part, devices, kind)
        nearest = sorted(divisors(part), key=lambda d: abs(d - k))[:8]
        raise ValueError(
            f"num_microbatches={k} must divide {what}, but {came}. Use "
            f"{one_of(sorted(nearest))}."
        )


def rows_of_device(call: Call) -> tuple[int, str, str]:
    """How many rows a device splits, what they are, and how messages say so."""
    rows, came = _rows_of_batch(call)
    devices, kind = _num_splits(call) if call.options.axes else (1, "")
    part = rows // devices
    return part, _what_is_split(part, devices, kind), came


def _what_is_split(part: int, devices: int, kind: str) -> str:
    if devices == 1:
        return "the batch axis"
    return f"the batch of each of the {devices} {kind}, {part} examples"


def _divides(k: int, size: Any) -> bool:
    """Whether it divides a dimension that `jax.export` leaves open."""
    try:
        return bool(size % k == 0)
    except Exception:  # which JAX does not export
        return False


def _rows_of_batch(call: Call) -> tuple[int, str]:
    """How many rows the batch has, and how messages say so."""
    named = zip(_named_batch(call), call.batch_axes, strict=True)
    leaves = [
        (name, jnp.shape(x), jnp.shape(x)[axis])
        for (name, x), axis in named
        if axis is not None
    ]
    if not leaves:
        places = call.roles["batch_argnums"]
        none = "holds none that batch_axes splits"
        raise ValueError(
            "batch_argnums must name arguments that hold arrays, but "
            f"{' and '.join(f'{_argument(i)} {none}' for i in places)}. Change it."
        )
    (first, shape, rows), *others = leaves
    came = f"{first} has shape {shape}"
    for name, other, length in others:
        if length != rows:
            raise ValueError(
                "All leaves of the batch must have one length along their batch axis, "
                f"but {came} and {name} has shape {other}. Put the examples on axis "
                "0, or say in batch_axes where they are."
            )
    if rows == 0:
        options, todo = call.options, "Skip the call"
        if not (options.whole_batch or options.axis_name or options.overlap):
            todo += ", or pad the batch and pass num_real_microbatches=0"
        raise ValueError(
            f"The batch must hold at least one example, but {came}. {todo}."
        )
    return rows, came


def _num_splits(call: Call) -> tuple[int, str]:
    """Over how many devices the batch is split, and of which kind they are."""
    axes = call.options.axes
    if not axes:
        split = zip(call.batch, call.split_axes, strict=True)
        return max(meshes.num_parts(x, axis) for x, axis in split), "devices"
    devices = 1 if call.mesh is None else meshes.num_devices(axes, call.mesh)
    kind = "logical devices" if call.logical else "devices"
    return devices * (call.logical or 1), kind


def _check_no_batch(call: Call, rows: int) -> None:
    """Raises if an argument without a role is as long as the batch."""
    for place in call.without_role:
        leaves = jax.tree.leaves(call.at(place))
        shapes = [getattr(x, "shape", ()) for x in leaves]
        for axis in {0, *call.split_axes} if leaves else ():
            if all(shape[axis : axis + 1] == (rows,) for shape in shapes):
                raise ValueError(
                    f"An argument with the batch's {rows} rows must have a role, but "
                    f"{_argument(place)}, of shape {shapes[0]}, has none, and would go "
                    "to each micro-batch whole. Pass "
                    f"{_line(call, 'batch_argnums', place)} to split it; if it is to "
                    "go whole, pass that, and None for it in batch_axes."
                )

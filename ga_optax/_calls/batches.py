"""The batch and the devices of a call: rows, axes, divisibility.

    n rows  =  devices · num_microbatches · rows of a micro-batch

Which leaves have rows, along which axis, and whether k divides them; then `Devices`,
the one record of what is known of the mesh.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .. import _checks
from .._checks import divisors, is_raw_key, is_single, named_leaves, one_of, uneven
from .._devices import collectives, meshes
from .._devices.collectives import Membership
from .._devices.meshes import Axes, By, DataAxis, Placement
from .._passes import about, jaxprs
from .._passes.shards import Shard
from .._text import warn_once
from ..accumulator import Accumulator
from .options import NAMES, Argument

# == Rows of the batch =================================================================

Call = Any  # of `call`, which imports this


def argument(place: Argument) -> str:
    """The name of an argument in messages."""
    return f"argument {place!r}"


def to_pass(call: Call, role: str, place: Argument) -> str:
    """The option that gives a role to one more argument, as users write it."""
    named = isinstance(place, str)
    places = [i for i in call.roles[role] if isinstance(i, str) == named]
    value = (*places, place) if places else place
    return f"{NAMES[role] if named else role}={value!r}"


def is_typed_key(leaf: Any) -> bool:
    """True for a typed array of PRNG keys."""
    is_traced = isinstance(leaf, jax.Array)
    return is_traced and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def named_batch(call: Call) -> list[tuple[str, Any]]:
    """The leaves of the batch arguments, each with its name."""
    places = call.roles["batch_argnums"]
    leaves = []
    for i in places:
        for name, x in named_leaves(call.at(i)):
            alone = len(places) == 1 and x is not call.at(i)
            leaves.append((name if alone else f"{name} of {argument(i)}", x))
    return leaves


def is_array(x: Any) -> bool:
    """True for a leaf that `jax.jit` would trace, and for the type of such a leaf."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


_A_KEY_ALONE = (
    "Pass keys by themselves, and name them in rng_argnums; to verify pass rng=."
)


# -- Axes ------------------------------------------------------------------------------


def axes_of(call: Call, hint: bool) -> list[int | None]:
    """The axis of each leaf of the batch, not negative; None for what goes whole."""
    axes, batch = call.options.batch_axes, call.role("batch_argnums")
    axes = tuple(axes) if isinstance(axes, list) else axes
    if len(batch) == 1 and not (is_single(axes) and not is_single(batch[0])):
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
    named = named_batch(call)
    leaf_axes = jax.tree.structure(batch).flatten_up_to(of_leaves)
    of_leaves = iter(leaf_axes)
    for place in call.roles["batch_argnums"]:
        _checks.check_no_lists(argument(place), call.at(place), of_leaves)
    for i, ((name, x), axis) in enumerate(zip(named, leaf_axes, strict=True)):
        if axis is None:
            continue
        if hint and np.ndim(x) == 0:
            leaf_axes[i] = None
            continue
        whole = "Give it None in batch_axes to pass it to each micro-batch as it is."
        todo = _A_KEY_ALONE if is_typed_key(x) and not hint else whole
        _checks.check_arrays(name, x, todo)
        ndim = jnp.ndim(x)
        if not -ndim <= axis < ndim:
            has = f"has shape {jnp.shape(x)}" if ndim else "is a scalar"
            raise ValueError(
                "Every leaf of the batch must have a batch axis, here axis "
                f"{axis}, but {name} {has}. {todo}{or_another(call)}"
            )
        leaf_axes[i] = axis % ndim
    return leaf_axes


# -- Rows ------------------------------------------------------------------------------


def checked_split(call: Call, hint: bool) -> Call:
    """The call, whose rows the devices and micro-batches divide; or raises."""
    rows, came, todo = counted_rows(call, hint)
    if hint:
        _warn_of_rows(call, rows, came)
        call = _with_whole_keys(call, rows)
    if hint and call.options.argnums != ():
        about.note_batch(rows * (call.devices.number if call.devices.bound else 1))
    devices, kind = _num_splits(call)
    part, rest = divmod(rows, devices)
    if rest:
        near = one_of([n for n in (rows - rest, rows - rest + devices) if n])
        raise ValueError(
            f"The {devices} {kind} along data_axis={call.devices.axes} must divide the "
            f"batch axis, but {came}. Use a batch of {near} examples{todo}."
        )
    of_all = rows, f"the batch axis, but {came}", todo
    each = f"the batch of each of the {devices} {kind}, {part} examples, but {came}"
    of_device = of_all if devices == 1 else (part, each, todo)
    # The last micro-batch is smaller if no row needs another, see `engine.partition`.
    may_rest = hint and devices == 1 and not call.devices.axes and isinstance(rows, int)
    options = call.options
    if (size := options.microbatch_size) is not None:
        divided = of_device if call.devices.axes else of_all
        if may_rest:
            number = -(-rows // size)
        else:
            number = _quotient(call, "microbatch_size", size, divided)
        options = options._replace(num_microbatches=number, microbatch_size=None)
        call = call._replace(options=options)
    if may_rest and options.num_microbatches < rows:
        call = call.in_pieces(rows, options.num_microbatches)
    k = call.options.num_microbatches
    # In a region a device does not know which leaves are whole on all devices.
    if hint and not call.devices.bound:
        call = _as_they_divide(call, rows, 0 if call.rest else devices * k)
    else:
        _check_one_length(call, rows, came)
        if devices * k > 1:
            _check_no_batch(call, rows)
    if not isinstance(part, int) and not _holds(lambda: part % k == 0):
        raise ValueError(
            f"num_microbatches={k} must divide the batch axis, but {came}. Export a "
            f'dimension that it divides, such as jax.export.symbolic_shape("{k}*b").'
        )
    if not call.rest:
        _quotient(call, "num_microbatches", k, of_device)
    return call


def or_another(call: Call) -> str:
    """A sentence on what may be the batch, or parameters, if the batch looks odd."""
    places = *range(len(call.args)), *call.kwargs
    named = {argument(i): call.at(i) for i in places}
    batch = list(map(argument, call.roles["batch_argnums"]))
    return _checks.or_another(named, batch, call.options.num_microbatches or 1)


def _quotient(call: Call, option: str, number: int, rows: tuple[int, str, str]) -> int:
    """The number of rows over `number`; raises if `number` does not divide it."""
    part, what, todo = rows
    if part % number:
        nearest = sorted(divisors(part), key=lambda d: abs(d - number))[:8]
        use = one_of(sorted(nearest))
        if number > part and _checks.is_sequence(call.batch, number):
            todo += ". Is it one sequence? Its tokens lie along axis 1: batch_axes=1"
        more = or_another(call)
        if number > part:
            more = f" One example alone has no rows: give each leaf a batch axis.{more}"
        raise ValueError(
            f"{option}={number} must divide {what}. Use {use}{todo}. "
            f"{uneven(part, number)}{more}"
        )
    return part // number


def _with_axes(call: Call) -> list[tuple[str, Any, int]]:
    """The leaves that have rows: their names, themselves, and how many rows."""
    named = zip(named_batch(call), call.batch_axes, strict=True)
    return [
        (name, x, jnp.shape(x)[axis]) for (name, x), axis in named if axis is not None
    ]


def counted_rows(call: Call, hint: bool) -> tuple[int, str, str]:
    """The number of rows: the length of the leaves with most bytes of the batch.

    Returns: the number; a leaf that has it, in words; advice if it is not the number.
    """
    leaves = _with_axes(call)
    if not leaves:
        raise _no_rows(call)
    sizes: dict[Any, int] = {}
    for _, x, length in leaves:
        sizes[length] = sizes.get(length, 0) + (
            0 if is_raw_key(x) else jaxprs.nbytes(x)
        )
    # A size that `jax.export` leaves open is the number of rows.
    rows = max(sizes, key=lambda n: (not isinstance(n, int), sizes[n]))
    name, x = next((name, x) for name, x, length in leaves if length == rows)
    came = f"{name} has shape {jnp.shape(x)}"
    if rows == 0:
        todo = "Skip the call"
        if not hint:
            todo += ", or pad the batch and pass num_real_microbatches=0"
        raise ValueError(
            f"The batch must hold at least one example, but {came}. {todo}."
        )
    other = f"; or, if that leaf has no rows, give {name} None in batch_axes"
    return rows, came, other if len(sizes) > 1 else ""


def _no_rows(call: Call) -> ValueError:
    """The error that no leaf of the batch has rows; the error names what came."""
    came = []
    todo = "Pass the batch in that argument, or name another one in batch_argnums"
    for i in call.roles["batch_argnums"]:
        tree, leaves = call.at(i), named_leaves(call.at(i))
        if tree is None:
            came.append(f"{argument(i)} is None")
        elif not leaves:
            came.append(f"{argument(i)} is a {type(tree).__name__} without leaves")
        elif any(np.ndim(x) for _, x in leaves if is_array(x)):
            came.append(f"batch_axes gives None to all leaves of {argument(i)}")
            todo = "Give the leaves with rows their axis"
        else:
            [(name, x), *_] = leaves
            kind = "is a scalar" if is_array(x) else f"is of type {type(x).__name__}"
            came.append(f"{argument(i)} holds none with an axis: {name} {kind}")
    return ValueError(
        "batch_argnums must name arguments that hold arrays, but "
        f"{' and '.join(came)}. {todo}."
    )


def _with_whole_keys(call: Call, rows: int) -> Call:
    """The call, in which raw keys that are not as long as the batch go whole."""
    leaves = jax.tree.leaves(call.role("batch_argnums"))
    axes = [
        None if axis is not None and is_raw_key(x) and np.shape(x)[0] != rows else axis
        for x, axis in zip(leaves, call.batch_axes, strict=True)
    ]
    return call._replace(batch_axes=axes)


def _check_one_length(call: Call, rows: int, came: str) -> None:
    for name, x, length in _with_axes(call):
        if length != rows:
            todo = (
                "Put the examples on axis 0, or say in batch_axes where they are, with "
                "None for a leaf without examples, such as a table, which goes whole."
            )
            raise ValueError(
                "All leaves of the batch must have one length along their batch axis, "
                f"but {came} and {name} has shape {jnp.shape(x)}. "
                f"{_A_KEY_ALONE if is_raw_key(x) else todo}{or_another(call)}"
            )


def _as_they_divide(call: Call, rows: int, parts: int) -> Call:
    """The call, in which leaves that do not divide go whole, and others have a role.

    An argument without a role that has the batch's rows in all of its leaves has one.
    """
    leaves = jax.tree.leaves(call.role("batch_argnums"))
    axes = [
        None if axis is None or not _is_split(np.shape(x)[axis], rows, parts) else axis
        for x, axis in zip(leaves, call.batch_axes, strict=True)
    ]
    call = call._replace(batch_axes=axes)
    [axis, *others] = dict.fromkeys(call.split_axes)
    axis = 0 if others else axis
    for place in call.without_role:
        leaves = jax.tree.leaves(call.at(place))
        if leaves and all(np.shape(x)[axis : axis + 1] == (rows,) for x in leaves):
            batch = *call.roles["batch_argnums"], place
            call = call._replace(
                roles=call.roles | {"batch_argnums": batch},
                batch_axes=[*call.batch_axes, *[axis] * len(leaves)],
            )
        else:
            _warn_of_role(call, place, rows)
    return call


def _warn_of_rows(call: Call, rows: Any, came: str) -> None:
    """Warns if fewer rows are those of more leaves: the largest one may be a table.

    Integers in a matrix, such as tokens, count twice; `batch_axes` as a tree decides.
    """
    _, k, size, *_ = call.options
    votes: dict[Any, int] = {}
    if not isinstance(call.options.batch_axes, int):
        return
    for _, x, n in _with_axes(call):
        is_tokens = np.ndim(x) > 1 and jnp.issubdtype(x.dtype, jnp.integer)
        votes[n] = votes.get(n, 0) + 1 + is_tokens
    n = max(votes, key=votes.__getitem__)
    fewer = _holds(lambda: n < rows) and votes[n] > votes[rows]
    if fewer and k != 1 and n % (k or size) == 0:
        warn_once(
            f"The rows of a batch are those of most of its bytes, here {rows:,} ({came}"
            f"), but more leaves have {n} rows. If that leaf is a table, give it None "
            "in batch_axes; the gradient is right anyway, but may save nothing."
        )


def _is_split(n: Any, rows: Any, parts: int) -> bool:
    """True if a leaf of n rows is split: as the rows of the batch, or divisible.

    With 0 `parts` micro-batches have the rows of the batch alone.
    """
    is_one = _holds(lambda: n == rows)
    return is_one or (parts > 0 and _holds(lambda: n > 0 and n % parts == 0))


def _warn_of_role(call: Call, place: Argument, rows: int) -> None:
    """Warns if an argument without a role has more rows than the batch."""
    lengths = {np.shape(x)[:1] for x in jax.tree.leaves(call.at(place))}
    if len(lengths) != 1 or max(map(jnp.ndim, call.batch)) > 1:
        return
    [length] = lengths
    if not (length and _holds(lambda: length[0] > rows)):
        return
    split = " and ".join(map(argument, call.roles["batch_argnums"]))
    option = "batch_argnames" if isinstance(place, str) else "batch_argnums"
    warn_once(
        f"What is split should be the batch, but {split} has {rows} rows, and "
        f"{argument(place)}, which is not split, has {length[0]} along axis 0 of every "
        f"leaf. If that is the batch, pass {option}={place!r}; the gradient is right "
        "anyway, but saves nothing."
    )


def _holds(test: Callable[[], Any]) -> bool:
    """The result of a test of dimensions; False if `jax.export` leaves them open."""
    try:
        return bool(test())
    except Exception:  # which JAX does not export
        return False


def _num_splits(call: Call) -> tuple[int, str]:
    """The number of devices that the batch is split over, and the kind of devices."""
    devices = call.devices
    if not devices.axes:
        return max(map(meshes.num_parts, call.batch, call.split_axes)), "devices"
    kind = "logical devices" if devices.logical else "devices"
    number = 1 if devices.mesh is None else devices.number
    return number * (devices.logical or 1), kind


def _check_no_batch(call: Call, rows: int) -> None:
    """Raises if an argument without a role is as long as the batch."""
    for place in call.without_role:
        leaves = jax.tree.leaves(call.at(place))
        shapes = [getattr(x, "shape", ()) for x in leaves]
        for axis in {0, *call.split_axes} if leaves else ():
            if all(shape[axis : axis + 1] == (rows,) for shape in shapes):
                raise ValueError(
                    f"An argument with the batch's {rows} rows must have a role, but "
                    f"{argument(place)}, of shape {shapes[0]}, has none, and would go "
                    "to each micro-batch whole. Pass "
                    f"{to_pass(call, 'batch_argnums', place)} to split it; if it is to "
                    "go whole, pass that, and None for it in batch_axes."
                )


# == The devices of a call =============================================================


class DoesNotFitError(ValueError):
    """An argument or an option does not fit: the error says so, and nothing runs."""


class Devices(NamedTuple):
    """The devices that a call runs on, and how arrays are sharded over them.

    Attributes:
      axes: the data axes; () if there are none.
      mesh: the mesh that is yet to bind them; None if a `shard_map` around the call
        binds them, or if there are none.
      number: how many devices there are along the data axes.
      each: True if the backward pass of every micro-step merges over devices.
      inner: the axes over which the compiler does so in a region of other axes.
      scatters: True if every micro-step adds its gradient to a sharded sum.
      logical: the number of logical devices on this one; 0 if there are none.
      is_checked: True in a `shard_map` that checks over which axes values vary.
      by: who distributes what is computed.
      specs: the `PartitionSpec` of each leaf of the parameters, or None.
      params: how the data axes shard each leaf of the parameters.
      gradients: how they shard its gradient.
      shards: the parts of arguments without gradient that are gathered where they are
        used, by the ids of these arguments.
      mapped: True in the `shard_map` that a call at top level makes.
    """

    axes: Axes = ()
    mesh: Any = None
    number: int = 1
    each: bool = False
    inner: Axes = ()
    scatters: bool = False
    logical: int = 0
    is_checked: bool = False
    by: By = By.NOBODY
    specs: Sequence[PartitionSpec | None] = ()
    params: Sequence[Placement] = ()
    gradients: Sequence[Placement] = ()
    shards: Mapping[int, Shard] = types.MappingProxyType({})
    mapped: bool = False

    @classmethod
    def of(cls, axis: DataAxis | None, params: Any, batch: Sequence[Any]) -> "Devices":
        """Asks the mesh and the arrays; raises if they do not fit the data axis."""
        devices = cls(is_checked=meshes.checks_varying())
        # In another call with that data axis the program sees the rows of all devices.
        if axis is None or meshes.sees_all_rows(axis.axes):
            return devices
        mesh, sharded = meshes.find_mesh(axis.axes, axis.mesh, batch), axis.grad_specs
        number = meshes.num_devices(axis.axes, mesh)
        devices = devices._replace(axes=axis.axes, mesh=mesh, number=number)
        if total := axis.logical_devices or 0:
            meshes.check_logical(total, axis.axes, number, params)
        each = axis.sync == "each" and sharded is None
        devices = devices._replace(
            each=each,
            scatters=axis.sync == "each" and sharded is not None,
            logical=total // number,
            by=By.COMPILER if each and mesh is not None else By.US,
        )
        specs = axis.param_specs if sharded is None else PartitionSpec()
        devices = devices.with_params(params, specs)
        if sharded is not None:
            where = meshes.placements(params, sharded, axis.axes, mesh, "grad_specs")
            devices = devices._replace(gradients=where)
        if mesh is None:
            return devices._in_region(params, batch, axis)
        if not devices.each:
            meshes.check_scatter(params, devices.gradients, axis.axes, mesh)
        return devices

    def with_params(self, params: Any, specs: Any = None) -> "Devices":
        """The same devices, with parameters of these specs."""
        where = meshes.placements(params, specs, self.axes, self.mesh)
        known = meshes.broadcast_specs(specs, params)
        return self._replace(specs=known, params=where, gradients=where)

    def for_arrays(self, tree: Any, optimize: bool) -> "Devices":
        """The same devices, with `by` for the arrays of a tree."""
        devices = self._replace(is_checked=meshes.checks_varying())
        if self.axes:
            return devices
        if optimize and meshes.is_open(tree) and collectives.split_can_wait():
            return devices._replace(by=By.UNKNOWN)
        distributed = meshes.is_distributed(tree)
        return devices._replace(by=By.COMPILER if distributed else By.NOBODY)

    def _in_region(
        self, params: Any, batch: Sequence[Any], axis: DataAxis
    ) -> "Devices":
        """The same devices, in a `shard_map` of the user's; or raises."""
        split = frozenset().union(*map(meshes.varying, batch))
        same = tuple(name for name in self.axes if name not in split)
        if self.is_checked and same:
            raise ValueError(
                f"The batch must differ between the devices along {self.axes}, but it "
                f"is the same along {same}. Name {self.axes} in the in_specs of the "
                "shard_map."
            )
        if self.each and not self.is_checked and axis.param_specs is None:
            raise ValueError(
                f'sync="each" must know which parameters are sharded over {self.axes}, '
                "but this shard_map has check_vma=False. Pass DataAxis(param_specs=), "
                "or leave check_vma on."
            )
        where = list(self.params)
        for i, (name, x) in enumerate(named_leaves(params)):
            sharded, varying = where[i].axes, meshes.varying(x)
            loose = tuple(n for n in self.axes if n in varying and n not in sharded)
            if self.each:
                names = tuple(n for n in self.axes if n in varying or n in sharded)
                where[i] = Placement(summed=names)
            elif loose:
                raise DoesNotFitError(
                    "Parameters must be the same on all devices along the data axis, "
                    f"or param_specs must say how they are sharded, but {name} differs "
                    f"along {loose}. Pass DataAxis(param_specs=); or "
                    'sync="each", if fun itself gathers them.'
                )
        gradients = where if axis.grad_specs is None else self.gradients
        return self._replace(params=where, gradients=gradients)

    @property
    def bound(self) -> Axes:
        """The data axes over which this call is the part of one device."""
        return self.axes if self.mesh is None else ()

    @property
    def by_compiler(self) -> bool:
        """True if the compiler merges over devices: sync="each" at top level."""
        return self.by is By.COMPILER and self.mesh is not None

    @property
    def maps(self) -> bool:
        """True if each device runs its part in a `shard_map` that the call makes."""
        return self.by is By.US and self.mesh is not None

    @property
    def scattered(self) -> dict[int, Placement]:
        """Placements of gradients that are scattered before the sum, by leaf."""
        some = enumerate(self.gradients if self.scatters and self.bound else ())
        return {i: x for i, x in some if x.dims}

    @property
    def replicas(self) -> Axes:
        """The axes that shard no parameter, if each micro-step merges over others."""
        sharded = {name for place in self.params for name in place.axes}
        known = self.by_compiler and sharded and not meshes.explicit_names(self.mesh)
        return tuple(name for name in self.axes if known and name not in sharded)

    def over_replicas(self) -> "Devices":
        """The devices that merge over replicas once, and in each micro-step inside."""
        axes, whole = self.replicas, [Placement()] * len(self.params)
        return self._replace(
            axes=axes,
            inner=tuple(name for name in self.axes if name not in axes),
            number=meshes.num_devices(axes, self.mesh),
            each=False,
            by=By.US,
            params=whole,
            gradients=whole,
        )

    @property
    def compiled(self) -> tuple[Axes, Any]:
        """The axes over which the compiler merges here, and the mesh it works on."""
        if self.inner and self.mesh is None:
            return self.inner, jax.sharding.get_abstract_mesh()
        return (self.axes if self.by_compiler else ()), self.mesh

    @property
    def membership(self) -> Membership:
        """The rows that a micro-batch should hold here."""
        if self.by is By.UNKNOWN:
            return Membership.EITHER
        strides = self.by is By.COMPILER and not self.axes
        return Membership.STRIDED if strides else Membership.NEIGHBOURS

    def where(self, names: Sequence[str]) -> meshes.DeviceContext:
        """The devices as a loop has to know them, for parameters of these names."""
        axes, mesh = self.compiled
        gathers = axes and not meshes.explicit_names(mesh)
        return meshes.DeviceContext(
            names=names,
            axes=self.bound,
            placements=self.gradients if self.bound else (),
            scattered=self.scattered,
            logical=self.logical,
            gathered=meshes.ParamSharding(self.specs, axes, mesh) if gathers else None,
            shards=self.shards,
            by=self.by,
        )

    def split(self, x: Any, k: int, axis: int, membership: Membership) -> jax.Array:
        """An array as `[k, ...]`, with the rows of k micro-batches along axis 0."""
        axes, mesh = self.compiled
        if mesh is None:
            return collectives.split_rows(x, k, axis, membership)
        return collectives.split_shards(x, k, axes or self.axes, mesh, axis)

    def flat(self, acc: Accumulator) -> Any:
        """An accumulator of this device alone, whose total is a list."""
        total = collectives.vary(jax.tree.leaves(acc.total), self.bound)
        return acc._replace(total=total)

    def shard(self, total: Any, zero: float = 0.0) -> Any:
        """A sum of gradients, empty or of all devices, with the sharding of gradients.

        `zero` is the number in an empty sum.
        """
        leaves, structure = jax.tree.flatten(total)
        for i, place in self.scattered.items():
            leaves[i] = collectives.part(leaves[i], place, zero)
        if (mesh := self.compiled[1]) is not None:
            leaves = collectives.constrain(leaves, list(self.specs), mesh)
        return structure.unflatten(leaves)

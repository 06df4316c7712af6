"""One call of the fold inside a call: its arguments by role, checked and placed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ga_optax import _collectives, _mesh
from ga_optax._checks import check_gradients, divisors, leaf_name
from ga_optax._mesh import Axes, Placement
from ga_optax._options import Options


class Call(NamedTuple):
    """One call of the returned function: its arguments by role.

    Attributes:
      options: the options.
      args: the positional arguments.
      kwargs: the keyword arguments.
      roles: the positions of each role.
      mesh: the mesh whose data axes split this call's batch; None if there is no data
        axis, and inside a `shard_map` that binds it.
      specs: how the data axes shard the parameters: `DataAxis.param_specs`, or what
        was found.
      where: how to merge the gradient of each parameter leaf over the data axes that
        are bound.
    """

    options: Options
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    roles: dict[str, tuple[int, ...]]
    mesh: Any = None
    specs: Any = None
    where: Sequence[Placement] = ()

    @classmethod
    def make(cls, options: Options, args: Any, kwargs: Any) -> "Call":
        """Checks the arguments; raises before `fun` is traced."""
        call = cls(options, args, kwargs, options.roles(len(args)))
        for position in call.roles["argnums"]:
            tree = args[position]
            check_gradients(tree, tree, name=f"argument {position}")
        for position in call.roles["rng_argnums"]:
            _check_keys(position, args[position])
        batch = {position: args[position] for position in call.roles["batch_argnums"]}
        if options.data_axis is None:
            _check_batch(options, 1, batch)
            _check_not_split(batch)
            return call
        mesh = _mesh.find_mesh(options.axes, options.data_axis.mesh, batch)
        devices = 1 if mesh is None else _mesh.num_devices(options.axes, mesh)
        _check_batch(options, devices, batch)
        return call._replace(mesh=mesh, specs=options.data_axis.param_specs)

    def role(self, name: str) -> tuple[Any, ...]:
        """The arguments with a role."""
        return tuple(self.args[position] for position in self.roles[name])

    @property
    def params(self) -> Any:
        """What to differentiate with respect to, in the structure of the result."""
        params = self.role("argnums")
        return params[0] if isinstance(self.options.argnums, int) else params

    @property
    def axes(self) -> Axes:
        """The data axes that are bound: over which this call is one device's part."""
        return self.options.axes if self.mesh is None else ()

    def placed(self, total: Any) -> Any:
        """An accumulator at top level, sharded as `specs` says."""
        if self.mesh is None or self.specs is None:
            return total
        return _collectives.constrain(total, self.specs, self.mesh)

    def with_args(self, new: dict[int, Any]) -> "Call":
        """The same call with other arguments at some positions."""
        args = list(self.args)
        for position, arg in new.items():
            args[position] = arg
        return self._replace(args=tuple(args))

    def on_device(self) -> "Call":
        """The same with every argument of a role made this device's own.

        Parameters that the data axes shard come out whole; keys differ by device.
        """
        axes = self.axes
        if not axes:
            return self
        known = _mesh.checks_varying()
        if known:
            self._check_split(axes)
        for path, leaf in jax.tree_util.tree_flatten_with_path(
            self.role("carry_argnums")
        )[0]:
            if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
                raise TypeError(
                    "With a data_axis the carry must hold numbers, which devices can "
                    f"average, but {leaf_name(path)} of the carried arguments is a "
                    "PRNG key. Name it in rng_argnums."
                )
        params, where = self._params_on_device(known)
        new = dict(zip(self.roles["argnums"], params, strict=True))
        device = jax.lax.axis_index(axes)
        for name in ("batch_argnums", "rng_argnums", "carry_argnums"):
            for position in self.roles[name]:
                tree = _collectives.vary(self.args[position], axes)
                if name == "rng_argnums":
                    tree = jax.tree.map(lambda k: jax.random.fold_in(k, device), tree)
                new[position] = tree
        return self.with_args(new)._replace(where=where)

    def _check_split(self, axes: Axes) -> None:
        leaves = jax.tree.leaves(self.role("batch_argnums"))
        split = frozenset().union(*map(_mesh.varying, leaves))
        same = tuple(name for name in axes if name not in split)
        if same:
            raise ValueError(
                f"The batch must differ between the devices along {axes}, but it is "
                f"the same along {same}. Pass it to the shard_map with {axes} in its "
                "in_specs."
            )

    def _params_on_device(self, known: bool) -> tuple[Any, list[Placement]]:
        axes = self.axes
        params = self.role("argnums")
        paths, structure = jax.tree_util.tree_flatten_with_path(params)
        leaves = [leaf for _, leaf in paths]
        where = _mesh.placements(self.params, self.specs, axes, None)
        if self.options.each:
            if not known and self.specs is None:
                raise ValueError(
                    'sync="each" must know which parameters are sharded over '
                    f"{axes}, but this shard_map has check_vma=False. Pass "
                    "DataAxis(param_specs=), or leave check_vma on."
                )
            summed = [
                tuple(n for n in axes if n in place.axes or n in _mesh.varying(x))
                for x, place in zip(leaves, where, strict=True)
            ]
            return _collectives.vary(params, axes), [
                Placement(summed=names) for names in summed
            ]
        for (path, x), place in zip(paths, where, strict=True):
            loose = _mesh.varying(x) & (set(axes) - set(place.axes))
            if loose:
                raise ValueError(
                    "Parameters must be the same on all devices along the data axis, "
                    "or param_specs must say how they are sharded, but "
                    f"{leaf_name(path)} differs along {tuple(sorted(loose))}. Pass "
                    'DataAxis(param_specs=); or sync="each", if fun itself gathers '
                    "them."
                )
        leaves = _collectives.gather(_collectives.vary(leaves, axes), where)
        return jax.tree.unflatten(structure, leaves), where


# -- Checks ----------------------------------------------------------------------------


def _check_keys(position: int, tree: Any) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
        typed = jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
        raw = dtype == jnp.uint32 and len(shape) == 1
        if not (typed or raw):
            raise ValueError(
                "rng_argnums must name PRNG keys, or trees of them, but "
                f"{leaf_name(path)} of argument {position} has shape {shape} and dtype "
                f"{dtype.name}. Pass one key, from jax.random.key(seed) for example; "
                "every micro-batch derives its own."
            )


def _check_batch(options: Options, devices: int, batch: dict[int, Any]) -> None:
    k, first = options.num_microbatches, None
    for position, tree in batch.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            shape = jnp.shape(leaf)
            name = leaf_name(path)
            if len(batch) > 1 or not path:
                name = f"{name} of argument {position}"
            if not shape:
                raise ValueError(
                    f"Every leaf of the batch must have a batch axis, but {name} is a "
                    "scalar. Pass it in an argument that batch_argnums does not name, "
                    "or by keyword: those go to every micro-batch whole."
                )
            if first is None:
                first = name, shape
            elif shape[0] != first[1][0]:
                raise ValueError(
                    "All leaves of the batch must have one length along axis 0, but "
                    f"{first[0]} has shape {first[1]} and {name} has shape {shape}. "
                    "Put the examples on axis 0 of each, or pass what is not per "
                    "example in another argument."
                )
    if first is None:
        raise ValueError(
            "batch_argnums must name arguments that hold arrays, but argument"
            f"{'s' * (len(batch) > 1)} {', '.join(map(str, batch))} "
            f"hold{'s' * (len(batch) == 1)} none. Pass the batch there, or change "
            "batch_argnums."
        )
    name, shape = first
    rows = shape[0]
    if rows == 0:
        raise ValueError(
            f"The batch must hold at least one example, but {name} has shape {shape}. "
            "Skip the call if there is no data."
        )
    if rows % devices:
        raise ValueError(
            f"The {devices} devices along data_axis={options.axes} must divide the "
            f"batch axis, but {name} has shape {shape}. Use a batch of "
            f"{rows - rows % devices or devices} or "
            f"{rows + devices - rows % devices} examples."
        )
    if rows // devices % k:
        what = "the batch axis"
        if devices > 1:
            what = (
                f"the batch of each of the {devices} devices, {rows // devices} "
                "examples"
            )
        raise ValueError(
            f"num_microbatches={k} must divide {what}, but {name} has shape {shape}. "
            f"Use {_divisors(rows // devices, k)}."
        )


def _check_not_split(batch: dict[int, Any]) -> None:
    """Raises if the type of a leaf says that devices share its rows."""
    for position, tree in batch.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            axes = _mesh.explicit_axes(leaf, 0)
            if axes:
                raise ValueError(
                    "A batch split over explicit mesh axes needs data_axis, but "
                    f"{leaf_name(path)} of argument {position} is split over {axes} "
                    "and data_axis is None. Pass data_axis="
                    f"{(axes if len(axes) > 1 else axes[0])!r}: each device then "
                    "splits its own rows, and the gradient is reduced once."
                )


def _divisors(n: int, near: int) -> str:
    """The divisors of n in words: all of them, or the eight nearest to `near`."""
    *most, last = map(str, sorted(sorted(divisors(n), key=lambda d: abs(d - near))[:8]))
    return f"{', '.join(most)} or {last}" if most else last

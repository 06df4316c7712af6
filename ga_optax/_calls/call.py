"""One call of the fold inside a call: its arguments by role, checked and placed."""

import itertools
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from ga_optax import config
from ga_optax._calls import batches, words
from ga_optax._calls.options import INTEGERS, Argument, Options
from ga_optax._checks import check_arrays, check_inexact, named_leaves, nodes_of
from ga_optax._devices import collectives, membership, meshes
from ga_optax._devices.meshes import Axes, Placement
from ga_optax._loop.step import Where
from ga_optax._passes import probe
from ga_optax._passes.facts import Lies
from ga_optax._passes.shards import Shard
from ga_optax.accumulator import Accumulator

_OF_INTEGERS = (
    "Pass it as another argument, or allow_int=True, which ga_optax.value_and_grad has."
)


class DoesNotFitError(ValueError):
    """An argument or an option does not fit: that is said, and nothing computed."""


class NoDerivativeError(NotImplementedError):
    """What is asked for is a derivative that cannot be had."""


class Call(NamedTuple):
    """One call of the returned function: its arguments by role.

    Attributes:
      options: the options.
      args: the positional arguments.
      kwargs: the keyword arguments.
      roles: the positions and keywords of each role.
      batch_axes: along which axis each leaf of the batch arguments is split; None if
        it goes to each micro-batch whole, as it came.
      mesh: the mesh that is yet to bind the data axes; None if none is: there are no
        such axes, or a `shard_map` around the call binds them.
      specs: how the data axes shard the parameters: `DataAxis.param_specs`, or what
        was found.
      grad_specs: how they shard the gradients of whole parameters; None if as those.
      placements: how to merge the gradient of each parameter leaf over the data axes
        that are bound.
      rows: how many leaves of the batch are differentiated, too: the first of them.
      shards: the parts of arguments without gradient that are gathered where they are
        used, by the ids of these.
      sums: whether gradients come in the dtypes of their sums.
    """

    options: Options
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    roles: dict[str, tuple[Argument, ...]]
    batch_axes: Sequence[int | None] = ()
    mesh: Any = None
    specs: Any = None
    grad_specs: Any = None
    placements: Sequence[Placement] = ()
    rows: int = 0
    shards: Mapping[int, Shard] = types.MappingProxyType({})
    sums: bool = False

    @classmethod
    def make(
        cls, options: Options, args: Any, kwargs: Any, hint: bool = False
    ) -> "Call":
        """Checks the arguments; raises before `fun` is traced.

        If what has rows is a `hint`, leaves that cannot be split go whole, and an
        argument without a role that has the batch's rows is split as well.
        """
        optimize = options.optimize and config.optimize and probe.usable()
        if optimize:
            words.what_is_missing()
        options = options._replace(optimize=optimize)
        if meshes.sees_all_rows(options.axes):  # in another call with that data axis
            options = options._replace(data_axis=None)
        call = cls(options, args, kwargs, options.roles(len(args), kwargs))
        for i in call.roles["argnums"]:
            check_parameters(i, call.at(i))
            check_arrays(batches.argument(i), call.at(i))
            for name, x in named_leaves(call.at(i)):
                check_inexact(f"{name} of {batches.argument(i)}", x, _OF_INTEGERS)
        for i in call.roles["carry_argnums"]:
            check_arrays(batches.argument(i), call.at(i), "Carry arrays alone.")
        call = call._replace(batch_axes=batches.axes_of(call, hint))
        if options.data_axis is not None:
            axis = options.data_axis
            mesh = meshes.find_mesh(axis.axes, axis.mesh, call.batch)
            whole = axis.grad_specs is not None
            specs = PartitionSpec() if whole else axis.param_specs
            call = call._replace(mesh=mesh, specs=specs, grad_specs=axis.grad_specs)
        batches.check_logical(call)
        if call.mesh is not None:
            call.check_specs()
        return batches.divided(call, hint)

    def check_specs(self) -> None:
        """Raises if the specs of the parameters, or of gradients, do not fit."""
        self.lie()
        where, axes = self.lie(of_gradients=True), self.options.axes
        if not self.options.each:
            meshes.check_scatter(self.params, where, axes, self.mesh)

    def lie(self, of_gradients: bool = False) -> list[Placement]:
        """How the data axes shard the parameters, or are to shard their gradients."""
        specs, option = self.specs, "param_specs"
        if of_gradients and self.grad_specs is not None:
            specs, option = self.grad_specs, "grad_specs"
        axes = self.options.axes
        return meshes.placements(self.params, specs, axes, self.mesh, option)

    def at(self, place: Argument) -> Any:
        """The argument at a position, or that of a keyword."""
        return self.kwargs[place] if isinstance(place, str) else self.args[place]

    def role(self, name: str) -> tuple[Any, ...]:
        """The arguments with a role."""
        return tuple(self.at(i) for i in self.roles[name])

    @property
    def without_role(self) -> list[Argument]:
        """Where the arguments stand that have none."""
        with_role = {INTEGERS, *itertools.chain(*self.roles.values())}
        return [i for i in (*range(len(self.args)), *self.kwargs) if i not in with_role]

    def leaves(self, role: str | None = None) -> dict[int, Any]:
        """The leaves of the arguments with a role, or of all, by their numbers.

        Of the batch those that have an axis.
        """
        count, found = itertools.count(), {}
        for i in (*range(len(self.args)), *self.kwargs):
            leaves = jax.tree.leaves(self.at(i))
            found[i] = [(n, x) for x, n in zip(leaves, count, strict=False)]
        chosen = found if role is None else self.roles[role]
        pairs = [pair for i in chosen for pair in found[i]]
        if role != "batch_argnums":
            return dict(pairs)
        split = zip(pairs, self.batch_axes, strict=True)
        return dict(pair for pair, axis in split if axis is not None)

    @property
    def others(self) -> dict[int, Any]:
        """What else has to be an operand of a region of a mesh, by number.

        All that has no role either, such as numbers and flags, goes to `fun` as it is.
        """
        known = {n for role in self.roles for n in self.leaves(role)}
        leaves = self.leaves().items()
        return {n: x for n, x in leaves if n not in known and collectives.is_operand(x)}

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
    def axes(self) -> Axes:
        """The data axes that are bound: over which this call is one device's part."""
        return self.options.axes if self.mesh is None else ()

    @property
    def by_compiler(self) -> bool:
        """Whether the compiler merges over devices: sync="each" at top level."""
        return self.options.each and self.mesh is not None

    @property
    def maps(self) -> bool:
        """Whether each device runs its own part, in a `shard_map` that is made here."""
        return self.mesh is not None and not self.by_compiler

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
        return {i: x for i, x in enumerate(self.placements) if x.dims}

    def where(self) -> Where:
        """What a loop knows of the devices."""
        options, lies = self.options, None
        if self.by_compiler and not meshes.explicit_names(self.mesh):
            specs = meshes.broadcast_specs(self.specs, self.params)
            lies = Lies(specs, options.axes, self.mesh)
        return Where(
            names=[name for name, _ in named_leaves(self.params)],
            axes=self.axes,
            placements=self.placements,
            sent=self.sent,
            logical=self.logical,
            gathered=lies,
            shards=self.shards,
            split_by_compiler=self.by_compiler or self.distributed,
        )

    def split(self, strided: bool | None) -> list[jax.Array]:
        """The batch as `[number of parts, ...]`, micro-batches along axis 0."""
        k = self.num_parts
        with jax.named_scope("split"):
            pairs = zip(self.batch, self.split_axes, strict=True)
            if self.mesh is None:
                return [membership.split(x, k, axis, strided) for x, axis in pairs]
            where = self.options.axes, self.mesh
            return [collectives.split_shards(x, k, *where, axis) for x, axis in pairs]

    def flat(self, acc: Accumulator) -> Any:
        """An accumulator whose total is a list, of this device's own."""
        total = collectives.vary(jax.tree.leaves(acc.total), self.axes)
        return acc._replace(total=total)

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

    def with_leaves(self, new: Mapping[int, Any]) -> "Call":
        """The same call with other leaves in place of some, by their numbers.

        All else goes to `fun` as it came.
        """
        count = itertools.count()

        def renewed(tree: Any) -> Any:
            leaves, structure = jax.tree.flatten(tree)
            own = [(n, x) for x, n in zip(leaves, count, strict=False)]
            if not any(n in new for n, _ in own):
                return tree
            return structure.unflatten(new.get(n, x) for n, x in own)

        args = tuple(map(renewed, self.args))
        return self._replace(
            args=args, kwargs={i: renewed(x) for i, x in self.kwargs.items()}
        )

    def on_device(self) -> "Call":
        """The same with every argument of a role made this device's own.

        Parameters that the data axes shard come out whole; keys differ by device.
        """
        axes = self.axes
        if not axes:
            return self
        split = frozenset().union(*map(meshes.varying, self.batch))
        same = tuple(name for name in axes if name not in split)
        known = meshes.checks_varying()
        if known and same:
            raise ValueError(
                f"The batch must differ between the devices along {axes}, but it is "
                f"the same along {same}. Name {axes} in the in_specs of the shard_map."
            )
        where = self._placed_in_region(known)
        own = {role: collectives.vary(self.leaves(role), axes) for role in self.roles}
        params = collectives.gather(list(own["argnums"].values()), where)
        own["argnums"] = dict(zip(own["argnums"], params, strict=True))
        if not self.logical:
            device = jax.lax.axis_index(axes)
            keys = own["rng_argnums"].items()
            own["rng_argnums"] = {n: jax.random.fold_in(k, device) for n, k in keys}
        if self.grad_specs is not None:
            where = self.lie(of_gradients=True)
        new = {n: x for leaves in own.values() for n, x in leaves.items()}
        return self.with_leaves(new)._replace(placements=where)

    def _placed_in_region(self, known: bool) -> list[Placement]:
        """Where the parameters lie that a region of a mesh holds; or raises."""
        axes, where, each = self.axes, self.lie(), self.options.each
        if each and not known and self.specs is None:
            raise ValueError(
                f'sync="each" must know which parameters are sharded over {axes}, but '
                "this shard_map has check_vma=False. Pass DataAxis(param_specs=), or "
                "leave check_vma on."
            )
        for i, (name, x) in enumerate(named_leaves(self.role("argnums"))):
            sharded, varying = where[i].axes, meshes.varying(x)
            loose = tuple(n for n in axes if n in varying and n not in sharded)
            if each:
                summed = tuple(n for n in axes if n in varying or n in sharded)
                where[i] = Placement(summed=summed)
            elif loose:
                raise DoesNotFitError(
                    "Parameters must be the same on all devices along the data axis, "
                    f"or param_specs must say how they are sharded, but {name} differs "
                    f"along {loose}. Pass DataAxis(param_specs=); or "
                    'sync="each", if fun itself gathers them.'
                )
        return where


def check_parameters(place: Argument, tree: Any) -> None:
    """Raises if parameters of a Flax module come with other state of it."""
    # Flax is no requirement: who has not imported it has no module of it either.
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    nodes = nodes_of(nnx.Variable, tree)
    others = [(path, x) for path, x in nodes.items() if not isinstance(x, nnx.Param)]
    if 0 < len(others) < len(nodes):
        path, node = others[0]
        raise TypeError(
            f"What is differentiated must be parameters alone, but leaf {path} of "
            f"{batches.argument(place)} is of type {type(node).__name__}, and fun "
            "could not update it. Use the functions of ga_optax.flax, which take "
            "modules; or graph, params, rest = nnx.split(model, nnx.Param, ...), and "
            "nnx.merge(graph, params, rest, copy=True) in fun."
        )

"""What keeps the sum of a window between two calls: one device, or each of many.

`MultiSteps` folds in the same way in both. On one device the state holds the
accumulator, and the last addition divides it. With data axes every device holds its
own sum, and the step all-reduces and divides them.
"""

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from ga_optax import accumulator
from ga_optax._across.choices import Predicate, select
from ga_optax._checks import named_leaves
from ga_optax._devices import collectives, meshes
from ga_optax.accumulator import Accumulator

T = TypeVar("T")
Held = Any  # an `Accumulator` whose total is the pair `(gradients, extra arguments)`


@dataclasses.dataclass(frozen=True)
class Storage:
    """What a state holds of a window; `total` is `(gradients, extra arguments)`.

    They are sums while the window is open. In the micro-step that closes the window
    on one device they are what the inner optimizer sees, means, in the place of sums.

    Attributes:
      use_grad_mean: whether the inner optimizer sees the mean, or the sum.
      axes: the data axes, bound by a `jax.shard_map`; `()` on one device.
    """

    use_grad_mean: bool
    axes: tuple[str, ...]

    @property
    def spec(self) -> PartitionSpec:
        """How the sum and its weight cross a `jax.shard_map`."""
        return meshes.split_spec(self.axes) if self.axes else PartitionSpec()

    def start(self, acc: Held) -> Held:
        """An empty accumulator as the state holds it: a part for each device."""
        if not self.axes:
            return acc

        def zeros(acc: Held) -> Held:
            parts = jax.tree.map(lambda x: jnp.zeros_like(x)[None], acc)
            return collectives.vary(parts, self.axes)

        mesh = meshes.find_mesh(self.axes, None, acc.total)
        if mesh is None:
            return zeros(acc)
        specs = (PartitionSpec(),), self.spec
        return collectives.over_mesh(zeros, mesh, self.axes, specs)(acc)

    def load(self, acc: Held) -> Held:
        """This device's accumulator, out of what the state holds."""
        if not self.axes:
            return acc
        if meshes.find_mesh(self.axes, None) is not None:
            raise ValueError(
                f"With data_axis={self.axes} this must be called inside a "
                "jax.shard_map over that axis, with state_specs for the state, but it "
                "is called outside. Wrap the training step; or leave data_axis out "
                "if the compiler splits the batch."
            )
        for name, leaf in named_leaves((acc.total, acc.weight)):
            if jnp.shape(leaf)[:1] != (1,):
                raise ValueError(
                    "Inside the shard_map the state must hold this device's part of "
                    f"the accumulator, [1, ...], but {name} has shape "
                    f"{jnp.shape(leaf)}. Pass state_specs as its in_specs."
                )
        total, weight = jax.tree.map(lambda x: x[0], (acc.total, acc.weight))
        return Accumulator(total, weight, acc.count)

    def store(self, acc: Held) -> Held:
        """The reverse of `load`."""
        if not self.axes:
            return acc
        parts = jax.tree.map(lambda x: x[None], (acc.total, acc.weight))
        total, weight = collectives.vary(parts, self.axes)
        return Accumulator(total, weight, acc.count)

    def check(self, grads: Any, params: Any, extra_args: Any) -> None:
        """Raises if gradients are reduced already, or the rest differs by device."""
        if not self.axes or not meshes.checks_varying():
            return
        axes = set(self.axes)
        for name, leaf in named_leaves(grads):
            reduced = sorted(axes - meshes.varying(leaf))
            if reduced:
                raise ValueError(
                    f"With a data_axis, grads must be those of one device, but {name} "
                    f"is the same along {reduced}: it is reduced already. To fix it, "
                    f"{meshes.OWN_COPY}"
                )
        for what, tree, todo in (
            ("extra arguments", extra_args, "Reduce them, with jax.lax.pmean."),
            ("params", params, "The sums would mix its shards: pass whole ones."),
        ):
            for name, leaf in named_leaves(tree):
                own = sorted(axes & meshes.varying(leaf))
                if own:
                    raise ValueError(
                        f"With a data_axis, {what} must be the same on all devices, "
                        f"but {name} differs along {own}. {todo}"
                    )

    def agree(self, decision: T) -> T:
        """A decision for all devices: if one of them says yes, all do."""
        if not self.axes:
            return decision
        return jax.tree.map(
            lambda x: jax.lax.pmax(x, self.axes),
            collectives.vary(decision, self.axes),
        )

    def of_all(self, grads: optax.Updates) -> optax.Updates:
        """Gradients with the types that the inner optimizer will see."""
        if not self.axes:
            return grads
        # They vary over devices here, and do not there.
        return jax.tree.map(
            lambda g: jax.ShapeDtypeStruct(g.shape, jnp.result_type(g)), grads
        )

    def finish(self, acc: Held, closes: Predicate) -> Held:
        """The sum; on one device, if the window closes, what the inner optimizer sees.

        Dividing here is part of the pass that adds the gradient. In the branch of the
        conditional it would be a pass of its own, over a second buffer. And it comes
        last: XLA computes a division once, and anything cheaper that follows it again
        for each reader, out of a sum that it has to copy for that.
        """
        divides = self.use_grad_mean or acc.total[1]
        if self.axes or not divides or closes is False:
            return acc  # over devices the sums are merged first, and divided then
        return select(closes, self._mean(acc), acc)

    def fence(self, acc: Held) -> Held:
        """Keeps the last addition out of the inner optimizer.

        Fused into it, the optimizer would read the old sum after the new one has
        overwritten it, so XLA would copy the old sum first.
        """
        return acc if self.axes else jax.lax.optimization_barrier(acc)

    def merged(self, acc: Held) -> Held:
        """What the inner optimizer sees, of the sums of all devices."""
        with jax.named_scope("ga_optax.merge"):
            grads, args = acc.total
            total = grads, collectives.vary(args, self.axes)
            whole = collectives.merge_across(acc._replace(total=total), self.axes)
        return self._mean(whole)

    def _mean(self, acc: Held) -> Held:
        """The same of one sum: of extra arguments always the mean."""
        divide = functools.partial(accumulator.divide, weight=acc.weight)
        grads, args = acc.total
        grads = jax.tree.map(divide, grads) if self.use_grad_mean else grads
        return acc._replace(total=(grads, jax.tree.map(divide, args)))

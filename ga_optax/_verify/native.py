"""Both gradients as training computes them, in the parameters' own dtypes."""

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax._verify.comparison import Comparison
from ga_optax._verify.gradients import distance, norm, norms, ratio
from ga_optax._verify.loss import NotFiniteError, first_not_finite
from ga_optax._verify.report import LeafReport
from ga_optax._verify.ulps import ulps


class Native:
    """How the two gradients differ as training computes them.

    Attributes:
      leaves: a report for each leaf.
      max_ulp: the largest of the leaves.
      distance: ‖G - M‖, G undivided and M accumulated.
      relative: that over ‖G‖.
      errors: ‖x - G‖ / ‖G‖ of each of the two, with G in float64.
      dtype: the narrowest floating dtype in it.
      eps: its precision.
    """

    def __init__(self, comparison: Comparison) -> None:
        loss, problem = comparison.loss, comparison.problem
        params, batch = problem.params, problem.batch
        with jax.enable_x64(problem.x64):
            grads = jax.jit(jax.grad(problem.fun))(params, batch, *problem.keys(0))
            whole = jax.tree.leaves(grads)
            loss.progress.tick()
            grads = jax.jit(problem.accumulated)(params, batch, *problem.key)[1]
            parts = jax.tree.leaves(grads)
            loss.progress.tick()
        del grads
        places = problem.place(None), "accumulated over the micro-batches"
        for place, leaves in zip(places, (whole, parts), strict=True):
            found = first_not_finite(problem, place, 0.0, leaves)
            if found is not None:
                raise NotFiniteError(found, narrow=True)
        self.leaves = tuple(
            map(_compare_leaf, problem.names, whole, parts, comparison.relative)
        )
        self.max_ulp = max(leaf.max_ulp for leaf in self.leaves)
        dtypes = {loss.dtype, *(x.dtype.name for x in whole)}
        self.eps, self.dtype = max((float(jnp.finfo(d).eps), d) for d in dtypes)
        exact = loss.of_part(None)[1]
        size = norm(norms(exact))
        self.distance = distance(whole, parts)
        self.relative = ratio(self.distance, size)
        self.errors = [ratio(distance(x, exact), size) for x in (whole, parts)]


def _compare_leaf(
    name: str, whole: jax.Array, parts: jax.Array, relative: float
) -> LeafReport:
    a, b = np.asarray(whole), np.asarray(parts)
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    return LeafReport(
        name=name,
        shape=a.shape,
        dtype=a.dtype.name,
        max_ulp=int(ulps(a, b).max(initial=0)),
        max_abs=float(np.abs(a.astype(wide) - b.astype(wide)).max(initial=0.0)),
        relative=float(relative),
    )

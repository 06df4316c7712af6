"""Both gradients as training computes them, in the parameters' own dtypes."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax import accumulator
from ga_optax._verify.comparison import Comparison
from ga_optax._verify.gradients import distance, norm, norms, ratio, ulps
from ga_optax._verify.loss import NotFiniteError, first_not_finite
from ga_optax._verify.report import LeafReport


class Native:
    """How the two gradients differ as training computes them.

    Attributes:
      comparison: the two gradients in float64, if the loss runs in float64.
      leaves: a report for each leaf.
      max_ulp: the largest of the leaves.
      distance: ‖G - M‖, G undivided and M accumulated.
      relative: that over ‖G‖.
      errors: ‖x - G‖ / ‖G‖ of each of the two, with G in float64.
      dtype: the floating dtype of the lowest precision in it.
      has_few_digits: whether less than half of that dtype's digits are right.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        loss, problem = comparison.loss, comparison.problem
        params, batch = problem.params, problem.batch
        # Each is traced by itself, as in training.
        grad, other = (
            jax.jit(jax.grad(problem.of_part(problem.fun))) for _ in range(2)
        )
        with jax.enable_x64(problem.x64):
            whole = jax.tree.leaves(grad(params, batch, *problem.part(None)))
            loss.progress.tick()
            acc = accumulator.init(params)
            for i, weight in enumerate(problem.weights):
                grads = other(params, batch, *problem.part(i))
                given = None if problem.weight is None else float(weight)
                acc = accumulator.add(acc, grads, given)
                loss.progress.tick()
            means = jax.tree.leaves(accumulator.mean(acc))
        parts = [x.astype(y.dtype) for x, y in zip(means, whole, strict=True)]
        places = problem.place(None), "accumulated over the micro-batches"
        for place, leaves in zip(places, (whole, parts), strict=True):
            found = first_not_finite(problem, place, 0.0, leaves)
            if found is not None:
                raise NotFiniteError(found, low_precision=True)
        names, relative = problem.names, comparison.relative
        self.leaves = tuple(map(_compare_leaf, names, whole, parts, relative))
        self.max_ulp = max(leaf.max_ulp for leaf in self.leaves)
        dtypes = {loss.dtype, *(x.dtype.name for x in whole)}
        eps, self.dtype = max((float(jnp.finfo(d).eps), d) for d in dtypes)
        exact = loss.of_part(None)[1]
        size = norm(norms(exact))
        self.distance = distance(whole, parts)
        self.relative = ratio(self.distance, size)
        self.has_few_digits = self.distance > math.sqrt(eps) * norm(comparison.terms)
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

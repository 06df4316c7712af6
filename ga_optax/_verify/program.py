"""What the program of the loss shows although the gradients may be equal.

Some mistakes are in the undivided batch's gradient and in its parts' alike, or show in
another batch alone. So no comparison of numbers finds them, but the program does.
"""

import numpy as np
from jax.extend import core

from ga_optax._passes import ir
from ga_optax._verify.proof import Proof, in_words

_SAME_VALUE = ("convert_element_type", "copy", "copy_p")


def warnings(proof: Proof | None, ok: bool) -> tuple[str, ...]:
    """What is wrong with a loss although the gradients may be equal, in sentences."""
    if proof is None:
        return ()
    found = [_ignored_batch(proof), _division_by_k(proof)]
    if ok and proof.problem.k > 1:
        found.append(_equal_counts(proof))
    return tuple(filter(None, found))


def _ignored_batch(proof: Proof) -> str:
    """If the loss does not use its batch."""
    k = proof.problem.k
    if k == 1 or proof.has_rows:
        return ""
    shapes = {np.shape(x) for x in proof.given}
    data = sorted(shape for shape in shapes if proof.problem.batch_size in shape)
    of = f", of shape {data[-1]} for example," if data else ""
    return f"""The loss does not use its batch. Each of the {k} micro-batches
        computes the same, which takes {k} times the time and saves no memory.
        Most likely the loss closes over the data{of} instead of reading it from its
        batch argument."""


def _equal_counts(proof: Proof) -> str:
    """If the micro-batches count alike in this batch, and maybe not in another."""
    alone = proof.meetings and proof.meets_in_counts
    if proof.problem.weight is not None or not alone:
        return ""
    return f"""The gradients agree because the micro-batches of this batch count alike.
        Those of another may not, for the loss reads a number of all rows. Where:
        {in_words(proof.counts)}. Pass a weight_fn that returns it, or use
        ga_optax.value_and_grad, which needs none."""


def _division_by_k(proof: Proof) -> str:
    """If the loss is divided by the number of micro-batches."""
    k = proof.problem.k
    # A half belongs to many losses.
    if k <= 2 or not _ends_with_division(proof.program.jaxpr, k):
        return ""
    return f"""The last operation of the loss divides it by {k}, which is the number of
        micro-batches. PyTorch needs that division, but ga_optax divides itself: remove
        it, unless it has another reason. Both gradients have this factor, so they do
        not differ by it."""


def _ends_with_division(jaxpr: core.Jaxpr, k: int) -> bool:
    """Whether the result is a mean, or another scalar but a sum, over a literal k."""
    last = _made_by(jaxpr, jaxpr.outvars[0])
    if last is None or last.primitive.name != "div":
        return False
    total, number = last.invars
    of = _made_by(jaxpr, total)
    # The division of a sum makes the mean itself.
    is_mean = of is not None and of.primitive.name == "reduce_sum"
    return not is_mean and isinstance(number, core.Literal) and number.val == k


def _made_by(jaxpr: core.Jaxpr, variable: object) -> core.JaxprEqn | None:
    """The equation that computes a value, before casts."""
    equation = ir.made_by(jaxpr, variable)
    while equation is not None and equation.primitive.name in _SAME_VALUE:
        equation = ir.made_by(jaxpr, equation.invars[0])
    return equation

"""Rules of the user's, whose second derivatives the program of a window does not have.

That program fills levels by functions that have others, and opens the rules that a rule
calls. So on a mesh, where JAX differentiates it, what has such a rule is refused.
"""

from typing import Any

import jax
from jax.extend import core

from ga_optax._calls.call import Call
from ga_optax._partition.custom import calls_rules, is_of_jax
from ga_optax._passes import places, read
from ga_optax._passes.divided import Divided


class NoDerivativeError(NotImplementedError):
    """A derivative that cannot be had."""


def rule_in(jaxpr: core.Jaxpr) -> core.JaxprEqn | None:
    """A call in a program that has a rule which may not be the true derivative.

    Those of JAX for forward mode are, and are kept, if they call no others.
    """
    for e in read.equations(jaxpr):
        name = e.primitive.name
        if name == "custom_vjp_call":
            return e
        if name == "custom_jvp_call" and (not is_of_jax(e) or calls_rules(e)):
            return e
        its = e.params.get("function")
        if isinstance(its, Divided) and rule_in(its.program.jaxpr):
            return e
    return None


def refused(call: Call, e: core.JaxprEqn, what: str) -> Exception:
    """The error of a derivative that cannot be had, of a program with such a call."""
    bound = call.devices.bound
    where = f"a jax.shard_map binds {bound}" if bound else "the mesh has them"
    return NoDerivativeError(
        f"{what} cannot be differentiated in a jax.shard_map, or with mesh axes of "
        "explicit type, if fun has a derivative rule of its own, but fun has "
        f"{e.primitive.name} at {places.place_of(e.source_info)}, and {where}. Call "
        "the function of ga_optax at top level, with data_axis=ga_optax.DataAxis(name, "
        "mesh=mesh) and mesh axes of the type Auto."
    )


def fixed(x: Any, error: Exception) -> Any:
    """The same array, which may have no derivative."""
    same = jax.custom_jvp(lambda x: x)

    @same.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise error

    return same(x)


def once(x: Any, error: Exception) -> Any:
    """The same array, which may be differentiated once, and not again."""
    same = jax.custom_jvp(lambda x: x)
    same.defjvp(lambda xs, ts: (fixed(xs[0], error), ts[0]))
    return same(x)

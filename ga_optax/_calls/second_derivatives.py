"""Custom derivative rules, of which a window has the first derivatives alone.

The program of a window has no rules for second derivatives. On a mesh JAX would
differentiate the program, so functions with such rules are refused.
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

    Rules of JAX for forward mode are true derivatives if they call no other rules.
    """
    for e in read.equations(jaxpr):
        name = e.primitive.name
        if name == "custom_vjp_call":
            return e
        if name == "custom_jvp_call" and (not is_of_jax(e) or calls_rules(e)):
            return e
        divided = e.params.get("function")
        if isinstance(divided, Divided) and rule_in(divided.program.jaxpr):
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
    """The same array, which raises `error` if it is differentiated."""
    same = jax.custom_jvp(lambda x: x)

    @same.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise error

    return same(x)


def once(x: Any, error: Exception) -> Any:
    """The same array, which raises `error` if it is differentiated twice."""
    same = jax.custom_jvp(lambda x: x)
    same.defjvp(lambda xs, ts: (fixed(xs[0], error), ts[0]))
    return same(x)

"""What is known of JAX's primitives, and what a program does beyond its results.

A pass changes equations of these primitives alone, and leaves the others where they
are. What is not known may hold anything in its backward pass: so it is differentiated
by itself to see whether that prints, calls back or communicates.
"""

import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._passes import ir, places, primitives

CAST = "convert_element_type"
PRODUCT, CONVOLUTION = "dot_general", "conv_general_dilated"
SUM, SUM_OF_TWO, SCATTER = "reduce_sum", "add_any", "scatter-add"
# They move numbers, one to one or one to many, and so do their transposes.
MOVES = ("transpose", "reshape", "squeeze", "broadcast_in_dim")
# They broadcast an operand, whose gradient is a sum over what it went to.
BROADCASTS = ("add", "sub", "mul", "broadcast_in_dim")
# They round nothing, or as often as the one who reads the result.
EXACT = {
    *("iota", "broadcast_in_dim", "reshape", "transpose", "squeeze"),
    *("slice", "concatenate", "pad", "rev", "select_n", CAST, "copy"),
}
# Their gradients need no operand, and no result.
LINEAR = {"iota", CAST} | {
    name for name, row in primitives.TABLE.items() if row.sums == slice(None)
}
# The gradient of an operand needs the other one; that of a divisor both.
OF_TWO = {PRODUCT, CONVOLUTION, "mul", "div"}
# They broadcast their operands.
ELEMENTWISE = {"add", "sub", "mul", "div", "max", "min", "pow"}
CONSTRAINT = "sharding_constraint"
GATHER_PARTS = "ga_optax_gather"  # of `shards`
ADD_TO, WRITE, READ_OUT, NEW_REF = "addupdate", "swap", "freeze", "new_ref"

# Parameters that are read or given here, by primitive.
PARAMETERS = {
    "scan": ("length", "reverse", "unroll"),
    "jit": ("in_shardings", "out_shardings", "in_layouts", "donated_invars"),
    "remat2": ("prevent_cse", "policy"),
    PRODUCT: ("dimension_numbers", "precision", "preferred_element_type"),
    CAST: ("new_dtype", "weak_type", "sharding"),
    "broadcast_in_dim": ("shape", "broadcast_dimensions", "sharding"),
    **dict.fromkeys((NEW_REF, ADD_TO, WRITE, READ_OUT), ()),
}

# Those of jax.lax without a row, whose transposes are linear and do nothing else.
_OTHERS = """
after_all all_gather all_gather_invariant all_gather_reduced all_to_all axis_index
empty2 eq_to iota pbroadcast pmax pmin ppermute random_clone reduce reduce_scatter
"""
# Of these the results are worth keeping; XLA fuses the others into their readers.
_DEAR = """
hessenberg ragged_all_to_all random_bits random_gamma reduce_window rng_bit_generator
select_and_scatter threefry2x32 tridiagonal
"""
_BUILT_IN = frozenset(primitives.TABLE) | frozenset(f"{_OTHERS} {_DEAR}".split())
_BUILT_IN |= {GATHER_PARTS}
CHEAP = frozenset(_OTHERS.split()) | {
    name for name, row in primitives.TABLE.items() if not row.is_dear
}
_RUNS = {"custom_jvp_call"}  # its rule is run as JAX differentiates it


# Code into which JAX cannot see, in a word for people, by primitive.
_HIDDEN = {
    "pallas_call": "kernel",
    "dot_product_attention_fwd_wrapper": "kernel",  # of cuDNN
    "dot_product_attention_bwd_wrapper": "kernel",
    "pure_callback": "callback",
    "io_callback": "callback",
    "ffi_call": "custom call",
    "custom_partitioning": "custom call",
    "ragged_dot_general": "ragged product",
}


_OPEN = _BUILT_IN | PARAMETERS.keys() | ir.CALLS.keys() | _RUNS
_OPEN |= {"custom_vjp_call", "custom_linear_solve", "call_hi_primitive", "shard_map"}
_OPEN |= {"empty", "get", "rowwise", "ga_optax_window", "ga_optax_value_and_grad"}


def hidden(name: str) -> str | None:
    """The kind of code that cannot be read, by its name; None for what can be."""
    is_open = name in _OPEN or not name.isidentifier()
    return _HIDDEN.get(name, None if is_open else "primitive")


def hides(equation: core.JaxprEqn) -> str | None:
    """The primitive in an equation that hides what it does; None if there is none.

    One without results, such as a check, hides nothing of those.
    """
    names = (e.primitive.name for e in ir.within(equation) if e.outvars)
    return next(filter(hidden, names), None)


def constrained_to(equation: core.JaxprEqn) -> Any:
    """The sharding that an equation asks for; None if it is no such constraint."""
    is_constraint = equation.primitive.name == CONSTRAINT
    return equation.params.get("sharding") if is_constraint else None


def is_known(equation: core.JaxprEqn) -> bool:
    """Whether a pass may move an equation: it and all inside it are known."""
    return all(
        not e.effects and (is_built_in(e) or ir.kind(e) or e.primitive.name in _RUNS)
        for e in ir.within(equation)
    )


def is_built_in(equation: core.JaxprEqn) -> bool:
    """Whether it is a primitive of `jax.lax` that does nothing but compute."""
    return not equation.effects and equation.primitive.name in _BUILT_IN


# -- What a program does beside its results --------------------------------------------


class Reason(NamedTuple):
    """Why something is not done to a program, and the line of the user's code."""

    why: str
    line: str = ""


class Deeds(NamedTuple):
    """What a program does that is not known to be harmless.

    Attributes:
      acts: why its effects could come in another order; None if they cannot.
      bends: why its gradient may not scale with its cotangent; None if it does.
      of_rules: the effects of rules of the user's.
    """

    acts: Reason | None = None
    bends: Reason | None = None
    of_rules: frozenset[Any] = frozenset()

    def __or__(self, other: Any) -> "Deeds":
        either = self.acts or other.acts, self.bends or other.bends
        return Deeds(*either, self.of_rules | other.of_rules)


_deeds: Any = weakref.WeakKeyDictionary()  # by program


def deeds(jaxpr: core.Jaxpr) -> Deeds:
    """What the program of a loss does, there and back."""
    if jaxpr not in _deeds:
        found = Deeds()
        for equation in jaxpr.eqns:
            if equation.effects or equation.primitive.name not in _BUILT_IN:
                found |= _deeds_of(jaxpr, equation)
        _deeds[jaxpr] = found
    return _deeds[jaxpr]


def _deeds_of(jaxpr: core.Jaxpr, equation: core.JaxprEqn) -> Deeds:
    name, found = equation.primitive.name, Deeds()
    line = places.line_of(equation.source_info)
    calls = ir.kind(equation) is not None
    for program in ir.inner_programs(equation) if calls else ():
        found |= deeds(program)
    if equation.effects:
        found |= Deeds(Reason("fun prints, calls back or communicates", line))
    if calls or equation.effects:
        return found
    bends = None
    if name not in _RUNS:
        bends = Reason(f"{name} may have a rule of its own", line)
    try:
        effects = backward(jaxpr, equation).effects
    except Exception as error:  # Any: the rule is the user's.
        why = f"{name} raises {type(error).__name__} if it is differentiated alone"
        return Deeds(Reason(why, line), bends)
    acts = Reason(f"the rule of {name} prints, calls back or communicates", line)
    return Deeds(acts if effects else None, bends, frozenset(effects))


def backward(jaxpr: core.Jaxpr, equation: core.JaxprEqn) -> core.Jaxpr:
    """The program that computes an equation and takes a cotangent back through it."""
    ins = list(dict.fromkeys(ir.variables(equation.invars)))
    smooth = [i for i, x in enumerate(ins) if ir.is_inexact(x)]
    outs = [x for x in equation.outvars if ir.is_inexact(x)]

    def forward(*values: Any) -> list[Any]:
        return ir.bind(jaxpr, [equation], ins, outs, values)

    def run(*values: Any) -> Any:
        of_smooth = ir.of_some(forward, values, smooth)
        out, pullback = jax.vjp(of_smooth, *(values[i] for i in smooth))
        return pullback(list(map(jnp.ones_like, out)))

    return ir.program_of(run, *(x.aval for x in ins)).jaxpr

"""A function over micro-batches as one equation of JAX, with its derivatives.

    divided           xs -> fun(*xs), at all rows
    tangent           (xs, ts) -> the tangents of the results
    gradient          (xs, cts) -> the cotangents of some xs

All three are functions over micro-batches themselves, so one primitive serves them.
Its derivative is a tangent; the transpose of a tangent is a gradient, which runs
`fun` once more. If one scalar alone moves, its gradient comes with its value instead:
the tangent is Σ gradient · t, and nothing runs twice. All other transformations, such
as another derivative, JAX applies to the plain function.

An equation may come with a program that exists already, such as that of
`value_and_grad`: then the program runs, and the equation gives its derivatives.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from .._devices import collectives, meshes
from ..accumulator import sum_dtype
from . import effects, jaxprs, new_primitive, primitives

NAME, WRITTEN = "ga_optax_microbatch", primitives.GRADIENTS

Flat = Callable[..., list[Any]]


class Tangent(NamedTuple):
    """The function of which an equation is the tangent.

    Attributes:
      base: the function.
      moving: the operands that have tangents.
      smooth: the results that have tangents.
    """

    base: "Divided"
    moving: tuple[int, ...]
    smooth: tuple[int, ...]


class Gradient(NamedTuple):
    """The function of which an equation is the gradient.

    Attributes:
      base: the function. Its operands come first, then the cotangents.
      wrt: the operands to differentiate with respect to.
      given: the results that have a cotangent.
      outs: the results that come back before the gradients. If there are some, the one
        cotangent is 1, and no operand; and gradients have the dtypes of their sums.
    """

    base: "Divided"
    wrt: tuple[int, ...]
    given: tuple[int, ...]
    outs: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Divided:
    """A function of arrays, to run over micro-batches.

    Attributes:
      name: the name of the function, for people.
      number: the number of micro-batches.
      remat: True if the backward pass computes everything again; None to choose.
      runs: runs the function over micro-batches, given this and the operands.
      finds: returns the axes of the rows of the results, given this.
      flat: the plain function, of all rows.
      types: the types of the operands.
      results: the types of the results.
      axes: the axis of the rows of each operand; None for no rows.
      of: the function of which this is a derivative, if it is one.
      traced: the program of all rows, if there is one already.
      size: the largest number of rows of a micro-batch, if the user gave one.
    """

    name: str
    number: int
    remat: bool | None
    runs: Callable[["Divided", Sequence[Any]], list[Any]]
    finds: Callable[["Divided"], Sequence[int | None]]
    flat: Flat
    types: Sequence[Any]
    results: Sequence[Any]
    axes: tuple[int | None, ...]
    of: Tangent | Gradient | None = None
    traced: jaxprs.Program | None = None
    size: int | None = None

    @classmethod
    def of_program(
        cls, closed: Any, axes: Sequence[int | None], **more: Any
    ) -> "Divided":
        """A program as a function, whose first operands are the program's constants."""
        return cls(**_read(closed, axes), **more)

    def with_program(
        self, closed: Any, axes: Sequence[int | None], number: int
    ) -> "Divided":
        """The function with another program, and another number of micro-batches."""
        return self._with(number=number, **_read(closed, axes))

    @property
    def has_callbacks(self) -> bool:
        """True if the function calls back for its results, or in a fixed order."""
        return self._has_effect("IO") or self._has_effect("Ordered")

    @functools.cached_property
    def rules_act(self) -> bool:
        """True if rules of the user's print or call back; they do with the tangents."""
        jaxpr = self.program.jaxpr
        has_rules = effects.rule_in(jaxpr) is not None
        return has_rules and bool(effects.side_effects(jaxpr).of_rules)

    def _has_effect(self, name: str) -> bool:
        """True if the function has an effect whose type has this name in JAX."""
        return any(name in type(x).__name__ for x in self.program.jaxpr.effects)

    def __repr__(self) -> str:
        return f"{self.name} over {self.number} micro-batches"

    @functools.cached_property
    def program(self) -> jaxprs.Program:
        """The program of all rows."""
        return self.traced or jaxprs.program_of(self.flat, *self.types)

    @functools.cached_property
    def silent(self) -> jaxprs.Program:
        """The program without callbacks, for derivatives: these must not call again."""
        program = self.program
        return program._replace(jaxpr=jaxprs.silent(program.jaxpr))

    def run_silently(self, *xs: Any) -> list[Any]:
        """The results of the function, without callbacks."""
        acts = any(map(jaxprs.acts, self.program.jaxpr.eqns))
        return jaxprs.results(self.silent, xs) if acts else self.flat(*xs)

    @functools.cached_property
    def axes_of_results(self) -> Sequence[int | None]:
        """The axis of the rows of each result, as far as it matters, or None."""
        return self.finds(self)

    def bind(self, xs: Sequence[Any], program: Any = None) -> list[Any]:
        """The results over micro-batches, by a program if there is one already."""
        if program is None:
            return _divided_primitive(NAME).bind(*xs, function=self)
        return _divided_primitive(WRITTEN).bind(*xs, function=self, program=program)

    def _with(self, **new: Any) -> "Divided":
        """Another function over the same micro-batches."""
        return dataclasses.replace(self, **({"of": None, "traced": None} | new))

    # -- Derivatives -------------------------------------------------------------------

    def operands_read(self, operands: Iterable[int]) -> tuple[int, ...]:
        """The operands that the function reads, among some."""
        jaxpr = self.program.jaxpr
        return tuple(i for i in operands if jaxprs.num_readers(jaxpr, jaxpr.invars[i]))

    def moved(self, moving: tuple[int, ...]) -> tuple[int, ...]:
        """The results that have tangents if some operands have tangents."""
        smooth = _depending(self.program.jaxpr, moving)
        smooth = tuple(i for i in smooth if jaxprs.is_inexact(self.results[i]))
        if len(smooth) < 2:
            return smooth
        # A loop, or a function, may return results without tangents beside others.
        tangents = self.tangent(moving, smooth)
        last = range(len(self.types), len(tangents.types))
        return tuple(smooth[i] for i in _depending(tangents.program.jaxpr, last))

    def tangent(self, moving: tuple[int, ...], smooth: tuple[int, ...]) -> "Divided":
        """The tangents of `smooth` results, for tangents of the `moving` operands."""
        return self._with(
            flat=new_primitive.pushed(self.run_silently, moving, smooth),
            types=(*self.types, *(self.types[i] for i in moving)),
            results=tuple(self.results[i] for i in smooth),
            axes=(*self.axes, *(self.axes[i] for i in moving)),
            of=Tangent(self, moving, smooth),
        )

    def beside_tangents(self, moving: tuple[int, ...]) -> "Divided":
        """The function without the rules that gave tangents, see `valued`."""
        if effects.rule_in(self.program.jaxpr) is None:
            return self
        value = self._with(flat=new_primitive.valued(self.flat, moving))
        return self._with(flat=value.run_silently) if self.rules_act else value

    def gradient(self, of: Gradient) -> "Divided":
        """The gradient of the function."""
        n, seeds = len(self.types), () if of.outs else of.given
        of_all = self.flat if of.outs else self.run_silently

        def flat(*both: Any) -> list[Any]:
            xs, cts = both[:n], list(both[n:])

            def of_some(*some: Any) -> tuple[list[Any], list[Any]]:
                out = of_all(*jaxprs.put(xs, of.wrt, some))
                return [out[i] for i in of.given], [out[i] for i in of.outs]

            some = [xs[i] for i in of.wrt]
            out, pull, rest = jax.vjp(of_some, *some, has_aux=True)
            grads = pull(cts if seeds else list(map(collectives.one_like, out)))
            if not seeds:
                grads = [g.astype(sum_dtype(g.dtype)) for g in grads]
            return [*rest, *grads]

        of_wrt = [self.types[i] for i in of.wrt]
        if not seeds:
            of_wrt = [
                x.update(dtype=sum_dtype(x.dtype), weak_type=False) for x in of_wrt
            ]
        return self._with(
            flat=flat,
            types=(*self.types, *(self.results[i] for i in seeds)),
            results=(*(self.results[i] for i in of.outs), *of_wrt),
            axes=(*self.axes, *(self.axes_of_results[i] for i in seeds)),
            of=of,
        )

    def comes_with_value(self, smooth: Sequence[int], moving: Sequence[int]) -> bool:
        """True if the gradient comes with the value.

        In float16 a gradient that is not scaled yet may vanish. If the function
        communicates, the cotangents of other devices come into the gradient.
        """
        if self.of is not None or self._has_effect("NamedAxis"):
            return False
        results = [self.results[i] for i in smooth]
        is_one = len(results) == 1 and results[0].shape == ()
        is_one = is_one and jnp.issubdtype(results[0].dtype, jnp.floating)
        if self.remat is False and results and not is_one:
            raise ValueError(
                "With remat=False exactly one result must be differentiated, a real "
                f"scalar, but of {self.name} come {[str(x) for x in results]}. Leave "
                "remat out, or put stop_gradient around the others."
            )
        operands = [self.types[i] for i in moving]
        half = any(x.dtype == jnp.float16 for x in (*results, *operands))
        return is_one and (not half if self.remat is None else not self.remat)

    def batched(
        self, vmap: Any, xs: Sequence[Any], mapped: Sequence[bool], program: Any
    ) -> Any:
        """The results of operands, of which some have one more axis, the first."""
        along = [0 if is_mapped else None for is_mapped in mapped]
        pairs = zip(self.axes, mapped, strict=True)
        axes = [d if d is None else d + is_mapped for d, is_mapped in pairs]
        if program is not None:
            program = jax.make_jaxpr(vmap(core.jaxpr_as_fun(program), along))(*xs)
            types, results = tuple(program.in_avals), tuple(program.out_avals)
            how = {"types": types, "results": results, "axes": tuple(axes)}
            return self._with(flat=vmap(self.flat, along), **how).bind(xs, program)
        closed = jax.make_jaxpr(vmap(self.flat, along))(*xs)
        new = self.with_program(closed, axes, self.number)
        # JAX differentiates the function itself: its rules may run only then.
        flat = new.flat if closed.consts else vmap(self.flat, along)
        new = dataclasses.replace(new, remat=self.remat or None, flat=flat)
        return new.bind([*closed.consts, *xs])


def _read(closed: Any, axes: Sequence[int | None]) -> dict[str, Any]:
    """The fields of a `Divided` that depend on its program alone."""
    jaxpr = jaxprs.without_constants(closed.jaxpr)
    program = jaxprs.Program(jaxpr)

    def flat(*xs: Any) -> list[Any]:
        return jaxprs.results(program, xs)

    return {
        "flat": flat,
        "types": tuple(x.aval for x in jaxpr.invars),
        "results": tuple(x.aval for x in jaxpr.outvars),
        "axes": (*[None] * len(closed.consts), *axes),
        "traced": program,
    }


def _depending(jaxpr: core.Jaxpr, operands: Iterable[int]) -> list[int]:
    """The results of a program that depend on some of its operands."""
    dependent = jaxprs.following(jaxpr, [jaxpr.invars[i] for i in operands])
    return [i for i, x in enumerate(jaxpr.outvars) if jaxprs.is_among(x, dependent)]


# -- The primitives --------------------------------------------------------------------


@functools.cache
def _divided_primitive(name: str) -> core.Primitive:
    def impl(*xs: Any, function: Divided, program: Any = None) -> list[Any]:
        if program is not None:
            return jaxprs.results(program, xs)
        return function.runs(function, xs)

    def plain(function: Divided, program: Any = None) -> tuple[Flat, int]:
        flat = function.flat if program is None else core.jaxpr_as_fun(program)
        return flat, len(function.types)

    how = new_primitive.How(plain, _batched, _derived, impl, _types_of_results)
    new = new_primitive.primitive(name, how)
    new_primitive.transposed(new, _transposed)
    return new


def _types_of_results(
    *types: Any, function: Divided, program: Any = None
) -> tuple[Any, Any]:
    if program is not None:
        return _types_of_program(types, program), jaxprs.outer_effects(program.jaxpr)
    results = function.results
    if function.of is None or any(map(meshes.varying, types)):
        results = [x.aval for x in function.program.jaxpr.outvars]
    return list(results), _effects(function)


def _effects(function: Divided) -> frozenset[Any]:
    """The effects of a function.

    A gradient with the value stands in place of the function, and has its effects. For
    other derivatives the function has called back; only rules inside may call again.
    """
    if (of := function.of) is None:
        return jaxprs.outer_effects(function.program.jaxpr)
    base = of.base.program.jaxpr
    with_value = isinstance(of, Gradient) and of.outs
    found = jaxprs.outer_effects(base) if with_value else frozenset()
    return found | effects.side_effects(base).of_rules


def _types_of_program(types: Sequence[Any], program: Any) -> list[Any]:
    """The types of the results; in a region of a mesh, more of them may vary."""
    if list(map(meshes.varying, types)) == list(map(meshes.varying, program.in_avals)):
        return list(program.out_avals)
    run = core.jaxpr_as_fun(program)
    return [x.aval for x in jaxprs.program_of(run, *types).jaxpr.outvars]


def _batched(
    axis: Any, xs: Any, dims: Any, *, function: Divided, program: Any = None
) -> list[Any]:
    # The function may communicate along the axis.
    names = {"axis_name": axis.name, "spmd_axis_name": axis.spmd_name}
    vmap = functools.partial(jax.vmap, axis_size=axis.size, **names)
    pairs = zip(xs, dims, strict=True)
    xs = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in pairs]
    return function.batched(vmap, xs, [d is not None for d in dims], program)


def _derived(
    xs: Any,
    moved: list[int],
    dots: list[Any],
    *,
    function: Divided,
    program: Any = None,
) -> tuple[list[Any], dict[int, Any]]:
    moving = function.operands_read(moved)
    dots = [dots[moved.index(i)] for i in moving]
    smooth = function.moved(moving)
    if program is None and function.comes_with_value(smooth, moving):
        every = tuple(range(len(function.results)))
        gradient = function.gradient(Gradient(function, moving, smooth, every))
        both = gradient.bind(xs)
        out, gradients = both[: len(every)], both[len(every) :]
        pairs = zip(gradients, dots, strict=True)
        sum_of_all = functools.reduce(jnp.add, [paired(g, t) for g, t in pairs])
        tangents = [sum_of_all.astype(out[smooth[0]].dtype)]
    # A second run may return something else, or print what its rules print, too.
    elif function.has_callbacks or (
        function.program.jaxpr.effects and function.rules_act
    ):
        out, tangents = new_primitive.differentiated(function.flat, xs, moving, dots)
        tangents = [tangents[i] for i in smooth]
    else:
        value = function.beside_tangents(moving) if smooth else function
        out, tangents = value.bind(xs, program), []
        if smooth:
            tangents = function.tangent(moving, smooth).bind([*xs, *dots])
    return out, dict(zip(smooth, tangents, strict=True))


def paired(x: jax.Array, y: jax.Array) -> jax.Array:
    """Σ x · y, in the dtype of `x`; either one is the gradient for the other.

    `y` may be a Python number, as in `jax.jvp(fun, (x,), (1.0,))`.
    """
    x, y = map(collectives.on_device, (x, jnp.asarray(y)))
    return jnp.sum(x * y.astype(x.dtype)).real.astype(float)


def _transposed(
    xs: Any, linear: Any, cts: Any, *, function: Divided, program: Any = None
) -> list[Any]:
    del program
    if isinstance(of := function.of, Tangent):
        n = len(of.base.types)
        wrt, given = [of.moving[i - n] for i in linear], [of.smooth[i] for i in cts]
        base, operands = of.base, xs[:n]
    else:  # A linear function has the same gradient everywhere.
        types = [function.types[i] for i in linear]
        zeros = [jnp.zeros(x.shape, x.dtype) for x in types]
        given, wrt, base = cts, linear, function
        operands = jaxprs.put(xs, linear, zeros)
    gradient = base.gradient(Gradient(base, tuple(wrt), tuple(given)))
    return gradient.bind([*operands, *cts.values()])


# -- Derivatives that are refused ------------------------------------------------------


class NoDerivativeError(NotImplementedError):
    """A derivative that cannot be had."""


def not_differentiable(x: Any, error: Exception) -> Any:
    """The same array, which raises `error` if it is differentiated."""
    if not jaxprs.is_inexact(x):
        return x
    same = jax.custom_jvp(lambda x: x)

    @same.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise error

    return same(x)

"""All public functions of JAX and of Optax's losses, with rows on axis 0 and axis 1.

Each is called in the ways that it takes, and the program of a micro-batch compared with
that of all rows. `PYTHONPATH=tests python -m corpus.functions` prints
benchmarks/FUNCTIONS.md: which of them are computed whole.
"""

import inspect
import itertools
import sys
import warnings

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import optax
from corpus.harness import arguments, over_micro_batches, partitioned

from ga_optax._passes import jaxprs

MODULES = {
    "jax.numpy": jnp,
    "jax.numpy.fft": jnp.fft,
    "jax.numpy.linalg": jnp.linalg,
    "jax.nn": jax.nn,
    "jax.lax": jax.lax,
    "jax.scipy.fft": jsp.fft,
    "jax.scipy.linalg": jsp.linalg,
    "jax.scipy.signal": jsp.signal,
    "jax.scipy.special": jsp.special,
    "jax.scipy.stats.norm": jsp.stats.norm,
    "jax.scipy.stats": jsp.stats,
    "optax.losses": optax.losses,
}
AXES = (0, 1)


def number(h):
    return (jnp.abs(h) * 3).astype(jnp.int32)


def matrices(h):
    """A matrix for each row, of full rank: rows are the first axis, or the last."""
    return h[:, :, None] * h[:, None, :] + 3 * jnp.eye(h.shape[1], dtype=h.dtype)


# What a function may take: of `h`, which has rows on an axis.
WAYS = {
    "x": lambda f, h: f(h),
    "x, y": lambda f, h: f(h, jnp.cos(h)),
    "x, y, z": lambda f, h: f(h, jnp.cos(h), jnp.sin(h)),
    "x > 0": lambda f, h: f(h > 0),
    "x > 0, y, z": lambda f, h: f(h > 0, h, jnp.sin(h)),
    "int": lambda f, h: f(number(h)),
    "int, int": lambda f, h: f(number(h), number(jnp.cos(h)) + 1),
    "x, int": lambda f, h: f(h, number(h)),
    "int, x": lambda f, h: f(number(h), h),
    "int, 3": lambda f, h: f(number(h), 3),
    "x, axis": lambda f, h: f(h, axis=0),
    "x, other axis": lambda f, h: f(h, axis=1),
    "x, y, axis": lambda f, h: f(h, jnp.cos(h), axis=0),
    "x, 0": lambda f, h: f(h, 0),
    "x, 2": lambda f, h: f(h, 2),
    "x, 0, 1": lambda f, h: f(h, 0, 1),
    "x, 0.5": lambda f, h: f(h, 0.5),
    "x, (1, 0)": lambda f, h: f(h, (1, 0)),
    "x, (0,)": lambda f, h: f(h, (0,)),
    "x, transposed": lambda f, h: f(h, jnp.cos(h).T),
    "[x, y]": lambda f, h: f([h, jnp.cos(h)]),
    "[x, y], 0": lambda f, h: f([h, jnp.cos(h)], 0),
    "probabilities": lambda f, h: f(jax.nn.softmax(h, 1), jax.nn.softmax(-h, 1)),
    "logits, classes": lambda f, h: f(h, number(h[:, 0]) % h.shape[1]),
    "a vector": lambda f, h: f(h[:, 0]),
    "two vectors": lambda f, h: f(h[:, 0], h[:, 1]),
    "matrices": lambda f, h: f(matrices(h)),
    "matrices, x": lambda f, h: f(matrices(h), h[..., None]),
    "matrices, 2": lambda f, h: f(matrices(h), 2),
    "complex": lambda f, h: f(h + 1j * jnp.cos(h)),
}
MOST_WAYS = 4  # of one function

# They are no functions of arrays alone, draw, read files, or need a mesh.
LEFT_OUT = {
    *("load", "save", "savez", "from_dlpack", "fromfile", "print_environment_info"),
    *("all_gather", "all_to_all", "axis_index", "axis_size", "pbroadcast", "pcast"),
    *("pmax", "pmean", "pmin", "ppermute", "pshuffle", "psum", "psum_scatter", "pswap"),
    *("pvary", "ragged_all_to_all", "rng_bit_generator", "rng_uniform", "create_token"),
    *("infeed", "outfeed", "after_all", "optimization_barrier", "reshard", "empty"),
    *("empty_like", "with_sharding_constraint", "stop_gradient", "shape_as_value"),
    # Rows meet in it, and its rule fails for integers, which some of the ways give it:
    # then it is computed whole, and a warning says so.
    "safe_softmax_cross_entropy",
}


def functions():
    """Each by its name, once."""
    seen = set()
    for module, names in MODULES.items():
        for name in sorted(getattr(names, "__all__", None) or dir(names)):
            f = getattr(names, name, None)
            if name.startswith("_") or name.endswith("_p") or name in LEFT_OUT:
                continue
            is_new = isinstance(f, jnp.ufunc) or id(f) not in seen
            if callable(f) and not inspect.isclass(f) and is_new:
                seen.add(id(f))
                yield f"{module}.{name}", f


def called(f, way, axis):
    """The results that are arrays, of rows on an axis."""

    def fun(h, w, ids):
        out = WAYS[way](f, h if axis == 0 else h.T)
        leaves = [
            x for x in jax.tree.leaves(out) if isinstance(x, jax.Array) and x.size
        ]
        return [x for x in leaves if not jnp.issubdtype(x.dtype, jax.dtypes.extended)]

    return fun


def takes(fun):
    """Whether a function can be called so, and gives something of the rows."""
    args = arguments()
    try:
        jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    except Exception:  # Any: it is asked with all that some function takes.
        return False
    return any(jaxpr.invars[0] in e.invars for e in jaxpr.eqns) and bool(jaxpr.outvars)


def ways(f, axis):
    """Functions of rows on an axis, in some of the ways that it can be called."""
    every = (called(f, way, axis) for way in WAYS)
    return list(itertools.islice(filter(takes, every), MOST_WAYS))


def off(fun):
    """How far results over micro-batches are off, in units of the bound.

    In float64: 1e-9 of the largest number, of sums of some hundred terms, through
    inverses. Of integers some functions make float32, on the way or at the end: then
    2^10 of its eps, for they invert nothing.
    """
    args, worst = arguments(), 0.0
    try:
        due = fun(*args)
    except Exception:  # Any: it does not take that, which shows when it runs.
        return worst
    equations = jaxprs.equations(jax.make_jaxpr(fun)(*args).jaxpr)
    types = {x.aval.dtype for e in equations for x in e.outvars}
    is_coarse = not types.isdisjoint(map(jnp.dtype, ("float32", "complex64")))
    bound = 2.0**10 * jnp.finfo(jnp.float32).eps if is_coarse else 1e-9
    for got, want in zip(over_micro_batches(fun, args), due, strict=True):
        assert got.shape == want.shape
        same = (got == want) | ((got != got) & (want != want))
        far = jnp.where(same, 0, jnp.abs(got * 1.0 - want * 1.0))
        scale = 1 + jnp.nanmax(jnp.where(jnp.isfinite(want), jnp.abs(want), 0))
        worst = max(worst, float((jnp.nan_to_num(far, nan=jnp.inf) / scale).max()))
    return worst / bound


def whole(f):
    """Primitives that are computed whole, by axis; none at all if no way is taken."""
    found = []
    for of_axis in (funs := [ways(f, axis) for axis in AXES]):
        notes = [partitioned(fun, arguments())[1].whole for fun in of_axis]
        names = {note.name.split(" of ")[0] for each in notes for note in each}
        found.append(sorted(names))
    return found if any(funs) else []


def page():
    """benchmarks/FUNCTIONS.md, which docs/rowwise.md names."""
    every = {name: found for name, f in functions() if (found := whole(f))}
    alike = {}  # what is computed whole, by axis: the functions of which it is
    for name, found in every.items():
        if any(found):
            alike.setdefault(tuple(map(tuple, found)), []).append(name)
    number = len(every) - sum(map(len, alike.values()))
    text = f"""Of {len(every)} public functions of JAX {jax.__version__} and of
`optax.losses`, called in several ways with rows on axis 0 and on axis 1,
{number} are computed from the rows of a micro-batch, and from what these
must know of the others. The rest are right, too, but some call of theirs is
computed whole in each micro-batch, in the memory of all rows: what is
computed so stands beside them.
`PYTHONPATH=tests python -m corpus.functions > benchmarks/FUNCTIONS.md` prints this
table, and `python tests/printed.py jax.numpy.sort` the row of one function.

| functions | rows on axis 0 | rows on axis 1 |
| --- | --- | --- |"""
    return "\n".join([text, *(_cells(names, found) for found, names in alike.items())])


def row(name):
    """The row of one function; without primitives if nothing is computed whole."""
    [f] = [f for other, f in functions() if other == name]
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _cells([name], whole(f))


def _cells(names, by_axis):
    """A row of functions, and of what is computed whole of them on either axis."""
    cells = [", ".join(f"`{x}`" for x in each) for each in (names, *by_axis)]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")
    print(page(), file=sys.stdout)

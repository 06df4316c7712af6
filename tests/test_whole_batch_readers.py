"""What rules conclude from a program: who reads a value, and what an index counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ga_optax as ga
from ga_optax._partition import indexing, reductions
from ga_optax._passes import ir

# What is computed whole is a warning, for programs as small as these.
pytestmark = [
    pytest.mark.usefixtures("optax_promotion", "fast_compilation"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
]
# In float64: of at most some thousand terms, conditioned no worse than 1e3.
BOUND, WRONG = 1e-10, 1e-6
N, D, K = 8, 4, 4


def arguments(n=N):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape)) for shape in ((D, D), (n, D))]


def off(fun, n=N, k=K):
    """How far value and gradients are off, of a loss and of the gradient itself."""
    with jax.enable_x64(True):
        args = arguments(n)
        grads = jax.value_and_grad(fun)
        step = ga.value_and_grad(fun, k, accumulator_dtype="float64")
        want, errors = jax.tree.leaves(jax.jit(grads)(*args)), []
        for run in (step, ga.microbatch(grads, k)):
            pairs = zip(jax.tree.leaves(jax.jit(run)(*args)), want, strict=True)
            errors += [float(jnp.abs(x - y).max() / jnp.abs(y).max()) for x, y in pairs]
        return max(errors)


# -- Nobody else reads it --------------------------------------------------------------


def before(reverse):
    """Sums over all rows before each: the carry is a result, too."""

    def fun(w, x):
        start = jnp.zeros(D)
        scan = jax.lax.scan(lambda c, r: (c + r, c), start, x @ w, reverse=reverse)
        return jnp.sin(scan[1]).sum()

    return fun


def after(w, x):
    def add(c, r):
        new = c + r
        return new, new

    return jnp.sin(jax.lax.scan(add, jnp.zeros(D), x @ w)[1]).sum()


def swapped(w, x):
    def add(c, r):
        return (c[1] + r, c[0]), None

    first, second = jax.lax.scan(add, (jnp.zeros(D), jnp.ones(D)), x @ w)[0]
    return jnp.sin(first).sum() + jnp.cos(second).sum()


def kept(w, x):
    total = (x @ w).sum(0)
    scan = jax.lax.scan(lambda c, r: (c, (r, c)), total, jnp.sin(x @ w))
    return sum(jnp.sin(y).sum() for y in jax.tree.leaves(scan))


def sorted_with(w, x):
    """An extremum that a sort returns behind integers."""
    order = jnp.array([2, 0, 3, 1])
    _, y = jax.lax.sort((order, (x @ w).max(0)), num_keys=1)
    return (jnp.sin(y) * jnp.arange(D)).sum()


def counted(w, x):
    def body(c, _):
        return (c[0] + 1, c[1] * (x @ w).max(0)), None

    times, y = jax.lax.scan(body, (0, jnp.ones(D)), None, length=2)[0]
    return jnp.sin(y).sum() * times


READ = {
    "sums before": before(False),
    "sums behind": before(True),
    "sums up to": after,
    "swapped sums": swapped,
    "a sum that is kept": kept,
    "sorted extrema": sorted_with,
    "counted extrema": counted,
}


@pytest.mark.parametrize("name", READ)
def test_what_others_read_too_is_that_of_the_whole_batch(name):
    assert off(READ[name]) < BOUND


def test_results_that_are_no_readers_are_found(monkeypatch):
    monkeypatch.setattr(ir, "num_readers", lambda program, x: 1)
    assert off(before(False)) > WRONG


def test_extrema_that_are_taken_for_stopped_are_found(monkeypatch):
    monkeypatch.setattr(reductions, "_only_stopped", lambda *_: True)
    assert off(sorted_with) > WRONG


def test_results_are_readers():
    def run(x):
        return jnp.sin(x), x, x

    program = jax.make_jaxpr(run)(1.0).jaxpr
    [x] = program.invars
    assert (len(ir.uses(program, x)), ir.num_readers(program, x)) == (1, 3)
    assert ir.only_use(program, x) is None
    once = jax.make_jaxpr(jnp.sin)(1.0).jaxpr
    assert ir.only_use(once, once.invars[0]) == (once.eqns[0], 0)
    assert ir.only_use(once, once.outvars[0]) is None


# -- An index that counts --------------------------------------------------------------


def counting(n, *dtypes):
    """An index that counts rows, unless one of the dtypes cannot."""
    index = jnp.arange(n)
    for dtype in dtypes:
        index = index.astype(dtype)
    return index.astype(int)


WRAPS = {
    "bool": (8, bool),
    "uint2": (8, jnp.uint2),
    "int4": (16, jnp.int4),
    "int8": (256, jnp.int8),
    "uint8": (512, jnp.uint8),
}
ROUNDS = {
    "bfloat16": (512, jnp.bfloat16),
    "float8": (32, jnp.float8_e4m3fn),
    "float16": (4096, jnp.float16),
    "there and back": (512, jnp.int32, jnp.bfloat16, jnp.float32),
}
EXACT = {
    "int8": (128, jnp.int8),
    "uint8": (256, jnp.uint8),
    "bfloat16": (256, jnp.bfloat16),
    "float16": (2048, jnp.float16),
    "float32": (4096, jnp.float32),
}


def picked(n, *dtypes):
    return lambda w, x: jnp.sin((x @ w)[counting(n, *dtypes), 1]).sum()


def meet(n, *dtypes):
    """Whether rows need one another to pick by that index."""
    with jax.enable_x64(True):
        found = ga.batch_dependencies(picked(n, *dtypes), K)(*arguments(n))
    return bool(found.meetings or found.whole)


@pytest.mark.parametrize("name", WRAPS)
def test_a_cast_that_changes_numbers_counts_no_rows(name):
    n, *dtypes = WRAPS[name]
    assert off(picked(n, *dtypes), n) < BOUND


@pytest.mark.parametrize("name", ROUNDS)
def test_a_cast_that_rounds_numbers_counts_no_rows(name):
    assert meet(*ROUNDS[name])  # XLA may leave out the rounding, in either program


def test_an_iota_that_begins_again_counts_no_rows():
    def fun(w, x):
        index = jax.lax.iota(jnp.uint8, 512).astype(int)
        return jnp.sin((x @ w)[index, 1]).sum()

    assert off(fun, 512) < BOUND


@pytest.mark.parametrize("name", EXACT)
def test_a_cast_that_keeps_all_numbers_counts_rows(name):
    n, *dtypes = EXACT[name]
    assert off(picked(n, *dtypes), n) < BOUND
    assert not meet(n, *dtypes)


def test_an_index_behind_a_transpose_counts_no_rows():
    def fun(w, x):
        index = jax.lax.broadcasted_iota(int, (N, N), 0)
        index = jax.lax.reshape(index, (N, N), dimensions=(1, 0))[:, 3]
        return jnp.sin((x @ w)[index, 1]).sum()

    assert off(fun) < BOUND


def test_casts_that_are_followed_blindly_are_found(monkeypatch):
    monkeypatch.setattr(indexing, "_holds", lambda dtype, n: True)
    n, *dtypes = WRAPS["bool"]
    assert off(picked(n, *dtypes), n) > WRONG
    assert not meet(*ROUNDS["bfloat16"])

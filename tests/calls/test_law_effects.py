"""What prints, checks or calls back does so once, with what the whole batch gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of, put
from jax import lax
from jax.experimental import checkify, io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P

import ga_optax as ga

# What is computed whole is a warning, for programs as small as these.
pytestmark = [
    pytest.mark.usefixtures("optax_promotion", "fast_compilation"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
]
N, D, K = 8, 3, 4
W, X = 0.1 * jnp.arange(9.0).reshape(D, D), 0.1 * jnp.arange(24.0).reshape(N, D)
SAID = []


def note(x):
    SAID.append(f"{float(x):.3f}")


def note_all(xs):
    jax.debug.callback(lambda xs: list(map(note, np.ravel(xs))), xs)
    return []


def _batched(xs, _):
    unheard.bind(*xs)
    return [], []


unheard = Primitive("unheard")  # of a name that nobody knows, with an effect
unheard.multiple_results = True
_EFFECTS = jax.make_jaxpr(lambda: jax.debug.callback(note, 0.0))().effects
unheard.def_effectful_abstract_eval(lambda x: ([], set(_EFFECTS)))
ad.primitive_jvps[unheard] = lambda xs, _: (unheard.bind(*xs), [])
batching.primitive_batchers[unheard] = _batched
mlir.register_lowering(unheard, mlir.lower_fun(note_all, multiple_results=True))


ACTS = {
    "a callback": lambda x: jax.debug.callback(note, x),
    "a callback in order": lambda x: jax.debug.callback(note, x, ordered=True),
    "a print": lambda x: jax.debug.print("{x:.3f}", x=x),
    "a print in order": lambda x: jax.debug.print("{x:.3f}", x=x, ordered=True),
    "io": lambda x: io_callback(note, None, x),
    "io in order": lambda x: io_callback(note, None, x, ordered=True),
    "a check": lambda x: checkify.check(x > 1e6, "{x:.3f}", x=x),
    "unheard": unheard.bind,
}


def acting(act, h):
    act(lax.stop_gradient(h).sum())
    return h


def mean_square(h):
    return jnp.mean(h**2)


def of_layers_of(act, h, w):
    return lax.scan(lambda h, _: (acting(act, jnp.tanh(h @ w)), None), h, None, 2)[0]


def centred(h):
    return mean_square(jnp.exp(h - h.mean(0)))


def in_cond(act, h):
    return lax.cond(W[0, 1] > 0, lambda h: acting(act, 2 * h), lambda h: h, h)


def in_while(act, h):
    def body(c):
        return c[0] + 1, acting(act, 2 * c[1])

    return lax.while_loop(lambda c: c[0] < 2, body, (0, lax.stop_gradient(h)))[1]


def in_jvp(act, h, of_rule):
    """In a function with a forward rule, or in the rule."""
    plain, acts = (lambda h: h), functools.partial(acting, act)
    call = jax.custom_jvp(plain if of_rule else acts)
    rule = acts if of_rule else plain
    call.defjvp(lambda xs, ts: (rule(xs[0]), ts[0]))
    return call(h)


def in_vjp(act, h, where):
    """In a function with a backward rule, or on one of the ways of that."""
    plain, acts = (lambda h: h), functools.partial(acting, act)
    call, there, back = (acts if i == where else plain for i in range(3))
    call = jax.custom_vjp(call)
    call.defvjp(lambda h: (there(h), None), lambda _, ct: (back(ct),))
    return call(h)


OF_ROWS = {  # what acts between a product and the mean of its squares
    "open": acting,
    "rows meet": lambda act, h: acting(act, jnp.exp(h - h.mean(0))),
    "a branch": in_cond,
    "a function": lambda act, h: jax.jit(functools.partial(acting, act))(h),
    "a checkpoint": lambda act, h: jax.checkpoint(lambda h: acting(act, jnp.sin(h)))(h),
    "with a jvp": lambda act, h: in_jvp(act, h, False),
    "a jvp": lambda act, h: in_jvp(act, h, True),
    "with a vjp": lambda act, h: in_vjp(act, h, 0),
    "a vjp, there": lambda act, h: in_vjp(act, h, 1),
    "a vjp, back": lambda act, h: in_vjp(act, h, 2),
}


def of_rows(place):
    return lambda act, w, x: mean_square(place(act, x @ w))


PLACES = {name: of_rows(place) for name, place in OF_ROWS.items()} | {
    "of weights": lambda act, w, x: mean_square(x @ acting(act, w)),
    "the loss": lambda act, w, x: acting(act, mean_square(x @ w)),
    "a scan": lambda act, w, x: mean_square(of_layers_of(act, x, w)),
    "a scan, and rows meet": lambda act, w, x: centred(x @ of_layers_of(act, w, w)),
    "a branch, and rows meet": lambda act, w, x: centred(x @ in_cond(act, w)),
    "after": lambda act, w, x: (
        mean_square(x @ w) + 0 * in_cond(act, lax.stop_gradient(mean_square(x @ w)))
    ),
    "a while": lambda act, w, x: mean_square(x @ w) + in_while(act, x @ w).mean(),
    "each of the rows": lambda act, w, x: jax.vmap(
        lambda row: mean_square(acting(act, row @ w))
    )(x).mean(),
}
IN_ORDER = [name for name in ACTS if "order" in name]
CASES = [
    (act, place)
    for act in ACTS
    for place in PLACES
    # JAX refuses these.
    if not (act.startswith("io") and place == "a checkpoint")
    and not (act in IN_ORDER and place == "each of the rows")
]


def acted(name, run, capsys, *args):
    """What was said, and what the first check that failed says."""
    SAID.clear()
    capsys.readouterr()
    if name == "a check":
        error, _ = jax.jit(checkify.checkify(run))(*args)
        SAID.extend((error.get() or "").split(" ")[:1])
    else:
        jax.block_until_ready(jax.jit(run)(*args))
        jax.effects_barrier()
    return sorted([*filter(None, SAID), *capsys.readouterr().out.split()])


@pytest.mark.grid(6, 30)
@pytest.mark.parametrize(("name", "place"), CASES)
def test_whatever_acts_is_kept_and_acts_once(name, place, capsys):
    fun = functools.partial(PLACES[place], ACTS[name])

    def of(run):
        return acted(name, run, capsys, W, X)

    plain, of_jax = of(fun), of(jax.value_and_grad(fun))
    want = plain or of_jax  # a rule acts where it is differentiated
    assert want
    got = of(ga.value_and_grad(fun, K))
    # JAX replaces the function by its rule there, and what acts in it alone is gone.
    assert got == want or (place in ("with a jvp", "with a vjp") and got == of_jax)
    assert of(ga.microbatch(fun, K)) == plain
    # JAX does not keep all that acts in a scan, and runs a checkpoint twice.
    assert of(jax.value_and_grad(ga.microbatch(fun, K))) in (plain, of_jax)


@pytest.mark.grid(1, 4)
@pytest.mark.parametrize("place", ["open", "of weights", "the loss", "a scan"])
def test_whatever_acts_does_so_once_on_all_devices(place, capsys):
    fun, mesh = functools.partial(PLACES[place], ACTS["a callback"]), mesh_of(2)
    want = acted("a callback", jax.value_and_grad(fun), capsys, W, X)
    step = ga.value_and_grad(fun, 2, data_axis=ga.DataAxis("data", mesh=mesh))
    assert acted("a callback", step, capsys, W, put(X, mesh, P("data"))) == want


@pytest.mark.grid(2, 8)
@pytest.mark.parametrize("name", ACTS)
def test_by_itself_each_micro_batch_acts(name, capsys):
    fun = functools.partial(PLACES["open"], ACTS[name])
    parts = X.reshape(K, -1, D)
    each = [acted(name, jax.value_and_grad(fun), capsys, W, x) for x in parts]
    want = each[0] if name == "a check" else sorted(x for xs in each for x in xs)
    acc = ga.accumulator.init(W)
    assert acted(name, ga.accumulate(fun, K), capsys, acc, W, X) == want


@pytest.mark.parametrize("in_scan", [False, True])
def test_what_has_a_state_runs_once_where_rows_do_not_meet_either(in_scan):
    calls = []

    def counted():
        calls.append(0)
        return np.float32(len(calls))

    def fun(w, x):
        def body(c, _):
            return c * io_callback(counted, jax.ShapeDtypeStruct((), w.dtype)), None

        h = x @ w
        return jnp.mean(lax.scan(body, h, None, 1)[0] if in_scan else body(h, None)[0])

    with pytest.warns(UserWarning, match="all rows at once.*calls io_callback"):
        value = jax.jit(ga.value_and_grad(fun, K))(W, X)[0]
    assert len(calls) == 1
    assert jnp.allclose(value, jnp.mean(X @ W))

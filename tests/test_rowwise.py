"""`ga.rowwise` and `ga.register_primitive`: what the user says of rows."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rowwise_losses
from helpers import bits, mesh_of, off, put, temporaries
from jax.extend import core
from jax.interpreters import ad, mlir
from jax.sharding import PartitionSpec as P
from rowwise_losses import LOSSES, ROWS, arguments, as_it_is, mixed

import ga_optax as ga
from ga_optax._calls import savings
from ga_optax._passes import closures, ir
from ga_optax._passes.rowwise import READ

K = 8
pytestmark = pytest.mark.usefixtures("optax_promotion")
FAST = pytest.mark.usefixtures("fast_compilation")


def of(name, promise=ga.rowwise):
    return functools.partial(LOSSES[name], promise=promise)


# Sums over rows in another order, of numbers conditioned no worse than 10.
BOUND = 10 * ROWS * float(np.finfo(np.float32).eps)


# -- Inside ----------------------------------------------------------------------------


@FAST
@pytest.mark.grid(4, 20)
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_the_undivided_batch(name):
    args = arguments()
    want = jax.jit(jax.value_and_grad(of(name, as_it_is)))(*args)
    got = jax.jit(ga.value_and_grad(of(name), K))(*args)
    assert off(got, want) < BOUND


@pytest.mark.grid(2, 20)
@pytest.mark.parametrize("name", LOSSES)
def test_it_takes_the_memory_of_micro_batches_by_themselves(name):
    args, fun = arguments(), of(name, as_it_is)
    each = ga.accumulate(fun, K)

    def plain(params, x):
        return each(ga.accumulator.init(params), params, x)

    own = temporaries(jax.jit(ga.value_and_grad(of(name), K)), *args)
    # Rows meet in a mean of all, which takes a few numbers, and fuses otherwise.
    assert own <= 1.1 * temporaries(jax.jit(plain), *args)
    assert own < 0.3 * temporaries(jax.jit(jax.value_and_grad(fun)), *args)
    found = ga.batch_dependencies(of(name), K)(*args)
    assert (found.whole, bool(found.promised)) == ([], True)
    if name in ("callback", "custom_call"):  # the twin: without a promise
        found = ga.batch_dependencies(fun, K)(*args)
        assert (bool(found.whole), found.promised) == (True, [])


@FAST
@pytest.mark.grid(1, 2)
@pytest.mark.parametrize("name", ["with_closure", "gradient_inside"])
def test_on_a_mesh_it_is_the_same(name):
    mesh = mesh_of()
    params, x = arguments()
    want = jax.jit(jax.value_and_grad(of(name, as_it_is)))(params, x)
    split = put(x, mesh, P("data"))
    axis = ga.DataAxis("data", mesh=mesh)
    got = jax.jit(ga.value_and_grad(of(name), 2, data_axis=axis))(params, split)
    assert off(got, want) < BOUND
    region = jax.shard_map(
        ga.value_and_grad(of(name), 2, data_axis="data"),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    assert off(jax.jit(region)(params, x), want) < BOUND


def test_in_a_microbatch_in_a_loss_the_rows_are_those_of_the_inner_one():
    seen = []

    def layer(x, w):
        def run(x):
            seen.append(len(x))
            return jnp.tanh(x @ w)

        return ga.rowwise(run)(x).sum()

    def loss(w, x):
        return ga.microbatch(layer, 4, batch_argnums=0)(x, w) / x.size

    w, x = jnp.ones((4, 2)), jnp.linspace(0, 1, 64).reshape(16, 4)
    want = jax.value_and_grad(lambda w, x: layer(x, w) / x.size)(w, x)
    for step in (jax.value_and_grad(loss), ga.value_and_grad(loss, 2)):
        seen.clear()
        assert off(jax.jit(step)(w, x), want) < BOUND
        assert 4 in seen


def test_results_that_nobody_reads_are_not_computed():
    def loss(w, x):
        def fun(x):
            return jnp.tanh(x @ w), jnp.sinh(x @ w)

        return jnp.mean(jax.checkpoint(ga.rowwise(fun))(x)[0])

    args = jnp.ones((4, 2)), jnp.ones((8, 4))
    program = jax.make_jaxpr(loss, axis_env=READ)(*args).jaxpr
    assert "sinh" in str(program)
    assert "sinh" not in str(ir.live(program))
    step = jax.jit(ga.value_and_grad(loss, 4))
    assert off(step(*args), jax.value_and_grad(loss)(*args)) < BOUND


@FAST
def test_sizes_may_be_left_open():
    fun = of("with_closure")
    args = arguments()
    n = jax.export.symbolic_shape("4*n")[0]
    x = jax.ShapeDtypeStruct((n, *args[1].shape[1:]), jnp.float32)
    exported = jax.export.export(jax.jit(ga.value_and_grad(fun, 4)))(args[0], x)
    want = jax.value_and_grad(of("with_closure", as_it_is))(*args)
    assert off(exported.call(*args), want) < BOUND


def test_it_is_traced_in_the_context_in_which_it_was_called():
    def loss(w, x):
        with jax.default_matmul_precision("highest"):
            return jnp.mean(ga.rowwise(lambda x: x @ w)(x))

    args = jnp.ones((4, 2)), jnp.ones((8, 4))
    program = str(jax.make_jaxpr(ga.value_and_grad(loss, 4))(*args))
    products = program.count("dot_general[")
    assert products == program.count("precision=(Precision.HIGHEST") > 0


# -- Outside ---------------------------------------------------------------------------


def function(x, w):
    return mixed(x, 2.0, w)


PROMISED = ga.rowwise(function, in_axes=(0, None))
UNDER = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: jax.vmap(f, (1, None), 1),
    "grad": lambda f: jax.grad(lambda x, w: f(x, w).sum(), (0, 1)),
    "checkpoint": lambda f: jax.grad(
        lambda x, w: jax.checkpoint(f)(x, w).sum(), (0, 1)
    ),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (jnp.cos(x), jnp.sin(w))),
    "hessian": lambda f: jax.hessian(lambda x, w: f(x, w).sum(), 1),
    "gradients of rows": lambda f: jax.vmap(
        jax.grad(lambda x, w: f(x[None], w).sum(), 1), (0, None)
    ),
    "scan": lambda f: lambda x, w: jax.lax.scan(lambda h, _: (f(h, w), h), x, length=3),
    "shard_map": lambda f: jax.shard_map(
        f,
        mesh=mesh_of(2, names=("d",)),
        in_specs=(P("d"), P()),
        out_specs=P("d"),
    ),
}


@pytest.mark.parametrize("name", UNDER)
def test_outside_it_is_the_function_and_costs_nothing(name):
    args = jnp.linspace(-1, 1, 64).reshape(4, 4, 4), jnp.eye(4) * 0.3
    want, got = (jax.jit(UNDER[name](f)) for f in (function, PROMISED))
    assert bits(got(*args)) == bits(want(*args))
    both = (f.lower(*args).compile().cost_analysis()["flops"] for f in (want, got))
    assert len(set(both)) == 1


def test_what_it_prints_is_what_the_function_prints():
    said = []

    def fun(x):
        jax.debug.callback(lambda x: said.append(x.shape), x)
        return x

    def ran(step, x):
        said.clear()
        jax.block_until_ready(jax.jit(step)(x))
        jax.effects_barrier()
        return said

    x = jnp.ones((4, 2))
    for f in (fun, ga.rowwise(fun)):
        assert ran(jax.grad(lambda x, f=f: f(x).sum()), x) == [(4, 2)]
    step = ga.value_and_grad(lambda w, x: ga.rowwise(fun)(x * w).sum(), 2)
    assert ran(functools.partial(step, 1.0), x) == [(2, 2)] * 2


def test_a_rule_that_is_not_linear_has_the_whole_cotangent():
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.05, 0.05),))

    def loss(w, x, promise=ga.rowwise):
        h = promise(clipped)(x @ w)
        return jnp.mean(h**2) + jnp.mean(h - h.mean(0)) ** 2 + jnp.std(h)

    w, x = arguments()[0]["router"], arguments()[1][:, 0]
    want = jax.value_and_grad(loss)(w, x, as_it_is)
    assert off(jax.jit(ga.value_and_grad(loss, 4))(w, x), want) < BOUND


# -- Promises that do not hold ---------------------------------------------------------


def normalised(h):
    return (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3)


def by_row(h):
    return (h - h.mean(1, keepdims=True)) / jnp.sqrt(h.var(1, keepdims=True) + 1e-3)


def at_top(w, x):
    h = ga.rowwise(by_row)(x @ w)
    return jnp.mean(ga.rowwise(normalised)(h) ** 2 * jnp.arange(4.0))


def in_a_scan(w, x):
    @jax.checkpoint
    def layer(h, _):
        return ga.rowwise(normalised)(ga.rowwise(by_row)(h @ w)), None

    h, _ = jax.lax.scan(layer, x, length=2)
    return jnp.mean(h**2 * jnp.arange(4.0))


def only_for_all(w, x):
    def fun(h):
        return h.reshape(4, 4, 4).cumsum(1).reshape(16, 4)

    return jnp.mean(ga.rowwise(fun)(x @ w) ** 2)


def of_one_length(w, x):
    def fun(h):
        return jnp.ones((16, 4)) * h[:1]

    return jnp.mean(ga.rowwise(fun)(x @ w) ** 2)


def few():
    rng = np.random.default_rng(0)
    return (jnp.asarray(rng.normal(size=(n, 4)), jnp.float32) for n in (4, 16))


@FAST
@pytest.mark.slow
@pytest.mark.parametrize("fun", [at_top, in_a_scan])
def test_a_broken_promise_is_found_by_numbers_and_named(fun):
    w, x = few()
    got, want = ga.value_and_grad(fun, 4)(w, x), jax.value_and_grad(fun)(w, x)
    assert off(got, want) > 0.1
    report = ga.verify(fun, w, x, 4)
    assert (report.ok, report.cause) == (False, ga.Cause.PROMISE)
    assert re.search(r"normalised at test_rowwise.py:\d+", report.message)
    assert "by_row" not in report.message


@FAST
@pytest.mark.slow
def test_the_twin_that_holds_is_not_accused():
    def loss(w, x):
        return jnp.mean(ga.rowwise(by_row)(x @ w) ** 2 * jnp.arange(4.0))

    def apart(w, x):
        return jnp.std(ga.rowwise(by_row)(x @ w) * jnp.arange(4.0))

    assert ga.verify(loss, *few(), 4).ok
    assert ga.verify(apart, *few(), 4).cause is ga.Cause.CROSS_EXAMPLE


@pytest.mark.parametrize(
    ("loss", "why"), [(only_for_all, "raised TypeError"), (of_one_length, "returned")]
)
def test_what_does_not_take_fewer_rows_is_computed_whole_and_said(loss, why):
    w, x = few()
    said = rf"rowwise of fun must .* any number of rows, .* it {why}"
    with pytest.warns(UserWarning, match=said):
        got = jax.jit(ga.value_and_grad(loss, 8))(w, x)
    assert off(got, jax.value_and_grad(loss)(w, x)) < BOUND
    with pytest.warns(UserWarning, match="any number of rows"):
        found = ga.batch_dependencies(loss, 8)(w, x)
    assert ([x.name for x in found.whole], found.promised) == (["rowwise of fun"], [])


# -- What is said ----------------------------------------------------------------------


def test_batch_dependencies_lists_promises_and_ends_with_what_to_do():
    args, unmarked = arguments(), of("callback", as_it_is)
    said = str(ga.batch_dependencies(of("callback"), K)(*args))
    assert "rowwise of sort_on_the_host, promised: 16,384 numbers" in said
    said = re.sub(r":\d+|\s+", " ", str(ga.batch_dependencies(unmarked, K)(*args)))
    assert said.endswith(
        "1 callback is computed whole: wrap sort_on_the_host (rowwise_losses.py ) in "
        "ga_optax.rowwise if its rows do not need each other."
    )

    def several(p, x):
        hidden = of("callback", as_it_is), of("custom_call", as_it_is)
        return sum(fun(p, x) for fun in hidden)

    said = " ".join(str(ga.batch_dependencies(several, K)(*args)).split())
    assert re.search(r"\d callbacks? and \d primitives? are computed whole: wrap", said)


def test_the_warning_of_savings_names_it(monkeypatch):
    monkeypatch.setattr(savings, "_said", set())
    monkeypatch.setattr(savings, "FEW_BYTES", 1)
    with pytest.warns(UserWarning, match=r"Wrap that in ga_optax.rowwise if its rows"):
        jax.eval_shape(ga.value_and_grad(of("custom_call", as_it_is), K), *arguments())


# -- Errors ----------------------------------------------------------------------------

X = np.ones((4, 3), np.float32)
WRONG = {
    "no function": (lambda: ga.rowwise(3), "fun must be a function"),
    "no rows": (
        lambda: ga.rowwise(jnp.sin, in_axes=None)(X),
        "An argument of rowwise must have rows, but in_axes gives none",
    ),
    "by keyword alone": (lambda: ga.rowwise(jnp.sin)(x=X), "pass them by position"),
    "no such axis": (
        lambda: ga.rowwise(jnp.sin, in_axes=2)(X),
        r"in_axes of rowwise must be axes .* 2 for leaf \[0\], of shape \(4, 3\)",
    ),
    "no array": (
        lambda: ga.rowwise(lambda x, flag: x)(X, "causal"),
        r"it has 0 for leaf \[1\], of type str. Pass None",
    ),
    "no prefix": (
        lambda: ga.rowwise(jnp.sin, in_axes=(0, 0))(X),
        r"in_axes of rowwise must be an int, None, or a prefix .* \(0, 0\)",
    ),
    "other lengths": (
        lambda: ga.rowwise(jnp.add, in_axes=(0, 1))(X, X),
        r"leaf \[0\] has shape \(4, 3\) and leaf \[1\] has shape \(4, 3\)",
    ),
    "a result without rows": (
        lambda: ga.rowwise(jnp.sum)(X),
        r"out_axes of rowwise .* 0 for the only leaf, of shape \(\). Sum over rows",
    ),
    "a result that goes whole": (
        lambda: ga.rowwise(jnp.sin, out_axes=None)(X),
        "out_axes of rowwise must be axes of rows, but it has None",
    ),
    "a result of another length": (
        lambda: ga.rowwise(lambda x: {"y": x[1:]})(X),
        r"must have the 4 rows .* but leaf \['y'\] has shape \(3, 3\)",
    ),
    "no primitive": (
        lambda: ga.register_primitive("sin", "b -> b"),
        "must have a jax.extend.core.Primitive, but it is 'sin'",
    ),
    **{
        dimensions: (
            lambda dimensions=dimensions: ga.register_primitive(
                core.Primitive("wrong"), dimensions
            ),
            f"must name those of operands -> results, .*{re.escape(why)}",
        )
        for dimensions, why in {
            "b t": "no name is in an operand",
            "b -> b -> b": "no name",
            "b t -> c _": "no name is in an operand and in all results",
            "b b -> b _": "'b' is no name, or twice",
            "b 3 -> b _": "'3' is no name",
        }.items()
    },
}


@pytest.mark.quick
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_says_what_was_required_what_came_and_what_to_do(name):
    call, message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


# -- What it closes over ---------------------------------------------------------------


def holders():
    def default(x, w=X):
        return x @ w.T

    def recursive(x, n=2):
        return recursive(x, n - 1) if n else x

    class Holder:
        def __init__(self, w):
            self.w = w

        def run(self, x):
            return x @ self.w.T

    tree = {"w": X}
    jax.tree_util.register_pytree_node(
        Holder, lambda x: ((x.w,), None), lambda _, xs: Holder(*xs)
    )
    return {
        "method": Holder(X).run,
        "partial": functools.partial(lambda w, x: x @ w.T, X),
        "tree": lambda x: x @ tree["w"].T,
        "function": lambda x: default(x),
        "itself alone": recursive,
        "a global": lambda x: x @ X.T,
    }


@pytest.mark.parametrize("name", holders())
def test_a_function_gets_other_values_wherever_it_holds_them(name):
    fun = holders()[name]
    new = closures.replaced(fun, {id(X): 2 * X})
    if name in ("itself alone", "a global"):
        assert new is fun
    else:
        assert (new(X) == 2 * fun(X)).all()
        assert (fun(X) == X @ X.T).all()
    assert closures.replaced(fun, {}) is fun


# -- Primitives of others --------------------------------------------------------------


def primitive(name):
    """A scaled row without its mean, of which nothing is known."""

    def run(x, scale):
        return (x - x.mean(-1, keepdims=True)) * scale

    new = core.Primitive(name)
    new.def_abstract_eval(lambda x, scale: x)
    new.def_impl(jax.jit(run))
    mlir.register_lowering(new, mlir.lower_fun(run, multiple_results=False))

    def jvp(xs, dots):
        dots = tuple(map(ad.instantiate_zeros, dots))
        return new.bind(*xs), jax.jvp(run, xs, dots)[1]

    ad.primitive_jvps[new] = jvp
    return new


def centred(op, along=2):
    def loss(p, x):
        h = op.bind(x.swapaxes(along, 2), p["router"][:, 0])
        return rowwise_losses.ends(jnp.tanh(h))

    return loss


def test_a_primitive_is_computed_in_parts_if_it_is_registered():
    op, args = primitive("centred"), arguments()
    fun = centred(op)
    want = jax.jit(jax.value_and_grad(fun))(*args)
    assert [x.name for x in ga.batch_dependencies(fun, K)(*args).whole] == [op.name]
    before = temporaries(jax.jit(ga.value_and_grad(fun, K)), *args)
    ga.register_primitive(op, "b t _, _ -> b t _")
    found = ga.batch_dependencies(fun, K)(*args)
    assert (found.whole, [x.name for x in found.promised]) == ([], [op.name])
    step = jax.jit(ga.value_and_grad(fun, K))
    assert off(step(*args), want) < BOUND
    assert temporaries(step, *args) < 0.5 * before
    across = centred(op, along=0)  # rows are what it takes the mean of: computed whole
    got = ga.value_and_grad(across, K)(*args)
    assert off(got, jax.value_and_grad(across)(*args)) < BOUND


def test_a_primitive_of_other_dimensions_than_registered_is_computed_whole():
    op, args = primitive("centred"), arguments()
    ga.register_primitive(op, "b _, _ -> b _")
    want = jax.value_and_grad(centred(op))(*args)
    with pytest.warns(UserWarning, match=r"has operands and results of \[3, 1, 3\]"):
        got = ga.value_and_grad(centred(op), K)(*args)
    assert off(got, want) < BOUND

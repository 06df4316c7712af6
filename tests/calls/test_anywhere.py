"""`ga.microbatch` anywhere in a program: it and its derivatives are those of `fun`."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from corpus.random_programs import off
from helpers import mesh_of, put, temporaries, with_rule
from jax.sharding import PartitionSpec as P

import ga_optax as ga

pytestmark = pytest.mark.usefixtures("optax_promotion")
WORDS, TOKENS, WIDTH, K = 96, 32, 6, 4
BOUND = 1e-11


def normal(i, *shape):
    return jax.random.normal(jax.random.key(i), shape, dtype=float) / WIDTH**0.5


def arrays():
    labels = jax.random.randint(jax.random.key(2), (TOKENS,), 0, WORDS)
    return normal(0, WIDTH, WORDS), normal(1, TOKENS, WIDTH), labels


def each(w, h, labels):
    """A loss for each token."""
    z = h @ w
    own = jnp.take_along_axis(z, labels[:, None], 1)[:, 0]
    return jax.nn.logsumexp(z, -1) - own


def head(w, h, labels):
    return jnp.mean(each(w, h, labels))


def normed(w, h, labels):
    """Rows that meet."""
    z = jnp.tanh(h @ w)
    z = (z - z.mean(0, keepdims=True)) / jnp.sqrt(z.var(0, keepdims=True) + 0.1)
    return jnp.mean(jax.nn.logsumexp(z, -1) ** 2) + 0.0 * jnp.sum(labels)


def normed_each(w, h, labels):
    z = jnp.tanh(h @ w)
    return jax.nn.logsumexp(z - z.mean(0, keepdims=True), -1) + 0.0 * labels


own_rule = with_rule(jnp.tanh, lambda args, ct: (3.0 * ct * args[0],))


def ruled(w, h, labels):
    return head(w, own_rule(h), labels)


def over(f, k=K, **more):
    return ga.microbatch(f, k, batch_argnums=(1, 2), **more)


def squared(f):
    return lambda *xs: jnp.mean(f(*xs) ** 2)


def model(f):
    return lambda p, x, y: 0.7 * f(p[1], jnp.tanh(x @ p[0]), y)


def grad(f):
    return jax.value_and_grad(f, (0, 1))


def params():
    return (normal(3, WIDTH, WIDTH), normal(0, WIDTH, WORDS))


def pushed(f, w, h, y):
    return jax.jvp(lambda *xs: f(*xs, y), (w, h), (jnp.cos(w), jnp.sin(h)))


def pulled(f, w, h, y):
    value, pull = jax.vjp(lambda *xs: f(*xs, y), w, h)
    return value, pull(jnp.cos(value))


def reverse_over_reverse(f, *args):
    def dot(w, h, y):
        return sum(jnp.vdot(g, jnp.cos(g)) for g in jax.grad(f, (0, 1))(w, h, y))

    return jax.grad(dot, (0, 1))(*args)


def of_four(*axes, inside=False):
    """The gradient of each of four, by `vmap` of it or the other way round."""

    def way(f, *args):
        four = jnp.arange(4.0).reshape(4, 1, 1)
        w, h, y = (
            x if axis is None else jnp.stack([x] * 4) if x.ndim == 1 else x + four
            for x, axis in zip(args, axes, strict=True)
        )
        if not inside:
            return jax.vmap(grad(f), axes)(w, h, y)
        return grad(lambda *xs: jnp.sum(jax.vmap(f, axes)(*xs) ** 2))(w, h, y)

    return way


def region(f, mesh, rows, **how):
    """`f` of what each device has of its last arguments, so many."""
    specs = P(), *[P("d")] * rows
    return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P(), **how)


def in_region(f, *args, check_vma=False):
    local = lambda w, h, y: jax.lax.pmean(f(w, h, y), "d")  # noqa: E731
    mesh = mesh_of(1, names=("d",))
    return grad(region(local, mesh, 2, check_vma=check_vma))(*args)


def in_model(f, *args):
    return jax.value_and_grad(model(f))(*args)


_CHECKS = "in a region that checks"
WAYS = {
    "value": lambda f, *args: f(*args),
    "gradient": lambda f, *args: grad(f)(*args),
    "gradient of rows alone": lambda f, *args: jax.grad(f, 1)(*args),
    "gradient of the weights alone": lambda f, *args: jax.grad(f)(*args),
    "jvp": pushed,
    "linearize": lambda f, w, h, y: jax.linearize(lambda w: f(w, h, y), w)[1](w + 1),
    "vjp": pulled,
    "second derivatives, forward over reverse": lambda f, w, h, y: pushed(
        lambda *xs: jax.grad(f, (0, 1))(*xs), w, h, y
    ),
    "second derivatives, reverse over reverse": reverse_over_reverse,
    "vmap of the gradient, of h": of_four(None, 0, None),
    "vmap of the gradient, of h and labels": of_four(None, 0, 0),
    "vmap of the gradient, of the weights": of_four(0, None, None),
    "gradient of vmap": of_four(None, 0, None, inside=True),
    "in a region of a mesh": in_region,
    _CHECKS: partial(in_region, check_vma=True),
}
FUNCTIONS = {
    "a mean": head,
    "rows": each,
    "rows that meet": normed,
    "rows that meet, and come back": normed_each,
    "a rule": ruled,
}
_FORWARD = ("jvp", "linearize", "second derivatives, forward over reverse")


def cases():
    for of, f in FUNCTIONS.items():
        for name in WAYS:
            no_forward_mode = f is ruled and name in _FORWARD
            has_no_types = f in (normed, normed_each) and name == _CHECKS
            if not (no_forward_mode or has_no_types):
                yield of, name


@pytest.mark.grid(9, 40)
@pytest.mark.usefixtures("fast_compilation", "float64")
@pytest.mark.parametrize(("of", "name"), list(cases()))
def test_it_is_the_function_wherever_it_stands(of, name):
    """In models, and in one another: test_law_random."""
    f, way = FUNCTIONS[of], WAYS[name]
    is_scalar = f in (head, normed, ruled) or name in ("value", "vjp", "jvp")
    scalar = (lambda f: f) if is_scalar else squared
    steps = partial(way, scalar(over(f))), partial(way, scalar(f))
    assert off(*(jax.jit(step)(*arrays()) for step in steps)) < BOUND


def whole(f, argnums=(1, 2), **options):
    return f


def in_pieces(f, argnums=(1, 2), **options):
    return ga.microbatch(f, K, batch_argnums=argnums, **options)


def communicating(divide, *args):
    """Rows and weights less their means over an axis of `jax.vmap`."""

    def centred(w, h, labels):
        w, h = (x - jax.lax.pmean(x, "models") for x in (w, h))
        return head(w, h, labels)

    args = [jnp.stack([x, 2 * x]) if x.ndim > 1 else jnp.stack([x, x]) for x in args]
    step = jax.value_and_grad(divide(centred), (0, 1))
    return jax.vmap(step, axis_name="models")(*args)


def cotangents_of_others(divide, w, h, y):
    """Maps that communicate, each with a cotangent of its own."""

    def spread(h):
        return jnp.mean(jnp.tanh(h - jax.lax.pmean(h, "v")) ** 2)

    def one(h, scale):
        return jax.grad(lambda h: jnp.sin(divide(spread, 0)(h)) * scale)(h)

    scales = jnp.array([1.0, 5.0, -2.0])
    return jax.vmap(one, axis_name="v")(jnp.stack([h, h * 2, h[::-1]]), scales)


def keywords(divide, w, h, y):
    """Trees hold nothing and None, and keywords are in any order."""

    def f(params, *, batch, scale=None):
        return head(params["w"], batch[0], batch[2]) * (2 if scale is None else scale)

    step = jax.value_and_grad(divide(f, (), batch_argnames="batch"))
    own = {"w": w, "none": None, "empty": ()}
    return [step(own, batch=(h, None, y), scale=s) for s in (None, 3.0)]


def results_of_any_kind(divide, *args):
    def f(w, h, labels):
        kinds = {"number": 2.0, "none": None, "empty": (), "whole": w, "rows": [h, {}]}
        return kinds | {"loss": head(w, h, labels), "integer": labels + 1, "bool": True}

    return divide(f)(*args)


PROGRAMS = (
    *(communicating, keywords),
    *(cotangents_of_others, results_of_any_kind),
)


@pytest.mark.usefixtures("fast_compilation", "float64")
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_comes_in_and_out_is_that_of_the_function(program):
    steps = (partial(program, divide) for divide in (in_pieces, whole))
    assert off(*(jax.jit(step)(*arrays()) for step in steps)) < BOUND


def test_integers_have_a_cotangent_of_no_bits():
    scaled = over(lambda s, h, y: jnp.mean(h) * s)
    _, pull = jax.vjp(lambda s: scaled(s, *arrays()[1:]), jnp.int32(3))
    assert pull(jnp.ones([]))[0].dtype == jax.dtypes.float0


def summed(w, h):
    return jnp.sum(jnp.tanh(h @ w)) / WORDS


@pytest.mark.grid(2, 6)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("outer", ["axis", "name"])
@pytest.mark.parametrize("inner", ["axis", "name", None])
def test_in_a_call_with_its_data_axis_it_has_the_rows_of_all_devices(inner, outer):
    mesh = mesh_of(names=("d",))
    axes = {None: None, "name": "d", "axis": ga.DataAxis("d", mesh=mesh)}

    def loss(w, h):
        f = ga.microbatch(summed, 2, batch_argnums=1, data_axis=axes[inner])
        return f(w, h) ** 2

    step = ga.value_and_grad(loss, 2, data_axis=axes[outer])
    step = step if outer == "axis" else region(step, mesh, 1, check_vma=False)
    want = jax.value_and_grad(lambda w, h: summed(w, h) ** 2)(*arrays()[:2])
    assert off(jax.jit(step)(*arrays()[:2]), want) < BOUND


@pytest.mark.parametrize("data_axis", [None, "d"])
@pytest.mark.parametrize("of", ["a mean", "rows", "rows that meet"])
def test_devices_that_have_the_rows_between_them_exchange_sums_alone(of, data_axis):
    mesh = mesh_of(names=("d",))
    f = FUNCTIONS[of]
    scalar = squared if f is each else lambda f: f
    k = K if data_axis is None else 2
    mine = partial(in_model, scalar(over(f, k, data_axis=data_axis)))
    args = put((params(), *arrays()[1:]), mesh, (P(), P("d"), P("d")))
    with jax.set_mesh(mesh):
        compiled = jax.jit(mine).lower(*args).compile()
        got = compiled(*args)
    want = in_model(scalar(f), params(), *arrays()[1:])
    assert off(got, want) < 1e-4  # in float32
    if f is not normed or data_axis:
        moves = "all-to-all", "all-gather", "collective-permute"
        assert not any(f" {name}(" in compiled.as_text() for name in moves)


SHAPES = (16, 2048), (512, 16), (512,)
TYPES = list(map(jax.ShapeDtypeStruct, SHAPES, ("float32", "float32", "int32")))


def costs(step):
    """Products, each in a loop over all rows, and temporaries, in all logits.

    They are those of the compiled step: XLA drops those that nobody reads.
    """
    text = jax.jit(step).lower(*TYPES).compile().as_text()
    logits = 4 * 2048 * 512
    products = len(re.findall(r' dot\(|"__cublas', text))
    return products, temporaries(jax.jit(step), *TYPES) / logits


WINDOW = ga.value_and_grad(over(head, 16), 4, argnums=0, batch_argnums=(1, 2))
COSTS = {  # products, and temporaries at most
    "value": (over(head, 16), 1, 0.1),
    "gradient": (grad(over(head, 16)), 3, 0.2),
    "gradient of the weights": (jax.grad(over(head, 16)), 2, 0.2),
    "gradient of rows": (jax.grad(over(head, 16), 1), 2, 0.2),
    "remat": (grad(over(head, 16, remat=True)), 4, 0.2),
    "remat, with the gradient of its own": (grad(over(head, 16, remat=False)), 3, 0.2),
    "rows": (grad(squared(over(each, 16))), 4, 0.2),
    "in a checkpoint": (grad(jax.checkpoint(over(head, 16))), 4, 0.2),
    "jvp": (partial(pushed, over(head, 16)), 3, 0.3),
    "in a window": (WINDOW, 2, 0.2),
    "in a finer one": (grad(over(over(head, 2), 16)), 3, 0.2),
}


@pytest.mark.parametrize("name", COSTS)
def test_nothing_runs_twice_that_need_not(name):
    step, due, most = COSTS[name]
    ran, memory = costs(step)
    assert ran == due
    assert memory < most


def test_the_twin_undivided_takes_what_it_is_compared_with():
    assert costs(grad(head))[1] > 1.9


@pytest.mark.cpu
def test_on_devices_pieces_are_of_the_rows_of_one_device():
    axis = ga.DataAxis("d", mesh=mesh_of(8, names=("d",)))
    how = {"batch_argnums": (1, 2), "data_axis": axis}
    found = ga.batch_dependencies(over(head, 8), 4, **how)
    assert found(*TYPES).pieces == [("head", 8, 512 // 4 // 8 // 8)]


@pytest.mark.parametrize(
    ("rows", "how", "due"),
    [
        (64, {"k": 8}, (8, 2)),
        (48, {"k": 8}, (6, 2)),  # 8 does not divide 12
        (28, {"k": 4}, (1, 7)),
        (48, {"k": None, "microbatch_size": 8}, (2, 6)),
    ],
)
def test_if_the_pieces_do_not_divide_the_rows_the_most_that_do(rows, how, due):
    w, h, labels = arrays()
    args = w, jnp.resize(h, (rows, WIDTH)), jnp.resize(labels, rows)
    found = ga.batch_dependencies(over(head, **how), 4, batch_argnums=(1, 2))(*args)
    assert found.pieces == ([("head", *due)] if due[0] > 1 else [])
    assert ("Inside, head runs in" in str(found)) == (due[0] > 1)


def test_an_option_that_does_not_fit_is_refused():
    with pytest.raises(TypeError, match="remat must be True, False or None, but it is"):
        ga.microbatch(head, 4, remat=1)
    mine = ga.microbatch(each, K, batch_argnums=(1, 2), remat=False)
    with pytest.raises(ValueError, match="With remat=False exactly one result must be"):
        grad(squared(mine))(*arrays())

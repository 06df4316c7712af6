"""`batch_dependencies` says what a window does: passes and bytes are counted here."""

import collections
import itertools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ga_optax as ga

pytestmark = pytest.mark.usefixtures("optax_promotion")
K, ROWS = 4, 16
# No two layers have weights of one shape, so that products say whose they are.
WIDTHS = [13, 17, 19, 23, 29, 31, 37, 41, 43]


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def arguments(layers=2):
    pairs = itertools.pairwise(WIDTHS[: layers + 1])
    batch = {"x": array(ROWS, WIDTHS[0]), "m": array(ROWS)}
    return [array(*pair) for pair in pairs], batch


def network(p, b, between=lambda h: h):
    h = b["x"]
    for w in p:
        h = jnp.tanh(between(h @ w))
    return h


def mean(p, b):
    return (network(p, b) ** 2).mean()


def masked(p, b):
    return ((network(p, b) ** 2).sum(1) * b["m"]).sum() / b["m"].sum()


def balanced(p, b):
    """Classes count alike, however many rows they have."""
    of_class = (b["x"][:, :3] > 0).astype(float)
    each = (network(p, b) ** 2).sum(1)
    return (each @ of_class / of_class.sum(0)).mean()


def root(p, b):
    return jnp.sqrt(mean(p, b))


def contrastive(p, b):
    z = network(p, b)
    return (jax.nn.logsumexp(z @ z.T, 1) - (z**2).sum(1)).mean()


def standard(h):
    return (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3)


def normalised(p, b):
    return (network(p, b, standard) ** 4).mean()


def dice(p, b):
    q = jax.nn.sigmoid(network(p, b).sum(1))
    return 1 - 2 * (q * b["m"]).sum() / (q.sum() + b["m"].sum())


def head(p, b):
    """A dice loss of given features."""
    q = jax.nn.sigmoid((b["x"] @ p[0]).sum(1))
    return 1 - 2 * (q * b["m"]).sum() / (q.sum() + b["m"].sum())


def over_rows(p, b):
    z = network(p, b)
    return (jax.nn.softmax(z.sum(1))[:, None] * z).sum(0).var()


def ranked(p, b):
    """`sort` over rows has no rule."""
    return (jnp.sort(network(p, b).sum(1)) * jnp.linspace(0, 1, ROWS)).mean()


# -- Counted in the program ------------------------------------------------------------

_PRODUCT = re.compile(r"stablehlo\.dot_general.*: \((.*)\) -> (.*)")
_SHAPE = re.compile(r"tensor<([\dx]*)x\w+>")


def products(fun, args, k=K, **options):
    """The shapes of the products in the loops of a window: operands and result."""
    step = jax.jit(ga.value_and_grad(fun, k, **options))
    for types in _PRODUCT.findall(step.lower(*args).as_text()):
        shapes = _SHAPE.findall(" ".join(types))
        yield [tuple(map(int, shape.split("x"))) for shape in shapes]


def counted(fun, args, k=K, **options):
    """How often the product of any layer runs over all rows, and to its gradient."""
    forward, backward = collections.Counter(), collections.Counter()
    for one, two, result in products(fun, args, k, **options):
        for w in args[0]:
            if w.size == math.prod(result):
                backward[w.shape] += 1
            elif w.size in map(math.prod, (one, two)) and w.shape[1] in result:
                forward[w.shape] += 1
    return max(forward.values()), max(backward.values())


def said(fun, args, k=K, **options):
    found = ga.batch_dependencies(fun, k, **options)(*args)
    return found.forward_passes, found.backward_passes


@pytest.mark.grid(3)
@pytest.mark.parametrize(
    ("fun", "layers", "passes"),
    [
        (mean, 2, (1, 1)),
        (masked, 2, (1, 1)),
        (balanced, 2, (1, 1)),
        (root, 2, (2, 1)),
        (contrastive, 2, (2, 1)),
        (normalised, 1, (1, 1)),
        (normalised, 8, (1, 1)),
        (dice, 2, (2, 1)),
        (head, 1, (2, 1)),
        (over_rows, 2, (2, 1)),
        (ranked, 2, (2, 1)),
    ],
)
def test_passes_are_those_that_are_counted_in_the_program(fun, layers, passes):
    args = arguments(layers)
    assert said(fun, args) == counted(fun, args) == passes
    for limit in (0, 2000):
        limited = {"residual_bytes": limit}
        assert said(fun, args, **limited) == counted(fun, args, **limited)


@pytest.mark.parametrize(("fun", "counts"), [(masked, 1), (balanced, 3)])
def test_a_quotient_of_sums_waits_for_its_counts_alone(fun, counts):
    [meeting] = ga.batch_dependencies(fun, K)(*arguments()).meetings
    assert (meeting.kind, meeting.type.size) == ("sum", counts)
    # The twin: counts that the parameters change meet with what they divide.
    assert len(ga.batch_dependencies(dice, K)(*arguments()).meetings) == 2


@pytest.mark.slow
def test_less_that_is_kept_takes_more_passes():
    args = arguments(8)
    limits = 0, 5_000, 10_000, 10**9
    runs = [
        ga.batch_dependencies(normalised, K, residual_bytes=limit)(*args)
        for limit in limits
    ]
    forward = [found.forward_passes for found in runs]
    assert forward[0] > forward[1] > forward[2] > forward[3] == 1
    kept = [sum(x.nbytes for x in found.kept) for found in runs]
    assert kept[0] == 0
    assert all(0 < n <= limit for n, limit in zip(kept[1:], limits[1:], strict=True))


@pytest.mark.grid(1, 4)
@pytest.mark.parametrize("fun", [mean, masked, contrastive, normalised])
def test_passes_over_devices_are_those_of_the_program_too(fun):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    args = arguments()
    room = {"residual_bytes": 10**9}  # of each device
    over = {"data_axis": ga.DataAxis("data", mesh=mesh), **room}
    alone = ga.batch_dependencies(fun, 2 * K, **room)(*args)
    found = ga.batch_dependencies(fun, K, **over)(*args)
    assert said(fun, args, **over) == counted(fun, args, **over)
    assert said(fun, args, **over) == said(fun, args, 2 * K, **room)
    assert found.num_microbatches == 2 * K
    # What is gathered, or the same for all, is on every device; of its own activations
    # each has its part.
    assert [x.nbytes for x in found.meetings] == [x.nbytes for x in alone.meetings]
    halves = [(1 + (x.kind == "kept")) * x.nbytes for x in found.kept]
    assert halves == [x.nbytes for x in alone.kept]


# -- The table -------------------------------------------------------------------------


def test_the_table_has_a_line_for_what_is_alike_and_one_for_all():
    def layers(p, x):
        def body(h, w):
            return jnp.tanh(h @ w - h.mean(0)), None

        return (jax.lax.scan(body, x, p)[0] ** 2).mean()

    found = ga.batch_dependencies(layers, K)(array(3, 32, 32), array(ROWS, 32))
    table, told = str(found).split("\n\n")
    header, _, *rows = table.splitlines()
    total = told[told.index("In all") :].replace("\n", " ")
    assert header.split("  ")[0] == "what meets"
    [sums] = [row for row in rows if "a sum of 32 numbers" in row]
    assert sums.startswith("3 times a sum of 32 numbers")
    assert " 384 " in sums
    first = layers.__code__.co_firstlineno
    assert f"test_whole_batch_dependencies.py:{first + 2}:" in sums
    assert told.startswith("forward, backward: how often")
    assert found.kept_bytes == sum(x.nbytes for x in (*found.meetings, *found.kept))
    passes = f"{found.forward_passes} forward pass"
    assert total.startswith(f"In all: {passes}")
    assert f"in about {found.peak_bytes:,} bytes." in total


def test_arguments_are_those_of_the_step_or_their_types():
    def fun(p, x, key, train, scale=1.0):
        keep = jax.random.bernoulli(key, 0.5, x.shape) if train else 1.0
        return jnp.sqrt((jnp.tanh((x * keep) @ p) ** 2).mean()) * scale

    p, x, key = jnp.ones((8, 8)), jnp.ones((ROWS, 8)), jax.random.key(0)
    found = ga.batch_dependencies(fun, K)(p, x, key, True, scale=2.0)
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (p, x, key))
    assert str(ga.batch_dependencies(fun, K)(*types, True, scale=2.0)) == str(found)
    assert found.forward_passes == 2
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    find = ga.batch_dependencies(fun, K, data_axis="data")
    found = find(p, x, key, False)
    assert found.num_microbatches == 2 * K
    of_x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    assert str(find(types[0], of_x, types[2], False)) == str(found)


# -- What to do ------------------------------------------------------------------------


def _halved(h):
    return jax.lax.while_loop(lambda h: jnp.abs(h).max() > 0.1, lambda h: h / 2, h)


def _in_order(h):
    return jax.vmap(lambda x: jnp.zeros_like(x).at[jnp.argsort(x)].set(x))(h)


def _by_offsets(h):
    first = jnp.arange(len(h))[:, None] * h.shape[1]
    at = (jnp.argsort(h, 1) + first).reshape(-1)
    return jnp.zeros(h.size).at[at].set(h.reshape(-1)).reshape(h.shape)


ADVISED = {
    "while": (_halved, jax.vmap(_halved)),
    "scatter": (_by_offsets, _in_order),
}


@pytest.mark.parametrize("name", ADVISED)
def test_what_is_computed_whole_says_what_to_do_and_that_helps(name):
    w, x = jnp.ones((4, 4)), jnp.ones((16, 4))
    tables = []
    for f in ADVISED[name]:

        def loss(w, x, f=f):
            return jnp.mean(jnp.sin(x @ w) * jax.lax.stop_gradient(f(x @ w)))

        tables.append(str(ga.batch_dependencies(loss, 4)(w, x)))
    assert "jax.vmap" in tables[0]
    assert "jax.vmap" not in tables[1]

"""By block: partitions cover, adds equal `accumulator.add`, and touch one block."""

from typing import NamedTuple

import helpers
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import leaves_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ga_optax import accumulator, blocks
from ga_optax.accumulator import Accumulator
from ga_optax.blocks import _by_block

compilations = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **_: (
        compilations.append(event) if event.endswith("backend_compile_duration") else 0
    )
)


class Layer(NamedTuple):
    w: jax.Array
    b: jax.Array


def bits(tree):  # of any tree, an empty one too
    return jax.tree.leaves(tree) and helpers.bits(tree)


def model(layers=3, width=4, seed=0):
    """A tree of lists, named tuples and a bare leaf."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return {
        "embed": draw(7, width),
        "layers": [Layer(draw(width, width), draw(width)) for _ in range(layers)],
        "head": {"w": draw(width, 7)},
    }


def stacked(layers=3, width=4, seed=0):
    """The same model with stacked layers."""
    params = model(layers, width, seed)
    return params | {"layers": jax.tree.map(lambda *x: jnp.stack(x), *params["layers"])}


NAMES = ["embed", "layers/0", "layers/1", "layers/2", "head"]
SIZES = dict(zip(NAMES, [28, 20, 20, 20, 28], strict=True))
STACKED_BY = ["embed", blocks.Stacked("layers"), "head"]
BOTH = pytest.mark.parametrize(
    ("make", "by"), [(model, NAMES), (stacked, STACKED_BY)], ids=["list", "stack"]
)


def add_all(p, acc, grads, weight=None, order=reversed):
    for name in order(p):
        acc = blocks.add(p, acc, name, blocks.select(p, grads, name), weight)
    return acc


# -- Partitions ------------------------------------------------------------------------

BY_BIAS = lambda path: "b" if path.endswith("/b") else "rest"  # noqa: E731
HAIKU = {"mlp/~/linear_0": {"w": jnp.ones(2)}, "mlp/~/linear_01": jnp.ones(3)}


@pytest.mark.parametrize(
    ("tree", "by", "sizes"),
    [
        (model(), 1, {"embed": 28, "head": 28, "layers": 60}),
        (model(), 2, {"embed": 28, "head/w": 28, **dict.fromkeys(NAMES[1:4], 20)}),
        (model(), NAMES, SIZES),
        (stacked(), STACKED_BY, SIZES),
        (model(), "", {"": 116}),
        # A prefix ends where a key ends.
        (HAIKU, list(HAIKU), dict(zip(HAIKU, [2, 3], strict=True))),
        (model(), BY_BIAS, {"rest": 104, "b": 12}),
        (
            stacked(),
            lambda s: blocks.Stacked("deep") if "layers" in s else "shallow",
            {"shallow": 56, "deep/0": 20, "deep/1": 20, "deep/2": 20},
        ),
        (jax.eval_shape(model), 1, {"embed": 28, "head": 28, "layers": 60}),
    ],
    ids=["1", "2", "list", "stacked", "all", "haiku", "path", "deep", "shapes"],
)
def test_a_rule_names_the_blocks_in_its_order(tree, by, sizes):
    p = blocks.partition(tree, by)
    assert {name: p[name].elements for name in p} == sizes
    # By the order of leaves for a number, by that of the rule else.
    assert list(p.names) == list(sizes) or by == 2
    assert len(p) == len(sizes)


def test_a_block_is_the_tree_at_its_path_and_otherwise_one_with_none():
    params = model()
    p = blocks.partition(params, NAMES)
    assert blocks.select(p, params, "layers/1") is not params
    assert isinstance(blocks.select(p, params, "layers/1"), Layer)
    assert blocks.select(p, params, "embed") is params["embed"]
    layer = blocks.select(blocks.partition(stacked(), STACKED_BY), stacked(), NAMES[2])
    assert bits(layer) == bits(params["layers"][1])
    p = blocks.partition(params, BY_BIAS)
    chosen = blocks.select(p, params, "b")
    assert (chosen["embed"], chosen["layers"][0].w) == (None, None)
    assert bits(chosen["layers"][2].b) == bits(params["layers"][2].b)


def test_a_partition_is_hashable_static_and_a_tree_without_leaves():
    params = model()
    p, same = (blocks.partition(params, NAMES) for _ in range(2))
    assert (p, hash(p), jax.tree.leaves(p)) == (same, hash(same), [])
    for other in (blocks.partition(params, 1), blocks.partition(model(width=5), NAMES)):
        assert p != other
    as_tree = jax.jit(lambda p, t: blocks.select(p, t, "layers/1"))
    by_number = jax.jit(blocks.select, static_argnums=(0, 2))
    got = as_tree(p, params), as_tree(same, params), by_number(p, params, NAMES[2])
    assert list(map(bits, got)) == [bits(params["layers"][1])] * 3
    assert as_tree._cache_size() == 1


SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)


def trees(dtype):
    """Leaves of random bits, NaN payloads and subnormals among them."""
    raw = hnp.arrays(f"u{np.dtype(dtype).itemsize}", SHAPES)
    keys = st.sampled_from(["a", "b", "a/b", "c", "10", "1"])
    return st.recursive(
        raw.map(lambda x: jnp.asarray(x.view(dtype))),
        lambda inner: (
            st.dictionaries(keys, inner, max_size=3)
            | st.lists(inner, max_size=3)
            | st.tuples(inner, st.none())
        ),
        max_leaves=6,
    )


@hypothesis.given(
    st.sampled_from(["f4", "i4", "bfloat16", "c8", "u1"]).flatmap(trees),
    st.sampled_from([1, 2, 3, "", lambda path: "some" if "b" in path else "other"]),
)
def test_every_leaf_is_in_one_block_and_comes_back_bit_for_bit(tree, by):
    if not jax.tree.leaves(tree) and by == "":
        return  # a prefix without a leaf
    p = blocks.partition(tree, by)
    positions = [i for name in p for i in p[name].leaves]
    assert sorted(positions) == list(range(len(jax.tree.leaves(tree))))
    for name in p:
        block = blocks.select(p, tree, name)
        again = blocks.replace(p, tree, name, block)
        vector, spec = blocks.flatten(p, tree, name)
        for got, due in ((again, tree), (blocks.unflatten(p, vector, spec), block)):
            assert jax.tree.structure(got) == jax.tree.structure(due)
            assert bits(got) == bits(due)
        assert vector.shape == (sum(spec.sizes),) == (p[name].elements,)
        flat = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(block))
        assert np.asarray(vector).tobytes() == flat


# -- Adding a block --------------------------------------------------------------------


@pytest.mark.grid(2, 4)
@BOTH
@pytest.mark.parametrize("weights", [None, [3, 0, 2.5, 7]], ids=["plain", "weighted"])
@pytest.mark.parametrize("order", [iter, reversed])
def test_adding_every_block_gives_the_bits_of_adding_the_tree(make, by, weights, order):
    p = blocks.partition(make(), by)
    by_block = whole = accumulator.init(make())
    by_block = jax.tree.map(jnp.copy, by_block)  # it is donated
    for i, weight in enumerate(weights or [None] * 4):
        by_block = add_all(p, by_block, make(seed=i), weight, order)
        whole = jax.jit(accumulator.add)(whole, make(seed=i), weight)
        assert isinstance(by_block, Accumulator)
    assert bits(by_block) == bits(whole)


@BOTH
@pytest.mark.parametrize("weight", [None, 2.0, 0.0])
def test_the_first_micro_step_overwrites_whatever_the_buffers_hold(make, by, weight):
    p = blocks.partition(make(), by)

    def holding(count):
        nans = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), make())
        return Accumulator(nans, jnp.float32(count or jnp.nan), jnp.int32(count))

    clean = add_all(p, accumulator.init(make()), make(seed=1), weight)
    assert bits(add_all(p, holding(0), make(seed=1), weight)) == bits(clean)
    assert clean.weight == (1 if weight is None else weight)
    # The twin: an accumulator that is not empty is read.
    held = add_all(p, holding(1), make(seed=1), weight)
    assert all(np.isnan(x).all() for x in jax.tree.leaves(held.total))


@BOTH
def test_24_equal_layers_compile_once(make, by):
    params = make(24, 6 if make is model else 9)["layers"]  # widths of no other test
    p = blocks.partition(params, blocks.Stacked("") if make is stacked else 1)
    acc, layer = accumulator.init(params), blocks.select(p, params, "0")
    before, size = len(compilations), _by_block._add._cache_size()
    for _ in range(3):
        for name in reversed(p):
            acc = blocks.add(p, acc, name, layer)
    # And a program that advances weight and count, which may be compiled already.
    assert len(compilations) - before in (1, 2)
    assert _by_block._add._cache_size() == size + 1


def pointers(tree):
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


def test_an_add_writes_its_own_blocks_buffers_in_place_and_touches_no_other():
    params = model(width=64)
    p, acc = blocks.partition(params, NAMES), accumulator.init(params)
    before, places = acc.total, pointers(acc.total)
    opened = blocks.add(p, acc, "layers/1", params["layers"][1])
    assert pointers(opened._acc.total) == places
    # Donated: the old buffers of this block, and of no other, are gone.
    gone = [x for x in jax.tree.leaves(before) if x.is_deleted()]
    assert [id(x) for x in gone] == [id(x) for x in before["layers"][1]]


def test_an_add_to_stacked_layers_works_in_place_with_one_layer_of_workspace():
    params = stacked(24, 256)["layers"]
    p, acc = blocks.partition(params, blocks.Stacked("")), accumulator.init(params)
    grads, places = blocks.select(p, params, "5"), pointers(acc.total)
    leaves = jax.tree.leaves(acc.total), jax.tree.leaves(grads)
    rest = acc._replace(total=())
    lowered = _by_block._add.lower(leaves[0], rest, leaves[1], None, jnp.int32(5))
    memory, layer = lowered.compile().memory_analysis(), 4 * p["5"].elements
    assert memory.alias_size_in_bytes == 24 * layer
    assert memory.temp_size_in_bytes < 1.1 * layer
    total = blocks.add(p, acc, "5", grads)._acc.total
    assert pointers(total) == places
    # Every other layer keeps its bits.
    assert not any(np.delete(x, 5, axis=0).any() for x in jax.tree.leaves(total))


@BOTH
@pytest.mark.parametrize("weight", [None, 3.0, "array"])
def test_adding_transfers_nothing_and_waits_for_nothing(make, by, weight, monkeypatch):
    p, acc, grads = blocks.partition(make(), by), accumulator.init(make()), make(seed=1)
    array = jnp.float32(3)

    def get(x):
        assert not isinstance(x, jax.Array), "a transfer to the host"
        return x

    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_get", get)
        patch.setattr(type(array), "__float__", get)
        with jax.transfer_guard("disallow"):
            for _ in range(2):
                acc = add_all(p, acc, grads, array if weight == "array" else weight)
            # The twins: the guard would have seen it, and so would the patches.
            with pytest.raises(Exception, match="Disallowed"):
                acc.count + 1
        with pytest.raises(AssertionError, match="to the host"):
            accumulator.add(accumulator.init(make()), grads, array)
    assert int(acc.count) == 2


@BOTH
def test_inside_jit_and_scan_it_gives_the_same_bits(make, by):
    p = blocks.partition(make(), by)
    batches = jax.tree.map(lambda *x: jnp.stack(x), *(make(seed=i) for i in range(3)))
    weights = jnp.array([1.0, 4.0, 2.0])

    def micro_step(acc, batch):
        return add_all(p, acc, *batch), None

    run = jax.jit(lambda acc: jax.lax.scan(micro_step, acc, (batches, weights))[0])
    acc = accumulator.init(make())
    for i in range(3):  # block by block, outside
        head = blocks.add(p, acc, "head", make(seed=i)["head"], weights[i])
        head = jax.jit(lambda acc: acc)(head) if i == 0 else head  # an open one, too
        assert head.added == ("head",)
        for name in head.missing:
            grads, own = blocks.select(p, make(seed=i), name), head._weight
            head = blocks.add(p, head, name, grads, own)
        acc = head
    assert bits(run(accumulator.init(make()))) == bits(acc)


@pytest.mark.cpu
@BOTH
def test_a_sharded_accumulator_stays_sharded(make, by):
    mesh = jax.make_mesh((4,), ("model",), devices=jax.devices()[:4])

    def put(x):
        spec = P(*[None] * (x.ndim - 1), "model") if x.ndim else P()
        return jax.device_put(x, NamedSharding(mesh, spec))

    params = jax.tree.map(put, make() | {"head": {"w": jnp.ones((4, 8))}})
    p = blocks.partition(params, by)
    acc = add_all(p, accumulator.init(params), params)
    acc = acc._replace(weight=put(acc.weight), count=put(acc.count))
    grads, weight = {n: blocks.select(p, params, n) for n in p}, put(jnp.float32(2))
    with jax.transfer_guard("disallow"):
        for name in p:
            acc = blocks.add(p, acc, name, grads[name], weight)
    for got, want in leaves_of(acc.total, params):
        assert got.sharding == want.sharding
        np.testing.assert_array_equal(got, 3 * want)


# -- Norms, and what is not finite -----------------------------------------------------


@BOTH
def test_norms_are_those_of_a_float64_oracle(make, by):
    tree = make(width=32)
    p = blocks.partition(tree, by)
    norms = blocks.norms(p, tree)
    assert (norms.shape, norms.dtype) == ((len(p),), jnp.float32)
    for name, norm in zip(p, np.asarray(norms, np.float64), strict=True):
        leaves = jax.tree.leaves(blocks.select(p, tree, name))
        exact = np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in leaves))
        bound = (p[name].elements / 2 + 2) * 2.0**-24  # as the docstring derives
        assert abs(norm - exact) <= bound * exact
    assert bits(jax.jit(lambda t: blocks.norms(p, t))(tree)) == bits(norms)


def test_norms_take_the_widest_precision_complex_leaves_and_no_block():
    tree = {"a": jnp.array([3 + 4j], jnp.complex64), "b": jnp.ones(4, jnp.bfloat16)}
    of = lambda tree: blocks.norms(blocks.partition(tree, 1), tree)  # noqa: E731
    np.testing.assert_array_equal(of(tree), np.array([5, 2], np.float32))
    with jax.enable_x64(True):
        norms = of({"a": jnp.full(2, 1e100), "b": jnp.ones(4, jnp.float32)})
        assert norms.dtype == jnp.float64
        assert np.isfinite(norms).all()
    nothing = blocks.partition({}, 1)
    assert of({}).shape == blocks.not_finite(nothing, {}).shape == (0,)


@BOTH
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_says_which_block(make, by, bad):
    tree = make()
    p = blocks.partition(tree, by)
    assert not blocks.not_finite(p, tree).any()
    for name in p:
        leaves, structure = jax.tree.flatten(blocks.select(p, tree, name))
        leaves[-1] = leaves[-1].at[(-1,) * leaves[-1].ndim].set(bad)
        spoilt = blocks.replace(p, tree, name, jax.tree.unflatten(structure, leaves))
        assert blocks.not_finite(p, spoilt).tolist() == [n == name for n in p]


@BOTH
@pytest.mark.parametrize("function", [blocks.norms, blocks.not_finite])
def test_24_blocks_take_one_computation_and_one_transfer(make, by, function):
    tree = make(22, 5)
    p = blocks.partition(tree, by if make is stacked else 2)
    before = len(compilations)
    with jax.transfer_guard("disallow"):
        result = function(p, tree)
    assert len(compilations) == before + 1  # nothing runs but this one program
    assert len(p) == len(jax.device_get(result)) == 24
    assert isinstance(result, jax.Array)


# -- Misuse ----------------------------------------------------------------------------

Q = blocks.partition(model(), NAMES)
LAYER, EMBED = model()["layers"][0], model()["embed"]
UNLIKE = model() | {"layers": [LAYER, LAYER._replace(w=jnp.ones((5, 4))), LAYER]}
HEADLESS = model() | {"head": {}}
VECTOR, SPEC = blocks.flatten(Q, model(), "layers/0")
TWO = {"a": {"w": jnp.ones(2), "n": jnp.ones(2, jnp.bfloat16)}}
R, FIRST = blocks.partition(TWO, 1), blocks.partition(model(), 1)
FOUR = ["embed", "layers", "head"]
EMPTY, NARROW = accumulator.init(model()), blocks.partition(model(width=3), NAMES)


def opened(weight=None):
    return blocks.add(Q, accumulator.init(model()), "head", model()["head"], weight)


def twice(first, second, q=Q, name="embed"):
    blocks.add(q, opened(first), name, model()[name], second)


def added(new, name="layers/0", tree=None):
    blocks.add(Q, accumulator.init(tree or model()), name, new)


def divided(by, tree=None):
    blocks.partition(tree or model(width=3), by)


def two_names(of_s, rest):
    tree = {"a": {"s": jnp.ones((2, 2))}, "b": jnp.ones(3)}
    divided(lambda s: blocks.Stacked(of_s) if s == "a/s" else rest, tree)


ERRORS = """
# A rule that does not cover the tree once.
divided(["embed", "head"]) -> V [0].w | matches no prefix
divided([*FOUR, "layers/0"]) -> V the prefixes 'layers', 'layers/0'
divided([*FOUR, "tail"]) -> V 'tail' has none
divided(0) -> V it is 0. Use 1
divided(lambda _: None) -> V for leaf ['embed'] | it is None
divided(lambda _: 7) -> T result of the function | it is 7 of type int
divided(blocks.Stacked("")) -> V one leading axis
blocks.partition({"a": jnp.zeros((0, 3))}, blocks.Stacked("a"))
  -> V one leading axis | shape (0, 3)
two_names("a", "a/0") -> V have different names, but 'a/0' is the name of 2. Name one
# A tree or a block that is not the partition's.
blocks.select(Q, model(), "layers/7") -> V 7'. Use 'embed'
blocks.replace(Q, model(), "layers/0", LAYER._replace(b=jnp.ones(5)))
  -> V .b | (4,), as in | (5,)
blocks.replace(Q, model(), "layers/0", {"w": LAYER.w}) -> V must have the tree structure
added(LAYER._replace(b=jnp.ones(3))) -> V leaf .b of the gradient of bl
added({"w": LAYER.w}) -> V must have the tree structure of
blocks.add(Q, model(), "embed", EMBED) -> T type dict. Make one
# An open micro-step.
twice(None, None, name="head") -> V 'head' was added already. First add 'e
twice(None, None, FIRST) -> V of one partition, but 'embed'
opened().total -> A 'embed', 'layers/0', 'layers/1'
opened().sum -> A has no attribute 'sum'
accumulator.add(opened(), model()) -> A must be added before
accumulator.merge(EMPTY, opened()) -> A must be added before
# Weights.
twice(2.0, None) -> V 'embed' gets | 'head' got
twice(2.0, jnp.float32(2)) -> V 'embed' gets | 'head' got
twice(jnp.float32(2), jnp.float32(2)) -> V one array object
# Vectors and reports.
blocks.unflatten(Q, VECTOR[:-1], SPEC) -> V 'layers/0' must have | 20, | (19,)
blocks.unflatten(Q, VECTOR.astype("bfloat16"), SPEC) -> T float32 | bfloat16
blocks.unflatten(NARROW, VECTOR, SPEC) -> V 'layers/0', which has 12 | it has 20
blocks.flatten(R, TWO, "a") -> T one dtype | bfloat16 and float32
blocks.report(model(), jnp.int32) -> T floating | it is int32
"""
OF_TREES = """
blocks.select(Q, TREE, "embed")
blocks.norms(Q, TREE)
blocks.not_finite(Q, TREE)
blocks.flatten(Q, TREE, "embed")
blocks.replace(Q, TREE, "embed", EMBED)
added(EMBED, "embed", TREE)
"""
for _code in OF_TREES.split("\n")[1:-1]:
    ERRORS += f"""
{_code.replace("TREE", "UNLIKE")} -> V leaf ['layers'][1].w | (5, 4)
{_code.replace("TREE", "HEADLESS")} -> V leaf ['head']['w'] is missing
"""


@pytest.mark.parametrize(("code", "error", "said"), helpers.refusals(ERRORS))
def test_what_does_not_fit_raises_and_says_what_came(code, error, said):
    helpers.says(lambda: eval(code), error, said)


def test_what_raises_donates_nothing_and_equal_numbers_are_one_weight():
    acc = accumulator.init(model())
    with pytest.raises(ValueError, match=r"leaf \.b"):
        blocks.add(Q, acc, "layers/0", LAYER._replace(b=jnp.ones(3)))
    assert not any(x.is_deleted() for x in jax.tree.leaves(acc))
    acc = blocks.add(Q, opened(2), "embed", EMBED, np.float32(2))
    assert acc.missing == ("layers/0", "layers/1", "layers/2")
    one, ones = blocks.partition(jnp.ones(3), 1), jnp.ones(3)  # whole at once
    assert isinstance(blocks.add(one, accumulator.init(ones), "", ones), Accumulator)


# -- The report ------------------------------------------------------------------------


def test_a_report_has_a_row_for_each_block_and_their_sum():
    shapes = jax.eval_shape(lambda: model(width=1024))  # no memory is taken
    report = blocks.report(blocks.partition(shapes, 2))
    sizes = {row.name: row.elements for row in report.rows}
    ends = dict.fromkeys(("embed", "head/w"), 7 * 1024)
    assert sizes == ends | dict.fromkeys(NAMES[1:4], 1024 * 1025)
    assert report.elements == sum(sizes.values())
    for words in ("1,049,600", "[1024,1024]", f"{report.elements:,}"):
        assert words in str(report)
    # A bare tree is reported by top-level name.
    names = [row.name for row in blocks.report(shapes).rows]
    assert names == ["embed", "head", "layers"]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, None])
def test_the_reports_bytes_are_those_of_the_accumulator(dtype):
    own = {"half": jnp.ones(5, jnp.bfloat16), "complex": jnp.ones(3, jnp.complex64)}
    tree = stacked() | own
    total = accumulator.init(tree, dtype).total
    due = sum(x.nbytes for x in jax.tree.leaves(total))
    for of in (tree, blocks.partition(tree, [*STACKED_BY, *own])):
        assert blocks.report(of, dtype).bytes == due

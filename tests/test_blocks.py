"""By block: partitions cover, adds equal `accumulator.add`, and touch one block."""

import functools
import time
from typing import NamedTuple

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax import accumulator, blocks
from ga_optax.accumulator import Accumulator
from ga_optax.blocks import _micro_step

compilations = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **_: (
        compilations.append(event) if event.endswith("backend_compile_duration") else 0
    )
)


class Layer(NamedTuple):
    w: jax.Array
    b: jax.Array


def bits(tree):
    return [
        (np.asarray(x).dtype, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)
    ]


def model(layers=3, width=4, seed=0):
    """A tree of lists, named tuples and a bare leaf."""
    draw = np.random.default_rng(seed).normal
    return {
        "embed": jnp.asarray(draw(size=(7, width)), jnp.float32),
        "layers": [
            Layer(
                jnp.asarray(draw(size=(width, width)), jnp.float32),
                jnp.asarray(draw(size=width), jnp.float32),
            )
            for _ in range(layers)
        ],
        "head": {"w": jnp.asarray(draw(size=(width, 7)), jnp.float32)},
    }


def stacked(layers=3, width=4, seed=0):
    """The same model with stacked layers."""
    params = model(layers, width, seed)
    return params | {"layers": jax.tree.map(lambda *x: jnp.stack(x), *params["layers"])}


LISTED_BY = ["embed", "layers/0", "layers/1", "layers/2", "head"]
STACKED_BY = ["embed", blocks.Stacked("layers"), "head"]
BOTH = pytest.mark.parametrize(
    ("make", "by"), [(model, LISTED_BY), (stacked, STACKED_BY)], ids=["list", "stack"]
)


def add_all(p, acc, grads, weight=None, order=reversed):
    for name in order(p):
        acc = blocks.add(p, acc, name, blocks.select(p, grads, name), weight)
    return acc


# -- Partitions ------------------------------------------------------------------------


def test_a_number_of_keys_names_the_blocks_by_the_first_keys_of_their_paths():
    params = model()
    assert blocks.partition(params, 1).names == ("embed", "head", "layers")
    assert set(blocks.partition(params, 2).names) == {
        "embed",
        "head/w",
        "layers/0",
        "layers/1",
        "layers/2",
    }


def test_prefixes_name_the_blocks_in_their_order():
    assert blocks.partition(model(), LISTED_BY).names == tuple(LISTED_BY)
    assert blocks.partition(stacked(), STACKED_BY).names == tuple(LISTED_BY)
    assert blocks.partition(model(), "").names == ("",)
    assert len(blocks.partition(model(), LISTED_BY)) == 5


def test_a_prefix_ends_where_a_key_ends():
    params = model(layers=11)
    names = ["embed", "head", *(f"layers/{i}" for i in range(11))]
    p = blocks.partition(params, names)
    assert p["layers/1"].elements == p["layers/10"].elements == 20
    haiku = {"mlp/~/linear_0": {"w": jnp.ones(2)}, "mlp/~/linear_01": jnp.ones(3)}
    p = blocks.partition(haiku, ["mlp/~/linear_0", "mlp/~/linear_01"])
    assert [p[name].elements for name in p] == [2, 3]


def test_a_function_of_the_path_names_blocks_across_the_tree():
    p = blocks.partition(model(), lambda path: "b" if path.endswith("/b") else "rest")
    assert p.names == ("rest", "b")
    assert p["b"].elements == 12
    chosen = blocks.select(p, model(), "b")
    assert chosen["embed"] is None
    assert chosen["layers"][0].w is None
    assert bits(chosen["layers"][2].b) == bits(model()["layers"][2].b)


def test_a_function_can_tell_that_layers_are_stacked():
    p = blocks.partition(
        stacked(), lambda s: blocks.Stacked("deep") if "layers" in s else "shallow"
    )
    assert p.names == ("shallow", "deep/0", "deep/1", "deep/2")


def test_what_a_block_is_called_by_a_path_has_the_tree_at_that_path():
    params = model()
    p = blocks.partition(params, LISTED_BY)
    assert isinstance(blocks.select(p, params, "layers/1"), Layer)
    assert blocks.select(p, params, "embed") is params["embed"]
    assert set(blocks.select(p, params, "head")) == {"w"}
    p = blocks.partition(stacked(), STACKED_BY)
    layer = blocks.select(p, stacked(), "layers/1")
    assert jax.tree.map(jnp.shape, layer) == Layer((4, 4), (4,))
    assert bits(layer) == bits(params["layers"][1])


def test_a_partition_is_hashable_and_equal_to_one_made_the_same_way():
    one, two = (blocks.partition(model(), LISTED_BY) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one != blocks.partition(model(), 1)
    assert one != blocks.partition(model(width=5), LISTED_BY)


def test_a_partition_is_a_static_argument_and_a_tree_without_leaves():
    params = model()
    p = blocks.partition(params, LISTED_BY)
    assert jax.tree.leaves(p) == []
    want = bits(params["layers"][1])
    by_number = jax.jit(blocks.select, static_argnums=(0, 2))
    assert bits(by_number(p, params, "layers/1")) == want
    as_tree = jax.jit(lambda p, t: blocks.select(p, t, "layers/1"))
    assert bits(as_tree(p, params)) == want
    assert bits(as_tree(blocks.partition(params, LISTED_BY), params)) == want
    assert as_tree._cache_size() == 1


def test_a_partition_of_shapes_is_that_of_arrays():
    shapes = jax.eval_shape(model)
    assert blocks.partition(shapes, 1) == blocks.partition(model(), 1)


KEYS = st.sampled_from(["a", "b", "a/b", "c", "10", "1"])
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
DTYPES = (np.float32, np.int32, ml_dtypes.bfloat16, np.complex64, np.uint8, np.bool_)


@st.composite
def arrays(draw, dtype):
    """Random bit patterns, NaN payloads and subnormals among them."""
    shape = draw(SHAPES)
    size = np.dtype(dtype).itemsize * int(np.prod(shape))
    raw = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    if dtype == np.bool_:
        raw = raw & 1
    return jnp.asarray(raw.view(dtype).reshape(shape))


def trees(leaves):
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.dictionaries(KEYS, inner, max_size=3),
            st.lists(inner, max_size=3),
            st.tuples(inner, st.none()),
        ),
        max_leaves=6,
    )


TREES = st.sampled_from(DTYPES).flatmap(lambda dtype: trees(arrays(dtype)))
RULES = st.one_of(
    st.integers(1, 3),
    st.just(""),
    st.just(lambda path: "some" if "b" in path else "other"),
)


@hypothesis.given(TREES, RULES)
def test_every_leaf_is_in_one_block_and_only_there(tree, by):
    if not jax.tree.leaves(tree) and by == "":
        return  # a prefix without a leaf
    p = blocks.partition(tree, by)
    positions = [i for name in p for i in p[name].leaves]
    assert sorted(positions) == list(range(len(jax.tree.leaves(tree))))
    selected = [x for name in p for x in jax.tree.leaves(blocks.select(p, tree, name))]
    assert sorted(map(repr, bits(selected))) == sorted(map(repr, bits(tree)))


@hypothesis.given(TREES, RULES)
def test_replacing_a_block_by_itself_changes_no_bit(tree, by):
    if not jax.tree.leaves(tree) and by == "":
        return
    p = blocks.partition(tree, by)
    for name in p:
        again = blocks.replace(p, tree, name, blocks.select(p, tree, name))
        assert jax.tree.structure(again) == jax.tree.structure(tree)
        assert bits(again) == bits(tree)


@BOTH
def test_replacing_a_block_changes_that_block_alone(make, by):
    old, new = make(seed=0), make(seed=1)
    p = blocks.partition(old, by)
    mixed = blocks.replace(p, old, "layers/1", blocks.select(p, new, "layers/1"))
    for name in p:
        from_new = bits(blocks.select(p, new, name))
        from_old = bits(blocks.select(p, old, name))
        assert bits(blocks.select(p, mixed, name)) == (
            from_new if name == "layers/1" else from_old
        )


@pytest.mark.parametrize(
    ("by", "error", "words"),
    [
        (
            ["embed", "head"],
            ValueError,
            r"\['layers'\]\[0\].w .* has none of the pref.*'head'",
        ),
        (
            ["embed", "layers", "layers/0", "head"],
            ValueError,
            "has the prefixes 'layers', 'layers/0'",
        ),
        (["embed", "layers", "head", "tail"], ValueError, "'tail' has none"),
        (["embed", "layers", "head", 3], TypeError, "it is 3 of type int"),
        (0, ValueError, "it is 0. Use 1"),
        (True, TypeError, "it is True"),
        (None, TypeError, "it is None"),
        (2.0, TypeError, "it is 2.0"),
        (lambda path: None, ValueError, "for leaf \\['embed'\\] .* it is None"),
        (lambda path: 7, TypeError, "function returns .* it is 7 of type int"),
        (blocks.Stacked(""), ValueError, "one leading axis"),
    ],
)
def test_a_rule_that_does_not_cover_the_tree_once_raises(by, error, words):
    with pytest.raises(error, match=words):
        blocks.partition(model(width=3), by)


def test_stacked_layers_need_a_leading_axis():
    with pytest.raises(ValueError, match=r"\['s'\] has shape \(\)"):
        blocks.partition({"s": jnp.ones(()), "a": jnp.ones(2)}, blocks.Stacked(""))
    with pytest.raises(ValueError, match=r"leaf \['a'\] has shape \(0, 3\)"):
        blocks.partition({"a": jnp.ones((0, 3))}, blocks.Stacked(""))


def test_two_blocks_of_one_name_raise():
    with pytest.raises(ValueError, match=r"have one name, but 'a/0'"):
        blocks.partition(
            {"a": {"s": jnp.ones((2, 2))}, "b": jnp.ones(3)},
            lambda path: blocks.Stacked("a") if path == "a/s" else "a/0",
        )
    with pytest.raises(ValueError, match=r"Give them different names"):
        blocks.partition(
            {"s": jnp.ones((2, 2)), "b": jnp.ones(3)},
            lambda path: blocks.Stacked("a") if path == "s" else "a",
        )


def test_a_block_that_is_not_there_raises_and_lists_those_that_are():
    p = blocks.partition(model(), LISTED_BY)
    with pytest.raises(ValueError, match=r"it is 'layers/7'. Use 'embed', 'layers/0'"):
        blocks.select(p, model(), "layers/7")


def test_a_tree_that_does_not_fit_the_partition_raises_and_names_the_leaf():
    p = blocks.partition(model(), LISTED_BY)
    wrong = model()
    wrong["layers"][1] = wrong["layers"][1]._replace(w=jnp.ones((5, 4)))
    for use in (
        lambda t: blocks.select(p, t, "embed"),
        lambda t: blocks.norms(p, t),
        lambda t: blocks.not_finite(p, t),
        lambda t: blocks.flatten(p, t, "embed"),
        lambda t: blocks.replace(p, t, "embed", jnp.ones((7, 4))),
        lambda t: blocks.add(p, accumulator.init(t), "embed", jnp.ones((7, 4))),
    ):
        with pytest.raises(ValueError, match=r"leaf \['layers'\]\[1\].w .*\(5, 4\)"):
            use(wrong)
        with pytest.raises(ValueError, match=r"leaf \['head'\]\['w'\] is missing"):
            use(model() | {"head": {}})


def test_a_block_that_does_not_fit_raises_and_names_the_leaf():
    p = blocks.partition(model(), LISTED_BY)
    layer = model()["layers"][0]
    put = functools.partial(blocks.replace, p, model(), "layers/0")
    which = r"leaf .b of the new tree must have {}, as in block 'layers/0', but it has "
    shapes = which.format(r"shape \(4,\)") + r"shape \(5,\)"
    with pytest.raises(ValueError, match=shapes):
        put(layer._replace(b=jnp.ones(5)))
    with pytest.raises(ValueError, match=which.format("dtype float32") + "dtype bfl"):
        put(layer._replace(b=jnp.ones(4, jnp.bfloat16)))
    with pytest.raises(ValueError, match=r"must have the tree structure of block"):
        put({"w": layer.w})


# -- Adding a block --------------------------------------------------------------------


@pytest.mark.grid(1, 4)
@BOTH
@pytest.mark.parametrize("weights", [None, [3, 0, 2.5, 7]], ids=["plain", "weighted"])
@pytest.mark.parametrize("order", [iter, reversed])
def test_adding_every_block_gives_the_bits_of_adding_the_tree(make, by, weights, order):
    p = blocks.partition(make(), by)
    by_block = accumulator.init(make())
    at_once = jax.jit(accumulator.add)
    whole = accumulator.init(make())
    for i in range(4):
        weight = None if weights is None else weights[i]
        by_block = add_all(p, by_block, make(seed=i), weight, order)
        whole = at_once(whole, make(seed=i), weight)
        assert isinstance(by_block, Accumulator)
    assert bits(by_block) == bits(whole)
    assert bits(accumulator.mean(by_block)) == bits(accumulator.mean(whole))


@BOTH
def test_the_mean_is_the_weighted_mean_of_a_float64_oracle(make, by):
    weights = [5, 1, 3]
    p, acc = blocks.partition(make(), by), accumulator.init(make())
    for i, weight in enumerate(weights):
        acc = add_all(p, acc, make(seed=i), weight)
    leaves = [jax.tree.leaves(make(seed=i)) for i in range(3)]

    def errors(mean):
        """Of each leaf, in units of the bound."""
        for got, *grads in zip(jax.tree.leaves(mean), *leaves, strict=True):
            bound = oracle.sum_error_bound(grads, weights, 2.0**-24)
            yield np.max(np.abs(got - oracle.weighted_mean(grads, weights)) / bound)

    assert max(errors(accumulator.mean(acc))) <= 1
    # The twins: the mean of means, and a dropped micro-batch.
    assert max(errors(accumulator.mean(acc._replace(weight=jnp.float32(3))))) > 1e3
    dropped = add_all(p, accumulator.init(make()), make(seed=0), 5)
    dropped = add_all(p, dropped, make(seed=1), 1)
    assert max(errors(accumulator.mean(dropped))) > 1e3


@BOTH
@pytest.mark.parametrize("weight", [None, 2.0, 0.0])
def test_the_first_micro_step_overwrites_whatever_the_buffers_hold(make, by, weight):
    p = blocks.partition(make(), by)
    nans = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), make())
    stale = Accumulator(nans, jnp.float32(jnp.nan), jnp.int32(0))
    clean = add_all(p, accumulator.init(make()), make(seed=1), weight)
    assert bits(add_all(p, stale, make(seed=1), weight)) == bits(clean)
    assert clean.weight == (1 if weight is None else weight)
    # The twin: an accumulator that is not empty is read.
    nans = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), make())
    held = Accumulator(nans, jnp.float32(1), jnp.int32(1))
    held = add_all(p, held, make(seed=1), weight)
    assert all(np.isnan(x).all() for x in jax.tree.leaves(held.total))


@BOTH
def test_a_window_begins_again_where_the_count_is_set_to_zero(make, by):
    p = blocks.partition(make(), by)
    acc = add_all(p, accumulator.init(make()), make(seed=1))
    acc = acc._replace(count=jnp.zeros([], jnp.int32))
    acc = add_all(p, acc, make(seed=2))
    assert bits(acc) == bits(add_all(p, accumulator.init(make()), make(seed=2)))


def test_24_equal_layers_compile_once():
    width = 6  # of no other test, so that nothing is compiled yet
    params = {f"layer_{i}": model(1, width)["layers"][0] for i in range(24)}
    p = blocks.partition(params, 1)
    acc = accumulator.init(params)
    layer = params["layer_0"]
    before = len(compilations)
    for _ in range(3):
        for name in reversed(p):
            acc = blocks.add(p, acc, name, layer)
    # One add for all layers, and one program that advances weight and count, which
    # another test may have compiled.
    assert len(compilations) - before in (1, 2)
    size = _micro_step._add._cache_size()
    acc = add_all(p, acc, params)
    assert _micro_step._add._cache_size() == size
    # The twin: a layer of another shape is another program.
    other = {"a": layer, "b": jnp.ones(width + 1)}
    add_all(blocks.partition(other, 1), accumulator.init(other), other)
    assert _micro_step._add._cache_size() == size + 1


def test_24_stacked_layers_compile_once():
    params = stacked(24, 6)["layers"]
    p = blocks.partition(params, blocks.Stacked(""))
    layer = blocks.select(p, params, "0")
    acc = accumulator.init(params)
    size = _micro_step._add._cache_size()
    for name in p:
        acc = blocks.add(p, acc, name, layer)
    assert _micro_step._add._cache_size() == size + 1
    assert int(acc.count) == 1


def pointers(tree):
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


def test_an_add_writes_its_own_blocks_buffers_in_place_and_touches_no_other():
    params = model(width=64)
    p = blocks.partition(params, LISTED_BY)
    acc = accumulator.init(params)
    before = acc.total
    places = pointers(before)
    opened = blocks.add(p, acc, "layers/1", params["layers"][1])
    after = opened._before.total
    assert pointers(after) == places
    for old, new in (("embed", "embed"), ("head", "head")):
        assert jax.tree.leaves(before[old])[0] is jax.tree.leaves(after[new])[0]
    assert before["layers"][0].w is after["layers"][0].w
    # Donated: the old buffers of this block, and of no other, are gone.
    gone = [x.is_deleted() for x in jax.tree.leaves(before)]
    assert sum(gone) == 2
    assert before["layers"][1].w.is_deleted()


def test_an_add_to_stacked_layers_works_in_place_with_one_layer_of_workspace():
    params = stacked(24, 256)["layers"]
    p = blocks.partition(params, blocks.Stacked(""))
    acc = accumulator.init(params)
    grads = blocks.select(p, params, "5")
    places = pointers(acc.total)
    memory = (
        _micro_step._add.lower(
            jax.tree.leaves(acc.total),
            acc._replace(total=()),
            jax.tree.leaves(grads),
            None,
            jnp.int32(5),
        )
        .compile()
        .memory_analysis()
    )
    layer = 4 * p["5"].elements
    assert memory.alias_size_in_bytes == 24 * layer
    assert memory.temp_size_in_bytes < 1.1 * layer
    opened = blocks.add(p, acc, "5", grads)
    assert pointers(opened._before.total) == places
    # Every other layer keeps its bits.
    others = jax.tree.map(lambda x: np.delete(x, 5, axis=0), opened._before.total)
    assert all(not x.any() for x in jax.tree.leaves(others))


@BOTH
@pytest.mark.parametrize("weight", [None, 3.0, "array"])
def test_adding_transfers_nothing_by_itself(make, by, weight):
    p, acc, grads = blocks.partition(make(), by), accumulator.init(make()), make(seed=1)
    weight = jnp.float32(3) if weight == "array" else weight
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            acc = add_all(p, acc, grads, weight)
    assert int(acc.count) == 2
    # The twin: the guard would have seen it.
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match=r"Disallowed"):
        acc.count + 1


@BOTH
def test_adding_never_waits_for_an_array(make, by, monkeypatch):
    p, acc, grads = blocks.partition(make(), by), accumulator.init(make()), make(seed=1)
    weight = jnp.float32(3)

    def fail(*args):
        raise AssertionError("a transfer to the host")

    monkeypatch.setattr(jax, "device_get", fail)
    monkeypatch.setattr(type(weight), "__float__", fail)
    add_all(p, acc, grads, weight)
    # The twin: outside jit `accumulator.add` looks at its weight, and this is seen.
    with pytest.raises(AssertionError, match=r"a transfer to the host"):
        accumulator.add(accumulator.init(make()), grads, weight)


@BOTH
def test_a_micro_step_inside_jit_and_scan_gives_the_same_bits(make, by):
    p = blocks.partition(make(), by)
    batches = jax.tree.map(lambda *x: jnp.stack(x), *(make(seed=i) for i in range(3)))
    weights = jnp.array([1.0, 4.0, 2.0])

    def micro_step(acc, batch):
        grads, weight = batch
        return add_all(p, acc, grads, weight), None

    run = jax.jit(lambda acc: jax.lax.scan(micro_step, acc, (batches, weights))[0])
    acc = accumulator.init(make())
    for i in range(3):
        acc = add_all(p, acc, make(seed=i), weights[i])
    assert bits(run(accumulator.init(make()))) == bits(acc)


@BOTH
def test_an_open_micro_step_can_pass_through_jit(make, by):
    p = blocks.partition(make(), by)
    acc = blocks.add(
        p, accumulator.init(make()), "head", blocks.select(p, make(), "head")
    )
    acc = jax.jit(lambda acc: acc)(acc)
    assert acc.added == ("head",)
    for name in acc.missing:
        acc = blocks.add(p, acc, name, blocks.select(p, make(), name))
    assert bits(acc) == bits(add_all(p, accumulator.init(make()), make()))


@BOTH
def test_a_sharded_accumulator_stays_sharded(make, by):
    mesh = jax.make_mesh((4,), ("model",), devices=jax.devices()[:4])

    def put(tree):
        return jax.tree.map(
            lambda x: jax.device_put(
                x, NamedSharding(mesh, P(*[None] * (x.ndim - 1), "model"))
            ),
            tree,
        )

    params = put(make() | {"head": {"w": jnp.ones((4, 8))}})
    p = blocks.partition(params, by)
    acc = add_all(p, accumulator.init(params), params)
    replicated = NamedSharding(mesh, P())
    held = acc._replace(
        weight=jax.device_put(acc.weight, replicated),
        count=jax.device_put(acc.count, replicated),
    )
    acc = add_all(p, held, params, 2.0)
    for got, want in zip(
        jax.tree.leaves(acc.total), jax.tree.leaves(params), strict=True
    ):
        assert got.sharding == want.sharding
        np.testing.assert_array_equal(got, 3 * want)
    assert float(acc.weight) == 3


def test_the_accumulators_dtype_is_kept():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model())
    p = blocks.partition(params, LISTED_BY)
    for dtype in (jnp.float32, jnp.bfloat16):
        acc = accumulator.init(params, dtype)
        whole = jax.jit(accumulator.add)(accumulator.init(params, dtype), params, 3)
        assert bits(add_all(p, acc, params, 3)) == bits(whole)


def test_a_tree_of_one_block_is_whole_at_once():
    p = blocks.partition(jnp.ones(3), 1)
    acc = blocks.add(p, accumulator.init(jnp.ones(3)), "", jnp.ones(3))
    assert isinstance(acc, Accumulator)
    assert int(acc.count) == 1


# -- Misuse ----------------------------------------------------------------------------


def opened(weight=None):
    p = blocks.partition(model(), LISTED_BY)
    acc = accumulator.init(model())
    return p, blocks.add(p, acc, "head", model()["head"], weight)


def test_adding_a_block_twice_in_a_micro_step_raises():
    p, acc = opened()
    with pytest.raises(
        ValueError, match=r"'head' was added already.*first: 'embed', 'l"
    ):
        blocks.add(p, acc, "head", model()["head"])


@pytest.mark.parametrize("field", Accumulator._fields)
def test_an_open_micro_step_cannot_be_read(field):
    _, acc = opened()
    with pytest.raises(AttributeError, match=r"lacks 'embed', 'layers/0', 'layers/1'"):
        getattr(acc, field)


def test_no_mean_and_no_sum_can_be_taken_of_an_open_micro_step():
    _, acc = opened()
    with pytest.raises(AttributeError, match=r"must hold whole micro-steps"):
        accumulator.mean(acc)
    with pytest.raises(AttributeError, match=r"must hold whole micro-steps"):
        accumulator.add(acc, model())
    with pytest.raises(AttributeError, match=r"must hold whole micro-steps"):
        accumulator.merge(accumulator.init(model()), acc)
    with pytest.raises(AttributeError, match=r"has no attribute 'sum'"):
        acc.sum  # noqa: B018


@pytest.mark.parametrize(
    ("first", "second"),
    [(None, 2.0), (2.0, None), (2.0, 3.0), ("array", 2.0), (2.0, "array")],
)
def test_blocks_of_a_micro_batch_with_different_weights_raise(first, second):
    first, second = (jnp.float32(2) if w == "array" else w for w in (first, second))
    p, acc = opened(first)
    with pytest.raises(ValueError, match=r"'embed' gets .* 'head' got"):
        blocks.add(p, acc, "embed", model()["embed"], second)


def test_an_equal_array_that_is_another_one_raises_as_it_is_not_looked_at():
    p, acc = opened(jnp.float32(2))
    with pytest.raises(ValueError, match=r"the very same array"):
        blocks.add(p, acc, "embed", model()["embed"], jnp.float32(2))


def test_equal_numbers_are_the_same_weight():
    p, acc = opened(2)
    acc = blocks.add(p, acc, "embed", model()["embed"], np.float32(2))
    assert acc.missing == ("layers/0", "layers/1", "layers/2")


@pytest.mark.parametrize(
    ("weight", "error", "words"),
    [
        (-1.0, ValueError, "not negative, but it is -1.0"),
        (float("nan"), ValueError, "it is nan"),
        ([1.0], TypeError, "of type list"),
        (True, TypeError, "it is True"),
        (jnp.ones(2), ValueError, r"shape \(2,\)"),
        (jnp.ones((), bool), TypeError, "dtype bool"),
    ],
)
def test_a_weight_that_is_none_raises(weight, error, words):
    with pytest.raises(error, match=words):
        opened(weight)


def test_another_partition_in_the_middle_of_a_micro_step_raises():
    _, acc = opened()
    with pytest.raises(ValueError, match=r"of one partition, but 'embed' comes with a"):
        blocks.add(blocks.partition(model(), 1), acc, "embed", model()["embed"])


def test_what_is_no_accumulator_raises():
    p = blocks.partition(model(), LISTED_BY)
    with pytest.raises(
        TypeError, match=r"it is a dict. Make one with accumulator.init"
    ):
        blocks.add(p, model(), "head", model()["head"])


def test_a_gradient_that_is_not_the_blocks_raises_and_names_the_leaf():
    p, acc = blocks.partition(model(), LISTED_BY), accumulator.init(model())
    layer = model()["layers"][0]
    add = functools.partial(blocks.add, p, acc, "layers/0")
    with pytest.raises(
        ValueError, match=r"leaf .b of the gradient of block 'layers/0'"
    ):
        add(layer._replace(b=jnp.ones(3)))
    with pytest.raises(TypeError, match=r"leaf .b .*int32"):
        add(layer._replace(b=jnp.ones(4, jnp.int32)))
    with pytest.raises(ValueError, match=r"must have the tree structure of"):
        add({"w": layer.w})
    # Nothing was donated by those.
    assert not any(x.is_deleted() for x in jax.tree.leaves(acc))


# -- Norms and non-finite values -------------------------------------------------------


@BOTH
def test_norms_are_those_of_a_float64_oracle(make, by):
    tree = make(width=32)
    p = blocks.partition(tree, by)
    norms = blocks.norms(p, tree)
    assert norms.shape == (len(p),)
    assert norms.dtype == jnp.float32
    for name, norm in zip(p, np.asarray(norms, np.float64), strict=True):
        leaves = jax.tree.leaves(blocks.select(p, tree, name))
        exact = np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in leaves))
        bound = (p[name].elements / 2 + 2) * 2.0**-24  # as the docstring derives
        assert abs(norm - exact) <= bound * exact
    # The twin: the norm of another block is not within the bound.
    assert abs(norms[0] - norms[1]) > 0.01 * norms[0]


def test_norms_take_the_widest_precision_and_complex_leaves():
    tree = {"a": jnp.array([3 + 4j], jnp.complex64), "b": jnp.ones(4, jnp.bfloat16)}
    norms = blocks.norms(blocks.partition(tree, 1), tree)
    np.testing.assert_array_equal(norms, np.array([5, 2], np.float32))
    with jax.enable_x64(True):
        tree = {"a": jnp.full(2, 1e100), "b": jnp.ones(4, jnp.float32)}
        norms = blocks.norms(blocks.partition(tree, 1), tree)
        assert norms.dtype == jnp.float64
        assert np.isfinite(norms).all()


@BOTH
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_says_which_block(make, by, bad):
    tree = make()
    p = blocks.partition(tree, by)
    assert not blocks.not_finite(p, tree).any()
    for name in p:
        block = blocks.select(p, tree, name)
        leaves, structure = jax.tree.flatten(block)
        leaves[-1] = leaves[-1].at[(-1,) * leaves[-1].ndim].set(bad)
        spoilt = blocks.replace(p, tree, name, jax.tree.unflatten(structure, leaves))
        assert blocks.not_finite(p, spoilt).tolist() == [n == name for n in p]


@BOTH
@pytest.mark.parametrize("function", [blocks.norms, blocks.not_finite])
def test_24_blocks_take_one_computation_and_one_transfer(make, by, function):
    tree = make(22, 5)
    by = ["embed", blocks.Stacked("layers"), "head"] if make is stacked else 2
    p = blocks.partition(tree, by)
    assert len(p) == 24
    before = len(compilations)
    with jax.transfer_guard("disallow"):
        result = function(p, tree)
    assert len(compilations) == before + 1  # nothing runs but this one program
    assert isinstance(result, jax.Array)  # one array, so one transfer
    assert len(jax.device_get(result)) == 24


def test_norms_and_not_finite_work_inside_jit_and_of_no_block():
    tree = model()
    p = blocks.partition(tree, LISTED_BY)
    assert bits(jax.jit(lambda t: blocks.norms(p, t))(tree)) == bits(
        blocks.norms(p, tree)
    )
    nothing = blocks.partition({}, 1)
    assert blocks.norms(nothing, {}).shape == (0,)
    assert blocks.not_finite(nothing, {}).shape == (0,)


# -- Flat vectors ----------------------------------------------------------------------


@pytest.mark.exhaustive
@hypothesis.given(TREES, RULES)
def test_flatten_and_unflatten_round_trip_bit_for_bit(tree, by):
    if not jax.tree.leaves(tree) and by == "":
        return
    p = blocks.partition(tree, by)
    for name in p:
        vector, spec = blocks.flatten(p, tree, name)
        assert vector.shape == (sum(spec.sizes),) == (p[name].elements,)
        again = blocks.unflatten(p, vector, spec)
        selected = blocks.select(p, tree, name)
        assert jax.tree.structure(again) == jax.tree.structure(selected)
        assert bits(again) == bits(selected)
        flat = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(selected))
        assert np.asarray(vector).tobytes() == flat


@BOTH
def test_flatten_works_inside_jit_and_returns_its_spec(make, by):
    p = blocks.partition(make(), by)
    vector, spec = jax.jit(lambda t: blocks.flatten(p, t, "layers/2"))(make())
    want, same = blocks.flatten(p, make(), "layers/2")
    assert (bits(vector), spec) == (bits(want), same)
    assert {spec: 1}[same] == 1


def test_a_vector_of_another_size_raises_with_the_block_and_both_sizes():
    p = blocks.partition(model(), LISTED_BY)
    vector, spec = blocks.flatten(p, model(), "layers/0")
    with pytest.raises(
        ValueError, match=r"'layers/0' must have shape \(20,\).*\(19,\)"
    ):
        blocks.unflatten(p, vector[:-1], spec)
    with pytest.raises(ValueError, match=r"\(20,\), but it has shape \(4, 5\)"):
        blocks.unflatten(p, vector.reshape(4, 5), spec)
    with pytest.raises(
        TypeError, match=r"'layers/0' must have dtype float32.*bfloat16"
    ):
        blocks.unflatten(p, vector.astype(jnp.bfloat16), spec)
    other = blocks.partition(model(width=3), LISTED_BY)
    with pytest.raises(ValueError, match=r"'layers/0', which has 12 .* it has 20"):
        blocks.unflatten(other, vector, spec)
    with pytest.raises(ValueError, match=r"it is 'layers/0'. Use 'embed'"):
        blocks.unflatten(blocks.partition(model(), 1), vector, spec)


def test_a_block_of_two_dtypes_is_no_vector():
    tree = {"a": {"w": jnp.ones(2), "n": jnp.ones(2, jnp.bfloat16)}}
    p = blocks.partition(tree, 1)
    with pytest.raises(
        TypeError, match=r"'a' must have one dtype.*bfloat16 and float32"
    ):
        blocks.flatten(p, tree, "a")


# -- Report ----------------------------------------------------------------------------


def reference_model(hidden=1024, kv=256, inner=4096, layers=24, vocabulary=32768):
    """Nine components a layer; Megatron's names."""
    zeros = jnp.zeros
    layer = {
        "q": (hidden, hidden),
        "k": (hidden, kv),
        "v": (hidden, kv),
        "o": (hidden, hidden),
        "gate": (hidden, inner),
        "up": (hidden, inner),
        "down": (inner, hidden),
        "norm_1": (hidden,),
        "norm_2": (hidden,),
    }
    return {
        "layers": [{n: zeros(s) for n, s in layer.items()} for _ in range(layers)],
        "lm_head": zeros((hidden, vocabulary)),
        "final_norm": zeros(hidden),
    }


def test_the_report_of_the_350m_model_is_right_and_takes_less_than_a_second():
    start = time.perf_counter()
    shapes = jax.eval_shape(reference_model)
    report = blocks.report(
        blocks.partition(shapes, lambda p: "/".join(p.split("/")[:2]))
    )
    page = str(report)
    assert time.perf_counter() - start < 1
    assert len(report.rows) == 26
    sizes = {row.name: row.elements for row in report.rows}
    assert all(sizes[f"layers/{i}"] == 15_206_400 for i in range(24))
    assert report.bytes // 2**20 == 1520
    assert "15,206,400" in page
    assert "1,520.191" in page
    assert "2×[1024,1024]" in page


def test_a_bare_tree_is_reported_by_top_level_name():
    report = blocks.report(jax.eval_shape(reference_model))
    assert [row.name for row in report.rows] == ["final_norm", "layers", "lm_head"]
    assert report.elements == 24 * 15_206_400 + 1024 * 32768 + 1024


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, None])
def test_the_reports_bytes_are_those_of_the_accumulator(dtype):
    tree = stacked() | {
        "half": jnp.ones(5, jnp.bfloat16),
        "complex": jnp.ones(3, jnp.complex64),
    }
    total = accumulator.init(tree, dtype).total
    assert blocks.report(tree, dtype).bytes == sum(
        x.nbytes for x in jax.tree.leaves(total)
    )
    p = blocks.partition(
        tree, ["embed", blocks.Stacked("layers"), "head", "half", "complex"]
    )
    assert blocks.report(p, dtype).bytes == blocks.report(tree, dtype).bytes


def test_a_dtype_that_cannot_hold_gradients_raises():
    with pytest.raises(TypeError, match=r"must be a floating dtype, but it is int32"):
        blocks.report(model(), jnp.int32)


def test_the_module_is_public():
    assert ga.blocks is blocks
    assert set(blocks.__all__) <= set(vars(blocks))

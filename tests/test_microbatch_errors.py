"""What does not fit is refused, with what was required, what came and what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ga_optax as ga

pytestmark = pytest.mark.quick


def untraced(*args, **kwargs):
    raise AssertionError("fun must not be traced")


def loss(w, x):
    return jnp.mean(x * w)


W = np.float32(2.0)
X = np.ones(8, np.float32)


@pytest.mark.parametrize(
    ("k", "error", "message"),
    [
        (0, ValueError, "must be at least 1, but it is 0"),
        (-2, ValueError, "must be at least 1, but it is -2"),
        (2.0, TypeError, r"must be an int\b.* it is 2\.0 of type float"),
        (True, TypeError, "it is True of type bool"),
        ("4", TypeError, "it is '4' of type str"),
    ],
)
def test_the_number_of_micro_batches_must_be_a_positive_int(k, error, message):
    for make in (ga.value_and_grad, ga.accumulate):
        with pytest.raises(error, match=message):
            make(untraced, k)


def test_a_numpy_integer_is_an_int():
    assert float(jax.jit(ga.value_and_grad(loss, np.int64(4)))(W, X)[0]) == 2


def test_a_batch_that_does_not_divide_says_what_would():
    batch = {"image": np.ones((10, 28, 28), np.float32)}
    with pytest.raises(ValueError, match=r"num_microbatches=4 must divide") as error:
        ga.value_and_grad(untraced, 4)(W, batch)
    assert "leaf ['image'] has shape (10, 28, 28). Use 1, 2, 5 or 10." in str(
        error.value
    )
    with pytest.raises(ValueError, match=r"Use 1 or 7\."):
        ga.accumulate(untraced, 4)(ga.accumulator.init(W), W, X[:7])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"a": X, "b": X[:4]}, r"leaf \['a'\] has shape \(8,\) and leaf \['b'\] has"),
        ({"a": X, "b": 3.0}, r"leaf \['b'\] is a scalar"),
        ([1.0, 2.0], r"leaf \[0\] is a scalar"),
        ({}, "argument 1 holds none"),
        (None, "argument 1 holds none"),
        (X[:0], r"at least one example, but the only leaf of argument 1 has shape"),
    ],
)
def test_a_batch_must_be_arrays_with_one_batch_axis(batch, message):
    with pytest.raises(ValueError, match=message):
        ga.value_and_grad(untraced, 2)(W, batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rng_argnums": 1}, "rng_argnums must not overlap batch_argnums.* argument 1"),
        ({"rng_argnums": 0}, "rng_argnums must not overlap argnums"),
        ({"argnums": 1}, r"batch_argnums must not overlap argnums.*microbatch\(jax.v"),
        ({"carry_argnums": (2, 1)}, "carry_argnums must not overlap batch_argnums"),
        ({"batch_argnums": ()}, "batch_argnums must name at least one"),
        ({"argnums": ()}, "argnums must name at least one"),
        ({"aux": "median"}, "it holds 'median'"),
        ({"aux": {"loss": "mean", "other": None}}, "it holds None"),
    ],
)
def test_options_that_contradict_are_refused_when_the_function_is_made(
    options, message
):
    for make in (ga.value_and_grad, ga.accumulate):
        with pytest.raises(ValueError, match=message):
            make(untraced, 2, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"argnums": "0"}, "argnums must be an int or a sequence of ints"),
        ({"batch_argnums": 1.5}, r"it is 1\.5"),
        ({"weight_fn": 3}, "weight_fn must be a function"),
        ({"accumulator_dtype": jnp.int32}, "must be a floating dtype"),
    ],
)
def test_options_of_the_wrong_type_are_refused(options, message):
    with pytest.raises(TypeError, match=message):
        ga.value_and_grad(untraced, 2, **options)
    with pytest.raises(TypeError, match="fun must be a function"):
        ga.value_and_grad(3, 2)


@pytest.mark.parametrize("leaf", ["text", jnp.sin])
def test_aux_that_is_no_number_is_refused(leaf):
    def fun(w, x):
        return jnp.mean(x * w), {"kept": leaf}

    step = ga.value_and_grad(fun, 2, has_aux=True)
    with pytest.raises(TypeError, match=r"aux must be arrays or numbers, but \['kept"):
        step(W, X)


def test_an_overlap_through_a_negative_position_is_found_at_the_call():
    step = ga.value_and_grad(untraced, 2, rng_argnums=-1)
    with pytest.raises(ValueError, match="must not overlap"):
        step(W, X)


def test_an_argument_that_did_not_come_by_position_is_missed():
    with pytest.raises(ValueError, match="names number 1, and 1 came"):
        ga.value_and_grad(untraced, 2)(W, batch=X)


def test_keys_must_be_keys():
    for bad in (X, np.float32(1), jax.random.split(jax.random.key(0), 8)):
        with pytest.raises(ValueError, match="must name PRNG keys"):
            ga.value_and_grad(untraced, 2, rng_argnums=2)(W, X, {"dropout": bad})


def test_parameters_must_be_floating():
    with pytest.raises(TypeError, match=r"leaf \['n'\] of argument 0 must be floating"):
        ga.value_and_grad(untraced, 2)({"n": np.int32(1), "w": W}, X)


def test_in_place_is_a_bool_and_works_on_any_jax():
    for wrong in (None, "yes", 1):
        with pytest.raises(TypeError, match="optimize must be a"):
            ga.value_and_grad(untraced, 2, optimize=wrong)
    assert float(ga.value_and_grad(loss, 2, optimize=True)(W, X)[0]) == 2


@pytest.mark.parametrize(
    ("fun", "error", "message"),
    [
        (lambda w, x: x * w, ValueError, r"must be a scalar, but it has shape \(4,\)"),
        (lambda w, x: jnp.int32(1), TypeError, "floating, but it has dtype int32"),
        (
            lambda w, x: jax.lax.complex(jnp.mean(x * w), w),
            TypeError,
            "it has dtype complex64",
        ),
        (lambda w, x: (jnp.mean(x * w), x), TypeError, "its loss is of type tuple"),
        (lambda w, x: None, TypeError, "its loss is of type NoneType"),
    ],
)
def test_a_loss_must_be_a_real_floating_scalar(fun, error, message):
    with pytest.raises(error, match=message):
        ga.value_and_grad(fun, 2)(W, X)


def test_a_pair_is_due_with_aux_and_with_a_carry():
    with pytest.raises(TypeError, match=r"fun must return \(loss, aux\)"):
        ga.value_and_grad(loss, 2, has_aux=True)(W, X)
    with pytest.raises(TypeError, match=r"fun must return \(loss, carry\)"):
        ga.value_and_grad(lambda w, x, c: loss(w, x), 2, carry_argnums=2)(W, X, X)
    step = ga.value_and_grad(
        lambda w, x, c: (loss(w, x), c), 2, carry_argnums=2, has_aux=True
    )
    with pytest.raises(TypeError, match=r"\(loss, \(carry, aux\)\)"):
        step(W, X, W)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"a": jnp.zeros(3)}, r"keep the shape \(2,\)"),
        ({"a": jnp.zeros(2, jnp.bfloat16)}, "dtype float32"),
        ({"b": jnp.zeros(2)}, r"leaf \[0\]\['a'\] is missing"),
    ],
)
def test_a_carry_must_come_back_as_it_went(new, message):
    step = ga.value_and_grad(lambda w, x, c: (loss(w, x), new), 2, carry_argnums=2)
    with pytest.raises(ValueError, match=message):
        step(W, X, {"a": jnp.zeros(2)})


def test_a_carry_that_is_changed_where_it_is_counts_as_it_came():
    def grows(w, x, c):
        c["a"] = c["a"] + 1
        if len(x) < 4:
            c["b"] = c["a"]
        return loss(w, x), c

    (_, carry), _ = ga.value_and_grad(grows, 1, carry_argnums=2)(W, X, {"a": W})
    assert jnp.array_equal(carry["a"], W + 1)
    with pytest.raises(ValueError, match=r"leaf \[0\]\['b'\] is not in its arguments"):
        ga.value_and_grad(grows, 4, carry_argnums=2)(W, X, {"a": W})


@pytest.mark.parametrize(
    ("weight_fn", "error", "message"),
    [
        (lambda x: x, ValueError, r"must be a scalar, but it has shape \(4,\)"),
        (lambda x: -1.0, ValueError, "not negative"),
        (lambda x: "4", TypeError, "must be a real number"),
        (lambda x: x[0] > 0, TypeError, "dtype bool"),
    ],
)
def test_a_weight_must_be_one_number_and_is_seen_before_fun(weight_fn, error, message):
    with pytest.raises(error, match=message):
        ga.value_and_grad(untraced, 2, weight_fn=weight_fn)(W, X)


def test_aux_modes_must_match_the_aux_tree():
    def fun(w, x):
        return loss(w, x), {"a": w, "key": jax.random.key(0)}

    with pytest.raises(ValueError, match="a prefix of the aux tree"):
        ga.value_and_grad(fun, 2, has_aux=True, aux={"b": "mean"})(W, X)
    with pytest.raises(TypeError, match=r"leaf \['key'\] of the aux has dtype key"):
        ga.value_and_grad(fun, 2, has_aux=True)(W, X)
    for mode in ("last", "stack"):
        modes = {"a": "mean", "key": mode}
        ga.value_and_grad(fun, 2, has_aux=True, aux=modes)(W, X)


def test_an_accumulator_must_be_one_and_match_the_parameters():
    call = ga.accumulate(untraced, 2)
    with pytest.raises(TypeError, match="must be the accumulator to continue"):
        call(W, W, X)
    acc = ga.accumulator.init({"w": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match=r"leaf \['w'\] of the parameters"):
        call(acc, {"w": np.zeros(4, np.float32)}, X)
    with pytest.raises(ValueError, match=r"leaf \['w'\] is missing"):
        call(acc, {"v": np.zeros(3, np.float32)}, X)


@pytest.mark.parametrize(
    ("options", "args", "kwargs", "message"),
    [
        ({}, (), "rngs", r"leaf \['a'\] of argument 'rngs'.*rng_argnames='rngs'\.$"),
        ({}, (2,), "", r"leaf \['a'\] of argument 2 .*and rng_argnums=2\.$"),
        ({"rng_argnums": 2}, (2, 3), "", r"argument 3 .*and rng_argnums=\(2, 3\)\.$"),
    ],
)
def test_a_key_that_no_one_declared_is_refused_with_the_line_to_write(
    options, args, kwargs, message
):
    keys = {"a": jax.random.key(0)}
    with pytest.raises(ValueError, match=f"PRNG key must differ.*{message}"):
        ga.value_and_grad(untraced, 2, **options)(
            W, X, *(keys for _ in args), **({kwargs: keys} if kwargs else {})
        )


@pytest.mark.parametrize(
    ("options", "args", "kwargs", "message"),
    [
        ({}, (X, X), {}, r"argument 2, of .*batch_argnums=\(1, 2\) .*None for it"),
        ({}, (X, {"a": X, "b": X}), {}, r"batch_argnums=\(1, 2\)"),
        ({}, (X,), {"y": X}, "batch_argnames='y' .*None for it in batch_axes"),
        ({"batch_axes": 1}, (X[None], X), {}, r"batch_argnums=\(1, 2\)"),
        ({"batch_axes": 1}, (X[None], X[None]), {}, r"of shape \(1, 8\)"),
        (
            {"batch_argnums": (1, 2), "batch_argnames": "y"},
            (X, X, X),
            {"y": X},
            r"argument 3.*batch_argnums=\(1, 2, 3\) ",
        ),
    ],
)
def test_what_is_as_long_as_the_batch_must_have_a_role(options, args, kwargs, message):
    with pytest.raises(ValueError, match=f"must have a role, but .*{message}"):
        ga.value_and_grad(untraced, 2, **options)(W, *args, **kwargs)


def test_what_is_not_like_a_batch_needs_no_role():
    teacher = {"w": np.ones((8, 2), np.float32), "b": np.ones(2, np.float32)}

    def fun(w, x, *rest, **named):
        return loss(w, x)

    step = ga.value_and_grad(fun, 2)
    step(W, X, teacher, X[:7], 8.0, "eight", None, names=["a"] * 8, t=(X, 1.0))
    # Nothing is split, so nothing can go astray.
    ga.value_and_grad(fun, 1)(W, X, X, y=X)


@pytest.mark.parametrize(
    ("options", "batch", "message"),
    [
        ({"batch_axes": 1}, X, "here axis 1, but the only leaf of argument 1 has"),
        ({"batch_axes": {"a": 0}}, {"b": X}, "must be a prefix of the batch"),
        ({"batch_axes": (0, None, 0)}, (X, X), "must be a prefix of the batch"),
        ({"batch_axes": None}, X, "argument 1 holds none that batch_axes splits"),
        ({"batch_axes": {"a": 0, "b": 1}}, {"a": X, "b": X[None, 1:]}, "batch_axes"),
    ],
)
def test_batch_axes_must_fit_the_batch(options, batch, message):
    with pytest.raises(ValueError, match=message):
        ga.value_and_grad(untraced, 2, **options)(W, batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_axes": "0"}, "batch_axes must be an int, None, or a tree"),
        ({"batch_axes": {"a": 1.0}}, r"it holds 1\.0"),
        ({"batch_argnames": 3}, "batch_argnames must be a str or a sequence of strs"),
        ({"rng_argnames": ("a", 1)}, "rng_argnames must be a str"),
    ],
)
def test_names_and_axes_of_the_wrong_type_are_refused(options, message):
    with pytest.raises(TypeError, match=message):
        ga.value_and_grad(untraced, 2, **options)


def test_names_must_come_by_keyword_and_have_one_role():
    with pytest.raises(ValueError, match="rng_argnames must not overlap batch_argnam"):
        ga.value_and_grad(untraced, 2, batch_argnames="x", rng_argnames="x")
    with pytest.raises(ValueError, match="names 'y', and z came"):
        ga.value_and_grad(untraced, 2, batch_argnames="y")(W, X, z=1)


def module(kind):
    """A module of two leaves, the second of which is of a kind."""
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones([]))
            self.other = getattr(nnx, kind)(jnp.ones([]))

    return Model()


def test_state_of_a_flax_module_is_not_differentiated():
    def fun(model, x):
        return jnp.mean(x * model.w)

    with pytest.raises(TypeError, match=r"other.* BatchStat.*ga_optax\.flax"):
        ga.value_and_grad(untraced, 2)(module("BatchStat"), X)
    with pytest.raises(TypeError, match=r"leaf \['a'\].*BatchStat"):
        ga.value_and_grad(untraced, 2)({"a": module("BatchStat")}, X)
    grads = ga.value_and_grad(fun, 2)(module("Param"), X)[1]
    assert jax.tree.leaves(grads)[-1] == 1


@pytest.mark.parametrize(
    ("role", "tree", "message"),
    [
        ("argnums", {"f": jax.nn.relu}, r"leaf \['f'\] of argument 0.*eqx\.partition"),
        ("argnums", jnp.tanh, "argument 0 must be an array"),
        ("batch", {"a": X, "id": np.array(["a"] * 8)}, r"leaf \['id'\].*dtype <U1"),
        ("batch", {"a": X, "id": "a"}, r"leaf \['id'\].*type str.*None in batch_axes"),
        ("rng_argnums", {"f": "a"}, r"leaf \['f'\] of argument 2"),
        ("carry_argnums", {"f": jnp.tanh}, r"leaf \['f'\] of argument 2"),
    ],
)
def test_leaves_that_are_no_arrays_are_named(role, tree, message):
    args = {"argnums": (tree, X), "batch": (W, tree)}.get(role, (W, X, tree))
    options = {role: 2} if len(args) == 3 else {}
    with pytest.raises(TypeError, match=message):
        ga.value_and_grad(untraced, 2, **options)(*args)


def test_an_accumulator_is_of_arrays():
    with pytest.raises(TypeError, match=r"leaf \['f'\] of params must be an array"):
        ga.accumulator.init({"w": W, "f": jax.nn.relu})


@pytest.mark.parametrize("weight_fn", [lambda: 1.0, lambda a, b: 1.0])
def test_a_weight_fn_must_take_the_batch_arguments(weight_fn):
    with pytest.raises(TypeError, match="must take the batch arguments, argument 1, b"):
        ga.value_and_grad(untraced, 2, weight_fn=weight_fn)(W, X)


def test_an_error_of_fun_says_what_it_was_given():
    def fun(w, x):  # written for the undivided batch
        return jnp.mean(x * w * jnp.ones(8))

    with pytest.raises(TypeError) as error:
        ga.value_and_grad(fun, 2)(W, X)
    note = error.value.__notes__[0]  # JAX adds another one
    assert "one of 2 micro-batches" in note
    assert "has shape (4,), split along axis 0 of (8,)." in note


def test_aux_without_numbers_is_refused_by_name():
    def fun(w, x):
        return loss(w, x), {"name": "train", "loss": loss(w, x)}

    with pytest.raises(TypeError, match=r"aux must be arrays.*\['name'\] is 'train'"):
        ga.value_and_grad(fun, 2, has_aux=True)(W, X)


def test_a_loss_that_is_not_finite_is_that_of_the_whole_batch():
    def fun(w, x):
        return jnp.sum(x * w) / 0.0

    step = ga.value_and_grad(fun, 2, whole_batch=True)
    assert step(-W, X) == jax.value_and_grad(fun)(-W, X) == (-np.inf, np.inf)

"""Passes touch what they know and nothing else, and a call goes on without them."""

import logging
import pathlib
import subprocess
import sys

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import linear_call
from jax.experimental import checkify
from jax.sharding import AxisType

import ga_optax as ga
from ga_optax._inside import in_place
from ga_optax._passes import arrivals, ir, known, notes, probe, table, transformable
from ga_optax._passes.facts import Facts
from ga_optax.testing import assert_trees_bitwise_equal

K, ROWS, WIDTH, LAYERS = 2, 4, 4, 3
HAS_REFS = pytest.mark.skipif(not in_place.HAS_REFS, reason="before jax 0.11.1")


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def stacked():
    return normal(LAYERS, WIDTH, WIDTH) / 2, normal(K * ROWS, WIDTH, seed=1)


def scanned(w, x, rule=lambda h: h):
    h = jax.lax.scan(lambda h, w: (rule(jnp.tanh(h @ w)), None), x, w)[0]
    return jnp.mean(h**2)


def ruled(back):
    """The identity, with a rule for its cotangent."""

    @jax.custom_vjp
    def same(h):
        return h

    same.defvjp(lambda h: (h, None), lambda _, g: (back(g),))
    return same


def notes_of(loss, *args, **options):
    with notes.recorded() as lines:
        jax.make_jaxpr(ga.value_and_grad(loss, K, **options))(*args)
    return lines


def bound(loss, w, x):
    """c·n·eps·Σ|terms| of a gradient: of two orders of the same sums."""
    grads = [jax.grad(loss)(w, part) for part in jnp.split(x, K)]
    return 64 * np.finfo(np.float32).eps * sum(map(jnp.abs, grads)) / K


# -- Known, or left alone --------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, [1.0, 100.0, 3.0, 7.0]])
def test_a_weight_is_not_scaled_through_a_transpose_that_clips(weights, monkeypatch):
    def clipped(h):
        def clip(_, ct):
            return jnp.clip(ct, -0.01, 0.01)

        return linear_call(lambda _, h: h, clip, (), h)

    def loss(w, batch):
        return jnp.mean(clipped(batch[0] @ w))

    w, x = normal(3), normal(8, 3, seed=1)
    each = jnp.repeat(jnp.asarray(weights or [1.0] * 4), 2)
    options = {"weight_fn": lambda batch: batch[1][0]} if weights else {}
    parts = [jax.grad(loss)(w, (part, None)) for part in jnp.split(x, 4)]
    expected = np.average(np.asarray(parts, np.float64), axis=0, weights=each[::2])

    def differs():
        got = ga.value_and_grad(loss, 4, **options)(w, (x, each))[1]
        terms = np.max(np.abs(np.asarray(parts)))
        return bool(np.any(np.abs(got - expected) > 8 * np.finfo("f4").eps * terms))

    assert not differs()
    if weights:  # the twin: every rule is taken for a linear one
        monkeypatch.setattr(known, "deeds", lambda jaxpr: known.Deeds())
        assert differs()


def printing(g):
    jax.debug.callback(lambda _: None, jnp.sum(g), ordered=True)
    return g


@HAS_REFS
def test_a_callback_in_a_backward_rule_keeps_its_order(monkeypatch):
    seen = []

    def kept(g):
        jax.debug.callback(lambda x: seen.append(float(x)), jnp.sum(g), ordered=True)
        return g

    def loss(w, x):
        return scanned(w, x, ruled(kept))

    w, x = stacked()
    [note] = notes_of(loss, w, x)
    assert "the rule of custom_vjp_call prints, calls back or communicates" in note
    assert "test_passes.py" in note
    plain = jax.jit(ga.value_and_grad(loss, K, optimize=False))(w, x)
    jax.effects_barrier()
    order, seen[:] = [*seen], []
    got = jax.jit(ga.value_and_grad(loss, K))(w, x)
    jax.effects_barrier()
    assert seen == order
    assert len(seen) == K * LAYERS
    assert np.all(np.abs(got[1] - plain[1]) <= bound(loss, w, x))
    monkeypatch.setattr(known, "deeds", lambda jaxpr: known.Deeds())
    with pytest.raises(KeyError):  # the twin
        jax.jit(ga.value_and_grad(loss, K))(w, x)


@HAS_REFS
def test_a_collective_in_a_backward_rule_is_batched_by_the_users_vmap(monkeypatch):
    def loss(w, x):
        return scanned(w, x, ruled(lambda g: jax.lax.psum(g, "i")))

    w, x = stacked()

    def total(gradient):
        over = jax.vmap(gradient, in_axes=(None, 0), axis_name="i")
        return over(w, jnp.stack([x, x + 1]))[1]

    got = total(ga.value_and_grad(loss, K))
    plain = total(ga.value_and_grad(loss, K, optimize=False))
    assert_trees_bitwise_equal(got, plain)
    monkeypatch.setattr(known, "deeds", lambda jaxpr: known.Deeds())
    with pytest.raises((AssertionError, NameError)):  # the twin
        total(ga.value_and_grad(loss, K))


def test_what_is_known_of_a_program_is_read_from_rules_and_inner_programs():
    def deeds(fun):
        return known.deeds(jax.make_jaxpr(fun)(jnp.ones(3)).jaxpr)

    quiet = ruled(lambda g: g)
    assert deeds(jax.nn.relu) == known.Deeds()
    assert deeds(quiet).acts is None
    assert "custom_vjp_call" in deeds(quiet).bends.why
    assert deeds(jax.jit(jax.checkpoint(ruled(printing)))).acts is not None
    assert deeds(lambda x: jax.lax.map(quiet, x)).bends is not None
    loud = deeds(lambda x: jax.debug.print("{}", x)).acts
    assert "prints" in loud.why
    assert "test_passes.py" in loud.line


@HAS_REFS
@pytest.mark.parametrize("jits", [False, True])
def test_checkify_sees_into_the_loop(jits, monkeypatch):
    def loss(w, x):
        return jnp.mean(jnp.log(scanned(w, x) - 5))

    w, x = stacked()

    def error(gradient):
        gradient = jax.jit(gradient) if jits else gradient
        checked = checkify.checkify(gradient, errors=checkify.float_checks)
        return checked(w, x)[0].get()

    assert any("in place" in note for note in notes_of(loss, w, x))
    expected = error(ga.value_and_grad(loss, K, optimize=False))
    assert expected == "nan generated by primitive: log."
    assert error(ga.value_and_grad(loss, K)) == expected
    # The twin: without a rule it sees what comes out of the loop, and not inside.
    rules = sys.modules[checkify.checkify.__module__].error_checks
    monkeypatch.delitem(rules, transformable._primitive())
    assert error(ga.value_and_grad(loss, K)) != expected


@HAS_REFS
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8])
def test_a_scanned_shift_has_the_bits_of_the_plain_sum(rows, monkeypatch):
    def loss(p, x):
        def layer(h, p):
            return jnp.tanh(h * p[0][None] + p[1][None]), None

        return jnp.mean(jax.lax.scan(layer, x, p)[0] ** 2)

    p, x = (normal(3, 5), normal(3, 5, seed=2)), normal(4 * rows, 5, seed=1)

    def both():
        got = jax.jit(ga.value_and_grad(loss, 4))(p, x)[1]
        with helpers.by_hand():
            return got, jax.jit(ga.value_and_grad(loss, 4))(p, x)[1]

    assert_trees_bitwise_equal(*both())
    if rows == 2:  # the twin adds two rows in place
        monkeypatch.setattr(arrivals, "FEW", 0)
        with pytest.raises(AssertionError):
            assert_trees_bitwise_equal(*both())


# -- The table -------------------------------------------------------------------------


def test_every_pass_has_a_law_and_a_row_in_the_table():
    for one in table.PASSES:
        assert one.law
        assert f" {one.name} " in table.__doc__


def bfloat16_layers(w, x):
    """Something for each pass of a call without a mesh to do."""
    angles = jnp.cos(jnp.arange(WIDTH, dtype=jnp.float32) * 0.3)

    def layer(h, w):
        q = jnp.tanh(h @ w).astype(jnp.float32) * angles[None]
        return q.astype(jnp.bfloat16), None

    h = jax.lax.scan(layer, x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))[0]
    return jnp.mean(h.astype(jnp.float32) ** 2)


def text_of(loss, *args, **options):
    return str(jax.make_jaxpr(ga.value_and_grad(loss, K, **options))(*args))


@pytest.mark.parametrize(
    "name",
    [
        "constants",
        *(pytest.param(name, marks=HAS_REFS) for name in ("products", "casts")),
    ],
)
def test_without_a_pass_the_program_is_another_one(name, monkeypatch):
    args = stacked()
    with_all = text_of(bfloat16_layers, *args)
    plain = text_of(bfloat16_layers, *args, optimize=False)
    helpers.without_pass(monkeypatch, name)
    assert text_of(bfloat16_layers, *args) not in (with_all, plain)
    assert text_of(bfloat16_layers, *args, optimize=False) == plain


def test_a_pass_that_raises_is_left_out_with_one_warning(monkeypatch):
    def broken(program, facts):
        raise KeyError("a parameter")

    args = stacked()
    helpers.without_pass(monkeypatch, "products")
    expected = text_of(bfloat16_layers, *args)
    monkeypatch.undo()
    passes = [
        one._replace(change=broken) if one.name == "products" else one
        for one in table.PASSES
    ]
    monkeypatch.setattr(table, "PASSES", tuple(passes))
    monkeypatch.setattr(table, "_failed", set())
    with pytest.warns(UserWarning, match="'products'.*jax.*KeyError.*optimize=False"):
        assert text_of(bfloat16_layers, *args) == expected
    assert text_of(bfloat16_layers, *args) == expected  # and no other warning


def test_a_pass_that_changes_types_is_left_out(monkeypatch):
    def shorter(program, facts):
        jaxpr = program.jaxpr
        return program._replace(jaxpr=jaxpr.replace(outvars=jaxpr.outvars[1:]))

    one = table.Pass("shorter", "fun", "none", lambda facts: True, shorter)
    monkeypatch.setattr(table, "PASSES", (one,))
    monkeypatch.setattr(table, "_failed", set())
    closed = jax.make_jaxpr(lambda x: (x, x))(1.0)
    program = ir.Program(closed.jaxpr)
    with pytest.warns(UserWarning, match="other types"):
        assert table.run("fun", program, Facts()) is program


# -- The next JAX ----------------------------------------------------------------------


@pytest.fixture
def next_jax():
    """What is found out about JAX once is found out anew."""
    probe.usable.cache_clear()
    yield
    probe.usable.cache_clear()


def primitive(name):
    [found] = {
        e.primitive for e in ir.equations(probe._program()) if e.primitive.name == name
    }
    return found


RENAMED = [name for name in known.PARAMETERS if name != "broadcast_in_dim"]


@pytest.mark.usefixtures("next_jax")
@pytest.mark.parametrize("name", RENAMED)
def test_a_primitive_of_another_name_ends_in_the_plain_loop(name, monkeypatch):
    args = stacked()
    plain = text_of(bfloat16_layers, *args, optimize=False)
    probe.usable.cache_clear()
    monkeypatch.setattr(primitive(name), "name", f"{name}_2")
    with pytest.warns(UserWarning, match="lacks.*optimize=False"):
        got = text_of(bfloat16_layers, *args)
    assert "".join(got.replace(f"{name}_2", name).split()) == "".join(plain.split())
    text_of(bfloat16_layers, *args)  # warns once


PARAMETERS = [(name, p) for name, each in known.PARAMETERS.items() for p in each]


@pytest.mark.usefixtures("next_jax")
@pytest.mark.parametrize(("name", "parameter"), PARAMETERS)
def test_a_parameter_that_is_gone_ends_in_the_plain_loop(name, parameter, monkeypatch):
    args = stacked()
    plain = text_of(bfloat16_layers, *args, optimize=False)
    written = ir.equations

    def without(jaxpr):
        for e in written(jaxpr):
            params = dict(e.params)
            if e.primitive.name == name:
                params.pop(parameter, None)
            yield e.replace(params=params)

    probe.usable.cache_clear()
    monkeypatch.setattr(ir, "equations", without)
    assert probe.differences() == [f"{name}'s parameter {parameter}"]
    with pytest.warns(UserWarning, match=f"{name}'s parameter {parameter}"):
        assert text_of(bfloat16_layers, *args) == plain


@HAS_REFS
def test_without_a_registration_nothing_is_added_in_place(monkeypatch):
    from jax.interpreters import mlir

    args = stacked()
    with helpers.by_hand():
        expected = jax.jit(ga.value_and_grad(scanned, K))(*args)
    monkeypatch.delattr(mlir, "register_lowering")
    transformable._primitive.cache_clear()
    try:
        with pytest.warns(UserWarning, match="in place.*optimize=False"):
            got = jax.jit(ga.value_and_grad(scanned, K))(*args)
    finally:
        transformable._primitive.cache_clear()
    assert_trees_bitwise_equal(got, expected)


def test_this_jax_is_as_known_and_nothing_is_registered_at_import():
    assert probe.differences() == []
    code = (
        "import ga_optax\n"
        "from ga_optax._passes import probe, transformable\n"
        "for made in (probe.usable, transformable._primitive):\n"
        "    assert made.cache_info().currsize == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def mesh(kind):
    return jax.make_mesh((2,), ("d",), axis_types=(kind,))


CONTEXTS = {
    "explicit mesh": lambda: jax.set_mesh(mesh(AxisType.Explicit)),
    "mesh": lambda: jax.set_mesh(mesh(AxisType.Auto)),
    "with mesh": lambda: mesh(AxisType.Auto),
    "wide": lambda: jax.enable_x64(True),
    "no jit": lambda: jax.disable_jit(),
    "precision": lambda: jax.default_matmul_precision("highest"),
    "no transfers": lambda: jax.transfer_guard("disallow"),
    "nans": lambda: jax.debug_nans(True),
    "leaks": lambda: jax.checking_leaks(),
    "at once": lambda: jax.ensure_compile_time_eval(),
}


@pytest.mark.filterwarnings("ignore:.*mesh.*context:DeprecationWarning")
@pytest.mark.parametrize("context", CONTEXTS)
def test_this_jax_is_as_known_in_any_context_of_the_first_call(context):
    with CONTEXTS[context]():
        assert probe.differences() == []
        found = []
        jax.eval_shape(lambda x: found.append(probe.differences()) or x, np.ones(2))
        assert found == [[]]


def test_in_the_context_of_a_mesh_of_types_a_probe_finds_another_jax():
    """The twin: without a thread of its own."""
    with CONTEXTS["explicit mesh"]():
        assert probe._differences() != []


# -- The size of a program -------------------------------------------------------------


def test_the_readers_of_all_variables_are_looked_up_once(monkeypatch):
    """Or passes take the square of the number of leaves, as the twin does."""
    looked_up = []
    variables = ir.variables
    monkeypatch.setattr(
        ir, "variables", lambda atoms: looked_up.append(atoms) or variables(atoms)
    )

    def times(number):
        def loss(params, x):
            for w in params:
                x = jnp.tanh(x * w[None])
            return jnp.mean(x)

        params = [jax.ShapeDtypeStruct((WIDTH,), jnp.float32)] * number
        jaxpr = jax.make_jaxpr(loss)(params, jnp.ones((ROWS, WIDTH))).jaxpr
        looked_up.clear()
        for variable in jaxpr.invars[:number]:
            assert arrivals.arrival(jaxpr, variable) == "whole"
        return len(looked_up)

    class Forgetful(dict):
        def __contains__(self, _):
            return False

    assert times(30) == 1
    monkeypatch.setattr(ir, "_indices", Forgetful())
    assert times(30) >= 30


@pytest.mark.quick
def test_the_log_names_the_line_that_keeps_a_parameter_out(caplog):
    def loss(p, x):
        return jnp.mean(x @ p["w"] @ p["w"])

    caplog.set_level(logging.DEBUG, "ga_optax")
    notes = notes_of(loss, {"w": normal(WIDTH, WIDTH)}, normal(8, WIDTH))
    if in_place.HAS_REFS:
        [note] = notes
        assert "used more than once" in note
        assert "test_passes.py" in note
        assert note in caplog.text


def test_the_log_names_lines_of_the_user_alone():
    """Also where the loop over micro-batches writes equations of its own."""

    def loss(w, x):
        def layer(h, w):
            h = jnp.tanh(h @ w)
            return h - jax.lax.pmean(jnp.mean(h, 0), "rows")[None], None

        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, w)[0] ** 2)

    log = " ".join(notes_of(loss, *stacked(), axis_name="rows"))
    assert "test_passes.py" in log
    assert "ga_optax" not in log.replace(str(pathlib.Path(__file__).parents[1]), "")
    assert "unknown" not in log


# -- What a call keeps -----------------------------------------------------------------


def window_of(kind, scale):
    """A window whose loop closes over `scale`, or over what rows need of each other."""

    def root(w, x):
        mean = scanned(w, x) * scale
        return jnp.sqrt(jax.lax.pmean(mean, "rows") if kind == "axis_name" else mean)

    options = {"axis_name": {"axis_name": "rows"}, "whole_batch": {"whole_batch": True}}
    if kind == "accumulate":
        w, x = stacked()
        return ga.accumulate(root, K)(ga.accumulator.init(w), w, x)
    return ga.value_and_grad(root, K, **options.get(kind, {}))(*stacked())


KINDS = ["value_and_grad", "accumulate", "axis_name", "whole_batch"]


@pytest.mark.grid(1, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_is_traced_outlives_the_call(kind):
    with jax.checking_leaks():
        jax.jit(lambda scale: window_of(kind, scale))(np.float32(2))


@HAS_REFS
def test_a_program_that_is_kept_with_its_values_would_be_seen(monkeypatch):
    """The twin."""
    monkeypatch.setattr(ir, "without_values", lambda jaxpr: jaxpr)
    if not hasattr(jax.make_jaxpr(lambda x: x)(1.0).jaxpr, "consts"):
        pytest.skip("this JAX holds no values in a program")
    with jax.checking_leaks(), pytest.raises(Exception, match="Leaked trac"):
        jax.jit(lambda scale: window_of("value_and_grad", scale))(np.float32(2))

"""`testing.describe`: what each loop computes, of which lines, and what it leaves."""

import re

import helpers
import jax
import jax.numpy as jnp
import pytest

import ga_optax as ga
from ga_optax import testing
from ga_optax._window import room

K, N, D = 4, 16, 3
W, X = jnp.ones(D), jnp.ones((N, D))


def mean(w, x):
    return jnp.mean((x @ w) ** 2)


def root(w, x):
    h = x @ w
    moment = jnp.mean(h**2)
    return jnp.mean(h / jnp.sqrt(moment))


def norms(w, x):
    h = x @ w
    for _ in range(2):
        h = h - jnp.mean(jnp.tanh(h))
    return jnp.mean(h**2)


VERBS = "computes", "goes back", "fills"


def stages(text):
    """`{name: (how, lines that it computes, goes back, fills)}` of a plan's stages."""
    found = {}
    for part in text.split("\n\n"):
        part = re.sub(rf"\n  (?!{'|'.join(VERBS)})", " ", part)  # one line each
        head, *rest = part.splitlines()
        if re.match(r"(the loss|level \d.*|after the loops): ", head):
            name, how = head.split(": ", 1)
            lines = ([x for x in rest if x.startswith(f"  {verb}")] for verb in VERBS)
            found[name] = (how, *lines)
    return found


def described(fun, *args, k=K, **options):
    return testing.describe(ga.value_and_grad(fun, k, **options))(*args or (W, X))


def of(fun, **options):
    return stages(described(fun, **options))


LOOP = f"a loop over {K} micro-batches"
BOTH = f"{LOOP}, forward and backward"
ONCE = "once, in no loop"
STAGES = {
    mean: {"the loss": BOTH},
    root: {
        "level 1": LOOP,
        "level 1, shared": ONCE,
        "the loss": BOTH,
        "level 1, shared, back": ONCE,
        "level 1, back": LOOP,
    },
    norms: {
        "level 1": LOOP,
        "level 2": LOOP,
        "the loss": BOTH,
        "level 2, back": LOOP,
        "level 1, back": LOOP,
    },
}


@pytest.mark.quick
@pytest.mark.parametrize("fun", STAGES)
def test_a_plan_has_a_stage_for_each_loop_in_the_order_in_which_they_run(fun):
    found = {name: how for name, (how, *_) in of(fun).items()}
    assert list(found.items()) == list(STAGES[fun].items())


def test_each_stage_names_the_lines_that_it_computes_and_goes_back_through():
    start = root.__code__.co_firstlineno
    places = {n: f"test_describe.py:{start + n}:" for n in (1, 2, 3)}

    def lines(texts):
        return {n for n, place in places.items() if any(place in x for x in texts)}

    found = {name: list(map(lines, rest)) for name, (_, *rest) in of(root).items()}
    assert found == {
        "level 1": [{1, 2}, set(), {1, 3}],  # line 3 reads the sum, so rows meet there
        "level 1, shared": [{3}, set(), {3}],
        "the loss": [{3}, {3}, set()],
        "level 1, shared, back": [{3}, {3}, set()],
        "level 1, back": [{1, 2}, {1, 2}, set()],
    }


def test_cotangents_go_through_no_stop_gradient_in_a_checkpoint_either():
    @jax.checkpoint
    def stopped(h):
        return jax.lax.stop_gradient(jnp.tanh(h)) * h

    def fun(w, x):
        return jnp.mean(stopped(x @ w) ** 2)

    computes, back = (
        {name for line in lines for name in line.rsplit(": ", 1)[1].split(", ")}
        for lines in of(fun)["the loss"][1:3]
    )
    assert {"tanh", "stop_gradient", "mul"} <= computes
    assert computes - back == {"tanh", "stop_gradient"}


def test_bytes_and_passes_are_those_of_batch_dependencies():
    known = ga.batch_dependencies(root, K)(W, X)
    text = described(root)
    sizes = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) bytes, at", text)]
    assert sum(sizes) == known.kept_bytes > 0
    assert f"{known.forward_passes} forward and {known.backward_passes} back" in text


def test_results_that_need_no_rows_come_after_the_loops():
    found = of(lambda *args: (mean(*args), jnp.exp(root(*args))), has_aux=True)
    assert list(found)[-1] == "after the loops"
    assert found["after the loops"][0] == ONCE


def test_what_is_dropped_on_the_way_is_filled_again_before_it_is_read(monkeypatch):
    monkeypatch.setattr(room, "LITTLE", 0)

    def deep(w, x):
        for _ in range(12):
            h = jnp.tanh(x @ w)
            h = h - h.mean(0, keepdims=True)
            x = x + h / jnp.sqrt(h.var(0, keepdims=True) + 1e-5)
        return jnp.mean(x**2)

    text = described(deep, jnp.eye(D), X)
    found = stages(text)
    names = list(found)
    again = [name for name in found if "filled again" in name]
    assert again
    for name in again:
        assert found[name][3]
        back = names.index(name.replace("filled again", "back"))
        assert names.index("the loss") < names.index(name) < back
    assert "at most 3 forward and 1 backward" in text


@pytest.mark.parametrize(
    "call",
    [
        ga.microbatch(mean, K),
        lambda w, x: ga.accumulate(mean, K)(ga.accumulator.init(w), w, x),
        lambda w, x: w - ga.value_and_grad(mean, K)(w, x)[1],
    ],
)
def test_any_call_of_ours_is_described_in_any_program(call):
    assert list(stages(testing.describe(call)(W, X)))[-1] == "the loss"


@pytest.mark.parametrize("fun", [mean, root])
def test_on_a_mesh_a_loop_is_that_of_each_device(fun):
    axis = ga.DataAxis("data", mesh=helpers.mesh_of(2))
    how, *_ = of(fun, k=2, data_axis=axis)["the loss"]
    assert how.startswith("a loop over 2 micro-batches on each of 2 devices, ")


def test_types_and_numbers_will_do_and_nothing_runs():
    def scaled(w, x, power):
        jax.debug.callback(lambda: pytest.fail("it ran"))
        return jnp.mean((x @ w) ** power)

    types = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (W, X))
    assert "the loss" in stages(described(scaled, *types, 2))


def test_who_passes_nothing_of_ours_is_told_what_to_pass():
    with pytest.raises(ValueError, match=r"describe needs .* Pass ga_optax\.value_and"):
        testing.describe(jax.grad(mean))(W, X)

"""What fits, for the step of the language model example."""

import functools
import pathlib
import types

import helpers
import jax
import pytest

import ga_optax as ga

pytest.importorskip("flax")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

char_lm = helpers.load(pathlib.Path(__file__).parents[1] / "examples" / "char_lm.py")

CANDIDATES = (2, 4, 8, 16, 32, 64)
CONFIG = char_lm.Config(layers=2, width=16, heads=2, length=24, batch_size=64)

pytestmark = [
    pytest.mark.published,
    pytest.mark.usefixtures("optax_promotion", "fast_compilation"),
]


def inputs():
    params = jax.eval_shape(lambda: char_lm.init_params(CONFIG))
    state = jax.eval_shape(char_lm.make_windows(2, CONFIG).init, params)
    shape = CONFIG.batch_size, CONFIG.length + 1
    tokens = jax.ShapeDtypeStruct(shape, jax.numpy.int32)
    return params, state, tokens, char_lm.make_key(CONFIG, "dropout")


@functools.cache
def compiled(k):
    return char_lm.make_step(k, CONFIG).lower(*inputs()).compile()


def need(k):
    return helpers.needed(compiled(k))


def test_it_compiles_at_most_four_of_six_and_predicts_the_chosen_program():
    limit = (need(2) + need(8)) // 2
    asked = []

    def make_step(k):
        """The same program for plan and for this test: it takes a second to compile."""
        asked.append(k)
        lowered = types.SimpleNamespace(compile=lambda: compiled(k))
        return types.SimpleNamespace(lower=lambda *args: lowered)

    plan = ga.plan(
        make_step,
        *inputs(),
        batch_size=CONFIG.batch_size,
        memory_limit=limit,
        candidates=CANDIDATES,
    )
    assert len(asked) == len(set(asked)) <= 4
    assert plan.num_microbatches in (4, 8)
    assert plan.bytes == need(plan.num_microbatches) <= limit
    # By brute force: nothing with fewer micro-batches fits.
    fewer = CANDIDATES[: CANDIDATES.index(plan.num_microbatches)]
    assert all(need(k) > limit for k in fewer)

"""Scans in whose bodies rows meet on the side: they stay scans, of any length."""

import functools

import jax
import jax.numpy as jnp
import pytest
from corpus import scans
from corpus.scans import BODIES, BOUND, How, K, arguments, loss_of
from helpers import error, temporaries
from helpers import mean_of as by_themselves

import ga_optax as ga
from ga_optax._window import flat

pytestmark = [
    pytest.mark.usefixtures("optax_promotion", "fast_compilation"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
]
by_name = functools.partial(pytest.mark.parametrize, ids=lambda x: x.__name__)


def off_by(body, how=How(), k=3, n=scans.N, **options):  # noqa: B008
    with jax.enable_x64(True):
        return error(loss_of(body, how), k, *arguments(how.length, n), **options)


@pytest.mark.grid(4, 11)
@pytest.mark.parametrize(
    "how",
    [
        *(How(3, *x) for x in [(0, 0), (0, 1), (1, 0), (1, 1)]),
        *(How(length, remat=True) for length in (0, 1, 6, 33, 48)),
    ],
)
@by_name("body", BODIES)
def test_a_scan_has_the_value_and_gradients_of_the_whole_batch(body, how):
    if how.length == 3:
        assert off_by(body, how) < BOUND
    else:
        assert off_by(body, how, n=4, k=2) < 10 * BOUND


def another_iteration(monkeypatch):
    stacked = flat.SplitScan._stacked
    roll = lambda *args: jnp.roll(stacked(*args), 1, 0)  # noqa: E731
    monkeypatch.setattr(flat.SplitScan, "_stacked", roll)


def without_marks(monkeypatch):
    monkeypatch.setattr(flat, "checkpoint_name", lambda x, name: x)


@pytest.mark.parametrize(
    ("body", "how", "options", "wrong"),
    [
        (scans.logged, How(), {}, another_iteration),
        # A rule in a loop sees all of its cotangent if nothing is to be kept, too.
        (scans.with_rule, How(), {"residual_bytes": 0}, without_marks),
    ],
)
def test_the_comparison_sees_what_is_wrong(body, how, options, wrong, monkeypatch):
    assert off_by(body, how, **options) < BOUND
    wrong(monkeypatch)
    assert off_by(body, how, **options) > 1e-6


def step(loss, **options):
    return jax.jit(ga.value_and_grad(loss, K, **options))


def lines(layers):
    loss, args = scans.decoder(layers, scans.nothing)
    return len(step(loss).lower(*args).as_text().splitlines())


def in_the_open(monkeypatch):
    """Iterations stand one after the other."""
    find = flat.SplitScan._find_parts

    def found(self, graph):
        find(self, graph)
        self.unrolled.update(self.part.values())

    monkeypatch.setattr(flat.SplitScan, "_find_parts", found)


def test_a_program_has_as_many_lines_at_any_length(monkeypatch):
    assert lines(48) == lines(6)
    in_the_open(monkeypatch)
    assert lines(6) > lines(3) + 300


@pytest.mark.slow
@pytest.mark.parametrize("layers", [6, 32, 48])
def test_it_takes_the_temporaries_of_plain_micro_batches(layers):
    """1.05 to 1.08 of them: the rest is what the experts' shares are at all layers."""
    loss, args = scans.decoder(layers, scans.nothing)
    plain = temporaries(jax.jit(by_themselves(loss, K)), *args)
    assert temporaries(step(loss), *args) < 1.1 * plain


@pytest.mark.grid(2, 6)
@pytest.mark.parametrize("remat", [False, True])
@by_name("body", BODIES)
def test_a_small_scan_runs_at_most_three_times_and_once_back(body, remat):
    loss, args = loss_of(body, How(8, remat)), arguments(8, 96, jnp.float32)

    def passes(**options):
        found = ga.batch_dependencies(loss, K, **options)(*args)
        return found.forward_passes, found.backward_passes

    assert passes() <= (3, 1)
    # The twin: without room.
    is_ring = body is scans.ring_aside and remat
    assert not is_ring or passes(residual_bytes=0) > (9, 5)


def whole(body, length):
    with jax.enable_x64(True):
        args = arguments(length)
        return ga.batch_dependencies(loss_of(body, How(length)), 3)(*args).whole


@by_name("body", [scans.ring, scans.ring_aside])
def test_rows_that_meet_in_the_carry_are_computed_whole_in_a_long_scan(body):
    assert whole(body, 64) == []
    [(name, line, size)] = whole(body, 65)
    assert name == "scan of 65 iterations, in whose carry rows meet,"
    assert "scans.py" in line
    assert size > 65 * 2 * scans.N * scans.D  # it is not its results alone


@pytest.mark.quick
def test_what_is_the_same_in_all_iterations_meets_once():
    def loss(w, x):
        def step(h, t):
            return h + jax.nn.softmax(h @ jnp.tanh(x @ w).T + t) @ x, None

        return jnp.mean(jax.lax.scan(step, x, jnp.linspace(0, 1, 16))[0] ** 2)

    args = jnp.eye(16), jax.random.normal(jax.random.key(0), (128, 16))
    whole = temporaries(jax.jit(jax.value_and_grad(loss)), *args)
    assert temporaries(jax.jit(ga.value_and_grad(loss, 8)), *args) < whole / 3

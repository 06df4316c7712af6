"""How large a batch still pays: the simple gradient noise scale.

Let G be the true gradient and Σ the covariance of the gradient of one example. Let g_i
be the gradient of a micro-batch of w_i examples, and g the mean over a window of k
micro-batches with W = Σ w_i examples. Then

    E |g_i|²  =  |G|² + tr Σ / w_i             E |g|²  =  |G|² + tr Σ / W,

and the gradients that are accumulated anyway give unbiased estimates of both unknowns:

    tr Σ  ≈  (Σ w_i·|g_i|² - W·|g|²) / (k - 1)         |G|²  ≈  |g|² - tr Σ / W

For equal w_i these are equations A.2 and A.3 of McCandlish et al., with B_big = W and
B_small = W / k. The ratio tr Σ / |G|² is the simple noise scale: the batch size at
which noise and gradient have the same size. A ratio of two estimates is biased, so each
of them is averaged over windows before they are divided.

References:
  McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training", 2018,
  https://arxiv.org/abs/1812.06162, section 2.2 and appendix A.1.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from ga_optax._across.state import find_state
from ga_optax.accumulator import parts

# The decay of the exponential moving averages. They are as good as a plain mean of
# (1 + 0.98) / (1 - 0.98) = 99 windows: the estimates of one window are often off by
# their own size, so the average is off by a tenth. Their terms are 49 windows old on
# average; a scale that grows over thousands of steps hardly moves in that time.
DECAY = 0.98

# The two-sided 95 % quantile of the normal distribution.
_QUANTILE = 1.959964

# With fewer windows there is no interval: the quantile would not be right.
_ENOUGH = 4


class NoiseState(NamedTuple):
    """What a `MultiSteps` with `track_noise=True` keeps, in the dtype of its `weight`.

    Attributes:
      squares: Σ w·|g|² over the open window, a float `[]`. As in the accumulator, the
        first micro-step of a window overwrites it.
      count: micro-steps of the open window whose weight is not 0, int32 `[]`.
      windows: how many windows gave an estimate, int32 `[]`.
      mean: smoothed |G|², tr Σ and W, a float `[3]`.
      deviation: the smoothed squares of the deviations of |G|² and tr Σ from their
        means, and the smoothed product of the two deviations, a float `[3]`.
    """

    squares: jax.Array
    count: jax.Array
    windows: jax.Array
    mean: jax.Array
    deviation: jax.Array


class NoiseScale(NamedTuple):
    """The gradient noise scale; see `noise_scale`. `str` of it is a sentence to read.

    All sizes are in the unit of the weights: examples or tokens, or micro-batches if
    there are no weights. No field is ever NaN.

    Attributes:
      value: tr Σ / |G|², a float `[]`; 0 if it is unknown.
      known: whether `value` is known, bool `[]`. It is not before a window of at least
        two micro-steps has closed, if all gradients are zero, or if the noise hides the
        gradient, so that the estimate of |G|² is not positive.
      squared_norm: the unbiased estimate of |G|²; it may be negative.
      trace: the estimate of tr Σ, the variance of the gradient of one example.
      low: the lower end of the 95 % confidence interval of `value`; 0 if it is unknown.
      high: its upper end; inf if the data do not bound it.
      window: the weight of a window, smoothed like the estimates.
      windows: how many windows gave an estimate, int32 `[]`.
    """

    value: jax.Array
    known: jax.Array
    squared_norm: jax.Array
    trace: jax.Array
    low: jax.Array
    high: jax.Array
    window: jax.Array
    windows: jax.Array

    def __str__(self) -> str:
        if jnp.ndim(self.value) or isinstance(self.value, jax.core.Tracer):
            return repr(self)
        if not self.windows:
            return (
                "The noise scale is unknown: no window of several micro-steps closed."
            )
        of = f"{int(self.windows)} window{'s' if self.windows > 1 else ''}"
        if not self.known:
            bound = f"; it is at least {_short(self.low)}" if self.low > 0 else ""
            return (
                f"The noise scale is unknown after {of}: the estimate of |G|² is "
                f"{self.squared_norm:.3g}, not positive{bound}."
            )
        ratio = f"{self.window / self.value:.2g}" if self.value > 0 else "infinitely"
        return (
            f"The noise scale is {_short(self.value)} (95 %: {_short(self.low)} to "
            f"{_short(self.high)}), after {of} of {_short(self.window)}: a window is "
            f"{ratio} times as large."
        )


def _short(x: jax.Array) -> str:
    """Three digits, and no exponent for a number of examples or tokens."""
    return f"{x:.0f}" if 999.5 <= x < 1e12 else f"{x:.3g}"


def noise_scale(state: optax.OptState) -> NoiseScale:
    """The batch size beyond which more accumulation stops paying.

    >>> import functools, jax, jax.numpy as jnp, optax, ga_optax as ga
    >>> tx = ga.MultiSteps(optax.sgd(0.0), 8, track_noise=True)
    >>> params, state = jnp.zeros(100), tx.init(jnp.zeros(100))
    >>> step = jax.jit(functools.partial(ga.apply_gradients, tx))
    >>> for key in jax.random.split(jax.random.key(0), 400):
    ...     noise = jax.random.normal(key, 100)  # tr Σ = 100, |G|² = 25
    ...     params, state = step(0.5 + noise, state, params)
    >>> scale = ga.noise_scale(state)
    >>> print(scale)  # doctest: +ELLIPSIS
    The noise scale is ... (95 %: ... to ...), after 50 windows of 8: a window is ...
    >>> bool(scale.low < 4 < scale.high)
    True

    If a window is much smaller than the noise scale, little is wasted: a window twice
    as large does nearly the work of two steps. If it is much larger, most micro-batches
    repeat what the others said. The scale changes during training and usually grows, so
    look at it again.

    It needs windows of two or more micro-steps. Their gradients must be independent and
    their weights proportional to their sizes; without weights, all have the same size.

    **Exactness.** Every window that ran the inner optimizer gives unbiased estimates of
    |G|² and tr Σ. Each is averaged over windows on its own, by an exponential moving
    average with a decay of 0.98, corrected for its start and as good as a plain mean of
    99 windows. Windows with one micro-step, dropped windows, and windows with inf or
    NaN are left out. tr Σ is a difference, so if it is smaller than W·|G|² times the
    rounding of the accumulator, it is nothing but rounding. The interval is Fieller's
    for a ratio, with the t quantile of the effective number of windows. It assumes that
    windows are independent and alike; if training changes fast, it is too wide rather
    than too narrow. It needs four windows. Gradient norms must lie between 1e-9 and 1e9
    for float32 to hold their squares.

    **Cost.** A few scalar operations on the device. `track_noise` reads the gradient
    once more in a micro-step and the mean once more in a window, and keeps ten scalars.
    Sharded gradients are squared on the devices that hold them; only one scalar for
    each leaf crosses the network.

    Args:
      state: the state of a `MultiSteps` with `track_noise=True`, or any state that
        holds one.

    Returns:
      A `NoiseScale` of scalars. It may share arrays with the state, so read it before
      you donate the state to the next call.

    Raises:
      ValueError: if `state` holds no state of a `MultiSteps` with `track_noise=True`,
        or more than one.

    References:
      McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training",
      2018, https://arxiv.org/abs/1812.06162, appendix A.1.
      Fieller, "Some Problems in Interval Estimation", JRSS B 16, 1954.
    """
    noise: NoiseState = find_state(state, "noise").noise
    squared_norm, trace, window = (noise.mean[..., i] for i in range(3))
    known = (noise.windows > 0) & (squared_norm > 0)
    some = jnp.where(known, squared_norm, jnp.ones_like(squared_norm))
    low, high = _interval(noise, squared_norm, trace)
    return NoiseScale(
        value=jnp.where(known, jnp.maximum(trace, 0) / some, jnp.zeros_like(trace)),
        known=known,
        squared_norm=squared_norm,
        trace=trace,
        low=low,
        high=high,
        window=window,
        windows=noise.windows,
    )


# -- What MultiSteps does --------------------------------------------------------------


def init(squares: ArrayLike = 0.0) -> NoiseState:
    """Returns the state without any estimate.

    If `squares` is inf, the open window will be left out.
    """
    return NoiseState(
        squares=jnp.asarray(squares, float),
        count=jnp.zeros([], jnp.int32),
        windows=jnp.zeros([], jnp.int32),
        mean=jnp.zeros(3, float),
        deviation=jnp.zeros(3, float),
    )


def add(
    noise: NoiseState, grads: optax.Updates, weight: ArrayLike | None, empty: jax.Array
) -> NoiseState:
    """Adds one micro-step, the first of its window if `empty`."""
    held = noise.squares, noise.count
    squares, count = (jnp.where(empty, jnp.zeros_like(x), x) for x in held)
    term = squared_norm(grads).astype(squares.dtype)
    if weight is None:
        return noise._replace(squares=squares + term, count=count + 1)
    weight = jnp.asarray(weight).astype(squares.dtype)
    none = weight == 0
    return noise._replace(
        # Selected, not multiplied: a NaN of weight 0 must not count.
        squares=jnp.where(none, squares, squares + weight * term),
        count=jnp.where(none, count, count + 1),
    )


def close(
    noise: NoiseState, total: optax.Updates, weight: jax.Array, is_mean: bool
) -> NoiseState:
    """Adds the estimates of a window that ran the inner optimizer.

    Args:
      noise: the state with all micro-steps of the window in it.
      total: the mean or the sum of the window.
      weight: Σ w of the window.
      is_mean: whether `total` is the mean.
    """
    square = squared_norm(total).astype(weight.dtype)
    # If the weight is 0 there is no step: the result is computed, but not selected.
    weight = jnp.where(weight == 0, jnp.ones_like(weight), weight)
    if not is_mean:
        square = square / weight / weight
    several = noise.count > 1
    others = jnp.where(several, noise.count - 1, jnp.ones_like(noise.count))
    trace = (noise.squares - weight * square) / others.astype(weight.dtype)
    new = jnp.stack([square - trace / weight, trace, weight])

    # A moving average corrected for its start is a mean whose last term has the share
    # (1 - decay) / (1 - decay^n). The squares of deviations are averaged alike, by the
    # update of West (1979), which never subtracts two large numbers.
    windows = noise.windows + 1
    n = windows.astype(weight.dtype)
    one, all_ = jnp.expm1(math.log(DECAY) * jnp.stack([jnp.ones_like(n), n]))
    share = one / all_  # exactly 1 for the first
    off = new - noise.mean
    products = jnp.stack([off[0] * off[0], off[1] * off[1], off[0] * off[1]])
    mean = noise.mean + share * off
    deviation = (1 - share) * (noise.deviation + share * products)

    counts = several & jnp.all(jnp.isfinite(mean)) & jnp.all(jnp.isfinite(deviation))
    return noise._replace(
        windows=jnp.where(counts, windows, noise.windows),
        mean=jnp.where(counts, mean, noise.mean),
        deviation=jnp.where(counts, deviation, noise.deviation),
    )


def squared_norm(tree: optax.Updates) -> jax.Array:
    """Σ |x|² over all leaves, which are read once; nothing is written."""
    # Without the barrier XLA would share the squares, or the wider dtype, with what the
    # accumulator or the optimizer computes from the same leaf, and write them out.
    tree = jax.lax.optimization_barrier(tree)
    terms = [
        jnp.sum(jnp.square(part.astype(jnp.promote_types(part.dtype, jnp.float32))))
        for leaf in map(jnp.asarray, jax.tree.leaves(tree))
        for part in parts(leaf)
    ]
    dtype = jnp.result_type(float)
    return sum((term.astype(dtype) for term in terms), jnp.zeros([], dtype))


# -- The ratio and its error -----------------------------------------------------------


def _interval(
    noise: NoiseState, s: jax.Array, t: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The positive part of Fieller's 95 % confidence interval for E t / E s.

    A ratio r cannot be excluded if t - r·s is at most q standard errors away from 0:

        (t - r·s)²  <=  q²·(v_tt - 2·r·v_st + r²·v_ss)

    Divided by s², this is a quadratic inequality a·r² - 2·b·r + c <= 0 in r. If a <= 0,
    s itself may be 0, and nothing bounds r from above.
    """
    enough = noise.windows >= _ENOUGH
    enough = enough & (jnp.square(s) >= jnp.finfo(s.dtype).tiny)
    # The effective number of windows, 1 / Σ share². By geometric sums it is
    # (1 + d)/(1 - d) · (1 - d^windows)/(1 + d^windows) for the decay d.
    half = -math.log(DECAY) / 2
    windows = jnp.where(enough, noise.windows, jnp.full_like(noise.windows, _ENOUGH))
    n = jnp.tanh(half * windows.astype(s.dtype)) / math.tanh(half)
    s = jnp.where(enough, s, jnp.ones_like(s))
    # The variance of a mean: Σ (x - mean)² / n / (n - 1).
    q = jnp.square(_t_quantile(n - 1)) / (n - 1)
    v_ss, v_tt, v_st = (q * noise.deviation[..., i] / jnp.square(s) for i in range(3))
    r = t / s
    a, b, c = 1 - v_ss, r - v_st, jnp.square(r) - v_tt
    root = jnp.sqrt(jnp.maximum(jnp.square(b) - a * c, 0))
    bounded = a > 0
    a = jnp.where(a == 0, jnp.ones_like(a), a)
    ends = jnp.stack([(b - root) / a, (b + root) / a])
    first, second = jnp.min(ends, axis=0), jnp.max(ends, axis=0)
    # If it is not bounded, the ratios between the ends are excluded.
    excluded = ~bounded & (root > 0) & (first <= 0)
    zero, inf = jnp.zeros_like(r), jnp.full_like(r, jnp.inf)
    low = jnp.where(bounded, first, jnp.where(excluded, second, zero))
    # Rounding alone can make t negative.
    low, high = jnp.maximum(low, 0), jnp.maximum(second, 0)
    bounded = bounded & enough & (s > 0)
    return jnp.where(enough, low, zero), jnp.where(bounded, high, inf)


def _t_quantile(freedom: jax.Array) -> jax.Array:
    """Student's 97.5 % quantile, within 1 % from 3 degrees of freedom on.

    Abramowitz and Stegun, "Handbook of Mathematical Functions", 1964, eq. 26.7.5.
    """
    z = _QUANTILE
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + (first + (second + third / freedom) / freedom) / freedom

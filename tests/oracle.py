"""NumPy float64 oracles: gradient accumulation written the obvious way.

Nothing of ours and nothing of JAX is imported here, so that an agreement means
something.
"""

import numpy as np


def weighted_mean(grads, weights):
    """Σ w·g / Σ w of arrays, in float64 (complex128); 0 where the weights are."""
    total = sum(
        w * np.asarray(g).astype(_wide(g)) for g, w in zip(grads, weights, strict=True)
    )
    return total / sum(weights) if sum(weights) else np.zeros_like(total)


def sum_error_bound(grads, weights, eps):
    """How far a recursive sum, divided once, may be off, in precision `eps`.

    n products, n - 1 additions and a division round once each: n + 1 roundings, so
    that |error| <= (n + 1)·eps·Σ|w·g| / Σ w to first order (Higham, "Accuracy and
    Stability of Numerical Algorithms", 2nd ed., 2002, section 4.2), and a factor 2
    takes the higher orders and the rounding of Σ w.
    """
    terms = sum(
        abs(w) * np.abs(np.asarray(g).astype(_wide(g)))
        for g, w in zip(grads, weights, strict=True)
    )
    return 2 * (len(grads) + 1) * eps * terms / max(sum(weights), 1e-300)


def _wide(g):
    return np.complex128 if np.iscomplexobj(g) else np.float64

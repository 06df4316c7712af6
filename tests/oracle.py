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


class Adam:
    """Adam with a schedule, one leaf, Kingma & Ba 2015, algorithm 1."""

    def __init__(self, p, schedule, b1=0.9, b2=0.999, eps=1e-8):
        self.p = np.asarray(p, np.float64)
        self.m = np.zeros_like(self.p)
        self.v = np.zeros_like(self.p)
        self.t, self.schedule, self.b1, self.b2, self.eps = 0, schedule, b1, b2, eps

    def step(self, g):
        """One update with the gradient g."""
        rate = self.schedule(self.t)
        self.t += 1
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g**2
        m = self.m / (1 - self.b1**self.t)
        v = self.v / (1 - self.b2**self.t)
        self.p = self.p - rate * m / (np.sqrt(v) + self.eps)


def _wide(g):
    return np.complex128 if np.iscomplexobj(g) else np.float64

"""The fold across calls: `MultiSteps`, `apply_gradients`, `flush`.

The way of a gradient: `multi_steps` checks it, `window` adds it to what `place` keeps
(the sum of one device, or of many), and runs the inner optimizer where a window closes.

    state        the state, and what reads it
    choices      a choice that is known when traced, or is not
    noise_scale  the gradient noise scale

Imports `_devices` and the root.
"""

"""The fold across calls: `MultiSteps`, `apply_gradients`, `flush`.

The way of a gradient: `multi_steps` makes a `request` of a call, and `window` adds its
gradient to what `storage` keeps (the sum of one device, or of many) and runs the inner
optimizer where a window closes.

    config       what a `MultiSteps` was made with
    state        the state, and what reads it
    optax_state  reads a state of Optax's
    choices      a choice that is known when traced, or is not

Imports `_devices` and the root.
"""

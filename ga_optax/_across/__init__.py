"""The fold across calls: `MultiSteps`, `apply_gradients`, `flush`.

The path of a gradient: `multi_steps` makes a `request` of a call. `window` adds the
gradient to the sum in `storage` (of one device, or of many), and runs the inner
optimizer when the window closes.

    config       the arguments of a `MultiSteps`
    state        the state, and functions that read it
    optax_state  converts a state of Optax
    decisions    functions of the user's that skip micro-steps or drop windows
    choices      predicates that are Python bools or traced

Imports `_devices` and the root.
"""

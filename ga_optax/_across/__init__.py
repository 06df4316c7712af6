"""The fold across calls: `MultiSteps`, `apply_gradients`, `flush`.

The path of a gradient: `multi_steps` makes a `Request` of a call. `window` adds the
gradient to the sum in its `Storage` (of one device, or of many), and runs the inner
optimizer when the window closes.

    multi_steps  `MultiSteps`, `apply_gradients`, `flush`
    window       one call: the request, a micro-step, the close of a window
    config       the arguments of a `MultiSteps`, and where the sum lies
    state        the state, functions that read it, states of Optax
    choices      predicates that are Python bools or traced; the user's decisions

Imports `_devices` and the root.
"""

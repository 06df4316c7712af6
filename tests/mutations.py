"""Do the tests see it? Faults put into a copy of the package, one at a time.

    python tests/mutations.py                   # all: the cheapest tier that sees each
    python tests/mutations.py psum mean         # those with such a word in their name
    python tests/mutations.py --up-to quick     # no other tier

`FAULTS` has, for a file of the package and files of tests of which one must fail, what
is wrong then: the lines that are replaced, and what stands there instead; or a function
that returns something else, of `given`.
`test_mutations.py` holds that each text is still there, once.
"""

import argparse
import collections
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

import index

ROOT = pathlib.Path(__file__).parents[1]


class Mutation(NamedTuple):
    file: str  # below ga_optax
    tests: list[str]  # the names of files, without .py
    name: str
    old: str
    new: str


RETURNS = re.compile(r"( *)def (\w+)\(\.\.\.\): return (.*)")


def read(text):
    """The mutations that `FAULTS` is the text of."""
    for section in text.split("\n@ ")[1:]:
        where, *faults = section.strip().split("\n* ")
        file, tests = where.split(": ")
        for name, *lines in map(str.splitlines, faults):
            old, new = ("\n".join(x[2:] for x in lines if x[0] == s) for s in "-+")
            if is_def := RETURNS.fullmatch(new):
                indent, fun, result = is_def.groups()
                old = f"def {fun}("
                new = f"{old}*given, **options):\n{indent}    return {result}\n\n"
                new += f"{indent}def as_it_was_{fun}("
            yield Mutation(file, tests.split(), name, old, new)


FAULTS = """
@ _across/host.py: test_on_host
* all arrays of a state are moved in at once
-         done = out if moved else []
+         done = []
* arrays meet in a function that is jitted
-         if jaxprs.kind(equation) != "call":
+         if True:
* scalars move, too
-     return jnp.ndim(x) > 0 and not
+     return not
* a new state stays on the device
+ def _to_host(...): return given[0]
@ _across/choices.py: test_on_host
* states on the host are selected
-     if run_both and not any(map(is_on_host, jax.tree.leaves(other := leave()))):
+     if run_both and (other := leave(),):
@ _passes/shared.py: test_law
* parameters of the host have no stand-in
-     return equation.primitive.name == primitives.PUT
+     return False
@ _calls/undivided.py: test_law_told
* a sum over rows has all rows
-     gathered = (e for e in jaxpr.eqns if e.primitive.name == "all_gather")
+     gathered = (e for e in jaxpr.eqns if e.primitive.name in MEETINGS)
* a report does not see that all rows run
- call.sees(plan)
+ pass
* what is computed whole is not said
+ def warn_of_whole(...): return None
* what follows from all rows is taken for a micro-batch's own
+ def _computed(...): return 0, 1
* what JAX refuses is said to be a fault of the library first
- out = undivided(call, plan)
+ warn("The gradient is computed of all rows at once")
+         out = undivided(call, plan)
@ _compiled/plan.py: test_plan
* arguments on the host are planned on the device
+     def _in_host_memory(...): return given[1]
* what aliases on the host counts twice
-     return int(sum(sizes) - 2 * sizes[-1])
+     return int(sum(sizes))
* plan: what is donated counts twice
- return self.temp + self.argument + self.output - self.alias
+ return self.temp + self.argument + self.output
* plan: a program out of a cache needs nothing
-     if not total:
+     if total is None:
@ _devices/collectives.py: test_law
* gradients stay in the host's memory
+ def on_device(...): return given[0]
@ _partition/indexing.py: test_law_devices
* picks of rows in several segments need all rows
- if rows is None or operand.dim not in index_map:
+ if rows is None or operand.dim not in index_map or rows.segments > 1:
@ _partition/nested.py: test_law_devices
* a scan over rows in several segments has all rows
- if how.length % (rows.segments * held.unit(w.axis.parts)):
+ if rows.segments > 1 or how.length % held.unit(w.axis.parts):
@ _partition/moves.py: test_table
* what moves along other axes, too, is a move of rows
-     kept = {way.outs[i] for way in factors.ways_to_split(e)}  # axes that stay
+     kept = {*range(len(vs[0].shape))}
* padding that is one row off
- places, old = low + np.arange(len(numbers)) * (between + 1), numbers
+ places, old = low + 1 + np.arange(len(numbers)) * (between + 1), numbers
* a few rows come from the wrong micro-batch
- return jnp.where(owner == w.index, few, jnp.zeros_like(few)), PARTIAL
+ return jnp.where(owner == 0, few, jnp.zeros_like(few)), PARTIAL
@ _passes/jaxprs.py: test_law_mended
* results of a program are no readers
+ def num_readers(...): return 1
@ _partition/reductions.py: test_law_mended
* extrema are taken for stopped
- if not w.is_compared(e, v):
+ if v is not None:
* an extremum lies where it was taken
- if is_own and shifted.is_along(extremum, of, axes) and is_inexact(v.aval):
+ if is_own and is_inexact(v.aval):
* an extremum that no row attains in a later level
- later = not any(v.params for v in vs) and any(map(held.is_of_rows, vs))
+ later = False
@ _passes/rowwise.py: test_derivatives
* a value of a promise is differentiated by the rule again
-         value = new_primitive.valued(promise.fun, moved)
+         value = promise.fun
@ _passes/equation.py: test_derivatives
* a value of micro-batches is differentiated by the rule again
-         value = self._with(flat=new_primitive.valued(self.flat, moving))
+         value = self
* a rule prints with the value and with the tangents
-         return self._with(flat=value.run_silently) if self.rules_act else value
+         return value
@ _passes/effects.py: test_derivatives test_law_rules
* a package whose name begins with that of JAX is JAX
- _JAX = os.path.dirname(jax.__file__) + os.sep
+ _JAX = os.path.dirname(jax.__file__)
* a rule of the user's for a function of JAX is one of JAX
-     are_of_jax = place.startswith(_JAX) and rule.startswith(_JAX)
+     are_of_jax = place.startswith(_JAX)
* a rule in a function of micro-batches is not seen
-             or (inside is not None and rule_in(inside.jaxpr, is_true) is not None)
+             or inside is True
@ _partition/attached.py: test_law_rules
* a backward rule is taken for linear
+ def is_linear(...): return True
* each micro-batch adds what all of them have
+ def _of_first(...): return given[1]
* a cotangent that is zero is an array
- return [x if gives or not is_inexact(x) else stopped(x) for x, gives in pairs]
+ return [x for x, gives in pairs]
@ _partition/held.py: test_law_mended
* sums that wait are scaled by what is no number
+ def is_scaled(...): return False
* a cast makes no other number
- if name != CAST or number is None or not np.isfinite(number):
+ if True:
* a loss without an aux is the sum of its parts, whatever they are
- late = {i: place(v) for i, v in enumerate(out) if v.scaled}
+ late = {i: place(v) for i, v in enumerate(out) if v.scaled and i}
@ _partition/shifted.py: test_shifted
* a sum shifted by a micro-batch's own maximum is not scaled
- scale *= jnp.exp(late)
+ scale *= jnp.ones_like(late)
* what a mask takes out of all rows is NaN
- is_out = ~kept.any(gone, keepdims=True)
+ is_out = jnp.zeros_like(late, bool)
* an infinite maximum is a shift
- own = jnp.where(jnp.isfinite(most), most, jnp.zeros_like(most))
+ own = most
* factors of a shifted sum may be of any size
+ def _largest(...): return jnp.ones([1] * given[3].ndim, given[3].dtype)
* what a mask takes out is multiplied by 0
- for step, vs, i in found.steps:
+ for step, vs, i in [x for x in found.steps if x[0].primitive.name != "select_n"]:
* any shift bounds what it shifts
+ def _is_bound(...): return True
@ _partition/factors.py: test_derivatives
* an extremum of a row is compared with what may be rounded in another way
- if w.is_compared(e, vs[0]):
+ if False:
@ _partition/indexing.py: test_shifted
* what is picked is shifted first
+ def _of_operands(...): return None
* what is broadcast is known by its shape in a micro-batch
- if u.shape == like.shape:
+ if u.shape == held.local_shape(like.shape, like.layout, w.axis.parts):
@ _partition/partitioned.py: test_shifted
* functions of pairs are always split along columns
- if not best.turns:
+ if True:
@ _partition/closures.py: test_closures
* a rule takes nothing of what it closes over
+ def _closed_over(...): return {}
@ _passes/equation.py: test_closures
* an array over which a rule closes may depend on a parameter
+ def not_differentiable(...): return given[0]
@ _partition/nested.py: test_closures
* all operands of a scan have tangents
+ def _smooth(...): return [True] * len(given[1])
@ _passes/effects.py: test_closures
* constants have tangents, too
-     smooth = [i for i, x in enumerate(ins) if x in can_move]
+     smooth = [i for i, x in enumerate(ins) if jaxprs.is_inexact(x)]
@ _window/run.py: test_law_devices
* a derivative goes back through what comes after the loss
- earlier = [b for b in schedule.buffers if b.level < Level(schedule.end)]
+ earlier = schedule.buffers
@ _passes/jaxprs.py: test_law_effects
* what acts is known as a callback
- return not all(map(is_of_values, equation.effects))
+ return any("Error" not in str(x) for x in equation.effects)
* what acts does so at every level
+ def silent(...): return given[0]
@ _partition/passed_on.py: test_law_effects
* each micro-batch prints
+ def _run_once(...): return given[0].bound(*given[1:])
@ _partition/writer.py: test_law
* a whole addend is added k times
+     def addend(...): return given[1].x
* each micro-batch adds an equal share, however many rows it has
- size = parts.total / parts.rows if isinstance(parts, Uneven) else parts
+ size = 4 if isinstance(parts, Uneven) else parts
@ _partition/held.py: test_law test_table
* each micro-batch takes the first rows for its own
+ def rows_of(...): return as_it_was_rows_of(*given[:2], 0 * given[2], given[3])
* the smallest of all rows is the largest
- return self._over("pmax" if is_max else "pmin", x)
+ return self._over("pmax", x)
* uneven micro-batches keep no count but the last one's
- zeros.at[index].set(wide)
+ zeros.at[0].set(wide)
* a dropped psum
- return self._over("psum", x)
+ return x
* the last micro-batch draws and counts from its first row
- start = jax.lax.add(start, np.int32(skipped))
+ start = jax.lax.add(start, np.int32(0 * skipped))
* rows in segments are cut as neighbours
- x = jnp.reshape(x, (*shape[:d], rows.segments, parts, rest, *shape[d + 1 :]))
-     x = jax.lax.dynamic_index_in_dim(x, index, d + 1, keepdims=False)
+ x = jnp.reshape(x, (*shape[:d], parts, rows.segments, rest, *shape[d + 1 :]))
+     x = jax.lax.dynamic_index_in_dim(x, index, d, keepdims=False)
@ _partition/created.py: test_law test_table
* a draw without its offset
- if d != rows.dim:
-         return here
+ return here
@ _calls/batches.py: test_arguments
* the first leaf says how many rows there are
- rows = max(sizes, key=lambda n: (not isinstance(n, int), sizes[n]))
+ rows = next(iter(sizes))
@ _checks.py: test_arguments
* a raw key is split
+ def is_raw_key(...): return False
@ _calls/call.py: test_refused
* no argument is taken for the batch that another one was said to be
+ def _question_on_batch(...): return ""
@ _calls/batches.py: test_law_told
* a number of classes is warned of as a table is
- votes[n] > votes[rows]
+ votes[n] >= votes[rows]
* nothing is said of a table that is taken for the rows
+ def _warn_of_rows(...): return None
@ _calls/call.py: test_arguments
* the gradient of the imaginary part
- return loss.real, (loss, aux)
+ return loss.imag, (loss, aux)
@ _devices/meshes.py: test_refused
* any name is one of an axis
+ def _check_names(...): return None
* a spec may have more entries than dimensions
- if specs is not None and spec is not None and len(spec) > jnp.ndim(leaf):
+ if False:
* devices: a sync that is none
- if self.sync not in ("last", "each"):
+ if False:
@ _partition/held.py: test_dependencies
* a report takes what is added up for the whole
- "part" if v.is_partial else "all"
+ "all"
@ _calls/regions.py: test_refused
* a loss may sum over devices of which it has one
+ def check_no_region(...): return None
@ _calls/regions.py: test_regions
* a region over other axes stays in a mesh where all axes are automatic
- if any(e.params["mesh"] != context for e in found):
+ if False:
* a region that checks around one of the model's
- if found and call.devices.is_checked:  # what goes back has types of no region
+ if False:
@ _calls/rows.py: test_anywhere
* gradients of rows upside down
- for x, aval, d in triples
+ for x, aval, d in ((x[::-1], *r) for x, *r in triples)
@ _passes/primitives.py: test_law_dtypes
* a gradient that is rounded for its sum is rounded before, too
- _entry("custom_jvp_call", None, "", DEAR, PASSED,
+ _entry("custom_jvp_call", None, "", DEAR,
@ _loop/micro_step.py: test_law_dtypes
* gradients of bfloat16 are rounded in each micro-batch
+     def low_precision(...): return False
@ _window/room.py: test_law_costs
* nothing is dropped between levels
+ def _segments(...): return ()
* weights that a checkpoint casts are of rows, with all that reads them
+ def _apart(...): return [given[0]]
@ _window/kept.py: test_kept
* what is kept of a gradient as a program stays between the levels that read it
+ def _segmented(...): return ()
* residuals take more than the room there is
+ def _less(...): return given[1]
* a stack that later levels read is written over
-     left = [j for j in schedule.drops.get(level.number, ()) if j in known]
+     left = [*known]
@ _window/flat.py: test_kept
* sums wait for the last level
-         if i and folds[i] == "sum" and jaxprs.is_variable(x):
+         if False:
@ _passes/checkpoints.py: test_kept
* what a checkpoint computes again is merged with what it was before
-     if not equation.params["differentiated"]:
+     if True:
@ _partition/held.py: test_kept
* the branch of a platform is no program like any other
+ def taken(...): return None
@ _window/flat.py: test_law_costs
* masks, and what else grows in a checkpoint, are kept of each micro-batch
+ def _growing(...): return set(), set()
* scores that wait for a mask are kept
+ def _late(...): return set()
@ _window/run.py: test_law_costs
* micro-batches run also where the undivided batch takes less
+ def _takes_less(...): return True
* of plans with less and less room the first alone is tried
+ def _rooms(...): return (None,)
* what needs no rows is stored, however many bytes it takes
+ def is_small(...): return True
@ _passes/alive.py: test_law_costs
* what an iteration of a loop takes is not counted
+ def _inside(...): return 0
@ _calls/rows.py: test_law_costs
* products that need no rows run in each micro-batch
+ def shares_much(...): return False
@ _partition/nested.py: test_law_costs
* branches of which rows read a sum run in each micro-batch
- if is_summed_first(w, e, operands):
+ if False:
@ _passes/jaxprs.py: test_law_costs
* each level is traced by itself
+ def form(...): return object()
@ _partition/held.py: test_law_costs
* rows are kept once for each of their shapes
+ def is_reshaped(...): return False
@ _partition/reductions.py: test_law_costs
* pairs of rows are split along rows alone
+ def pairs_by_columns(...): return None
* pairs of rows are gathered where other rows of them are wanted
+ def turned_to(...): return None
@ _partition/linear.py: test_law_dtypes
* parts of a sum are rounded, and not the sum
- return None if rounds else [(vs[0].x, PARTIAL)]
+ return None if rounds else [(w.run(e, [vs[0].x]), PARTIAL)]
* rows meet in a sum that is rounded
- rounds = forbids or w.scope.is_inner
+ rounds = True
@ _partition/linear.py: test_law_costs
* a sum waits for a product with what all micro-batches share
+ def is_summed_first(...): return False
* no product with what all micro-batches share runs with the rows
+ def _work_before(...): return 0.0, 0.0
@ _partition/nested.py: test_anywhere
* pieces of the rows of the whole batch
- range(min(function.number, rows), 0, -1)
+ range(max(1, function.number // w.axis.size), 0, -1)
@ _window/levels.py: test_law_costs
* a new stack waits for a sum to which a loop adds
- late = buffers if way.cotangents is None else cotangents | mine
+ late = buffers if way.cotangents is None else mine | cotangents
@ _passes/shared.py: test_devices
* an embedding is gathered whole in each micro-batch
+ def _looked_up(...): return None
* a parameter that is read as it is comes in low precision
- if use is None:
-         return None
-     equation, i = use
+ equation, i = use or jaxprs.uses(jaxpr, x)[0]
* parameters are cast after they are gathered
- left_alone(reader, "not one cast alone reads the parameter")
-     return program._replace(jaxpr=jaxpr)
+ left_alone(reader, "not one cast alone reads the parameter")
+     return program
@ _calls/separate.py: test_devices
* a call on a mesh counts as one micro-step
- count = jnp.full_like(acc.count, count)
+ count = jnp.full_like(acc.count, 1)
@ _calls/call.py: test_devices
* a parameter in low precision is that of the first device alone
- [params[i]] = collectives.gather([low], [place])
+ params[i] = jnp.concatenate([low] * (x.size // low.size), place.dims[0][0])
@ _passes/shards.py: test_law_devices
* a frozen argument that is gathered whole
+ def _is_split(...): return False
* layers in a row that are gathered at once
- values = values if self.in_loop else _after_other_operands(values)
+ values = list(values)
* a gathered layer that is kept for the way back
- return (use if self.in_checkpoint else jax.checkpoint(use))(*values)
+ return use(*values)
@ _passes/equation.py: test_anywhere
* a gradient comes with the value always
+     def comes_with_value(...): return True
@ _calls/engine.py: test_anywhere
* the cotangents of rows are left out
- [paired(x, ct) for
+ [paired(x, ct * 0 + 1) for
@ _devices/meshes.py: test_anywhere
* a call takes all rows for those of one device
+ def sees_all_rows(...): return False
@ _passes/places.py: test_law_told
* an equation knows nothing of its caller
+ def better_placed(...): return given[0]
* an error of the user's code is taken for one of the library
- return bool(file) and not file.startswith(_OURS)
+ return False
* a NaN that JAX finds is taken for a fault of the library
- return error if isinstance(error, _OF_NUMBERS) else None
+ return None
@ _partition/custom.py: test_law_told
* a rule that JAX does not call raises
- return _as_it_raises(w, e, vs, error)
+ raise error
* a rule that fails by itself is a fault of the library
- return []
+ raise error
@ _window/stages.py: test_law_told test_dependencies
* what runs and what is shown lack the way back of what is shared
- for level in (Level(n + 1, in_loop=False), Level(n)):
+ for level in (Level(n),):
@ accumulator.py: test_accumulator
* a micro-batch that is not added
- jax.lax.add(x, y) if x.shape == y.shape else x + y
+ x
* a product with the reciprocal of the weight
- return t / jnp.where(jnp.isnan(t), jnp.ones_like(w), w)
+ return t * (1 / w)
* the mean of what an empty accumulator holds
-     return jnp.where(weight == 0, jnp.zeros_like(total), quotient)
+     return quotient
* an empty accumulator that is added
- return jnp.where(b.count == 0, x, jnp.where(a.count == 0, y, x + y))
+ return x + y
* complex numbers weighted as a whole
-     if not jnp.issubdtype(wide, jnp.complexfloating):
+     if True:
* rounded: numbers that are subnormal in 16 bits are 0
- jnp.finfo(wide).nexp, digits
+ jnp.finfo(x.dtype).nexp, digits
* rounded: no derivative without its rule
- return cast(exact * one, x.dtype)
+ return jax.lax.stop_gradient(cast(exact * one, x.dtype))
* a micro-batch of weight 0 that is added
- return [jnp.where(weight == 0, old, new) for old, new in pairs]
+ return [new for _, new in pairs]
* float64 parameters that accumulate in float32
- real = np.dtype(np.float64) if wide else dtype
+ real = dtype
* sums of 16 bits that are computed in 16 bits
- return dtype if jnp.finfo(dtype).bits >= 32 else np.dtype(np.float32)
+ return dtype
* a negative weight that is traced counts
- return jnp.where(number < 0, jnp.full_like(number, jnp.nan), number)
+ return number
* a mean of weight 1 that is divided
- quotient = jnp.where(weight == 1, total, divide(total, weight))
+ quotient = divide(total, weight)
* a mean of weight 0 with a derivative
- d_mean = jnp.where(weight == 0, jnp.zeros_like(d_mean), d_mean)
+ d_mean = jnp.where(weight == 0, d_mean + 0, d_mean)
* a count that wraps
- return jax.lax.add(counter, one)
+ return jax.lax.add(counter, jnp.ones_like(counter))
@ _across/window.py: test_multi_steps_numbers
* a window without a weight for its micro-batches
- new = accumulator.add(old, self.terms, self.weight)
+ new = accumulator.add(old, self.terms)
* a window that closes one micro-step late
- return count.astype(wide) >= k.astype(wide)
+ return count.astype(wide) > k.astype(wide)
* a skipped micro-step that is added
- return choices.select(skip, old, new)
+ return new
* a window of weight 0 that steps
- steps = choices.both(closes, has_weight(acc))
+ steps = closes
* a dropped window that is not counted
- skipped = closes & ~emitted
+ skipped = closes & emitted
* what a function that skips keeps is lost
- return out, state._replace(total=total, skip_state=skip_state)
+ return out, state._replace(total=total)
* a norm without the imaginary parts
- for part in accumulator.parts(leaf)
+ for part in accumulator.parts(leaf)[:1]
* the optimizer sees the dtype of the gradients
-         if dtypes[0] == dtypes[1]:
-             return grads
+         return narrow
* functions that decide are given micro-steps
- fn(updates, self.state.gradient_step, self.params)
+ fn(updates, self.state.mini_step, self.params)
* what a function keeps changes the dtype
- return decision, choices.cast_like(new, getattr(self.state, field))
+ return decision, new
* NumPy computes with a restored state
+ def _as_array(...): return given[0]
* an optimizer of one dtype gets wider gradients
- except (TypeError, ValueError, FutureWarning):
+ except ZeroDivisionError:
@ _across/config.py: test_multi_steps_composition
* nothing is said of a window that apply_if_finite leaves out and counts
- if finite and not (
+ if not finite and not (
* slow parameters that have a gradient, too
- return node.fast if is_pair(node) else node
+ return node
@ _across/config.py: test_multi_steps_numbers
* a window of 1.5 micro-steps closes with the first
- return math.ceil(k) if math.isfinite(k) else k
+ return math.floor(k) if math.isfinite(k) else k
* a count that bfloat16 does not have is k
- return jnp.ceil(k).astype(jnp.int32)
+ return jnp.ceil(k)
* a sum for a mean across calls
- jax.tree.map(divide, grads) if self.use_grad_mean else grads
+ grads
@ _calls/engine.py: test_law
* the gradient of the last, smaller micro-batch alone
- operands = operands._replace(acc=some.acc)
+ operands = operands._replace(acc=operands.acc)
@ _partition/linear.py: test_law
* sums of uneven micro-batches that are yet to be rounded are refused
- forbids = w.scope.forbids_collectives and not w.scope.may_count
+ forbids = w.scope.forbids_collectives
@ _calls/rows.py: test_law
* counts of the last, smaller micro-batch are left out
- for part, meetings, xs in triples:
+ for part, meetings, xs in triples[:1]:
@ _checks.py: test_refused
* an unknown keyword has no nearest option
- meant = difflib.get_close_matches(keyword, options, 1)
+ meant = []
* a type passes for an array
- if isinstance(x, jax.ShapeDtypeStruct):
+ if False:
* complex weights
- if not (jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)):
+ if False:
@ _across/config.py: test_multi_steps_drop_in
* a window of 1.5 micro-steps closes with the first, traced
- return jnp.ceil(k).astype(jnp.int32)
+ return jnp.floor(k).astype(jnp.int32)
@ _across/window.py: test_multi_steps_devices
* skips on one device alone
- decision = jax.lax.pmax(collectives
+ decision = jax.lax.pmin(collectives
* reduced gradients that nobody refuses
-         if reduced:
+         if False:
@ _across/config.py: test_multi_steps_devices
* the sum over devices of one device's accumulator is its own
- whole = collectives.merge_across(acc._replace(total=total), self.axes)
+ whole = acc._replace(total=total)
@ _across/state.py: test_multi_steps_drop_in
* a running mean taken for a sum
- return a * count.astype(a.dtype) if use_grad_mean else a
+ return a
* from_optax: what a function that skips keeps is lost
- skip_state=leaf.skip_state
+ skip_state=()
* the sum so far is divided
- if isinstance(self, SummedState):
+ if False:
@ data.py: test_data
* an epoch that repeats the last order
- jax.random.fold_in(key, step // steps)
+ key
* micro-batches that take every k-th example of a window
- return window.reshape(k, -1)
+ return window.reshape(-1, k).T
* a window that overlaps the one before
- start = (step % steps).astype(jnp.int32) * jnp.int32(size)
+ start = (step % steps).astype(jnp.int32) * jnp.int32(size - 1)
* the last example is never drawn
- jax.random.randint(key, (size,), 0, n, jnp.int32)
+ jax.random.randint(key, (size,), 0, n - 1, jnp.int32)
* indices of 64 bits
- order.astype(jnp.int32)
+ order
@ blocks/_summary.py: test_blocks
* norms without the imaginary parts
- jnp.add, [jnp.square(x.astype(dtype)) for x in accumulator.parts(leaf)]
+ jnp.add, [jnp.square(x.astype(dtype)) for x in accumulator.parts(leaf)[:1]]
* blocks of a stack: one number for all layers
- first = 0 if next(group).index is None else 1
+ first = 0 if next(group).index is None else 0
@ blocks/_by_block.py: test_blocks
* blocks of one micro-batch with two weights
- if not same and weight is not known:
+ if False:
* blocks of a stack: every layer is added to the first
- return acc.total if index is None else with_slices(total, index, acc.total)
+ return acc.total if index is None else with_slices(total, 0 * index, acc.total)
* blocks of a stack: the number of the layer is copied to each device
- beside.sharding if known and beside.committed else None
+ None
@ flax/_states.py: test_flax
* an optimizer whose flush forgets arguments
- change = partial(multi_steps.flush, self.tx, **nnx.as_pure(extra_args))
+ change = partial(multi_steps.flush, self.tx)
* a train state that counts updates
- step=self.step + 1
+ step=self.step
* an optimizer of all variables
- grads = nnx.as_pure(nnx.state(grads, self.wrt, graph=self.graph))
+ grads = nnx.as_pure(nnx.state(grads, graph=self.graph))
@ _loop/folds.py: test_accumulate
* each by itself: a weight forgotten in the mean of a loss
- accumulator.weighted(x, weight, total.dtype, weighting.zero_of_weighted)
+ x.astype(total.dtype)
* each by itself: a sum of aux that loses the rows before
- total + w.rounded(x)
+ w.rounded(x)
* each by itself: rows of different examples are added up in silence
- if longer[i].shape != x.shape:
+ if False:
@ accumulator.py: test_accumulate
* each by itself: counts that wrap in eight bits
- return np.promote_types(dtype, kind)
+ return np.dtype(dtype)
@ _loop/folds.py: test_devices
* devices: the last aux is that of the first device
- meshes.num_devices(axes) - 1
+ 0
@ _devices/collectives.py: test_membership
* devices: rows of a strided split taken as neighbours
- parts = parts[::-1] if strided else parts
+ parts = parts
* devices: a program for several devices splits neighbours
- strided = getattr(devices, "num_devices", 1) > 1
+ strided = False
@ _partition/partitioned.py: test_membership
* devices: which rows are next to each other is not asked
- return not (by_place or has_rows) and all(
+ return not (by_place or has_rows) or all(
* devices: a row is looked at by its place
- by_place = part.meets or part.reads_index or
+ by_place = part.meets or
@ _devices/collectives.py: test_logical_devices
* logical devices: neighbours are added in another order
- x = rounded_sum(x[0::2], x[1::2])
+ x = rounded_sum(x[: x.shape[0] // 2], x[x.shape[0] // 2 :])
@ _loop/micro_step.py: test_logical_devices
* logical devices: a loop that XLA compiles as one function
- cpu=lambda *pair: jax.lax.sort(jnp.stack(pair))[1],
+ cpu=lambda count, following: following,
@ _compiled/audit.py: test_audit
* who passes sync="each" is told to pass data_axis
- if _EACH in scopes:
+ if False:
* audit: loops in loops do not multiply
- math.prod(t for t in trips if t is not None)
+ max(t for t in [*trips, 1] if t is not None)
@ _verify/diagnosis.py: test_verify
* leaves without rows are split as the batch is
- None if axis is None or x.shape[axis] != rows else axis
+ axis
* verify: every difference is rounding
- return bool((off <= self.tolerance * terms + _FLOOR * norm(terms)).all())
+ return True
* verify: rows that need each other are taken for rows in places
- if proof.has_place and proof.in_counts:
+ if proof.has_place:
* verify: a NaN of weight 0 is the first
- used = np.append(evidence.weights, 1) != 0
+ used = np.append(evidence.weights, 1) >= 0
* verify: a mask in half a float is summed as it is
- and leaf.dtype.itemsize < 4
+ and leaf.dtype.itemsize < 1
@ _verify/measured.py: test_verify
* verify: a NaN of weight 0 is added
- return [x + jnp.where(w == 0, 0, w * y) for x, y in pairs], size(part)
+ return [x + w * y for x, y in pairs], size(part)
* verify: all micro-batches have the first one's rows
- leaves = (x if d is None else x[part] for x, d in pairs)
+ leaves = (x if d is None else x[0] for x, d in pairs)
* verify: all micro-batches draw the same
- keys = jax.tree.map(lambda key: jax.random.fold_in(key, index), self.key)
+ keys = self.key
* verify: a weight that rounds is taken as it is
- weight = jax.jit(Wide(lambda *x: self.fun(*x)[1], self.x64))
+ weight = jax.jit(lambda *x: self.fun(*x)[1])
* verify: the factor of a scale upside down
- factor = norm(size(whole)[:-1]) / norm(size(mean)[:-1])
+ factor = norm(size(mean)[:-1]) / norm(size(whole)[:-1])
@ _verify/proof.py: test_verify
* verify: a number that parameters are in is taken for a count
- if x.aval.size == 1 and x not in of_params]
+ if x.aval.size == 1]
@ _passes/primitives.py: test_table
* a dimension that is broadcast has rows
- return [d if d < kept and n == most else None for d, (n, most) in pairs]
+ return [d if d < kept else None for d, (n, most) in pairs]
* rows that a transposition leaves where they were
- return [range(_rank(e))], [e.params["permutation"]]
+ return [range(_rank(e))], [range(_rank(e))]
* a dimension of a reduction that is one too far
- [[d for d in range(_rank(e)) if d not in gone]]
+ [[d for d in range(_rank(e)) if d + 1 not in gone]]
* rows of a sum over an axis of jax.vmap lie along another axis
- return ins, [[d for d in dims if d not in e.params["axes"]] for dims in ins]
+ return ins, [[*dims][: -len(e.params["axes"])] for dims in ins]
@ _verify/diagnosis.py: test_dtypes
* keys are taken for counts of tokens
- if axis is None or not is_real(leaf.dtype):
+ if axis is None:
@ blocks/_partition.py: test_dtypes
* the bytes of a key are those of the key
- jax.ShapeDtypeStruct, self.shapes, self.dtypes
+ np.empty, self.shapes, self.dtypes
@ testing.py: test_dtypes
* float0 has bits
- if not a.dtype.itemsize:
+ if a.dtype.itemsize < 0:
@ _partition/factors.py: test_law_dtypes
* a sum over rows that is dropped
- return [(x, PARTIAL) for x in w.results(e, w.parts(vs, rows, way.ins))]
+ return [(x, WHOLE) for x in w.results(e, w.parts(vs, rows, way.ins))]
@ _partition/groups.py: test_ragged
* groups of the whole batch in a micro-batch
- here = [jnp.clip(x - first, 0, length)
+ here = [jnp.clip(x, 0, length)
@ _partition/splits.py: test_rowwise
* a promise that is not checked
- why = "" if types == due else
+ why = "" if types else
@ _partition/splits.py: test_table
* a scan by what is associative takes its own total twice
- last = jnp.maximum(at - 1, 0)
+ last = at
* a reversed scan by what is associative begins in the first micro-batch
- at = w.axis.size - 1 - w.index if reverse else w.index
+ at = w.index
@ _passes/associative_scan.py: test_rowwise
* an associative scan is its recursion alone
- if not is_read():
+ if True:
@ _partition/splits.py: test_kernels
* a kernel with scratch taken for one whose programs are apart
- return bool(grid.scratch_avals) and not is_parallel
+ return False
* a factor that is needed whole taken for one that is passed on
-         *rule.need_replication_factors,
@ _partition/nested.py: test_regions
* rows of a device that are those of another
+ def _on_device(...): return given[0]
* a region keeps the mesh in which it was traced
- mesh = context if context.manual_axes else mesh
+ mesh = mesh or context
@ _passes/primitives.py: test_regions
* what devices exchange is not split
+ def _exchanged(...): return None
@ _partition/indexing.py: test_indices test_table test_law_mended
* a place outside of all rows is clipped to one more
- clipped = jnp.clip(asked, 0, operand.shape[d] - 1)
+ clipped = jnp.clip(asked, 0, operand.shape[d])
* the first update to a place stays
- stays = _read(top, here.indices, order.shape, e) == order
+ stays = _read(top, here.indices, order.shape, e) > order
* an index that counts is read from the first column
- return _counts(vs[column], None, n)
+ return _counts(vs[0], None, n)
* a cast counts rows whatever it does to numbers
+ def _holds(...): return True
* the columns of an index stay columns wherever they are spread
- if axes[-1:] != (len(v.shape) - 1,):  # the columns are all alike, and new
+ if not axes:
* an index that is out of bounds picks no number, if none was said to be
- row = asked if mode == modes.FILL_OR_DROP else clipped
+ row = clipped if mode == modes.CLIP else asked
* what is taken of others' rows stays unique
- broken = {"unique_indices": False, "indices_are_sorted": False}
+ broken = {"indices_are_sorted": False}
* what is written behind all rows is written to one place
- jnp.where(is_here, here, operand.shape[d] + after)
+ jnp.where(is_here, here, operand.shape[d])
* a number that is picked twice is that of other rows
- here = here // jnp.asarray(times, x.dtype) if times > 1 else here
+ here = here % jnp.asarray(n // w.axis.size, x.dtype) if times > 1 else here
@ _partition/writer.py: test_table
* a row belongs to the next micro-batch
- owner = jnp.where(inside, row // rest % parts, 0)
+ owner = jnp.where(inside, (row // rest + 1) % parts, 0)
@ _partition/reductions.py: test_table
* sums of rows from the first on take their own total twice
- is_before = places > w.index if reverse else places < w.index
+ is_before = places >= w.index if reverse else places <= w.index
* the place of an extremum is that in a micro-batch
- places, values = w.gather(at + first, v), w.gather(best, v)
+ places, values = w.gather(at, v), w.gather(best, v)
@ _partition/extrema.py: test_law_mended test_derivatives
* an extremum's derivative counts micro-batches, and not rows
- share = jnp.where(found == out[None], counts, jnp.zeros_like(counts))
+ share = jnp.where(found == out[None], jnp.ones_like(counts), 0 * counts)
* an extremum that no row attains where it rounds otherwise
- return (x == extremum) | (first & (extremum == extremum))
+ return x == extremum
@ _partition/custom.py: test_table
* the tangent of an integer is a symbol
- fixed = [e.params["symbolic_zeros"] and not moves for moves in moving]
+ fixed = [not moves for moves in moving]
@ _partition/nested.py: test_table test_law_rules
* a loop whose test reads constants alone at first is computed whole
- if PARTIAL in new or new.count(WHOLE) == layouts.count(WHOLE):
+ if PARTIAL in new or layouts == [rows] * len(carry):
* a scan over rows adds to its start in each micro-batch
- start = [w.addend(v) for v in carry]
+ start = [w.whole(v) for v in carry]
* a solver returns the solution alone
- solve, transposed, symmetric, has_aux=has_aux
+ solve, transposed, symmetric, has_aux=False
@ _passes/pullback.py: test_traced
* a gradient in which no cotangent is counts as zero
- given = [i + m - first in gives for i in range(len(grads))]
+ given = [jaxprs.is_among(x, later) for x in grads]
* a result has a cotangent that none reaches
- kind = self._kind(e, kind[0], cotangents)
+ pass
@ _loop/micro_step.py: test_optimize
* every sum is rounded and fenced, also where no grouping is promised
- return self.optimize and self.grouped
+ return self.optimize
@ _loop/loop.py: test_accumulate test_microbatch
* one key for all micro-batches
- keys = [jax.random.fold_in(key, state.acc.count) for key in operands.keys]
+ keys = [jax.random.fold_in(key, 0 * state.acc.count) for key in operands.keys]
* a weight that is counted twice
- weights = self.vary(acc.weight + one, one)
+ weights = self.vary(acc.weight + one + one, one)
* one micro-batch more than are real
- return micro_step.if_holds(i < number, step, state, batch)
+ return micro_step.if_holds(i <= number, step, state, batch)
* what an empty accumulator holds is added to
- total = [accumulator.cleared(x, empty) for x in total]
+ total = list(total)
* the mean of a loss divides by one micro-batch less
- weights = [total + one, accumulator.increment(count)]
+ weights = [total + one * (count > 0), accumulator.increment(count)]
@ _devices/collectives.py: test_devices test_law_devices
* devices: what an empty accumulator holds is merged
- total = jax.tree.map(lambda x: jnp.where(empty, jnp.zeros_like(x), x), acc.total)
+ total = acc.total
* devices: a slice of a leaf is scattered along another axis
- dim += x.ndim - ndim
+ dim += 0
* devices: a leaf that is summed already is summed once more
- done = placement.axes + placement.summed
+ done = placement.axes
* devices: an all-reduce left out
- sums = jax.lax.psum([result[i] for i in members], other_axes)
+ sums = [result[i] for i in members]
@ _loop/loop.py: test_devices test_logical_devices
* devices: a carried mean that is a sum
- next(means) / number if _averages(x) else jax.lax.pmax(x, axes)
+ next(means) if _averages(x) else jax.lax.pmax(x, axes)
* logical devices: all devices fold the same keys
- indices = number * jax.lax.axis_index(axes) + jnp.arange(number, dtype=jnp.int32)
+ indices = jnp.arange(number, dtype=jnp.int32)
@ _loop/folds.py: test_law_mended test_law_devices
* devices: the largest number is the smallest of theirs
- "max": _extremum(jnp.maximum, jax.lax.pmax),
+ "max": _extremum(jnp.maximum, jax.lax.pmin),
* the largest number is that of the last micro-batch
- jnp.where(number == 0, x, larger(most, x)), most
+ jnp.where(number >= 0, x, larger(most, x)), most
@ _calls/engine.py: test_devices test_law_devices
* devices: the micro-batches of all devices have the same numbers
- index = index + call.num_of_device * jax.lax.axis_index(axes).astype(jnp.int32)
+ index = index + 0 * jax.lax.axis_index(axes).astype(jnp.int32)
* replicas of shards draw for rows of others
-     if not call.devices.replicas or of_rows or jaxprs.uses(part.jaxpr, place):
+     if not call.devices.replicas or of_rows:
* replicas of shards are summed in each micro-step
-     if not call.devices.replicas or of_rows or jaxprs.uses(part.jaxpr, place):
+     if call.num_of_device:
* a table that a loss closes over is refused
-     except ManualAxisError as error:
+     except ZeroDivisionError as error:
@ _window/schedule.py: test_law test_law_rules
* what follows from a collective is a level too early
- largest = largest._replace(level=largest.level + 1, of_rows=False)
+ largest = largest._replace(level=max(largest.level, 1), of_rows=False)
* a buffer is read at the level that fills it
- return buffer.level < level
+ return buffer.level <= level
@ testing.py: test_testing
* testing: what verify warns of is lost
- warnings.warn(warning, stacklevel=2)
+ del warning
* testing: the last index that differs is the first
- np.argwhere(differ)[0]
+ np.argwhere(differ)[-1]
@ _across/choices.py: test_multi_steps_numbers
* a window with -inf that is kept
- & jnp.isfinite(jnp.min(part))
+ & ~jnp.isnan(jnp.min(part))
@ _window/levels.py: test_law_devices
* devices: the largest number of a level is the smallest of theirs
- "max": jax.lax.pmax,
+ "max": jax.lax.pmin,
@ blocks/_partition.py: test_blocks
* a stack without layers
- if not shape or not shape[0] or shape[0] != of_leaves[0][0]:
+ if not shape or shape[0] != of_leaves[0][0]:
"""
MUTATIONS = list(read(FAULTS))


# The tiers in the order of their cost, and the markers of what each adds.
TIERS = {
    "quick": "quick",
    "test": "not quick and not slow",
    "slow": "not quick and slow",
}


def files(mutation):
    """The files of its tests, by their names, which are unique."""
    return [path for x in mutation.tests for path in (ROOT / "tests").rglob(f"{x}.py")]


def run(mutation, tiers):
    """The first tier of which a test fails with the fault in, and which one does."""
    with tempfile.TemporaryDirectory() as folder:
        package = shutil.copytree(ROOT / "ga_optax", pathlib.Path(folder, "ga_optax"))
        path = package / mutation.file
        text = path.read_text(encoding="utf-8")
        assert text.count(mutation.old) == 1, mutation
        path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        for tier in tiers:
            paths = files(mutation)
            if tier == "quick":  # as a process takes seconds to import a file
                paths = [x for x in paths if x in index.quick_files()]
            if paths and (seen := failing(paths, TIERS[tier], folder)):
                return tier, seen
    return None, ""


def failing(paths, marked, folder):
    """The first test with such markers that fails with the package in a folder."""
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "pytest", "-q", "-x", *paths),
            *("-m", f"{marked} and not exhaustive and not published"),
            *("-p", "no:cacheprovider"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": folder},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode in (0, 5):  # 5: there is no such test
        return ""
    lines = done.stdout.splitlines() or [done.stderr]
    seen = [
        line.split(" ")[1] for line in lines if line.startswith(("FAILED ", "ERROR "))
    ]
    return " ".join(seen) or lines[-1]


def main():
    """Prints the first tier that sees each fault, and how many each tier sees."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="of the names of faults")
    parser.add_argument("--up-to", choices=TIERS, default="slow", help="the last tier")
    given = parser.parse_args()
    tiers = [*TIERS][: [*TIERS].index(given.up_to) + 1]
    seen = collections.Counter()
    for mutation in MUTATIONS:
        if not given.words or any(word in mutation.name for word in given.words):
            tier, test = run(mutation, tiers)
            seen[tier] += 1
            print(f"{tier or 'MISSED':6}  {mutation.name}: {test}", flush=True)
    number, total = 0, sum(seen.values())
    for tier in tiers:
        number += seen[tier]
        print(f"{tier} sees {number} of {total}")
    return seen[None]


if __name__ == "__main__":
    sys.exit(main() > 0)

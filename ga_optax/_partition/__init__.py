"""A function of the whole batch, partitioned over micro-batches: GSPMD in time.

A function is traced once, at all n rows. Its program becomes that of one of k
micro-batches, with collectives over a named axis wherever rows need one another:

    program of fun, [n, ...]  ->  program of a micro-batch, [n / k, ...], + collectives

Rows are followed from the leaves of the batch. Each value has a layout: it is *whole*;
or it has *rows* along one dimension, globally [s, n, ...] and here [s, n / k, ...]; or
it is *partial*, a sum over micro-batches that nothing nonlinear has read yet. An axis
that merely is as long as the batch is never taken for rows. An equation without a
rule gathers the operands and is computed whole, which is right and only takes memory.

    held         what a micro-batch holds of a value: layouts, labels, notes
    writer       the program of a micro-batch while it is written; changes of layout
    partitioned  `partition`
    rules        the table of rules, by primitive
    factors      rules that follow from entries of the table of primitives, in `_passes`
    linear       sums that wait
    reductions   reductions where rows meet: columns, extrema
    shifted      sums of shifted values, such as a softmax over rows
    extrema      their derivatives
    created      rows that a program makes itself
    moves        rows that move
    groups       products of groups of rows
    indexing     gathers and scatters
    nested       programs inside: functions, branches, loops, regions, `microbatch`
    custom       functions with custom rules; `attached`, where rows meet in these
    closures     what such rules close over
    passed_on    equations that are computed whole
    splits       calls that say how they split, and kernels of Pallas

Imports `_passes` alone.
"""

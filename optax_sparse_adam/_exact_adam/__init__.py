"""`exact_adam`: dense Adam's own numbers, at the cost of the touched rows.

While a row has no gradient, its updates depend only on its moments and on the
learning-rate schedule, so their sum, the *remaining update*, can be computed in
advance. A table stores, for each row, its value with that sum applied, the *projected
final value*; its current value is computed where the row is read.

The files, those that others stand on first:

- `remaining_update`: the remaining update of a row, as a polynomial.
- `rows`: stale rows: what is known of them, and their values now.
- `kernel_arrays`: the same, as the kernel takes it.
- `stale_table`: stale rows of a table, for whoever looks them up.
- `step`: the step on the rows that have a gradient.
- `state`: the state, and which parameters it belongs to.
- `schedule`: the polynomials of each step, from the schedules.
- `leaves`: gradients, parameters and rows of a step, leaf by leaf.
- `checks`: what is wrong in a step, and what becomes NaN.
- `update`: the step of all leaves.
- `flush`: `flush`, which goes through all rows.
- `optimizer`: the public functions, and the checks of their arguments.

`native/exact_adam.h` does the same arithmetic on CPUs.
"""

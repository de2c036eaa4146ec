"""What has `init` and `update`: the optimisers, and the wrappers of optax's.

Each optimiser has a file with its formula for the rows of one parameter, of which
`by_leaf` makes a transformation; `lazy` takes any transformation of optax. Both stand
on `_rows`, which gathers the touched rows and scatters them back.

`exact_adam` has the public functions and their checks, `exact_schedule` what follows
from the schedule in each step, `exact_formula` the step on rows, and `_rows/ways` and
`_rows/resting_rows` where a row at rest is. Where the kernel is used,
`native/exact_adam.h` does the arithmetic on rows of the last three, and JAX computes
the numbers that it is given.
"""

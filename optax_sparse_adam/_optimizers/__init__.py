"""What has `init` and `update`: the optimisers, and the wrappers of optax's.

Each optimiser has a file with its formula; those of `exact_adam` and
`sparse_adafactor` are in `exact_formula` and `adafactor_formula`, and what `lazy` wraps
has optax's. All stand on `_rows`, which gathers the touched rows and scatters them
back.

`exact_adam` has the public functions and their checks, `exact_schedule` what follows
from the schedule in each step, `exact_formula` the step on rows, and `_rows/ways` and
`_rows/resting_rows` where a row at rest is. Where the kernel is used,
`native/exact_adam.h` does the arithmetic on rows of the last three, and JAX computes
the numbers that it is given.
"""

"""What has `init` and `update`: the optimisers, and the wrappers of optax's.

Each optimiser has a file with its formula for the rows of one parameter. `by_leaf`
makes a dense transformation of a formula, and `lazy` lifts that, like any
transformation of optax, to row-sparse gradients. Both stand on `_rows`, which gathers
the touched rows and scatters them back.

`exact_adam` has a folder of its own, `_exact_adam`.
"""

"""Arithmetic on a few rows of a large table.

Words, as all of the package uses them:

- table: a parameter or a part of the state of which a step uses few rows; an array
  `[num_rows, *row_shape]`, or `[*sizes, *row_shape]` where `n_sparse` is not 1.
- row: the slice of a table at one index. A row is an index of `n_sparse` integers.
- n_sparse: how many leading axes of a table an index is for; nearly always 1.
- entry: an index that a BCOO stores, with its values: `indices[slot]`, `data[slot]`.
- slot: the place of an entry in the arrays, from 0 to `nse - 1`.
- nse: how many entries there are, padding included; as in JAX, "number of specified
  elements". It is static.
- padding: entries whose index is out of bounds. They mean nothing. See `padding`.
- touched: a row with at least one entry, whatever its values. Only touched rows, and
  their state, change.
- duplicates: entries of one row. Their values add up.
- coalesced: without duplicates, the touched rows in ascending order in front, padding
  after them. Such rows are passed on as `(indices, data, count)`, always in this order.
- count: how many touched rows there are, or, where rows are believed to be unique and
  padding lies between them, how many slots there are up to the last one; a scalar that
  is known when a program runs.
- segment: the place of an entry's row among the touched rows.
- compact: holding the touched rows only, `[nse, *row_shape]` in place of a whole table.
- source: what a lookup reads: a table, and where rows of it are stale, what brings them
  up to date.
- row function: what is computed between gather and scatter,
  `row_fn(data, rows_of_tables, *args)`.
- block: as many touched rows as a CPU updates at a time; see `map_rows`.

`canary` and `checks` say what counts as a gradient (`canary_arrays`, `clocks` and
`armed` what it carries for that), and `entries` opens it, once.
`row_ops` has the step of a table: how rows are summed (`duplicates`), taken and put
(`gather_scatter`) and mapped (`map_rows`) by XLA, and the lookups of a loss, in a
`source`; `kernel_ops` is the same by the kernel, and `with_ops` chooses one of them for
a program. `lookups` has the two lookups that gradients know. `update_table` updates a
table by the formula of an optimiser, `apply_updates` adds that to the parameter, and
`new_arrays` makes the arrays of a new state. `coalesce` is public, and `segments` the
same of ids that are no gradient's. `bags` has the public `embedding_bag`, `bag_sums`
what XLA computes of it, and `bag_gradient` the entries of its gradient by bags. `stale`
says what gradients need to know of rows that `exact_adam` has not brought up to date.
All of them stand on `padding`.
"""

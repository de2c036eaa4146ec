"""Row-sparse gradients of unchanged models.

`value_and_grad` traces a loss; `differentiate` has JAX differentiate it with respect to
the rows that it looks up. `walk` evaluates the jaxpr with an `Expression` in place of
each table (`expressions`), and `rules` says what each primitive does with these:
`lookups` and `reading` for lookups, the other `rules_*` for primitives with jaxprs
inside. `backward_slice` says what the loss depends on, `row_slices` makes BCOOs of
rows, and `arguments` checks what a user passes.
"""

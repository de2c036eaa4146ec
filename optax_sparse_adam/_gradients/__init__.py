"""Row-sparse gradients of unchanged models.

`value_and_grad` traces a gradient to a jaxpr. `analysis` finds which of its values are
sums of rows on their way to the gradient of a wanted leaf, and what is in the way for
the others. `interpreter` evaluates the jaxpr with two symbolic values in the place of
tables (`symbolic_values`). `rules` says what each primitive does with them:
`rules_lookups` for gathers and their transposes, `rules_control_flow` and
`rules_shard_map` for primitives with jaxprs inside, `rules_custom` for functions with
custom derivatives.
"""

"""Row-sparse gradients of unchanged models.

`value_and_grad` traces a gradient to a jaxpr, and `interpreter` evaluates it with two
symbolic values in the place of tables (`symbolic_values`). `rules` says what each
primitive does with them: `rules_lookups` for gathers and their transposes,
`rules_control_flow` and `rules_shard_map` for primitives with jaxprs inside.
"""

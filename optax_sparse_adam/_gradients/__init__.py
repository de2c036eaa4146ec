"""Row-sparse gradients of unchanged models.

`value_and_grad` traces a gradient to a jaxpr. `analysis` finds out which leaves have a
gradient that is a sum of rows, and `interpreter` evaluates the jaxpr with two symbolic
values in the place of tables (`symbolic_values`). `rules` says what each primitive does
with them: `rules_elementwise`, `reading` for lookups, `rules_lookups` for their
transposes, `rules_control_flow`, `rules_shard_map` and `rules_custom` for primitives
with jaxprs inside; `rule_kinds` has what rules have in common. `arguments` checks what
a user passes.
"""

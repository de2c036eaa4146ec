"""Row-sparse gradients of unchanged models.

A gradient's jaxpr (`_interpreter`) is evaluated with two values that stand for tables
(`_values`), by rules (`_rules`; `_calls` and `_shard_map` for primitives with jaxprs
inside) that know row lookups and their transposes (`_lookups`).
"""

from ._api import grad as grad
from ._api import value_and_grad as value_and_grad

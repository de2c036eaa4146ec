"""The formula of a table that `lazy` has found in a jaxpr, as a function of rows."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from .._jax_extras.jaxprs import Equation, run_equations
from .._rows.map_rows import Tables


class RowFormula:
    """Equations that compute new rows from old ones, as a `Formula.rows`.

    Two of the same equations are equal, whatever tables they are of: JAX then traces a
    step of 26 tables of one size once.
    """

    def __init__(
        self,
        equations: Sequence[Equation],
        literals: dict[int, Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        dtypes: Sequence[Any],
        *,
        reads_param: bool,
    ):
        """Takes the equations, of values by their ids.

        Args:
          equations: Those between inputs and outputs.
          literals: Numbers that they contain; it may have further ones.
          inputs: The gradient, the state, the parameter if it is read, and what all
            rows share.
          outputs: The update, and the new state.
          dtypes: The types of gradient and state in the equations.
          reads_param: Whether the parameter is read.
        """
        # Values are numbered as they occur, so that equal equations are equal.
        numbers: dict[int, int] = {}

        def numbered(value_ids: Sequence[int]) -> tuple[int, ...]:
            return tuple(numbers.setdefault(x, len(numbers)) for x in value_ids)

        self._inputs = numbered(inputs)
        self._equations = [
            Equation(eqn, [*numbered(operands)], [*numbered(results)])
            for eqn, operands, results in equations
        ]
        self._outputs, self._dtypes = numbered(outputs), tuple(dtypes)
        self._literals = {
            number: literals[value_id]
            for value_id, number in numbers.items()
            if value_id in literals
        }
        self.reads_param, self._key = reads_param, self._made_of()

    def _made_of(self) -> Hashable:
        """All that tells it from another one."""
        literals = [
            (number, type(x), np.asarray(x).dtype, np.asarray(x).tobytes())
            for number, x in self._literals.items()
        ]
        equations = [
            (x.primitive, x.ctx, *x.params.items(), *operands, *results)
            for x, operands, results in self._equations
        ]
        ends = self._inputs, self._outputs, self._dtypes
        key = *ends, *literals, *equations
        try:
            hash(key)
        except TypeError:  # a parameter that cannot be compared
            return id(self)
        return key

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowFormula) and self._key == other._key

    def __call__(
        self, data: jax.Array, rows: Tables, shared: Sequence[jax.Array]
    ) -> tuple[jax.Array, Tables]:
        """The update of some rows, and their new state."""
        cast = [x.astype(t) for x, t in zip((data, *rows), self._dtypes, strict=False)]
        arrays = *cast, *rows[len(cast) - 1 :], *shared
        values = dict(zip(self._inputs, arrays, strict=True))
        env = run_equations(self._equations, self._literals | values, len(data))
        update, *new_rows = (env[number] for number in self._outputs)
        return update, tuple(new_rows)

"""Primitives of other libraries that have names of JAX's: no rule is theirs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive, primitives
from jax.interpreters import ad, mlir

import optax_sparse_adam as osa
from optax_sparse_adam._gradients.backward_slice import WITHOUT_DERIVATIVE
from optax_sparse_adam._gradients.rules import RULES
from optax_sparse_adam._jax_extras.jaxprs import ELEMENTWISE
from optax_sparse_adam._optimizers.lazy_row_analysis import _KEEPS_ROWS

from ..helpers.gradients import assert_same
from ..helpers.support import slow_but

TABLE = jnp.asarray(np.arange(32).reshape(8, 4) / 8, jnp.float32)
IDS = jnp.asarray([0, 5, 0])
# What JAX hides is known by its name alone.
NAMES = sorted(
    name
    for name in {*RULES, *WITHOUT_DERIVATIVE, *_KEEPS_ROWS, "while"}
    if name in ELEMENTWISE - {"add_any"} or hasattr(primitives, f"{name}_p")
)


def upside_down(name):
    """A primitive of this name, whose row `r` is another row of its operand."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x: x[::-1])
    primitive.def_abstract_eval(lambda x: x)
    ad.deflinear2(primitive, lambda cotangent, x: (cotangent[::-1],))
    lowered = mlir.lower_fun(lambda x: x[::-1], multiple_results=False)
    mlir.register_lowering(primitive, lowered)
    return primitive


SETS = {"some": ["gather", "round", "tanh"], "all": NAMES}


@pytest.mark.parametrize("which", slow_but(SETS, "some"))
def test_same_as_jax(which):
    """`tanh` and `gather` may be anything, and `round` may have a derivative."""
    assert set(SETS["some"]) < set(NAMES)
    assert len(NAMES) > 60
    foreign = list(map(upside_down, SETS[which]))
    scales = np.arange(1, len(foreign) + 1) / 64

    def loss(table):
        rows = [primitive.bind(table)[IDS] for primitive in foreign]
        return sum(jnp.sum(x) * scale for x, scale in zip(rows, scales, strict=True))

    def losses(table):
        return osa.value_and_grad(loss)(table), jax.value_and_grad(loss)(table)

    (value, grad), (like, expected) = jax.jit(losses)(TABLE)
    assert_same(value, like, 16)
    assert_same(grad, expected, 16)
    assert np.argwhere(np.any(grad, axis=1)).ravel().tolist() == [2, 7]

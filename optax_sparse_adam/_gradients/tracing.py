"""A function as a jaxpr, whatever it takes and returns, and in every mode of JAX."""

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr

from .backward_slice import forwarded_by_jaxpr

_ARRAY = object()
_NUMPY = (
    "optax_sparse_adam traces the function, and outside of jax.jit its arguments of "
    "NumPy stay NumPy's, so that it may decide by their values. Where it indexes one "
    "of them by what it computes, give that as an array of JAX, jnp.asarray(x), or call"
    " it in a function under jax.jit."
)


class AsStored(NamedTuple):
    """A part of a function's result that is written back to where arguments are stored.

    A table in it that is what it was before is not brought up to date.
    """

    tree: Any


def as_places(argnums: Any) -> tuple[int, ...]:
    places = argnums if isinstance(argnums, Sequence) else (argnums,)
    return tuple(map(operator.index, places))


def trace(
    fun: Callable[..., Any],
    args: Sequence[Any],
    places: Sequence[int],
    *,
    has_loss: bool = False,
) -> tuple[ClosedJaxpr, Callable[[Sequence[Any]], Any], list[bool]]:
    """The jaxpr of a function of some of its arguments, and what undoes its flattening.

    The results of `fun` may be anything: the arrays among them leave through the jaxpr,
    and a loss, the first of them, even if it is a Python number. The second function
    makes the result of `fun` of those of the jaxpr; of each the list says whether it
    is in an `AsStored`.
    """
    structure: Any = None
    outputs: list[Any] = []
    are_stored: list[bool] = []

    def traced(*chosen: Any) -> list[Any]:
        values = list(args)
        for place, value in zip(places, chosen, strict=True):
            values[place] = value
        nonlocal structure
        result = fun(*values)
        leaves, structure = jax.tree.flatten(result)
        is_array = [isinstance(x, jax.Array) for x in leaves]
        if has_loss:
            is_array[0] = True
        pairs = list(zip(leaves, is_array, strict=True))
        # For `(loss, {"n": 3, "x": x})`: `[_ARRAY, 3, _ARRAY]`, and the jaxpr returns
        # two arrays. What is no array, such as a string, cannot leave through a jaxpr.
        outputs[:] = [_ARRAY if flag else x for x, flag in pairs]
        flags = zip(_are_stored(result), is_array, strict=True)
        are_stored[:] = [is_stored for is_stored, flag in flags if flag]
        return [x for x, flag in pairs if flag]

    def to_result(arrays: Sequence[Any]) -> Any:
        rest = iter(arrays)
        results = [next(rest) if x is _ARRAY else x for x in outputs]
        return jax.tree.unflatten(structure, results)

    try:
        closed = jax.make_jaxpr(traced)(*(args[place] for place in places))
    except jax.errors.TracerArrayConversionError as error:
        error.add_note(_NUMPY)
        raise
    return closed, to_result, are_stored


def _are_stored(tree: Any) -> list[bool]:
    """Whether each leaf is in an `AsStored`."""

    def is_stored(x: Any) -> bool:
        return isinstance(x, AsStored)

    nodes = jax.tree.leaves(tree, is_leaf=is_stored)
    return [is_stored(node) for node in nodes for _ in jax.tree.leaves(node)]


def as_passed(
    closed: ClosedJaxpr,
    args: Sequence[Any],
    results: Sequence[Any],
    are_stored: Sequence[bool],
) -> list[Any]:
    """The results of a function; stored arguments among them as they were passed."""
    if not any(are_stored):
        return [*results]
    places = forwarded_by_jaxpr(closed.jaxpr, as_values=True)
    of_each = zip(places, are_stored, results, strict=True)
    return [
        args[place] if is_stored and place is not None else x
        for place, is_stored, x in of_each
    ]


def jit_enabled() -> Any:
    """`fun` is traced as ever under `jax.disable_jit`.

    Problem: under `jax.disable_jit` gradients of `embedding_bag` are dense, and an
    optimiser of rows moves every row. Cause: a walk knows some lookups by the name of
    their `jit`, and the jaxpr has none. Remedy: `fun` is traced with `jit`, since what
    it computes are tracers in either case. Safe: the user's setting is back when the
    gradient is there. Test: `tests/gradients/test_ways_to_run.py`.
    """
    return jax.disable_jit(False)


@contextlib.contextmanager
def floating_point_errors() -> Iterator[None]:
    """What `jax.debug_nans` and `jax.debug_infs` find raises a `FloatingPointError`.

    Problem: `except FloatingPointError` does not catch it where a `jit` is in the loss.
    Cause: JAX tells what it finds in a `jit` by another exception, with no public name,
    which `jax.jit` makes a FloatingPointError of, and the evaluation of a jaxpr not.
    Remedy: so does this. Safe: nothing else has that name. Test:
    `tests/gradients/test_debug_nans.py`.
    """
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "InternalFloatingPointError":
            raise
        name, kind = (*error.args, "a value", "nan")[:2]
        raise FloatingPointError(
            f"invalid value ({kind}) encountered in {name}, of the loss or its gradient"
        ) from error

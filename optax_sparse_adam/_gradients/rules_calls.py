"""The rules of a walk for primitives with jaxprs inside: calls, loops and branches.

A call is evaluated in its place. Bodies of loops, branches, and what is rematerialised
are functions that JAX traces by itself: they get their deltas as arguments, and return
their row ids as further results. For a scan with body `step`, in short:

    before:  carry, ys        = scan(step)(carry, xs)
    after:   carry, (ys, ids) = scan(step with deltas)(carry, (xs, deltas))

with deltas `[length * n, ...]` outside and `[n, ...]` in each step. Tables are closed
over: nothing of their size is carried or returned.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from .._jax_extras.jaxprs import name_and_params, scan_sizes
from .._jax_extras.varying_axes import axes_of_type, vary
from .._rows.padding import row_bounds
from .backward_slice import CALLS, as_closed, computed
from .expressions import Expression, arrays_among, merge
from .lookups import Promises
from .row_slices import LookupEntries
from .walk import Request, Results, Walk


def call(walk: Walk, eqn: JaxprEqn, *args: Any) -> Results:
    name, params = name_and_params(eqn)
    return walk.evaluate(as_closed(params[CALLS[name]]), args)


def remat(walk: Walk, eqn: JaxprEqn, *args: Any) -> Results:
    """A function whose values the backward pass computes again, lookups included."""
    params = name_and_params(eqn)[1]
    closed = as_closed(params["jaxpr"])
    requests, results = walk.plan(closed, args)
    keep, needed = computed(eqn), walk.program.slice.variables
    if any(
        isinstance(results[i], Expression) and eqn.outvars[i] in needed for i in keep
    ):
        # `checkpoint(tanh)(table)[ids]`: the function leaves the checkpoint as an
        # expression, and nothing of the table's size is held or computed again.
        return walk.evaluate(closed, args)
    deltas = walk.request(requests)
    walk.program.reread.update(x.leaf.index for x in requests)
    if walk.is_plan:
        return [None] * len(eqn.outvars)

    def function(arrays: Sequence[Any], deltas: Sequence[Any]) -> Any:
        return walk.evaluate_inside(closed, merge(args, arrays), deltas, keep)

    flags = params["prevent_cse"]
    prevent_cse = any(flags) if isinstance(flags, tuple) else flags
    if prevent_cse and params is not eqn.params:
        # Of the arguments. With `jax_remat3`, `True` would put tables, which are closed
        # over, behind a barrier, too. (tests/gradients/test_value_and_grad.py)
        prevent_cse = True, True
    checkpointed = jax.checkpoint(
        function,
        prevent_cse=prevent_cse,
        policy=params["policy"],
    )
    arrays, rows = checkpointed(arrays_among(args), deltas)
    walk.entries += rows
    return _results(eqn, keep, arrays)


def scan(walk: Walk, eqn: JaxprEqn, *args: Any) -> Results:
    """A loop; a table may be carried if no step changes it.

    The body has operands `consts, carry, xs`, in this order, and results `carry, ys`.
    """
    params, body = eqn.params, eqn.params["jaxpr"]
    length = params["length"]
    first, carried = scan_sizes(eqn)
    last = first + carried
    # A table of which each step gets a row is an array.
    args = *args[:last], *(walk.as_array(eqn, x) for x in args[last:])
    requests, results = walk.plan(body, args)
    # A carried table stays one if each step returns it in its place: the new loop
    # closes over it. A step that changes it, as `lambda t, i: (t / 2, t[i])` does,
    # looks up in another table each time, and so does one that swaps two. These enter
    # as arrays, with dense gradients, and the loop is planned again.
    changed = [
        isinstance(x, Expression) and x is not end
        for x, end in zip(args[first:last], results, strict=False)
    ]
    if any(changed):
        carry = [
            walk.as_array(eqn, x) if flag else x
            for x, flag in zip(args[first:last], changed, strict=True)
        ]
        return scan(walk, eqn, *args[:first], *carry, *args[last:])
    is_carried = [isinstance(x, Expression) for x in args[first:last]]
    stacked = [i for i in computed(eqn) if i >= carried]
    plain = [*(i for i in range(carried) if not is_carried[i]), *stacked]
    # What leaves the loop, or enters the next step, is an array.
    leaving = [x if i in plain else None for i, x in enumerate(results)]
    walk.results_as_arrays(eqn, leaving, body.jaxpr.invars[first:last])
    # What is promised holds of the ids of one step.
    every = [x._replace(count=length * x.count, promises=Promises()) for x in requests]
    deltas = walk.request(every)
    if walk.is_plan:
        return [
            *merge(args[first:last], [None] * carried),
            *[None] * (len(results) - carried),
        ]
    consts = arrays_among(args[:first])
    carry = arrays_among(args[first:last])
    per_step = [
        delta.reshape(length, x.count, *delta.shape[1:])
        for delta, x in zip(deltas, requests, strict=True)
    ]

    # Tables are among `args`, and the arrays of a step come between them.
    def step(carry: Any, inputs: Any) -> Any:
        xs, step_deltas = inputs
        values = merge(args, [*consts, *carry, *xs])
        results, rows = walk.evaluate_inside(
            body, values, step_deltas, keep=plain, beside=[*consts, *carry, *xs]
        )
        return results[: len(carry)], (results[len(carry) :], rows)

    carry, (ys, rows) = lax.scan(
        step,
        carry,
        (list(args[last:]), per_step),
        length=length if isinstance(length, int) else None,  # a symbol, as arrays have
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    # `[length, n, ...]`, as the steps stack them, to `[length * n, ...]`.
    walk.entries += jax.tree.map(lambda x: lax.collapse(x, 0, 2), rows)
    ys = _results(eqn, stacked, ys)[carried:]
    return [*merge(args[first:last], carry), *ys]


def while_loop(walk: Walk, eqn: JaxprEqn, *args: Any) -> Results:
    """A loop through which no derivative passes: its lookups need no deltas.

    JAX has no reverse derivative of such a loop: where one is needed, it refuses.
    """
    if any(isinstance(x, Expression) and x.leaves for x in args):
        return NotImplemented
    params = eqn.params
    first, inner = params["cond_nconsts"], params["body_nconsts"]
    test = params["cond_jaxpr"].out_avals[0]
    # In `shard_map` what the flags of a `vmap` choose varies as they do. JAX makes such
    # a loop of a carry that varies less, and refuses to trace it.
    is_batched, varying = bool(test.shape), {*axes_of_type(test)}
    carried = (x.aval for x in eqn.invars[first + inner :])
    if is_batched and any(varying - {*axes_of_type(x)} for x in carried):
        return NotImplemented
    if walk.is_plan:
        return [None] * len(eqn.outvars)
    of_test, of_body = args[:first], args[first : first + inner]
    # A carried table that no step changes is a constant, unless the test reads it.
    carry = [walk.dense(x) for x in args[first + inner :]]

    def running(carry: Sequence[Any]) -> jax.Array:
        found, _ = walk.evaluate_inside(params["cond_jaxpr"], [*of_test, *carry], ())
        result: jax.Array = found[0]
        return result

    def step(carry: Sequence[Any]) -> Any:
        new, _ = walk.evaluate_inside(params["body_jaxpr"], [*of_body, *carry], ())
        if not is_batched:
            return new
        # Under `vmap` each loop stops by itself.
        return [*map(functools.partial(_chosen, running(carry)), new, carry)]

    return lax.while_loop(lambda carry: jnp.any(running(carry)), step, carry)


def _chosen(flags: jax.Array, new: Any, old: Any) -> jax.Array:
    """By a flag for each element of the leading axes."""
    shape, layout = jnp.shape(new), jax.typeof(new).sharding
    mask = lax.broadcast_in_dim(flags, shape, range(flags.ndim))
    if layout.mesh.explicit_axes:
        mask = jax.reshard(mask, layout)
    return jnp.where(mask, new, old)


def _results(eqn: JaxprEqn, places: Sequence[int], arrays: Sequence[Any]) -> list[Any]:
    """The results of an equation at these places; the others are its operands."""
    by_place = dict(zip(places, arrays, strict=True))
    return [by_place.get(i) for i in range(len(eqn.outvars))]


def cond(walk: Walk, eqn: JaxprEqn, index: Any, *args: Any) -> Results:
    """Branches share their deltas: only one of them runs.

    With branches that look up 6 and 3 rows of a table, both get one delta of 6 rows;
    the second one takes 3 of them, and returns 3 ids out of bounds for the rest.
    """
    branches = eqn.params["branches"]
    plans, results = zip(*(walk.plan(b, args) for b in branches), strict=True)
    for of_branch in results:
        walk.results_as_arrays(eqn, of_branch)
    keep = computed(eqn)
    keys, shared = _shared(plans)
    deltas = dict(zip(shared, walk.request(list(shared.values())), strict=True))
    if walk.is_plan:
        return [None] * len(eqn.outvars)

    def run(place: int) -> Any:
        # The branch takes the first rows of each delta that it shares with others, and
        # returns ids for all rows of all deltas, as branches return equal shapes. The
        # derivative with respect to rows that it does not take is zero.
        pairs = zip(keys[place], plans[place], strict=True)
        chunks = [deltas[key][: request.count] for key, request in pairs]
        arrays, rows = walk.evaluate_inside(branches[place], args, chunks, keep)
        entries_by_key = dict(zip(keys[place], rows, strict=True))
        return arrays, [_padded(entries_by_key.get(k), x) for k, x in shared.items()]

    runs = [functools.partial(run, place) for place in range(len(branches))]
    arrays, rows = _switch(eqn, index, runs)
    walk.entries += rows
    return _results(eqn, keep, arrays)


def _switch(eqn: JaxprEqn, index: Any, branches: Sequence[Callable[[], Any]]) -> Any:
    """Runs one of these functions in the place of the branches of a `cond`."""
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return lax.switch(index, branches)
    # Those of `lax.platform_dependent`. JAX compiles one of them only; the others may
    # not compile at all, as a kernel for another platform.
    pairs = list(zip(platforms, branches, strict=True))
    named = {name: branch for names, branch in pairs for name in names or ()}
    default = next((branch for names, branch in pairs if names is None), None)
    return lax.platform_dependent(default=default, **named)


def _shared(
    plans: Sequence[Sequence[Request]],
) -> tuple[list[list[Any]], dict[Any, Request]]:
    """For each branch the keys of its requests, and the requests that all share by key.

    The k-th lookups of a leaf in each branch have one key.
    """
    # One branch looks up 6 and 3 rows of a table, the other one 5: their keys are 0 and
    # 1, and 0. Shared are a delta of 6 rows and one of 3.
    keys: list[list[Any]] = []
    shared: dict[Any, Request] = {}
    for requests in plans:
        keys.append([])
        for request in requests:
            # A lookup in the one branch at row 0 and in the other one at row 1 is none
            # at a constant: the rows that are read depend on the branch.
            kind = request._replace(count=0, constant=None, promises=Promises())
            key = kind, sum(other == kind for other, _ in keys[-1])
            keys[-1].append(key)
            count = max(request.count, shared[key].count if key in shared else 0)
            shared[key] = kind._replace(count=count)
    return keys, shared


def _padded(entries: LookupEntries | None, request: Request) -> LookupEntries:
    """The entries of a branch, and ids out of bounds up to those of the request."""
    size, bags = request.num_entries, request.bags
    empty = LookupEntries(
        jnp.zeros((0, request.depth), jnp.int32),
        None if bags is None else jnp.zeros(0, jnp.int32),
        jnp.zeros(0, bags.dtype) if bags is not None and bags.has_weights else None,
    )
    varying = jax.tree.map(
        functools.partial(vary, axes=request.axes),
        empty if entries is None else entries,
    )
    missing = size - len(varying.ids)

    def padded(x: jax.Array) -> jax.Array:
        fill = row_bounds(request.shape, x) if x.ndim > 1 else 0
        padding = jnp.broadcast_to(jnp.asarray(fill, x.dtype), (missing, *x.shape[1:]))
        return jnp.concatenate([x, vary(padding, request.axes)]) if missing else x

    return jax.tree.map(padded, varying)

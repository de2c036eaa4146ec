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
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from .._jax_extras.varying_axes import vary
from .backward_slice import CALLS, as_closed, scan_sizes
from .expressions import Expression
from .rules_elementwise_calls import elementwise_branches
from .walk import BagEntries, Request, Results, Walk, joined_rows


def has_table(x: Any) -> bool:
    return isinstance(x, Expression) and x.has_table


def call(walk: Walk, eqn: JaxprEqn, needed: Any, *args: Any) -> Results:
    return walk.evaluate(as_closed(eqn.params[CALLS[eqn.primitive.name]]), args, needed)


def without_tables(
    walk: Walk, eqn: JaxprEqn, needed: Sequence[bool], results: Sequence[Any]
) -> list[Any]:
    """The results of an equation that may not be expressions, as arrays."""
    for value, flag in zip(results, needed, strict=True):
        if flag:
            walk.use_densely(eqn, value)
    return [walk.dense(x) for x in results]


def remat(walk: Walk, eqn: JaxprEqn, needed: Any, *args: Any) -> Results:
    closed = as_closed(eqn.params["jaxpr"])
    requests, results = walk.plan(closed, args, needed)
    if any(flag and has_table(x) for x, flag in zip(results, needed, strict=True)):
        # A function of a table: its rows are computed where they are looked up.
        return walk.evaluate(closed, args, needed)
    deltas = walk.request(requests)
    if walk.is_plan:
        return [None] * len(eqn.outvars)
    is_array = [not isinstance(x, Expression) for x in args]

    def function(arrays: Sequence[Any], deltas: Sequence[Any]) -> Any:
        rest = iter(arrays)
        values = [
            next(rest) if flag else x for x, flag in zip(args, is_array, strict=True)
        ]
        inner = walk.inside(deltas)
        results = inner.evaluate(closed, values, needed)
        return [inner.dense(x) for x in results], inner.rows

    flags = eqn.params["prevent_cse"]
    checkpointed = jax.checkpoint(
        function,
        prevent_cse=any(flags) if isinstance(flags, tuple) else flags,
        policy=eqn.params["policy"],
    )
    arrays = [x for x, flag in zip(args, is_array, strict=True) if flag]
    results, rows = checkpointed(arrays, deltas)
    walk.rows += rows
    return results


def scan(walk: Walk, eqn: JaxprEqn, needed: Any, *args: Any) -> Results:
    """A loop; a table may be carried if no step changes it.

    A loop that looks up more rows than the table has gets deltas of the table's shape:
    stacked rows could need any multiple of the memory that `jax.grad` needs.
    """
    params, body = eqn.params, eqn.params["jaxpr"]
    first, carried = scan_sizes(eqn)
    length, last = params["length"], first + carried
    flags = walk.program.slices.of_body(eqn, needed)
    inputs = walk.program.slices.operands(eqn, needed)

    # A table that steps change, or of which each step gets a row, is an array.
    def as_array(place: int) -> Any:
        if inputs[place]:
            walk.use_densely(eqn, args[place])
        return walk.dense(args[place])

    args = tuple(
        as_array(i) if i >= last or not has_table(x) else x for i, x in enumerate(args)
    )
    tables = [x if has_table(x) else None for x in args[first:last]]
    plain = [i for i, x in enumerate(tables) if x is None]

    def operands(carry: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
        rest = iter(carry)
        carry = [next(rest) if x is None else x for x in tables]
        return [*args[:first], *carry, *xs]

    unknown = operands([None] * len(plain), [None] * len(args[last:]))
    requests, results = walk.plan(body, unknown, flags)
    kept = [x is None or x is end for x, end in zip(tables, results, strict=False)]
    if not all(kept):
        carry = [
            x if ok else as_array(first + i)
            for i, (x, ok) in enumerate(zip(args[first:last], kept, strict=True))
        ]
        return scan(walk, eqn, needed, *args[:first], *carry, *args[last:])
    whole = _too_many(requests, length)
    if whole:
        requests, results = walk.plan(body, unknown, flags, whole=whole)
    ends = [results[i] for i in plain] + results[carried:]
    ends_needed = [flags[i] for i in plain] + flags[carried:]
    without_tables(walk, eqn, ends_needed, ends)
    outer, places = _requests_of_all_steps(requests, length)
    deltas = walk.request(outer)
    if walk.is_plan:
        return [*tables, *[None] * (len(results) - carried)]
    per_step = {
        i: deltas[i].reshape(length, request.count, *deltas[i].shape[1:])
        for i, request in zip(places, requests, strict=True)
        if not request.is_whole
    }

    def body_with_deltas(carry: Any, xs: Any) -> Any:
        xs, own = xs
        chosen = [own[i] if i in own else deltas[i] for i in places]
        inner = walk.inside(chosen, whole=whole)
        results = inner.evaluate(body, operands(carry, xs), flags)
        ys = [inner.dense(x) for x in results[carried:]]
        return [inner.dense(results[i]) for i in plain], (ys, inner.rows)

    carry, (ys, rows) = lax.scan(
        body_with_deltas,
        [args[first + i] for i in plain],
        (list(args[last:]), per_step),
        length=length,
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    for i, request in enumerate(outer):
        own = [x for x, place in zip(rows, places, strict=True) if place == i]
        if request.bags is not None:
            walk.rows.append(jax.tree.map(_all_steps, own[0]))
            continue
        flat = [_all_steps(x) for x in own]
        walk.rows.append(joined_rows(flat, request.depth, request.shape))
    last_carry = dict(zip(plain, carry, strict=True))
    return [last_carry.get(i, x) for i, x in enumerate(tables)] + list(ys)


def _all_steps(x: jax.Array) -> jax.Array:
    """`[length, n, ...]` as `[length * n, ...]`."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _too_many(requests: Sequence[Request], length: int) -> frozenset[int]:
    """The leaves of which a loop looks up more rows than their tables have."""
    counts: Counter[int] = Counter()
    limits = {}
    for request in requests:
        counts[request.leaf.index] += request.num_entries * length
        limits[request.leaf.index] = math.prod(request.shape[: request.depth])
    return frozenset(i for i, count in counts.items() if count > limits[i])


def _requests_of_all_steps(
    requests: Sequence[Request], length: int
) -> tuple[list[Request], list[int]]:
    """What a loop requests, and for each request of its body the place there.

    A delta of the table's shape serves all steps, and all lookups of a leaf.
    """
    outer: dict[Any, Request] = {}
    places = []
    for i, request in enumerate(requests):
        key = _pool(request) if request.is_whole else i
        before = outer[key].count if key in outer else 0
        outer[key] = request._replace(count=before + length * request.count)
        places.append(list(outer).index(key))
    return list(outer.values()), places


def cond(walk: Walk, eqn: JaxprEqn, needed: Any, index: Any, *args: Any) -> Results:
    """Branches share their deltas: only one of them runs.

    With branches that look up 6 and 3 rows of a table, both get one delta of 6 rows;
    the second one takes 3 of them, and returns 3 ids out of bounds for the rest.
    """
    branches = eqn.params["branches"]
    plans, columns = [], []
    for branch in branches:
        requests, results = walk.plan(branch, args, needed)
        columns.append(results)
        plans.append(requests)
    if any(has_table(x) for results in columns for x in results):
        results = elementwise_branches(walk, eqn, index, *args)
        if results is not NotImplemented:
            return results
    for results in columns:
        without_tables(walk, eqn, needed, results)
    pools = _pools(plans)
    deltas = dict(zip(pools, walk.request(list(pools.values())), strict=True))
    if walk.is_plan:
        return [None] * len(eqn.outvars)

    def run(number: int) -> Any:
        used: Counter[Any] = Counter()
        chunks = []
        for request in plans[number]:
            key, delta = _pool(request), deltas[_pool(request)]
            if not request.is_whole:
                delta = delta[used[key] : used[key] + request.count]
            used[key] += request.count
            chunks.append(delta)
        inner = walk.inside(chunks)
        results = inner.evaluate(branches[number], args, needed)
        rows: dict[Any, list[jax.Array]] = {key: [] for key in pools}
        for request, found in zip(plans[number], inner.rows, strict=True):
            rows[_pool(request)].append(
                jax.tree.map(functools.partial(vary, axes=request.axes), found)
            )
        padded = [_padded(rows[key], request) for key, request in pools.items()]
        return [inner.dense(x) for x in results], padded

    indices = range(len(branches))
    results, rows = lax.switch(index, [functools.partial(run, i) for i in indices])
    walk.rows += rows
    return list(results)


def _pool(request: Request) -> Any:
    return request.leaf, request.axes, request.is_whole, request.bags


def _pools(plans: Sequence[Sequence[Request]]) -> dict[Any, Request]:
    """One request for all branches, with the count of the one that needs most rows."""
    pools: dict[Any, Request] = {}
    counts: list[Counter[Any]] = []
    for requests in plans:
        counts.append(Counter())
        for request in requests:
            counts[-1][_pool(request)] += request.count
            pools.setdefault(_pool(request), request)
    return {
        key: request._replace(count=max(x[key] for x in counts), constant=None)
        for key, request in pools.items()
    }


def _padded(rows: Sequence[Any], request: Request) -> Any:
    """All ids of a pool, and ids out of bounds up to its count."""
    if request.bags is not None:
        of_entries = request._replace(count=request.num_entries, bags=None)
        ids = _padded([x.ids for x in rows], of_entries)
        missing = len(ids) - sum(len(x.ids) for x in rows)

        def filled(found: list[jax.Array], dtype: Any) -> jax.Array:
            zeros = vary(jnp.zeros(missing, dtype), request.axes)
            return jnp.concatenate([*found, zeros])

        segments, weights = filled([x.segments for x in rows], jnp.int32), None
        if request.bags.has_weights:
            weights = filled([x.weights for x in rows], request.bags.dtype)
        return BagEntries(ids, segments, weights)
    missing = request.count - sum(len(x) for x in rows)
    padding = np.tile(np.asarray(request.shape[: request.depth]), (missing, 1))
    found = [x.astype(jnp.int32) if x.dtype.itemsize < 8 else x for x in rows]
    if missing or not found:
        dtype = found[0].dtype if found else jnp.int32
        found = [*found, vary(jnp.asarray(padding.astype(dtype)), request.axes)]
    return joined_rows(found, request.depth, request.shape)

"""Calls of the kernel with every array in turn of a wrong type, shape, size or content.

Past all of Python's checks, as only a fault in them would; all calls and arrays are
those of `CALLS`. Run as a program, with a library compiled with sanitizers,
it shows that no call leaves its buffers: `kernel_cases.py LIBRARY EVERY`, where 4 is
for every fourth call.
"""

import functools
import itertools
import re
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from optax_sparse_adam.native import _library

# A line is `handler formula: operands -> results`; a buffer is `name:type[sizes]`.
# Types: f float32; i int32; t and u float32 or bfloat16, each the same in the call.
# Sizes are multiplied: N rows of W numbers in the table, E entries, V rows of values, K
# ids, B bags, P parameters of a state, C coefficients of a polynomial, or a digit. What
# has a `?` may be empty, what has a `!` is there with weight decay. A result `name=` is
# an operand, in place. What has formulas is called as it is, and to add the update to
# the table: that is an operand then, behind the state, and a result in place of
# `indices` and `sums`.
CALLS = """
read rows: table:t[NW] ids:i[K] -> rows:t[KW]
read exact_adam: table:f[NW] mu:f[NW] nu:f[NW] last:i[N] high:f[N]! low:f[N]!
    stale:f[P6] polynomials:f[P2C] steps:i[P2] place:i[] ids:i[K] -> rows:f[KW]
read bags: table:t[NW] ids:i[E] segments:i[E]? weights:f[E]? -> sums:f[BW]
update order: indices:i[E1] -> entries:i[E2]
update sum: GRADIENT scalars:f[0] -> indices:i[E1] sums:f[EW] count:i[]
update adam: GRADIENT mu:t[NW] nu:u[NW] scalars:f[5] -> indices:i[E1] sums:f[EW] mu= nu=
update rowwise_adagrad: GRADIENT nu:f[N] table:f[NW]! scalars:f[3]
    -> indices:i[E1] sums:f[EW] nu=
update rowwise_adam: GRADIENT mu:t[NW] nu:f[N] table:f[NW]! scalars:f[9]
    -> indices:i[E1] sums:f[EW] mu= nu=
update exact_adam: GRADIENT mu:f[NW] nu:f[NW] last:i[N] high:f[N]! low:f[N]!
    table:f[NW]! stale:f[P6] polynomials:f[P3C] steps:i[P2] place:i[] scalars:f[P9]
    -> indices:i[E1] sums:f[EW] mu= nu= last= high=! low=!
update add: table:t[NW] indices:i[E1] rows:u[EW] -> table=
update put: table:t[NW] indices:i[E1] rows:t[EW] -> table=
""".replace("GRADIENT", "entries:i[E2] values:f[VW] segments:i[E]? weights:f[E]?")
ROWS, ENTRIES, WIDTH, BAGS = 9, 6, 3, 2
SIZES = {"N": ROWS, "W": WIDTH, "E": ENTRIES, "K": ENTRIES, "B": BAGS, "P": 2, "C": 3}
TYPES = {"f": "float32", "i": "int32", "t": "float32", "u": "float32"}
ATTRIBUTES = {"num_rows": np.int64(ROWS), "width": np.int64(WIDTH)}
ATTRIBUTES |= {"uses_roots": np.bool_(False), "decays": np.bool_(False)}
OF_HANDLERS = {
    "read": {"clamps": np.bool_(False), "fill": np.int64(0)},
    "update": {"adds": np.bool_(False)},
}


class Buffer(NamedTuple):
    name: str
    type: str  # empty for a result in the memory of the operand of this name
    sizes: str
    mark: str


def specifications():
    """The operands and the results of each call."""
    lines = re.sub(r"\n +", " ", CALLS).strip().split("\n")
    pattern = r"(\w+)(?:=|:(\w)\[(\w*)\])([?!]?)"
    for line in lines:
        call, operands, results = re.match(r"(\w+ \w+): (.*) -> (.*)", line).groups()
        both = (re.findall(pattern, words) for words in (operands, results))
        yield call, *([Buffer(*x) for x in found] for found in both)


def call(name, operands, results, owners, attributes, contents=()):
    """Calls the kernel with arrays of these shapes and types, or these contents."""
    arrays = {key: _array(key, *value) for key, value in operands.items()}
    function = _function(name, operands, results, owners, attributes)
    return jax.block_until_ready(function(*(arrays | dict(contents)).values()))


def _function(name, operands, results, owners, attributes, **flags):
    handler, formula = name.split()
    attributes = ATTRIBUTES | OF_HANDLERS[handler] | attributes
    function = jax.ffi.ffi_call(
        f"optax_sparse_adam.{handler}",
        [jax.ShapeDtypeStruct(*x) for x in results.values()],
        input_output_aliases={
            [*operands].index(owner): [*results].index(key)
            for key, owner in owners.items()
        },
        **flags,
    )
    return functools.partial(function, formula=formula, **attributes)


def _array(key, shape, dtype):
    if key == "entries" and shape[1:] == (2,):  # by row, as `order` makes them
        ids = _array("ids", shape[:1], "int64")
        ids = np.where((ids < 0) | (ids >= ROWS), ROWS, ids)
        slots = np.argsort(ids, kind="stable")
        return np.stack([ids[slots], slots], axis=1).astype(dtype)
    if key not in ("indices", "ids", "segments"):
        return np.ones(shape, dtype)
    ids = np.arange(int(np.prod(shape))) % 7 * 3 - 4  # duplicates, some out of bounds
    ids[-1:] = np.iinfo(np.int32).min
    return ids.reshape(shape).astype(dtype)


def right_calls():
    """`(name, operands, results, owners of the results' memory, attributes)`."""
    for name, operands, results in specifications():
        for low in ("", "t", "u"):
            for is_full in (False, True):  # with bags, weights, weight decay
                of_bags = is_full and any(x.name == "segments" for x in operands)
                sizes = SIZES | {"V": BAGS if of_bags else ENTRIES}

                def struct(x, low=low, is_full=is_full, sizes=sizes):
                    shape = [sizes.get(size, size) for size in x.sizes]
                    shape = [0] if x.mark == "?" and not is_full else map(int, shape)
                    is_low = low != "" and x.type == low
                    return (*shape,), "bfloat16" if is_low else TYPES[x.type]

                both = operands, results
                given, news = ([x for x in y if is_full or x.mark != "!"] for y in both)
                before = {x.name: struct(x) for x in given}
                owners = {x.name: x.name for x in news if not x.type}
                if "values" in before and not of_bags:
                    owners["sums"] = "values"
                after = {
                    x.name: before[owners[x.name]] if x.name in owners else struct(x)
                    for x in news
                }
                if low not in ["", *(x.type for x in operands)]:
                    continue
                own = {"decays": np.bool_(any(x.mark == "!" for x in given))}
                yield name, before, after, owners, own
                if before.get("scalars", [(0,)])[0] != (0,):
                    yield name, *_adding(before, after, owners), own | ADDS


ADDS = {"adds": np.bool_(True)}


def _adding(operands, results, owners):
    """The call that adds the same update to the table."""
    table = {"table": ((ROWS, WIDTH), "float32")}
    items = [*operands.items()]
    at = [*operands].index("stale" if "stale" in operands else "scalars")
    operands = dict(items[:at]) | table | dict(items[at:])
    results = {x: y for x, y in results.items() if x not in ("indices", "sums")} | table
    owners = {x: y for x, y in owners.items() if x != "sums"} | {"table": "table"}
    return operands, results, owners


def wrong(shape, dtype):
    """Another type; no rows, fewer and more; narrower and wider; a scalar."""
    yield shape, "int64" if dtype == "int32" else "float64"
    if shape in ((), (0,)):
        yield (ENTRIES - 1,), dtype
        return
    for rows in (0, shape[0] - 1, 1000 * shape[0]):
        yield (rows, *shape[1:]), dtype
    if len(shape) > 1:
        yield (*shape[:-1], shape[-1] - 1), dtype
        yield (*shape[:-1], 1000 * shape[-1]), dtype
    yield (), dtype


def _is_right(name, operands, key, other):
    """Whether a call takes this operand, or result, as well."""
    shape, dtype = other
    if dtype != operands.get(key, ("", "float32"))[1]:
        return False
    is_regular = operands.get("segments", [None])[0] == (0,)
    size = int(np.prod(shape))
    # Other bags of the same entries.
    bags = size // WIDTH if key == "sums" and size % WIDTH == 0 else 0
    parts = 4 if name.startswith("read") else 6  # polynomials
    return (
        (key == "polynomials" and size in range(parts, 130 * parts, parts))
        or (name == "read bags" and bags > 0 and not (is_regular and ENTRIES % bags))
        or (key == "weights" and shape == (0,))
        or (key == "values" and not is_regular and size % WIDTH == 0)
        or (name == "read bags" and key == "segments" and shape == (0,))
        or (name == "read bags" and key == "ids" and is_regular and size == 6000)
    )


def wrong_calls():
    """Every wrong call: the arguments of `call`."""
    known = [(name, operands) for name, operands, _ in specifications()]
    decaying = {name for name, has in known if any(x.mark == "!" for x in has)}
    for name, operands, results, owners, own in right_calls():
        for key, value in operands.items():
            for other in wrong(*value):
                news = {
                    x: other if owners.get(x) == key else y for x, y in results.items()
                }
                sizes = [np.prod(shape) for shape, _ in news.values()]
                # XLA makes no call for results without numbers.
                if any(sizes) and not _is_right(name, operands, key, other):
                    yield name, operands | {key: other}, news, owners, own
        for key, value in results.items():
            rest = {x: y for x, y in owners.items() if x != key}
            if key in owners and key != "sums":
                yield name, operands, results, rest, own  # not in place
            for other in wrong(*value):
                is_call = len(results) > 1 or np.prod(other[0]) > 0
                if is_call and not _is_right(name, operands, key, other):
                    yield name, operands, results | {key: other}, rest, own
        for key in operands:
            if key not in owners.values():
                fewer = {x: y for x, y in operands.items() if x != key}
                yield name, fewer, results, owners, own
        # What these know of the table is how many rows it has.
        knows = name not in ("update order", "update sum")
        changes = [{"width": -1}, {"num_rows": -1}]
        changes += [{"num_rows": ROWS + 1 if knows else 2**31}]
        changes += [] if name == "update order" else [{"width": WIDTH + 1}]
        if name == "update sum":
            changes += [{"num_rows": 1}]  # fewer than its entries are of
        for change in changes:
            attributes = {key: np.int64(size) for key, size in change.items()}
            yield name, operands, results, owners, own | attributes
        if name in decaying:
            other = own | {"decays": ~own["decays"]}
            # A table that is added to may be read as well.
            if "exact" in name or "adds" not in own:
                yield name, operands, results, owners, other
        if "adds" in own:
            yield name, operands, results, owners, own | {"adds": np.bool_(False)}
    yield "update other", {}, {"count": ((), "int32")}, {}, {}


def wrong_entries(entries):
    """Entries that are not by row, or not of each slot once, by what is wrong."""
    entries = np.asarray(entries)

    def with_(place, column, value):
        new = entries.copy()
        new[place, column] = value
        return new

    least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    padding = np.flatnonzero(entries[:, 0] == ROWS)[0]
    yield "reversed", entries[::-1].copy()
    yield "padding first", np.roll(entries, 1, axis=0)
    yield "padding between", entries[np.r_[0, padding, 1 : len(entries)]][:-1]
    yield "a later row first", with_(0, 0, ROWS - 1)
    yield "an equal row in two places", with_(padding, 0, entries[0, 0])
    for row in (ROWS + 1, -1, least, most):
        yield f"the row {row}", with_(-1, 0, row)
        yield f"the row {row} first", with_(0, 0, row)
    for slot in (len(entries), -1, least, most):
        yield f"the slot {slot}", with_(0, 1, slot)
        yield f"the slot {slot} of padding", with_(-1, 1, slot)
    yield "a slot twice", with_(0, 1, entries[-1, 1])
    yield "an entry twice", np.concatenate([entries[:1], entries[:-1]])
    yield "one entry", np.zeros_like(entries)
    yield "one row before all", np.concatenate([[[ROWS, 0]], entries[1:]])


def wrong_contents():
    """Every call whose entries are wrong, in few entries and in those of many parts."""
    for name, operands, results, owners, own in right_calls():
        if "entries" not in operands:
            continue
        for times in (1, 400):

            def longer(items, times=times):
                return {
                    key: (
                        ((times * shape[0], *shape[1:]), dtype)
                        if shape[:1] == (ENTRIES,)
                        else (shape, dtype)
                    )
                    for key, (shape, dtype) in items.items()
                }

            given = longer(operands)
            for what, entries in wrong_entries(_array("entries", *given["entries"])):
                contents = {"entries": entries.astype(np.int32)}
                yield what, (name, given, longer(results), owners, own, contents)


def odd_contents():
    """Every call with integers that mean nothing: taken or refused, in its buffers."""
    least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    for name, operands, results, owners, own in right_calls():
        for key, (shape, dtype) in operands.items():
            if dtype != "int32" or key == "entries":
                continue
            size = int(np.prod(shape))
            for values in (
                *(
                    [x]
                    for x in (least, least + 1, -1, 0, ROWS, ROWS + 1, most - 1, most)
                ),
                *([least, most], [most, least], [ROWS, -1, 3], range(size, 0, -1)),
            ):
                array = np.resize(np.array([*values], np.int32), shape)
                yield name, operands, results, owners, own, {key: array}


def _refusal(make, *case):
    """What the kernel says of a wrong call."""
    try:
        make(*case)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        if not str(error).startswith("INVALID_ARGUMENT: The kernel "):
            raise
        return str(error)
    raise AssertionError(f"The kernel took {case}")


def _refusals_of_one_program(cases):
    """Each run makes one of the calls; a program for each takes four times as long."""
    arrays, branches = {}, []
    # The last one is right. JAX waits for it at the end, and raises what it raises.
    for case in (*cases, next(right_calls())):
        keys = [f"{key} {value}" for key, value in case[1].items()]
        made = [_array(key, *value) for key, value in case[1].items()]
        arrays |= dict(zip(keys, made, strict=True))
        function = _function(*case, has_side_effect=True)  # nobody reads its results

        def branch(arrays, function=function, keys=keys):
            function(*(arrays[key] for key in keys))
            return 0

        branches.append(branch)
    arrays = jax.device_put(arrays)
    program = jax.jit(lambda i, arrays: jax.lax.switch(i, branches, arrays))

    def make(i, *_):
        jax.block_until_ready(program(i, arrays))

    found = [_refusal(make, i, *case) for i, case in enumerate(cases)]
    make(len(cases))
    return found


def refusals(every):
    """Makes so few of the wrong calls, and returns the messages of the errors."""
    found, cases = [], itertools.islice(wrong_calls(), 0, None, every)
    with jax.enable_x64(True):
        while some := [*itertools.islice(cases, 32)]:
            found += _refusals_of_one_program(some)
    contents = itertools.islice(wrong_contents(), 0, None, every)
    return found + [_refusal(call, *case) for _, case in contents]


if __name__ == "__main__":
    _library.register(Path(sys.argv[1]))
    for case in right_calls():
        call(*case)
    for case in odd_contents():
        try:
            call(*case)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            if "another place" not in str(error):
                raise
    print(f"{len(refusals(int(sys.argv[2])))} wrong calls refused")

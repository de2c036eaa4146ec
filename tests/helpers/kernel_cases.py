"""Calls of the kernel with every array in turn of a wrong type, shape or size.

Past all of Python's checks, as only a fault in them would; all calls and arrays are
those of `native/buffers.h`. Run as a program, with a library compiled with sanitizers,
it shows that no call leaves its buffers: `kernel_cases.py LIBRARY`.
"""

import sys
from pathlib import Path

import jax
import numpy as np

from optax_sparse_adam.native import _calls, _library

ROWS, ENTRIES, WIDTH, BAGS = 9, 6, 3, 2
ATTRIBUTES = {
    "num_rows": np.int64(ROWS),
    "width": np.int64(WIDTH),
    "degree": np.int64(3),
    "uses_roots": np.bool_(False),
}
READING = {"clamps": np.bool_(False), "fill": np.int64(0)}
SIZES = {"N": ROWS, "W": WIDTH, "E": ENTRIES, "K": ENTRIES, "B": BAGS, "C": 3}
TYPES = {"f": "float32", "i": "int32", "t": "float32", "u": "float32"}


def call(name, operands, results, owners, attributes):
    """Calls the kernel with arrays of these shapes and types."""
    handler, formula = name.split()
    attributes = ATTRIBUTES | (READING if handler == "read" else {}) | attributes
    function = jax.ffi.ffi_call(
        f"optax_sparse_adam.{handler}",
        [jax.ShapeDtypeStruct(*x) for x in results.values()],
        input_output_aliases={
            [*operands].index(owner): [*results].index(key)
            for key, owner in owners.items()
        },
    )
    args = [_array(key, *value) for key, value in operands.items()]
    return jax.block_until_ready(function(*args, formula=formula, **attributes))


def _array(key, shape, dtype):
    if key not in ("indices", "ids", "segments"):
        return np.ones(shape, dtype)
    ids = np.arange(int(np.prod(shape))) % 7 * 3 - 4  # duplicates, some out of bounds
    ids[-1:] = np.iinfo(np.int32).min
    return ids.reshape(shape).astype(dtype)


def right_calls():
    """`(name, operands, results, owners of the results' memory)`."""
    for name, (operands, results) in _calls._specifications().items():
        for low in ("", "t", "u"):
            for is_full in (False, True):  # whether arrays that may be empty are not
                of_bags = is_full and any(x.name == "segments" for x in operands)
                sizes = SIZES | {"V": BAGS if of_bags else ENTRIES}

                def struct(x, low=low, is_full=is_full, sizes=sizes):
                    shape = [sizes.get(size) or int(size) for size in x.sizes]
                    shape = shape if is_full or not x.is_optional else [0]
                    is_low = low != "" and x.type == low
                    return (*shape,), "bfloat16" if is_low else TYPES[x.type]

                before = {x.name: struct(x) for x in operands}
                owners = {x.name: x.name for x in results if not x.type}
                if name.startswith("update") and "data" in before and not of_bags:
                    owners["sums"] = "data"
                after = {
                    x.name: before[owners[x.name]] if x.name in owners else struct(x)
                    for x in results
                }
                if low in ["", *(x.type for x in operands)]:
                    yield name, before, after, owners


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
    return (
        (name == "read bags" and bags > 0 and not (is_regular and ENTRIES % bags))
        or (key == "weights" and shape == (0,))
        or (key == "data" and not is_regular and size % WIDTH == 0)
        or (name == "read bags" and key == "segments" and shape == (0,))
        or (name == "read bags" and key == "ids" and is_regular and size == 6000)
    )


def wrong_calls():
    """Every wrong call: the arguments of `call`."""
    for name, operands, results, owners in right_calls():
        for key, value in operands.items():
            for other in wrong(*value):
                news = {
                    x: other if owners.get(x) == key else y for x, y in results.items()
                }
                sizes = [np.prod(shape) for shape, _ in news.values()]
                # XLA makes no call for results without numbers.
                if any(sizes) and not _is_right(name, operands, key, other):
                    yield name, operands | {key: other}, news, owners, {}
        for key, value in results.items():
            rest = {x: y for x, y in owners.items() if x != key}
            if key in owners and np.prod(value[0]) > 0:
                yield name, operands, results, rest, {}  # not in place
            for other in wrong(*value):
                is_call = len(results) > 1 or np.prod(other[0]) > 0
                if is_call and not _is_right(name, operands, key, other):
                    yield name, operands, results | {key: other}, rest, {}
        for key in operands:
            if key not in owners.values():
                fewer = {x: y for x, y in operands.items() if x != key}
                yield name, fewer, results, owners, {}
        changes = [{"width": WIDTH + 1}, {"width": -1}, {"num_rows": -1}]
        # All that the sums know of the table is how many rows it has.
        changes += [{"num_rows": 2**31 - 1 if name == "update sum" else ROWS + 1}]
        changes += [{"degree": 2}, {"degree": 0}] * ("polynomials" in operands)
        for change in changes:
            attributes = {key: np.int64(size) for key, size in change.items()}
            yield name, operands, results, owners, attributes
    yield "update other", {}, {"count": ((), "int32")}, {}, {}


def refusals():
    """Makes every wrong call, and returns the messages of the errors."""
    messages = []
    with jax.enable_x64(True):
        for case in wrong_calls():
            try:
                call(*case)
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                if not str(error).startswith("INVALID_ARGUMENT: The kernel "):
                    raise
                messages.append(str(error))
            else:
                raise AssertionError(f"The kernel took {case}")
    return messages


if __name__ == "__main__":
    _library.register(Path(sys.argv[1]))
    for case in right_calls():
        call(*case, {})
    print(f"{len(refusals())} wrong calls refused")

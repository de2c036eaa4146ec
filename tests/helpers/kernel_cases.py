"""Calls of the kernel with every array in turn of a wrong type, shape or size.

Past all of Python's checks, as only a fault in them would. Run as a program, with a
library compiled with sanitizers, it shows that no call leaves its buffers:
`kernel_cases.py LIBRARY`.
"""

import sys
from pathlib import Path

import jax
import numpy as np

ROWS, NSE, WIDTH = 9, 6, 3
BAGS = 2
GRADIENT = {
    "indices": ((NSE, 1), "int32"),
    "data": ((NSE, WIDTH), "float32"),
    "segments": ((0,), "int32"),  # a row of data for each index
    "weights": ((0,), "float32"),
}
FACTORED = {
    "indices": ((NSE, 1), "int32"),
    "bags": ((BAGS, WIDTH), "float32"),
    "segments": ((NSE,), "int32"),
    "weights": ((NSE,), "float32"),
}
READ = {"table": ((ROWS, WIDTH), "float32"), **FACTORED}
del READ["bags"]
MOMENTS = dict.fromkeys(("mu", "nu"), ((ROWS, WIDTH), "float32"))
TABLE = {"table": ((ROWS, WIDTH), "float32"), "indices": ((2, NSE), "int32")}
LOW_MOMENTS = {"mu": ((ROWS, WIDTH), "bfloat16"), "nu": ((ROWS, WIDTH), "float32")}
WRITTEN = {
    "table": ((ROWS, WIDTH), "float32"),
    "indices": ((NSE, 1), "int32"),
    "rows": ((NSE, WIDTH), "float32"),
}
LOW = {"table": ((ROWS, WIDTH), "bfloat16")}
FACTORS = {"factors": ((5,), "float32")}
NODES = 3
RESTING = MOMENTS | {"last": ((ROWS,), "int32")}
STEPS = {"steps": ((2,), "int32")}
DECAYS = dict.fromkeys(("high", "low"), ((ROWS,), "float32"))
EXACT = (
    GRADIENT
    | RESTING
    | {"numbers": ((15 + 3 * NODES,), "float32")}
    | STEPS
    | DECAYS
    | {"param": ((ROWS, WIDTH), "float32")}
)
NOW = (
    {"table": TABLE["table"]}
    | RESTING
    | {"numbers": ((6 + 2 * NODES,), "float32")}
    | STEPS
    | {"indices": TABLE["indices"]}
    | DECAYS
)
# The function, and its arrays.
CALLS = (
    ("adam_rows", GRADIENT | MOMENTS | FACTORS),
    ("adam_rows", GRADIENT | LOW_MOMENTS | FACTORS),
    ("exact_adam_rows", EXACT),
    ("sum_rows", GRADIENT),
    ("take_rows", TABLE),
    ("take_rows", TABLE | LOW),
    ("take_rows_now", NOW),
    ("add_rows", WRITTEN),
    ("add_rows", WRITTEN | LOW),
    ("put_rows", WRITTEN),
)
# Of bags; and the results of the call.
OF_BAGS = (
    ("sum_rows", FACTORED, (((NSE, 1), "int32"), ((NSE, WIDTH), "float32"))),
    ("read_bags", READ, (((BAGS, WIDTH), "float32"),)),
    (
        "read_bags",
        READ | {"table": ((ROWS, WIDTH), "bfloat16"), "segments": ((0,), "int32")},
        (((BAGS, WIDTH), "float32"),),
    ),
)
# The memory of these arrays is that of the results.
IN_PLACE = {
    "adam_rows": ("indices", "data", "mu", "nu"),
    "exact_adam_rows": ("indices", "data", "mu", "nu", "last", "high", "low"),
    "sum_rows": ("indices", "data"),
    "take_rows": (),
    "take_rows_now": (),
    "add_rows": ("table",),
    "put_rows": ("table",),
}


def wrong(shape, dtype):
    """Another type; no rows, fewer and more; narrower and wider; a scalar."""
    yield shape, "int64" if dtype == "int32" else "float64"
    if shape == (0,):
        yield (NSE - 1,), dtype
        return
    for rows in (0, shape[0] - 1, 1000 * shape[0]):
        yield (rows, *shape[1:]), dtype
    if len(shape) > 1:
        yield (*shape[:-1], shape[-1] - 1), dtype
        yield (*shape[:-1], 1000 * shape[-1]), dtype
    yield (), dtype


def call(name, arrays, *, results=None, **sizes):
    """Calls the kernel's function; a result has the shape of its argument."""
    struct = {key: jax.ShapeDtypeStruct(*value) for key, value in arrays.items()}
    args = [_array(key, *value) for key, value in arrays.items()]
    attributes = {"num_rows": np.int64(ROWS), "width": np.int64(WIDTH)}
    if "numbers" in arrays:
        attributes |= {"nodes": np.int64(NODES)}
    if name.startswith("take"):
        number = np.int64 if name == "take_rows" else np.float32
        attributes |= {"clamps": np.bool_(True), "fill": number(0)}
        ids = struct["indices"].shape
        out = results or [jax.ShapeDtypeStruct((*ids, WIDTH), arrays["table"][1])]
        aliases = {}
    else:
        names = [key for key in IN_PLACE.get(name, ()) if key in struct]
        out = [*(results or map(struct.get, names))]
        place = len(out)
        if "indices" in names or name == "sum_rows":
            place = min(place, 5)  # of the count: the results of a decay are last
            out.insert(place, jax.ShapeDtypeStruct((), "int32"))
        aliases = {
            [*struct].index(key): i + (i >= place) for i, key in enumerate(names)
        }
        aliases = {} if results else aliases
    function = jax.ffi.ffi_call(
        f"optax_sparse_adam.{name}", out, input_output_aliases=aliases
    )
    attributes |= {key: np.int64(value) for key, value in sizes.items()}
    return jax.block_until_ready(function(*args, **attributes))


def _array(key, shape, dtype):
    if key not in ("indices", "segments"):
        return np.ones(shape, dtype)
    ids = np.arange(int(np.prod(shape))) % 7 * 3 - 4  # duplicates, some out of bounds
    ids[-1:] = np.iinfo(np.int32).min
    return ids.reshape(shape).astype(dtype)


def cases():
    """Every wrong call: `(name, arrays, keyword arguments of call)`."""
    for name, arrays in CALLS:
        low = next((k for k, x in arrays.items() if x[1] == "bfloat16"), None)
        if low is not None:
            # Sizes are checked as for float32, by the same lines.
            yield name, arrays | {low: (arrays[low][0], "float64")}, {}
            yield name, arrays | {low: (arrays[low][0][:1], "bfloat16")}, {}
            continue
        for key, value in arrays.items():
            is_ids = not IN_PLACE[name] and key == "indices"  # any shape will do
            for other in wrong(*value):
                is_only_result = (*IN_PLACE[name],) == (key,)
                if is_only_result and 0 in other[0]:
                    continue  # XLA makes no call for a result without numbers
                if not is_ids or other[1] != "int32":
                    yield name, arrays | {key: other}, {}
        for sizes in (
            {"num_rows": ROWS + 1},
            {"num_rows": 0},
            {"width": WIDTH + 1},
            {"width": -1},
        ):
            if (name, *sizes) != ("sum_rows", "num_rows") or sizes["num_rows"] <= 0:
                yield name, arrays, sizes
        struct = [jax.ShapeDtypeStruct(*arrays[key]) for key in IN_PLACE[name]]
        if "numbers" in arrays:
            yield name, arrays, {"nodes": 0}
            yield name, arrays, {"nodes": -1}
            yield name, {key: x for key, x in arrays.items() if key != "high"}, {}
        if not struct:
            struct = [jax.ShapeDtypeStruct((2, NSE, WIDTH), arrays["table"][1])]
        else:
            yield name, arrays, {"results": struct}  # not in place
        for i, result in enumerate(struct):
            for shape, dtype in wrong(result.shape, result.dtype.name):
                if len(struct) == 1 and 0 in shape:
                    continue
                others = [*struct]
                others[i] = jax.ShapeDtypeStruct(shape, dtype)
                yield name, arrays, {"results": others}
    for name, arrays, results in OF_BAGS:
        right = [jax.ShapeDtypeStruct(*x) for x in results]
        for key, value in arrays.items():
            for other in wrong(*value):
                # No bags, or no weights, are no mistake; and ids have any shape.
                is_fine = key in ("bags", "weights") and other[0][:1] == (0,)
                is_fine |= key == "bags" and other[0][1:] == (WIDTH,)
                is_fine |= name == "read_bags" and key == "segments" and 0 in other[0]
                if not (is_fine and other[1] == value[1]):
                    yield name, arrays | {key: other}, {"results": right}
        for i, result in enumerate(results):
            for other in wrong(*result):
                if name == "sum_rows" or (0 not in other[0] and len(other[0]) > 1):
                    others = [*right]
                    others[i] = jax.ShapeDtypeStruct(*other)
                    if other[0][1:] != (WIDTH,) or other[1] != "float32" or i:
                        yield name, arrays, {"results": others}
        for sizes in ({"num_rows": 0}, {"width": WIDTH + 1}, {"width": -1}):
            yield name, arrays, {"results": right} | sizes
    most = 2**31 - 1  # ids of padding would not be int32
    yield "sum_rows", GRADIENT, {"num_rows": most}


def refusals():
    """Makes every wrong call, and returns the messages of the errors."""
    messages = []
    with jax.enable_x64(True):
        for name, arrays, kwargs in cases():
            try:
                call(name, arrays, **kwargs)
            except jax.errors.JaxRuntimeError as error:
                messages.append(str(error))
            else:
                raise AssertionError(f"{name} took {arrays} {kwargs}")
    return messages


if __name__ == "__main__":
    from optax_sparse_adam.native import _library

    _library.register(Path(sys.argv[1]))
    for name, arrays in CALLS:
        call(name, arrays)
    for name, arrays, results in OF_BAGS:
        call(name, arrays, results=[jax.ShapeDtypeStruct(*x) for x in results])
    print(f"{len(refusals())} wrong calls refused")

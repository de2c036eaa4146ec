"""Calls of the kernel with every array in turn of a wrong type, shape or size.

Past all of Python's checks, as only a fault in them would. Run as a program, with a
library compiled with sanitizers, it shows that no call leaves its buffers:
`kernel_cases.py LIBRARY`.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

ROWS, NSE, WIDTH = 9, 6, 3
GRADIENT = {"indices": ((NSE, 1), "int32"), "data": ((NSE, WIDTH), "float32")}
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
# The function, and its arrays.
CALLS = (
    ("adam_rows", GRADIENT | MOMENTS | FACTORS),
    ("adam_rows", GRADIENT | LOW_MOMENTS | FACTORS),
    ("sum_rows", GRADIENT),
    ("take_rows", TABLE),
    ("take_rows", TABLE | LOW),
    ("add_rows", WRITTEN),
    ("add_rows", WRITTEN | LOW),
    ("put_rows", WRITTEN),
)
# The memory of these arrays is that of the results.
IN_PLACE = {
    "adam_rows": ("indices", "data", "mu", "nu"),
    "sum_rows": ("indices", "data"),
    "take_rows": (),
    "add_rows": ("table",),
    "put_rows": ("table",),
}


def wrong(shape, dtype):
    """Another type; no rows, fewer and more; narrower and wider; a scalar."""
    yield shape, "int64" if dtype == "int32" else "float64"
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
    if name == "take_rows":
        attributes |= {"clamps": np.bool_(True), "fill": np.int64(0)}
        ids = struct["indices"].shape
        out = results or [jax.ShapeDtypeStruct((*ids, WIDTH), arrays["table"][1])]
        aliases = {}
    else:
        outs = [struct[key] for key in IN_PLACE[name]]
        out = results or outs
        if name in ("adam_rows", "sum_rows"):
            out = [*out, jax.ShapeDtypeStruct((), "int32")]
        aliases = {} if results else {i: i for i in range(len(outs))}
    function = jax.ffi.ffi_call(
        f"optax_sparse_adam.{name}", out, input_output_aliases=aliases
    )
    attributes |= {key: np.int64(value) for key, value in sizes.items()}
    return jax.block_until_ready(function(*args, **attributes))


def _array(key, shape, dtype):
    if key != "indices":
        return jnp.ones(shape, dtype)
    ids = np.arange(int(np.prod(shape))) % 7 * 3 - 4  # duplicates, some out of bounds
    ids[-1:] = np.iinfo(np.int32).min
    return jnp.asarray(ids.reshape(shape), dtype)


def cases():
    """Every wrong call: `(name, arrays, keyword arguments of call)`."""
    for name, arrays in CALLS:
        for key, value in arrays.items():
            is_ids = (name, key) == ("take_rows", "indices")  # any shape will do
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
        if name == "take_rows":
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
    print(f"{len(refusals())} wrong calls refused")

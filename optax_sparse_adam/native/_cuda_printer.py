"""A formula of rows, printed as C++ for one row of a table on a GPU.

The formula is traced, as `jax.jit` does it. What no row enters, such as a learning rate
or a bias correction, JAX computes before, for all rows at once. Of the rest each
equation becomes a statement:

    mu + 0.1 * (g - mu)
    float v0[V]; FOR v0[j] = g[j] - t0[j];        v0 = sub g mu
    float v1[V]; FOR v1[j] = 0x1.99999ap-4f * v0[j];
    float v2[V]; FOR v2[j] = t0[j] + v1[j];

A value with all columns of a row is an array of the columns of a lane, one with a
number for a row is a variable, and a sum over columns is a sum over the lanes of a
warp. Types below float32 are computed with as float32, and rounded after each
operation, as XLA does it. `rows.cu` has the functions that end with an underscore.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.typing import DTypeLike

from .._jax_extras.jaxprs import evaluate_eqn, name_and_params

# As many rows are traced where their number does not matter: no other axis has this
# size, so that each tells what it is.
ROWS = 7919

_TO_EVEN = lax.RoundingMethod.TO_NEAREST_EVEN
_COMPUTED = {"float32": "float", "int32": "int", "uint32": "unsigned", "bool": "bool"}
_LOW = ("bfloat16", "float16", "float8_e5m2", "float8_e4m3fn")
_STORED = _COMPUTED | {name: name for name in _LOW}


class Unsupported(Exception):
    """Why a formula, or an array, is not for the kernel."""


def stored_type(dtype: DTypeLike) -> str:
    """The C++ type of an array in memory."""
    name = jnp.dtype(dtype).name
    if name not in _STORED:
        raise Unsupported(f"arrays of {name}")
    return _STORED[name]


def computed_type(dtype: DTypeLike) -> str:
    return _COMPUTED.get(jnp.dtype(dtype).name, "float")


class Value(NamedTuple):
    """An expression of C++.

    Attributes:
      text: A constant, or the name of a variable.
      is_wide: Whether it has all columns of a row.
    """

    text: str
    is_wide: bool = False

    @property
    def element(self) -> str:
        return f"{self.text}[j]" if self.is_wide else self.text


class Program(NamedTuple):
    """A formula in C++.

    Attributes:
      lines: Its statements.
      results: Of each result its value, and its type.
      shared: What the statements read that is the same for all rows, in the order of
        `s0`, `s1`, ...
    """

    lines: list[str]
    results: list[tuple[Value, Any]]
    shared: list[jax.Array]


def constant(value: Any, dtype: DTypeLike) -> Value:
    kind, number = computed_type(dtype), np.asarray(value).item()
    if kind == "bool":
        return Value("true" if number else "false")
    if kind != "float":
        return Value(f"({kind})0x{number & 0xFFFFFFFF:x}u")
    number = float(np.float32(number))
    if math.isnan(number):
        return Value("NAN_")
    if math.isinf(number):
        return Value("INF_" if number > 0 else "(-INF_)")
    return Value(f"({number.hex()}f)")


# What a primitive is in C++, by the type of its first operand: `{0}`, `{1}`, ... are
# its operands, and `(T)` the type of the result. Of booleans, of all numbers, and more.
_OF_BOOLEANS = {
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
}
_OF_NUMBERS = _OF_BOOLEANS | {
    "add": "add_({0}, {1})",
    "add_any": "add_({0}, {1})",
    "max": "max_({0}, {1})",
    "min": "min_({0}, {1})",
    "div": "div_({0}, {1})",
    "rem": "rem_({0}, {1})",
    "clamp": "min_(max_({1}, {0}), {2})",
    "sign": "sign_({0})",
}
_OF_INTEGERS = _OF_NUMBERS | {
    "sub": "(T)((unsigned){0} - (unsigned){1})",
    "mul": "(T)((unsigned){0} * (unsigned){1})",
    "neg": "(T)(0u - (unsigned){0})",
    "abs": "({0} < 0 ? (T)(0u - (unsigned){0}) : {0})",
    "square": "(T)((unsigned){0} * (unsigned){0})",
    "not": "~{0}",
    "shift_left": "shift_left_({0}, {1})",
    "shift_right_logical": "shift_right_logical_({0}, {1})",
    "shift_right_arithmetic": "(T)shift_right_arithmetic_((int){0}, (int){1})",
}
_OF_FLOATS = _OF_NUMBERS | {
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "neg": "-{0}",
    "abs": "fabsf({0})",
    "square": "{0} * {0}",
    "rsqrt": "1.0f / sqrtf({0})",
    "logistic": "logistic_({0})",
    "is_finite": "is_finite_({0})",
    "round to even": "rintf({0})",
    "round": "roundf({0})",
    "reduce_precision 8 23": "{0}",
    "reduce_precision 8 7": "bfloat16::round({0})",
}
_FUNCTIONS = (
    "acos acosh asin asinh atan atanh cbrt ceil cos cosh erf erfc exp exp2 expm1 floor "
    "log log1p sin sinh sqrt tan tanh"
)
_OF_FLOATS |= {name: f"{name}f({{0}})" for name in _FUNCTIONS.split()}
_OF_FLOATS |= {x: f"{x}f({{0}}, {{1}})" for x in ("atan2", "nextafter", "pow")}
TEMPLATES = {
    "float": _OF_FLOATS,
    "int": _OF_INTEGERS,
    "unsigned": _OF_INTEGERS,
    "bool": _OF_BOOLEANS | {"not": "!{0}"},
}
_SAME = ["copy", "copy_p", "stop_gradient", "name"]
_SHAPES = ["broadcast_in_dim", "reshape", "squeeze", "expand_dims"]
_REDUCTIONS = {
    "reduce_sum": ("sum", "0"),
    "reduce_max": ("max", "-INF_"),
    "reduce_min": ("min", "INF_"),
}
_CALLS = {
    *("jit", "closed_call", "core_call", "remat", "remat2", "checkpoint"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
}


def print_formula(
    function: Callable[..., Sequence[jax.Array]],
    rows: Sequence[tuple[str, tuple[int, ...], Any, bool]],
    columns: int,
    args: Any,
    size: int = ROWS,
) -> Program:
    """The program of `function(rows, *args)`, which treats each row alone.

    Args:
      function: Takes and returns lists of arrays, `[rows]` or `[rows, *row_shape]`.
      rows: Of each its name in C++, its `row_shape` and type, and whether it has all
        columns.
      columns: How many numbers a row has.
      args: What it takes besides, the same for all rows.
      size: How many rows are traced, where the function may depend on it.

    Raises:
      Unsupported: If there is something in it that is not for the kernel.
    """
    if any(size in shape for _, shape, _, _ in rows):
        raise Unsupported("as many rows as columns")
    leaves, tree = jax.tree.flatten(args)

    def flat(arrays: Sequence[jax.Array], *leaves: jax.Array) -> list[jax.Array]:
        return list(function(arrays, *jax.tree.unflatten(tree, leaves)))

    like = [jax.ShapeDtypeStruct((size, *shape), dtype) for _, shape, dtype, _ in rows]
    closed = jax.make_jaxpr(flat)(like, *leaves)
    if closed.effects:
        raise Unsupported("effects, such as a debug.print")
    printer = _Printer(columns, size)
    values: list[Any] = [Value(name, is_wide) for name, _, _, is_wide in rows]
    results = printer.run(closed.jaxpr, closed.consts, [*values, *leaves])
    avals: Any = closed.out_avals
    dtypes = [aval.dtype for aval in avals]
    made = [(printer.read(x), dtype) for x, dtype in zip(results, dtypes, strict=True)]
    return Program(printer.lines, made, printer.shared)


class _Printer:
    """Statements, and the arrays that they read.

    What no row enters is an array of JAX; all else is a `Value`.
    """

    def __init__(self, columns: int, size: int):
        self.columns, self.rows = columns, (size,)
        self.lines: list[str] = []
        self.shared: list[jax.Array] = []
        self._names: dict[int, Value] = {}
        self._count = 0

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def of(atom: Any) -> Any:
            if isinstance(atom, Literal):
                aval: Any = atom.aval
                return _Constant(atom.val, aval.dtype)
            return env[atom]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, list(map(of, eqn.invars)))
            env.update(zip(eqn.outvars, results, strict=True))
        return list(map(of, jaxpr.outvars))

    def read(self, x: Any) -> Value:
        """An operand, in a statement."""
        if isinstance(x, Value):
            return x
        if isinstance(x, _Constant):
            return constant(x.value, x.dtype)
        is_of_host = isinstance(x, np.ndarray | np.generic | int | float)
        if is_of_host and np.size(x) == 1:
            return constant(x, jnp.result_type(x))
        if id(x) not in self._names:
            stored_type(x.dtype)
            is_of_rows = x.shape[:1] == self.rows != (1,)
            if x.size not in (1, self.columns) or is_of_rows:
                raise Unsupported(f"an array of shape {x.shape} that all rows share")
            self._names[id(x)] = Value(f"s{len(self.shared)}", x.size > 1)
            self.shared.append(x)
        return self._names[id(x)]

    def _equation(self, eqn: Any, args: list[Any]) -> list[Any]:
        name, params = name_and_params(eqn)
        is_spread = name in _SHAPES and eqn.outvars[0].aval.shape[:1] == self.rows
        if not is_spread and not any(isinstance(x, Value) for x in args):
            return evaluate_eqn(eqn, list(map(_array, args)))
        if name in _CALLS:
            names = "jaxpr", "call_jaxpr", "fun_jaxpr"
            closed = next(params[x] for x in names if x in params)
            consts = getattr(closed, "consts", ())
            return self.run(getattr(closed, "jaxpr", closed), consts, args)
        if name == "optimization_barrier":
            return args
        values = list(map(self.read, args))
        for var in eqn.outvars:
            self._check_shape(name, var.aval)
        if name in _SAME:
            return [values[0]]
        if name in _SHAPES:
            return [self._reshaped(eqn, params, values[0])]
        if name in _REDUCTIONS:
            return [self._reduced(eqn, name, params, values[0])]
        text = self._expression(eqn, name, params, [x.element for x in values])
        return [self._assign(eqn.outvars[0].aval, text, any(x.is_wide for x in values))]

    def _check_shape(self, name: str, aval: Any) -> None:
        shape = aval.shape[1:] if aval.shape[:1] == self.rows else aval.shape
        if math.prod(shape) not in (1, self.columns) or self.rows[0] in shape:
            raise Unsupported(f"{name} that makes {math.prod(shape)} numbers of a row")

    def _new_name(self) -> str:
        self._count += 1
        return f"v{self._count - 1}"

    def _assign(self, aval: Any, text: str, is_wide: bool) -> Value:
        value = Value(self._new_name(), is_wide)
        dtype = jnp.dtype(aval.dtype).name
        kind = computed_type(dtype)
        if dtype in _LOW:
            text = f"{dtype}::round({text})"
        text = text.replace("(T)", f"({kind})")
        if is_wide:
            self.lines.append(f"{kind} {value.text}[V]; FOR {value.element} = {text};")
        else:
            self.lines.append(f"const {kind} {value.text} = {text};")
        return value

    def _reshaped(self, eqn: Any, params: Any, value: Value) -> Value:
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        first = params.get("broadcast_dimensions", (0,))[:1]
        keeps = after[:1] == self.rows and first == (0,)
        if before[:1] == self.rows and not keeps:
            raise Unsupported("rows that become columns")
        return value

    def _reduced(self, eqn: Any, name: str, params: Any, value: Value) -> Value:
        before, aval = eqn.invars[0].aval.shape, eqn.outvars[0].aval
        is_row = before[:1] == self.rows
        if is_row and 0 in params["axes"]:
            raise Unsupported("what needs all rows at once")
        dtype = jnp.dtype(aval.dtype).name
        of_integers = dtype in ("int32", "uint32") and name == "reduce_sum"
        if dtype != "float32" and not of_integers:
            raise Unsupported(f"{name} of {dtype}")
        after = aval.shape[aval.shape[:1] == self.rows :]
        is_number = self.columns == 1 and value.is_wide  # which lane 0 has
        if not is_number and math.prod(before[is_row:]) == math.prod(after):
            return value  # of axes of size 1
        kind, start = _REDUCTIONS[name]
        total, function = self._new_name(), "add_" if kind == "sum" else f"{kind}_"
        self.lines.append(
            f"{computed_type(dtype)} {total} = {start}; FOR if (col(lane, j) < DIM) "
            f"{total} = {function}({total}, {value.element}); "
            f"{total} = all_{kind}({total});"
        )
        return Value(total)

    def _expression(self, eqn: Any, name: str, params: Any, args: list[str]) -> str:
        first, out = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        for x in (*eqn.invars, *eqn.outvars):
            stored_type(x.aval.dtype)
        if name == "select_n":
            if len(args) != 3 or first != jnp.bool_:
                raise Unsupported("a choice of more than two")
            return f"{args[0]} ? {args[2]} : {args[1]}"
        if name == "convert_element_type":
            return _converted(first, out, args[0])
        is_of_words = {first.name, out.name} <= {"float32", "int32", "uint32"}
        if name == "bitcast_convert_type" and is_of_words:
            is_float = first == jnp.float32
            bits = f"as_bits({args[0]})" if is_float else f"(unsigned){args[0]}"
            kind = computed_type(out)
            return f"as_float({bits})" if kind == "float" else f"({kind}){bits}"
        if name == "integer_pow":
            return self._power(eqn, args[0], params["y"])
        if name == "reduce_precision":
            name += f" {params['exponent_bits']} {params['mantissa_bits']}"
        if name == "round" and params["rounding_method"] == _TO_EVEN:
            name = "round to even"
        template = TEMPLATES[computed_type(first)].get(name)
        if template is None:
            raise Unsupported(f"{name} of {first.name}")
        return template.format(*args)

    def _power(self, eqn: Any, base: str, y: int) -> str:
        """By squares, as JAX lowers it."""
        aval, product = eqn.outvars[0].aval, ""
        multiply = TEMPLATES[computed_type(aval.dtype)]["mul"].format

        def times(x: str, y: str) -> str:
            return self._assign(aval, multiply(x, y), base.endswith("[j]")).element

        # y = 6 = 0b110: base ** 2 * base ** 4.
        for place, bit in enumerate(reversed(f"{abs(y):b}")):
            base = times(base, base) if place else base
            if bit == "1":
                product = times(product, base) if product else base
        return f"1.0f / {product}" if y < 0 else product or "1"


def _converted(old: Any, new: Any, text: str) -> str:
    kind, is_float = computed_type(new), computed_type(old) == "float"
    if kind == "bool":
        return f"{text} != 0"
    if is_float and kind in ("int", "unsigned"):
        return f"to_{kind}({text})"
    return f"({kind}){text}"


def _array(x: Any) -> Any:
    return jnp.asarray(x.value, x.dtype) if isinstance(x, _Constant) else x


class _Constant(NamedTuple):
    """A literal of a jaxpr."""

    value: Any
    dtype: Any

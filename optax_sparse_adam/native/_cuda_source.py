"""The CUDA source of a formula: `rows.cu`, and what is printed into it."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._cuda_printer import Program, Value, computed_type, constant, stored_type

_FOLDER = Path(__file__).parent


class Tuning(NamedTuple):
    """What changes the time of a kernel, and nothing else.

    The values are those of an H100, for updates of 1,048,576 ids of 10M x 128 and 8,192
    of 1M x 64. What was tried and does not pay: rows of tables that are asked for ahead
    (0.92 ms for 0.77; in later lists alone 0.764 for 0.754), loads and stores that pass
    by the caches, fewer registers, other parts.

    Attributes:
      ahead: Entries whose values a warp has asked for; a power of two.
      warps: In a block.
      threads: Of a block at most, of which the compiler makes the number of registers.
      few: Entries up to which a chunk has `small` of them, else `large`.
      small: At least; a power of two.
      large: At most 32.
      parts: Of a later list, by its size: up to it, the slots of a block, those of a
        warp at once, and warps.
      ranked: Entries up to which they are sorted by counting, not by XLA.
      options: For the compiler.
    """

    ahead: int = 4
    warps: int = 4
    threads: int = 512
    few: int = 1 << 16
    small: int = 16
    large: int = 32
    parts: tuple[tuple[int, int, int, int], ...] = (
        (2048, 128, 16, 8),
        (2**31, 512, 32, 16),
    )
    ranked: int = 16384
    options: tuple[str, ...] = ()


class Array(NamedTuple):
    """A table, in memory.

    Attributes:
      dtype: Its type.
      is_wide: Whether it has all columns, or one number a row.
    """

    dtype: Any
    is_wide: bool

    @property
    def c_type(self) -> str:
        return stored_type(self.dtype)


class Kernel(NamedTuple):
    """What a source is made of.

    Attributes:
      columns: Numbers of a row.
      tables: Arrays that get new rows.
      read: Arrays that are read.
      out: Type of what is written at each place, if anything is.
      data: Type of the values that come in, if any do.
      reduces: Whether entries are summed, or are rows that occur once.
      by_place: Whether keys are places of rows.
      bags: How many entries each bag has; 0 for those that have segments, and `None`
        for entries that have values of their own.
      weighted: Whether entries have weights.
      pools: Whether rows of bags are added up as they are read.
      fill: What is put out where a key is no row.
    """

    columns: int
    tables: tuple[Array, ...] = ()
    read: tuple[Array, ...] = ()
    out: Any = None
    data: Any = None
    reduces: bool = False
    by_place: bool = False
    bags: int | None = None
    weighted: bool = False
    pools: bool = False
    fill: float = 0.0


def columns_of_lane(columns: int) -> tuple[int, int]:
    """How many columns a lane reads at once, and how many it has."""
    each = [(-(-columns // (32 * n)) * n, -n) for n in (1, 2, 4) if columns % n == 0]
    count, at_once = min(each)
    return -at_once, count


@cache
def text_of(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def packed(shared: Sequence[jax.Array]) -> tuple[list[jax.Array], list[str], list[str]]:
    """What all rows share as few arrays: numbers of a type are one.

    Returns: the arrays, their parameters, and the statements that read `s0`, `s1`, ...
    """
    groups: dict[str, list[jax.Array]] = {}
    arrays: list[jax.Array] = []
    params, lines = [], []
    for i, x in enumerate(shared):
        name = jnp.dtype(x.dtype).name
        if x.size > 1:
            kind = stored_type(x.dtype)
            params.append(f"const {kind}* shared{i}_")
            arrays.append(x.reshape(-1))
            c_type = computed_type(x.dtype)
            lines.append(f"{c_type} s{i}[V]; load_row(s{i}, shared{i}_, 0, lane);")
            continue
        kind, dtype = {"int32": ("int", jnp.int32), "bool": ("int", jnp.int32)}.get(
            name,
            ("unsigned", jnp.uint32) if name == "uint32" else ("float", jnp.float32),
        )
        group = groups.setdefault(kind, [])
        read = f"{kind}s_[{len(group)}]"
        lines.append(f"const {'bool' if name == 'bool' else kind} s{i} = {read};")
        group.append(x.reshape(()).astype(dtype))
    for kind, group in groups.items():
        params.append(f"const {kind}* {kind}s_")
        arrays.append(jnp.stack(group))
    return arrays, params, lines


def _store(name: str, row: str, value: Value) -> str:
    return f"store_row({name}, {row}, lane, [&](int j) {{ return {value.element}; }});"


def _macros(
    kernel: Kernel, program: Program, tuning: Tuning, params: list[str]
) -> dict[str, Any]:
    """What `rows.cu` is compiled with, beside its formula."""
    at_once, _ = columns_of_lane(kernel.columns)
    names = [param.split()[-1] for param in params]
    macros: dict[str, Any] = {
        "DIM": kernel.columns,
        "VEC": at_once,
        "AHEAD": tuning.ahead,
        "THREADS": tuning.threads,
        "PARAMS": "".join(f", {param}" for param in params),
        "ARGS": "".join(f", {name}" for name in names),
        "PLACES": int(kernel.by_place),
        "WEIGHTS": int(kernel.weighted),
    }
    if kernel.bags is not None:
        macros["BAGS"] = kernel.bags
    if kernel.data is not None:
        macros["DATA"] = stored_type(kernel.data)
    if kernel.out is not None:
        macros["OUT"] = stored_type(kernel.out)
        macros["FILL"] = constant(kernel.fill, jnp.float32).text
    if kernel.reduces:
        macros["REDUCE"] = 1
    elif kernel.pools:
        macros["POOL"] = 1 if program.lines else 4  # rows at once
    return macros


def source_of(
    kernel: Kernel, program: Program, tuning: Tuning
) -> tuple[str, list[jax.Array]]:
    """The source, and the arrays of `program.shared` as the kernel takes them.

    Its parameters are, in this order, those that `rows_kernel` has in `rows.cu`, and
    then the output, the shared arrays, the tables and what is read besides.
    """
    shared, shared_params, shared_lines = packed(program.shared)
    params = [*shared_params]
    if kernel.out is not None:
        params.insert(0, f"{stored_type(kernel.out)}* out")
    body = []
    for kind, group in (("t", kernel.tables), ("r", kernel.read)):
        for i, array in enumerate(group):
            name, const = f"{kind}{i}", "const " if kind == "r" else ""
            params.append(f"{const}{array.c_type}* {name}_")
            c_type = computed_type(array.dtype)
            if array.is_wide:
                body.append(
                    f"{c_type} {name}[V]; load_row({name}, {name}_, row, lane);"
                )
            else:
                body.append(f"const {c_type} {name} = get({name}_[row]);")
    body += shared_lines + program.lines
    results = [value for value, _ in program.results]
    if kernel.pools:
        row = results.pop(0).element
        body.append(f"FOR g[j] += is_there ? weight * {row} : 0.0f;")
    elif kernel.out is not None:
        body.append(_store("out", "place", results.pop(0)))
    if any(not array.is_wide for array in kernel.tables):
        body.append("__syncwarp();  // all lanes read the number that one writes")
    for i, (array, value) in enumerate(zip(kernel.tables, results, strict=True)):
        if value == Value(f"t{i}", array.is_wide):
            continue  # as it was
        if array.is_wide:
            body.append(_store(f"t{i}_", "row", value))
        else:
            # Of a single column lane 0 has it.
            number = f"{value.text}[0]" if value.is_wide else value.text
            body.append(f"if (lane == 0) put(t{i}_[row], {number});")
    macros = _macros(kernel, program, tuning, params)
    head = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    text = text_of("rows.cu").replace(
        "  FORMULA\n", "".join(f"  {line}\n" for line in body)
    )
    return head + text, shared

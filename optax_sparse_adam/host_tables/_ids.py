"""Which rows a batch looks up: a small program, sliced out of the loss."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding

from ._compact import Whole, evaluate_compact


class RowIds:
    """The ids that a function looks up, computed on the host's CPU.

    What the function computes beside ids is no part of the program, and arguments that
    ids do not depend on are not sent there. On an accelerator it would also wait for
    the step before.

    Attributes:
      lines: Of each table, by its name: where it is looked up. Known after a call.
    """

    def __init__(
        self, fun: Callable[..., Any], tables: Mapping[int, Whole], treedef: Any
    ):
        self.lines: dict[str, set[str]] = {}
        self._fun, self._tables, self._treedef = fun, tables, treedef
        self._programs: dict[Any, tuple[Any, list[int], bool]] = {}

    def needs_params(
        self, dense: Sequence[Any], args: Any, static: Mapping[str, Any]
    ) -> bool:
        """Whether ids depend on parameters; then those of a later step do not exist."""
        return self._program(dense, args, static)[2]

    def __call__(
        self, dense: Sequence[Any], args: Any, static: Mapping[str, Any]
    ) -> list[jax.Array]:
        """The ids of each table, `[n]` with duplicates, as `_compact` says.

        Args:
          dense: The leaves of the parameters that are no tables.
          args: Further arguments: a tuple, and a dictionary of those by keyword.
          static: Arguments by keyword that are not traced.
        """
        program, kept, _ = self._program(dense, args, static)
        leaves = [*dense, *jax.tree.leaves((args[0], self._taken(args[1])))]
        given = [leaves[i] for i in kept]
        # What lies on a mesh stays there, and runs there.
        if jax.default_backend() != "cpu" and mesh_around(leaves) is None:
            given = jax.device_put(given, _cpu())
        return list(program(*given))

    def _taken(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        return {k: x for k, x in keywords.items() if takes_keyword(self._fun, k)}

    def _program(
        self, dense: Sequence[Any], args: Any, static: Mapping[str, Any]
    ) -> tuple[Any, list[int], bool]:
        batch, keywords = args
        # What the optimiser alone takes is nothing to the loss.
        args = batch, self._taken(keywords)
        static = self._taken(static)
        leaves, structure = jax.tree.flatten(args)
        avals = tuple((np.shape(x), jnp.result_type(x), _layout(x)) for x in leaves)
        x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
        key = structure, avals, tuple(sorted(static.items())), x64
        if key not in self._programs:
            self._programs[key] = self._trace(dense, leaves, structure, static)
        return self._programs[key]

    def _trace(
        self,
        dense: Sequence[Any],
        leaves: list[Any],
        structure: Any,
        static: Mapping[str, Any],
    ) -> tuple[Any, list[int], bool]:
        count, num_dense = len(self._tables), len(dense)

        def ids(rows: list[Any], *others: Any) -> list[jax.Array]:
            own, given = iter(rows), iter(others[:num_dense])
            params = self._treedef.unflatten(
                next(own if i in self._tables else given)
                for i in range(self._treedef.num_leaves)
            )
            args, keywords = jax.tree.unflatten(structure, others[num_dense:])
            fun = functools.partial(self._fun, **keywords, **static)
            none = [jnp.zeros(1, jnp.int32)] * count
            _, found, lines = evaluate_compact(
                fun, self._tables, params, none, args, effects=False
            )
            for name, own_lines in lines.items():
                self.lines.setdefault(name, set()).update(own_lines)
            return found

        rows = [
            jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
            for x in self._tables.values()
        ]
        values = [*dense, *leaves]
        shapes = [
            jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x), sharding=_layout(x))
            for x in values
        ]
        closed = jax.make_jaxpr(ids)(rows, *shapes)
        names = list(self._tables.values())
        reads = kept_arguments(jaxpr_as_fun(closed), [*rows, *shapes])
        for i in sorted(set(reads) & set(range(count))):
            places = ", ".join(sorted(self.lines.get(names[i].name, ())))
            raise ValueError(
                "Rows of tables in host memory are fetched before the function runs, "
                f"so ids must not depend on rows, but some depend on {names[i].name}, "
                f"which is looked up at {places}. Compute ids from the batch; or, in "
                "two calls, evaluate first and look up then."
            )
        kept = [i - count for i in reads if i >= count]
        # A random key has no zeros to stand for it.
        kept += [i for i, x in enumerate(shapes) if _is_key(x) and i not in kept]

        @jax.jit
        def program(*given: Any) -> list[jax.Array]:
            known = dict(zip(kept, given, strict=True))
            others = [
                known[i] if i in known else jnp.zeros(x.shape, x.dtype)
                for i, x in enumerate(shapes)
            ]
            zeros = [jnp.zeros(x.shape, x.dtype) for x in rows]
            return jaxpr_as_fun(closed)(*zeros, *others)

        return program, kept, any(i < num_dense for i in kept)


def takes_keyword(fun: Callable[..., Any], name: str) -> bool:
    try:
        known = inspect.signature(fun).parameters
    except (TypeError, ValueError):  # one that Python cannot look into
        return True
    return name in known or any(x.kind == x.VAR_KEYWORD for x in known.values())


def kept_arguments(fun: Callable[..., Any], args: Sequence[Any]) -> list[int]:
    """Which arguments a function reads, after its dead code is removed."""
    exported = jax.export.export(jax.jit(fun), platforms=["cpu"])
    return list(exported(*args).module_kept_var_idx)


def _layout(x: Any) -> Any:
    """The sharding of an array on several devices."""
    is_spread = isinstance(x, jax.Array) and len(x.devices()) > 1
    return x.sharding if is_spread else None


def mesh_around(leaves: Sequence[Any]) -> Any:
    """The mesh that arrays lie on, or that is set, or `None`."""
    for sharding in filter(None, map(_layout, leaves)):
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                "HostTrainer takes parameters and batches on one device, or with a "
                f"NamedSharding on a mesh; got {sharding}."
            )
        return sharding.mesh
    return None if jax.sharding.get_mesh().empty else jax.sharding.get_mesh()


def _is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.extended))


def _cpu() -> Any:
    return jax.local_devices(backend="cpu")[0]


def unique_rows(
    ids: np.ndarray, whole: Whole, lines: Mapping[str, set[str]], batch: str
) -> np.ndarray:
    """The rows that a batch looks up, ascending, each once.

    Raises:
      IndexError: If an id is out of bounds where the lookup promises that none is.
    """
    ids, size = np.sort(ids), whole.shape[0]
    if len(ids) and (ids[0] < 0 or ids[-1] > size):
        places = ", ".join(sorted(lines.get(whole.name, ())))
        # Those above the number of rows are one more than they are.
        row = int(ids[0]) - size if ids[0] < 0 else int(ids[-1]) - 1
        raise IndexError(
            f"{batch} looks up row {row} of {whole.name}, which has {size:,} "
            f"rows, at {places}. Give rows from 0 to "
            f"{size - 1:,}; where an id may be out of bounds, say so by "
            'table.at[ids].get(mode="fill") or mode="clip".'
        )
    is_new = np.ones(len(ids), bool)
    np.not_equal(ids[1:], ids[:-1], out=is_new[1:])
    ids = ids[is_new]
    return ids[ids < size]

"""A training step on the rows of a batch: what is known before the first batch.

    fetch    arrays of the rows of a batch, one for each field of a record
    join     parameters and state of a table of K rows
    step     `make_train_step` of the compact loss
    split    the arrays again, and what has no rows

Which arrays of the state have rows is asked of `tx.init`, as the row verbs do.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._exact_adam.state import begin_now
from .._gradients.marks import Sparse, marks_of
from .._gradients.value_and_grad import PartsOfTables
from .._optimizers.hyperparameters import check_transformation
from .._optimizers.row_owners import TableSize, check_sizes, find_owners
from .._optimizers.untouched_rows import check_untouched_rows, forms_of
from .._optimizers.update_fn import RowUpdateFn
from .._rows.checks import refuse_masked
from .._rows.stale import contains_stale
from .._train_step import extra_args_of, make_train_step
from ._arguments import as_arrays, refuse_untrainable
from ._by_row import treats_rows_alone
from ._compact import Whole, evaluate_compact, fingerprint
from ._records import Layout
from ._spread import Spread
from ._table import HostTable, rows_of_init, tables_among

_NUMBERS = 1 << 20  # of a parameter that are begun at once, whatever the optimiser


def compact(fun: Callable[..., Any], tables: Mapping[int, Whole]) -> Callable[..., Any]:
    """`fun` on K rows of each table: `compact_fun(params, rows, *args)`.

    Args:
      fun: `fun(params, *args)`, any function that JAX can trace.
      tables: By the index of their leaf in the parameters.

    Returns:
      A function of parameters with `[K, ...]` in the place of each table, and of a
      pair: their positions, int32 `[K]` for each table, ascending, padded; and the
      residuals of `evaluate_compact`. It returns the result, and a fingerprint of the
      ids that were looked up: with another one than that of the rows that were fetched,
      the result is wrong.
    """

    @functools.wraps(fun)
    def compact_fun(
        params: Any, rows: Any, /, *args: Any, **keywords: Any
    ) -> tuple[Any, jax.Array]:
        bound, (positions, residuals) = functools.partial(fun, **keywords), rows
        asked = bound, tables, params, positions, args, residuals
        result, ids, walk, _ = evaluate_compact(*asked)
        return result, fingerprint(ids) + jnp.uint32(walk.is_other)

    return compact_fun


class Plan:
    """The parameters and the state of a trainer: which parts of them are rows.

    Attributes:
      spread: The devices that rows of a batch go to.
      hosts: The `HostTable`s.
      tables: What is known of each, by the index of its leaf in the parameters.
      layouts: The records of each, in the same order.
      treedef: Of the parameters.
      dense: The parameters that are no tables, as they were given.
      names: Of what has no rows: the other parameters, then the rest of the state.
    """

    def __init__(self, tx: optax.GradientTransformation, params: Any, spread: Spread):
        check_transformation(tx, "HostTrainer")
        self.tx, self.spread = tx, spread
        hosts, self.tables, self.treedef = tables_among(params, spread)
        self.hosts = list(hosts.values())
        if not hosts:
            raise ValueError(
                "HostTrainer needs a HostTable among the parameters; for parameters "
                "on the device there is make_train_step."
            )
        _refuse_shared(hosts, self.tables)
        pairs = jax.tree_util.tree_leaves_with_path(params)
        for path, x in pairs:
            if not isinstance(x, HostTable):
                refuse_untrainable(x, jax.tree_util.keystr(path))
        shapes = [jax.ShapeDtypeStruct(np.shape(x), _held(x)) for _, x in pairs]
        state = jax.eval_shape(tx.init, self.treedef.unflatten(shapes))
        leaves = jax.tree_util.tree_leaves_with_path(state)
        sizes = {i: TableSize(x.shape, 1, 0) for i, x in self.tables.items()}
        owners = find_owners(
            *(tx.init, self.treedef, sizes, shapes, [x for _, x in leaves]),
            "HostTrainer",
        )
        self._trained = self.treedef.unflatten(shapes), owners
        # With a loss; a step asks again, with all that it gives and its number of rows.
        self._check_update(sizes, {"value": np.float32(0)})
        self.dense = [x for i, (_, x) in enumerate(pairs) if i not in hosts]
        self.num_dense = len(self.dense)
        # For each array of parameters and state the table whose rows it holds, if any.
        of_params = (i if i in hosts else None for i in range(len(pairs)))
        places: dict[int | None, int] = {i: k for k, i in enumerate(hosts)}
        self._owners = [places.get(i) for i in (*of_params, *owners)]
        trees = self.treedef.unflatten(shapes), state
        self._structure: Any = jax.tree.structure(trees)
        self._reads_state = contains_stale(state)
        self._shapes = jax.tree.leaves(trees)
        self.names: list[str] = []
        fields: list[list[Any]] = [[] for _ in hosts]
        named = [
            ("params", path, x) for (path, _), x in zip(pairs, shapes, strict=True)
        ]
        named += [("state", path, x) for path, x in leaves]
        for (tree, path, x), k in zip(named, self._owners, strict=True):
            name = jax.tree_util.keystr(path)
            if k is not None and jnp.issubdtype(x.dtype, jax.dtypes.extended):
                raise TypeError(
                    "HostTrainer keeps the bytes of rows, and rows of "
                    f"`{tree}{name}` are of the type {x.dtype}. Take one key for all "
                    "rows, without per_row; or keep the table on the device."
                )
            if k is None:
                self.names.append(tree + name)
            else:
                # The first one is the parameter, which has the table's name.
                name = tree + name if fields[k] else [*self.tables.values()][k].name
                fields[k].append((name, x.shape[1:], x.dtype))
        self.layouts = [Layout(x) for x in fields]

    def _check_update(
        self,
        tables: dict[int, TableSize],
        extra_args: dict[str, Any],
        forms: list[Any] | None = None,
    ) -> None:
        """Raises for a transformation that needs more than the rows of a batch."""
        tx, (params, owners) = optax.with_extra_args_support(self.tx), self._trained
        asked = tx, params, tables, owners, extra_args, "HostTrainer"
        check_sizes(*asked)
        check_untouched_rows(*asked, forms=forms)

    # Between the user's trees and lists: what has no rows, and for each table its
    # arrays, as its layout says.

    def join(self, rest: Iterable[Any], arrays: Iterable[Iterable[Any]]) -> Any:
        """Parameters and state."""
        left, columns = iter(rest), [*map(iter, arrays)]
        return self._structure.unflatten(
            next(left if k is None else columns[k]) for k in self._owners
        )

    def read_by_loss(self, rest: Sequence[Any]) -> Sequence[Any]:
        """The parameters that are no tables; with stale rows, the state with them."""
        return rest if self._reads_state else rest[: self.num_dense]

    def params_and_state(self, held: Sequence[Any], rows: Sequence[Any]) -> Any:
        """Parameters, and the state that they are read by, or `None`.

        Args:
          held: As `read_by_loss` says; or the parameters that are no tables, alone.
          rows: `[1, ...]` of each table.
        """
        if len(held) == self.num_dense:
            left, tables = iter(held), iter(rows)
            owners = self._owners[: self.treedef.num_leaves]
            leaves = [next(left if k is None else tables) for k in owners]
            return self.treedef.unflatten(leaves), None
        fields = [
            [row, *(jnp.zeros((1, *x.shape), x.dtype) for x in layout.fields[1:])]
            for row, layout in zip(rows, self.layouts, strict=True)
        ]
        return self.join(held, fields)

    def dense_of(self, params: Any) -> list[Any]:
        """The parameters that are no tables."""
        pairs = zip(jax.tree.leaves(params), self._owners, strict=False)
        return [x for x, k in pairs if k is None]

    def split(self, params: Any, state: Any) -> tuple[list[Any], list[list[Any]]]:
        """The inverse of `join`."""
        rest: list[Any] = []
        arrays: list[list[Any]] = [[] for _ in self.layouts]
        leaves = self._structure.flatten_up_to((params, state))
        for x, k in zip(leaves, self._owners, strict=True):
            (rest if k is None else arrays[k]).append(x)
        return rest, arrays

    # The beginning.

    def _begin(
        self, dense: Sequence[Any], tables: Mapping[int, Any], clocks: Any = None
    ) -> Any:
        """`split` of parameters, with these rows of tables, and their new state."""
        left = iter(dense)
        params = self.treedef.unflatten(
            tables[i] if i in tables else next(left)
            for i in range(self.treedef.num_leaves)
        )
        state = self.tx.init(params)
        return self.split(params, state if clocks is None else begin_now(state, clocks))

    def _two_rows(self) -> dict[int, Any]:
        return {
            i: jnp.zeros((2, *x.shape[1:]), x.dtype) for i, x in self.tables.items()
        }

    def begin_rest(self, dense: Sequence[Any]) -> list[Any]:
        """The state that has no rows."""
        return self._begin(dense, self._two_rows())[0][self.num_dense :]

    def check_begin(self, dense: Sequence[Any]) -> None:
        """Raises unless rows may be begun some at a time.

        Raises:
          ValueError: If `init` makes a row of others, or of how many there are; or what
            has no rows of these.
        """

        def begun(arrays: list[Any], dense: Sequence[Any]) -> tuple[Any, Any]:
            return self._begin(dense, dict(zip(self.tables, arrays, strict=True)))

        if not treats_rows_alone(begun, [*self.tables.values()], dense):
            raise ValueError(
                "HostTrainer begins rows of tables some at a time, but `init` of this "
                "optimiser computes of all rows, or of how many there are, what is one "
                "row's or none's, such as a norm over all parameters. Give the tables "
                "another optimiser, by optax.partition; or keep them on the device."
            )

    def split_state(self, state: Any) -> tuple[list[Any], list[list[Any]]]:
        """What of a state that exists is no row, and the rows of each table.

        Of a table there may be fewer rows than it has; not in one of several processes,
        where the state of a trainer has the rows of one of them.

        Raises:
          ValueError: If it is the state of other parameters, or of another optimiser.
        """
        shapes = self._structure.unflatten(self._shapes)[1]
        pairs = jax.tree_util.tree_leaves_with_path(shapes)
        expected: Any = jax.tree.structure(shapes)
        leaves, treedef = jax.tree.leaves(state), jax.tree.structure(state)
        if treedef != expected:
            raise ValueError(
                "HostTrainer needs a `state` of this optimiser for these parameters: "
                f"{expected}; got {treedef}."
            )
        rest: list[Any] = []
        arrays: list[list[Any]] = [[] for _ in self.layouts]
        owners = self._owners[len(self._owners) - len(leaves) :]
        for (path, shaped), x, k in zip(pairs, leaves, owners, strict=True):
            shape = np.shape(x)
            may_grow = k is not None and self.spread.processes == 1
            if may_grow and shape and shape[0] <= shaped.shape[0]:
                shape = shaped.shape[0], *shape[1:]
            # A step may have changed the type of state without rows, as in memory.
            may_differ = k is None and all(
                jnp.issubdtype(y, jnp.floating) for y in (_type_of(x), shaped.dtype)
            )
            if shape != shaped.shape or not (may_differ or _type_of(x) == shaped.dtype):
                raise ValueError(
                    f"`state{jax.tree_util.keystr(path)}` is {_type_of(x)}"
                    f"{list(np.shape(x))}, and HostTrainer needs {shaped.dtype}"
                    f"{list(shaped.shape)}" + (", or fewer rows." if may_grow else ".")
                )
            refuse_masked(x, "The `state` of HostTrainer")
            (rest if k is None else arrays[k]).append(x)
        return rest, arrays

    def init_records(
        self,
        k: int,
        dense: Sequence[Any],
        state: Sequence[Any],
        clocks: Any,
        *,
        skips_zeros: bool,
    ) -> Iterator[tuple[int, np.ndarray]]:
        """The records of a new table in pieces, each with its first row.

        Where all of them are zeros, nothing, if that may be skipped.

        Args:
          k: Which table.
          dense: The parameters that are no tables.
          state: The first rows of each array of its state, if they exist.
          clocks: Of that state, at which other rows begin; or `None`.
          skips_zeros: Whether rows that are not written are zeros.
        """
        host, layout, index = self.hosts[k], self.layouts[k], [*self.tables][k]
        total = host.shape[0]
        size = max(2, min(total, _NUMBERS // math.prod(host.shape[1:])))

        @jax.jit
        def arrays(dense: Sequence[Any], rows: jax.Array, clocks: Any) -> list[Any]:
            tables = self._two_rows() | {index: rows}
            return list(self._begin(dense, tables, clocks)[1][k])

        rows = np.zeros((size, *host.shape[1:]), host.dtype)
        if host.init is None:
            records = layout.pack(arrays(dense, rows, clocks), size)
            if skips_zeros and not state and not records.any():
                return
        for first in range(0, total, size):
            count = min(size, total - first)
            if host.init is not None:
                name = self.tables[index].name
                rows[:count] = rows_of_init(host, name, first, count)
            if host.init is not None or state:
                records = layout.pack(arrays(dense, rows, clocks), count)
            for number, x in enumerate(state, 1):
                part = np.asarray(x[first : first + count])
                layout.view(records, number)[: len(part)] = part
            yield first, records[:count]

    # Programs.

    def step(
        self, loss: Callable[..., Any], rest: Any, *, has_aux: bool, **options: Any
    ) -> Any:
        """`step(static, rest, arrays, rows, args)`, compiled and donated.

        It returns rest and arrays, the value, and a fingerprint of the ids. All that
        is trained stays where it is.
        """
        few = compact(loss, self.tables)
        stays = self.spread.stays(rest, None, self.spread.whole)

        @functools.wraps(loss)
        def with_fingerprint(*args: Any, **keywords: Any) -> Any:
            result, number = few(*args, **keywords)
            number = _as_key(number)
            if not has_aux:
                return result, (None, number)
            # What is no pair is refused as ever.
            is_pair = isinstance(result, tuple) and len(result) == 2
            return (result[0], (result[1], number)) if is_pair else result

        # Gradients take another way where a batch looks up more rows than a table has,
        # of which K rows alone do not say.
        sizes = {i: x.shape[0] for i, x in self.tables.items()}
        options["sparse"] = PartsOfTables(options.get("sparse"), sizes)
        # The gradients of each program, as the optimiser takes them.
        forms: dict[Any, list[Any]] = {}
        last: list[Any] = []

        @functools.wraps(self.tx.update)
        def update(grads: Any, *args: Any, **extra_args: Any) -> Any:
            result = self.tx.update(grads, *args, **extra_args)
            last[:] = forms_of(grads)
            return result

        tx = self.tx
        if type(tx.update) is not RowUpdateFn:
            has_extra = isinstance(tx, optax.GradientTransformationExtraArgs)
            kind: Any = optax.GradientTransformation
            kind = optax.GradientTransformationExtraArgs if has_extra else kind
            tx = kind(tx.init, update)
        inner = make_train_step(with_fingerprint, tx, True, **options)

        @functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2), **stays)
        def step(static: Any, rest: Any, arrays: Any, rows: Any, args: Any) -> Any:
            batch, keywords = as_arrays(args)
            params, state = self.join(rest, arrays)
            names = keywords | dict(static)
            new = inner(params, state, rows, *batch, **names)
            value, (aux, number) = new[2]
            value = (value, aux) if has_aux else value
            new_rest, new_arrays = self.split(*new[:2])
            self._refuse_types(arrays, new_arrays)
            pairs = zip(self.tables.items(), arrays, strict=True)
            given = jax.tree.leaves((rest, arrays, args))
            shapes = [(np.shape(x), _type_of(x)) for x in given]
            program = static, *shapes
            forms.setdefault(program, [*last])
            self._check_update(
                {i: TableSize(x.shape, 1, len(part[0])) for (i, x), part in pairs},
                extra_args_of(loss, self.tx, new[2][0], names),
                forms[program],
            )
            return new_rest, new_arrays, value, jax.random.key_data(number)[0]

        return step

    def of_whole_tables(self, sparse: Sparse) -> Sparse:
        """`sparse`, where a function was called with the shapes of whole tables.

        Raises:
          ValueError: If it says that the gradient of a table is dense.
        """
        if sparse is None or sparse is True:
            return sparse
        marks = marks_of(sparse, self._structure.unflatten(self._shapes)[0])
        for i, table in self.tables.items():
            if not marks[i]:
                raise ValueError(
                    "HostTrainer trains the rows that a batch looks up, and `sparse` "
                    f"says that the gradient of {table.name} is dense. Leave `sparse` "
                    "out, say True for the table, or keep it on the device."
                )
        return self.treedef.unflatten(map(bool, marks))

    def _refuse_types(self, arrays: Any, new_arrays: Any) -> None:
        """Raises if a step returns rows of other types than it gets: see `Layout`."""
        for layout, old, new in zip(self.layouts, arrays, new_arrays, strict=True):
            for (name, *_), x, y in zip(layout.fields, old, new, strict=True):
                if x.dtype != y.dtype:
                    raise TypeError(
                        "HostTrainer keeps rows in the types that `init` gives them, "
                        f"and a step of this optimiser returns {name} as {y.dtype}, "
                        f"which is {x.dtype}. Numbers that are arrays of a wider type "
                        "do so: give Python's. Of optax.inject_hyperparams all are, "
                        "beside a float32 leaf: put it around lazy, and name those "
                        'that moments are computed with, static_args=("b1", "b2"). '
                        "Or take tables of float32."
                    )


def _as_key(number: jax.Array) -> jax.Array:
    """A number as an auxiliary result that does not change the bits of a step.

    Problem: with one more result XLA fuses the loss in another way than in memory, and
    rounds otherwise. Cause: a gradient is made to depend on an element of each result
    (`_order_after` in `_gradients/differentiate.py`). Remedy: it is a random key, which
    has no elements to compare. Safe: it reads no rows, which the order is for. Test:
    `per_row` in `tests/host_tables/test_equality.py`.
    """
    data = jnp.stack([number, jnp.zeros_like(number)])
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def _refuse_shared(hosts: Mapping[int, HostTable], tables: Mapping[int, Any]) -> None:
    """Two tables in one file, or in one storage, would overwrite each other."""
    seen: dict[Any, str] = {}
    for i, host in hosts.items():
        place: Any = None if host.storage is None else id(host.storage)
        if host.file is not None:
            place = Path(host.file).resolve()
        if place is not None and place in seen:
            raise ValueError(
                f"Each table needs a file or a storage of its own; {seen[place]} and "
                f"{tables[i].name} have the same one."
            )
        seen[place] = tables[i].name


def _type_of(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)


def _held(x: Any) -> Any:
    """The type that JAX gives it."""
    return jax.dtypes.canonicalize_dtype(_type_of(x), allow_extended_dtype=True)

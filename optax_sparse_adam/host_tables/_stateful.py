"""What is saved with a trainer, in one archive: vocabularies, and whatever has a state.

{"keys": vocabulary, "stream": stream}  ->  {"keys": {"last": [1000] int32, ...}, ...}
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from .._rows.checks import refuse_masked

Described = dict[str, list[list[Any]]]


class Stateful(Protocol):
    """What a checkpoint of a `HostTrainer` holds beside it, as a `Vocabulary`."""

    def arrays_before(self, step: int) -> Mapping[str, np.ndarray]:
        """What there was when so many steps had been trained, in arrays by name.

        A pipeline draws batches ahead: what has been seen of later ones does not count.

        Raises:
          ValueError: If that is not known any more.
        """

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Goes on from what `arrays_before` has returned."""


def checked(function: str, stateful: Any) -> dict[str, Stateful]:
    """What is `stateful`, by name; `None` is nothing.

    Raises:
      TypeError: If it is no such dictionary. (A `Vocabulary` without keys is false, as
        what is empty is.)
    """
    parts = {} if stateful is None else stateful
    if not isinstance(parts, Mapping) or any(type(name) is not str for name in parts):
        raise TypeError(
            f"{function} needs what is `stateful` by name, a dictionary such as "
            f'{{"keys": vocabulary}}; got {parts!r}.'
        )
    for name, x in parts.items():
        if not all(callable(getattr(x, y, None)) for y in ("arrays_before", "restore")):
            raise TypeError(
                f"{function} needs what is `stateful` to have methods arrays_before "
                f"and restore, as a Vocabulary has; got {x!r} of {type(x).__name__} "
                f"for {name!r}."
            )
    return dict(parts)


def described(
    states: Mapping[str, Mapping[str, np.ndarray]],
) -> tuple[Described, list[np.ndarray]]:
    """What an archive says of arrays by two names, and these."""
    names: Described = {}
    arrays: list[np.ndarray] = []
    for name, state in states.items():
        if not isinstance(state, Mapping):
            raise TypeError(
                f"A checkpoint has arrays by name of stateful[{name!r}], a dictionary "
                f"from its arrays_before; got {state!r} of {type(state).__name__}."
            )
        names[name] = []
        for key, value in state.items():
            if type(key) is not str:
                raise TypeError(
                    f"A checkpoint has the arrays of stateful[{name!r}] by names, "
                    f"which are strings; got {key!r}."
                )
            refuse_masked(value, f"A checkpoint of stateful[{name!r}]")
            array = np.asarray(value)
            if array.dtype.hasobject or array.dtype.fields:
                raise TypeError(
                    f"A checkpoint holds arrays of numbers, got {key} of "
                    f"stateful[{name!r}] of the type {array.dtype}. Text is "
                    "np.frombuffer(text.encode(), np.uint8); fields are arrays."
                )
            names[name].append([key, list(array.shape), str(array.dtype)])
            arrays.append(array)
    return names, arrays


def restored(
    where: Any,
    stateful: Mapping[str, Stateful],
    names: Described,
    arrays: Sequence[np.ndarray],
    *,
    some: bool = False,
) -> None:
    """Gives all of them what an archive has; it may have more if they may be `some`.

    Raises:
      ValueError: If the archive has others, or one refuses its arrays.
    """
    if not {*stateful} <= {*names} or not (some or {*names} <= {*stateful}):
        raise ValueError(
            f"{where} was made with stateful={sorted(names)}, and here are "
            f"{sorted(stateful)}. Give the same names: what is not restored would be "
            "of another step than the rows."
        )
    each: Iterator[np.ndarray] = iter(arrays)
    for name, entries in names.items():
        state = {}
        for key, shape, dtype in entries:
            state[key] = next(each).view(np.dtype(dtype)).reshape(shape)
        if name in stateful:
            stateful[name].restore(state)

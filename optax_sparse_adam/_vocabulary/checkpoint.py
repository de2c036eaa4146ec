"""The arrays of a checkpoint: new ones, those that a user gives, and larger ones.

`keys`, `last` and `hits` are of the rows, with `changed`, the step at which a row got
its key. `waiting_...` are those of keys that have less than `min_hits`, in places of
their own. `gone` and `gone_at` are tombstones, a ring: the newest ones take the place
of the oldest. `numbers` are four counters and five numbers of the options.
"""

from collections.abc import Mapping, Sized
from typing import Any

import numpy as np

from .options import Options
from .store import FIELDS

# Places in `numbers`: the kind of keys, the last step, how many keys have gone so far,
# the last step of which a tombstone was lost; then the options.
KIND, STEP, GONE, LOST, OPTIONS = range(5)
_COUNT = OPTIONS + 5
_64_BITS = {"keys": np.uint64, "waiting_keys": np.uint64, "gone": np.uint64}
_TYPES = _64_BITS | {"numbers": np.int64}  # all others are int32
_OF_ROWS = "keys", "last", "hits", "changed"
OF_WAITING = "waiting_keys", "waiting_last", "waiting_hits"
_GROUPS = _OF_ROWS, OF_WAITING, ("gone", "gone_at")


def new_arrays(
    options: Options, rows: int, waiting: int, tombstones: int
) -> dict[str, np.ndarray]:
    """The arrays of a vocabulary without keys; `waiting` is 0 if none will wait."""
    sizes = {"": rows, "waiting_": waiting}
    new = {p + f: np.zeros(n, t) for p, n in sizes.items() for f, t in FIELDS if n}
    new["changed"] = np.full(rows, -1, np.int32)
    if tombstones:
        new["gone"] = np.zeros(tombstones, np.uint64)
        new["gone_at"] = np.zeros(tombstones, np.int32)
    return new | {"numbers": np.append([0, 0, 0, -1], options.numbers())}


def checked(saved: Mapping[str, Any], options: Options) -> dict[str, np.ndarray]:
    """Copies of arrays that a user gives, if they are those of a checkpoint.

    Raises:
      TypeError: If they have other types.
      ValueError: If they are of a vocabulary with other options, or damaged.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(
            f"A vocabulary's arrays are a dictionary of them, got "
            f"{type(saved).__name__}. Pass what `arrays` has returned."
        )
    arrays = {name: np.array(saved[name]) for name in saved}
    for name, x in arrays.items():
        dtype = np.dtype(_TYPES.get(name, np.int32))
        if x.dtype != dtype or x.ndim != 1:
            raise TypeError(
                f"A vocabulary's {name} are {dtype} of one axis, got {x.dtype} of "
                f"shape {x.shape}. Arrays of JAX have no 64 bits unless it is told so: "
                "restore these as arrays of NumPy."
            )
    needed = [*_OF_ROWS, *(OF_WAITING if options.min_hits > 1 else ()), "numbers"]
    if "numbers" in arrays and len(arrays["numbers"]) == _COUNT:
        _refuse_other_options(arrays["numbers"][OPTIONS:], options)
    if not {*needed} <= {*arrays} <= {*needed, *_GROUPS[2]}:
        _refuse_names(needed, arrays)
    fault = _fault_of(arrays)
    if fault:
        raise ValueError(
            f"A vocabulary's arrays are those of a checkpoint; got damaged ones: "
            f"{fault}. Restore another checkpoint."
        )
    return arrays


def _refuse_names(names: list[str], saved: Mapping[str, Any]) -> None:
    raise ValueError(
        f"restore needs the arrays {', '.join(names)}; got {', '.join(saved)}. Make "
        "the vocabulary with the options of the one that was saved."
    )


def _refuse_other_options(saved: np.ndarray, options: Options) -> None:
    numbers = options.numbers()
    names = "min_hits", "ttl", "score", "padding", "padding"
    for name, a, b in zip(names, saved.tolist(), numbers.tolist(), strict=True):
        if a != b:
            was = f" {a or None}" if name in ("min_hits", "ttl") else ""
            raise ValueError(
                "restore needs the arrays of a vocabulary with the same options, got "
                f"those of one with another {name}{was}; this one has "
                f"{name}={getattr(options, name)!r}. What follows would be neither of "
                "them. Make the vocabulary with the options of the one that was saved."
            )


def _fault_of(arrays: dict[str, np.ndarray]) -> str:
    """What is seen to be wrong in arrays of the right names and types."""
    numbers = arrays["numbers"]
    if len(numbers) != _COUNT:
        return f"numbers has {len(numbers)} entries, not {_COUNT}"
    kind, step, gone, lost = numbers[:OPTIONS].tolist()
    if not (0 <= kind <= 2 and 0 <= step < 2**31):
        return f"numbers has the kind {kind} and the step {step}"
    if not (0 <= gone < 2**62 and -1 <= lost <= step):
        return f"numbers has {gone} tombstones, lost until step {lost} of {step}"
    for names in _GROUPS:
        sizes = [len(arrays[name]) for name in names if name in arrays]
        if sizes and (len({*sizes}) > 1 or len(sizes) < len(names) or sizes[0] < 1):
            return f"the lengths of {', '.join(names)} are {sizes}"
    if len(arrays["keys"]) < 2:
        return "there is no row beside that of unknown keys"
    for prefix in ("", "waiting_") if "waiting_keys" in arrays else ("",):
        hits, last = arrays[prefix + "hits"], arrays[prefix + "last"]
        if hits.min() < 0 or hits[0]:
            return f"{prefix}hits has negative numbers, or some of row 0"
        if last.min() < 0 or last.max() > step:
            return f"{prefix}last has steps outside of 0 to {step}, the last one"
    if not -1 <= arrays["changed"].min() <= arrays["changed"].max() <= step:
        return f"changed has steps outside of -1 to {step}, the last one"
    times = arrays.get("gone_at", numbers[:0])[:gone]
    if len(times) and not 0 <= times.min() <= times.max() <= step:
        return f"gone_at has steps outside of 0 to {step}, the last one"
    return ""


def resized(
    saved: dict[str, np.ndarray], like: Mapping[str, Sized]
) -> dict[str, np.ndarray]:
    """The same contents in arrays as long as others."""
    if {*saved} != {*like}:
        _refuse_names([*like], saved)
    new = {}
    for name, x in saved.items():
        more = len(like[name]) - len(x)
        if more < 0:
            raise ValueError(
                f"restore needs arrays that are not larger than the vocabulary's: at "
                f"most {len(like[name])} entries for {name}, got {len(x)}. Make it as "
                "large as the one that was saved."
            )
        fill = -1 if name == "changed" else 0
        new[name] = np.pad(x, (0, more), constant_values=fill) if more else x
    size = len(saved.get("gone", ()))
    if size != len(like.get("gone", ())):  # the ring begins again
        count = int(saved["numbers"][GONE])
        places = np.arange(max(0, count - size), count) % size
        for name in ("gone", "gone_at"):
            new[name][: len(places)] = saved[name][places]
        new["numbers"] = saved["numbers"].copy()  # those that are in use stay
        new["numbers"][GONE] = len(places)
    return new

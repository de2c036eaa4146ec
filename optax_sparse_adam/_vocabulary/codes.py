"""Codes: the 64 bits that stand for a key.

An integer is its own code, a negative one in two's complement. So int64 and uint64 keys
would share codes, -1 and 2**64 - 1 for example: a vocabulary has one of the two kinds,
and refuses what the other alone can hold. A string's code is the FNV-1a hash of its
UTF-8 bytes (Fowler, Noll and Vo; RFC 9923), which has a few lines in any language:

    code = 0xCBF29CE484222325
    for byte in bytes: code = ((code ^ byte) * 0x100000001B3) mod 2**64

Known limit: FNV-1a is no secret. Who chooses strings may choose two of one code.
"""

from typing import Any

import jax
import numpy as np

_BASIS, _PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
_KEYS = "integers of 64 bits or less, strings or bytes"
_FEW = 16  # strings that are hashed one by one
SIGNED, UNSIGNED = 1, 2  # the kinds; 0 is that of a vocabulary without keys


def hash_keys(keys: Any) -> np.ndarray:
    """Hashes strings or bytes to 64 bits: FNV-1a of their UTF-8 bytes.

    As `Vocabulary` does: a key is found by its hash, too. The hash is the same on every
    machine and in every version, and is quickly written in other languages: begin with
    `0xCBF29CE484222325`; for each byte, XOR it in, then multiply by `0x100000001B3`
    modulo `2**64` (Fowler, Noll and Vo, RFC 9923). A string and its UTF-8 bytes are
    one key.

    Two of `n` strings share a hash with a probability of about `n**2 / 2**65`: 3e-8 for
    a million strings, 3e-4 for a hundred million, 3 % for a billion. They would share a
    row. Who chooses strings can make such pairs.

    Args:
      keys: Strings or bytes, of any shape: an array of them (`U`, `S`, `StringDType`),
        one of objects, as pandas has them, a list, or a single one. An `S` array has
        lost zero bytes at the end of its keys, a list has them.

    Returns:
      `uint64`, in the shape of the keys.

    Raises:
      TypeError: For anything else than strings and bytes.
      ValueError: For lists of different lengths, and for a string that has no UTF-8
        bytes, as half of a pair of surrogates has none.

    Examples:
      >>> import optax_sparse_adam as osa
      >>> [hex(x) for x in osa.hash_keys(["", "a", b"a"])]
      ['0xcbf29ce484222325', '0xaf63dc4c8601ec8c', '0xaf63dc4c8601ec8c']
    """
    array = as_array("hash_keys", keys)
    if array.size and array.dtype.kind not in "USTO":
        raise TypeError(
            f"hash_keys needs strings or bytes, got an array of {array.dtype}. "
            "Integers of 64 bits need no hash."
        )
    return _hash("hash_keys", array)


def as_array(function: str, keys: Any) -> np.ndarray:
    """The keys as an array. What is in lists stays as it is: zero bytes, all digits."""
    if isinstance(keys, jax.core.Tracer):
        raise TypeError(
            f"{function} is called on the host, with keys that are known, got a traced "
            "array. Call it outside of jit, and give the program its rows."
        )
    if isinstance(keys, np.ma.MaskedArray):
        raise TypeError(
            f"{function} needs a plain array, got a masked one. Pass keys.data, with "
            "mask=~keys.mask where keys are meant."
        )
    first = keys
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if isinstance(first, bytearray | memoryview) and memoryview(first).itemsize == 1:
        raise TypeError(
            f"{function} needs {_KEYS}; NumPy takes a {type(first).__name__} for an "
            "array of small integers. Give it bytes, bytes(key), or np.asarray(key)."
        )
    array = None
    try:
        array = np.asarray(keys)
    except UnicodeDecodeError:  # of bytes beside strings
        pass
    except ValueError as error:
        raise ValueError(
            f"{function} needs keys in an array, or in lists of one length, got a "
            f"{type(keys).__name__} that is none: {error} Fill shorter lists with the "
            "padding key, or leave places out by mask=."
        ) from None
    if array is None or (array.dtype.kind in "USf" and not hasattr(keys, "dtype")):
        made, array = array, np.array(keys, dtype=object)
        if made is not None and made.dtype.kind == "f":
            # NumPy rounds integers of which some are above 2**63 - 1 to floats.
            are_integers = all(isinstance(x, int | np.integer) for x in array.flat)
            if not (are_integers and array.size):
                return made
            return array if array.min() < 0 else array.astype(np.uint64)
    return array


def codes_of(function: str, array: np.ndarray, kind: int) -> tuple[np.ndarray, int]:
    """The codes `[n]` of all keys of an array, and the kind of the vocabulary then.

    Raises:
      TypeError: If the keys are no integers, strings or bytes.
      ValueError: If a vocabulary of this kind cannot tell a key from another one.
    """
    type_kind = array.dtype.kind
    if array.size == 0:
        return np.zeros(0, np.uint64), kind
    if type_kind in "USTO":
        hashes = _hash(function, array).reshape(-1)  # objects may be no strings
        if kind == SIGNED:
            raise TypeError(
                f"{function} cannot take strings here, as this vocabulary has signed "
                "integers as keys, and the hash of a string may be the bits of a "
                "negative one. Make a vocabulary for each."
            )
        return hashes, UNSIGNED
    if type_kind not in "iu":
        raise TypeError(
            f"{function} needs {_KEYS}, got an array of {array.dtype}: other numbers "
            "would be rounded or cut. Cast them, and see that they are equal after it."
        )
    kind = kind or (SIGNED if type_kind == "i" else UNSIGNED)
    if kind == UNSIGNED and type_kind == "i" and (least := array.min()) < 0:
        raise ValueError(
            f"{function} cannot take negative keys here, as this vocabulary has "
            "unsigned integers or strings as keys, and the bits of a negative number "
            f"are those of a large one; got {least}. Make a vocabulary for each, or "
            "give it int64 from the first key on."
        )
    if kind == SIGNED and type_kind == "u" and (most := array.max()) >= 2**63:
        raise ValueError(
            f"{function} cannot take keys above 2**63 - 1 here, as this vocabulary has "
            "signed integers as keys, and the bits of a large number are those of a "
            f"negative one; got {most}. Make a vocabulary for each, or give it uint64 "
            "from the first key on."
        )
    wide = array.astype(np.int64 if type_kind == "i" else np.uint64, copy=False)
    return np.ascontiguousarray(wide).reshape(-1).view(np.uint64), kind


def _hash(function: str, array: np.ndarray) -> np.ndarray:
    """FNV-1a, a byte of all strings at a time, the longest strings first."""
    flat, starts, lengths = _bytes(function, array.reshape(-1))
    longest_first = np.argsort(-lengths, kind="stable")
    starts, lengths = starts[longest_first], lengths[longest_first]
    code = np.full(len(starts), _BASIS)
    # How many strings are longer than 0, 1, 2, ... bytes.
    longer = len(lengths) - np.cumsum(np.bincount(lengths))
    for place, count in enumerate(longer[:-1]):
        if count <= _FEW:
            for i in range(count):
                rest = flat[starts[i] + place : starts[i] + lengths[i]]
                code[i] = _hash_on(int(code[i]), rest.tobytes())
            break
        part = code[:count]
        part ^= flat.take(starts[:count] + place)
        part *= _PRIME
    result = np.empty_like(code)
    result[longest_first] = code
    return result.reshape(array.shape)


def _hash_on(code: int, part: bytes) -> int:
    """FNV-1a of one string from here on: for a few, faster than an array of them."""
    prime = int(_PRIME)
    for byte in part:
        code = ((code ^ byte) * prime) & 0xFFFFFFFFFFFFFFFF
    return code


def _bytes(function: str, array: np.ndarray) -> tuple[np.ndarray, ...]:
    """All bytes in one array, and where each string begins, and how long it is."""
    if array.dtype.kind == "U" and array.dtype.itemsize:
        points = np.ascontiguousarray(array).view(np.uint32)
        if points.max(initial=0) < 128:  # ASCII: points are bytes
            width = array.dtype.itemsize // 4
            starts = np.arange(len(array)) * width
            return points.astype(np.uint8), starts, np.strings.str_len(array)
    if array.dtype.kind == "S" and array.dtype.itemsize:
        flat, width = np.ascontiguousarray(array).view(np.uint8), array.dtype.itemsize
        return flat, np.arange(len(array)) * width, np.strings.str_len(array)
    try:
        parts = [x.encode() if isinstance(x, str) else x for x in array.tolist()]
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{function} hashes the UTF-8 bytes of strings, and {error.object!r} has "
            "none: half of a pair of surrogates is no character. Mend it where it is "
            'decoded, or pass key.encode("utf-8", "surrogatepass").'
        ) from None
    for part in parts:
        if not isinstance(part, bytes):
            raise TypeError(
                f"{function} takes strings or bytes in an array of objects, got one "
                f"with {type(part).__name__} {part!r} in it. Integers need an array of "
                "int64 or uint64, and no hash."
            )
    lengths = np.array([len(part) for part in parts], np.int64)
    flat = np.frombuffer(b"".join(parts), np.uint8)
    return flat, np.cumsum(lengths) - lengths, lengths

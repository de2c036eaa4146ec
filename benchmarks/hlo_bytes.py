"""What a device sends in one run of a compiled program, by kind of collective."""

import math
import re
from collections import Counter

_SHAPE = re.compile(r"\b[a-z]+(\d*)\w*\[([\d,]*)\]")  # f32[8,64], pred[8]
_COLLECTIVE = re.compile(r"all-|collective-|ragged-|reduce-scatter")
_INSTRUCTION = re.compile(r"= (.*?) ([a-z][a-z-]*)\(")
# The part of the bytes of its result that a device sends, in a group of so many.
_SENT = {
    "all-gather": lambda n: (n - 1) / n,  # its own part, to each of the others
    "reduce-scatter": lambda n: n - 1,  # the part of each of the others
    "all-reduce": lambda n: 2 * (n - 1) / n,  # these two, one after the other
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}


def _bytes(shapes):
    total = 0
    for bits, dims in _SHAPE.findall(shapes):
        total += math.prod(int(d) for d in dims.split(",") if d) * int(bits or 8) // 8
    return total


def _group_size(line, devices):
    """The three ways to write groups of four of eight devices; none is all devices."""
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return found[1].count(",") + 1  # {{0,1,2,3},{4,5,6,7}}
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(found[1])  # [2,4]<=[8]
    if found := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return devices  # mesh['a'=2,'b'=4] {'b'}; {}


def _computations(text):
    """The lines of each computation by its name; that of the program is ENTRY."""
    lines = None
    computations = {}
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.-]+) (?:\(.*\) -> .*)?\{$", line)
        if head:
            lines = computations["ENTRY" if head[1] else head[2]] = []
        elif lines is not None:
            lines.append(line)
    return computations


def _times(computations, loops):
    """How often each computation runs, `loops` where a loop does not say how often."""
    times = Counter()

    def count(name, number):
        times[name] += number
        for line in computations[name]:
            trips = 1
            if " while(" in line:
                known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
                trips = int(known[1]) if known else loops
            called = re.findall(
                r"(?:body|condition|to_apply|calls|\w+_computation)=%?([\w.-]+)", line
            )
            for group in re.findall(
                r"(?:branch_computations|called_computations)=\{(.*?)\}", line
            ):
                called += re.findall(r"[\w.-]+", group.replace("%", ""))
            for other in called:
                count(other, number * trips)

    count("ENTRY", 1)
    return times


def sent_bytes(text, devices, loops=1):
    """Adds up what one device sends, with algorithms that send the least (rings).

    Args:
      text: `compiled.as_text()`.
      devices: How many devices the program is for.
      loops: The number of trips of a loop whose number the program does not tell.

    Returns:
      A `collections.Counter` of bytes by kind of collective.

    Raises:
      ValueError: For a collective that is not known here, an asynchronous one included;
        XLA's CPU compiler makes none.
    """
    computations = _computations(text)
    sent = Counter()
    for name, times in _times(computations, loops).items():
        for line in computations[name]:
            found = _INSTRUCTION.search(line)
            if found and _COLLECTIVE.match(found[2]):
                kind = found[2]
                if kind not in _SENT:
                    raise ValueError(f"Not counted: {line.strip()}")
                part = _SENT[kind](_group_size(line, devices))
                sent[kind] += times * _bytes(found[1]) * part
    return sent

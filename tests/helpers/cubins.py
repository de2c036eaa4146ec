"""Machine code of a GPU: what its compiler says of a kernel."""

import struct

_SECTION, _SIZE = "<IIQQQQIIQQ", 64
# Attributes of `.nv.info`, by their numbers: the registers of a thread, and the bytes
# of its stack, where spilled registers are.
_ATTRIBUTES = {0x2F: "registers", 0x11: "stack"}


def resources(code):
    """`registers` and `stack` of each thread, from the sections of an ELF file."""
    assert code[:4] == b"\x7fELF"
    start = struct.unpack_from("<Q", code, 0x28)[0]
    count, names = struct.unpack_from("<HH", code, 0x3C)
    sections = [
        struct.unpack_from(_SECTION, code, start + _SIZE * i) for i in range(count)
    ]
    found = {}
    for name, _, _, _, offset, size, *_ in sections:
        begin = sections[names][4] + name
        label = code[begin : code.index(b"\0", begin)].decode()
        if label != ".nv.info":
            continue
        at = offset
        while at < offset + size:
            form, attribute, length = struct.unpack_from("<BBH", code, at)
            at += 4
            if form != 4:
                continue
            if attribute in _ATTRIBUTES:
                found[_ATTRIBUTES[attribute]] = struct.unpack_from("<II", code, at)[1]
            at += length
    return found

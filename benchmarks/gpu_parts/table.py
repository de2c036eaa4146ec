"""The tables of docs/gpu.md, of the file that `gpu.py` writes."""

from gpu_parts import DENSE, KERNEL, TORCH, XLA

DRAWS = {"zipf": "Zipf", "uniform": "uniform", "half_on_one_row": "half on one row"}
PATHS = XLA, KERNEL


def tables(content):
    """All of them, in markdown, below a line that says where and when."""
    there, parts = content.get("environment", {}), []
    parts.append(heading(content, there))
    parts += [by_ids(content, part) for part in ("update", "step")]
    parts += [by_size(content), host(content), profiles(content), correctness(content)]
    return "\n\n".join(filter(None, parts))


def heading(content, there):
    versions = there.get("versions", {})
    words = [
        f"{name} {versions[name]}" for name in ("jax", "torch") if name in versions
    ]
    speed = content.get("copy_bytes_per_s", 0) / 1e9
    driver = str(there.get("driver", "")).partition(",")[0]
    place = f"{there.get('device', 'unknown device')}, driver {driver or 'unknown'}"
    commit = content["commit"] or "unknown"
    return (
        f"{place}, {', '.join(words)}; {content['date']}, commit {commit}. Copy: "
        f"{speed:,.0f} GB/s. Milliseconds, the best of three rounds of many calls; "
        "of twelve, where a call takes less than half of one."
    )


def timed(content, part):
    return [x for x in content["records"] if x["part"] == part and "best_ms" in x]


def ms(record):
    if record is None:
        return "-"
    value = record["best_ms"]
    text = f"{value:.3g}" if value < 100 else f"{value:,.0f}"
    if "least_ms" in record:
        text += f" ({value / record['least_ms']:.2f})"
    return text


def markdown(rows):
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def size(record):
    bags = f", bags of {record['bag']}" if record.get("bag") else ""
    return f"{record['rows']:,} x {record['dim']}, {record['ids']:,} ids{bags}"


def by_ids(content, part):
    """Optimisers by kinds of ids, by XLA and by the kernel."""
    records = timed(content, part)
    if not records:
        return ""
    draws = [x for x in DRAWS if any(record["draw"] == x for record in records)]
    has_kernel = any(x["path"] == KERNEL for x in records)
    paths = PATHS if has_kernel else (XLA,)
    head = [f"{part}, {size(records[0])}"]
    head += [f"{DRAWS[draw]}: {path}" for draw in draws for path in paths]
    rows, known = [head], {(x["name"], x["path"], x["draw"]): x for x in records}
    for name in dict.fromkeys(x["name"] for x in records):
        cells = []
        for draw in draws:
            for path in paths:
                is_other = name in (TORCH, DENSE)
                own = {TORCH: TORCH, DENSE: XLA}.get(name, path)
                found = known.get((name, own, draw))
                cells.append("" if is_other and path == KERNEL else ms(found))
        rows.append([name, *cells])
    words = "In brackets: of the least time, in which the bytes could be copied.\n\n"
    return (words if part == "update" else "") + markdown(rows)


def by_size(content):
    """Steps of other sizes and optimisers, beside torch and dense optax."""
    records = [
        x for p in ("bags", "small", "cross", "formulas") for x in timed(content, p)
    ]
    if not records:
        return ""
    others = {(size(x), x["name"]): x for x in records if x["name"] in (TORCH, DENSE)}
    known = {(size(x), x["name"], x["path"]): x for x in records}
    rows = [["step", "optimiser", *PATHS, TORCH, DENSE]]
    for key in dict.fromkeys((size(x), x["name"]) for x in records):
        if key[1] not in (TORCH, DENSE):
            own = [ms(known.get((*key, path))) for path in PATHS]
            rows.append(
                [*key, *own, *(ms(others.get((key[0], x))) for x in (TORCH, DENSE))]
            )
    return markdown(rows)


def host(content):
    records = timed(content, "host")
    if not records:
        return ""
    head = [f"host tables, {size(records[0])}", *(x["name"] for x in records)]
    return markdown([head, ["a step", *map(ms, records)]])


def profiles(content):
    records = [x for x in content["records"] if "total_us" in x]
    if not any(x["total_us"] for x in records):
        return ""
    rows = [["kernels of a step", "path", "microseconds", "kernels"]]
    for x in records:
        what = f"{x['name']}, {size(x)}"
        rows.append([what, x["path"], f"{x['total_us']:,.0f}", f"{x['number']:.0f}"])
    return markdown(rows)


def correctness(content):
    """A line on the checks and one on the tests."""
    lines = []
    checks = [x for x in content["records"] if x["part"] == "checks"]
    if checks:
        good = sum(x.get("ok", False) for x in checks)
        worst = [x["differences"]["float32"] for x in checks if "differences" in x]
        words = f"{good} of {len(checks)} trainings of six tables are as they should be"
        if worst:
            words += (
                f"; the kernel's float32 numbers differ by at most {max(worst):.1e}"
            )
        lines.append(words + ".")
    if tests := content.get("tests"):
        counts = ", ".join(f"{n} {kind}" for kind, n in tests["counts"].items())
        state = "" if tests["is_whole"] else " (not all: there was no time left)"
        lines.append(f"Tests: {counts} in {tests['seconds']:.0f} s{state}.")
    return "\n".join(lines)

"""Rows of load.py as one text table: engines below each other, and the ratio of each to the first."""

COLUMNS = {
    "TTFB p50": "ttfb_ms_p50",
    "p90": "ttfb_ms_p90",
    "p99 ms": "ttfb_ms_p99",
    "ms/patch": "patch_ms_p50",
    "RTF": "rtf_p50",
    "gap ms": "gap_ms_max",
    "audio s/s": "audio_s_per_s",
}
LOADS = {"closed": "at once", "open": "a second", "running": "running", "burst": "in a burst"}
"""What a row of each name is a row of."""
USUAL_CHARACTERS, USUAL_PATCHES = "14", "48"
"""Of a request; others are in the names of loads."""
_WIDTH = 9


def load_name(row: dict) -> str:
    """What an engine was under in this row, such as "8 at once" or "20 a second ref 10 text 200 patches 10:80"."""
    reference = f" ref {row['reference_s']:g}" if row["reference_s"] else ""
    text = f" text {row['characters']}" if row["characters"] != USUAL_CHARACTERS else ""
    patches = f" patches {row['patches']}" if row["patches"] != USUAL_PATCHES else ""
    return f"{row['load']:g} {LOADS[row['row']]}{reference}{text}{patches}"


def table(rows: list[dict], engines: list[str]) -> str:
    """Every load that any engine has a row of, in the order measured; some 100 characters a line.

    Args:
        rows: what compare.jsonl holds.
        engines: the first is what the others are compared with.

    Returns:
        The table, with a line for each engine's start and each failure above it. "never": the figure is infinite,
        because streams failed; "x" marks a ratio.
    """
    lines = []
    for row in rows:
        if row["row"] == "start":
            lines.append(f"{row['engine']}: ready after {row['ready_s']} s")
        elif row["row"] == "failed":
            lines.append(f"{row['engine']}: FAILED, {row['error']}")
    measured: dict[str, dict[str, dict]] = {}
    for row in rows:
        if row["row"] in LOADS:
            measured.setdefault(load_name(row), {})[row["engine"]] = row
    titles = "".join(title.rjust(_WIDTH + 1) for title in [*COLUMNS, "underrun", "failed"])
    width = max(22, *(len(name) + 1 for name in measured)) if measured else 22
    lines += ["", f"{'load':{width}}{'engine':15}{titles}"]
    for name, by_engine in measured.items():
        for engine in engines:
            if engine not in by_engine:
                continue
            row = by_engine[engine]
            lines.append(f"{name:{width}}{engine:15}{_figures(row)}")
            name = ""
            if engine != engines[0] and engines[0] in by_engine:
                ratios = _ratios(row, by_engine[engines[0]])
                lines.append(f"{'':{width}}{'x ' + engines[0]:15}{ratios}".rstrip())
    return "\n".join(lines)


def _figures(row: dict) -> str:
    cells = ["never" if row[name] is None else f"{row[name]:.4g}" for name in COLUMNS.values()]
    failed = row["refused"] + row["timeouts"] + row["errors"]
    cells += [f"{100 * row['underrun']:.1f}%", f"{failed}/{row['streams']}"]
    return "".join(cell.rjust(_WIDTH + 1) for cell in cells)


def _ratios(row: dict, base: dict) -> str:
    cells = [f"{row[name] / base[name]:.2f}x" if row[name] and base[name] else "-" for name in COLUMNS.values()]
    return "".join(cell.rjust(_WIDTH + 1) for cell in cells)


def markdown(rows: list[dict], engines: list[str]) -> str:
    """The same as a table of Markdown, `first → second → ...`, for a README; "-": not measured."""
    lines = ["| load | TTFB p50 / p99, ms | ms a patch | audio s per s | ran dry |", "|---|---|---|---|---|"]
    loads = dict.fromkeys(load_name(row) for row in rows if row["row"] in LOADS)
    for load in loads:
        own = {row["engine"]: row for row in rows if row["row"] in LOADS and load_name(row) == load}
        cells = [[*_markdown_cells(own[name])] if name in own else ["-"] * 4 for name in engines]
        lines.append(f"| {load} | " + " | ".join(" → ".join(column) for column in zip(*cells, strict=True)) + " |")
    return "\n".join(lines)


def _markdown_cells(row: dict) -> list[str]:
    def shown(name: str, digits: int = 0) -> str:
        return "never" if row[name] is None else f"{row[name]:.{digits}f}"

    return [
        f"{shown('ttfb_ms_p50')} / {shown('ttfb_ms_p99')}",
        shown("patch_ms_p50", 1),
        shown("audio_s_per_s"),
        f"{100 * row['underrun']:.1f}%",
    ]

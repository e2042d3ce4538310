"""Make the table of array libraries and backends from the results of `test_interop.py`.

MULTISAMPLE_INTEROP_RESULTS=found.jsonl pytest tests/libraries/test_interop.py
python tests/support/interop_table.py found.jsonl    # writes interop_results.json, and the table in its page
python tests/support/interop_table.py                # writes only the table, from interop_results.json
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from places import ROOT

RESULTS = Path(__file__).with_name("interop_results.json")
PAGE = ROOT / "multisample" / "_libraries" / "README.md"
MARKERS = ("<!-- interop: made by tests/support/interop_table.py -->\n", "<!-- /interop -->\n")

BACKENDS = ("torch_ext", "cupy", "numba", "cpu")
LIBRARIES = (
    "list", "NumPy", "PyTorch, CPU", "PyTorch, CUDA", "CuPy", "Numba", "JAX, CPU", "JAX, CUDA", "`__dlpack__`, CPU",
    "`__dlpack__`, CUDA", "`__cuda_array_interface__`",
)  # fmt: skip
PACKAGES = ("numpy", "torch", "cupy-cuda13x", "cupy-cuda12x", "numba-cuda", "jax", "jaxlib", "ml_dtypes")

Results = dict[str, Any]


def collected(lines: str) -> Results:
    """The combined results of a run's lines, with the machine and the versions."""
    cells: dict[str, dict[str, Any]] = {}
    where: dict[str, Any] = {}
    for line in lines.splitlines():
        found = json.loads(line)
        if "about" in found:
            where = found["about"]
            continue
        cell = cells.setdefault(f"{found.pop('library')} with {found.pop('backend')}", {"into": True, "out_of": True})
        kind = found.pop("kind")
        if kind == "out":
            cell["strided out" if found["strided"] else "out"] = True
            continue
        cell["result"] = found.get("result", "refused")
        if kind == "refused":
            continue
        for way in ("into", "out_of"):
            cell[way] = cell[way] and found[way]
    return {"about": where, "cells": dict(sorted(cells.items()))}


def about() -> dict[str, Any]:
    """The date, the device of this machine and the package versions."""
    import multisample

    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    devices = {status.device for name, status in multisample.backends().items() if name in ("cupy", "numba")}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": next(iter(sorted(devices - {""})), "no GPU"),
        "versions": versions,
    }


def committed() -> Results:
    results: Results = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results


def cell(found: dict[str, Any] | None) -> str:
    if found is None or "result" not in found:
        return ""
    if found["result"] == "refused":
        return "refused"
    copies = {(True, True): "no copy", (False, True): "copied in", (True, False): "copied out"}
    notes = [found["result"], copies.get((found["into"], found["out_of"]), "copied")]
    if found.get("strided out"):
        notes.append("`out=`")
    elif found.get("out"):
        notes.append("contiguous `out=`")
    return "; ".join(notes)


def table(results: Results) -> str:
    """The table in Markdown, followed by the device and the versions."""
    lines = [f"| arrays | {' | '.join(f'`{name}`' for name in BACKENDS)} |", "|---" * (len(BACKENDS) + 1) + "|"]
    for library in LIBRARIES:
        cells = (cell(results["cells"].get(f"{library} with {backend}")) for backend in BACKENDS)
        lines.append(f"| {library} | {' | '.join(cells)} |")
    tested = results["about"]
    versions = ", ".join(f"{package} {version}" for package, version in tested["versions"].items())
    return "\n".join(
        (
            *lines,
            "",
            f"From `tests/libraries/test_interop.py` on {tested['date']} ({tested['device']}; {versions}).",
            "",
        )
    )


def with_table(text: str, results: Results) -> str:
    """`text` with the table between its markers; ValueError if `text` has no markers."""
    begin, end = MARKERS
    before, rest = text[: text.index(begin)], text[text.index(begin) + len(begin) :]
    return f"{before}{begin}\n{table(results)}\n{rest[rest.index(end) :]}"


def main() -> None:
    if len(sys.argv) > 1:
        results = collected(Path(sys.argv[1]).read_text(encoding="utf-8"))
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), committed()), encoding="utf-8")


if __name__ == "__main__":
    main()

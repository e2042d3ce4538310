"""Print how many times as fast as each peer `multisample` was, from the JSON of one benchmark run.

pytest bench --benchmark-only --benchmark-json=results.json
python bench/ratios.py results.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(path: str) -> None:
    groups: dict[str, dict[str, dict[str, float]]] = {}
    for entry in json.loads(Path(path).read_text())["benchmarks"]:
        row = {"time": entry["stats"]["median"], "normals": entry["extra_info"]["normals"]}
        groups.setdefault(entry["group"], {})[entry["params"]["name"]] = row
    for group, rows in groups.items():
        ours = rows["multisample"]
        print(f"{group}: {ours['time'] * 1e6:.2f} us, {ours['normals'] / ours['time'] / 1e9:.3f} G normals/s")
        for name, row in rows.items():
            if row is not ours:
                print(f"    {row['time'] / ours['time']:8.2f} times as fast as {name} ({row['time'] * 1e6:.2f} us)")


if __name__ == "__main__":
    main(sys.argv[1])

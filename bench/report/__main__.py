"""The commands: python -m bench.report results.json [more.json ...] -o report/, and python -m bench.report --row"""

from __future__ import annotations

from bench.report.report import main

if __name__ == "__main__":
    main()

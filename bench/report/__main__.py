"""The commands: python -m bench.report [results.json ...] [--pages] [--row] [-o report/]"""

from __future__ import annotations

from bench.report.report import main

if __name__ == "__main__":
    main()

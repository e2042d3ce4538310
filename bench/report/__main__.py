"""The command: python -m bench.report results.json [more.json ...] -o report/"""

from __future__ import annotations

from bench.report.report import main

if __name__ == "__main__":
    main()

"""Python programs in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path


def run_python(
    *arguments: str, folder: Path | None = None, seconds: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, which must succeed. It imports from the folders of this process."""
    path = os.pathsep.join(filter(None, sys.path))
    command, environment = [sys.executable, *arguments], os.environ | {"PYTHONPATH": path} | environment
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done

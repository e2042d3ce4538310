"""The C++ and CUDA sources: their folder, and a digest that names every library compiled from them."""

from pathlib import Path

from multisample.backends.system.sources import BACKENDS, CSRC


def folder() -> Path:
    """The folder of the sources."""
    return Path(str(CSRC.folder))


def digest() -> str:
    """The digest of the sources: see `Sources.digest`. The modules that pack launches must not have changed either."""
    BACKENDS.digest()
    return CSRC.digest()


def missing() -> tuple[str, ...]:
    """Why compilers cannot read the sources; empty if they can."""
    if folder().is_dir():
        return ()
    return (f"{folder()} is no folder, since multisample is in an archive: install multisample with pip",)

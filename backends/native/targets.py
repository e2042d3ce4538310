"""The GPUs and the C library to compile for.

Every function is cheap and never raises: `status` of a backend calls them.
"""

import os
import warnings

WHEEL_ARCHITECTURES = "7.5;8.0;8.6;9.0+PTX"
"""Those of a wheel by default. GPUs of 8.9 run the code for 8.6. For newer ones, drivers compile the PTX."""


def named_architectures() -> str:
    """The architectures of TORCH_CUDA_ARCH_LIST; empty if it names none."""
    names = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    return "" if names == "native" else names


def cuda_architectures() -> str:
    """Architectures to compile for, in the form of TORCH_CUDA_ARCH_LIST; empty without a device."""
    import torch

    if names := named_architectures():
        return names
    found = {torch.cuda.get_device_capability(device) for device in range(device_count())}
    # A device may be newer than PyTorch and its CUDA: the driver compiles their newest PTX for it.
    known = [int("".join(filter(str.isdigit, name))) for name in torch.cuda.get_arch_list() if name.startswith("sm_")]
    newest = divmod(max(known), 10) if known else (99, 0)
    names = ";".join(f"{major}.{minor}" for major, minor in sorted({min(capability, newest) for capability in found}))
    return f"{names}+PTX" if names else ""


def device_count() -> int:
    """How many CUDA devices PyTorch sees."""
    import torch

    if torch.version.cuda is None:
        return 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns of a driver that is too old, and reports no device.
            return int(torch.cuda.device_count())
    except Exception:  # A broken driver may raise anything.
        return 0


def libc() -> str:
    """Name and version of the C library; empty on systems that do not report them."""
    # platform.libc_ver would read the whole interpreter.
    name = "CS_GNU_LIBC_VERSION"
    return os.confstr(name) or "" if name in getattr(os, "confstr_names", ()) else ""

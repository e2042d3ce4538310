"""Outcomes of calls, to compare."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def contents(array: Any) -> Any:
    """Bits, shape and type of an array, or the value of another object."""
    if isinstance(array, tuple):
        return tuple(map(contents, array))
    if isinstance(array, torch.Tensor):
        plain = array.detach().resolve_neg().contiguous().cpu()
        whole = plain.as_subclass(torch.Tensor).reshape(-1).view(torch.uint8).numpy().tobytes()
        about = array.dtype, tuple(array.shape), array.stride(), str(array.device), array.requires_grad
        return type(array), *about, array.is_inference(), whole
    if isinstance(array, np.ndarray):
        return type(array), array.dtype, array.shape, array.strides, array.flags.writeable, array.tobytes()
    if hasattr(array, "__array__"):
        return type(array), contents(np.asarray(array))
    return repr(array)


def outcome(call: Callable[[], Any]) -> Any:
    """The bits of a result, or a list of the types and texts of an error and of its causes and contexts."""
    try:
        return contents(call())
    except Exception as error:
        shown, one = [], error
    while one is not None:
        shown.append((type(one), re.sub("0x[0-9a-fA-F]+", "0x", str(one))))
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return shown

"""XLA's foreign function interface, read and written through ctypes.

XLA calls a handler with the address of a call frame. The layouts here are those of ``xla/ffi/api/c_api.h``, a header in
jaxlib, on 64-bit platforms. Within a major version, structs of that header grow at their ends only.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

MAJOR, LEAST_MINOR = 0, 3
"""The layouts hold for this major version, from this minor version on."""

INSTANTIATE, EXECUTE = 0, 3
"""The stages in which an executable is made, and in which it runs: XLA_FFI_ExecutionStage."""

_METADATA = 1  # XLA_FFI_Extension_Metadata
_STRING = 4  # XLA_FFI_AttrType_STRING
_COMMAND_BUFFERS = 1  # XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE

# XLA_FFI_Error_Code
INVALID_ARGUMENT, RESOURCE_EXHAUSTED, INTERNAL, UNAVAILABLE = 3, 8, 13, 14

# XLA_FFI_CallFrame: byte offsets of its fields.
EXTENSION_AT, CALL_API_AT, CONTEXT_AT, STAGE_AT = 8, 16, 24, 32
ARGUMENT_COUNT_AT, ARGUMENTS_AT, RESULT_COUNT_AT, RESULTS_AT = 56, 72, 96, 112
_ATTRIBUTE_COUNT_AT, _ATTRIBUTE_TYPES_AT, _ATTRIBUTES_AT = 136, 144, 160
# XLA_FFI_Api: the version, and byte offsets of functions.
_VERSION_AT, ERROR_CREATE, STREAM_GET, _TYPE_REGISTER, _STATE_SET, STATE_GET, ORDINAL_GET = (
    32, 48, 80, 88, 104, 112, 184
)  # fmt: skip
# XLA_FFI_Buffer: byte offsets of the address of its elements, and of the lengths of its axes.
BUFFER_DATA, BUFFER_DIMS = 24, 40

_pointer_at, _int_at = ctypes.c_uint64.from_address, ctypes.c_int.from_address
_span_at = (ctypes.c_uint64 * 2).from_address


class Frame:
    """One call of a handler, valid while it runs."""

    def __init__(self, address: int, target: Target) -> None:
        self._address, self._target = address, target

    def word(self, at: int) -> int:
        """The 8 bytes of the frame at this offset."""
        return _pointer_at(self._address + at).value

    def string(self) -> bytes:
        """The one attribute of the call, a string."""
        count = self.word(_ATTRIBUTE_COUNT_AT)
        if count != 1 or _int_at(self.word(_ATTRIBUTE_TYPES_AT)).value != _STRING:
            raise ValueError(f"expected one attribute, a string, got {count} attributes")
        address, length = _span_at(_pointer_at(self.word(_ATTRIBUTES_AT)).value)
        return ctypes.string_at(address, length)

    def _call(self, offset: int, request: ctypes.Array[ctypes.c_uint64]) -> int:
        """Call the function at `offset` of the API. Returns the last field of its arguments, where answers are."""
        error = _function_at(self.word(CALL_API_AT), offset)(ctypes.addressof(request))
        if error:
            raise RuntimeError("XLA refused the state of a call")
        return request[-1]

    def set_state(self, state: int) -> None:
        """Give XLA the state of the call that is being instantiated."""
        self._call(_STATE_SET, _request(48, self.word(CONTEXT_AT), INSTANTIATE, self._target.type_id, state))

    def state(self) -> int:
        """The address of the call's state."""
        return self._call(STATE_GET, _request(48, self.word(CONTEXT_AT), INSTANTIATE, self._target.type_id, 0))

    def error(self, code: int, message: str) -> int:
        """A new error, for the handler to return: it is XLA's from then on."""
        # C text ends at a null character, and surrogates have no code in UTF-8.
        text = ctypes.create_string_buffer(message.replace("\0", "\\0").encode(errors="backslashreplace"))
        request = _request(24 + 4, ctypes.addressof(text), code)
        error = _function_at(self.word(CALL_API_AT), ERROR_CREATE)(ctypes.addressof(request))
        return int(error or 0)

    def answer_metadata(self) -> bool:
        """Answer a query for metadata, if the call is one. RuntimeError for a version with other layouts."""
        extension = self.word(EXTENSION_AT)
        while extension:  # XLA_FFI_Extension_Base: size, type, next; then a pointer to XLA_FFI_Metadata.
            _, kind, following, metadata = struct.unpack("QI4xQQ", ctypes.string_at(extension, 32))
            if kind == _METADATA:
                # The metadata and the version begin with sizes and extensions, which XLA has set.
                (ctypes.c_int * 2).from_address(metadata + 24)[:] = list(self._version())
                ctypes.c_uint32.from_address(metadata + 32).value = _COMMAND_BUFFERS if self._target.records else 0
                _pointer_at(metadata + 40).value = self._registered_type()
                return True
            extension = following
        return False

    def _registered_type(self) -> int:
        """The id that XLA gave to the type of our states. The first call in a process registers the type."""
        target, type_id = self._target, _pointer_at(self._target.type_id)
        if not type_id.value:
            name = ctypes.create_string_buffer(f"multisample_{target.platform}".encode())
            information = _request(24, target.deleter)
            words = ctypes.addressof(name), len(name.value), target.type_id, ctypes.addressof(information)
            self._call(_TYPE_REGISTER, _request(48, *words))
        return type_id.value

    def _version(self) -> tuple[int, int]:
        major, minor = (ctypes.c_int * 2).from_address(self.word(CALL_API_AT) + _VERSION_AT)
        if major != MAJOR or minor < LEAST_MINOR:
            raise RuntimeError(
                f"jax: expected version {MAJOR}.{LEAST_MINOR} or a later {MAJOR}.x of XLA's foreign function interface,"
                f" got {major}.{minor}: install versions of jax and multisample that go together"
            )
        return major, minor


def _request(size: int, *words: int) -> ctypes.Array[ctypes.c_uint64]:
    """The struct of a function's arguments: its size in bytes, no extension, and fields of 8 bytes.

    A field of 4 bytes is the low half of a word, as in `Frame`.
    """
    return (ctypes.c_uint64 * (2 + len(words)))(size, 0, *words)


_function_of = functools.lru_cache(64)(ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p))


def _function_at(api: int, offset: int) -> Callable[[int], Any]:
    return _function_of(_pointer_at(api + offset).value)


class Target(NamedTuple):
    """What a target of custom calls does in Python."""

    call: Callable[[Frame, int], None]
    """``call(frame, launch)`` executes the `Launch` at an address. For address 0, it makes an executable's state."""
    platform: str
    """XLA's name of the platform. All targets of a platform share one type of state."""
    type_id: int
    """The address of the type id of the state; the id is 0 until XLA assigns it."""
    deleter: int
    """The address of the C function that frees a state."""
    records: bool
    """Whether XLA may record calls into command buffers."""


def handle(address: int, launch: int, target: Target) -> int:
    """Handle a call frame. Returns 0, or after an exception the address of an XLA error with its text.

    `launch` is the address of the `Launch` of a call that is executed. It is 0 where XLA makes an executable or
    asks for metadata, the only other stages with a handler.
    """
    frame = Frame(address, target)
    try:
        if not (frame.word(EXTENSION_AT) and frame.answer_metadata()):
            target.call(frame, launch)
        return 0
    except (TypeError, ValueError) as error:
        return frame.error(INVALID_ARGUMENT, str(error))
    except MemoryError as error:
        return frame.error(RESOURCE_EXHAUSTED, str(error) or "out of memory")
    except BaseException as error:
        return frame.error(INTERNAL, str(error) or type(error).__name__)

"""A backend of a third party, for tests."""

from collections.abc import Callable
from typing import Any

from multisample.backends import registry
from multisample.backends.contract import PROTOCOL, BackendStatus
from multisample.backends.launch import HOST, Launch, Operation


class FakeBackend:
    """A backend that delegates to the cpu backend and records its launches. It cannot run if it has `reasons`."""

    device_kinds: tuple[str, ...] = ("cpu",)
    host_library = "numpy"
    protocol = PROTOCOL
    operations: tuple[int, ...] = (Operation.sample, Operation.moments)

    def __init__(self, name: str = "fake", *reasons: str) -> None:
        self.name, self.reasons, self.status_calls = name, reasons, 0
        self.launched: list[Launch] = []

    def status(self) -> BackendStatus:
        self.status_calls += 1
        return BackendStatus(False, self.reasons) if self.reasons else BackendStatus(True, (), "1.2", "a stand-in")

    def prepare(self, device_kind: str) -> None:
        pass

    def adopt(self, array: Any) -> Any:
        return array

    def launch(self, launch: Launch) -> None:
        self.launched.append(launch)
        registry.find("cpu").launch(launch._replace(device=HOST, stream=0))

    def advancer(self, device: int) -> Callable[[int, int], None]:
        raise AssertionError("there is no counter in host memory")

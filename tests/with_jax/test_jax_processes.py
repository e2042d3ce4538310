"""Programs of JAX in other processes: exits, signals, forks, saved programs, command buffers and sharded calls."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_backend import FakeBackend
from jax.experimental import serialize_executable
from processes import run_python

import multisample
from multisample import perturb, sample, weighted_moments
from multisample._routes.jax import native, python_entry
from multisample.backends.launch import Operation

BEGIN = """
import os, pickle, signal, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
from fake_backend import FakeBackend
from jax.experimental import serialize_executable
import multisample
from multisample import sample
from multisample.backends import registry

class Slow(FakeBackend):
    seconds = 0.0
    def launch(self, launch):
        time.sleep(self.seconds)
        registry.find("cpu").launch(launch)

registry.register(Slow("python"))
mu = np.zeros(100, np.float32)
"""

CLOSED = """
f = jax.jit(lambda key: sample(mu, 1.0, 30, seed=key, backend="python"))
f(jax.random.key(0))
python_entry.close()
print(float(f(jax.random.key(3)).sum()))
wrong = []
def draw():
    try:
        f(jax.random.key(3)).sum()
    except Exception as error:
        wrong.append(str(error))
thread = threading.Thread(target=draw)
thread.start()
thread.join()
print(wrong)
python_entry.reopen()
"""

SIGNALS = """
class Alarm(Exception):
    pass
armed = False
def handler(*_):
    if armed:
        raise Alarm
signal.signal(signal.SIGALRM, handler)
key = jax.random.key(5)
for name in ("cpu", "python"):
    f = jax.jit(lambda key: sample(mu[:10], 1.0, 10, seed=key, backend=name))
    expected = np.asarray(f(key))
    start, counts = time.monotonic(), [0, 0, 0]
    # On a busy machine, few calls and alarms fit into a short time.
    while time.monotonic() < start + (0.3 if counts[0] > 50 and counts[1] > 5 else 60):
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)  # Longer than a call in Python takes on a slow machine.
            while True:
                x = f(key)
                counts[0] += 1
        except Alarm:
            counts[1] += 1
        except Exception as error:
            armed = False
            assert "which Python printed" in str(error) or "Alarm" in str(error), error
            counts[2] += 1
        armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert (np.asarray(x) == expected).all() and (np.asarray(f(key)) == expected).all()
    print(*counts)
"""

FORK = """
from multisample._routes.jax import python_entry
from multisample.backends.kernels.cpu import calls
Slow.seconds = 0.5
f = jax.jit(lambda key: sample(mu, 1.0, 30, seed=key, backend="python"))
g = jax.jit(lambda key: sample(mu, 1.0, 3000, seed=key))
jax.block_until_ready(g(jax.random.key(0)))
thread = threading.Thread(target=lambda: jax.block_until_ready(f(jax.random.key(0))))
thread.start()
while python_entry._entry[0] == 0:
    time.sleep(0.01)
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # JAX advises against forks.
    child = os.fork()
if child == 0:
    import ctypes
    python_entry.close()  # Does not wait for the parent's thread.
    from multisample._routes.jax import handlers
    from multisample._routes.jax.static import Static
    from multisample.backends.launch import HOST, Operation, pack
    x, vectors = np.empty((1, 100, 3000), np.float32), np.stack([mu, mu + 1])
    words = np.array([0, 7], np.uint32)
    launch = handlers._launch(Static("cpu", "float32", d=100, n=3000), HOST, 1)
    mu_at, sigma_at = (vector.ctypes.data for vector in vectors)
    addresses = dict(mu=mu_at, sigma=sigma_at, matrix=x.ctypes.data, seed_at=words.ctypes.data)
    run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(calls.function_address(launch))
    run(pack(launch._replace(**addresses)))
    os._exit(0 if (x[0] == sample(mu, 1.0, 3000, seed=7)).all() else 3)
for _ in range(1000):
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        break
    time.sleep(0.05)
else:
    os.kill(child, signal.SIGKILL)
    status = -1
thread.join()
assert python_entry._entry[0] == 0, python_entry._entry
Slow.seconds = 0
print(status)
"""

LOAD = """
multisample.jax.load_handlers()
exported, compiled = pickle.load(open(sys.argv[1], "rb"))
for f in (jax.export.deserialize(bytearray(exported)).call, serialize_executable.deserialize_and_load(*compiled)):
    x, y, z = f(jnp.asarray(mu), np.array([0, 6], np.uint32))
    assert (np.asarray(x) == sample(mu, 2.0, 7, seed=6)).all()
    assert (np.asarray(y) == sample(mu, 1.0, 5, seed=6)).all()
    assert (np.asarray(z["a"]) == multisample.perturb({"a": mu}, 1.0, seed=6, member=3)["a"]).all()
"""

IN_FLIGHT = """
g = jax.jit(lambda key: sample(np.zeros(1000, np.float32), 1.0, 10000, seed=key).sum())
jax.block_until_ready(g(jax.random.key(0)))
def work():
    g(jax.random.key(1))
    begun.set()
    threading.Event().wait()
begun = threading.Event()
threading.Thread(target=work, daemon=True).start()
begun.wait()
Slow.seconds = 0.05
def draws(key, _):
    return key, sample(mu, 1.0, 2000, seed=key, backend="python").sum()
f = jax.jit(lambda key: jax.lax.scan(draws, key, length=1000)[1])
f(jax.random.key(1))  # Needs Python when the process ends.
time.sleep(0.3)
g(jax.random.key(1))
"""


def save(path: Path) -> None:
    """Save a program in both of JAX's ways."""

    @jax.jit
    def draw(mu: Any, key: Any) -> Any:
        x, y = sample(mu, 2.0, 7, seed=key), sample(mu, 1.0, 5, seed=key, backend="python")
        return x, y, perturb({"a": mu}, 1.0, seed=key, member=3)

    with jax.default_device(jax.devices("cpu")[0]):
        operands = jnp.zeros(100), jax.random.key_data(jax.random.key(0))
        allowed = [jax.export.DisabledSafetyCheck.custom_call(f"multisample_{name}") for name in ("sample", "perturb")]
        exported = jax.export.export(draw, platforms=["cpu"], disabled_checks=allowed)(*operands)
        compiled = serialize_executable.serialize(draw.lower(*operands).compile())
    path.write_bytes(pickle.dumps((bytes(exported.serialize()), compiled)))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs forks and interval timers")
def test_saved_programs_forks_signals_and_a_closed_entry(registered: Callable[[Any], Any], tmp_path: Path) -> None:
    """In one process, one after another, since a process takes seconds to start."""
    pytest.importorskip("flatbuffers")
    registered(FakeBackend("python"))
    save(tmp_path / "programs")
    # The process runs the saved programs before it lowers any of its own, and exits while
    # some of its programs run.
    script = BEGIN + LOAD + FORK + SIGNALS + CLOSED + IN_FLIGHT
    ran = run_python("-c", script, str(tmp_path / "programs"), seconds=120, JAX_PLATFORMS="cpu")
    of_child, *of_signals, number, errors = ran.stdout.splitlines()
    # In a forked child, no thread is inside a handler in Python.
    assert of_child == "0"
    # Exceptions of signal handlers do not end the process.
    found = [tuple(map(int, line.split())) for line in of_signals]
    assert [calls > 50 and alarms > 5 for calls, alarms, _ in found] == [True, True]
    assert found[0][2] == 0  # The backend cpu runs no Python.
    # A closed entry admits the thread that closed it.
    expected = sample(np.zeros(100, np.float32), 1.0, 30, seed=3).sum()
    assert float(number) == pytest.approx(float(expected), rel=1e-4)
    assert "shutting down" in errors


CALLS = {
    Operation.sample: lambda key, x: sample(x, 1.0, 40, seed=key),
    Operation.gradient: lambda key, x: jax.grad(lambda y: (sample(x, y, 40, seed=key) ** 2).sum())(x),
    Operation.moments: lambda key, x: weighted_moments(x, 2.0, np.ones(3, np.float32), seed=key, order=2),
    Operation.perturb: lambda key, x: perturb({"x": x, "y": [x[:3]]}, [0.1, 2.0], seed=key, member=1),
}


@pytest.mark.parametrize("operation", CALLS, ids=lambda operation: operation.name)
def test_a_program_that_runs_does_not_enter_python(monkeypatch: Any, operation: Operation) -> None:
    """The states are resolved when an executable is made: running one never reaches Python."""
    program, x = jax.jit(CALLS[operation]), np.linspace(0, 1, 30, dtype=np.float32)
    entered: list[Any] = []
    with jax.default_device(jax.devices("cpu")[0]):
        expected, other = (jax.tree.map(np.asarray, program(jax.random.key(seed), x)) for seed in (8, 9))
        number = native.number(operation, on_device=False)
        target = python_entry.targets[number]
        call = lambda *call: (entered.append(call), target.call(*call))[1]  # noqa: E731
        monkeypatch.setitem(python_entry.targets, number, target._replace(call=call))
        for seed, results in ((8, expected), (9, other)):
            jax.tree.map(np.testing.assert_array_equal, program(jax.random.key(seed), x), results)
    assert entered == []
    for one, another in zip(jax.tree.leaves(expected), jax.tree.leaves(other), strict=True):
        assert (one != another).any()


PURGED = """
def drawn():
    import multisample
    moments = multisample.weighted_moments(jnp.ones(3), jnp.zeros(2), 1.0, seed=7)
    gradient = jax.grad(lambda mu: multisample.sample(mu, 1.0, 3, seed=7).sum())(jnp.zeros(2))
    x = multisample.sample(2**54 + 2**30 + 1, jnp.ones(2), 3, seed=7), multisample.perturb(jnp.zeros(2), 1.0, seed=7)
    return [np.asarray(y).tobytes().hex() for y in (*moments, gradient, *x)]

found = []
for _ in range(3):
    found.append(drawn())
    for name in [name for name in sys.modules if name.partition(".")[0] == "multisample"]:
        del sys.modules[name]
assert found[0] == found[1] == found[2]
from multisample._routes.jax import native
native.digest = lambda: "another version"
try:
    drawn()
except RuntimeError as error:
    print(error)
"""


def test_a_package_that_is_purged_and_imported_again_draws_the_same() -> None:
    message = "XLA keeps the handlers of another version of multisample, which this process imported before"
    assert run_python("-c", BEGIN + PURGED).stdout == f"jax: {message}: restart the process\n"


# Command buffers of CUDA need flags.
IN_COMMAND_BUFFERS = """
import sys
import jax, jax.numpy as jnp, numpy as np
from multisample import Key, perturb, sample

backend = sys.argv[1]
mu, sigma = np.linspace(-1, 1, 37, dtype=np.float32), np.linspace(1, 2, 37, dtype=np.float32)

@jax.jit
def draw(mu, sigma, key):
    x = sample(mu, sigma, 100, seed=key, backend=backend)
    y = sample(x.mean(1), sigma, 50, seed=Key(key, 1), backend=backend, layout="nd", antithetic=True)
    z = sample(y.mean(0), 1.0, 20, seed=Key(key, 2), backend=backend, noise="shared")
    tree = jax.lax.stop_gradient([mu, sigma.astype("float16")])
    return x, y, z, *perturb(tree, [1.0, 2.0], seed=Key(key, 3), member=4, backend=backend)

def loss(mu, sigma, key):
    return sum((x ** 2).sum() for x in draw(mu, sigma, key)[:3])

text = draw.lower(mu, sigma, jax.random.key(0)).compile().as_text()
for seed in range(5):  # The first runs record, later ones replay with other seeds.
    x, y, z, *tried = map(np.asarray, draw(mu, sigma, jax.random.key(seed)))
    for found, p in zip(tried, perturb([mu, sigma.astype("float16")], [1.0, 2.0], seed=Key(seed, 3), member=4)):
        assert (found == p).all()
    assert (x == sample(mu, sigma, 100, seed=seed)).all()
    center = np.asarray(jax.jit(lambda x: x.mean(1))(x))
    np.testing.assert_allclose(y, sample(center, sigma, 50, seed=Key(seed, 1), layout="nd", antithetic=True), atol=1e-5)
gradient = jax.jit(jax.grad(loss, (0, 1)))
first = gradient(mu, sigma, jax.random.key(3))
for _ in range(3):
    np.testing.assert_allclose(gradient(mu, sigma, jax.random.key(3)), first, rtol=1e-4)
jax.block_until_ready(gradient(mu, sigma, jax.random.key(4)))
print("recorded" if "command_buffer" in text else "not recorded")
"""


@pytest.mark.parametrize("name", ["cupy", "numba", "torch_ext"])
def test_calls_can_be_recorded_into_command_buffers(gpus: list[Any], name: str) -> None:
    status = multisample.list_backends()[name]
    if not status.available:
        pytest.skip("; ".join(status.reasons))
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_graph_min_graph_size=1"
    run = run_python("-c", IN_COMMAND_BUFFERS, name, seconds=600, XLA_FLAGS=flags)
    assert run.stdout.split()[-1] == "recorded"


SCRIPT = Path(__file__).parents[1] / "support" / "sharded_jax.py"


@pytest.mark.slow
def test_sharded_over_eight_virtual_devices() -> None:
    """One process runs all checks."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    run_python(str(SCRIPT), seconds=600, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")


def test_sharded_over_gpus(gpus: list[Any]) -> None:
    if len(gpus) < 2:
        pytest.skip("this JAX has one CUDA device")
    run_python(str(SCRIPT), seconds=600)

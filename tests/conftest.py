"""The `backend` fixture: every test that asks for it runs on the CPU, in the emulator and on CUDA.

The emulator is its hook build, which sees every access; `--backend NAME` (repeatable) chooses
others, "emulator" the fast build; `--emulator-seed N` seeds the order in which the emulator
runs CTAs and threads. `@pytest.mark.backends("cpu")` limits a test, `@pytest.mark.schedules` runs
it in the emulator under every kind of schedule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import emulator
import hypothesis
import pytest
from backends import BACKENDS, DEFAULT, EMULATED, Backend, available, get_backend

from paged_attn import _ops

DEFAULT_SCHEDULE = "random"
DEFAULT_SMS = 4

hypothesis.settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=50,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend", action="append", choices=BACKENDS, help="run only on this backend; repeatable"
    )
    parser.addoption("--emulator-seed", type=int, default=0, help="seed of the emulator's schedule")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "backends(*names): run on these backends only")
    config.addinivalue_line("markers", "schedules: in the emulator, run under every schedule")


def pytest_report_header(config: pytest.Config) -> str:
    chosen = config.getoption("--backend") or [name for name in DEFAULT if available(name)]
    return f"backends: {', '.join(chosen)}; emulator seed: {config.getoption('--emulator-seed')}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" not in metafunc.fixturenames:
        return
    chosen = metafunc.config.getoption("--backend") or DEFAULT
    limit = metafunc.definition.get_closest_marker("backends")
    schedules = [DEFAULT_SCHEDULE]
    if metafunc.definition.get_closest_marker("schedules") is not None:
        schedules = list(emulator.SCHEDULES)
    params = []
    for name in chosen:
        kinds = {name, "emulator"} if name in EMULATED else {name}
        if limit is not None and not kinds.intersection(limit.args):
            continue
        if name in EMULATED:
            ids = {s: f"{name}-{s}" if len(schedules) > 1 else name for s in schedules}
            params += [pytest.param((name, s), id=ids[s]) for s in schedules]
            continue
        missing = pytest.mark.skipif(not available(name), reason=f"no {name} here")
        params.append(pytest.param((name, ""), id=name, marks=missing))
    metafunc.parametrize("backend", params, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs kernels on something slower than a processor is slow."""
    for item in items:
        name, _ = getattr(getattr(item, "callspec", None), "params", {}).get("backend", ("", ""))
        if name in EMULATED or item.path.parent.name in ("emulator", "ptx"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """The backend under test; paged_attn's functions call its ops while the test runs."""
    name, schedule = request.param
    chosen = get_backend(name)
    with contextlib.ExitStack() as stack:
        if name in EMULATED:
            seed = request.config.getoption("--emulator-seed")
            hooks = name == "hooks"
            emulator.configure(seed=seed, schedule=schedule, sms=DEFAULT_SMS, hooks=hooks)
            if hooks:  # what torch allocates for results is watched, too
                stack.enter_context(emulator.product(hooks=True).captured_tensors())
        monkeypatch.setattr(_ops, "lib", chosen.namespace)
        yield chosen
        chosen.set_checks(False)

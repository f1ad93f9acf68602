"""What holds around every test: nothing is left behind, and chance can be repeated."""

from __future__ import annotations

import gc
import os
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from distckpt import exitstatus
from servers import FaultProxy, GatewayServer, MissingProgram, S3Server, SeaweedServer

pytest.register_assert_rewrite("distckpt.storage.contract")

# Inherited by every process that a test starts, also when its parent dies first: leaks of another test run on
# this machine are not blamed on this one.
_RUN_VARIABLE = "DISTCKPT_TEST_RUN"
_RUN = uuid.uuid4().hex
os.environ[_RUN_VARIABLE] = _RUN

_GRACE_S = 2.0
_SEED = pytest.StashKey[int]()

hypothesis.settings.register_profile("default", deadline=None, max_examples=50, print_blob=True)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-point", action="store_true", help="power loss on a real file system: all points, not some"
    )
    parser.addoption("--seed", type=int, default=None, help="seed of the rng fixture, from a failure's text")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Keep what was imported out of every later collection: several tests ask for many, at 0.5 s each."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    seed = item.stash.get(_SEED, None)
    if report.failed and seed is not None:
        report.sections.append(("seed", f"repeat with: pytest --seed {seed} '{item.nodeid}'"))
    return report


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers whose seed is in the text of a failure."""
    seed = request.config.getoption("--seed")
    if seed is None:
        seed = random.SystemRandom().randrange(2**32)
    request.node.stash[_SEED] = seed
    return random.Random(seed)


def _start(make: Callable[[Path], S3Server], folder: Path) -> Iterator[S3Server]:
    try:
        server = make(folder)
    except MissingProgram as missing:
        if os.environ.get("CI"):
            pytest.fail(str(missing))
        pytest.skip(str(missing))
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server; a test that kills it starts it again."""
    yield from _start(SeaweedServer, tmp_path_factory.mktemp("seaweed"))


@pytest.fixture(scope="session")
def minio_like_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Another one, of other code, with less of S3."""
    yield from _start(GatewayServer, tmp_path_factory.mktemp("gateway"))


@pytest.fixture
def s3_url(s3_server: S3Server) -> str:
    """A URL on `s3_server` below which there is nothing yet."""
    return s3_server.new_prefix()


ProxyOf = Callable[[S3Server], FaultProxy]


@pytest.fixture(scope="session")
def _proxies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyOf]:
    started: dict[int, FaultProxy] = {}

    def proxy_of(server: S3Server) -> FaultProxy:
        if id(server) not in started:
            started[id(server)] = FaultProxy(server, tmp_path_factory.mktemp("proxy"))
        return started[id(server)]

    yield proxy_of
    for proxy in started.values():
        proxy.stop()


@pytest.fixture
def proxy_of(_proxies: ProxyOf) -> Iterator[ProxyOf]:
    """Returns the proxy in front of a server, which fails as told until the test ends (see faultproxy.py)."""
    used: list[FaultProxy] = []

    def proxy_of(server: S3Server) -> FaultProxy:
        proxy = _proxies(server)
        if proxy not in used:
            used.append(proxy)
            proxy.reset()
        return proxy

    yield proxy_of
    for proxy in used:
        proxy.reset()


@pytest.fixture
def fault_proxy(proxy_of: ProxyOf, s3_server: S3Server) -> FaultProxy:
    """The proxy in front of `s3_server`."""
    return proxy_of(s3_server)


def _worker_processes() -> Iterator[str]:
    for process in psutil.process_iter(["cmdline"]):
        if any("distckpt.worker" in argument for argument in process.info["cmdline"] or ()):
            try:
                ours = process.environ().get(_RUN_VARIABLE) == _RUN
            except psutil.Error:
                continue
            if ours:
                yield f"worker process {process.pid}"


def _unreaped_children() -> Iterator[str]:
    for child in psutil.Process().children():
        try:
            if child.status() == psutil.STATUS_ZOMBIE:
                yield f"unreaped process {child.pid}"
        except psutil.Error:
            continue


def _descriptors() -> Iterator[str]:
    """Only those that can be distckpt's: torch and gloo open descriptors on first use and keep them."""
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if (
            "memfd:distckpt" in target
            or "[pidfd]" in target
            or ".distcp" in target
            or "/.distckpt/" in target
        ):
            yield f"descriptor of {target}"


def _mappings() -> Iterator[str]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:distckpt" in line:
            yield f"mapping {line.split()[0]} of {line.split(maxsplit=5)[5]}"


def _shared_files() -> Iterator[str]:
    for path in Path("/dev/shm").glob("distckpt*"):
        yield f"shared memory file {path}"


def _resources() -> Counter[str]:
    found: Counter[str] = Counter()
    for probe in (_worker_processes, _unreaped_children, _descriptors, _mappings, _shared_files):
        found.update(probe())
    return found


@pytest.fixture(autouse=True)
def no_failure_is_left() -> Iterator[None]:
    """Have no save that failed in a test, and that it did not ask for, change the exit status of pytest."""
    yield
    exitstatus._ExitState.unheard.clear()


@pytest.fixture(autouse=True)
def leak_check() -> Iterator[None]:
    """Fail a test that leaves a process, descriptor, mapping or shared memory of distckpt behind (I8).

    Fixtures of a wider scope are set up before this one and may hold some; those of the test itself are torn
    down before the check.
    """
    before = _resources()
    yield
    deadline = time.monotonic() + _GRACE_S
    leaked = _resources() - before
    while leaked and time.monotonic() < deadline:
        time.sleep(0.02)
        leaked = _resources() - before
    if leaked:
        pytest.fail("left behind: " + "; ".join(sorted(leaked.elements())))

"""What does an idempotent request cost, beside the bare endpoint and beside what people use instead?

The same FastAPI endpoint, one uvicorn worker, 64 connections by wrk, a fresh key with every request. The bare
one ignores the key. The contenders are asgi-idempotency-header on Redis, which it recommends, and
fastapi-idempotency in memory, its default; neither survives a kill -9. duly stores on SQLite, with a flush
before the handler runs and one before the answer: in a file that other processes may use at the same time,
and in one that its process has to itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.measure import ROOT, Contender, Median, Options, Report, figure, folder, rounds
from bench.processes import NoAnswer, Server
from bench.servers import free_port, redis_server, running, until_open

CONNECTIONS = 64
OURS, OWNED = "duly, SQLite", "duly, SQLite of one process"
KEYS = """
local count = 0
local own = tostring({}):sub(8)
request = function()
  count = count + 1
  local key = own .. "-" .. os.time() .. "-" .. count
  local headers = {["Content-Type"] = "application/json", ["Idempotency-Key"] = key}
  return wrk.format("POST", "/orders", headers, '{"id":"o-1","amount":12}')
end
"""


@contextlib.contextmanager
def server(kind: str, store: str) -> Iterator[Server]:
    """The endpoint behind one of the middlewares."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "bench.middleware_app:app", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--log-level", "warning", "--no-access-log"],
        cwd=ROOT,
        env=os.environ | {"BENCH_KIND": kind, "BENCH_STORE": store},
    )
    with running(process):
        until_open(port, process, f"the endpoint, {kind}")
        yield Server(f"http://127.0.0.1:{port}", process.pid, f"the endpoint, {kind}")


def requests(endpoint: Server, script: Path, seconds: int, work: list[float]) -> Contender:
    """Requests a second, as wrk counts them; one that is not answered with 200 is an error. What each costs
    in processor time (µs) is added to `work`."""

    async def measure() -> float:
        before = endpoint.worked
        command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-s", str(script), endpoint.url]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: ASYNC221
        if "Non-2xx" in said or "Socket errors" in said:
            raise NoAnswer(f"wrk: {said}")
        rate = re.search(r"Requests/sec:\s*([\d.]+)", said)
        count = re.search(r"(\d+) requests in", said)
        assert rate is not None, said
        assert count is not None, said
        work.append((endpoint.worked - before) / int(count[1]) * 1e6)
        return float(rate[1])

    return measure


async def run(options: Options) -> Report:
    """Measure all of them in turns."""
    seconds, turns = options.pick((3, 3), (5, 7))
    title = f"idempotent requests, {CONNECTIONS} connections"
    if shutil.which("wrk") is None or importlib.util.find_spec("fastapi") is None:
        return Report(title, notes=["wrk or FastAPI is not installed: nothing was measured"])
    notes: list[str] = []
    contenders: dict[str, Contender] = {}
    work: dict[str, list[float]] = {}
    with contextlib.ExitStack() as all_:
        place = all_.enter_context(folder())
        script = place / "keys.lua"
        script.write_text(KEYS)
        kinds = {
            "bare": "",
            OURS: f"sqlite:///{place}/keys.db",
            OWNED: f"sqlite:///{place}/owned.db?mode=rw",
        }
        redis = all_.enter_context(redis_server(place / "redis"))
        if redis is not None and importlib.util.find_spec("idempotency_header_middleware"):
            kinds["asgi-idempotency-header, Redis"] = redis.url
        if importlib.util.find_spec("fastapi_idempotency"):
            kinds["fastapi-idempotency, memory"] = "memory"
        for kind, store in kinds.items():
            endpoint = all_.enter_context(server(kind.partition(",")[0], store))
            contenders[kind] = requests(endpoint, script, seconds, work.setdefault(kind, []))
        rate = await rounds(contenders, turns)
    rivals = [name for name in rate if "idempotency" in name]
    ours = rate[OURS]
    figures = [figure(name, value, "requests/s") for name, value in rate.items() if "duly" not in name]
    figures += [figure(name, rate[name], "requests/s", rate["bare"], "bare") for name in (OURS, OWNED)]
    if len(rivals) == 2:
        fastest = max(rate[name] for name in rivals)
        figures.append(figure(OURS, ours, "requests/s", fastest, "the faster of the others"))
    else:
        notes.append("a contender is not installed: nothing to compare with")
    figures += [
        figure(f"{name}, processor time", Median(costs), "µs", *_beside(name, work))
        for name, costs in work.items()
    ]
    return Report(title, figures, dict(rate), notes=notes)


def _beside(name: str, work: dict[str, list[float]]) -> tuple[float, str] | tuple[()]:
    """What the processor time of a request behind duly is compared with."""
    return (Median(work["bare"]), "bare") if "duly" in name else ()

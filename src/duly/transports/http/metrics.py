"""Shows the metrics of a hub: `/metrics` for Prometheus, `/v1/metrics` for the dashboard and `duly top`, and
`/healthz` and `/readyz` for supervisors and load balancers.

The law: metrics are for admins and for accounts of the role `monitor`. A client on the same machine may read
`/metrics` without a token; one that comes through a proxy, or under a name that is not this machine's, may
not. Health needs no token and tells no secret.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from aiohttp import HttpVersion11, web

from duly.errors import DulyError, NotAllowed
from duly.identity.accounts import Principal, Role
from duly.runtime.telemetry import ChartSnapshot, TelemetrySnapshot
from duly.runtime.thresholds import JudgedMetric, judge
from duly.runtime.time_series import ChartStep
from duly.transports.connections import address_of
from duly.transports.http import messages as http
from duly.transports.http.gate import OWN_NAMES, host_name

if TYPE_CHECKING:
    from duly.transports.http.exposition import Exposition

_PROXIED: Final = frozenset(
    {
        "forwarded", "via", "x-real-ip", "x-client-ip", "x-cluster-client-ip", "true-client-ip",
        "cf-connecting-ip", "cf-ray", "cf-visitor", "fastly-client-ip", "fly-client-ip", "cdn-loop",
        "x-envoy-external-address", "x-original-forwarded-for", "x-original-host", "x-amzn-trace-id",
        "x-scheme", "x-url-scheme", "front-end-https",
    }
)  # fmt: skip
"""Headers that proxies add to a request; also everything that begins with X-Forwarded-."""


class ClusterTotal(msgspec.Struct, frozen=True):
    """A total of all hubs on the ledger."""

    name: str
    labels: dict[str, str]
    value: int


class MetricsAnswer(msgspec.Struct, frozen=True):
    """The metrics of one hub, the totals of all hubs, those metrics that have a threshold, and for admins how
    the parts of this hub are."""

    snapshot: TelemetrySnapshot
    cluster: list[ClusterTotal]
    thresholds: list[JudgedMetric]
    state: dict[str, object]


class MetricsBackend(http.MessagesBackend, Protocol):
    """The interface of the hub for metrics."""

    async def authenticate(self, token: str | None, address: str) -> Principal:
        """Return the account of a token, also of one that may only read metrics; raises
        `NotAuthenticated`."""
        ...

    async def measure(self, *, stored: bool = False) -> TelemetrySnapshot:
        """Return all metrics. With `stored` everything is stored first, and shown as it is stored."""
        ...

    async def cluster_totals(self) -> list[ClusterTotal]:
        """Return the totals of all hubs."""
        ...

    def chart(self, step: ChartStep) -> ChartSnapshot:
        """Return the columns of a chart."""
        ...


def routes(server: MetricsBackend) -> list[web.RouteDef]:
    """Return the routes of metrics and health."""
    shown = MetricsEndpoint(server)
    return [
        web.get("/metrics", shown.scrape),
        web.get("/v1/metrics", shown.metrics),
        web.get("/v1/metrics/{step}", shown.chart),
        web.get("/healthz", shown.alive),
        web.get("/readyz", http.MessagesEndpoint(server).health),
    ]


class MetricsEndpoint:
    """Answers requests for metrics."""

    def __init__(self, server: MetricsBackend) -> None:
        self._server = server
        self._exposition: Exposition | None = None

    async def scrape(self, request: web.Request) -> web.Response:
        """Answer Prometheus, which asks for metrics as text."""
        try:
            if not is_local(request):
                await self._reader(request)
            snapshot = await self._server.measure(stored=True)
        except DulyError as trouble:
            return http.problem(trouble)
        if self._exposition is None:
            # Not every hub is scraped: what only that needs is loaded only then.
            from duly.transports.http.exposition import Exposition

            self._exposition = Exposition()
        return web.Response(
            body=self._exposition.text(snapshot), headers={"Content-Type": self._exposition.content_type}
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """Answer with all metrics as JSON."""
        try:
            who = await self._reader(request)
            totals = await self._server.cluster_totals()
            state = self._server.health.state() if who.role is Role.ADMIN else {}
            snapshot = await self._server.measure()
            answer = MetricsAnswer(snapshot, totals, judge(snapshot), state)
        except DulyError as trouble:
            return http.problem(trouble)
        return http.as_json(answer)

    async def chart(self, request: web.Request) -> web.Response:
        """Answer with the columns of a chart: seconds, minutes or hours."""
        try:
            await self._reader(request)
            word = request.match_info["step"]
            if word not in frozenset(ChartStep):
                known = ", ".join(ChartStep)
                return http.error(404, "not_found", f"there is no chart of {word[:80]!r}; there are {known}")
            return http.as_json(self._server.chart(ChartStep(word)))
        except DulyError as trouble:
            return http.problem(trouble)

    async def alive(self, request: web.Request) -> web.Response:
        """Answer that the process works; a process that does not answer should be restarted."""
        return http.as_json({"ok": True})

    async def _reader(self, request: web.Request) -> Principal:
        who = await self._server.authenticate(http.token_in(request), address_of(request))
        if who.role not in (Role.ADMIN, Role.MONITOR):
            raise NotAllowed(
                f"{who.name} is {who.role.with_article}; metrics are for admins and monitors: "
                "'duly add monitor NAME' makes one"
            )
        return who


def is_local(request: web.Request) -> bool:
    """Return whether a request comes from a program on this machine, and not through a proxy or from a page.

    nginx adds no headers unless configured, and then speaks HTTP/1.0; programs that read metrics speak 1.1.
    """
    return (
        request.remote in OWN_NAMES
        and request.version >= HttpVersion11
        and host_name(request.headers.get("Host", "")) in OWN_NAMES
        and "Origin" not in request.headers
        and not any(_is_of_proxy(name.lower()) for name in request.headers)
    )


def _is_of_proxy(header: str) -> bool:
    return header in _PROXIED or header.startswith("x-forwarded-")

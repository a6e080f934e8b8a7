"""The replicas as a deployment of Ray Serve. All that depends on Ray is in this file, since its router API is alpha.

An actor for each replica supervises the project's own server, and no request passes through Ray: the queue asks Ray's
router which replicas there are. Ray starts, watches, replaces and scales the actors.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from integrations.ray import options
from routing import autoscalers

for _name, _value in options.RAY_SETTINGS.items():
    os.environ.setdefault(_name, _value)

import aiohttp  # noqa: E402
import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray.experimental import internal_kv  # noqa: E402
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig  # noqa: E402
from ray.serve.request_router import RequestRouter  # noqa: E402

from integrations.ray.fleet_queue import Found  # noqa: E402
from integrations.ray.options import Plan  # noqa: E402
from integrations.ray.server_process import ServerProcess  # noqa: E402
from routing.autoscalers import Bounds, Load  # noqa: E402

APP = "fleet"
FIND_SECONDS = 1.0
WAITING, FRESH_SECONDS = b"eb-fleet-waiting", 10.0  # the key of what waits in the queue, and how long that is believed
REPORT_SECONDS = 1.0  # between two reports of a replica to the routers
LOAD_SECONDS = 2.0  # between two reports of a replica to the autoscaler; Ray's own 10 let a load of 20 s pass unseen
CHECK_SECONDS = 5.0
DRAIN_SPARE = 15.0  # seconds that a replica may take to end beyond the longest request


class NamingRouter(RequestRouter):  # type: ignore[misc]
    """Names the replicas instead of choosing one. Without Ray's FIFOMixin, which would swap replicas between requests."""

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> list[list[Any]]:
        """Put the replicas into the list of the call, which is in this process and so passed by reference."""
        pending_request.args[0][:] = [
            Found(one.replica_id.unique_id, one.replica_metadata["url"], one.routing_stats or {})
            for one in candidate_replicas
        ]
        return [list(candidate_replicas)]


class RayReplicas:
    """The replicas behind a handle of Ray Serve."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def find(self) -> list[Found]:
        """See `Source.find`."""
        found: list[Found] = []
        with contextlib.suppress(asyncio.TimeoutError):  # Ray waits until there is a replica
            await asyncio.wait_for(self._pick(found), FIND_SECONDS)
        return found

    async def _pick(self, found: list[Found]) -> None:
        # Without a reservation, which would cost a call to the replica; Ray's own proxy chooses like this.
        async with self._handle.pick.choose_replica(found, _reserve=False):
            pass

    def report(self, waiting: Load) -> None:
        """See `Source.report`. The autoscaler is in a process of Ray's, which shares its key-value store."""
        internal_kv._internal_kv_put(WAITING, json.dumps([time.time(), waiting]).encode(), overwrite=True)


class ReplicaActor:
    """One server process and what Ray asks about it."""

    async def __init__(self, environment: Mapping[str, str], host: str, drain_seconds: float) -> None:  # type: ignore[misc]
        # Ray awaits it.
        self.server = ServerProcess(environment, host or ray.util.get_node_ip_address())
        self.drain_seconds = drain_seconds
        key = environment.get("EB_API_KEY")
        self.session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(CHECK_SECONDS), headers={"Authorization": f"Bearer {key}"} if key else None
        )
        await asyncio.to_thread(self.server.wait)
        self._watching = asyncio.create_task(self._end_with_server())

    async def _end_with_server(self) -> None:
        """End this process when the server does, so that Ray replaces both at once."""
        while not self.server.has_ended:
            await asyncio.sleep(0.2)
        os._exit(1)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return what the queue learns of the replica. Ray asks once."""
        return {"url": self.server.url, "pid": os.getpid()}

    async def _load(self) -> Load:
        async with self.session.get(f"{self.server.url}/stats") as answer:
            stats = await answer.json()
        engine = stats["engine"]
        kv = engine["kv"] or {"pages_total": 0, "pages_used": 0, "page_size": 0}
        return Load(
            running=stats["requests-running"], waiting=stats["requests-waiting"], slots=engine["max_batch_size"],
            kv_used=kv["pages_used"] / kv["pages_total"] if kv["pages_total"] else 0.0,
            kv_tokens=kv["pages_total"] * kv["page_size"], waiting_tokens=stats["tokens-waiting"],
            prefill_tokens=stats["prompt-tokens-waiting"],
        )  # fmt: skip

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return what routers may know. Ray's controller asks every REPORT_SECONDS and tells all routers."""
        return (await self._load())._asdict()

    record_autoscaling_stats = record_routing_stats  # Ray averages what the autoscaler may know

    async def check_health(self) -> None:
        """Raise when the server does not answer or its loop hangs. After three times Ray replaces the actor."""
        async with self.session.get(f"{self.server.url}/health") as answer:
            answer.raise_for_status()

    def pick(self) -> None:
        """Do nothing: Ray's `choose_replica` needs the name of a method, but never calls it."""

    def __del__(self) -> None:
        """Let the server drain. Requests go past Ray, which believes the actor idle and waits for nothing else."""
        if hasattr(self, "_watching"):
            self._watching.cancel()
            self.server.drain(self.drain_seconds)


class Scaler:
    """One of our autoscalers as a policy of Ray, which keeps to the bounds and waits for `upscale_delay_s`."""

    def __init__(self, autoscaler: str) -> None:
        self._wanted = autoscalers.make(autoscaler)

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        columns: Mapping[str, Mapping[Any, float]] = ctx.aggregated_metrics or {}
        loads = [
            Load(**{name: columns[name].get(replica, 0) for name in Load._fields if name in columns})  # type: ignore[arg-type]
            for replica in ctx.running_replicas
        ]
        if not loads:
            return ctx.target_num_replicas, {}
        queued = self._queued()
        loads[0] = loads[0]._replace(**{name: getattr(loads[0], name) + value for name, value in queued.items()})
        slots, kv_tokens = max(load.slots for load in loads), max(load.kv_tokens for load in loads)
        loads += [Load(slots=slots, kv_tokens=kv_tokens)] * (ctx.target_num_replicas - len(loads))  # these are starting
        return self._wanted(loads, Bounds(ctx.capacity_adjusted_min_replicas, ctx.capacity_adjusted_max_replicas)), {}

    def _queued(self) -> dict[str, float]:
        """Return what waits in the queue, as fields of a load; nothing if it has not been heard of for a while."""
        stored = internal_kv._internal_kv_get(WAITING) if internal_kv._internal_kv_initialized() else None
        at, load = json.loads(stored or "[0, []]")
        fields = ("waiting", "waiting_tokens", "prefill_tokens")
        return {name: getattr(Load(*load), name) for name in fields} if time.time() - at < FRESH_SECONDS else {}


def replicas(plan: Plan) -> Any:
    """Return the deployment of the replicas."""
    least, most = plan.replicas
    count: dict[str, Any] = {"num_replicas": least}
    if most > least:
        policy = AutoscalingPolicy(policy_function=Scaler, policy_kwargs={"autoscaler": plan.autoscaler})
        scaling = AutoscalingConfig(
            min_replicas=least, max_replicas=most, policy=policy,
            look_back_period_s=options.AVERAGE_SECONDS, metrics_interval_s=LOAD_SECONDS,
            upscale_delay_s=plan.upscale_delay, downscale_delay_s=plan.downscale_delay,
        )  # fmt: skip
        count = {"autoscaling_config": scaling}
    router = RequestRouterConfig(request_router_class=NamingRouter, request_routing_stats_period_s=REPORT_SECONDS)
    deployment = serve.deployment(
        ReplicaActor, name="replica", request_router_config=router, health_check_period_s=1, health_check_timeout_s=10,
        graceful_shutdown_timeout_s=plan.config.request_timeout + DRAIN_SPARE,
        ray_actor_options={"num_cpus": plan.cpus, "num_gpus": plan.gpus}, **count,
    )  # fmt: skip
    host = "127.0.0.1" if plan.is_local else ""
    return deployment.bind(plan.environment, host, plan.config.request_timeout + DRAIN_SPARE / 2)


def start(plan: Plan) -> None:
    """Connect to the cluster of the plan, or start Ray on this machine."""
    common = {"runtime_env": options.runtime(), "log_to_driver": False, "logging_level": "warning"}
    if plan.is_local:  # not all ports of its processes listen on this address alone
        cpus = math.ceil(plan.cpus * plan.replicas.most)
        own = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": 80 << 20}
        ray.init(_node_ip_address="127.0.0.1", **own, **common)
    else:
        ray.init(address=plan.address, **common)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # of this process; the actors write to files
    serve.start(proxy_location="Disabled")


def deploy(deployment: Any) -> Any:
    """Start the replicas, or replace those there are one after the other; return their handle when all are ready.

    RuntimeError, with the reason of the server, if it does not start.
    """
    try:
        return serve.run(deployment, name=APP, route_prefix=None)
    except RuntimeError:
        application = serve.status().applications.get(APP)
        messages = [one.message for one in application.deployments.values()] if application else []
        found = re.search(r"ServerFailed: (.*)", "\n".join(messages))
        if found is None:
            raise
    raise RuntimeError(found[1])


def stop(plan: Plan) -> None:
    """End the replicas, each after its open requests. On a cluster, other applications stay."""
    if plan.is_local:
        serve.shutdown()
    else:
        serve.delete(APP)


def disconnect() -> None:
    """Leave the cluster, or end Ray on this machine."""
    ray.shutdown()

"""Which upstreams can be reached, as known from requests or from test connections that `/health` and `/ready` open.

A test connection carries no request, so it costs nothing at a hosted API. This module must not know queues or policies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from yarl import URL

from integrations.queue.sites import Site

LOOK_SECONDS = 1.0


async def look(sites: Sequence[Site]) -> None:
    """Open a connection to each upstream without open requests, and note whether that works."""
    await asyncio.gather(*(_look(site) for site in sites if not site.open or site.down_since))


async def _look(site: Site) -> None:
    url = URL(site.url)
    opening = asyncio.open_connection(url.host, url.port, ssl=url.scheme == "https" or None)
    try:
        _, writer = await asyncio.wait_for(opening, LOOK_SECONDS)
    except (OSError, asyncio.TimeoutError):
        site.down_since = site.down_since or time.time()
    else:
        site.down_since = None
        writer.close()


def state(sites: Sequence[Site]) -> tuple[str, str | None]:
    """Return `down` if no upstream can be reached or may get a request, else `ok`; and which ones fail, and since when."""
    failures, is_down = [], True
    for site in sites:
        since, how, rest = site.down_since, f"{site.name} cannot be reached", site.rest
        if since is None and rest is not None and rest.is_failure:
            since, how = time.time() - (rest.clock() - rest.since), rest.why
        if since is not None:
            failures.append(f"{how} since {time.strftime('%F %T UTC', time.gmtime(since))}")
        # After its rest, its next request may find it well.
        is_down = is_down and since is not None and not (site.down_since is None and site.may_be_asked)
    return "down" if is_down else "ok", "; ".join(failures) or None

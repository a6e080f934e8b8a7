"""Two clients, 3:1, or a burst, on a server that `./eb vllm serve` started: python tests/integrations/vllm/shares.py URL MODEL shares|burst.

`shares` prints each client's part of the tokens while both have requests waiting; `burst` the mean seconds to the first token.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time

import aiohttp

N = 64


async def one(
    session: aiohttp.ClientSession, url: str, body: dict[str, object], seen: list[tuple[float, str, bool]]
) -> None:
    first = True
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                seen.append((time.perf_counter(), str(body["user"]), first))
                first = False


async def main(url: str, model: str, kind: str) -> None:
    rng, seen = random.Random(7), list[tuple[float, str, bool]]()
    bodies = [
        {"model": model, "prompt": [rng.randrange(5, 4000) for _ in range(rng.randrange(8, 120))], "user": "bob" if i % 4 == 3 else "alice",
         "max_tokens": max(2, min(200, int(rng.lognormvariate(3.4, 1.0)))), "ignore_eos": True, "stream": True}
        for i in range(N)
    ]  # fmt: skip
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=900)
    ) as session:
        began = time.perf_counter()
        await asyncio.gather(*(one(session, url, body, seen) for body in bodies))
    firsts = [at - began for at, _, first in seen if first]
    # Bob, with fewer requests, is done first: until his last request has begun, both have requests waiting.
    until = max(at for at, user, first in seen if first and user == "bob")
    both = [user for at, user, _ in seen if at <= until]
    if kind == "shares":
        print(
            f"alice {both.count('alice') / len(both):.2f}, bob {both.count('bob') / len(both):.2f} of {len(both)} tokens"
        )
    else:
        print(
            f"mean seconds to the first token {sum(firsts) / len(firsts):.3f}, all answers in {max(at for at, *_ in seen) - began:.1f} s"
        )


asyncio.run(main(*sys.argv[1:4]))

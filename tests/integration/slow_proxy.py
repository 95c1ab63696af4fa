"""A server in front of another that hands on every answer late; an answer about /trickle/ comes drop by drop.

usage: slow_proxy.py HOST:PORT TARGET_HOST:PORT DELAY_SECONDS BYTES_PER_SECOND
"""

from __future__ import annotations

import asyncio
import contextlib
import sys


async def serve(listen: str, target: str, delay: float, rate: float) -> None:
    """Until it is ended. ``delay`` seconds before each answer; ``rate`` bytes a second where the path says trickle."""
    host, _, port = target.partition(":")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        trickling = False

        async def questions() -> None:
            nonlocal trickling
            while data := await reader.read(65536):
                trickling = trickling or b"/trickle/" in data.partition(b"\r\n")[0]
                back.write(data)
                await back.drain()
            back.write_eof()

        async def answers() -> None:
            while data := await there.read(65536):
                await asyncio.sleep(delay)
                step = max(1, int(rate / 4)) if trickling else len(data)
                for at in range(0, len(data), step):
                    writer.write(data[at : at + step])
                    await writer.drain()
                    if trickling:
                        await asyncio.sleep(0.25)
            writer.close()

        with contextlib.suppress(OSError):
            await asyncio.gather(questions(), answers())

    server = await asyncio.start_server(connected, *listen.split(":"))
    print("listening on", listen, flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])))

"""Between a client and a server: TLS, or a connection that breaks."""

import asyncio
import ssl
import threading


class Forwarder:
    """Hands connections on to a port of this machine while the context is open.

    Args:
        port: the server's.
        tls: what clients have to speak; None for plain TCP.
        cut_after: bytes from the server, after which a connection breaks.

    Attributes:
        url: "localhost:port", for clients.
    """

    def __init__(self, port: int, tls: ssl.SSLContext | None = None, cut_after: int = 2**62) -> None:
        self._port, self._tls, self._cut_after = port, tls, cut_after
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="forwarder", daemon=True)

    def __enter__(self) -> "Forwarder":
        self._thread.start()
        serve = asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._tls)
        server = asyncio.run_coroutine_threadsafe(serve, self._loop).result(10)
        self.url = f"localhost:{server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        pumps = [self._pump(reader, up_writer, 2**62), self._pump(up_reader, writer, self._cut_after)]
        await asyncio.wait([asyncio.ensure_future(pump) for pump in pumps], return_when=asyncio.FIRST_COMPLETED)
        for side in writer, up_writer:
            side.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int) -> None:
        while most > 0 and (data := await reader.read(min(most, 65536))):
            most -= len(data)
            writer.write(data)
            await writer.drain()

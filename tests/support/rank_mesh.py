"""Connect the ranks of a group by Unix sockets, and exchange frames of bytes between them."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import Store

_NUMBER = struct.Struct("<Q")
_CHUNK = 1 << 20


class Mesh:
    """Connections of this rank to others. One thread at a time may use it; any thread may close it."""

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        self._sockets = sockets
        for connection in sockets.values():
            connection.setblocking(False)

    def peers(self) -> list[int]:
        """Return the ranks at the other ends."""
        return sorted(self._sockets)

    def exchange(self, frames: Mapping[int, bytes], seconds: float) -> dict[int, bytes]:
        """Send a frame to each of these ranks and receive one from each.

        Raises:
            TimeoutError: some ranks did not send a frame in time; ``args[0]`` lists them.
            ConnectionError: a rank has closed its end; ``args[0]`` lists it.
        """
        end = time.monotonic() + seconds
        unsent = {rank: memoryview(_NUMBER.pack(len(frame)) + frame) for rank, frame in frames.items()}
        received = {rank: bytearray() for rank in frames}
        with selectors.PollSelector() as selector:
            for rank in frames:
                selector.register(self._sockets[rank], selectors.EVENT_READ | selectors.EVENT_WRITE, rank)
            while waiting := {key.data for key in selector.get_map().values()}:
                ready = selector.select(max(0.0, end - time.monotonic()))
                if not ready:
                    raise TimeoutError(sorted(waiting))
                for key, events in ready:
                    rank, connection = key.data, self._sockets[key.data]
                    try:
                        if events & selectors.EVENT_WRITE and unsent[rank]:
                            unsent[rank] = unsent[rank][connection.send(unsent[rank]) :]
                        if events & selectors.EVENT_READ:
                            _receive(connection, received[rank])
                    except BlockingIOError:
                        continue
                    except OSError as error:
                        raise ConnectionError([rank]) from error
                    has_frame = _missing(received[rank]) == 0
                    wanted = (0 if has_frame else selectors.EVENT_READ) | (selectors.EVENT_WRITE if unsent[rank] else 0)
                    if wanted:
                        selector.modify(connection, wanted, rank)
                    else:
                        selector.unregister(connection)
        return {rank: bytes(data[_NUMBER.size :]) for rank, data in received.items()}

    def tell(self, frame: bytes) -> None:
        """Send a small frame to all ranks that are still there, without waiting for theirs."""
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.send(_NUMBER.pack(len(frame)) + frame)

    def interrupt(self) -> None:
        """End the connections, and with them an exchange in another thread."""
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections; the other ranks can still read what was sent."""
        for connection in self._sockets.values():
            connection.close()


def _missing(data: bytearray) -> int:
    """Return the number of bytes to read next: of the length of the frame, then of the frame."""
    if len(data) < _NUMBER.size:
        return _NUMBER.size - len(data)
    (size,) = _NUMBER.unpack_from(data)
    return int(_NUMBER.size + size - len(data))


def _receive(connection: socket.socket, data: bytearray) -> None:
    while missing := _missing(data):  # never reads into the next frame
        chunk = connection.recv(min(missing, _CHUNK))
        if not chunk:
            raise ConnectionResetError
        data += chunk


def connect(store: Store, rank: int, size: int, timeout: timedelta, count: int) -> list[dict[int, socket.socket]]:
    """Connect this rank to every other one ``count`` times; collective. No key stays in the store."""
    connections: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(timeout.total_seconds())
        listener.bind("")  # an abstract address, which leaves no file
        listener.listen(count * size)
        if rank < size - 1:
            store.set(str(rank), listener.getsockname().hex())
        for other in range(rank):
            store.wait([str(other)], timeout)
            address = bytes.fromhex(store.get(str(other)).decode())
            for number in range(count):
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(address)
                connection.sendall(_NUMBER.pack(rank) + _NUMBER.pack(number))
                connections[number][other] = connection
        for _ in range(count * (size - 1 - rank)):
            connection, _ = listener.accept()
            other, number = struct.unpack("<QQ", connection.recv(2 * _NUMBER.size, socket.MSG_WAITALL))
            connections[number][other] = connection
        if rank < size - 1:
            store.delete_key(str(rank))
    return connections

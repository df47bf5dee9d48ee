"""Frames over a socket: a fixed header, a few small extras, a pickled payload and raw buffers beside it.

    header   "MF", kind, epoch, number of the call, bytes of the extras, bytes of the payload (network byte order)
    extras   marshalled: ids of registers to free, segments given back, sizes of buffers, segment they are in
    payload  a pickle of protocol 5
    buffers  in the stream, or in shared memory whose file is passed along (Unix sockets)

A peer has shown the session's token before the first frame is read. Sizes beyond the bounds end the connection.
"""

from __future__ import annotations

import array
import contextlib
import marshal
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .compact import Buffer, bytes_of
from .segments import SHARED, Placed, SegmentReader, SegmentWriter, is_available

_HEADER = struct.Struct("!2sBIQIQ")
_MAGIC = b"MF"
# Bounds of a frame's parts, in bytes, and of all its buffers together. They stop nonsense, not large models.
MOST_EXTRAS, MOST_PAYLOAD, MOST_BUFFERS = 1 << 26, 1 << 32, 1 << 42
_CHUNK, _FDS = 1 << 14, socket.CMSG_SPACE(4 * 4)
_ENDED = "the peer has closed the connection"
_STALL = 0.5  # Seconds after which a send that does not move asks whether it should go on.


class Closed(ConnectionError):
    """The peer has closed the connection, or its process has ended."""


class BadFrame(Closed):
    """What came is no frame, or too large for one; the connection is closed."""


class Late(TimeoutError):
    """Nothing came in time."""


@dataclass(slots=True)
class Frame:
    """One message. `freed` are the registers that the receiver may drop before it looks at the payload.

    written: all of a small message, once it has been written: it may go to several peers.
    """

    kind: int
    epoch: int
    number: int
    payload: Buffer = b""
    buffers: Sequence[Buffer] = ()
    freed: Sequence[int] = ()
    written: bytes = b""


class Connection:
    """A socket that carries frames in both directions. One thread at a time may receive; any may send."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        sock.setblocking(True)
        self._unix = sock.family == socket.AF_UNIX
        if not self._unix:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds = struct.pack("ll", 0, int(_STALL * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        self._writer = SegmentWriter() if self._unix and is_available() else None
        self._reader = SegmentReader()
        self._pending, self._fds = b"", array.array("i")
        self._patient_for = 0.0  # Seconds that reads wait; 0 for as long as it takes.
        self._sending = threading.Lock()
        self._closing = threading.Lock()

    def fileno(self) -> int:
        """The socket's number, -1 once it is closed."""
        return self.sock.fileno()

    def send(self, frame: Frame, stalled: Callable[[float], None] = lambda seconds: None) -> None:
        """Send a frame. Raises Closed; where the peer does not read, `stalled` is called with the seconds so far.

        A send that `stalled` ends leaves half a frame behind: the connection cannot be used any more.
        """
        if frame.buffers or len(frame.payload) >= _CHUNK or self._reader.released:
            with self._sending:
                self._send(frame, stalled)
            return
        data = frame.written or _write_small(frame)
        with self._sending:
            try:
                sent = self.sock.send(data)
            except BlockingIOError:  # after SO_SNDTIMEO
                sent = 0
            except OSError as error:
                raise Closed(str(error)) from None
            if sent < len(data):
                self._write_rest([data], sent, stalled)

    def _send(self, frame: Frame, stalled: Callable[[float], None]) -> None:
        buffers, payload, fd, extras = frame.buffers, frame.payload, None, b""
        if buffers:
            extras, fd, buffers = self._extras(frame)
        else:
            extras = _marshalled(frame.freed, self._reader.take_released(), (), ())
        header = _HEADER.pack(_MAGIC, frame.kind, frame.epoch, frame.number, len(extras), len(payload))
        try:
            self._write([header + extras, payload, *buffers], fd, stalled)
        except OSError as error:
            raise Closed(str(error)) from None
        finally:
            if fd is not None:
                os.close(fd)

    def _extras(self, frame: Frame) -> tuple[bytes, int | None, Sequence[Buffer]]:
        sizes, buffers = [len(buffer) for buffer in frame.buffers], frame.buffers
        segment, fd = (), None
        if self._writer is not None and sum(sizes) >= SHARED:
            placed, fd = self._writer.put(buffers)
            segment, buffers = (placed.number, placed.size, placed.dropped, fd is not None), ()
        return _marshalled(frame.freed, self._reader.take_released(), sizes, segment), fd, buffers

    def _write(self, parts: Sequence[Buffer], fd: int | None, stalled: Callable[[float], None]) -> None:
        fds = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []
        sent = self._attempt(lambda: self.sock.sendmsg(parts, fds), stalled)
        if sent < sum(map(len, parts)):
            self._write_rest(parts, sent, stalled)

    def _write_rest(self, parts: Sequence[Buffer], sent: int, stalled: Callable[[float], None]) -> None:
        for part in parts:
            view, sent = memoryview(part)[sent:], max(0, sent - len(part))
            while view.nbytes:
                view = view[self._attempt(lambda rest=view: self.sock.send(rest), stalled) :]

    def _attempt(self, action: Callable[[], int], stalled: Callable[[float], None]) -> int:
        start = time.monotonic()
        while True:
            try:
                return action()
            except BlockingIOError:  # after SO_SNDTIMEO
                stalled(time.monotonic() - start)

    def receive(self) -> Frame:
        """The next frame. Raises Closed at the end of the connection, BadFrame for what is none."""
        data = self._pending
        if len(data) < _HEADER.size:
            data = self._filled(data, _HEADER.size)
        magic, kind, epoch, number, extras_size, size = _HEADER.unpack_from(data)
        if magic != _MAGIC or extras_size > MOST_EXTRAS or size > MOST_PAYLOAD:
            self.close()
            raise BadFrame(f"no frame: it begins with {bytes(data[:16])!r}")
        start = _HEADER.size + extras_size
        end = start + size
        if len(data) < end:
            data = self._filled(data, end)
        self._pending = data[end:]
        payload = data[start:end]
        if not extras_size:
            return Frame(kind, epoch, number, payload)
        freed, released, sizes, segment = marshal.loads(data[_HEADER.size : start])
        if released and self._writer is not None:
            self._writer.give_back(released)
        return Frame(kind, epoch, number, payload, self._buffers(sizes, segment) if sizes else (), freed)

    def _filled(self, data: bytes, size: int) -> bytes:
        """These bytes and those that come next, so many at least."""
        while len(data) < size:
            try:
                data += self._more(size - len(data))
            except BlockingIOError:  # after SO_RCVTIMEO
                if not data:
                    raise
        return data

    def _buffers(self, sizes: Sequence[int], segment: Sequence[Any]) -> list[Buffer]:
        if sum(sizes) > MOST_BUFFERS:
            self.close()
            raise BadFrame(f"a frame has buffers of {sum(sizes)} bytes")
        if segment:
            number, size, dropped, is_new = segment
            fd = self._fds.pop(0) if is_new else None
            return self._reader.buffers(Placed(number, size, dropped), fd, sizes)
        return [self._fill(bytes_of(torch.empty(size, dtype=torch.uint8))) for size in sizes]

    def _fill(self, view: memoryview) -> memoryview:
        """The view, filled with what comes next."""
        have = min(len(self._pending), view.nbytes)
        view[:have] = self._pending[:have]
        self._pending = self._pending[have:]
        while have < view.nbytes:
            try:
                got = self.sock.recv_into(view[have:])
            except BlockingIOError:  # after SO_RCVTIMEO
                continue
            except OSError as error:
                raise Closed(str(error)) from None
            if not got:
                raise Closed(_ENDED)
            have += got
        return view

    def receive_within(self, seconds: float) -> Frame:
        """The next frame. Raises Late where none begins in so many seconds."""
        if not self._pending:
            try:
                self._pending = self._more(flags=self._patience(seconds))
            except BlockingIOError:
                raise Late from None
        return self.receive()

    def _patience(self, seconds: float) -> int:
        """Let reads wait so long; flags for one that does not wait at all."""
        if seconds <= 0:
            return socket.MSG_DONTWAIT
        if seconds != self._patient_for:
            limit = struct.pack("ll", int(seconds), max(1, int(seconds % 1 * 1e6)))
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._patient_for = seconds
        return 0

    def _more(self, size: int = 0, flags: int = 0) -> bytes:
        """What has come, or comes next. Raises Closed."""
        size, ancillary = size if size > _CHUNK else _CHUNK, ()
        try:
            if self._unix:
                data, ancillary, _, _ = self.sock.recvmsg(size, _FDS, flags)
            else:
                data = self.sock.recv(size, flags)
        except BlockingIOError:
            raise
        except OSError as error:
            raise Closed(str(error)) from None
        if not data:
            raise Closed(_ENDED)
        for level, kind, found in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds.frombytes(found[: len(found) - len(found) % self._fds.itemsize])
        return data

    def is_ready(self) -> bool:
        """Whether bytes of the next frame are here already."""
        return len(self._pending) >= _HEADER.size

    def close(self) -> None:
        """Close the connection; the peer notices at once."""
        with self._closing, contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def _write_small(frame: Frame) -> bytes:
    extras = _marshalled(frame.freed, (), (), ()) if frame.freed else b""
    head = _HEADER.pack(_MAGIC, frame.kind, frame.epoch, frame.number, len(extras), len(frame.payload))
    frame.written = head + extras + frame.payload
    return frame.written


def _marshalled(*extras: Any) -> bytes:
    return marshal.dumps(extras)

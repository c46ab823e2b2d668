"""Point-to-point messages between the ranks of a group.

    receiver   posts a receive                      copies the chunk, acknowledges it
                        │                                  ▲            │
    sender              └─▶ stages a chunk in a free slot ─┘            └─▶ the slot is free again

Only messages that both sides have posted use slots, so slots always become free. Messages between two ranks with the
same tag stay in the order of the calls; those with different tags may overtake each other. A message that is larger
than a slot is sent in chunks.

Both sides wait on the host until their own GPU has reached the call: all messages share a stream, on which a waiting
message would block the others.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from spindle.run.ipc.job import Job, flat_bytes
from spindle.run.ipc.memory_backend import Segments
from spindle.run.ipc.shm_control import (
    ACKNOWLEDGED,
    ACKNOWLEDGEMENTS,
    CHUNK_WORDS,
    CHUNKS,
    POST_WORDS,
    POSTED,
    POSTS,
    RING,
    SENT,
    TAKEN,
    WAITING,
    ShmControl,
)


@dataclass(slots=True)
class _Message:
    """A send or a receive, from the call to its last chunk."""

    job: Job
    flat: torch.Tensor  # bytes
    post: int = -1  # the number of the receiver's post
    offset: int = 0

    @property
    def remaining(self) -> int:
        return self.flat.numel() - self.offset

    def next_part(self, num_bytes: int) -> torch.Tensor:
        part = self.flat[self.offset : self.offset + num_bytes]
        self.offset += num_bytes
        return part


@dataclass(slots=True)
class _Slot:
    """Room for one chunk in a segment, and the rank that read it last, with its signal."""

    segment: int
    offset: int
    num_bytes: int
    reader: int = -1
    signal: int = 0


@dataclass(slots=True)
class _Pair:
    """Messages between this rank and a peer. Counts are as in this rank's row of control words."""

    sends: dict[int, deque[_Message]] = field(default_factory=lambda: defaultdict(deque))  # by tag
    posts: dict[int, deque[tuple[int, int]]] = field(default_factory=lambda: defaultdict(deque))  # number, bytes
    sending: deque[_Message] = field(default_factory=deque)
    unacknowledged: deque[_Slot] = field(default_factory=deque)  # in the order of their chunks
    receives: deque[tuple[int, _Message]] = field(default_factory=deque)  # to be posted, with their tags
    expected: dict[int, _Message] = field(default_factory=dict)  # by number of the post
    num_posted: int = 0
    num_taken: int = 0
    num_sent: int = 0
    num_acknowledged: int = 0
    is_waiting: bool = False

    def jobs(self) -> Iterator[Job]:
        yield from (message.job for queue in self.sends.values() for message in queue)
        yield from (message.job for message in self.sending)
        yield from (message.job for _, message in self.receives)
        yield from (message.job for message in self.expected.values())


class Messages:
    """All messages of one rank in one group."""

    def __init__(self, control: ShmControl, segments: Segments, names: Sequence[str]) -> None:
        self._control, self._segments, self._names = control, segments, names
        self._pairs = [_Pair() for _ in range(control.size)]
        self._active: set[int] = set()  # peers with messages in flight
        self._slots: dict[int, deque[_Slot]] = {}  # free slots, by segment
        self._notified: set[int] = set()  # peers for which control words were written

    def send(self, job: Job, peer: int, tag: int) -> None:
        self._pairs[peer].sends[tag].append(_Message(job, flat_bytes(job.tensors[0])))
        self._active.add(peer)

    def receive(self, job: Job, peer: int, tag: int) -> None:
        self._pairs[peer].receives.append((tag, _Message(job, flat_bytes(job.tensors[0]))))
        self._active.add(peer)

    def jobs(self) -> Iterator[Job]:
        for pair in self._pairs:
            yield from pair.jobs()

    def waited_for(self) -> set[int]:
        return {peer for peer, pair in enumerate(self._pairs) if next(pair.jobs(), None) is not None}

    def readers(self) -> set[int]:
        """Ranks that have not copied yet what was sent to them."""
        return {
            peer
            for peer, pair in enumerate(self._pairs)
            if pair.unacknowledged or pair.sending or any(pair.sends.values())
        }

    def advance(self) -> bool:
        """Advance as far as possible without waiting. Returns whether another call may advance further."""
        has_advanced = False
        for peer in tuple(self._active):
            pair = self._pairs[peer]
            if pair.unacknowledged or pair.sending or pair.sends:
                has_advanced |= self._advance_sends(peer, pair)
            if pair.receives or pair.expected:
                has_advanced |= self._advance_receives(peer, pair)
            has_advanced |= self._publish_waiting(peer, pair)
        if self._notified:
            self._control.fence()
            for peer in self._notified:
                if self._control.words[self._control.pair(peer, self._control.rank) + WAITING]:
                    self._control.ring(peer)
            self._notified.clear()
        return has_advanced

    def _publish_waiting(self, peer: int, pair: _Pair) -> bool:
        """Publish whether this rank waits for a peer, which then wakes it. Returns whether it starts to wait: then it
        must look once more, because nobody wakes it for what was written earlier."""
        waiting = bool(pair.sending or pair.sends or pair.receives or pair.expected)
        if not waiting and not pair.unacknowledged:
            self._active.discard(peer)
        if waiting == pair.is_waiting:
            return False
        pair.is_waiting = waiting
        self._control.words[self._control.pair(self._control.rank, peer) + WAITING] = waiting
        self._control.fence()
        return waiting

    def _advance_sends(self, peer: int, pair: _Pair) -> bool:
        words, rank = self._control.words, self._control.rank
        own_row, peer_row = self._control.pair(rank, peer), self._control.pair(peer, rank)
        num_posted, num_acknowledged = words[peer_row + POSTED], words[peer_row + ACKNOWLEDGED]
        for number in range(pair.num_taken, num_posted):
            place = peer_row + POSTS + number % RING * POST_WORDS
            pair.posts[words[place]].append((number, words[place + 1]))
        if num_posted > pair.num_taken:
            words[own_row + TAKEN] = pair.num_taken = num_posted
            self._notified.add(peer)
        for number in range(pair.num_sent - len(pair.unacknowledged), num_acknowledged):
            slot = pair.unacknowledged.popleft()
            slot.reader, slot.signal = peer, words[peer_row + ACKNOWLEDGEMENTS + number % RING]
            self._slots[slot.segment].append(slot)
        self._match(peer, pair)
        return self._stage(peer, pair, own_row, RING - (pair.num_sent - num_acknowledged))

    def _match(self, peer: int, pair: _Pair) -> None:
        """Pair sends with posted receives of the same tag, in order."""
        for tag in list(pair.sends):
            sends, posts = pair.sends[tag], pair.posts[tag]
            while sends and posts:
                message = sends.popleft()
                message.post, expected = posts.popleft()
                pair.sending.append(message)
                if expected != message.flat.numel():  # the receiver finds out from the chunk
                    message.job.finish(self._unequal(peer, expected, message))
            if not sends:
                del pair.sends[tag]
            if not posts:
                del pair.posts[tag]

    def _stage(self, peer: int, pair: _Pair, own_row: int, num_free: int) -> bool:
        """Stage chunks while slots are free. Messages take turns, so that a small one need not wait for a large one."""
        has_advanced = False
        num_stuck = 0
        while num_stuck < len(pair.sending) and num_free > 0:
            message = pair.sending.popleft()
            slot = self._free_slot(message) if message.job.is_ready() else None
            if slot is None:
                pair.sending.append(message)
                num_stuck += 1
                continue
            self._stage_chunk(message, slot, own_row + CHUNKS + pair.num_sent % RING * CHUNK_WORDS)
            pair.unacknowledged.append(slot)
            pair.num_sent += 1
            self._control.words[own_row + SENT] = pair.num_sent
            self._notified.add(peer)
            num_free, num_stuck, has_advanced = num_free - 1, 0, True
            if not message.job.is_done():
                if message.remaining:
                    pair.sending.append(message)
                else:
                    message.job.finish()
        return has_advanced

    def _stage_chunk(self, message: _Message, slot: _Slot, header: int) -> None:
        backend, message_bytes = message.job.backend, message.flat.numel()
        message.job.begin()
        if slot.reader >= 0:
            backend.wait_signals({slot.reader: slot.signal})
        num_bytes = min(slot.num_bytes, message.remaining)
        place = self._segments.of(self._control.rank, backend, slot.segment)[slot.offset : slot.offset + num_bytes]
        place.copy_(message.next_part(num_bytes))
        words = (message.post, slot.segment, slot.offset, num_bytes, message_bytes, backend.signal())
        for offset, word in enumerate(words):
            self._control.words[header + offset] = word

    def _free_slot(self, message: _Message) -> _Slot | None:
        backend = message.job.backend
        largest = len(backend.slots) - 1
        kind = next((index for index, (_, size) in enumerate(backend.slots) if message.remaining <= size), largest)
        count, num_bytes = backend.slots[kind]
        segment = self._segments.for_messages(backend, kind, count * num_bytes)
        if segment not in self._slots:
            self._slots[segment] = deque(_Slot(segment, place * num_bytes, num_bytes) for place in range(count))
        return self._slots[segment].popleft() if self._slots[segment] else None

    def _advance_receives(self, peer: int, pair: _Pair) -> bool:
        has_advanced = False
        words, rank = self._control.words, self._control.rank
        own_row, peer_row = self._control.pair(rank, peer), self._control.pair(peer, rank)
        num_taken = words[peer_row + TAKEN]
        while pair.receives and pair.num_posted - num_taken < RING:
            tag, message = pair.receives.popleft()
            place = own_row + POSTS + pair.num_posted % RING * POST_WORDS
            words[place], words[place + 1] = tag, message.flat.numel()
            pair.expected[pair.num_posted] = message
            pair.num_posted += 1
            words[own_row + POSTED] = pair.num_posted
            self._notified.add(peer)
            has_advanced = True
        for number in range(pair.num_acknowledged, words[peer_row + SENT]):
            place = peer_row + CHUNKS + number % RING * CHUNK_WORDS
            post, segment, offset, num_bytes, message_bytes, signal = words[place : place + CHUNK_WORDS]
            message = pair.expected[post]
            copied, error = 0, None  # the signal behind the copy
            if message_bytes == message.flat.numel():
                if not message.job.is_ready():
                    break
                copied = self._copy_chunk(message, peer, segment, slice(offset, offset + num_bytes), signal)
            else:
                error = self._unequal(peer, message_bytes, message)
            if error or not message.remaining:
                del pair.expected[post]
                message.job.finish(error)
            words[own_row + ACKNOWLEDGEMENTS + number % RING] = copied
            words[own_row + ACKNOWLEDGED] = pair.num_acknowledged = number + 1
            self._notified.add(peer)
            has_advanced = True
        return has_advanced

    def _copy_chunk(self, message: _Message, peer: int, segment: int, place: slice, signal: int) -> int:
        backend = message.job.backend
        message.job.begin()
        source = self._segments.of(peer, backend, segment)[place]
        backend.wait_signals({peer: signal})
        message.next_part(source.numel()).copy_(source)
        return backend.signal()

    def _unequal(self, peer: int, num_bytes: int, message: _Message) -> RuntimeError:
        return RuntimeError(
            f"a message of {message.flat.numel()} bytes here has {num_bytes} bytes at {self._names[peer]}"
        )

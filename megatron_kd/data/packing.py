"""From a stream of documents to samples of one length, every token once.

All documents of a split form one stream of T tokens. Sample i holds the S positions i·S … i·S + S − 1 of the stream
and one token more, the last position's label:

    stream    a a a a ⏹ b b b b b ⏹ c c c ⏹          (⏹ ends a document)
    sample 0  a a a a|⏹      tokens [S + 1]: the token after | is only a label
    sample 1          ⏹ b b b|b
    sample 2                  b b ⏹ c|c

So the token at a boundary is the last label of one sample and the first input of the next; every position of the
stream is an input exactly once and every token that has a predecessor in its document is a label exactly once.
A document cut by a boundary goes on in the next sample without its past, as in any packed training.

    segment[t]    number of the document within its sample, from 0: attention and positions restart where it changes
    loss_mask[t]  1 where the label belongs to the same document and is to be learnt; 0 at a document's last position

The last sample is filled up with the end-of-document token, as one more document that costs nothing.

Shapes: T tokens of the stream, D documents, N samples, S positions. Collectives: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenStream:
    """Documents laid end to end.

    tokens: [T] ids.
    starts: [D] where each document begins, ascending, the first at 0.
    learnt: [T] 1 where the token is to be learnt.
    """

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    learnt: NDArray[np.uint8]

    def sample_count(self, sequence_length: int) -> int:
        """Samples the stream fills; its last token has no label, so it needs no position."""
        return max(-(-(len(self.tokens) - 1) // sequence_length), 0)

    def documents(self, first: int, last: int) -> TokenStream:
        """The stream of documents `first` … `last` − 1."""
        ends = np.append(self.starts, len(self.tokens))
        begin, end = int(ends[first]), int(ends[last])
        return TokenStream(self.tokens[begin:end], self.starts[first:last] - begin, self.learnt[begin:end])

    def cut(self, position: int) -> TokenStream:
        """The same stream, with a document beginning at `position` too."""
        return TokenStream(self.tokens, np.union1d(self.starts, [position]), self.learnt)


class PackedSamples(NamedTuple):
    """Samples as the cache stores them."""

    tokens: NDArray[np.int32]  # [N, S + 1]
    segment: NDArray[np.int32]  # [N, S]
    loss_mask: NDArray[np.uint8]  # [N, S]


def pack(stream: TokenStream, sequence_length: int, first: int, last: int, padding_id: int) -> PackedSamples:
    """Samples `first` … `last` − 1 of the stream.

    Args:
        stream: what to pack.
        sequence_length: S.
        first: the first sample.
        last: one past the last sample.
        padding_id: fills the end of the last sample.
    """
    length = len(stream.tokens)
    positions = np.arange(first, last)[:, None] * sequence_length + np.arange(sequence_length + 1)  # [N, S + 1]
    inside = positions < length
    clipped = np.minimum(positions, length - 1)
    tokens = np.where(inside, stream.tokens[clipped], padding_id).astype(np.int32)
    document = np.searchsorted(np.append(stream.starts, length), positions, side="right")  # the padding is one too
    loss_mask = (document[:, 1:] == document[:, :-1]) & inside[:, 1:] & (stream.learnt[clipped[:, 1:]] != 0)
    segment = document[:, :-1] - document[:, :1]
    return PackedSamples(tokens, segment.astype(np.int32), loss_mask.astype(np.uint8))

"""From one sample's stored arrays to its row of a batch, in memory that is used again for the next sample.

Allocating it anew for each sample would cost as much time as the arithmetic: every fresh page is a page fault.

At temperature τ ≠ 1, with the stored normalisers logz_1 and logz_τ, the teacher's logit of an entry is
logprob + logz_1, so

    logprob_τ = (logprob + logz_1)/τ − logz_τ        tail_τ = log(1 − Σ_k exp(logprob_τ,k))

With K′ < K the dropped entries' probability joins the tail, which keeps its meaning: all that is not an entry.

Shapes: n samples of the batch, S positions, K stored entries, K′ wanted ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_kd.cache.ranks import RankCoder, RankScratch
from megatron_kd.cache.schema import Manifest

_INFINITY_BITS = 0x7C00  # float16


@dataclass(frozen=True)
class CacheBatch:
    """Samples in the order asked for. Position t holds the teacher's distribution for tokens[:, t + 1]."""

    tokens: np.ndarray  # int32 [n, S+1]: inputs are [:, :-1], labels [:, 1:]
    ids: np.ndarray  # int32 [n, S, K′], −1 = absent
    logprobs: np.ndarray  # float32 [n, S, K′], falling; −inf where absent
    tail_logprob: np.ndarray  # float32 [n, S]: log of the mass outside the K′ entries
    label_logprob: np.ndarray  # float32 [n, S]: of the label, at temperature 1
    loss_mask: np.ndarray  # uint8 [n, S]: 1 = train on it
    segment: np.ndarray  # int32 [n, S]: document number in a packed sample

    @classmethod
    def empty(cls, manifest: Manifest, n: int, k: int) -> CacheBatch:
        """Room for n samples of k entries."""
        s = manifest.seq_length
        return cls(
            tokens=np.empty((n, s + 1), np.int32),
            ids=np.empty((n, s, k), np.int32),
            logprobs=np.empty((n, s, k), np.float32),
            tail_logprob=np.empty((n, s), np.float32),
            label_logprob=np.empty((n, s), np.float32),
            loss_mask=np.empty((n, s), np.uint8),
            segment=np.empty((n, s), np.int32),
        )


@dataclass(frozen=True)
class TokenBatch:
    """The text of samples without its targets; fields as in CacheBatch."""

    tokens: np.ndarray  # int32 [n, S+1]
    loss_mask: np.ndarray  # uint8 [n, S]
    segment: np.ndarray  # int32 [n, S]

    @classmethod
    def empty(cls, manifest: Manifest, n: int) -> TokenBatch:
        """Room for n samples."""
        s = manifest.seq_length
        return cls(np.empty((n, s + 1), np.int32), np.empty((n, s), np.uint8), np.empty((n, s), np.int32))

    def places(self, row: int) -> dict[str, np.ndarray]:
        """Array → where one sample of it has to be put; nothing is left to decode then."""
        return {"tokens": self.tokens[row], "loss_mask": self.loss_mask[row], "segment": self.segment[row]}


class SampleDecoder:
    """Decodes one sample after the other; every thread needs its own.

    Usage: put the sample's stored arrays where `places` says, then call `finish`.
    """

    def __init__(self, manifest: Manifest, ranks: RankCoder, k: int, temperature: float) -> None:
        s, t = manifest.seq_length, len(manifest.temperatures)
        self._ranks, self._k, self._temperature = ranks, k, np.float32(temperature)
        self._column = manifest.temperatures.index(temperature)
        self._rank_planes = np.empty((ranks.planes, s, k), np.uint8)
        self._rank = np.empty((s, k), ranks.dtype)
        self._step_planes = np.empty((2, s, manifest.k), np.uint8)
        self._bits = np.empty((s, manifest.k), np.uint16)
        self._logprobs = np.empty((s, manifest.k), np.float32)
        self._tail, self._logz = np.empty(s, np.float16), np.empty((s, t), np.float32)
        self._scratch = RankScratch(s, k)

    def places(self, batch: CacheBatch, row: int) -> dict[str, np.ndarray]:
        """Array → where one sample of it has to be put; those not named are not needed."""
        places = {
            "tokens": batch.tokens[row],
            "topk_rank": self._rank_planes,
            "topk_logprob_step": self._step_planes,
            "label_logprob": batch.label_logprob[row],
            "loss_mask": batch.loss_mask[row],
            "segment": batch.segment[row],
        }
        return places | ({"tail_logprob": self._tail} if self._column == 0 else {"logz": self._logz})

    def finish(self, batch: CacheBatch, row: int) -> None:
        """Ids, log-probs and tail of the sample that was put into `places`."""
        join_planes(self._rank_planes, self._rank)
        join_planes(self._step_planes, self._bits)
        self._ranks.decode(batch.tokens[row, :-1], self._rank, batch.ids[row], self._scratch)
        whole = self._k == self._bits.shape[1]
        logprobs = batch.logprobs[row] if whole else self._logprobs
        decode_logprobs(self._bits, logprobs)
        if self._column == 0:
            tail = self._tail.astype(np.float32)
        else:
            logprobs += self._logz[:, :1]
            logprobs /= self._temperature
            logprobs -= self._logz[:, self._column :][:, :1]
            tail = _log_rest(logprobs)
        if not whole:
            tail = np.logaddexp(tail, _logsumexp(logprobs[:, self._k :]))
            batch.logprobs[row] = logprobs[:, : self._k]
        batch.tail_logprob[row] = tail


def join_planes(planes: np.ndarray, out: np.ndarray) -> None:
    """Numbers [S, K] from their bytes, planes uint8 [P, S, K], the lowest first."""
    np.copyto(out, planes[-1])
    for plane in planes[-2::-1]:
        out <<= 8
        out |= plane


def decode_logprobs(step: np.ndarray, out: np.ndarray) -> None:
    """Log-probs float32 [S, K] from steps uint16 [S, K], which are used up."""
    bits = np.cumsum(step, axis=-1, out=step)
    # float16 to float32 by its bits: the mantissa moves up by 13 places, and 2¹¹² makes good for the exponent's other
    # bias, subnormal numbers included. Ten times faster than NumPy's conversion.
    np.left_shift(bits, 13, out=out.view(np.uint32), dtype=np.uint32)
    out *= np.float32(-(2.0**112))
    if (bits[:, -1] >= _INFINITY_BITS).any():  # the entries fall: the last is the first to reach it
        out[bits >= _INFINITY_BITS] = -np.inf


def _logsumexp(values: np.ndarray) -> np.ndarray:
    """Over the last axis, whose entries fall: the first is the largest."""
    largest = np.where(np.isfinite(values[..., :1]), values[..., :1], 0)
    with np.errstate(divide="ignore"):
        return largest[..., 0] + np.log(np.exp(values - largest).sum(axis=-1))


def _log_rest(logprobs: np.ndarray) -> np.ndarray:
    """log(1 − Σ exp(logprobs)); −inf where rounding leaves nothing."""
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(1 - np.exp(logprobs.astype(np.float64)).sum(axis=-1), 0))

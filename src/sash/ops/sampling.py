"""From logits to a token: shaping, filtering and counter-based noise, one row at a time.

A row's token depends on its logits, its request's parameters, seed and position, and on nothing
else, so batch mates, preemption and speculation can't change it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from sash.spec.sampling import SamplingParams, TokenLogprobs, mix64

_MASK64 = (1 << 64) - 1
# How far below the best scaled logit nucleus sampling looks before it sorts the whole vocabulary.
_NUCLEUS_DEPTH = 12.0
# The smallest divisor that float32 keeps apart from 0 with room to spare.
_LEAST_TEMPERATURE = 1e-30


@dataclass(slots=True)
class SamplerState:
    """What shapes a request's logits: fixed biases, and the counts that penalties need.

    Args:
        params: the request's parameters.
        seed: 64-bit seed of its noise.
        stop_ids: tokens that may not come before ``min_tokens``.
        bias: [V] float32, -inf for banned tokens; None: no bias and no ban.
        stop_index: ``stop_ids`` as a tensor, None where there are none.
        seen: [S] int64, the distinct tokens of prompt and answer; None without penalties.
        counts: [S] float32, how often each of them is in the answer.
        places: where each of them stands in ``seen``.
    """

    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    bias: torch.Tensor | None = None
    stop_index: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    places: dict[int, int] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether logits go unshaped."""
        return self.bias is None and self.counts is None and not (self.params.min_tokens and self.stop_ids)


def sampler_state(
    params: SamplingParams,
    *,
    seed: int,
    stop_ids: Sequence[int],
    prompt: Sequence[int],
    vocab_size: int,
    device: torch.device,
) -> SamplerState:
    """The state of a request before its first token; on ``device``, where logits are. The ids in ``params``
    and ``prompt`` are known to lie in the vocabulary."""
    # A model's own stop tokens may lie outside the rows that it has.
    stop_ids = tuple(t for t in stop_ids if t < vocab_size)
    state = SamplerState(params, seed, stop_ids)
    if params.logit_bias or params.allowed_token_ids is not None or params.bad_token_ids:
        bias = torch.zeros(vocab_size)
        if params.allowed_token_ids is not None:
            bias.fill_(-math.inf)
            bias[list(params.allowed_token_ids)] = 0.0
        if params.logit_bias:
            bias[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()))
        bias[list(params.bad_token_ids)] = -math.inf
        state.bias = bias.to(device)
    if stop_ids:
        state.stop_index = torch.tensor(stop_ids, device=device)
    if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
        distinct = list(dict.fromkeys(prompt))
        state.seen = torch.tensor(distinct, dtype=torch.int64, device=device)
        state.counts = torch.zeros(len(distinct), device=device)
        state.places = {token: place for place, token in enumerate(distinct)}
    return state


def count_token(state: SamplerState, token: int) -> None:
    """A token has become part of the answer."""
    if state.seen is None or state.counts is None:
        return
    place = state.places.setdefault(token, len(state.places))
    if place < len(state.seen):
        state.counts[place] += 1
    else:
        state.seen = torch.cat((state.seen, state.seen.new_tensor([token])))
        state.counts = torch.cat((state.counts, state.counts.new_ones(1)))


def counting(state: SamplerState, token: int) -> SamplerState:
    """The state after one more token, should it become part of the answer; ``state`` stays as it is."""
    if state.counts is None:
        return state
    after = replace(state, counts=state.counts.clone(), places=dict(state.places))
    count_token(after, token)
    return after


def shape_logits(logits: torch.Tensor, state: SamplerState, num_generated: int) -> torch.Tensor:
    """Biases, bans, min_tokens and penalties on logits [V] float32; a new tensor, or the same when plain."""
    if state.plain:
        return logits
    params = state.params
    out = logits if state.bias is None else logits + state.bias
    if state.seen is not None and state.counts is not None:
        own = out[state.seen]
        own = torch.where(own > 0, own / params.repetition_penalty, own * params.repetition_penalty)
        own = own - params.frequency_penalty * state.counts - params.presence_penalty * (state.counts > 0)
        out = out.index_copy(0, state.seen, own)
    if state.stop_index is not None and num_generated < params.min_tokens:
        out = out.index_fill(0, state.stop_index, -math.inf)
    return out


Race = Callable[[torch.Tensor, float, int, int], int]


def race(logits: torch.Tensor, temperature: float, seed: int, position: int) -> int:
    """The arg-max of logits [V] over a temperature plus noise: a draw from the whole distribution."""
    values = _scaled(logits, temperature)
    return int(torch.argmax(values + gumbel(seed, position, torch.arange(len(values), device=values.device))))


def race_among(logits: torch.Tensor, ids: list[int], temperature: float, seed: int, position: int) -> int:
    """``race`` where it is known that one of ``ids`` (ascending) wins."""
    if len(ids) == 1:
        return ids[0]
    own = torch.tensor(ids, device=logits.device)
    sums = _scaled(logits, temperature)[own] + gumbel(seed, position, own)
    return ids[int(torch.argmax(sums))]


def choose(
    logits: torch.Tensor, state: SamplerState, position: int, ids: torch.Tensor | None = None, race: Race = race
) -> int:
    """The token that follows ``position``: arg-max, or a draw from the filtered distribution.

    The draw is arg-max of logits / temperature + Gumbel noise, with noise a function of seed,
    position and token id (Gumbel-max; counter-based as in Salmon et al., SC 2011). Order of filters:
    temperature, min_p, top_k, top_p.

    Args:
        logits: [V] float32, shaped; or [N], those of ``ids``.
        state: the request's.
        position: of the row that gave the logits.
        ids: [N] int64, the tokens that the logits belong to where they are not all.
        race: see ``sash.ops.base.Ops``.
    """
    params = state.params
    if params.temperature == 0.0:
        best = int(torch.argmax(logits))
        return best if ids is None else int(ids[best])
    if ids is None and not (params.min_p or params.top_k or params.top_p < 1.0):
        return race(logits, params.temperature, state.seed, position)
    values, kept = _candidates(_scaled(logits, params.temperature), params)
    kept = kept if ids is None else ids[kept]
    return int(kept[torch.argmax(values + gumbel(state.seed, position, kept))])


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    # The best logit becomes 0, so that dividing by a very small temperature can't overflow it.
    return (logits - logits.max()).div_(divisor(temperature))


def divisor(temperature: float) -> float:
    """What logits are divided by."""
    return max(temperature, _LEAST_TEMPERATURE)


def _candidates(scaled: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that pass the filters, and their places."""
    if not params.min_p:
        return _head(scaled, params)
    kept = torch.nonzero(scaled >= scaled.max() + math.log(params.min_p)).squeeze(-1)
    values, places = _head(scaled[kept], params)
    return values, kept[places]


def _head(scaled: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    vocab = scaled.shape[0]
    if 0 < params.top_k < vocab:
        values, ids = torch.topk(scaled, params.top_k)
        return _nucleus(values, ids, torch.logsumexp(values, 0), params.top_p) or (values, ids)
    if params.top_p < 1.0:
        total = torch.logsumexp(scaled, 0)
        likely = torch.nonzero(scaled > -_NUCLEUS_DEPTH).squeeze(-1)
        head = torch.sort(scaled[likely], descending=True, stable=True)
        found = _nucleus(head.values, likely[head.indices], total, params.top_p)
        if found is not None:
            return found
        whole = torch.sort(scaled, descending=True, stable=True)
        return _nucleus(whole.values, whole.indices, total, params.top_p) or (whole.values, whole.indices)
    return scaled, torch.arange(vocab, device=scaled.device)


def _nucleus(
    values: torch.Tensor, ids: torch.Tensor, total: torch.Tensor, top_p: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The smallest head of descending ``values`` whose probability reaches top_p; None: it isn't reached."""
    if top_p >= 1.0:
        return None
    mass = torch.cumsum(torch.exp(values - total).double(), 0)
    if float(mass[-1]) < top_p:
        return None
    count = int(torch.searchsorted(mass, top_p)) + 1
    return values[:count], ids[:count]


def gumbel(seed: int, position: int, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise [n] float32 for token ids [n]: a pure function of seed, position and id."""
    bits = _mix_tensor(ids.to(torch.int64) + _signed(noise_key(seed, position)))
    # 52 bits, moved by half a step: strictly between 0 and 1.
    uniform = ((bits >> 12) & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)
    return -torch.log(-torch.log(uniform)).float()


def noise_key(seed: int, position: int) -> int:
    """64 bits: a token's noise is made of the mixed bits of its id and this, added."""
    return mix64(mix64(seed) ^ (position + 0x9E3779B97F4A7C15))


def _signed(x: int) -> int:
    x &= _MASK64
    return x - (1 << 64) if x >= 1 << 63 else x


def _mix_tensor(x: torch.Tensor) -> torch.Tensor:
    """``mix64`` on int64 tensors, whose products wrap and whose shifts must be made logical."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _logical_shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _logical_shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> list[TokenLogprobs]:
    """Log-probabilities of ``tokens`` [M] under raw logits [M, V] float32, with the ``count`` best of each row."""
    total = torch.logsumexp(logits, -1, keepdim=True)
    own = logits.gather(-1, tokens.unsqueeze(-1))
    ranks = ((logits > own).sum(-1) + 1).tolist()
    own_list = (own - total).squeeze(-1).tolist()
    top = torch.topk(logits, count) if count else None
    top_ids = [()] * len(ranks) if top is None else [tuple(r) for r in top.indices.tolist()]
    top_values = [()] * len(ranks) if top is None else [tuple(r) for r in (top.values - total).tolist()]
    return [TokenLogprobs(*row) for row in zip(tokens.tolist(), own_list, ranks, top_ids, top_values, strict=True)]

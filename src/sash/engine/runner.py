"""Runner: runs a step plan on the decoder and draws its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from sash.engine.grammars import Constraint
from sash.engine.sequence import Sequence
from sash.engine.step import Step
from sash.kv.storage import KVPool
from sash.models.decoder import Decoder
from sash.models.fused import FusedDecoder, obstacle
from sash.ops.base import Ops
from sash.ops.masks import Mask
from sash.ops.sampling import Race, SamplerState, choose, counting, shape_logits, token_logprobs
from sash.scheduler.plan import StepItem, StepPlan
from sash.spec.config import ResolvedConfig
from sash.spec.model import ModelSpec
from sash.spec.sampling import TokenLogprobs

# Rows of logits that exist at once: a vocabulary of 262 144 takes 1 MiB each in float32.
_LOGIT_ROWS = 64
# How long a step waits for masks that are not ready when its rows are, for the sake of its other rows; and otherwise.
_PATIENCE_S, _IDLE_PATIENCE_S = 0.002, 0.1


@dataclass(slots=True)
class StepResult:
    """Sampled tokens by answer id, their log-probabilities where wanted, and answers that failed.

    An answer gets one token, and one more for each of its drafts that was right; none if it is ``complete`` (its
    grammar allows no further token) or ``late`` (its grammar has not told yet).
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_scores: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    complete: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)

    def accepted(self, item: StepItem) -> int:
        """How many drafts of an item were right."""
        return max(len(self.tokens.get(item.request_id, [])) - 1, 0)


class Runner:
    """Runs step plans on a decoder over the pools.

    Args:
        spec: the model.
        decoder: its layers.
        ops: the table that attention is taken from.
        config: sizes and groups.
        pools: one per group of ``config.groups``.
    """

    def __init__(
        self, spec: ModelSpec, decoder: Decoder, ops: Ops, config: ResolvedConfig, pools: tuple[KVPool, ...]
    ) -> None:
        self._spec = spec
        self.decoder = decoder
        self._ops = ops
        self.pools = pools
        self._place = {layer: (g, i) for g, group in enumerate(config.groups) for i, layer in enumerate(group.layers)}
        self.device = decoder.device
        planes = [pools[g].layers[i] for g, i in (self._place[layer] for layer in range(len(spec.layers)))]
        self.op_by_op = obstacle(decoder)
        self._fused = None if self.op_by_op else FusedDecoder(decoder, planes)
        self._logits = decoder.logits if self._fused is None else self._fused.logits

    @property
    def executor(self) -> Decoder | FusedDecoder:
        """Whose ``forward`` runs the layers."""
        return self._fused or self.decoder

    def layer_pools(self) -> list[tuple[int, KVPool]]:
        """Each layer's number with the pool of its group."""
        return [(layer, self.pools[group]) for layer, (group, _) in sorted(self._place.items())]

    @torch.inference_mode()
    def run(self, plan: StepPlan, sequences: Mapping[str, Sequence]) -> StepResult:
        """Compute a step: write its K and V, sample its tokens. ``sequences`` is not changed."""
        step = Step(plan, sequences, self._spec, self._place, self.pools, self._ops)
        self._copy(step.copies_before())
        ids, positions, narrow = (
            step.token_ids.to(self.device),
            step.positions.to(self.device),
            step.narrow(self.device),
        )
        if self._fused is None:
            hidden = self.decoder.forward(ids, positions, step.attend, narrow)
        else:
            hidden = self._fused.forward(ids, positions, step.views(), narrow)
        self._copy(plan.copies_after)
        return self._sample(step, hidden, sequences)

    def _copy(self, copies: tuple[tuple[tuple[int, int], ...], ...]) -> None:
        for pool, pairs in zip(self.pools, copies, strict=False):
            if pairs:
                pool.copy_pages(pairs)

    def _sample(self, step: Step, hidden: torch.Tensor, sequences: Mapping[str, Sequence]) -> StepResult:
        """Score prompts and draw tokens from the rows that came out, ``_LOGIT_ROWS`` at a time."""
        result = StepResult()
        row = 0
        sampling: list[tuple[StepItem, range]] = []
        for item, first in zip(step.plan.items, step.out_first, strict=True):
            if sequences[item.request_id].wants_scores(first) and first < item.end:
                self._score_prompt(item, first, hidden[row : row + item.end - first], sequences, result)
            row += item.end - first
            if item.samples:
                sampling.append((item, range(row - 1 - item.num_drafts, row)))
        _await_masks(step.plan, [item for item, _ in sampling], sequences)
        for part in _parts(sampling):
            rows = [row for _, rows in part for row in rows]
            if rows != list(range(hidden.shape[0])):
                wanted = hidden.index_select(0, torch.tensor(rows, device=hidden.device))
            else:
                wanted = hidden
            items = [item for item, _ in part]
            if self._fused is not None and all(_takes_best(item, sequences) for item in items):
                self._draw(items, None, self._fused.best(wanted), sequences, result)
            else:
                logits = self._logits(wanted)
                self._draw(items, logits, self._ops.argmax(logits), sequences, result)
        return result

    def _score_prompt(
        self,
        item: StepItem,
        first: int,
        hidden: torch.Tensor,
        sequences: Mapping[str, Sequence],
        result: StepResult,
    ) -> None:
        """Log-probabilities of the prompt tokens that follow rows ``first`` … of this chunk."""
        seq = sequences[item.request_id]
        end = min(item.end, seq.prompt_tokens - 1)
        scores: list[TokenLogprobs] = []
        for a in range(first, end, _LOGIT_ROWS):
            b = min(a + _LOGIT_ROWS, end)
            logits = self._logits(hidden[a - first : b - first])
            tokens = torch.tensor(seq.tokens[a + 1 : b + 1], device=hidden.device)
            scores += token_logprobs(logits, tokens, seq.params.prompt_logprobs or 0)
        result.prompt_scores[item.request_id] = scores

    def _draw(
        self,
        items: list[StepItem],
        logits: torch.Tensor | None,
        best: tuple[list[int], list[float]],
        sequences: Mapping[str, Sequence],
        result: StepResult,
    ) -> None:
        """The tokens of each item and fork from logits [rows, V]: one row per item, and one per draft of its.
        ``best`` are the rows' arg-max and maximum, enough for items that take them as they are."""
        ids, tops = best
        # A row that isn't finite has no best token.
        greedy = [token if np.isfinite(top) else None for top, token in zip(tops, ids, strict=True)]
        row = 0
        for item in items:
            rows = slice(row, row + 1 + item.num_drafts)
            for answer_id in (item.request_id, *item.forks):
                seq = sequences[answer_id]
                if seq.constraint is not None and not _open(seq.constraint, answer_id, result):
                    continue
                tokens, error = _verified(
                    item, seq, None if logits is None else logits[rows], greedy[rows], self._ops.race
                )
                if error is not None:
                    result.errors[answer_id] = error
                    continue
                result.tokens[answer_id] = tokens
                if seq.params.logprobs is not None and logits is not None:
                    own = torch.tensor(tokens, device=logits.device)
                    scored = logits[row : row + len(tokens)]
                    result.logprobs[answer_id] = token_logprobs(scored, own, seq.params.logprobs)
            row = rows.stop


def _parts(sampling: list[tuple[StepItem, range]]) -> list[list[tuple[StepItem, range]]]:
    """Items and their rows in parts of at most ``_LOGIT_ROWS`` rows, or of one item."""
    parts: list[list[tuple[StepItem, range]]] = []
    room = 0
    for item, rows in sampling:
        if not parts or len(rows) > room:
            parts.append([])
            room = _LOGIT_ROWS
        parts[-1].append((item, rows))
        room -= len(rows)
    return parts


def _takes_best(item: StepItem, sequences: Mapping[str, Sequence]) -> bool:
    """Whether all answers of an item take the most likely token and tell no probabilities: no logits are needed."""
    answers = (sequences[name] for name in (item.request_id, *item.forks))
    return all(
        a.params.temperature == 0.0 and a.state.plain and a.params.logprobs is None and a.constraint is None
        for a in answers
    )


def _await_masks(plan: StepPlan, items: list[StepItem], sequences: Mapping[str, Sequence]) -> None:
    """Wait for the masks of the rows that draw tokens now, but not for long while others want theirs.

    A single row without its mask is computed again in the next step. A chunk can't be, so it is waited for; that
    happens where a preempted answer goes on whose mask was lost meanwhile.
    """
    waiting = [(i, c) for i in items if (c := sequences[i.request_id].constraint) is not None and not c.ready]
    if not waiting:
        return
    owner = waiting[0][1].owner
    owner.wait([c for _, c in waiting], _PATIENCE_S if len(waiting) < len(plan.items) else _IDLE_PATIENCE_S)
    while chunks := [c for i, c in waiting if i.count > 1 and not c.ready]:
        owner.wait(chunks, _IDLE_PATIENCE_S)


def _open(constraint: Constraint, answer_id: str, result: StepResult) -> bool:
    """Whether the answer draws a token now; if not, ``result`` is told why."""
    if not constraint.ready:
        result.late.add(answer_id)
    elif constraint.error:
        result.errors[answer_id] = constraint.error
    elif constraint.ended:
        result.complete.add(answer_id)
    else:
        return True
    return False


def _verified(
    item: StepItem, seq: Sequence, logits: torch.Tensor | None, greedy: list[int | None], race: Race
) -> tuple[list[int], str | None]:
    """The answer's next tokens from logits [1 + drafts, V], or why there is none.

    Row by row, as if each were a step of its own: a row counts only if every draft before it is the
    token that was drawn there. So an error in a later row waits until that row comes first.
    """
    drafts, state, tokens = seq.draft[: item.num_drafts], seq.state, list[int]()
    for i, best in enumerate(greedy):
        token, error = _next_token(
            seq, state, None if logits is None else logits[i], best, item.newest + i, seq.generated + i, race
        )
        if error is not None:
            return tokens, None if tokens else error
        tokens.append(token)
        if i == len(drafts) or token != drafts[i]:
            break
        state = counting(state, token)
    return tokens, None


def _next_token(
    seq: Sequence,
    state: SamplerState,
    logits: torch.Tensor | None,
    best: int | None,
    position: int,
    generated: int,
    race: Race,
) -> tuple[int, str | None]:
    """The token that follows ``position`` by logits [V], whose arg-max is ``best``; or why there is none."""
    if best is None:
        return -1, "the model gave logits that are not finite"
    bits = None if seq.constraint is None else seq.constraint.bits
    mask = None if bits is None else Mask(bits)
    takes_best = seq.params.temperature == 0.0 and state.plain
    if logits is None or (takes_best and (mask is None or mask.allows(best))):
        return best, None
    shaped = shape_logits(logits, state, generated)
    ids = None
    if mask is not None:
        shaped, ids = mask.apply(shaped)
    if shaped is not logits and (not len(shaped) or not torch.isfinite(shaped.max())):
        bans = "allowed_token_ids, bad_token_ids, logit_bias or min_tokens ban"
        return -1, f"no token is left: {bans} all" + (" that structured_outputs allow" if mask else "")
    return choose(shaped, state, position, ids, race), None

"""Runner: runs a step plan on the decoder and draws its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from sash.engine.sequence import Sequence
from sash.engine.step import Step
from sash.kv.storage import KVPool
from sash.models.decoder import Decoder
from sash.models.fused import FusedDecoder, obstacle
from sash.ops.base import Ops
from sash.ops.sampling import choose, shape_logits, token_logprobs
from sash.scheduler.plan import StepItem, StepPlan
from sash.spec.config import ResolvedConfig
from sash.spec.model import ModelSpec
from sash.spec.sampling import TokenLogprobs

# Rows of logits that exist at once: a vocabulary of 262 144 takes 1 MiB each in float32.
_LOGIT_ROWS = 64


@dataclass(slots=True)
class StepResult:
    """Sampled tokens by answer id, their log-probabilities where wanted, and answers that failed."""

    tokens: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_scores: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


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
        self._decoder = decoder
        self._ops = ops
        self.pools = pools
        self._place = {layer: (g, i) for g, group in enumerate(config.groups) for i, layer in enumerate(group.layers)}
        self.device = decoder.device
        planes = [pools[g].layers[i] for g, i in (self._place[layer] for layer in range(len(spec.layers)))]
        self.op_by_op = obstacle(decoder, planes)
        self._fused = None if self.op_by_op else FusedDecoder(decoder, planes)
        self._logits = decoder.logits if self._fused is None else self._fused.logits

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
            hidden = self._decoder.forward(ids, positions, step.attend, narrow)
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
        last_rows: list[int] = []
        sampling: list[StepItem] = []
        for item, first in zip(step.plan.items, step.out_first, strict=True):
            if sequences[item.request_id].wants_scores(first) and first < item.end:
                self._score_prompt(item, first, hidden[row : row + item.end - first], sequences, result)
            row += item.end - first
            if item.samples:
                last_rows.append(row - 1)
                sampling.append(item)
        for a in range(0, len(sampling), _LOGIT_ROWS):
            rows = torch.tensor(last_rows[a : a + _LOGIT_ROWS], device=hidden.device)
            logits = self._logits(hidden.index_select(0, rows))
            self._draw(sampling[a : a + _LOGIT_ROWS], logits, sequences, result)
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
        self, items: list[StepItem], logits: torch.Tensor, sequences: Mapping[str, Sequence], result: StepResult
    ) -> None:
        """One token per item and fork from logits [len(items), V]."""
        ids, tops = self._ops.argmax(logits)
        for i, item in enumerate(items):
            for answer_id in (item.request_id, *item.forks):
                seq = sequences[answer_id]
                if not np.isfinite(tops[i]):
                    result.errors[answer_id] = "the model gave logits that are not finite"
                    continue
                if seq.params.temperature == 0.0 and seq.state.plain:
                    token = ids[i]
                else:
                    shaped = shape_logits(logits[i], seq.state, seq.generated)
                    if not torch.isfinite(shaped.max()):
                        result.errors[answer_id] = (
                            "no token is left: allowed_token_ids, bad_token_ids or logit_bias ban all"
                        )
                        continue
                    token = choose(shaped, seq.state, item.end - 1)
                result.tokens[answer_id] = token
                if seq.params.logprobs is not None:
                    own = torch.tensor([token], device=logits.device)
                    result.logprobs[answer_id] = token_logprobs(logits[i : i + 1], own, seq.params.logprobs)[0]

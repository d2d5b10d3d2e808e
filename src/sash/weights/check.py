"""What a model needs of its weights, held against what a file offers: everything wrong in one error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from sash.spec.errors import ModelError, enumerated
from sash.spec.model import ModelSpec, expected_weights


def check_weights(
    found: Mapping[str, Sequence[int]],
    spec: ModelSpec,
    *,
    source: str = "the weights",
    names: Mapping[str, str] | None = None,
    truncated: Iterable[str] = (),
) -> None:
    """Hold canonical names and shapes against ``expected_weights(spec)``.

    Args:
        found: canonical name (or the file's own, for tensors that map to none) to shape, [out, in].
        spec: the model that the weights are for.
        source: file or folder, named in the error.
        names: canonical name to the file's own name, shown beside it where it differs.
        truncated: names whose bytes end early, listed with the rest.

    Raises:
        ModelError: lists every missing, unexpected, wrongly shaped and truncated tensor.
    """
    wanted = expected_weights(spec)
    label = _labeller(names or {})
    problems = {
        "missing": [f"{label(n)} {list(shape)}" for n, shape in wanted.items() if n not in found],
        "unexpected": [f"{label(n)} {list(shape)}" for n, shape in found.items() if n not in wanted],
        "wrong shape": [
            f"{label(n)} is {list(shape)}, must be {list(wanted[n])}"
            for n, shape in found.items()
            if n in wanted and tuple(shape) != wanted[n]
        ],
        "truncated": [label(n) for n in truncated],
    }
    lines = [_section(kind, items) for kind, items in problems.items() if items]
    if lines:
        raise ModelError(
            f"{source} doesn't fit {spec.architecture} with {len(spec.layers)} layers:\n"
            + "\n".join(lines)
            + "\nUse the complete, unmodified file that belongs to this description."
        )


def _labeller(names: Mapping[str, str]) -> Callable[[str], str]:
    def label(name: str) -> str:
        own = names.get(name, name)
        return name if own == name else f"{name} ({own})"

    return label


def _section(kind: str, items: Sequence[str]) -> str:
    return f"  {kind} ({len(items)}):\n    " + enumerated(items, "\n    ")

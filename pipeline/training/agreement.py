"""Whether all ranks have decided alike, before the first message: gloo takes a shorter one without a word."""

from __future__ import annotations

import hashlib

from pipeline.training.failures import RunFailure
from pipeline.training.group import Group
from pipeline.training.plan import Plan


class PlanMismatchError(RunFailure):
    """Ranks run different programs, or expect messages of different shapes."""


def check_same_plan(plan: Plan, group: Group) -> None:
    """Compare what the ranks run and send; every process must call it.

    Raises:
        PlanMismatchError: which ranks differ from rank 0.
    """
    found = group.gather([_digest(plan)] * len(group.local))
    others = [rank for rank, digest in enumerate(found) if digest != found[0]]
    if others:
        raise PlanMismatchError(
            f"ranks {others} have another plan than rank 0 (program, cut or shapes): "
            "start every rank with the same code and configuration"
        )


def _digest(plan: Plan) -> str:
    decided = (
        plan.program,
        plan.evaluation,
        plan.counts,
        dict(plan.tied),
        dict(plan.boundaries),
        plan.microbatch_sizes,
        plan.microbatch_kinds,
        plan.dp,
    )
    return hashlib.sha256(repr(decided).encode()).hexdigest()

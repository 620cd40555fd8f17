"""Further queries in training: one-to-many matching of H-DETR and groups of Group DETR, for all learned queries."""

from __future__ import annotations

from detr_bf.common.errors import InputError
from detr_bf.common.structures import GROUP, QueryGroup

ONE_TO_MANY = "one_to_many"  # end of the names of their losses


def query_groups(
    num_queries: int, *, one_to_many: int = 0, repeats: int = 6, weight: float = 1.0, group_detr: int = 1
) -> tuple[QueryGroup, ...]:
    """Describe the queries that a detector has in training besides its ``num_queries`` main queries.

    Args:
        num_queries: number of the main queries, which alone are used in evaluation.
        one_to_many: number of queries of which each object is matched with several (H-DETR: Jia et al. 2022, arXiv
            2207.13080, section 3.2), 0 for none.
        repeats: number of these queries that an object is matched with.
        weight: of their losses, which are divided by ``repeats``.
        group_detr: K groups of ``num_queries`` queries, the main queries included, each matched one-to-one and with an
            equal share in the loss (Group DETR: Chen et al. 2022, arXiv 2207.13085, section 3.2); 1 for none.

    Raises:
        InputError: ``repeats`` or ``group_detr`` below 1.
    """
    if repeats < 1 or group_detr < 1:
        raise InputError(f"repeats={repeats} and group_detr={group_detr} must be 1 or more")
    groups = []
    if one_to_many:
        groups.append(QueryGroup(ONE_TO_MANY, one_to_many, repeats=repeats, weight=weight))
    if group_detr > 1:
        others = group_detr - 1
        groups.append(QueryGroup(GROUP, others * num_queries, parts=others, weight=others))
    return tuple(groups)

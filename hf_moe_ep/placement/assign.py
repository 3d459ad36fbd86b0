"""`assign_slots`: assign the E experts of a layer to the D ranks of an ep group, E / D to each.

The aim is a low load of the busiest rank. Two algorithms assign the experts. The assignment whose
busiest rank has the lower load is used. Both algorithms start with the busiest experts:

    one at a time   assign each expert to the rank with the lowest load that still has room
    in rounds       assign one expert to each rank per round: the busiest expert of the round to the
                    rank with the lowest load, and so on

For example, 6 experts have 9 5 4 3 3 0 tokens, and each of 2 ranks gets 3 experts. The mean load of
a rank is 12:

    in hub order    9 + 5 + 4 = 18        3 + 3 + 0 = 6
    one at a time   5 + 4 + 3 = 12        9 + 3 + 0 = 12

The algorithm in rounds guarantees a bound. In a round of D experts the rank with the lowest load
gets the busiest expert. After the round, two ranks therefore differ by at most the larger of two
numbers: their difference before the round, and the difference between the first and the last expert
of the round. Let s be the largest difference between the first and the last expert of a round. Then

    busiest rank <= mean + (1 - 1 / D) * s

because if one rank has load M, each of the other D - 1 ranks has at least M - s. The bound is
reached if only one expert has tokens. The algorithm "one at a time" can be better: for the loads
12 4 4 4 0 0 on 2 ranks its busiest rank has 12 tokens, and in rounds 16. But no bound is proved for
this algorithm. In any assignment, the busiest rank has at least the mean load, and at least the
sum of the loads of the busiest expert and the E / D - 1 idlest experts.

The result depends only on the counts, which are equal on all ranks, so no communication is needed.
If loads are equal, the expert or rank with the smaller number comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def assign_slots(
    load_E: Sequence[int], ranks: int, old_slots_E: Sequence[int] | None = None
) -> list[int]:
    """Choose a slot (a row of the stacked tensors) for each expert.

    Rank r owns the E / D slots from r * E / D on.

    Args:
        load_E: the tokens of each expert.
        ranks: the number of ranks D of the ep group, a divisor of E.
        old_slots_E: the present slots of the experts (default: hub order, slot e for expert e). An
            expert that stays on its rank keeps its slot, and ranks are numbered so that many
            experts stay.

    Returns:
        The new slot of each expert, or the present slots if neither assignment lowers the load of
        the busiest rank.
    """
    slots_E = list(range(len(load_E))) if old_slots_E is None else list(old_slots_E)
    candidates = (_assign_one_at_a_time(load_E, ranks), _assign_in_rounds(load_E, ranks))
    best = min(candidates, key=lambda ranks_E: compute_largest_load(load_E, ranks_E, ranks))
    local = len(load_E) // ranks
    old_ranks_E = [slot // local for slot in slots_E]
    if compute_largest_load(load_E, best, ranks) >= compute_largest_load(
        load_E, old_ranks_E, ranks
    ):
        return slots_E
    return _choose_slots(_renumber_ranks(best, old_ranks_E, ranks), slots_E, ranks)


def compute_largest_load(load_E: Sequence[int], ranks_E: Sequence[int], ranks: int) -> int:
    """Return the tokens of the busiest rank, if expert e is on rank `ranks_E[e]`."""
    return max(_sum_loads(load_E, ranks_E, ranks))


def compute_load_bound(load_E: Sequence[int], ranks: int) -> Fraction:
    """Return the upper bound of the busiest rank's load that the module docstring derives."""
    rounds = _split_into_rounds(load_E, ranks)
    spread = max((load_E[experts[0]] - load_E[experts[-1]] for experts in rounds), default=0)
    return Fraction(sum(load_E), ranks) + Fraction(ranks - 1, ranks) * spread


def _sum_loads(load_E: Sequence[int], ranks_E: Sequence[int], ranks: int) -> list[int]:
    sums = [0] * ranks
    for load, rank in zip(load_E, ranks_E, strict=True):
        sums[rank] += load
    return sums


def _sort_busiest_first(load_E: Sequence[int]) -> list[int]:
    return sorted(range(len(load_E)), key=lambda expert: (-load_E[expert], expert))


def _split_into_rounds(load_E: Sequence[int], ranks: int) -> list[list[int]]:
    """Split the experts, the busiest first, into rounds of one expert per rank."""
    experts = _sort_busiest_first(load_E)
    return [experts[first : first + ranks] for first in range(0, len(experts), ranks)]


def _assign_one_at_a_time(load_E: Sequence[int], ranks: int) -> list[int]:
    room, sums, ranks_E = [len(load_E) // ranks] * ranks, [0] * ranks, [0] * len(load_E)
    for expert in _sort_busiest_first(load_E):
        rank = min((rank for rank in range(ranks) if room[rank]), key=lambda rank: sums[rank])
        ranks_E[expert] = rank
        room[rank] -= 1
        sums[rank] += load_E[expert]
    return ranks_E


def _assign_in_rounds(load_E: Sequence[int], ranks: int) -> list[int]:
    sums, ranks_E = [0] * ranks, [0] * len(load_E)
    for experts in _split_into_rounds(load_E, ranks):
        idlest_first = sorted(range(ranks), key=lambda rank: (sums[rank], rank))
        for expert, rank in zip(experts, idlest_first, strict=True):
            ranks_E[expert] = rank
            sums[rank] += load_E[expert]
    return ranks_E


def _renumber_ranks(ranks_E: list[int], old_ranks_E: list[int], ranks: int) -> list[int]:
    """Renumber the ranks of an assignment so that many experts stay on `old_ranks_E`."""
    num_common = [[0] * ranks for _ in range(ranks)]
    for assigned, old in zip(ranks_E, old_ranks_E, strict=True):
        num_common[assigned][old] += 1
    pairs = sorted(
        ((assigned, old) for assigned in range(ranks) for old in range(ranks)),
        key=lambda pair: (-num_common[pair[0]][pair[1]], pair),
    )
    new_number: dict[int, int] = {}
    for assigned, old in pairs:
        if assigned not in new_number and old not in new_number.values():
            new_number[assigned] = old
    return [new_number[assigned] for assigned in ranks_E]


def _choose_slots(ranks_E: list[int], old_slots_E: list[int], ranks: int) -> list[int]:
    """Choose a slot on rank `ranks_E[e]` for each expert e.

    An expert whose slot `old_slots_E[e]` is on that rank keeps the slot.
    """
    local = len(ranks_E) // ranks
    stays = [rank == slot // local for rank, slot in zip(ranks_E, old_slots_E, strict=True)]
    taken = {slot for slot, stay in zip(old_slots_E, stays, strict=True) if stay}
    free = [
        [slot for slot in range(rank * local, (rank + 1) * local) if slot not in taken]
        for rank in range(ranks)
    ]
    return [
        slot if stay else free[rank].pop(0)
        for rank, slot, stay in zip(ranks_E, old_slots_E, stays, strict=True)
    ]

"""Which expert goes to which rank: the bound against every way of dealing, slots, what stays."""

import random
from collections.abc import Iterator
from itertools import combinations, product

import pytest

from hf_moe_ep.placement.assign import _in_rounds, balanced, bound, busiest


def _deals(experts: tuple[int, ...], local: int) -> Iterator[list[tuple[int, ...]]]:
    """Every way of dealing experts into shares of `local`, shares without an order."""
    if not experts:
        yield []
        return
    first, *others = experts
    for beside in combinations(others, local - 1):
        rest = tuple(expert for expert in others if expert not in beside)
        for deal in _deals(rest, local):
            yield [(first, *beside), *deal]


def _least(load_E: tuple[int, ...], ranks: int) -> int:
    """The busiest rank of the best of all deals."""
    deals = _deals(tuple(range(len(load_E))), len(load_E) // ranks)
    return min(max(sum(load_E[expert] for expert in share) for share in deal) for deal in deals)


def _busiest(load_E: tuple[int, ...], slots_E: list[int], ranks: int) -> int:
    local = len(load_E) // ranks
    return busiest(load_E, [slot // local for slot in slots_E], ranks)


def _cases() -> Iterator[tuple[tuple[int, ...], int]]:
    """All loads of up to 3 tokens of 6 experts, and random ones with a few that are busy."""
    for load_E in product(range(4), repeat=6):
        yield load_E, 2
        yield load_E, 3
    chance = random.Random(0)
    for _ in range(300):
        load_E = tuple(int(chance.paretovariate(0.8)) for _ in range(8))
        yield load_E, 2
        yield load_E, 4


def test_no_rank_is_over_the_bound_nor_far_over_the_best_deal() -> None:
    """In thousands of small cases the worst deal is 4 / 3 of the best."""
    worst = 0.0
    for load_E, ranks in _cases():
        slots_E = balanced(load_E, ranks)
        assert sorted(slots_E) == list(range(len(load_E))), (load_E, slots_E)
        most, least = _busiest(load_E, slots_E, ranks), _least(load_E, ranks)
        in_hub_order = _busiest(load_E, list(range(len(load_E))), ranks)
        assert least <= most <= bound(load_E, ranks), (load_E, ranks, most)
        assert busiest(load_E, _in_rounds(load_E, ranks), ranks) <= bound(load_E, ranks)
        assert most <= in_hub_order
        worst = max(worst, most / (least or 1))
    assert worst <= 4 / 3, worst


def test_the_bound_is_met() -> None:
    """All but one expert are idle: mean + (1 - 1 / D) * s is that expert, and no deal has less."""
    load_E = (0, 0, 12, 0, 0, 0)
    assert bound(load_E, 3) == 12 == _least(load_E, 3)
    assert bound((5, 5, 5, 5), 2) == 10


def test_the_example() -> None:
    load_E = (9, 5, 4, 3, 3, 0)
    slots_E = balanced(load_E, 2)
    assert _busiest(load_E, list(range(6)), 2) == 18
    assert _busiest(load_E, slots_E, 2) == 12
    assert [slot // 3 for slot in slots_E] == [1, 0, 0, 1, 0, 1]


def test_a_busy_expert_has_the_idlest_beside_it() -> None:
    """Dealing in rounds would give a rank one expert of each kind, 16 in sum. The best is 12."""
    load_E = (12, 4, 4, 4, 0, 0)
    assert busiest(load_E, _in_rounds(load_E, 2), 2) == 16
    assert _busiest(load_E, balanced(load_E, 2), 2) == 12 == _least(load_E, 2)


def test_one_rank_with_three_times_the_mean_becomes_even() -> None:
    """64 experts on 8 ranks. The eight busy experts of the first rank go to one rank each."""
    load_E = tuple(3000 + expert if expert < 8 else 1000 * 5 // 7 + expert for expert in range(64))
    hub_order = list(range(64))
    mean = sum(load_E) / 8
    assert _busiest(load_E, hub_order, 8) > 2.9 * mean
    slots_E = balanced(load_E, 8)
    assert _busiest(load_E, slots_E, 8) < 1.01 * mean
    assert sorted(slots_E[expert] // 8 for expert in range(8)) == list(range(8))


def test_what_can_stay_stays() -> None:
    """A share goes to the rank that holds most of it, and experts keep their slots. An even load
    moves nothing, and a deal that is not better moves nothing.
    """
    assert balanced((1, 2, 3, 4), 2, [0, 2, 3, 1]) == [0, 2, 3, 1]
    assert balanced((1, 1, 1, 1), 2) == [0, 1, 2, 3]
    load_E = (9, 5, 4, 3, 3, 0)
    stays = [slot == expert for expert, slot in enumerate(balanced(load_E, 2))]
    assert stays == [False, True, True, True, False, True]


@pytest.mark.parametrize("ranks", [2, 4])
def test_placements_follow_each_other(ranks: int) -> None:
    """From any placement the result is a permutation within the bound, and the same each time."""
    chance = random.Random(ranks)
    slots_E = list(range(16))
    for _ in range(50):
        load_E = tuple(chance.randrange(100) for _ in range(16))
        before = slots_E
        slots_E = balanced(load_E, ranks, before)
        assert sorted(slots_E) == list(range(16))
        assert slots_E == balanced(load_E, ranks, before)
        assert _busiest(load_E, slots_E, ranks) <= bound(load_E, ranks)

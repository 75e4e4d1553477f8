"""Who is tested with whom, when: all pairs in rounds in which everybody is busy. Standard library only."""

from __future__ import annotations

import random


def rounds(players: int) -> int:
    """The number of rounds in which everybody meets everybody once.

    >>> rounds(4), rounds(5), rounds(1)
    (3, 5, 0)
    """
    return 0 if players < 2 else players - 1 + players % 2


def opponent(player: int, number: int, players: int) -> int | None:
    """Whom ``player`` meets in round ``number``; None in a round off, which odd numbers of players have.

    The circle method: the last player stays, all others move on by one place a round, and meet whom they face. Every
    round is a matching, so that 2,048 hosts need 2,047 rounds instead of 2,096,128 tests one after the other.

    >>> [[opponent(player, number, 4) for player in range(4)] for number in range(3)]
    [[3, 2, 1, 0], [1, 0, 3, 2], [2, 3, 0, 1]]
    """
    even = players + players % 2
    last = even - 1
    if player == last:
        other = _partner_of_last(number, even)
    else:
        other = (number - player) % last
        if other == player:
            other = last
    return None if other >= players else other


def _partner_of_last(number: int, even: int) -> int:
    """The player that would meet itself in this round: ``2 * player = number`` modulo ``even - 1``."""
    last = even - 1
    return number * (last + 1) // 2 % last


def order_of_rounds(players: int) -> list[int]:
    """The rounds in an order that is mixed and the same on every rank, so that the first ones are a fair sample.

    >>> sorted(order_of_rounds(6))
    [0, 1, 2, 3, 4]
    """
    numbers = list(range(rounds(players)))
    random.Random(players).shuffle(numbers)
    return numbers

"""The places of the server: one limit, and each place given back once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from serving.places import Places


def test_places_are_taken_all_or_none_from_any_thread() -> None:
    places = Places(10)
    assert places.take(10)
    assert not places.take(1)
    places.give_back(10)
    assert not places.take(11)
    with ThreadPoolExecutor(8) as pool:
        took = list(pool.map(lambda _: places.take(3), range(64)))
    assert (sum(took), places.taken) == (3, 9)


def test_the_places_of_a_request_are_given_back_together_and_once() -> None:
    places = Places(4)
    place = places.lend()
    assert place is not None
    assert place.take_more(3)
    assert not place.take_more(1)
    assert places.lend() is None
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: place.give_back(), range(64)))
    assert places.taken == 0

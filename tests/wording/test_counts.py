"""Plurals, and lists of ranks."""

from notebook_launcher import wording


def test_plural_counts_a_noun():
    assert [wording.plural(count, "rank") for count in (0, 1, 2, 1234)] == [
        "0 ranks",
        "1 rank",
        "2 ranks",
        "1,234 ranks",
    ]


def test_verb_agrees_with_the_number_of_its_subjects():
    assert [wording.plural_verb("has returned", count) for count in (1, 2)] == ["has returned", "have returned"]
    assert [wording.plural_verb("is", count) for count in (0, 1)] == ["are", "is"]
    assert wording.plural_verb("waited", 2) == "waited"


def test_ranks_in_a_row_are_a_span():
    assert [wording.rank_list(ranks) for ranks in ([2], (2, 0), [7, 0, 1, 2, 3, 3])] == [
        "rank 2",
        "ranks 0, 2",
        "ranks 0-3, 7",
    ]
